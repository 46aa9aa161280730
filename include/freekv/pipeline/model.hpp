// The model that a pipeline keeps a cache for: its layers and heads, and how its attention computes.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <freekv/core/error.hpp>
#include <freekv/core/size.hpp>
#include <string>
#include <utility>
#include <vector>

namespace freekv {

/// Layers and heads of a model; its head_dim is the pipeline's shape's.
struct model_settings {
  /// The most that settings may say, so that sizes are counted right.
  static constexpr int most_layers = 1 << 16, most_heads = 1 << 12;
  int layers = 1;
  int query_heads = 0;
  int kv_heads = 0;

  /// Query heads that share a KV head.
  int group() const { return query_heads / kv_heads; }
  /// Throws settings_error.
  [[gnu::cold]] void validate() const {
    const auto text = [](int n) { return std::to_string(n); };
    if (layers < 1) throw settings_error("layers is " + text(layers) + "; a pipeline has at least 1");
    if (kv_heads < 1) throw settings_error("kv_heads is " + text(kv_heads) + "; a layer has at least 1");
    if (layers > most_layers || query_heads > most_heads)
      throw settings_error(text(layers) + " layers of " + text(query_heads) + " query heads; give at most " +
                           text(most_layers) + ", and " + text(most_heads));
    if (query_heads < kv_heads || query_heads % kv_heads != 0)
      throw settings_error("query_heads " + text(query_heads) + " is not a multiple of kv_heads " +
                           text(kv_heads));
  }
};

/// Base of the log-sum-exp that attention returns.
enum class log_base : std::uint8_t {
  e,
  two,  ///< as FlashInfer has it
};
constexpr float nat_in(log_base base) { return base == log_base::two ? 1.44269504088896341f : 1.0f; }

/// Attention's scores and masks, and the base of the log-sum-exp that it returns. (docs/contract.md, 1.2 to
/// 1.4, and 1.6)
struct attention_settings {
  float scale = 0.0f;      ///< of scores; 0: 1 / sqrt(head_dim)
  float selection_scale = 0.0f;  ///< of the scores that units are selected by; 0: `scale`
  int sliding_window = 0;  ///< tokens, a row's own included, that it attends to in layers of kind `sliding`
  float soft_cap = 0.0f;   ///< scores become soft_cap * tanh(score / soft_cap); 0: none
  std::vector<float> sink_logits{};  ///< (layers, query_heads): of a further token without a value, whose
                                     ///< weight the log-sum-exp counts; none: no such token
  log_base lse_base = log_base::e;
  /// Units in which keys and values are stored: a key is its stored numbers times its scale (vLLM's k_scale
  /// and v_scale). Of all, (layers), or (layers, kv_heads); none: 1. Above 0. Rows that are appended are
  /// divided by them, but those of fp8_e4m3, which are stored numbers. Data that policies have learnt from
  /// keys is of stored ones.
  std::vector<float> key_scales{}, value_scales{};

  /// Fills in what has its default. Throws settings_error.
  [[gnu::cold]] void fill_in(const model_settings& model, int head_dim) {
    if (scale == 0.0f) scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
    if (selection_scale == 0.0f) selection_scale = scale;
    if (!(scale > 0.0f && std::isfinite(scale))) throw settings_error("scale is not finite, or below 0");
    if (!(selection_scale > 0.0f && std::isfinite(selection_scale)))
      throw settings_error("selection_scale is not finite, or below 0");
    if (!(soft_cap >= 0.0f && std::isfinite(soft_cap)))
      throw settings_error("soft_cap is " + std::to_string(soft_cap) +
                           "; choose a positive number, or 0 for none");
    const std::size_t heads = to_size(model.layers) * to_size(model.query_heads);
    if (!sink_logits.empty() && sink_logits.size() != heads)
      throw settings_error("sink_logits has " + std::to_string(sink_logits.size()) + " numbers; needed are " +
                           std::to_string(heads) + ", one for each query head of each layer, or none");
    for (const float logit : sink_logits)
      if (!(logit < HUGE_VALF))
        throw settings_error("a sink logit is NaN or infinity; -infinity is a token of no weight");
    fill_in_scales("key_scales", key_scales, model);
    fill_in_scales("value_scales", value_scales, model);
  }

 private:
  /// Makes scales those of each KV head of each layer; of those that are all 1, none.
  [[gnu::cold]] static void fill_in_scales(const char* name, std::vector<float>& scales,
                                           const model_settings& model) {
    const std::size_t layers = to_size(model.layers), heads = to_size(model.kv_heads);
    const std::size_t given = scales.size();
    if (given != 0 && given != 1 && given != layers && given != layers * heads)
      throw settings_error(std::string(name)
                               .append(" has ")
                               .append(std::to_string(given))
                               .append(" numbers; give 1, " + std::to_string(layers) +
                                       " (one for each layer), " + std::to_string(layers * heads) +
                                       " (one for each KV head of each layer), or none"));
    bool all_are_1 = true;
    for (const float scale : scales) {
      all_are_1 = all_are_1 && scale == 1.0f;
      if (!(scale > 0.0f && scale < HUGE_VALF))
        throw settings_error(std::string(name).append(" has ").append(std::to_string(scale)).append(
            "; a scale is a number above 0, such as the largest number's size over 448"));
    }
    if (all_are_1) scales.clear();
    if (scales.empty()) return;
    std::vector<float> of_heads;
    for (std::size_t i = 0; i < layers * heads; ++i)
      of_heads.push_back(scales[given == 1 ? 0 : given == layers ? i / heads : i]);
    scales = std::move(of_heads);
  }
};

}  // namespace freekv
