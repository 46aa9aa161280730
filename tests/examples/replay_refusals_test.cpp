// What freekv-replay does not accept: one sentence on stderr, exit code 2, and nothing else touched.

#include <sys/stat.h>

#include "../catch.hpp"
#include "refusal.hpp"
#include "replay_case.hpp"

using namespace tests;

namespace {

/// A correct basis for it, of rank 24.
tensor_map good_basis(std::int64_t layers = 1, std::int64_t heads = 2, std::int64_t rank = 24,
                      std::int64_t d = 64) {
  return {
      {"mean", {"F32", {layers, heads, d}, std::string(to_size(layers * heads * d * 4), '\0')}},
      {"rows", {"F32", {layers, heads, rank, d}, std::string(to_size(layers * heads * rank * d * 4), '\0')}}};
}

/// A folder with a trace and a basis in which replays are refused.
class refusals {
 public:
  explicit refusals(const std::string& trace = good_trace().whole()) {
    store(folder / "trace", trace);
    store(folder / "basis", parts_of(good_basis(), {}).whole());
  }

  /// `arguments` behind the program, the trace and --out, with and without a file under the output's name.
  /// Each of `parts` is in the sentence.
  void refuse(const std::vector<std::string>& arguments, const std::vector<std::string>& parts,
              program_limits limits = {.address_space = two_gigabytes}) {
    std::vector<std::string> command{FREEKV_REPLAY, folder / "trace", "--out", folder / "out"};
    command.insert(command.end(), arguments.begin(), arguments.end());
    refuse_command(command, parts, limits);
    store(folder / "out", "an older file");
    refuse_command(command, parts, limits);
    CHECK(load(folder / "out") == "an older file");
    fs::remove(folder / "out");
  }
  void refuse_command(const std::vector<std::string>& command, const std::vector<std::string>& parts,
                      program_limits limits = {.address_space = two_gigabytes}) {
    std::string shown;
    for (const std::string& argument : command) shown += " " + argument.substr(0, 100);
    INFO(shown);
    const auto before = folder.listing();
    check_mentions(sentence_of(run_program(command, limits)), parts);
    CHECK(folder.listing() == before);
  }

  scratch_folder folder;
};

/// A trace that is wrong is refused with these words.
void refuse_trace(const std::string& trace, const std::vector<std::string>& parts) {
  refusals{trace}.refuse({}, parts);
}
void refuse_trace(const file_parts& trace, const std::vector<std::string>& parts) {
  refuse_trace(trace.whole(), parts);
}

/// good_trace() with its header changed.
template <class Change>
file_parts changed(const Change& change) {
  file_parts parts = good_trace();
  change(parts.header);
  return parts;
}

}  // namespace

TEST_CASE("the trace and basis of these tests are accepted as they are", "[replay]") {
  const refusals good;
  for (const char* basis : {"prompt", "basis"}) {
    const program_end end = run_program(
        {FREEKV_REPLAY, good.folder / "trace", "--out", good.folder / "out", "--variant",
         "freekv_key_subspace", "--basis", std::string(basis) == "prompt" ? basis : good.folder / basis},
        {.address_space = two_gigabytes});
    INFO(end);
    CHECK(end.exit_code == 0);
    CHECK(read_tensors(good.folder / "out").size() == 6);
  }
}

TEST_CASE("options that cannot be are refused with the number and what to choose", "[replay]") {
  refusals r;
  r.refuse({"--k", "0"}, {"--k 0", "at least one"});
  r.refuse({"--k", "-3"}, {"--k -3", "at least one"});
  r.refuse({"--variant", "full", "--k", "0"}, {"--k 0"});
  r.refuse({"--unit", "3"}, {"a unit of 3 tokens", "a page of 32", "divisor"});
  r.refuse({"--unit", "-1"}, {"a unit of -1 tokens"});
  r.refuse({"--unit", "4", "--summary", "key_sketch"}, {"key_sketch", "8 tokens at a time", "has 4"});
  r.refuse({"--variant", "infinigen", "--bits", "3"}, {"key_subspace", "8 tokens at a time", "has 1"});
  r.refuse({"--window", "0"}, {"window of 0", "page size 32"});
  r.refuse({"--window", "-32"}, {"window of -32"});
  r.refuse({"--window", "16"}, {"window of 16", "page size 32"});
  r.refuse({"--window", "48"}, {"window of 48", "page size 32"});
  r.refuse({"--sink", "48"}, {"sink of 48", "page size 32"});
  r.refuse({"--sink", "-32"}, {"sink of -32"});
  r.refuse({"--page", "7"}, {"page size 7", "multiple of 8"});
  r.refuse({"--page", "12"}, {"page size 12", "multiple of 8"});
  r.refuse({"--page", "264"}, {"page size 264", "256"});
  r.refuse({"--page", "0"}, {"page size 0"});
  r.refuse({"--page", "-8"}, {"page size -8"});
  for (const char* chunk : {"0", "-4", "5", "64"})
    r.refuse({"--summary", "chunk_means", "--chunk", chunk},
             {"chunk of " + std::string(chunk), "page of 32"});
  for (const char* rank : {"0", "-1", "65", "2000000000"})
    for (const fs::path& basis : {fs::path("prompt"), r.folder / "basis"})
      r.refuse({"--summary", "key_subspace", "--rank", rank, "--basis", basis},
               {std::string("rank ") + rank});
  for (const char* bits : {"0", "1", "5", "-3", "64"})
    r.refuse({"--summary", "key_subspace", "--bits", bits}, {bits + std::string(" bits"), "2, 3, 4 or 8"});
  for (const char* threads : {"0", "-1", "100000"})
    r.refuse({"--threads", threads}, {threads + std::string(" threads"), "1 to 1024"});
  r.refuse({"--sliding-window", "0"}, {"sliding_window is 0"});
  r.refuse({"--soft-cap", "-1"}, {"--soft-cap -1", "negative"});
  r.refuse({"--variant", "h2o", "--soft-cap", "30"}, {"h2o", "--soft-cap"});
  const auto refuse_values = [&](const char* variant, const char* values,
                                 const std::vector<std::string>& names) {
    r.refuse({"--variant", variant, "--eviction-values", values}, names);
  };
  refuse_values("snapkv", "windows=16", {"snapkv has no number \"windows\"", "kernel, window"});
  refuse_values("tova", "window=16", {"tova has no number \"window\"; it has none"});
  refuse_values("snapkv", "window=1.5", {"snapkv", "window of 1.5", "whole"});
  refuse_values("snapkv", "window=1e300", {"snapkv", "whole"});
  refuse_values("raas", "keeps_prompt=2", {"raas", "keeps_prompt of 2", "0 nor 1"});
  refuse_values("snapkv", "kernel=4", {"snapkv", "kernel of 4", "odd"});
  refuse_values("h2o", "recent=nan", {"--eviction-values recent", "nan", "finite"});
  refuse_values("snapkv", "window=8,window=9", {"window twice"});
  for (const char* values : {"", "window", "=16", "window=16,", "window=16,,kernel=5"})
    refuse_values("snapkv", values, {"--eviction-values", "window=16,kernel=5"});
  refuse_values("freekv", "window=16", {"--eviction-values", "freekv", "forgets"});
  r.refuse({"--heads", "heads", "--sliding-window", "8"}, {"--heads", "--sliding-window"});
  r.refuse({"--scale", "-0.5"}, {"--scale -0.5", "negative"});
  for (const char* scale : {"1e39", "1e-60"})
    for (const char* option : {"--scale", "--selection-scale"}) r.refuse({option, scale}, {scale, "float32"});
  for (const char* share : {"0", "-0.1", "1.1", "1e300"})
    r.refuse({"--selection", "top_p", "--top-p", share}, {"top_p", "share above 0, at most 1"});
  for (const char* bonus : {"-0.1", "1e7", "-1e300"})
    r.refuse({"--selection", "sticky_top_k", "--bonus", bonus}, {"bonus", "from 0 to 1000000"});
  for (const char* share : {"-0.1", "1.1", "-1e300"})
    for (const char* correction : {"mass_deficit", "missing_share"})
      r.refuse({"--correction", correction, "--delta", share}, {"delta", "share from 0 to 1"});
  r.refuse({"--correction", "verified_share", "--epsilon", "1.1"}, {"epsilon", "share from 0 to 1"});
  r.refuse({"--correction", "verified_share", "--delta", "0.6"}, {"delta", "to 0.5"});
  r.refuse({"--correction", "verified_share", "--samples", "1"}, {"1 samples", "from 2"});
  for (const char* steps : {"0", "-2"})
    r.refuse({"--correction", "every_n_steps", "--every", steps}, {"every " + std::string(steps) + " steps"});
  for (const char* bits : {"0", "3", "8", "-1"})
    r.refuse({"--summary", "key_sketch", "--bits", bits}, {bits + std::string(" bits"), "1, 2 or 4"});
  for (const char* times : {"0", "-1"})
    r.refuse({"--summary", "coarse_to_fine", "--times", times}, {times + std::string(" times")});
  r.refuse({"--spare", "-1"}, {"-1 spare slots"});
  r.refuse({"--spare", "2147483647"}, {"2147483647 spare slots", "0 to 536870912"});
  for (const char* option : {"--tau", "--scale", "--selection-scale", "--top-p", "--delta", "--epsilon"})
    for (const char* number :
         {"nan", "NaN", "-nan", "inf", "-inf", "infinity", "1e400", "", "0.9x", "x", " 1"})
      r.refuse({option, number}, {option});
  for (const char* option : {"--page", "--sink", "--window", "--k", "--chunk", "--rank", "--bits", "--times",
                             "--threads", "--basis-layer", "--every", "--spare", "--unit", "--samples"})
    for (const char* number : {"nan", "99999999999", "1.5", "", "1e2", "0x20", "eight", "8 "}) {
      r.refuse({option, number}, {option, "whole number"});
      if (sanitized) break;
    }
  r.refuse({"--k", "2000000000"}, {"--k 2000000000", "pages"});  // legal, but not to be written
}

TEST_CASE("unknown names are refused with the known ones", "[replay]") {
  refusals r;
  r.refuse({"--variant", "freekv2"}, {"freekv2", "streaming_llm", "freekv_key_subspace"});
  r.refuse({"--variant", ""}, {"--variant \"\"", "streaming_llm"});
  r.refuse({"--variant", "freekv_page_16"}, {"freekv_page_16", "streaming_llm"});  // --page says that
  r.refuse({"--summary", "median"},
           {"--summary \"median\"", "min_max", "centroid_box", "key_sketch", "key_subspace"});
  r.refuse({"--variant", "full", "--summary", "median"}, {"--summary \"median\""});
  r.refuse({"--summary-dtype", "int4"}, {"--summary-dtype \"int4\"", "standard", "key", "float32", "int8"});
  r.refuse({"--pooling", "sum"}, {"--pooling \"sum\"", "mean_softmax", "max_query"});
  r.refuse({"--selection", "top_q"}, {"--selection \"top_q\"", "top_k", "top_p", "sticky_top_k"});
  r.refuse({"--rows", "per_token"}, {"--rows \"per_token\"", "per_kv_head", "per_query_head", "per_layer"});
  r.refuse({"--rows", "per_query_head", "--correction", "mass_deficit"},
           {"per_query_head", "mass_deficit", "cosine_drift"});
  r.refuse({"--correction", "missing_share"}, {"missing_share", "min_max", "key_codes or key_subspace"});
  r.refuse({"--correction", "verified_share"}, {"verified_share", "min_max", "key_codes or key_subspace"});
  r.refuse({"--correction", "sometimes"}, {"sometimes", "cosine_drift", "mass_deficit", "always", "never",
                                           "every_n_steps", "missing_share", "verified_share"});
  r.refuse({"--drift-pool", "median"}, {"--drift-pool \"median\"", "mean", "min", "max"});
  r.refuse({"--residency", "random"}, {"--residency \"random\"", "first_unselected", "least_recently_used"});
  r.refuse({"--variant", "shadowkv"}, {"neither k_pre nor rope_base", "--rope-base"});
  r.refuse({"--codec", "low_rank_keys"}, {"--rope-base", "--rope-pairs neighbours"});
  r.refuse({"--codec", "low_rank_keys", "--rope-base", "0"}, {"--rope-base 0"});
  r.refuse({"--codec", "low_rank_keys", "--rope-base", "1e4", "--rope-pairs", "thirds"},
           {"thirds", "halves, neighbours"});
  r.refuse({"--codec", "low_rank_keys", "--rope-base", "1e4", "--key-rank", "-1"}, {"--key-rank -1"});
  r.refuse({"--pinning", "some"}, {"--pinning \"some\"", "no_pins, pin_outliers"});
  r.refuse({"--pinning", "pin_outliers", "--pinned", "-1"}, {"pin_outliers: -1 units"});
  r.refuse({"--thin", "0"}, {"thinned to a share of 0", "above 0"});
  r.refuse({"--thin", "1.5"}, {"thinned to a share of 1.5", "up to 1"});
  r.refuse({"--thin", "half"}, {"--thin", "\"half\"", "not a finite number"});
  r.refuse({"--thin", "0.5", "--variant", "h2o"}, {"h2o", "chooses by itself what stays"});
  r.refuse({"--thin", "0.5", "--codec", "low_rank_keys", "--rope-base", "10000"},
           {"low_rank_keys", "keep prompts whole"});
  r.refuse({"--thin", "0.5", "--sliding-window", "8"}, {"--thin", "--sliding-window"});
  r.refuse({"--variant", "mpcache", "--backend", "cuda"}, {"--thin", "mpcache", "--backend"});
  r.refuse({"--pinning", "pin_outliers", "--rows", "per_layer"}, {"per_layer", "no_pins"});
  r.refuse({"--variant", "think", "--pruned", "1"}, {"--pruned 1 is not a share from 0 to below 1"});
  r.refuse({"--codec", "key_channels", "--pruned", "-0.1"}, {"--pruned -0.1"});
  r.refuse({"--codec", "key_channels", "--pruned", "most"}, {"--pruned \"most\" is not a finite number"});
  r.refuse({"--codec", "int3"}, {"--codec \"int3\"", "identity", "fp8", "int4_channel"});
  r.refuse({"--codec", "int8_token", "--variant", "full"}, {"--codec", "full recalls nothing"});
  r.refuse({"--store-file", "/nowhere/at/all"}, {"store file /nowhere/at/all", "folder"});
  r.refuse({"--layout", "NHD"}, {"--layout \"NHD\"", "nhd", "hnd"});
  r.refuse({"--route", "direct"}, {"direct", "resident", "in_place"});
  r.refuse({"--dtype", "F16"}, {"F16", "stored", "f32", "f16", "bf16"});
  r.refuse({"--budget", "512"}, {"--budget", "--help"});
  r.refuse({"-k", "8"}, {"-k", "--help"});
  r.refuse({"second"}, {"second", "--help"});
  r.refuse({"--k"}, {"--k", "--help"});
  r.refuse({"--k", "3", "--k", "4"}, {"--k", "--help"});
  r.refuse({"--no\nsuch\rflag\x1b[31m"}, {"--no such flag"});
  r.refuse_command({FREEKV_REPLAY}, {"trace", "--help"});
  r.refuse_command({FREEKV_REPLAY, ""}, {"''"});
  r.refuse_command({FREEKV_REPLAY, "--out", r.folder / "out"}, {"trace", "--help"});
}

TEST_CASE("files that are no traces are refused", "[replay]") {
  refusals r;
  const auto refuse_file = [&](const std::string& name, const std::vector<std::string>& parts) {
    r.refuse_command({FREEKV_REPLAY, name, "--out", r.folder / "out"}, parts);
  };
  refuse_file(r.folder / "absent", {"absent", "No such file"});
  refuse_file(r.folder / "trace/below", {"Not a directory"});
  refuse_file(r.folder / "", {"directory"});
  REQUIRE(::mkfifo((r.folder / "fifo").c_str(), 0600) == 0);
  refuse_file(r.folder / "fifo", {"FIFO"});
  store(r.folder / "line\nbreak", "x");
  refuse_file(r.folder / "line\nbreak", {"break"});
  refuse_file(r.folder / "basis", {"no tensor 'q'"});

  const std::string good = good_trace().whole();
  refuse_trace(std::string(), {"empty"});
  refuse_trace("PK\x03\x04", {"4 bytes"});
  refuse_trace(std::string(1000, '\0'), {"header"});
  refuse_trace(std::string(1000, '\xff'), {"header length", "18446744073709551615"});
  for (const std::size_t bytes : {7, 8, 9, 100, 1000, 40000})
    refuse_trace(good.substr(0, bytes), {bytes == 7 ? "7 bytes" : bytes < 400 ? "truncated" : "truncated"});
  refuse_trace(good.substr(0, good.size() - 1), {"truncated"});
  refuse_trace(good + '\0', {"no tensor covers"});
}

TEST_CASE("files that lie about their sizes are refused without the memory they ask for", "[replay]") {
  const auto small = [](std::uint64_t length, const std::string& rest) {
    return std::string(reinterpret_cast<const char*>(&length), 8) + rest;
  };
  for (const std::uint64_t length :
       {~std::uint64_t{0}, std::uint64_t{1} << 63, std::uint64_t{1} << 40, std::uint64_t{100'000'001}})
    refuse_trace(small(length, good_trace().header.dump()), {"header length", std::to_string(length)});
  refuse_trace(small(99'999'999, good_trace().header.dump()), {"header length", "99999999"});

  const auto lie = [](const std::vector<std::int64_t>& q, const std::vector<std::int64_t>& kv,
                      std::uint64_t bytes) {
    nlohmann::json header{{"__metadata__", {{"prompt_len", "0"}}}};
    std::uint64_t offset = 0;
    for (const char* name : {"q", "k", "v"}) {
      header[name] = {{"dtype", "F32"},
                      {"shape", std::string(name) == "q" ? q : kv},
                      {"data_offsets", {offset, offset + bytes}}};
      offset += bytes;
    }
    return file_of(header.dump(), "");
  };
  constexpr std::int64_t huge = std::int64_t{1} << 40;
  refuse_trace(lie({huge, 1, 64}, {huge, 1, 64}, huge * 256), {"truncated"});
  refuse_trace(lie({huge, huge, huge}, {huge, huge, huge}, 0), {"overflows"});
  refuse_trace(lie({1 << 20, 32, 128}, {1 << 20, 8, 128}, 0), {"data_offsets"});
  // No bytes, and so no lie that the format could see.
  refuse_trace(lie({0, huge, 64}, {0, huge, 64}, 0), {"1024 heads"});
  refuse_trace(lie({0, 1 << 20, 64}, {0, 1 << 20, 64}, 0), {"1024 heads"});
  refuse_trace(lie({0, 1, huge}, {0, 1, huge}, 0), {"head_dim"});
  refuse_trace(lie({huge, 1, 0}, {huge, 1, 0}, 0), {"tokens"});
  refuse_trace(lie({1 << 29, 1, 0}, {1 << 29, 1, 0}, 0), {"head_dim 0"});
  refuse_trace(lie({1 << 29, 0, 64}, {1 << 29, 0, 64}, 0), {"heads"});
}

TEST_CASE("headers that contradict themselves are refused", "[replay]") {
  refuse_trace(file_of("[]", ""), {"'{'"});
  refuse_trace(file_of("{", ""), {"JSON"});
  refuse_trace(file_of("{}", ""), {"no tensor"});
  for (const char* name : {"q", "k", "v"})
    refuse_trace(changed([&](auto& header) {
                   header["other"] = header[name];
                   header.erase(name);
                 }),
                 {"no tensor '" + std::string(name) + "'"});
  refuse_trace(changed([](auto& h) { h["q"]["dtype"] = "I32"; }), {"q has dtype I32", "F32, F16 or BF16"});
  refuse_trace(changed([](auto& h) { h["v"]["dtype"] = "I32"; }), {"v has dtype I32"});
  refuse_trace(changed([](auto& h) { h["v"]["dtype"] = "F33"; }), {"F33"});
  refuse_trace(changed([](auto& h) { h["k"]["dtype"] = "F16"; }), {"'k'", "bytes"});
  refuse_trace(changed([](auto& h) { h["k"]["shape"] = {40, 128}; }), {"k has shape (40, 128)", "head_dim"});
  refuse_trace(changed([](auto& h) { h["k"]["shape"] = {40, 2, 64, 1}; }), {"k has shape (40, 2, 64, 1)"});
  refuse_trace(changed([](auto& h) { h["k"]["shape"] = {20, 4, 64}; }), {"(20, 4, 64)", "(40, 2, 64)"});
  refuse_trace(changed([](auto& h) { h["q"]["shape"] = {80, 2, 64}; }), {"(80, 2, 64)", "(40, 2, 64)"});
  refuse_trace(changed([](auto& h) { h["q"]["shape"] = {40, 2, 128}; }), {"(40, 2, 128)", "(40, 2, 64)"});
  refuse_trace(changed([](auto& h) { h["q"]["shape"] = {40, -4, 64}; }), {"-4"});
  refuse_trace(changed([](auto& h) { h["q"]["shape"] = {40, 4.0, 64}; }), {"whole number"});
  refuse_trace(changed([](auto& h) { h["q"].erase("shape"); }), {"'shape'"});
  // q lies behind k, and v behind q.
  refuse_trace(changed([](auto& h) { h["v"]["data_offsets"] = h["k"]["data_offsets"]; }), {"overlap"});
  refuse_trace(changed([](auto& h) {
                 for (auto& offset : h["v"]["data_offsets"]) offset = offset.template get<int>() - 4;
               }),
               {"overlap"});
  file_parts gap = good_trace();
  gap.data += "gap.";
  for (auto& offset : gap.header["v"]["data_offsets"]) offset = offset.get<int>() + 4;
  refuse_trace(gap, {"gap"});
  refuse_trace(changed([](auto& h) { h["q"]["data_offsets"] = {100, 50}; }), {"end before"});
  refuse_trace(changed([](auto& h) { h["q"]["data_offsets"] = {0}; }), {"data_offsets"});

  const auto shaped = [](std::int64_t query_heads, std::int64_t kv_heads, std::int64_t d,
                         const std::string& v_dtype = "F32") {
    const auto zeros = [&](std::int64_t heads, const std::string& dtype) {
      return tensor_text{
          dtype, {4, heads, d}, std::string(to_size(4 * heads * d * (dtype == "F32" ? 4 : 2)), '\0')};
    };
    return parts_of(
        {{"q", zeros(query_heads, "F32")}, {"k", zeros(kv_heads, "F32")}, {"v", zeros(kv_heads, v_dtype)}},
        {{"prompt_len", "0"}});
  };
  refuse_trace(shaped(5, 2, 64), {"5 query heads", "2 KV heads"});
  refuse_trace(shaped(1, 2, 64), {"1 query heads", "2 KV heads"});
  refuse_trace(shaped(0, 2, 64), {"0 query heads"});
  refuse_trace(shaped(2, 0, 64), {"0 KV heads"});
  refuse_trace(shaped(2, 2, 64, "F16"), {"k is F32", "v is F16", "--dtype"});
  for (const std::int64_t d : {24, 72, 512, 8192}) {
    const auto number = "head_dim " + std::to_string(d);
    refuse_trace(shaped(1, 1, d), {number, "(64", "FREEKV_HEAD_DIMS"});
    // Before a basis of that size is learnt, which takes hours.
    refusals{shaped(1, 1, d).whole()}.refuse({"--variant", "freekv_key_subspace", "--rank", "8"}, {number});
  }
}

TEST_CASE("a prompt_len that is missing or no number of tokens is refused", "[replay]") {
  refuse_trace(changed([](auto& h) { h.erase("__metadata__"); }), {"prompt_len", "decimal"});
  refuse_trace(changed([](auto& h) { h["__metadata__"] = nlohmann::json::object(); }), {"prompt_len"});
  refuse_trace(changed([](auto& h) { h["__metadata__"] = {{"prompt_length", "30"}}; }), {"prompt_len"});
  refuse_trace(changed([](auto& h) { h["__metadata__"] = "30"; }), {"__metadata__"});
  refuse_trace(changed([](auto& h) { h["__metadata__"]["prompt_len"] = 30; }), {"prompt_len", "string"});
  for (const char* text : {"", " 30", "30 ", "-1", "-0", "+3", "3.0", "0x10", "thirty", "nan", "41",
                           "4294967296", "18446744073709551617", "3\t\x1b[0m"})
    refuse_trace(changed([&](auto& h) { h["__metadata__"]["prompt_len"] = text; }),
                 {"prompt_len", "decimal number from 0 to", "40"});
}

TEST_CASE("a basis that does not fit the trace is refused", "[replay]") {
  refusals r;
  const auto refuse_basis = [&](const std::string& basis, const std::vector<std::string>& parts,
                                const std::vector<std::string>& more = {}) {
    store(r.folder / "basis", basis);
    std::vector<std::string> arguments{"--variant", "freekv_key_subspace", "--basis", r.folder / "basis"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    r.refuse(arguments, parts);
  };
  const auto basis = [](const tensor_map& tensors) { return parts_of(tensors, {}).whole(); };
  refuse_basis(basis(good_basis(1, 3)), {"3 heads", "2 heads"});
  refuse_basis(basis(good_basis(1, 2, 24, 80)), {"head_dim 80", "head_dim 64"});
  refuse_basis(basis(good_basis(1, 2, 16)), {"rank 16", "rank 24"});
  refuse_basis(basis(good_basis(3)), {"3 layers", "--basis-layer"});
  refuse_basis(basis(good_basis(3)), {"3 layers", "3"}, {"--basis-layer", "3"});
  refuse_basis(basis(good_basis(3)), {"3 layers", "-1"}, {"--basis-layer", "-1"});
  refuse_basis(basis({{"mean", good_basis()["mean"]}}), {"no tensor 'rows'"});
  refuse_basis(basis({{"rows", good_basis()["rows"]}}), {"no tensor 'mean'"});
  refuse_basis(basis({{"mean", good_basis(1, 1)["mean"]}, {"rows", good_basis()["rows"]}}), {"mean must be"});
  refuse_basis(basis({{"mean", good_basis()["mean"]}, {"rows", good_basis()["mean"]}}), {"rows (layers"});
  tensor_map integers = good_basis();
  integers["rows"].dtype = "I32";
  refuse_basis(basis(integers), {"I32"});
  refuse_basis(basis(good_basis(1, 2, 0)), {"mean must be"});
  refuse_basis(good_trace().whole(), {"no tensor 'mean'"});
  refuse_basis("", {"empty"});
  r.refuse({"--variant", "freekv_key_subspace", "--basis", r.folder / "absent"}, {"absent", "No such file"});
  r.refuse({"--variant", "freekv_key_subspace", "--basis", r.folder / ""}, {"directory"});
  r.refuse({"--variant", "freekv_key_subspace", "--basis", ""}, {"''"});
}

TEST_CASE("a head list that does not fit the trace is refused", "[replay]") {
  const std::string named = changed([](auto& h) { h["__metadata__"]["layer"] = "3"; }).whole();
  refusals r{named};
  const auto refuse_heads = [&](const std::string& list, const std::vector<std::string>& parts) {
    store(r.folder / "heads", list);
    r.refuse({"--heads", r.folder / "heads"}, parts);
    r.refuse({"--variant", "duo_attention", "--heads", r.folder / "heads"}, parts);
  };
  refuse_heads("3 0 complete\n3 2 retrieval\n", {"line 2", "head 2", "2 KV heads"});
  refuse_heads("3 -1 complete", {"line 1", "head -1"});
  refuse_heads("3 0 full", {"line 1", "full", "retrieval, complete or window"});
  refuse_heads("3 0", {"line 1", "layer head kind"});
  refuse_heads("3 0 window more", {"line 1", "layer head kind"});
  refuse_heads("3 0 window\n\n3 0 window", {"line 3", "twice"});
  refuse_heads("99999 0 window", {"line 1", "99999"});
  refuse_heads(std::string(2000, '\xff'), {"line 1"});
  r.refuse({"--heads", r.folder / "absent"}, {"absent", "opened"});
  r.refuse({"--heads", r.folder / "heads", "--variant", "full"}, {"--heads", "--variant full"});
  for (const char* variant : {"razor_attention", "razor_attention_compensated", "duo_attention"})
    r.refuse({"--variant", variant}, {variant, "--heads"});
  store(r.folder / "heads", "3 0 complete\n");
  r.refuse_command(
      {FREEKV_REPLAY, r.folder / "trace", "--heads", r.folder / "heads", "--out", r.folder / "heads"},
      {"--out", "input"});
  for (const auto& layer : {"", "1024", "1000000"}) {
    refusals other{changed([&](auto& h) { h["__metadata__"]["layer"] = layer; }).whole()};
    store(other.folder / "heads", "3 0 complete\n");
    other.refuse({"--heads", other.folder / "heads"}, {"--heads", layer, "layer into its metadata"});
  }
}

TEST_CASE("a list of layers that does not fit the trace is refused", "[replay]") {
  refusals r{changed([](auto& h) { h["__metadata__"]["layer"] = "3"; }).whole()};
  const auto refuse_list = [&](const std::string& list, const std::vector<std::string>& parts,
                               const std::vector<std::string>& more = {}) {
    store(r.folder / "layers", list);
    std::vector<std::string> options{"--by-layer", r.folder / "layers"};
    options.insert(options.end(), more.begin(), more.end());
    r.refuse(options, parts);
  };
  refuse_list("3 32 -", {"line 1", "layer tokens tau delta"});
  refuse_list("# none\n3 32 2 -", {"line 2", "cosine"});
  refuse_list("3 33 - -", {"33 tokens for layer 3", "units have", "multiples"});
  refuse_list("3 32 - -", {"page size 0"}, {"--page", "0"});
  r.refuse({"--by-layer", r.folder / "absent"}, {"absent", "opened"});
  store(r.folder / "layers", "3 32 - -");
  r.refuse({"--by-layer", r.folder / "layers", "--variant", "full"}, {"--by-layer", "--variant full"});
  r.refuse_command(
      {FREEKV_REPLAY, r.folder / "trace", "--by-layer", r.folder / "layers", "--out", r.folder / "layers"},
      {"--out", "input"});
  refusals other;
  store(other.folder / "layers", "3 32 - -");
  other.refuse({"--by-layer", other.folder / "layers"},
               {"no layer", "--by-layer", "layer into its metadata"});
}

TEST_CASE("an output that cannot be written is refused before the trace is read", "[replay]") {
  refusals r;
  fs::create_directory(r.folder / "folder");
  fs::create_directory_symlink(r.folder / "nowhere", r.folder / "dangling");
  REQUIRE(::mkfifo((r.folder / "fifo").c_str(), 0600) == 0);
  const auto refuse_output = [&](const std::string& out, const std::vector<std::string>& parts) {
    // A trace that is missing would be the fault if it came first.
    for (const fs::path& trace : {r.folder / "trace", r.folder / "absent"})
      r.refuse_command({FREEKV_REPLAY, trace, "--out", out}, parts);
  };
  refuse_output(r.folder / "absent-folder/out", {"absent-folder", "No such file"});
  refuse_output(r.folder / "trace/out", {"Not a directory"});
  refuse_output(r.folder / "folder", {"directory"});
  refuse_output(r.folder / "folder/", {"folder"});
  refuse_output(r.folder / "fifo", {"FIFO"});
  refuse_output(r.folder / std::string(300, 'n'), {"too long"});
  refuse_output("", {"empty file name"});
}

TEST_CASE("the inputs are not written over", "[replay]") {
  refusals r;
  const std::string trace = load(r.folder / "trace"), basis = load(r.folder / "basis");
  fs::create_symlink(r.folder / "trace", r.folder / "link");
  fs::create_hard_link(r.folder / "trace", r.folder / "other-name");
  fs::create_directory(r.folder / "folder");
  for (const char* name : {"trace", "link", "other-name", "./trace", "folder/../trace"})
    r.refuse_command({FREEKV_REPLAY, r.folder / "trace", "--out", r.folder / name}, {"--out", "input"});
  r.refuse_command({FREEKV_REPLAY, r.folder / "trace", "--variant", "freekv_key_subspace", "--basis",
                    r.folder / "basis", "--out", r.folder / "basis"},
                   {"--out", "input"});
  CHECK(load(r.folder / "trace") == trace);
  CHECK(load(r.folder / "basis") == basis);
}

TEST_CASE("a disk without room leaves no partial output", "[replay]") {
  refusals r;
  r.refuse({}, {"out", "written"}, {.file_size = 5000});
}

TEST_CASE("a summary that cannot be printed is a failure", "[replay]") {
  if (::access("/dev/full", W_OK) != 0) return;
  const refusals r;
  const program_end end = run_program({FREEKV_REPLAY, r.folder / "trace"}, {.standard_output = "/dev/full"});
  check_mentions(sentence_of(end), {"standard output"});
}

TEST_CASE("more memory than there is gives a sentence", "[replay]") {
  if (sanitized) return;  // a sanitizer ends the program where memory is refused
  refusals r;
  // Legal, and 560 MB of -1.
  r.refuse({"--k", "7000000"}, {"memory", "selected pages"}, {.address_space = std::size_t{1} << 29});
}

TEST_CASE("traces with random damage are replayed or refused, never worse", "[replay]") {
  const scratch_folder folder;
  const std::string good = good_trace().whole();
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, good.data(), 8);
  const int header_end = static_cast<int>(header_bytes) + 8;
  int refused = 0, replayed = 0;
  constexpr int traces = sanitized ? 40 : 400;
  for (std::uint64_t seed = 1; seed <= traces; ++seed) {
    dice d(seed);
    std::string bad = good;
    const auto somewhere = [&] {
      return to_size(d.below(2) == 0 ? d.below(static_cast<int>(bad.size())) : d.below(header_end));
    };
    for (int faults = d.between(1, 3); faults > 0; --faults) {
      const std::size_t at = std::min(somewhere(), bad.size() - 1);
      switch (d.below(7)) {
        case 0:
          bad[at] = static_cast<char>(d.below(256));
          break;
        case 1:
          bad[at] = static_cast<char>(bad[at] ^ (1 << d.below(8)));
          break;
        case 2:
          bad.erase(at, to_size(d.between(1, 20)));
          break;
        case 3:
          bad.insert(at, bad.substr(std::min(somewhere(), bad.size()), to_size(d.between(1, 20))));
          break;
        case 4:
          bad.resize(std::max<std::size_t>(at, 1));
          break;
        case 5: {  // another digit, or many more
          const std::size_t digit = bad.find_first_of("0123456789", at);
          if (digit != std::string::npos)
            bad.insert(digit, d.one_of<std::string>({"9", "0", "-", "1e9", "999999999"}));
          break;
        }
        default: {  // another number of the header's length
          const std::uint64_t length = header_bytes + static_cast<std::uint64_t>(d.between(-3, 3));
          std::memcpy(bad.data(), &length, std::min<std::size_t>(8, bad.size()));
        }
      }
      if (bad.empty()) bad = " ";
    }
    store(folder / "trace", bad);
    const program_end end =
        run_program({FREEKV_REPLAY, folder / "trace", "--out", folder / "out", "--variant",
                     d.below(2) == 0 ? "freekv" : "freekv_key_subspace", "--rank", "4"},
                    {.address_space = two_gigabytes});
    INFO("seed " << seed << ": " << end);
    if (end.exit_code == 0) {
      ++replayed;
      CHECK(nlohmann::json::parse(end.out).is_object());
      CHECK(read_tensors(folder / "out").size() == 6);
      fs::remove(folder / "out");
    } else {
      ++refused;
      sentence_of(end);
      CHECK(end.err.find("memory") == std::string::npos);
    }
    REQUIRE(folder.listing() == std::vector<std::string>{"trace"});
  }
  INFO(refused << " refused, " << replayed << " replayed");
  CHECK(refused > traces / 2);
  CHECK(replayed > traces / 20);
}
