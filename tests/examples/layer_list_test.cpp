// Lists of what layers have of their own, and how a budget is shared out.

#include "layer_list.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <sstream>

#include "../catch.hpp"
#include "safetensors.hpp"

namespace {

using freekv::examples::halfway;
using freekv::examples::layer_values;
using freekv::examples::read_layer_list;
using freekv::examples::share_units;

std::vector<layer_values> read(const std::string& text) {
  std::istringstream in(text);
  return read_layer_list(in, "list", 4);
}
std::string fault_of(const std::string& text) {
  try {
    read(text);
  } catch (const freekv::examples::file_error& e) {
    return e.what();
  }
  return "";
}

/// Losses that fall with units, not always by less.
std::vector<std::vector<double>> random_losses(std::mt19937& random, int layers, int most) {
  std::vector<std::vector<double>> losses(static_cast<std::size_t>(layers));
  for (auto& loss : losses) {
    double left = std::uniform_real_distribution<>(0, 100)(random);
    for (int n = 0; n <= most; ++n) {
      loss.push_back(left);
      left *= std::uniform_real_distribution<>(0.5, 1)(random);
    }
  }
  return losses;
}

}  // namespace

TEST_CASE("a list of layers says what each has of its own", "[layers]") {
  const auto all = read("# layer tokens tau delta\n\n2 544 - 0.125 # many\n0 - -0.5 1e-1\n3 - - -\n");
  REQUIRE(all.size() == 4);
  CHECK(all[2].selected_tokens == 544);
  CHECK_FALSE(all[2].tau);
  CHECK(all[2].delta == 0.125f);
  CHECK_FALSE(all[0].selected_tokens);
  CHECK(all[0].tau == -0.5f);
  CHECK(all[0].delta == 0.1f);
  for (const std::size_t layer : {1, 3})
    CHECK_FALSE((all[layer].selected_tokens || all[layer].tau || all[layer].delta));
  CHECK(read("").size() == 4);
}

TEST_CASE("a wrong list of layers is refused with the line and a remedy", "[layers]") {
  const std::string form =
      "a line is \"layer tokens tau delta\", such as \"3 544 - 0.1\", - for what the layer has not";
  for (const char* line : {"1", "1 32 -", "1 32 - - -", "- 32 - -", "1 32x - -", "1 3.5 - -", "one 32 - -",
                           "1 32 nan -", "1 32 - few", "1 99999999999 - -"})
    CHECK(fault_of("0 32 - -\n" + std::string(line)) == "\"list\", line 2: " + form);
  CHECK(fault_of("4 32 - -") == "\"list\", line 1: layer 4 is none of 4 layers");
  CHECK(fault_of("-1 32 - -") == "\"list\", line 1: layer -1 is none of 4 layers");
  CHECK(fault_of("1 32 - -\n1 64 - -") == "\"list\", line 2: layer 1 is listed twice");
  CHECK(fault_of("1 0 - -") == "\"list\", line 1: a layer selects at least a token, not 0");
  CHECK(fault_of("1 - 1.5 -") == "\"list\", line 1: tau is a cosine, from -1 to 1, not \"1.5\"");
  CHECK(fault_of("1 - - -0.1") == "\"list\", line 1: delta is a share, from 0 to 1, not \"-0.1\"");
}

TEST_CASE("units go where they save most", "[layers]") {
  const std::vector<std::vector<double>> losses{{10, 4, 2, 1, 0.5}, {3, 2.9, 2.8, 2.7, 2.6}, {8, 7, 0, 0, 0}};
  CHECK(share_units(losses, 3, 0, 4) == std::vector<int>{1, 0, 2});  // the third's second unit saves 7
  CHECK(share_units(losses, 6, 1, 4) == std::vector<int>{3, 1, 2});
  CHECK(share_units(losses, 6, 2, 2) == std::vector<int>{2, 2, 2});
  const std::vector<std::vector<double>> alike(3, {4, 2, 1, 0.5});
  CHECK(share_units(alike, 4, 0, 3) == std::vector<int>{2, 1, 1});
  CHECK_THROWS_WITH(share_units(losses, 13, 0, 4),
                    "share_units: 13 units are not from 0 to 4 for each of 3 layers");
  CHECK_THROWS_WITH(share_units(losses, 2, 1, 4),
                    "share_units: 2 units are not from 1 to 4 for each of 3 layers");
  auto endless = losses;
  endless.front().back() = std::numeric_limits<double>::infinity();
  CHECK_THROWS_WITH(share_units(endless, 6, 0, 4), "share_units: a loss is not finite");
  CHECK_THROWS_WITH(share_units(losses, 6, 0, 5),
                    "share_units: losses with up to 5 units are asked for, and 5 are there");
}

TEST_CASE("shared units keep their sum and bounds, a larger total takes none away, and few are better",
          "[layers]") {
  std::mt19937 random(1);
  for (int round = 0; round < 50; ++round) {
    const int layers = 1 + static_cast<int>(random() % 5), most = 1 + static_cast<int>(random() % 6),
              least = static_cast<int>(random() % static_cast<unsigned>(most + 1));
    const auto losses = random_losses(random, layers, most);
    const auto lost = [&](const std::vector<int>& units) {
      double sum = 0;
      for (std::size_t l = 0; l < units.size(); ++l) sum += losses[l][static_cast<std::size_t>(units[l])];
      return sum;
    };
    std::vector<int> before;
    for (int total = least * layers; total <= most * layers; ++total) {
      const auto units = share_units(losses, total, least, most);
      CHECK(std::accumulate(units.begin(), units.end(), 0) == total);
      CHECK(std::all_of(units.begin(), units.end(), [&](int n) { return n >= least && n <= most; }));
      for (std::size_t l = 0; l < before.size(); ++l) CHECK(units[l] >= before[l]);
      before = units;
    }
    // Where losses are convex it is the best there is: no unit moved saves anything.
    auto convex = losses;
    for (auto& loss : convex)
      for (std::size_t n = 0; n < loss.size(); ++n) loss[n] = loss[0] / static_cast<double>(n + 1);
    const auto units = share_units(convex, (least + most) * layers / 2, least, most);
    for (std::size_t from = 0; from < units.size(); ++from)
      for (std::size_t to = 0; to < units.size(); ++to) {
        const auto n = static_cast<std::size_t>(units[from]), m = static_cast<std::size_t>(units[to]);
        if (from != to && units[from] > least && units[to] < most)
          CHECK(convex[from][n - 1] - convex[from][n] >= convex[to][m] - convex[to][m + 1]);
      }
    CHECK(lost(before) <= lost(std::vector<int>(losses.size(), least)));
  }
}

TEST_CASE("half of the way keeps the sum and goes no further", "[layers]") {
  CHECK(halfway({2, 13, 14, 11}, 10) == std::vector<int>{6, 12, 12, 10});
  CHECK(halfway({10, 10}, 10) == std::vector<int>{10, 10});
  std::mt19937 random(2);
  for (int round = 0; round < 50; ++round) {
    const int even = 1 + static_cast<int>(random() % 12), layers = 2 + static_cast<int>(random() % 8);
    std::vector<int> units(static_cast<std::size_t>(layers), even);
    for (int move = 0; move < 20; ++move) {
      int& from = units[random() % units.size()];
      if (from > 0) --from, ++units[random() % units.size()];
    }
    const auto met = halfway(units, even);
    CHECK(std::accumulate(met.begin(), met.end(), 0) == even * layers);
    for (std::size_t l = 0; l < units.size(); ++l) CHECK(std::abs(2 * met[l] - units[l] - even) <= 1);
  }
}
