#include "needle_text.hpp"

#include <algorithm>
#include <array>
#include <freekv/core/size.hpp>
#include <utility>

namespace freekv::examples {
namespace {

struct fact {
  const char* subject;
  const char* number;
};
constexpr std::array<fact, 8> facts{{{"lighthouse", "73951"},
                                     {"orchard", "40286"},
                                     {"harbour", "91437"},
                                     {"library", "25860"},
                                     {"windmill", "68314"},
                                     {"bakery", "17592"},
                                     {"chapel", "84073"},
                                     {"museum", "36729"}}};

std::string sentence_of(const fact& f) {
  return std::string("The secret number of the ") + f.subject + " is " + f.number + ".";
}

double depth_of(std::size_t nth) { return 0.05 + 0.85 * static_cast<double>(nth) / (facts.size() - 1); }

bool all_digits(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

/// The first `size` bytes of `text`, cut at the end of a sentence, with the facts between sentences, a
/// paragraph each.
std::string with_facts(const std::string& text, std::size_t size) {
  const auto sentence_end = [&](std::size_t from) {
    const std::size_t end = text.find(". ", from);
    return end == std::string::npos || end + 2 > size ? size : end + 2;
  };
  std::string result;
  std::size_t done = 0;
  for (std::size_t i = 0; i < facts.size(); ++i) {
    const std::size_t at = std::max(done, sentence_end(to_size(depth_of(i) * static_cast<double>(size))));
    result += text.substr(done, at - done) + "\n\n" + sentence_of(facts[i]) + "\n\n";
    done = at;
  }
  return result + text.substr(done, size - done);
}

}  // namespace

needle_text hide_needles(const model& model, const std::string& text, int tokens) {
  // As many bytes of the text as make, with the facts, just no more tokens than asked for.
  std::size_t low = 0, high = text.size();
  while (low < high) {
    const std::size_t middle = (low + high + 1) / 2;
    if (static_cast<int>(model.tokenize(with_facts(text, middle)).size()) <= tokens)
      low = middle;
    else
      high = middle - 1;
  }
  needle_text needles;
  const std::string haystack = with_facts(text, low);
  needles.tokens = model.tokenize(haystack);
  for (std::size_t i = 0; i < facts.size(); ++i) {
    const std::string subject = facts[i].subject;
    const std::string asked =
        "\n\nAs stated above, the secret number of the " + subject + " is " + facts[i].number;
    needle_text::question q{depth_of(i), model.tokenize(asked, false), 0};
    for (auto token = q.tokens.rbegin(); token != q.tokens.rend() && all_digits(model.to_text(*token));
         ++token)
      ++q.digits;
    if (q.digits == 0)
      throw engine_error("model '" + model.shape().name + "' has no token of digits alone in \"" + asked +
                         "\": its answers cannot be told digit by digit");
    needles.questions.push_back(std::move(q));
  }
  return needles;
}

}  // namespace freekv::examples
