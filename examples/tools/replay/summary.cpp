#include "summary.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "layer_setup.hpp"
#include "statistics.hpp"

namespace freekv::examples {
namespace {

using json = nlohmann::ordered_json;

json number(double x) { return std::isfinite(x) ? json(x) : json(nullptr); }

json share(double part, double whole) { return whole > 0 ? number(part / whole) : json(nullptr); }

/// Whatever the command line says, for all layers.
json settings_of(const replay_options& o, const host_options& host) {
  const method_spec& m = o.method;
  const auto of_retrieval = [&](const auto& value) { return m.retrieves() ? json(value) : json(nullptr); };
  json settings{{"trace", o.trace},
                {"variant", o.variant},
                {"summary", of_retrieval(m.summary)},
                {"pooling", of_retrieval(m.pooling)},
                {"selection", of_retrieval(m.selection)},
                {"rows", of_retrieval(m.rows)},
                {"correction", of_retrieval(m.correction)},
                {"page", o.page},
                {"sink", o.sink},
                {"window", o.window},
                {"k", o.k},
                {"tau", o.tau},
                {"route", o.route},
                {"backend", o.backend}};
  if (o.backend == "host")
    settings.update({{"threads", host.threads}, {"instructions", host::name_of(host.instructions)}});
  if (o.route == "resident") settings["layout"] = o.layout;
  if (m.retrieves() && m.unit != 0) settings["unit"] = m.unit;
  if (o.heads) settings["heads"] = *o.heads;
  if (o.by_layer) settings["by_layer"] = *o.by_layer;
  if (o.sliding_window) settings["sliding_window"] = *o.sliding_window;
  if (o.soft_cap != 0) settings["soft_cap"] = o.soft_cap;
  if (m.codec != method_spec{}.codec) settings["codec"] = m.codec;
  if (m.needs_factors()) settings["key_rank"] = m.key_rank;
  if (m.needs_channels()) settings["pruned"] = o.pruned;
  if (o.store_file) settings["store_file"] = *o.store_file;
  if (m.thins()) settings["thin"] = o.thin;
  if (m.evicts()) settings["budget"] = std::int64_t{o.sink} + o.window + std::int64_t{o.k} * o.page;
  if (!m.eviction_values.empty()) settings["eviction_values"] = m.eviction_values;
  if (!m.retrieves()) return settings;
  const bool subspace = m.summary == "key_subspace", sketch = m.summary == "key_sketch",
             two_stages = m.summary == "coarse_to_fine";
  const bool clusters = m.summary == "key_clusters";
  const bool signatures = m.summary == "key_signatures";
  if (!subspace && !sketch && !two_stages && !clusters && !signatures) settings["summary_dtype"] = m.format;
  if (m.summary == "chunk_means") settings["chunk"] = m.chunk;
  if (subspace) settings.update({{"rank", m.rank}, {"bits", m.bits}, {"basis", o.basis}});
  if (clusters) settings.update({{"clusters", m.clusters}, {"basis", o.basis}});
  if (signatures) settings.update({{"bits", m.bits}, {"tables", m.tables}, {"basis", o.basis}});
  if (m.needs_codebooks()) settings.update({{"codes", m.codes}, {"basis", o.basis}});
  if (sketch) settings["bits"] = m.bits;
  if (two_stages) settings["times"] = m.times;
  if (m.pinning == "pin_outliers") settings.update({{"pinning", m.pinning}, {"pinned", m.pinned}});
  if (o.selection_scale != 0) settings["selection_scale"] = o.selection_scale;
  if (m.selection == "top_p") settings.update({{"top_p", o.top_p}, {"calibrated", m.calibrated}});
  if (m.selection == "sticky_top_k") settings["bonus"] = o.bonus;
  if (m.correction == "cosine_drift") settings["drift_pool"] = m.drift_pool;
  if (m.correction == "mass_deficit" || m.correction == "missing_share")
    settings.update({{"delta", o.delta}, {"partial", m.partial}});
  if (m.correction == "verified_share")
    settings.update({{"delta", o.delta}, {"epsilon", o.epsilon}, {"samples", m.samples}});
  if (m.correction == "every_n_steps") settings["every"] = m.every;
  if (o.route == "resident") settings.update({{"residency", m.residency}, {"spare", m.spare}});
  return settings;
}

/// What depends on the trace.
json form_of(const replay_options& o, const trace_form& t) {
  return {{"dtype", dtype_name(t.element)},
          {"tokens", t.tokens},
          {"prompt_len", t.prompt_len},
          {"query_heads", t.query_heads},
          {"kv_heads", t.kv_heads},
          {"head_dim", t.head_dim},
          {"scale", o.scale != 0 ? o.scale : t.scale_of_scores()}};
}

json errors_of(const head_errors& e) {
  return {{"relative_l2_mean", share(e.sum, static_cast<double>(e.heads))},
          {"relative_l2_max", e.heads > 0 ? number(e.most) : json(nullptr)},
          {"heads_not_finite", e.not_finite}};
}

json findings_of(const replay_options& o, const layer_result& r) {
  const auto heads = static_cast<double>(r.errors.heads), selected = static_cast<double>(r.selected),
             recalled = static_cast<double>(r.recalled), steps = static_cast<double>(r.form.steps());
  const double rows = steps * r.form.kv_heads;
  const double seconds = r.seconds.empty() ? NAN : median(r.seconds);
  const double full_seconds = r.seconds.empty() ? NAN : median(r.full_seconds);
  return {{"steps", r.form.steps()},
          {"error", errors_of(r.errors)},
          {"error_of_codec", r.codec_errors ? errors_of(*r.codec_errors) : json(nullptr)},
          {"mass_kept", r.keeps_coded_tokens ? json(nullptr) : share(r.errors.mass, heads)},
          {"correction_rate", share(static_cast<double>(r.corrected), rows)},
          {"hit_rate", o.method.evicts() ? json(nullptr) : share(selected - recalled, selected)},
          {"pages_recalled", r.recalled},
          {"pages_recalled_before_attention", r.before_attention},
          {"pages_recalled_per_step", share(recalled, steps)},
          {"pages_promoted", r.promoted},
          {"bytes_recalled", r.recalled * static_cast<long long>(r.slice_bytes)},
          {"summary_bytes_per_page", o.method.retrieves() ? json(r.summary_bytes) : json(0)},
          {"fast_tier_bytes", r.fast_tier_bytes},
          {"store_bytes", r.store_bytes},
          {"staging_bytes", r.staging_bytes},
          {"seconds_per_step", number(seconds)},
          {"full_attention_seconds_per_step", number(full_seconds)},
          {"time_over_full_attention", share(seconds, full_seconds)}};
}

/// A number of each layer that has a mean and a worst; which end is the worst.
struct compared {
  json::json_pointer at;
  bool small_is_worse;
};

std::vector<compared> all_compared() {
  return {
      {"/error/relative_l2_mean"_json_pointer, false},  {"/mass_kept"_json_pointer, true},
      {"/correction_rate"_json_pointer, false},         {"/hit_rate"_json_pointer, true},
      {"/pages_recalled_per_step"_json_pointer, false}, {"/bytes_recalled"_json_pointer, false},
      {"/fast_tier_bytes"_json_pointer, false},         {"/time_over_full_attention"_json_pointer, false}};
}

}  // namespace

json summary_of(const replay_options& o, const host_options& host, const layer_result& r) {
  json settings = settings_of(o, host);
  settings.update(form_of(o, r.form));
  json summary{{"settings", settings}};
  summary.update(findings_of(o, r));
  return summary;
}

json summary_of(const replay_options& o, const host_options& host, const std::vector<replay_job>& jobs,
                const std::vector<layer_result>& results) {
  json layers = json::array();
  for (std::size_t i = 0; i < results.size(); ++i) {
    const trace_form& form = results[i].form;
    layers.push_back({{"trace", jobs[i].trace.filename().string()},
                      {"layer", form.layer ? json(*form.layer) : json(nullptr)}});
    layers.back().update(form_of(o, form));
    const replay_options own = options_of_layer(o, form);
    if (o.by_layer) layers.back().update({{"k", own.k}, {"tau", own.tau}, {"delta", own.delta}});
    layers.back().update(findings_of(own, results[i]));
  }
  json mean = json::object(), worst = json::object();
  for (const auto& [at, small_is_worse] : all_compared()) {
    double sum = 0;
    int counted = 0;
    const json* worst_layer = nullptr;
    for (const json& layer : layers) {
      if (!layer.at(at).is_number()) continue;  // null: a layer without steps, or without recall
      const double value = layer.at(at);
      sum += value;
      ++counted;
      if (worst_layer == nullptr || (small_is_worse ? value < worst_layer->at(at).get<double>()
                                                    : value > worst_layer->at(at).get<double>()))
        worst_layer = &layer;
    }
    mean[at] = share(sum, counted);
    worst[at] = worst_layer == nullptr ? json(nullptr)
                                       : json{{"value", worst_layer->at(at)},
                                              {"layer", worst_layer->at("layer")},
                                              {"trace", worst_layer->at("trace")}};
  }
  return {{"settings", settings_of(o, host)}, {"layers", layers}, {"mean", mean}, {"worst", worst}};
}

}  // namespace freekv::examples
