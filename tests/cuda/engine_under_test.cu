#include "../../examples/tools/engine/engine.cuh"
#include "engine_under_test.hpp"

namespace engine_under_test {
namespace {

using tested_engine = engine<method, head_dim>;

host_matrix host_copy(const matrix& m) {
  host_matrix copy{static_cast<std::size_t>(m.width), std::vector<bfloat16>(m.numbers.size())};
  device::check(cudaMemcpy(copy.numbers.data(), m.numbers.data(), m.numbers.size() * sizeof(bfloat16),
                           cudaMemcpyDefault),
                "cudaMemcpy");
  return copy;
}

/// Copies steps behind which more are queued, and tells a peer of them when they have happened.
class recorder : public engine_observer {
 public:
  explicit recorder(peer& to) : to_(to) {}

  void watch(const tested_engine& e) {
    engine_ = &e;
    device::check(cudaStreamSynchronize(e.compute()), "cudaStreamSynchronize");  // which makes the weights
    const model& m = e.model();
    model_weights weights{host_copy(m.embedding()), host_copy(m.head()), {}};
    for (int layer = 0; layer < m.shape().layers; ++layer) {
      const model::layer_weights& w = m.weights(layer);
      weights.layers.push_back({host_copy(w.qkv), host_copy(w.out), host_copy(w.gates), host_copy(w.down)});
    }
    to_.loaded(weights);
  }
  void changed(change what, sequence_id id, int number) override {
    pending_.push_back({.what = what, .id = id, .number = number});
  }
  void stepped(std::span<const step_input> inputs, std::span<const row_input> packet,
               bool replayed) override {
    std::size_t rows = 0;
    for (const step_input& input : inputs) rows += static_cast<std::size_t>(input.tokens);
    const model& m = engine_->model();
    const auto q = rows * static_cast<std::size_t>(m.shape().query_width());
    const auto kv = rows * static_cast<std::size_t>(m.shape().kv_width());
    const auto told = packet.first(rows);
    event& e = pending_.emplace_back();
    e.stepped = {.sequences = {inputs.begin(), inputs.end()},
                 .packet = {told.begin(), told.end()},
                 .replayed = replayed,
                 .inputs = copy(e, m.inputs().data(), rows),
                 .chosen = copy(e, m.chosen().data(), m.chosen().size()),
                 .layers = {}};
    for (int layer = 0; layer < m.shape().layers; ++layer) {
      const model::layer_rows of = m.rows_of(layer);
      e.stepped.layers.push_back({.out = copy(e, of.out, q),
                                  .queries = copy(e, of.in.queries, q),
                                  .keys = copy(e, of.in.keys, kv),
                                  .values = copy(e, of.in.values, kv)});
    }
    if (++steps_pending_ == 64) catch_up();
  }
  void catch_up() {
    device::check(cudaStreamSynchronize(engine_->compute()), "cudaStreamSynchronize");
    for (const event& e : pending_)
      e.copies.empty() ? to_.changed(e.what, e.id, e.number) : to_.stepped(e.stepped);
    pending_.clear();
    steps_pending_ = 0;
  }

 private:
  struct event {
    change what{};
    sequence_id id{};
    int number = 0;
    step stepped{};
    std::vector<std::unique_ptr<page_locked<std::byte>>> copies{};
  };

  template <class T>
  std::span<const T> copy(event& e, const T* from, std::size_t n) {
    const auto& to = e.copies.emplace_back(std::make_unique<page_locked<std::byte>>(n * sizeof(T)));
    device::check(cudaMemcpyAsync(to->data(), from, n * sizeof(T), cudaMemcpyDefault, engine_->compute()),
                  "cudaMemcpyAsync");
    return {reinterpret_cast<const T*>(to->data()), n};
  }

  peer& to_;
  const tested_engine* engine_ = nullptr;
  std::vector<event> pending_;
  int steps_pending_ = 0;
};

}  // namespace

bool has_device() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

engine_result serve(const engine_options& o, peer& to) {
  recorder record(to);
  tested_engine tested(o, &record);
  record.watch(tested);
  engine_result result = tested.run();
  record.catch_up();
  return result;
}

}  // namespace engine_under_test
