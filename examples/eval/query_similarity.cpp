// How alike the queries of successive steps are: what speculative retrieval rests on. (FreeKV section 3.1,
// figure 3)

#include <algorithm>
#include <cmath>
#include <freekv/core/size.hpp>
#include <vector>

#include "job.hpp"
#include "retrieval_attention.hpp"
#include "statistics.hpp"

namespace freekv::examples {

namespace {

/// Attends as `ours`, and keeps every step's queries.
class query_keeper : public attention {
 public:
  query_keeper(attention& ours, const model_shape& shape)
      : ours_(ours), row_(to_size(shape.query_heads * shape.head_dim)), layers_(shape.layers) {}

  void attend(const layer_rows& rows, float* output) override {
    queries_.insert(queries_.end(), rows.query, rows.query + row_);
    ours_.attend(rows, output);
  }
  /// (query_heads, head_dim) of a step and layer.
  const float* query(int step, int layer) const {
    return queries_.data() + (to_size(step) * to_size(layers_) + to_size(layer)) * row_;
  }

 private:
  attention& ours_;
  std::size_t row_;
  int layers_;
  std::vector<float> queries_;  // (steps, layers, query_heads, head_dim)
};

double cosine(const float* a, const float* b, int size) {
  double product = 0, of_a = 0, of_b = 0;
  for (int i = 0; i < size; ++i) {
    product += double{a[i]} * b[i];
    of_a += double{a[i]} * a[i];
    of_b += double{b[i]} * b[i];
  }
  return product / std::sqrt(of_a * of_b);
}

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

/// Cosines of a KV head, which is corrected where they are below tau: the mean over its query heads, by step.
struct cosines_of_head {
  int layer = 0, head = 0;
  double mean = 0;
  std::vector<double> by_step;
};

/// How the cosines that a correction looks at vary from step to step (figure 3c): of three KV heads, those of
/// least, middle and most mean, and how many heads are below tau. `similarities(layer, query head, apart)`
/// are by step. Returns a sentence.
template <class Similarities>
std::string compare_steps(job& j, const std::string& method, const Similarities& similarities) {
  const arguments& a = j.options();
  const model_shape& shape = j.model().shape();
  const int group = shape.query_heads / shape.kv_heads;
  std::vector<cosines_of_head> heads;
  for (int layer = a.common.complete_layers; layer < shape.layers; ++layer)
    for (int head = 0; head < shape.kv_heads && !shape.slides(layer); ++head) {
      std::vector<double> by_step(to_size(a.steps - 1));
      for (int g = 0; g < group; ++g) {
        const auto of_query_head = similarities(layer, head * group + g, 1);
        for (std::size_t step = 0; step < by_step.size(); ++step)
          by_step[step] += of_query_head[step] / group;
      }
      const double of_all = mean(by_step);
      heads.push_back({layer, head, of_all, std::move(by_step)});
    }
  if (heads.empty()) return "";
  std::ranges::sort(heads, {}, &cosines_of_head::mean);
  const auto add = [&](const char* which, const cosines_of_head& of) {
    j.lines().add("query_cosine_steps", method, which, of.mean, "",
                  {{"layer", of.layer}, {"head", of.head}, {"by_step", of.by_step}});
  };
  add("least", heads.front());
  add("middle", heads[heads.size() / 2]);
  add("most", heads.back());
  std::vector<double> below(to_size(a.steps - 1));
  for (const cosines_of_head& of : heads)
    for (std::size_t step = 0; step < below.size(); ++step)
      below[step] += (of.by_step[step] < double{a.tau}) / static_cast<double>(heads.size());
  j.lines().add("query_cosine_steps", method, "below_tau", mean(below), "", {{"by_step", below}});
  const auto percent = [](double share) { return fixed(100 * share, 0) + " %"; };
  return "in a step " + percent(mean(below)) + " of the KV heads that retrieve are below tau " +
         fixed(a.tau, 2) + ", the mean of their query heads; in the tenth of steps with fewest " +
         percent(percentile(below, 0.1)) + " or less, with most " + percent(percentile(below, 0.9)) +
         " or more\n";
}

}  // namespace

void compare_queries(job& j) {
  const arguments& a = j.options();
  const contender& full = j.contenders().front();
  const model_shape& shape = j.model().shape();
  const prepared_prompt& prompt = j.prompt();
  host_backend backend({.threads = a.common.threads});
  const auto p = make_contender(full, a.common, shape, prompt, a.steps, true, backend);
  prompt.kv.restore(*p);
  retrieval_attention attention(*p, shape, 0);
  query_keeper kept(attention, shape);
  engine decoding(j.model(), {.threads = a.common.threads, .context = 1, .rows = 1});
  for (int step = 0; step < a.steps; ++step) {
    decoding.decode(j.after_prompt()[step], prompt.kv.tokens() + step, kept);
    j.progress()("queries of successive steps", static_cast<double>(step + 1) / a.steps);
  }

  // By query head, over steps; of all layers, for several distances.
  const auto similarities = [&](int layer, int head, int apart) {
    std::vector<double> all;
    for (int step = apart; step < a.steps; ++step)
      all.push_back(cosine(kept.query(step, layer) + head * shape.head_dim,
                           kept.query(step - apart, layer) + head * shape.head_dim, shape.head_dim));
    return all;
  };
  std::vector<int> distances;
  for (int apart = 1; apart < a.steps && apart <= 64; apart *= 2) distances.push_back(apart);
  constexpr double published = 0.84;  // what the paper's heads are all above, adjacent steps, mean over steps
  std::vector<std::vector<std::string>> rows{
      {"layer", "least head", "mean of heads", "most", "heads above 0.84", "steps above 0.9"}};
  for (std::size_t i = 1; i < distances.size(); ++i)
    rows[0].push_back(std::to_string(distances[i]) + " apart");
  int above = 0, heads = 0;
  for (int layer = 0; layer < shape.layers; ++layer) {
    std::vector<double> means, share_above, all;
    for (int head = 0; head < shape.query_heads; ++head) {
      const auto of_head = similarities(layer, head, 1);
      means.push_back(mean(of_head));
      all.insert(all.end(), of_head.begin(), of_head.end());
    }
    const auto [least, most] = std::minmax_element(means.begin(), means.end());
    const auto here =
        static_cast<int>(std::count_if(means.begin(), means.end(), [](double m) { return m > published; }));
    const auto alike = std::count_if(all.begin(), all.end(), [](double c) { return c >= 0.9; });
    above += here;
    heads += shape.query_heads;
    rows.push_back({std::to_string(layer) + (shape.slides(layer) ? " (slides)" : ""), fixed(*least, 3),
                    fixed(mean(means), 3), fixed(*most, 3),
                    std::to_string(here) + "/" + std::to_string(shape.query_heads),
                    fixed(100.0 * static_cast<double>(alike) / static_cast<double>(all.size()), 0) + " %"});
    j.lines().add("query_cosine", full.name, "adjacent", mean(means), "",
                  {{"layer", layer}, {"by_head", means}});
    for (const int apart : distances) {
      std::vector<double> farther = means;  // of adjacent steps
      for (int head = 0; apart > 1 && head < shape.query_heads; ++head)
        farther[head] = mean(similarities(layer, head, apart));
      if (apart > 1) rows.back().push_back(fixed(mean(farther), 3));
      j.lines().add("query_cosine_apart", full.name, "mean", mean(farther), "",
                    {{"layer", layer}, {"apart", apart}});
    }
  }
  const std::string below = compare_steps(j, full.name, similarities);
  j.say("\n" + table(rows) + "cosine of a query head's rotated queries of adjacent steps, mean over " +
        std::to_string(a.steps) + " steps after " + std::to_string(a.prompt) + " tokens, full attention; " +
        std::to_string(above) + " of " + std::to_string(heads) +
        " heads are\nabove 0.84, as all of the paper's are (FreeKV, figure 3); steps above 0.9: those that "
        "tau 0.9 would not correct, of single heads\n" +
        below);
}

}  // namespace freekv::examples
