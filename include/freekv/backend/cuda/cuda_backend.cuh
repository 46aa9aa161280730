// The CUDA backend: the two streams of a pipeline on a device.
#pragma once

#include <cstdint>
#include <freekv/backend/cuda/multiplies.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/core/policy.hpp>
#include <optional>
#include <string_view>

namespace freekv {

namespace device {
template <class State, class Settings, multiplies Attention, class Recall, class Copies>
class stages;
struct recall_default;
struct copies_default;
}  // namespace device

/// Means by which slices come from the store to their slots: a few blocks of a kernel, or the device's copy
/// engines.
enum class recall_by : std::uint8_t { kernel, copy_engines };

/// A device's streams. Compute is the engine's: what append and attend read and write is ordered by it, and
/// they return when their work is queued there. Selection and recall for the next step are queued on the
/// recall stream. No call waits for the device but those of the pipeline that say so, and a step that is
/// `device::step_ring::depth` ahead of it. The two streams are the caller's, may be the same, and neither is
/// the legacy default stream; the device that is current at construction is theirs. One pipeline at a time
/// uses a backend; it outlives its pipelines, whose memory is a `device_memory` and a `pinned_memory`, or
/// others of that kind.
///
/// Recall by copy engines waits on the host for each selection and is refused while a stream is captured; it
/// has a stream of its own beside the two.
///
/// `Attention`: what multiplies where layers attend. `Recall::tuning`: how a kernel recalls, a
/// device::recall_tuning; `Copies::tuning`: how copy engines do, a device::copies_tuning.
template <device::multiplies Attention = device::multiplies::by_element,
          class Recall = device::recall_default, class Copies = device::copies_default>
class basic_cuda_backend {
 public:
  using policy_kind = backend_kind;
  static constexpr std::string_view name = "cuda";
  // Types that a pipeline takes from its backend.
  using event = device::event;
  template <class State, class Settings>
  using stages = device::stages<State, Settings, Attention, Recall, Copies>;

  basic_cuda_backend(cudaStream_t compute, cudaStream_t recall, recall_by by = recall_by::kernel)
      : compute_(compute), recall_(recall) {
    if (by == recall_by::copy_engines) transfers_.emplace();
  }

  device::stream& compute() { return compute_; }
  device::stream& recall() { return recall_; }
  /// The stream of copy engines, where they recall; else null.
  device::stream* transfers() { return transfers_ ? &transfers_->ordered : nullptr; }

  /// Launches of steps that begin from now on are sized for `at_least` so much, whatever they bring: for
  /// tests and measurements, as captured steps have bounds of their own. What a step brings is read on the
  /// device; what is not there costs blocks that return, and changes no result.
  void size_launches_for(const device::step_bounds& at_least) { launch_bounds_ = at_least; }
  const device::step_bounds& launch_bounds() const { return launch_bounds_; }

 private:
  struct transfer_stream {
    device::owned_stream of;
    device::stream ordered{of.get()};
  };
  device::stream compute_, recall_;
  std::optional<transfer_stream> transfers_;
  device::step_bounds launch_bounds_;
};

using cuda_backend = basic_cuda_backend<>;
/// Backend whose attention multiplies by tensor cores: F16, BF16 and fp8, head_dim a multiple of 16.
using tensor_core_backend = basic_cuda_backend<device::multiplies::tensor_cores>;

}  // namespace freekv
