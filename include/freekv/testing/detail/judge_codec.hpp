// Random pages, of which a codec is to give back what its definition says, and random sequences, whose
// attention is to what comes back.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <freekv/core/size.hpp>
#include <freekv/policies/codec.hpp>
#include <freekv/testing/detail/judge_steps.hpp>
#include <freekv/testing/detail/random_cases.hpp>
#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace freekv::testing::detail {

/// Keys and values of one KV head's page, (tokens, head_dim) each.
template <class Element>
struct page_numbers {
  std::vector<Element> keys, values;
};

/// Largest error of a number of size 1 that is rounded to an element.
template <element Element>
inline constexpr double rounding_of = 0x1p-24;
template <>
inline constexpr double rounding_of<half> = 0x1p-11;
template <>
inline constexpr double rounding_of<bfloat16> = 0x1p-8;

/// True where a model suits the codec.
template <class Codec>
bool suits_model(const Codec& codec, const codec_setting& model) {
  try {
    if constexpr (hooks_of<Codec>::has(hook::validate)) codec.validate(model);
    return true;
  } catch (const settings_error&) {
    return false;
  }
}

/// Rows of a page as they come back. Before and after, on the elements' side, rows lie apart.
template <int HeadDim, class Element, class Codec>
page_numbers<Element> read_back(const Codec& codec, const page_numbers<Element>& page, row_range rows,
                                const std::string& where, differences& wrong) {
  constexpr int stride = HeadDim + 8;
  constexpr std::uint32_t untouched = 0xa5a5a5a5u;
  const int tokens = static_cast<int>(page.keys.size()) / HeadDim;
  const Element mark = from_float<Element>(-12288.0f);  // between rows, and where nothing is written
  const auto apart = [&](const std::vector<Element>& dense) {
    std::vector<Element> spread(to_size(tokens * stride), mark);
    for (int t = 0; t < tokens; ++t)
      std::copy_n(&dense[to_size(t * HeadDim)], HeadDim, &spread[to_size(t * stride)]);
    return spread;
  };
  const auto dense = [&](const std::vector<Element>& spread) {
    std::vector<Element> numbers;
    for (int t = 0; t < rows.count; ++t) {
      const auto row = spread.begin() + t * stride;
      numbers.insert(numbers.end(), row, row + HeadDim);
    }
    return numbers;
  };
  const std::size_t bytes = codec.bytes({tokens, HeadDim}, sizeof(Element));
  if (bytes % 4 != 0) wrong.add(where, " takes ", bytes, " bytes, which is no multiple of 4");
  std::vector<std::uint32_t> stored((bytes + 3) / 4 + 64, untouched);
  auto* const out = reinterpret_cast<std::byte*>(stored.data());
  const std::vector<Element> key_rows = apart(page.keys), value_rows = apart(page.values);
  codec.template encode<HeadDim>(
      scalar_team{}, head_slice<const Element>{key_rows.data(), value_rows.data(), stride}, tokens, out);
  if (std::any_of(stored.begin() + static_cast<std::ptrdiff_t>((bytes + 3) / 4), stored.end(),
                  [](std::uint32_t word) { return word != untouched; }))
    wrong.add(where, " writes more than its ", bytes, " bytes");
  std::vector<Element> keys(to_size(tokens * stride), mark), values = keys;
  codec.template decode<HeadDim>(scalar_team{}, out, tokens, rows,
                                 head_slice<Element>{keys.data(), values.data(), stride});
  const auto is_mark = [&](const Element& x) { return std::memcmp(&x, &mark, sizeof x) == 0; };
  for (int i = 0; i < tokens * stride; ++i)
    if ((i / stride >= rows.count || i % stride >= HeadDim) &&
        !(is_mark(keys[to_size(i)]) && is_mark(values[to_size(i)]))) {
      wrong.add(where, " writes more than the ", rows.count, " rows that are read");
      break;
    }
  return {dense(keys), dense(values)};
}

/// Adds where a plane, of keys or of values, does not come back as its definition has it. What is halfway
/// between two codes may become either: numbers moved by rounding are tried.
template <class Element>
void judge_plane(const std::string& where, const char* what,
                 const std::function<doubles(const doubles&, kv_extent)>& read,
                 const std::vector<Element>& plane, const std::vector<Element>& back, kv_extent page,
                 double tolerance, differences& wrong) {
  const doubles exact = wide(plane), got = wide(back), want = read(exact, page);
  if (want.size() != got.size())
    return wrong.add(where, ": ", got.size(), " numbers of ", what, "s come back, of the definition ",
                     want.size());
  const double slack = tolerance * largest(exact);
  const auto fits = [&](double is, double by_definition, double more) {
    const double off = std::fabs(is - by_definition);
    // Subnormal halves are 2^-24 apart.
    return off <= more * slack + rounding_of<Element> * std::fabs(by_definition) * 1.001 + 0x1p-24;
  };
  std::vector<std::size_t> misses;
  for (std::size_t i = 0; i < got.size(); ++i)
    if (!fits(got[i], want[i], 1.0)) misses.push_back(i);
  random_numbers random(1);
  for (int nth = 0; nth < 64 && !misses.empty(); ++nth) {
    doubles moved = exact;
    for (double& x : moved) x += slack * random.either_way();
    const doubles again = read(moved, page);
    std::erase_if(misses, [&](std::size_t i) { return fits(got[i], again[i], 3.0); });
  }
  if (misses.empty()) return;
  const std::size_t i = misses[0], d = to_size(page.head_dim);
  wrong.add(where, ": number ", i % d, " of token ", i / d, "'s ", what, " comes back as ", got[i],
            ", of the definition ", want[i]);
}

/// Adds where rows are not the same bits. A number of which `differs(row, number)` holds may be another.
template <class Element, class Differs>
void judge_same(const std::string& where, const std::string& why, const page_numbers<Element>& a,
                const page_numbers<Element>& b, int head_dim, const Differs& differs, differences& wrong) {
  for (std::size_t i = 0; i < a.keys.size(); ++i) {
    const int row = static_cast<int>(i) / head_dim, number = static_cast<int>(i) % head_dim;
    const auto same = [&](const Element& x, const Element& y) { return std::memcmp(&x, &y, sizeof x) == 0; };
    if (!differs(row, number) && !(same(a.keys[i], b.keys[i]) && same(a.values[i], b.values[i])))
      return wrong.add(where, ": number ", number, " of row ", row, " comes back as another ", why);
  }
}

/// Judge of random pages: what comes back, in parts and as a whole, and what a number that is not finite does
/// to others.
template <int HeadDim, class Element, class Codec>
void judge_pages(const Codec& codec, const codec_definition& definition, const conformance_options& options,
                 differences& wrong) {
  if (!suits_model(codec, {1, 1, HeadDim})) return;
  random_numbers random(options.seed + to_size(HeadDim));
  const auto below = [&](int count) {
    return random.one_of({0, 1, 2, 3, 5, 7, 11, 13, 29, 61, 101}) % count;
  };
  for (int nth = 0; nth < options.units; nth += 3) {
    const kv_extent geometry{random.one_of({8, 8, 16, 24, 32, 64, 128}), HeadDim};
    const int tokens = geometry.tokens, count = tokens * HeadDim;
    const std::string where = std::string(element_name<Element>) + ", page of " + std::to_string(tokens) +
                              ", head_dim " + std::to_string(HeadDim);
    const float size = nth % 4 == 0 ? 6.0f : nth % 4 == 1 ? 0.02f : 1.0f;
    page_numbers<Element> page{random.normals<Element>(count, size), random.normals<Element>(count, size)};
    const auto all = read_back<HeadDim>(codec, page, {0, tokens}, where, wrong);
    judge_plane(where, "key", definition.keys, page.keys, all.keys, geometry, definition.tolerance, wrong);
    judge_plane(where, "value", definition.values, page.values, all.values, geometry, definition.tolerance,
                wrong);

    const int first = below(tokens), some = 1 + below(tokens - first);
    const auto part = [&](const std::vector<Element>& of) {
      return std::vector<Element>(of.begin() + first * HeadDim, of.begin() + (first + some) * HeadDim);
    };
    judge_same(
        where, "where some rows are read", read_back<HeadDim>(codec, page, {first, some}, where, wrong),
        {part(all.keys), part(all.values)}, HeadDim, [](int, int) { return false; }, wrong);

    const int token = below(tokens), number = below(HeadDim);
    for (const float spoilt :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      page.keys[to_size(token * HeadDim + number)] = page.values[to_size(token * HeadDim + number)] =
          from_float<Element>(spoilt);
      judge_same(
          where, "beside one that is not finite, of another token and channel",
          read_back<HeadDim>(codec, page, {0, tokens}, where, wrong), all, HeadDim,
          [&](int t, int i) { return t == token || i == number; }, wrong);
    }
  }
}

/// Judge of random sequences: attention is to what comes back of complete pages and to the others' rows as
/// they are, and the same bits with three threads as with one.
template <class Element, class Codec>
void judge_reads(const Codec& codec, const conformance_options& options, differences& wrong) {
  using pipeline = judging_pipeline<Element, Codec>;
  constexpr int d = random_text<Element>::d, steps = 20;
  random_numbers random(options.seed + 2);
  int decoded = 0;
  for (int run = 0; run < options.runs; ++run) {
    const int page = random.one_of({8, 16, 32}), kv_heads = random.one_of({1, 2, 3});
    const int group = random.one_of({1, 2, 3, 5});
    const int prompt = page * random.one_of({3, 6, 9}) + random.one_of({0, 3, page - 1});
    typename pipeline::settings settings;
    give_shape(settings, page, kv_heads, group, random.one_of({1, 2, 4}), prompt + steps);
    if (!suits_model(codec, {1, kv_heads, d})) continue;
    ++decoded;
    give(settings, codec);
    const random_text<Element> text(random, prompt + steps, kv_heads, group);
    const std::string where = place_of<Element>(settings);
    random_text<Element> read = text;  // complete pages as they come back
    for (int first = 0; first + page <= prompt + steps; first += page)
      for (int head = 0; head < kv_heads; ++head) {
        page_numbers<Element> of_head;
        const auto row = [&](int t) { return ((first + t) * kv_heads + head) * d; };
        for (int t = 0; t < page; ++t) {
          of_head.keys.insert(of_head.keys.end(), &text.keys[to_size(row(t))],
                              &text.keys[to_size(row(t))] + d);
          of_head.values.insert(of_head.values.end(), &text.values[to_size(row(t))],
                                &text.values[to_size(row(t))] + d);
        }
        const auto back = read_back<d>(codec, of_head, {0, page}, where, wrong);
        for (int t = 0; t < page; ++t) {
          std::copy_n(&back.keys[to_size(t * d)], d, &read.keys[to_size(row(t))]);
          std::copy_n(&back.values[to_size(t * d)], d, &read.values[to_size(row(t))]);
        }
      }
    decode_twice<pipeline>(
        where, settings, text, prompt, steps,
        [&](const std::string& at, int step, int head, bool, const std::vector<int>& units,
            const std::vector<float>& out) {
          const int row = prompt + step, complete = (row + 1) / page * page;
          random_text<Element> seen = read;
          const auto open = [&](const std::vector<Element>& from, std::vector<Element>& to) {
            std::copy(from.begin() + complete * kv_heads * d, from.end(),
                      to.begin() + complete * kv_heads * d);
          };
          open(text.keys, seen.keys);
          open(text.values, seen.values);
          const auto tokens = attended_tokens(row, roles_at(row + 1, settings.budget, page), page, units);
          for (int g = 0; g < group; ++g) seen.compare(at, row, head * group + g, tokens, out, wrong);
        },
        wrong);
  }
  if (decoded == 0 && options.runs > 0)
    wrong.add("head_dim 64 does not suit the codec, and no sequence was decoded");
}

}  // namespace freekv::testing::detail
