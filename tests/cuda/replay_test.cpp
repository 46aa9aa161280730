// freekv-replay on a device gives what it gives on the host: on the committed trace, on random ones, and on
// events.
//
// Exit status: 0 all agree, 1 not, 77 no device, which the program says.
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "../agreement.hpp"
#include "../examples/run_program.hpp"
#include "../examples/tensor_file.hpp"
#include "../property/random_case.hpp"

namespace {

using namespace tests;
using words = std::vector<std::string>;

/// What is a machine's, or a backend's own.
bool is_compared(const std::string& name) {
  return name != "settings" && name.find("seconds") == std::string::npos &&
         name.find("time_") == std::string::npos && !name.ends_with("_bytes");
}

/// Throws disagreement unless the summaries have the same counts and, to rounding, the same shares.
void compare(const nlohmann::json& host, const nlohmann::json& device, const std::string& where) {
  if (host.is_object()) {
    if (host.size() != device.size()) throw disagreement{where + " has other members"};
    for (const auto& [name, value] : host.items())
      if (is_compared(name)) compare(value, device.at(name), where + "/" + name);
    return;
  }
  const bool same = host.is_number_float() && device.is_number_float()
                        ? close(host.get<double>(), device.get<double>(), 2e-5)
                        : host == device;
  if (!same) throw disagreement{sentence(where, " is ", host, " on the host and ", device, " on the device")};
}

/// Selections, corrections and recalls must be equal; outputs agree as docs/contract.md, 13.8 says.
long compare(const tensor_map& host, const tensor_map& device) {
  if (host.size() != device.size()) throw disagreement{"the files have other tensors"};
  long selected = 0;
  for (const auto& [name, expected] : host) {
    const tensor_text& got = device.at(name);
    if (got.shape != expected.shape || got.dtype != expected.dtype)
      throw disagreement{name + " has another shape or type"};
    if (expected.dtype != "F32") {
      if (got.bytes != expected.bytes) throw disagreement{name + " differs"};
      if (name.starts_with("selected"))
        for (std::size_t i = 0; i < got.bytes.size(); i += 4) selected += got.bytes[i + 3] >= 0;  // not -1
      continue;
    }
    const double tolerance = name.starts_with("lse") ? 1e-5 : 2e-5;
    for (std::size_t i = 0; i < expected.bytes.size(); i += 4) {
      float a, b;
      std::memcpy(&a, expected.bytes.data() + i, 4);
      std::memcpy(&b, got.bytes.data() + i, 4);
      if (!close(a, b, tolerance))
        throw disagreement{sentence(name, " ", i / 4, " is ", a, " on the host and ", b, " on the device")};
    }
  }
  return selected;
}

class replays {
 public:
  /// `arguments` on both sides.
  void compare(const words& arguments) {
    std::string text;
    for (const std::string& word : arguments) text += " " + fs::path(word).filename().string();
    try {
      const auto [host, device] = std::pair(run("host", arguments), run("cuda", arguments));
      for (const program_end& end : {host, device})
        if (end.exit_code != 0) throw disagreement{sentence(end)};
      ::compare(nlohmann::json::parse(host.out), nlohmann::json::parse(device.out), "summary");
      const long selected = ::compare(read_tensors(out("host")), read_tensors(out("cuda")));
      std::printf("ok    %s: %ld selected\n", text.c_str(), selected);
    } catch (const disagreement& d) {
      ++failed_;
      std::printf("FAILED%s: %s\n", text.c_str(), d.what.c_str());
    }
  }
  /// Not on a device.
  void refuse(const words& arguments, const std::string& sentence) {
    const program_end end = run("cuda", arguments);
    if (end.exit_code == 2 && end.err.find(sentence) != std::string::npos) return;
    ++failed_;
    std::printf("FAILED: \"%s\" is not refused: %s\n", sentence.c_str(), tests::sentence(end).c_str());
  }
  program_end run(const std::string& backend, const words& arguments) const {
    words command{FREEKV_REPLAY, "--backend", backend, "--out", out(backend)};
    command.insert(command.end(), arguments.begin(), arguments.end());
    return run_program(command, {.seconds = 240});
  }
  int failed() const { return failed_; }

  /// A random trace of 2 KV heads.
  std::string trace(const std::string& name, const std::string& dtype, int head_dim, int prompt, int steps) {
    random_case c;
    c.seed = 1 + static_cast<std::uint64_t>(++traces_);
    auto& o = c.options;
    o.element = dtype == "F16" ? data_type::f16 : data_type::bf16;
    o.head_dim = head_dim;
    o.kv_heads = 2;
    o.query_heads = 6;
    token_source source(c);
    std::vector<float> q, k, v;
    for (int token = 0; token < prompt + steps; ++token) {
      source.next();
      q.insert(q.end(), source.queries.begin(), source.queries.end());
      k.insert(k.end(), source.keys.begin(), source.keys.end());
      v.insert(v.end(), source.values.begin(), source.values.end());
    }
    const auto tensor = [&](const std::vector<float>& values, int heads) {
      return tensor_text{dtype, {prompt + steps, heads, head_dim}, bytes_of(values, dtype)};
    };
    const fs::path path = folder_ / name;
    store(path, parts_of({{"q", tensor(q, 6)}, {"k", tensor(k, 2)}, {"v", tensor(v, 2)}},
                         {{"prompt_len", std::to_string(prompt)}})
                    .whole());
    return path.string();
  }
  /// Tokens that are all alike, so that their pages' masses are.
  std::string equal_trace(const std::string& name, int tokens) {
    const auto ones = [&](int heads) {
      const std::vector<float> values(static_cast<std::size_t>(tokens * heads * 64), 1.0f);
      return tensor_text{"F16", {tokens, heads, 64}, bytes_of(values, "F16")};
    };
    const fs::path path = folder_ / name;
    store(path, parts_of({{"q", ones(6)}, {"k", ones(2)}, {"v", ones(2)}},
                         {{"prompt_len", std::to_string(tokens - 2)}})
                    .whole());
    return path.string();
  }
  std::string events(const std::string& name, const std::string& lines) {
    store(folder_ / name, lines);
    return (folder_ / name).string();
  }

 private:
  std::string out(const std::string& backend) const {
    return (folder_ / (backend + ".safetensors")).string();
  }
  scratch_folder folder_;
  int failed_ = 0, traces_ = 0;
};

}  // namespace

int main() {
  replays r;
  const std::string real = FREEKV_TRACE;
  const words small{"--page", "16", "--sink", "16", "--window", "32", "--k", "4"};
  const auto with = [&](const std::string& trace, words more) {
    words all{trace};
    all.insert(all.end(), small.begin(), small.end());
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  if (const program_end end = r.run("cuda", with(real, {}));
      end.exit_code == 2 && end.err.find("no NVIDIA device is usable") != std::string::npos) {
    std::printf("SKIPPED: %s", end.err.c_str());
    return 77;
  }
  r.compare(with(real, {}));
  r.compare(with(real, {"--route", "in_place", "--variant", "quest"}));
  const std::string halves = r.trace("f16", "F16", 64, 150, 12), wide = r.trace("bf16", "BF16", 128, 150, 12);
  r.compare(with(halves, {"--variant", "freekv_key_subspace"}));
  r.compare(with(halves, {"--summary", "coarse_to_fine", "--times", "1"}));
  r.compare(with(
      halves, {"--variant", "freekv_top_p", "--top-p", "0.3", "--pooling", "max_softmax", "--spare", "2"}));
  // Scores of 1e7, beside which the logarithm of 15 is no number of float32.
  r.compare({r.equal_trace("equal", 300), "--page", "16", "--sink", "16", "--window", "32", "--k", "15",
             "--variant", "freekv_top_p", "--top-p", "0.5", "--pooling", "mean_score", "--scale", "200000"});
  r.compare(with(halves, {"--correction", "mass_deficit", "--partial", "--delta", "0.1", "--unit", "4"}));
  r.compare(with(halves, {"--variant", "quest_per_query_head"}));
  r.compare(with(halves, {"--pinning", "pin_outliers", "--pinned", "3", "--rows", "per_query_head"}));
  r.compare(with(halves, {"--codec", "int4_channel"}));
  r.compare(with(halves, {"--codec", "fp8", "--route", "in_place"}));
  r.compare(with(halves, {"--variant", "think", "--pruned", "0.6"}));
  r.compare(with(halves, {"--codec", "low_rank_keys", "--key-rank", "100", "--rope-base", "10000",
                          "--rope-pairs", "halves", "--unit", "8"}));
  // The device's other shape, where programs have it on the host too.
  const bool has_wide = std::any_of(
      std::begin(freekv::examples::compiled_shapes), std::end(freekv::examples::compiled_shapes),
      [](const auto& shape) { return shape.element == data_type::bf16 && shape.head_dim == 128; });
  if (has_wide) {
    r.compare(with(wide, {}));
    r.compare(with(wide, {"--variant", "streaming_llm"}));
    r.refuse(with(wide, {"--codec", "int8_token"}), "BF16 of head_dim 128 with min_max");
    r.refuse(with(wide, {"--correction", "always"}), "BF16 of head_dim 128 with min_max");
  } else {
    std::printf("left out: BF16 of head_dim 128, which is not among the shapes compiled in\n");
  }
  const std::string sequence = R"(,"trace":")" + halves + "\"}\n";
  words of_events{"--events", r.events("events", R"({"op":"open","seq":0)" + sequence +
                                                     R"({"op":"open","seq":1)" + sequence +
                                                     R"({"op":"prompt","seq":0,"tokens":100}
{"op":"prompt","seq":1,"tokens":70}
{"op":"step","rows":[{"seq":0,"tokens":1},{"seq":1,"tokens":2}]}
{"op":"fork","seq":0,"child":2}
{"op":"truncate","seq":1,"length":71}
{"op":"preempt","seq":0}
{"op":"step","rows":[{"seq":2,"tokens":1},{"seq":1,"tokens":1}]}
{"op":"restore","seq":0}
{"op":"step","rows":[{"seq":0,"tokens":1},{"seq":2,"tokens":1}]}
)")};
  of_events.insert(of_events.end(), small.begin(), small.end());
  r.compare(of_events);

  r.refuse(with(real, {"--variant", "h2o"}), "eviction h2o");
  return r.failed() == 0 ? 0 : 1;
}
