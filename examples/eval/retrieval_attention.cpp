#include "retrieval_attention.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <freekv/core/size.hpp>

namespace freekv::examples {

void retrieval_attention::attend(const layer_rows& rows, float* output) {
  const auto n = [&](int heads, int width) { return to_size(rows.rows * heads * width); };
  const auto start = std::chrono::steady_clock::now();
  if (rows.layer == 0) begin_step(rows);
  if (by_layer_before_ && rows.layer > 0) pipeline_.select_by(rows.layer, queries_before_);
  pipeline_.append(rows.layer, {rows.key, n(shape_.kv_heads, shape_.head_dim)},
                   {rows.value, n(shape_.kv_heads, shape_.head_dim)},
                   {rows.query, n(shape_.query_heads, shape_.head_dim)});
  if (by_layer_before_)
    queries_before_.assign(rows.query, rows.query + n(shape_.query_heads, shape_.head_dim));
  lse_.resize(n(shape_.query_heads, 1));
  pipeline_.attend(rows.layer, {output, n(shape_.query_heads, shape_.head_dim)}, lse_);
  seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (compare_) gather(rows, output);
  if (rows.layer + 1 == shape_.layers) pipeline_.end_step();
}

void retrieval_attention::reset() {
  const auto heads = to_size(shape_.layers * shape_.kv_heads);
  by_head_.assign(heads, {});
  attended_.assign(heads * std::max<std::size_t>(sequences_.size(), 1), {});
  seconds_ = 0;
}

void retrieval_attention::begin_step(const layer_rows& rows) {
  lse_lost_ = 0;
  lse_heads_ = 0;
  if (sequences_.empty()) return pipeline_.begin_step(rows.rows, step_phase::decode);
  step_.clear();
  for (const sequence_tokens& of : rows.of)
    step_.push_back(
        {sequences_.at(to_size(of.sequence)), static_cast<int>(of.tokens.size()), step_phase::decode});
  pipeline_.begin_step(step_);
}

void retrieval_attention::gather(const layer_rows& rows, const float* output) {
  if (rows.layer < complete_layers_ || shape_.slides(rows.layer)) return;
  const auto d = to_size(shape_.head_dim);
  full_.resize(lse_.size() * d);
  full_lse_.resize(lse_.size());
  pipeline_.attend_full(rows.layer, full_, full_lse_);
  const auto heads = to_size(shape_.query_heads);
  const auto kv_heads = to_size(shape_.kv_heads);
  const std::size_t group = heads / kv_heads, first = to_size(rows.layer) * kv_heads;
  for (std::size_t head = 0; head < lse_.size(); ++head) {  // of one row after the other
    double difference = 0, size = 0;
    for (std::size_t i = head * d; i < (head + 1) * d; ++i) {
      difference += std::pow(double{output[i]} - full_[i], 2);
      size += std::pow(double{full_[i]}, 2);
    }
    attention_statistics& s = by_head_[first + head % heads / group];
    s.error += size > 0 ? std::sqrt(difference / size) : 0;
    s.mass += std::exp(double{lse_[head]} - full_lse_[head]);
    ++s.heads;
    lse_lost_ += full_lse_[head] - lse_[head];
    ++lse_heads_;
  }
  if (sequences_.empty()) {
    const step_report report = pipeline_.report(rows.layer);
    judge(report);
    return gather(report, rows.layer, 0);
  }
  for (const sequence_tokens& of : rows.of) {
    const auto sequence = to_size(of.sequence);
    gather(pipeline_.report(rows.layer, sequences_[sequence]), rows.layer, sequence);
  }
}

void retrieval_attention::judge(const step_report& report) {
  const auto heads = to_size(shape_.query_heads), kv_heads = to_size(shape_.kv_heads);
  std::vector<double> kept(kv_heads, 0.0);
  for (std::size_t head = 0; head < lse_.size(); ++head)
    kept[head % heads / (heads / kv_heads)] += std::exp(double{lse_[head]} - full_lse_[head]);
  for (std::size_t head = 0; head < kv_heads; ++head) {
    judged_.push_back({.missed = static_cast<float>(1.0 - kept[head] * static_cast<double>(kv_heads) /
                                                              static_cast<double>(lse_.size())),
                       .corrected = report.corrected[head] != 0});
    if (!report.missed.empty()) judged_.back().bound = report.missed[head].share_bound;
  }
}

void retrieval_attention::gather(const step_report& report, int layer, std::size_t sequence) {
  const auto kv_heads = to_size(shape_.kv_heads);
  const std::size_t most = report.attended.size() / kv_heads;
  const std::size_t first = to_size(layer) * kv_heads;
  for (std::size_t head = 0; head < report.corrected.size(); ++head) {
    attention_statistics& s = by_head_[first + head];
    s.corrected += report.corrected[head];
    s.recalled += report.recalled[head];
    s.recalled_before_attention += report.recalled_before_attention[head];
    s.promoted += report.promoted[head];
    s.attended += report.attended_count[head];
    if (!report.coded_count.empty()) s.coded += report.coded_count[head];
    const auto pages = report.attended.subspan(head * most, to_size(report.attended_count[head]));
    auto& before = attended_[sequence * by_head_.size() + first + head];
    if (s.rows > 0) {
      ++s.followed;
      s.changed += std::count_if(pages.begin(), pages.end(), [&](std::int32_t page) {
        return !std::binary_search(before.begin(), before.end(), page);
      });
    }
    before.assign(pages.begin(), pages.end());
    ++s.rows;
  }
}

attention_statistics& attention_statistics::operator+=(const attention_statistics& more) {
  error += more.error;
  mass += more.mass;
  heads += more.heads;
  rows += more.rows;
  corrected += more.corrected;
  recalled += more.recalled;
  recalled_before_attention += more.recalled_before_attention;
  promoted += more.promoted;
  changed += more.changed;
  followed += more.followed;
  attended += more.attended;
  coded += more.coded;
  return *this;
}

}  // namespace freekv::examples
