// Somebody's text inside one of our sentences.
#pragma once

#include <cctype>
#include <string>

namespace freekv::examples {

/// In quotes: the first 40 characters, and ? for what cannot be printed, such as a 0, which would end the sentence.
inline std::string cited(const std::string& text) {
  std::string safe = text.substr(0, 40);
  for (char& c : safe)
    if (std::iscntrl(static_cast<unsigned char>(c)) != 0) c = '?';
  return "\"" + safe + "\"";
}

}  // namespace freekv::examples
