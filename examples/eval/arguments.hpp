// The main job's options.
#pragma once

#include <string>
#include <vector>

#include "contender.hpp"
#include "generation.hpp"
#include "tasks.hpp"

namespace freekv::examples {

struct arguments {
  std::string model, text, needle_text, calibration, cache, out, tasks, commit = "unknown";
  int prompt = 4096, steps = 128, basis_tokens = 4096, rounds = 5, timed_steps = 16;
  double pair_seconds = 25;
  int generate = 0, batch = 0, draft = 0, own_continuation = 0;
  sampling sampled{.seed = 1};
  int samples = 0;     ///< answers to a question; 0: one, of the most likely tokens
  bool chats = false;  ///< prompts of tasks are messages in the model's chat template
  std::vector<int> needle_tokens{1024, 4096}, needle_budgets{512, 1024};
  bool full = false;
  std::vector<int> lengths{1024, 2048, 4096, 7168}, budgets{256, 384, 512, 768, 1024};
  std::vector<double> taus{0.7, 0.8, 0.9, 0.95};
  int deep_steps = 64;
  std::vector<std::string> only;
  std::vector<std::string> codecs;
  std::vector<std::string> corrections;  ///< NAME, NAME=VALUE or NAME=VALUE,SAMPLES
  std::vector<double> epsilons;
  std::vector<int> true_mass;  ///< rows that select by it, by pages more than the budget
  std::vector<std::string> more_texts;
  std::vector<std::string> head_lists;  ///< FILE, or VARIANT=FILE
  std::string by_layer;                 ///< file; empty: no rows by layer
  int codes = 6;                        ///< bytes a token of key_codes
  std::vector<std::string> sections;    ///< by name; those that the other options ask for unless given
  float tau = 0.9f;
  std::string frontier_summary = "key_subspace";
  common_settings common;
  std::vector<task> questions;  ///< those of the file of tasks

  bool does(const std::string& section) const;
};

/// Reads the file of tasks as well, so that its faults are known at once. Exits after --help. Throws
/// choice_error and file_error.
arguments parse_arguments(int argc, char** argv);

}  // namespace freekv::examples
