// One KV head's keys and values within a page, stored by a codec and read back.
#pragma once

#include <algorithm>
#include <array>
#include <freekv/core/unroll.hpp>
#include <freekv/policies/integer_codecs.hpp>
#include <vector>

#include "../catch.hpp"
#include "../oracle/codec.hpp"
#include "../sanitized.hpp"
#include "rows.hpp"

namespace tests {

/// A page (plane, token, head, dim) or (head, plane, token, dim), of which one head is stored.
template <class E>
struct coded_page {
  int d = 64, tokens = 8, heads = 1, head = 0;
  bool by_head = false;
  std::vector<E> elements{};

  coded_page(int d_, int tokens_, int heads_ = 1, int head_ = 0, bool by_head_ = false)
      : d(d_), tokens(tokens_), heads(heads_), head(head_), by_head(by_head_) {
    elements.assign(count(2 * tokens * heads * d), freekv::from_float<E>(77.0f));
  }
  template <class Page>
  static auto slice_of(Page& page) {
    auto* first = page.elements.data() + (page.by_head ? page.head * 2 * page.tokens : page.head) * page.d;
    return freekv::head_slice<std::remove_pointer_t<decltype(first)>>{
        first, first + (page.by_head ? page.tokens : page.tokens * page.heads) * page.d,
        page.by_head ? page.d : page.heads * page.d};
  }
  freekv::head_slice<E> slice() { return slice_of(*this); }
  freekv::head_slice<const E> slice() const { return slice_of(*this); }
  E& at(oracle::plane_kind plane, int token, int dim) {
    const auto rows = slice();
    return (plane == oracle::plane_kind::keys ? rows.key : rows.value)[token * rows.stride + dim];
  }
  /// (tokens, d), as numbers.
  std::vector<double> numbers(oracle::plane_kind plane) const {
    std::vector<double> all;
    const auto rows = slice();
    const E* first = plane == oracle::plane_kind::keys ? rows.key : rows.value;
    for (int t = 0; t < tokens; ++t)
      for (int i = 0; i < d; ++i)
        all.push_back(static_cast<double>(freekv::to_float(first[t * rows.stride + i])));
    return all;
  }
  std::vector<double> numbers() const {
    auto all = numbers(oracle::plane_kind::keys);
    const auto values = numbers(oracle::plane_kind::values);
    all.insert(all.end(), values.begin(), values.end());
    return all;
  }
  /// Everything but the head is as it was made.
  bool others_untouched() const {
    coded_page other = *this;
    for (const auto plane : {oracle::plane_kind::keys, oracle::plane_kind::values})
      for (int t = 0; t < tokens; ++t)
        for (int i = 0; i < d; ++i) other.at(plane, t, i) = freekv::from_float<E>(77.0f);
    return same_bits(other.elements, coded_page(d, tokens, heads, head, by_head).elements);
  }
};

template <class E>
std::ostream& operator<<(std::ostream& out, const coded_page<E>& c) {
  return out << freekv::element_name<E> << ", d " << c.d << ", " << c.tokens << " tokens, head " << c.head
             << " of " << c.heads << (c.by_head ? ", hnd" : ", nhd");
}

/// Channels of different sizes and centres, as keys have them.
template <class E>
coded_page<E> make_coded_page(dice& d, int head_dim) {
  const int heads = d.between(1, 3);
  coded_page<E> c(head_dim, d.one_of({8, 16, 24, 32, 64, 128}), heads, d.below(heads), d.below(2) == 0);
  const float size = d.one_of({1.0f, 1.0f, 0.01f, 100.0f, 1e-3f});
  for (const auto plane : {oracle::plane_kind::keys, oracle::plane_kind::values}) {
    const auto centres = normals(d, count(c.d)), sizes = normals(d, count(c.d));
    for (int t = 0; t < c.tokens; ++t)
      for (int i = 0; i < c.d; ++i)
        c.at(plane, t, i) = freekv::from_float<E>(size * (centres[count(i)] + sizes[count(i)] * d.normal()));
  }
  return c;
}

/// head_dims that codecs are compiled for here.
inline constexpr auto coded_head_dims = [] {
  if constexpr (sanitized)
    return std::array{64, 128};
  else
    return std::array{64, 80, 96, 128, 192, 256};
}();

/// Calls `use(i)` with the head dim as a constant.
template <class Use>
void with_head_dim(int d, const Use& use) {
  freekv::unroll<coded_head_dims.size()>([&](auto which) {
    constexpr int head_dim = coded_head_dims[which];
    if (d == head_dim) use(std::integral_constant<int, head_dim>{});
  });
}

/// Calls `use(codec, kind)` for all.
template <class Use>
void each_codec(const Use& use) {
  using enum oracle::codec_kind;
  use(freekv::identity{}, identity);
  use(freekv::cast<freekv::bfloat16>{}, bf16);
  use(freekv::cast<freekv::half>{}, f16);
  use(freekv::cast<freekv::fp8_e4m3>{}, fp8);
  use(freekv::int8_token{}, int8_token);
  use(freekv::int4_token{}, int4_token);
  use(freekv::int8_channel{}, int8_channel);
  use(freekv::int4_channel{}, int4_channel);
}

/// What is stored. Nothing is written behind it.
template <class E, class Codec>
std::vector<std::byte> encoded(const Codec& codec, const coded_page<E>& c) {
  constexpr std::size_t behind = 16;
  constexpr std::byte guard{0xa5};
  const std::size_t bytes = codec.bytes({c.tokens, c.d}, sizeof(E));
  std::vector<std::byte> stored(bytes + behind, guard);
  with_head_dim(c.d, [&](auto d) {
    codec.template encode<d>(freekv::scalar_team{}, c.slice(), c.tokens, stored.data());
  });
  CHECK(std::all_of(stored.begin() + static_cast<long>(bytes), stored.end(),
                    [=](std::byte b) { return b == guard; }));
  stored.resize(bytes);
  return stored;
}

/// Read back into a page like `c`.
template <class E, class Codec>
coded_page<E> decoded(const Codec& codec, const coded_page<E>& c, const std::vector<std::byte>& stored) {
  coded_page<E> back(c.d, c.tokens, c.heads, c.head, c.by_head);
  with_head_dim(c.d, [&](auto d) {
    codec.template decode<d>(freekv::scalar_team{}, stored.data(), c.tokens, {0, c.tokens}, back.slice());
  });
  return back;
}
template <class E, class Codec>
coded_page<E> round_trip(const Codec& codec, const coded_page<E>& c) {
  return decoded(codec, c, encoded(codec, c));
}

}  // namespace tests
