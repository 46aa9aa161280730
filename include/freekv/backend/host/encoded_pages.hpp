// Complete pages of layers that keep them encoded: codec and file between a page's rows and its slices.
#pragma once

#include <algorithm>
#include <array>
#include <freekv/backend/host/workspace.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/core/size.hpp>
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

  /// Encodes one head's slice of a sequence's page that is to be written; those of its other heads before and
  /// behind it, in order.
  [[gnu::noinline]] void encode(const sequence_head& at, int page,
                                const head_slice<const element>& slice) const {
    resolve(policies_->codec, [&](const auto& codec) {
      codec_at(codec, place_of(at.head, page, s_->store_page(at.sequence, page)))
          .template encode<d>(scalar_team{}, slice, s_->page.tokens, encoded(at.head));
    });
  }
  /// Decodes a slice of a page whose heads were all encoded.
  void decode(const sequence_head& at, int page, const head_slice<element>& to) const {
    decode(encoded(at.head), at.head, {page, 0, s_->page.tokens}, s_->store_page(at.sequence, page), to);
  }
  /// Writes the encoded slices of all heads of a sequence's page. Throws store_error.
  void write(int sequence, int page) const {
    naming(sequence, [&] { s_->slices.write_page(s_->store_page(sequence, page), w_->encoded); });
  }

  /// Reads `count` parts of one KV head's slices of complete pages of a sequence: `part(i)`, those of a page
  /// side by side, to the first rows of the head_slice `to(i)`. Throws store_error.
  template <class Part, class To>
  void read(const sequence_head& at, int count, const Part& part, const To& to) const {
    read_stored(
        at, count, part, [&](int page) { return s_->store_page(at.sequence, page); }, to);
  }
  /// Reads pages as above, where page `page` is the store's page `store_page(page)`. Slices of a file are
  /// read whole, once each, and as many at a time as there is scratch for.
  template <class Part, class StorePage, class To>
  void read_stored(const sequence_head& at, int count, const Part& part, const StorePage& store_page,
                   const To& to) const {
    const slice_store& slices = s_->slices;
    const auto decode_part = [&](int i, const std::byte* from) {
      decode(from, at.head, part(i), store_page(part(i).page), to(i));
    };
    if (slices.file == nullptr) {
      for (int i = 0; i < count; ++i) decode_part(i, slices.in_memory(store_page(part(i).page), at.head));
      return;
    }
    for (int first = 0, last; first < count; first = last) {
      std::array<file_read, most_staged> reads;
      std::size_t distinct = 0;
      for (last = first; last < count; ++last) {
        const int page = part(last).page;
        if (last > first && part(last - 1).page == page) continue;
        if (distinct == reads.size()) break;
        reads[distinct] = slices.read_of(store_page(page), at.head, encoded(static_cast<int>(distinct)));
        ++distinct;
      }
      naming(at.sequence, [&] { slices.file->read({reads.data(), distinct}); });
      for (int i = first, nth = 0; i < last; ++i) {
        if (i > first && part(i - 1).page != part(i).page) ++nth;
        decode_part(i, encoded(nth));
      }
    }
  }

  /// Reads such parts as many at a time as there is scratch for, and calls `use(i, slice)` for each.
  template <class Part, class Use>
  void read_each(const sequence_head& at, int count, const Part& part, const Use& use) const {
    for (int first = 0; first < count; first += most_staged) {
      const int some = std::min(count - first, most_staged);
      read(
          at, some, [&](int i) { return part(first + i); }, [&](int i) { return staged(i); });
      for (int i = 0; i < some; ++i) use(first + i, staged(i));
    }
  }

 private:
  slice_place place_of(int head, int page, store_page_id store_page) const {
    return {s_->layer, head, s_->heads.kv, page * s_->page.tokens, s_->shared_of(store_page), w_->shared};
  }
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
  std::byte* encoded(int nth) const { return w_->encoded + to_size(nth) * s_->slices.slice_bytes; }
  [[gnu::noinline]] void decode(const std::byte* from, int head, const page_range& part,
                                store_page_id store_page, const head_slice<element>& to) const {
    resolve(policies_->codec, [&](const auto& codec) {
      codec_at(codec, place_of(head, part.page, store_page))
          .template decode<d>(scalar_team{}, from, s_->page.tokens, row_range{part.first, part.tokens}, to);
    });
  }

  const State* s_;
  const Policies* policies_;
  const workspace* w_;
};

}  // namespace freekv::host
