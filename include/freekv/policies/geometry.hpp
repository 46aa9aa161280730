// Page size and unit, which are policies, and beside them the budget and the roles of pages and slots at a
// length.
#pragma once

#include <algorithm>
#include <concepts>
#include <freekv/config.hpp>
#include <freekv/core/hooks.hpp>
#include <freekv/core/ids.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/core/shape.hpp>
#include <string>

namespace freekv {

/// Tokens in a page: a multiple of 8 from 8 to 256, fixed at compile time or, as `page_size<dynamic>{32}`,
/// set at run time.
template <int Tokens = 32>
struct page_size {
  static_assert(Tokens == dynamic || (Tokens >= 8 && Tokens <= 256 && Tokens % 8 == 0),
                "page_size must be a multiple of 8 from 8 to 256, or dynamic");
  using policy_kind = page_size_kind;
  count_of<Tokens> tokens{};
};

/// Says how many tokens a page holds. A run-time choice is a value of one type, page_size<dynamic>.
template <class P>
concept page_size_policy = policy<P> && std::same_as<typename P::policy_kind, page_size_kind> &&
    requires(const P p) {
  { p.tokens } -> std::convertible_to<int>;
};

static_assert(page_size_policy<page_size<>> && page_size_policy<page_size<dynamic>>);

struct page_size_kind : kind_defaults {
  using default_policy = page_size<>;
  template <class P>
  struct check {
    static_assert(page_size_policy<P>,
                  "a page size has tokens -> int; for a choice at run time take page_size<dynamic>");
  };
};

/// Unit of what is summarised, selected and recalled: a page, or with `unit<8>` that many tokens of one, a
/// divisor of the page size, set at run time as `unit<dynamic>{8}`, 0 for whole pages. Storage, sink and
/// window stay in pages. (InfiniGen selects single tokens, ShadowKV chunks of 8)
template <int Tokens = 0>
struct unit {
  static_assert(Tokens == dynamic || (Tokens >= 0 && Tokens <= 256),
                "unit takes 1 to 256 tokens, 0 for whole pages, or dynamic");
  using policy_kind = unit_kind;
  count_of<Tokens> tokens{};
};

/// Says how many tokens are selected together; 0: a page's.
template <class U>
concept unit_policy = policy<U> && std::same_as<typename U::policy_kind, unit_kind> && requires(const U u) {
  { u.tokens } -> std::convertible_to<int>;
};

static_assert(unit_policy<unit<>> && unit_policy<unit<dynamic>>);

struct unit_kind : kind_defaults {
  using default_policy = unit<>;
  template <class P>
  struct check {
    static_assert(unit_policy<P>, "a unit has tokens -> int; for a choice at run time take unit<dynamic>");
  };
};

/// Budget of one KV head, in tokens that it attends to: `sink + window + selected_units * page_size`, plus
/// the open page's remainder; where a unit is less than a page, `selected_units` counts units. `sink >= 0`
/// and `window >= page_size` are multiples of the page size; `selected_units >= 1`.
struct budget {
  int sink = 64;
  int window = 128;
  int selected_units = 10;
};

/// The roles of a sequence's pages at one length, as ranges of logical pages:
/// sink [0, sink_end), candidates [sink_end, window_begin), window [window_begin, page_end).
struct page_roles {
  int sink_end = 0;
  int window_begin = 0;
  int page_end = 0;
  FREEKV_HD constexpr int candidates() const { return window_begin - sink_end; }
  constexpr bool operator==(const page_roles&) const = default;
};

/// Roles at length `tokens` for budget `b` and page size `page`: window pages are the non-sink pages that
/// hold one of the last `b.window` tokens; candidates are the complete pages that are neither sink nor
/// window.
FREEKV_HD constexpr page_roles roles_at(int tokens, const budget& b, int page) {
  const int page_end = (tokens + page - 1) / page;
  const int sink_end = b.sink / page < page_end ? b.sink / page : page_end;
  const int first_window_token = tokens > b.window ? tokens - b.window : 0;
  const int first_window_page = first_window_token / page;
  return {sink_end, first_window_page > sink_end ? first_window_page : sink_end, page_end};
}

/// Slots of a resident cache, equal for all heads of a layer: sink slots, then the window ring (page j in
/// ring slot j mod ring), then the selected slots, the only ones whose heads may hold different pages. A slot
/// holds a page, a selected one a unit, and as many of these as make a page share its block.
struct slot_roles {
  int sink = 0;
  int ring = 0;
  int selected = 0;
  int units_per_page = 1;
  /// Blocks, of a page each.
  FREEKV_HD constexpr int total() const { return fixed() + selected_blocks_for(selected); }
  /// Blocks of sink and ring; and of `slots` selected slots.
  FREEKV_HD constexpr int fixed() const { return sink + ring; }
  FREEKV_HD constexpr int selected_blocks_for(int slots) const {
    return (slots + units_per_page - 1) / units_per_page;
  }
  FREEKV_HD constexpr slot_id sink_slot(int page) const { return slot_id{page}; }
  FREEKV_HD constexpr slot_id ring_slot(int page) const { return slot_id{sink + page % ring}; }
  /// The slot that has the room of selected unit i.
  FREEKV_HD constexpr slot_id selected_slot(int i) const { return slot_id{sink + ring + i / units_per_page}; }
  /// First non-sink page that is still whole in the ring at length `tokens`.
  FREEKV_HD constexpr int ring_begin(int tokens, int page_tokens) const {
    const int begin = (tokens + page_tokens - 1) / page_tokens - ring;
    return begin > sink ? begin : sink;
  }
};

/// `spare`: slots beyond the selected pages, for pages that are no longer selected. `decode_rows`: most that
/// a step appends; the ring has room for those that are taken back.
FREEKV_HD constexpr slot_roles slots_for(const budget& b, int page, int spare = 0, int decode_rows = 1) {
  const int ring = b.window / page + 1 + (2 * (decode_rows - 1) + page - 1) / page;
  return {b.sink / page, ring, b.selected_units + spare};
}

}  // namespace freekv
