// The engine: requests that come and go, decoded by steps of a model that are captured once, of a few sizes,
// and replayed.
#pragma once

#include <cuda_profiler_api.h>

#include <algorithm>
#include <deque>
#include <freekv/core/size.hpp>
#include <freekv/freekv.cuh>
#include <string>
#include <vector>

#include "engine.hpp"
#include "model.cuh"
#include "schedule.hpp"

namespace freekv::examples {

/// A captured step that can be launched.
class captured_step {
 public:
  explicit captured_step(cudaGraph_t graph) : graph_(graph) {
    device::check(cudaGraphInstantiate(&launched_, graph_, 0), "cudaGraphInstantiate");
  }
  captured_step(const captured_step&) = delete;
  captured_step& operator=(const captured_step&) = delete;
  ~captured_step() {
    cudaGraphExecDestroy(launched_);
    cudaGraphDestroy(graph_);
  }
  void launch(cudaStream_t stream) const {
    device::check(cudaGraphLaunch(launched_, stream), "cudaGraphLaunch");
  }

 private:
  cudaGraph_t graph_;
  cudaGraphExec_t launched_ = nullptr;
};

/// Times of a stream's work, between points of its order; nobody waits before the sum is asked for.
class stopwatch {
 public:
  explicit stopwatch(cudaStream_t of) : of_(of) {}
  stopwatch(const stopwatch&) = delete;
  stopwatch& operator=(const stopwatch&) = delete;
  ~stopwatch() {
    for (const cudaEvent_t point : points_) cudaEventDestroy(point);
  }
  void start() {
    if (points_.size() % 2 == 0) record();
  }
  void stop() {
    if (points_.size() % 2 == 1) record();
  }
  double seconds() {
    stop();
    float sum = 0.0f, milliseconds = 0.0f;
    for (std::size_t i = 0; i < points_.size(); i += 2) {
      device::check(cudaEventSynchronize(points_[i + 1]), "cudaEventSynchronize");
      device::check(cudaEventElapsedTime(&milliseconds, points_[i], points_[i + 1]), "cudaEventElapsedTime");
      sum += milliseconds;
    }
    return 1e-3 * sum;
  }

 private:
  void record() {
    device::check(cudaEventCreate(&points_.emplace_back()), "cudaEventCreate");
    device::check(cudaEventRecord(points_.back(), of_), "cudaEventRecord");
  }

  cudaStream_t of_;
  std::vector<cudaEvent_t> points_;
};

/// An engine with a method of freekv/methods.hpp in every layer. Prompts are computed by steps of their own,
/// which are not captured, between replays. Where a pool is exhausted the youngest sequence is preempted;
/// where that has happened to one already and was not enough, that one is released and starts over later.
template <class Method, int HeadDim>
class engine {
 public:
  static constexpr int page_tokens = page_tokens_for(HeadDim);
  using pipeline_type =
      typename Method::template pipeline<kv_shape<bfloat16, HeadDim>, page_size<page_tokens>, cuda_backend>;
  using change = engine_observer::change;

  explicit engine(const engine_options& o, engine_observer* observer = nullptr)
      : options_(o),
        observer_(observer),
        backend_(compute_.get(), recall_.get()),
        pipeline_(settings_for<Method, typename pipeline_type::settings>(o), backend_, {&slow_, &fast_}),
        model_(o.model, std::max(o.batch * o.draft, o.context > 0 ? 1 : o.chunk), 2 * o.batch, o.draft,
               o.seed, compute_.get()),
        requests_(o.seed + 1, o),
        random_(o.seed + 2) {}

  engine_result run() {
    // Half as many again as the size before, about, so that few rows are padding.
    for (int size = 1; size < options_.batch; size += (size + 1) / 2) capture(size);
    capture(options_.batch);
    result_.counts.replays_of_graph.resize(graphs_.size());
    result_.slice_bytes = pipeline_.slice_bytes();
    result_.store_pages = pipeline_.configuration().store_pages();
    if (options_.context > 0)
      for (int i = 0; i < options_.batch; ++i) open_with_random_context();
    pipeline_.synchronize();
    device::check(cudaProfilerStart(), "cudaProfilerStart");
    for (std::int64_t now = 0; result_.counts.replays < options_.steps; ++now) {
      if (options_.context == 0) admit(now);
      if (!running_.empty()) step();
    }
    device::check(cudaProfilerStop(), "cudaProfilerStop");
    result_.seconds = watch_.seconds();
    return result_;
  }

  cudaStream_t compute() const { return compute_.get(); }
  const examples::model& model() const { return model_; }

 private:
  struct sequence {
    request of;
    sequence_id id{};
    int produced = 0;
    std::int32_t next = 0;  // token, or ~index of the model's choice
  };

  // Steps.

  /// All layers of a step, whose end it is, and the tokens that come next of rows from `first` on.
  void run(typename pipeline_type::step step, int rows, int first) {
    model_.embed(rows);
    for (int layer = 0; layer < options_.model.layers; ++layer) {
      model_.before_attention(layer, rows, options_.similarity);
      const auto [in, out] = model_.rows_of(layer);
      const auto kv = at(rows * options_.model.kv_width()), q = at(rows * options_.model.query_width());
      step.template append<bfloat16, bfloat16>(
          layer, {.keys = {in.keys, kv}, .values = {in.values, kv}, .queries = {in.queries, q}});
      step.attend(layer, {out, q});
      model_.after_attention(layer, rows);
    }
    model_.choose(first, rows);
    step.end();
  }
  void capture(int sequences) {
    const int rows = sequences * options_.draft;
    device::check(cudaStreamBeginCapture(compute_.get(), cudaStreamCaptureModeThreadLocal),
                  "cudaStreamBeginCapture");
    run(pipeline_.begin_captured_step({.entries = sequences, .rows = rows}), rows, 0);
    cudaGraph_t graph = nullptr;
    device::check(cudaStreamEndCapture(compute_.get(), &graph), "cudaStreamEndCapture");
    graphs_.push_back({sequences, std::make_unique<captured_step>(graph)});
  }
  /// A step of all that run, by the smallest graph that takes them.
  void step() {
    plan();
    const auto graph = std::find_if(graphs_.begin(), graphs_.end(), [&](const auto& g) {
      return g.first >= static_cast<int>(running_.size());
    });
    const std::span<const row_input> packet = fill_packet();
    watch_.start();
    graph->second->launch(compute_.get());
    engine_counts& counts = result_.counts;
    ++counts.replays;
    ++counts.replays_of_graph[at(static_cast<int>(graph - graphs_.begin()))];
    counts.stepped += static_cast<std::int64_t>(running_.size());
    counts.full += static_cast<int>(running_.size()) == options_.batch;
    counts.padded += graph->first > static_cast<int>(running_.size());
    if (observer_ != nullptr) observer_->stepped(inputs_, packet, true);
    if (options_.report_every > 0 && counts.replays % options_.report_every == 0) read_reports();
    for (std::size_t i = 0; i < running_.size(); ++i) accept(running_[i], inputs_[i].tokens);
    end_those_that_are_done();
  }
  void plan() {
    for (;;) try {
        inputs_.clear();
        for (const sequence& s : running_)
          inputs_.push_back({s.id, std::min(options_.draft, s.of.output - s.produced)});
        pipeline_.reserve(inputs_);
        while (!pipeline_.plan(inputs_)) pipeline_.wait();
        return;
      } catch (const pool_exhausted&) {
        ++result_.counts.pools_full;
        give_way();
      }
  }
  /// The rows of the step that is planned: each sequence's next token, and guesses behind it.
  std::span<const row_input> fill_packet() {
    const std::span<row_input> packet = model_.next_packet();
    std::size_t row = 0;
    for (std::size_t i = 0; i < running_.size(); ++i) {
      const int tokens = inputs_[i].tokens, before = pipeline_.tokens(running_[i].id) - tokens;
      for (int t = 0; t < tokens; ++t)
        packet[row++] = {t == 0 ? running_[i].next : any_token(), before + t, choice(running_[i].id, t)};
      result_.counts.pages_filled += (before + tokens) / page_tokens - before / page_tokens;
    }
    std::fill(packet.begin() + static_cast<std::ptrdiff_t>(row), packet.end(), row_input{});
    return packet;
  }
  /// What becomes of a sequence's rows: guesses are right up to one that is drawn, and the rest is taken
  /// back.
  void accept(sequence& s, int tokens) {
    const int right = random_.between(1, tokens);
    if (right < tokens) truncate(s, pipeline_.tokens(s.id) - (tokens - right));
    s.produced += right;
    s.next = ~choice(s.id, right - 1);
    result_.counts.tokens += right;
    if (s.of.takes_back > 0 && s.produced > s.of.output / 2) {
      s.produced -= s.of.takes_back;
      truncate(s, pipeline_.tokens(s.id) - std::exchange(s.of.takes_back, 0));
      s.next = any_token();
    }
  }

  // Sequences.

  /// What has come by now and finds room: those that were preempted first.
  void admit(std::int64_t now) {
    for (; requests_.next().arrives <= now; requests_.draw()) waiting_.push_back(requests_.next());
    while (room_ && !preempted_.empty() && has_room()) try {
        pipeline_.restore(preempted_.front().id);
        tell(change::restore, preempted_.front().id);
        ++result_.counts.restored;
        running_.push_back(preempted_.front());
        preempted_.erase(preempted_.begin());
      } catch (const pool_exhausted&) {
        room_ = false;  // until another ends
      }
    while (!waiting_.empty() && has_room() && preempted_.empty()) {
      const request r = waiting_.front();
      // A page for each that runs, so that they need not give way at once.
      if (pipeline_.free_pages() <= pages(r.prompt) + static_cast<int>(running_.size())) {
        ++result_.counts.waited;
        return;
      }
      waiting_.pop_front();
      open(r);
      // Once, however often it gives way and is opened again.
      if (std::exchange(running_.back().of.forks, false) && has_room()) fork(running_.back());
    }
  }
  bool has_room() const { return static_cast<int>(running_.size()) < options_.batch; }
  void open(const request& r) {
    watch_.stop();
    sequence& s = running_.emplace_back(sequence{r, pipeline_.open()});
    tell(change::open, s.id);
    ++result_.counts.joined;
    for (int before = 0, rows = 0; before < r.prompt; before += rows) {
      rows = std::min(options_.chunk, r.prompt - before);
      inputs_ = {{s.id, rows, step_phase::prefill}};
      auto prompt = pipeline_.begin_step(inputs_);
      const std::span<row_input> packet = model_.next_packet();
      for (int row = 0; row < rows; ++row) packet[at(row)] = {any_token(), before + row};
      if (before + rows == r.prompt) packet[at(rows - 1)].to = choice(s.id, 0);
      run(std::move(prompt), rows, rows - 1);
      ++result_.counts.prefill_steps;
      if (observer_ != nullptr) observer_->stepped(inputs_, packet, false);
    }
    s.next = ~choice(s.id, 0);
  }
  /// Another answer to the same prompt, which begins with a token of its own.
  void fork(const sequence& parent) try {
    sequence child = parent;
    child.id = pipeline_.fork(parent.id);
    child.next = any_token();
    tell(change::fork, parent.id, static_cast<int>(child.id));
    ++result_.counts.forked;
    running_.push_back(child);
  } catch (const pool_exhausted&) {
    ++result_.counts.pools_full;
  }
  void open_with_random_context() {
    const auto kv_width = at(options_.model.kv_width());
    const int most_rows = 1024;
    in_device<bfloat16> rows(2 * most_rows * kv_width);
    sequence& s = running_.emplace_back(sequence{{.output = 1 << 30}, pipeline_.open()});
    s.next = any_token();
    for (int before = 0, count = 0; before < options_.context; before += count) {
      count = std::min(most_rows, options_.context - before);
      const std::size_t n = at(count) * kv_width;
      auto prompt = pipeline_.begin_step({{s.id, count, step_phase::prefill}});
      for (int layer = 0; layer < options_.model.layers; ++layer) {
        model_.fill_with_normals(rows.data(), 2 * n, 1.0f,
                                 static_cast<std::uint64_t>(random_.below(1 << 30)));
        prompt.append(layer, {.keys = {rows.data(), n}, .values = {rows.data() + n, n}, .queries = {}});
      }
      prompt.end();
    }
    pipeline_.synchronize();
  }
  void truncate(const sequence& s, int tokens) {
    pipeline_.truncate(s.id, tokens);
    tell(change::truncate, s.id, tokens);
    ++result_.counts.truncated;
  }
  void give_way() {
    if (!preempted_.empty()) {
      release(preempted_.back());
      waiting_.push_front(preempted_.back().of);
      preempted_.pop_back();
      ++result_.counts.restarted;
    } else if (running_.size() > 1) {
      pipeline_.preempt(running_.back().id);
      tell(change::preempt, running_.back().id);
      ++result_.counts.preempted;
      preempted_.push_back(running_.back());
      running_.pop_back();
      room_ = false;
    } else {
      throw;  // there is no room for one sequence alone
    }
  }
  void end_those_that_are_done() {
    std::erase_if(running_, [&](const sequence& s) {
      if (s.produced < s.of.output) return false;
      release(s);
      ++result_.counts.left;
      return true;
    });
  }
  void release(const sequence& s) {
    pipeline_.release(s.id);
    tell(change::release, s.id);
    room_ = true;
  }
  void tell(change what, sequence_id id, int number = 0) {
    if (observer_ != nullptr) observer_->changed(what, id, number);
  }

  void read_reports() {
    watch_.stop();
    result_.reported_tokens += static_cast<std::int64_t>(inputs_.size());
    for (int layer = 0; layer < options_.model.layers; ++layer)
      for (const step_input& input : inputs_) {
        const step_report report = pipeline_.report(layer)[input.sequence];
        for (std::size_t head = 0; head < report.corrected.size(); ++head) {
          ++result_.heads;
          result_.corrected += report.corrected[head];
          result_.recalled += report.recalled[head];
          result_.recalled_before_attention += report.recalled_before_attention[head];
        }
      }
  }

  static std::size_t at(int n) { return to_size(n); }
  static int pages(int tokens) { return (tokens + page_tokens - 1) / page_tokens; }
  int any_token() { return random_.below(options_.model.vocab); }
  /// Place of what the model says comes behind row `row` of a sequence's.
  int choice(sequence_id id, int row) const { return static_cast<int>(id) * options_.draft + row; }

  engine_options options_;
  engine_observer* observer_;
  device::owned_stream compute_{true}, recall_;
  device::device_memory fast_;
  device::pinned_memory slow_;
  cuda_backend backend_;
  pipeline_type pipeline_;
  examples::model model_;
  arrivals requests_;
  dice random_;
  std::vector<std::pair<int, std::unique_ptr<captured_step>>> graphs_;  // by rising number of sequences
  std::vector<sequence> running_, preempted_;                           // the youngest last
  std::deque<request> waiting_;
  std::vector<step_input> inputs_;  // of the step queued last
  stopwatch watch_{compute_.get()};
  bool room_ = false;  // there may be some for one that is preempted
  engine_result result_;
};

}  // namespace freekv::examples
