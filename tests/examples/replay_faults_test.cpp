// What tried to break freekv-replay: damaged events, limits of the system, signals, long names.

#include <fcntl.h>
#include <sys/stat.h>

#include <csignal>
#include <thread>

#include "../catch.hpp"
#include "refusal.hpp"
#include "replay_case.hpp"

using namespace tests;

namespace {

/// A folder with a trace.
struct trace_folder {
  scratch_folder folder;
  trace_folder() { store(folder / "trace", good_trace().whole()); }
  std::string trace() const { return folder / "trace"; }
  std::vector<std::string> command(const std::vector<std::string>& more) const {
    std::vector<std::string> all{FREEKV_REPLAY, trace()};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
};

std::string sentence_for(const std::vector<std::string>& command, program_limits limits = {.seconds = 60}) {
  return sentence_of(run_program(command, limits));
}

const std::string opened = "{\"op\":\"open\",\"seq\":0,\"trace\":\"trace\"}\n";

/// A trace that takes a moment to replay and 2 MB to write.
std::string long_trace() {
  constexpr std::int64_t tokens = sanitized ? 1600 : 2000, heads = 16, d = 64;
  std::string numbers(to_size(tokens * heads * d * 4), '\0');
  dice dice(1);
  for (std::size_t i = 0; i < numbers.size(); i += 4) {
    const float x = dice.normal();
    std::memcpy(&numbers[i], &x, 4);
  }
  const tensor_text tensor{"F32", {tokens, heads, d}, numbers};
  return parts_of({{"q", tensor}, {"k", tensor}, {"v", tensor}}, {{"prompt_len", "1500"}}).whole();
}

}  // namespace

TEST_CASE("events take traces of one layer, with one scale", "[faults]") {
  const trace_folder f;
  store(f.folder / "events", opened + "{\"op\":\"open\",\"seq\":1,\"trace\":\"other\"}\n");
  const auto replayed = [&](const char* key, const char* value) {
    file_parts other = good_trace();
    if (key != nullptr) other.header["__metadata__"][key] = value;
    store(f.folder / "other", other.whole());
    return run_program({FREEKV_REPLAY, "--events", f.folder / "events"}, {.seconds = 20});
  };
  CHECK(replayed(nullptr, nullptr).exit_code == 0);
  check_mentions(sentence_of(replayed("scale", "1.0")), {"other", "scale", "one layer's form"});
  CHECK(replayed("layer", "7").exit_code == 0);  // which the first may be of, too
  file_parts named = good_trace();
  named.header["__metadata__"]["layer"] = "3";
  store(f.trace(), named.whole());
  check_mentions(sentence_of(replayed("layer", "7")), {"other", "layer", "one layer's form"});
}

TEST_CASE("events whose JSON nests deep are refused in every member", "[faults]") {
  const trace_folder f;
  const std::string deep = std::string(100000, '[') + std::string(100000, ']');
  const std::string objects = [] {
    std::string text;
    for (int i = 0; i < 100000; ++i) text += "{\"a\":";
    return text + "1" + std::string(100000, '}');
  }();
  const auto refuse = [&](const std::string& text, const std::string& what) {
    store(f.folder / "events", text);
    INFO(text.substr(0, 100));
    check_mentions(sentence_for({FREEKV_REPLAY, "--events", f.folder / "events"}), {"line", what});
  };
  for (const std::string& value : {deep, objects, deep.substr(0, 100000)}) {
    refuse("{\"op\":\"open\",\"seq\":" + value + "}", "deeper than 32");
    refuse("{\"op\":" + value + ",\"seq\":0}", "deeper than 32");
    refuse("{\"op\":\"open\",\"seq\":0,\"trace\":" + value + "}", "deeper than 32");
    refuse(opened + "{\"op\":\"prompt\",\"seq\":0,\"tokens\":" + value + "}", "deeper than 32");
    refuse(opened + "{\"op\":\"step\",\"rows\":" + value + "}", "deeper than 32");
    refuse(opened + "{\"op\":\"step\",\"rows\":[{\"seq\":" + value + "}]}", "deeper than 32");
    refuse(value, "deeper than 32");
  }
  // Brackets in strings nest nothing, and 30 levels are those of a value of the wrong type.
  refuse("{\"op\":\"" + std::string(1000, '[') + "\\\"[[[\",\"seq\":0}", "\"op\" is");
  refuse("{\"op\":\"open\",\"seq\":" + std::string(30, '[') + std::string(30, ']') + "}", "whole number");
}

TEST_CASE("threads that cannot be had are counted in a sentence", "[faults]") {
  if (sanitized) return;  // address space has no limit there
  const trace_folder f;
  check_mentions(sentence_for(f.command({"--threads", "1000"}), {.address_space = 300'000'000}),
                 {"1000 threads", "the system gives", "choose fewer threads", "pids limit", "ulimit -v"});
}

TEST_CASE("a limit on file sizes is a sentence wherever a file is written", "[faults]") {
  const trace_folder f;
  const auto before = f.folder.listing();
  for (const std::size_t most : {100, 1000, 5000})
    check_mentions(sentence_for(f.command({"--out", f.folder / "out"}), {.file_size = most}),
                   {"out", "cannot be written", "large"});
  check_mentions(sentence_for(f.command({"--store-file", f.folder / "store"}), {.file_size = 100}),
                 {"store", "ulimit -f"});
  CHECK(f.folder.listing() == before);
}

TEST_CASE("a signal leaves neither the unfinished output nor the store's file", "[faults]") {
  const scratch_folder folder;
  store(folder / "trace", long_trace());
  REQUIRE(run_program({FREEKV_REPLAY, folder / "trace", "--out", folder / "whole"}).exit_code == 0);
  const auto whole = load(folder / "whole");
  store(folder / "out", "an older file");
  const auto names = [&](const std::string& beginning) {
    const auto all = folder.listing();
    return std::any_of(all.begin(), all.end(),
                       [&](const auto& name) { return name.rfind(beginning, 0) == 0; });
  };
  int ended = 0;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    if (sanitized && signal != SIGINT) break;  // each replay takes a minute there
    // At the first sight of a file, and while the output grows.
    for (const std::uintmax_t grown : {0, 1, 1 << 19, 1 << 20}) {
      if (sanitized && grown > 1) break;
      const auto seen = [&] {
        for (const auto& entry : fs::directory_iterator(folder.path())) {
          std::error_code gone;
          if (entry.path().filename().string().rfind(".freekv-", 0) == 0 &&
              fs::file_size(entry.path(), gone) + 1 > grown && !gone)
            return signal;
        }
        return 0;
      };
      const program_end end =
          run_program({FREEKV_REPLAY, folder / "trace", "--out", folder / "out"}, {.signal_when = seen});
      INFO(end);
      ended += end.signal == signal;
      CHECK((end.signal == signal || end.exit_code == 0));
      CHECK_FALSE(names(".freekv-"));
      const auto out = load(folder / "out");  // a signal may come when the output has its name already
      CHECK(((end.signal != 0 && out == "an older file") || out == whole));
      store(folder / "out", "an older file");
    }
    const program_end end = run_program({FREEKV_REPLAY, folder / "trace", "--store-file", folder / "store"},
                                        {.signal_when = [&] { return names("store") ? signal : 0; }});
    INFO(end);
    CHECK(end.signal == signal);
    CHECK_FALSE(names("store"));
  }
  CHECK(ended >= (sanitized ? 1 : 8));
}

TEST_CASE("a store's file that was there before stays there, whatever ends the replay", "[faults]") {
  const trace_folder f;
  store(f.folder / "store", "mine");
  check_mentions(sentence_for(f.command({"--store-file", f.folder / "store"})), {"store", "exists"});
  CHECK(load(f.folder / "store") == "mine");
}

TEST_CASE("a signal that is ignored stays ignored", "[faults]") {
  const scratch_folder folder;
  store(folder / "trace", long_trace());
  const program_end end =
      run_program({"/bin/sh", "-c",
                   "trap '' INT; exec " + std::string(FREEKV_REPLAY) + " " + std::string(folder / "trace") +
                       " --store-file " + std::string(folder / "store")},
                  {.signal_when = [&] { return fs::exists(folder / "store") ? SIGINT : 0; }});
  INFO(end);
  CHECK(end.exit_code == 0);
}

TEST_CASE("what is cited is cut, in quotes", "[faults]") {
  const trace_folder f;
  const std::string much(100000, 'm');
  const auto events = [&](const std::string& text) {
    store(f.folder / "events", text);
    return sentence_for({FREEKV_REPLAY, "--events", f.folder / "events"});
  };
  check_mentions(
      events(opened + "{\"op\":\"step\",\"rows\":[{\"seq\":0,\"tokens\":1,\"kind\":\"" + much + "\"}]}"),
      {"line 2", "\"mmm", "100000 bytes", "decode or prompt"});
  check_mentions(events("{\"op\":\"" + much + "\",\"seq\":0}"), {"100000 bytes", "release"});
  check_mentions(events("{\"op\":\"open\",\"seq\":0,\"trace\":\"" + std::string(1 << 20, 't') + "\"}"),
                 {"line 1", "ttt", "too long"});
  check_mentions(events("{\"op\":\"open\",\"seq\":\"" + much + "\"}"), {"...", "whole number"});
  // Not within a character of several bytes.
  std::string wide;
  for (int i = 0; i < 1000; ++i) wide += "\u4e2d";
  for (const char* shift : {"", "a", "ab"}) {
    const std::string line = events(std::string("{\"op\":\"") + shift + wide + "\",\"seq\":0}");
    CHECK_NOTHROW(nlohmann::json(line).dump());  // which throws for what is not UTF-8
    const std::string value = events(std::string("{\"op\":\"open\",\"seq\":\"") + shift + wide + "\"}");
    CHECK_NOTHROW(nlohmann::json(value).dump());
  }

  file_parts dimensions = good_trace();
  dimensions.header["q"]["shape"] = std::vector<int>(1000, 1);
  for (const int n : {40, 4, 64}) dimensions.header["q"]["shape"].push_back(n);
  store(f.folder / "dimensions", dimensions.whole());
  check_mentions(sentence_for({FREEKV_REPLAY, f.folder / "dimensions"}), {"q has shape (1, 1,", "995 more"});

  for (const char* option :
       {"--variant", "--summary", "--codec", "--pooling", "--route", "--dtype", "--backend", "--rows",
        "--selection", "--correction", "--residency", "--layout"}) {
    check_mentions(sentence_for(f.command({option, ""})), {std::string(option) + " \"\""});
    check_mentions(sentence_for(f.command({option, much})), {std::string(option) + " \"mmm", "100000 bytes"});
  }
  for (const char* option : {"--k", "--tau", "--scale", "--top-p", "--rope-base"})
    check_mentions(sentence_for(f.command({option, much})), {std::string(option) + " \"mmm"});
  for (const char* option : {"--out", "--basis", "--heads", "--store-file", "--", "--mmm"})
    sentence_for(f.command({option, much, "--variant", "freekv_key_subspace"}));  // which is not long
  sentence_for({FREEKV_REPLAY, much});
  sentence_for({FREEKV_REPLAY, "--events", much});
  sentence_for(f.command({much}));
}

TEST_CASE("messages name what is wrong, with a remedy that is accepted", "[faults]") {
  const trace_folder f;
  const std::vector<std::string> units{"--page", "24",       "--unit", "12",        "--sink",
                                       "48",     "--window", "48",     "--summary", "chunk_means"};
  check_mentions(sentence_for(f.command(units)), {"a chunk of 8", "a unit of 12", "such as 6"});
  auto remedied = units;
  remedied.insert(remedied.end(), {"--chunk", "6"});
  CHECK(run_program(f.command(remedied)).exit_code == 0);
  check_mentions(sentence_for(f.command(
                     {"--pinning", "pin_outliers", "--pinned", "2147483647", "--out", f.folder / "out"})),
                 {"--k 8 and --pinned 2147483647 give"});
  check_mentions(sentence_for(f.command({"--selection", "top_p", "--top-p", "1.0000001"})),
                 {"p of 1.0000001"});
  check_mentions(sentence_for(f.command({"--correction", "mass_deficit", "--delta", "1.0000001"})),
                 {"delta of 1.0000001"});
  if (!sanitized)
    check_mentions(sentence_for(f.command({"--spare", "100000000"}), {.address_space = two_gigabytes}),
                   {"memory", "--spare 100000000", "lower"});
}

TEST_CASE("a FIFO is read if somebody writes to it, and else not waited for", "[faults]") {
  const trace_folder f;
  const std::string fifo = f.folder / "fifo";
  REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
  check_mentions(sentence_for({FREEKV_REPLAY, "--events", fifo}, {.seconds = 20}), {"fifo", "nobody writes"});
  file_parts named = good_trace();
  named.header["__metadata__"]["layer"] = "3";
  store(f.folder / "named", named.whole());
  check_mentions(sentence_for({FREEKV_REPLAY, f.folder / "named", "--heads", fifo}, {.seconds = 20}),
                 {"fifo", "nobody writes"});
  std::thread writer([&] {
    const int file = ::open(fifo.c_str(), O_WRONLY | O_CLOEXEC);
    const std::string events = opened + "{\"op\":\"prompt\",\"seq\":0,\"tokens\":3}\n";
    ::usleep(200'000);  // the reader waits for what comes
    CHECK(::write(file, events.data(), events.size()) == static_cast<ssize_t>(events.size()));
    ::close(file);
  });
  ::usleep(200'000);
  const auto before = fs::current_path();
  fs::current_path(f.folder.path());  // where the trace is
  const program_end end = run_program({FREEKV_REPLAY, "--events", "fifo"}, {.seconds = 20});
  fs::current_path(before);
  if (end.exit_code != 0) ::close(::open(fifo.c_str(), O_RDONLY | O_NONBLOCK));
  writer.join();
  INFO(end);
  CHECK(end.exit_code == 0);
}

TEST_CASE("an output is not replaced when the summary cannot be printed", "[faults]") {
  if (::access("/dev/full", W_OK) != 0) return;
  const trace_folder f;
  store(f.folder / "out", "an older file");
  store(f.folder / "events", opened + "{\"op\":\"prompt\",\"seq\":0,\"tokens\":3}\n" +
                                 "{\"op\":\"step\",\"rows\":[{\"seq\":0,\"tokens\":1}]}\n");
  fs::create_directory(f.folder / "traces");
  fs::copy_file(f.trace(), f.folder / "traces" / "a.safetensors");
  fs::create_directory(f.folder / "outputs");
  store(f.folder / "outputs" / "a.safetensors", "an older file");
  const auto before = f.folder.listing();
  const program_limits full{.standard_output = "/dev/full"};
  check_mentions(sentence_for(f.command({"--out", f.folder / "out"}), full), {"standard output"});
  check_mentions(
      sentence_for({FREEKV_REPLAY, "--events", f.folder / "events", "--out", f.folder / "out"}, full),
      {"standard output"});
  check_mentions(sentence_for({FREEKV_REPLAY, f.folder / "traces", "--out", f.folder / "outputs"}, full),
                 {"standard output"});
  CHECK(load(f.folder / "out") == "an older file");
  CHECK(load(f.folder / "outputs" / "a.safetensors") == "an older file");
  CHECK(f.folder.listing() == before);
  CHECK(fs::directory_iterator(f.folder / "outputs")->path().filename() == "a.safetensors");
}

TEST_CASE("top_p takes half of equal pages whatever their scores", "[faults]") {
  const scratch_folder folder;
  constexpr std::int64_t tokens = 18 * 16 + 2, d = 64;
  const auto ones = [&](std::int64_t heads) {
    return tensor_text{
        "F32", {tokens, heads, d}, bytes_of(std::vector<float>(to_size(tokens * heads * d), 1.0f), "F32")};
  };
  store(folder / "trace", parts_of({{"q", ones(4)}, {"k", ones(2)}, {"v", ones(2)}},
                                   {{"prompt_len", std::to_string(tokens - 2)}})
                              .whole());
  for (const char* scale : {"1", "200000", "1e30"})
    for (const char* pooling :
         {"mean_score", "max_score", "mean_query", "max_query", "mean_softmax", "max_softmax"})
      for (const char* rows : {"per_kv_head", "per_layer", "per_query_head"}) {
        INFO(scale << ", " << pooling << ", " << rows);
        const program_end end = run_program({FREEKV_REPLAY,  folder / "trace",
                                             "--page",       "16",
                                             "--sink",       "16",
                                             "--window",     "32",
                                             "--k",          "15",
                                             "--selection",  "top_p",
                                             "--top-p",      "0.5",
                                             "--correction", "always",
                                             "--scale",      scale,
                                             "--pooling",    pooling,
                                             "--rows",       rows,
                                             "--out",        folder / "out"});
        INFO(end);
        REQUIRE(end.exit_code == 0);
        const tensor_text selected = read_tensors(folder / "out").at("selected");
        const auto pages = elements_of<std::int32_t>(selected);
        // 15 candidates, of which 8 have more than half.
        for (std::size_t row = 0; row < pages.size(); row += 15)
          CHECK(std::count_if(pages.begin() + static_cast<std::ptrdiff_t>(row),
                              pages.begin() + static_cast<std::ptrdiff_t>(row) + 15,
                              [](std::int32_t page) { return page >= 0; }) == 8);
      }
}
