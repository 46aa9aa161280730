// Append, summarise and drift on the host.
#pragma once

#include <algorithm>
#include <cstring>
#include <freekv/algorithms/copy_slice.hpp>
#include <freekv/algorithms/keep_selection.hpp>
#include <freekv/algorithms/summarise_unit.hpp>
#include <freekv/backend/host/encoded_pages.hpp>
#include <freekv/backend/host/isa.hpp>
#include <freekv/backend/host/workspace.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/policies/correction.hpp>
#include <freekv/policies/pinning.hpp>

namespace freekv::host {

/// An entry's keys and values as a step brings them, (kv_heads, head_dim) a row: token t of it is row
/// `t - first`.
template <class In>
struct rows_from {
  step_rows<In> rows;
  int first = 0, head_dim = 1;

  const In* key(int token, int head) const {
    return rows.keys + (token - first) * rows.key_stride + std::int64_t{head} * head_dim;
  }
  const In* value(int token, int head) const {
    return rows.values + (token - first) * rows.value_stride + std::int64_t{head} * head_dim;
  }
};

/// Writes the summaries of one head's slice of a complete page, one for each unit.
template <class State, class Summaries>
void summarise_slice(isa set, const State& s, const Summaries& summaries,
                     const head_slice<const typename State::element>& slice, store_page_id store_page,
                     int head, const workspace& w) {
  with_team(set, [&](auto team) {
    resolve(summaries, [&](const auto& summary) {
      for (int nth = 0; nth < s.units_per_page; ++nth)
        summarise_unit<typename State::element>(team, summary_at(summary, s.layer, head),
                                                rows_behind(slice, s.first_row_of(nth)), s.unit,
                                                {w.rows, w.numbers}, s.summary_of(store_page, head, nth));
    });
  });
}

/// Writes what each unit of a slice is worth to be pinned.
template <class State, class Pinning>
void value_slice(isa set, const State& s, const Pinning& pinning,
                 const head_slice<const typename State::element>& slice, store_page_id store_page, int head,
                 const workspace& w) {
  constexpr int d = State::head_dim;
  resolve(pinning, [&]<class P>(const P& policy) {
    if constexpr (!std::is_same_v<P, no_pins>)
      with_team(set, [&](auto team) {
        for (int nth = 0; nth < s.units_per_page; ++nth) {
          for (int t = 0; t < s.unit.tokens; ++t)
            team.widen(slice.key + (s.first_row_of(nth) + t) * slice.stride, w.rows + t * d, d);
          s.pin_worth_of(store_page, head, nth) =
              freekv::detail::pin_worth(policy.worth(team, unit_keys{w.rows, s.unit}, w.pooled_query));
        }
      });
  });
}

/// Appends the rows of one entry that fall into one page: K and V to the store and, where the layer keeps
/// slots and the page stays in the fast tier, to its sink or ring slot; a page that becomes complete is
/// summarised, and encoded if the layer keeps it so: then slots, too, hold what the codec gives back.
///
/// `rows` has key(token, head) and value(token, head), of the stored element type or float, to fp8_e4m3 of
/// any. Throws store_error, and may be called again then.
template <class State, class Policies, class Rows>
void append_page(isa set, const State& s, const Policies& policies, const step_entry& entry, int page_index,
                 const Rows& rows, const workspace& w) {
  using element = typename State::element;
  constexpr int d = State::head_dim;
  const int page_begin = page_index * s.page.tokens, page_end = page_begin + s.page.tokens;
  const int first = std::max(entry.before, page_begin), last = std::min(entry.after(), page_end);
  const bool complete = last == page_end, encodes = s.encoded && complete;
  const slot_id slot = s.fixed_slot(page_index, entry.after());
  const bool in_slots = slot != slot_id::none;
  const store_page_id store_page = s.store_page(entry.sequence, page_index);
  const encoded_pages pages(s, policies, w);
  const auto put = []<class In>(element* to, const In* from, const float* scale) {
    if (scale != nullptr && !std::is_same_v<In, fp8_e4m3>)
      for (int i = 0; i < d; ++i) to[i] = stored_number<element>(from[i], *scale);
    else if constexpr (std::is_same_v<In, element>)
      std::memcpy(to, from, d * sizeof(element));
    else
      for (int i = 0; i < d; ++i) to[i] = from_float<element>(to_float(from[i]));
  };
  const auto scale_of = [](const float* scales, int head) {
    return scales == nullptr ? nullptr : scales + head;
  };
  const int shared_rows =
      entry.shared_page != store_page_id::none && page_index == entry.before / s.page.tokens
          ? entry.before % s.page.tokens
          : 0;
  for (int head = 0; head < s.heads.kv; ++head) {
    const auto kept = !s.encoded ? slice_of(s.store, store_page, head)
                      : entry.phase == step_phase::prefill && first == page_begin && complete
                          ? pages.staged(0)
                          : s.open_slice(entry.sequence, page_index, head);
    if (shared_rows > 0 && !s.encoded)
      copy_slice<d>(as_const(slice_of(s.store, entry.shared_page, head)), kept, shared_rows);
    for (int token = first; token < last; ++token) {
      const int t = token - page_begin;
      put(kept.key + t * kept.stride, rows.key(token, head), scale_of(s.key_scales, head));
      put(kept.value + t * kept.stride, rows.value(token, head), scale_of(s.value_scales, head));
    }
    if (complete && s.kind_of(head) == layer_kind::retrieval) {
      summarise_slice(set, s, policies.summary, as_const(kept), store_page, head, w);
      if (s.pins > 0) value_slice(set, s, policies.pinning, as_const(kept), store_page, head, w);
    }
    if (encodes)
      pages.encode({entry.sequence, head}, page_index, as_const(kept));
    else if (in_slots)
      copy_slice<d>(as_const(rows_behind(kept, first - page_begin)),
                    rows_behind(s.block_slice(entry.sequence, slot, head), first - page_begin), last - first);
  }
  if (!encodes) return;
  for (int head = 0; in_slots && head < s.heads.kv; ++head)
    pages.decode({entry.sequence, head}, page_index, s.block_slice(entry.sequence, slot, head));
  pages.write(entry.sequence, page_index);
}

/// Forgets the selection of a sequence, and what its selected slots hold.
template <class State>
void drop_selection(const State& s, int sequence) {
  for (int head = 0; head < s.heads.kv; ++head) freekv::detail::drop_selection(one_lane{}, s, sequence, head);
}

/// Flags the KV heads of a decode entry that select anew; then keeps `queries` (rows, query_heads, head_dim),
/// which make the next selection.
template <class State, class Correction>
void detect_drift(isa set, const State& s, const Correction& correction, const step_entry& entry,
                  const float* queries) {
  constexpr int d = State::head_dim;
  const int group = s.heads.group();
  const auto query = [&](int decode_row, int head) {
    return queries + (std::ptrdiff_t{decode_row} * s.heads.query + std::ptrdiff_t{head} * group) * d;
  };
  with_team(set, [&](auto team) {
    for (int head = 0; head < s.heads.kv; ++head) {
      const float* const before =
          entry.kept_row < 0 ? nullptr : s.kept_query(entry.sequence, head, entry.kept_row);
      const bool anew = selects_anew(team, correction.at(s.layer), entry, {before, group, d},
                                     [&](int row) { return query(row, head); });
      begin_report(s, entry.sequence, head, anew);
    }
  });
  for (int head = 0; head < s.heads.kv; ++head)
    for (int r = 0; r < entry.tokens; ++r)
      std::memcpy(s.kept_query(entry.sequence, head, r), query(r, head), to_size(group * d) * sizeof(float));
}

}  // namespace freekv::host
