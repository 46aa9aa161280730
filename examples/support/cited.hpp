// Somebody's text inside one of our sentences.
#pragma once

#include <cctype>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace freekv::examples {

/// The first `most` bytes, or up to three fewer, so that no UTF-8 sequence is cut.
inline std::string_view beginning(std::string_view text, std::size_t most) {
  if (text.size() <= most) return text;
  const auto continues = [&](std::size_t at) {
    return (static_cast<unsigned char>(text[at]) & 0xc0u) == 0x80u;
  };
  std::size_t end = most;
  for (int step = 0; step < 3 && end > 0 && continues(end); ++step) --end;
  return text.substr(0, end);
}

/// In quotes: the first 40 bytes, of how many where there are more, and ? for what cannot be printed, such as
/// a 0, which would end the sentence.
inline std::string cited(std::string_view text) {
  constexpr std::size_t most = 40;
  std::string safe(beginning(text, most));
  const std::string first = std::to_string(safe.size());
  for (char& c : safe)
    if (std::iscntrl(static_cast<unsigned char>(c)) != 0) c = '?';
  safe = "\"" + safe + "\"";
  if (text.size() > most) safe += " (the first " + first + " of " + std::to_string(text.size()) + " bytes)";
  return safe;
}

/// A text, or its `first` and `last` bytes where there are more: names of files differ in the last.
inline std::string shortened(std::string_view text, std::size_t first = 100, std::size_t last = 200) {
  if (text.size() <= first + last) return std::string(text);
  std::string shorter(beginning(text, first));
  shorter += "[...]";
  return shorter += text.substr(text.size() - last);
}

/// In quotes.
inline std::string cited_path(const std::filesystem::path& path) {
  return "\"" + shortened(path.native()) + "\"";
}

/// "(40, 2, 64)", or of more than eight the first.
inline std::string cited_shape(const std::vector<std::int64_t>& shape) {
  constexpr std::size_t most = 8;
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size() && i < most; ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  if (shape.size() > most) text += ", and " + std::to_string(shape.size() - most) + " more";
  return text + ")";
}

}  // namespace freekv::examples
