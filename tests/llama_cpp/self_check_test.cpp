// The check of a model before the long work: what it finds wrong, on tables, and what it says of a real
// model.

#include "self_check.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "../catch.hpp"
#include "prompt.hpp"

namespace {

using namespace freekv::examples;

std::string model_path() {
  const char* path = std::getenv("FREEKV_MODEL");
  return path != nullptr ? path : FREEKV_MODEL;
}

constexpr float infinity = std::numeric_limits<float>::infinity();

/// Logits as they may be: from -12 to 12.
std::vector<float> some_logits(float shift = 0) {
  std::vector<float> logits;
  for (int i = 0; i < 1000; ++i) logits.push_back(12 * std::sin(static_cast<float>(i)) + shift);
  return logits;
}

}  // namespace

TEST_CASE("logits that are no numbers, or all the same, are found", "[self_check]") {
  CHECK(fault_of(some_logits()).empty());
  CHECK_THAT(fault_of({}), Catch::Contains("no logits"));
  CHECK(fault_of(std::vector<float>(1000, 0.0f)) == "all logits are 0");
  for (const float bad : {std::nanf(""), infinity, -infinity}) {
    auto logits = some_logits();
    logits[0] = logits[999] = bad;
    CHECK(fault_of(logits) == "2 of 1000 logits are not finite");
  }
}

TEST_CASE("known logits are compared to a tolerance", "[self_check]") {
  const auto logits = some_logits();
  const std::vector<known_logit> known{{0, logits[0]}, {10, logits[10]}, {999, logits[999]}};
  CHECK(fault_against(logits, known).empty());
  CHECK(fault_against(logits, {}).empty());
  for (const float sign : {-1.0f, 1.0f}) {
    CHECK(fault_against(some_logits(0.9f * sign * known_tolerance), known).empty());
    auto wrong = logits;
    wrong[999] += 1.1f * sign * known_tolerance;
    CHECK_THAT(fault_against(wrong, known), Catch::Contains("token 999") && Catch::Contains(" and not "));
  }
  auto wrong = logits;
  wrong[10] = std::nanf("");
  CHECK_THAT(fault_against(wrong, known), Catch::Contains("token 10 is nan"));
  CHECK_THAT(fault_against(std::span(logits).first(999), known), Catch::Contains("no logit of token 999"));
}

TEST_CASE("logits alone and in a batch are compared to a share of their spread", "[self_check]") {
  const auto batch = some_logits();
  CHECK(fault_between(batch, batch).empty());
  const double spread = 12 / std::sqrt(2.0);
  const auto off_by = [&](double share) { return some_logits(static_cast<float>(share * spread)); };
  CHECK(fault_between(off_by(0.9 * batch_tolerance), batch).empty());
  CHECK_THAT(fault_between(off_by(1.1 * batch_tolerance), batch), Catch::Contains("of their spread"));
  auto other = batch;
  std::reverse(other.begin(), other.end());
  CHECK_THAT(fault_between(other, batch), Catch::Contains("alone and in a batch differ"));
  other = batch;
  other[3] = std::nanf("");
  CHECK_FALSE(fault_between(other, batch).empty());
  CHECK_THAT(fault_between(std::span(batch).first(10), batch), Catch::Contains("10 logits"));
}

TEST_CASE("the model of the main job is known and passes; against other logits it does not", "[self_check]") {
  const model m(model_path());
  const known_model* known = find_known(key_of_file(model_path()));
  REQUIRE(known != nullptr);
  CHECK(known->last.size() >= 8);
  CHECK(find_known(1) == nullptr);
  check_model(m, known, 1);
  check_model(m, nullptr, 1);
  known_model other = *known;
  other.last.back().value += 3;
  CHECK_THROWS_WITH(check_model(m, &other, 1),
                    Catch::Contains("gives wrong logits here: the logit of token " +
                                    std::to_string(other.last.back().token)) &&
                        Catch::Contains("The processor is " + processor_name()) &&
                        Catch::Contains("llama.cpp was built") && Catch::Contains("-DGGML_NATIVE=OFF"));
  CHECK_THROWS_AS(check_model(m, &other, 1), engine_error);
}
