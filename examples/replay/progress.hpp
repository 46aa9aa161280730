// How far a long run is, on a terminal.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string>

namespace freekv::examples {

/// One line on stderr, rewritten in place and gone in the end. Silent for the first two seconds, and always
/// where stderr is no terminal.
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
    if (!terminal_) return;
    const auto now = clock::now();
    if (now < next_) return;
    next_ = now + std::chrono::milliseconds(200);
    shown_ = true;
    std::fprintf(stderr, "\r\x1b[K%s: %s%s %lld of %lld", program_.c_str(), part_.c_str(), stage, done,
                 total);
    std::fflush(stderr);
  }

 private:
  using clock = std::chrono::steady_clock;
  std::string program_, part_;
  bool terminal_ = ::isatty(STDERR_FILENO) == 1, shown_ = false;
  clock::time_point next_ = clock::now() + std::chrono::seconds(2);
};

}  // namespace freekv::examples
