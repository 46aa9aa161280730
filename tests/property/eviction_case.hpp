// Random sequences for methods that forget, and one step of the library beside the oracle's.
#pragma once

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
  if (s.kind == oracle::eviction_kind::lazy_eviction)
    s.window = o.method.interval > 0 ? o.method.interval : 64;
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
  if (o.method.interval > 0) s.interval = o.method.interval;
  s.keeps_prompt = o.method.eviction == "raas" && o.method.keeps_prompt;
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

/// Whether a method observes the last rows of a prompt, and rows behind it instead.
inline bool observes_probes(const freekv::examples::method_spec& m) {
  for (const char* other : {"h2o", "mikv", "q_hitter", "d2o", "trim_kv", "given_worths"})
    if (m.eviction == other) return false;
  return !(m.eviction == "raas" && m.keeps_prompt);
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
