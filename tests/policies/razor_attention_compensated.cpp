// razor_attention_compensated, whose heads all forget, is its definition.
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <string>
#include <vector>

#include "../catch.hpp"

TEST_CASE("razor_attention_compensated conforms to its definition", "[conforms]") {
  constexpr int sink = 4;
  const freekv::testing::eviction_definition definition{
      .worth = [](const freekv::testing::attended_rows&, int token) { return double(token); },
      .fates =
          [](const std::vector<freekv::testing::parted_tokens>& so_far) {
            std::vector<freekv::merge_fate> fates(so_far.back().tokens.size());
            int merged = 0;  // before, with the one that they are in
            for (const freekv::testing::parted_tokens& of : so_far)
              merged += &of == &so_far.back() ? 1 : static_cast<int>(of.tokens.size()) - of.staying;
            for (int i = 0; i < static_cast<int>(fates.size()); ++i) {
              if (so_far.back().tokens[freekv::to_size(i)] == sink) fates[freekv::to_size(i)].weight = merged;
              if (i >= so_far.back().staying) fates[freekv::to_size(i)].into = sink;
            }
            return fates;
          },
      .merge_by = freekv::merge_rule::as_many};
  CHECK(freekv::testing::conforms<freekv::razor_attention_compensated>(definition) ==
        std::vector<std::string>{});
}
