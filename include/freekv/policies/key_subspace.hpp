// Token-level key estimates in a subspace, quantised. Ours.
#pragma once

#include <cmath>
#include <freekv/core/unroll.hpp>
#include <freekv/policies/summary.hpp>

namespace freekv {

/// The subspaces of all layers and KV heads, as data: for each (layer, head) a mean key (head_dim) followed
/// by `rank` orthonormal rows (rank, head_dim), float32, in memory that the backend can read and that
/// outlives its use. The rows are the leading eigenvectors of the keys' covariance over a prompt or a
/// calibration text.
struct subspace_basis {
  const float* data = nullptr;
  int layers = 0;
  int kv_heads = 0;
  int rank = 0;
  int head_dim = 0;

  FREEKV_HD constexpr std::size_t floats_per_head() const {
    return static_cast<std::size_t>(rank + 1) * static_cast<std::size_t>(head_dim);
  }
  FREEKV_HD constexpr const float* mean(int layer, int head) const {
    return data + static_cast<std::size_t>(layer * kv_heads + head) * floats_per_head();
  }
  FREEKV_HD constexpr const float* rows(int layer, int head) const { return mean(layer, head) + head_dim; }
};

/// Every token of the page by its `Rank` coefficients `E (k - mu)`, in `Bits` bits (2, 3, 4 or 8) with one
/// float32 scale a token, or unquantised (32). The score is `ln sum_t exp(scale * <E q, c_t>)`: the page's
/// log-mass up to the term of `mu`, which is the same for all pages.
///
/// Numbers: (Rank, p) coefficients in units of their token's scale, tokens innermost, then p scales. Stored: for
/// each coefficient the codes of 8 tokens at a time, `Bits` bytes each, then the scales: `Rank * p * Bits / 8 +
/// 4 * p` bytes.
template <int Rank = 24, int Bits = 3>
struct key_subspace {
  static_assert(Bits == dynamic || Bits == 2 || Bits == 3 || Bits == 4 || Bits == 8 || Bits == 32,
                "key_subspace takes 2, 3, 4 or 8 bits, or 32 for unquantised coefficients");
  using policy_kind = summary_kind;
  static constexpr std::string_view name = "key_subspace";
  count_of<Rank> rank{};
  count_of<Bits> bits{};
  subspace_basis basis{};

  FREEKV_HD constexpr int width(page_geometry page) const { return (rank + 1) * page.tokens; }
  FREEKV_HD constexpr int query_width(int) const { return rank; }
  FREEKV_HD constexpr std::size_t bytes(page_geometry page) const {
    const auto tokens = static_cast<std::size_t>(page.tokens);
    if (bits == 32) return static_cast<std::size_t>(int{rank}) * tokens * sizeof(float);
    return code_bytes(page) + tokens * sizeof(float);
  }

  std::string values() const { return std::to_string(int{rank}) + ", " + std::to_string(int{bits}); }
  void validate(const summary_setting& s) const {
    const auto text = [](int n) { return std::to_string(n); };
    if (bits != 2 && bits != 3 && bits != 4 && bits != 8 && bits != 32)
      throw settings_error("key_subspace: " + text(bits) +
                           " bits; choose 2, 3, 4 or 8, or 32 for unquantised coefficients");
    if (rank < 1 || rank > s.page.head_dim)
      throw settings_error("key_subspace: rank " + text(rank) + " is not between 1 and head_dim " +
                           text(s.page.head_dim));
    if (basis.data == nullptr)
      throw settings_error(
          "key_subspace needs its basis as data: compute it from the prompt's keys or a text");
    if (basis.rank < rank || basis.head_dim != s.page.head_dim || basis.layers < s.layers ||
        basis.kv_heads != s.kv_heads)
      throw settings_error("key_subspace: the basis has " + text(basis.layers) + " layers of " +
                           text(basis.kv_heads) + " heads, rank " + text(basis.rank) + ", head_dim " +
                           text(basis.head_dim) + "; needed are " + text(s.layers) + " layers of " +
                           text(s.kv_heads) + " heads, rank " + text(rank) + " or more, head_dim " +
                           text(s.page.head_dim));
  }

  /// The policy for one head.
  struct head_policy;
  FREEKV_HD constexpr head_policy at(int layer, int head) const {
    return {*this, basis.mean(layer, head), basis.rows(layer, head)};
  }

 private:
  FREEKV_HD constexpr std::size_t code_bytes(page_geometry page) const {
    return static_cast<std::size_t>(rank * (page.tokens / 8) * bits + 3) / 4 * 4;
  }
};

template <int Rank, int Bits>
struct key_subspace<Rank, Bits>::head_policy {
  key_subspace policy;
  const float* mean;
  const float* rows;

  FREEKV_HD constexpr int width(page_geometry page) const { return policy.width(page); }
  FREEKV_HD constexpr int query_width(int head_dim) const { return policy.query_width(head_dim); }
  FREEKV_HD constexpr std::size_t bytes(page_geometry page) const { return policy.bytes(page); }

  /// E q.
  template <team T>
  FREEKV_HD void prepare(T team, const group_query& query, float* prepared) const {
    for (int r = 0; r < policy.rank; ++r) {
      const float* row = rows + r * query.head_dim;
      typename T::pack product(0.0f);
      for (int i = 0; i < query.head_dim; i += T::width)
        product = product + team.load(row + i) * team.load(query.data + i);
      prepared[r] = team.sum(product);
    }
  }

  template <team T>
  FREEKV_HD void summarise(T team, const page_keys& keys, float* numbers) const {
    const int d = keys.page.head_dim, tokens = keys.page.tokens;
    for (int t = 0; t < tokens; ++t) {
      for (int r = 0; r < policy.rank; ++r) {
        typename T::pack product(0.0f);
        for (int i = 0; i < d; i += T::width)
          product =
              product + team.load(rows + r * d + i) * (team.load(keys.row(t) + i) - team.load(mean + i));
        numbers[r * tokens + t] = team.sum(product);
      }
      numbers[policy.rank * tokens + t] = 1.0f;
    }
  }

  template <team T>
  FREEKV_HD float score(T team, const page_query& query, const float* numbers) const {
    constexpr int most = 4;  // packs of tokens at a time, so that sums over lanes are few
    log_sum_exp mass;
    int t = 0;
    for (; t + most * T::width <= query.page.tokens; t += most * T::width)
      add_tokens<most>(team, query, numbers, t, mass);
    for (; t < query.page.tokens; t += T::width) add_tokens<1>(team, query, numbers, t, mass);
    return mass.value();
  }

  /// Symmetric: code = round(c / scale) + largest, scale = max|c| / largest. A token with a NaN or infinite
  /// coefficient gets a NaN for its scale, so its estimate is NaN. A subnormal scale is rounded so coarsely that
  /// c / scale can exceed the largest code, which then stands for it.
  template <team T>
  FREEKV_HD void encode(T team, page_geometry page, const float* numbers, std::byte* out) const {
    if (policy.bits == 32) {
      auto* stored = reinterpret_cast<float*>(out);
      for (int i = team.lane(); i < policy.rank * page.tokens; i += team.lanes()) stored[i] = numbers[i];
      return;
    }
    const auto largest = static_cast<float>(largest_code());
    auto* scales = reinterpret_cast<float*>(out + policy.code_bytes(page));
    for (int t = team.lane(); t < page.tokens; t += team.lanes()) {
      float most = 0.0f;
      for (int r = 0; r < policy.rank; ++r)
        most = scalar_team{}.maximum(most, ::fabsf(numbers[r * page.tokens + t]));
      scales[t] = most < infinity ? most / largest : NAN;
    }
    team.sync();
    auto* codes = reinterpret_cast<std::uint8_t*>(out);
    for (int block = team.lane(); block < policy.rank * page.tokens / 8; block += team.lanes()) {
      std::uint64_t word = 0;
      for (int i = 0; i < 8; ++i) {
        const int at = block * 8 + i;
        const float quotient = ::rintf(numbers[at] / scales[at % page.tokens]);
        float code = quotient > largest ? largest : quotient;
        code = code < -largest ? -largest : code == code ? code : 0.0f;
        word |= static_cast<std::uint64_t>(code + largest) << (i * policy.bits);
      }
      for (int i = 0; i < policy.bits; ++i)
        codes[block * policy.bits + i] = static_cast<std::uint8_t>(word >> (8 * i));
    }
  }

  template <team T>
  FREEKV_HD void decode(T team, page_geometry page, const std::byte* in, float* numbers) const {
    switch (policy.bits) {
      case 2:
        return decode_bits<2>(team, page, in, numbers);
      case 3:
        return decode_bits<3>(team, page, in, numbers);
      case 4:
        return decode_bits<4>(team, page, in, numbers);
      case 8:
        return decode_bits<8>(team, page, in, numbers);
      default:
        break;
    }
    const int count = policy.rank * page.tokens;
    team.widen(reinterpret_cast<const float*>(in), numbers, count);
    for (int t = 0; t < page.tokens; ++t) numbers[count + t] = 1.0f;
  }

 private:
  FREEKV_HD constexpr int largest_code() const { return (1 << (policy.bits - 1)) - 1; }

  /// Estimates `Packs` packs of tokens from token `first` on and adds them to `mass`.
  template <int Packs, team T>
  FREEKV_HD void add_tokens(T team, const page_query& query, const float* numbers, int first,
                            log_sum_exp& mass) const {
    using pack = typename T::pack;
    pack estimate[Packs];
    const pack factor(query.scale);
    unroll<Packs>([&](auto i) { estimate[i] = pack(0.0f); });
    for (int r = 0; r < policy.rank; ++r) {
      const pack q(query.data[r]);
      const float* row = numbers + r * query.page.tokens + first;
      unroll<Packs>([&](auto i) { estimate[i] = estimate[i] + q * team.load(row + i * T::width); });
    }
    const float* scales = numbers + policy.rank * query.page.tokens + first;
    unroll<Packs>([&](auto i) { estimate[i] = estimate[i] * (factor * team.load(scales + i * T::width)); });
    mass.add(team, estimate, Packs);
  }

  template <int B, team T>
  FREEKV_HD void decode_bits(T team, page_geometry page, const std::byte* in, float* numbers) const {
    const auto* codes = reinterpret_cast<const std::uint8_t*>(in);
    const int count = policy.rank * page.tokens;
    const typename T::pack largest(static_cast<float>(largest_code()));
    for (int i = 0; i < count; i += T::width)
      team.store(numbers + i, team.template load_codes<B>(codes, i) - largest);
    team.widen(reinterpret_cast<const float*>(in + policy.code_bytes(page)), numbers + count, page.tokens);
  }
};

static_assert(summary_policy<key_subspace<>>);

}  // namespace freekv
