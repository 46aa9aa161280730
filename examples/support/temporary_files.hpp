// Files that go when a signal ends the program.
#pragma once

#include <signal.h>

#include <filesystem>

namespace freekv::examples {

/// Signals that end a program from outside (SIGHUP, SIGINT, SIGQUIT, SIGPIPE, SIGTERM, SIGXCPU) end it as
/// before, but remove the listed files first. A write beyond the limit on file sizes fails, where SIGXFSZ
/// would have ended the program. For the start of main; signals that are ignored by then stay so.
void remove_temporary_files_on_signals();

/// Removes the listed files. Async-signal-safe; files created from then on wait for the program's end.
void remove_temporary_files() noexcept;

/// Holds up the removal while a file is created and listed, or put into its place and struck off: no signal's
/// handler runs on this thread, and one on another waits.
class removal_held {
 public:
  removal_held();
  removal_held(const removal_held&) = delete;
  removal_held& operator=(const removal_held&) = delete;
  ~removal_held();

 private:
  sigset_t before_;
};

/// A file's name on the list while this lives. With a thousand names on it the list is full, and further ones
/// are left out.
class temporary_name {
 public:
  temporary_name() = default;
  explicit temporary_name(const std::filesystem::path& path);
  temporary_name(temporary_name&& other) noexcept : place_(other.place_) { other.place_ = none; }
  temporary_name& operator=(temporary_name&& other) noexcept;
  ~temporary_name();

 private:
  static constexpr int none = -1;
  int place_ = none;
};

}  // namespace freekv::examples
