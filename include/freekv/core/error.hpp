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

/// A fixed-capacity pool cannot hold what a step will complete; thrown before anything is queued.
struct pool_exhausted : error {
  pool_exhausted(const std::string& pool, long capacity, long used, const std::string& who, long needed)
      : error(pool + " exhausted: " + std::to_string(used) + " of " + std::to_string(capacity) + " in use, " +
              who + " needs " + std::to_string(needed) +
              " more; release a sequence or raise the capacity in the settings"),
        capacity(capacity),
        used(used),
        needed(needed) {}
  long capacity, used, needed;
};

}  // namespace freekv
