// The command line of freekv-replay.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "choices.hpp"

namespace freekv::examples {

/// Variants that are methods: the others are a page size or a budget, which flags here say directly.
std::vector<named_variant> replayed_variants();

struct replay_options {
  std::string trace;                  ///< file or folder; empty where there are events
  std::optional<std::string> events;  ///< file
  std::optional<int> store_pages, fast_pages;
  std::optional<std::string> out;  ///< file to write, where one is wanted
  std::string variant = "freekv";
  method_spec method{};  ///< the variant's policies, with the flags' instead where there are such
  std::string basis = "prompt";
  std::optional<int> basis_layer;
  std::optional<double> rope_base;
  std::optional<std::string> rope_pairs;
  std::optional<std::string> heads;       ///< file of what each KV head keeps
  std::optional<std::string> by_layer;    ///< file of layers' own budgets and thresholds
  int page = 32, sink = 64, window = 64;  ///< tokens
  int k = 8;                              ///< pages
  double tau = 0.9, top_p = 0.95, bonus = 0.693147, delta = 0.2, epsilon = 0.1, pruned = 0.4, thin = 1;
  double scale = 0.0;                     ///< 0: the trace's, or 1 / sqrt(head_dim)
  double selection_scale = 0.0;           ///< of scores that units are selected by; 0: `scale`
  double soft_cap = 0.0;                  ///< of attention's scores; 0: none
  std::optional<int> sliding_window;      ///< tokens that the model's layer attends to; none: all
  std::optional<std::string> store_file;  ///< file or folder; none: the store is in memory
  std::string backend = "host", route = "resident", layout = "nhd", dtype = "stored";
  int threads = 1;
};

inline constexpr named_value<rotary_pairs> rope_pairs[] = {{"halves", rotary_pairs::halves},
                                                           {"neighbours", rotary_pairs::neighbours}};

/// What the command line asks for; nothing where it asked for help, which is then on stdout. Throws
/// choice_error, one sentence.
std::optional<replay_options> parse_replay_options(int argc, char** argv);

}  // namespace freekv::examples
