// Temperatures of top_p, found from a prompt's keys and its last queries.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <freekv/algorithms/score_unit.hpp>
#include <freekv/algorithms/summarise_unit.hpp>
#include <freekv/core/error.hpp>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/shape.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/settings.hpp>
#include <freekv/policies/coarse_to_fine.hpp>
#include <freekv/policies/detail/temperature.hpp>
#include <freekv/policies/pooling.hpp>
#include <freekv/policies/selection.hpp>
#include <functional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace freekv {

namespace detail {

/// One layer of a prompt, as `calibrate_top_p` takes it.
struct prompt_layer {
  int layer = 0, tokens = 0, rows = 0;
  const float* keys = nullptr;     // (tokens, kv_heads, head_dim)
  const float* queries = nullptr;  // (rows, query_heads, head_dim)
};

/// The calibration of one layer: its candidates, scored as a pipeline scores them and as attention does. By
/// one lane, which takes milliseconds a KV head.
template <class Shape, class Settings>
class top_p_calibration {
  using element = typename Shape::element_type;
  static constexpr int d = Shape::head_dim;

 public:
  top_p_calibration(const Settings& s, const prompt_layer& of) : s_(s), of_(of), unit_{s.unit_tokens(), d} {
    const page_roles roles = roles_at(of.tokens, s.budget_at(of.layer), s.page.tokens);
    first_token_ = roles.sink_end * s.page.tokens;
    candidates_ = std::max(0, roles.candidates()) * s.units_per_page();
  }

  float temperature(int head, double p) {
    if (candidates_ == 0) return 1.0f;
    summarise(head);
    const bool each = s_.selects_by() == selection_scope::query_head;
    const int group = s_.model.group(), selecting = each ? group : 1;
    std::vector<std::vector<float>> scores;
    std::vector<int> wanted;
    for (int row = 0; row < of_.rows; ++row)
      for (int nth = 0; nth < selecting; ++nth) {
        const float* const first =
            of_.queries + (std::ptrdiff_t{row} * s_.model.query_heads + head * group + nth) * d;
        const group_query queries{first, each ? 1 : group, d};
        std::vector<float> pooled = score(head, queries);
        if (pooled.empty()) continue;
        wanted.push_back(std::min(units_wanted(head, queries, p), static_cast<int>(pooled.size())));
        scores.push_back(std::move(pooled));
      }
    if (scores.empty()) return 1.0f;
    return static_cast<float>(calibrated_temperature(
        static_cast<int>(scores.size()), p, [&](int r) { return scores[to_size(r)].data(); },
        [&](int r) { return static_cast<int>(scores[to_size(r)].size()); },
        [&](int r) { return wanted[to_size(r)]; }));
  }

 private:
  float key_scale_of(int head) const {
    const std::vector<float>& scales = s_.attention.key_scales;
    return scales.empty() ? 1.0f : scales[to_size(of_.layer * s_.model.kv_heads + head)];
  }
  const float* key(int token, int head) const {
    return of_.keys + (std::ptrdiff_t{token} * s_.model.kv_heads + head) * d;
  }

  /// Stores the candidates' summaries, of keys as a pipeline has them.
  void summarise(int head) {
    std::vector<element> keys(to_size(unit_.tokens * d));
    std::vector<float> widened(keys.size());
    resolve(s_.summary, [&](const auto& summary) {
      numbers_.resize(to_size(summary.width(unit_)));
      bytes_ = summary_bytes<element>(summary, unit_);
      stored_.resize(bytes_ * to_size(candidates_));
      for (int j = 0; j < candidates_; ++j) {
        for (int t = 0; t < unit_.tokens; ++t)
          for (int i = 0; i < d; ++i)
            keys[to_size(t * d + i)] =
                stored_number<element>(key(first_token_ + j * unit_.tokens + t, head)[i], key_scale_of(head));
        summarise_unit<element>(scalar_team{}, summary_at(summary, of_.layer, head),
                                head_slice<const element>{keys.data(), nullptr, d}, unit_,
                                {widened.data(), numbers_.data()}, stored(j));
      }
    });
  }
  std::byte* stored(int j) { return stored_.data() + bytes_ * to_size(j); }

  /// Pooled scores of the candidates that have any, the best first.
  std::vector<float> score(int head, group_query queries) {
    constexpr scalar_team team{};
    std::vector<float> pooled_query(to_size(d)), pooled(to_size(candidates_));
    return resolve(s_.pooling, [&]<class Pooling>(const Pooling& pooling) {
      if constexpr (query_pooling<Pooling>) {
        pooling.pool_query(team, queries, pooled_query.data());
        queries = {pooled_query.data(), 1, d};
      }
      const std::vector<float> scores = score_each(head, queries);
      std::vector<float> log_sums(to_size(queries.group));
      for (int g = 0; g < queries.group; ++g) {
        log_sum_exp sum;
        for (int j = 0; j < candidates_; ++j) sum.add(scores[to_size(g * candidates_ + j)]);
        log_sums[to_size(g)] = sum.value();
      }
      const row_scores row{scores.data(), candidates_, log_sums.data(), queries.group};
      for (int j = 0; j < candidates_; ++j)
        if constexpr (query_pooling<Pooling>)
          pooled[to_size(j)] = scores[to_size(j)];
        else
          team.store(&pooled[to_size(j)], pooling.pool(team, row, j));
      for (float& x : pooled) x = clamp_score(x);
      std::erase(pooled, -infinity);
      std::sort(pooled.begin(), pooled.end(), std::greater<>());
      return pooled;
    });
  }
  /// (group, candidates)
  std::vector<float> score_each(int head, const group_query& queries) {
    constexpr scalar_team team{};
    std::vector<float> scores(to_size(queries.group * candidates_));
    resolve(s_.summary, [&]<class Summary>(const Summary& summary) {
      std::vector<float> prepared(
          to_size(prepared_queries::floats(queries.group, summary_query_width(summary, d))));
      const auto of_head = summary_at(summary, of_.layer, head);
      const prepared_queries by = prepare_group(
          team, of_head, queries, s_.attention.selection_scale * key_scale_of(head), prepared.data());
      for (int j = 0; j < candidates_; ++j) {
        const score_column column{scores.data() + j, candidates_};
        if constexpr (two_stage_summary<Summary>)
          score_unit_finely<element>(team, of_head, unit_, stored(j), by, numbers_.data(), column);
        else
          score_unit<element>(team, of_head, unit_, stored(j), by, numbers_.data(), column);
      }
    });
    return scores;
  }

  /// The fewest candidates that have `p` of the attention that the queries give to all of them, each as much.
  int units_wanted(int head, const group_query& queries, double p) const {
    std::vector<double> shares(to_size(candidates_)), masses(shares.size());
    for (int g = 0; g < queries.group; ++g) {
      double most = -static_cast<double>(infinity), sum = 0.0;
      for (int j = 0; j < candidates_; ++j)
        most = std::max(most, masses[to_size(j)] = log_mass(head, queries.head(g), j));
      for (double& mass : masses) sum += mass = std::exp(mass - most);
      for (std::size_t j = 0; j < shares.size(); ++j) shares[j] += masses[j] / (sum * queries.group);
    }
    std::sort(shares.begin(), shares.end(), std::greater<>());
    double taken = 0.0;
    for (std::size_t j = 0; j < shares.size(); ++j)
      if ((taken += shares[j]) >= p) return static_cast<int>(j) + 1;
    return candidates_;
  }
  double log_mass(int head, const float* query, int j) const {
    double most = -static_cast<double>(infinity), sum = 0.0;
    for (int t = 0; t < unit_.tokens; ++t) {
      const float* const of_token = key(first_token_ + j * unit_.tokens + t, head);
      double score = 0.0;
      for (int i = 0; i < d; ++i) score += static_cast<double>(query[i]) * static_cast<double>(of_token[i]);
      score *= static_cast<double>(s_.attention.scale);
      if (const auto cap = static_cast<double>(s_.attention.soft_cap); cap != 0.0)
        score = cap * std::tanh(score / cap);
      if (score > most)
        sum = sum * std::exp(most - score) + 1.0, most = score;
      else
        sum += std::exp(score - most);
    }
    const double mass = most + std::log(sum);
    return std::isnan(mass) ? -static_cast<double>(infinity) : mass;  // as a unit of NaN scores (5.1)
  }

  const Settings& s_;
  const prompt_layer of_;
  const kv_extent unit_;
  int first_token_ = 0, candidates_ = 0;
  std::vector<std::byte> stored_;
  std::vector<float> numbers_;
  std::size_t bytes_ = 0;
};

}  // namespace detail

/// Finds the temperatures of a layer's KV heads for `top_p` of `settings`, which are a pipeline's
/// `configuration()`: those at which as many of the candidates have p of the softmax of their pooled scores
/// as have p of the attention that is given to all of them, on average over the prompt's last rows. `keys`
/// are a prompt's, (tokens, kv_heads, head_dim), before any rounding or codec, `queries` those of its last
/// rows, (rows, query_heads, head_dim), 16 are enough; to `temperatures` (kv_heads). Where there are no
/// candidates they are 1. Pinned units count as candidates, and of two-stage summaries all candidates are
/// scored finely. Allocates, and takes as long as attention of those rows: not for a step. Throws
/// usage_error. (HARD-KV, arXiv 2606.28831, section 3: there tokens' scores are calibrated after a transform
/// of them, here units' after a summary; the attention of a group is the mean over its heads, as in FreeKV)
template <class Shape, class Settings>
[[gnu::cold]] void calibrate_top_p(const Settings& settings, int layer, std::span<const float> keys,
                                   std::span<const float> queries, std::span<float> temperatures) {
  const std::size_t key_row = to_size(settings.model.kv_heads * Shape::head_dim),
                    query_row = to_size(settings.model.query_heads * Shape::head_dim);
  const auto text = [](auto n) { return std::to_string(n); };
  if (layer < 0 || layer >= settings.model.layers)
    throw usage_error("calibrate_top_p: layer " + text(layer) + " is not one of " +
                      text(settings.model.layers) + "; choose from 0 to " + text(settings.model.layers - 1));
  if (keys.size() % key_row != 0 || queries.size() % query_row != 0 ||
      queries.size() / query_row > keys.size() / key_row ||
      temperatures.size() != to_size(settings.model.kv_heads))
    throw usage_error("calibrate_top_p: " + text(keys.size()) + " numbers of keys in rows of " +
                      text(key_row) + ", " + text(queries.size()) + " of queries in rows of " +
                      text(query_row) + " and room for " + text(temperatures.size()) +
                      " temperatures; give whole rows, queries of at most as many tokens as keys, and room "
                      "for one temperature of each of " +
                      text(settings.model.kv_heads) + " KV heads");
  resolve(settings.selection, [&]<class Selection>(const Selection& selection) {
    if constexpr (std::is_same_v<Selection, top_p>) {
      detail::top_p_calibration<Shape, Settings> calibration(
          settings, {layer, static_cast<int>(keys.size() / key_row),
                     static_cast<int>(queries.size() / query_row), keys.data(), queries.data()});
      for (int head = 0; head < settings.model.kv_heads; ++head)
        temperatures[to_size(head)] = calibration.temperature(head, static_cast<double>(selection.p));
    } else {
      throw usage_error("calibrate_top_p: " + std::string(Selection::name) +
                        " takes no temperatures; choose top_p");
    }
  });
}

}  // namespace freekv
