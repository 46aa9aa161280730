// Bytes of a pipeline's memory, part by part.
#pragma once

#include <cstddef>

namespace freekv {

/// Bytes of each part of a pipeline's memory. From the `slow` resource come `store` and `host_copies`, from
/// `fast` all the rest: `device_store + slots + summaries + codec + state + staging`.
struct memory_bytes {
  std::size_t store = 0;  ///< KV of all tokens of all layers, but for what is in a file or `device_store`
  std::size_t file = 0;   ///< KV of complete pages in the store's file
  /// of `store` or `device_store`: the complete layers' part, which attention reads whole
  std::size_t complete = 0;
  std::size_t slots = 0;      ///< sink, window and selected slots; of an evicting_pipeline what heads keep
  std::size_t summaries = 0;  ///< page summaries, and where attention is completed pages' values
  std::size_t codec = 0;  ///< what a codec keeps of complete pages beside the store, as low_rank_keys does
  std::size_t state = 0;  ///< page tables, selections, previous queries, scratch
  /// KV of prompts, and worths given for them: of an evicting_pipeline until they end; of a device's while
  /// they attend
  std::size_t staging = 0;

  std::size_t device_store = 0;  ///< where fast memory is a device's: KV of complete layers and open pages
  std::size_t host_copies = 0;   ///< of a device's tables and reports what the host keeps, and its uploads

  /// KV and summaries that a device keeps, or would keep, in its own memory: with `complete`, which on the
  /// host comes from `slow`; without `state` and `staging`, though those come from `fast`.
  std::size_t fast_tier() const { return slots + summaries + codec + complete; }
  /// Taken from both resources.
  std::size_t total() const {
    return store + host_copies + device_store + slots + summaries + codec + state + staging;
  }
};

}  // namespace freekv
