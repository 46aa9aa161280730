// Texts to run a typed pipeline on, and whole steps of it.
#pragma once

#include <freekv/freekv.hpp>
#include <iterator>
#include <span>
#include <vector>

#include "../catch.hpp"
#include "rows.hpp"

namespace tests {

/// head_dim 24, pages of 8; unit, summary, rows, correction, plan and route chosen at run time.
using tiny_pipeline = freekv::retrieval_pipeline<
    freekv::kv_shape<freekv::half, 24>, freekv::page_size<8>, freekv::unit<freekv::dynamic>,
    freekv::any_of<freekv::min_max, freekv::chunk_means<4>, freekv::key_subspace<8, 3>>,
    freekv::any_of<freekv::per_kv_head, freekv::per_query_head>,
    freekv::any_of<freekv::cosine_drift, freekv::always, freekv::never>,
    freekv::any_of<freekv::complete_first<freekv::dynamic>,
                   freekv::complete_first<freekv::dynamic, freekv::layer_kind::window>>,
    freekv::any_of<freekv::resident, freekv::in_place>>;

/// Three layers, the first of them complete; 6 query heads on 2 KV heads; 1 sink, 2 window and 2 selected
/// pages.
inline tiny_pipeline::settings tiny_settings() {
  tiny_pipeline::settings s;
  s.model = {.layers = 3, .query_heads = 6, .kv_heads = 2};
  s.budget = {.sink = 8, .window = 16, .selected_units = 2};
  s.capacity.max_tokens = 200;
  s.plan = freekv::complete_first<freekv::dynamic>{1};
  return s;
}

/// What a model would bring: queries (tokens, query_heads, d), keys and values (tokens, kv_heads, d) of each
/// layer, and worths (tokens, kv_heads), NaN among them.
class text {
 public:
  struct rows {
    std::span<const float> queries, keys, values, worths;
  };

  template <class Settings>
  text(const Settings& s, int head_dim, int tokens, std::uint64_t seed)
      : layers_(count(s.model.layers)),
        query_row_(count(s.model.query_heads * head_dim)),
        key_row_(count(s.model.kv_heads * head_dim)),
        heads_(count(s.model.kv_heads)) {
    dice d(seed), of_worths(seed + 1000);
    for (layer_rows& l : layers_) {
      auto query = normals(d, query_row_), centre = normals(d, key_row_);
      for (int t = 0; t < tokens; ++t) {
        // Some steps turn the query far, most a little.
        const float turn = d.below(4) == 0 ? 1.0f : 0.1f;
        for (float& x : query) x = (x + turn * d.normal()) / std::sqrt(1.0f + turn * turn);
        for (float& x : centre) x = 0.9f * x + 0.4f * d.normal();
        l.queries.insert(l.queries.end(), query.begin(), query.end());
        // Representable in every element type, so that stored and float input are the same.
        for (const float x : centre) l.keys.push_back(rounded_to_bfloat16(x + 0.5f * d.normal()));
        for (std::size_t i = 0; i < key_row_; ++i) l.values.push_back(rounded_to_bfloat16(d.normal()));
        for (std::size_t i = 0; i < heads_; ++i)
          l.worths.push_back(of_worths.below(16) == 0 ? quiet_nan
                                                      : std::exp(-0.1f * std::fabs(of_worths.normal())));
      }
    }
  }

  /// The first `tokens` tokens of `beginning`, then those of `end` from there on.
  static text spliced(const text& beginning, int tokens, const text& end) {
    text both = beginning;
    for (std::size_t l = 0; l < both.layers_.size(); ++l) {
      const auto splice = [&](std::vector<float>& data, const std::vector<float>& rest, std::size_t row) {
        const auto at = static_cast<std::ptrdiff_t>(count(tokens) * row);
        data.resize(count(tokens) * row);
        data.insert(data.end(), rest.begin() + at, rest.end());
      };
      splice(both.layers_[l].queries, end.layers_[l].queries, both.query_row_);
      splice(both.layers_[l].keys, end.layers_[l].keys, both.key_row_);
      splice(both.layers_[l].values, end.layers_[l].values, both.key_row_);
      splice(both.layers_[l].worths, end.layers_[l].worths, both.heads_);
    }
    return both;
  }

  /// Queries of zero attend to everything alike.
  void zero_queries() {
    for (layer_rows& l : layers_) std::fill(l.queries.begin(), l.queries.end(), 0.0f);
  }
  /// Rounds queries to what bfloat16 has of them.
  void round_queries() {
    for (layer_rows& l : layers_)
      for (float& x : l.queries) x = rounded_to_bfloat16(x);
  }
  /// Gives all tokens the same worth.
  void equal_worths(float worth) {
    for (layer_rows& l : layers_) std::fill(l.worths.begin(), l.worths.end(), worth);
  }

  rows at(int layer, int first, int tokens) const {
    const auto part = [&](const std::vector<float>& data, std::size_t row) {
      return std::span(data).subspan(count(first) * row, count(tokens) * row);
    };
    const auto& l = layers_[count(layer)];
    return {part(l.queries, query_row_), part(l.keys, key_row_), part(l.values, key_row_),
            part(l.worths, heads_)};
  }

 private:
  static float rounded_to_bfloat16(float x) {
    // Few enough bits for half too.
    return freekv::to_float(freekv::from_float<freekv::bfloat16>(std::fabs(x) < 1e-3f ? 0.0f : x));
  }
  struct layer_rows {
    std::vector<float> queries, keys, values, worths;
  };
  std::vector<layer_rows> layers_;
  std::size_t query_row_, key_row_, heads_;
};

/// Whether a pipeline's policy takes worths of rows.
template <class Pipeline>
bool gives_worths(const Pipeline& pipeline) {
  if constexpr (requires { pipeline.configuration().eviction; })
    return resolve(pipeline.configuration().eviction,
                   []<class E>(const E&) { return freekv::takes_worths<E>; });
  else
    return false;
}

/// The rows of one sequence in a step: the next `tokens` of its text.
struct sequence_part {
  freekv::sequence_id id{};
  const text* source = nullptr;
  int tokens = 1;
  freekv::step_phase phase = freekv::step_phase::decode;
};

/// What a step gave one sequence, of all layers one after the other; reports of decode rows only.
struct sequence_result {
  std::vector<float> out, lse;
  std::vector<std::int32_t> report;

  bool operator==(const sequence_result& other) const {
    return same_bits(out, other.out) && same_bits(lse, other.lse) && report == other.report;
  }
};

template <class Pipeline>
void add_report(const Pipeline& pipeline, int layer, freekv::sequence_id id, sequence_result& result) {
  const auto report = pipeline.report(layer)[id];
  const auto add = [&](const auto& numbers) {
    std::copy(numbers.begin(), numbers.end(), std::back_inserter(result.report));
  };
  add(report.corrected);
  add(report.recalled);
  add(report.promoted);
  add(report.attended_count);
  const std::size_t heads = report.corrected.size(), stride = report.attended.size() / heads;
  for (std::size_t h = 0; h < heads; ++h)  // what lies behind the count means nothing
    add(report.attended.subspan(h * stride, count(report.attended_count[h])));
}

/// Asks for the masses of a layer that attends next. What they add up to, for each row and query head, is
/// expected to be what attention then gives as log-sum-exp.
template <class Step, class Settings>
std::vector<float> added_masses(Step& step, const Settings& s, int layer, std::size_t rows) {
  const std::size_t entries = count(step.most_attended(layer)), heads = rows * count(s.model.query_heads);
  std::vector<float> masses(heads * entries, quiet_nan), sums;
  step.log_masses(layer, masses);
  const double unit = double{nat_in(s.attention.lse_base)};
  for (std::size_t head = 0; head < heads; ++head) {
    double sum = 0.0;
    for (std::size_t i = 0; i < entries; ++i) sum += std::exp(double{masses[head * entries + i]} / unit);
    if (!s.attention.sink_logits.empty())
      sum += std::exp(double{
          s.attention.sink_logits[count(layer * s.model.query_heads) + head % count(s.model.query_heads)]});
    sums.push_back(static_cast<float>(std::log(sum) * unit));
  }
  return sums;
}

/// One whole step: every layer appends and attends all rows. Some steps ask for masses beside it.
template <class Pipeline>
std::vector<sequence_result> run_step(Pipeline& pipeline, const std::vector<sequence_part>& parts) {
  const auto& s = pipeline.configuration();
  const std::size_t query_row = count(s.model.query_heads * Pipeline::head_dim),
                    heads = count(s.model.query_heads);
  std::vector<freekv::step_input> listed;
  std::vector<int> first;
  for (const auto& part : parts) {
    listed.push_back({part.id, part.tokens, part.phase});
    first.push_back(pipeline.tokens(part.id));
  }
  auto step = pipeline.begin_step(listed);
  std::vector<sequence_result> results(parts.size());
  for (int layer = 0; layer < s.model.layers; ++layer) {
    std::vector<float> queries, keys, values, worths;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const auto rows = parts[i].source->at(layer, first[i], parts[i].tokens);
      queries.insert(queries.end(), rows.queries.begin(), rows.queries.end());
      keys.insert(keys.end(), rows.keys.begin(), rows.keys.end());
      values.insert(values.end(), rows.values.begin(), rows.values.end());
      if (gives_worths(pipeline)) worths.insert(worths.end(), rows.worths.begin(), rows.worths.end());
    }
    std::vector<float> out(queries.size(), quiet_nan), lse(queries.size() / query_row * heads, quiet_nan);
    step.template append<float>(layer,
                                {.keys = keys, .values = values, .queries = queries, .worths = worths});
    std::vector<float> expected;
    if constexpr (requires { step.most_attended(layer); })
      if (!queries.empty() && first[0] % 4 == 0)
        expected = added_masses(step, s, layer, queries.size() / query_row);
    step.attend(layer, out, lse);
    for (std::size_t i = 0; i < expected.size(); ++i)
      if (!is_near(expected[i], lse[i], 1e-4))
        FAIL("masses add up to " << expected[i] << ", and lse is " << lse[i]);
    std::size_t row = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::size_t end = row + count(parts[i].tokens);
      const auto copy = [&](const std::vector<float>& from, std::size_t width, std::vector<float>& to) {
        to.insert(to.end(), from.begin() + static_cast<long>(row * width),
                  from.begin() + static_cast<long>(end * width));
      };
      copy(out, query_row, results[i].out);
      copy(lse, heads, results[i].lse);
      row = end;
    }
  }
  step.end();
  for (std::size_t i = 0; i < parts.size(); ++i)
    if (parts[i].phase == freekv::step_phase::decode)
      for (int layer = 0; layer < s.model.layers; ++layer)
        add_report(pipeline, layer, parts[i].id, results[i]);
  return results;
}

/// A step of one sequence.
template <class Pipeline>
sequence_result run_step(Pipeline& pipeline, freekv::sequence_id id, const text& source, int tokens,
                         freekv::step_phase kind) {
  return run_step(pipeline, {{id, &source, tokens, kind}})[0];
}

template <class Pipeline>
std::vector<sequence_result> decode(Pipeline& pipeline, freekv::sequence_id id, const text& source,
                                    int steps) {
  std::vector<sequence_result> results;
  for (int i = 0; i < steps; ++i)
    results.push_back(run_step(pipeline, id, source, 1, freekv::step_phase::decode));
  return results;
}

/// A prompt whose rows are appended and do not attend.
template <class Pipeline>
void prompt_only(Pipeline& pipeline, freekv::sequence_id id, const text& source, int tokens) {
  const int first = pipeline.tokens(id);
  auto step = pipeline.begin_step({{id, tokens, freekv::step_phase::prefill}});
  for (int layer = 0; layer < pipeline.configuration().model.layers; ++layer) {
    const auto rows = source.at(layer, first, tokens);
    step.template append<float>(layer, {.keys = rows.keys, .values = rows.values});
  }
  step.end();
}

}  // namespace tests
