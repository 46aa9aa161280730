// Which random cases are run: the environment may say.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace tests {

inline std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

/// A fixed number of random cases, or the share of them (one in FREEKV_SHARE) that slow builds run.
template <class Number>
Number share_of(Number cases) {
  const auto share = static_cast<Number>(number_from("FREEKV_SHARE", 1));
  return (cases + share - 1) / share;
}

}  // namespace tests
