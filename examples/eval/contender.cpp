#include "contender.hpp"

namespace freekv::examples {

namespace {

int page_of(const contender& c, const common_settings& s) { return c.page > 0 ? c.page : s.page; }
int budget_of(const contender& c, const common_settings& s) {
  return static_cast<int>(c.budget_share * s.budget) + c.more_pages * page_of(c, s);
}
int selected_units(const contender& c, const common_settings& s) {
  return (budget_of(c, s) - s.sink - s.window) / c.method.unit_tokens(page_of(c, s));
}
/// Of the selected units those that are pinned, in ShadowKV's proportion: 48 beside 256 others.
int pinned_units(const contender& c, const common_settings& s) {
  return c.method.pinning == "pin_outliers" ? (48 * selected_units(c, s) + 152) / 304 : 0;
}

}  // namespace

bool fits(const contender& c, const common_settings& s) {
  if (!c.by_layer.empty() && s.budget != c.budget_by_layer) return false;
  return !(c.selects() || c.method.evicts()) ||
         (selected_units(c, s) >= 1 && s.sink % page_of(c, s) == 0 && s.window % page_of(c, s) == 0);
}

subspace_basis basis_of(const contender& c, const prepared_prompt& prompt) {
  if (!c.method.needs_basis()) return {};
  const learnt_keys& learnt = c.basis == basis_source::prompt ? prompt.own : prompt.other;
  return learnt.bases.at(c.method.rows_of_basis()).view();
}

subspace_basis factors_of(const contender& c, const prepared_prompt& prompt) {
  if (!c.method.needs_factors()) return {};
  return (c.basis == basis_source::prompt ? prompt.own : prompt.other).factors.value().view();
}

key_codebooks codebooks_of(const contender& c, const prepared_prompt& prompt) {
  if (!c.method.needs_codebooks()) return {};
  return (c.basis == basis_source::prompt ? prompt.own : prompt.other)
      .codebooks.at({c.method.codes, c.method.unit})
      .view();
}

std::size_t learnt_bytes_of(const contender& c, const prepared_prompt& prompt) {
  const auto bytes = [](const auto& of) {
    return static_cast<std::size_t>(of.layers * of.kv_heads) * of.floats_per_head() * sizeof(float);
  };
  const subspace_basis basis = basis_of(c, prompt);
  const key_codebooks codebooks = codebooks_of(c, prompt);
  const subspace_basis factors = factors_of(c, prompt);
  const auto channels = prompt.channels.find(c.name);
  return (channels != prompt.channels.end() ? channels->second.size() : 0) +
         (basis.data != nullptr ? bytes(basis) : 0) + (factors.data != nullptr ? bytes(factors) : 0) +
         (codebooks.data != nullptr ? bytes(codebooks) : 0);
}

pipeline_options options_of(const contender& c, const common_settings& s, const model_shape& shape,
                            const prepared_prompt& prompt, int more, bool in_place) {
  pipeline_options o;
  o.element = data_type::f16;
  o.head_dim = shape.head_dim;
  o.layers = shape.layers;
  o.query_heads = shape.query_heads;
  o.kv_heads = shape.kv_heads;
  o.page = page_of(c, s);
  const int pinned = pinned_units(c, s);
  o.budget = c.selects() || c.method.evicts()
                 ? budget{s.sink, s.window, selected_units(c, s) - pinned}
                 : budget{s.sink, budget_of(c, s) - s.sink, 1};
  o.max_tokens = prompt.kv.tokens() + more;
  o.max_prompt = prompt.kv.tokens();
  o.scale = shape.scale;
  o.complete_layers = s.complete_layers;
  o.sliding_window = shape.sliding_window;
  o.sliding_layers = shape.sliding;
  o.in_place = in_place;
  o.method = c.method;
  o.method.pinned = pinned;
  o.basis = basis_of(c, prompt);
  o.codebooks = codebooks_of(c, prompt);
  o.factors = factors_of(c, prompt);
  if (const auto found = prompt.temperatures.find(c.name); found != prompt.temperatures.end())
    o.temperatures = {found->second.data(), shape.layers, shape.kv_heads};
  if (const auto found = prompt.channels.find(c.name); found != prompt.channels.end())
    o.channels = {found->second.data(), shape.layers, shape.kv_heads, shape.head_dim};
  if (shape.rotary) o.rotary = shape.rotary->view();
  o.head_kinds = c.head_kinds;
  o.voters = c.voters;
  o.by_layer = c.by_layer;
  return o;
}

std::unique_ptr<pipeline> make_contender(const contender& c, const common_settings& s,
                                         const model_shape& shape, const prepared_prompt& prompt, int more,
                                         bool in_place, host_backend& backend) {
  const pipeline_options o = options_of(c, s, shape, prompt, more, in_place);
  if (c.method.needs_temperatures() && o.temperatures.data == nullptr)
    throw usage_error(c.name + " selects by temperatures, and none are found from this prompt");
  return make_pipeline(o, backend);
}

contender true_mass_of(int unit, int more_pages) {
  contender c{unit == 0 ? "true page mass" : "true mass of " + std::to_string(unit) + " tokens",
              {.summary = "chunk_means", .chunk = 1, .unit = unit, .correction = "always"}};
  if (more_pages > 0) c.name += ", pages more: " + std::to_string(more_pages);
  c.more_pages = more_pages;
  c.deep = true;  // not swept
  return c;
}

std::size_t summary_bytes_of(const contender& c, const pipeline& p) {
  return c.selects() ? p.summary_bytes() : 0;
}

}  // namespace freekv::examples
