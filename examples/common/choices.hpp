// What programs choose at run time: the policies by name, and the variants built from them. A new policy
// joins the list of its kind; a new variant joins `variants`.
#pragma once

#include <array>
#include <freekv/freekv.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace freekv::examples {

using any_summary = any_of<min_max, chunk_means<dynamic>, key_subspace<dynamic, dynamic>>;
using any_correction = any_of<cosine_drift, always, never>;
using any_plan = any_of<complete_first<dynamic>, complete_first<dynamic, layer_kind::window>,
                        every_layer<layer_kind::complete>>;
using any_route = any_of<resident, in_place>;

/// What a pipeline does, by names; the defaults are FreeKV as published.
struct method {
  std::string summary = "min_max";
  int chunk = 8;  ///< of chunk_means, tokens
  int rank = 24;  ///< of key_subspace
  int bits = 3;
  std::string correction = "cosine_drift";
  float tau = 0.9f;
  std::string plan = "retrieval";  ///< or "complete", "window"
};

/// A published method by its name.
struct named_variant {
  std::string_view name;
  method does;
};

inline const std::vector<named_variant>& variants() {
  static const std::vector<named_variant> all{
      {"full", {.plan = "complete"}},
      {"streaming_llm", {.plan = "window"}},
      {"quest", {.correction = "always"}},
      {"freekv", {}},
      {"freekv_chunk_means", {.summary = "chunk_means"}},
      {"freekv_key_subspace", {.summary = "key_subspace"}},
  };
  return all;
}

/// The names, for help and messages: "full, streaming_llm, ...".
inline std::string variant_names() {
  std::string names;
  for (const auto& variant : variants()) names += (names.empty() ? "" : ", ") + std::string(variant.name);
  return names;
}

inline constexpr std::array summary_names{"min_max", "chunk_means", "key_subspace"};
inline constexpr std::array correction_names{"cosine_drift", "always", "never"};

/// head_dims that programs are compiled for: the CMake list FREEKV_HEAD_DIMS.
#ifndef FREEKV_HEAD_DIMS
#define FREEKV_HEAD_DIMS 64, 80, 96, 128, 192, 256
#endif
inline constexpr std::array head_dims{FREEKV_HEAD_DIMS};

}  // namespace freekv::examples
