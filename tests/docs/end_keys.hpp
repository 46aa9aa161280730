// A page's first and last key.
#pragma once

#include <freekv/policies/mean_summaries.hpp>

namespace freekv {

/// The page's first and last key; the score is the larger scaled product with one of them. Kept in the key's type.
struct end_keys {
  using policy_kind = summary_kind;
  using hooks = hook_list<hook::stored>;
  static constexpr std::string_view name = "end_keys";
  template <class Key>
  using stored = Key;

  FREEKV_HD constexpr int width(page_geometry page) const { return 2 * page.head_dim; }  // numbers a page

  template <team T>
  FREEKV_HD void summarise(T team, const unit_keys& keys, float* numbers) const {
    const int d = keys.page.head_dim;
    for (int i = 0; i < d; i += T::width) {
      team.store(numbers + i, team.load(keys.row(0) + i));
      team.store(numbers + d + i, team.load(keys.row(keys.page.tokens - 1) + i));
    }
  }
  template <team T>
  FREEKV_HD float score(T team, const unit_query& query, const float* numbers) const {
    const int d = query.page.head_dim;
    const float first = detail::inner_product(team, query.data, numbers, d);
    const float last = detail::inner_product(team, query.data, numbers + d, d);
    return query.scale * scalar_team{}.maximum(first, last);
  }
};

static_assert(summary_policy<end_keys>);

}  // namespace freekv
