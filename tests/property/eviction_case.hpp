// Random sequences for methods that forget, and one step of the library beside the oracle's.
#pragma once

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "../agreement.hpp"
#include "../oracle/eviction.hpp"
#include "random_case.hpp"

namespace tests {

inline constexpr oracle_word<oracle::eviction_kind> oracle_evictions[] = {
    {"h2o", oracle::eviction_kind::h2o},
    {"mikv", oracle::eviction_kind::mikv},
    {"q_hitter", oracle::eviction_kind::q_hitter},
    {"tova", oracle::eviction_kind::tova},
    {"snapkv", oracle::eviction_kind::snapkv},
    {"dapq", oracle::eviction_kind::dapq},
    {"epi_cache", oracle::eviction_kind::epi_cache},
    {"pyramid_kv", oracle::eviction_kind::pyramid_kv},
    {"raas", oracle::eviction_kind::raas},
    {"lazy_eviction", oracle::eviction_kind::lazy_eviction},
    {"hard_kv", oracle::eviction_kind::hard_kv},
    {"defensive_kv", oracle::eviction_kind::defensive_kv},
    {"layer_defensive_kv", oracle::eviction_kind::layer_defensive_kv},
    {"compress_kv", oracle::eviction_kind::compress_kv},
    {"cake", oracle::eviction_kind::cake},
    {"r_kv", oracle::eviction_kind::r_kv},
    {"arkv_origin", oracle::eviction_kind::arkv_origin},
    {"arkv", oracle::eviction_kind::arkv},
    {"arkv_split", oracle::eviction_kind::arkv_split},
    {"d2o", oracle::eviction_kind::d2o},
    {"exact_merge", oracle::eviction_kind::exact_merge},
    {"hard_kv_merge", oracle::eviction_kind::hard_kv_merge},
    {"hard_kv_pairs", oracle::eviction_kind::hard_kv_pairs},
    {"kv_merger", oracle::eviction_kind::kv_merger},
    {"trim_kv", oracle::eviction_kind::trim_kv},
    {"given_worths", oracle::eviction_kind::given_worths}};

/// Another number of a policy than the published one. `beta` is pyramid_kv's or d2o's.
inline void take_number(oracle::eviction_settings& s, const std::string& name, double number) {
  const int whole = static_cast<int>(number);
  if (name == "alpha") s.alpha = number;
  if (name == "beta") s.beta = whole, s.ema = number;
  if (name == "gamma") s.gamma = number;
  if (name == "heavy") s.heavy = number;
  if (name == "interval") s.interval = whole;
  if (name == "keeps_prompt") s.keeps_prompt = whole != 0;
  if (name == "kernel") s.kernel = whole;
  if (name == "lambda") s.lambda = number;
  if (name == "p") s.p = number;
  if (name == "recent") s.recent = number;
  if (name == "similar") s.similar = number;
  if (name == "sink") s.sink = whole;
  if (name == "takers") s.takers = whole;
  if (name == "tau1") s.tau1 = number;
  if (name == "tau2") s.tau2 = number;
  if (name == "tau3") s.tau3 = number;
  if (name == "threshold") s.threshold = number;
  if (name == "window") s.window = whole;
}

/// Numbers of a method's policy for a budget, each as published or another.
inline void give_random_numbers(freekv::examples::method_spec& m, int budget, dice& d) {
  auto& numbers = m.eviction_values;
  const auto is = [&](auto... names) { return ((m.eviction == names) || ...); };
  const auto maybe = [&](const char* name, std::initializer_list<double> of) {
    if (d.below(3) != 0) numbers[name] = *(of.begin() + d.below(static_cast<int>(of.size())));
  };
  const bool hard = m.eviction.starts_with("hard_kv"), arkv = m.eviction.starts_with("arkv"),
             cake = m.eviction == "cake";
  const bool pools =
      is("snapkv", "dapq", "pyramid_kv", "compress_kv", "defensive_kv", "layer_defensive_kv", "r_kv");
  if (pools || hard || arkv || cake) {
    maybe("window", {cake ? 2.0 : 1.0, 3, 16, std::min(40.0, budget - 2.0)});
    maybe("kernel", {1, 3, 9});
  }
  if (is("epi_cache")) maybe("window", {1, 5, 40});
  if (is("h2o", "mikv", "d2o")) maybe("recent", {0, 0.25, 0.875});
  if (is("d2o")) maybe("beta", {0, 0.25, 1});
  if (is("pyramid_kv")) maybe("beta", {1, 3, 50});
  if (is("q_hitter")) {
    maybe("recent", {0, 0.125, 0.25});
    maybe("heavy", {0, 0.125, 0.75});
    maybe("alpha", {0, 0.25, 1});
  }
  if (is("raas", "lazy_eviction")) maybe("threshold", {0, 1e-3, 0.02, 0.3});
  if (hard) maybe("p", {0.3, 0.7, 0.99});
  if (is("hard_kv_pairs")) maybe("takers", {1, 3});
  if (hard) maybe("sink", {0, 2, budget - numbers.emplace("window", 32).first->second});
  if (cake || arkv) maybe("gamma", {0, 10, 300});
  if (arkv) maybe("alpha", {0, 0.5, 0.875});
  if (is("cake", "arkv", "arkv_split")) {
    maybe("tau1", {0.5, 1, 3});
    maybe("tau2", {0.5, 1, 3});
  }
  if (is("arkv", "arkv_split")) maybe("tau3", {0.5, 1, 3});
  if (is("r_kv")) {
    maybe("lambda", {0, 0.5, 1});
    maybe("similar", {0, 0.25, 0.9});
  }
  if (is("kv_merger")) {
    maybe("window", {1, 3, 16, budget - 8.0});
    maybe("sink", {0, 2, 7});
  }
  if (is("given_worths")) {
    maybe("recent", {0, 0.5});
    maybe("sink", {0, 1, budget / 4.0});
    if (numbers.count("sink") != 0) numbers["sink"] = std::floor(numbers["sink"]);
  }
}

/// Of one of the layers that forget.
inline oracle::eviction_settings eviction_settings_of(const freekv::examples::pipeline_options& o,
                                                      int layer = 0) {
  oracle::eviction_settings s;
  s.query_heads = o.query_heads;
  s.kv_heads = o.kv_heads;
  s.head_dim = o.head_dim;
  s.budget = o.budget.sink + o.budget.window + o.budget.selected_units * o.page;
  s.scale = o.scale == 0 ? oracle::default_scale(o.head_dim) : static_cast<double>(o.scale);
  s.kind = freekv::examples::find_by_name("eviction", oracle_evictions, o.method.eviction).value;
  s.layer = layer;
  s.layers = o.layers - o.complete_layers;
  if (s.kind == oracle::eviction_kind::pyramid_kv) s.window = 8;
  if (s.kind == oracle::eviction_kind::lazy_eviction) s.window = 64;
  if (o.method.eviction == "raas") s.page = o.page;
  if (s.kind == oracle::eviction_kind::d2o) s.recent = 0.25;
  if (s.kind == oracle::eviction_kind::q_hitter) s.recent = 0.25, s.alpha = 0.5;
  s.element = o.element == data_type::f16    ? oracle::element_kind::f16
              : o.element == data_type::bf16 ? oracle::element_kind::bf16
                                             : oracle::element_kind::f32;
  s.room = o.budget.window;
  s.sink = o.budget.sink;
  s.recent_tokens = o.budget.window;
  if (s.kind == oracle::eviction_kind::given_worths) s.sink = 0, s.recent = 0.25;
  if (s.kind == oracle::eviction_kind::r_kv) s.window = 8;
  if (s.kind == oracle::eviction_kind::compress_kv) s.window = 8, s.kernel = 5;
  for (int head = 0; !o.voters.empty() && head < o.query_heads; ++head)
    if (o.voters.at(static_cast<std::size_t>((o.complete_layers + layer) * o.query_heads + head)) != 0)
      s.voters.push_back(head);
  if (o.method.eviction.starts_with("arkv"))
    s.kernel = 5, s.gamma = 263.81, s.tau1 = 7.774, s.tau2 = 5.407, s.tau3 = 5.528;
  if (o.method.eviction.starts_with("hard_kv") || s.kind == oracle::eviction_kind::kv_merger) s.sink = 1;
  if (o.method.eviction.ends_with("defensive_kv") || s.kind == oracle::eviction_kind::cake) s.kernel = 5;
  for (const auto& [name, number] : o.method.eviction_values) take_number(s, name, number);
  return s;
}

/// Worths as gates may say them: many near 1 and below, some alike, NaN and what is beyond 0 and 1.
inline std::vector<float> random_worths(std::uint64_t seed, int count) {
  dice d(seed + 4711);
  std::vector<float> worths;
  for (int i = 0; i < count; ++i) {
    const float drawn = std::min(1.0f, std::fabs(d.normal()));
    const float odd[] = {0.0f, 1.0f, 1.0f, 0.5f, 0.5f, 1.0f + drawn, -drawn, NAN};
    const int kind = d.below(32);
    worths.push_back(kind < 8 ? odd[kind] : kind < 20 ? 1.0f - 0.05f * drawn * drawn : drawn);
  }
  return worths;
}

/// All rows of a sequence; the first `prompt` are its prompt.
struct eviction_text {
  int prompt = 0, tokens = 0;
  std::vector<float> queries, keys, values, worths;

  eviction_text(const random_case& c, int prompt_tokens, int all) : prompt(prompt_tokens), tokens(all) {
    token_source source(c);
    for (int t = 0; t < all; ++t) {
      source.next();
      queries.insert(queries.end(), source.queries.begin(), source.queries.end());
      keys.insert(keys.end(), source.keys.begin(), source.keys.end());
      values.insert(values.end(), source.values.begin(), source.values.end());
    }
    worths = random_worths(c.seed, all * c.options.kv_heads);
  }
  std::span<const float> rows(const std::vector<float>& of, int first, int count) const {
    const std::size_t width = of.size() / static_cast<std::size_t>(std::max(1, tokens));
    return std::span(of).subspan(static_cast<std::size_t>(first) * width,
                                 static_cast<std::size_t>(count) * width);
  }
};

/// The first `tokens` rows of one, then those of another, whose prompt is as long, as far as it goes.
inline eviction_text spliced(eviction_text beginning, int tokens, const eviction_text& end) {
  const auto from_there_on = [&](std::vector<float>& rows, const std::vector<float>& others) {
    const std::size_t first =
        static_cast<std::size_t>(tokens) * others.size() / static_cast<std::size_t>(std::max(1, end.tokens));
    rows.resize(first);
    rows.insert(rows.end(), others.begin() + static_cast<std::ptrdiff_t>(first), others.end());
  };
  from_there_on(beginning.queries, end.queries);
  from_there_on(beginning.keys, end.keys);
  from_there_on(beginning.values, end.values);
  from_there_on(beginning.worths, end.worths);
  beginning.tokens = end.tokens;
  return beginning;
}

/// What was compared, so that a test can require that it was.
struct eviction_coverage {
  long steps = 0, sets = 0, doubtful = 0, evicted = 0, prompt_rows = 0;
  long other_budgets = 0;  // of prompts, than all have together
  long below_budget = 0;   // sets of fewer tokens, though there were more
  long merged = 0, lost = 0;
  long forks = 0, forked_prompts = 0;                  // of them those whose parents had not decoded
  long probed = 0;                                     // prompts, or blocks, that probe rows have observed
  long in_prompt = 0;                                  // sets of a block's last row without all tokens before
  long coded = 0, coded_sets = 0, coded_doubtful = 0;  // sets of which some or none are coded
};

/// Whether a method observes the last rows of a prompt, and rows behind it instead. raas that keeps the
/// prompt is the one method that is given `keeps_prompt`.
inline bool observes_probes(const freekv::examples::method_spec& m) {
  for (const char* other : {"h2o", "mikv", "q_hitter", "d2o", "trim_kv", "given_worths"})
    if (m.eviction == other) return false;
  return m.eviction_values.count("keeps_prompt") == 0;
}

/// Queries of probe rows, (count, query_heads, head_dim): another row's of the text each, or its opposite.
inline std::vector<float> random_probes(dice& d, const std::vector<float>& queries, int row, int count) {
  std::vector<float> probes;
  const int rows = static_cast<int>(queries.size()) / row;
  for (int i = 0; i < count; ++i) {
    const float sign = d.below(4) == 0 ? -1.0f : 1.0f;
    const int from = d.below(rows) * row;
    for (int x = 0; x < row; ++x) probes.push_back(sign * queries[static_cast<std::size_t>(from + x)]);
  }
  return probes;
}

/// Budgets of Layer-DefensiveKV, which are the library's where the exact ranking, (heads of all layers),
/// allows them: `kept` tokens of the prompt by each KV head of the settings' layer. Throws disagreement.
inline void take_head_budgets(oracle::forgetful_decoder& expected, oracle::eviction_settings s,
                              const std::vector<std::vector<double>>& worths_of_heads,
                              const std::vector<int>& kept) {
  const auto ranges = oracle::layer_defensive_budgets(s, worths_of_heads);
  for (int head = 0; head < s.kv_heads; ++head) {
    const auto& [exact, least, most] = ranges.at(static_cast<std::size_t>(s.layer * s.kv_heads + head));
    const int own = kept.at(static_cast<std::size_t>(head));
    if (own < least || own > most)
      throw disagreement{sentence("KV head ", head, " keeps ", own, " tokens of the prompt for ", exact,
                                  ", from ", least, " to ", most)};
  }
  s.head_budgets = kept;
  expected.take_budget(s);
}

/// Compares one row's output; throws disagreement.
inline void compare_row(const std::string& where, const oracle::attention& want, std::span<const float> out,
                        std::span<const float> lse) {
  for (std::size_t i = 0; i < lse.size(); ++i)
    if (!close(static_cast<double>(lse[i]), want.lse[i], 1e-5) &&
        !(std::fabs(static_cast<double>(lse[i]) - want.lse[i]) <= want.lse_rounding.at(i)))
      throw disagreement{sentence(where, ": lse of head ", i, " is ", lse[i], " for ", want.lse[i])};
  for (std::size_t i = 0; i < out.size(); ++i)
    if (!close(static_cast<double>(out[i]), want.out[i], 2e-5) &&
        !(std::fabs(static_cast<double>(out[i]) - want.out[i]) <= want.doubt.at(i)))
      throw disagreement{sentence(where, ": output ", i, " is ", out[i], " for ", want.out[i])};
}

/// One KV head's units that a step attended to, out of a report or a file. `newest`: the new token's unit.
inline void compare_units(const std::string& where, oracle::forgetful_decoder& expected, int head,
                          const std::vector<int>& got, int newest, eviction_coverage& seen) {
  const auto listed = [](const std::vector<int>& units) {
    std::string text;
    for (const int unit : units) text += " " + std::to_string(unit);
    return text;
  };
  std::vector<int> want = expected.kept(head);
  const bool open = std::find(want.begin(), want.end(), newest) != want.end();
  if (!open) want.push_back(newest);
  ++seen.sets;
  if (got == want) return;
  std::vector<int> theirs = got;
  if (!open) theirs.erase(std::remove(theirs.begin(), theirs.end(), newest), theirs.end());
  if (!std::is_sorted(got.begin(), got.end()) || (!open && theirs.size() + 1 != got.size()) ||
      !expected.accepts(head, theirs))
    throw disagreement{sentence(where, ", KV head ", head, ": attended", listed(got), " for", listed(want))};
  ++seen.doubtful;
}

/// Those of the units that were coded, ascending.
inline void compare_coded(const std::string& where, oracle::forgetful_decoder& expected, int head,
                          const std::set<int>& got, eviction_coverage& seen) {
  ++seen.coded_sets;
  seen.coded += std::ssize(got);
  if (got == expected.coded(head)) return;
  if (!expected.accepts_coded(head, got))
    throw disagreement{sentence(where, ", KV head ", head, ": ", got.size(), " tokens are coded for ",
                                expected.coded(head).size(), ", or others")};
  ++seen.coded_doubtful;
}

}  // namespace tests
