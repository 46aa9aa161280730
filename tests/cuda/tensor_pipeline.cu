#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "device_pipeline_of_shape.cuh"
#include "tensor_pipeline.hpp"

namespace tests {

namespace {

using namespace freekv::examples;
/// On what is older than sm_90: loads.
struct recall_by_bulk_copies {
  static constexpr freekv::device::recall_tuning tuning{
      .read = freekv::device::recall_read::bulk_copies, .threads = 128, .depth = 3, .buffer_bytes = 1024};
};
using backend = freekv::basic_cuda_backend<freekv::device::multiplies::tensor_cores, recall_by_bulk_copies>;
using implementation =
    device_pipeline_type<freekv::kv_shape<freekv::bfloat16, tensor_shape.head_dim>,
                         freekv::any_of<freekv::per_kv_head, freekv::per_query_head>,
                         freekv::any_of<freekv::identity, freekv::int8_token>>::with<backend>;

class tensor_pipeline final : public device_pipeline_of_shape<implementation> {
  using of_shape = device_pipeline_of_shape<implementation>;

 public:
  tensor_pipeline(const implementation::settings& s, const pipeline_options& o)
      : of_shape(s, o), sink_logits_(o.sink_logits), query_heads_(static_cast<std::size_t>(o.query_heads)) {}

  void attend(int layer, std::span<float> out, std::span<float> lse) override {
    const std::size_t entries = static_cast<std::size_t>(most_attended(layer));
    std::vector<float> masses(lse.size() * entries);
    if (!lse.empty()) log_masses(layer, masses);
    of_shape::attend(layer, out, lse);
    for (std::size_t i = 0; i < lse.size(); ++i) {
      double sum = 0.0, most = double{lse[i]};
      if (!std::isfinite(most)) most = 0.0;
      const auto add = [&](float mass) { sum += std::exp(double{mass} - most); };
      for (std::size_t entry = 0; entry < entries; ++entry) add(masses[i * entries + entry]);
      if (!sink_logits_.empty())
        add(sink_logits_[static_cast<std::size_t>(layer) * query_heads_ + i % query_heads_]);
      const double all = most + std::log(sum), given = double{lse[i]};
      const bool same = std::isfinite(given)
                            ? std::fabs(all - given) <= 1e-5 * std::fmax(1.0, std::fabs(given))
                        : std::isnan(given) ? std::isnan(all)
                                            : all == given;
      if (!same)
        throw std::runtime_error("layer " + std::to_string(layer) + ": masses of row and query head number " +
                                 std::to_string(i) + " add up to " + std::to_string(all) + ", and lse is " +
                                 std::to_string(given));
    }
  }

 private:
  std::vector<float> sink_logits_;
  std::size_t query_heads_;
};

}  // namespace

std::unique_ptr<pipeline> make_tensor_pipeline(const pipeline_options& o) {
  auto s = device_settings<implementation::settings>(o);
  s.correction = policy_maker<freekv::cosine_drift>::from(o.method, {});
  if (o.method.rows == "per_query_head") s.scope = freekv::per_query_head{};
  if (o.method.codec == "int8_token") s.codec = freekv::int8_token{};
  return std::make_unique<tensor_pipeline>(s, o);
}

}  // namespace tests
