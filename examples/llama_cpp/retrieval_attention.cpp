#include "retrieval_attention.hpp"

#include <chrono>
#include <cmath>

namespace freekv::examples {

void retrieval_attention::attend(const layer_rows& rows, float* output) {
  const auto n = [&](int heads, int width) { return static_cast<std::size_t>(rows.rows * heads * width); };
  const auto start = std::chrono::steady_clock::now();
  if (rows.layer == 0) pipeline_.begin_step(rows.rows, row_kind::decode);
  pipeline_.append(rows.layer, {rows.key, n(shape_.kv_heads, shape_.head_dim)},
                   {rows.value, n(shape_.kv_heads, shape_.head_dim)},
                   {rows.query, n(shape_.query_heads, shape_.head_dim)});
  lse_.resize(n(shape_.query_heads, 1));
  pipeline_.attend(rows.layer, {output, n(shape_.query_heads, shape_.head_dim)}, lse_);
  seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (compare_) gather(rows, output);
  if (rows.layer + 1 == shape_.layers) pipeline_.end_step();
}

void retrieval_attention::gather(const layer_rows& rows, const float* output) {
  if (rows.layer < complete_layers_) return;
  const auto d = static_cast<std::size_t>(shape_.head_dim);
  full_.resize(lse_.size() * d);
  full_lse_.resize(lse_.size());
  pipeline_.attend_full(rows.layer, full_, full_lse_);
  for (std::size_t head = 0; head < lse_.size(); ++head) {
    double difference = 0, size = 0;
    for (std::size_t i = head * d; i < (head + 1) * d; ++i) {
      difference += std::pow(double{output[i]} - full_[i], 2);
      size += std::pow(double{full_[i]}, 2);
    }
    statistics_.error += size > 0 ? std::sqrt(difference / size) : 0;
    statistics_.mass += std::exp(double{lse_[head]} - full_lse_[head]);
    ++statistics_.heads;
  }
  const step_report report = pipeline_.report(rows.layer);
  for (std::size_t head = 0; head < report.corrected.size(); ++head) {
    statistics_.corrected += report.corrected[head];
    statistics_.recalled += report.recalled[head];
    statistics_.promoted += report.promoted[head];
    ++statistics_.rows;
  }
}

}  // namespace freekv::examples
