// Settings of the tiny pipeline drawn at random, and a pipeline of one sequence.
#pragma once

#include <vector>

#include "steps.hpp"

namespace tests {

inline constexpr int head_dim = tiny_pipeline::head_dim;

/// Basis for key_subspace<8, 3> of tiny_settings.
inline const std::vector<float>& basis_data() {
  static const std::vector<float> data = [] {
    dice d(99);
    std::vector<float> all;
    for (int layer = 0; layer < 3; ++layer) {
      const auto of_layer = random_basis(d, 2, 8, head_dim);
      all.insert(all.end(), of_layer.begin(), of_layer.end());
    }
    return all;
  }();
  return data;
}

inline tiny_pipeline::settings random_settings(dice& d) {
  auto s = tiny_settings();
  switch (d.below(3)) {
    case 0:
      s.summary = freekv::chunk_means<4>{};
      break;
    case 1:
      s.summary = freekv::key_subspace<8, 3>{.basis = {basis_data().data(), 3, 2, 8, head_dim}};
      break;
    default:
      break;
  }
  const bool codes = freekv::resolve(
      s.summary, []<class S>(const S&) { return std::is_same_v<S, freekv::key_subspace<8, 3>>; });
  if (d.below(3) == 0 && !codes) {  // which are kept for 8 tokens
    s.unit = {{4}};
    s.budget.selected_units = 3;
  }
  switch (d.below(3)) {
    case 0:
      s.correction = freekv::always{};
      break;
    case 1:
      s.correction = freekv::never{};
      break;
    default:
      break;
  }
  if (d.below(3) == 0) s.scope = freekv::per_query_head{};
  if (d.below(2) == 0) s.route = freekv::in_place{};
  if (d.below(5) == 0) s.plan = freekv::complete_first<freekv::dynamic, freekv::layer_kind::window>{1};
  if (d.below(3) == 0) s.capacity.store_file = {.path = "/tmp", .direct = d.below(2) == 0};
  return s;
}

/// A pipeline with one sequence.
struct fresh {
  explicit fresh(const tiny_pipeline::settings& s) : pipeline(s, backend), id(pipeline.open()) {}
  freekv::host_backend backend{};
  tiny_pipeline pipeline;
  freekv::sequence_id id;
};

}  // namespace tests
