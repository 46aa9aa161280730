// The policies of the programs' lists, for tests of what holds for all of them.
#pragma once

#include <string>
#include <vector>

#include "choices.hpp"

namespace tests {

using freekv::examples::method_spec;

/// Every policy once with the others as published, every summary in every format.
inline std::vector<method_spec> every_policy() {
  using namespace freekv::examples;
  std::vector<method_spec> all;
  for (const auto& one : summaries)
    for (const auto& format : formats) {
      method_spec m{
          .summary = std::string(one.name), .format = std::string(format.name), .rank = 12, .times = 2};
      const bool own_format = m.summary.starts_with("key_") || m.summary == "coarse_to_fine";
      if (own_format && m.format != "standard") continue;
      m.bits = m.summary == "key_sketch" ? 2 : 3;
      m.tables = 7;
      all.push_back(m);
    }
  for (const auto& one : poolings) all.push_back({.pooling = std::string(one.name)});
  for (const auto& one : selections)
    if (one.name != freekv::colliding::name)
      all.push_back({.selection = std::string(one.name), .top_p = 0.6f});
  all.push_back({.summary = "key_signatures",
                 .rank = 12,
                 .bits = 2,
                 .tables = 6,
                 .unit = 1,
                 .pooling = "max_score",
                 .selection = "colliding",
                 .rows = "per_query_head",
                 .correction = "always"});
  for (const auto& one : selection_scopes)
    for (const char* correction : {"cosine_drift", "always", "never"})
      all.push_back({.rows = std::string(one.name), .correction = correction});
  all.push_back({.rows = "per_layer", .correction = "mass_deficit", .partial = true});
  all.push_back({.pooling = "max_score", .rows = "per_layer"});
  for (const auto& one : corrections)
    for (const bool partial : {false, true})
      if (one.name == freekv::missing_share::name || one.name == freekv::verified_share::name)
        all.push_back({.summary = "key_subspace",
                       .rank = 12,
                       .bits = 4,
                       .correction = std::string(one.name),
                       .partial = partial});
      else
        all.push_back({.correction = std::string(one.name), .partial = partial, .every = 3});
  for (const int unit : {1, 4, 8}) all.push_back({.unit = unit, .spare = unit});
  all.push_back({.summary = "key_subspace", .rank = 12, .bits = 32, .unit = 2, .rows = "per_query_head"});
  for (const int unit : {0, 4}) all.push_back({.unit = unit, .pinning = "pin_outliers", .pinned = 3});
  for (const auto& pool : drift_pools) all.push_back({.drift_pool = std::string(pool.name)});
  for (const auto& one : residencies)
    for (const int spare : {0, 1, 5}) all.push_back({.residency = std::string(one.name), .spare = spare});
  for (const auto& one : codecs)  // but those that take lists, which have tests of their own
    if (const method_spec m{.codec = std::string(one.name)}; !m.needs_factors() && !m.needs_channels())
      all.push_back(m);
  for (const char* summary : {"key_subspace", "key_codes"})
    for (const auto& one : completions)
      for (const int unit : {0, 8})
        all.push_back({.summary = summary,
                       .rank = 12,
                       .bits = 4,
                       .unit = unit,
                       .correction = "mass_deficit",
                       .completion = std::string(one.name),
                       .codec = unit == 0 ? "int8_token" : "identity"});
  return all;
}

inline std::string words(const method_spec& m) {
  return m.summary + " " + m.format + ", " + m.pooling + ", " + m.selection + ", " + m.rows + ", " +
         m.correction + (m.partial ? " partial" : "") + " " + m.drift_pool + ", " + m.residency + " " +
         std::to_string(m.spare) + ", unit " + std::to_string(m.unit) + ", " + m.pinning + ", " + m.codec +
         ", " + m.completion;
}

}  // namespace tests
