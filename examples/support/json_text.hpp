// JSON that others wrote.
#pragma once

#include <string_view>

namespace freekv::examples {

/// Levels of objects and arrays that our files need are 3; what prints or destroys a value goes down as many
/// calls.
inline constexpr int deepest_json = 32;

/// Whether objects and arrays lie in each other deeper than that. Of what is no JSON it is asked up to the
/// fault.
inline bool nests_too_deep(std::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      i += c == '\\';
      in_string = c != '"';
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > deepest_json) return true;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

}  // namespace freekv::examples
