// Typed exceptions. Each message is a sentence with the numbers and what would help. A call that throws
// settings_error, usage_error or pool_exhausted has changed no sequence; one that throws store_error may be
// repeated. (docs/contract.md, 11.5)
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

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

/// A pool of fixed capacity (pages, sequences, slots, a sequence's tokens) cannot give what a call needs;
/// thrown before anything is queued.
struct pool_exhausted : error {
  [[gnu::cold]] pool_exhausted(
      const std::string& pool, long pool_capacity, long in_use, const std::string& who, long more,
      const std::string& remedy = "release a sequence or raise the capacity in the settings")
      : error(pool + " exhausted: " + std::to_string(in_use) + " of " + std::to_string(pool_capacity) +
              " in use, " + who + " needs " + std::to_string(more) + " more; " + remedy),
        capacity(pool_capacity),
        used(in_use),
        needed(more) {}
  long capacity, used, needed;
};

/// A saved prefix that is damaged, or that other settings, another model or another version of its format
/// have made. Nothing has changed.
struct prefix_error : error {
  using error::error;
};

/// Threads that the system does not give; those that it gave have ended again.
struct thread_error : error {
  /// `of`: whose threads they are, `wanted` and `started` both with the calling thread where that is one of
  /// them.
  [[gnu::cold]] thread_error(const std::string& of, int threads_wanted, int threads_started,
                             const std::error_code& cause, const std::string& remedy)
      : error(
            of + " wants " + std::to_string(threads_wanted) + (threads_wanted == 1 ? " thread" : " threads") +
            ", and the system gives " + std::to_string(threads_started) + " (" + cause.message() + "); " +
            remedy +
            ", or raise the limit on processes (ulimit -u, a container's pids limit) or memory (ulimit -v)"),
        wanted(threads_wanted),
        started(threads_started) {}
  int wanted, started;
};

/// Operation of a file.
enum class store_operation : std::uint8_t { create, reserve, read, write, open };

/// Fault of a file, a store's or one that a prefix is saved in: what it was asked for, and what went wrong.
struct store_fault {
  std::string file;
  store_operation operation = store_operation::read;
  std::uint64_t offset = 0, bytes = 0;  ///< of the file; both 0 for `create` and `open`
  int system_error = 0;                 ///< errno; 0 where the file ended early
  std::string detail;                   ///< beside the system's own words, or instead of them
  std::string remedy;
  std::string sequence;  ///< whose tokens it was about, where that is known
  const char* kind = "store file";
};

/// A file that cannot be created, reserved, opened, read or written. What a read left in the caller's memory,
/// or a write in the file, is unspecified within the ranges that were asked for; everything else is as
/// before, and the same call may be made again.
struct store_error : error, store_fault {
  explicit store_error(store_fault fault) : error(sentence(fault)), store_fault(std::move(fault)) {}

  /// This error, told of a sequence.
  [[gnu::cold]] store_error with_sequence(std::string name) const {
    store_fault fault = *this;
    fault.sequence = std::move(name);
    return store_error(std::move(fault));
  }

 private:
  [[gnu::cold]] static std::string sentence(const store_fault& fault) {
    std::string text = fault.sequence.empty() ? "" : fault.sequence + ": ";
    text += std::string(fault.kind) + " " + fault.file + ": ";
    const std::string bytes = std::to_string(fault.bytes) + " bytes";
    const std::string place = " at offset " + std::to_string(fault.offset);
    switch (fault.operation) {
      case store_operation::create:
        text += "creating it";
        break;
      case store_operation::open:
        text += "opening it";
        break;
      case store_operation::reserve:
        text += "reserving " + bytes;
        break;
      case store_operation::read:
        text += "reading " + bytes + place;
        break;
      case store_operation::write:
        text += "writing " + bytes + place;
        break;
    }
    text += " failed: ";
    if (fault.system_error != 0) text += std::generic_category().message(fault.system_error);
    if (fault.system_error != 0 && !fault.detail.empty()) text += ", ";
    return text + fault.detail + (fault.remedy.empty() ? "" : "; " + fault.remedy);
  }
};

}  // namespace freekv
