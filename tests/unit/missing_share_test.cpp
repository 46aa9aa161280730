// missing_share: who is corrected, and what it attends to then, by the definition in float64 on random steps.

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "../oracle/numbers.hpp"
#include "../property/seeds.hpp"
#include "rows_of_text.hpp"

namespace {

using namespace tests;
using freekv::layer_kind;
using freekv::step_phase;

constexpr int d = 64;

/// Units' masses are known exactly: a basis of head_dim rows, unquantised.
using judged = freekv::retrieval_pipeline<
    freekv::kv_shape<float, d>, freekv::page_size<freekv::dynamic>, freekv::unit<freekv::dynamic>,
    freekv::key_subspace<d, 32>, freekv::any_of<freekv::mass_deficit, freekv::missing_share>,
    freekv::any_of<freekv::top_k, freekv::sticky_top_k>, freekv::any_of<freekv::resident, freekv::in_place>,
    freekv::every_layer<layer_kind::retrieval>>;

/// One KV head by the definition.
class definition {
 public:
  definition(const judged::settings& s, const rows_of_text& text, int head)
      : s_(&s), text_(&text), head_(head) {}

  struct step {
    bool corrected = true, firm = true;
    std::vector<int> attended;
    bool by_candidates = true;  // would mass_deficit of the same delta flag it?
  };
  /// What a step of `rows` rows behind `before` tokens does with the selection `carried`, if any, among
  /// candidates that are those at length `at`.
  step judge(int before, int rows, int at, const std::optional<std::vector<int>>& carried,
             const freekv::missing_share& by) {
    const auto units = candidates(at, before);
    score(before, rows, units);
    step result;
    const std::vector<int> best = select(units, pooled_, result.firm);
    result.attended = best;
    if (!carried) return result;
    const auto share = [&](const std::vector<int>& those, const std::vector<double>& of) {
      double sum = 0.0;
      for (const int one : those) sum += of[count(one - units.front())];
      return sum;
    };
    const auto missing = [&](const std::vector<int>& held) {
      return share(best, shares_) - share(held, shares_);
    };
    const double delta = double{by.delta};
    const auto flags = [&](const std::vector<int>& held) {
      if (held == best) return false;
      result.firm = result.firm && std::fabs(missing(held) - delta) > 1e-5;
      return missing(held) > delta;
    };
    result.attended = *carried;
    result.corrected = flags(*carried);
    std::vector<double> masses;
    for (const double x : pooled_) masses.push_back(std::exp(x));
    result.by_candidates = share(*carried, masses) < (1.0 - delta) * share(best, masses);
    if (!result.corrected) return result;
    if (!by.partial) {
      result.attended = best;
      return result;
    }
    std::vector<int>& held = result.attended;
    const auto less = [&](int a, int b) {
      return pooled_[count(a - units.front())] < pooled_[count(b - units.front())];
    };
    while (flags(held)) {
      std::vector<int> gains, losses;
      std::set_difference(best.begin(), best.end(), held.begin(), held.end(), std::back_inserter(gains));
      std::set_difference(held.begin(), held.end(), best.begin(), best.end(), std::back_inserter(losses));
      if (gains.empty()) break;
      if (!losses.empty())
        held.erase(
            std::find(held.begin(), held.end(), *std::min_element(losses.begin(), losses.end(), less)));
      held.push_back(*std::max_element(gains.begin(), gains.end(), less));
      std::sort(held.begin(), held.end());
    }
    return result;
  }
  /// What is selected for the next step by the queries of this one.
  std::vector<int> next(int before, int rows, const std::vector<int>& held, bool& firm) {
    const auto units = candidates(before + rows + 1, before + rows + 1);
    score(before, rows, units);
    std::vector<double> scores = pooled_;
    freekv::resolve(s_->selection, [&]<class S>(const S& selection) {
      if constexpr (std::is_same_v<S, freekv::sticky_top_k>)
        for (const int one : held)
          if (one >= units.front() && one <= units.back())
            scores[count(one - units.front())] += double{selection.bonus};
    });
    return select(units, scores, firm);
  }

 private:
  int page() const { return s_->page.tokens; }
  int unit() const { return s_->unit_tokens(); }
  std::vector<int> candidates(int at, int before) const {
    const auto roles = freekv::roles_at(at, s_->budget, page());
    const int end = std::min(roles.window_begin, before / page()), per_page = page() / unit();
    std::vector<int> units;
    for (int one = roles.sink_end * per_page; one < end * per_page; ++one) units.push_back(one);
    window_ = std::max(end, roles.sink_end) * page();
    sink_ = roles.sink_end * page();
    return units;
  }
  /// Pooled scores, by softmax over the candidates, and shares of all attention.
  void score(int before, int rows, const std::vector<int>& units) {
    pooled_.assign(units.size(), 0.0);
    shares_.assign(units.size(), 0.0);
    const int group = s_->model.group();
    for (int row = before; row < before + rows; ++row)
      for (int g = 0; g < group; ++g) {
        const auto head = count(head_ * group + g);
        const auto of = [&](int t) {
          return double{s_->attention.scale} *
                 oracle::dot(std::span(&text_->q[count(row) * text_->query_row + head * d], d),
                             std::span(&text_->k[count(t) * text_->key_row + count(head_ * d)], d));
        };
        std::vector<double> masses;
        double all = 0.0, beside = 0.0;
        for (const int one : units) {
          double sum = 0.0;
          for (int t = one * unit(); t < (one + 1) * unit(); ++t) sum += std::exp(of(t));
          masses.push_back(sum);
          all += sum;
        }
        for (int t = 0; t <= row; ++t)
          if (t < sink_ || t >= window_) beside += std::exp(of(t));
        if (!s_->attention.sink_logits.empty()) beside += std::exp(double{s_->attention.sink_logits[head]});
        for (std::size_t j = 0; j < units.size(); ++j) {
          pooled_[j] += masses[j] / all / (group * rows);
          shares_[j] += masses[j] / (all + beside) / (group * rows);
        }
      }
    for (double& x : pooled_) x = std::log(x);
  }
  std::vector<int> select(const std::vector<int>& units, const std::vector<double>& scores,
                          bool& firm) const {
    std::vector<std::size_t> order(units.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return scores[a] > scores[b]; });
    const auto k = std::min(order.size(), count(s_->budget.selected_units));
    if (k < order.size()) firm = firm && scores[order[k - 1]] - scores[order[k]] > 1e-4;
    std::vector<int> best;
    for (std::size_t i = 0; i < k; ++i) best.push_back(units[order[i]]);
    std::sort(best.begin(), best.end());
    return best;
  }

  const judged::settings* s_;
  const rows_of_text* text_;
  int head_;
  mutable int sink_ = 0, window_ = 0;
  std::vector<double> pooled_, shares_;
};

}  // namespace

TEST_CASE("missing_share is refused where shares are not known, with what to choose", "[missing_share]") {
  using namespace freekv;
  host_backend backend;
  dice dice(1);
  const auto basis = random_basis(dice, 2, d, d);
  const refusals by{"missing_share", backend, basis};
  const auto nothing = [](auto&) {};
  using usual = retrieval_pipeline<kv_shape<float, d>, key_subspace<d, 32>, missing_share>;
  by.check<usual::with<min_max>>("choose key_codes or key_subspace", nothing);
  by.check<usual::with<mean_query>>("choose mean_softmax", nothing);
  by.check<usual::with<per_layer>>("choose per_kv_head", nothing);
  by.check<usual::with<per_query_head>>("choose cosine_drift", nothing);
  by.check<usual::with<pin_outliers<2>>>("choose no_pins", nothing);
  by.check<usual::with<int8_token>::with<in_place>>("choose resident", nothing);
  by.check<usual>("selection_scale is not scale", [](auto& s) { s.attention.selection_scale = 1.0f; });
  by.check<usual>("choose mass_deficit", [](auto& s) { s.attention.soft_cap = 30.0f; });
  by.check<usual>("from 0 to 1", [](auto& s) { s.correction.delta = 1.5f; });
}

TEST_CASE("missing_share corrects whom its definition does, and exchanges as many units", "[missing_share]") {
  dice dice(100 * number_from("FREEKV_SEED", 1) + 91);
  int compared = 0, doubtful = 0, flagged = 0, some = 0, otherwise = 0;
  for (int trial = 0; trial < 60; ++trial) {
    const sizes of = sizes::random(dice, 6);
    auto basis = random_basis(dice, of.kv_heads, d, d);
    freekv::missing_share by{.delta = dice.one_of({0.0f, 0.02f, 0.05f, 0.2f}), .partial = dice.below(2) == 0};
    auto given = settings_of<judged>(of, basis, d, d);
    given.correction = by;
    if (dice.below(2) == 0) given.selection = freekv::sticky_top_k{};
    if (dice.below(2) == 0)
      given.route = freekv::in_place{};
    else if (dice.below(3) == 0)
      given.capacity.store_file = {.path = "/tmp"};
    given.capacity.max_resident = 2;
    draw_logits_and_scales(dice, d, given, basis);
    freekv::host_backend backend({.threads = 1 + dice.below(3), .overlap = dice.below(2) == 0});
    judged pipeline(given, backend);
    const auto& s = pipeline.configuration();
    const rows_of_text text(dice, s.capacity.max_tokens, s);
    INFO(pipeline.name() << ", trial " << trial << ", rows " << of.rows);
    auto id = pipeline.open();
    run(pipeline, id, text, (6 + dice.below(8)) * of.page + dice.below(of.page), step_phase::prefill);
    std::vector<definition> heads;
    for (int head = 0; head < of.kv_heads; ++head) heads.emplace_back(s, text, head);
    std::vector<std::optional<std::vector<int>>> carried(count(of.kv_heads));
    std::vector<char> firm(count(of.kv_heads), 1);
    int at = pipeline.tokens(id) + 1, last_rows = 0;
    for (int event = 0; event < 24 && pipeline.tokens(id) + of.rows <= s.capacity.max_tokens; ++event) {
      switch (dice.below(8)) {
        case 0: {
          const auto child = pipeline.fork(id);
          pipeline.release(id);
          id = child;
          break;
        }
        case 1:
          pipeline.preempt(id);
          pipeline.restore(id);
          break;
        case 2:
          if (const int cut = dice.below(last_rows + 2); cut > 0) {
            pipeline.truncate(id, pipeline.tokens(id) - cut);
            if (cut >= last_rows) {  // else the selection stays
              std::fill(carried.begin(), carried.end(), std::nullopt);
              at = pipeline.tokens(id) + 1;
            }
            last_rows = std::max(0, last_rows - cut);
          }
          break;
        default:
          break;
      }
      const int before = pipeline.tokens(id), rows = 1 + dice.below(of.rows);
      run(pipeline, id, text, rows, step_phase::decode);
      for (int head = 0; head < of.kv_heads; ++head) {
        auto& one = heads[count(head)];
        const auto attended = attended_of(pipeline, id, head);
        const bool corrected = pipeline.report(0)[id].corrected[count(head)] != 0;
        const auto& selection = carried[count(head)];
        const auto wanted = one.judge(before, rows, at, selection, by);
        if (wanted.firm && (firm[count(head)] != 0 || !selection)) {
          ++compared;
          flagged += selection && wanted.corrected;
          otherwise += selection && wanted.corrected != wanted.by_candidates;
          some += wanted.corrected && selection && by.partial &&
                  attended != one.judge(before, rows, at, {}, by).attended;
          if (corrected != wanted.corrected) FAIL("corrected " << corrected << " in event " << event);
          if (attended != wanted.attended) FAIL("other units in event " << event);
        } else {
          ++doubtful;
        }
        bool sure = true;
        carried[count(head)] = one.next(before, rows, attended, sure);
        firm[count(head)] = sure;
      }
      at = before + rows + 1;
      last_rows = rows;
    }
  }
  INFO(compared << " compared, " << doubtful << " doubtful, " << flagged << " flagged, " << some
                << " exchanged in part, " << otherwise << " otherwise than by the candidates' masses");
  CHECK(compared > 1500);
  CHECK(doubtful < compared / 20);
  CHECK(flagged > 200);
  CHECK(some > 20);
  CHECK(otherwise > 100);
}

TEST_CASE("shares of NaN flag a head, but none whose selection is the best one", "[missing_share]") {
  const std::int32_t best[] = {3, 4};
  const auto nothing = [](const std::int32_t*, int) { return quiet_nan; };
  const auto correct = [&](std::int32_t* selected, bool& corrected) {
    return freekv::detail::correct_selection(freekv::missing_share{.delta = 1.0f}, {selected, best, 2, 2},
                                             corrected, nothing, [](std::int32_t unit) { return unit; });
  };
  std::int32_t same[] = {3, 4}, other[] = {3, 5};
  bool corrected = false;
  CHECK(correct(same, corrected) == 2);
  CHECK_FALSE(corrected);
  CHECK(correct(other, corrected) == 2);
  CHECK(corrected);
  CHECK(std::equal(best, best + 2, other));
}

TEST_CASE("where all that is selected is among the best, the best unit that is missed comes besides",
          "[missing_share]") {
  std::int32_t selected[3] = {4, -9, -9};
  const std::int32_t best[] = {2, 4, 6};
  const float masses[] = {0, 0, 0.3f, 0, 0.4f, 0, 0.2f};
  bool corrected = false;
  CHECK(freekv::detail::correct_selection(
            freekv::mass_deficit{.delta = 0.3f, .partial = true}.at(0), {selected, best, 1, 3}, corrected,
            [&](const std::int32_t* units, int n) {
              float sum = 0;
              for (int i = 0; i < n; ++i) sum += masses[units[i]];
              return sum;
            },
            [&](std::int32_t unit) { return masses[unit]; }) == 2);
  CHECK(corrected);
  CHECK((selected[0] == 2 && selected[1] == 4));
}
