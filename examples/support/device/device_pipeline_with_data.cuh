// Defines device_pipeline_with_data: a device_pipeline_of_shape whose policies take data beside their
// numbers.
#pragma once

#include <cstddef>
#include <cstring>
#include <freekv/core/size.hpp>
#include <memory>
#include <span>
#include <vector>

#include "device_pipeline_of_shape.cuh"

namespace freekv::examples {

/// What policies are given beside their numbers, in memory that the device reads. As it is when it is first
/// used, since a program may learn it when its pipeline is there already.
class device_data {
 public:
  explicit device_data(const pipeline_options& o) : options_(o) {
    const auto take_basis = [&](subspace_basis& basis) {
      take(basis.data, to_size(basis.layers * basis.kv_heads) * basis.floats_per_head());
    };
    take_basis(options_.basis);
    take_basis(options_.factors);
    auto& books = options_.codebooks;
    take(books.data, to_size(books.layers * books.kv_heads) * books.floats_per_head());
    take(options_.rotary.frequencies, to_size(options_.rotary.pairs));
    auto& temperatures = options_.temperatures;
    take(temperatures.data, to_size(temperatures.layers * temperatures.kv_heads));
    take(options_.channels.data, options_.channels.bytes());
  }
  device_data(const device_data&) = delete;
  device_data& operator=(const device_data&) = delete;
  ~device_data() {
    for (const copy& one : copies_) cudaFreeHost(one.to);
  }
  const pipeline_options& options() const { return options_; }
  method_data for_policies() const {
    return {.basis = options_.basis,
            .codebooks = options_.codebooks,
            .factors = options_.factors,
            .rotary = options_.rotary,
            .temperatures = options_.temperatures,
            .channels = options_.channels,
            .by_layer = options_.by_layer};
  }
  void fill() {
    for (const copy& one : copies_)
      if (!filled_) std::memcpy(one.to, one.from, one.bytes);
    filled_ = true;
  }

 private:
  struct copy {
    void* to;
    const void* from;
    std::size_t bytes;
  };
  template <class T>
  void take(const T*& data, std::size_t count) {
    if (data == nullptr || count == 0) return;
    copy one{nullptr, data, count * sizeof(T)};
    device::check(cudaMallocHost(&one.to, one.bytes), "cudaMallocHost");
    copies_.push_back(one);
    data = static_cast<const T*>(one.to);
  }
  pipeline_options options_;
  std::vector<copy> copies_;
  bool filled_ = false;
};

/// `settings_of(options, data)` says what the pipeline is told.
template <class Implementation>
class device_pipeline_with_data final : private device_data, public device_pipeline_of_shape<Implementation> {
  using of_shape = device_pipeline_of_shape<Implementation>;

 public:
  template <class SettingsOf>
  device_pipeline_with_data(const pipeline_options& o, const SettingsOf& settings_of)
      : device_data(o), of_shape(settings_of(options(), for_policies()), options()) {}
  void begin_step(std::span<const step_input> rows) override {
    fill();
    of_shape::begin_step(rows);
  }
};

}  // namespace freekv::examples
