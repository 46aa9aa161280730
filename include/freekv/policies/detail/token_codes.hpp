// A page's tokens as quantised coefficients, and the log-mass they estimate: what key_subspace and key_sketch
// keep.
#pragma once

#include <cmath>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/size.hpp>
#include <freekv/core/unroll.hpp>
#include <freekv/policies/summary.hpp>

namespace freekv::detail {

/// `rows` coefficients of each of `tokens` tokens, symmetric in `bits` bits (1, 2, 3, 4 or 8) with one
/// float32 scale a token, or unquantised (32).
///
/// Numbers: (rows, tokens) coefficients in units of their token's scale, tokens innermost, then the scales.
/// Stored: for each row the codes of 8 tokens at a time, `bits` bytes each, then the scales. A token with a
/// NaN or infinite coefficient gets a NaN for its scale, so its estimate is NaN.
struct token_codes {
  int rows = 0;
  int bits = 32;
  int tokens = 0;

  /// Throws settings_error for a summary called `name` whose units do not fill whole bytes of codes.
  void validate(std::string_view name) const {
    if (bits != 32 && tokens % 8 != 0)
      throw settings_error(std::string(name) + ": codes are kept for 8 tokens at a time, and a unit has " +
                           std::to_string(tokens) + "; choose a multiple of 8");
  }
  FREEKV_HD constexpr int width() const { return (rows + 1) * tokens; }
  FREEKV_HD constexpr std::size_t bytes() const {
    if (bits == 32) return to_size(rows * tokens) * sizeof(float);
    return code_bytes() + to_size(tokens) * sizeof(float);
  }

  template <team T>
  FREEKV_HD void encode(T team, const float* numbers, std::byte* out) const {
    if (bits == 32) return narrow_numbers<float>(team, numbers, rows * tokens, out);
    auto* scales = reinterpret_cast<float*>(out + code_bytes());
    for (int t = team.lane(); t < tokens; t += team.lanes()) {
      float most = 0.0f, sum = 0.0f;
      for (int r = 0; r < rows; ++r) {
        const float size = ::fabsf(numbers[r * tokens + t]);
        most = scalar_team{}.maximum(most, size);
        sum += size;
      }
      // With one bit, a sign alone, the mean size is what is closest.
      const float scale = bits == 1 ? sum / static_cast<float>(rows) : most / largest_code();
      scales[t] = most < infinity ? scale : NAN;
    }
    team.sync();
    auto* codes = reinterpret_cast<std::uint8_t*>(out);
    for (int block = team.lane(); block < rows * tokens / 8; block += team.lanes()) {
      std::uint64_t word = 0;
      for (int i = 0; i < 8; ++i) {
        const int at = block * 8 + i;
        word |= code_of(numbers[at], scales[at % tokens]) << (i * bits);
      }
      for (int i = 0; i < bits; ++i) codes[block * bits + i] = static_cast<std::uint8_t>(word >> (8 * i));
    }
  }

  template <team T>
  FREEKV_HD void decode(T team, const std::byte* in, float* numbers) const {
    switch (bits) {
      case 1:
        return decode_bits<1>(team, in, numbers);
      case 2:
        return decode_bits<2>(team, in, numbers);
      case 3:
        return decode_bits<3>(team, in, numbers);
      case 4:
        return decode_bits<4>(team, in, numbers);
      case 8:
        return decode_bits<8>(team, in, numbers);
      default:
        break;
    }
    widen_numbers<float>(team, in, rows * tokens, numbers);
    for (int t = team.lane(); t < tokens; t += team.lanes()) numbers[rows * tokens + t] = 1.0f;
  }

  /// `ln sum_t exp(base + scale * <query, c_t>)`; `query` has a number for each row.
  template <team T>
  FREEKV_HD float log_mass(T team, const float* query, float scale, float base, const float* numbers) const {
    constexpr int most = 4;  // packs of tokens at a time, so that sums over lanes are few
    log_sum_exp log_sum;
    if (tokens % T::width != 0) {
      for (int t = 0; t < tokens; ++t) log_sum.add(rounded_sum(base, estimate_of(t, query, scale, numbers)));
      return log_sum.value();
    }
    const estimator<T> estimates{
        *this, team, query, numbers, typename T::pack(scale), typename T::pack(base)};
    int t = 0;
    for (; t + most * T::width <= tokens; t += most * T::width) estimates.template add<most>(t, log_sum);
    for (; t < tokens; t += T::width) estimates.template add<1>(t, log_sum);
    return log_sum.value();
  }

 private:
  template <class T>
  struct estimator {
    const token_codes& codes;
    T team;
    const float* query;
    const float* numbers;
    typename T::pack scale, base;

    /// Adds `Packs` packs of tokens from token `first` on.
    template <int Packs>
    FREEKV_HD void add(int first, log_sum_exp& log_sum) const {
      using pack = typename T::pack;
      pack estimate[Packs];
      unroll<Packs>([&](auto i) { estimate[i] = pack(0.0f); });
      for (int r = 0; r < codes.rows; ++r) {
        const pack q(query[r]);
        const float* row = numbers + r * codes.tokens + first;
        unroll<Packs>([&](auto i) { estimate[i] = estimate[i] + q * team.load(row + i * T::width); });
      }
      const float* scales = numbers + codes.rows * codes.tokens + first;
      unroll<Packs>(
          [&](auto i) { estimate[i] = base + estimate[i] * (scale * team.load(scales + i * T::width)); });
      log_sum.add(team, estimate, Packs);
    }
  };

  FREEKV_HD float estimate_of(int token, const float* query, float scale, const float* numbers) const {
    float sum = 0.0f;
    for (int r = 0; r < rows; ++r) sum = rounded_sum(sum, query[r] * numbers[r * tokens + token]);
    return sum * (scale * numbers[rows * tokens + token]);
  }
  FREEKV_HD constexpr float largest_code() const { return static_cast<float>((1 << (bits - 1)) - 1); }
  FREEKV_HD constexpr std::size_t code_bytes() const {
    return to_size(rows * (tokens / 8) * bits + 3) / 4 * 4;
  }
  /// round(c / scale) + largest. A subnormal scale is rounded so coarsely that the quotient can exceed the
  /// largest code, which then stands for it.
  FREEKV_HD std::uint64_t code_of(float c, float scale) const {
    if (bits == 1) return c >= 0.0f ? 1 : 0;
    const float largest = largest_code();
    float code = ::rintf(c / scale);
    code = code > largest ? largest : code < -largest ? -largest : code == code ? code : 0.0f;
    return static_cast<std::uint64_t>(code + largest);
  }
  template <int Bits, team T>
  FREEKV_HD void decode_bits(T team, const std::byte* in, float* numbers) const {
    using pack = typename T::pack;
    const auto* codes = reinterpret_cast<const std::uint8_t*>(in);
    for (int i = 0; i < rows * tokens; i += T::width) {
      const pack code = team.template load_codes<Bits>(codes, i);
      if constexpr (Bits == 1)
        team.store(numbers + i, code + code - pack(1.0f));
      else
        team.store(numbers + i, code - pack(largest_code()));
    }
    team.widen(reinterpret_cast<const float*>(in + code_bytes()), numbers + rows * tokens, tokens);
  }
};

}  // namespace freekv::detail
