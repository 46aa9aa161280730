#include <algorithm>
#include <cmath>

#include "measure.hpp"

namespace freekv::examples {

namespace {

/// -ln of the softmax of `logits` at `token`.
double loss_of(std::span<const float> logits, llama_token token) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  return std::log(sum) + largest - logits[static_cast<std::size_t>(token)];
}

int most_likely(std::span<const float> logits) {
  return static_cast<int>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

/// Empty for a contender that has none.
subspace_basis basis_of(const contender& c, const prepared_prompt& prompt) {
  if (c.basis == basis_source::none) return {};
  return (c.basis == basis_source::prompt ? prompt.own : prompt.other).view();
}

}  // namespace

std::unique_ptr<pipeline> make_contender(const contender& c, const common_settings& s,
                                         const model_shape& shape, const prepared_prompt& prompt, int more,
                                         bool in_place, host_backend& backend) {
  pipeline_options o;
  o.element = data_type::f16;
  o.head_dim = shape.head_dim;
  o.layers = shape.layers;
  o.query_heads = shape.query_heads;
  o.kv_heads = shape.kv_heads;
  o.page = s.page;
  const bool selects = c.does.plan == "retrieval";
  o.budget = {s.sink, selects ? s.window : s.budget - s.sink,
              selects ? (s.budget - s.sink - s.window) / s.page : 1};
  o.max_tokens = prompt.kv.tokens() + more;
  o.scale = shape.scale;
  o.complete_layers = s.complete_layers;
  o.in_place = in_place;
  o.does = c.does;
  o.basis = basis_of(c, prompt);
  return make_pipeline(o, backend);
}

std::size_t summary_bytes_of(const contender& c, const pipeline& p) {
  return c.does.plan == "retrieval" ? p.summary_bytes() : 0;
}

quality measure_quality(const contender& c, const common_settings& s, const model& model,
                        const prepared_prompt& prompt, std::span<const llama_token> text,
                        const progress_function& progress) {
  host_backend backend({.threads = s.threads, .overlap = s.overlap});
  const auto steps = static_cast<int>(text.size()) - 1;
  const auto p = make_contender(c, s, model.shape(), prompt, steps, false, backend);
  prompt.kv.restore(*p);
  engine decoding(model, {.threads = s.threads, .context = 1, .rows = 1});
  retrieval_attention attention(*p, model.shape(), c.does.plan == "complete" ? 0 : s.complete_layers);
  attention.compare_with_full(true);
  quality q;
  for (int step = 0; step < steps; ++step) {
    const auto logits =
        decoding.decode(text[static_cast<std::size_t>(step)], prompt.kv.tokens() + step, attention);
    q.losses.push_back(loss_of(logits, text[static_cast<std::size_t>(step) + 1]));
    q.choices.push_back(most_likely(logits));
    progress("quality of " + c.name, static_cast<double>(step + 1) / steps);
  }
  q.attention = attention.statistics();
  q.fast_tier_bytes = p->bytes().fast_tier();
  const subspace_basis basis = basis_of(c, prompt);
  q.fast_tier_bytes +=
      static_cast<std::size_t>(basis.layers * basis.kv_heads) * basis.floats_per_head() * sizeof(float);
  q.slice_bytes = p->slice_bytes();
  q.summary_bytes = summary_bytes_of(c, *p);
  return q;
}

needle_result measure_needles(const contender& c, const common_settings& s, const model& model,
                              const prepared_prompt& prompt, const needle_text& needles,
                              const progress_function& progress) {
  host_backend backend({.threads = s.threads, .overlap = s.overlap});
  std::size_t longest = 0;
  for (const auto& question : needles.questions) longest = std::max(longest, question.tokens.size());
  const auto p = make_contender(c, s, model.shape(), prompt, static_cast<int>(longest), true, backend);
  engine decoding(model, {.threads = s.threads, .context = 1, .rows = 1});
  retrieval_attention attention(*p, model.shape(), s.complete_layers);
  needle_result result;
  result.summary_bytes = summary_bytes_of(c, *p);
  for (const auto& question : needles.questions) {
    prompt.kv.restore(*p);
    double loss = 0;
    bool found = true;
    const std::size_t first_digit = question.tokens.size() - static_cast<std::size_t>(question.digits);
    for (std::size_t i = 0; i + 1 < question.tokens.size(); ++i) {
      const auto logits =
          decoding.decode(question.tokens[i], prompt.kv.tokens() + static_cast<int>(i), attention);
      if (i + 1 < first_digit) continue;
      loss += loss_of(logits, question.tokens[i + 1]);
      found = found && most_likely(logits) == question.tokens[i + 1];
    }
    result.loss_per_digit.push_back(loss / question.digits);
    result.found.push_back(found);
    progress("needles with " + c.name + ", budget " + std::to_string(s.budget) + ", " +
                 std::to_string(prompt.kv.tokens()) + " tokens",
             static_cast<double>(result.found.size()) / static_cast<double>(needles.questions.size()));
  }
  return result;
}

double needle_result::mean_loss() const {
  double sum = 0;
  for (const double loss : loss_per_digit) sum += loss;
  return sum / static_cast<double>(loss_per_digit.size());
}

int needle_result::facts_found() const {
  return static_cast<int>(std::count(found.begin(), found.end(), true));
}

}  // namespace freekv::examples
