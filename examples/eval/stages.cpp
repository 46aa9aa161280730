// How long each stage of a decode step takes. (FreeKV figure 1, right)

#include <algorithm>
#include <array>
#include <chrono>
#include <freekv/core/size.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fatal_signals.hpp"
#include "job.hpp"
#include "retrieval_attention.hpp"
#include "statistics.hpp"

namespace freekv::examples {

namespace {

constexpr std::array stages{"append", "correct", "attend", "speculate"};
using stage_seconds = std::array<double, stages.size()>;

/// Attends with `pipeline`, one stage after the other: what is queued for the next step is waited for in each
/// layer, so that each stage has the processor to itself.
class staged_attention : public attention {
 public:
  staged_attention(pipeline& pipeline, const model_shape& shape) : pipeline_(pipeline), shape_(shape) {}

  void attend(const layer_rows& rows, float* output) override {
    const auto row = to_size(rows.rows * shape_.head_dim);
    const auto queries = to_size(shape_.query_heads) * row, keys = to_size(shape_.kv_heads) * row;
    if (rows.layer == 0) pipeline_.begin_step(rows.rows, step_phase::decode);
    auto lap = [this, before = std::chrono::steady_clock::now()](std::size_t stage) mutable {
      const auto now = std::chrono::steady_clock::now();
      seconds_[stage] += std::chrono::duration<double>(now - before).count();
      before = now;
    };
    pipeline_.append(rows.layer, {rows.key, keys}, {rows.value, keys}, {rows.query, queries}), lap(0);
    pipeline_.correct(rows.layer), lap(1);
    pipeline_.attend(rows.layer, {output, queries}, {}), lap(2);
    pipeline_.synchronize(), lap(3);
    if (rows.layer + 1 == shape_.layers) pipeline_.end_step();
  }
  /// Spent since the last call, of all layers.
  stage_seconds take() { return std::exchange(seconds_, {}); }

 private:
  pipeline& pipeline_;
  model_shape shape_;
  stage_seconds seconds_{};
};

}  // namespace

void compare_stages(job& j) {
  const arguments& a = j.options();
  // A thread of its own selects for the next step: what it does can then be waited for.
  host_backend backend({.threads = a.common.threads, .overlap = true});
  engine decoding(j.model(), {.threads = a.common.threads, .context = 1, .rows = 1});
  const int room = (1 + a.rounds) * a.timed_steps;
  std::vector<std::unique_ptr<pipeline>> pipelines;
  std::vector<staged_attention> attentions;
  for (const contender& c : j.contenders()) {
    pipelines.push_back(make_contender(c, a.common, j.model().shape(), j.prompt(), room, true, backend));
    j.prompt().kv.restore(*pipelines.back());
    attentions.emplace_back(*pipelines.back(), j.model().shape());
  }

  std::vector<std::array<std::vector<double>, stages.size()>> seconds(attentions.size());  // a step, by round
  for (int round = 0; round <= a.rounds; ++round)
    for (std::size_t who = 0; who < attentions.size(); ++who) {
      note_detail(j.contenders()[who].name + ", round " + std::to_string(round));
      for (int step = round * a.timed_steps; step < (round + 1) * a.timed_steps; ++step)
        decoding.decode(j.after_prompt()[to_size(step) % j.after_prompt().size()],
                        j.prompt().kv.tokens() + step, attentions[who]);
      const stage_seconds taken = attentions[who].take();
      for (std::size_t stage = 0; round > 0 && stage < stages.size(); ++stage)
        seconds[who][stage].push_back(taken[stage] / a.timed_steps);
      j.progress()(round == 0 ? "stages, warming up" : "stages, round " + std::to_string(round),
                   static_cast<double>(who + 1) / static_cast<double>(attentions.size()));
    }

  std::vector<std::vector<std::string>> rows{{"ms/token at " + std::to_string(a.prompt) + " tokens, " +
                                                  std::to_string(a.common.threads) + " threads",
                                              "append", "correct", "attend", "before the next layer",
                                              "select and recall for the next step"}};
  for (std::size_t who = 0; who < attentions.size(); ++who) {
    const std::string& name = j.contenders()[who].name;
    stage_seconds medians{};
    for (std::size_t stage = 0; stage < stages.size(); ++stage) {
      medians[stage] = median(seconds[who][stage]);
      j.lines().add("stage", name, stages[stage], medians[stage], "s/token", {{"route", "in_place"}});
    }
    const auto text = [](double s) { return fixed(1e3 * s, 2); };
    rows.push_back({name, text(medians[0]), text(medians[1]), text(medians[2]),
                    text(medians[0] + medians[1] + medians[2]), text(medians[3])});
  }
  j.say("\n" + table(rows) + "medians of " + std::to_string(a.rounds) + " rounds of " +
        std::to_string(a.timed_steps) +
        " tokens in turns, all layers; each stage alone, the last with its thread's start in each layer;\n" +
        "append: with summaries of pages that fill, and each head's drift; route in_place\n");
}

}  // namespace freekv::examples
