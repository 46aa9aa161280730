// What tried to break freekv-heads: limits of the system, signals, FIFOs, long names.

#include <sys/stat.h>

#include <csignal>

#include "../catch.hpp"
#include "refusal.hpp"

using namespace tests;

namespace {

/// A folder of traces, layers 1 to 3, and an older list beside it.
struct heads_case {
  scratch_folder folder;
  heads_case() {
    fs::create_directory(folder / "traces");
    for (const char* layer : {"1", "2", "3"}) add(layer, good_trace());
    store(list(), "an older list");
  }
  void add(const std::string& layer, file_parts trace) {
    trace.header["__metadata__"]["layer"] = layer;
    store(trace_of(layer), trace.whole());
  }
  fs::path trace_of(const std::string& layer) const {
    return folder / ("traces/layer-" + layer + ".safetensors");
  }
  std::string list() const { return folder / "heads.txt"; }
  program_end run(const std::vector<std::string>& more = {}, program_limits limits = {.seconds = 60}) const {
    std::vector<std::string> command{FREEKV_HEADS, folder / "traces", "--page", "8", "--sink",
                                     "8",          "--window",        "8"};
    command.insert(command.end(), more.begin(), more.end());
    return run_program(command, limits);
  }
  std::string sentence(const std::vector<std::string>& more, program_limits limits = {.seconds = 60}) const {
    return sentence_of(run(more, limits), "freekv-heads");
  }
  /// The older list is there as it was, and nothing else is but the traces.
  void check_untouched() const {
    CHECK(load(list()) == "an older list");
    CHECK(folder.listing() == std::vector<std::string>{"heads.txt", "traces"});
  }
};

}  // namespace

TEST_CASE("a list that is complete takes the place of an older one", "[heads]") {
  const heads_case c;
  const auto end = c.run({"--out", c.list()});
  INFO(end);
  REQUIRE(end.exit_code == 0);
  const std::string list = load(c.list());
  CHECK(std::count(list.begin(), list.end(), '\n') == 7);  // of two KV heads a layer, and what they are
  CHECK(c.folder.listing() == std::vector<std::string>{"heads.txt", "traces"});
}

TEST_CASE("a limit on file sizes leaves the older list of heads", "[heads]") {
  const heads_case c;
  check_mentions(c.sentence({"--out", c.list()}, {.file_size = 20}),
                 {"heads.txt", "cannot be written", "large"});
  c.check_untouched();
}

TEST_CASE("a signal leaves the older list of heads, and nothing else", "[heads]") {
  heads_case c;
  constexpr std::int64_t tokens = 20000, d = 64;  // many seconds
  const auto zeros = [](std::int64_t heads) {
    return tensor_text{
        "F16", {tokens, heads, d}, std::string(static_cast<std::size_t>(tokens * heads * d * 2), '\0')};
  };
  c.add("9", parts_of({{"q", zeros(4)}, {"k", zeros(1)}, {"v", zeros(1)}}, {{"prompt_len", "1"}}));
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    int asked = 0;
    const auto end = c.run({"--out", c.list()},
                           {.seconds = 60, .signal_when = [&] { return ++asked > 300 ? signal : 0; }});
    INFO(end);
    CHECK(end.signal == signal);
    c.check_untouched();
  }
}

TEST_CASE("a FIFO is neither waited for nor replaced by a list of heads", "[heads]") {
  const heads_case c;
  const std::string fifo = c.folder / "fifo", layer = c.trace_of("4");
  REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
  check_mentions(c.sentence({"--out", fifo}, {.seconds = 20}), {"fifo", "FIFO"});
  CHECK(fs::is_fifo(fifo));
  fs::remove(fifo);
  check_mentions(c.sentence({"--out", c.folder / "traces"}), {"traces", "directory"});
  check_mentions(c.sentence({"--out", c.folder / "no/where"}), {"where", "No such file"});
  c.check_untouched();
  REQUIRE(::mkfifo(layer.c_str(), 0600) == 0);
  check_mentions(c.sentence({"--out", c.list()}, {.seconds = 20}), {"layer-4", "FIFO"});
  check_mentions(
      sentence_of(run_program({FREEKV_HEADS, layer, "--out", c.list()}, {.seconds = 20}), "freekv-heads"),
      {"layer-4", "FIFO"});
  c.check_untouched();
}

TEST_CASE("a layer that is damaged is named, and the older list of heads stays", "[heads]") {
  heads_case c;
  const std::string good = load(c.trace_of("2"));
  const auto refuse = [&](const std::string& bytes, const std::string& what) {
    store(c.trace_of("2"), bytes);
    check_mentions(c.sentence({"--out", c.list()}), {"layer-2", what});
  };
  for (const std::size_t bytes : {0, 7, 100, 1000})
    refuse(good.substr(0, bytes), bytes == 0 ? "empty" : bytes == 7 ? "7 bytes" : "truncated");
  refuse(good.substr(0, good.size() - 1), "truncated");
  refuse(file_of("{\"q\":{\"more\":" + std::string(100000, '[') + std::string(100000, ']') + "}}", ""), "32");
  file_parts nameless = good_trace();
  refuse(nameless.whole(), "which layer");
  nameless.header["__metadata__"]["layer"] = std::string(100000, '9');
  refuse(nameless.whole(), "layer");
  file_parts no_step = good_trace();
  no_step.header["__metadata__"] = {{"layer", "2"}, {"prompt_len", "40"}};
  refuse(no_step.whole(), "no decode step");
  c.check_untouched();
}

TEST_CASE("a trace is no place for the list of its heads", "[heads]") {
  const heads_case c;
  const std::string before = load(c.trace_of("2"));
  check_mentions(c.sentence({"--out", c.trace_of("2")}), {"--out", "layer-2", "input"});
  CHECK(load(c.trace_of("2")) == before);
  c.check_untouched();
}

TEST_CASE("two traces of a layer are refused, as no program reads a list of both", "[heads]") {
  heads_case c;
  file_parts again = good_trace();
  again.header["__metadata__"]["layer"] = "2";
  store(c.trace_of("other"), again.whole());
  check_mentions(c.sentence({"--out", c.list()}), {"layer-2", "layer-other", "both of layer 2"});
  c.check_untouched();
}

TEST_CASE("a share that is no number is refused", "[heads]") {
  const heads_case c;
  for (const char* share : {"nan", "-nan", "1.5", "-0.1"})
    check_mentions(c.sentence({"--out", c.list(), "--share", share}), {"--share", share});
  c.check_untouched();
}

TEST_CASE("what sink logits take of the attention is no head's reach", "[heads]") {
  // All tokens are alike; the first KV head's query heads attend to their sink logits alone.
  const heads_case c;
  const std::vector<float> logits{30, 30, -30, -30};
  const file_parts trace =
      parts_of({{"q", tensor_text{"F32", {40, 4, 64}, std::string(40 * 4 * 64 * 4, '\0')}},
                {"k", tensor_text{"F32", {40, 2, 64}, std::string(40 * 2 * 64 * 4, '\0')}},
                {"v", tensor_text{"F32", {40, 2, 64}, std::string(40 * 2 * 64 * 4, '\0')}},
                {"sink_logits", tensor_text{"F32", {4}, bytes_of(logits, "F32")}}},
               {{"prompt_len", "30"}, {"layer", "2"}, {"period", "10"}});
  store(c.folder / "alone", trace.whole());
  for (const char* by : {"mass", "echo"}) {
    const auto end = run_program({FREEKV_HEADS, c.folder / "alone", "--out", c.list(), "--page", "8",
                                  "--sink", "8", "--window", "8", "--share", "0.5", "--by", by});
    INFO(end);
    REQUIRE(end.exit_code == 0);
    const std::string list = load(c.list());
    INFO(list);
    const auto first = list.find("2 1 complete"), second = list.find("2 0 window");
    CHECK((first != std::string::npos && second != std::string::npos && first < second));
  }
}

TEST_CASE("what freekv-heads cites is cut", "[heads]") {
  const heads_case c;
  const std::string much(100000, 'm');
  for (const char* option : {"--by", "--share", "--page", "--sink", "--window", "--complete-layers", "--mmm"})
    for (const std::string& value : {much, std::string("a\nb\x1b[2J"), std::string()})
      check_mentions(c.sentence({"--out", c.list(), option, value}), {option});
  c.sentence({"--out", much});
  c.sentence({"--out", c.list(), much});
  sentence_of(run_program({FREEKV_HEADS, much, "--out", c.list()}), "freekv-heads");
  c.check_untouched();
}
