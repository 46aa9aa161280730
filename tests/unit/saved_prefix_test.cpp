// Prefixes that are saved and loaded, by other processes too: sequences that begin with one give what its
// rows would give, bit for bit, and what is damaged or of something else is an error.

#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <freekv/storage/checked_stream.hpp>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "../catch.hpp"
#include "../examples/run_program.hpp"
#include "../files.hpp"
#include "../mentions.hpp"
#include "../sanitized.hpp"
#include "random_settings.hpp"

namespace {

using namespace tests;
using Catch::Contains;
using freekv::layer_kind;
using freekv::prefix_error;

constexpr std::uint64_t model = 0xfeedface12345678;

/// What tiny_pipeline does not have: layouts, codecs, codebooks, pinned units, kinds by head.
using rich_pipeline = freekv::retrieval_pipeline<
    freekv::kv_shape<freekv::bfloat16, 64>, freekv::page_size<freekv::dynamic>, freekv::unit<freekv::dynamic>,
    freekv::any_of<freekv::layout_pair<freekv::nhd, freekv::hnd>,
                   freekv::layout_pair<freekv::hnd, freekv::nhd>>,
    freekv::any_of<freekv::mean, freekv::key_codes<4, 4>,
                   freekv::coarse_to_fine<freekv::mean, freekv::key_subspace<8, 4>, 2>>,
    freekv::any_of<freekv::no_pins, freekv::pin_outliers<2>>,
    freekv::any_of<freekv::identity, freekv::cast<freekv::fp8_e4m3>, freekv::int4_channel,
                   freekv::low_rank_keys<freekv::dynamic>, freekv::key_channels>,
    freekv::by_head, freekv::any_of<freekv::resident, freekv::in_place>>;

/// Data of rich_pipeline's policies: of 3 layers of 2 heads.
struct rich_data {
  std::vector<float> books, basis, factors, frequencies;
  std::vector<std::uint8_t> channels;
  explicit rich_data(std::uint64_t seed) {
    dice d(seed);
    const auto add = [](std::vector<float>& to, const std::vector<float>& more) {
      to.insert(to.end(), more.begin(), more.end());
    };
    for (int layer = 0; layer < 3; ++layer) {
      add(books, random_codebooks(d, form()));
      add(basis, random_basis(d, 2, 8, 64));
      add(factors, random_factors(d, 2, 40, 64));
    }
    for (int pair = 0; pair < 20; ++pair) frequencies.push_back(d.uniform());
    for (int byte = 0; byte < 3 * 2 * 64 / 8; ++byte)  // 32 of 64 channels
      channels.push_back(d.one_of<std::uint8_t>({0x0f, 0x3c, 0xa5, 0x71, 0xe8}));
  }
  static freekv::key_codebooks form() { return {nullptr, 3, 2, 64, 4, 2, 4, 3}; }
  freekv::key_codes<4, 4> codes() const {
    freekv::key_codes<4, 4> summary{.books = form()};
    summary.books.data = books.data();
    return summary;
  }
  freekv::coarse_to_fine<freekv::mean, freekv::key_subspace<8, 4>, 2> two_stages() const {
    freekv::coarse_to_fine<freekv::mean, freekv::key_subspace<8, 4>, 2> summary;
    summary.fine.basis = {basis.data(), 3, 2, 8, 64};
    return summary;
  }
  freekv::low_rank_keys<freekv::dynamic> low_rank() const {
    return {{40}, {factors.data(), 3, 2, 40, 64}, {frequencies.data(), 20, freekv::rotary_pairs::halves}};
  }
  freekv::key_channels thin() const { return {.pruned = 0.5f, .lists = {channels.data(), 3, 2, 64}}; }
};
const rich_data& data() {
  static const rich_data one(7);
  return one;
}

/// Codecs take turns by `seed`.
rich_pipeline::settings random_rich_settings(dice& d, std::uint64_t seed) {
  rich_pipeline::settings s;
  s.model = {.layers = 3, .query_heads = 4, .kv_heads = 2};
  s.page = {{d.one_of({8, 16})}};
  s.budget = {.sink = 16, .window = 16, .selected_units = 3};
  s.capacity.max_tokens = 200;
  s.capacity.max_decode_rows = d.one_of({1, 3});
  switch (d.below(3)) {
    case 0:
      s.summary = data().codes();
      break;
    case 1:
      s.summary = data().two_stages();
      break;
    default:
      s.unit = {{d.one_of({0, 4})}};
  }
  if (d.below(2) == 0) s.pinning = freekv::pin_outliers<2>{};
  switch (seed % 5) {
    case 0:
      s.codec = freekv::cast<freekv::fp8_e4m3>{};
      break;
    case 1:
      s.codec = freekv::int4_channel{};
      break;
    case 2:
      s.codec = data().low_rank();
      break;
    case 3:
      s.codec = data().thin();
      break;
    default:
      break;
  }
  s.plan.kv_heads = 2;
  for (int i = 0; i < 6; ++i)
    s.plan.kinds.push_back(
        d.one_of({layer_kind::retrieval, layer_kind::retrieval, layer_kind::complete, layer_kind::window}));
  return s;
}

/// What a pipeline that loads a prefix may have otherwise than the one that saved it.
void change_freely(rich_pipeline::settings& s, dice& d) {
  if (d.below(2) == 0) s.layouts = freekv::layout_pair<freekv::hnd, freekv::nhd>{};
  if (d.below(2) == 0) s.route = freekv::in_place{};
  s.capacity.store_file.reset();
  if (d.below(2) == 0) s.capacity.store_file = {.path = "/tmp", .direct = d.below(2) == 0};
  s.budget.selected_units = d.between(2, 4);
  s.capacity.max_sequences = 3;
}
void change_freely(tiny_pipeline::settings& s, dice& d) {
  if (d.below(2) == 0) s.route = freekv::in_place{};
  s.capacity.store_file.reset();
  if (d.below(2) == 0) s.capacity.store_file = {.path = "/tmp", .direct = d.below(2) == 0};
  s.capacity.max_sequences = 3;
}

/// A pipeline with one sequence.
template <class Pipeline>
struct one_sequence {
  explicit one_sequence(const typename Pipeline::settings& s) : pipeline(s, backend), id(pipeline.open()) {}
  freekv::host_backend backend{{.threads = 2, .bytes_per_thread = 512}};
  Pipeline pipeline;
  freekv::sequence_id id;
};

/// Saves a prefix of a prompt, loads it where other things go on, and holds sequences that begin with it to
/// one that was given the rows.
template <class Pipeline>
void expect_same(typename Pipeline::settings s, std::uint64_t seed, dice& d) {
  constexpr int longest = 160, d_of_key = Pipeline::head_dim;
  const int prompt = d.between(0, 100), page = s.page.tokens, tokens = prompt / page * page;
  const text source(s, d_of_key, longest, seed), other(s, d_of_key, longest, seed + 1000);
  const scratch_folder folder;
  const std::string path = (folder / "prefix").string();
  {
    one_sequence<Pipeline> first(s);
    if (prompt > 0) prompt_only(first.pipeline, first.id, source, prompt);
    decode(first.pipeline, first.id, source, 3);
    first.pipeline.save_prefix(first.pipeline.keep_prefix(first.id, prompt), path, model);
    // It may go on at once.
    decode(first.pipeline, first.id, source, 2);
  }
  CHECK(folder.listing() == std::vector<std::string>{"prefix"});

  change_freely(s, d);
  freekv::host_backend backend({.overlap = seed % 2 == 0});
  Pipeline pipeline(s, backend);
  const int all_pages = pipeline.free_pages();
  const auto busy = pipeline.open(), gone = pipeline.open();  // so that pages are not taken in order
  prompt_only(pipeline, busy, other, 2 * page + 3);
  prompt_only(pipeline, gone, other, page);
  prompt_only(pipeline, busy, other, page);
  pipeline.release(gone);
  decode(pipeline, busy, other, 1);
  const int free = pipeline.free_pages();
  std::optional<freekv::prefix> start(pipeline.load_prefix(path, model));
  CHECK(start->pages() == tokens / page);
  CHECK(pipeline.free_pages() == free - tokens / page);
  const auto a = pipeline.open(*start), b = pipeline.open(*start);
  start.reset();
  for (const auto& [id, end] : {std::pair(a, &source), std::pair(b, &other)}) {
    const text spliced = text::spliced(source, tokens, *end);
    one_sequence<Pipeline> alone(s);
    if (tokens > 0) prompt_only(alone.pipeline, alone.id, spliced, tokens);
    const auto expected = decode(alone.pipeline, alone.id, spliced, 12);
    decode(pipeline, busy, other, 1);
    CHECK(decode(pipeline, id, spliced, 12) == expected);
  }
  for (const auto id : {a, b, busy}) pipeline.release(id);
  CHECK(pipeline.free_pages() == all_pages);
}

/// A saved prefix of 3 pages in memory, and a pipeline that it fits.
struct saved {
  tiny_pipeline::settings s = tiny_settings();
  text source{s, head_dim, 60, 1};
  fresh used{s};
  std::string bytes;

  explicit saved(int prompt = 24) : source(s, head_dim, prompt + 30, 1) {
    prompt_only(used.pipeline, used.id, source, prompt);
    save();
  }
  void save() {
    bytes.clear();
    used.pipeline.save_prefix(
        used.pipeline.keep_prefix(used.id, used.pipeline.tokens(used.id)),
        [this](std::span<const std::byte> more) {
          bytes.append(reinterpret_cast<const char*>(more.data()), more.size());
        },
        model);
  }
};

/// Reads from a string; what it lacks it says.
struct ended : std::runtime_error {
  using std::runtime_error::runtime_error;
};
auto reader_of(const std::string& bytes) {
  return [&bytes, at = std::make_shared<std::size_t>(0)](std::span<std::byte> to) {
    if (to.size() > bytes.size() - *at) throw ended("the stream has ended");
    std::memcpy(to.data(), bytes.data() + *at, to.size());
    *at += to.size();
  };
}

/// The sentence of a prefix_error; "" where there is none.
template <class Pipeline>
std::string refusal_of(Pipeline& pipeline, const std::string& path, std::uint64_t of_model = model) {
  try {
    const auto loaded = pipeline.load_prefix(path, of_model);
    return "";
  } catch (const prefix_error& error) {
    return error.what();
  }
}

}  // namespace

TEST_CASE("a loaded prefix is as its rows appended, bit for bit: summaries, units, plans, the store's place",
          "[saved_prefix]") {
  for (std::uint64_t seed = 1; seed <= some_of(40u); ++seed) {
    INFO("seed " << seed);
    dice d(seed);
    expect_same<tiny_pipeline>(random_settings(d), seed, d);
  }
}

TEST_CASE("and with codecs, codebooks, pinned units, layouts and kinds by head", "[saved_prefix]") {
  std::set<std::string> codecs, summaries;
  for (std::uint64_t seed = 1; seed <= some_of(40u); ++seed) {
    INFO("seed " << seed);
    dice d(seed);
    auto s = random_rich_settings(d, seed);
    codecs.insert(freekv::detail::printed(s.codec));
    summaries.insert(freekv::detail::printed(s.summary));
    if (d.below(2) == 0) s.capacity.store_file = {.path = "/tmp", .direct = d.below(2) == 0};
    expect_same<rich_pipeline>(s, seed, d);
  }
  CHECK(codecs.size() == 5);
  CHECK(summaries.size() == 3);
}

TEST_CASE("a prefix has all pages of layers with a sliding window too", "[saved_prefix]") {
  using sliding_pipeline =
      freekv::retrieval_pipeline<freekv::kv_shape<float, 24>, freekv::page_size<8>, freekv::by_layer>;
  sliding_pipeline::settings s;
  s.model = {.layers = 3, .query_heads = 2, .kv_heads = 1};
  s.budget = {.sink = 8, .window = 16, .selected_units = 2};
  s.capacity.max_tokens = 160;
  s.attention.sliding_window = 21;
  s.plan.kinds = {layer_kind::sliding, layer_kind::retrieval, layer_kind::window};
  const text source(s, 24, 160, 1);
  const scratch_folder folder;
  const std::string path = (folder / "prefix").string();
  one_sequence<sliding_pipeline> first(s), second(s);
  prompt_only(first.pipeline, first.id, source, 96);
  first.pipeline.save_prefix(first.pipeline.keep_prefix(first.id, 96), path, model);
  s.capacity.max_sequences = 2;
  one_sequence<sliding_pipeline> loads(s);
  const auto id = loads.pipeline.open(loads.pipeline.load_prefix(path, model));
  prompt_only(second.pipeline, second.id, source, 96);
  CHECK(decode(loads.pipeline, id, source, 40) == decode(second.pipeline, second.id, source, 40));
}

TEST_CASE("writes a prefix for another process", "[.saves]") {
  const auto s = tiny_settings();
  fresh used(s);
  prompt_only(used.pipeline, used.id, text(s, head_dim, 120, 5), 90);
  used.pipeline.save_prefix(used.pipeline.keep_prefix(used.id, 90), std::getenv("FREEKV_TEST_PREFIX"), model);
}

TEST_CASE("another process's prefix is loaded, and takes an older one's place", "[saved_prefix]") {
  const scratch_folder folder;
  const std::string path = (folder / "prefix").string();
  store(path, "an older one");
  ::setenv("FREEKV_TEST_PREFIX", path.c_str(), 1);
  const program_end end = run_program({"/proc/self/exe", "[.saves]"});
  INFO(end);
  REQUIRE(end.exit_code == 0);
  CHECK(folder.listing() == std::vector<std::string>{"prefix"});
  auto s = tiny_settings();
  s.capacity.max_sequences = 2;
  const text source(s, head_dim, 120, 5);
  fresh alone(s), loads(s);
  prompt_only(alone.pipeline, alone.id, source, 88);
  const auto id = loads.pipeline.open(loads.pipeline.load_prefix(path, model));
  CHECK(decode(loads.pipeline, id, source, 30) == decode(alone.pipeline, alone.id, source, 30));
}

TEST_CASE("a prefix goes through a stream to a pipeline of the same settings", "[saved_prefix]") {
  saved from;
  auto s = from.s;
  s.capacity.max_sequences = 2;
  fresh alone(s), loads(s);
  prompt_only(alone.pipeline, alone.id, from.source, 24);
  const auto id = loads.pipeline.open(loads.pipeline.load_prefix(reader_of(from.bytes), model));
  CHECK(decode(loads.pipeline, id, from.source, 20) == decode(alone.pipeline, alone.id, from.source, 20));

  const std::string before = from.bytes;
  const auto saves_to = [&](std::span<const std::byte>) { throw ended("the peer has hung up"); };
  CHECK_THROWS_AS(
      from.used.pipeline.save_prefix(from.used.pipeline.keep_prefix(from.used.id, 24), saves_to, model),
      ended);
  from.save();
  CHECK(from.bytes == before);
}

TEST_CASE("every byte that is damaged is found, and nothing has changed", "[saved_prefix]") {
  saved from;
  dice d(1);
  tiny_pipeline& pipeline = from.used.pipeline;
  const int free = pipeline.free_pages();
  const std::string whole = from.bytes;
  CHECK(whole.size() > 5000);
  std::size_t accepted = 0, tried = 0;
  const auto load = [&](const std::string& bytes) {
    ++tried;
    try {
      const auto loaded = pipeline.load_prefix(reader_of(bytes), model);
      ++accepted;
    } catch (const prefix_error&) {
    } catch (const ended&) {  // a length that is longer
    }
    if (pipeline.free_pages() != free) FAIL("pages are lost");
  };
  for (std::size_t at = 0; at < whole.size(); at += sanitized ? 7 : 1) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ d.between(1, 255));
    load(damaged);
    if (at < 600)
      for (int bit = 0; bit < 8; ++bit) {
        damaged = whole;
        damaged[at] = static_cast<char>(damaged[at] ^ (1 << bit));
        load(damaged);
      }
  }
  CHECK(accepted == 0);
  for (int i = 0; i < some_of(3000); ++i) {  // several faults at once
    std::string damaged = whole;
    for (int faults = d.between(2, 40); faults > 0; --faults) {
      char& byte = damaged[count(d.below(static_cast<int>(whole.size())))];
      byte = static_cast<char>(byte ^ d.one_of({0x80, 0x01, d.between(1, 255)}));
    }
    if (damaged != whole) load(damaged);
  }
  CHECK(accepted == 0);
  CHECK(tried > some_of(8000u));
  load(whole);
  CHECK(accepted == 1);
}

TEST_CASE("blocks of a large prefix that are damaged, moved or another's are found", "[saved_prefix]") {
  tiny_pipeline::settings s = tiny_settings();
  s.capacity.max_tokens = 4000;
  s.capacity.max_sequences = 2;
  const auto save = [&](std::uint64_t seed) {
    fresh used(s);
    prompt_only(used.pipeline, used.id, text(s, head_dim, 3000, seed), 3000);
    std::string bytes;
    used.pipeline.save_prefix(
        used.pipeline.keep_prefix(used.id, 3000),
        [&](std::span<const std::byte> more) {
          bytes.append(reinterpret_cast<const char*>(more.data()), more.size());
        },
        model);
    return bytes;
  };
  const std::string whole = save(1), other = save(2);
  REQUIRE(whole.size() == other.size());
  constexpr std::size_t block = freekv::detail::checked_blocks::room;
  REQUIRE(whole.size() / block >= 6);
  fresh loads(s);
  const int free = loads.pipeline.free_pages();
  int accepted = 0;
  const auto load = [&](const std::string& bytes) {
    try {
      const auto loaded = loads.pipeline.load_prefix(reader_of(bytes), model);
      ++accepted;
    } catch (const prefix_error&) {
    }
    if (loads.pipeline.free_pages() != free) FAIL("pages are lost");
  };
  dice d(3);
  for (int i = 0; i < some_of(200); ++i) {
    std::string damaged = whole;
    char& byte = damaged[count(d.below(static_cast<int>(whole.size())))];
    byte = static_cast<char>(byte ^ d.between(1, 255));
    load(damaged);
  }
  const std::size_t first = whole.find("pinning none\n") + 13 + 8;
  for (std::size_t a = 0; a < 3; ++a) {
    std::string damaged = whole;
    std::swap_ranges(damaged.begin() + static_cast<long>(first + a * block),
                     damaged.begin() + static_cast<long>(first + (a + 1) * block),
                     damaged.begin() + static_cast<long>(first + 4 * block));
    CHECK(damaged != whole);
    load(damaged);
    if (a > 0) load(whole.substr(0, first + a * block) + other.substr(first + a * block));
    load(whole.substr(0, first + a * block) + other.substr(first + a * block, block) +
         whole.substr(first + (a + 1) * block));
  }
  CHECK(accepted == 0);
  load(whole);
  load(other);
  CHECK(accepted == 2);
}

TEST_CASE("a file of any other length is refused", "[saved_prefix]") {
  saved from;
  const scratch_folder folder;
  const std::string path = (folder / "prefix").string();
  store(path, from.bytes + "x");
  CHECK_THAT(refusal_of(from.used.pipeline, path),
             Contains("prefix file " + path + " is damaged: it has " + std::to_string(from.bytes.size() + 1) +
                      " bytes, and " + std::to_string(from.bytes.size()) +
                      " were written; remove it, and save the prefix again"));
  const int free = from.used.pipeline.free_pages();
  store(path, from.bytes);
  int refused = 0;
  const std::size_t step = sanitized ? 7 : 1;
  std::size_t cuts = 0;
  for (std::size_t length = from.bytes.size(); length-- > 0;) {
    if (length > 700 && length % step != 0) continue;
    fs::resize_file(path, length);
    ++cuts;
    refused += refusal_of(from.used.pipeline, path).find("is damaged") != std::string::npos;
  }
  CHECK(refused == static_cast<int>(cuts));
  CHECK(from.used.pipeline.free_pages() == free);
}

TEST_CASE("a prefix of thinner keys fits pipelines with the same lists of channels alone", "[saved_prefix]") {
  const scratch_folder folder;
  const std::string path = (folder / "prefix").string();
  dice d(2);
  auto s = random_rich_settings(d, 2);
  s.plan.kinds.assign(6, layer_kind::retrieval);
  s.codec = data().thin();
  one_sequence<rich_pipeline> first(s);
  prompt_only(first.pipeline, first.id, text(s, 64, 40, 1), 40);
  first.pipeline.save_prefix(first.pipeline.keep_prefix(first.id, 40), path, model);
  one_sequence<rich_pipeline> same(s);
  CHECK(same.pipeline.load_prefix(path, model).pages() > 0);
  const rich_data others(8);
  s.codec = others.thin();
  one_sequence<rich_pipeline> loads(s);
  check_mentions(refusal_of(loads.pipeline, path),
                 {"is of \"codec key_channels(0.5) of data 0x",
                  "and the pipeline of \"codec key_channels(0.5) of data 0x"});
}

TEST_CASE("what a prefix does not fit is said, with both values", "[saved_prefix]") {
  const scratch_folder folder;
  const std::string path = (folder / "prefix").string();
  dice d(1);
  auto s = random_rich_settings(d, 1);
  s.page = {{16}};
  s.unit = {{0}};
  s.plan.kinds.assign(6, layer_kind::retrieval);
  s.plan.kinds[0] = s.plan.kinds[1] = s.plan.kinds[2] = layer_kind::complete;
  s.summary = data().codes();
  s.codec = data().low_rank();
  s.pinning = freekv::no_pins{};
  one_sequence<rich_pipeline> first(s);
  prompt_only(first.pipeline, first.id, text(s, 64, 40, 1), 40);
  first.pipeline.save_prefix(first.pipeline.keep_prefix(first.id, 40), path, model);
  const std::string header = load(path).substr(24, 300);
  check_mentions(header,
                 {"model 0xfeedface12345678\n", "element bf16\n", "head_dim 64\n", "page 16\n", "unit 16\n",
                  "kv_heads 2\n", "layers 3\n", "plan c(cr)r\n", "codec low_rank_keys(40) of data 0x",
                  "summary key_codes(4, 4) of data 0x", "pinning none\n"});

  const rich_data others(8);
  std::vector<float> near = data().books;
  near[near.size() / 2] += 0.01f;
  const auto expect = [&](const std::function<void(rich_pipeline::settings&)>& change, const std::string& has,
                          const std::string& wants) {
    auto other = s;
    change(other);
    one_sequence<rich_pipeline> loads(other);
    const int free = loads.pipeline.free_pages();
    check_mentions(
        refusal_of(loads.pipeline, path),
        {"prefix file " + path + " is of \"" + has, "and the pipeline of \"" + wants,
         "load it where settings and model are those that it was saved with, or save the prefix again"});
    CHECK(loads.pipeline.free_pages() == free);
  };
  using settings = rich_pipeline::settings;
  expect([](settings& o) { o.page = {{8}}; }, "page 16\"", "page 8\"");
  expect([](settings& o) { o.unit = {{8}}; }, "unit 16\"", "unit 8\"");
  expect(
      [](settings& o) {
        o.model.layers = 2;
        o.plan.kinds.resize(4);
      },
      "layers 3\"", "layers 2\"");
  expect([](settings& o) { o.plan.kinds[2] = layer_kind::retrieval; }, "plan c(cr)r\"", "plan crr\"");
  expect([](settings& o) { o.plan.kinds[5] = layer_kind::window; }, "plan c(cr)r\"", "plan c(cr)(rw)\"");
  expect([](settings& o) { o.codec = freekv::identity{}; }, "codec low_rank_keys(40) of data ",
         "codec identity\"");
  expect([&](settings& o) { o.codec = others.low_rank(); }, "codec low_rank_keys(40) of data ",
         "codec low_rank_keys(40) of data ");
  expect(
      [](settings& o) {
        auto codec = data().low_rank();
        codec.rotary.of = freekv::rotary_pairs::neighbours;
        o.codec = codec;
      },
      "codec low_rank_keys(40) of data ", "codec low_rank_keys(40) of data ");
  expect([](settings& o) { o.codec = data().thin(); }, "codec low_rank_keys(40) of data ",
         "codec key_channels(0.5) of data 0x");
  expect([](settings& o) { o.summary = freekv::mean{}; }, "summary key_codes(4, 4) of data ",
         "summary mean\"");
  expect(
      [&](settings& o) {
        auto summary = data().codes();
        summary.books.data = near.data();
        o.summary = summary;
      },
      "summary key_codes(4, 4) of data ", "summary key_codes(4, 4) of data ");
  expect([](settings& o) { o.pinning = freekv::pin_outliers<2>{}; }, "pinning none\"",
         "pinning pin_outliers(2)\"");

  CHECK_THAT(
      refusal_of(first.pipeline, path, model + 1),
      Contains("is of \"model 0xfeedface12345678\", and the pipeline of \"model 0xfeedface12345679\""));
  CHECK(refusal_of(first.pipeline, path).empty());
  tiny_pipeline::settings tiny = tiny_settings();
  fresh other_shape(tiny);
  CHECK_THAT(refusal_of(other_shape.pipeline, path),
             Contains("\"element bf16\", and the pipeline of \"element f16\""));
  // A copy of the same data is the same data.
  const rich_data copy(7);
  s.codec = copy.low_rank();
  s.summary = copy.codes();
  one_sequence<rich_pipeline> same(s);
  CHECK(refusal_of(same.pipeline, path).empty());
}

TEST_CASE("files of another format, byte order or version are refused in sentences", "[saved_prefix]") {
  saved from;
  const scratch_folder folder;
  const std::string path = (folder / "prefix").string();
  std::string other = from.bytes;
  other[0] = 'f';
  store(path, other);
  CHECK(refusal_of(from.used.pipeline, path) ==
        "prefix file " + path + " is not a saved prefix; name one that save_prefix has written");
  other = from.bytes;
  std::reverse(other.begin() + 8, other.begin() + 12);
  store(path, other);
  CHECK(refusal_of(from.used.pipeline, path) ==
        "prefix file " + path +
            " is of a machine with the other byte order; save the prefix again on one like this");
  other = from.bytes;
  other[12] = 2;
  store(path, other);
  CHECK(
      refusal_of(from.used.pipeline, path) ==
      "prefix file " + path +
          " has version 2 of the format, and this library knows 1; save the prefix again with this library");
}

TEST_CASE("a prefix that finds no room is refused, and fits when there is some", "[saved_prefix]") {
  saved from;
  auto s = from.s;
  s.capacity.max_sequences = 2;
  s.capacity.store_tokens = 32;
  fresh loads(s);
  prompt_only(loads.pipeline, loads.id, from.source, 9);
  CHECK_THROWS_WITH(
      loads.pipeline.load_prefix(reader_of(from.bytes), model),
      "page pool exhausted: 2 of 4 in use, the prefix needs 3 more; release a sequence or raise the "
      "capacity in the settings");
  CHECK(loads.pipeline.free_pages() == 2);
  loads.pipeline.release(loads.id);
  CHECK(loads.pipeline.load_prefix(reader_of(from.bytes), model).pages() == 3);
  CHECK(loads.pipeline.free_pages() == 4);

  s = from.s;
  s.capacity.max_tokens = 23;
  s.capacity.store_tokens = 80;
  fresh shorter(s);
  CHECK_THROWS_WITH(shorter.pipeline.load_prefix(reader_of(from.bytes), model),
                    Contains("tokens of a sequence exhausted: 0 of 23 in use, the prefix needs 24 more"));
}

TEST_CASE("files that cannot be written or read are errors of the system, and an older file stays",
          "[saved_prefix]") {
  saved from;
  const scratch_folder folder;
  const std::string path = (folder / "prefix").string();
  auto& pipeline = from.used.pipeline;
  const auto kept = pipeline.keep_prefix(from.used.id, 24);
  CHECK_THROWS_WITH(
      pipeline.save_prefix(kept, (folder / "none" / "prefix").string(), model),
      "prefix file " + (folder / "none" / "prefix").string() +
          ": creating it failed: No such file or directory; name a file in a folder that exists and "
          "can be written");
  CHECK_THROWS_WITH(
      pipeline.load_prefix(path, model),
      "prefix file " + path + ": opening it failed: No such file or directory; name a file that can be read");
  CHECK_THROWS_AS(pipeline.save_prefix(kept, folder.path().string(), model), freekv::store_error);
  CHECK_THROWS_AS(pipeline.load_prefix(folder.path().string(), model), freekv::store_error);
  pipeline.save_prefix(kept, path, model);
  const std::string whole = load(path);
  CHECK(whole == from.bytes);
  for (const rlim_t most : {0u, 24u, 1000u, static_cast<unsigned>(whole.size()) - 1}) {
    std::signal(SIGXFSZ, SIG_IGN);
    rlimit before{};
    getrlimit(RLIMIT_FSIZE, &before);
    const rlimit now{most, before.rlim_max};
    setrlimit(RLIMIT_FSIZE, &now);
    try {
      pipeline.save_prefix(kept, path, model);
      FAIL("written beyond the limit");
    } catch (const freekv::store_error& error) {
      CHECK(error.operation == freekv::store_operation::write);
      CHECK(error.system_error == EFBIG);
      CHECK_THAT(error.what(),
                 Contains("prefix file " + path + ": writing ") && Contains("; raise the limit (ulimit -f)"));
    }
    setrlimit(RLIMIT_FSIZE, &before);
    CHECK(folder.listing() == std::vector<std::string>{"prefix"});
    CHECK(load(path) == whole);
  }
  pipeline.save_prefix(kept, path, model);
  CHECK(refusal_of(pipeline, path).empty());
}

TEST_CASE("a store's file that cannot be read or written fails the call alone", "[saved_prefix]") {
  saved from;
  auto s = from.s;
  s.capacity.max_sequences = 2;
  const scratch_folder folder;
  const std::string store_path = (folder / "store").string(), path = (folder / "prefix").string();
  s.capacity.store_file = {.path = store_path};
  fresh filed(s), alone(from.s);
  prompt_only(filed.pipeline, filed.id, from.source, 24);
  prompt_only(alone.pipeline, alone.id, from.source, 24);
  const auto kept = filed.pipeline.keep_prefix(filed.id, 24);
  const std::string content = load(store_path);
  fs::resize_file(store_path, 0);
  CHECK_THROWS_WITH(filed.pipeline.save_prefix(kept, path, model),
                    Contains("store file " + store_path + ": reading"));
  CHECK(folder.listing() == std::vector<std::string>{"store"});
  {
    std::signal(SIGXFSZ, SIG_IGN);
    rlimit before{};
    getrlimit(RLIMIT_FSIZE, &before);
    const rlimit now{0, before.rlim_max};
    setrlimit(RLIMIT_FSIZE, &now);
    const int free = filed.pipeline.free_pages();
    CHECK_THROWS_AS(filed.pipeline.load_prefix(reader_of(from.bytes), model), freekv::store_error);
    CHECK(filed.pipeline.free_pages() == free);
    setrlimit(RLIMIT_FSIZE, &before);
  }
  fs::resize_file(store_path, content.size());
  {
    std::fstream file(store_path, std::ios::in | std::ios::out | std::ios::binary);
    file.write(content.data(), static_cast<std::streamsize>(content.size()));
  }
  filed.pipeline.save_prefix(kept, path, model);
  CHECK(load(path) == from.bytes);
  const auto id = filed.pipeline.open(filed.pipeline.load_prefix(path, model));
  CHECK(decode(filed.pipeline, id, from.source, 20) == decode(alone.pipeline, alone.id, from.source, 20));
}

TEST_CASE("saving and loading are refused in a step, and another pipeline's prefix always",
          "[saved_prefix]") {
  saved from;
  auto& pipeline = from.used.pipeline;
  fresh other(from.s);
  const auto kept = pipeline.keep_prefix(from.used.id, 24);
  const auto nowhere = [](std::span<const std::byte>) {};
  CHECK_THROWS_WITH(other.pipeline.save_prefix(kept, nowhere, model),
                    "save_prefix: the prefix is of another pipeline");
  auto step = pipeline.begin_step({{from.used.id}});
  CHECK_THROWS_WITH(pipeline.save_prefix(kept, nowhere, model),
                    Contains("the step in progress has not ended"));
  CHECK_THROWS_WITH(pipeline.load_prefix(reader_of(from.bytes), model),
                    Contains("the step in progress has not ended"));
}

TEST_CASE("a checksum is another where one group of 8 bytes is, or the length, or what comes before",
          "[saved_prefix]") {
  dice d(1);
  for (int trial = 0; trial < 20000; ++trial) {
    std::vector<std::byte> bytes(count(d.between(1, 40)));
    for (std::byte& b : bytes) b = static_cast<std::byte>(d.below(256));
    const std::uint64_t sum = freekv::detail::checksum(bytes);
    const std::size_t group = count(d.below(static_cast<int>(bytes.size()))) / 8 * 8;
    auto other = bytes;
    for (std::size_t i = group; i < std::min(group + 8, other.size()); ++i)
      if (d.below(2) == 0) other[i] = static_cast<std::byte>(d.below(256));
    if (other != bytes && freekv::detail::checksum(other) == sum) FAIL("not found");
    other = bytes;  // two signs
    for (int i = 0; i < 2; ++i) other[count(d.below(static_cast<int>(other.size())))] ^= std::byte{0x80};
    if (other != bytes && freekv::detail::checksum(other) == sum) FAIL("two signs are not found");
    other = bytes;
    other.push_back(std::byte{0});
    if (freekv::detail::checksum(other) == sum) FAIL("a zero more is not found");
    if (freekv::detail::checksum(bytes, 1) == sum) FAIL("what comes before is not found");
  }
}
