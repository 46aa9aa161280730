// What programs do where they refuse: exit code 2 and one sentence.
#pragma once

#include <algorithm>
#include <string>

#include "../catch.hpp"
#include "../mentions.hpp"
#include "run_program.hpp"
#include "tensor_file.hpp"

namespace tests {

inline constexpr std::size_t two_gigabytes = std::size_t{2} << 30;

/// A correct trace: 40 tokens, 30 of them the prompt, 4 query heads, 2 KV heads, d 64, F32.
inline file_parts good_trace() {
  const auto zeros = [](std::int64_t heads) {
    return tensor_text{
        "F32", {40, heads, 64}, std::string(static_cast<std::size_t>(40 * heads * 64 * 4), '\0')};
  };
  return parts_of({{"q", zeros(4)}, {"k", zeros(2)}, {"v", zeros(2)}}, {{"prompt_len", "30"}});
}

/// The program's fault as one line; checks that it is one sentence.
inline std::string sentence_of(const program_end& end, const std::string& program = "freekv-replay") {
  INFO(end);
  CHECK(end.exit_code == 2);
  CHECK(end.out.empty());
  CHECK_FALSE(end.err.empty());
  if (end.err.empty()) return {};
  CHECK(end.err.back() == '\n');
  const std::string line = end.err.substr(0, end.err.size() - 1);
  CHECK(line.rfind(program + ": ", 0) == 0);
  CHECK(line.size() > 30);
  CHECK(line.size() < 1000);
  CHECK(line.find(". ") == std::string::npos);
  CHECK(line.back() != '.');
  CHECK(std::none_of(line.begin(), line.end(),
                     [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }));
  return line;
}

}  // namespace tests
