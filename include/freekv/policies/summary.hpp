// Summaries: what stands for a unit's keys when units are scored.
//
// A summary policy turns the keys of one unit and one KV head into `width` numbers and scores a query against
// them: a unit is a page, or a part of one. The library stores the numbers (by default as float32) and hands
// them back as floats, so a policy is three functions:
//
//   struct my_summary {
//     using policy_kind = summary_kind;
//     static constexpr std::string_view name = "my_summary";
//     FREEKV_HD constexpr int width(kv_extent unit) const;                            // numbers a unit
//     template <team T>
//     FREEKV_HD void summarise(T team, const unit_keys& keys, float* numbers) const;
//     template <team T>
//     FREEKV_HD float score(T team, const unit_query& query, const float* numbers) const;
//   };
//
// Optional, and then listed, as in `using hooks = hook_list<hook::stored>;`: `stored<Key>`, the element type
// kept (default float), or for a format of its own `bytes<Key>(unit)`,
// `encode<Key>(team, unit, numbers, out)` and `decode<Key>(team, unit, in, numbers)`, or instead of `decode`
// a `score` of `const std::byte*`; `query_width(d)` and `prepare(team, query, prepared)`, done once a step
// for each query; `at(layer, head)`, the policy for one head, where it depends on calibration data, which may
// have these as well; `data(visit)` then, which calls `visit(array, bytes)` for each array of them;
// `values()`, what it was given, for names; `with_elements<Key>(stored, body)`, and of two stages
// `kept(candidates, selected)`.
//
// `linear`, true: the score is `scale` times the product of the prepared query with the numbers, `width` a
// multiple of 8, wherever that is finite; units are then scored many at a time, and `score` decides where it
// is not.
//
// `summarised_by_whole_rows`, true: numbers are rows of head_dim, whose count does not depend on the unit's
// tokens; on a device a team as wide as a row works on them, and where the summary is `linear` too, stored
// elements are multiplied as they are.
//
// `prepare_four` and `score_four` (`hook::four_heads`): see `scores_four_heads`.
//
// `mass_term(team, query)`, the query (1, head_dim) as it is: what times the scale and added to a score of
// that query makes an estimate of the unit's log-mass, `ln sum_t exp(scale * <q, k_t>)`.
//
// `log_weight(team, query, key)` (`hook::weighs`), a query (1, head_dim) of any positive scale and a key of
// any element type: what attention adds to the score of a token that has been sampled by this summary's
// scores, minus the logarithm of the probability that it is (`sampling_selection`).
//
// `validate(setting)` throws settings_error where the setting does not suit the policy.
//
// NaN in a key must come out as a NaN score; the library turns it into -infinity (docs/contract.md, 5.1).
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <freekv/core/error.hpp>
#include <freekv/core/hooks.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/core/shape.hpp>
#include <freekv/core/size.hpp>
#include <freekv/core/team.hpp>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace freekv {

/// Model and unit that a summary policy is used for, for `validate`.
struct summary_setting {
  kv_extent unit;
  int layers = 0;
  int kv_heads = 0;
  bool part_of_page = false;

  /// "page of 32", or "unit of 8".
  std::string text() const { return (part_of_page ? "unit of " : "page of ") + std::to_string(unit.tokens); }
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

/// A summary that scores stored bytes as they are, `score(team, query, stored)`, instead of decoded numbers.
template <class S>
concept scores_stored_bytes = requires(const S s, unit_query query, const std::byte* stored) {
  { s.score(scalar_team{}, query, stored) } -> std::same_as<float>;
};

/// A policy of kind `summary_kind` whose `at(layer, head)`, or itself, has the three functions above (tried
/// with the one-lane team).
template <class S>
concept summary_policy = policy<S> && std::same_as<typename S::policy_kind, summary_kind> &&
    requires(const S s, unit_keys keys, float* numbers) {
  { S::name } -> std::convertible_to<std::string_view>;
  { s.width(keys.unit) } -> std::convertible_to<int>;
  summary_at(s, 0, 0).summarise(scalar_team{}, keys, numbers);
} &&(requires(const S s, unit_query query, const float* numbers) {
  { summary_at(s, 0, 0).score(scalar_team{}, query, numbers) } -> std::same_as<float>;
} || scores_stored_bytes<decltype(summary_at(std::declval<const S&>(), 0, 0))>);

/// Bytes of one unit's summary for one KV head, scales included; a multiple of 4.
template <class Key, class S>
FREEKV_HD constexpr std::size_t summary_bytes(const S& summary, kv_extent unit) {
  std::size_t bytes = 0;
  if constexpr (requires { summary.template bytes<Key>(unit); })
    bytes = summary.template bytes<Key>(unit);
  else
    bytes = to_size(summary.width(unit)) * sizeof(summary_element<S, Key>);
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

/// Prepares a query (1, head_dim) for scoring, once a step and query head: to `prepared` (query_width).
template <team T, class S>
FREEKV_HD void prepare_query(T team, const S& summary, const group_query& query, float* prepared) {
  if constexpr (requires { summary.prepare(team, query, prepared); })
    summary.prepare(team, query, prepared);
  else
    for (int i = 0; i < query.head_dim; i += T::width) team.store(prepared + i, team.load(query.data + i));
}

/// Units that are scored together at most, and that are by `score_four`.
inline constexpr int units_at_once = 32, units_by_four = 256;

/// Stored summaries of several units, `bytes` apart.
struct stored_summaries {
  const std::byte* first = nullptr;
  std::size_t bytes = 0;
  int count = 0;

  FREEKV_HD const std::byte* at(int nth) const { return first + to_size(nth) * bytes; }
};

/// A summary that, on that team, scores four query heads at once: `prepare_four(team, query, prepared)`
/// has up to four heads to (query_width, 4), `score_four(team, query, units, scores)` up to `units_by_four`
/// units' scores to (units, 4), with room for one unit more.
template <class S, class T>
concept scores_four_heads = team_of_halves<T> &&
    requires(const S s, T team, group_query queries, unit_query query, float* numbers) {
  s.prepare_four(team, queries, numbers);
  s.score_four(team, query, stored_summaries{}, numbers);
};

/// Prepares the queries of a group for scoring by that team: to `prepared` (prepared_queries::floats).
template <team T, class S>
FREEKV_HD prepared_queries prepare_group(T team, const S& summary, const group_query& query, float scale,
                                         float* prepared) {
  prepared_queries all{prepared, summary_query_width(summary, query.head_dim), query.group, scale};
  const auto heads = [&](int first, int count) {
    return group_query{query.head(first), count, query.head_dim, query.step};
  };
  if constexpr (scores_four_heads<S, T>)
    if (query.group > 1) {
      all.by_four = true;
      for (int g = 0; g < query.group; g += 4)
        summary.prepare_four(team, heads(g, query.group - g < 4 ? query.group - g : 4),
                             prepared + g * all.width);
      return all;
    }
  for (int g = 0; g < query.group; ++g) prepare_query(team, summary, heads(g, 1), prepared + g * all.width);
  return all;
}

/// `count` numbers as consecutive elements.
template <element Stored, team T>
FREEKV_HD void narrow_numbers(T team, const float* numbers, int count, std::byte* out) {
  auto* elements = reinterpret_cast<Stored*>(out);
  for (int i = team.lane(); i < count; i += team.lanes()) elements[i] = from_float<Stored>(numbers[i]);
}

/// Numbers stored as `Stored`, as floats again.
template <element Stored, team T>
FREEKV_HD void widen_numbers(T team, const std::byte* in, int count, float* numbers) {
  const auto* elements = reinterpret_cast<const Stored*>(in);
  const int blocks = count / 8 * 8;
  team.widen(elements, numbers, blocks);
  for (int i = blocks + team.lane(); i < count; i += team.lanes()) numbers[i] = to_float(elements[i]);
}

/// A summary whose score is a product.
template <class S>
concept linear_summary = requires {
  requires S::linear;
};

/// Calls `body(elements)` with stored numbers as the elements they are; false where they have another format.
template <class Key, class S, class Body>
FREEKV_HD bool with_elements(const S& summary, const std::byte* stored, const Body& body) {
  if constexpr (requires { summary.template with_elements<Key>(stored, body); }) {
    return summary.template with_elements<Key>(stored, body);
  } else if constexpr (requires(kv_extent unit) { summary.template bytes<Key>(unit); }) {
    return false;
  } else {
    body(reinterpret_cast<const summary_element<S, Key>*>(stored));
    return true;
  }
}

/// Numbers to stored bytes.
template <class Key, team T, class S>
FREEKV_HD void encode_summary(T team, const S& summary, kv_extent unit, const float* numbers,
                              std::byte* out) {
  if constexpr (requires { summary.template encode<Key>(team, unit, numbers, out); })
    summary.template encode<Key>(team, unit, numbers, out);
  else
    narrow_numbers<summary_element<S, Key>>(team, numbers, summary.width(unit), out);
}

/// Stored bytes to numbers.
template <class Key, team T, class S>
FREEKV_HD void decode_summary(T team, const S& summary, kv_extent unit, const std::byte* in, float* numbers) {
  if constexpr (requires { summary.template decode<Key>(team, unit, in, numbers); })
    summary.template decode<Key>(team, unit, in, numbers);
  else
    widen_numbers<summary_element<S, Key>>(team, in, summary.width(unit), numbers);
}

namespace detail {

/// The plainest team_of_halves, to try a summary's `prepare_four` and `score_four` with.
struct team_to_try : scalar_team {
  static constexpr int width = 8;
  pack sum_each(const pack (&x)[width]) const;
  pack load_halves(const float*, const float*) const;
  void store_by_four(float*, const pack (&)[4]) const;
  void load_by_four(const float*, pack (&)[4]) const;
  pack repeat(pack) const;
  pack fold(pack) const;
};
static_assert(team_of_halves<team_to_try>);

struct takes_elements {
  template <class Element>
  void operator()(const Element*) const;
};

/// True where `P`, the policy for one head, has that optional member.
template <class P>
constexpr bool head_summary_offers(hook h) {
  switch (h) {
    case hook::bytes:
      return requires(const P p) {
        { p.template bytes<float>(kv_extent{}) } -> std::same_as<std::size_t>;
      };
    case hook::encode:
      return requires(const P p, const float* numbers, std::byte* out) {
        p.template encode<float>(scalar_team{}, kv_extent{}, numbers, out);
      };
    case hook::decode:
      return requires(const P p, const std::byte* in, float* numbers) {
        p.template decode<float>(scalar_team{}, kv_extent{}, in, numbers);
      };
    case hook::four_heads:
      return scores_four_heads<P, team_to_try>;
    case hook::query_width:
      return requires(const P p) {
        { p.query_width(64) } -> std::same_as<int>;
      };
    case hook::prepare:
      return requires(const P p, float* prepared) { p.prepare(scalar_team{}, group_query{}, prepared); };
    case hook::stored:
      return requires { typename P::template stored<float>; };
    case hook::linear:
      return requires {
        { P::linear } -> std::same_as<const bool&>;
      };
    case hook::summarised_by_whole_rows:
      return requires {
        { P::summarised_by_whole_rows } -> std::same_as<const bool&>;
      };
    case hook::mass_term:
      return requires(const P p) {
        { p.mass_term(scalar_team{}, group_query{}) } -> std::same_as<float>;
      };
    case hook::weighs:
      return requires(const P p, const float* key) {
        { p.log_weight(scalar_team{}, group_query{}, key) } -> std::same_as<float>;
      };
    case hook::with_elements:
      return requires(const P p, const std::byte* stored) {
        { p.template with_elements<float>(stored, takes_elements{}) } -> std::same_as<bool>;
      };
    default:
      return false;
  }
}

}  // namespace detail

struct min_max;

struct summary_kind : kind_defaults {
  using default_policy = min_max;
  template <class P>
  struct check {
    static_assert(summary_policy<P>,
                  "a summary policy has a name, width(unit), summarise(team, keys, numbers) and score(team, "
                  "query, numbers) -> float, itself or what its at(layer, head) returns");
  };
  template <class P>
  static constexpr bool offers(hook h) {
    using of_head = std::remove_const_t<decltype(summary_at(std::declval<const P&>(), 0, 0))>;
    switch (h) {
      case hook::at:
        return requires(const P p) { p.at(0, 0); };
      case hook::kept:
        return requires(const P p) {
          p.coarse;
          p.fine;
          { p.kept(1, 1) } -> std::same_as<int>;
        };
      case hook::validate:
        return requires(const P p) { p.validate(summary_setting{}); };
      default:
        return kind_defaults::offers<P>(h) || detail::head_summary_offers<P>(h) ||
               detail::head_summary_offers<of_head>(h);
    }
  }
  template <class P>
  [[gnu::always_inline]] static void validate(const P& policy, const policy_setting& s) {
    policy.validate({{s.unit_tokens, s.head_dim}, s.layers, s.kv_heads, s.unit_tokens < s.page_tokens});
  }
};

}  // namespace freekv
