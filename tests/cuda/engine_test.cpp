// The example engine, whose decode steps are captured, against the host: every step's queries, keys, values
// and choices against the model's definition in float64, and every attention against a pipeline of the host
// backend that is given the same rows and changes. Sequences join, leave, fork, are cut back and preempted,
// in pools that are too small; each of these has to happen. FREEKV_STEPS: of the first of two runs, 2000
// unless given.
//
// Exit status: 0 all right, 1 not, 77 no device.
#include "engine_under_test.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <freekv/methods.hpp>
#include <map>

#include "../../examples/tools/engine/random_numbers.hpp"

namespace {

using namespace freekv;
using namespace engine_under_test;

using host_pipeline =
    method::pipeline<kv_shape<bfloat16, head_dim>, page_size<page_tokens_for(head_dim)>, host_backend>;

using freekv::to_size;

std::vector<double> normed(std::span<const double> x) {
  double squares = 0.0;
  for (const double value : x) squares += value * value;
  std::vector<double> y(x.begin(), x.end());
  for (double& value : y) value /= std::sqrt(squares / static_cast<double>(x.size()) + 1e-5);
  return y;
}
void add(std::vector<double>& x, const std::vector<double>& y) {
  for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

/// The largest of differences, and whether they are within what is allowed.
struct difference {
  const char* what;
  double allowed, most = 0.0;
  std::int64_t compared = 0;

  void take(double a, double b, double unit = 1.0) {
    const double found = std::fabs(a - b) / unit;
    most = found <= most ? most : found;  // NaN stays
    ++compared;
  }
  bool right() const {
    const bool all = most <= allowed && compared > 0;
    std::printf("%s %s: %lld compared, %.3g at most, %.3g allowed\n", all ? "ok    " : "FAILED", what,
                static_cast<long long>(compared), most, allowed);
    return all;
  }
};

/// Does on the host what an engine has done.
class host_peer : public peer {
 public:
  explicit host_peer(const engine_options& o)
      : options_(o), retrieval_(settings_for<method, host_pipeline::settings>(o), backend_) {}

  void loaded(const model_weights& weights) override { weights_ = weights; }
  void changed(change what, sequence_id id, int number) override {
    switch (what) {
      case change::open:
        names_[id] = retrieval_.open();
        break;
      case change::fork:
        names_[sequence_id{number}] = retrieval_.fork(names_.at(id));
        break;
      case change::truncate:
        retrieval_.truncate(names_.at(id), number);
        break;
      case change::preempt:
        retrieval_.preempt(names_.at(id));
        break;
      case change::restore:
        retrieval_.restore(names_.at(id));
        break;
      case change::release:
        retrieval_.release(names_.at(id));
        break;
    }
  }
  void stepped(const step& s) override {
    check_model(s);
    chosen_.assign(s.chosen.begin(), s.chosen.end());
    std::vector<step_input> inputs(s.sequences);
    for (step_input& input : inputs) input.sequence = names_.at(input.sequence);
    auto step = retrieval_.begin_step(inputs);
    for (int layer = 0; layer < options_.model.layers; ++layer) {
      const step::layer_rows& rows = s.layers[to_size(layer)];
      std::vector<float> out(rows.out.size());
      step.append<bfloat16, bfloat16>(layer,
                                      {.keys = rows.keys, .values = rows.values, .queries = rows.queries});
      step.attend(layer, out);
      for (std::size_t i = 0; i < out.size(); ++i) attention_.take(rows.out[i], out[i]);
      if (!attends_to_all()) continue;
      step.attend_full(layer, out);
      for (std::size_t i = 0; i < out.size(); ++i) full_.take(rows.out[i], out[i]);
    }
    step.end();
    if (!s.replayed) return;
    for (const step_input& input : inputs) {
      const step_report report = retrieval_.report(options_.model.layers - 1)[input.sequence];
      for (const int flag : report.corrected) corrected_ += flag;
      for (const int slices : report.recalled) recalled_ += slices;
    }
  }
  bool right() const {
    std::printf("%lld heads corrected, %lld slices recalled, by the host\n",
                static_cast<long long>(corrected_), static_cast<long long>(recalled_));
    return queries_.right() & keys_.right() & values_.right() & tokens_.right() & choices_.right() &
           attention_.right() & (attends_to_all() ? full_.right() : corrected_ > 0 && recalled_ > 0);
  }

 private:
  bool attends_to_all() const { return options_.attends_to.window >= options_.max_tokens(); }
  /// What the model makes of a step's tokens and of what its layers have attended to.
  void check_model(const step& s) {
    const model_shape& m = options_.model;
    for (std::size_t row = 0; row < s.inputs.size(); ++row) {
      const row_input& told = s.packet[row];
      tokens_.take(s.inputs[row].token, told.token < 0 ? chosen_.at(to_size(~told.token)) : told.token);
      std::vector<double> x = weights_.embedding.row(s.inputs[row].token);
      for (int layer = 0; layer < m.layers; ++layer) {
        const step::layer_rows& rows = s.layers[to_size(layer)];
        const model_weights::layer& w = weights_.layers[to_size(layer)];
        check_heads(w.qkv.times(normed(x)), rows, row, layer, told.position);
        const float* const out = rows.out.data() + row * to_size(m.query_width());
        add(x, w.out.times(std::vector<double>(out, out + m.query_width())));
        const std::vector<double> gates = w.gates.times(normed(x));
        std::vector<double> inner;
        for (std::size_t i = 0; i < gates.size(); i += 2)
          inner.push_back(gates[i] / (1.0 + std::exp(-gates[i])) * gates[i + 1]);
        add(x, w.down.times(inner));
      }
      if (told.to < 0) continue;
      const std::vector<double> logits = weights_.head.times(normed(x));
      choices_.take(logits.at(to_size(s.chosen[to_size(told.to)])),
                    *std::max_element(logits.begin(), logits.end()));
    }
  }
  void check_heads(const std::vector<double>& qkv, const step::layer_rows& rows, std::size_t row, int layer,
                   int position) {
    const model_shape& m = options_.model;
    const std::size_t d = to_size(m.head_dim), half = d / 2;
    for (int head = 0; head < m.query_heads + 2 * m.kv_heads; ++head) {
      const bool is_query = head < m.query_heads, is_value = head >= m.query_heads + m.kv_heads;
      const std::span<const double> of_head(qkv.data() + to_size(head) * d, d);
      const std::vector<double> from =
          m.norms_heads && !is_value ? normed(of_head) : std::vector<double>(of_head.begin(), of_head.end());
      for (std::size_t i = 0; i < d; ++i) {
        const double angle = position * std::pow(double{m.rope_base}, -2.0 * static_cast<double>(i % half) /
                                                                          static_cast<double>(d));
        const double other = i < half ? -from[i + half] : from[i - half];
        double expected = is_value ? from[i] : from[i] * std::cos(angle) + other * std::sin(angle);
        if (is_query) {
          if (options_.similarity > 0)
            expected = std::sqrt(double{options_.similarity}) *
                           common_query(layer, head, position, static_cast<int>(i)) +
                       std::sqrt(1.0 - double{options_.similarity}) * expected;
        }
        const auto at = [&](int first, int heads) {
          return (row * to_size(heads) + to_size((head - first) % heads)) * d + i;
        };
        const bfloat16 number = is_query
                                    ? rows.queries[at(0, m.query_heads)]
                                    : (is_value ? rows.values : rows.keys)[at(m.query_heads, m.kv_heads)];
        (is_query   ? queries_
         : is_value ? values_
                    : keys_)
            .take(to_float(number), expected, std::max(1.0, std::fabs(expected)));
      }
    }
  }

  engine_options options_;
  host_backend backend_{{.threads = 1, .overlap = false}};
  host_pipeline retrieval_;
  model_weights weights_;
  std::map<sequence_id, sequence_id> names_;
  std::vector<std::int32_t> chosen_;
  std::int64_t corrected_ = 0, recalled_ = 0;
  // Floats of a few sums of 64 products; queries, keys and values are rounded to 8 bits.
  difference tokens_{"tokens that steps read", 0.0}, queries_{"queries", 1.0 / 256 + 1e-5},
      keys_{"keys", 1.0 / 256 + 1e-5}, values_{"values", 1.0 / 256 + 1e-5},
      choices_{"logits below the largest", 2e-5}, attention_{"attention beside the host's", 2e-5},
      full_{"attention beside full attention", 2e-5};
};

bool happened(const char* what, std::int64_t times) {
  std::printf("%s %s: %lld times\n", times > 0 ? "ok    " : "FAILED", what, static_cast<long long>(times));
  return times > 0;
}

/// Runs an engine beside the host; `what_happened` says of its counts whether all did that had to.
template <class Happened>
bool serves(const char* name, const engine_options& o, const Happened& what_happened) {
  std::printf("%s\n", name);
  host_peer host(o);
  const engine_result r = serve(o, host);
  const engine_counts& c = r.counts;
  bool right = host.right() & (c.replays == o.steps);
  right &= happened("a page fills", c.pages_filled);
  right &= happened("a prompt takes more than a step", c.prefill_steps - c.joined);
  right &= happened("a request joins", c.joined) & happened("a request leaves", c.left);
  right &= happened("a fork", c.forked) & happened("a truncation", c.truncated);
  right &= happened("a padded batch", c.padded);
  return right & what_happened(r);
}

}  // namespace

int main() {
  if (!has_device()) return 77;
  const char* const given = std::getenv("FREEKV_STEPS");
  engine_options o{
      .attends_to = {.sink = 8, .window = 16, .selected_units = 3}, .similarity = 0.5f, .tau = 0.5f};
  o.steps = given == nullptr ? 2000 : std::atoi(given);
  o.output = 112;
  o.store_tokens = 512;
  bool right = serves("one row a sequence, in a store that is too small", o, [](const engine_result& r) {
    const engine_counts& c = r.counts;
    bool all = happened("a full batch", c.full);
    for (const std::int64_t replays : c.replays_of_graph) all &= happened("a graph of another size", replays);
    all &= happened("a pool is full", c.pools_full) & happened("a preemption", c.preempted);
    all &= happened("a store page is given out anew", c.pages_filled - r.store_pages);
    return all & happened("a request waits for pages", c.waited) &
           happened("a request starts over", c.restarted);
  });
  // Blocks of selected slots for fewer sequences than a batch may have.
  o.model.norms_heads = true;
  o.draft = 3;
  o.steps /= 16;
  o.store_tokens = 0;
  o.selected_tokens = 5 * o.attends_to.selected_units * page_tokens_for(head_dim);
  right &= serves("three rows a sequence, with blocks that are too few", o, [](const engine_result& r) {
    const engine_counts& c = r.counts;
    return happened("rows of a draft are taken back", c.truncated - c.joined) &
           happened("a pool is full", c.pools_full) & happened("a preemption", c.preempted) &
           happened("a restoration", c.restored);
  });
  o.steps /= 2;
  o.selected_tokens = 0;
  o.attends_to.window = 144;  // of 139 tokens at most
  right &= serves("a budget for everything", o, [](const engine_result&) { return true; });
  return right ? 0 : 1;
}
