// Page summaries: what stands for a page's keys when pages are scored.
//
// A summary policy turns the keys of one page and one KV head into `width` numbers and scores a query against
// them. The library stores the numbers (by default as float32) and hands them back as floats, so a policy is
// three functions:
//
//   struct my_summary {
//     using policy_kind = summary_kind;
//     static constexpr std::string_view name = "my_summary";
//     FREEKV_HD constexpr int width(page_geometry page) const;                      // numbers a page
//     template <team T>
//     FREEKV_HD void summarise(T team, const page_keys& keys, float* numbers) const;
//     template <team T>
//     FREEKV_HD float score(T team, const page_query& query, const float* numbers) const;
//   };
//
// Optional: `stored<Key>`, the element type kept (default float); or `bytes(page)`, `encode` and `decode` for
// a format of its own; `query_width(d)` and `prepare(team, query, prepared)`, done once a step for each query
// head; `at(layer, head)`, the policy for one head, where it depends on calibration data.
//
// `validate(setting)` throws settings_error where the setting does not suit the policy.
//
// NaN in a key must come out as a NaN score; the library turns it into -infinity (spec: NaN and infinity are
// data).
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <freekv/core/error.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/core/shape.hpp>
#include <freekv/core/team.hpp>
#include <freekv/functors/log_sum_exp.hpp>
#include <string>
#include <string_view>
#include <type_traits>

namespace freekv {

/// What a summary policy is used for, for `validate`.
struct summary_setting {
  page_geometry page;
  int layers = 0;
  int kv_heads = 0;
};

namespace detail {

template <class S, class Key>
struct stored_element {
  using type = float;
};
template <class S, class Key>
requires requires { typename S::template stored<Key>; }
struct stored_element<S, Key> {
  using type = typename S::template stored<Key>;
};

}  // namespace detail

/// Element type in which `S` keeps its numbers for keys of type `Key`, unless it has a format of its own.
template <class S, class Key>
using summary_element = typename detail::stored_element<S, Key>::type;

/// The policy for one layer and KV head.
template <class S>
FREEKV_HD constexpr auto summary_at(const S& summary, int layer, int head) {
  if constexpr (requires { summary.at(layer, head); })
    return summary.at(layer, head);
  else
    return summary;
}

/// A policy of kind `summary_kind` whose `at(layer, head)`, or itself, has the three functions above (tried
/// with the one-lane team).
template <class S>
concept summary_policy = policy<S> && std::same_as<typename S::policy_kind, summary_kind> &&
    requires(const S s, page_keys keys, page_query query, float* numbers) {
  { S::name } -> std::convertible_to<std::string_view>;
  { s.width(keys.page) } -> std::convertible_to<int>;
  summary_at(s, 0, 0).summarise(scalar_team{}, keys, numbers);
  { summary_at(s, 0, 0).score(scalar_team{}, query, numbers) } -> std::same_as<float>;
};

/// Bytes of one page's summary for one KV head, scales included; a multiple of 4.
template <class Key, class S>
FREEKV_HD constexpr std::size_t summary_bytes(const S& summary, page_geometry page) {
  std::size_t bytes = 0;
  if constexpr (requires { summary.bytes(page); })
    bytes = summary.bytes(page);
  else
    bytes = static_cast<std::size_t>(summary.width(page)) * sizeof(summary_element<S, Key>);
  return (bytes + 3) / 4 * 4;
}

/// Floats of a prepared query.
template <class S>
FREEKV_HD constexpr int summary_query_width(const S& summary, int head_dim) {
  if constexpr (requires { summary.query_width(head_dim); })
    return summary.query_width(head_dim);
  else
    return head_dim;
}

/// What is computed once a step for each query head: a query (1, head_dim) to `prepared` (query_width).
template <team T, class S>
FREEKV_HD void prepare_query(T team, const S& summary, const group_query& query, float* prepared) {
  if constexpr (requires { summary.prepare(team, query, prepared); })
    summary.prepare(team, query, prepared);
  else
    for (int i = 0; i < query.head_dim; i += T::width) team.store(prepared + i, team.load(query.data + i));
}

/// Numbers to stored bytes.
template <class Key, team T, class S>
FREEKV_HD void encode_summary(T team, const S& summary, page_geometry page, const float* numbers,
                              std::byte* out) {
  if constexpr (requires { summary.encode(team, page, numbers, out); }) {
    summary.encode(team, page, numbers, out);
  } else {
    using stored = summary_element<S, Key>;
    auto* elements = reinterpret_cast<stored*>(out);
    for (int i = team.lane(); i < summary.width(page); i += team.lanes())
      elements[i] = from_float<stored>(numbers[i]);
  }
}

/// Stored bytes to numbers.
template <class Key, team T, class S>
FREEKV_HD void decode_summary(T team, const S& summary, page_geometry page, const std::byte* in,
                              float* numbers) {
  if constexpr (requires { summary.decode(team, page, in, numbers); })
    summary.decode(team, page, in, numbers);
  else
    team.widen(reinterpret_cast<const summary_element<S, Key>*>(in), numbers, summary.width(page));
}

/// Elementwise minimum and maximum of a page's keys; the score is an upper bound of the largest scaled
/// product of the query with a key of the page. Kept in the key's type, which is exact. (Quest; FreeKV
/// section 3.2)
struct min_max {
  using policy_kind = summary_kind;
  static constexpr std::string_view name = "min_max";
  template <class Key>
  using stored = Key;

  FREEKV_HD constexpr int width(page_geometry page) const { return 2 * page.head_dim; }

  template <team T>
  FREEKV_HD void summarise(T team, const page_keys& keys, float* numbers) const {
    for (int i = 0; i < keys.page.head_dim; i += T::width) {
      auto low = team.load(keys.row(0) + i), high = low;
      for (int t = 1; t < keys.page.tokens; ++t) {
        const auto key = team.load(keys.row(t) + i);
        low = team.minimum(low, key);
        high = team.maximum(high, key);
      }
      team.store(numbers + i, low);
      team.store(numbers + keys.page.head_dim + i, high);
    }
  }

  template <team T>
  FREEKV_HD float score(T team, const page_query& query, const float* numbers) const {
    const int d = query.page.head_dim;
    typename T::pack bound(0.0f);
    for (int i = 0; i < d; i += T::width) {
      const auto q = team.load(query.data + i);
      bound = bound + team.maximum(q * team.load(numbers + i), q * team.load(numbers + d + i));
    }
    return query.scale * team.sum(bound);
  }
};

/// Mean keys of the page's chunks of `Tokens` tokens; the score is `ln sum_b exp(scale * <q, mean_b>)`, an
/// estimate of the page's log-mass up to `ln Tokens`. `Tokens` divides the page size;
/// `chunk_means<dynamic>{8}` takes it at run time. Kept in float32. Ours.
template <int Tokens = 8>
struct chunk_means {
  using policy_kind = summary_kind;
  static constexpr std::string_view name = "chunk_means";
  count_of<Tokens> tokens{};

  FREEKV_HD constexpr int width(page_geometry page) const { return page.tokens / tokens * page.head_dim; }

  std::string values() const { return std::to_string(int{tokens}); }
  void validate(const summary_setting& s) const {
    if (tokens < 1 || s.page.tokens % tokens != 0)
      throw settings_error("chunk_means: a chunk of " + std::to_string(int{tokens}) +
                           " tokens does not divide a page of " + std::to_string(s.page.tokens) +
                           "; choose a divisor such as 4 or 8");
  }

  template <team T>
  FREEKV_HD void summarise(T team, const page_keys& keys, float* numbers) const {
    const int d = keys.page.head_dim;
    const typename T::pack share(1.0f / static_cast<float>(tokens));
    for (int chunk = 0; chunk < keys.page.tokens / tokens; ++chunk)
      for (int i = 0; i < d; i += T::width) {
        auto sum = team.load(keys.row(chunk * tokens) + i);
        for (int t = 1; t < tokens; ++t) sum = sum + team.load(keys.row(chunk * tokens + t) + i);
        team.store(numbers + chunk * d + i, sum * share);
      }
  }

  template <team T>
  FREEKV_HD float score(T team, const page_query& query, const float* numbers) const {
    const int d = query.page.head_dim;
    log_sum_exp mass;
    for (int chunk = 0; chunk < query.page.tokens / tokens; ++chunk) {
      typename T::pack product(0.0f);
      for (int i = 0; i < d; i += T::width)
        product = product + team.load(query.data + i) * team.load(numbers + chunk * d + i);
      mass.add(query.scale * team.sum(product));
    }
    return mass.value();
  }
};

static_assert(summary_policy<min_max> && summary_policy<chunk_means<>>);

}  // namespace freekv
