// The line that a fatal signal leaves, and the signal that it dies of.

#include "fatal_signals.hpp"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../catch.hpp"
#include "../files.hpp"
#include "../sanitized.hpp"
#include "tensor_file.hpp"

namespace {

using freekv::examples::note_detail;
using freekv::examples::note_remark;
using freekv::examples::note_stage;
using freekv::examples::report_fatal_signals;

struct child_end {
  std::string err;
  int signal = 0;
};

/// What a child process that runs `body` writes to stderr, and the signal that ends it. `sent`: a signal that
/// it gets after a second.
child_end in_child(const std::function<void()>& body, int sent = 0) {
  std::array<int, 2> ends{};
  REQUIRE(::pipe(ends.data()) == 0);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    for (const int number : {SIGSEGV, SIGILL, SIGBUS, SIGFPE, SIGABRT})
      ::signal(number, SIG_DFL);  // not Catch2's
    const struct rlimit none { 0, 0 };
    ::setrlimit(RLIMIT_CORE, &none);
    ::dup2(ends[1], STDERR_FILENO);
    body();
    ::_exit(0);
  }
  ::close(ends[1]);
  if (sent != 0) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    ::kill(child, sent);
  }
  child_end end;
  std::array<char, 4096> block;
  for (ssize_t count = 0; (count = ::read(ends[0], block.data(), block.size())) > 0;)
    end.err.append(block.data(), static_cast<std::size_t>(count));
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) end.signal = WTERMSIG(status);
  return end;
}

/// Uses up a stack, whatever an optimiser makes of it.
int recurse(int depth) {
  volatile char frame[4096];
  frame[0] = static_cast<char>(depth);
  return depth < 0 ? 0 : recurse(depth + 1) + frame[0];
}

}  // namespace

TEST_CASE("every fatal signal leaves a line and ends the program as it would have", "[signals]") {
  if (tests::sanitized) return;  // which have reports of their own
  const std::vector<std::pair<int, std::string>> all{{SIGSEGV, "segmentation fault (SIGSEGV)"},
                                                     {SIGILL, "illegal instruction (SIGILL)"},
                                                     {SIGBUS, "bus error (SIGBUS)"},
                                                     {SIGFPE, "arithmetic exception (SIGFPE)"},
                                                     {SIGABRT, "abort (SIGABRT)"}};
  for (const auto& [number, name] : all) {
    const auto end = in_child([number = number] {
      report_fatal_signals("program");
      note_stage("measuring quality");
      note_detail("freekv, 12 tokens");
      note_remark("look there");
      ::raise(number);
    });
    CHECK(end.signal == number);
    CHECK(end.err == "program: " + name + " while measuring quality: freekv, 12 tokens; look there\n");
  }
}

TEST_CASE("the line says what was noted last, and nothing of what was not", "[signals]") {
  if (tests::sanitized) return;
  CHECK(in_child([] {
          report_fatal_signals("p");
          ::abort();
        }).err == "p: abort (SIGABRT) while starting\n");
  CHECK(in_child([] {
          report_fatal_signals("p");
          note_stage("one");
          note_detail("of the first");
          note_stage("two");
          ::abort();
        }).err == "p: abort (SIGABRT) while two\n");
  CHECK(in_child([] {
          report_fatal_signals("p");
          note_stage("a");
          note_detail(std::string(100000, 'x'));
          note_remark("b\n\x1b[2Jc");
          ::abort();
        }).err == "p: abort (SIGABRT) while a: " + std::string(240, 'x') + "; b  [2Jc\n");
}

TEST_CASE("a fault leaves its line in any thread, and on a stack that is full", "[signals]") {
  if (tests::sanitized) return;
  const auto in_thread = in_child([] {
    report_fatal_signals("p");
    note_stage("working");
    std::thread([] { ::raise(SIGSEGV); }).join();
  });
  CHECK(in_thread.signal == SIGSEGV);
  CHECK(in_thread.err == "p: segmentation fault (SIGSEGV) while working\n");
  const auto overflow = in_child([] {
    report_fatal_signals("p");
    note_stage("recursing");
    recurse(0);
  });
  CHECK(overflow.signal == SIGSEGV);
  CHECK(overflow.err == "p: segmentation fault (SIGSEGV) while recursing\n");
}

TEST_CASE("notes may be taken while others are read", "[signals]") {
  if (tests::sanitized) return;
  const auto end = in_child([] {
    report_fatal_signals("p");
    note_stage("s");
    note_detail(std::string(200, 'z'));
    std::vector<std::thread> writers;
    for (int i = 0; i < 3; ++i)
      writers.emplace_back([i] {
        for (;;) note_detail(std::string(200, static_cast<char>('a' + i)));
      });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ::abort();
  });
  CHECK(end.signal == SIGABRT);
  CHECK_THAT(end.err, Catch::StartsWith("p: abort (SIGABRT) while s: ") && Catch::EndsWith("\n"));
  CHECK(end.err.size() == std::string("p: abort (SIGABRT) while s: \n").size() + 200);
}

TEST_CASE("a program that gets a signal in the middle of its work says where", "[signals]") {
  if (tests::sanitized) return;
  constexpr std::int64_t tokens = 20000, d = 64;  // 20,000 steps of up to 20,000 tokens: many seconds
  const auto zeros = [](std::int64_t heads) {
    return tests::tensor_text{
        "F16", {tokens, heads, d}, std::string(static_cast<std::size_t>(tokens * heads * d * 2), '\0')};
  };
  const tests::scratch_folder folder;
  std::filesystem::create_directory(folder / "traces");
  const std::string trace = folder / "traces/long.safetensors";
  tests::store(trace, tests::parts_of({{"q", zeros(2)}, {"k", zeros(1)}, {"v", zeros(1)}},
                                      {{"prompt_len", "1"}, {"layer", "3"}})
                          .whole());
  const auto runs = [](std::vector<std::string> command) {
    return [command = std::move(command)]() mutable {
      std::vector<char*> arguments;
      for (std::string& argument : command) arguments.push_back(argument.data());
      arguments.push_back(nullptr);
      ::execv(arguments[0], arguments.data());
    };
  };
  const auto replay = in_child(runs({FREEKV_REPLAY, trace, "--variant", "full"}), SIGBUS);
  CHECK(replay.signal == SIGBUS);
  CHECK_THAT(replay.err,
             Catch::Matches("freekv-replay: bus error \\(SIGBUS\\) while (reading headers|replaying with "
                            "full(: (step|prompt token) [0-9]+ of [0-9]+)?)\n"));
  const auto heads = in_child(
      runs({FREEKV_HEADS, (folder / "traces").string(), "--out", (folder / "heads").string()}), SIGFPE);
  CHECK(heads.signal == SIGFPE);
  CHECK_THAT(heads.err, Catch::Matches("freekv-heads: arithmetic exception \\(SIGFPE\\) while measuring heads"
                                       "(: layer 0 of 1)?\n"));
}
