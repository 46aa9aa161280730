// An eviction that merges, and its definition: TOVA whose tokens merge by equal weights. exact_merge is the
// same with other weights.
#include <cmath>
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <iterator>
#include <string>
#include <vector>

#include "../catch.hpp"

namespace {

/// The token with the least of the last row merges into the one whose key is most like its own: their keys
/// and values become the mean, which weighs as many as they are.
struct merge_nearest : freekv::tova {
  using hooks = freekv::hook_list<freekv::hook::merge>;
  static constexpr std::string_view name = "merge_nearest";
  struct head_memory {};

  constexpr freekv::merge_rule merge_by() const { return freekv::merge_rule::as_many; }
  void merge(const freekv::merging_tokens& of, const freekv::eviction_moment&, head_memory&,
             freekv::merge_fate* fates) const {
    for (int i = of.staying; i < of.end(); ++i) fates[i] = {.into = of.nearest(i), .weight = 1.0};
  }
};

double cosine(const freekv::testing::doubles& a, const freekv::testing::doubles& b) {
  double product = 0.0, of_a = 0.0, of_b = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) product += a[i] * b[i], of_a += a[i] * a[i], of_b += b[i] * b[i];
  return product / std::sqrt(of_a * of_b);
}

}  // namespace

TEST_CASE("evictions that merge conform to their definitions", "[conforms]") {
  freekv::testing::eviction_definition definition{
      .worth = [](const freekv::testing::attended_rows& seen,
                  int token) { return seen.shares.back()[token]; },
      .fates =
          [](const std::vector<freekv::testing::parted_tokens>& so_far) {
            const freekv::testing::parted_tokens& of = so_far.back();
            std::vector<freekv::merge_fate> fates(of.tokens.size());  // of weight 1
            for (int i = of.staying; i < std::ssize(fates); ++i) {
              double most = -2.0;
              for (int into = 0; into < of.staying; ++into)
                if (const double like = cosine(of.keys[i], of.keys[into]); like > most)
                  most = like, fates[i].into = into;
            }
            return fates;
          },
      .merge_by = freekv::merge_rule::as_many};
  CHECK(freekv::testing::conforms<merge_nearest>(definition) == std::vector<std::string>{});
  definition.merge_by = freekv::merge_rule::as_last_row;
  CHECK(freekv::testing::conforms<freekv::exact_merge>(definition) == std::vector<std::string>{});
}
