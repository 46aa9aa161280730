// Runs a program as a person at a shell does, and says what became of it.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <functional>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../sanitized.hpp"

namespace tests {

/// What a program may use; 0: as much as it likes. Sanitizers reserve address space by the terabyte, so a
/// limit on it does not hold in their builds.
struct program_limits {
  double seconds = 120;  ///< then it counts as hanging and is killed
  std::size_t address_space = 0;
  std::size_t file_size = 0;
  const char* standard_output = nullptr;  ///< a file to write to, where it is not to be captured
  /// Asked every millisecond until it says a signal, which is then sent.
  std::function<int()> signal_when{};
};

struct program_end {
  int exit_code = -1;  ///< -1: ended by a signal
  int signal = 0;
  bool hung = false;
  std::string out, err;
};

inline std::ostream& operator<<(std::ostream& stream, const program_end& end) {
  if (end.hung)
    stream << "hung";
  else if (end.signal != 0)
    stream << "signal " << end.signal;
  else
    stream << "exit code " << end.exit_code;
  return stream << "\nstdout: " << end.out.substr(0, 2000) << "\nstderr: " << end.err.substr(0, 2000);
}

/// Runs `command` (program first, no shell) until it ends.
inline program_end run_program(const std::vector<std::string>& command, const program_limits& limits = {}) {
  std::vector<char*> arguments;
  for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);

  std::array<std::array<int, 2>, 2> pipes{};  // of stdout and stderr: to read, to write
  for (auto& ends : pipes)
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
  const pid_t child = ::fork();
  if (child < 0) throw std::runtime_error("fork failed");
  if (child == 0) {
    const auto limit = [](auto resource, std::size_t most) {
      const struct rlimit both { most, most };
      if (most != 0) ::setrlimit(resource, &both);
    };
    if (!sanitized) limit(RLIMIT_AS, limits.address_space);
    limit(RLIMIT_FSIZE, limits.file_size);
    limit(RLIMIT_CORE, 1);
    ::signal(SIGXFSZ, SIG_DFL);  // as at a shell
    int to = pipes[0][1];
    if (limits.standard_output != nullptr) to = ::open(limits.standard_output, O_WRONLY | O_CLOEXEC);
    if (to < 0 || ::dup2(to, STDOUT_FILENO) < 0 || ::dup2(pipes[1][1], STDERR_FILENO) < 0) ::_exit(126);
    ::execv(arguments[0], arguments.data());
    ::_exit(127);
  }

  program_end end;
  std::array<std::string*, 2> texts{&end.out, &end.err};
  std::array<pollfd, 2> open{};
  for (std::size_t i = 0; i < 2; ++i) {
    ::close(pipes[i][1]);
    open[i] = {pipes[i][0], POLLIN, 0};
  }
  const auto start = std::chrono::steady_clock::now();
  bool asks = static_cast<bool>(limits.signal_when);
  while (open[0].fd >= 0 || open[1].fd >= 0) {
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    const double left = limits.seconds - elapsed.count();
    const int wait = asks ? 1 : static_cast<int>(left * 1000) + 1;
    const int ready = left > 0 ? ::poll(open.data(), open.size(), wait) : 0;
    if (ready < 0 && errno == EINTR) continue;
    if (asks && left > 0) {
      if (const int signal = limits.signal_when(); signal != 0) {
        ::kill(child, signal);
        asks = false;
      } else if (ready == 0) {
        continue;
      }
    }
    if (ready == 0 && left > 0) continue;
    if (ready <= 0) {
      end.hung = true;
      ::kill(child, SIGKILL);
      break;
    }
    for (std::size_t i = 0; i < 2; ++i) {
      if (open[i].fd < 0 || open[i].revents == 0) continue;
      std::array<char, 65536> block;
      const ssize_t count = ::read(open[i].fd, block.data(), block.size());
      if (count > 0)
        texts[i]->append(block.data(), static_cast<std::size_t>(count));
      else
        open[i].fd = -1;
    }
  }
  for (const auto& ends : pipes) ::close(ends[0]);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFEXITED(status)) end.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) end.signal = WTERMSIG(status);
  return end;
}

}  // namespace tests
