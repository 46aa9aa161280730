// Lanes of a warp as a team: what the shared algorithms run on where a device has more than one thread for
// them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/core/team.hpp>
#include <freekv/core/unroll.hpp>

namespace freekv::device {

/// `Share` neighbouring numbers, a lane's part of a pack.
template <int Share>
struct lane_pack {
  float x[Share];

  lane_pack() = default;
  FREEKV_HD explicit lane_pack(float all) {
    unroll<Share>([&](auto i) { x[i] = all; });
  }
  FREEKV_HD friend lane_pack operator+(const lane_pack& a, const lane_pack& b) {
    return of([&](auto i) { return rounded_sum(a.x[i], b.x[i]); });
  }
  FREEKV_HD friend lane_pack operator-(const lane_pack& a, const lane_pack& b) {
    return of([&](auto i) { return rounded_sum(a.x[i], -b.x[i]); });
  }
  FREEKV_HD friend lane_pack operator*(const lane_pack& a, const lane_pack& b) {
    return of([&](auto i) { return a.x[i] * b.x[i]; });
  }
  /// a * b + c, rounded once.
  FREEKV_HD friend lane_pack fused(const lane_pack& a, const lane_pack& b, const lane_pack& c) {
    return of([&](auto i) { return ::fmaf(a.x[i], b.x[i], c.x[i]); });
  }
  /// number(i) for each i, a compile-time constant.
  template <class Number>
  FREEKV_HD static lane_pack of(const Number& number) {
    lane_pack all;
    unroll<Share>([&](auto i) { all.x[i] = number(i); });
    return all;
  }
};

/// `Lanes` neighbouring threads of a warp, 1 to 32 and a power of two, each with `Share` neighbouring numbers
/// of a pack. Threads of other teams of the warp may be elsewhere. Sums are taken in one order, that of the
/// lanes paired by falling distance, and so are the same in every run and on every lane.
///
/// Loads and stores are of up to 16 bytes a lane where the address allows it.
template <int Lanes, int Share>
struct lane_team {
  static_assert(Lanes >= 1 && Lanes <= 32 && (Lanes & (Lanes - 1)) == 0, "lanes are a power of two up to 32");
  static constexpr int width = Lanes * Share;
  static constexpr int lane_count = Lanes;
  using pack = lane_pack<Share>;

  template <element E>
  __device__ pack load(const E* p) const {
    constexpr int bytes = Share * static_cast<int>(sizeof(E)), block = bytes < 16 ? bytes : 16;
    const E* const mine = p + lane() * Share;
    pack all;
    if constexpr ((block == 16 || block == 8 || block == 4) && bytes % block == 0) {
      if (reinterpret_cast<std::uintptr_t>(mine) % block == 0) {
        struct alignas(block) piece {
          E elements[block / static_cast<int>(sizeof(E))];
        };
        constexpr int each = block / static_cast<int>(sizeof(E));
        unroll<bytes / block>([&](auto part) {
          const piece loaded = reinterpret_cast<const piece*>(mine)[part];
          unroll<each>([&](auto i) { all.x[part * each + i] = to_float(loaded.elements[i]); });
        });
        return all;
      }
    }
    unroll<Share>([&](auto i) { all.x[i] = to_float(mine[i]); });
    return all;
  }
  __device__ void store(float* p, const pack& x) const {
    float* const mine = p + lane() * Share;
    if constexpr (Share % 4 == 0) {
      if (reinterpret_cast<std::uintptr_t>(mine) % 16 == 0) {
        unroll<Share / 4>([&](auto part) {
          reinterpret_cast<float4*>(mine)[part] =
              float4{x.x[part * 4], x.x[part * 4 + 1], x.x[part * 4 + 2], x.x[part * 4 + 3]};
        });
        return;
      }
    }
    unroll<Share>([&](auto i) { mine[i] = x.x[i]; });
  }

  __device__ pack maximum(const pack& a, const pack& b) const {
    return pack::of([&](auto i) { return scalar_team{}.maximum(a.x[i], b.x[i]); });
  }
  __device__ pack minimum(const pack& a, const pack& b) const {
    return pack::of([&](auto i) { return scalar_team{}.minimum(a.x[i], b.x[i]); });
  }
  __device__ pack select_greater(const pack& a, const pack& b, const pack& x, const pack& y) const {
    return pack::of([&](auto i) { return a.x[i] > b.x[i] ? x.x[i] : y.x[i]; });
  }
  __device__ pack exp(const pack& x) const {
    return pack::of([&](auto i) { return ::expf(x.x[i]); });
  }
  __device__ pack bounded_exp(const pack& x) const { return exp(x); }
  __device__ pack log(const pack& x) const {
    return pack::of([&](auto i) { return ::logf(x.x[i]); });
  }
  __device__ pack tanh(const pack& x) const {
    return pack::of([&](auto i) { return ::tanhf(x.x[i]); });
  }

  __device__ float sum(const pack& x) const {
    const auto add = [](float a, float b) { return rounded_sum(a, b); };
    return across(in_share(x, add), add);
  }
  __device__ float max(const pack& x) const {
    const auto larger = [](float a, float b) { return scalar_team{}.maximum(a, b); };
    return across(in_share(x, larger), larger);
  }
  __device__ std::int32_t max_of_lanes(std::int32_t x) const {
    return across(x, [](std::int32_t a, std::int32_t b) { return a > b ? a : b; });
  }
  /// Adds as `sum` does. Each exchange halves what a lane still has to add up: Share * (Lanes - 1) in all.
  __device__ pack sum_each(const pack (&x)[width]) const {
    return each_of(x, [](float a, float b) { return rounded_sum(a, b); });
  }
  /// The largest of each, but for NaN.
  __device__ pack max_each(const pack (&x)[width]) const {
    return each_of(x, [](float a, float b) { return ::fmaxf(a, b); });
  }

  template <int Bits>
  __device__ pack load_codes(const std::uint8_t* codes, int first) const {
    return pack::of(
        [&](auto i) { return scalar_team{}.template load_codes<Bits>(codes, first + lane() * Share + i); });
  }
  __device__ pack lookup(const float* table, const std::uint8_t* codes) const {
    return pack::of([&](auto i) { return table[codes[lane() * Share + i]]; });
  }
  template <element E>
  __device__ void widen(const E* in, float* out, int n) const {
    if ((reinterpret_cast<std::uintptr_t>(in) | reinterpret_cast<std::uintptr_t>(out)) % 16 != 0) {
      for (int i = lane(); i < n; i += Lanes) out[i] = to_float(in[i]);
      return;
    }
    for_pieces(in, n, [&](int first, const auto& x) {
      unroll<piece<E>::size / 4>([&](auto part) {
        constexpr int i = part * 4;
        reinterpret_cast<float4*>(out + first)[part] =
            float4{to_float(x[i]), to_float(x[i + 1]), to_float(x[i + 2]), to_float(x[i + 3])};
      });
    });
  }
  /// Rows of `n` elements, `stride` apart, to floats that lie one behind the other: a lane waits for four
  /// pieces, of whatever rows, at a time.
  template <element E>
  __device__ void widen_rows(const E* in, std::int64_t stride, int rows, float* out, int n) const {
    constexpr int size = piece<E>::size, at_once = 4;
    const auto bytes = static_cast<std::uintptr_t>(stride) * sizeof(E);
    if (n % size != 0 ||
        (reinterpret_cast<std::uintptr_t>(in) | reinterpret_cast<std::uintptr_t>(out) | bytes) % 16 != 0) {
      for (int row = 0; row < rows; ++row) widen(in + row * stride, out + row * n, n);
      return;
    }
    struct place {
      int row, column;
    };
    const int in_row = n / size, step_rows = Lanes / in_row, step_columns = Lanes % in_row;
    place next{lane() / in_row, lane() % in_row};
    while (next.row < rows) {
      piece<E> loaded[at_once];
      place at[at_once];
      unroll<at_once>([&](auto nth) {
        at[nth] = next;
        if (next.row < rows)
          loaded[nth] = *reinterpret_cast<const piece<E>*>(in + next.row * stride + next.column * size);
        next.row += step_rows;
        next.column += step_columns;
        if (next.column >= in_row) next = {next.row + 1, next.column - in_row};
      });
      unroll<at_once>([&](auto nth) {
        if (at[nth].row >= rows) return;
        auto* const to = reinterpret_cast<float4*>(out + at[nth].row * n + at[nth].column * size);
        const auto& x = loaded[nth].x;
        unroll<size / 4>([&](auto part) {
          constexpr int i = part * 4;
          to[part] = float4{to_float(x[i]), to_float(x[i + 1]), to_float(x[i + 2]), to_float(x[i + 3])};
        });
      });
    }
  }
  __device__ const std::byte* stage(const std::byte* from, int n, std::byte* to) const {
    using word = std::uint32_t;
    const int behind = static_cast<int>(reinterpret_cast<std::uintptr_t>(from) % 16 / sizeof(word));
    const auto* const in = reinterpret_cast<const word*>(from);
    auto* const out = reinterpret_cast<word*>(to) + behind;
    const int words = n / static_cast<int>(sizeof(word)), first = min(words, (4 - behind) % 4);
    const int last = first + (words - first) / 4 * 4;  // pieces are between these two
    for (int i = lane(); i < first; i += Lanes) out[i] = in[i];
    for_pieces(in + first, last - first, [&](int i, const auto& x) {
      *reinterpret_cast<uint4*>(out + first + i) = uint4{x[0], x[1], x[2], x[3]};
    });
    for (int i = last + lane(); i < words; i += Lanes) out[i] = in[i];
    return reinterpret_cast<const std::byte*>(out);
  }
  __device__ void prefetch(const void*) const {}  // other warps hide the wait
  __device__ int lane() const { return thread_x() % Lanes; }
  __device__ int lanes() const { return Lanes; }
  __device__ void sync() const { __syncwarp(mask()); }

  /// The threads of the warp that are this team's.
  __device__ unsigned mask() const {
    if constexpr (Lanes == 32) return 0xffffffffu;
    return ((1u << Lanes % 32) - 1u) << (threadIdx.x % 32 / Lanes * Lanes);
  }

 private:
  template <class T>
  struct alignas(16) piece {
    static constexpr int size = 16 / static_cast<int>(sizeof(T));
    T x[size];
  };
  /// Calls use(i, x) on one of the lanes with the piece x of in[i], in[i + 1], ..: `n` are whole pieces.
  template <class T, class Use>
  __device__ void for_pieces(const T* in, int n, const Use& use) const {
    constexpr int step = Lanes * piece<T>::size, at_once = 2;  // a lane waits for so many
#pragma unroll 1
    for (int first = lane() * piece<T>::size; first < n; first += at_once * step) {
      piece<T> loaded[at_once];
      unroll<at_once>([&](auto nth) {
        const int i = first + nth * step;
        if (i < n) loaded[nth] = *reinterpret_cast<const piece<T>*>(in + i);
      });
      unroll<at_once>([&](auto nth) {
        const int i = first + nth * step;
        if (i < n) use(i, loaded[nth].x);
      });
    }
  }
  template <class Combine>
  __device__ static float in_share(const pack& x, const Combine& combine) {
    float all = x.x[0];
    unroll<Share - 1>([&](auto i) { all = combine(all, x.x[i + 1]); });
    return all;
  }
  template <class T, class Combine>
  __device__ T across(T x, const Combine& combine) const {
    for (int distance = Lanes / 2; distance > 0; distance /= 2)
      x = combine(x, __shfl_xor_sync(mask(), x, distance, Lanes));
    return x;
  }
  template <class Combine>
  __device__ pack each_of(const pack (&x)[width], const Combine& combine) const {
    float rest[width];
    unroll<width>([&](auto i) { rest[i] = in_share(x[i], combine); });
    halve<Lanes / 2>(rest, combine);
    return pack::of([&](auto i) { return rest[i]; });
  }
  /// Keeps this lane's half of `2 * Distance * Share` results, laid out by the lane that is to have them.
  template <int Distance, class Combine>
  __device__ void halve(float (&rest)[width], const Combine& combine) const {
    if constexpr (Distance > 0) {
      const bool upper = (lane() & Distance) != 0;
      unroll<Distance * Share>([&](auto i) {
        const float low = rest[i], high = rest[i + Distance * Share];
        const float theirs = __shfl_xor_sync(mask(), upper ? low : high, Distance, Lanes);
        rest[i] = combine(upper ? high : low, theirs);
      });
      halve<Distance / 2>(rest, combine);
    }
  }
};

static_assert(team<lane_team<8, 1>> && team<lane_team<32, 1>> && team<lane_team<16, 8>>);

/// The largest power of two up to `most` that divides `n`.
constexpr int largest_share(int n, int most) {
  int share = 1;
  while (share < most && n % (2 * share) == 0) share *= 2;
  return share;
}

/// Neighbouring numbers of a lane of `row_team`: 8, or 4 or 2 where teams of 8 would give a lane more than 16
/// in all.
constexpr int row_share(int head_dim) {
  int share = 8;
  while (share > 2 && head_dim > 16 * largest_share(head_dim / share, 32)) share /= 2;
  return share;
}

/// The team for rows of `HeadDim` numbers, which takes them in packs of 8 a lane, 16 bytes of 2-byte
/// elements, unless it would then have too few lanes for what attention keeps in registers: 96 numbers are 3
/// packs of 8 lanes by 4.
template <int HeadDim>
using row_team = lane_team<largest_share(HeadDim / row_share(HeadDim), 32), row_share(HeadDim)>;

}  // namespace freekv::device
