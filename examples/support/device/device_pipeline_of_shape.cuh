// Defines device_pipeline_of_shape: a typed pipeline of the CUDA backend behind the programs' interface.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstring>
#include <freekv/core/size.hpp>
#include <freekv/freekv.cuh>
#include <memory_resource>
#include <span>
#include <stdexcept>
#include <vector>

#include "../settings_of_options.hpp"
#include "device_pipeline.hpp"

namespace freekv::examples {

/// Device memory that grows to what is asked for.
template <class T>
class device_array {
 public:
  device_array() = default;
  device_array(const device_array&) = delete;
  device_array& operator=(const device_array&) = delete;
  ~device_array() { cudaFree(data_); }
  std::span<T> sized(std::size_t count) {
    if (count > size_) {
      cudaFree(data_);
      device::check(cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(T)), "cudaMalloc");
      size_ = count;
    }
    return {data_, count};
  }
  std::span<T> all() { return {data_, size_}; }
  std::span<const T> of(std::span<const T> host, cudaStream_t stream) {
    const std::span<T> there = sized(host.size());
    if (!host.empty())
      device::check(
          cudaMemcpyAsync(there.data(), host.data(), host.size_bytes(), cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync");
    return there;
  }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Counts what is taken from another resource.
class counting_memory final : public std::pmr::memory_resource {
 public:
  explicit counting_memory(std::pmr::memory_resource& from) : from_(&from) {}
  std::size_t taken() const { return taken_; }

 private:
  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    taken_ += bytes;
    return from_->allocate(bytes, alignment);
  }
  void do_deallocate(void* data, std::size_t bytes, std::size_t alignment) override {
    taken_ -= bytes;
    from_->deallocate(data, bytes, alignment);
  }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
  std::pmr::memory_resource* from_;
  std::size_t taken_ = 0;
};

template <class Implementation>
class device_pipeline_of_shape : public pipeline, public device_controls {
  using element = typename Implementation::element;
  using settings = typename Implementation::settings;

 public:
  device_pipeline_of_shape(const settings& s, const pipeline_options& o)
      : backend_(compute_.get(), recall_.get(), o.copy_engines ? recall_by::copy_engines : recall_by::kernel),
        pipeline_(s, backend_, {&slow_, &fast_}) {
    const memory_bytes& bytes = pipeline_.bytes();
    if (slow_.taken() != bytes.store + bytes.host_copies || slow_.taken() + fast_.taken() != bytes.total())
      throw std::logic_error("the pipeline has taken other memory than it says");
  }

  ~device_pipeline_of_shape() override {
    if (captured_ != nullptr) cudaGraphExecDestroy(captured_);
  }

  sequence_id open() override { return pipeline_.open(); }
  sequence_id fork(sequence_id parent) override { return pipeline_.fork(parent); }
  void truncate(sequence_id id, int tokens) override { pipeline_.truncate(id, tokens); }
  void preempt(sequence_id id) override { pipeline_.preempt(id); }
  void restore(sequence_id id) override { pipeline_.restore(id); }
  void release(sequence_id id) override { pipeline_.release(id); }
  int tokens(sequence_id id) const override { return pipeline_.tokens(id); }
  std::int32_t free_pages() const override { return pipeline_.free_pages(); }

  void begin_step(std::span<const step_input> rows) override { step_ = pipeline_.begin_step(rows); }
  void append(int layer, std::span<const float> keys, std::span<const float> values,
              std::span<const float> queries) override {
    step_.template append<float>(
        layer, {float_keys_.of(keys, compute_.get()), float_values_.of(values, compute_.get()),
                queries_.of(queries, compute_.get())});
  }
  void append_stored(int layer, std::span<const std::byte> keys, std::span<const std::byte> values,
                     std::span<const float> queries) override {
    const auto elements = [](std::span<const std::byte> bytes) {
      return std::span(reinterpret_cast<const element*>(bytes.data()), bytes.size() / sizeof(element));
    };
    step_.append(layer, {keys_.of(elements(keys), compute_.get()),
                         values_.of(elements(values), compute_.get()), queries_.of(queries, compute_.get())});
  }
  void attend(int layer, std::span<float> out, std::span<float> lse) override {
    const auto [device_out, device_lse] = outputs(out, lse);
    step_.attend(layer, device_out, device_lse);
    bring(out, out_);
    bring(lse, lse_);
  }
  void attend_full(int layer, std::span<float> out, std::span<float> lse) override {
    const auto [device_out, device_lse] = outputs(out, lse);
    step_.attend_full(layer, device_out, device_lse);
    bring(out, out_);
    bring(lse, lse_);
  }
  int most_attended(int layer) const { return step_.most_attended(layer); }
  void log_masses(int layer, std::span<float> masses) {
    step_.log_masses(layer, masses_.sized(masses.size()));
    bring(masses, masses_);
  }
  void end_step() override { step_.end(); }
  bool abandon_step() override { return step_.abandon(); }
  void synchronize() override { pipeline_.synchronize(); }
  step_report report(int layer, sequence_id id) const override { return pipeline_.report(layer)[id]; }
  const memory_bytes& bytes() const override { return pipeline_.bytes(); }
  std::size_t slice_bytes() const override { return pipeline_.slice_bytes(); }
  std::size_t summary_bytes() const override {
    return pipeline_.summary_bytes() * to_size(pipeline_.configuration().units_per_page());
  }

  void size_launches_for(int sequences, int rows, int pages) override {
    backend_.size_launches_for({.entries = sequences,
                                .rows = rows,
                                .pages = pages,
                                .tokens = pages * int{pipeline_.configuration().page.tokens},
                                .decodes = true,
                                .prompts = true,
                                .copies = true});
  }
  void capture_step(int sequences, int rows) override {
    const auto& s = pipeline_.configuration();
    const std::size_t keys = to_size(rows) * to_size(s.model.kv_heads * Implementation::head_dim),
                      lse = to_size(rows) * to_size(s.model.query_heads),
                      queries = lse * to_size(Implementation::head_dim);
    for (auto& [array, width] : {std::pair{&captured_keys_, keys},
                                 {&captured_values_, keys},
                                 {&captured_queries_, queries},
                                 {&captured_out_, queries},
                                 {&captured_lse_, lse}})
      array->sized(width * to_size(s.model.layers));
    device::check(cudaStreamBeginCapture(compute_.get(), cudaStreamCaptureModeThreadLocal),
                  "cudaStreamBeginCapture");
    auto step = pipeline_.begin_captured_step({.entries = sequences, .rows = rows});
    for (int layer = 0; layer < s.model.layers; ++layer) {
      const auto part = [&](device_array<float>& all, std::size_t width) {
        return all.sized(width * to_size(s.model.layers)).subspan(to_size(layer) * width, width);
      };
      step.template append<float>(layer, {part(captured_keys_, keys), part(captured_values_, keys),
                                          part(captured_queries_, queries)});
      step.attend(layer, part(captured_out_, queries), part(captured_lse_, lse));
    }
    step.end();
    cudaGraph_t graph = nullptr;
    device::check(cudaStreamEndCapture(compute_.get(), &graph), "cudaStreamEndCapture");
    device::check(cudaGraphInstantiate(&captured_, graph, 0), "cudaGraphInstantiate");
    device::check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
  void plan_step(std::span<const step_input> rows) override {
    pipeline_.reserve(rows);
    while (!pipeline_.plan(rows)) pipeline_.wait();
  }
  void replay_step(std::span<const float> keys, std::span<const float> values, std::span<const float> queries,
                   std::span<float> out, std::span<float> lse) override {
    const auto layers = to_size(pipeline_.configuration().model.layers);
    const auto copy = [&]<class To, class From>(std::span<To> to, std::span<From> from, cudaMemcpyKind kind) {
      const std::size_t to_each = to.size() / layers, from_each = from.size() / layers,
                        each = std::min(to_each, from_each);
      for (std::size_t layer = 0; layer < layers && each > 0; ++layer)
        device::check(cudaMemcpyAsync(to.data() + layer * to_each, from.data() + layer * from_each,
                                      each * sizeof(float), kind, compute_.get()),
                      "cudaMemcpyAsync");
    };
    copy(captured_keys_.all(), keys, cudaMemcpyHostToDevice);
    copy(captured_values_.all(), values, cudaMemcpyHostToDevice);
    copy(captured_queries_.all(), queries, cudaMemcpyHostToDevice);
    device::check(cudaGraphLaunch(captured_, compute_.get()), "cudaGraphLaunch");
    copy(out, captured_out_.all(), cudaMemcpyDeviceToHost);
    copy(lse, captured_lse_.all(), cudaMemcpyDeviceToHost);
    device::check(cudaStreamSynchronize(compute_.get()), "cudaStreamSynchronize");
  }
  int flagged_heads(int layer) const override { return pipeline_.report(layer).flagged_heads(); }

 private:
  std::pair<std::span<float>, std::span<float>> outputs(std::span<float> out, std::span<float> lse) {
    return {out_.sized(out.size()), lse_.sized(lse.size())};
  }
  void bring(std::span<float> to, device_array<float>& from) {
    device::check(cudaMemcpyAsync(to.data(), from.sized(to.size()).data(), to.size_bytes(),
                                  cudaMemcpyDeviceToHost, compute_.get()),
                  "cudaMemcpyAsync");
    device::check(cudaStreamSynchronize(compute_.get()), "cudaStreamSynchronize");
  }

  device::owned_stream compute_, recall_;
  device::pinned_memory pinned_;
  device::device_memory device_;
  counting_memory slow_{pinned_}, fast_{device_};
  typename Implementation::backend_type backend_;
  device_array<element> keys_, values_;
  device_array<float> float_keys_, float_values_, queries_, out_, lse_, masses_;
  device_array<float> captured_keys_, captured_values_, captured_queries_, captured_out_, captured_lse_;
  cudaGraphExec_t captured_ = nullptr;
  Implementation pipeline_;
  typename Implementation::step step_;
};

/// What every pipeline here chooses at run time, as it costs no kernels.
template <class Shape, policy... Others>
using device_pipeline_type =
    retrieval_pipeline<Shape, for_devices::page, for_devices::unit, for_devices::layouts, for_devices::plan,
                       for_devices::route, cuda_backend, Others...>;

/// What all pipelines are told, whatever their other policies.
template <class Settings>
Settings device_settings(const pipeline_options& o) {
  method_data data{.head_kinds = o.head_kinds, .kv_heads = o.kv_heads};
  data.sliding_layers = o.sliding_layers;
  auto s = settings_of_options<Settings>(o, data);
  if (!o.store_file.empty()) s.capacity.store_file = {.path = o.store_file};
  return s;
}

}  // namespace freekv::examples
