// Pipelines of one shape with any summary that the CUDA backend has.
#include <cstring>

#include "device_pipeline.hpp"
#include "device_pipeline_of_shape.cuh"

namespace freekv::examples {

namespace {

using implementation = device_pipeline_type<kv_shape<half, policy_shape.head_dim>, summary_list::any>;

/// What a summary is given beside its numbers, in memory that the device reads. As it is when it is first used, since a
/// program may learn it when its pipeline is there already.
class device_data {
 public:
  explicit device_data(const pipeline_options& o) : options_(o) {
    auto& basis = options_.basis;
    take(basis.data, static_cast<std::size_t>(basis.layers * basis.kv_heads) * basis.floats_per_head());
    auto& books = options_.codebooks;
    take(books.data, static_cast<std::size_t>(books.layers * books.kv_heads) * books.floats_per_head());
  }
  device_data(const device_data&) = delete;
  device_data& operator=(const device_data&) = delete;
  ~device_data() {
    for (const copy& one : copies_) cudaFreeHost(one.to);
  }
  const pipeline_options& options() const { return options_; }
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
  void take(const float*& data, std::size_t count) {
    if (data == nullptr || count == 0) return;
    copy one{nullptr, data, count * sizeof(float)};
    device::check(cudaMallocHost(&one.to, one.bytes), "cudaMallocHost");
    copies_.push_back(one);
    data = static_cast<const float*>(one.to);
  }
  pipeline_options options_;
  std::vector<copy> copies_;
  bool filled_ = false;
};

implementation::settings settings_of(const pipeline_options& o) {
  auto s = device_settings<implementation::settings>(o);
  const method_data data{.basis = o.basis, .codebooks = o.codebooks};
  s.summary = chosen("summary", summaries, o.does.summary).make(o.does, data);
  s.correction = made<cosine_drift>::from(o.does, data);
  return s;
}

class pipeline_with_data final : private device_data, public device_pipeline_of_shape<implementation> {
 public:
  explicit pipeline_with_data(const pipeline_options& o)
      : device_data(o), device_pipeline_of_shape<implementation>(settings_of(options()), options()) {}
  void begin_step(std::span<const sequence_rows> rows) override {
    fill();
    device_pipeline_of_shape<implementation>::begin_step(rows);
  }
};

}  // namespace

std::unique_ptr<pipeline> make_device_summaries(const pipeline_options& o) {
  return std::make_unique<pipeline_with_data>(o);
}

}  // namespace freekv::examples
