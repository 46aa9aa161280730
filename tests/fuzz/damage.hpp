// Damage to files, the same for the same seed, and how long it goes on.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#include "../catch.hpp"

namespace tests {

/// Of one seed. std::mt19937_64 is the same everywhere; the standard's distributions are not.
class source_of_damage {
 public:
  explicit source_of_damage(std::uint64_t seed) : numbers_(seed * 0x9e3779b97f4a7c15u + 1) {}

  std::size_t below(std::size_t n) { return n == 0 ? 0 : static_cast<std::size_t>(numbers_() % n); }
  bool one_in(std::size_t n) { return below(n) == 0; }
  template <class Choices>
  const auto& one_of(const Choices& choices) {
    return *(std::begin(choices) + static_cast<std::ptrdiff_t>(below(std::size(choices))));
  }

  /// One fault anywhere in `bytes`: what a disk, a cut transfer or a careless program leaves.
  void damage_bytes(std::string& bytes) {
    const std::size_t at = below(bytes.size()), other = below(bytes.size());
    const std::size_t length = 1 + below(one_in(4) ? 4096 : 24);
    switch (below(7)) {
      case 0:
        if (!bytes.empty()) bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
        break;
      case 1:
        if (!bytes.empty()) bytes[at] = static_cast<char>(below(256));
        break;
      case 2:
        bytes.erase(at, length);
        break;
      case 3:
        bytes.insert(at, bytes.substr(other, length));
        break;
      case 4:
        bytes.resize(at);
        break;
      case 5:
        bytes.append(length, one_in(2) ? '\0' : static_cast<char>(below(256)));
        break;
      default:
        for (std::size_t i = 0; i < length && other + i < bytes.size() && at + i < bytes.size(); ++i)
          bytes[at + i] = bytes[other + i];
    }
  }

  /// One fault in a text of JSON or of words: a number, a bracket, a string, a part of it twice.
  void damage_text(std::string& text) {
    static const std::vector<std::string> numbers{"0",
                                                  "-0",
                                                  "-1",
                                                  "1",
                                                  "2",
                                                  "3",
                                                  "7",
                                                  "8",
                                                  "64",
                                                  "255",
                                                  "1024",
                                                  "65536",
                                                  "1.0",
                                                  "1e3",
                                                  "1e999",
                                                  "0x10",
                                                  "2147483647",
                                                  "2147483648",
                                                  "007",
                                                  "4294967295",
                                                  "4294967296",
                                                  "9007199254740993",
                                                  "4611686018427387904",
                                                  "9223372036854775807",
                                                  "NaN",
                                                  "9223372036854775808",
                                                  "18446744073709551615",
                                                  "18446744073709551616",
                                                  "1e308",
                                                  "null"};
    static const std::vector<std::string> pieces{"{",
                                                 "}",
                                                 "[",
                                                 "]",
                                                 ",",
                                                 ":",
                                                 "\"",
                                                 "\\",
                                                 "\\u0000",
                                                 "\\ud800",
                                                 "\\udc00",
                                                 "\\/",
                                                 "\n",
                                                 "\t",
                                                 " ",
                                                 "true",
                                                 "null",
                                                 "{}",
                                                 "[]",
                                                 "\"\"",
                                                 "//",
                                                 "/*",
                                                 "\xff",
                                                 "\xc3\x28",
                                                 "\xed\xa0\x80",
                                                 "\xef\xbb\xbf",
                                                 "\x7f",
                                                 "\"shape\":[1]",
                                                 "\"dtype\":\"F16\"",
                                                 "\"data_offsets\":[0,8]",
                                                 "\"__metadata__\":{}",
                                                 "-",
                                                 "#",
                                                 ";"};
    static const std::vector<std::string> words{
        "F32", "F16", "BF16",  "F64",          "U8", "BOOL", "F4", "C64",   "I64",        "F33",
        "f32", "",    "dtype", "__metadata__", "q",  "k",    "v",  "shape", "prompt_len", "data_offsets"};
    switch (below(9)) {
      case 0:
      case 1: {  // another number
        const auto [begin, length] = run_of(text, "0123456789");
        if (length > 0) text.replace(begin, length, one_of(numbers));
        break;
      }
      case 2: {  // the same number, a little off
        const auto [begin, length] = run_of(text, "0123456789");
        if (length == 0 || length > 18) break;
        const long long off = static_cast<long long>(below(9)) - 4;
        text.replace(begin, length, std::to_string(std::stoll(text.substr(begin, length)) + off));
        break;
      }
      case 3:
        text.insert(below(text.size() + 1), one_of(pieces));
        break;
      case 4: {  // something between two quotes
        const std::size_t begin = text.find('"', below(text.size()));
        const std::size_t end = begin == std::string::npos ? begin : text.find('"', begin + 1);
        if (end != std::string::npos) text.replace(begin + 1, end - begin - 1, one_of(words));
        break;
      }
      case 5: {  // a part that begins and ends at a comma or a bracket, once more
        const auto part = part_of(text);
        text.insert(
            below(2) == 0 ? text.size() - std::min<std::size_t>(text.size(), 1) : below(text.size() + 1),
            part);
        break;
      }
      case 6: {  // such a part gone
        const auto part = part_of(text);
        const std::size_t at = text.find(part);
        if (!part.empty() && at != std::string::npos) text.erase(at, part.size());
        break;
      }
      case 7: {  // deep
        const std::string opening = one_in(2) ? "[" : "{\"a\":", closing = opening == "[" ? "]" : "}";
        std::string deep;
        const std::size_t depth = 1 + below(one_in(3) ? 3000 : 40);
        for (std::size_t i = 0; i < depth; ++i) deep += opening;
        if (one_in(2)) {
          deep += "0";
          for (std::size_t i = 0; i < depth; ++i) deep += closing;
        }
        text.insert(below(text.size() + 1), deep);
        break;
      }
      default:
        damage_bytes(text);
    }
  }

 private:
  /// A maximal run of `characters` somewhere behind a random place: its begin and length.
  std::pair<std::size_t, std::size_t> run_of(const std::string& text, std::string_view characters) {
    const std::size_t begin = text.find_first_of(characters, below(text.size()));
    if (begin == std::string::npos) return {0, 0};
    const std::size_t end = std::min(text.find_first_not_of(characters, begin), text.size());
    return {begin, end - begin};
  }
  std::string part_of(const std::string& text) {
    const std::size_t begin = text.find_first_of(",{[", below(text.size()));
    if (begin == std::string::npos) return {};
    std::size_t end = begin + 1 + below(80);
    end = std::min(text.find_first_of(",}]", std::min(end, text.size())), text.size());
    return text.substr(begin, end - begin);
  }

  std::mt19937_64 numbers_;
};

/// A number from the environment.
inline long from_environment(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return otherwise;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*end != '\0' || value < 1) throw std::runtime_error(std::string(name) + " is not a positive number");
  return value;
}

/// The seed that is tried now: a sanitizer ends the program without a word of it otherwise.
inline long& seed_now() {
  static long seed = 0;
  return seed;
}

/// Calls `check(seed)` for `cases` seeds, or for FREEKV_FUZZ_CASES of them; the first is FREEKV_FUZZ_SEED, or
/// 1. Returns how many there were.
template <class Check>
long for_seeds(long cases, const Check& check) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback([] { std::fprintf(stderr, "FREEKV_FUZZ_SEED=%ld\n", seed_now()); });
#endif
  const long first = from_environment("FREEKV_FUZZ_SEED", 1),
             count = from_environment("FREEKV_FUZZ_CASES", cases);
  for (long seed = first; seed < first + count; ++seed) {
    INFO("FREEKV_FUZZ_SEED=" << seed);
    seed_now() = seed;
    check(static_cast<std::uint64_t>(seed));
  }
  return count;
}

/// What a message says, whatever its file, names and numbers: to count the faults that were reached.
inline std::string kind_of_message(const std::string& message) {
  std::string kind;
  bool quoted = false;
  for (const char c : message) {
    if (c == '\'' || c == '"') quoted = !quoted;
    if (!quoted && (c == ' ' || (c >= 'a' && c <= 'z'))) kind += c;
  }
  return kind.substr(0, 60);
}

}  // namespace tests
