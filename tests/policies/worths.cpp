// Policies that take worths are their definitions: one of pages, with a prompt that is cut and one that is in
// the slots at once, and one that merges.
#include <algorithm>
#include <cmath>
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "../catch.hpp"
#include "../unit/given_pages.hpp"

TEST_CASE("worths are given for each token of a page", "[conforms]") {
  const freekv::testing::eviction_definition definition{
      .worth = [](const freekv::testing::attended_rows& seen, int first) {
        const int end = std::min(first + tests::given_pages::page, static_cast<int>(seen.worths.size()));
        double most = -HUGE_VAL;
        for (int token = first; token < end; ++token) most = std::max(most, seen.worths[token]);
        return most;
      }};
  for (const bool keeps_prompt : {false, true})
    CHECK(freekv::testing::conforms(definition, tests::given_pages{keeps_prompt}) ==
          std::vector<std::string>{});
}

namespace {

/// trim_kv whose tokens merge into the first that stays, which then weighs as many as they are.
struct trim_kv_into_first : freekv::trim_kv {
  using hooks = freekv::hook_list<freekv::hook::merge, freekv::hook::worths>;
  static constexpr std::string_view name = "trim_kv_into_first";
  struct head_memory {};
  constexpr freekv::merge_rule merge_by() const { return freekv::merge_rule::as_many; }
  void merge(const freekv::merging_tokens& of, const freekv::eviction_moment&, head_memory&,
             freekv::merge_fate* fates) const {
    for (int i = of.staying; i < of.end(); ++i) fates[i].into = 0;
  }
};

}  // namespace

TEST_CASE("a policy that merges may take worths", "[conforms]") {
  const freekv::testing::eviction_definition definition{
      .worth =
          [](const freekv::testing::attended_rows& seen, int token) {
            const double beta = std::min(seen.worths[token], 1.0);
            const auto age = static_cast<double>(seen.shares.size()) - 1 - token;
            return beta > 0 ? age * std::log(beta) : -HUGE_VAL;
          },
      .fates =
          [](const std::vector<freekv::testing::parted_tokens>& so_far) {
            std::vector<freekv::merge_fate> fates(so_far.back().tokens.size());
            for (std::size_t i = freekv::to_size(so_far.back().staying); i < fates.size(); ++i)
              fates[i].into = 0;
            return fates;
          },
      .merge_by = freekv::merge_rule::as_many};
  CHECK(freekv::testing::conforms<trim_kv_into_first>(definition) == std::vector<std::string>{});
}
