// Complete pages as a codec leaves them: in memory or in a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <freekv/core/ids.hpp>
#include <freekv/core/size.hpp>
#include <freekv/storage/file_store.hpp>
#include <span>

namespace freekv::detail {

/// One layer's encoded pages. A slice is one KV head's keys and values of a page; those of a page lie side by
/// side, so that a page is written in one piece. Trivially copyable.
struct slice_store {
  std::byte* data = nullptr;   // in memory: (store page, kv head, slice_bytes)
  slice_file* file = nullptr;  // or the same in a file, from `first` on
  std::uint64_t first = 0;
  std::size_t slice_bytes = 0;  // with what alignment adds
  int kv_heads = 0;

  FREEKV_HD constexpr std::uint64_t offset(store_page_id store_page, int head) const {
    return (static_cast<std::uint64_t>(number_of(store_page)) * static_cast<std::uint64_t>(kv_heads) +
            static_cast<std::uint64_t>(head)) *
           slice_bytes;
  }

  /// Writes the slices of all heads of a page. Throws store_error.
  void write_page(store_page_id store_page, const std::byte* slices) const {
    const std::size_t bytes = to_size(kv_heads) * slice_bytes;
    if (file == nullptr) {
      std::memcpy(data + offset(store_page, 0), slices, bytes);
    } else {
      const file_write page{first + offset(store_page, 0), slices, bytes};
      file->write({&page, 1});
    }
  }

  /// Bytes of the slice of `head`, where they lie; of a store in memory.
  FREEKV_HD std::byte* in_memory(store_page_id store_page, int head) const {
    return data + offset(store_page, head);
  }
  /// A read of the slice of `head` to `to`; of a store in a file.
  file_read read_of(store_page_id store_page, int head, std::byte* to) const {
    return {first + offset(store_page, head), to, slice_bytes};
  }
};

}  // namespace freekv::detail
