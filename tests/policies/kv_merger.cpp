// kv_merger, and its definition, which cuts the pairs that are least alike one after the other.
#include <algorithm>
#include <cmath>
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <iterator>
#include <numeric>
#include <string>
#include <vector>

#include "../catch.hpp"

namespace {

using freekv::testing::doubles;

double product(const doubles& a, const doubles& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}
/// Of each token but the last: how alike it and the next are; where one of them is a run of its own -2.
doubles pairs_of(const freekv::kv_merger& policy, const std::vector<int>& tokens,
                 const std::vector<doubles>& keys, const freekv::eviction_moment& at) {
  doubles pairs;
  for (std::size_t i = 0; i + 1 < tokens.size(); ++i) {
    const bool apart = policy.protects(tokens[i], at) || policy.protects(tokens[i + 1], at);
    const double lengths = std::sqrt(product(keys[i], keys[i]) * product(keys[i + 1], keys[i + 1]));
    pairs.push_back(apart ? -2.0 : product(keys[i], keys[i + 1]) / lengths);
  }
  return pairs;
}
/// Cuts the least pair from `first` to `end`, of those alike the first; what is cut is 3.
std::ptrdiff_t cut_least(doubles& pairs, std::ptrdiff_t first, std::ptrdiff_t end) {
  const auto least = std::min_element(pairs.begin() + first, pairs.begin() + end);
  *least = 3.0;
  return least - pairs.begin();
}

}  // namespace

TEST_CASE("kv_merger conforms to its definition", "[conforms]") {
  for (const auto& [window, sink] : {std::pair{3, 2}, std::pair{1, 0}, std::pair{12, 1}}) {
    const freekv::kv_merger policy{.window = window, .sink = sink};
    const freekv::testing::eviction_definition definition{
        .worths =
            [&](const freekv::testing::observed_tokens& held) {
              const std::size_t all = held.tokens.size();
              doubles pairs = pairs_of(policy, held.tokens, held.keys, held.at), attention(all), worths(all);
              for (const auto& row : held.rows)
                for (const doubles& shares : row)
                  for (std::size_t i = 0; i < all; ++i) attention[i] += shares[i];
              for (int runs = 1; runs < held.at.budget; ++runs) cut_least(pairs, 0, std::ssize(pairs));
              auto first = attention.begin();
              for (std::size_t i = 0; i < all; ++i) {
                if (i + 1 < all && pairs[i] < 3.0) continue;
                const auto end = attention.begin() + static_cast<std::ptrdiff_t>(i) + 1;
                worths[static_cast<std::size_t>(std::max_element(first, end) - attention.begin())] = 1.0;
                first = end;
              }
              return worths;
            },
        .fates =
            [&](const std::vector<freekv::testing::parted_tokens>& so_far) {
              const freekv::testing::parted_tokens& of = so_far.back();
              std::vector<int> order(of.tokens.size()), tokens;
              std::iota(order.begin(), order.end(), 0);
              std::sort(order.begin(), order.end(),
                        [&](int a, int b) { return of.tokens[a] < of.tokens[b]; });
              std::vector<doubles> keys;
              std::vector<std::ptrdiff_t> pivots;  // in the order of the text
              for (const int place : order) {
                if (place < of.staying) pivots.push_back(std::ssize(tokens));
                tokens.push_back(of.tokens[place]);
                keys.push_back(of.keys[place]);
              }
              doubles pairs = pairs_of(policy, tokens, keys, of.at);
              std::vector<freekv::merge_fate> fates(tokens.size());
              std::ptrdiff_t first = 0;
              for (int run = 0; run < of.staying; ++run) {
                const std::ptrdiff_t end = run + 1 == of.staying
                                               ? std::ssize(tokens)
                                               : cut_least(pairs, pivots[run], pivots[run + 1]) + 1;
                doubles squares;
                for (std::ptrdiff_t i = first; i < end; ++i) {
                  doubles apart = keys[i];
                  for (std::size_t x = 0; x < apart.size(); ++x) apart[x] -= keys[pivots[run]][x];
                  squares.push_back(product(apart, apart));
                }
                const double mean = std::accumulate(squares.begin(), squares.end(), 0.0) /
                                    static_cast<double>(end - first - 1);
                for (std::ptrdiff_t i = first; i < end; ++i)
                  if (i != pivots[run])
                    fates[order[i]] = {run, mean > 0.0 ? std::exp(-squares[i - first] / (2.0 * mean)) : 1.0};
                first = end;
              }
              return fates;
            },
        .merge_by = freekv::merge_rule::as_many};
    CHECK(freekv::testing::conforms<freekv::kv_merger>(definition, policy) == std::vector<std::string>{});
  }
}
