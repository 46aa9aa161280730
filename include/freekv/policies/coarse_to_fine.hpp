// Two summaries of a unit: a coarse one scores all candidates, a fine one the best of them.
#pragma once

#include <concepts>
#include <cstdint>
#include <freekv/policies/summary.hpp>
#include <type_traits>

namespace freekv {

namespace detail {

/// Two summaries side by side, the fine one's numbers, bytes and prepared query first: scored alone it is
/// `Fine`. Each is a policy or what its `at(layer, head)` returned.
template <class Coarse, class Fine>
struct summary_pair {
  Coarse coarse{};
  Fine fine{};

  FREEKV_HD constexpr int width(kv_extent unit) const { return fine.width(unit) + coarse.width(unit); }
  FREEKV_HD constexpr int query_width(int head_dim) const {
    return summary_query_width(fine, head_dim) + summary_query_width(coarse, head_dim);
  }
  template <class Key>
  FREEKV_HD constexpr std::size_t bytes(kv_extent unit) const {
    return summary_bytes<Key>(fine, unit) + summary_bytes<Key>(coarse, unit);
  }

  template <team T>
  FREEKV_HD void summarise(T team, const unit_keys& keys, float* numbers) const {
    fine.summarise(team, keys, numbers);
    coarse.summarise(team, keys, numbers + fine.width(keys.unit));
  }
  template <team T>
  FREEKV_HD void prepare(T team, const group_query& query, float* prepared) const {
    prepare_query(team, fine, query, prepared);
    prepare_query(team, coarse, query, prepared + summary_query_width(fine, query.head_dim));
  }
  /// Fine's score, of what it scores: its numbers, or its stored bytes.
  template <team T, class Number>
  requires(std::same_as<Number, std::byte> == scores_stored_bytes<Fine>) FREEKV_HD
      float score(T team, const unit_query& query, const Number* numbers) const {
    return fine.score(team, query, numbers);
  }

  template <class Key, team T>
  FREEKV_HD void encode(T team, kv_extent unit, const float* numbers, std::byte* out) const {
    encode_summary<Key>(team, fine, unit, numbers, out);
    encode_summary<Key>(team, coarse, unit, numbers + fine.width(unit), out + summary_bytes<Key>(fine, unit));
  }
  template <class Key, team T>
  FREEKV_HD void decode(T team, kv_extent unit, const std::byte* in, float* numbers) const {
    if constexpr (!scores_stored_bytes<Fine>) decode_summary<Key>(team, fine, unit, in, numbers);
    if constexpr (!scores_stored_bytes<Coarse>)
      decode_summary<Key>(team, coarse, unit, in + summary_bytes<Key>(fine, unit),
                          numbers + fine.width(unit));
  }
};

/// Validates one summary of the pair, if it has `validate`.
template <class S>
void validate_summary(const S& summary, const summary_setting& setting) {
  if constexpr (requires { summary.validate(setting); }) summary.validate(setting);
}

}  // namespace detail

/// A summary that has a coarse and a fine one and says how many candidates the fine one scores.
template <class S>
concept two_stage_summary = requires(const S s) {
  s.coarse;
  s.fine;
  { s.kept(1, 1) } -> std::same_as<int>;
};

/// Scores units in two stages. `Coarse` scores all candidates; the best `Times` times as many as are to be
/// selected, by its pooled scores, are kept, and `Fine` scores these. Selection and masses see Fine's scores
/// alone, pooled over the kept candidates. What is not kept scores -infinity, as a unit of NaN keys does: it
/// has no mass, and is selected only where kept units score -infinity too, which are never fewer than the
/// units to select. Ties go to the smaller unit in both stages. Where all candidates can be kept, Coarse
/// scores none.
///
///     coarse_to_fine<min_max, key_sketch<4>>            // 4 times
///     coarse_to_fine<mean, key_sketch<2>, dynamic>{{}, {8}}  // 8 times, chosen at run time
///
/// Numbers and stored bytes are Fine's, then Coarse's, each in its own format. Scored by itself, outside a
/// selection, it is Fine.
template <class Coarse, class Fine, int Times = 4>
struct coarse_to_fine : detail::summary_pair<Coarse, Fine> {
  static_assert(summary_policy<Coarse> && summary_policy<Fine>, "coarse_to_fine takes two summary policies");
  static_assert(!two_stage_summary<Coarse> && !two_stage_summary<Fine>,
                "coarse_to_fine takes summaries of one stage");
  static_assert(sizeof(detail::checked_hooks<Coarse>) + sizeof(detail::checked_hooks<Fine>) > 0);
  static_assert(Times == dynamic || Times >= 1, "coarse_to_fine keeps the selected pages 1 or more times");
  using policy_kind = summary_kind;
  using hooks = hook_list<hook::at, hook::bytes, hook::data, hook::decode, hook::encode, hook::kept,
                          hook::prepare, hook::query_width, hook::validate, hook::values>;
  static constexpr std::string_view name = "coarse_to_fine";
  count_of<Times> times{};

  /// Candidates that the coarse summary keeps of `candidates`, where up to `selected_units` are selected.
  FREEKV_HD constexpr int kept(int candidates, int selected_units) const {
    const std::int64_t most = std::int64_t{int{times}} * selected_units;
    return most < candidates ? static_cast<int>(most) : candidates;
  }
  /// Both summaries for one head.
  FREEKV_HD constexpr auto at(int layer, int head) const {
    const auto coarse_of_head = summary_at(this->coarse, layer, head);
    const auto fine_of_head = summary_at(this->fine, layer, head);
    return detail::summary_pair<std::remove_const_t<decltype(coarse_of_head)>,
                                std::remove_const_t<decltype(fine_of_head)>>{coarse_of_head, fine_of_head};
  }

  template <class Visit>
  void data(const Visit& visit) const {
    visit_data(this->coarse, visit);
    visit_data(this->fine, visit);
  }
  std::string values() const {
    return detail::printed(this->coarse) + ", " + detail::printed(this->fine) + ", " +
           std::to_string(int{times});
  }
  void validate(const summary_setting& setting) const {
    if (times < 1)
      throw settings_error("coarse_to_fine: " + std::to_string(int{times}) +
                           " times the selected pages; keep them once or more");
    detail::validate_summary(this->coarse, setting);
    detail::validate_summary(this->fine, setting);
  }
};

}  // namespace freekv
