// Random rows of scores, and groups of queries, whose pooled ones are to be a pooling's definition's.
#pragma once

#include <cmath>
#include <freekv/core/size.hpp>
#include <freekv/policies/pooling.hpp>
#include <freekv/testing/detail/random_cases.hpp>
#include <limits>
#include <string>
#include <vector>

namespace freekv::testing::detail {

/// Scores of a group pooled by a team: candidates in packs, the last one with what is behind them.
template <team T, class Policy>
std::vector<float> pool_by(T team, const Policy& policy, const std::vector<doubles>& scores) {
  const int candidates = static_cast<int>(scores[0].size()), group = static_cast<int>(scores.size());
  const int stride = (candidates + T::width - 1) / T::width * T::width;
  std::vector<float> of_heads(to_size(group * stride)), log_sums, pooled(to_size(stride));
  for (int g = 0; g < group; ++g) {
    double most = -std::numeric_limits<double>::infinity(), sum = 0.0;
    for (const double score : scores[to_size(g)]) most = std::max(most, score);
    for (const double score : scores[to_size(g)]) sum += std::isfinite(most) ? std::exp(score - most) : 0.0;
    log_sums.push_back(sum > 0.0 ? static_cast<float>(most + std::log(sum)) : -infinity);
    for (int j = 0; j < candidates; ++j)
      of_heads[to_size(g * stride + j)] = static_cast<float>(scores[to_size(g)][to_size(j)]);
  }
  const row_scores row{of_heads.data(), stride, log_sums.data(), group};
  for (int j = 0; j < stride; j += T::width) team.store(pooled.data() + j, policy.pool(team, row, j));
  pooled.resize(to_size(candidates));
  return pooled;
}

template <team T, class Policy>
std::vector<float> pool_queries_by(T team, const Policy& policy, const std::vector<doubles>& queries) {
  const std::vector<float> of_heads = narrow(queries);
  std::vector<float> pooled(queries[0].size());
  policy.pool_query(team,
                    {of_heads.data(), static_cast<int>(queries.size()), static_cast<int>(queries[0].size())},
                    pooled.data());
  return pooled;
}

template <class Policy>
void judge_pools(const Policy& policy, const pooling_definition& definition,
                 const conformance_options& options, differences& wrong) {
  random_numbers random(options.seed);
  for (int nth = 0; nth < options.units; ++nth) {
    const int group = random.one_of({1, 2, 3, 4, 5, 7, 8, 16});
    const int width = query_pooling<Policy> ? 8 * random.one_of({1, 2, 8, 10, 16, 32})
                                            : random.one_of({1, 2, 7, 8, 9, 30, 100, 333});
    const float spread = nth % 4 == 0 ? 30.0f : 2.0f;
    std::vector<doubles> of_heads;
    for (int g = 0; g < group; ++g) of_heads.push_back(wide(random.normals<float>(width, spread)));
    if constexpr (!query_pooling<Policy>)  // pages that no head has, as those of NaN; now and then all
      for (int j = 0; j < width; ++j)
        if (nth % 10 == 0 || random.one_of({0, 0, 0, 0, 0, 0, 0, 1}) == 1)
          for (doubles& scores : of_heads) scores[to_size(j)] = -std::numeric_limits<double>::infinity();
    const doubles want = query_pooling<Policy> ? definition.query(of_heads) : definition.scores(of_heads);
    const auto where = [&](const char* on) {
      return std::string(on) + ", group of " + std::to_string(group) + ", " + std::to_string(width) +
             (query_pooling<Policy> ? " numbers" : " candidates");
    };
    on_every_team([&](auto team, const char* on) {
      std::vector<float> got;
      if constexpr (query_pooling<Policy>)
        got = pool_queries_by(team, policy, of_heads);
      else
        got = pool_by(team, policy, of_heads);
      if (want.size() != got.size()) return wrong.add(where(on), ": the definition has ", want.size());
      for (std::size_t j = 0; j < want.size(); ++j) {
        const double pooled = static_cast<double>(got[j]);
        double size = 1.0 + std::fabs(want[j]);
        for (const doubles& of_head : of_heads)
          if (std::isfinite(of_head[j])) size = std::max(size, std::fabs(of_head[j]));
        const double off = std::fabs(pooled - want[j]);
        if (!(pooled == want[j] || (std::isfinite(size) && off <= definition.tolerance * size)))
          wrong.add(where(on), ": number ", j, " is ", pooled, ", of the definition ", want[j]);
      }
    });
  }
}

}  // namespace freekv::testing::detail
