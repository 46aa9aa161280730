// Complete pages of layers that keep them encoded: codec and file between a page's rows and its slices.
#pragma once

#include <algorithm>
#include <array>
#include <freekv/backend/host/workspace.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/policies/codec.hpp>
#include <string>

namespace freekv::host {

/// Encodes and decodes the pages of one layer with a thread's scratch. `Policies` has the codec as a member.
template <class State, class Policies>
class encoded_pages {
 public:
  using element = typename State::element;
  static constexpr int d = State::head_dim;

  encoded_pages(const State& s, const Policies& policies, const workspace& w)
      : s_(&s), policies_(&policies), w_(&w) {}

  /// Scratch for one decoded slice of `most_staged`.
  head_slice<element> staged(int nth) const {
    auto* const key = reinterpret_cast<element*>(w_->decoded) + std::ptrdiff_t{nth} * 2 * s_->page.tokens * d;
    return {key, key + std::ptrdiff_t{s_->page.tokens} * d, d};
  }

  /// Encodes one head's slice of a page that is to be written.
  [[gnu::noinline]] void encode(int head, const head_slice<const element>& slice) const {
    resolve(policies_->codec,
            [&](const auto& codec) { codec.template encode<d>(slice, s_->page.tokens, encoded(head)); });
  }
  /// What comes back of a slice that was encoded.
  void decode(int head, const head_slice<element>& to) const { decode(encoded(head), to); }
  /// Writes the encoded slices of all heads of a sequence's page. Throws store_error.
  void write(int sequence, int page) const {
    naming(sequence, [&] { s_->slices.write_page(s_->store_page(sequence, page), w_->encoded); });
  }

  /// Reads `count` slices of one KV head of a sequence: that of its complete page `page(i)` to the head_slice `to(i)`.
  /// Throws store_error.
  template <class Page, class To>
  void read(const head_of& at, int count, const Page& page, const To& to) const {
    read_stored(
        at, count, [&](int i) { return s_->store_page(at.sequence, page(i)); }, to);
  }
  /// The same of store pages. Files are read as many slices at a time as there is scratch for.
  template <class StorePage, class To>
  void read_stored(const head_of& at, int count, const StorePage& store_page, const To& to) const {
    const slice_store& slices = s_->slices;
    if (slices.file == nullptr) {
      for (int i = 0; i < count; ++i) decode(slices.in_memory(store_page(i), at.head), to(i));
      return;
    }
    for (int first = 0; first < count; first += most_staged) {
      const int some = std::min(count - first, most_staged);
      std::array<file_read, most_staged> reads;
      for (int i = 0; i < some; ++i)
        reads[static_cast<std::size_t>(i)] = slices.read_of(store_page(first + i), at.head, encoded(i));
      naming(at.sequence, [&] { slices.file->read({reads.data(), static_cast<std::size_t>(some)}); });
      for (int i = 0; i < some; ++i) decode(encoded(i), to(first + i));
    }
  }

  /// Reads the pages `page(i)`, the same ones side by side, once each and as many at a time as there is scratch for, and
  /// calls `use(i, slice)` for each of `count`. Throws store_error.
  template <class Page, class Use>
  void read_each(const head_of& at, int count, const Page& page, const Use& use) const {
    for (int first = 0, last; first < count; first = last) {
      std::array<int, most_staged> pages{};
      int distinct = 0;
      for (last = first; last < count; ++last) {
        if (distinct > 0 && pages[static_cast<std::size_t>(distinct - 1)] == page(last)) continue;
        if (distinct == most_staged) break;
        pages[static_cast<std::size_t>(distinct++)] = page(last);
      }
      const auto nth_page = [&](int nth) { return pages[static_cast<std::size_t>(nth)]; };
      read(at, distinct, nth_page, [&](int nth) { return staged(nth); });
      for (int i = first, nth = 0; i < last; ++i) {
        if (page(i) != nth_page(nth)) ++nth;
        use(i, staged(nth));
      }
    }
  }

 private:
  /// Says in an error whose tokens it was about.
  template <class Call>
  static void naming(int sequence, const Call& call) {
    try {
      call();
    } catch (const store_error& error) {
      throw_naming(error, sequence);
    }
  }
  [[noreturn, gnu::cold, gnu::noinline]] static void throw_naming(const store_error& error, int sequence) {
    throw error.with_sequence("sequence " + std::to_string(sequence));
  }
  std::byte* encoded(int nth) const {
    return w_->encoded + static_cast<std::size_t>(nth) * s_->slices.slice_bytes;
  }
  [[gnu::noinline]] void decode(const std::byte* from, const head_slice<element>& to) const {
    resolve(policies_->codec,
            [&](const auto& codec) { codec.template decode<d>(from, s_->page.tokens, to); });
  }

  const State* s_;
  const Policies* policies_;
  const workspace* w_;
};

}  // namespace freekv::host
