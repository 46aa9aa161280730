#include "temporary_files.hpp"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

namespace freekv::examples {
namespace {

constexpr std::array ending_signals{SIGHUP, SIGINT, SIGQUIT, SIGPIPE, SIGTERM, SIGXCPU};

// What the handler looks at: whoever takes a name off its place has it for itself.
std::array<std::atomic<char*>, 1024> names{};
std::atomic<int> holders{0};
std::atomic<bool> ending{false};
static_assert(std::atomic<char*>::is_always_lock_free && std::atomic<int>::is_always_lock_free &&
                  std::atomic<bool>::is_always_lock_free,
              "a signal's handler may use lock-free atomics alone");

extern "C" void end_by(int signal) {
  const int number = errno;
  remove_temporary_files();
  ::signal(signal, SIG_DFL);
  ::raise(signal);  // which ends the program when the handler returns
  errno = number;
}

}  // namespace

void remove_temporary_files_on_signals() {
  ::signal(SIGXFSZ, SIG_IGN);
  struct sigaction end {};
  end.sa_handler = end_by;
  ::sigemptyset(&end.sa_mask);
  for (const int signal : ending_signals) ::sigaddset(&end.sa_mask, signal);
  for (const int signal : ending_signals) {
    struct sigaction before {};
    if (::sigaction(signal, nullptr, &before) == 0 && before.sa_handler == SIG_DFL)
      ::sigaction(signal, &end, nullptr);
  }
}

void remove_temporary_files() noexcept {
  ending = true;
  // Threads in the middle of a system call or two; about a second at most, as one may hang in it, or be this
  // one.
  for (int tries = 0; holders != 0 && tries < 100'000'000; ++tries) {
  }
  for (std::atomic<char*>& name : names)
    if (const char* const path = name.exchange(nullptr)) ::unlink(path);
}

removal_held::removal_held() {
  sigset_t held;
  ::sigemptyset(&held);
  for (const int signal : ending_signals) ::sigaddset(&held, signal);
  ::pthread_sigmask(SIG_BLOCK, &held, &before_);
  ++holders;
  while (ending) {
    --holders;
    ::pause();  // the signal that another thread handles ends the program
    ++holders;
  }
}

removal_held::~removal_held() {
  --holders;
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

temporary_name::temporary_name(const std::filesystem::path& path) {
  std::unique_ptr<char, decltype(&std::free)> copy(::strdup(path.c_str()), &std::free);
  for (std::size_t i = 0; copy && i < names.size(); ++i) {
    char* empty = nullptr;
    if (!names[i].compare_exchange_strong(empty, copy.get())) continue;
    copy.release();
    place_ = static_cast<int>(i);
    return;
  }
}

temporary_name& temporary_name::operator=(temporary_name&& other) noexcept {
  std::swap(place_, other.place_);
  return *this;
}

temporary_name::~temporary_name() {
  if (place_ != none) std::free(names[place_].exchange(nullptr));
}

}  // namespace freekv::examples
