// freekv-replay with methods that forget, against the float64 oracle.

#include "../property/eviction_case.hpp"
#include "../property/seeds.hpp"
#include "compiled_shapes.hpp"
#include "refusal.hpp"
#include "replay_agreement.hpp"

using namespace tests;

namespace {

const std::vector<std::string> forgetful_variants{
    "q_hitter",   "h2o",          "mikv",          "tova",          "snapkv",
    "pyramid_kv", "raas",         "lazy_eviction", "hard_kv",       "defensive_kv",
    "cake",       "r_kv",         "arkv_origin",   "arkv",          "arkv_split",
    "d2o",        "exact_merge",  "hard_kv_merge", "hard_kv_pairs", "kv_merger",
    "trim_kv",    "given_worths", "dapq",          "epi_cache",     "layer_defensive_kv",
    "compress_kv"};

std::vector<float> floats_of(const tensor_text& tensor) {
  std::vector<float> floats;
  for (const std::uint16_t bits : elements_of<std::uint16_t>(tensor))
    floats.push_back(freekv::examples::half_to_float(bits));
  return floats;
}

/// A trace of a real model, F16.
struct recorded {
  std::vector<float> q, k, v, worths, probes;
  int query_heads = 0, kv_heads = 0, head_dim = 0, tokens = 0;

  recorded() {
    const tensor_map tensors = read_tensors(FREEKV_TRACE);
    q = floats_of(tensors.at("q")), k = floats_of(tensors.at("k")), v = floats_of(tensors.at("v"));
    const auto& shape = tensors.at("q").shape;
    tokens = static_cast<int>(shape[0]), query_heads = static_cast<int>(shape[1]),
    head_dim = static_cast<int>(shape[2]);
    kv_heads = static_cast<int>(tensors.at("k").shape[1]);
    worths = random_worths(1, tokens * kv_heads);  // its model has no gates
    dice d(2);
    probes = random_probes(d, q, query_heads * head_dim, 40);
  }
  std::span<const float> rows(const std::vector<float>& of, int first, int count) const {
    const std::size_t width = of.size() / to_size(tokens);
    return std::span(of).subspan(to_size(first) * width, to_size(count) * width);
  }
  /// The same with another number of prompt tokens.
  void store_as(const std::filesystem::path& path, int prompt) const {
    const auto one = [&](const std::vector<float>& of, int heads) {
      return tensor_text{"F16", {tokens, heads, head_dim}, bytes_of(of, "F16")};
    };
    store(path, parts_of({{"q", one(q, query_heads)},
                          {"k", one(k, kv_heads)},
                          {"v", one(v, kv_heads)},
                          {"worths", {"F32", {tokens, kv_heads}, bytes_of(worths, "F32")}},
                          {"q_probe", {"F16", {40, query_heads, head_dim}, bytes_of(probes, "F16")}}},
                         {{"prompt_len", std::to_string(prompt)}, {"layer", "3"}})
                    .whole());
  }
};

}  // namespace

TEST_CASE("every method that forgets agrees with the oracle on a trace of a real model",
          "[replay][eviction]") {
  const recorded trace;
  eviction_coverage seen;
  for (const std::string& variant : forgetful_variants)
    for (const auto& run : {std::pair(400, true), {400, false}, {0, true}, {60, false}}) {
      const int prompt = run.first;
      const bool published = run.second;
      if (sanitized && prompt != 400) continue;
      INFO(variant << ", prompt " << prompt);
      const scratch_folder folder;
      trace.store_as(folder / "trace", prompt);
      std::vector<std::string> command{FREEKV_REPLAY, folder / "trace",
                                       "--variant",   variant,
                                       "--page",      "16",
                                       "--sink",      "16",
                                       "--window",    "32",
                                       "--k",         "4",
                                       "--out",       folder / "out",
                                       "--threads",   "2"};
      // A list, or without one every query head votes.
      const bool lists = variant == "compress_kv" && prompt == 400;
      if (lists) {
        std::ofstream(folder / "voters")
            << "# layer query_head\n3 1\n2 0\n3 " << trace.query_heads - 1 << "\n";
        command.insert(command.end(), {"--heads", folder / "voters"});
      }
      freekv::examples::method_spec method{.plan = "eviction", .eviction = variant};
      if (!published) {
        dice d(number_from("FREEKV_SEED", 61) + static_cast<std::uint64_t>(prompt));
        give_random_numbers(method, 16 + 32 + 4 * 16, d);
        std::ostringstream list;
        for (const auto& [name, number] : method.eviction_values)
          list << (list.tellp() > 0 ? "," : "") << name << '=' << number;
        if (list.tellp() > 0) command.insert(command.end(), {"--eviction-values", list.str()});
      }
      const auto end = run_program(command);
      INFO(end);
      REQUIRE(end.exit_code == 0);
      REQUIRE(end.err.empty());

      const int steps = trace.tokens - prompt, budget = 16 + 32 + 4 * 16;
      freekv::examples::pipeline_options o;
      o.head_dim = trace.head_dim;
      o.query_heads = trace.query_heads;
      o.kv_heads = trace.kv_heads;
      o.page = 16;
      o.budget = {16, 32, 4};
      o.method = method;
      if (lists) {
        o.voters.assign(to_size(trace.query_heads), 0);
        o.voters[1] = o.voters.back() = 1;
      }
      const auto settings = eviction_settings_of(o);
      CHECK(settings.budget == budget);
      oracle::forgetful_decoder expected(settings);
      // A block is as many tokens as the budget, and the same probe rows observe each.
      const int block = variant == "epi_cache" ? budget : prompt;
      for (int done = 0; done < prompt; done += block) {
        const auto part = [&](const std::vector<float>& of) {
          return trace.rows(of, done, std::min(block, prompt - done));
        };
        expected.prompt(part(trace.q), part(trace.k), part(trace.v), part(trace.worths));
        if (variant == "dapq" || variant == "epi_cache") expected.observe(trace.probes);
      }

      const tensor_map written = read_tensors(folder / "out");
      const auto out = elements_of<float>(written.at("out")), lse = elements_of<float>(written.at("lse"));
      const auto selected = elements_of<std::int32_t>(written.at("selected"));
      const int columns = static_cast<int>(written.at("selected").shape[2]);
      // The only layer's ratio is 1: nothing of it is coded.
      const bool in_4_bits = variant == "mikv" || variant == "q_hitter";
      const bool codes = in_4_bits || variant == "arkv" || variant == "arkv_split";
      REQUIRE((written.count("coded") != 0) == codes);
      const auto coded = codes ? elements_of<std::int32_t>(written.at("coded")) : std::vector<std::int32_t>{};
      const auto is_coded = [](int token) { return token >= 0; };
      CHECK(std::any_of(coded.begin(), coded.end(), is_coded) == in_4_bits);
      CHECK(written.at("selected").shape == std::vector<std::int64_t>{steps, trace.kv_heads, columns});
      // Slots: what the budget says, and no more.
      const int slots =
          variant == "raas"                                     ? budget + 16
          : variant.starts_with("arkv")                         ? budget
          : variant == "mikv"                                   ? trace.tokens
          : variant == "lazy_eviction"                          ? std::min(budget + 64, trace.tokens)
          : variant.starts_with("hard_kv") || variant == "r_kv" ? std::min(budget + 128, trace.tokens)
          : variant == "epi_cache"
              ? std::min(budget + std::max(budget, prompt == 0 ? trace.tokens : steps), trace.tokens)
          : variant == "snapkv" || variant == "dapq" || variant == "pyramid_kv" || variant == "kv_merger" ||
                  variant.ends_with("defensive_kv") || variant == "cake" || variant == "compress_kv"
              ? std::min(budget + std::max(steps, prompt == 0 ? trace.tokens : 0), trace.tokens)
              : budget + 1;
      const int most = variant == "raas" ? std::min(slots, (trace.tokens + 15) / 16 * 16) : slots;
      const bool shared = variant == "layer_defensive_kv";  // the budget among the layer's heads
      const bool pooled = variant == "cake" || shared;      // a head may have any part of what all have
      const int pool = prompt == 0 ? budget + trace.tokens : slots;  // where a prompt could have come too
      if (prompt > 0) CHECK(columns == (variant == "raas" ? most / 16 : pooled ? trace.tokens : most));

      expected_summary numbers;
      std::vector<int> all;
      for (int t = 0; t < prompt; ++t) all.push_back(t);
      oracle::forgetful_decoder full([&] {
        auto s = settings;
        s.kind = oracle::eviction_kind::tova, s.page = 1, s.budget = trace.tokens;
        return s;
      }());
      if (prompt > 0)
        full.prompt(trace.rows(trace.q, 0, prompt), trace.rows(trace.k, 0, prompt),
                    trace.rows(trace.v, 0, prompt));
      try {
        for (int step = 0; step < steps; ++step) {
          const int token = prompt + step;
          const auto q = trace.rows(trace.q, token, 1), k = trace.rows(trace.k, token, 1),
                     v = trace.rows(trace.v, token, 1);
          const auto where = sentence("step ", step);
          if (shared && step == 0 && prompt > budget) {
            std::vector<std::vector<double>> worths;
            std::vector<int> kept;
            for (int head = 0; head < trace.kv_heads; ++head) {
              worths.push_back(expected.defended_worths(head));
              const auto units = std::span(selected).subspan(to_size(head * columns), to_size(columns));
              kept.push_back(static_cast<int>(std::find(units.begin(), units.end(), -1) - units.begin()) - 1);
            }
            take_head_budgets(expected, settings, worths, kept);
          }
          for (int head = 0; head < trace.kv_heads; ++head) {
            const auto units = std::span(selected).subspan(to_size((step * trace.kv_heads + head) * columns),
                                                           to_size(columns));
            const auto padding = std::find(units.begin(), units.end(), -1);
            compare_units(where, expected, head, {units.begin(), padding}, token / settings.page, seen);
            if (written.count("coded") != 0) {
              const auto in_bytes = std::span(coded).subspan(
                  to_size((step * trace.kv_heads + head) * columns), to_size(columns));
              const auto end_of_coded = std::find(in_bytes.begin(), in_bytes.end(), -1);
              compare_coded(where, expected, head, {in_bytes.begin(), end_of_coded}, seen);
            }
            CHECK(std::all_of(padding, units.end(), [](int unit) { return unit == -1; }));
          }
          const auto want = expected.step(q, k, v, trace.rows(trace.worths, token, 1)).attended,
                     whole = full.step(q, k, v).attended;
          const auto heads = to_size(trace.query_heads), d = to_size(trace.head_dim);
          const auto row = std::span(out).subspan(to_size(step) * heads * d, heads * d);
          compare_row(where, want, row, std::span(lse).subspan(to_size(step) * heads, heads));
          for (std::size_t head = 0; head < heads; ++head)
            numbers.add_head(row.subspan(head * d, d), lse[to_size(step) * heads + head],
                             std::span(whole.out).subspan(head * d, d), whole.lse[head]);
          ++seen.steps;
        }
      } catch (const disagreement& e) {
        FAIL_CHECK(e.what);
      }
      const auto summary = nlohmann::json::parse(end.out);
      const auto heads = static_cast<double>(numbers.heads);
      if (codes && steps > 0)
        CHECK(summary.at("mass_kept").is_null());
      else
        CHECK(summary.at("mass_kept").get<double>() == Approx(numbers.mass_sum / heads).margin(2e-4));
      CHECK(summary.at("error").at("relative_l2_mean").get<double>() ==
            Approx(numbers.error_sum / heads).margin(2e-4));
      CHECK(summary.at("settings").at("budget") == budget);
      CHECK(summary.at("settings").at("summary") == nullptr);
      CHECK(summary.at("hit_rate") == nullptr);
      CHECK(summary.at("pages_recalled") == 0);
      CHECK(summary.at("summary_bytes_per_page") == 0);
      const int unit = variant == "raas" ? 16 : 1, original = 2 * trace.head_dim * 2;
      const int originals = variant == "mikv" ? budget + 1 : 1;
      const int of_head = in_4_bits
                              ? originals * original + (columns - originals) * 2 * (trace.head_dim / 2 + 4)
                              : (pooled ? pool : columns * unit) * original;
      CHECK(summary.at("fast_tier_bytes") == (trace.kv_heads * of_head + 127) / 128 * 128);
      CHECK((summary.at("staging_bytes").get<long>() > 0) == (variant != "epi_cache"));  // which stages none
    }
  CHECK(seen.steps == std::ssize(forgetful_variants) * (sanitized ? 2 * 24 : 2 * 24 + 424 + 364));
  CHECK(seen.doubtful * 50 < seen.sets);
}

TEST_CASE("what methods that forget cannot do is refused", "[replay][eviction]") {
  const scratch_folder folder;
  store(folder / "trace", good_trace().whole());
  store(folder / "events", "{\"op\":\"open\",\"seq\":0,\"trace\":\"trace\"}\n");
  for (const std::string& variant : forgetful_variants) {
    const auto line =
        sentence_of(run_program({FREEKV_REPLAY, "--events", folder / "events", "--variant", variant}));
    CHECK_THAT(line, Catch::Contains("--variant " + variant + " forgets"));
    freekv::host_backend backend;
    freekv::examples::pipeline_options o;
    o.head_dim = freekv::examples::head_dims[0];
    o.query_heads = 4, o.kv_heads = 2, o.max_tokens = 100;
    o.method = {.plan = "eviction", .eviction = variant};
    const auto p = freekv::examples::make_pipeline(o, backend);
    const auto id = p->open();
    const auto says = Catch::Contains("keeps no complete store to do this from");
    CHECK_THROWS_WITH(p->truncate(id, 0), Catch::StartsWith("truncate: " + variant) && says);
    CHECK_THROWS_WITH(p->preempt(id), Catch::StartsWith("preempt: " + variant) && says);
    CHECK_THROWS_WITH(p->restore(id), Catch::StartsWith("restore: " + variant) && says);
    CHECK_THROWS_AS(p->truncate(id, 0), freekv::usage_error);
  }
  for (const std::string variant : {"trim_kv", "given_worths"})
    CHECK_THAT(sentence_of(run_program({FREEKV_REPLAY, folder / "trace", "--variant", variant, "--page", "8",
                                        "--sink", "8", "--window", "8", "--k", "1"})),
               Catch::Contains("--variant " + variant + " goes by what a model's gates say of each token") &&
                   Catch::Contains("the trace has no tensor worths (tokens, n_kv)"));
  for (const std::string variant : {"dapq", "epi_cache"})
    CHECK_THAT(sentence_of(run_program({FREEKV_REPLAY, folder / "trace", "--variant", variant, "--page", "8",
                                        "--sink", "8", "--window", "8", "--k", "3"})),
               Catch::Contains(
                   "--variant " + variant +
                   " goes by the queries of pseudo tokens behind the prompt, and the trace has no tensor "
                   "q_probe (rows, n_qo, d)"));
  // What a trace has under these names is looked at, whatever the variant.
  const auto zeros = [](std::vector<std::int64_t> shape, const std::string& dtype = "F32") {
    std::int64_t bytes = 4;
    for (const std::int64_t length : shape) bytes *= length;
    return tensor_text{dtype, std::move(shape), std::string(to_size(bytes), '\0')};
  };
  for (const tensor_text& wrong :
       {zeros({0, 4, 64}), zeros({3, 2, 64}), zeros({3, 4, 32}), zeros({3, 256}), zeros({3, 4, 64}, "I32")}) {
    store(folder / "wrong", parts_of({{"q", zeros({40, 4, 64})},
                                      {"k", zeros({40, 2, 64})},
                                      {"v", zeros({40, 2, 64})},
                                      {"q_probe", wrong}},
                                     {{"prompt_len", "30"}})
                                .whole());
    CHECK_THAT(
        sentence_of(run_program({FREEKV_REPLAY, folder / "wrong", "--page", "8"})),
        Catch::Contains("q_probe is ") && Catch::Contains("needed is F32, F16 or BF16 of (rows, 4, 64)"));
  }
  for (const tensor_text& wrong :
       {zeros({40, 3}), zeros({2, 40}), zeros({40, 2, 1}), zeros({80}), zeros({40, 2}, "I32")}) {
    store(folder / "wrong", parts_of({{"q", zeros({40, 4, 64})},
                                      {"k", zeros({40, 2, 64})},
                                      {"v", zeros({40, 2, 64})},
                                      {"worths", wrong}},
                                     {{"prompt_len", "30"}})
                                .whole());
    CHECK_THAT(sentence_of(run_program({FREEKV_REPLAY, folder / "wrong", "--page", "8"})),
               Catch::Contains("worths is ") && Catch::Contains("needed is F32, F16 or BF16 of (40, 2)"));
  }
  const auto line = sentence_of(run_program({FREEKV_REPLAY, folder / "trace", "--variant", "snapkv", "--page",
                                             "8", "--sink", "8", "--window", "8", "--k", "1"}));
  CHECK_THAT(line, Catch::Contains("snapkv: a window of 32 rows is not from 1 to below the budget of 24"));
}
