// hard_kv_pairs, and its definition: by the shares of all tokens, so that the budget alone says how many
// stay.
#include <algorithm>
#include <cmath>
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <iterator>
#include <string>
#include <vector>

#include "../catch.hpp"

namespace {

using freekv::testing::doubles;

/// Places from `first` to `end`, those of most, or least, shares first.
std::vector<int> ranked(const doubles& shares, int first, int end, bool most) {
  std::vector<int> places;
  for (int i = first; i < end; ++i) places.push_back(i);
  std::stable_sort(places.begin(), places.end(),
                   [&](int a, int b) { return most ? shares[a] > shares[b] : shares[a] < shares[b]; });
  return places;
}

}  // namespace

TEST_CASE("hard_kv_pairs conforms to its definition", "[conforms]") {
  freekv::hard_kv_pairs policy;
  policy.p = 1.0f, policy.window = 3, policy.interval = 5, policy.kernel = 1, policy.sink = 2;
  for (const int takers : {freekv::every_token, 4, 1}) {
    policy.takers = takers;
    const freekv::testing::eviction_definition definition{
        .worths =
            [](const freekv::testing::observed_tokens& held) {
              doubles most(held.tokens.size());
              for (const auto& row : held.rows) {
                double sum = 0.0;
                for (const double score : row[0]) sum += std::exp(score);
                for (std::size_t i = 0; i < most.size(); ++i)
                  most[i] = std::max(most[i], std::exp(row[0][i]) / sum);
              }
              return most;
            },
        .fates =
            [&](const std::vector<freekv::testing::parted_tokens>& so_far) {
              const freekv::testing::parted_tokens& of = so_far.back();
              const int all = static_cast<int>(of.tokens.size());
              std::vector<freekv::merge_fate> fates;
              for (const double share : of.shares) fates.push_back({.weight = share});
              std::vector<int> best = ranked(of.shares, 0, of.staying, true);
              std::erase_if(best, [&](int i) {
                return of.tokens[i] < 2 || of.tokens[i] >= of.at.tokens - 3 || of.shares[i] <= 0.0;
              });
              if (std::ssize(best) > takers) best.resize(takers);
              std::size_t nth = 0;
              for (const int i : ranked(of.shares, of.staying, all, false)) {
                const std::size_t place = nth++;
                if (!best.empty() && of.shares[i] > 0.0) fates[i].into = best[place % best.size()];
              }
              return fates;
            },
        .merge_by = freekv::merge_rule::by_shares};
    CHECK(freekv::testing::conforms<freekv::hard_kv_pairs>(definition, policy) == std::vector<std::string>{});
  }
}
