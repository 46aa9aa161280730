// Settings that programs give every pipeline that retrieves, on the host and on a device.
#pragma once

#include "choices.hpp"
#include "pipeline.hpp"

namespace freekv::examples {

/// Settings of `o`, but for the store's file and for policies that not all pipelines choose at run time.
/// `data`: what the layout and the plan are made with.
template <class Settings>
Settings settings_of_options(const pipeline_options& o, const method_data& data) {
  Settings s;
  s.model = {.layers = o.layers, .query_heads = o.query_heads, .kv_heads = o.kv_heads};
  s.budget = o.budget;
  for (const layer_values& own : o.by_layer) {
    s.budget_of_layer.push_back(o.budget);
    if (own.selected_tokens)
      s.budget_of_layer.back().selected_units = *own.selected_tokens / o.method.unit_tokens(o.page);
  }
  s.capacity.max_tokens = o.max_tokens;
  s.capacity.max_sequences = o.max_sequences;
  s.capacity.max_resident = o.max_resident;
  s.capacity.max_decode_rows = o.max_decode_rows;
  s.capacity.store_tokens = o.store_tokens;
  s.capacity.selected_tokens = o.selected_tokens;
  s.attention.scale = o.scale;
  s.attention.selection_scale = o.method.selection_scale;
  s.attention.sliding_window = o.sliding_window;
  s.attention.soft_cap = o.soft_cap;
  s.attention.sink_logits = o.sink_logits;
  s.attention.key_scales = o.key_scales;
  s.attention.value_scales = o.value_scales;
  s.page = {o.page};
  s.unit = {{o.method.unit}};
  s.layouts = find_by_name("layout", layouts, o.layout).make(o.method, data);
  s.plan = plan_of(o.method, data, o.complete_layers);
  if (o.in_place)
    s.route = in_place{};
  else
    s.route = resident{};
  return s;
}

}  // namespace freekv::examples
