// Random rows, the teams of this machine, and comparisons with an answer for NaN: for the tests of single
// functions.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <freekv/backend/host/isa.hpp>
#include <limits>
#include <optional>
#include <ostream>
#include <span>
#include <type_traits>
#include <vector>

#include "../instruction_sets.hpp"
#include "../property/random_case.hpp"

namespace tests {

inline constexpr float inf = std::numeric_limits<float>::infinity();
inline constexpr float quiet_nan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float largest = std::numeric_limits<float>::max();

constexpr std::size_t count(std::integral auto n) { return static_cast<std::size_t>(n); }

/// What a body of team code runs on: one lane, or an instruction set of this machine.
struct executor {
  std::optional<freekv::host::isa> set;
  bool operator==(const executor&) const = default;
};
inline constexpr executor one_lane{};
inline executor best() { return {freekv::host::best_isa()}; }

inline std::ostream& operator<<(std::ostream& out, executor e) {
  return out << (e == one_lane ? "one lane" : freekv::host::name_of(*e.set));
}

inline std::vector<executor> executors() {
  std::vector<executor> all{one_lane};
  for (const auto set : instruction_sets()) all.push_back({set});
  return all;
}

/// Calls `body(team)`. Many assertions belong behind it: a body is inlined for each instruction set.
template <class Body>
void run_on(executor e, const Body& body) {
  if (e == one_lane)
    body(freekv::scalar_team{});
  else
    freekv::host::with_wide_team(*e.set, body);
}

/// NaN is near NaN, an infinity near itself alone.
inline bool is_near(double a, double b, double tolerance) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  if (std::isinf(a) || std::isinf(b)) return a == b;
  return std::fabs(a - b) <= tolerance;
}

/// Equal bit for bit, NaN and the sign of zero included.
template <class A, class B>
bool same_bits(const A& a, const B& b) {
  return a.size() == b.size() &&
         (a.size() == 0 || std::memcmp(a.data(), b.data(), a.size() * sizeof(*a.data())) == 0);
}

inline std::vector<float> normals(dice& d, std::size_t n, float size = 1.0f) {
  std::vector<float> numbers(n);
  for (float& x : numbers) x = size * d.normal();
  return numbers;
}

/// `numbers` as stored elements, rounded to nearest.
template <freekv::element E>
std::vector<E> stored_as(std::span<const float> numbers) {
  std::vector<E> elements;
  for (const float x : numbers) elements.push_back(freekv::from_float<E>(x));
  return elements;
}

/// What stored elements stand for.
template <class E>
std::vector<float> values_of(const std::vector<E>& elements) {
  std::vector<float> numbers;
  for (const E& x : elements) numbers.push_back(freekv::to_float(x));
  return numbers;
}

/// Rows of `width` numbers, as the oracle takes them.
inline std::vector<std::span<const float>> rows_of(const std::vector<float>& data, int width) {
  std::vector<std::span<const float>> rows;
  for (std::size_t i = 0; i < data.size(); i += count(width))
    rows.push_back(std::span(data).subspan(i, count(width)));
  return rows;
}

}  // namespace tests
