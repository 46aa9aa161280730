// A random page, summarised and scored by a policy through the algorithms.
#pragma once

#include <algorithm>
#include <freekv/algorithms/score_unit.hpp>
#include <freekv/algorithms/summarise_unit.hpp>
#include <freekv/policies/key_sketch.hpp>
#include <freekv/policies/key_subspace.hpp>
#include <vector>

#include "../catch.hpp"
#include "rows.hpp"

namespace tests {

using any_subspace = freekv::key_subspace<freekv::dynamic, freekv::dynamic>;

/// One page of one KV head and the queries of its group.
struct page_case {
  int d = 24, p = 8, group = 1;
  float scale = 0.2f;
  std::vector<float> keys{};     // (p, d), as stored
  std::vector<float> queries{};  // (group, d)
  std::vector<float> basis{};    // mean and rows, for key_subspace
  int rank = 0;

  freekv::kv_extent page() const { return {p, d}; }
  any_subspace subspace(int bits) const { return {{rank}, {bits}, {basis.data(), 1, 1, rank, d}}; }
};

inline std::ostream& operator<<(std::ostream& out, const page_case& c) {
  return out << "d " << c.d << ", page " << c.p << ", group " << c.group << ", rank " << c.rank;
}

/// Keys near a common direction, as pages have them.
template <class E>
page_case make_page(dice& d) {
  page_case c;
  c.d = d.one_of({8, 24, 64, 72, 80, 96, 128, 192, 256});
  c.p = d.one_of({8, 16, 24, 32, 64, 128});
  c.group = d.one_of({1, 2, 3, 4, 5, 7, 8, 16});
  c.scale = d.one_of({1.0f / std::sqrt(static_cast<float>(c.d)), 0.05f, 0.5f});
  const auto centre = normals(d, count(c.d));
  for (int t = 0; t < c.p; ++t)
    for (int i = 0; i < c.d; ++i) c.keys.push_back(centre[count(i)] + 0.5f * d.normal());
  c.keys = values_of(stored_as<E>(c.keys));
  c.queries = normals(d, count(c.group * c.d));
  c.rank = d.between(1, std::min(32, c.d));
  c.basis = random_basis(d, 1, c.rank, c.d);
  return c;
}

struct scored {
  std::vector<std::byte> stored;
  std::vector<float> numbers;  // decoded
  std::vector<float> scores;   // (group)
};

/// Through the library, keys in rows `stride` elements apart.
template <class E, class Policy>
scored score_by(executor on, const Policy& whole, const page_case& c, int stride) {
  const auto policy = freekv::summary_at(whole, 0, 0);
  const auto page = c.page();
  const auto keys = stored_as<E>(c.keys);
  std::vector<E> rows(count(c.p * stride),
                      freekv::from_float<E>(quiet_nan));  // between rows lies nothing of ours
  for (int t = 0; t < c.p; ++t) std::copy_n(keys.begin() + t * c.d, c.d, rows.begin() + t * stride);
  const int width = policy.width(page), query_width = freekv::summary_query_width(policy, c.d);
  std::vector<float> key_scratch(c.keys.size()), numbers(count(width)),
      prepared(count(freekv::prepared_queries::floats(c.group, query_width)));
  const std::size_t bytes = freekv::summary_bytes<E>(policy, page);
  constexpr std::byte guard{0xab};
  scored result{std::vector<std::byte>(bytes + 64, guard), std::vector<float>(count(width), -1.0f),
                std::vector<float>(count(c.group))};
  std::vector<float> spread(count(c.group * 3), -5.0f);
  run_on(on, [&](auto team) {
    freekv::detail::summarise_unit<E>(team, policy, freekv::head_slice<const E>{rows.data(), nullptr, stride},
                                      page, {key_scratch.data(), numbers.data()}, result.stored.data());
    const auto queries =
        freekv::prepare_group(team, policy, {c.queries.data(), c.group, c.d}, c.scale, prepared.data());
    freekv::detail::score_unit<E>(team, policy, page, result.stored.data(), queries, result.numbers.data(),
                                  {spread.data() + 1, 3});
    if constexpr (!freekv::scores_stored_bytes<std::remove_const_t<decltype(policy)>>)
      freekv::decode_summary<E>(team, policy, page, result.stored.data(), result.numbers.data());
  });
  CHECK(std::all_of(result.stored.begin() + static_cast<long>(bytes), result.stored.end(),
                    [&](std::byte b) { return b == guard; }));
  result.stored.resize(bytes);
  for (int g = 0; g < c.group; ++g) {
    result.scores[count(g)] = spread[count(3 * g + 1)];
    CHECK(spread[count(3 * g)] == -5.0f);
    CHECK(spread[count(3 * g + 2)] == -5.0f);
  }
  return result;
}

}  // namespace tests
