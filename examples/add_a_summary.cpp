// A summary of one's own, end to end: the struct, its definition in float64, the proof, and a pipeline that
// has it.
#include <algorithm>
#include <cstdio>
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <string>

namespace fk = freekv;

/// A unit's first and last key; the score is the larger scaled product with one of them.
struct end_keys {
  using policy_kind = fk::summary_kind;
  static constexpr std::string_view name = "end_keys";
  FREEKV_HD constexpr int width(fk::kv_extent unit) const { return 2 * unit.head_dim; }  // numbers a unit
  template <fk::team T>
  FREEKV_HD void summarise(T team, const fk::unit_keys& keys, float* numbers) const {
    const int d = keys.unit.head_dim;
    for (int i = 0; i < d; i += T::width) {
      team.store(numbers + i, team.load(keys.row(0) + i));
      team.store(numbers + d + i, team.load(keys.row(keys.unit.tokens - 1) + i));
    }
  }
  template <fk::team T>
  FREEKV_HD float score(T team, const fk::unit_query& query, const float* numbers) const {
    typename T::pack first(0.0f), last(0.0f);
    for (int i = 0, d = query.unit.head_dim; i < d; i += T::width) {
      first = first + team.load(query.data + i) * team.load(numbers + i);
      last = last + team.load(query.data + i) * team.load(numbers + d + i);
    }
    return query.scale * fk::scalar_team{}.maximum(team.sum(first), team.sum(last));
  }
};

/// `end_keys` in float64, from its definition.
const fk::testing::summary_definition definition{
    .numbers =
        [](const auto& keys, fk::kv_extent unit) {
          fk::testing::doubles numbers(keys.begin(), keys.begin() + unit.head_dim);
          numbers.insert(numbers.end(), keys.end() - unit.head_dim, keys.end());
          return numbers;
        },
    .score =
        [](const auto& query, const auto& numbers, fk::kv_extent, double scale) {
          double first = 0.0, last = 0.0;
          for (std::size_t i = 0, d = query.size(); i < d; ++i) {
            first += query[i] * numbers[i];
            last += query[i] * numbers[d + i];
          }
          return scale * std::max(first, last);
        }};

int main() {
  const auto wrong = fk::testing::conforms<end_keys>(definition);
  for (const std::string& sentence : wrong) std::puts(sentence.c_str());

  using pipeline = fk::methods::freekv_paper::pipeline<fk::kv_shape<fk::half, 64>, fk::page_size<16>>;
  fk::host_backend backend;
  pipeline::with<end_keys> retrieval(
      {.model = {.query_heads = 8, .kv_heads = 2}, .capacity = {.max_tokens = 4096}}, backend);
  std::puts(retrieval.name().c_str());
  return wrong.empty() ? 0 : 1;
}
