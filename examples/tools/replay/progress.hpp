// How far a long run is, on a terminal.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string>

#include "fatal_signals.hpp"

namespace freekv::examples {

/// One line on stderr, rewritten in place and gone in the end. Silent for the first two seconds, and always
/// where stderr is no terminal. Noted as well for the line that a fatal signal leaves.
class progress_line {
 public:
  explicit progress_line(std::string program) : program_(std::move(program)) {}
  progress_line(const progress_line&) = delete;
  progress_line& operator=(const progress_line&) = delete;
  ~progress_line() {
    if (shown_) std::fputs("\r\x1b[K", stderr);
  }

  /// What is shown until the next call belongs to `name`, one of several.
  void part(std::string name) {
    for (char& c : name)  // file names may hold escape codes
      if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
    part_ = name + ": ";
  }

  /// `done` of `total` parts of a stage.
  void show(const char* stage, long long done, long long total) {
    char text[240];
    std::snprintf(text, sizeof text, "%s%s %lld of %lld", part_.c_str(), stage, done, total);
    note_detail(text);
    if (!terminal_) return;
    const auto now = clock::now();
    if (now < next_) return;
    next_ = now + std::chrono::milliseconds(200);
    shown_ = true;
    std::fprintf(stderr, "\r\x1b[K%s: %s", program_.c_str(), text);
    std::fflush(stderr);
  }

 private:
  using clock = std::chrono::steady_clock;
  std::string program_, part_;
  bool terminal_ = ::isatty(STDERR_FILENO) == 1, shown_ = false;
  clock::time_point next_ = clock::now() + std::chrono::seconds(2);
};

}  // namespace freekv::examples
