// How far a KV head's queries have turned since the queries that made its selection.
#pragma once

#include <cmath>
#include <cstdint>
#include <freekv/core/team.hpp>
#include <freekv/functors/log_sum_exp.hpp>

namespace freekv {

/// The cosine of each query head with its previous query, averaged over the group. `defined` is false where a
/// norm or a product of two is zero or not finite in float32: then nothing can be said and the head counts as
/// drifted.
struct query_drift {
  float cosine = 0.0f;
  bool defined = true;
};

/// `query`, `previous`: (group, head_dim). (FreeKV section 3.3, query-based identification)
template <team T>
FREEKV_HD query_drift drift_of(T team, const float* query, const float* previous, int group, int head_dim) {
  const auto usable = [](float x) { return x > 0.0f && x < infinity; };
  query_drift drift;
  for (int g = 0; g < group; ++g) {
    typename T::pack product(0.0f), now(0.0f), before(0.0f);
    for (int i = 0; i < head_dim; i += T::width) {
      const auto q = team.load(query + g * head_dim + i), p = team.load(previous + g * head_dim + i);
      product = product + q * p;
      now = now + q * q;
      before = before + p * p;
    }
    const float norm = ::sqrtf(team.sum(now)), previous_norm = ::sqrtf(team.sum(before));
    if (!usable(norm) || !usable(previous_norm) || !usable(norm * previous_norm)) drift.defined = false;
    drift.cosine += team.sum(product) / (norm * previous_norm);
  }
  drift.cosine /= static_cast<float>(group);
  return drift;
}

}  // namespace freekv
