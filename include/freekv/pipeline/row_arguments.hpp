// Rows and outputs that a caller hands to a step: checked, and as stages take them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <freekv/core/element.hpp>
#include <freekv/core/error.hpp>
#include <freekv/core/shape.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/stage_arguments.hpp>
#include <freekv/pipeline/step_input.hpp>
#include <span>
#include <string>

namespace freekv::detail {

/// Checks that `given` numbers are `rows` rows of `row` numbers, or more, as a padded batch has: those behind
/// are neither read nor written. Throws usage_error.
inline void expect_numbers(const char* what, std::size_t given, int rows, std::int64_t row) {
  if (given < to_size(rows) * to_size(row))
    throw usage_error(std::string(what) + ": " + std::to_string(given) + " numbers for " +
                      std::to_string(rows) + " rows of " + std::to_string(row));
}

/// Checks the same of rows that begin `stride` numbers apart, or with 0 lie one behind the other. Returns how
/// far apart they begin. Throws usage_error.
inline std::int64_t expect_rows(const char* what, std::size_t given, int rows, std::int64_t row,
                                std::int64_t stride) {
  if (stride == 0) {
    expect_numbers(what, given, rows, row);
    return row;
  }
  if (stride < row)
    throw usage_error(std::string(what) + ": a stride of " + std::to_string(stride) + " for rows of " +
                      std::to_string(row) +
                      " numbers; give as many or more, or 0 where they lie one behind the other");
  // By division, as a stride that means nothing may be too large to multiply.
  const auto behind = static_cast<std::int64_t>(given) - row;  // the first row
  if (rows > 0 && (behind < 0 || (rows > 1 && stride > behind / (rows - 1))))
    throw usage_error(std::string(what) + ": " + std::to_string(given) + " numbers for " +
                      std::to_string(rows) + " rows of " + std::to_string(row) + ", " +
                      std::to_string(stride) + " apart");
  return stride;
}

/// Refuses worths of rows for `who`, which takes none. Throws usage_error.
[[noreturn, gnu::cold]] inline void refuse_worths(const std::string& who, std::size_t given) {
  throw usage_error("append: " + who + " takes no worths, and " + std::to_string(given) +
                    " are given; leave them out, or take an evicting_pipeline whose policy lists "
                    "hook::worths");
}

/// Refuses queries to select by for `who`, because it `does`. Throws usage_error.
[[noreturn, gnu::cold]] inline void refuse_selecting(const std::string& who, const char* does) {
  throw usage_error("append: " + who + " takes no other queries to select by, as it " + does +
                    "; leave `selecting` out");
}

/// Rows that a step has, and heads of a row.
struct row_shape {
  int rows = 0;
  head_counts heads;
  int head_dim = 0;

  std::int64_t kv_numbers() const { return std::int64_t{heads.kv} * head_dim; }
  std::int64_t query_numbers() const { return std::int64_t{heads.query} * head_dim; }
};

/// Rows as stages take them; queries where they are needed, or given. Throws usage_error.
template <class In, class Query>
step_rows<In> checked_rows(const kv_rows<In, Query>& rows, const row_shape& of, bool needs_queries) {
  static_assert(query_element<Query>, "append takes queries of float, half or bfloat16");
  step_rows<In> given{rows.keys.data(), rows.values.data()};
  given.key_stride =
      expect_rows("append: keys", rows.keys.size(), of.rows, of.kv_numbers(), rows.strides.keys);
  given.value_stride =
      expect_rows("append: values", rows.values.size(), of.rows, of.kv_numbers(), rows.strides.values);
  if (needs_queries || !rows.queries.empty())
    given.queries = {rows.queries.data(),
                     expect_rows("append: queries", rows.queries.size(), of.rows, of.query_numbers(),
                                 rows.strides.queries),
                     type_of_element<Query>};
  given.selecting = given.queries;
  if (!rows.selecting.empty())
    given.selecting = {rows.selecting.data(),
                       expect_rows("append: selecting queries", rows.selecting.size(), of.rows,
                                   of.query_numbers(), rows.strides.selecting),
                       type_of_element<Query>};
  return given;
}

/// Outputs as stages take them, rows `stride` numbers apart, and log-sum-exps, of which a nat is written as
/// `per_nat`. Throws usage_error.
template <class Out>
attention_output checked_output(std::span<Out> out, std::int64_t stride, std::span<float> lse, float per_nat,
                                const row_shape& of) {
  static_assert(query_element<Out>, "outputs are float, half or bfloat16");
  if (!lse.empty()) expect_numbers("log-sum-exp", lse.size(), of.rows, of.heads.query);
  return {out.data(), lse.empty() ? nullptr : lse.data(), per_nat,
          expect_rows("attention output", out.size(), of.rows, of.query_numbers(), stride),
          type_of_element<Out>};
}

}  // namespace freekv::detail
