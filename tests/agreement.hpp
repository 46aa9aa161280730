// How comparisons with the oracle say what they found.
#pragma once

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>

namespace tests {

/// Why the library and the oracle disagree.
struct disagreement {
  std::string what;
};

template <class... T>
std::string sentence(const T&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

/// Within `tolerance` of the larger, or of 1; infinities equal themselves, NaN equals NaN.
inline bool close(double a, double b, double tolerance) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  if (std::isinf(a) || std::isinf(b)) return a == b;
  return std::fabs(a - b) <= tolerance * std::max({std::fabs(a), std::fabs(b), 1.0});
}

}  // namespace tests
