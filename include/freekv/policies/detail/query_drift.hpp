// Drift of a KV head's queries: how far they have turned since the queries that made its selection.
#pragma once

#include <cmath>
#include <cstdint>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/shape.hpp>
#include <freekv/core/team.hpp>

namespace freekv {

/// Pooling of the cosines of a group's query heads with their previous queries.
enum class drift_pool : std::uint8_t { mean, min, max };

namespace detail {

/// The pooled cosine of a group. `defined` is false where a norm or a product of two is zero or not finite in
/// float32: then nothing can be said and the head counts as drifted.
struct query_drift {
  float cosine = 0.0f;
  bool defined = true;
};

/// Drift of the queries of one group from `before` to `now`, as a pooled cosine. (FreeKV section 3.3,
/// query-based identification)
template <team T>
FREEKV_HD query_drift drift_of(T team, const group_query& now, const group_query& before,
                               drift_pool pool = drift_pool::mean) {
  const auto usable = [](float x) { return x > 0.0f && x < infinity; };
  query_drift drift;
  for (int g = 0; g < now.group; ++g) {
    typename T::pack product(0.0f), squares(0.0f), squares_before(0.0f);
    for (int i = 0; i < now.head_dim; i += T::width) {
      const auto q = team.load(now.head(g) + i), p = team.load(before.head(g) + i);
      product = product + q * p;
      squares = squares + q * q;
      squares_before = squares_before + p * p;
    }
    const float norms = ::sqrtf(team.sum(squares)) * ::sqrtf(team.sum(squares_before));
    if (!usable(norms)) drift.defined = false;
    const float cosine = team.sum(product) / norms;
    if (pool == drift_pool::mean)
      drift.cosine += cosine;
    else if (g == 0 || (pool == drift_pool::min ? cosine < drift.cosine : cosine > drift.cosine))
      drift.cosine = cosine;
  }
  if (pool == drift_pool::mean) drift.cosine /= static_cast<float>(now.group);
  return drift;
}

}  // namespace detail
}  // namespace freekv
