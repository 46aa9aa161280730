// A step on the device: what the host knows of it, uploaded through a ring of page-locked memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/core/error.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/storage/memory.hpp>
#include <span>
#include <vector>

namespace freekv::device {

/// What a launch is sized by. A launch may be sized for more than there is: what there is, is read on the device.
struct step_bounds {
  int entries = 0;
  int rows = 0;    // of all entries
  int pages = 0;   // that one entry writes to
  int tokens = 0;  // of a sequence that has prompt rows, with them
  bool decodes = false, prompts = false, copies = false;

  /// What is large enough for both.
  constexpr step_bounds max_with(const step_bounds& other) const {
    return {.entries = std::max(entries, other.entries),
            .rows = std::max(rows, other.rows),
            .pages = std::max(pages, other.pages),
            .tokens = std::max(tokens, other.tokens),
            .decodes = decodes || other.decodes,
            .prompts = prompts || other.prompts,
            .copies = copies || other.copies};
  }
};

/// A step as kernels see it.
struct step_view {
  const step_entry* entries = nullptr;  // by rising first row
  const std::int32_t* count = nullptr;  // of them
  step_bounds bounds;

  __device__ int size() const { return *count; }
  /// The entry that row `row` of the step belongs to; null where it is no entry's.
  __device__ const step_entry* entry_of(int row) const {
    int first = 0, last = size();  // entries that begin at or before the row lie before `first`
    while (first < last) {
      const int middle = (first + last) / 2;
      if (entries[middle].first_row <= row)
        first = middle + 1;
      else
        last = middle;
    }
    if (first == 0 || row >= entries[first - 1].first_row + entries[first - 1].tokens) return nullptr;
    return entries + first - 1;
  }
};

/// A table of the host's that the device has a copy of.
struct host_and_device_table {
  const std::int32_t* host = nullptr;
  std::int32_t* device = nullptr;
};

/// A number of a table that has changed.
struct table_patch {
  std::int32_t* at = nullptr;
  std::int32_t value = 0;
};

struct step_packet {
  std::int32_t* counts = nullptr;  // (2): entries, patches; page-locked
  step_entry* entries = nullptr;   // (most entries)
  table_patch* patches = nullptr;  // (most patches)
};

struct upload_tuning {
  int threads = 256;   ///< of a block
  int registers = 32;  ///< of a thread at most
  constexpr bool valid() const { return valid_block(threads, registers); }
};
inline constexpr upload_tuning upload_default{};
static_assert(upload_default.valid());

template <class Packet>  // a template, as a header's kernels are: each program has one of it
__global__ void upload_step(Packet from, step_entry* entries, std::int32_t* count) {
  const int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int all = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = first; i < from.counts[0]; i += all) entries[i] = from.entries[i];
  for (int i = first; i < from.counts[1]; i += all) *from.patches[i].at = from.patches[i].value;
  if (first == 0) *count = from.counts[0];
}

/// The steps on their way to the device: `depth` of them in page-locked memory. The device's own copy of a step is
/// overwritten `depth` steps later, when each layer's append has waited for the layer's recall of the step before, and so
/// for all that reads it.
class step_ring {
 public:
  static constexpr std::size_t depth = 4;

  /// Takes room for steps of `most_entries` and as many patches as pages may be written to, `most_patches`.
  step_ring(int most_entries, std::int64_t most_patches, carver& fast, carver& pinned) {
    for (slot& s : slots_) {
      s.packet = {pinned.take<std::int32_t>(2),
                  pinned.take<step_entry>(static_cast<std::size_t>(most_entries)),
                  pinned.take<table_patch>(static_cast<std::size_t>(most_patches))};
      s.entries = fast.take<step_entry>(static_cast<std::size_t>(most_entries));
      s.count = fast.take<std::int32_t>(1);
    }
  }

  /// The patches of the next step, from the first. Waits until the device has read the step `depth` before.
  table_patch* begin() {
    slot& s = slots_[next_ % depth];
    s.read.wait();
    return s.packet.patches;
  }
  /// Queues the upload of the step; what is queued behind it finds it in the view.
  step_view upload(std::span<const step_entry> entries, std::int32_t patches, const step_bounds& most,
                   stream& compute) {
    slot& s = slots_[next_++ % depth];
    s.packet.counts[0] = static_cast<std::int32_t>(entries.size());
    s.packet.counts[1] = patches;
    std::copy(entries.begin(), entries.end(), s.packet.entries);
    launch("upload of a step",
           {1 + blocks_for(patches, 16 * upload_default.threads), upload_default.threads, compute.get()},
           upload_step<step_packet>, s.packet, s.entries, s.count);
    s.read = compute.record();
    return {s.entries, s.count, most};
  }

 private:
  struct slot {
    step_packet packet;
    step_entry* entries = nullptr;
    std::int32_t* count = nullptr;
    event read;
  };
  std::array<slot, depth> slots_;
  std::size_t next_ = 0;
};

}  // namespace freekv::device
