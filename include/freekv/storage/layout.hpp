// NHD and HND page layouts as mdspan mappings over one index space: (page, plane, token, head, dim).
//
// Plane 0 holds keys, plane 1 values. Stages index this space and take strides from the mapping; none of them
// asks which layout it is. (FreeKV section 4.2)
#pragma once

#include <concepts>
#include <cstdint>
#include <cuda/std/array>
#include <cuda/std/mdspan>
#include <freekv/config.hpp>
#include <freekv/core/hooks.hpp>
#include <freekv/core/ids.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/core/shape.hpp>
#include <freekv/core/size.hpp>
#include <string_view>

namespace freekv {

/// The indices of the space, in its order.
enum class page_axis : std::uint8_t { page, plane, token, head, dim };

/// Extents of a run of pages: (pages, 2, page_size, kv_heads, head_dim); head_dim is a compile-time extent.
template <int HeadDim>
using page_extents = cuda::std::extents<std::int64_t, cuda::std::dynamic_extent, 2, cuda::std::dynamic_extent,
                                        cuda::std::dynamic_extent, to_size(HeadDim)>;

/// A dense layout whose axes lie in memory in the order `Axes`, outermost first. An mdspan layout policy:
/// exhaustive, unique and strided for all extents.
template <page_axis... Axes>
struct ordered_layout {
  template <class Extents>
  class mapping {
   public:
    using extents_type = Extents;
    using index_type = typename extents_type::index_type;
    using size_type = typename extents_type::size_type;
    using rank_type = typename extents_type::rank_type;
    using layout_type = ordered_layout;
    static_assert(extents_type::rank() == sizeof...(Axes), "one extent for each axis");

    mapping() = default;
    FREEKV_HD constexpr explicit mapping(const extents_type& extents) : extents_(extents) {
      index_type stride = 1;
      for (rank_type i = sizeof...(Axes); i-- > 0;) {
        const rank_type axis = axes()[i];
        strides_[axis] = stride;
        stride *= extents.extent(axis);
      }
    }

    FREEKV_HD constexpr const extents_type& extents() const noexcept { return extents_; }
    FREEKV_HD constexpr index_type stride(rank_type axis) const noexcept { return strides_[axis]; }
    FREEKV_HD constexpr index_type required_span_size() const noexcept {
      index_type size = 1;
      for (rank_type i = 0; i < extents_type::rank(); ++i) size *= extents_.extent(i);
      return size;
    }
    template <class... Index>
    FREEKV_HD constexpr index_type operator()(Index... index) const noexcept {
      static_assert(sizeof...(Index) == sizeof...(Axes), "one index for each axis");
      const cuda::std::array<index_type, sizeof...(Index)> at{static_cast<index_type>(index)...};
      index_type offset = 0;
      for (rank_type i = 0; i < sizeof...(Index); ++i) offset += at[i] * strides_[i];
      return offset;
    }

    FREEKV_HD static constexpr bool is_always_unique() noexcept { return true; }
    FREEKV_HD static constexpr bool is_always_exhaustive() noexcept { return true; }
    FREEKV_HD static constexpr bool is_always_strided() noexcept { return true; }
    FREEKV_HD static constexpr bool is_unique() noexcept { return true; }
    FREEKV_HD static constexpr bool is_exhaustive() noexcept { return true; }
    FREEKV_HD static constexpr bool is_strided() noexcept { return true; }

    FREEKV_HD friend constexpr bool operator==(const mapping& a, const mapping& b) noexcept {
      return a.extents_ == b.extents_;
    }

   private:
    FREEKV_HD static constexpr cuda::std::array<rank_type, sizeof...(Axes)> axes() {
      return {static_cast<rank_type>(Axes)...};
    }
    extents_type extents_{};
    cuda::std::array<index_type, sizeof...(Axes)> strides_{};
  };
};

/// Token by token, the natural order of a projection's output: a page is (p, n_kv, d) for keys, then for
/// values.
struct nhd
    : ordered_layout<page_axis::page, page_axis::plane, page_axis::token, page_axis::head, page_axis::dim> {
  static constexpr std::string_view name = "nhd";
};
/// Head by head: a page is (n_kv, 2, p, d), so one KV head's keys and values are one contiguous run of 2*p*d.
struct hnd
    : ordered_layout<page_axis::page, page_axis::head, page_axis::plane, page_axis::token, page_axis::dim> {
  static constexpr std::string_view name = "hnd";
};

/// Layouts of the fast and of the slow tier.
template <class Fast = nhd, class Slow = hnd>
struct layout_pair {
  using policy_kind = layout_kind;
  using fast = Fast;
  using slow = Slow;
};

/// Mapping of a run of pages by `Layout`.
template <class Layout, int HeadDim>
using page_mapping = typename Layout::template mapping<page_extents<HeadDim>>;

/// An mdspan layout policy for pages: named, without gaps, the elements of a row next to each other.
template <class L>
concept page_layout = requires(const page_mapping<L, 8> map) {
  { L::name } -> std::convertible_to<std::string_view>;
  { map(0, 0, 0, 0, 0) } -> std::convertible_to<std::int64_t>;
  requires page_mapping<L, 8>::is_always_exhaustive();
  requires(page_mapping<L, 8>(page_extents<8>(1, 8, 2)).stride(4) == 1);
};

/// Names the layouts of the two tiers.
template <class P>
concept layout_policy = policy<P> && std::same_as<typename P::policy_kind, layout_kind> &&
    page_layout<typename P::fast> && page_layout<typename P::slow>;

static_assert(layout_policy<layout_pair<nhd, hnd>> && layout_policy<layout_pair<hnd, nhd>>);

struct layout_kind : kind_defaults {
  using default_policy = layout_pair<>;
  template <class P>
  struct check {
    static_assert(layout_policy<P>,
                  "a layout pair has types fast and slow, each an mdspan layout of (page, plane, token, "
                  "head, dim) with a name, without gaps and with dim innermost");
  };
};

/// The run-time extents of one page.
struct page_shape {
  int tokens = 0;
  int kv_heads = 0;
};

/// Pages in memory: an mdspan over (page, plane, token, head, dim).
template <class Element, int HeadDim, class Layout>
using page_span = cuda::std::mdspan<Element, page_extents<HeadDim>, Layout>;

/// `pages` pages at `data`, laid out as `Layout`.
template <class Layout, int HeadDim, class Element>
FREEKV_HD constexpr page_span<Element, HeadDim, Layout> make_page_span(Element* data, std::int64_t pages,
                                                                       page_shape shape) {
  return page_span<Element, HeadDim, Layout>(
      data, page_mapping<Layout, HeadDim>(page_extents<HeadDim>(pages, shape.tokens, shape.kv_heads)));
}

/// Pages of any layout, whose strides are run-time values: what stages index, so that they are compiled once
/// for all layouts.
template <class Element, int HeadDim>
using strided_pages = page_span<Element, HeadDim, cuda::std::layout_stride>;

/// One KV head's part of one page: row t of keys at `key + t * stride`, of values at `value + t * stride`;
/// each row is head_dim contiguous elements.
template <class Element>
struct head_slice {
  Element* key = nullptr;
  Element* value = nullptr;
  std::int64_t stride = 0;
};

namespace detail {

/// Pages with their layout's strides as run-time values.
template <int HeadDim, class Element, class Layout>
constexpr strided_pages<Element, HeadDim> strided(const page_span<Element, HeadDim, Layout>& pages) {
  const auto& map = pages.mapping();
  cuda::std::array<std::int64_t, page_extents<HeadDim>::rank()> strides{};
  for (std::size_t axis = 0; axis < strides.size(); ++axis) strides[axis] = map.stride(axis);
  return {pages.data_handle(), {map.extents(), strides}};
}

/// The slice, to be read alone.
template <class Element>
FREEKV_HD constexpr head_slice<const Element> as_const(const head_slice<Element>& slice) {
  return {slice.key, slice.value, slice.stride};
}

/// The slice without its first `rows` rows.
template <class Element>
FREEKV_HD constexpr head_slice<Element> rows_behind(const head_slice<Element>& slice, int rows) {
  return {slice.key + rows * slice.stride, slice.value + rows * slice.stride, slice.stride};
}

/// The slice of `head` in page `page`.
template <class PageSpan>
FREEKV_HD constexpr head_slice<typename PageSpan::element_type> slice_of(const PageSpan& pages,
                                                                         std::int64_t page, int head) {
  const auto& map = pages.mapping();
  return {pages.data_handle() + map(page, 0, 0, head, 0), pages.data_handle() + map(page, 1, 0, head, 0),
          map.stride(to_size(page_axis::token))};
}
/// One KV head's part of a page of the store.
template <class PageSpan>
FREEKV_HD constexpr head_slice<typename PageSpan::element_type> slice_of(const PageSpan& store,
                                                                         store_page_id page, int head) {
  return slice_of(store, std::int64_t{number_of(page)}, head);
}

}  // namespace detail

}  // namespace freekv
