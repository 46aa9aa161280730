// Which random cases are run: the environment may say.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

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

/// Of a list every second entry, which by FREEKV_ROUND, a run's number; without that all of it.
template <class List>
List in_turns(List list) {
  if (std::getenv("FREEKV_ROUND") == nullptr) return list;
  std::uint64_t nth = number_from("FREEKV_ROUND", 0);
  std::erase_if(list, [&](const auto&) { return nth++ % 2 != 0; });
  return list;
}

}  // namespace tests
