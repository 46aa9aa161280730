// What a second level of summaries would save: boxes of several pages, whose bounds rule out that one of
// their pages is selected, so that these need not be scored. The selection stays the same.

#include <algorithm>
#include <cmath>
#include <freekv/core/size.hpp>
#include <functional>
#include <limits>

#include "measure.hpp"

namespace freekv::bench {

namespace {

constexpr int page = 32;
constexpr float infinity = std::numeric_limits<float>::infinity();

/// The boxes around `rows` keys each, (boxes, head_dim).
struct boxes {
  int head_dim = 0;
  std::vector<float> low, high;

  boxes(std::span<const float> keys, int dimensions, int rows) : head_dim(dimensions) {
    const auto d = to_size(dimensions);
    const std::size_t count = keys.size() / d / to_size(rows);
    low.assign(count * d, infinity);
    high.assign(count * d, -infinity);
    for (std::size_t i = 0; i < count * d * to_size(rows); ++i) {
      const std::size_t at = i / d / to_size(rows) * d + i % d;
      low[at] = std::min(low[at], keys[i]);
      high[at] = std::max(high[at], keys[i]);
    }
  }
  int count() const { return static_cast<int>(low.size()) / head_dim; }
  /// The most that a key in box i may score.
  double bound(const float* query, int i) const {
    double sum = 0;
    for (int e = 0; e < head_dim; ++e) {
      const auto at = to_size(i * head_dim + e);
      sum += std::max(query[e] * low[at], query[e] * high[at]);
    }
    return sum / std::sqrt(head_dim);
  }
};

}  // namespace

void ruled_out::add(std::span<const float> keys, std::span<const float> queries, const sizes& of) {
  const auto whole = to_size(of.pages_of_box * page * of.head_dim);
  keys = keys.first(keys.size() / whole * whole);
  const boxes pages(keys, of.head_dim, page), large(keys, of.head_dim, of.pages_of_box * page);
  const auto each = [&](const boxes& b, auto&& pooled) {
    std::vector<double> all;
    for (int i = 0; i < b.count(); ++i) all.push_back(pooled(i));
    return all;
  };
  const auto per_query = to_size(of.group * of.head_dim);
  for (std::size_t first = 0; first + per_query <= queries.size(); first += per_query) {
    const auto score = [&](const boxes& b, int g, int i) {
      return b.bound(&queries[first] + g * of.head_dim, i);
    };
    std::vector<double> masses;  // of all candidates, by query head
    for (int g = 0; g < of.group; ++g) {
      const auto scores = each(pages, [&](int i) { return score(pages, g, i); });
      const double most = *std::max_element(scores.begin(), scores.end());
      double sum = 0;
      for (const double x : scores) sum += std::exp(x - most);
      masses.push_back(most + std::log(sum));
    }
    const auto share = [&](bool softmax) {
      const auto pooled = [&](const boxes& b) {
        return each(b, [&](int i) {
          double sum = 0;
          for (int g = 0; g < of.group; ++g) {
            const double x = score(b, g, i);
            sum += softmax ? std::exp(x - masses[g]) : x;
          }
          return sum;
        });
      };
      auto candidates = pooled(pages);
      const auto least = candidates.begin() + of.selected - 1;
      std::nth_element(candidates.begin(), least, candidates.end(), std::greater<>());
      const auto bounds = pooled(large);
      return static_cast<double>(
                 std::count_if(bounds.begin(), bounds.end(), [&](double x) { return x < *least; })) /
             static_cast<double>(bounds.size());
    };
    mean_score += share(false);
    mean_softmax += share(true);
    ++selections;
  }
}

void report_ruled_out(context& c, const std::string& of_case, const ruled_out& all) {
  c.ratio("two levels", of_case, "boxes ruled out, mean_score", all.mean_score / all.selections);
  c.ratio("two levels", of_case, "boxes ruled out, mean_softmax with L_g known",
          all.mean_softmax / all.selections);
}

void bench_two_levels(context& c) {
  constexpr int tokens = 131072, head_dim = 128, group = 4;
  if (!c.begins("two levels", "normal keys")) return;
  fast_normals random(7);
  std::vector<float> keys(to_size((c.smoke ? tokens / 64 : tokens) * head_dim)),
      queries(2 * group * head_dim);
  for (auto* const rows : {&keys, &queries})
    for (float& x : *rows) x = random.next();
  for (const int pages_of_box : {4, 16}) {
    ruled_out all;
    all.add(keys, queries, {head_dim, group, pages_of_box, 2048 / page / (c.smoke ? 64 : 1)});
    report_ruled_out(
        c, "normal keys, 128K, 2048 selected, boxes of " + std::to_string(pages_of_box) + " pages", all);
  }
}

}  // namespace freekv::bench
