// The blocks of one layer's selected slots, which its resident sequences share.
#pragma once

#include <cstdint>
#include <freekv/core/size.hpp>
#include <utility>
#include <vector>

namespace freekv::detail {

/// Blocks from `first` on, given to slot sets as they need them: at most `most` to one, whose selected slots
/// begin in `table[set * most]` and lie in that block and the next ones listed, -1 behind them.
class block_pool {
 public:
  block_pool() = default;
  block_pool(std::int64_t first, std::int64_t capacity, int most, int sets, std::int32_t* table)
      : capacity_(capacity), most_(most), held_(to_size(sets)), table_(table) {
    free_.reserve(to_size(capacity));
    for (std::int64_t block = capacity; block-- > 0;)
      free_.push_back(static_cast<std::int32_t>(first + block));
  }

  std::int64_t capacity() const { return capacity_; }
  std::int64_t available() const { return static_cast<std::int64_t>(free_.size()); }
  /// Blocks that one slot set holds at most.
  int most() const { return most_; }
  int held(int set) const { return held_[to_size(set)]; }

  /// Takes blocks, of which there are enough, or gives the last ones back.
  void hold(int set, int blocks) {
    int& held = held_[to_size(set)];
    std::int32_t* const listed = table_ + static_cast<std::ptrdiff_t>(set) * most_;
    for (; held < blocks; ++held) {
      listed[held] = free_.back();
      free_.pop_back();
    }
    while (held > blocks) free_.push_back(std::exchange(listed[--held], -1));
  }

 private:
  std::int64_t capacity_ = 0;
  int most_ = 0;
  std::vector<int> held_;  // by slot set
  std::vector<std::int32_t> free_;
  std::int32_t* table_ = nullptr;
};

}  // namespace freekv::detail
