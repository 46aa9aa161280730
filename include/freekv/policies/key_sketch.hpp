// The unit's mean key and every token's difference from it, quantised. Ours.
#pragma once

#include <freekv/core/size.hpp>
#include <freekv/policies/detail/token_codes.hpp>
#include <freekv/policies/mean_summaries.hpp>

namespace freekv {

/// The unit's mean key in float32 and per token the difference from it in `Bits` bits (1, 2 or 4) with one
/// float32 scale. The score is `ln sum_t exp(scale * (<q, mean> + <q, r_t>))`: the unit's log-mass.
///
/// Numbers: the mean (head_dim), then token_codes of head_dim rows. Stored alike:
/// `4 * d + d * p * Bits / 8 + 4 * p` bytes.
template <int Bits = 2>
struct key_sketch {
  static_assert(Bits == dynamic || Bits == 1 || Bits == 2 || Bits == 4, "key_sketch takes 1, 2 or 4 bits");
  using policy_kind = summary_kind;
  using hooks = hook_list<hook::bytes, hook::decode, hook::encode, hook::validate, hook::values>;
  static constexpr std::string_view name = "key_sketch";
  count_of<Bits> bits{};

  FREEKV_HD constexpr int width(kv_extent unit) const { return unit.head_dim + codes(unit).width(); }
  template <class Key>
  FREEKV_HD constexpr std::size_t bytes(kv_extent unit) const {
    return mean_bytes(unit) + codes(unit).bytes();
  }

  std::string values() const { return std::to_string(int{bits}); }
  void validate(const summary_setting& s) const {
    codes(s.unit).validate(name);
    if (bits != 1 && bits != 2 && bits != 4)
      throw settings_error("key_sketch: " + std::to_string(int{bits}) + " bits; choose 1, 2 or 4");
  }

  template <team T>
  FREEKV_HD void summarise(T team, const unit_keys& keys, float* numbers) const {
    const int d = keys.unit.head_dim, tokens = keys.unit.tokens;
    detail::mean_of_keys(team, keys, 0, tokens, numbers);
    team.sync();
    float* residuals = numbers + d;
    for (int i = team.lane(); i < d * tokens; i += team.lanes())
      residuals[i] = keys.row(i % tokens)[i / tokens] - numbers[i / tokens];
    for (int t = team.lane(); t < tokens; t += team.lanes()) residuals[d * tokens + t] = 1.0f;
  }
  template <team T>
  FREEKV_HD float score(T team, const unit_query& query, const float* numbers) const {
    const int d = query.unit.head_dim;
    const float base = query.scale * detail::inner_product(team, query.data, numbers, d);
    return codes(query.unit).log_mass(team, query.data, query.scale, base, numbers + d);
  }

  template <class Key, team T>
  FREEKV_HD void encode(T team, kv_extent unit, const float* numbers, std::byte* out) const {
    narrow_numbers<float>(team, numbers, unit.head_dim, out);
    codes(unit).encode(team, numbers + unit.head_dim, out + mean_bytes(unit));
  }
  template <class Key, team T>
  FREEKV_HD void decode(T team, kv_extent unit, const std::byte* in, float* numbers) const {
    widen_numbers<float>(team, in, unit.head_dim, numbers);
    codes(unit).decode(team, in + mean_bytes(unit), numbers + unit.head_dim);
  }

 private:
  FREEKV_HD static constexpr std::size_t mean_bytes(kv_extent unit) {
    return to_size(unit.head_dim) * sizeof(float);
  }
  FREEKV_HD constexpr detail::token_codes codes(kv_extent unit) const {
    return {unit.head_dim, bits, unit.tokens};
  }
};

static_assert(summary_policy<key_sketch<>>);

}  // namespace freekv
