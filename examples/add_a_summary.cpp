// A summary of one's own, end to end: the struct, its definition in float64, the proof, and a pipeline that
// has it.
#include <algorithm>
#include <cstdio>
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <string>

namespace fk = freekv;

/// The mean keys of a unit's two halves; the score is the larger scaled product with one of them.
struct half_means {
  using policy_kind = fk::summary_kind;
  static constexpr std::string_view name = "half_means";
  FREEKV_HD constexpr int width(fk::kv_extent unit) const { return 2 * unit.head_dim; }  // numbers a unit
  template <fk::team T>
  FREEKV_HD void summarise(T team, const fk::unit_keys& keys, float* numbers) const {
    const int d = keys.unit.head_dim, each = (keys.unit.tokens + 1) / 2;  // one token is both halves
    const typename T::pack share(1.0f / static_cast<float>(each));
    for (int i = 0; i < d; i += T::width) {
      typename T::pack first(0.0f), second(0.0f);
      for (int t = 0; t < each; ++t) {
        first = first + team.load(keys.row(t) + i);
        second = second + team.load(keys.row(keys.unit.tokens - each + t) + i);
      }
      team.store(numbers + i, first * share);
      team.store(numbers + d + i, second * share);
    }
  }
  template <fk::team T>
  FREEKV_HD float score(T team, const fk::unit_query& query, const float* numbers) const {
    typename T::pack first(0.0f), second(0.0f);
    for (int i = 0, d = query.unit.head_dim; i < d; i += T::width) {
      first = first + team.load(query.data + i) * team.load(numbers + i);
      second = second + team.load(query.data + i) * team.load(numbers + d + i);
    }
    return query.scale * fk::scalar_team{}.maximum(team.sum(first), team.sum(second));
  }
};

/// `half_means` in float64, from its definition.
const fk::testing::summary_definition definition{
    .numbers =
        [](const auto& keys, fk::kv_extent unit) {
          const std::size_t d = static_cast<std::size_t>(unit.head_dim), each = (keys.size() / d + 1) / 2 * d;
          fk::testing::doubles numbers(2 * d);
          for (std::size_t i = 0; i < each; ++i) {
            const double share = static_cast<double>(d) / static_cast<double>(each);
            numbers[i % d] += keys[i] * share;
            numbers[d + i % d] += keys[keys.size() - each + i] * share;
          }
          return numbers;
        },
    .score =
        [](const auto& query, const auto& numbers, fk::kv_extent, double scale) {
          double first = 0.0, second = 0.0;
          for (std::size_t i = 0, d = query.size(); i < d; ++i) {
            first += query[i] * numbers[i];
            second += query[i] * numbers[d + i];
          }
          return scale * std::max(first, second);
        }};

int main() {
  const auto wrong = fk::testing::conforms<half_means>(definition);
  for (const std::string& sentence : wrong) std::puts(sentence.c_str());

  using pipeline = fk::methods::freekv_paper::pipeline<fk::kv_shape<fk::half, 64>, fk::page_size<16>>;
  fk::host_backend backend;
  pipeline::with<half_means> retrieval(
      {.model = {.query_heads = 8, .kv_heads = 2}, .capacity = {.max_tokens = 4096}}, backend);
  std::puts(retrieval.name().c_str());
  return wrong.empty() ? 0 : 1;
}
