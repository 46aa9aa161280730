#include "arguments.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "command_line.hpp"
#include "job.hpp"

namespace freekv::examples {

namespace {

void require(bool holds, const std::string& sentence) {
  if (!holds) throw choice_error(sentence);
}

void add_options(CLI::App& app, arguments& a) {
  app.option_defaults()->always_capture_default();
  app.add_option("--model", a.model, "GGUF file")->required();
  app.add_option("--text", a.text, "Text to decode")->required();
  app.add_option(
         "--needle-text", a.needle_text,
         "Text that facts are hidden in; each text lends the other what is learnt from its keys, as \"other "
         "text's basis\" and \"other text's codebooks\"")
      ->required();
  app.add_option(
      "--calibration", a.calibration,
      "Text with numbers and code, the second half of what is learnt from for \"other text's\"; '': none");
  app.add_option("--cache", a.cache, "Folder for what llama.cpp computes once; '' keeps nothing")->required();
  app.add_option("--out", a.out, "Folder for results.jsonl and table.txt")->required();
  app.add_option("--prompt", a.prompt, "Tokens of the prompt");
  app.add_option("--steps", a.steps, "Tokens decoded after it, teacher-forced");
  app.add_option(
      "--more-texts", a.more_texts,
      "Texts that the sections quality, budgets and taus decode as well, each after a prompt of its own: "
      "tables are of all");
  app.add_option("--budget", a.common.budget, "Tokens a head attends to: sink, window and selected pages");
  app.add_option("--page", a.common.page, "Tokens in a page");
  app.add_option("--sink", a.common.sink, "Sink tokens");
  app.add_option("--window", a.common.window, "Window tokens");
  app.add_option("--tau", a.tau, "Correction threshold of cosine_drift");
  app.add_option("--complete-layers", a.common.complete_layers,
                 "Leading layers that keep everything, in all methods");
  app.add_option("--variant", a.only,
                 "Only these rows (and full), by name, also those of --full; several allowed");
  app.add_option("--codec", a.codecs,
                 "Rows of freekv_key_codes whose store keeps complete pages so: " + names_of(codecs) +
                     "; several allowed");
  app.add_option(
      "--correction", a.corrections,
      "Rows of freekv_key_codes, and of others by key_codes that --variant names, corrected so: " +
          names_of(corrections) +
          ", with =VALUE for its tau, delta, epsilon or steps, and of verified_share =VALUE,SAMPLES; "
          "several allowed");
  app.add_option("--epsilon", a.epsilons,
                 "Shares of full attention: the section quality says how often heads miss more");
  app.add_option(
      "--true-mass", a.true_mass,
      "Rows that select before each attention by the true mass of pages, and of units of 4 tokens, "
      "from the keys themselves, with so many pages more than --budget: what summaries only "
      "estimate; the section quality compares all others with them; several allowed");
  app.add_option("--codes", a.codes, "Bytes a token of key_codes, in all rows that have it");
  app.add_option(
      "--head-list", a.head_lists,
      "What each head keeps, for razor_attention, razor_attention_compensated and duo_attention: lines of "
      "layer, head and kind (retrieval, complete, window); VARIANT=FILE for one of them. compress_kv=FILE: "
      "which query heads choose for their layer, lines of layer and query head; without it all do");
  app.add_option(
      "--by-layer", a.by_layer,
      "Budgets and thresholds of each layer, lines of layer, selected tokens, tau and delta, - for the "
      "common one, as --section by_layer learns them: each row that retrieves has one beside it with these");
  app.add_option("--basis-tokens", a.basis_tokens,
                 "Tokens, at most, that the basis and codebooks for the other text are learnt from");
  app.add_option("--needle-tokens", a.needle_tokens,
                 "Lengths of the texts that facts are hidden in; 0: none");
  app.add_option("--needle-budgets", a.needle_budgets, "Budgets for finding them");
  app.add_option("--threads", a.common.threads, "Threads, of llama.cpp and of FreeKV alike");
  app.add_flag("--overlap", a.common.overlap, "Speculate on one more thread, beside llama.cpp's");
  app.add_option("--rounds", a.rounds, "Rounds of the speed measurement; 0: none");
  app.add_option("--timed-steps", a.timed_steps, "Tokens a round");
  app.add_option(
      "--pair-seconds", a.pair_seconds,
      "Seconds, at most, for pairs of blocks timed one beside the other, until the ratios of speeds "
      "are known to 5 % either way; 0: none");
  app.add_option("--generate", a.generate,
                 "Tokens that every method generates on its own after the prompt; 0: none");
  app.add_option(
      "--own-continuation", a.own_continuation,
      "Tokens that full attention generates after the prompt, greedily, and all methods are then given "
      "one by one: their loss by position, where texts that differ cannot be compared; 0: none");
  app.add_option("--temperature", a.sampled.temperature,
                 "Of sampling them, and --samples; 0: the most likely token always");
  app.add_option(
      "--top-p", a.sampled.top_p,
      "Sampling is among the fewest and most likely tokens that have this share of the probability");
  app.add_option("--samples", a.samples,
                 "Answers that every method samples to a question of --tasks: avg@N and pass@N say how many "
                 "are right; 0: "
                 "one, of the most likely tokens");
  app.add_flag("--chat", a.chats, "Prompts of --tasks are messages in the model's chat template");
  app.add_option("--seed", a.sampled.seed,
                 "Of sampling them, and of --draft's wrong guesses, the same for every method");
  app.add_option("--batch", a.batch,
                 "Texts, parts of --text, that every method decodes together and one at a time; 0: none");
  app.add_option(
      "--draft", a.draft,
      "Tokens that every method decodes in one step, the next one and guesses of those behind it, of which "
      "what follows a wrong one is taken back; 0: none");
  app.add_option(
      "--tasks", a.tasks,
      "Questions, one JSON object a line: \"prompt\" with \"choices\" and \"correct\" (an index), or "
      "with \"answer\"; the cache keeps every prompt");
  app.add_flag("--full", a.full,
               "The deep run, most of an hour: more variants, sweeps of length, budget and correction "
               "threshold, and the frontier");
  app.add_option("--lengths", a.lengths, "Tokens of context that --full sweeps");
  app.add_option("--budgets", a.budgets, "Budgets that --full sweeps");
  app.add_option("--taus", a.taus, "Correction thresholds that --full sweeps");
  app.add_option("--deep-steps", a.deep_steps, "Tokens decoded for each of these");
  app.add_option("--frontier-summary", a.frontier_summary,
                 "Summary whose corrections the section frontier compares");
  app.add_option("--section", a.sections, "Only these parts: " + section_names() + "; several allowed");
  app.add_option("--commit", a.commit, "Noted in the results");
  for (const char* option :
       {"--model", "--text", "--needle-text", "--calibration", "--cache", "--out", "--commit"})
    app.get_option(option)->take_last();  // examples/run.sh gives defaults before what a person gives
}

void choose_sections(arguments& a) {
  if (a.sections.empty()) {
    if (!a.needle_tokens.empty()) a.sections.push_back("needles");
    a.sections.push_back("quality");
    if (a.full) a.sections.insert(a.sections.end(), {"budgets", "taus"});
    if (a.rounds > 0) a.sections.push_back("speed");
    if (a.full) a.sections.push_back("lengths");
    if (a.full && !a.needle_tokens.empty()) a.sections.push_back("frontier");
    if (a.own_continuation > 0) a.sections.push_back("continuation");
    if (a.generate > 0) a.sections.push_back("generate");
    if (a.batch > 0) a.sections.push_back("batch");
    if (a.draft > 0) a.sections.push_back("draft");
    if (!a.tasks.empty()) a.sections.push_back("tasks");
  }
  for (const auto& name : a.sections)
    require(find_section(name) != nullptr,
            "--section " + name + " is unknown; choose among: " + section_names());
  require(!a.does("continuation") || a.own_continuation > 0,
          "--section continuation needs --own-continuation, the number of tokens");
  require(!a.does("generate") || a.generate > 0, "--section generate needs --generate, the number of tokens");
  require(!a.does("batch") || a.batch > 0, "--section batch needs --batch, the number of texts");
  require(!a.does("draft") || a.draft > 0, "--section draft needs --draft, the number of tokens a step");
  require(!a.does("tasks") || !a.tasks.empty(), "--section tasks needs --tasks, a file of questions");
  require(!a.does("needles") || !a.needle_tokens.empty() || a.full,
          "--section needles needs --needle-tokens above 0");
  require(!a.does("frontier") || !a.needle_tokens.empty(),
          "--section frontier needs --needle-tokens above 0");
  find_by_name("--frontier-summary", summaries, a.frontier_summary);
  require(
      a.frontier_summary != key_signatures<>::name,
      "--frontier-summary key_signatures samples tokens, and has no corrections to compare; choose another");
  require(!a.does("queries") || a.steps > 1,
          "--section queries compares successive steps; give --steps of at least 2");
  const bool times = a.does("speed") || a.does("lengths") || a.does("stages");
  require(!times || a.rounds > 0, "timing needs --rounds of at least 1");
}

void check_budgets(const arguments& a) {
  std::vector<int> budgets{a.common.budget};
  if (a.does("needles")) budgets.insert(budgets.end(), a.needle_budgets.begin(), a.needle_budgets.end());
  if (a.does("frontier")) budgets.push_back(a.needle_budgets.front());
  if (a.does("budgets")) budgets.insert(budgets.end(), a.budgets.begin(), a.budgets.end());
  for (const int budget : budgets) {
    const int selected = budget - a.common.sink - a.common.window;
    require(selected >= a.common.page && selected % a.common.page == 0,
            "a budget of " + std::to_string(budget) + " tokens leaves " + std::to_string(selected) +
                " for selected pages of " + std::to_string(a.common.page) +
                " after sink and window; give a budget that leaves one or more whole pages");
  }
}

}  // namespace

bool arguments::does(const std::string& section) const {
  return std::find(sections.begin(), sections.end(), section) != sections.end();
}

arguments parse_arguments(int argc, char** argv) {
  arguments a;
  CLI::App app(
      "Decodes a text with full attention, a sliding window and FreeKV's retrieval in llama.cpp and compares "
      "them.",
      "freekv-compare");
  add_options(app, a);
  if (!parsed(app, argc, argv)) std::exit(0);
  require(a.prompt >= 1 && a.steps >= 1 && a.deep_steps >= 1,
          "--prompt, --steps and --deep-steps are at least 1");
  constexpr int most_tokens = 1 << 24;
  require(std::max({a.prompt, a.steps, a.deep_steps, a.generate, a.own_continuation}) <= most_tokens,
          "--prompt, --steps and other numbers of tokens are at most " + std::to_string(most_tokens));
  require(a.basis_tokens >= 2, "--basis-tokens is at least 2");
  require(a.common.complete_layers >= 0, "--complete-layers is at least 0");
  require(a.rounds >= 0 && a.timed_steps >= 1, "--rounds is at least 0 and --timed-steps at least 1");
  require(a.pair_seconds >= 0, "--pair-seconds is at least 0");
  for (const int pages : a.true_mass)
    require(pages >= 0, "--true-mass is a number of pages, at least 0, not " + std::to_string(pages));
  require(a.codes >= 1, "--codes is at least 1 byte a token");
  require(a.generate >= 0, "--generate is at least 0");
  require(a.own_continuation == 0 || a.own_continuation >= 4,
          "--own-continuation is 0, or at least 4 tokens, which are told apart by position");
  const auto most = static_cast<int>(llama_max_parallel_sequences());
  require(a.batch == 0 || (a.batch >= 2 && a.batch <= most),
          "--batch is 0, or from 2 to " + std::to_string(most) +
              " texts, which are the most that llama.cpp takes");
  require(a.draft == 0 || (a.draft >= 2 && a.draft <= a.steps),
          "--draft is 0, or at least 2 tokens and no more than --steps");
  const double temperature = a.sampled.temperature, top_p = a.sampled.top_p;
  require(temperature >= 0 && std::isfinite(temperature), "--temperature is 0 or a positive number");
  require(top_p > 0 && top_p <= 1, "--top-p is a share of the probability, above 0 and at most 1");
  require(top_p == 1 || temperature > 0, "--top-p is of sampling; give --temperature above 0 with it");
  require(a.samples >= 0 && a.samples <= 1024, "--samples is from 0 to 1024");
  require(a.samples == 0 || temperature > 0,
          "--samples of " + std::to_string(a.samples) +
              " at temperature 0 would be alike; give --temperature above 0 with it");
  if (a.needle_tokens == std::vector<int>{0}) a.needle_tokens.clear();
  std::vector<int> lengths = a.needle_tokens;
  lengths.insert(lengths.end(), a.lengths.begin(), a.lengths.end());
  for (const int tokens : lengths)
    require(tokens >= 300, std::to_string(tokens) +
                               " tokens, of --needle-tokens or --lengths, leave no text between eight facts; "
                               "give 300 or more");
  for (const double tau : a.taus)
    require(tau >= -1 && tau <= 1, "--taus are cosines, from -1 to 1, not " + std::to_string(tau));
  const common_settings& c = a.common;
  require(c.page >= 8 && c.page <= 256 && c.page % 8 == 0, "--page is a multiple of 8 from 8 to 256");
  require(c.sink >= 0 && c.sink % c.page == 0 && c.window >= c.page && c.window % c.page == 0,
          "--sink and --window are multiples of the page of " + std::to_string(c.page) +
              " tokens, the window at least one");
  for (const auto& name : a.codecs) find_by_name("--codec", codecs, name);
  choose_sections(a);
  check_budgets(a);
  if (a.does("tasks")) a.questions = read_tasks(a.tasks);
  return a;
}

}  // namespace freekv::examples
