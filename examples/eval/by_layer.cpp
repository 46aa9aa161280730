// What each layer should have of a budget that is common in the mean: learnt from a text decoded with full
// attention.

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <freekv/core/size.hpp>
#include <fstream>
#include <numeric>
#include <vector>

#include "job.hpp"
#include "report.hpp"
#include "retrieval_attention.hpp"

namespace freekv::examples {

namespace {

/// Attends as `ours`, which is full attention. Of each layer it sums what the n best pages of a KV head, by
/// their mean mass over the group, would lose beside sink and window.
class page_losses : public attention {
 public:
  page_losses(attention& ours, const model_shape& shape, const prompt_cache& prompt,
              const common_settings& common, int most)
      : ours_(ours),
        shape_(shape),
        common_(common),
        most_(most),
        keys_(to_size(shape.layers)),
        values_(to_size(shape.layers)),
        errors_(to_size(shape.layers), std::vector<double>(to_size(most) + 1)),
        masses_(to_size(shape.layers)) {
    for (int layer = 0; layer < shape.layers; ++layer) {
      keys_[to_size(layer)] = prompt.float_keys(layer);
      const auto values = prompt.values(layer);
      const auto* const halves = reinterpret_cast<const half*>(values.data());
      values_[to_size(layer)].assign(halves, halves + values.size() / sizeof(half));
    }
  }

  void attend(const layer_rows& rows, float* output) override {
    ours_.attend(rows, output);
    if (rows.layer == 0) ++steps_;
    const std::size_t row = to_size(shape_.kv_heads * shape_.head_dim), layer = to_size(rows.layer);
    keys_[layer].insert(keys_[layer].end(), rows.key, rows.key + row);
    values_[layer].insert(values_[layer].end(), rows.value, rows.value + row);
    if (rows.layer < common_.complete_layers || shape_.slides(rows.layer)) return;
    for (int head = 0; head < shape_.kv_heads; ++head) add(rows.layer, head, rows.query);
  }
  /// Relative L2 distance of a head's output from full attention's with n pages, n from 0, the mean over
  /// heads and steps.
  std::vector<double> errors(int layer) const {
    std::vector<double> mean = errors_[to_size(layer)];
    for (double& error : mean) error /= samples();
    return mean;
  }
  /// Softmax mass of the pages that may be selected, likewise.
  double mass(int layer) const { return masses_[to_size(layer)] / samples(); }

 private:
  struct page_part {
    double mass = 0;
    std::vector<double> out;  // (head_dim), values weighted by masses
  };

  double samples() const { return static_cast<double>(to_size(shape_.query_heads) * steps_); }

  /// What each page has of a query head's attention.
  std::vector<page_part> parts_of(int layer, int head, const float* query) const {
    const auto d = to_size(shape_.head_dim), stride = to_size(shape_.kv_heads) * d,
               tokens = keys_[to_size(layer)].size() / stride, page = to_size(common_.page);
    const float* const keys = keys_[to_size(layer)].data() + to_size(head) * d;
    const float* const values = values_[to_size(layer)].data() + to_size(head) * d;
    std::vector<float> scores(tokens);
    for (std::size_t token = 0; token < tokens; ++token) {
      float product = 0;
      for (std::size_t i = 0; i < d; ++i) product += query[i] * keys[token * stride + i];
      scores[token] = product * shape_.scale;
    }
    const float most = *std::max_element(scores.begin(), scores.end());
    for (float& score : scores) score = std::exp(score - most);
    const double sum = std::accumulate(scores.begin(), scores.end(), 0.0);
    std::vector<page_part> parts((tokens + page - 1) / page, page_part{0, std::vector<double>(d)});
    for (std::size_t token = 0; token < tokens; ++token) {
      const double mass = scores[token] / sum;
      page_part& part = parts[token / page];
      part.mass += mass;
      for (std::size_t i = 0; i < d; ++i) part.out[i] += mass * values[token * stride + i];
    }
    return parts;
  }

  void add(int layer, int head, const float* queries) {
    const int group = shape_.query_heads / shape_.kv_heads;
    std::vector<std::vector<page_part>> parts;
    for (int g = 0; g < group; ++g)
      parts.push_back(parts_of(layer, head, queries + (head * group + g) * shape_.head_dim));
    const auto d = to_size(shape_.head_dim), stride = to_size(shape_.kv_heads) * d;
    const auto tokens = static_cast<int>(keys_[to_size(layer)].size() / stride);
    const int first = common_.sink / common_.page,
              end = std::max(first, (tokens - common_.window) / common_.page);
    std::vector<int> best(to_size(end - first));  // pages that may be selected
    std::iota(best.begin(), best.end(), first);
    std::vector<double> pooled(parts.front().size());
    for (const auto& of_query : parts) {
      double candidates = 0;
      for (const int page : best) candidates += of_query[to_size(page)].mass;
      masses_[to_size(layer)] += candidates;
      for (const int page : best)
        if (candidates > 0) pooled[to_size(page)] += of_query[to_size(page)].mass / candidates;
    }
    std::stable_sort(best.begin(), best.end(),
                     [&](int a, int b) { return pooled[to_size(a)] > pooled[to_size(b)]; });
    for (const auto& of_query : parts) {
      std::vector<double> full(d), kept(d);
      double mass = 0, size = 0;
      const auto keep = [&](int page) {
        mass += of_query[to_size(page)].mass;
        for (std::size_t i = 0; i < d; ++i) kept[i] += of_query[to_size(page)].out[i];
      };
      for (int page = 0; page < static_cast<int>(of_query.size()); ++page) {
        for (std::size_t i = 0; i < d; ++i) full[i] += of_query[to_size(page)].out[i];
        if (page < first || page >= end) keep(page);
      }
      for (const double x : full) size += x * x;
      for (int n = 0; n <= most_; ++n) {
        if (n > 0 && to_size(n) <= best.size()) keep(best[to_size(n) - 1]);
        double square = 0;
        for (std::size_t i = 0; i < d; ++i) square += std::pow(full[i] - kept[i] / mass, 2);
        errors_[to_size(layer)][to_size(n)] += size > 0 ? std::sqrt(square / size) : 0;
      }
    }
  }

  attention& ours_;
  model_shape shape_;
  common_settings common_;
  int most_;
  std::vector<std::vector<float>> keys_, values_;  // by layer, (tokens, kv_heads, head_dim)
  std::vector<std::vector<double>> errors_;        // by layer, sums with n pages
  std::vector<double> masses_;                     // by layer, sums
  long long steps_ = 0;
};

}  // namespace

void learn_by_layer(job& j) {
  const arguments& a = j.options();
  const common_settings& common = a.common;
  const model_shape& shape = j.model().shape();
  const int pages = (common.budget - common.sink - common.window) / common.page;
  const int least = std::min(pages, 2), most = 4 * pages;
  const contender& full = j.contenders().front();
  host_backend backend({.threads = common.threads});
  const auto p = make_contender(full, common, shape, j.prompt(), a.steps, true, backend);
  j.prompt().kv.restore(*p);
  retrieval_attention attention(*p, shape, 0);
  page_losses losses(attention, shape, j.prompt().kv, common, most);
  engine decoding(j.model(), {.threads = common.threads, .context = 1, .rows = 1});
  for (int step = 0; step < a.steps; ++step) {
    decoding.decode(j.after_prompt()[step], a.prompt + step, losses);
    j.progress()("what layers lose", static_cast<double>(step + 1) / a.steps);
  }

  std::vector<int> layers;  // that retrieve
  std::vector<std::vector<double>> errors;
  for (int layer = common.complete_layers; layer < shape.layers; ++layer) {
    if (shape.slides(layer)) continue;
    layers.push_back(layer);
    errors.push_back(losses.errors(layer));
  }
  if (layers.empty()) throw choice_error("--section by_layer needs layers that retrieve, and there are none");
  const auto count = static_cast<int>(layers.size());
  const std::vector<int> units = halfway(share_units(errors, count * pages, least, most), pages);

  const std::string path = a.out + "/layers.txt";
  std::ofstream list(path);
  list << "# freekv-compare --section by_layer: " << shape.name << ", " << a.steps << " tokens of "
       << std::filesystem::path(a.text).filename().string() << " after " << a.prompt << ", --budget "
       << common.budget << ", page " << common.page
       << "\n# layer tokens tau delta; mass of what may be selected\n";
  std::vector<std::vector<std::string>> rows{
      {"layer", "mass of pages", "error with " + std::to_string(pages), "pages", "error with these"}};
  double even = 0, own = 0;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const double mass = losses.mass(layers[i]);
    list << layers[i] << " " << units[i] * common.page << " - -  # " << fixed(mass, 3) << "\n";
    const double before = errors[i][to_size(pages)], after = errors[i][to_size(units[i])];
    even += before / count;
    own += after / count;
    rows.push_back({std::to_string(layers[i]), fixed(mass, 3), fixed(before, 3), std::to_string(units[i]),
                    fixed(after, 3)});
    j.lines().add("by_layer", full.name, "pages", units[i], "per KV head",
                  {{"layer", layers[i]}, {"steps", a.steps}});
  }
  list.close();
  if (!list) throw file_error("\"" + path + "\" cannot be written; choose another folder with --out");
  j.say("\n" + table(rows) +
        "error: relative L2 distance of a head's output from full attention's with the best pages by their "
        "mean mass over its group,\nmean " +
        fixed(even, 3) + ", and " + fixed(own, 3) +
        " with as many pages by layer; mass of pages: of what may be selected. For --by-layer: " + path +
        "\n");
}

}  // namespace freekv::examples
