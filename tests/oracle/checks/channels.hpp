// key_channels.
#pragma once

#include "../channels.hpp"
#include "by_hand.hpp"

TEST_CASE("channels are kept whose part of the scores is largest, and others read back as 0") {
  using rows = std::vector<doubles>;
  using bools = std::vector<bool>;
  // Norms of columns: 5, 1, 0, 2 of queries and 1, 2, 9, 5 of keys; products 5, 2, 0, 10.
  const rows queries{{3, 1, 0, 0}, {-4, 0, 0, 2}}, keys{{0, 2, 9, 3}, {-1, 0, 0, -4}};
  CHECK(oracle::kept_channels(queries, keys, 4, 1) == bools{false, false, false, true});
  CHECK(oracle::kept_channels(queries, keys, 4, 2) == bools{true, false, false, true});
  CHECK(oracle::kept_channels(queries, keys, 4, 3) == bools{true, true, false, true});
  // Keys alone would keep channel 2, queries alone channel 0.
  CHECK(oracle::kept_channels(rows(1, doubles(4, 1.0)), keys, 4, 1) == bools{false, false, true, false});
  CHECK(oracle::kept_channels(queries, rows(1, doubles(4, 1.0)), 4, 1) == bools{true, false, false, false});
  // Of channels alike the lower, also where there is nothing to go by.
  CHECK(oracle::kept_channels(rows(1, doubles(4, 1.0)), rows(1, doubles(4, -2.0)), 4, 2) ==
        bools{true, true, false, false});
  CHECK(oracle::kept_channels({}, {}, 4, 3) == bools{true, true, true, false});
  // A row with a NaN or an infinity counts for no channel.
  const rows odd{
      {0, 2, 9, 3}, {-1, 0, 0, -4}, {100, oracle::not_a_number, 0, 0}, {0, 0, 0, oracle::infinity}};
  CHECK(oracle::kept_channels(queries, odd, 4, 1) == bools{false, false, false, true});

  CHECK(oracle::thinned({1, 2, 3, 4, -5, 6, oracle::infinity, 8}, {true, false, false, true}) ==
        doubles{1, 0, 0, 4, -5, 0, 0, 8});
}
