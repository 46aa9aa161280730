// Policies and algorithms give on the device what they give on the host, in their one-lane form.
//
// Shared bodies fuse no product with a sum, so sums, products, quotients, square roots and conversions are
// equal bit by bit. Exponentials and logarithms are not: the device's expf and logf and the host's are each
// right to about 1 ulp and round differently, so what uses them agrees to a few ulp; where their results are
// summed and rescaled, as in attention, to a few more.
//
// Exit status: 0 all equal, 1 not, 77 no device.
#include <freekv/algorithms/attend_slice.hpp>
#include <freekv/algorithms/copy_slice.hpp>
#include <freekv/algorithms/match_slots.hpp>
#include <freekv/algorithms/ordered_key.hpp>
#include <freekv/algorithms/score_unit.hpp>
#include <freekv/algorithms/summarise_unit.hpp>
#include <freekv/policies/box_summaries.hpp>
#include <freekv/policies/coarse_to_fine.hpp>
#include <freekv/policies/correction.hpp>
#include <freekv/policies/detail/query_drift.hpp>
#include <freekv/policies/geometry.hpp>
#include <freekv/policies/integer_codecs.hpp>
#include <freekv/policies/key_clusters.hpp>
#include <freekv/policies/key_codes.hpp>
#include <freekv/policies/key_sketch.hpp>
#include <freekv/policies/key_subspace.hpp>
#include <freekv/policies/low_rank_keys.hpp>
#include <freekv/policies/pinning.hpp>
#include <freekv/policies/pooling.hpp>
#include <freekv/policies/selection.hpp>
#include <freekv/policies/stored_as.hpp>

#include "both_sides.cuh"

namespace {

using namespace both_sides;
using freekv::bfloat16;
using freekv::half;
using freekv::scalar_team;

constexpr double log_ulp = 4, attention_ulp = 16;

using freekv::to_size;
std::string text(int n) { return std::to_string(n); }
template <class E>
std::string of() {
  return " of " + std::string(freekv::element_name<E>);
}

// ---- conversions and keys ----

struct convert_all {
  half* halves;
  bfloat16* bfloats;
  float *from_half, *from_bfloat;
  const float* numbers;
  FREEKV_HD void operator()(int i) const {
    const auto bits = static_cast<std::uint16_t>(i);
    from_half[i] = freekv::to_float(cuda::std::bit_cast<half>(bits));
    from_bfloat[i] = freekv::to_float(cuda::std::bit_cast<bfloat16>(bits));
    halves[i] = freekv::from_float<half>(numbers[i]);
    bfloats[i] = freekv::from_float<bfloat16>(numbers[i]);
  }
};

void conversions(report& checks, random_numbers& random) {
  constexpr int n = 1 << 16;
  pinned<float> numbers(n);
  for (int i = 0; i < n; ++i) {
    // Half of them near what half precision holds, a quarter of those ties.
    const auto bits = random.bits();
    numbers[to_size(i)] = i % 2 ? cuda::std::bit_cast<float>(bits)
                                : cuda::std::bit_cast<float>((bits & 0x8fffffffu) + 0x30000000u);
    if (i % 8 == 0)
      numbers[to_size(i)] = cuda::std::bit_cast<float>(
          (cuda::std::bit_cast<std::uint32_t>(numbers[to_size(i)]) & (i % 16 ? 0xffff0000u : 0xffffe000u)) |
          (i % 16 ? 0x8000u : 0x1000u));
  }
  results<half> halves(n);
  results<bfloat16> bfloats(n);
  results<float> from_half(n), from_bfloat(n);
  checks.run(n, [&](auto side) {
    return convert_all{side(halves), side(bfloats), side(from_half), side(from_bfloat), numbers.data()};
  });
  checks.equal("to_float of every f16", from_half);
  checks.equal("to_float of every bf16", from_bfloat);
  checks.equal("from_float to f16", halves);
  checks.equal("from_float to bf16", bfloats);
}

struct make_keys {
  const float* scores;
  const std::int32_t* pages;
  std::uint64_t* keys;
  std::int32_t* pages_back;
  float* clamped;
  std::int32_t* counts;
  FREEKV_HD void operator()(int i) const {
    clamped[i] = freekv::detail::clamp_score(scores[i]);
    keys[i] = freekv::detail::ordered_key(scores[i], pages[i]);
    pages_back[i] = freekv::detail::unit_of_key(keys[i]);
    counts[i] = freekv::top_k{}.count(pages[i] % 100, 32);
  }
};

void ordered_keys(report& checks, random_numbers& random) {
  constexpr float most = std::numeric_limits<float>::max(), least = std::numeric_limits<float>::denorm_min();
  pinned<float> scores = random.normals<float>(1000, 10.0f);
  for (const float x : {0.0f, -0.0f, least, -least, most, -most, freekv::infinity, -freekv::infinity})
    scores.push_back(x);
  pinned<std::int32_t> pages(scores.size());
  for (auto& page : pages) page = static_cast<std::int32_t>(random.bits() >> 1);
  pages.front() = 0;
  pages.back() = std::numeric_limits<std::int32_t>::max();
  results<std::uint64_t> keys(scores.size());
  results<std::int32_t> pages_back(scores.size()), counts(scores.size());
  results<float> clamped(scores.size());
  checks.run(static_cast<int>(scores.size()), [&](auto side) {
    return make_keys{scores.data(), pages.data(), side(keys), side(pages_back), side(clamped), side(counts)};
  });
  checks.equal("ordered_key", keys);
  checks.equal("unit_of_key", pages_back);
  checks.equal("clamp_score", clamped);
  checks.equal("top_k: count", counts);
}

// ---- geometry, layouts, copies ----

struct find_roles {
  freekv::budget budget;
  int page;
  std::int32_t* found;  // (lengths, 7)
  FREEKV_HD void operator()(int tokens) const {
    const freekv::page_roles roles = freekv::roles_at(tokens, budget, page);
    const freekv::slot_roles slots = freekv::slots_for(budget, page);
    const int numbers[] = {roles.sink_end,
                           roles.window_begin,
                           roles.page_end,
                           roles.candidates(),
                           slots.total(),
                           number_of(slots.ring_slot(tokens)),
                           slots.ring_begin(tokens, page)};
    for (int i = 0; i < 7; ++i) found[tokens * 7 + i] = numbers[i];
  }
};

void roles(report& checks, random_numbers& random) {
  for (int shape = 0; shape < 3; ++shape) {
    const int page = 8 * random.between(1, 8);
    const freekv::budget budget{page * random.below(3), page * random.between(1, 4), random.between(1, 9)};
    constexpr int lengths = 1000;
    results<std::int32_t> found(7 * lengths);
    checks.run(lengths, [&](auto side) { return find_roles{budget, page, side(found)}; });
    checks.equal("roles and slots, page size " + text(page), found);
  }
}

template <class Layout, int HeadDim>
struct map_indices {
  freekv::page_shape shape;
  std::int64_t pages;
  float* data;
  std::int64_t* offsets;   // (page, plane, token, head, dim)
  std::int64_t* of_slice;  // (page, head, 3): key, value, stride
  FREEKV_HD void operator()(int i) const {
    const auto span = freekv::make_page_span<Layout, HeadDim>(data, pages, shape);
    const int dim = i % HeadDim, head = i / HeadDim % shape.kv_heads;
    const int token = i / HeadDim / shape.kv_heads % shape.tokens;
    const int plane = i / HeadDim / shape.kv_heads / shape.tokens % 2;
    const int page = i / HeadDim / shape.kv_heads / shape.tokens / 2;
    offsets[i] = span.mapping()(page, plane, token, head, dim);
    if (plane != 0 || token != 0 || dim != 0) return;
    const auto slice = freekv::detail::slice_of(span, page, head);
    std::int64_t* out = of_slice + 3 * (page * shape.kv_heads + head);
    out[0] = slice.key - data;
    out[1] = slice.value - data;
    out[2] = slice.stride;
  }
};

template <class Layout, int HeadDim>
void mapping(report& checks, random_numbers& random) {
  const freekv::page_shape shape{8 * random.between(1, 3), random.between(1, 5)};
  const int pages = random.between(1, 3), elements = pages * 2 * shape.tokens * shape.kv_heads * HeadDim;
  pinned<float> data(to_size(elements));
  results<std::int64_t> offsets(to_size(elements)), of_slice(to_size(3 * pages * shape.kv_heads));
  checks.run(elements, [&](auto side) {
    return map_indices<Layout, HeadDim>{shape, pages, data.data(), side(offsets), side(of_slice)};
  });
  const std::string what = std::string(Layout::name) + ", head_dim " + text(HeadDim) + ": ";
  checks.equal(what + "offsets", offsets);
  checks.equal(what + "slices", of_slice);
}

template <class From, class To, int HeadDim, class Element>
struct copy_slices {
  freekv::page_shape shape;
  std::int64_t pages;
  int tokens;
  Element* from;
  Element* to;
  FREEKV_HD void operator()(int i) const {
    const std::int64_t page = i / shape.kv_heads;
    const int head = i % shape.kv_heads;
    const auto source = freekv::make_page_span<From, HeadDim>(from, pages, shape);
    const auto target = freekv::make_page_span<To, HeadDim>(to, pages, shape);
    freekv::detail::copy_slice<HeadDim>(
        freekv::detail::as_const(freekv::detail::slice_of(source, page, head)),
        freekv::detail::slice_of(target, page, head), tokens);
  }
};

template <class From, class To, class Element>
void copies(report& checks, random_numbers& random) {
  constexpr int d = 24;
  const freekv::page_shape shape{8 * random.between(1, 3), random.between(1, 5)};
  const int pages = random.between(1, 3), tokens = random.between(1, shape.tokens);
  const std::size_t elements = to_size(pages * 2 * shape.tokens * shape.kv_heads * d);
  pinned<Element> from = random.normals<Element>(elements);
  results<Element> to(elements);
  checks.run(pages * shape.kv_heads, [&](auto side) {
    return copy_slices<From, To, d, Element>{shape, pages, tokens, from.data(), side(to)};
  });
  checks.equal("copy_slice" + of<Element>() + ", " + std::string(From::name) + " to " +
                   std::string(To::name) + ", " + text(tokens) + " tokens of " + text(shape.tokens),
               to);
}

// ---- codecs ----

template <int HeadDim, class Element, class Codec>
struct store_and_read {
  Codec codec;
  freekv::page_shape shape;
  std::int64_t pages;
  Element* from;
  std::byte* stored;  // (pages, heads, bytes)
  Element* back;
  FREEKV_HD void operator()(int i) const {
    const std::int64_t page = i / shape.kv_heads;
    const int head = i % shape.kv_heads;
    const auto source = freekv::make_page_span<freekv::nhd, HeadDim>(from, pages, shape);
    const auto target = freekv::make_page_span<freekv::nhd, HeadDim>(back, pages, shape);
    std::byte* bytes = stored + to_size(i) * codec.bytes({shape.tokens, HeadDim}, sizeof(Element));
    codec.template encode<HeadDim>(freekv::scalar_team{},
                                   freekv::detail::as_const(freekv::detail::slice_of(source, page, head)),
                                   shape.tokens, bytes);
    codec.template decode<HeadDim>(freekv::scalar_team{}, bytes, shape.tokens,
                                   freekv::row_range{0, shape.tokens},
                                   freekv::detail::slice_of(target, page, head));
  }
};

/// Page 0 holds a NaN and an infinity; bytes are compared of the others, since a NaN has many encodings.
template <class Element, class Codec>
void codecs(report& checks, random_numbers& random, const Codec& codec) {
  constexpr int d = 40;
  const freekv::page_shape shape{8 * random.between(1, 4), random.between(1, 3)};
  const int pages = random.between(2, 4);
  const std::size_t elements = to_size(2 * shape.tokens * shape.kv_heads * d);
  const std::size_t bytes = to_size(shape.kv_heads) * codec.bytes({shape.tokens, d}, sizeof(Element));
  pinned<Element> from = random.normals<Element>(to_size(pages) * elements);
  from[3] = freekv::from_float<Element>(std::numeric_limits<float>::quiet_NaN());
  from[elements - 1] = freekv::from_float<Element>(-freekv::infinity);
  // All of page 1 is tiny, or zero.
  for (std::size_t i = elements; i < 2 * elements; ++i)
    from[i] = freekv::from_float<Element>(i % 2 ? freekv::to_float(from[i]) * 0x1p-20f : -0.0f);
  results<std::byte> stored(to_size(pages) * bytes);
  results<Element> back(to_size(pages) * elements);
  checks.run(pages * shape.kv_heads, [&](auto side) {
    return store_and_read<d, Element, Codec>{codec, shape, pages, from.data(), side(stored), side(back)};
  });
  const std::string what = std::string(Codec::name) + of<Element>() + ", " + text(shape.tokens) + " tokens: ";
  checks.equal(what + "stored bytes", stored, [&](std::size_t i) { return i >= bytes; });
  checks.equal(what + "read back", back);
}

template <class Element>
void all_codecs(report& checks, random_numbers& random) {
  codecs<Element>(checks, random, freekv::identity{});
  codecs<Element>(checks, random, freekv::cast<bfloat16>{});
  codecs<Element>(checks, random, freekv::cast<half>{});
  codecs<Element>(checks, random, freekv::cast<freekv::fp8_e4m3>{});
  codecs<Element>(checks, random, freekv::int8_token{});
  codecs<Element>(checks, random, freekv::int4_token{});
  codecs<Element>(checks, random, freekv::int8_channel{});
  codecs<Element>(checks, random, freekv::int4_channel{});
}

/// All heads of a page, whose keys are rebuilt from what the heads share.
template <int HeadDim>
struct share_and_rebuild {
  freekv::low_rank_keys<freekv::dynamic> codec;
  freekv::page_shape shape;
  float* from;        // (pages, plane, tokens, heads, head_dim)
  std::byte* stored;  // (pages, heads, bytes)
  float* shared;      // (pages, tokens, rank)
  float* sums;        // the same
  float* back;        // as `from`
  FREEKV_HD void operator()(int page) const {
    const freekv::kv_extent geometry{shape.tokens, HeadDim};
    const auto source = freekv::make_page_span<freekv::nhd, HeadDim>(from, page + 1, shape);
    const auto target = freekv::make_page_span<freekv::nhd, HeadDim>(back, page + 1, shape);
    const int floats = codec.shared_floats(geometry), each = shape.tokens * codec.rank;
    const auto of_head = [&](int head) {
      return codec.at({0, head, shape.kv_heads, 1000 * page,
                       reinterpret_cast<std::byte*>(shared + page * each), sums + page * floats});
    };
    const auto bytes = [&](int head) {
      return stored + to_size(page * shape.kv_heads + head) * codec.bytes(geometry, sizeof(float));
    };
    for (int head = 0; head < shape.kv_heads; ++head)
      of_head(head).template encode<HeadDim>(
          freekv::scalar_team{}, freekv::detail::as_const(freekv::detail::slice_of(source, page, head)),
          shape.tokens, bytes(head));
    for (int head = 0; head < shape.kv_heads; ++head)
      of_head(head).template decode<HeadDim>(freekv::scalar_team{}, bytes(head), shape.tokens,
                                             freekv::row_range{0, shape.tokens},
                                             freekv::detail::slice_of(target, page, head));
  }
};

void rebuilt_keys(report& checks, random_numbers& random, freekv::rotary_pairs pairs) {
  constexpr int d = 40, rank = 9, pages = 3;
  const freekv::page_shape shape{8 * random.between(1, 4), random.between(1, 3)};
  const std::size_t elements = to_size(pages * 2 * shape.tokens * shape.kv_heads * d);
  pinned<float> from = random.normals<float>(elements);
  from[3] = std::numeric_limits<float>::quiet_NaN();
  const pinned<float> basis = random.normals<float>(to_size(shape.kv_heads * (rank + 1) * d), 0.2f);
  const pinned<float> frequencies = random.normals<float>(d / 2, 0.5f);
  const freekv::low_rank_keys<freekv::dynamic> codec{
      {rank}, {basis.data(), 1, shape.kv_heads, rank, d}, {frequencies.data(), d / 2, pairs}};
  const std::size_t bytes = codec.bytes({shape.tokens, d}, sizeof(float)),
                    floats = to_size(pages * shape.tokens * rank);
  results<std::byte> stored(to_size(pages * shape.kv_heads) * bytes);
  results<float> shared(floats), sums(to_size(pages * codec.shared_floats({shape.tokens, d}))),
      back(elements);
  checks.run(pages, [&](auto side) {
    return share_and_rebuild<d>{codec,        shape,      from.data(), side(stored),
                                side(shared), side(sums), side(back)};
  });
  const std::string what =
      "low_rank_keys, " + text(shape.kv_heads) + " heads, " + text(shape.tokens) + " tokens: ";
  constexpr double sincos_ulp = 8;  // of angles in float64
  checks.equal(what + "stored bytes", stored);
  checks.close(what + "coefficients", shared, sincos_ulp);
  checks.close(what + "keys and values", back, sincos_ulp);
}

struct value_units {
  freekv::kv_extent unit;
  const float* keys;  // (units, tokens, head_dim)
  float* scratch;     // (units, head_dim)
  float* worth;
  FREEKV_HD void operator()(int i) const {
    worth[i] = freekv::pin_outliers<>{}.worth(scalar_team{}, {keys + i * unit.tokens * unit.head_dim, unit},
                                              scratch + i * unit.head_dim);
  }
};

void pins(report& checks, random_numbers& random) {
  const freekv::kv_extent unit{random.between(1, 32), 8 * random.between(3, 12)};
  constexpr int units = 20;
  pinned<float> keys = random.normals<float>(to_size(units * unit.tokens * unit.head_dim));
  keys[5] = freekv::infinity;
  pinned<float> scratch(to_size(units * unit.head_dim));
  results<float> worth(units);
  checks.run(units, scratch, [&](auto side) {
    return value_units{unit, keys.data(), scratch.data(), side(worth)};
  });
  checks.equal("pin_outliers, unit (" + text(unit.tokens) + ", " + text(unit.head_dim) + ")", worth);
}

// ---- summaries ----

template <class Key, class Summary>
struct summarise_and_score {
  Summary summary;
  freekv::kv_extent page;
  const Key* keys;  // (pages, tokens, head_dim)
  freekv::group_query queries;
  float scale;
  float* scratch;     // (pages, scratch_each)
  std::byte* stored;  // (pages, bytes)
  float* numbers;     // (pages, width)
  float* prepared;    // (pages, group, query width)
  float* scores;      // (pages, group)

  FREEKV_HD int scratch_each() const { return page.tokens * page.head_dim + summary.width(page); }
  FREEKV_HD void operator()(int i) const {
    const auto policy = freekv::summary_at(summary, 0, 0);
    const scalar_team team;
    const int query_width = freekv::summary_query_width(policy, page.head_dim);
    const Key* unit_keys = keys + i * page.tokens * page.head_dim;
    const freekv::head_slice<const Key> slice{unit_keys, unit_keys, page.head_dim};
    float* own = scratch + i * scratch_each();
    std::byte* bytes = stored + to_size(i) * freekv::summary_bytes<Key>(policy, page);
    freekv::detail::summarise_unit<Key>(team, policy, slice, page, {own, own + page.tokens * page.head_dim},
                                        bytes);
    float* query = prepared + i * queries.group * query_width;
    for (int g = 0; g < queries.group; ++g)
      freekv::prepare_query(team, policy, {queries.head(g), 1, page.head_dim}, query + g * query_width);
    freekv::detail::score_unit<Key>(team, policy, page, bytes, {query, query_width, queries.group, scale},
                                    numbers + i * policy.width(page), {scores + i * queries.group, 1});
  }
};

/// Calls check(shape's name, pages' results ..) for a few shapes. Every fourth page holds a key that is NaN,
/// infinite or huge; bytes are compared of the others, since a NaN has many encodings.
template <class Key, class Summary>
void summaries(report& checks, random_numbers& random, const Summary& given, const std::string& name,
               double score_ulp) {
  for (int shape = 0; shape < 2; ++shape) {
    const freekv::kv_extent page{8 * random.between(1, 6), 8 * random.between(3, 12)};
    const int pages = random.between(9, 20), group = random.between(1, 4);
    pinned<Key> keys = random.normals<Key>(to_size(pages * page.tokens * page.head_dim));
    for (int i = 0; i < pages; i += 4) {
      constexpr float odd[] = {std::numeric_limits<float>::quiet_NaN(), freekv::infinity, -freekv::infinity,
                               3.0e4f};
      keys[to_size((i * page.tokens + random.below(page.tokens)) * page.head_dim +
                   random.below(page.head_dim))] = freekv::from_float<Key>(odd[i / 4 % 4]);
    }
    const pinned<float> queries = random.normals<float>(to_size(group * page.head_dim), 2.0f);
    // A mean and rows for the policies that have them.
    const pinned<float> basis = random.normals<float>(to_size((page.head_dim + 1) * page.head_dim), 0.2f);
    Summary summary = given;
    if constexpr (requires { summary.basis; })
      summary.basis = {basis.data(), 1, 1, page.head_dim, page.head_dim};
    pinned<float> books;
    if constexpr (requires { summary.books; }) {
      summary.books = {nullptr, 1, 1, page.head_dim, summary.mean_codes, 4, summary.codes, 3};
      books = random.normals<float>(summary.books.floats_per_head(), 0.5f);
      summary.books.data = books.data();
    }
    const auto policy = freekv::summary_at(summary, 0, 0);
    const std::size_t bytes = freekv::summary_bytes<Key>(policy, page);
    const int query_width = freekv::summary_query_width(policy, page.head_dim);

    pinned<float> scratch(to_size(pages * (page.tokens * page.head_dim + policy.width(page))));
    results<std::byte> stored(to_size(pages) * bytes);
    results<float> numbers(to_size(pages * policy.width(page)));
    results<float> prepared(to_size(pages * group * query_width)), scores(to_size(pages * group));
    checks.run(pages, scratch, [&](auto side) {
      return summarise_and_score<Key, Summary>{
          summary,        page,           keys.data(),  {queries.data(), group, page.head_dim},
          0.1f,           scratch.data(), side(stored), side(numbers),
          side(prepared), side(scores)};
    });
    const std::string what =
        name + of<Key>() + ", page (" + text(page.tokens) + ", " + text(page.head_dim) + "): ";
    checks.equal(what + "stored bytes", stored, [&](std::size_t i) { return i / bytes % 4 != 0; });
    checks.equal(what + "numbers", numbers);
    checks.equal(what + "prepared queries", prepared);
    if (score_ulp == 0)
      checks.equal(what + "scores", scores);
    else
      checks.close(what + "scores", scores, score_ulp);
  }
}

template <class Key>
void all_summaries(report& checks, random_numbers& random) {
  using freekv::dynamic;
  using freekv::number_format;
  using freekv::stored_as;
  summaries<Key>(checks, random, freekv::min_max{}, "min_max", 0);
  summaries<Key>(checks, random, stored_as<freekv::min_max, number_format::int8>{}, "min_max in int8", 0);
  summaries<Key>(checks, random, freekv::centroid_box{}, "centroid_box", 0);
  summaries<Key>(checks, random, freekv::mean{}, "mean", 0);
  summaries<Key>(checks, random,
                 stored_as<freekv::mean, number_format::any>(freekv::mean{}, number_format::key),
                 "mean in the key's type", 0);
  summaries<Key>(checks, random, freekv::ball{}, "ball", 0);
  summaries<Key>(checks, random, stored_as<freekv::ball, number_format::int8>{}, "ball in int8", 0);
  summaries<Key>(checks, random, freekv::key_codes<4, 3>{}, "key_codes<4, 3>", log_ulp);
  summaries<Key>(checks, random, freekv::key_codes<dynamic, dynamic>{{6}, {1}},
                 "key_codes<dynamic, dynamic>{6, 1}", log_ulp);
  summaries<Key>(checks, random, freekv::key_clusters{}, "key_clusters", 0);
  summaries<Key>(checks, random, freekv::key_sketch<1>{}, "key_sketch<1>", log_ulp);
  summaries<Key>(checks, random, freekv::key_sketch<dynamic>{{2}}, "key_sketch<dynamic>{2}", log_ulp);
  summaries<Key>(checks, random, freekv::key_sketch<4>{}, "key_sketch<4>", log_ulp);
  summaries<Key>(checks, random, freekv::coarse_to_fine<freekv::min_max, freekv::key_sketch<4>>{},
                 "coarse_to_fine<min_max, key_sketch<4>>", log_ulp);
  summaries<Key>(checks, random, freekv::chunk_means<8>{}, "chunk_means<8>", log_ulp);
  summaries<Key>(checks, random, freekv::chunk_means<dynamic>{{4}}, "chunk_means<dynamic>{4}", log_ulp);
  summaries<Key>(checks, random, freekv::key_subspace<24, 2>{}, "key_subspace<24, 2>", log_ulp);
  summaries<Key>(checks, random, freekv::key_subspace<24, 3>{}, "key_subspace<24, 3>", log_ulp);
  summaries<Key>(checks, random, freekv::key_subspace<8, 4>{}, "key_subspace<8, 4>", log_ulp);
  summaries<Key>(checks, random, freekv::key_subspace<8, 8>{}, "key_subspace<8, 8>", log_ulp);
  summaries<Key>(checks, random, freekv::key_subspace<16, 32>{}, "key_subspace<16, 32>", log_ulp);
  summaries<Key>(checks, random, freekv::key_subspace<dynamic, dynamic>{{7}, {3}},
                 "key_subspace<dynamic, dynamic>{7, 3}", log_ulp);
}

// ---- pooling ----

struct sum_scores {
  const float* scores;  // (heads, candidates)
  int candidates;
  float* log_sums;
  FREEKV_HD void operator()(int head) const {
    freekv::log_sum_exp sum;
    for (int j = 0; j < candidates; ++j) sum.add(scores[head * candidates + j]);
    log_sums[head] = sum.value();
  }
};
struct pool_scores {
  freekv::row_scores row;
  float* pooled;  // (candidates, 4): mean_softmax, max_softmax, mean_score, max_score
  FREEKV_HD void operator()(int j) const {
    const scalar_team team;
    pooled[4 * j] = freekv::mean_softmax{}.pool(team, row, j);
    pooled[4 * j + 1] = freekv::max_softmax{}.pool(team, row, j);
    pooled[4 * j + 2] = freekv::mean_score{}.pool(team, row, j);
    pooled[4 * j + 3] = freekv::max_score{}.pool(team, row, j);
  }
};

void pooling(report& checks, random_numbers& random) {
  for (int shape = 0; shape < 4; ++shape) {
    const int group = random.between(1, 8), candidates = random.between(1, 300);
    pinned<float> scores = random.normals<float>(to_size(group * candidates), 8.0f);
    for (int i = 0; i < group * candidates; i += 13) scores[to_size(i)] = -freekv::infinity;
    if (shape == 3) std::fill_n(scores.begin(), candidates, -freekv::infinity);  // a head without any score
    results<float> log_sums(to_size(group)), pooled(to_size(4 * candidates));
    checks.run(group, [&](auto side) { return sum_scores{scores.data(), candidates, side(log_sums)}; });
    const std::string what = text(group) + " heads, " + text(candidates) + " candidates";
    checks.close("log_sum_exp: " + what, log_sums, log_ulp);
    checks.run(candidates, [&](auto side) {
      return pool_scores{{scores.data(), candidates, log_sums.host.data(), group}, side(pooled)};
    });
    checks.close("poolings: " + what, pooled, log_ulp);
  }
}

// ---- slots ----

struct slot_matching {
  const std::int32_t* wanted;  // (heads, most)
  const std::int32_t* counts;
  int most, spare;
  std::int32_t *slot_unit, *stamps, *slot_of;  // (heads, most)
  std::int32_t* misses;
  FREEKV_HD void operator()(int head) const {
    const freekv::detail::slot_contents slots{slot_unit + head * most, stamps + head * most, most};
    int* const to = slot_of + head * most;
    const std::int32_t* const pages = wanted + head * most;
    // Counts stay below the slots, so that spare slots are slots that the selection leaves.
    misses[head] =
        spare == 0
            ? freekv::detail::match_slots(freekv::first_unselected<>{}, pages, counts[head], slots, 5, to)
            : freekv::detail::match_slots(freekv::least_recently_used<freekv::dynamic>{{{spare}}}, pages,
                                          counts[head], slots, 5, to);
  }
};

void slots(report& checks, random_numbers& random) {
  for (int shape = 0; shape < 6; ++shape) {
    const int heads = 100, most = random.between(1, 20),
              spare = shape % 2 == 0 ? 0 : random.between(0, most / 2);
    pinned<std::int32_t> wanted(to_size(heads * most)), held(to_size(heads * most), -1),
        counts(to_size(heads));
    const auto draw = [&](int head, pinned<std::int32_t>& pages, int count) {
      int page = -1;
      for (int i = 0; i < count; ++i) pages[to_size(head * most + i)] = page += random.between(1, 3);
    };
    for (int head = 0; head < heads; ++head) {
      draw(head, wanted, counts[to_size(head)] = random.between(0, most - spare));
      draw(head, held, random.between(0, most));
      for (int i = most - 1; i > 0; --i)
        std::swap(held[to_size(head * most + i)], held[to_size(head * most + random.below(i + 1))]);
    }
    pinned<std::int32_t> before(to_size(heads * most));
    for (auto& stamp : before) stamp = random.between(0, 4);
    results<std::int32_t> slot_unit(held), stamps(before), slot_of(to_size(heads * most), -99),
        misses(to_size(heads));
    checks.run(heads, [&](auto side) {
      return slot_matching{wanted.data(),   counts.data(), most,          spare,
                           side(slot_unit), side(stamps),  side(slot_of), side(misses)};
    });
    const std::string what = "match_slots, " + text(most) + " slots, " + text(spare) + " spare: ";
    checks.equal(what + "pages", slot_unit);
    checks.equal(what + "stamps", stamps);
    checks.equal(what + "slots", slot_of);
    checks.equal(what + "misses", misses);
  }
}

// ---- correction ----

struct find_drift {
  const float *now, *before;  // (heads, group, head_dim)
  int group, head_dim;
  freekv::cosine_drift::layer_policy policy;
  float* cosines;
  std::uint8_t* flags;  // (heads, 4): defined, cosine_drift, always, never
  FREEKV_HD void operator()(int head) const {
    const scalar_team team;
    const freekv::group_query q{now + head * group * head_dim, group, head_dim};
    const freekv::group_query p{before + head * group * head_dim, group, head_dim};
    const freekv::detail::query_drift drift = freekv::detail::drift_of(team, q, p);
    cosines[head] = drift.cosine;
    flags[head * 4] = drift.defined;
    flags[head * 4 + 1] = policy.flags(team, {q, p});
    flags[head * 4 + 2] = freekv::always{}.flags(team, {q, p});
    flags[head * 4 + 3] = freekv::never{}.flags(team, {q, p});
  }
};

void corrections(report& checks, random_numbers& random) {
  for (int shape = 0; shape < 3; ++shape) {
    const int heads = 60, group = random.between(1, 6), d = 8 * random.between(1, 20);
    pinned<float> now = random.normals<float>(to_size(heads * group * d)), before = now;
    for (int head = 0; head < heads; ++head) {  // turned by more and more
      const float turn = static_cast<float>(head) / static_cast<float>(heads);
      for (int i = 0; i < group * d; ++i) before[to_size(head * group * d + i)] += turn * random.normal();
    }
    std::fill_n(before.begin(), d, 0.0f);
    now[to_size(group * d)] = std::numeric_limits<float>::quiet_NaN();
    now[to_size(2 * group * d)] = 1.0e30f;
    results<float> cosines(to_size(heads));
    results<std::uint8_t> flags(to_size(4 * heads), 9);
    const auto policy = freekv::cosine_drift{.tau_of_layer = {0.5f, 0.9f}}.at(1);
    checks.run(heads, [&](auto side) {
      return find_drift{now.data(), before.data(), group, d, policy, side(cosines), side(flags)};
    });
    const std::string what = ", group " + text(group) + ", head_dim " + text(d);
    checks.equal("drift_of" + what, cosines);
    checks.equal("cosine_drift, always, never" + what, flags);
  }
}

// ---- attention ----

template <int HeadDim, class Element>
struct attend_rows {
  const Element* pages;  // (rows, pages_each, plane, page, head_dim)
  const float* queries;  // (rows, group, head_dim), scaled
  const std::int32_t* tokens;
  int group, page, pages_each;
  float* scratch;             // (rows, attention_scratch)
  freekv::log_sum_exp* log_sums;  // (rows, 2, group)
  float* weighted;            // (rows, 2, group, head_dim)
  float *out, *lse;
  float soft_cap;
  const float* sink_logits;  // (group), or null
  /// The first page is one part, the others are another.
  FREEKV_HD void operator()(int row) const {
    const scalar_team team;
    freekv::detail::attention_part parts[2];
    for (int i = 0; i < 2; ++i) {
      parts[i] = {log_sums + (row * 2 + i) * group, weighted + (row * 2 + i) * group * HeadDim};
      parts[i].clear(team, group, HeadDim);
    }
    const freekv::group_query query{queries + row * group * HeadDim, group, HeadDim};
    for (int i = 0; i * page < tokens[row]; ++i) {
      const Element* key = pages + (row * pages_each + i) * 2 * page * HeadDim;
      const int count = tokens[row] - i * page < page ? tokens[row] - i * page : page;
      freekv::detail::attend_slice<HeadDim>(
          team, query, freekv::head_slice<const Element>{key, key + page * HeadDim, HeadDim}, count,
          parts[i == 0 ? 0 : 1], scratch + row * freekv::detail::attention_scratch<HeadDim>, soft_cap);
    }
    freekv::detail::merge_parts<HeadDim>(team, parts[1], parts[0], group);
    if (sink_logits != nullptr) freekv::detail::add_logits<HeadDim>(team, sink_logits, group, parts[0]);
    freekv::detail::finish_attention<HeadDim>(team, parts[0], group, out + row * group * HeadDim,
                                              lse + row * group);
  }
};

template <int HeadDim, class Element>
void attention(report& checks, random_numbers& random) {
  constexpr int rows = 20, pages_each = 3, d = HeadDim;
  const int group = random.between(1, 3), page = 8 * random.between(1, 3);
  const int page_elements = 2 * page * d;
  pinned<Element> pages = random.normals<Element>(to_size(rows * pages_each * page_elements));
  const pinned<float> queries =
      random.normals<float>(to_size(rows * group * d), 1.5f / std::sqrt(static_cast<float>(d)));
  pinned<std::int32_t> tokens(rows);
  for (auto& n : tokens) n = random.between(1, pages_each * page);
  tokens[0] = 0;
  tokens[1] = pages_each * page;
  // Row 2: NaN in a key; row 3: an infinite value; row 4: a token, and row 5: all tokens of score -infinity
  // (or +infinity, by the query's sign).
  const auto first = [&](int row) { return pages.begin() + row * pages_each * page_elements; };
  first(2)[0] = freekv::from_float<Element>(std::numeric_limits<float>::quiet_NaN());
  first(3)[page * d] = freekv::from_float<Element>(freekv::infinity);
  first(4)[0] = freekv::from_float<Element>(-freekv::infinity);
  for (int t = 0; t < page; ++t) first(5)[t * d] = freekv::from_float<Element>(-freekv::infinity);
  tokens[5] = page;

  pinned<float> scratch(to_size(rows * freekv::detail::attention_scratch<d>)),
      weighted(to_size(rows * 2 * group * d));
  pinned<freekv::log_sum_exp> log_sums(to_size(rows * 2 * group));
  const bool extras = random.between(0, 1) == 1;
  const pinned<float> sink_logits = random.normals<float>(to_size(group), 2.0f);
  results<float> out(to_size(rows * group * d), 7.0f), lse(to_size(rows * group), 7.0f);
  checks.run(rows, scratch, [&](auto side) {
    return attend_rows<d, Element>{pages.data(),
                                   queries.data(),
                                   tokens.data(),
                                   group,
                                   page,
                                   pages_each,
                                   scratch.data(),
                                   log_sums.data(),
                                   weighted.data(),
                                   side(out),
                                   side(lse),
                                   extras ? 3.0f : 0.0f,
                                   extras ? sink_logits.data() : nullptr};
  });
  const std::string what = "attention" + of<Element>() + ", head_dim " + text(d) + ", group " + text(group) +
                           ", page size " + text(page) + (extras ? ", soft cap and sink logits: " : ": ");
  checks.close(what + "outputs", out, attention_ulp);
  checks.close(what + "log-sum-exp", lse, attention_ulp);
}

template <class Element>
void all_of_element(report& checks, random_numbers& random) {
  using freekv::hnd, freekv::nhd;
  copies<nhd, nhd, Element>(checks, random);
  copies<nhd, hnd, Element>(checks, random);
  copies<hnd, nhd, Element>(checks, random);
  copies<hnd, hnd, Element>(checks, random);
  all_codecs<Element>(checks, random);
  all_summaries<Element>(checks, random);
  attention<40, Element>(checks, random);
  attention<128, Element>(checks, random);
  attention<200, Element>(checks, random);
}

}  // namespace

int main() {
  skip_without_device();
  cudaDeviceProp device;
  require(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
  std::printf("on %s, compute capability %d.%d\n", device.name, device.major, device.minor);

  report checks;
  random_numbers random(1);
  conversions(checks, random);
  ordered_keys(checks, random);
  roles(checks, random);
  mapping<freekv::nhd, 8>(checks, random);
  mapping<freekv::hnd, 8>(checks, random);
  mapping<freekv::nhd, 80>(checks, random);
  mapping<freekv::hnd, 80>(checks, random);
  pooling(checks, random);
  slots(checks, random);
  corrections(checks, random);
  rebuilt_keys(checks, random, freekv::rotary_pairs::halves);
  rebuilt_keys(checks, random, freekv::rotary_pairs::neighbours);
  pins(checks, random);
  all_of_element<float>(checks, random);
  all_of_element<half>(checks, random);
  all_of_element<bfloat16>(checks, random);
  return checks.finish();
}
