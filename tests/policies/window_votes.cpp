// An eviction that observes, and its definition: SnapKV without its pooling.
#include <algorithm>
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <string>
#include <vector>

#include "../catch.hpp"

namespace {

/// When a prompt ends its last 8 tokens stay, and of the others those with the largest shares of the last 8
/// rows, all query heads' together. What is decoded stays.
struct window_votes {
  using policy_kind = freekv::eviction_kind;
  using hooks = freekv::hook_list<freekv::hook::observe>;
  static constexpr std::string_view name = "window_votes";

  constexpr int unit_tokens() const { return 1; }
  constexpr bool stages_prompt() const { return true; }
  constexpr int observed_rows() const { return 8; }
  constexpr int capacity(const freekv::eviction_limits& most) const {
    return most.budget + most.max_generated;
  }
  constexpr int kept(const freekv::eviction_moment& at) const {
    return at.prompt_ends ? at.budget : freekv::every_token;
  }
  constexpr bool protects(int token, const freekv::eviction_moment& at) const {
    return token >= at.prompt - 8;
  }
  constexpr freekv::group_rule group() const { return freekv::group_rule::each; }
  constexpr bool observes_decoding() const { return false; }
  int observe(const freekv::observed_units& held, const freekv::eviction_moment&, float* worths) const {
    std::fill_n(worths, held.units, 0.0f);
    for (int r = 0; r < held.rows; ++r)
      for (int i = 0; i < held.units; ++i) worths[i] += held.row(r)[i];
    return held.units;
  }
};

}  // namespace

TEST_CASE("an eviction that observes conforms to its definition", "[conforms]") {
  using freekv::testing::doubles;
  const freekv::testing::eviction_definition definition{
      .worths = [](const freekv::testing::observed_tokens& held) {
        doubles worths(held.tokens.size());
        for (const std::vector<doubles>& row : held.rows)
          for (const doubles& shares : row)
            for (std::size_t i = 0; i < worths.size(); ++i) worths[i] += shares[i];
        return worths;
      }};
  CHECK(freekv::testing::conforms<window_votes>(definition) == std::vector<std::string>{});
}
