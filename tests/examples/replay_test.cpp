// freekv-replay as its user sees it: traces in; tensors and a JSON object out, as the float64 oracle says.

#include "../catch.hpp"
#include "compiled_shapes.hpp"
#include "replay_agreement.hpp"

using namespace tests;

namespace {

/// Runs a case in a folder of its own and compares it with the oracle; a failure names the case.
void check_replay(const replay_case& c, coverage& seen) {
  INFO(c);
  try {
    const scratch_folder folder;
    check_agreement(c, run_replay(c, folder), seen);
    CHECK(folder.listing().size() == 2u + (c.basis_layers > 0) + !c.heads.empty());
  } catch (const disagreement& d) {
    FAIL_CHECK(d.what);
  } catch (const std::exception& e) {
    FAIL_CHECK("the output cannot be read: " << e.what());
  }
}

tensor_map tensors_of(const replay_case& c) {
  const scratch_folder folder;
  return run_replay(c, folder).tensors;
}

void check_same(const tensor_map& a, const tensor_map& b, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    INFO(name);
    CHECK((a.at(name).bytes == b.at(name).bytes));
  }
}
const std::vector<std::string> outputs{"out", "lse", "selected", "corrected"};

/// The mean of `points` and the `rank` leading eigenvectors of their covariance, by Jacobi rotations.
std::vector<std::vector<double>> mean_and_directions(const std::vector<std::vector<double>>& points,
                                                     int rank) {
  const std::size_t d = points[0].size();
  std::vector<double> mean(d, 0.0);
  for (const auto& point : points)
    for (std::size_t i = 0; i < d; ++i) mean[i] += point[i] / static_cast<double>(points.size());
  std::vector<std::vector<double>> covariance(d, std::vector<double>(d, 0.0)), vectors = covariance;
  for (const auto& point : points)
    for (std::size_t i = 0; i < d; ++i)
      for (std::size_t j = 0; j < d; ++j) covariance[i][j] += (point[i] - mean[i]) * (point[j] - mean[j]);
  for (std::size_t i = 0; i < d; ++i) vectors[i][i] = 1.0;
  for (int sweep = 0; sweep < 12; ++sweep)
    for (std::size_t p = 0; p < d; ++p)
      for (std::size_t q = p + 1; q < d; ++q) {
        const double angle = 0.5 * std::atan2(2 * covariance[p][q], covariance[q][q] - covariance[p][p]);
        const double c = std::cos(angle), s = std::sin(angle);
        const auto turn = [&](double& a, double& b) {
          const double old = a;
          a = c * old - s * b;
          b = s * old + c * b;
        };
        for (std::size_t i = 0; i < d; ++i) turn(covariance[i][p], covariance[i][q]);
        for (std::size_t i = 0; i < d; ++i) turn(covariance[p][i], covariance[q][i]);
        for (std::size_t i = 0; i < d; ++i) turn(vectors[p][i], vectors[q][i]);
      }
  std::vector<std::size_t> order(d);
  for (std::size_t i = 0; i < d; ++i) order[i] = i;
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return covariance[a][a] > covariance[b][b]; });
  std::vector<std::vector<double>> rows{mean};
  for (int r = 0; r < rank; ++r) rows.push_back(vectors[order[to_size(r)]]);
  return rows;
}

/// All variants; where a sanitizer makes them ten times slower, every eighth.
std::map<std::string, variant_policies> spread_variants() {
  std::map<std::string, variant_policies> some;
  int nth = 0;
  for (const auto& variant : variants_of_contract())
    if (nth++ % (sanitized ? 8 : 1) == 0) some.insert(variant);
  return some;
}

}  // namespace

TEST_CASE("replays of random traces agree with the float64 oracle", "[replay]") {
  coverage seen;
  const std::uint64_t most = sanitized ? 20 : 300;  // ten times slower there
  for (std::uint64_t seed = 1; seed <= most; ++seed) check_replay(random_replay(seed), seen);
  INFO(seen);
  if (sanitized) return;
  CHECK(seen.firm_selections > 1000);
  CHECK(seen.heads > 5000);
  CHECK(seen.corrected > 200);
  CHECK(seen.kept > 200);
  CHECK(seen.recalled > 300);
  CHECK(seen.before_attention > 150);
  CHECK(seen.promoted_replays > 5);
  CHECK(seen.thinned > 20);
}

TEST_CASE("every compiled shape agrees with the oracle", "[replay]") {
  coverage seen;
  for (const auto& shape : freekv::examples::compiled_shapes)
    for (const bool in_place : {false, true})
      check_replay(with(plain_case("freekv_key_subspace"),
                        [&](replay_case& c) {
                          auto& o = c.layer.options;
                          c.dtype = std::string(dtype_name(shape.element));
                          c.query_dtype = c.dtype == "F16" ? "BF16" : c.dtype == "F32" ? "F16" : "F32";
                          o.head_dim = shape.head_dim;
                          o.query_heads = 2;
                          o.in_place = in_place;
                          c.layer.steps = 6;
                        }),
                   seen);
  constexpr auto shapes = static_cast<long>(std::size(freekv::examples::compiled_shapes));
  CHECK(seen.replays == 2 * shapes);
  CHECK(seen.firm_selections > 13 * shapes);
}

TEST_CASE("every variant agrees with the oracle on a trace of a real model", "[replay]") {
  metadata_map metadata;
  const tensor_map recorded = read_tensors(FREEKV_TRACE, &metadata);
  coverage seen;
  for (const auto& [variant, policies] : spread_variants()) {
    replay_case c = plain_case(variant);
    auto& o = c.layer.options;
    c.query_dtype = recorded.at("q").dtype;
    c.dtype = recorded.at("k").dtype;
    o.query_heads = static_cast<int>(recorded.at("q").shape[1]);
    o.kv_heads = static_cast<int>(recorded.at("k").shape[1]);
    o.head_dim = static_cast<int>(recorded.at("q").shape[2]);
    o.page = 16;
    o.budget = {16, 32, 4};
    o.method.rank = 24;
    o.method.bits = 3;
    c.layer.prompt = std::stoi(metadata.at("prompt_len"));
    c.layer.steps = static_cast<int>(recorded.at("q").shape[0]) - c.layer.prompt;
    fill_trace(c);
    const auto values = [&](const char* name) {
      std::vector<float> floats;
      for (const std::uint16_t bits : elements_of<std::uint16_t>(recorded.at(name)))
        floats.push_back(freekv::examples::half_to_float(bits));
      return floats;
    };
    REQUIRE(c.dtype == "F16");
    c.q = values("q");
    c.k = values("k");
    c.v = values("v");
    learn_codebooks(c);
    learn_factors(c);
    check_replay(c, seen);
  }
  CHECK(seen.replays == static_cast<long>(spread_variants().size()));
  if (sanitized) return;
  CHECK(seen.corrected > 50);
  CHECK(seen.kept > 20);
  CHECK(seen.recalled > 100);
}

TEST_CASE("legal extremes of settings and lengths agree with the oracle", "[replay]") {
  coverage seen;
  const auto check = [&](const char* what, const std::function<void(replay_case&)>& change) {
    for (const char* variant : {"freekv", "freekv_key_subspace", "streaming_llm", "full"}) {
      if (sanitized && std::string(variant) != "freekv_key_subspace") continue;
      INFO(what);
      check_replay(with(plain_case(variant), change), seen);
    }
  };
  check("no prompt", [](auto& c) { c.layer.prompt = 0; });
  check("no prompt, long enough to select", [](auto& c) { c.layer.prompt = 0, c.layer.steps = 60; });
  check("no step", [](auto& c) { c.layer.steps = 0; });
  check("no token", [](auto& c) { c.layer.prompt = c.layer.steps = 0; });
  check("one token, the prompt", [](auto& c) { c.layer.prompt = 1, c.layer.steps = 0; });
  check("one token, a step", [](auto& c) { c.layer.prompt = 0, c.layer.steps = 1; });
  check("shorter than a page", [](auto& c) { c.layer.prompt = 3, c.layer.steps = 4; });
  check("exactly a page", [](auto& c) { c.layer.prompt = 7, c.layer.steps = 1; });
  check("a page and its prompt", [](auto& c) { c.layer.prompt = 8, c.layer.steps = 2; });
  check("no sink", [](auto& c) { c.layer.options.budget.sink = 0; });
  check("a budget larger than the sequence", [](auto& c) { c.layer.options.budget = {800, 1600, 300}; });
  check("a sink of two million tokens", [](auto& c) { c.layer.options.budget.sink = 2'000'000; });
  check("a window of two million tokens", [](auto& c) { c.layer.options.budget.window = 2'000'000; });
  check("two million tokens of pages", [](auto& c) { c.layer.options.budget.selected_units = 250'000; });
  check("the largest sink and window",
        [](auto& c) { c.layer.options.budget.sink = c.layer.options.budget.window = 2'147'483'640; });
  check("largest page", [](auto& c) {
    c.layer.options.page = 256;
    c.layer.options.budget = {0, 256, 1};
    c.layer.prompt = 760;
  });
  check("tau -5", [](auto& c) { c.tau = "-5"; });
  check("tau 5", [](auto& c) { c.tau = "5"; });
  check("one query head", [](auto& c) { c.layer.options.kv_heads = c.layer.options.query_heads = 1; });
  check("a rank above the prompt's tokens", [](auto& c) {
    c.layer.options.method.rank = 40;
    c.layer.prompt = 20;
    c.layer.steps = 40;
  });
  check("a rank of head_dim", [](auto& c) { c.layer.options.method.rank = 64; });
  check("rank 1", [](auto& c) { c.layer.options.method.rank = 1; });
  CHECK(seen.replays == 22 * (sanitized ? 1 : 4));
}

TEST_CASE("values of tau beyond float32 flag as its largest do", "[replay]") {
  coverage seen;
  for (const char* tau : {"1e39", "-1e39"}) {
    replay_case c = plain_case();
    c.tau = tau;
    c.layer.options.method.tau = tau[0] == '-' ? -3e38f : 3e38f;
    check_replay(c, seen);
  }
  CHECK(seen.kept == 22);
  CHECK(seen.corrected == 24 + 2);
}

TEST_CASE("NaN and infinity inside a trace are data", "[replay]") {
  coverage seen;
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const char* variant : {"freekv", "freekv_chunk_means", "freekv_key_subspace", "quest", "full"})
    for (const float poison : {nan, inf, -inf})
      for (const char tensor : {'q', 'k', 'v'}) {
        replay_case c = plain_case(variant);
        c.layer.options.in_place = tensor == 'k';
        c.threads = 2;
        auto& values = tensor == 'q' ? c.q : tensor == 'k' ? c.k : c.v;
        const int width = c.layer.options.head_dim;
        const int heads = tensor == 'q' ? c.layer.options.query_heads : c.layer.options.kv_heads;
        const auto at = [&](int token, int head, int i) -> float& {
          return values[to_size((token * heads + head) * width + i)];
        };
        // In the last head alone, so that the others show that they are not affected.
        if (tensor == 'q')
          at(84, heads - 1, 3) = at(87, heads - 1, 0) = poison;
        else  // a page among the candidates, and a token in the window
          at(30, heads - 1, 5) = at(83, heads - 1, 63) = poison;
        INFO("poison " << poison << " in " << tensor);
        check_replay(c, seen);
      }
  CHECK(seen.replays == 45);
  CHECK(seen.not_finite > 50);
}

TEST_CASE("twilight prunes to the paper's share of the mass unless it is told otherwise", "[replay]") {
  replay_case c = plain_case("twilight");
  const scratch_folder folder;
  store(folder / "trace", trace_of(c).whole());
  const std::vector<std::string> command{
      FREEKV_REPLAY, folder / "trace", "--variant", "twilight", "--page", "8", "--sink",
      "8",           "--window",       "16",        "--k",      "2"};
  const auto settings_with = [&](const std::vector<std::string>& flags) {
    auto whole = command;
    whole.insert(whole.end(), flags.begin(), flags.end());
    const program_end end = run_program(whole);
    INFO(end);
    REQUIRE(end.exit_code == 0);
    return nlohmann::json::parse(end.out).at("settings");
  };
  const auto usual = settings_with({"--out", folder / "usual"});
  CHECK(usual.at("top_p") == 0.85);
  CHECK(usual.at("times") == 4);
  const auto other = settings_with({"--top-p", "0.3", "--times", "1"});
  CHECK(other.at("top_p") == 0.3);
  CHECK(other.at("times") == 1);
  c.top_p = "0.85";
  fill_trace(c);
  check_same(read_tensors(folder / "usual"), tensors_of(c), outputs);
}

TEST_CASE("a prompt of NaN keys alone still has a basis", "[replay]") {
  coverage seen;
  replay_case c = plain_case("freekv_key_subspace");
  for (std::size_t i = 0; i < to_size(c.layer.prompt * 2 * 64); ++i) c.k[i] = std::nanf("");
  check_replay(c, seen);
  // One head of two: its neighbour keeps its own basis and its finite numbers.
  c = plain_case("freekv_key_subspace");
  for (int token = 0; token < c.layer.prompt; ++token)
    std::fill_n(c.k.begin() + token * 2 * 64, 64, std::nanf(""));
  check_replay(c, seen);
  CHECK(seen.replays == 2);
}

TEST_CASE("a trace of zeros alone is replayed", "[replay]") {
  coverage seen;
  for (const char* variant : {"freekv", "freekv_key_subspace", "full"}) {
    replay_case c = plain_case(variant);
    for (auto* tensor : {&c.q, &c.k, &c.v}) std::fill(tensor->begin(), tensor->end(), 0.0f);
    check_replay(c, seen);
  }
  CHECK(seen.corrected == 2 * 24);  // a query of norm zero is flagged
}

TEST_CASE("numbers at the limits of their types are replayed", "[replay]") {
  for (const auto& variant : spread_variants())
    for (const std::string& dtype : all_dtypes())
      for (const float share : {1.0f, 0.9f, 1e-4f}) {
        if (sanitized && share != 0.9f) continue;
        replay_case c = plain_case(variant.first);
        c.dtype = c.query_dtype = dtype;
        fill_trace(c);
        const float largest = dtype == "F16" ? 65504.0f : dtype == "BF16" ? 3.38953139e38f : 3.40282347e38f;
        dice d(3);
        for (auto* tensor : {&c.q, &c.k, &c.v})
          for (float& x : *tensor) x = rounded(d.one_of({-1.0f, 1.0f}) * share * largest, element_of(dtype));
        INFO(c << ", share " << share);
        const scratch_folder folder;
        const replay_output r = run_replay(c, folder);  // throws unless it succeeds with the contract's form
        const int units = 12 * 8 / c.layer.options.method.unit_tokens(8);
        for (const std::int32_t unit : r.selected) CHECK((unit >= -1 && unit < units));
        // Where no product leaves float32 there is nothing to be infinite.
        if (dtype == "F16" && c.layer.options.method.codec == "identity") {
          CHECK(std::all_of(r.out.begin(), r.out.end(), [](float x) { return std::isfinite(x); }));
          CHECK(std::all_of(r.lse.begin(), r.lse.end(), [](float x) { return std::isfinite(x); }));
        }
      }
}

TEST_CASE("the smallest numbers of a type are replayed like others", "[replay]") {
  coverage seen;
  for (const char* variant : {"freekv", "freekv_key_subspace"})
    for (const std::string& dtype : all_dtypes()) {
      replay_case c = with(plain_case(variant), [&](replay_case& changed) { changed.dtype = dtype; });
      const float smallest = dtype == "F16" ? 0x1p-24f : 0x1p-126f;
      for (float& x : c.k) x = rounded(x * 100 * smallest, element_of(dtype));
      check_replay(c, seen);
    }
  CHECK(seen.replays == 6);
}

TEST_CASE("selected, corrected and recalled of full and streaming_llm do not depend on k", "[replay]") {
  for (const char* variant : {"full", "streaming_llm"}) {
    const tensor_map few = tensors_of(plain_case(variant));
    const tensor_map many =
        tensors_of(with(plain_case(variant), [](auto& c) { c.layer.options.budget.selected_units = 7; }));
    check_same(few, many, {"out", "lse", "corrected", "recalled"});
    for (const auto& tensors : {few, many}) {
      for (const auto page : elements_of<std::int32_t>(tensors.at("selected"))) CHECK(page == -1);
      for (const auto flag : elements_of<std::uint8_t>(tensors.at("corrected"))) CHECK(flag == 0);
      for (const auto pages : elements_of<std::int32_t>(tensors.at("recalled"))) CHECK(pages == 0);
    }
  }
}

TEST_CASE("two runs, any number of threads and both routes write the same", "[replay]") {
  if (sanitized) return;  // long, and invariants_test has the same of the library
  for (const auto& variant : spread_variants()) {
    INFO(variant.first);
    // Large enough that several threads have work: they are woken for each quarter megabyte.
    const replay_case c = with(plain_case(variant.first), [](auto& changed) {
      changed.layer.options.budget = {64, 512, 60};
      changed.layer.options.query_heads = 4;
      changed.layer.prompt = 2000;
    });
    const tensor_map first = tensors_of(c);
    check_same(first, tensors_of(c), outputs);
    for (const int threads : {2, 3}) {
      INFO(threads << " threads");
      replay_case threaded = c;
      threaded.threads = threads;
      check_same(first, tensors_of(threaded), outputs);
      check_same(first, tensors_of(threaded), {"recalled"});
    }
    replay_case in_place = c;
    in_place.layer.options.in_place = true;
    const tensor_map from_store = tensors_of(in_place);
    check_same(first, from_store, outputs);
    for (const auto pages : elements_of<std::int32_t>(from_store.at("recalled"))) CHECK(pages == 0);
    if (c.retrieves()) {
      const auto recalled = elements_of<std::int32_t>(first.at("recalled"));
      CHECK(std::any_of(recalled.begin(), recalled.end(), [](int pages) { return pages > 0; }));
    }
  }
}

TEST_CASE("with k for every candidate each variant is full attention", "[replay]") {
  const auto full = elements_of<float>(tensors_of(plain_case("full")).at("out"));
  for (const auto& variant : spread_variants()) {
    if (variant.second.plan != "retrieval" || variant.second.selection != "top_k") continue;
    const auto out = elements_of<float>(tensors_of(with(plain_case(variant.first), [](auto& c) {
                                          c.layer.options.budget.selected_units = 40 * 8;
                                          if (c.codec_loses()) c.codec = "identity";
                                          if (c.variant == "mpcache") c.thin = "1";
                                        })).at("out"));
    REQUIRE(out.size() == full.size());
    for (std::size_t i = 0; i < out.size(); ++i)
      if (!close(out[i], full[i], 1e-6)) FAIL_CHECK(variant.first << ": " << out[i] << " for " << full[i]);
  }
}

TEST_CASE("the basis of the prompt spans the leading eigenvectors of its keys' covariance", "[replay]") {
  // As many bits as a number has, so that only the subspace counts.
  replay_case c = with(plain_case("freekv_key_subspace"), [](auto& changed) {
    changed.layer.options.method.bits = 32;
    changed.layer.options.method.rank = 8;
    changed.layer.prompt = 200;
  });
  const auto& o = c.layer.options;
  std::vector<float> basis;
  for (int head = 0; head < o.kv_heads; ++head) {
    std::vector<std::vector<double>> keys;
    for (int token = 0; token < c.layer.prompt; ++token) {
      const auto key = c.k.begin() + (token * o.kv_heads + head) * o.head_dim;
      keys.emplace_back(key, key + o.head_dim);
    }
    for (const auto& row : mean_and_directions(keys, o.method.rank))
      basis.insert(basis.end(), row.begin(), row.end());
  }
  replay_case from_file = c;
  from_file.layer.basis_data = basis;
  from_file.basis_layers = 1;
  coverage seen;
  check_replay(from_file, seen);
  CHECK(seen.firm_selections > 20);
  check_same(tensors_of(c), tensors_of(from_file), outputs);
}

TEST_CASE("keys are rebuilt from what they were before rotation, which the trace or a flag says",
          "[replay]") {
  // A trace with k_pre needs no flags: what it finds is the rotation that the flags would have said.
  replay_case flags =
      with(plain_case("shadowkv"), [](replay_case& c) { c.layer.options.method.key_rank = 100; });
  const auto& o = flags.layer.options;
  replay_case pre = flags;
  using namespace freekv::examples;
  pre.k_pre = rotated(flags.k, o.kv_heads, o.head_dim,
                      rotation_of_base(rope_base, o.head_dim / 2, freekv::rotary_pairs::halves), -1.0f);
  const auto error = [](const replay_case& c) {
    return run_replay(c, scratch_folder()).summary.at("error_of_codec").at("relative_l2_mean").get<double>();
  };
  const double by_flags = error(flags);
  CHECK(by_flags > 0.01);
  CHECK(std::fabs(error(pre) - by_flags) < 1e-3 * by_flags);

  if (sanitized) return;  // the rest is long, and about numbers
  // Of a real layer's keys, pairs of which only these were turned together before.
  const auto real = [](const std::vector<std::string>& more) {
    std::vector<std::string> command{FREEKV_REPLAY, FREEKV_TRACE, "--variant",   "shadowkv",
                                     "--page",      "16",         "--sink",      "16",
                                     "--window",    "32",         "--rope-base", "100000"};
    if (more.size() == 2) command.insert(command.end(), {"--key-rank", "160"});
    command.insert(command.end(), more.begin(), more.end());
    const auto end = run_program(command);
    INFO(end);
    REQUIRE(end.exit_code == 0);
    return nlohmann::json::parse(end.out);
  };
  const auto error_of = [](const nlohmann::json& s) -> double {
    return s.at("error_of_codec").at("relative_l2_mean");
  };
  const auto neighbours = real({"--rope-pairs", "neighbours"});
  CHECK(error_of(neighbours) < 0.5 * error_of(real({"--rope-pairs", "halves"})));
  CHECK(error_of(real({"--rope-pairs", "neighbours", "--key-rank", "192"})) < 1e-3);
  // Without a number it is 160 of 1024, of 192 numbers 30.
  CHECK(error_of(real({"--rope-pairs", "neighbours", "--key-rank", "0"})) ==
        error_of(real({"--rope-pairs", "neighbours", "--key-rank", "30"})));
  // 8 tokens' values of 64 f16, and their bits.
  CHECK(neighbours.at("bytes_recalled") == neighbours.at("pages_recalled").get<long>() * (8 * 64 * 2 + 4));
}

TEST_CASE("of a real layer's keys the channels that are chosen tell most", "[replay]") {
  const auto real = [](const std::string& pruned) {
    const auto end = run_program({FREEKV_REPLAY, FREEKV_TRACE, "--variant", "think", "--page", "16", "--sink",
                                  "16", "--window", "32", "--k", "8", "--pruned", pruned});
    INFO(end);
    REQUIRE(end.exit_code == 0);
    return nlohmann::json::parse(end.out);
  };
  const auto error_of = [](const nlohmann::json& s) -> double {
    return s.at("error_of_codec").at("relative_l2_mean");
  };
  const auto whole = real("0"), most = real("0.4"), few = real("0.6");
  CHECK(error_of(whole) == 0.0);
  CHECK(error_of(most) > 0.0);
  CHECK(error_of(most) < 0.75 * error_of(few));
  // 16 tokens' keys of 40 and values of 64 f16.
  CHECK(most.at("bytes_recalled") == most.at("pages_recalled").get<long>() * 16 * (40 + 64) * 2);
  CHECK(most.at("pages_recalled") == whole.at("pages_recalled"));  // summaries are of whole keys
}

TEST_CASE("half of the mass on a real layer takes fewer pages and bytes than the k best pages", "[replay]") {
  const auto replayed = [](const std::vector<std::string>& more) {
    std::vector<std::string> command{FREEKV_REPLAY, FREEKV_TRACE, "--page", "8",  "--sink",       "8",
                                     "--window",    "32",         "--k",    "12", "--correction", "always"};
    command.insert(command.end(), more.begin(), more.end());
    const auto end = run_program(command);
    INFO(end);
    REQUIRE(end.exit_code == 0);
    return nlohmann::json::parse(end.out);
  };
  const auto best = replayed({}), half_mass = replayed({"--selection", "top_p", "--top-p", "0.5"});
  CHECK(2 * half_mass.at("bytes_recalled").get<long>() < best.at("bytes_recalled").get<long>());
  // Of a step's selected pages each is a hit or recalled.
  const auto selected = [](const nlohmann::json& s) {
    return s.at("pages_recalled").get<double>() / (1 - s.at("hit_rate").get<double>());
  };
  CHECK(2 * selected(half_mass) < selected(best));
}

TEST_CASE("a basis file of several layers is used by the layer that the trace or the flag names",
          "[replay]") {
  coverage seen;
  for (const bool trace_names_layer : {false, true}) {
    replay_case c = plain_case("freekv_key_subspace");
    c.basis_layers = 3;
    c.basis_layer = 2;
    c.trace_names_layer = trace_names_layer;
    check_replay(c, seen);
  }
  CHECK(seen.firm_selections > 20);
}

TEST_CASE("without --out nothing is written", "[replay]") {
  const scratch_folder folder;
  const replay_case c = plain_case();
  store(folder / "trace", trace_of(c).whole());
  const auto with_out = run_replay(c, folder).summary;
  fs::remove(folder / "out");
  const program_end end = run_program(command_of(c, folder / "trace", "", ""));
  INFO(end);
  REQUIRE(end.exit_code == 0);
  auto alone = nlohmann::json::parse(end.out);
  for (const char* name : {"steps", "error", "mass_kept", "correction_rate", "hit_rate", "bytes_recalled"}) {
    INFO(name);
    CHECK(alone.at(name) == with_out.at(name));
  }
  CHECK(folder.listing() == std::vector<std::string>{"trace"});
}

TEST_CASE("defaults are those of the contract", "[replay]") {
  const scratch_folder folder;
  store(folder / "trace", trace_of(plain_case()).whole());
  const program_end end = run_program({FREEKV_REPLAY, folder / "trace"});
  INFO(end);
  REQUIRE(end.exit_code == 0);
  const auto settings = nlohmann::json::parse(end.out).at("settings");
  CHECK(settings.at("variant") == "freekv");
  CHECK(settings.at("summary") == "min_max");
  CHECK(settings.at("correction") == "cosine_drift");
  CHECK(settings.at("page") == 32);
  CHECK(settings.at("sink") == 64);
  CHECK(settings.at("window") == 64);
  CHECK(settings.at("k") == 8);
  CHECK(settings.at("tau") == 0.9);
  CHECK(settings.at("route") == "resident");
  CHECK(settings.at("layout") == "nhd");
  CHECK(settings.at("summary_dtype") == "standard");
  CHECK(settings.at("pooling") == "mean_softmax");
  CHECK(settings.at("selection") == "top_k");
  CHECK(settings.at("rows") == "per_kv_head");
  CHECK(settings.at("drift_pool") == "mean");
  CHECK(settings.at("spare") == 0);
  CHECK(settings.at("residency") == "first_unselected");
  CHECK(settings.at("threads") == 1);
}

TEST_CASE("tau is the variant's unless it is given", "[replay]") {
  const scratch_folder folder;
  store(folder / "trace", trace_of(plain_case()).whole());
  const auto tau_with = [&](std::vector<std::string> more) {
    std::vector<std::string> command{FREEKV_REPLAY, folder / "trace", "--variant", "freekv_long_inputs"};
    command.insert(command.end(), more.begin(), more.end());
    const program_end end = run_program(command);
    INFO(end);
    REQUIRE(end.exit_code == 0);
    return nlohmann::json::parse(end.out).at("settings").at("tau");
  };
  CHECK(tau_with({}) == 0.8);
  CHECK(tau_with({"--tau", "0.7"}) == 0.7);
}

TEST_CASE("an output that exists is replaced, and a second run reads the same trace", "[replay]") {
  const scratch_folder folder;
  const replay_case c = plain_case();
  store(folder / "out", std::string(1 << 20, 'x'));
  const auto first = run_replay(c, folder);
  const auto second = run_replay(c, folder);
  check_same(first.tensors, second.tensors, outputs);
  CHECK(folder.listing() == std::vector<std::string>{"out", "trace"});
}

TEST_CASE("help names every flag and its default", "[replay]") {
  const program_end end = run_program({FREEKV_REPLAY, "--help"});
  INFO(end);
  CHECK(end.exit_code == 0);
  CHECK(end.err.empty());
  for (const char* flag : {"--variant TEXT=freekv ",
                           "--page INT=32 ",
                           "--sink INT=64 ",
                           "--window INT=64 ",
                           "--k INT=8 ",
                           "--tau FLOAT=0.9, of freekv_long_inputs 0.8",
                           "--summary TEXT=the variant's",
                           "--chunk INT=8 ",
                           "--rank INT=24 ",
                           "--bits INT=3, of key_sketch 2",
                           "--summary-dtype TEXT=standard",
                           "--pooling TEXT=the variant's",
                           "--selection TEXT=the variant's",
                           "--times INT=4 ",
                           "--top-p FLOAT=0.95, of twilight 0.85, of freekv_calibrated_top_p 0.9",
                           "--drift-pool TEXT=mean ",
                           "--delta FLOAT=0.2, of missing_share and verified_share 0.05",
                           "--epsilon FLOAT=0.1",
                           "--samples INT=4 ",
                           "--partial ",
                           "--every INT=8 ",
                           "--residency TEXT=first_unselected",
                           "--spare INT=0 ",
                           "--codec TEXT=the variant's",
                           "--pinning TEXT=the variant's",
                           "--pinned INT=48 ",
                           "--thin FLOAT=1, of mpcache 0.3",
                           "--key-rank INT=0 ",
                           "--rope-base FLOAT=the trace's",
                           "--rope-pairs TEXT=the trace's",
                           "--store-file TEXT=the store is in",
                           "--layout TEXT=nhd ",
                           "--heads TEXT=every head retrieves",
                           "--basis TEXT=prompt ",
                           "--basis-layer INT=",
                           "--rows TEXT=the variant's",
                           "--correction TEXT=the variant's",
                           "--route TEXT=resident ",
                           "--dtype TEXT=stored ",
                           "--scale FLOAT=the metadata's scale, or",
                           "--selection-scale FLOAT=--scale",
                           "--threads INT=1 ",
                           "--out TEXT=none "}) {
    INFO("lacks " << flag);
    CHECK(end.out.find(flag) != std::string::npos);
  }
  for (const auto& variant : variants_of_contract()) CHECK(end.out.find(variant.first) != std::string::npos);
}
