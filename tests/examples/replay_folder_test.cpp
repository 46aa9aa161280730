// freekv-replay on a folder of traces: every layer as alone, and what they come to together.

#include "../catch.hpp"
#include "refusal.hpp"
#include "replay_case.hpp"

using namespace tests;

namespace {

using nlohmann::json;

/// A trace in a folder, by the name of its file.
struct named_case {
  std::string name;
  replay_case layer;
  std::optional<int> number;  // in its metadata
};

named_case named(const std::string& name, std::optional<int> number, const replay_case& layer) {
  return {name, layer, number};
}

void store_trace(const fs::path& folder, const named_case& c) {
  file_parts parts = trace_of(c.layer);
  if (c.number) parts.header["__metadata__"]["layer"] = std::to_string(*c.number);
  store(folder / c.name, parts.whole());
}

/// Layers of three shapes whose file names sort otherwise than their numbers; the last two name the same one.
std::vector<named_case> some_layers() {
  return {
      named("z.safetensors", 2, plain_case()),
      named("c.safetensors", 10,
            with(plain_case(),
                 [](replay_case& c) {
                   c.layer.options.kv_heads = 1;
                   c.layer.options.query_heads = 4;
                   c.layer.turn = 0.6f;
                   c.dtype = "F16";
                 })),
      named("d.safetensors", 10,
            with(plain_case(),
                 [](replay_case& c) {
                   c.layer.prompt = 120;
                   c.layer.steps = 30;
                   c.layer.turn = 0.05f;
                   c.layer.seed = 77;
                 })),
      named("a.safetensors", std::nullopt,
            with(plain_case(),
                 [](replay_case& c) {
                   c.layer.prompt = 50;
                   c.layer.steps = 0;
                 })),
  };
}

/// A folder of traces, and the program run in it.
struct traces_folder {
  traces_folder() { fs::create_directory(traces()); }
  explicit traces_folder(const std::vector<named_case>& layers) : traces_folder() {
    for (const named_case& c : layers) store_trace(traces(), c);
  }
  fs::path traces() const { return folder / "traces"; }
  program_end run(const std::string& trace, const std::string& out,
                  const std::vector<std::string>& more = {}) const {
    std::vector<std::string> command{FREEKV_REPLAY, trace};
    for (const auto& [flag, value] : std::map<std::string, std::string>{
             {"--page", "8"}, {"--sink", "8"}, {"--window", "16"}, {"--k", "2"}})
      if (std::find(more.begin(), more.end(), flag) == more.end())
        command.insert(command.end(), {flag, value});
    if (!out.empty()) command.insert(command.end(), {"--out", out});
    command.insert(command.end(), more.begin(), more.end());
    return run_program(command, {.address_space = two_gigabytes});
  }
  json replayed(const std::string& trace, const std::string& out,
                const std::vector<std::string>& more = {}) const {
    const program_end end = run(trace, out, more);
    INFO(end);
    REQUIRE(end.exit_code == 0);
    CHECK(end.err.empty());
    return json::parse(end.out);
  }
  scratch_folder folder;
};

/// Times differ from run to run; all else does not.
json without_times(json object) {
  for (const char* name : {"seconds_per_step", "full_attention_seconds_per_step", "time_over_full_attention"})
    CHECK(object.erase(name) == 1);
  return object;
}

/// Runs the program on a folder that it refuses, with and without --out, and requires that it leaves nothing.
void refuse(const traces_folder& f, const std::vector<std::string>& parts,
            const std::vector<std::string>& more = {}, const std::string& out = "out") {
  for (const bool with_out : {false, true}) {
    if (!with_out && out != "out") continue;
    const auto before = f.folder.listing();
    check_mentions(sentence_of(f.run(f.traces(), with_out ? (f.folder / out).string() : "", more)), parts);
    CHECK(f.folder.listing() == before);
  }
}

}  // namespace

TEST_CASE("a folder is replayed by layer and name, and each layer is as it is alone", "[replay]") {
  const auto cases = some_layers();
  const traces_folder f(cases);
  store(f.traces() / "notes.txt", "no trace");
  store(f.traces() / "layer.safetensors.part", "no trace either");
  fs::create_directory(f.traces() / "folder.safetensors");
  for (const std::vector<std::string>& method : {std::vector<std::string>{},
                                                 {"--variant", "freekv_key_subspace", "--rank", "8"},
                                                 {"--variant", "full"}}) {
    const json all = f.replayed(f.traces(), f.folder / "out", method);
    REQUIRE(all.size() == 4);
    CHECK(all.at("settings").at("trace") == f.traces().string());
    CHECK(all.at("settings").at("page") == 8);
    REQUIRE(all.at("layers").size() == cases.size());
    for (std::size_t i = 0; i < cases.size(); ++i) {
      INFO(cases[i].name);
      json layer = without_times(all.at("layers")[i]);
      CHECK(layer.at("trace") == cases[i].name);
      CHECK(layer.at("layer") == (cases[i].number ? json(*cases[i].number) : json(nullptr)));
      layer.erase("trace");
      layer.erase("layer");

      json alone = without_times(f.replayed(f.traces() / cases[i].name, f.folder / "alone", method));
      json settings = alone.at("settings");
      alone.erase("settings");
      for (const char* name :
           {"tokens", "prompt_len", "dtype", "query_heads", "kv_heads", "head_dim", "scale"}) {
        INFO(name);
        CHECK(all.at("settings").count(name) == 0);  // they are each layer's own
        CHECK(layer.at(name) == settings.at(name));
        layer.erase(name);
        settings.erase(name);
      }
      settings["trace"] = f.traces().string();
      CHECK(layer == alone);
      CHECK(all.at("settings") == settings);
      CHECK((load(f.folder / "out" / cases[i].name) == load(f.folder / "alone")));
    }
    std::size_t written = 0;
    for (const auto& entry : fs::directory_iterator(f.folder / "out")) written += entry.is_regular_file();
    CHECK(written == cases.size());
  }
}

TEST_CASE("each layer is replayed with what a list says of it", "[replay]") {
  auto cases = some_layers();
  cases.pop_back();  // which has no number
  const traces_folder f(cases);
  store(f.folder / "layers", "# layer tokens tau delta\n2 8 - 0.01\n10 24 - -\n");
  const std::vector<std::string> method{"--variant", "freekv_key_subspace_deficit", "--rank", "8"};
  auto listed = method;
  listed.insert(listed.end(), {"--by-layer", f.folder / "layers"});
  const json all = f.replayed(f.traces(), f.folder / "out", listed);
  CHECK(all.at("settings").at("by_layer") == (f.folder / "layers").string());
  REQUIRE(all.at("layers").size() == cases.size());
  for (std::size_t i = 0; i < cases.size(); ++i) {
    INFO(cases[i].name);
    const bool first = cases[i].number == 2;
    json layer = without_times(all.at("layers")[i]);
    CHECK(layer.at("k") == (first ? 1 : 3));  // of 8 tokens
    CHECK(layer.at("delta").get<double>() == Approx(first ? 0.01 : 0.2));
    auto given = method;
    given.insert(given.end(), {"--k", first ? "1" : "3", "--delta", first ? "0.01" : "0.2"});
    const json alone = without_times(f.replayed(f.traces() / cases[i].name, f.folder / "alone", given));
    for (const char* name : {"error", "mass_kept", "correction_rate", "pages_recalled", "fast_tier_bytes"})
      CHECK(layer.at(name) == alone.at(name));
    CHECK((load(f.folder / "out" / cases[i].name) == load(f.folder / "alone")));
  }
}

TEST_CASE("mean and worst are over the layers that have a number", "[replay]") {
  const traces_folder f(some_layers());
  const json all = f.replayed(f.traces(), "");
  const json& layers = all.at("layers");
  CHECK(layers[3].at("mass_kept").is_null());  // a layer without steps
  const std::map<std::string, bool> small_is_worse{
      {"/error/relative_l2_mean", false},  {"/mass_kept", true},
      {"/correction_rate", false},         {"/hit_rate", true},
      {"/pages_recalled_per_step", false}, {"/bytes_recalled", false},
      {"/fast_tier_bytes", false},         {"/time_over_full_attention", false}};
  std::size_t different = 0;
  for (const auto& [name, small] : small_is_worse) {
    INFO(name);
    const json::json_pointer at(name);
    double sum = 0, worst = small ? 1e300 : -1e300;
    int counted = 0;
    json worst_layer, best_layer;
    for (const json& layer : layers) {
      if (layer.at(at).is_null()) continue;
      const double value = layer.at(at);
      sum += value;
      ++counted;
      if (small ? value < worst : value > worst) {
        worst = value;
        worst_layer = layer;
      }
    }
    CHECK(counted >= 3);
    CHECK(all.at("mean").at(at).get<double>() == Approx(sum / counted).epsilon(1e-12));
    CHECK(all.at("worst").at(at).at("value").get<double>() == worst);
    CHECK(all.at("worst").at(at).at("trace") == worst_layer.at("trace"));
    CHECK(all.at("worst").at(at).at("layer") == worst_layer.at("layer"));
    different += worst != layers[0].at(at).get<double>();
  }
  CHECK(different > 3);  // else the first layer alone could have been looked at
  CHECK(all.at("mean").size() == small_is_worse.size());
  CHECK(all.at("worst").size() == small_is_worse.size());
  for (const json& layer : layers) {
    if (layer.at("steps") == 0) continue;
    CHECK(layer.at("pages_recalled_per_step").get<double>() ==
          Approx(layer.at("pages_recalled").get<double>() / layer.at("steps").get<double>()));
    CHECK(layer.at("fast_tier_bytes").get<long long>() > 0);
  }
}

TEST_CASE("a folder whose layers have no steps has no means", "[replay]") {
  const traces_folder f({some_layers()[3]});
  const json all = f.replayed(f.traces(), "");
  CHECK(all.at("mean").at("mass_kept").is_null());
  CHECK(all.at("worst").at("mass_kept").is_null());
  CHECK(all.at("mean").at("error").at("relative_l2_mean").is_null());
}

TEST_CASE("a basis file may lie beside the traces", "[replay]") {
  const traces_folder f({some_layers()[0]});
  replay_case c = plain_case("freekv_key_subspace");
  c.basis_layers = 3;
  store(f.traces() / "basis.safetensors", basis_file_of(c));
  const json all = f.replayed(
      f.traces(), f.folder / "out",
      {"--variant", "freekv_key_subspace", "--rank", "16", "--basis", f.traces() / "basis.safetensors"});
  CHECK(all.at("layers").size() == 1);
  // Where no basis is read it is a trace like others, and no good one.
  refuse(f, {"basis.safetensors", "no tensor 'q'"}, {"--basis", f.traces() / "basis.safetensors"});
}

TEST_CASE("a head list says for each layer of a folder what its heads keep", "[replay]") {
  const traces_folder f({named("a.safetensors", 2, plain_case()), named("b.safetensors", 10, plain_case())});
  store(f.folder / "heads", "2 0 complete\n2 1 complete\n10 0 retrieval\n");
  const json all = f.replayed(f.traces(), f.folder / "out", {"--heads", f.folder / "heads"});
  CHECK(all.at("settings").at("heads") == (f.folder / "heads").string());
  CHECK(all.at("layers")[0].at("mass_kept").get<double>() == Approx(1));
  CHECK(all.at("layers")[0].at("correction_rate") == 0);
  CHECK(all.at("layers")[1].at("mass_kept").get<double>() < 0.999);
  const auto selected =
      elements_of<std::int32_t>(read_tensors(f.folder / "out" / "b.safetensors").at("selected"));
  REQUIRE(selected.size() == 12 * 2 * 2);
  for (std::size_t step = 0; step < 12; ++step) {
    CHECK(selected[step * 4] >= 0);       // KV head 0 retrieves
    CHECK(selected[step * 4 + 2] == -1);  // KV head 1, which is not listed, sees sink and window
  }
}

TEST_CASE("outputs of an older replay are replaced, and what else is in the folder stays", "[replay]") {
  const traces_folder f({some_layers()[0]});
  fs::create_directory(f.folder / "out");
  store(f.folder / "out" / "z.safetensors", "an older file");
  store(f.folder / "out" / "notes", "mine");
  f.replayed(f.traces(), f.folder / "out");
  CHECK(read_tensors(f.folder / "out" / "z.safetensors").size() == 6);
  CHECK(load(f.folder / "out" / "notes") == "mine");
}

TEST_CASE("a folder without traces is refused", "[replay]") {
  traces_folder f;
  refuse(f, {"traces", "directory without a trace", ".safetensors", "freekv-record"});
  store(f.traces() / "trace", good_trace().whole());
  fs::create_directory(f.traces() / "folder.safetensors");
  refuse(f, {"directory without a trace"});
}

TEST_CASE("one bad trace is refused by its name before any is replayed", "[replay]") {
  const auto refuse_beside_good = [](const std::string& bad, const std::vector<std::string>& parts,
                                     const std::vector<std::string>& more = {}) {
    traces_folder f(some_layers());
    store(f.traces() / "layer-3.safetensors", bad);
    std::vector<std::string> all{"layer-3.safetensors"};
    all.insert(all.end(), parts.begin(), parts.end());
    refuse(f, all, more);
  };
  refuse_beside_good("", {"empty"});
  refuse_beside_good(good_trace().whole().substr(0, 5000), {"truncated"});
  file_parts changed = good_trace();
  changed.header["__metadata__"].erase("prompt_len");
  refuse_beside_good(changed.whole(), {"prompt_len"});

  const std::string zeros(4 * 72 * 4, '\0');
  refuse_beside_good(parts_of({{"q", {"F32", {4, 1, 72}, zeros}},
                               {"k", {"F32", {4, 1, 72}, zeros}},
                               {"v", {"F32", {4, 1, 72}, zeros}}},
                              {{"prompt_len", "2"}})
                         .whole(),
                     {"head_dim 72", "FREEKV_HEAD_DIMS"});
}

TEST_CASE("a layer that the basis lacks is refused by its trace's name", "[replay]") {
  const traces_folder f({named("a.safetensors", 2, plain_case()), named("b.safetensors", 3, plain_case())});
  replay_case c = plain_case("freekv_key_subspace");
  c.basis_layers = 3;
  store(f.folder / "basis", basis_file_of(c));
  refuse(f, {"b.safetensors", "3 layers", "none numbered 3"},
         {"--variant", "freekv_key_subspace", "--rank", "16", "--basis", f.folder / "basis"});
}

TEST_CASE("settings that cannot be are refused for a folder as for a trace", "[replay]") {
  const traces_folder f(some_layers());
  refuse(f, {"page size 12", "multiple of 8", "z.safetensors"}, {"--page", "12"});
  refuse(f, {"--k 0"}, {"--k", "0"});
  refuse(f, {"100000 threads"}, {"--threads", "100000"});
}

TEST_CASE("an output that is no folder, or the traces' own, is refused", "[replay]") {
  const traces_folder f(some_layers());
  const std::string before = load(f.traces() / "z.safetensors");
  store(f.folder / "file", "mine");
  fs::create_directory_symlink(f.traces(), f.folder / "link");
  refuse(f, {"file", "folder of traces"}, {}, "file");
  refuse(f, {"traces", "another folder"}, {}, "traces");
  refuse(f, {"link", "another folder"}, {}, "link");
  refuse(f, {"absent", "No such file"}, {}, "absent/out");
  refuse(f, {"Not a directory"}, {}, "file/out");
  fs::create_directory(f.folder / "linked");
  fs::create_hard_link(f.traces() / "c.safetensors", f.folder / "linked" / "a.safetensors");
  refuse(f, {"a.safetensors", "input"}, {}, "linked");
  CHECK(load(f.folder / "file") == "mine");
  CHECK(load(f.traces() / "z.safetensors") == before);
}
