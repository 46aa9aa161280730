// A stream of bytes in blocks, each followed by a checksum: nothing of a block is handed out before it has
// been checked.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <freekv/core/error.hpp>
#include <span>
#include <string>
#include <utility>

namespace freekv::detail {

/// A checksum of bytes behind others whose checksum is `before`. It is another for certain where the bytes
/// differ within one group of 8 at a multiple of 8, and but for one case in 2^64 otherwise. Not for bytes
/// that somebody forges.
inline std::uint64_t checksum(std::span<const std::byte> bytes, std::uint64_t before = 0) {
  constexpr std::uint64_t odd = 0x9e3779b97f4a7c15;
  std::uint64_t sum = before;
  const auto add = [&sum](std::uint64_t group) {  // each step is one to one, in `sum` as in `group`
    sum = (sum ^ group) * odd;
    sum ^= sum >> 32;
  };
  add(bytes.size());
  std::size_t at = 0;
  std::uint64_t group = 0;
  for (; at + sizeof group <= bytes.size(); at += sizeof group) {
    std::memcpy(&group, bytes.data() + at, sizeof group);
    add(group);
  }
  group = 0;
  std::memcpy(&group, bytes.data() + at, bytes.size() - at);
  add(group);
  return sum;
}

/// Blocks of a stream: all of `bytes`, but for the last one, and a checksum behind each, which goes on from
/// the one before.
struct checked_blocks {
  static constexpr std::size_t bytes = std::size_t{1} << 18;
  static constexpr std::size_t room = bytes + sizeof(std::uint64_t);

  /// Bytes of a stream of so many, with the checksums.
  static constexpr std::uint64_t stored(std::uint64_t count) {
    return count + (count + bytes - 1) / bytes * sizeof(std::uint64_t);
  }
};

/// Writes such a stream by `write(std::span<const std::byte>)`. `memory`: has `copy(to, from, bytes)`, which
/// may be queued, and `finish()`, which waits for it.
template <class Write, class Memory>
class checked_writer {
 public:
  /// `block`: checked_blocks::room bytes. `before`: a checksum of what precedes the stream.
  checked_writer(const Write& write, Memory& memory, std::byte* block, std::uint64_t before)
      : write_(write), memory_(memory), block_(block), sum_(before) {}

  void put(const std::byte* from, std::size_t bytes) {
    while (bytes > 0) {
      const std::size_t part = std::min(bytes, checked_blocks::bytes - used_);
      memory_.copy(block_ + used_, from, part);
      used_ += part, from += part, bytes -= part;
      if (used_ == checked_blocks::bytes) end();
    }
  }
  /// Writes what is left; behind the last `put`.
  void end() {
    if (used_ == 0) return;
    memory_.finish();
    sum_ = checksum({block_, used_}, sum_);
    std::memcpy(block_ + used_, &sum_, sizeof sum_);
    write_(std::span<const std::byte>(block_, used_ + sizeof sum_));
    used_ = 0;
  }

 private:
  const Write& write_;
  Memory& memory_;
  std::byte* block_;
  std::uint64_t sum_;
  std::size_t used_ = 0;
};

/// Reads such a stream by `read(std::span<std::byte>)`, which fills the span or throws.
template <class Read, class Memory>
class checked_reader {
 public:
  /// `bytes`: of the stream, without checksums. `name`: what it is called in errors.
  checked_reader(const Read& read, Memory& memory, std::byte* block, std::uint64_t before,
                 std::uint64_t bytes, std::string name)
      : read_(read), memory_(memory), block_(block), sum_(before), left_(bytes), name_(std::move(name)) {}

  /// Throws prefix_error where a block is not what was written.
  void take(std::byte* to, std::size_t bytes) {
    while (bytes > 0) {
      if (at_ == used_) next();
      const std::size_t part = std::min(bytes, used_ - at_);
      memory_.copy(to, block_ + at_, part);
      at_ += part, to += part, bytes -= part;
    }
  }

 private:
  void next() {
    memory_.finish();
    used_ = std::min<std::size_t>(left_, checked_blocks::bytes);
    at_ = 0;
    left_ -= used_;
    read_(std::span<std::byte>(block_, used_ + sizeof sum_));
    sum_ = checksum({block_, used_}, sum_);
    if (std::memcmp(&sum_, block_ + used_, sizeof sum_) != 0)
      throw prefix_error(name_ + " is damaged: " + std::to_string(used_) + " bytes, with " +
                         std::to_string(left_) +
                         " behind them, are not what was written; remove it, and save the prefix again");
  }

  const Read& read_;
  Memory& memory_;
  std::byte* block_;
  std::uint64_t sum_;
  std::uint64_t left_;
  std::string name_;
  std::size_t used_ = 0, at_ = 0;
};

}  // namespace freekv::detail
