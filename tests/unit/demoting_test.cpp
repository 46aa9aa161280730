// Tokens that become coded: how many, which, what of, and what attention to them takes.

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../catch.hpp"
#include "../oracle/eviction.hpp"
#include "../sanitized.hpp"
#include "reports.hpp"
#include "steps.hpp"

namespace {

using namespace tests;
using Catch::Contains;
using freekv::bfloat16;
using freekv::half;
using freekv::settings_error;
using freekv::step_phase;

constexpr int d = 24;
using shape = freekv::kv_shape<half, d>;
constexpr std::size_t original_bytes = 2 * d * sizeof(half), fp8_bytes = 2 * (d + 4),
                      int4_bytes = 2 * (d / 2 + 4);

/// Rows of some layers, with less attention to single tokens from layer to layer.
struct layered_text {
  int layers = 1, query_heads = 1, kv_heads = 1, tokens = 0;
  std::vector<std::vector<float>> queries{}, keys{}, values{};

  void draw(dice& random, float size) {
    for (int layer = 0; layer < layers; ++layer) {
      queries.push_back(normals(random, count(tokens * query_heads * d)));
      for (float& x : queries.back()) x *= size * std::pow(0.5f, static_cast<float>(layer));
      for (auto* of : {&keys, &values}) {
        of->push_back(normals(random, count(tokens * kv_heads * d)));
        for (float& x : of->back()) x = freekv::to_float(freekv::from_float<half>(x));
      }
    }
  }
  std::span<const float> rows(const std::vector<float>& of, int first, int many) const {
    const std::size_t width = of.size() / count(tokens);
    return std::span(of).subspan(count(first) * width, count(many) * width);
  }
};

template <class Eviction>
using pipeline_of = freekv::evicting_pipeline<shape, Eviction>;

template <class Eviction>
typename pipeline_of<Eviction>::settings settings_of(const Eviction& eviction, const layered_text& text,
                                                     int budget, int prompt) {
  typename pipeline_of<Eviction>::settings s;
  s.model = {.layers = text.layers, .query_heads = text.query_heads, .kv_heads = text.kv_heads};
  s.budget = budget;
  s.capacity.max_prompt = std::max(1, prompt);
  s.capacity.max_generated = text.tokens;
  s.plan = {{0}};
  s.eviction = eviction;
  return s;
}

/// Appends the prompt and decodes the rest; `see(id, row, out)` behind each decode row, with all layers'
/// outputs. Returns those of all decode rows.
template <class Pipeline, class See>
std::vector<float> run(Pipeline& p, const layered_text& text, int prompt, const See& see) {
  const auto id = p.open();
  std::vector<float> decoded;
  for (int done = 0; done < text.tokens;) {
    const int now = done < prompt ? prompt : 1;
    auto step = p.begin_step({{id, now, done < prompt ? step_phase::prefill : step_phase::decode}});
    for (int layer = 0; layer < text.layers; ++layer) {
      std::vector<float> out(count(now * text.query_heads * d));
      step.template append<float>(layer, {.keys = text.rows(text.keys[count(layer)], done, now),
                                          .values = text.rows(text.values[count(layer)], done, now),
                                          .queries = text.rows(text.queries[count(layer)], done, now)});
      step.attend(layer, out);
      if (done >= prompt) decoded.insert(decoded.end(), out.begin(), out.end());
    }
    step.end();
    if (done >= prompt) see(id, done, std::span(decoded).last(count(text.layers * text.query_heads * d)));
    done += now;
  }
  p.release(id);
  return decoded;
}
template <class Eviction>
std::vector<float> outputs(const Eviction& eviction, const layered_text& text, int budget, int prompt) {
  freekv::host_backend backend({.threads = 2, .bytes_per_thread = 64});
  pipeline_of<Eviction> p(settings_of(eviction, text, budget, prompt), backend);
  return run(p, text, prompt, [](auto, int, auto) {});
}

/// A row's attention to tokens of a layer, some of them coded, by a query head in float64: how far `out` is
/// from it at most.
template <class Codec>
double apart_from_attention(const Codec& codec, const layered_text& text, int layer, int query_head, int row,
                            const std::vector<int>& tokens, const std::vector<int>& coded,
                            std::span<const float> out) {
  const int head = query_head * text.kv_heads / text.query_heads;
  const auto numbers = [&](const std::vector<float>& of, int heads, int at, int token) {
    return text.rows(of, token, 1).subspan(count(at) * of.size() / count(text.tokens * heads), d);
  };
  std::vector<half> rows(2 * d);
  std::vector<std::byte> bytes(codec.bytes({1, d}, sizeof(half)));
  const freekv::head_slice<half> slice{rows.data(), rows.data() + d, d};
  std::vector<double> sums(d);
  double total = 0;
  const auto query = numbers(text.queries[count(layer)], text.query_heads, query_head, row);
  for (const int token : tokens) {
    const auto key = numbers(text.keys[count(layer)], text.kv_heads, head, token),
               value = numbers(text.values[count(layer)], text.kv_heads, head, token);
    for (int x = 0; x < d; ++x) {
      rows[count(x)] = freekv::from_float<half>(key[count(x)]);
      rows[count(d + x)] = freekv::from_float<half>(value[count(x)]);
    }
    if (std::binary_search(coded.begin(), coded.end(), token)) {
      codec.template encode<d>(freekv::scalar_team{},
                               freekv::head_slice<const half>{rows.data(), rows.data() + d, d}, 1,
                               bytes.data());
      codec.template decode<d>(freekv::scalar_team{}, static_cast<const std::byte*>(bytes.data()), 1,
                               freekv::row_range{0, 1}, slice);
    }
    double score = 0;
    for (int x = 0; x < d; ++x)
      score += static_cast<double>(query[count(x)]) * static_cast<double>(freekv::to_float(rows[count(x)]));
    const double weight = std::exp(score / std::sqrt(static_cast<double>(d)));
    total += weight;
    for (int x = 0; x < d; ++x)
      sums[count(x)] += weight * static_cast<double>(freekv::to_float(rows[count(d + x)]));
  }
  double apart = 0;
  for (int x = 0; x < d; ++x)
    apart = std::max(apart, std::fabs(sums[count(x)] / total - static_cast<double>(out[count(x)])));
  return apart;
}

template <class Eviction>
Eviction with_window(int window) {
  Eviction policy;
  policy.window = window;
  return policy;
}

/// The layers' ratios in float64, from the equations.
template <class Eviction>
std::vector<double> ratios_of(const layered_text& text, const Eviction& eviction, int budget, int prompt) {
  std::vector<double> sensitivities, ratios;
  oracle::eviction_settings s;
  s.query_heads = text.query_heads, s.kv_heads = text.kv_heads, s.head_dim = d, s.budget = budget;
  s.scale = oracle::default_scale(d), s.window = eviction.window, s.kind = oracle::eviction_kind::arkv;
  s.tau1 = 7.774, s.tau2 = 5.407, s.tau3 = 5.528;
  for (int layer = 0; layer < text.layers; ++layer) {
    oracle::forgetful_decoder decoder(s);
    decoder.prompt(text.rows(text.queries[count(layer)], 0, prompt),
                   text.rows(text.keys[count(layer)], 0, prompt),
                   text.rows(text.values[count(layer)], 0, prompt));
    sensitivities.push_back(decoder.sensitivity());
  }
  for (int layer = 0; layer < text.layers; ++layer) {
    s.layer = layer;
    oracle::give_arkv_ratio(s, sensitivities);
    ratios.push_back(s.ratio);
  }
  return ratios;
}

/// fp8_token that knows each token that it has coded, by a number behind its bytes.
struct watched_token {
  using policy_kind = freekv::codec_kind;
  static constexpr std::string_view name = "watched_token";
  using bytes_of_token = std::vector<std::byte>;
  struct record {
    std::vector<bytes_of_token> stored;
    std::set<std::vector<float>> coded, decoded;
    int twice = 0, of_decoded = 0, changed = 0;
  };
  static record& seen() {
    static record of_all;
    return of_all;
  }
  template <class Slice>
  static std::vector<float> numbers(const Slice& token) {
    std::vector<float> all;
    for (const auto* row : {token.key, token.value})
      for (int i = 0; i < d; ++i) all.push_back(freekv::to_float(row[i]));
    return all;
  }
  constexpr std::size_t bytes(freekv::kv_extent page, std::size_t element_bytes) const {
    return freekv::fp8_token{}.bytes(page, element_bytes) + sizeof(std::uint32_t);
  }
  template <int HeadDim, class Team, class Element>
  void encode(Team team, const freekv::head_slice<const Element>& from, int tokens, std::byte* to) const {
    record& r = seen();
    r.of_decoded += static_cast<int>(r.decoded.count(numbers(from)));
    r.twice += !r.coded.insert(numbers(from)).second;
    freekv::fp8_token{}.encode<HeadDim>(team, from, tokens, to);
    const auto number = static_cast<std::uint32_t>(r.stored.size());
    std::memcpy(to + fp8_bytes, &number, sizeof number);
    r.stored.emplace_back(to, to + fp8_bytes);
  }
  template <int HeadDim, class Team, class Element>
  void decode(Team team, const std::byte* from, int tokens, freekv::row_range rows,
              const freekv::head_slice<Element>& to) const {
    record& r = seen();
    std::uint32_t number = 0;
    std::memcpy(&number, from + fp8_bytes, sizeof number);
    r.changed += number >= r.stored.size() || r.stored[number] != bytes_of_token(from, from + fp8_bytes);
    freekv::fp8_token{}.decode<HeadDim>(team, from, tokens, rows, to);
    r.decoded.insert(numbers(to));
  }
};
struct watched_split : freekv::arkv_split {
  constexpr watched_token codec() const { return {}; }
};

}  // namespace

TEST_CASE("a layer alone has the ratio 1, and ARKV is its baseline then, bit for bit",
          "[eviction][demoting]") {
  dice random(1);
  for (int trial = 0; trial < some_of(6); ++trial) {
    layered_text text{.query_heads = 6, .kv_heads = 2, .tokens = 180};
    text.draw(random, 1.0f);
    const int prompt = random.one_of({0, 20, 60, 100}), budget = random.between(20, 70);
    INFO("a prompt of " << prompt << ", budget " << budget);
    const auto origin = outputs(with_window<freekv::arkv_origin>(8), text, budget, prompt);
    CHECK(same_bits(outputs(with_window<freekv::arkv>(8), text, budget, prompt), origin));
    CHECK(same_bits(outputs(with_window<freekv::arkv_split>(8), text, budget, prompt), origin));
  }
}

TEST_CASE("ARKV's ratios are above 0 and at most 1, which one layer has", "[eviction][demoting]") {
  freekv::arkv policy;
  policy.window = 2;
  // Shares 0.7, 0.1, 0.1 and 0.1: H 0.940448, V 0.0675, K 7/3.
  const double votes[] = {1.4, 0.2, 0.2, 0.2, 9.0, 9.0};
  CHECK(policy.sensitivity(votes, 6) == Approx(0.7024590424).epsilon(1e-6));
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinite = HUGE_VAL;
  const auto ratios = [&](std::vector<double> of) {
    std::vector<float> all(of.size());
    policy.rate(of.data(), static_cast<int>(of.size()), all.data());
    return all;
  };
  CHECK(ratios({0.5, 1.0, 0.25}) == std::vector<float>{0.5f, 1.0f, 0.25f});
  // A layer that tells nothing keeps what it has, and is not what others are compared with.
  CHECK(ratios({nan, 0.1, 0.0, infinite, 0.2}) == std::vector<float>{1.0f, 0.5f, 1.0f, 1.0f, 1.0f});
  CHECK(ratios({nan, 0.0}) == std::vector<float>{1.0f, 1.0f});
  CHECK(ratios({}).empty());
  for (const int tokens : {0, 1, 2, 3}) CHECK(!(policy.sensitivity(votes, tokens) > 0.0));
  dice random(2);
  for (int trial = 0; trial < some_of(100); ++trial) {
    std::vector<double> of;
    for (int layer = random.between(1, 40); layer-- > 0;)
      of.push_back(std::exp(static_cast<double>(random.normal())));
    const auto all = ratios(of);
    CHECK(*std::max_element(all.begin(), all.end()) == 1.0f);
    CHECK(std::all_of(all.begin(), all.end(), [](float ratio) { return ratio > 0.0f; }));
  }
}

TEMPLATE_TEST_CASE("behind a cut as many tokens are in fp8 as the layers' ratios say, never the window's",
                   "[eviction][demoting]", freekv::arkv, freekv::arkv_split) {
  dice random(3);
  constexpr bool splits = std::is_same_v<TestType, freekv::arkv_split>;
  int cuts = 0, coded_ever = 0;
  double worst = 0;  // outputs' distance from attention in float64
  for (int trial = 0; trial < some_of(8); ++trial) {
    const int kv_heads = random.between(1, 2), window = random.between(2, 12);
    layered_text text{.layers = random.between(2, 5),
                      .query_heads = kv_heads * random.between(1, 3),
                      .kv_heads = kv_heads,
                      .tokens = 220};
    text.draw(random, random.one_of({0.5f, 2.0f}));
    const int budget = window + random.between(20, 60), prompt = random.between(window + 2, 150),
              best = static_cast<int>(0.75 * (budget - window));
    const auto policy = with_window<TestType>(window);
    const auto ratios = ratios_of(text, policy, budget, prompt);
    INFO("budget " << budget << ", window " << window << ", a prompt of " << prompt);
    freekv::host_backend backend({.threads = 2, .bytes_per_thread = 64});
    pipeline_of<TestType> p(settings_of(policy, text, budget, prompt), backend);
    std::vector<std::vector<int>> held(count(text.layers * kv_heads)), coded(held);
    std::size_t bytes_before = 0;
    run(p, text, prompt, [&](freekv::sequence_id id, int row, std::span<const float> out) {
      std::size_t bytes = 0;  // of what was there before the row
      int all_coded = 0, cut = 0;
      for (int layer = 0; layer < text.layers; ++layer)
        for (int head = 0; head < kv_heads; ++head) {
          const auto report = p.report(layer)[id];
          const auto now = of_head(report.attended, report.attended_count, head),
                     in_fp8 = of_head(report.coded, report.coded_count, head);
          auto& before = held[count(layer * kv_heads + head)];
          auto& coded_before = coded[count(layer * kv_heads + head)];
          const int had = row == prompt ? prompt : static_cast<int>(before.size());
          bytes += (now.size() - 1 - in_fp8.size()) * original_bytes + in_fp8.size() * fp8_bytes;
          // Of what was coded that stays coded which stays, and what is coded is there.
          CHECK(std::includes(now.begin(), now.end(), in_fp8.begin(), in_fp8.end()));
          for (const int token : coded_before)
            CHECK(std::binary_search(now.begin(), now.end(), token) ==
                  std::binary_search(in_fp8.begin(), in_fp8.end(), token));
          if (static_cast<int>(now.size()) != had + 1) {
            ++cuts, ++cut;
            CHECK(had >= budget);
            CHECK(static_cast<int>(now.size()) == window + best + 1);
            const double originals = ratios[count(layer)] * (splits ? best : budget - window);
            const double doubt = std::abs(originals - std::round(originals)) < 0.02 ? 1.0 : 0.0;
            CHECK(std::abs(static_cast<double>(in_fp8.size()) -
                           std::max(0.0, best - std::floor(originals))) <= doubt);
            CHECK((in_fp8.empty() || in_fp8.back() < row - window));
            all_coded += static_cast<int>(in_fp8.size());
          } else {
            CHECK(in_fp8 == coded_before);
          }
          const int group = text.query_heads / kv_heads, query_head = head * group + row % group;
          worst = std::max(worst, apart_from_attention(
                                      freekv::fp8_token{}, text, layer, query_head, row, now, in_fp8,
                                      out.subspan(count((layer * text.query_heads + query_head) * d), d)));
          before = now, coded_before = in_fp8;
        }
      CHECK((cut == 0 || cut == text.layers * kv_heads));
      if (row > prompt) CHECK(bytes == bytes_before);
      bytes_before = p.kept_bytes(id);
      coded_ever += all_coded;
      if (cut == 0 || splits) return;
      double share = 0;
      for (const double ratio : ratios) share += std::max(0.0, 0.75 - ratio) / text.layers;
      CHECK(static_cast<double>(all_coded) / (budget * text.layers * kv_heads) ==
            Approx((1 - static_cast<double>(window) / budget) * share).margin(1.0 / budget).epsilon(0));
    });
  }
  CHECK(worst < 2e-5);
  CHECK(cuts > 100);
  CHECK(coded_ever > 100);
}

TEST_CASE("a token is coded once, and its bytes stay what they are until it leaves", "[eviction][demoting]") {
  dice random(4);
  layered_text text{.layers = 3, .query_heads = 4, .kv_heads = 2, .tokens = 260};
  text.draw(random, 1.0f);
  freekv::host_backend backend;
  for (const int prompt : {100, 20}) {
    auto& seen = watched_token::seen() = {};
    watched_split policy;
    policy.window = 8;
    pipeline_of<watched_split> p(settings_of(policy, text, 48, prompt), backend);
    std::set<std::array<int, 3>> coded;
    run(p, text, prompt, [&](freekv::sequence_id id, int, auto) {
      for (int layer = 0; layer < 3; ++layer)
        for (const int head : {0, 1})
          for (const int token : of_head(p.report(layer)[id].coded, p.report(layer)[id].coded_count, head))
            coded.insert({layer, head, token});
    });
    INFO("a prompt of " << prompt << ", " << seen.stored.size() << " tokens");
    CHECK(seen.stored.size() > 150);
    CHECK(seen.stored.size() >= coded.size());  // the last row's are not attended to
    CHECK(seen.twice == 0);
    CHECK(seen.of_decoded == 0);
    CHECK(seen.changed == 0);
  }
}

TEST_CASE("mikv forgets nothing, and codes what h2o would forget", "[eviction][demoting]") {
  // Queries of zero attend to everything alike: earlier tokens have been attended to more often.
  dice random(5);
  layered_text text{.query_heads = 2, .kv_heads = 1, .tokens = 130};
  text.draw(random, 0.0f);
  freekv::host_backend backend;
  for (const int prompt : {100, 0}) {
    pipeline_of<freekv::mikv> p(settings_of(freekv::mikv{}, text, 40, prompt), backend);
    run(p, text, prompt, [&](freekv::sequence_id id, int row, std::span<const float> out) {
      const auto report = p.report(0)[id];
      CHECK(of_head(report.attended, report.attended_count, 0) == from_to(0, row));
      CHECK(of_head(report.coded, report.coded_count, 0) == from_to(20, row - 21));
      CHECK(apart_from_attention(freekv::int4_token{}, text, 0, row % 2, row, from_to(0, row),
                                 from_to(20, row - 21), out.subspan(count(row % 2 * d), d)) < 2e-5);
    });
  }
  // A budget of everything leaves nothing coded, and is full attention.
  CHECK(same_bits(outputs(freekv::mikv{}, text, 130, 60), outputs(freekv::h2o{}, text, 130, 60)));
}

TEST_CASE("q_hitter ranks tokens by attention and by how well 4 bits suit them", "[eviction][demoting]") {
  const freekv::q_hitter policy;
  // A budget of 8: the latest 2 tokens, and the 2 of most attention.
  const float masses[] = {5, 0, 1, 1, 4, 0.5f, 3, 2, 0, 0}, of_keys[] = {0, 1, 2, 3, 4, 4, 0, 2, 1, 1},
              of_values[] = {1, 3, 1, 2, 1, 1, 3, 1, 2, 2};
  std::vector<freekv::q_hitter::unit_state> units(10);
  std::vector<std::int32_t> tokens(10);
  std::vector<float> worths(10);
  for (int i = 0; i < 10; ++i) {
    units[count(i)].mass = masses[i];
    units[count(i)].key_error = of_keys[i], units[count(i)].value_error = of_values[i];
    tokens[count(i)] = i;
  }
  const auto rank = [&] {
    policy.rank({10, tokens.data(), units.data()}, {.budget = 8, .tokens = 10}, worths.data());
  };
  rank();
  const double want[] = {2, 0.1875, 0.475, 0.2875, 2, 0.3, 0.55, 0.575};
  for (int i = 0; i < 8; ++i) CHECK(static_cast<double>(worths[count(i)]) == Approx(want[i]).epsilon(1e-6));
  // A token whose numbers are none suits least, and changes no other's worth.
  units[5].key_error = static_cast<float>(quiet_nan);
  rank();
  for (int i = 0; i < 8; ++i) CHECK(static_cast<double>(worths[count(i)]) == Approx(want[i]).epsilon(1e-6));
  // Of tokens alike the latest have most attention.
  for (auto& unit : units) unit = {};
  rank();
  CHECK(worths[5] < 1.0f);
  CHECK(worths[6] == 2.0f);
  CHECK(worths[7] == 2.0f);

  // In units of 1: a half becomes 0, a quarter is lost.
  const float key[] = {7, 0.5f, 1.25f, 0, 2, 3, -1, -7}, value[8] = {};
  freekv::q_hitter::unit_state unit{};
  policy.on_row(unit, key, value, 8);
  CHECK(static_cast<double>(unit.key_error) == Approx(std::sqrt(0.3125)).epsilon(1e-6));
  CHECK(unit.value_error == 0.0f);
}

TEST_CASE("all that q_hitter keeps is in 4 bits but for the row that attends", "[eviction][demoting]") {
  dice random(8);
  layered_text text{.query_heads = 2, .kv_heads = 1, .tokens = 130};
  text.draw(random, 1.0f);
  freekv::host_backend backend;
  for (const int prompt : {100, 20, 0}) {
    pipeline_of<freekv::q_hitter> p(settings_of(freekv::q_hitter{}, text, 40, prompt), backend);
    run(p, text, prompt, [&](freekv::sequence_id id, int row, std::span<const float> out) {
      const auto report = p.report(0)[id];
      const auto held = of_head(report.attended, report.attended_count, 0),
                 coded = of_head(report.coded, report.coded_count, 0);
      CHECK(std::ssize(held) == std::min(40, row) + 1);
      CHECK(coded == std::vector(held.begin(), held.end() - 1));
      const auto latest = from_to(std::max(0, row - 10), row);
      CHECK(std::includes(held.begin(), held.end(), latest.begin(), latest.end()));
      CHECK(apart_from_attention(freekv::int4_token{}, text, 0, row % 2, row, held, coded,
                                 out.subspan(count(row % 2 * d), d)) < 2e-5);
    });
  }
}

TEST_CASE("slots are as large as what is original and coded in them at most",
          "[eviction][demoting][memory]") {
  const layered_text text{.layers = 3, .query_heads = 4, .kv_heads = 2, .tokens = 150};
  freekv::host_backend backend;
  const auto slots = [&](auto eviction, int budget) {
    return
        typename pipeline_of<decltype(eviction)>::footprint(settings_of(eviction, text, budget, 100), backend)
            .bytes()
            .slots;
  };
  const auto rounded_up = [](std::size_t bytes) { return (bytes + 127) / 128 * 128; };
  CHECK(slots(freekv::mikv{}, 40) == 3 * rounded_up(2 * (41 * original_bytes + 209 * int4_bytes)));
  CHECK(slots(freekv::mikv{}, 300) == slots(freekv::h2o{}, 300));
  CHECK(slots(freekv::q_hitter{}, 40) == 3 * rounded_up(2 * (original_bytes + 40 * int4_bytes)));
  // Before its first cut a head has the whole budget as it is.
  for (const int budget : {40, 70, 300}) {
    CHECK(slots(freekv::arkv{}, budget) == slots(freekv::arkv_origin{}, budget));
    CHECK(slots(freekv::arkv_split{}, budget) == slots(freekv::arkv_origin{}, budget));
  }
  struct always_half : freekv::arkv_split {
    constexpr int most_originals(const freekv::eviction_limits& most) const { return most.budget / 2; }
  };
  CHECK(slots(always_half{}, 40) == 3 * rounded_up(2 * (20 * original_bytes + 20 * fp8_bytes)));
}

TEMPLATE_TEST_CASE("in fp8 with a scale a number comes back within a sixteenth of its row's largest",
                   "[eviction][demoting]", float, half, bfloat16) {
  constexpr int width = 64;
  const double rounding = std::is_same_v<TestType, float>  ? 0x1p-22
                          : std::is_same_v<TestType, half> ? 0x1p-11
                                                           : 0x1p-8;
  const double least = std::is_same_v<TestType, half> ? 0x1p-24 : 0x1p-133;
  dice random(6);
  std::vector<TestType> rows(2 * width), back(2 * width);
  std::vector<std::byte> stored(freekv::fp8_token{}.bytes({1, width}, sizeof(TestType)));
  CHECK(stored.size() == 2 * (width + 4));
  const auto round_trip = [&] {
    freekv::fp8_token{}.encode<width>(
        freekv::scalar_team{}, freekv::head_slice<const TestType>{rows.data(), rows.data() + width, width}, 1,
        stored.data());
    freekv::fp8_token{}.decode<width>(freekv::scalar_team{}, static_cast<const std::byte*>(stored.data()), 1,
                                      freekv::row_range{0, 1},
                                      freekv::head_slice<TestType>{back.data(), back.data() + width, width});
  };
  const auto number = [](const std::vector<TestType>& of, int i) {
    return static_cast<double>(freekv::to_float(of[count(i)]));
  };
  for (int trial = 0; trial < some_of(300); ++trial) {
    const float size =
        random.one_of({1.0f, 1.0f, 1e-3f, 3e4f, 1e-7f, std::is_same_v<TestType, half> ? 1.0f : 3e38f});
    for (auto& x : rows) x = freekv::from_float<TestType>(size * (2.0f * random.uniform() - 1.0f));
    if (trial % 3 == 0) rows[count(random.below(2 * width))] = freekv::from_float<TestType>(-size);
    round_trip();
    for (const int plane : {0, width}) {
      double most = 0;
      for (int i = plane; i < plane + width; ++i) most = std::max(most, std::fabs(number(rows, i)));
      int wrong = 0;
      for (int i = plane; i < plane + width; ++i) {
        const double apart = std::fabs(number(rows, i) - number(back, i));
        // A scale of the smallest floats is coarse itself.
        const double of_own = std::fabs(number(rows, i)) * (0x1p-4 + 0x1p-20) + most / 448 * 0x1p-10;
        const double slack = rounding * most + least;
        if (!(apart <= most * 0x1p-4 + slack) || (most > 1e-30 && !(apart <= of_own + slack))) ++wrong;
      }
      CHECK(wrong == 0);
    }
  }
  std::fill(rows.begin(), rows.end(), freekv::from_float<TestType>(0.0f));
  rows[3] = freekv::from_float<TestType>(-0.0f);
  round_trip();
  for (int i = 0; i < 2 * width; ++i) {
    CHECK(number(back, i) == 0.0);
    CHECK(std::signbit(number(back, i)) == (i == 3));
  }
  for (const float odd : {quiet_nan, HUGE_VALF, -HUGE_VALF}) {
    for (auto& x : rows) x = freekv::from_float<TestType>(random.normal());
    round_trip();
    const auto before = back;
    rows[count(random.below(width))] = freekv::from_float<TestType>(odd);
    round_trip();
    for (int i = 0; i < width; ++i) CHECK(std::isnan(number(back, i)));
    for (int i = width; i < 2 * width; ++i) CHECK(number(back, i) == number(before, i));
  }
}

TEST_CASE("what cannot be coded as a policy says is refused", "[eviction][demoting][errors]") {
  struct of_pages : freekv::mikv {
    constexpr int unit_tokens() const { return 8; }
  };
  struct in_place : freekv::mikv {
    constexpr bool stages_prompt() const { return false; }
  };
  struct by_largest : freekv::arkv {
    constexpr freekv::group_rule group() const { return freekv::group_rule::largest_score; }
  };
  const layered_text text{.layers = 2, .query_heads = 2, .kv_heads = 2, .tokens = 150};
  freekv::host_backend backend;
  const auto refuses = [&](auto eviction, const char* words) {
    try {
      typename pipeline_of<decltype(eviction)>::footprint(settings_of(eviction, text, 40, 100), backend);
      FAIL_CHECK("nothing was thrown: " << words);
    } catch (const settings_error& e) {
      CHECK_THAT(e.what(), Contains(words));
    }
  };
  refuses(of_pages{},
          "mikv codes units of 8 tokens of a prompt that is staged; code units of 1, and stage prompts");
  refuses(in_place{}, "mikv codes units of 1 tokens of a prompt that is not staged");
  refuses(by_largest{}, "arkv rates layers by shares and observes the largest scores of the group");
  refuses(with_window<freekv::arkv>(40), "arkv: a window of 40 rows is not from 1 to below the budget of 40");
  freekv::arkv_split split;
  split.alpha = 1.0f;
  refuses(split, "arkv_split: a gamma of 263.81 and an alpha of 1");
  split = {};
  split.tau2 = 0.0f;
  refuses(split, "arkv_split: taus of 7.774, 0 and 5.528; taus are above 0");
  freekv::mikv recent;
  recent.recent = 1.0f;
  refuses(recent, "mikv: recent of 1 is not a share");
}

TEST_CASE("a sequence without a prompt has the ratio 1, whoever had its place before",
          "[eviction][demoting]") {
  dice random(11);
  layered_text text{.layers = 3, .query_heads = 2, .kv_heads = 1, .tokens = 120};
  text.draw(random, 2.0f);
  freekv::arkv_split policy;
  policy.window = 8;
  freekv::host_backend backend;
  pipeline_of<freekv::arkv_split> p(settings_of(policy, text, 40, 60), backend);
  const auto without_prompt = [&] { return run(p, text, 0, [](auto, int, auto) {}); };
  const auto expected = without_prompt();
  run(p, text, 60, [](auto, int, auto) {});
  CHECK(without_prompt() == expected);
}
