// Typed exceptions. Each message is a sentence with the numbers and what would help; a call that throws has
// changed nothing.
#pragma once

#include <stdexcept>
#include <string>

namespace freekv {

/// Base of everything FreeKV throws itself.
struct error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Settings that contradict each other or a policy; thrown before anything is allocated.
struct settings_error : error {
  using error::error;
};

/// Calls in an order that has no meaning: attend before append, an unknown sequence, a layer twice.
struct usage_error : error {
  using error::error;
};

/// A pool of fixed capacity (pages, sequences, slots, a sequence's tokens) cannot give what a call needs; thrown before
/// anything is queued.
struct pool_exhausted : error {
  pool_exhausted(const std::string& pool, long pool_capacity, long in_use, const std::string& who, long more,
                 const std::string& remedy = "release a sequence or raise the capacity in the settings")
      : error(pool + " exhausted: " + std::to_string(in_use) + " of " + std::to_string(pool_capacity) +
              " in use, " + who + " needs " + std::to_string(more) + " more; " + remedy),
        capacity(pool_capacity),
        used(in_use),
        needed(more) {}
  long capacity, used, needed;
};

}  // namespace freekv
