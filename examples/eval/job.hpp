// The main job: what its sections share, and the sections themselves. Each measures, prints a table and
// writes JSON lines.
#pragma once

#include <fstream>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "arguments.hpp"
#include "report.hpp"

namespace freekv::examples {

class job {
 public:
  /// Loads the model and checks that llama.cpp computes it rightly here. Throws engine_error, choice_error,
  /// file_error.
  explicit job(const arguments& wanted);

  const arguments& options() const { return options_; }
  const examples::model& model() const { return model_; }
  const prompt_cache::place& place() const { return place_; }
  /// The rows of the tables; the first is full attention.
  std::span<const contender> contenders() const { return contenders_; }
  /// The row of quest, which others are paired with; none where it is not compared.
  std::optional<std::size_t> quest() const;
  /// Those that --full sweeps.
  std::span<const contender> principal() const { return principal_; }

  /// The first tokens of --text: all that the sections chosen need.
  std::span<const llama_token> text() const { return text_; }
  /// --prompt tokens of them, prepared at the first call.
  const prepared_prompt& prompt();
  /// What follows these: --steps tokens, and one more to predict.
  std::span<const llama_token> after_prompt() const { return after_prompt(text()); }
  /// The same of another text.
  std::span<const llama_token> after_prompt(std::span<const llama_token> text) const;

  /// `from`: the file that the tokens are from, or empty; another lends what is learnt of another text's
  /// keys: half of it --needle-text, or --text, and half --calibration. `timed`: llama.cpp itself will go on
  /// from these tokens. Throws choice_error where there is no other text.
  prepared_prompt prepare(std::span<const llama_token> tokens, const std::string& from, bool timed = false);

  json_lines& lines() { return lines_; }
  progress_function progress() { return std::ref(progress_); }
  /// Prints, and writes to table.txt.part.
  void say(const std::string& text);
  /// A figure for the table at the end, which has full attention, FreeKV as published and what is
  /// recommended; of other rows it is left out. The last one of a column stands.
  void keep_in_short(std::string_view row, const std::string& column, const std::string& figure);
  /// Says the table at the end, and moves results.jsonl and table.txt to their places.
  void finish();

 private:
  /// What the contenders whose source this is need.
  bool asks_for(basis_source source) const;
  learnt_keys learn(const prompt_cache& keys, basis_source source);
  std::vector<std::string> lenders_beside(const std::string& from) const;
  const learnt_keys& learnt_beside(const std::string& from);

  arguments options_;
  prompt_cache::place place_;
  examples::model model_;
  std::vector<llama_token> text_;
  std::vector<contender> contenders_, principal_;
  json_lines lines_;
  std::ofstream table_;
  std::vector<std::vector<std::string>> in_short_{{"in short"}};
  progress_line progress_;
  std::map<std::vector<std::string>, learnt_keys> learnt_;  // by those who lend
  std::optional<prepared_prompt> prompt_;
};

/// Facts hidden in a text and asked for at its end. Also by depth and length with --full.
void compare_needles(job& j);
/// Teacher-forced decoding: perplexity, attention mass kept, what is moved. By layer and head with --full.
void compare_quality(job& j);
/// KL and mass against the budget, on --text and --more-texts.
void compare_budgets(job& j);
/// Corrections and pages changed against the correction threshold, by layer.
void compare_taus(job& j);
/// Perplexity, divergence and mass of pooling rules and summaries.
void compare_poolings(job& j);
/// Divergence and mass by whose queries heads select: this step's, those of the step or the layer before.
void compare_sources(job& j);
/// Cosines of successive steps' queries, by layer and head.
void compare_queries(job& j);
/// Decoding speed, in turns with llama.cpp itself.
void compare_speed(job& j);
/// The same against the context's length.
void compare_lengths(job& j);
/// How long each stage of a decode step takes.
void compare_stages(job& j);
/// Loss of what full attention goes on with on its own, by position.
void compare_continuation(job& j);
/// Texts that every contender writes on its own.
void compare_generated(job& j);
/// Texts decoded together and one at a time.
void compare_batch(job& j);
/// Several tokens a step, of which some are taken back, beside one a step.
void compare_drafts(job& j);
/// Questions from a file.
void compare_tasks(job& j);
/// Learns from --text what --by-layer reads: a budget for each layer, of which the mean is the common one.
void learn_by_layer(job& j);
/// What HARD-KV's paper says of budgets by head, of log-sum-exp and of temperatures, on this model.
void compare_hard_kv(job& j);
/// ARKV beside its baseline without a tier, and how much of its cache is coded.
void compare_arkv(job& j);

struct section {
  const char* name;
  void (*run)(job&);
  double usual_share = 0;  ///< of the time of the job without options; 0: not in it
};
/// In the order in which they run.
std::span<const section> sections();
/// nullptr for none.
const section* find_section(const std::string& name);
std::string section_names();

}  // namespace freekv::examples
