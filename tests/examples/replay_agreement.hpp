// Compares what freekv-replay wrote with the float64 oracle, by the rules of docs/contract.md, 13.8.
#pragma once

#include <cmath>

#include "../oracle/channels.hpp"
#include "../oracle/thinning.hpp"
#include "replay_case.hpp"

namespace tests {

/// What was compared, so that a test can require that it was.
struct coverage {
  long replays = 0, steps = 0, firm_selections = 0, heads = 0, corrected = 0, kept = 0, recalls = 0,
       recalled = 0, before_attention = 0, not_finite = 0, promoted_replays = 0, thinned = 0;
};

inline std::ostream& operator<<(std::ostream& out, const coverage& c) {
  return out << c.replays << " replays, " << c.steps << " steps, " << c.firm_selections
             << " firm selections, " << c.heads << " head outputs (" << c.not_finite << " not finite), "
             << c.corrected << " corrected and " << c.kept << " kept heads, " << c.recalls
             << " recall counts with " << c.recalled << " pages, " << c.before_attention
             << " before attention, " << c.promoted_replays << " replays with their promotions, " << c.thinned
             << " thinned prompts";
}

/// The JSON object's numbers, from the tensors and from the oracle's full attention.
struct expected_summary {
  double error_sum = 0, error_max = 0, mass_sum = 0;
  long long heads = 0, not_finite = 0, corrected = 0, selected = 0, recalled = 0, before_attention = 0,
            promoted = 0;
  bool promoted_known = true;

  /// One query head: the program's output and log-sum-exp, full attention's output, and the log-sum-exp of
  /// full attention to keys as they are stored.
  void add_head(std::span<const float> out, float lse, std::span<const double> full, double full_lse) {
    double difference = 0, length = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      difference += (static_cast<double>(out[i]) - full[i]) * (static_cast<double>(out[i]) - full[i]);
      length += full[i] * full[i];
    }
    const double error = length > 0 ? std::sqrt(difference / length) : std::sqrt(difference);
    const double mass = std::exp(static_cast<double>(lse) - full_lse);
    if (!std::isfinite(error) || !std::isfinite(mass)) {
      ++not_finite;
      return;
    }
    ++heads;
    error_sum += error;
    error_max = std::max(error_max, error);
    mass_sum += mass;
  }
};

/// Bytes of one KV head's keys and values of a page in the store, or of a unit where it is recalled by
/// itself.
inline long slice_bytes(const freekv::examples::pipeline_options& o, long element) {
  const std::string& codec = o.method.codec;
  const long p = o.store_file.empty() ? o.method.unit_tokens(o.page) : o.page, d = o.head_dim;
  if (codec == "low_rank_keys") return p * d * element + (p + 31) / 32 * 4;  // values, and a bit for each key
  if (codec == "key_channels")
    return p * (freekv::key_channels{o.method.pruned}.kept(o.head_dim) + d) * element;
  if (codec == "bf16" || codec == "f16") return 2 * p * d * 2;
  if (codec == "fp8") return 2 * p * d;
  const long codes = codec.starts_with("int8") ? 2 * p * d : p * d;
  if (codec.ends_with("_token")) return codes + 2 * p * 4;    // scales
  if (codec == "int8_channel") return codes + d * 4 + p * 4;  // of keys' channels and of values' tokens
  if (codec == "int4_channel") return codes + 2 * (d + p) * element;  // ends of ranges, as elements
  return 2 * p * d * element;
}

/// Throws disagreement unless the JSON object has the contract's content and these numbers.
inline void check_summary(const replay_case& c, const replay_output& r, const expected_summary& e) {
  const auto& o = c.layer.options;
  const nlohmann::json& s = r.summary;
  const auto is = [&](const nlohmann::json& value, const nlohmann::json& expected, const char* what) {
    if (value != expected) throw disagreement{sentence("JSON: ", what, " is ", value, " for ", expected)};
  };
  // Shares of the mass and errors are about 1 at most, but where keys are rebuilt from coefficients that say
  // nothing of them: a mass is e to a number in float32, so its error is relative.
  const auto near = [&](const nlohmann::json& value, double expected, double tolerance, const char* what) {
    if (!std::isfinite(expected)) return is(value, nullptr, what);
    const double within = tolerance * std::fmax(1.0, std::fabs(expected));
    if (!value.is_number() || !(std::fabs(value.get<double>() - expected) <= within))
      throw disagreement{sentence("JSON: ", what, " is ", value, " for ", expected)};
  };
  const auto& settings = s.at("settings");
  is(settings.at("variant"), c.variant, "variant");
  const auto of_retrieval = [&](const std::string& name) {
    return c.retrieves() ? nlohmann::json(name) : nlohmann::json(nullptr);
  };
  is(settings.at("summary"), of_retrieval(o.method.summary), "summary");
  is(settings.at("pooling"), of_retrieval(o.method.pooling), "pooling");
  is(settings.at("selection"), of_retrieval(o.method.selection), "selection");
  is(settings.at("rows"), of_retrieval(o.method.rows), "rows");
  is(settings.at("correction"), of_retrieval(o.method.correction), "correction");
  is(settings.at("page"), o.page, "page");
  is(settings.at("sink"), o.budget.sink, "sink");
  is(settings.at("window"), o.budget.window, "window");
  is(settings.at("k"), o.budget.selected_units, "k");
  is(settings.at("tau"), std::stod(c.tau), "tau");
  is(settings.at("route"), o.in_place ? "in_place" : "resident", "route");
  is(settings.at("dtype"), c.kept_dtype(), "dtype");
  is(settings.at("tokens"), c.tokens(), "tokens");
  is(settings.at("prompt_len"), c.layer.prompt, "prompt_len");
  is(settings.at("query_heads"), o.query_heads, "query_heads");
  is(settings.at("kv_heads"), o.kv_heads, "kv_heads");
  is(settings.at("head_dim"), o.head_dim, "head_dim");
  is(settings.at("threads"), c.threads, "threads");
  near(settings.at("scale"), c.scale.empty() ? 1 / std::sqrt(o.head_dim) : std::stod(c.scale), 1e-9, "scale");
  const auto is_if = [&](bool used, const char* name, const nlohmann::json& value) {
    if (used) is(settings.at(name), value, name);
    if (!used && settings.count(name) != 0)
      throw disagreement{sentence("JSON: ", name, " is of no use here")};
  };
  const bool clusters = c.retrieves() && o.method.summary == "key_clusters",
             signatures = c.retrieves() && o.method.summary == "key_signatures",
             subspace = c.uses_basis() && !clusters && !signatures,
             sketch = c.retrieves() && o.method.summary == "key_sketch",
             two_stages = c.retrieves() && o.method.summary == "coarse_to_fine";
  is_if(c.retrieves() && o.method.summary == "chunk_means", "chunk", o.method.chunk);
  is_if(subspace, "rank", o.method.rank);
  is_if(clusters, "clusters", o.method.clusters);
  is_if(subspace || sketch || signatures, "bits", o.method.bits);
  is_if(signatures, "tables", o.method.tables);
  is_if(two_stages, "times", o.method.times);
  is_if(c.retrieves() && !subspace && !sketch && !two_stages && !clusters && !signatures, "summary_dtype",
        o.method.format);
  is_if(c.retrieves() && !c.selection_scale.empty(), "selection_scale",
        c.selection_scale.empty() ? 0.0 : std::stod(c.selection_scale));
  is_if(c.retrieves() && o.method.selection == "top_p", "top_p", std::stod(c.top_p));
  is_if(c.thins(), "thin", std::stod(c.share()));
  is_if(c.retrieves() && o.method.selection == "top_p", "calibrated", o.method.calibrated);
  is_if(c.retrieves() && o.method.selection == "sticky_top_k", "bonus", std::stod(c.bonus));
  is_if(c.retrieves() && o.method.correction == "cosine_drift", "drift_pool", o.method.drift_pool);
  is_if(c.retrieves() && o.method.correction == "mass_deficit", "delta", std::stod(c.delta));
  is_if(c.retrieves() && o.method.correction == "mass_deficit", "partial", o.method.partial);
  is_if(c.retrieves() && o.method.correction == "every_n_steps", "every", o.method.every);
  is_if(!o.in_place, "layout", o.layout);
  is_if(c.retrieves() && o.method.pinning == "pin_outliers", "pinned", o.method.pinned);
  is_if(o.method.needs_factors(), "key_rank", o.method.key_rank);
  is_if(o.method.needs_channels(), "pruned", std::stod(c.pruned));
  is_if(c.retrieves() && o.method.unit != 0, "unit", o.method.unit);
  is_if(c.retrieves() && !o.in_place, "spare", o.method.spare);
  is_if(c.retrieves() && !o.in_place, "residency", o.method.residency);
  if ((settings.count("heads") != 0) == c.heads.empty()) throw disagreement{"JSON: heads"};

  is(s.at("steps"), c.layer.steps, "steps");
  const auto heads = static_cast<double>(e.heads), rows = static_cast<double>(c.layer.steps) * o.kv_heads;
  // 0 / 0 is NaN, which stands for null here.
  near(s.at("error").at("relative_l2_mean"), e.error_sum / heads, 2e-4, "mean error");
  near(s.at("error").at("relative_l2_max"), e.heads == 0 ? NAN : e.error_max, 2e-4, "largest error");
  is(s.at("error").at("heads_not_finite"), e.not_finite, "heads that are not finite");
  near(s.at("mass_kept"), e.mass_sum / heads, 2e-4, "mass kept");
  near(s.at("correction_rate"), static_cast<double>(e.corrected) / rows, 1e-9, "correction rate");
  near(s.at("hit_rate"),
       e.selected == 0 ? NAN : 1 - static_cast<double>(e.recalled) / static_cast<double>(e.selected), 1e-9,
       "hit rate");
  is(s.at("pages_recalled"), e.recalled, "pages recalled");
  is(s.at("pages_recalled_before_attention"), e.before_attention, "pages recalled before attention");
  is(s.at("bytes_recalled"), e.recalled * slice_bytes(o, c.kept_dtype() == "F32" ? 4 : 2), "bytes recalled");
  if (e.promoted_known) is(s.at("pages_promoted"), e.promoted, "pages promoted");
  if (c.layer.steps == 0) {
    is(s.at("seconds_per_step"), nullptr, "time of no step");
    return;
  }
  const double seconds = s.at("seconds_per_step"), full = s.at("full_attention_seconds_per_step");
  if (!(seconds > 0 && full > 0)) throw disagreement{"JSON: a step takes no time"};
  near(s.at("time_over_full_attention"), seconds / full, 1e-6 * seconds / full, "ratio of times");
}

/// Lists of channels that the oracle keeps, of a prompt's keys and last queries.
inline void choose_channels(random_case& c, std::span<const float> keys, std::span<const float> queries) {
  const auto& o = c.options;
  const int kept = freekv::key_channels{o.method.pruned}.kept(o.head_dim), group = o.query_heads / o.kv_heads;
  const auto rows_of = [&](std::span<const float> from, int heads, int first, int of) {
    std::vector<std::vector<double>> rows;
    for (std::size_t row = 0; row < from.size(); row += to_size(heads * o.head_dim))
      for (int head = first; head < first + of; ++head) {
        const auto numbers = from.subspan(row + to_size(head * o.head_dim), to_size(o.head_dim));
        rows.emplace_back(numbers.begin(), numbers.end());
      }
    return rows;
  };
  std::fill(c.channel_data.begin(), c.channel_data.end(), std::uint8_t{0});
  for (int head = 0; head < o.kv_heads; ++head) {
    const auto list = oracle::kept_channels(rows_of(queries, o.query_heads, head * group, group),
                                            rows_of(keys, o.kv_heads, head, 1), o.head_dim, kept);
    for (std::size_t i = 0; i < list.size(); ++i)
      if (auto& byte = c.channel_data[to_size(head * o.head_dim) / 8 + i / 8]; list[i])
        byte = static_cast<std::uint8_t>(byte | 1 << i % 8);
  }
}

/// Every page in one of the rows, ascending.
inline std::vector<int> all_of(const std::vector<std::vector<int>>& rows) {
  std::vector<int> pages;
  for (const auto& row : rows) pages.insert(pages.end(), row.begin(), row.end());
  if (rows.size() > 1) std::sort(pages.begin(), pages.end());
  if (rows.size() > 1) pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
  return pages;
}

/// A prompt's rows that were kept, (kept, kv_heads, head_dim).
struct thinned_prompt {
  std::vector<float> keys, values;
};
/// Throws disagreement unless each KV head keeps what the oracle allows.
inline thinned_prompt thinned_of(const replay_case& c, const replay_output& r) {
  const auto& o = c.layer.options;
  const int d = o.head_dim, tokens = c.layer.prompt,
            voting = std::min(tokens, freekv::examples::rows_that_thin), query_row = o.query_heads * d,
            key_row = o.kv_heads * d;
  const oracle::thinning_settings s{.query_heads = o.query_heads,
                                    .kv_heads = o.kv_heads,
                                    .head_dim = d,
                                    .kept = c.kept(),
                                    .sink = o.budget.sink,
                                    .window = o.budget.window,
                                    .scale = o.scale != 0 ? double{o.scale} : 1 / std::sqrt(d),
                                    .soft_cap = double{o.soft_cap}};
  const auto queries =
                 std::span(c.q).subspan(to_size((tokens - voting) * query_row), to_size(voting * query_row)),
             keys = std::span(c.k).first(to_size(tokens * key_row));
  thinned_prompt prompt;
  prompt.keys.resize(to_size(s.kept * key_row));
  prompt.values.resize(prompt.keys.size());
  for (int head = 0; head < o.kv_heads; ++head) {
    const auto first = r.kept.begin() + std::ptrdiff_t{head} * s.kept;
    const std::vector<int> kept(first, first + s.kept);
    if (!oracle::may_keep(s, oracle::votes_of(s, queries, keys, head), kept))
      throw disagreement{sentence("KV head ", head, " keeps other tokens of the prompt")};
    for (int row = 0; row < s.kept; ++row)
      for (int i = 0; i < d; ++i) {
        const auto from = to_size(kept[to_size(row)] * key_row + head * d + i),
                   to = to_size(row * key_row + head * d + i);
        prompt.keys[to] = c.k[from];
        prompt.values[to] = c.v[from];
      }
  }
  return prompt;
}

/// Throws disagreement unless the output is what the oracle allows.
inline void check_agreement(const replay_case& given, const replay_output& r, coverage& seen) {
  replay_case c = given;
  const auto& o = c.layer.options;
  const int heads = o.kv_heads, group = o.query_heads / heads, d = o.head_dim,
            k = o.budget.selected_units + c.pinned();
  if (c.dtype_flag != "stored")
    for (auto* tensor : {&c.q, &c.k, &c.v})
      for (float& x : *tensor) x = rounded(x, o.element);
  const auto rows_of = [&](const std::vector<float>& tensor, int first, int count, int width) {
    return std::span(tensor).subspan(to_size(first) * to_size(width), to_size(count) * to_size(width));
  };
  const auto prompt_keys = rows_of(c.k, 0, c.layer.prompt, heads * d);
  if (c.uses_basis() && c.basis_layers == 0) {
    freekv::examples::key_basis learnt(1, heads, o.method.basis_rank(c.layer.prompt), d);
    if (o.method.summary == "key_clusters") {
      learnt.cluster(0, prompt_keys);
    } else if (o.method.summary == "key_signatures") {
      learnt.draw(0, prompt_keys);
    } else if (c.variant == "fasa") {
      const int rows = std::min(c.layer.prompt, freekv::examples::rows_that_choose);
      learnt.choose_pairs(0, prompt_keys, rows_of(c.q, c.layer.prompt - rows, rows, heads * group * d), rows,
                          freekv::rotary_pairs::halves);
    } else {
      learnt.learn(0, prompt_keys);
    }
    c.layer.basis_data.assign(learnt.view().data,
                              learnt.view().data + to_size(heads) * learnt.view().floats_per_head());
    c.layer.options.basis = learnt.view();
  }
  if (o.method.needs_temperatures()) {  // as calibration_test has them right
    const int rows = std::min(c.layer.prompt, freekv::examples::rows_that_calibrate);
    c.layer.temperature_data.resize(to_size(heads));
    freekv::examples::calibrate(c.layer.with_basis(), 0, prompt_keys,
                                rows_of(c.q, c.layer.prompt - rows, rows, heads * group * d),
                                c.layer.temperature_data);
  }
  if (o.method.needs_channels()) {
    const int rows = std::min(c.layer.prompt, freekv::examples::rows_that_choose_channels);
    choose_channels(c.layer, prompt_keys, rows_of(c.q, c.layer.prompt - rows, rows, heads * group * d));
  }
  oracle::decoder expected(oracle_settings(c.layer));
  oracle::settings given_rows = expected.config();
  given_rows.read_back = nullptr;  // errors are those to full attention over what was recorded
  oracle::decoder exact(given_rows);
  const auto prompt_values = rows_of(c.v, 0, c.layer.prompt, heads * d);
  exact.prompt(prompt_keys, prompt_values, c.layer.prompt);
  if (c.thins()) {
    const thinned_prompt kept = thinned_of(c, r);
    expected.prompt(kept.keys, kept.values, c.kept());
    seen.thinned += c.kept() < c.layer.prompt;
  } else {
    expected.prompt(prompt_keys, prompt_values, c.layer.prompt);
  }

  expected_summary summary;
  std::vector<bool> carried_firm(to_size(heads), true);
  for (int step = 0; step < c.layer.steps; ++step) {
    const int token = c.layer.prompt + step;
    const auto query = rows_of(c.q, token, 1, o.query_heads * d);
    const auto want =
        expected.step(query, rows_of(c.k, token, 1, heads * d), rows_of(c.v, token, 1, heads * d));
    exact.prompt(rows_of(c.k, token, 1, heads * d), rows_of(c.v, token, 1, heads * d), 1);
    const auto full = exact.full(query), of_stored = c.thins() ? full : expected.full(query);
    ++seen.steps;
    for (int h = 0; h < heads; ++h) {
      const auto& row = want.rows[to_size(h)];
      const auto at = to_size(step) * to_size(heads) + to_size(h);
      const auto where = sentence("step ", step, ", KV head ", h, ": ");
      const auto fail = [&](const auto&... what) { throw disagreement{sentence(where, what...)}; };
      const auto listed = [](const auto& pages) {
        std::string text;
        for (const auto page : pages) text += " " + std::to_string(page);
        return text;
      };

      // The KV head's own row of `selected`, or those of its query heads, which it holds together.
      std::vector<std::vector<int>> rows_got;
      const int rows = c.selecting() / heads;
      for (int i = 0; i < rows; ++i) {
        const auto pages =
            std::span(r.selected).subspan((at * to_size(rows) + to_size(i)) * to_size(k), to_size(k));
        const auto end = std::find(pages.begin(), pages.end(), -1);
        rows_got.emplace_back(pages.begin(), end);
        if (std::any_of(end, pages.end(), [](int page) { return page != -1; }))
          fail("selected", listed(pages), " is not padded with -1");
      }
      const std::vector<int> got = all_of(rows_got);
      const auto count = static_cast<long>(got.size());
      if (r.corrected[at] > 1) fail("corrected is ", int{r.corrected[at]});
      const bool corrected = r.corrected[at] != 0;
      if (corrected != row.corrected && oracle::flag_is_firm(row, expected.config().tau))
        fail("corrected is ", corrected, ", pooled cosine ", row.pooled_cosine);
      const bool own = c.selecting() != heads && !row.selected.empty();
      const bool same_flag = corrected == row.corrected;
      const bool equal = got == row.selected && (!own || rows_got == row.selected_by_head);
      const bool firm = same_flag && (row.corrected ? row.correct_firm : carried_firm[to_size(h)]);
      if (!equal && firm) fail("selected", listed(got), " for", listed(row.selected));
      seen.firm_selections += firm && !got.empty();
      for (int g = h * group; g < (h + 1) * group; ++g) {
        const auto head = to_size(step) * to_size(o.query_heads) + to_size(g);
        const auto out = std::span(r.out).subspan(head * to_size(d), to_size(d));
        const auto whole = std::span(full.out).subspan(to_size(g) * to_size(d), to_size(d));
        summary.add_head(out, r.lse[head], whole, of_stored.lse[to_size(g)]);
        if (!equal) continue;
        ++seen.heads;
        seen.not_finite += !std::isfinite(r.lse[head]);
        if (!close(static_cast<double>(r.lse[head]), want.lse[to_size(g)], 1e-5) &&
            !(std::fabs(static_cast<double>(r.lse[head]) - want.lse[to_size(g)]) <=
              want.lse_doubt[to_size(g)]))
          fail("lse of query head ", g, " is ", r.lse[head], " for ", want.lse[to_size(g)]);
        for (int i = 0; i < d; ++i)
          if (!close(static_cast<double>(out[to_size(i)]), want.out[to_size(g * d + i)], 2e-5) &&
              !(want.lse_doubt[to_size(g)] > 0.0 &&
                std::fabs(static_cast<double>(out[to_size(i)]) - want.out[to_size(g * d + i)]) <=
                    want.doubt[to_size(g * d + i)]))
            fail("output ", i, " of query head ", g, " is ", out[to_size(i)], " for ",
                 want.out[to_size(g * d + i)]);
      }
      const bool comparable = row.movement_firm;
      if (comparable) {
        ++seen.recalls;
        seen.recalled += row.recalled;
        seen.before_attention += row.recalled_before_attention;
        if (r.recalled[at] != row.recalled) fail("recalled ", r.recalled[at], " for ", row.recalled);
        if (r.before_attention[at] != row.recalled_before_attention)
          fail("recalled ", r.before_attention[at], " before attention for ", row.recalled_before_attention);
      }
      summary.promoted_known = summary.promoted_known && comparable;
      summary.promoted += row.promoted;
      summary.corrected += corrected;
      summary.selected += count;
      summary.recalled += r.recalled[at];
      summary.before_attention += r.before_attention[at];
      if (!c.retrieves(h) && (count != 0 || corrected || r.recalled[at] != 0))
        fail("a head that does not retrieve selects, corrects or recalls");
      if (c.retrieves(h)) ++(corrected ? seen.corrected : seen.kept);
      carried_firm[to_size(h)] = row.corrected && row.selected == row.selected_next
                                     ? row.correct_firm && row.speculate_firm
                                     : row.speculate_firm;
    }
  }
  if (!c.retrieves() &&
      (summary.selected != 0 || summary.corrected != 0 || summary.recalled != 0 || summary.promoted != 0))
    throw disagreement{"a variant without retrieval selects, corrects or recalls"};
  if (o.in_place && summary.recalled != 0) throw disagreement{"in_place recalls"};
  seen.promoted_replays += summary.promoted_known && summary.promoted > 0;
  check_summary(c, r, summary);
  ++seen.replays;
}

}  // namespace tests
