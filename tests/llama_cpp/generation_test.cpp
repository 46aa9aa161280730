// What is said of generated texts and of rows of logits, and how tokens are sampled. No model is needed.

#include "generation.hpp"

#include <cmath>
#include <limits>

#include "../catch.hpp"
#include "logits.hpp"

namespace {

using namespace freekv::examples;
using tokens = std::vector<llama_token>;

std::vector<double> frequencies(double temperature, const std::vector<float>& logits, const tokens& never) {
  sampler s({.temperature = temperature, .seed = 5}, never);
  std::vector<double> counts(logits.size());
  for (int i = 0; i < 20000; ++i) counts[s.choose(logits)] += 1.0 / 20000;
  return counts;
}

}  // namespace

TEST_CASE("at temperature 0 the most likely token is chosen that may be") {
  const std::vector<float> logits{1, 4, 3, -2};
  CHECK(sampler({}).choose(logits) == 1);
  CHECK(sampler({}, {1}).choose(logits) == 2);
}

TEST_CASE("sampling follows the softmax of the logits over the temperature") {
  const std::vector<float> logits{0, 1, 2, 1000};
  const double temperature = GENERATE(0.5, 1.0, 3.0);
  const auto seen = frequencies(temperature, logits, {3});
  double total = 0;
  for (int i = 0; i < 3; ++i) total += std::exp(i / temperature);
  for (int i = 0; i < 3; ++i) CHECK(seen[i] == Approx(std::exp(i / temperature) / total).margin(0.015));
  CHECK(seen[3] == 0);
}

TEST_CASE("samplers of one seed choose alike, of two seeds do not") {
  const std::vector<float> logits(50, 0.0f);
  sampler a({.temperature = 1, .seed = 7}), b({.temperature = 1, .seed = 7}),
      other({.temperature = 1, .seed = 8});
  int alike = 0, unlike = 0;
  for (int i = 0; i < 100; ++i) {
    const auto token = a.choose(logits);
    alike += b.choose(logits) == token;
    unlike += other.choose(logits) != token;
  }
  CHECK(alike == 100);
  CHECK(unlike > 80);
}

TEST_CASE("top-p keeps the fewest and most likely tokens that have the share") {
  const std::vector<float> logits{std::log(0.1f), std::log(0.4f), std::log(0.2f), std::log(0.3f)};
  const auto seen = [&](double top_p) {
    sampler s({.temperature = 1, .top_p = top_p, .seed = 9});
    std::vector<double> counts(4);
    for (int i = 0; i < 20000; ++i) counts[s.choose(logits)] += 1.0 / 20000;
    return counts;
  };
  const auto margin = Approx(0).margin(0.015);
  const auto most = seen(0.3), two = seen(0.65), three = seen(0.75), all = seen(1);
  CHECK(most[1] == Approx(1));
  CHECK(two[0] + two[2] == 0);
  CHECK(two[1] - 4.0 / 7 == margin);
  CHECK(three[0] == 0);
  CHECK(three[2] - 2.0 / 9 == margin);
  CHECK(all[0] - 0.1 == margin);
}

TEST_CASE("where two texts part, and how much they agree") {
  const tokens a{1, 2, 3, 4}, b{1, 2, 5, 4};
  CHECK(first_difference(a, b) == 2);
  CHECK(first_difference(a, a) == 4);
  CHECK(agreement(a, b) == 0.75);
  CHECK(agreement(a, a) == 1);
}

TEST_CASE("repetition counts runs of four tokens that were there before") {
  CHECK(repetition(tokens{1, 2, 3}) == 0);
  CHECK(repetition(tokens{1, 2, 3, 4, 5, 6}) == 0);
  CHECK(repetition(tokens{1, 2, 3, 4, 1, 2, 3, 4}) == Approx(1 / 5.0));
  CHECK(repetition(tokens(100, 9)) == Approx(96 / 97.0));  // all but the first

  tokens late(1000);  // all different, then 259 tokens that stood at the beginning
  for (std::size_t i = 0; i < late.size(); ++i) late[i] = static_cast<llama_token>(i);
  CHECK(repetition(late) == 0);
  for (std::size_t i = 0; i < 259; ++i) late.push_back(static_cast<llama_token>(i));
  CHECK(repetition(late) == 1);  // of the last 256 runs
  late.push_back(5000);
  CHECK(repetition(late) == Approx(255 / 256.0));
}

TEST_CASE("a divergence is that of the softmaxes, whatever is added to all logits", "[generation]") {
  const auto logits = [](std::vector<double> probabilities, double more) {
    std::vector<float> all;
    for (const double p : probabilities) all.push_back(static_cast<float>(std::log(p) + more));
    return all;
  };
  const auto full = logits({0.5, 0.25, 0.25}, 0), other = logits({0.25, 0.25, 0.5}, 3);
  CHECK(divergence(full, full) == 0);
  CHECK(divergence(full, logits({0.5, 0.25, 0.25}, -40)) == Approx(0).margin(1e-6));
  CHECK(divergence(full, other) == Approx(0.5 * std::log(2.0) + 0.25 * std::log(0.5)).epsilon(1e-5));
  // Not the same the other way round: what full finds unlikely counts little.
  const auto sure = logits({0.98, 0.01, 0.01}, 0);
  CHECK(divergence(sure, full) == Approx(0.98 * std::log(1.96) + 0.02 * std::log(0.04)).epsilon(1e-5));
  CHECK(divergence(full, sure) == Approx(0.5 * std::log(0.5 / 0.98) + 0.5 * std::log(25.0)).epsilon(1e-5));
  const std::vector<float> certain{0, -std::numeric_limits<float>::max()};
  CHECK(divergence(certain, certain) == 0);
}
