// Pages that the store keeps as a codec leaves them, on the device: encoded when they are complete, and read
// back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <freekv/backend/cuda/lane_team.cuh>
#include <freekv/backend/cuda/page_staging.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/policies/codec.hpp>
#include <freekv/storage/memory.hpp>
#include <type_traits>

namespace freekv::device {

struct encode_tuning {
  int threads = 128;     ///< of a block
  int registers = 96;    ///< of a thread at most
  int most_teams = 512;  ///< that run at a time, each with scratch of a slice's bytes; more slices take turns
  constexpr bool valid() const {
    return valid_block(threads, registers) && most_teams % threads == 0 && most_teams > 0;
  }
};
inline constexpr encode_tuning encode_default{};
static_assert(encode_default.valid());

/// True of a codec that keeps complete pages in another form than their rows'.
template <class Codec>
inline constexpr bool encodes_pages = !std::is_same_v<Codec, identity>;

/// Range of a step's (entry, page) pairs that one launch works on, numbered entry by entry. Every entry has
/// as many pairs as the one that writes to most pages; those that it does not write to are skipped.
struct page_run {
  int first = 0, count = 0;
};

/// Scratch of encoding: pages that prompts complete, until they are encoded, and what they become.
template <class Element>
struct encoding_scratch {
  page_staging<Element> staged;
  std::byte* encoded = nullptr;  // (team, heads of a team, slice_stride)
  float* shared = nullptr;       // (team, shared floats)
  int team_heads = 1;            // heads of a page that a team encodes one after the other
  int shared_floats = 0;
  std::size_t slice_stride = 0;

  struct sizes {
    int kv_heads = 0;
    std::size_t slice_bytes = 0;
    int shared_floats = 0;  // of a codec whose slices share something; else 0
  };
  static encoding_scratch carve(carver& memory, const page_staging<Element>& staged, const sizes& s) {
    encoding_scratch scratch;
    scratch.staged = staged;
    scratch.team_heads = s.shared_floats > 0 ? s.kv_heads : 1;
    scratch.shared_floats = s.shared_floats;
    scratch.slice_stride = (s.slice_bytes + 15) / 16 * 16;
    const auto teams = to_size(encode_default.most_teams);
    scratch.encoded = memory.take<std::byte>(teams * to_size(scratch.team_heads) * scratch.slice_stride);
    scratch.shared = memory.take<float>(teams * to_size(scratch.shared_floats));
    return scratch;
  }
  FREEKV_HD std::byte* encoded_of(int team, int nth) const {
    return encoded + (to_size(team) * to_size(team_heads) + to_size(nth)) * slice_stride;
  }
  FREEKV_HD float* shared_of(int team) const { return shared + std::int64_t{team} * shared_floats; }
};

/// The codec of one head's slice of a sequence's page. `floats`: to encode what the page's slices share.
template <class State, class Codec>
__device__ auto codec_of(const State& s, const Codec& codec, const sequence_head& at, int page,
                         float* floats = nullptr) {
  std::byte* const shared = s.shared_of(s.store_page(at.sequence, page));
  return codec_at(codec, {s.layer, at.head, s.heads.kv, page * s.page.tokens, shared, floats});
}

/// Decodes some rows of a complete page, to the first rows of `to`. By `Lanes` neighbouring threads, whose
/// teams share the rows out.
template <int Lanes, class State, class Codec>
__device__ void decode_by_lanes(const State& s, const Codec& codec, const sequence_head& at,
                                const page_range& part, const head_slice<typename State::element>& to) {
  constexpr row_team<State::head_dim> team;
  constexpr int teams = Lanes / team.lane_count;
  const int each = (part.tokens + teams - 1) / teams;
  const int first = thread_x() % Lanes / team.lane_count * each;
  const int count = part.tokens - first < each ? part.tokens - first : each;
  if (count <= 0) return;
  const std::byte* const slice = s.slices.in_memory(s.store_page(at.sequence, part.page), at.head);
  codec_of(s, codec, at, part.page)
      .template decode<State::head_dim>(team, slice, s.page.tokens, row_range{part.first + first, count},
                                        rows_behind(to, first));
}

/// Encodes the pages that become complete; then slots, too, hold what the codec gives back. A task is a
/// slice, or all of a page where its slices share something.
template <class State, class Codec>
__global__ void encode_pages(State s, Codec codec, step_view step, page_run pages,
                             encoding_scratch<typename State::element> scratch) {
  constexpr int d = State::head_dim;
  const row_team<d> team;
  const int heads = scratch.team_heads, of_page = s.heads.kv / heads, p = s.page.tokens;
  const int mine = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / team.lanes());
  const int teams = static_cast<int>(gridDim.x * blockDim.x) / team.lanes();
  const int tasks = min(pages.count, step.size() * step.bounds.pages - pages.first) * of_page;
  for (int task = mine; task < tasks; task += teams) {
    const int nth = task / of_page, nth_of_step = pages.first + nth;
    const step_entry& entry = step.entries[nth_of_step / step.bounds.pages];
    const int page = entry.before / p + nth_of_step % step.bounds.pages;
    if ((page + 1) * p > entry.after()) continue;
    const int first = task % of_page * heads;
    for (int i = 0; i < heads; ++i) {
      const sequence_head at{entry.sequence, first + i};
      const auto rows = entry.phase == step_phase::prefill ? scratch.staged.slice(s, nth, at.head)
                                                           : s.open_slice(at.sequence, page, at.head);
      codec_of(s, codec, at, page, scratch.shared_of(mine))
          .template encode<d>(team, as_const(rows), p, scratch.encoded_of(mine, i));
    }
    team.sync();
    const slot_id slot = s.fixed_slot(page, entry.after());
    for (int i = 0; i < heads; ++i) {
      const sequence_head at{entry.sequence, first + i};
      const std::byte* const encoded = scratch.encoded_of(mine, i);
      const auto* const words = reinterpret_cast<const std::uint32_t*>(encoded);
      auto* const kept =
          reinterpret_cast<std::uint32_t*>(s.slices.in_memory(s.store_page(at.sequence, page), at.head));
      for (int word = team.lane(); word < static_cast<int>(s.slices.slice_bytes / 4); word += team.lanes())
        kept[word] = words[word];
      if (slot != slot_id::none)
        codec_of(s, codec, at, page)
            .template decode<d>(team, encoded, p, row_range{0, p}, s.block_slice(at.sequence, slot, at.head));
    }
    team.sync();  // the scratch is free again
  }
}
template <class State, class Codec>
void launch_encode(const State& s, const Codec& codec, const step_view& step, const page_run& pages,
                   const encoding_scratch<typename State::element>& scratch, cudaStream_t stream) {
  constexpr encode_tuning tuning = encode_default;
  constexpr int lanes = row_team<State::head_dim>::lane_count;
  const int blocks =
      blocks_for(std::int64_t{pages.count} * s.heads.kv / scratch.team_heads * lanes, tuning.threads);
  launch("encoding pages",
         {std::min(tuning.most_teams * lanes / tuning.threads, blocks), tuning.threads, stream},
         encode_pages<State, Codec>, s, codec, step, pages, scratch);
}

}  // namespace freekv::device
