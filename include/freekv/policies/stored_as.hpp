// The element type in which a summary keeps its numbers.
#pragma once

#include <cmath>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/size.hpp>
#include <freekv/policies/summary.hpp>

namespace freekv {

/// Format in which a summary's numbers are kept.
enum class number_format : std::int8_t {
  any = dynamic,  ///< one of the others, chosen at run time
  standard,       ///< what the summary keeps by itself
  key,            ///< the key's type
  float32,
  int8,  ///< 8 bits, symmetric, with a float32 scale `max|x| / 127` for every head_dim numbers
};

/// `Summary` with its numbers kept in another format: `stored_as<mean, number_format::int8>`, or chosen at
/// run time `stored_as<mean, number_format::any>`. In `int8` a bound is no longer a bound: it is rounded to
/// the nearest. A NaN or infinity among numbers that share a scale makes all of them NaN.
template <class Summary, number_format Format>
struct stored_as : Summary {
  static_assert(
      summary_policy<Summary> && !hooks_of<Summary>::has(hook::four_heads) &&
          !hooks_of<Summary>::has(hook::at) &&
          !requires(const Summary s, kv_extent unit) { s.template bytes<float>(unit); },
      "stored_as takes a summary without a format of its own");
  using hooks = typename hooks_of<Summary>::template with<hook::bytes, hook::decode, hook::encode,
                                                          hook::values, hook::with_elements>;
  count_of<static_cast<int>(Format)> format{};

  constexpr stored_as() = default;
  explicit constexpr stored_as(const Summary& summary, number_format chosen = Format) : Summary(summary) {
    if constexpr (Format == number_format::any) format.value = static_cast<int>(chosen);
  }

  FREEKV_HD constexpr bool is(number_format f) const { return format == static_cast<int>(f); }

  std::string values() const {
    std::string text;
    if constexpr (requires(const Summary s) { s.values(); }) text = Summary::values();
    const char* names[] = {"", "key", "float32", "int8"};
    const std::string chosen = names[int{format}];
    return text + (text.empty() || chosen.empty() ? "" : ", ") + chosen;
  }

  template <class Key>
  FREEKV_HD constexpr std::size_t bytes(kv_extent unit) const {
    const auto numbers = to_size(this->width(unit));
    if (is(number_format::int8)) return code_bytes(unit) + to_size(scales(unit)) * sizeof(float);
    if (is(number_format::float32)) return numbers * sizeof(float);
    return numbers * (is(number_format::key) ? sizeof(Key) : sizeof(summary_element<Summary, Key>));
  }

  template <class Key, team T>
  FREEKV_HD void encode(T team, kv_extent unit, const float* numbers, std::byte* out) const {
    const int count = this->width(unit);
    if (is(number_format::int8))
      encode_int8(team, unit, numbers, out);
    else if (is(number_format::float32))
      narrow_numbers<float>(team, numbers, count, out);
    else if (is(number_format::key))
      narrow_numbers<Key>(team, numbers, count, out);
    else
      narrow_numbers<summary_element<Summary, Key>>(team, numbers, count, out);
  }

  template <class Key, team T>
  FREEKV_HD void decode(T team, kv_extent unit, const std::byte* in, float* numbers) const {
    const int count = this->width(unit);
    if (is(number_format::int8))
      decode_int8(team, unit, in, numbers);
    else if (is(number_format::float32))
      widen_numbers<float>(team, in, count, numbers);
    else if (is(number_format::key))
      widen_numbers<Key>(team, in, count, numbers);
    else
      widen_numbers<summary_element<Summary, Key>>(team, in, count, numbers);
  }

  /// Calls `body` with the numbers as elements, unless they are codes.
  template <class Key, class Body>
  FREEKV_HD bool with_elements(const std::byte* in, const Body& body) const {
    if (is(number_format::int8)) return false;
    if (is(number_format::float32))
      body(reinterpret_cast<const float*>(in));
    else if (is(number_format::key))
      body(reinterpret_cast<const Key*>(in));
    else
      body(reinterpret_cast<const summary_element<Summary, Key>*>(in));
    return true;
  }

 private:
  static constexpr float largest = 127.0f;

  // Codes, each its number in units of its scale plus `largest`; then the scales.
  FREEKV_HD constexpr std::size_t code_bytes(kv_extent unit) const {
    return to_size((this->width(unit) + 3) / 4 * 4);
  }
  FREEKV_HD constexpr int scales(kv_extent unit) const {
    return (this->width(unit) + unit.head_dim - 1) / unit.head_dim;
  }

  template <team T>
  FREEKV_HD void encode_int8(T team, kv_extent unit, const float* numbers, std::byte* out) const {
    auto* codes = reinterpret_cast<std::uint8_t*>(out);
    auto* scale_of = reinterpret_cast<float*>(out + code_bytes(unit));
    const int count = this->width(unit);
    for (int part = team.lane(); part < scales(unit); part += team.lanes()) {
      const int first = part * unit.head_dim;
      const int last = first + unit.head_dim < count ? first + unit.head_dim : count;
      float most = 0.0f;
      for (int i = first; i < last; ++i) most = scalar_team{}.maximum(most, ::fabsf(numbers[i]));
      const float scale = most < infinity ? most / largest : NAN;
      scale_of[part] = scale;
      for (int i = first; i < last; ++i) {
        // A subnormal scale is rounded so coarsely that a quotient can exceed the largest code.
        float code = ::rintf(numbers[i] / scale);
        code = code > largest ? largest : code < -largest ? -largest : code == code ? code : 0.0f;
        codes[i] = static_cast<std::uint8_t>(code + largest);
      }
    }
  }

  template <team T>
  FREEKV_HD void decode_int8(T team, kv_extent unit, const std::byte* in, float* numbers) const {
    using pack = typename T::pack;
    const auto* codes = reinterpret_cast<const std::uint8_t*>(in);
    const auto* scale_of = reinterpret_cast<const float*>(in + code_bytes(unit));
    const int whole = this->width(unit) / unit.head_dim * unit.head_dim;
    for (int first = 0; first < whole; first += unit.head_dim) {
      const pack scale(scale_of[first / unit.head_dim]);
      for (int i = first; i < first + unit.head_dim; i += T::width)
        team.store(numbers + i, (team.template load_codes<8>(codes, i) - pack(largest)) * scale);
    }
    for (int i = whole + team.lane(); i < this->width(unit); i += team.lanes())
      numbers[i] = (static_cast<float>(codes[i]) - largest) * scale_of[i / unit.head_dim];
  }
};

}  // namespace freekv
