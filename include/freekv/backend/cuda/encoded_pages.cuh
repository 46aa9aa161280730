// Pages that the store keeps as a codec leaves them, on the device: encoded when they are complete, and read back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <freekv/backend/cuda/lane_team.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/step.cuh>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/policies/codec.hpp>
#include <freekv/storage/memory.hpp>
#include <type_traits>

namespace freekv::device {

struct encode_tuning {
  int threads = 128;     ///< of a block
  int registers = 96;    ///< of a thread at most
  int most_teams = 512;  ///< that run at a time, each with scratch of a slice's bytes; more slices take turns
  int staged_tokens = 2048;  ///< of prompts that are encoded in one launch; longer ones take several
  constexpr bool valid() const {
    return valid_block(threads, registers) && most_teams % threads == 0 && most_teams > 0 &&
           staged_tokens > 0;
  }
};
inline constexpr encode_tuning encode_default{};
static_assert(encode_default.valid());

/// Whether complete pages are kept in another form than that of their rows.
template <class Codec>
inline constexpr bool encodes_pages = !std::is_same_v<Codec, identity>;

/// Pages of a step that one launch works on. Each entry has as many as any writes to; of these pages of all entries, one
/// entry's behind another's, so many from the first.
struct page_run {
  int first = 0, count = 0;
};

/// Where pages that prompts complete are until they are encoded, and what they become.
template <class Element>
struct encoding_scratch {
  Element* staged = nullptr;     // (page, kv head, 2, page tokens, head_dim)
  std::byte* encoded = nullptr;  // (team, slice_stride)
  int pages = 0;                 // that there is room for
  std::size_t slice_stride = 0;

  struct sizes {
    int page_tokens = 0, kv_heads = 0, head_dim = 0;
    std::int64_t pages = 0;  // that a step may complete
    std::size_t slice_bytes = 0;
  };
  static encoding_scratch carve(carver& memory, const sizes& s) {
    encoding_scratch scratch;
    scratch.pages =
        static_cast<int>(std::clamp<std::int64_t>(encode_default.staged_tokens / s.page_tokens, 1, s.pages));
    scratch.slice_stride = (s.slice_bytes + 15) / 16 * 16;
    const auto numbers = std::int64_t{scratch.pages} * s.kv_heads * 2 * s.page_tokens * s.head_dim;
    scratch.staged = memory.take<Element>(static_cast<std::size_t>(numbers));
    scratch.encoded = memory.take<std::byte>(encode_default.most_teams * scratch.slice_stride);
    return scratch;
  }
  template <class State>
  FREEKV_HD head_slice<Element> staged_slice(const State& s, int nth, int head) const {
    const int plane = s.page.tokens * State::head_dim;
    Element* const key = staged + (std::int64_t{nth} * s.heads.kv + head) * 2 * plane;
    return {key, key + plane, State::head_dim};
  }
};

/// The codec of one head's slice of a sequence's page.
template <class State, class Codec>
__device__ auto codec_of(const State& s, const Codec& codec, const head_of& at, int page) {
  std::byte* const shared = s.shared_of(s.store_page(at.sequence, page));
  return codec_at(codec, {s.layer, at.head, s.heads.kv, page * s.page.tokens, shared});
}

/// Some rows of a complete page as they come back, to the first rows of `to`.
template <class Team, class State, class Codec>
__device__ void decode_part(Team team, const State& s, const Codec& codec, const head_of& at,
                            const page_part& part, const head_slice<typename State::element>& to) {
  codec_of(s, codec, at, part.page)
      .template decode<State::head_dim>(team,
                                        s.slices.in_memory(s.store_page(at.sequence, part.page), at.head),
                                        s.page.tokens, row_range{part.first, part.tokens}, to);
}
/// The same by a warp, whose teams share the rows out.
template <class State, class Codec>
__device__ void decode_by_warp(const State& s, const Codec& codec, const head_of& at, const page_part& part,
                               const head_slice<typename State::element>& to) {
  constexpr row_team<State::head_dim> team;
  constexpr int teams = 32 / team.lane_count;
  const int each = (part.tokens + teams - 1) / teams;
  const int first = static_cast<int>(threadIdx.x) % 32 / team.lane_count * each;
  const int count = part.tokens - first < each ? part.tokens - first : each;
  if (count > 0)
    decode_part(team, s, codec, at, {part.page, part.first + first, count}, rows_behind(to, first));
}

/// Encodes the pages that become complete; then slots, too, hold what the codec gives back.
template <class State, class Codec>
__global__ void encode_pages(State s, Codec codec, step_view step, page_run pages,
                             encoding_scratch<typename State::element> scratch) {
  constexpr int d = State::head_dim;
  const row_team<d> team;
  const int heads = s.heads.kv, p = s.page.tokens;
  const int first = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / team.lanes());
  const int teams = static_cast<int>(gridDim.x * blockDim.x) / team.lanes();
  std::byte* const encoded = scratch.encoded + static_cast<std::size_t>(first) * scratch.slice_stride;
  const int units = min(pages.count, step.size() * step.most.pages - pages.first) * heads;
  for (int unit = first; unit < units; unit += teams) {
    const int nth = unit / heads, nth_of_step = pages.first + nth;
    const step_entry& entry = step.entries[nth_of_step / step.most.pages];
    const int page = entry.before / p + nth_of_step % step.most.pages;
    if ((page + 1) * p > entry.after()) continue;
    const head_of at{entry.sequence, unit % heads};
    const auto rows = entry.kind == row_kind::prompt ? scratch.staged_slice(s, nth, at.head)
                                                     : s.open_slice(at.sequence, page, at.head);
    codec_of(s, codec, at, page).template encode<d>(team, as_const(rows), p, encoded);
    team.sync();
    const auto* const words = reinterpret_cast<const std::uint32_t*>(encoded);
    auto* const kept =
        reinterpret_cast<std::uint32_t*>(s.slices.in_memory(s.store_page(at.sequence, page), at.head));
    for (int i = team.lane(); i < static_cast<int>(s.slices.slice_bytes / 4); i += team.lanes())
      kept[i] = words[i];
    if (const int slot = s.fixed_slot(page, entry.after()); slot >= 0)
      codec_of(s, codec, at, page)
          .template decode<d>(team, encoded, p, row_range{0, p}, s.frame_slice(at.sequence, slot, at.head));
    team.sync();  // the scratch is free again
  }
}
template <class State, class Codec>
void launch_encode(const State& s, const Codec& codec, const step_view& step, const page_run& pages,
                   const encoding_scratch<typename State::element>& scratch, cudaStream_t stream) {
  constexpr encode_tuning tuning = encode_default;
  constexpr int lanes = row_team<State::head_dim>::lane_count;
  const int blocks = blocks_for(std::int64_t{pages.count} * s.heads.kv * lanes, tuning.threads);
  encode_pages<<<std::min(tuning.most_teams * lanes / tuning.threads, blocks), tuning.threads, 0, stream>>>(
      s, codec, step, pages, scratch);
  check(cudaGetLastError(), "encoding pages");
}

}  // namespace freekv::device
