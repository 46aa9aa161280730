// Pages kept in a file, whatever happens to it: the same outputs, or an error that says where, and nothing
// lost.

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <new>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../catch.hpp"
#include "../sanitized.hpp"
#include "failing_file.hpp"
#include "random_settings.hpp"

namespace {

using namespace tests;
using freekv::step_phase;
using freekv::store_error;

/// A folder that goes with the test.
struct folder {
  std::string path = (std::filesystem::temp_directory_path() / "freekv-store-XXXXXX").string();
  folder() { REQUIRE(mkdtemp(path.data()) != nullptr); }
  ~folder() { std::filesystem::remove_all(path); }
  std::string file() const { return path + "/store"; }
};

/// Files may not grow beyond `bytes`: writes beyond fail.
class short_files {
 public:
  explicit short_files(rlim_t bytes) {
    std::signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit now{bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &now);
  }
  ~short_files() { setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_{};
};

/// The store's file loses everything and takes nothing, until it gets back what it had.
class broken_file {
 public:
  explicit broken_file(const std::string& path) : descriptor_(open(path.c_str(), O_RDWR)) {
    REQUIRE(descriptor_ >= 0);
    struct stat is {};
    fstat(descriptor_, &is);
    content_.resize(static_cast<std::size_t>(is.st_size));
    REQUIRE(pread(descriptor_, content_.data(), content_.size(), 0) == is.st_size);
    REQUIRE(ftruncate(descriptor_, 0) == 0);
    full_.emplace(0);
  }
  ~broken_file() {
    full_.reset();
    REQUIRE(pwrite(descriptor_, content_.data(), content_.size(), 0) ==
            static_cast<ssize_t>(content_.size()));
    close(descriptor_);
  }

 private:
  int descriptor_;
  std::vector<char> content_;
  std::optional<short_files> full_;
};

tiny_pipeline::settings in_file(tiny_pipeline::settings s, const folder& where) {
  s.capacity.store_file = {.path = where.file()};
  return s;
}

/// Two decode rows of sequences `a` and `b` in one step whose calls may fail once: before each, and again
/// after it has failed, the file is broken if `breaks(layer, call)` says so; then it is whole again.
template <class Breaks>
std::vector<float> stubborn_step(tiny_pipeline& pipeline, const folder& where,
                                 const std::vector<sequence_part>& parts, const Breaks& breaks, int& failed) {
  const auto& s = pipeline.configuration();
  std::vector<freekv::step_input> listed;
  std::vector<int> first;
  int rows = 0;
  for (const auto& part : parts) {
    listed.push_back({part.id, part.tokens, part.phase});
    first.push_back(pipeline.tokens(part.id));
    rows += part.tokens;
  }
  const auto insist = [&](int layer, const char* name, const auto& call) {
    if (breaks(layer, name)) {
      pipeline.synchronize();
      const broken_file broken(where.file());
      for (int i = 0; i < 2; ++i) try {
          call();
          return;  // it needed nothing of the file
        } catch (const store_error& error) {
          ++failed;
          const std::string said = error.what();
          if (error.sequence.rfind("sequence ", 0) != 0 || said.find(where.file()) == std::string::npos ||
              said.find("at offset " + std::to_string(error.offset)) == std::string::npos)
            FAIL(said);
        }
    }
    call();
  };
  auto step = pipeline.begin_step(listed);
  std::vector<float> all;
  for (int layer = 0; layer < s.model.layers; ++layer) {
    std::vector<float> queries, keys, values;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const auto of = parts[i].source->at(layer, first[i], parts[i].tokens);
      queries.insert(queries.end(), of.queries.begin(), of.queries.end());
      keys.insert(keys.end(), of.keys.begin(), of.keys.end());
      values.insert(values.end(), of.values.begin(), of.values.end());
    }
    std::vector<float> out(queries.size(), quiet_nan);
    insist(layer, "append",
           [&] { step.append<float>(layer, {.keys = keys, .values = values, .queries = queries}); });
    insist(layer, "attend", [&] { step.attend(layer, out); });
    all.insert(all.end(), out.begin(), out.end());
  }
  step.end();
  return all;
}

/// What reports count of a step's recalls, of each layer, sequence and KV head.
std::vector<std::int32_t> recalls_of(const tiny_pipeline& pipeline, const std::vector<sequence_part>& parts) {
  std::vector<std::int32_t> all;
  for (int layer = 0; layer < pipeline.configuration().model.layers; ++layer)
    for (const auto& part : parts) {
      const auto report = pipeline.report(layer)[part.id];
      for (const auto& counts : {report.recalled, report.recalled_before_attention, report.promoted})
        all.insert(all.end(), counts.begin(), counts.end());
    }
  return all;
}

}  // namespace

TEST_CASE("a file that breaks fails calls, which can be repeated: not a bit is different",
          "[store_in_file]") {
  int failed_appends = 0, failed_attends = 0;
  for (std::uint64_t seed = 1; seed <= some_of(30u); ++seed) {
    dice d(seed);
    auto s = random_settings(d);
    s.capacity.store_file.reset();
    s.capacity.max_sequences = 2;
    s.capacity.max_decode_rows = d.one_of({1, 3});
    const int prompt = d.between(20, 90);
    const text one(s, head_dim, 200, seed), two(s, head_dim, 200, seed + 1000);
    const folder where;
    freekv::host_backend backend({.overlap = seed % 2 == 0}), other({.overlap = seed % 2 == 0});
    tiny_pipeline expected(s, backend), pipeline(in_file(s, where), other);
    for (auto* p : {&expected, &pipeline})
      for (const text* source : {&one, &two}) prompt_only(*p, p->open(), *source, prompt);
    int wrong = 0, miscounted = 0;
    for (int step = 0; step < 40; ++step) {
      const std::vector<sequence_part> parts{
          {freekv::sequence_id{0}, &one, d.between(1, s.capacity.max_decode_rows), step_phase::decode},
          {freekv::sequence_id{1}, &two, step % 9 == 8 ? 4 : 1,
           step % 9 == 8 ? step_phase::prefill : step_phase::decode}};
      const int layer = d.between(0, 2);
      const std::string call = d.below(2) == 0 ? "append" : "attend";
      int failed = 0, none = 0;
      if (step % 5 == 4) {
        const int kept = std::max(0, expected.tokens(parts[0].id) - d.between(0, 30));
        expected.truncate(parts[0].id, kept);
        const broken_file broken(where.file());
        pipeline.truncate(parts[0].id, kept);
      }
      const auto out = stubborn_step(
          pipeline, where, parts, [&](int l, const std::string& c) { return l == layer && c == call; },
          failed);
      wrong += !same_bits(out, stubborn_step(
                                   expected, where, parts, [](int, const char*) { return false; }, none));
      miscounted += recalls_of(pipeline, parts) != recalls_of(expected, parts);
      (call == "append" ? failed_appends : failed_attends) += failed;
    }
    INFO("seed " << seed);
    CHECK(wrong == 0);
    CHECK(miscounted == 0);
  }
  CHECK(failed_appends > 20);
  CHECK(failed_attends > 20);
}

TEST_CASE("what speculation cannot read, the next append asks for", "[store_in_file]") {
  auto s = tiny_settings();
  s.correction = freekv::never{};
  const text source(s, head_dim, 200, 5);
  const folder where;
  freekv::host_backend backend, at_once({.overlap = false});
  tiny_pipeline expected(s, backend), filed(in_file(s, where), at_once);
  for (auto* p : {&expected, &filed}) prompt_only(*p, p->open(), source, 121);
  const std::vector<sequence_part> parts{{freekv::sequence_id{0}, &source}};
  int failed_attends = 0, failed_appends = 0, none = 0, wrong = 0;
  for (int step = 0; step < 60; ++step) {
    const bool completes = filed.tokens(parts[0].id) % 8 == 7;
    const auto never_breaks = [](int, const char*) { return false; };
    const auto expects = stubborn_step(expected, where, parts, never_breaks, none);
    int& failed = step % 2 == 0 ? failed_attends : failed_appends;
    const char* const breaks_in = step % 2 == 0 ? "attend" : "append";
    const auto out = stubborn_step(
        filed, where, parts,
        [&](int layer, const std::string& call) { return layer == 1 && call == breaks_in && !completes; },
        failed);
    wrong += !same_bits(out, expects);
  }
  CHECK(wrong == 0);
  CHECK(failed_attends <= 2);  // the first step selects
  CHECK(failed_appends > 10);
}

TEST_CASE("a sequence that is abandoned leaves the others of its step as they would be", "[store_in_file]") {
  auto s = tiny_settings();
  s.capacity.max_sequences = 3;
  const text one(s, head_dim, 200, 1), two(s, head_dim, 200, 2), three(s, head_dim, 200, 3);
  fresh alone(s);
  prompt_only(alone.pipeline, alone.id, three, 50);
  freekv::host_backend backend;
  tiny_pipeline pipeline(s, backend);
  const auto a = pipeline.open(), b = pipeline.open(), c = pipeline.open();
  prompt_only(pipeline, a, one, 60);
  prompt_only(pipeline, b, two, 70);
  prompt_only(pipeline, c, three, 50);
  const int free_before = pipeline.free_pages();

  auto step = pipeline.begin_step({{a}, {b}, {c}});
  CHECK_THROWS_WITH(step.abandon(freekv::sequence_id{3}), "abandon: sequence 3 has no rows in this step");
  std::vector<float> last, expected = run_step(alone.pipeline, alone.id, three, 1, step_phase::decode).out;
  for (int layer = 0; layer < s.model.layers; ++layer) {
    std::vector<float> queries, keys, values;
    for (const auto& rows : {one.at(layer, 60, 1), two.at(layer, 70, 1), three.at(layer, 50, 1)}) {
      queries.insert(queries.end(), rows.queries.begin(), rows.queries.end());
      keys.insert(keys.end(), rows.keys.begin(), rows.keys.end());
      values.insert(values.end(), rows.values.begin(), rows.values.end());
    }
    step.append<float>(layer, {.keys = keys, .values = values, .queries = queries});
    if (layer == 1) step.abandon(b);
    std::vector<float> out(queries.size(), quiet_nan);
    step.attend(layer, out);
    const auto third = out.end() - static_cast<long>(queries.size() / 3);
    last.insert(last.end(), third, out.end());
    CHECK(std::isnan(out[queries.size() / 3]) == (layer >= 1));
  }
  step.end();
  CHECK(same_bits(last, expected));
  CHECK_THROWS_AS(pipeline.tokens(b), freekv::usage_error);
  CHECK(pipeline.free_pages() == free_before + 9);  // of 70 tokens
  CHECK(run_step(pipeline, c, three, 1, step_phase::decode) ==
        run_step(alone.pipeline, alone.id, three, 1, step_phase::decode));
}

TEST_CASE("pages that cannot be written fail the append, which can be repeated", "[store_in_file]") {
  const auto s = tiny_settings();
  const text source(s, head_dim, 200, 9);
  const folder where;
  fresh expected(s), filed(in_file(s, where));
  for (auto* f : {&expected, &filed}) prompt_only(f->pipeline, f->id, source, 47);
  const auto rows = source.at(1, 47, 1), first = source.at(0, 47, 1);
  auto step = filed.pipeline.begin_step({{filed.id}});
  std::vector<float> out(rows.queries.size());
  step.append<float>(0, {.keys = first.keys, .values = first.values, .queries = first.queries});
  step.attend(0, out);
  const auto append = [&] {
    step.append<float>(1, {.keys = rows.keys, .values = rows.values, .queries = rows.queries});
  };
  {
    const short_files limit(0);
    for (int i = 0; i < 2; ++i) try {
        append();
        FAIL("written beyond the limit");
      } catch (const store_error& error) {
        CHECK(error.system_error == EFBIG);
        CHECK(error.operation == freekv::store_operation::write);
        CHECK_THAT(error.what(), Catch::StartsWith("sequence 0: store file " + where.file() + ": writing "));
      }
  }
  append();
  step.attend(1, out);
  const auto last = source.at(2, 47, 1);
  step.append<float>(2, {.keys = last.keys, .values = last.values, .queries = last.queries});
  step.attend(2, out);
  step.end();
  const auto of_expected = run_step(expected.pipeline, expected.id, source, 1, step_phase::decode);
  CHECK(std::equal(out.begin(), out.end(), of_expected.out.end() - static_cast<long>(out.size())));
  CHECK(decode(expected.pipeline, expected.id, source, 40) == decode(filed.pipeline, filed.id, source, 40));
}

TEST_CASE("whichever write of prompts fails, their append can be repeated: not a bit is different",
          "[store_in_file]") {
  auto s = tiny_settings();
  s.capacity.max_sequences = 2;
  s.capacity.store_file = failing_file::options();
  const text one(s, head_dim, 100, 11), two(s, head_dim, 100, 12);
  const auto run = [&](bool from_blocks, int failing, int& failed) {
    freekv::host_backend backend;
    tiny_pipeline pipeline(s, backend);
    const auto a = pipeline.open(), b = pipeline.open();
    prompt_only(pipeline, a, one, 20);
    prompt_only(pipeline, b, two, 13);
    // Both begin and end inside pages, and where the first pages' rows are kept the last ones' are to be.
    auto step = pipeline.begin_step({{a, 10, step_phase::prefill}, {b, 20, step_phase::prefill}});
    failing_file::writes_left = failing;
    for (int layer = 0; layer < s.model.layers; ++layer) {
      std::vector<float> keys, values;
      std::vector<freekv::paged_blocks<const float>> tables;
      const std::int32_t first_block[] = {0};
      for (const auto& [source, before, after] : {std::tuple{&one, 20, 30}, {&two, 13, 33}}) {
        const auto rows = source->at(layer, before, after - before), all = source->at(layer, 0, after);
        keys.insert(keys.end(), rows.keys.begin(), rows.keys.end());
        values.insert(values.end(), rows.values.begin(), rows.values.end());
        tables.push_back(
            {{all.keys.data(), all.values.data(), 0, 2 * head_dim, head_dim, after}, first_block});
      }
      const auto append = [&] {
        if (from_blocks)
          step.append_from<float>(layer, tables);
        else
          step.append<float>(layer, {.keys = keys, .values = values});
      };
      try {
        append();
      } catch (const store_error&) {
        ++failed;
        append();
      }
      pipeline.synchronize();  // the tables go
    }
    step.end();
    failing_file::writes_left = -1;
    std::vector<std::vector<sequence_result>> steps;
    for (int i = 0; i < 6; ++i) steps.push_back(run_step(pipeline, {{a, &one}, {b, &two}}));
    return steps;
  };
  for (const bool from_blocks : {false, true}) {
    int failing = 0, none = 0, failed = 1;
    const auto expected = run(from_blocks, -1, none);
    for (; failed > 0; ++failing) {
      failed = 0;
      INFO("write " << failing << (from_blocks ? " from blocks" : ""));
      CHECK(run(from_blocks, failing, failed) == expected);
    }
    CHECK(failing == 1 + 2 * 4);  // of two layers, each one page and three
  }
}

TEST_CASE("a file that cannot be had is refused before anything is taken", "[store_in_file]") {
  auto s = tiny_settings();
  freekv::host_backend backend;
  s.capacity.store_file = {.path = "/nowhere/at/all"};
  CHECK_THROWS_AS(tiny_pipeline(s, backend), store_error);
  const folder where;
  const short_files limit(4096);
  CHECK_THROWS_WITH(tiny_pipeline(in_file(s, where), backend), Catch::Contains("reserving"));
  CHECK_FALSE(std::filesystem::exists(where.file()));
  s.capacity.store_file = {.path = ""};
  CHECK_THROWS_AS(tiny_pipeline(s, backend), freekv::settings_error);
}

TEST_CASE("pages in a file are counted there", "[store_in_file]") {
  const folder where;
  auto s = tiny_settings();
  freekv::host_backend backend;
  const auto memory = tiny_pipeline::footprint(s, backend).bytes();
  s = in_file(s, where);
  const auto bytes = tiny_pipeline::footprint(s, backend).bytes();
  CHECK_FALSE(std::filesystem::exists(where.file()));
  // 25 pages of 8 tokens, 2 heads, keys and values of 24 halves; one of three layers is complete.
  constexpr std::size_t page = 8 * 2 * 2 * 24 * 2;
  CHECK(memory.store == 3 * 25 * page);
  CHECK(memory.file == 0);
  CHECK(bytes.file == 2 * 25 * page);
  CHECK(bytes.store == 25 * page + 2 * page);  // and the open page of a sequence in the other layers
  const tiny_pipeline pipeline(s, backend);
  CHECK(std::filesystem::file_size(where.file()) == bytes.file);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST_CASE("a context larger than the memory that a process may have decodes from a file", "[store_in_file]") {
  using pipeline_type =
      freekv::retrieval_pipeline<freekv::kv_shape<freekv::half, 64>, freekv::complete_first<0>>;
  pipeline_type::settings s;
  s.model.query_heads = s.model.kv_heads = 4;
  s.capacity.max_tokens = 128 << 10;  // 128 MiB of keys and values
  constexpr int chunk = 1024, steps = 8;
  constexpr std::size_t limit = 64 << 20;
  const auto run = [&](auto make) {
    freekv::host_backend backend({.overlap = false});
    auto p = make(backend);
    const auto id = p->open();
    dice d(1);
    const std::size_t row = 4 * 64;
    std::vector<freekv::half> keys(chunk * row), values(chunk * row);
    for (int done = 0; done + 2 * chunk <= s.capacity.max_tokens; done += chunk) {
      for (auto* rows : {&keys, &values})
        for (std::size_t i = 0; i < rows->size(); ++i)
          (*rows)[i] = freekv::from_float<freekv::half>(static_cast<float>(d.below(2001) - 1000) * 1e-3f);
      auto prompt = p->begin_step({{id, chunk, step_phase::prefill}});
      prompt.append(0, {.keys = keys, .values = values});
      prompt.end();
    }
    std::vector<float> all;
    for (int step = 0; step < steps; ++step) {
      const auto q = normals(d, row);
      std::vector<float> out(row);
      auto decode = p->begin_step({{id}});
      decode.append(
          0, {.keys = std::span(keys).first(row), .values = std::span(values).first(row), .queries = q});
      decode.attend(0, out);
      decode.end();
      all.insert(all.end(), out.begin(), out.end());
    }
    return all;
  };
  const auto in_memory = [&](freekv::host_backend& backend) {
    return std::make_unique<pipeline_type>(s, backend);
  };
  const auto from_file = [&](freekv::host_backend& backend) {
    auto filed = s;
    filed.capacity.store_file = {.path = std::filesystem::temp_directory_path().string(), .uring = false};
    return std::make_unique<pipeline_type>(filed, backend);
  };
  const std::vector<float> expected = run(in_memory);

  // In a child, since a limit of the address space is for good.
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    std::size_t pages = 0;
    if (FILE* statm = std::fopen("/proc/self/statm", "r")) {
      if (std::fscanf(statm, "%zu", &pages) != 1) _exit(3);
      std::fclose(statm);
    }
    const rlim_t most = pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) + limit;
    const rlimit now{most, most};
    if (setrlimit(RLIMIT_AS, &now) != 0) _exit(4);
    try {
      run(in_memory);
      _exit(5);  // the limit limits nothing
    } catch (const std::bad_alloc&) {
    }
    try {
      const auto out = run(from_file);
      const auto bytes = out.size() * sizeof(float);
      _exit(write(ends[1], out.data(), bytes) == static_cast<ssize_t>(bytes) ? 0 : 6);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      _exit(7);
    }
  }
  std::vector<float> out(expected.size());
  close(ends[1]);
  std::size_t got = 0;
  for (ssize_t n; (n = read(ends[0], reinterpret_cast<char*>(out.data()) + got, out.size() * 4 - got)) > 0;)
    got += static_cast<std::size_t>(n);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(same_bits(out, expected));
}
#endif
