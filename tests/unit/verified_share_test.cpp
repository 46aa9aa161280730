// verified_share: who is drawn, what is estimated and who is corrected, by the definition in float64 on
// random steps; and whether the estimate is unbiased and the bound holds as often as it says.

#include <algorithm>
#include <array>
#include <cmath>
#include <freekv/algorithms/draw_units.hpp>
#include <limits>
#include <optional>

#include "../oracle/numbers.hpp"
#include "../property/seeds.hpp"
#include "../sanitized.hpp"
#include "rows_of_text.hpp"

namespace {

using namespace tests;
using freekv::layer_kind;
using freekv::step_phase;
using freekv::verified_share;

constexpr int d = 64;

/// `Rank` rows of a basis: with all of them units' masses are known exactly.
template <int Rank>
using judged = freekv::retrieval_pipeline<freekv::kv_shape<float, d>, freekv::page_size<freekv::dynamic>,
                                          freekv::unit<freekv::dynamic>, freekv::key_subspace<Rank, 32>,
                                          verified_share, freekv::any_of<freekv::top_k, freekv::sticky_top_k>,
                                          freekv::any_of<freekv::resident, freekv::in_place>,
                                          freekv::any_of<freekv::identity, freekv::cast<freekv::bfloat16>>,
                                          freekv::every_layer<layer_kind::retrieval>>;
using exact = judged<d>;
using inexact = judged<4>;

/// A number of splitmix64, written here once more.
double uniform(std::uint64_t seed, int layer, int head, int tokens, int nth) {
  std::uint64_t bits = 0;
  for (const auto number : {seed, static_cast<std::uint64_t>(layer), static_cast<std::uint64_t>(head),
                            static_cast<std::uint64_t>(tokens), static_cast<std::uint64_t>(nth)}) {
    bits += number + 0x9e3779b97f4a7c15ull;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ull;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebull;
    bits ^= bits >> 31;
  }
  return static_cast<double>(bits >> 11) / 9007199254740992.0;
}

/// Confidences and numbers of draws with the quantiles of Student's t, from tables.
struct confidence {
  float delta;
  int samples;
  double quantile;
};
constexpr std::array<confidence, 5> confidences{{{0.05f, 2, 6.313752},
                                                 {0.05f, 4, 2.353363},
                                                 {0.05f, 8, 1.894579},
                                                 {0.1f, 3, 1.885618},
                                                 {0.01f, 11, 2.763769}}};

/// Masses of one KV head in float64.
class head_of_text {
 public:
  template <class Settings>
  head_of_text(const Settings& s, const rows_of_text& text, int head)
      : text_(&text),
        head_(head),
        group_(s.model.group()),
        page_(s.page.tokens),
        unit_(s.unit_tokens()),
        budget_(s.budget),
        scale_(s.attention.scale),
        sink_logits_(s.attention.sink_logits) {}

  /// Candidates of rows behind `before` tokens, which are those at length `at`.
  std::vector<int> candidates(int at, int before) const {
    const auto roles = freekv::roles_at(at, budget_, page_);
    const int end = std::min(roles.window_begin, before / page_), per_page = page_ / unit_;
    std::vector<int> units;
    for (int one = roles.sink_end * per_page; one < end * per_page; ++one) units.push_back(one);
    return units;
  }
  /// Of what a row attends to with these `selected` of the `units`: the mass of each unit that it misses, in
  /// masses of that and as the mean over query heads, -1 of those selected; the share of all that is missed.
  struct missed {
    std::vector<double> masses;
    double mass = 0.0, share = 0.0;
  };
  missed judge(int before, int rows, const std::vector<int>& units, const std::vector<int>& selected) const {
    missed result{.masses = std::vector<double>(units.size(), 0.0)};
    const auto is_selected = [&](int one) {
      return std::find(selected.begin(), selected.end(), one) != selected.end();
    };
    for (int row = before; row < before + rows; ++row)
      for (int g = 0; g < group_; ++g) {
        const auto head = count(head_ * group_ + g);
        std::vector<double> of(units.size(), 0.0);
        double attended = sink_logits_.empty() ? 0.0 : std::exp(double{sink_logits_[head]}), beside = 0.0;
        for (int t = 0; t <= row; ++t) {
          const double mass = std::exp(
              scale_ * oracle::dot(std::span(&text_->q[count(row) * text_->query_row + head * d], d),
                                   std::span(&text_->k[count(t) * text_->key_row + count(head_ * d)], d)));
          const int unit = t / unit_;
          if (!units.empty() && unit >= units.front() && unit <= units.back() && !is_selected(unit)) {
            of[count(unit - units.front())] += mass;
            beside += mass;
          } else {
            attended += mass;
          }
        }
        for (std::size_t j = 0; j < of.size(); ++j) result.masses[j] += of[j] / attended / (group_ * rows);
        result.mass += beside / attended / (group_ * rows);
        result.share += beside / (attended + beside) / (group_ * rows);
      }
    for (std::size_t j = 0; j < units.size(); ++j)
      if (is_selected(units[j])) result.masses[j] = -1.0;
    return result;
  }

  /// The estimate and its bound, by probabilities that follow the masses. `firm`: no draw is on the edge.
  struct estimate {
    double mass = 0.0, share_bound = 0.0;
    bool firm = true;
  };
  estimate draw(const missed& of, int before, const verified_share& by, double quantile) const {
    double left = 0.0;
    for (const double mass : of.masses) left += mass >= 0.0;
    if (left == 0.0) return {};
    estimate result;
    std::vector<double> drawn;
    for (int nth = 0; nth < by.samples; ++nth) {
      const double at = uniform(by.seed, 0, head_, before, nth);
      double below = 0.0, one = 0.0;
      bool found = false;
      for (const double mass : of.masses) {
        if (mass < 0.0) continue;
        const double probability = 15.0 / 16.0 * mass / of.mass + 1.0 / 16.0 / left;
        below += probability;
        result.firm = result.firm && std::fabs(at - below) > 1e-5;
        if (!found) one = mass / probability;
        found = found || at < below;
      }
      drawn.push_back(one);
    }
    const double n = by.samples;
    double squares = 0.0;
    for (const double one : drawn) result.mass += one / n;
    for (const double one : drawn) squares += std::pow(one - result.mass, 2);
    const double bound = result.mass + quantile * std::sqrt(squares / (n - 1.0)) / std::sqrt(n);
    result.share_bound = bound / (1.0 + bound);
    return result;
  }

 private:
  const rows_of_text* text_;
  int head_, group_, page_, unit_;
  freekv::budget budget_;
  double scale_;
  std::vector<float> sink_logits_;
};

/// Rounds keys to what a codec of half the bytes keeps.
void round_keys(rows_of_text& text) {
  for (float& k : text.k) k = freekv::to_float(freekv::from_float<freekv::bfloat16>(k));
}

/// Attends one decode step of each sequence.
template <class Pipeline>
void run_together(Pipeline& pipeline, const std::vector<freekv::sequence_id>& ids,
                  const std::vector<const rows_of_text*>& texts) {
  std::vector<freekv::step_input> inputs;
  std::vector<float> k, q;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    inputs.push_back({ids[i], 1, step_phase::decode});
    const auto& text = *texts[i];
    const int first = pipeline.tokens(ids[i]);
    for (const float x : text.part(text.k, text.key_row, first, 1)) k.push_back(x);
    for (const float x : text.part(text.q, text.query_row, first, 1)) q.push_back(x);
  }
  auto step = pipeline.begin_step(inputs);
  step.template append<float>(0, {.keys = k, .values = k, .queries = q});
  std::vector<float> out(q.size());
  step.attend(0, out);
  step.end();
}

template <class Pipeline>
std::vector<float> missed_of(const Pipeline& pipeline, freekv::sequence_id id) {
  std::vector<float> numbers;
  for (const auto& missed : pipeline.report(0)[id].missed) {
    numbers.push_back(missed.mass);
    numbers.push_back(missed.share_bound);
  }
  return numbers;
}

}  // namespace

TEST_CASE("Student's t has the quantiles of the tables", "[verified_share]") {
  using freekv::detail::student_t_quantile;
  for (const auto& one : confidences)
    CHECK(student_t_quantile(1.0 - double{one.delta}, one.samples - 1) == Approx(one.quantile).epsilon(1e-5));
  CHECK(student_t_quantile(0.99, 2) == Approx(6.964557).epsilon(1e-6));
  CHECK(student_t_quantile(0.975, 10) == Approx(2.228139).epsilon(1e-6));
  CHECK(student_t_quantile(0.95, 60) == Approx(1.670649).epsilon(1e-6));
  CHECK(student_t_quantile(0.5, 5) == Approx(0.0).margin(1e-9));
}

TEST_CASE("Candidates are drawn as often as they are probable", "[verified_share]") {
  using freekv::detail::drawn_unit;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> weights{3.0f, -1.0f, 0.0f, 1.0f, 0.0f, -1.0f, 4.0f};
  std::vector<double> at;
  constexpr int draws = 1000;
  for (int i = 0; i < draws; ++i) at.push_back((i + 0.5) / draws);
  std::vector<drawn_unit> drawn(at.size());
  REQUIRE(freekv::detail::draw_units(weights, at, drawn));
  std::vector<int> times(weights.size());
  for (const auto& one : drawn) {
    ++times[count(one.nth)];
    const float weight = weights[count(one.nth)];
    CHECK(one.probability == Approx(15.0 / 16.0 * weight / 8.0 + 1.0 / 16.0 / 5.0));
  }
  for (std::size_t j = 0; j < weights.size(); ++j) {
    const double probability =
        weights[j] < 0.0f ? 0.0 : 15.0 / 16.0 * double{weights[j]} / 8.0 + 1.0 / 16.0 / 5.0;
    CHECK(std::fabs(times[j] - draws * probability) <= 1.0);
  }
  const std::vector<float> none{0.0f, -1.0f, 0.0f};
  REQUIRE(freekv::detail::draw_units(none, at, drawn));
  CHECK(std::count_if(drawn.begin(), drawn.end(), [](const auto& one) { return one.nth == 0; }) == draws / 2);
  CHECK(drawn.back().nth == 2);
  CHECK(drawn.back().probability == 0.5);
  CHECK_FALSE(freekv::detail::draw_units(std::vector<float>{1.0f, nan}, at, drawn));
  CHECK_FALSE(
      freekv::detail::draw_units(std::vector<float>{std::numeric_limits<float>::infinity()}, at, drawn));
}

TEST_CASE("verified_share is refused where it cannot know shares, with what to choose", "[verified_share]") {
  using namespace freekv;
  host_backend backend;
  dice dice(1);
  const auto basis = random_basis(dice, 2, d, d);
  const refusals by{"verified_share", backend, basis};
  const auto nothing = [](auto&) {};
  using usual = retrieval_pipeline<kv_shape<float, d>, key_subspace<d, 32>, verified_share>;
  by.check<usual::with<min_max>>("choose key_codes or key_subspace", nothing);
  by.check<usual::with<mean_query>>("choose mean_softmax", nothing);
  by.check<usual::with<per_layer>>("choose per_kv_head", nothing);
  by.check<usual::with<int8_token>::with<in_place>>("choose resident", nothing);
  by.check<usual>("choose mass_deficit", [](auto& s) { s.attention.soft_cap = 30.0f; });
  by.check<usual>("choose missing_share", [](auto& s) { s.capacity.store_file = {.path = "/tmp"}; });
  by.check<usual>("share from 0 to 1", [](auto& s) { s.correction.epsilon = 1.5f; });
  by.check<usual>("share from 0 to 1", [](auto& s) { s.correction.epsilon = std::nanf(""); });
  by.check<usual>("to 0.5", [](auto& s) { s.correction.delta = 0.6f; });
  by.check<usual>("to 0.5", [](auto& s) { s.correction.delta = 0.0f; });
  by.check<usual>("from 2", [](auto& s) { s.correction.samples = 1; });
  by.check<usual>("to 64", [](auto& s) { s.correction.samples = 65; });

  typename usual::settings s;
  s.model = {.query_heads = 2, .kv_heads = 2};
  s.capacity = {.max_tokens = 640};
  s.summary.basis = {basis.data(), 1, 2, d, d};
  usual pipeline(s, backend);
  const rows_of_text text(dice, 4, s);
  auto step = pipeline.begin_step({{pipeline.open(), 4, step_phase::prefill}});
  CHECK_THROWS_WITH(
      step.append<float>(0, {.keys = text.k, .values = text.k, .queries = text.q, .selecting = text.q}),
      Catch::Contains("verifies takes no other queries to select by"));
  step.abandon();
}

TEST_CASE("verified_share estimates and corrects as its definition does", "[verified_share]") {
  dice dice(100 * number_from("FREEKV_SEED", 1) + 92);
  int compared = 0, doubtful = 0, flagged = 0, empty = 0;
  for (int trial = 0; trial < some_of(60); ++trial) {
    const sizes of = sizes::random(dice, 8);
    auto basis = random_basis(dice, of.kv_heads, d, d);
    auto given = settings_of<exact>(of, basis, d, d);
    const confidence sure = confidences[count(dice.below(static_cast<int>(confidences.size())))];
    given.correction = {.epsilon = dice.one_of({0.0f, 0.2f, 0.4f, 0.6f, 1.0f, 1.0f, 1.0f}),
                        .delta = sure.delta,
                        .samples = sure.samples,
                        .seed = static_cast<std::uint64_t>(dice.below(1000))};
    if (dice.below(2) == 0) given.selection = freekv::sticky_top_k{};
    if (dice.below(2) == 0)
      given.route = freekv::in_place{};
    else if (dice.below(2) == 0)
      given.codec = freekv::cast<freekv::bfloat16>{};
    given.capacity.max_resident = 2;
    draw_logits_and_scales(dice, d, given, basis);
    freekv::host_backend backend({.threads = 1 + dice.below(3), .overlap = dice.below(2) == 0});
    exact pipeline(given, backend);
    const auto& s = pipeline.configuration();
    rows_of_text text(dice, s.capacity.max_tokens, s);
    round_keys(text);
    INFO(pipeline.name() << ", trial " << trial << ", rows " << of.rows);
    auto id = pipeline.open();
    const int prompt = (6 + dice.below(8)) * of.page + dice.below(of.page);
    run(pipeline, id, text, prompt, step_phase::prefill);
    exact::with<freekv::always>::settings every;
    every.model = given.model;
    every.budget = given.budget;
    every.page = given.page;
    every.unit = given.unit;
    every.capacity = given.capacity;
    every.attention = given.attention;
    every.summary = given.summary;
    exact::with<freekv::always> always(every, backend);
    const auto other = always.open();
    run(always, other, text, prompt, step_phase::prefill);
    for (const auto& missed : pipeline.report(0)[id].missed) CHECK(missed.mass != missed.mass);
    int at = pipeline.tokens(id) + 1;
    for (int event = 0; event < 24 && pipeline.tokens(id) + of.rows <= s.capacity.max_tokens; ++event) {
      if (dice.below(6) == 0) {
        const auto child = pipeline.fork(id);
        CHECK(missed_of(pipeline, child).size() == 2 * count(of.kv_heads));
        pipeline.release(id);
        id = child;
      } else if (dice.below(6) == 0) {
        pipeline.preempt(id);
        pipeline.restore(id);
      }
      const int before = pipeline.tokens(id), rows = 1 + dice.below(of.rows);
      run(pipeline, id, text, rows, step_phase::decode);
      run(always, other, text, rows, step_phase::decode);
      const auto report = pipeline.report(0)[id];
      REQUIRE(report.missed.size() == count(of.kv_heads));
      for (int head = 0; head < of.kv_heads; ++head) {
        const head_of_text judge(s, text, head);
        const auto missed = report.missed[count(head)];
        const bool corrected = report.corrected[count(head)] != 0;
        const auto units = judge.candidates(at, before);
        if (event == 0) {
          CHECK(corrected);
          CHECK(missed.mass != missed.mass);
          CHECK(missed.share_bound != missed.share_bound);
          continue;
        }
        if (corrected != !(missed.share_bound <= s.correction.epsilon))
          FAIL("corrected " << corrected << ", bound " << missed.share_bound);
        if (corrected) {  // and attends to another selection than the one that was judged
          ++flagged;
          if (attended_of(pipeline, id, head) != attended_of(always, other, head))
            FAIL("not the best units in event " << event << ", head " << head);
          continue;
        }
        const auto truth = judge.judge(before, rows, units, attended_of(pipeline, id, head));
        const auto wanted = judge.draw(truth, before, s.correction, sure.quantile);
        if (!wanted.firm) {
          ++doubtful;
          continue;
        }
        ++compared;
        empty += truth.mass == 0.0;
        if (std::fabs(missed.mass - wanted.mass) > 1e-4 * wanted.mass + 1e-12 ||
            std::fabs(missed.share_bound - wanted.share_bound) > 1e-4)
          FAIL("missed " << missed.mass << " for " << wanted.mass << ", bound " << missed.share_bound
                         << " for " << wanted.share_bound << " in event " << event << ", head " << head);
      }
      at = before + rows + 1;
    }
  }
  INFO(compared << " compared, " << doubtful << " doubtful, " << flagged << " flagged, " << empty
                << " with nothing left");
  CHECK(compared > some_of(500));
  CHECK(doubtful < compared / 20);
  CHECK(flagged > some_of(200));
  CHECK(empty > some_of(20));
}

TEST_CASE("What verified_share says is missed is unbiased", "[verified_share]") {
  if (sanitized) return;  // of numbers alone
  dice dice(100 * number_from("FREEKV_SEED", 1) + 93);
  const sizes of{.k = 2, .group = 3};
  const auto basis = random_basis(dice, of.kv_heads, 4, d);
  auto s = settings_of<inexact>(of, basis, 4, d);
  s.correction = {.epsilon = 1.0f, .samples = 3};
  freekv::host_backend backend({.threads = 1});
  const int seeds = share_of(3000);
  std::vector<double> sum(count(of.kv_heads), 0.0), squares = sum, truth = sum, share = sum;
  std::vector<int> covered(count(of.kv_heads), 0);
  std::optional<rows_of_text> text;
  for (int seed = 0; seed < seeds; ++seed) {
    s.correction.seed = static_cast<std::uint64_t>(seed);
    inexact pipeline(s, backend);
    if (!text) text.emplace(dice, s.capacity.max_tokens, pipeline.configuration());
    const auto id = pipeline.open();
    run(pipeline, id, *text, 12 * of.page, step_phase::prefill);
    run(pipeline, id, *text, 1, step_phase::decode);
    run(pipeline, id, *text, 1, step_phase::decode);
    const auto report = pipeline.report(0)[id];
    for (std::size_t head = 0; head < sum.size(); ++head) {
      REQUIRE(report.corrected[head] == 0);
      if (seed == 0) {
        const head_of_text judge(pipeline.configuration(), *text, static_cast<int>(head));
        const int before = 12 * of.page + 1;
        const auto of_head = judge.judge(before, 1, judge.candidates(before + 1, before),
                                         attended_of(pipeline, id, static_cast<int>(head)));
        truth[head] = of_head.mass;
        share[head] = of_head.share;
      }
      const double mass = double{report.missed[head].mass};
      sum[head] += mass;
      squares[head] += mass * mass;
      covered[head] += share[head] <= double{report.missed[head].share_bound};
    }
  }
  for (std::size_t head = 0; head < sum.size(); ++head) {
    const double mean = sum[head] / seeds,
                 error = std::sqrt((squares[head] / seeds - mean * mean) / (seeds - 1.0));
    INFO("head " << head << ": " << mean << " for " << truth[head] << ", standard error " << error
                 << ", covered " << covered[head] << " of " << seeds);
    CHECK(std::fabs(mean - truth[head]) < 4.0 * error);
    CHECK(error < 0.03 * truth[head]);  // so that another estimate would be told from it
    CHECK(error > 1e-4 * truth[head]);
    CHECK(covered[head] > 0.8 * seeds);
  }
}

TEST_CASE("verified_share's bound holds about as often as it says", "[verified_share]") {
  if (sanitized) return;  // of numbers alone
  dice dice(100 * number_from("FREEKV_SEED", 1) + 94);
  for (const int samples : {2, 4, 8}) {
    int held = 0, all = 0;
    double bounds = 0.0, shares = 0.0;
    for (int trial = 0; trial < share_of(200); ++trial) {
      const sizes of{.k = 1 + dice.below(6), .group = 1 + dice.below(4)};
      const auto basis = random_basis(dice, of.kv_heads, 32, d);
      auto s = settings_of<judged<32>>(of, basis, 32, d);
      s.correction = {.epsilon = 1.0f, .samples = samples, .seed = static_cast<std::uint64_t>(trial)};
      freekv::host_backend backend({.threads = 1});
      judged<32> pipeline(s, backend);
      const rows_of_text text(dice, s.capacity.max_tokens, pipeline.configuration());
      const auto id = pipeline.open();
      run(pipeline, id, text, 16 * of.page, step_phase::prefill);
      run(pipeline, id, text, 1, step_phase::decode);
      for (int step = 0; step < 6; ++step) {
        const int before = pipeline.tokens(id);
        run(pipeline, id, text, 1, step_phase::decode);
        for (int head = 0; head < of.kv_heads; ++head) {
          const head_of_text judge(pipeline.configuration(), text, head);
          const auto truth =
              judge.judge(before, 1, judge.candidates(before + 1, before), attended_of(pipeline, id, head));
          const double bound = double{pipeline.report(0)[id].missed[count(head)].share_bound};
          held += truth.share <= bound;
          ++all;
          bounds += bound;
          shares += truth.share;
        }
      }
    }
    INFO(samples << " samples: held " << held << " of " << all << ", mean bound " << bounds / all
                 << " of a mean share " << shares / all);
    CHECK(held > 0.85 * all);    // 0.88 to 0.92 of 0.95: the summary knows half of the dimensions
    CHECK(bounds < 0.95 * all);  // or it would say nothing
  }
}

TEST_CASE("verified_share is the same bits in any batch, on any threads, by any chunks", "[verified_share]") {
  dice dice(100 * number_from("FREEKV_SEED", 1) + 95);
  const sizes of{.group = 3, .kv_heads = 3};
  const auto basis = random_basis(dice, of.kv_heads, 4, d);
  auto s = settings_of<inexact>(of, basis, 4, d);
  s.correction.epsilon = 0.8f;
  s.capacity.max_tokens = 400;
  freekv::host_backend one({.threads = 1}), three({.threads = 3, .overlap = true});
  inexact alone(s, one), together(s, three);
  const rows_of_text text(dice, s.capacity.max_tokens, alone.configuration()),
      beside(dice, s.capacity.max_tokens, alone.configuration());
  const auto a = alone.open(), b = together.open(), c = together.open();  // c: of another number
  run(alone, a, text, 300, step_phase::prefill);
  run(together, b, beside, 211, step_phase::prefill);
  for (const int part : {100, 37, 163}) run(together, c, text, part, step_phase::prefill);
  int flagged = 0, passed = 0;
  for (int step = 0; step < 40; ++step) {
    run(alone, a, text, 1, step_phase::decode);
    run_together(together, {b, c}, {&beside, &text});
    if (step == 0) continue;  // NaN: there was no selection
    const auto wanted = missed_of(alone, a);
    CHECK(missed_of(together, c) == wanted);
    CHECK(missed_of(together, b) != wanted);
    const auto corrected = together.report(0)[c].corrected;
    flagged += static_cast<int>(std::count(corrected.begin(), corrected.end(), 1));
    passed += static_cast<int>(std::count(corrected.begin(), corrected.end(), 0));
  }
  CHECK(flagged > 5);
  CHECK(passed > 5);
  const auto child = alone.fork(a);
  CHECK(missed_of(alone, child) == missed_of(alone, a));
  run(alone, child, text, 1, step_phase::decode);
  run(alone, a, text, 1, step_phase::decode);
  CHECK(missed_of(alone, child) == missed_of(alone, a));
}

TEST_CASE("verified_share flags a head of which it knows nothing, and none that misses nothing",
          "[verified_share]") {
  dice dice(96);
  sizes of{.k = 24};
  const auto basis = random_basis(dice, of.kv_heads, d, d);
  auto s = settings_of<exact>(of, basis, d, d);
  s.correction.epsilon = 0.0f;
  freekv::host_backend backend;
  {
    exact pipeline(s, backend);
    const rows_of_text text(dice, s.capacity.max_tokens, pipeline.configuration());
    const auto id = pipeline.open();
    run(pipeline, id, text, 100, step_phase::prefill);
    run(pipeline, id, text, 1, step_phase::decode);
    for (int step = 0; step < 5; ++step) {
      run(pipeline, id, text, 1, step_phase::decode);
      CHECK(missed_of(pipeline, id) == std::vector<float>(2 * count(of.kv_heads), 0.0f));
      CHECK(pipeline.report(0)[id].corrected[0] == 0);
    }
  }
  s.budget.selected_units = 2;
  s.correction.epsilon = 1.0f;
  exact pipeline(s, backend);
  rows_of_text text(dice, s.capacity.max_tokens, pipeline.configuration());
  // A row of the first KV head's queries, then a key of the second's, are no numbers.
  for (std::size_t i = 0; i < 2 * d; ++i) text.q[102 * text.query_row + i] = std::nanf("");
  for (std::size_t i = d; i < 2 * d; ++i) text.k[104 * text.key_row + i] = std::nanf("");
  const auto id = pipeline.open();
  run(pipeline, id, text, 101, step_phase::prefill);
  std::vector<std::array<int, 2>> corrected;
  for (int step = 0; step < 4; ++step) {
    run(pipeline, id, text, 1, step_phase::decode);
    const auto report = pipeline.report(0)[id];
    corrected.push_back({report.corrected[0], report.corrected[1]});
    for (std::size_t head = 0; head < 2; ++head)
      if (report.corrected[head] != 0)
        CHECK(report.missed[head].share_bound != report.missed[head].share_bound);
  }
  CHECK(corrected == std::vector<std::array<int, 2>>{{1, 1}, {1, 0}, {0, 0}, {0, 1}});
}

TEST_CASE("where a selection was dropped nothing is said of what it missed", "[verified_share]") {
  dice dice(97);
  const sizes of{};
  const auto basis = random_basis(dice, of.kv_heads, d, d);
  freekv::host_backend backend;
  exact pipeline(settings_of<exact>(of, basis, d, d), backend);
  const rows_of_text text(dice, pipeline.configuration().capacity.max_tokens, pipeline.configuration());
  const auto id = pipeline.open();
  run(pipeline, id, text, 100, step_phase::prefill);
  for (int step = 0; step < 3; ++step) run(pipeline, id, text, 1, step_phase::decode);
  for (const float number : missed_of(pipeline, id)) CHECK(number == number);
  SECTION("by a prompt's rows") { run(pipeline, id, text, 5, step_phase::prefill); }
  SECTION("by a truncation") { pipeline.truncate(id, 100); }
  run(pipeline, id, text, 1, step_phase::decode);
  for (const float number : missed_of(pipeline, id)) CHECK(number != number);
}
