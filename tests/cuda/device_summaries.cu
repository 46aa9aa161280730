// Pipelines of one shape with any summary that the CUDA backend has.
#include <cstring>

#include "device_pipeline.hpp"
#include "device_pipeline_of_shape.cuh"

namespace tests {

namespace {

using namespace freekv;
using namespace freekv::examples;

using summaries_here =
    policy_list<in_any_format<min_max>, in_any_format<mean>, in_any_format<centroid_box>, in_any_format<ball>,
                in_any_format<chunk_means<dynamic>>, key_sketch<dynamic>, key_subspace<dynamic, dynamic>,
                key_codes<dynamic, dynamic>>;
constexpr auto& summary_choices = summaries_here::choices;
using implementation = device_pipeline_type<kv_shape<half, policy_shape.head_dim>, summaries_here::any>;

/// What a summary is given beside its numbers, in memory that the device reads.
class device_data {
 public:
  explicit device_data(const pipeline_options& o) : options_(o) {
    auto& basis = options_.basis;
    basis.data =
        copied(basis.data, static_cast<std::size_t>(basis.layers * basis.kv_heads) * basis.floats_per_head());
    auto& books = options_.codebooks;
    books.data =
        copied(books.data, static_cast<std::size_t>(books.layers * books.kv_heads) * books.floats_per_head());
  }
  device_data(const device_data&) = delete;
  device_data& operator=(const device_data&) = delete;
  ~device_data() {
    for (void* data : taken_) cudaFreeHost(data);
  }
  const pipeline_options& options() const { return options_; }

 private:
  const float* copied(const float* from, std::size_t count) {
    if (from == nullptr || count == 0) return nullptr;
    void* to = nullptr;
    device::check(cudaMallocHost(&to, count * sizeof(float)), "cudaMallocHost");
    taken_.push_back(to);
    std::memcpy(to, from, count * sizeof(float));
    return static_cast<const float*>(to);
  }
  pipeline_options options_;
  std::vector<void*> taken_;
};

implementation::settings settings_of(const pipeline_options& o) {
  auto s = device_settings<implementation::settings>(o);
  const method_data data{.basis = o.basis, .codebooks = o.codebooks};
  s.summary = chosen("summary", summary_choices, o.does.summary).make(o.does, data);
  s.correction = made<cosine_drift>::from(o.does, data);
  return s;
}

class pipeline_with_data final : private device_data, public device_pipeline_of_shape<implementation> {
 public:
  explicit pipeline_with_data(const pipeline_options& o)
      : device_data(o), device_pipeline_of_shape<implementation>(settings_of(options())) {}
};

}  // namespace

device_pipeline make_device_summaries(const pipeline_options& o) {
  return std::make_unique<pipeline_with_data>(o);
}

}  // namespace tests
