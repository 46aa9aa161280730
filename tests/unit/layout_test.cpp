// NHD and HND as mdspan layout mappings, member by member, and the offsets that the shapes of
// docs/contract.md, 3.1 give.

#include <algorithm>
#include <cstdint>
#include <freekv/storage/layout.hpp>
#include <memory>
#include <tuple>
#include <type_traits>
#include <vector>

#include "../catch.hpp"

namespace {

using namespace freekv;
using detail::as_const, detail::slice_of;

template <class Layout, int HeadDim>
using mapping_of = typename Layout::template mapping<page_extents<HeadDim>>;

struct place {
  std::int64_t page, plane, token, head, dim;
};

/// A page is (p, n_kv, d) for keys, then for values.
template <class Extents>
std::int64_t expected_offset(nhd, const Extents& e, const place& i) {
  return (((i.page * 2 + i.plane) * e.extent(2) + i.token) * e.extent(3) + i.head) * e.extent(4) + i.dim;
}
/// The store keeps (page, n_kv, 2, p, d).
template <class Extents>
std::int64_t expected_offset(hnd, const Extents& e, const place& i) {
  return (((i.page * e.extent(3) + i.head) * 2 + i.plane) * e.extent(2) + i.token) * e.extent(4) + i.dim;
}

template <class Extents, class Visit>
void each_place(const Extents& e, const Visit& visit) {
  for (std::int64_t page = 0; page < e.extent(0); ++page)
    for (std::int64_t plane = 0; plane < e.extent(1); ++plane)
      for (std::int64_t token = 0; token < e.extent(2); ++token)
        for (std::int64_t head = 0; head < e.extent(3); ++head)
          for (std::int64_t dim = 0; dim < e.extent(4); ++dim) visit(place{page, plane, token, head, dim});
}

using layouts = std::tuple<nhd, hnd>;

}  // namespace

TEMPLATE_LIST_TEST_CASE("a page layout's mapping has the types of an mdspan layout mapping", "[layout]",
                        layouts) {
  using extents = page_extents<64>;
  using mapping = mapping_of<TestType, 64>;
  STATIC_REQUIRE(std::is_same_v<typename mapping::extents_type, extents>);
  STATIC_REQUIRE(std::is_same_v<typename mapping::index_type, typename extents::index_type>);
  STATIC_REQUIRE(std::is_same_v<typename mapping::size_type, typename extents::size_type>);
  STATIC_REQUIRE(std::is_same_v<typename mapping::rank_type, typename extents::rank_type>);
  STATIC_REQUIRE(std::is_same_v<typename mapping::layout_type::template mapping<extents>, mapping>);
  STATIC_REQUIRE(std::is_same_v<typename mapping::index_type, std::int64_t>);

  STATIC_REQUIRE(std::is_default_constructible_v<mapping>);
  STATIC_REQUIRE(std::is_constructible_v<mapping, const extents&>);
  STATIC_REQUIRE_FALSE(std::is_convertible_v<extents, mapping>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<mapping>);
  STATIC_REQUIRE(std::is_nothrow_move_constructible_v<mapping>);
  STATIC_REQUIRE(std::is_nothrow_move_assignable_v<mapping>);
  STATIC_REQUIRE(std::is_nothrow_swappable_v<mapping>);
  STATIC_REQUIRE(noexcept(mapping().extents()));
  STATIC_REQUIRE(noexcept(mapping().required_span_size()));
  STATIC_REQUIRE(noexcept(mapping()(0, 0, 0, 0, 0)));
  STATIC_REQUIRE(noexcept(mapping() == mapping()));

  STATIC_REQUIRE(mapping::is_always_unique());
  STATIC_REQUIRE(mapping::is_always_exhaustive());
  STATIC_REQUIRE(mapping::is_always_strided());
  STATIC_REQUIRE(mapping::is_unique());
  STATIC_REQUIRE(mapping::is_exhaustive());
  STATIC_REQUIRE(mapping::is_strided());
}

TEST_CASE("strides are those of a dense array in the layout's order", "[layout]") {
  constexpr page_extents<64> e(3, 16, 5);
  constexpr mapping_of<nhd, 64> by_token(e);
  STATIC_REQUIRE(by_token.stride(0) == 2 * 16 * 5 * 64);
  STATIC_REQUIRE(by_token.stride(1) == 16 * 5 * 64);
  STATIC_REQUIRE(by_token.stride(2) == 5 * 64);
  STATIC_REQUIRE(by_token.stride(3) == 64);
  STATIC_REQUIRE(by_token.stride(4) == 1);
  constexpr mapping_of<hnd, 64> by_head(e);
  STATIC_REQUIRE(by_head.stride(0) == 2 * 16 * 5 * 64);
  STATIC_REQUIRE(by_head.stride(3) == 2 * 16 * 64);
  STATIC_REQUIRE(by_head.stride(1) == 16 * 64);
  STATIC_REQUIRE(by_head.stride(2) == 64);
  STATIC_REQUIRE(by_head.stride(4) == 1);
  STATIC_REQUIRE(by_token.required_span_size() == 3 * 2 * 16 * 5 * 64);
  STATIC_REQUIRE(by_head.required_span_size() == by_token.required_span_size());
  // The axes' numbers are the index space's order.
  STATIC_REQUIRE(static_cast<int>(page_axis::page) == 0);
  STATIC_REQUIRE(static_cast<int>(page_axis::plane) == 1);
  STATIC_REQUIRE(static_cast<int>(page_axis::token) == 2);
  STATIC_REQUIRE(static_cast<int>(page_axis::head) == 3);
  STATIC_REQUIRE(static_cast<int>(page_axis::dim) == 4);
}

TEMPLATE_LIST_TEST_CASE("every index has an offset of its own, the one that the shape says", "[layout]",
                        layouts) {
  for (const std::int64_t pages : {1, 2, 3})
    for (const std::int64_t tokens : {1, 2, 8})
      for (const std::int64_t heads : {1, 2, 3}) {
        const page_extents<8> e(pages, tokens, heads);
        const mapping_of<TestType, 8> map(e);
        CHECK(map.extents() == e);
        CHECK(map.required_span_size() == pages * 2 * tokens * heads * 8);
        std::vector<int> hits(to_size(map.required_span_size()), 0);
        int wrong = 0;
        each_place(e, [&](const place& i) {
          const std::int64_t offset = map(i.page, i.plane, i.token, i.head, i.dim);
          const std::int64_t by_strides = i.page * map.stride(0) + i.plane * map.stride(1) +
                                          i.token * map.stride(2) + i.head * map.stride(3) +
                                          i.dim * map.stride(4);
          if (offset != expected_offset(TestType{}, e, i) || offset != by_strides) ++wrong;
          ++hits.at(to_size(offset));
        });
        CHECK(wrong == 0);
        CHECK(std::all_of(hits.begin(), hits.end(), [](int n) { return n == 1; }));
      }
}

TEMPLATE_LIST_TEST_CASE("mappings are equal exactly if their extents are", "[layout]", layouts) {
  using mapping = mapping_of<TestType, 8>;
  const mapping a(page_extents<8>(2, 16, 3));
  const mapping copy = a;
  CHECK(a == copy);
  CHECK(a == mapping(page_extents<8>(2, 16, 3)));
  CHECK(a != mapping(page_extents<8>(3, 16, 3)));
  CHECK(a != mapping(page_extents<8>(2, 8, 3)));
  CHECK(a != mapping(page_extents<8>(2, 16, 4)));
  mapping assigned;
  CHECK(assigned != a);
  assigned = a;
  CHECK(assigned == a);
  CHECK(assigned(1, 1, 15, 2, 7) == a(1, 1, 15, 2, 7));
}

TEMPLATE_LIST_TEST_CASE("without pages, tokens or heads nothing is mapped", "[layout]", layouts) {
  using mapping = mapping_of<TestType, 8>;
  CHECK(mapping().required_span_size() == 0);
  CHECK(mapping().extents() == page_extents<8>());
  CHECK(mapping(page_extents<8>(0, 16, 2)).required_span_size() == 0);
  CHECK(mapping(page_extents<8>(4, 16, 0)).required_span_size() == 0);
}

TEMPLATE_LIST_TEST_CASE("offsets of a large store do not overflow 32 bits", "[layout]", layouts) {
  const page_extents<256> e(1 << 20, 256, 64);
  const mapping_of<TestType, 256> map(e);
  const place last{(1 << 20) - 1, 1, 255, 63, 255};
  CHECK(map.required_span_size() == std::int64_t{1} << (20 + 1 + 8 + 6 + 8));
  CHECK(map(last.page, last.plane, last.token, last.head, last.dim) == map.required_span_size() - 1);
  // Indices of a narrow type are widened before they are multiplied.
  CHECK(map(static_cast<std::int32_t>(last.page), 1, std::uint8_t{255}, 63, 255) ==
        map.required_span_size() - 1);
}

TEMPLATE_LIST_TEST_CASE("a layout works in mdspan with compile-time and run-time extents", "[layout]",
                        layouts) {
  using all_static = cuda::std::extents<std::int64_t, 2, 2, 8, 3, 8>;
  using all_dynamic = cuda::std::dextents<std::int32_t, 5>;
  constexpr typename TestType::template mapping<all_static> fixed{all_static{}};
  const typename TestType::template mapping<all_dynamic> open(all_dynamic(2, 2, 8, 3, 8));
  STATIC_REQUIRE(fixed.required_span_size() == 2 * 2 * 8 * 3 * 8);
  int wrong = 0;
  each_place(all_static{}, [&](const place& i) {
    const auto offset = fixed(i.page, i.plane, i.token, i.head, i.dim);
    if (offset != expected_offset(TestType{}, all_static{}, i)) ++wrong;
    if (offset != open(i.page, i.plane, i.token, i.head, i.dim)) ++wrong;
  });
  CHECK(wrong == 0);

  std::vector<float> data(to_size(fixed.required_span_size()));
  cuda::std::mdspan<float, all_static, TestType> view(data.data(), fixed);
  float next = 0.0f;
  each_place(all_static{}, [&](const place& i) { view(i.page, i.plane, i.token, i.head, i.dim) = next++; });
  const cuda::std::mdspan<const float, all_dynamic, TestType> same(data.data(), open);
  next = 0.0f;
  each_place(all_static{}, [&](const place& i) {
    if (same(i.page, i.plane, i.token, i.head, i.dim) != next++) ++wrong;
  });
  CHECK(wrong == 0);
  CHECK(view.size() == data.size());
  CHECK(view.stride(0) == fixed.stride(0));
  CHECK(view.is_exhaustive());
  CHECK(view.is_unique());
  CHECK(view.is_strided());
  std::sort(data.begin(), data.end());
  CHECK(std::adjacent_find(data.begin(), data.end()) == data.end());
}

TEMPLATE_LIST_TEST_CASE("a head's slice of a page has its rows where the mapping says", "[layout]", layouts) {
  constexpr int pages = 3, tokens = 8, heads = 3, d = 16;
  std::vector<int> data(pages * 2 * tokens * heads * d);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<int>(i);
  const auto span = make_page_span<TestType, d>(data.data(), pages, {tokens, heads});
  CHECK(span.data_handle() == data.data());
  CHECK(span.extents() == page_extents<d>(pages, tokens, heads));
  CHECK(span.static_extent(4) == d);
  int wrong = 0;
  for (int page = 0; page < pages; ++page)
    for (int head = 0; head < heads; ++head) {
      const head_slice<int> slice = slice_of(span, page, head);
      const head_slice<const int> same = as_const(slice);
      if (same.key != slice.key || same.value != slice.value || same.stride != slice.stride) ++wrong;
      for (int t = 0; t < tokens; ++t)
        for (int i = 0; i < d; ++i) {
          if (&slice.key[t * slice.stride + i] != &span(page, 0, t, head, i)) ++wrong;
          if (&slice.value[t * slice.stride + i] != &span(page, 1, t, head, i)) ++wrong;
        }
    }
  CHECK(wrong == 0);
}

TEST_CASE("a slice of the store is one contiguous run of 2*p*d elements", "[layout]") {
  constexpr int pages = 3, tokens = 8, heads = 4, d = 16;
  std::vector<float> data(pages * 2 * tokens * heads * d);
  const auto store = make_page_span<hnd, d>(data.data(), pages, {tokens, heads});
  for (int page = 0; page < pages; ++page)
    for (int head = 0; head < heads; ++head) {
      const auto slice = slice_of(store, page, head);
      CHECK(slice.stride == d);
      CHECK(slice.value - slice.key == tokens * d);
      CHECK(slice.key - data.data() == (page * heads + head) * 2 * tokens * d);
    }
  const auto frames = make_page_span<nhd, d>(data.data(), pages, {tokens, heads});
  CHECK(slice_of(frames, 1, 2).stride == heads * d);
  CHECK(slice_of(frames, 1, 2).key - data.data() == 2 * tokens * heads * d + 2 * d);
  CHECK(slice_of(frames, 1, 2).value - slice_of(frames, 1, 2).key == tokens * heads * d);
}

TEST_CASE("a pair names the fast tier's layout first", "[layout]") {
  STATIC_REQUIRE(std::is_same_v<layout_pair<>::fast, nhd>);
  STATIC_REQUIRE(std::is_same_v<layout_pair<>::slow, hnd>);
  STATIC_REQUIRE(std::is_same_v<layout_pair<hnd, nhd>::fast, hnd>);
  STATIC_REQUIRE(std::is_same_v<layout_pair<hnd, nhd>::slow, nhd>);
  CHECK(nhd::name == "nhd");
  CHECK(hnd::name == "hnd");
}
