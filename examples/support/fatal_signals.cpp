#include "fatal_signals.hpp"

#include <signal.h>
#include <unistd.h>
#include <freekv/core/size.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <mutex>

namespace freekv::examples {

namespace {

/// A text that a signal handler may read while another thread replaces it: of two buffers one is read, the
/// other written.
template <std::size_t Most>
class noted_text {
 public:
  /// One writer at a time.
  void set(std::string_view text) noexcept {
    const int next = 1 - current_.load(std::memory_order_relaxed);
    buffer& to = buffers_[next];
    const std::size_t size = std::min(text.size(), to.size() - 1);
    for (std::size_t i = 0; i < size;
         ++i)  // names of files and variants may hold line breaks and escape codes
      to[i] = static_cast<unsigned char>(text[i]) < 0x20 || text[i] == 0x7f ? ' ' : text[i];
    to[size] = '\0';
    current_.store(next, std::memory_order_release);
  }
  const char* get() const noexcept { return buffers_[current_.load(std::memory_order_acquire)].data(); }

 private:
  using buffer = std::array<char, Most + 1>;  // the last byte is always 0
  std::array<buffer, 2> buffers_{};
  std::atomic<int> current_ = 0;
};
static_assert(
    std::atomic<int>::is_always_lock_free);  // else a handler might wait for the thread that it interrupts

constinit noted_text<240> program_name, stage_name, detail_name;
constinit noted_text<1200> remark_text;
std::mutex writing;
bool on_terminal = false;

struct fatal {
  int number;
  const char* text;
};
constexpr fatal all_fatal[] = {{SIGSEGV, "segmentation fault (SIGSEGV)"},
                               {SIGILL, "illegal instruction (SIGILL)"},
                               {SIGBUS, "bus error (SIGBUS)"},
                               {SIGFPE, "arithmetic exception (SIGFPE)"},
                               {SIGABRT, "abort (SIGABRT)"}};

/// A line put together without memory from the heap.
class line {
 public:
  void add(const char* text) noexcept {
    const std::size_t size = std::min(std::strlen(text), text_.size() - size_);
    std::memcpy(text_.data() + size_, text, size);
    size_ += size;
  }
  void write_to(int file) const noexcept {
    for (std::size_t done = 0; done < size_;) {
      const ssize_t now = ::write(file, text_.data() + done, size_ - done);
      if (now <= 0) return;
      done += to_size(now);
    }
  }

 private:
  std::array<char, 2400> text_{};
  std::size_t size_ = 0;
};

/// Runs in the thread that failed, on the other stack in main's; by then the signal's action is the default
/// again.
void on_fatal_signal(int number) {
  line l;
  l.add(on_terminal ? "\r\033[K" : "");  // over a line of progress
  l.add(program_name.get());
  l.add(": ");
  for (const fatal& f : all_fatal)
    if (f.number == number) l.add(f.text);
  l.add(" while ");
  l.add(stage_name.get());
  if (*detail_name.get() != '\0') {
    l.add(": ");
    l.add(detail_name.get());
  }
  if (*remark_text.get() != '\0') {
    l.add("; ");
    l.add(remark_text.get());
  }
  l.add("\n");
  l.write_to(STDERR_FILENO);
  raise(number);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool reports_itself = true;
#else
constexpr bool reports_itself = false;
#endif

}  // namespace

void report_fatal_signals(std::string_view program) {
  const std::lock_guard lock(writing);
  program_name.set(program);
  if (*stage_name.get() == '\0') stage_name.set("starting");
  if (reports_itself) return;
  on_terminal = isatty(STDERR_FILENO) != 0;
  static std::array<char, 1 << 16> other_stack;  // for a stack that has overflowed
  stack_t stack{};
  stack.ss_sp = other_stack.data();
  stack.ss_size = other_stack.size();
  sigaltstack(&stack, nullptr);
  struct sigaction action {};
  action.sa_handler = on_fatal_signal;
  // Reset and deferred by nobody: the handler's own raise() ends the program, as does a fault in the handler.
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_NODEFER | SA_ONSTACK);
  sigemptyset(&action.sa_mask);
  for (const fatal& f : all_fatal) sigaction(f.number, &action, nullptr);
}

void note_stage(std::string_view stage) {
  const std::lock_guard lock(writing);
  detail_name.set("");
  stage_name.set(stage);
}

void note_detail(std::string_view detail) {
  const std::lock_guard lock(writing);
  detail_name.set(detail);
}

void note_remark(std::string_view remark) {
  const std::lock_guard lock(writing);
  remark_text.set(remark);
}

}  // namespace freekv::examples
