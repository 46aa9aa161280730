// Pages' values by the last rows of a prompt, on the host.
#pragma once

#include <algorithm>
#include <freekv/algorithms/page_value.hpp>
#include <freekv/backend/host/attend.hpp>

namespace freekv::host {

/// Gives each page of one KV head its value by the last `rows` rows of a prompt's entry, at most all: the
/// mean of the page's values by what each row and query head gives them of its softmax over all it attends
/// to. `job` attends to everything. Throws store_error.
template <class State, class Policies>
void weigh_pages(isa set, const attention_job<State, Policies>& job, int head, int rows, const workspace& w) {
  constexpr int d = State::head_dim;
  const State& s = job.s;
  const int group = s.heads.group(), first = job.entry.tokens - rows;
  const auto query_of = [&](int row) { return w.observed_queries + std::ptrdiff_t{row - first} * group * d; };
  const auto total_of = [&](int row) { return w.observed_totals + std::ptrdiff_t{row - first} * group; };
  for (int row = first; row < job.entry.tokens; ++row)
    job.begin(set, row, head, query_of(row), {total_of(row), nullptr});
  // Calls `use(row, tokens of the page that the row attends to, their rows)` page by page.
  const auto for_pages = [&](const auto& use, const auto& end_of_page) {
    job.for_all(job.entry.tokens - 1, head, w, [&](const page_range& range, const auto& slice) {
      for (int row = first; row < job.entry.tokens; ++row) {
        const int tokens =
            std::min(range.tokens, job.entry.before + row + 1 - range.page * s.page.tokens - range.first);
        if (tokens > 0) use(row, tokens, slice);
      }
      end_of_page(range.page);
    });
  };
  for_pages(
      [&](int row, int tokens, const auto& slice) {
        attend_slice<d>(set, {query_of(row), group, d}, as_const(slice), tokens, {total_of(row), nullptr},
                        w.rows);
      },
      [](int) {});
  for (int row = first; s.sink_logits != nullptr && row < job.entry.tokens; ++row)
    for (int g = 0; g < group; ++g) total_of(row)[g].add(s.sink_logits[head * group + g]);

  std::fill_n(w.page_value, d, 0.0f);
  float weight = 0.0f;
  const attention_part of_page{w.part_log_sum, w.weighted};
  for_pages(
      [&](int row, int tokens, const auto& slice) {
        clear_part<d>(set, of_page, group);
        attend_slice<d>(set, {query_of(row), group, d}, as_const(slice), tokens, of_page, w.rows);
        for (int g = 0; g < group; ++g) {
          const float share = total_of(row)[g].share(of_page.log_sum[g].max);
          if (!(share > 0.0f)) continue;  // NaN, too: such a query head gives nothing
          weight += share * of_page.log_sum[g].sum;
          for (int i = 0; i < d; ++i) w.page_value[i] += share * of_page.weighted[g * d + i];
        }
      },
      [&](int page) {
        if (weight > 0.0f) {
          for (int i = 0; i < d; ++i) w.page_value[i] /= weight;
          freekv::detail::write_page_value(w.page_value, d, s.page_value(job.entry.sequence, head, page));
        }
        std::fill_n(w.page_value, d, 0.0f);
        weight = 0.0f;
      });
}

}  // namespace freekv::host
