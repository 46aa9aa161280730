// A step on the device: what the host knows of it, uploaded through a ring of page-locked memory, at once or
// by a replay of a captured step.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/core/error.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/storage/memory.hpp>
#include <span>
#include <string>
#include <thread>

namespace freekv::device {

/// Bounds that a launch is sized by, maybe for more than there is: what there is, is read on the device.
struct step_bounds {
  int entries = 0;
  int rows = 0;    // of all entries
  int pages = 0;   // that one entry writes to
  int tokens = 0;  // of a sequence that has prompt rows, with them
  bool decodes = false, prompts = false, copies = false;
  bool completes = false;  // a page

  /// Bounds that hold both.
  constexpr step_bounds max_with(const step_bounds& other) const {
    return {.entries = std::max(entries, other.entries),
            .rows = std::max(rows, other.rows),
            .pages = std::max(pages, other.pages),
            .tokens = std::max(tokens, other.tokens),
            .decodes = decodes || other.decodes,
            .prompts = prompts || other.prompts,
            .copies = copies || other.copies,
            .completes = completes || other.completes};
  }
  /// True where launches sized by `launched` do all of it.
  FREEKV_HD constexpr bool fits(const step_bounds& launched) const {
    return entries <= launched.entries && rows <= launched.rows && pages <= launched.pages &&
           tokens <= launched.tokens && decodes <= launched.decodes && prompts <= launched.prompts &&
           copies <= launched.copies;
  }
  /// Bounds with one entry more, which has a row or more; `page` tokens are a page.
  constexpr step_bounds with(const step_entry& entry, int page) const {
    const bool decode = entry.phase == step_phase::decode;
    return max_with({.entries = entries + 1,
                     .rows = entry.first_row + entry.tokens,
                     .pages = (entry.after() + page - 1) / page - entry.before / page,
                     .tokens = decode ? 0 : entry.after(),
                     .decodes = decode,
                     .prompts = !decode,
                     .copies = entry.shared_page != store_page_id::none,
                     .completes = entry.after() / page > entry.before / page});
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

/// A number of a table that has changed.
struct table_patch {
  std::int32_t* at = nullptr;
  std::int32_t value = 0;
};

/// Header of a packet.
struct packet_header {
  std::int64_t number = 0;  // of the step, from 1; written last
  std::int32_t patches = 0;
  step_bounds brings;  // entries, and what launches are to be sized for
};

/// Faults in the order of steps that are planned and replayed.
enum class replay_fault : std::int32_t { none, nothing_planned, too_large, out_of_turn };

/// Uploads as the device counts them.
struct upload_state {
  std::int64_t taken = 0;  // steps
  unsigned blocks_done = 0;
  replay_fault fault = replay_fault::none;
};
/// Uploads as the host sees them, in page-locked memory.
struct upload_status {
  std::int64_t taken = 0;
  replay_fault fault = replay_fault::none;
};

/// Packets of a ring, page-locked, and what the device keeps of it.
struct step_packets {
  static constexpr int depth = 4;

  packet_header* headers = nullptr;  // (depth)
  step_entry* entries = nullptr;     // (depth, most_entries)
  table_patch* patches = nullptr;    // (depth, most_patches)
  std::int64_t most_entries = 0, most_patches = 0;
  upload_state* state = nullptr;  // of the device
  upload_status* status = nullptr;

  FREEKV_HD step_entry* entries_of(std::int64_t step) const { return entries + step % depth * most_entries; }
  FREEKV_HD table_patch* patches_of(std::int64_t step) const { return patches + step % depth * most_patches; }
};

/// A step where the device has it.
struct device_step {
  step_entry* entries = nullptr;
  std::int32_t* count = nullptr;
};

struct upload_tuning {
  int threads = 256;        ///< of a block
  int registers = 40;       ///< of a thread at most
  int replayed_blocks = 4;  ///< of a captured upload, which brings any number of patches
  constexpr bool valid() const { return valid_block(threads, registers) && replayed_blocks > 0; }
};
inline constexpr upload_tuning upload_default{};
static_assert(upload_default.valid());

/// Takes the next packet of the ring, whose number the device has counted: so a captured upload takes another
/// one at each replay. `expected`: the step that it has to be; 0: any. A step that is not there, is not that
/// one, or needs more than launches are sized for is none: it and all that come after it have no entries, and
/// the host is told why.
template <class Packets>  // a template, as a header's kernels are: each program has one of it
__global__ void upload_step(Packets from, step_bounds launched, std::int64_t expected, device_step to) {
  __shared__ packet_header packet;
  __shared__ std::int64_t before;
  __shared__ replay_fault fault;
  if (threadIdx.x == 0) {
    before = from.state->taken;
    packet = from.headers[before % Packets::depth];
    fault = from.state->fault;
    if (fault == replay_fault::none)
      fault = packet.number != before + 1                      ? replay_fault::nothing_planned
              : expected != 0 && expected != packet.number     ? replay_fault::out_of_turn
              : expected == 0 && !packet.brings.fits(launched) ? replay_fault::too_large
                                                               : replay_fault::none;
  }
  __syncthreads();
  const bool taken = fault == replay_fault::none;
  const int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int all = static_cast<int>(gridDim.x * blockDim.x);
  const int entries = taken ? packet.brings.entries : 0, patches = taken ? packet.patches : 0;
  const table_patch* const changed = from.patches_of(before);
  for (int i = first; i < entries; i += all) to.entries[i] = from.entries_of(before)[i];
  for (int i = first; i < patches; i += all) *changed[i].at = changed[i].value;
  if (first == 0) *to.count = entries;
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(&from.state->blocks_done, 1u) + 1 < gridDim.x) return;
  // The last block: all have read the packet.
  from.state->blocks_done = 0;
  from.state->fault = fault;
  from.state->taken = before + taken;
  from.status->fault = fault;
  __threadfence_system();
  *static_cast<volatile std::int64_t*>(&from.status->taken) = before + taken;
}

/// Steps that are planned and not yet taken by the device, `depth` of them at most. Each is uploaded by a
/// launch behind the plan, or by the next replay of a captured upload, in the order in which they were
/// planned.
///
/// The device has `depth` copies of steps that are begun, one after the other, and one of replayed ones. The
/// first are overwritten `depth` steps later, when each layer's append has waited for the layer's recall of
/// the step before, and so for all that reads it; the last by the next replay, behind all of the replay
/// before.
class step_ring {
 public:
  static constexpr int depth = step_packets::depth;

  /// Takes room for steps of `most_entries` and as many patches as pages may be written to, `most_patches`.
  step_ring(int most_entries, std::int64_t most_patches, carver& fast, carver& page_locked) {
    const auto entries = to_size(most_entries);
    packets_ = {.headers = page_locked.take<packet_header>(depth),
                .entries = page_locked.take<step_entry>(depth * entries),
                .patches = page_locked.take<table_patch>(depth * to_size(most_patches)),
                .most_entries = most_entries,
                .most_patches = most_patches,
                .state = fast.take<upload_state>(1),
                .status = page_locked.take<upload_status>(1)};
    for (device_step& step : steps_) step = {fast.take<step_entry>(entries), fast.take<std::int32_t>(1)};
    no_entries_ = fast.take<std::int32_t>(1);
  }
  /// Empties the ring, before the first step.
  void clear(stream& compute) {
    std::fill_n(packets_.headers, depth, packet_header{});
    *packets_.status = {};
    check(cudaMemsetAsync(packets_.state, 0, sizeof *packets_.state, compute.get()), "cudaMemsetAsync");
    check(cudaMemsetAsync(no_entries_, 0, sizeof *no_entries_, compute.get()), "cudaMemsetAsync");
  }

  /// Steps that the device has not taken yet, as the host knows.
  std::int64_t ahead() const { return planned_ - std::atomic_ref(packets_.status->taken).load(); }
  bool full() const { return ahead() >= depth; }
  /// Throws replay_error if the order of steps and replays was wrong.
  void check_order() const {
    const replay_fault fault = std::atomic_ref(packets_.status->fault).load();
    if (fault == replay_fault::none) return;
    const std::string step = "step " + std::to_string(packets_.status->taken + 1) + " of the pipeline ";
    throw replay_error(
        (fault == replay_fault::nothing_planned
             ? step + "was replayed before it was planned; call plan before each launch of a captured step"
         : fault == replay_fault::too_large
             ? step + "was replayed by a graph that was captured for less than it brings; launch one that is "
                      "large enough"
             : step + "was planned, and another was begun, or a sequence changed, before its replay was "
                      "queued; launch the captured step first") +
        ". Neither that step nor any after it has happened: the pipeline has to go");
  }
  /// Waits until there is room to plan a step. Throws usage_error where replays are missing that would make
  /// some.
  void wait(const stream& compute) const {
    while (full()) {
      const bool idle = compute.idle();
      check_order();
      if (!full()) return;
      if (idle)
        throw usage_error(std::to_string(depth) +
                          " steps are planned, and no replay of them is queued; launch the captured step");
      std::this_thread::yield();
    }
  }

  /// A step without entries, which needs no upload.
  step_view empty_step() const { return {nullptr, no_entries_, {}}; }
  /// The patches of the next step, from the first; there is room for it.
  table_patch* patches() { return packets_.patches_of(planned_); }
  void plan(std::span<const step_entry> entries, std::int32_t patches, const step_bounds& brings) {
    packet_header& header = packets_.headers[planned_ % depth];
    std::copy(entries.begin(), entries.end(), packets_.entries_of(planned_));
    header.patches = patches;
    header.brings = brings;
    std::atomic_ref(header.number).store(++planned_);
  }
  /// Queues the upload of the step planned last, `patches` of them; what is queued behind it finds it in the
  /// view.
  step_view upload(std::int32_t patches, const step_bounds& most, stream& compute) {
    return launch_upload(1 + blocks_for(patches, 16 * upload_default.threads), planned_,
                         steps_[planned_ % depth], most, compute);
  }
  /// Captures an upload of whichever step is next.
  step_view capture(const step_bounds& most, stream& compute) {
    return launch_upload(upload_default.replayed_blocks, 0, steps_[depth], most, compute);
  }

 private:
  step_view launch_upload(int blocks, std::int64_t expected, const device_step& to, const step_bounds& most,
                          stream& compute) {
    launch("upload of a step", {blocks, upload_default.threads, compute.get()}, upload_step<step_packets>,
           packets_, most, expected, to);
    return {to.entries, to.count, most};
  }

  step_packets packets_;
  std::array<device_step, depth + 1> steps_;  // the last: of replays
  std::int32_t* no_entries_ = nullptr;        // 0, on the device
  std::int64_t planned_ = 0;
};

}  // namespace freekv::device
