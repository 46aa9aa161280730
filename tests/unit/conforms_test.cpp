// The judge of policies that users have: it passes a policy that is its definition, and tells of each flaw.

#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <string>
#include <vector>

#include "../catch.hpp"
#include "../property/eviction_case.hpp"
#include "../property/random_case.hpp"

namespace {

using freekv::testing::doubles;
using sentences = std::vector<std::string>;
constexpr freekv::testing::conformance_options few{.units = 30, .runs = 4};

bool mentions(const sentences& told, const std::string& words) {
  for (const std::string& one : told)
    if (one.find(words) != std::string::npos) return true;
  return false;
}

enum class flaw {
  none,
  score,
  numbers,
  width,
  drops_nan,
  drops_one_nan,
  of_wide_teams,
  of_some,
  late,
  of_zeros,
};

/// The page's mean key, or nearly.
struct flawed_mean {
  using policy_kind = freekv::summary_kind;
  using hooks = freekv::hook_list<freekv::hook::validate>;
  static constexpr std::string_view name = "flawed_mean";
  flaw has = flaw::none;

  constexpr int width(freekv::kv_extent unit) const { return unit.head_dim + (has == flaw::width ? 8 : 0); }
  template <freekv::team T>
  void summarise(T team, freekv::unit_keys keys, float* numbers) const {
    for (int i = keys.unit.head_dim; i < width(keys.unit); ++i) numbers[i] = 0.0f;
    if (has == flaw::numbers) --keys.unit.tokens;
    freekv::mean{}.summarise(team, keys, numbers);
    if (has == flaw::drops_one_nan && !std::isnan(numbers[0]))
      for (int i = 0; i < keys.unit.head_dim; ++i) numbers[i] = std::isnan(numbers[i]) ? 0.0f : numbers[i];
  }
  template <freekv::team T>
  float score(T team, const freekv::unit_query& query, const float* numbers) const {
    const float score = freekv::mean{}.score(team, query, numbers);
    if (has == flaw::drops_nan && score != score) return 0.0f;
    if (has == flaw::of_wide_teams && T::width > 1) return score + 1.0f;
    return has == flaw::score ? -score : score;
  }
  void validate(const freekv::summary_setting& setting) const {
    if (has == flaw::of_some && setting.unit.tokens != 64) throw freekv::settings_error("not of 64 tokens");
  }
};

sentences told_of_mean(flaw has) {
  const freekv::testing::summary_definition mean{
      .numbers =
          [](const doubles& keys, freekv::kv_extent unit) {
            const auto d = static_cast<std::size_t>(unit.head_dim);
            doubles numbers(d);
            for (std::size_t i = 0; i < keys.size(); ++i) numbers[i % d] += keys[i] / unit.tokens;
            return numbers;
          },
      .score =
          [](const doubles& query, const doubles& numbers, freekv::kv_extent, double scale) {
            double product = 0.0;
            for (std::size_t i = 0; i < query.size(); ++i) product += query[i] * numbers[i];
            return scale * product;
          }};
  flawed_mean policy;
  policy.has = has;
  return freekv::testing::conforms(mean, policy, few);
}

/// The largest of the heads' scores, or nearly.
struct flawed_max {
  using policy_kind = freekv::pooling_kind;
  static constexpr std::string_view name = "flawed_max";
  static constexpr bool uses_log_sums = false;
  flaw has = flaw::none;

  template <freekv::team T>
  auto pool(T team, const freekv::row_scores& row, int j) const {
    auto largest = row.load(team, 0, j);
    for (int g = 1; g < row.group - (has == flaw::of_some); ++g)
      largest = team.maximum(largest, row.load(team, g, j));
    if (has == flaw::of_wide_teams && T::width > 1) largest = largest + typename T::pack(1.0f);
    return has == flaw::drops_nan
               ? team.maximum(largest, typename T::pack(std::numeric_limits<float>::lowest()))
               : largest;
  }
};

sentences told_of_max(flaw has) {
  const freekv::testing::pooling_definition max{.scores = [](const std::vector<doubles>& scores) {
    doubles pooled = scores[0];
    for (const doubles& of_head : scores)
      for (std::size_t j = 0; j < pooled.size(); ++j) pooled[j] = std::max(pooled[j], of_head[j]);
    return pooled;
  }};
  flawed_max policy;
  policy.has = has;
  return freekv::testing::conforms(max, policy, few);
}

/// The first head's query, or another.
struct flawed_first_query {
  using policy_kind = freekv::pooling_kind;
  static constexpr std::string_view name = "flawed_first_query";
  flaw has = flaw::none;

  template <freekv::team T>
  void pool_query(T team, const freekv::group_query& query, float* pooled) const {
    for (int i = 0; i < query.head_dim; i += T::width)
      team.store(pooled + i, team.load(query.head(has == flaw::of_some ? query.group - 1 : 0) + i));
  }
};

sentences told_of_first_query(flaw has) {
  const freekv::testing::pooling_definition first{
      .query = [](const std::vector<doubles>& queries) { return queries[0]; }};
  flawed_first_query policy;
  policy.has = has;
  return freekv::testing::conforms(first, policy, few);
}

/// The k best of the candidates, those favoured that are held, or nearly.
struct flawed_selection {
  using policy_kind = freekv::selection_kind;
  using hooks = freekv::hook_list<freekv::hook::favour>;
  static constexpr std::string_view name = "flawed_selection";
  flaw has = flaw::none;

  constexpr int count(int candidates, int k) const {
    return std::min(candidates, has == flaw::of_some ? std::max(1, k - 1) : k);
  }
  constexpr float favour() const { return has == flaw::score ? 0.0f : 0.5f; }
};

sentences told_of_selection(flaw has) {
  const freekv::testing::selection_definition favouring{
      .selected = [](doubles scores, const std::vector<bool>& held, int k) {
        for (std::size_t j = 0; j < scores.size(); ++j) scores[j] += held[j] ? 0.5 : 0.0;
        return freekv::testing::detail::step_definitions{}.selection.selected(scores, held, k);
      }};
  flawed_selection policy;
  policy.has = has;
  return freekv::testing::conforms(favouring, policy, few);
}

/// Heads whose first query has turned by more than a right angle's third, or nearly.
struct flawed_turn {
  using policy_kind = freekv::correction_kind;
  static constexpr std::string_view name = "flawed_turn";
  flaw has = flaw::none;

  flawed_turn at(int) const { return *this; }
  template <freekv::team T>
  bool flags(T team, const freekv::query_change& change) const {
    double product = 0.0, of_now = 0.0, of_before = 0.0;
    for (int i = 0; i < change.now.head_dim; ++i) {
      const double a = static_cast<double>(change.now.head(0)[i]),
                   b = static_cast<double>(change.before.head(0)[i]);
      product += a * b, of_now += a * a, of_before += b * b;
    }
    if (has == flaw::late && change.decode_step > 10) return false;
    if (has == flaw::of_zeros && of_now == 0.0) return false;
    if (has == flaw::of_wide_teams && T::width > 1) return false;
    static_cast<void>(team);
    return !(product >= (has == flaw::score ? 0.7 : 0.86) * std::sqrt(of_now * of_before)) || of_now == 0.0;
  }
};

sentences told_of_turn(flaw has) {
  const freekv::testing::correction_definition turn{
      .by_queries = [](const freekv::testing::changed_queries& queries) {
        using freekv::testing::detail::inner_product;
        const doubles &now = queries.now[0], &before = queries.before[0];
        const double sizes = std::sqrt(inner_product(now, now) * inner_product(before, before));
        return sizes == 0.0 || inner_product(now, before) / sizes < 0.86;
      }};
  flawed_turn policy;
  policy.has = has;
  return freekv::testing::conforms(turn, policy, few);
}

/// Heads whose selected pages have less than half of the mass, or nearly.
struct flawed_half {
  using policy_kind = freekv::correction_kind;
  static constexpr std::string_view name = "flawed_half";
  flaw has = flaw::none;

  flawed_half at(int) const { return *this; }
  bool flags(const freekv::selection_masses& masses) const {
    return masses.selected < (has == flaw::score ? 0.6f : 0.8f) * masses.best;
  }
  bool exchanges_units() const { return false; }
};

sentences told_of_half(flaw has) {
  const freekv::testing::correction_definition half{
      .by_masses = [](double selected, double best) { return selected < 0.8 * best; }};
  flawed_half policy;
  policy.has = has;
  return freekv::testing::conforms(half, policy, few);
}

/// Tokens with the largest share of any row, or nearly; the latest four stay.
struct flawed_peak {
  using policy_kind = freekv::eviction_kind;
  static constexpr std::string_view name = "flawed_peak";
  flaw has = flaw::none;
  struct unit_state {
    float largest;
  };
  constexpr int unit_tokens() const { return 1; }
  constexpr bool stages_prompt() const { return true; }
  constexpr int observed_rows() const { return has == flaw::of_some ? 4 : 8; }
  constexpr int capacity(const freekv::eviction_limits& most) const { return most.budget + 1; }
  constexpr int kept(const freekv::eviction_moment& at) const { return at.budget; }
  constexpr bool protects(int token, const freekv::eviction_moment& at) const {
    return token + 4 >= at.tokens;
  }
  constexpr void on_append(unit_state& unit, int) const { unit.largest = 0.0f; }
  constexpr void on_prompt(unit_state& unit, const freekv::prompt_votes& votes, int token) const {
    if (has != flaw::late) unit.largest = votes.shares[token];
  }
  constexpr void on_attended(unit_state& unit, float share, int) const {
    unit.largest = has == flaw::score ? share : std::max(unit.largest, share);
  }
  std::uint32_t worth(const unit_state& unit) const {
    const std::uint32_t bits = freekv::order_bits(unit.largest);
    return has == flaw::numbers ? ~bits : bits;
  }
};

sentences told_of_peak(flaw has) {
  const freekv::testing::eviction_definition peak{
      .worth = [has](const freekv::testing::attended_rows& seen, int token) {
        double of_prompt = 0.0, largest = 0.0;
        for (std::size_t row = 0; row < seen.shares.size(); ++row) {
          const doubles& shares = seen.shares[row];
          const auto at = static_cast<std::size_t>(token);
          const double share = at < shares.size() ? shares[at] : 0.0;
          const int of_row = static_cast<int>(row);
          if (of_row < seen.prompt)
            of_prompt += seen.prompt_is_cut && of_row >= seen.prompt - 8 ? share : 0.0;  // votes
          else
            largest = std::max(largest, share);
        }
        if (has == flaw::drops_nan) return std::numeric_limits<double>::quiet_NaN();
        return std::max(of_prompt, largest);
      }};
  flawed_peak policy;
  policy.has = has;
  return freekv::testing::conforms(peak, policy);
}

/// Tokens with the largest score of the last eight rows and the first number of their key, where these are
/// above 0 together, or nearly; the latest four stay.
struct flawed_window {
  using policy_kind = freekv::eviction_kind;
  using hooks = freekv::hook_list<freekv::hook::observe, freekv::hook::sees_keys>;
  static constexpr std::string_view name = "flawed_window";
  flaw has = flaw::none;

  constexpr int unit_tokens() const { return 1; }
  constexpr bool stages_prompt() const { return true; }
  constexpr int observed_rows() const { return 8; }
  constexpr int capacity(const freekv::eviction_limits& most) const { return most.budget + 1; }
  constexpr int kept(const freekv::eviction_moment& at) const { return at.budget; }
  constexpr bool protects(int token, const freekv::eviction_moment& at) const {
    return token + (has == flaw::width ? 0 : 4) >= at.tokens;
  }
  constexpr freekv::group_rule group() const { return freekv::group_rule::largest_score; }
  constexpr bool observes_decoding() const { return true; }
  constexpr bool sees_keys() const { return true; }
  int observe(const freekv::observed_units& held, const freekv::eviction_moment& at, float* worths) const {
    int stay = has == flaw::of_some ? 1 : 0;
    for (int i = 0; i < held.units; ++i) {
      worths[i] = held.row(held.rows - 1)[i];
      for (int r = 0; r < held.rows; ++r)
        if (has != flaw::score) worths[i] = std::max(worths[i], held.row(r)[i]);
      if (has != flaw::numbers) worths[i] += held.keys[i * held.head_dim];
      stay += worths[i] > 0.0f || protects(held.tokens[i], at);
      if (has == flaw::late && !at.prompt_ends) worths[i] = -worths[i];
    }
    return stay;
  }
};

sentences told_of_window(flaw has) {
  const freekv::testing::eviction_definition window{
      .worths =
          [has](const freekv::testing::observed_tokens& held) {
            doubles worths = held.rows[0][0];
            for (std::size_t i = 0; i < worths.size(); ++i) {
              for (const auto& row : held.rows) worths[i] = std::max(worths[i], row[0][i]);
              worths[i] += held.keys[i][0];
            }
            if (has == flaw::drops_nan) worths.pop_back();
            return worths;
          },
      .staying =
          [](const freekv::testing::observed_tokens& held, const doubles& worths) {
            int stay = 0;
            for (std::size_t i = 0; i < worths.size(); ++i)
              stay += worths[i] > 0.0 || held.tokens[i] + 4 >= held.at.tokens;
            return stay;
          }};
  flawed_window policy;
  policy.has = has;
  return freekv::testing::conforms(window, policy);
}

/// Pages of four tokens, of which that leaves which has least of the last row, or nearly.
struct flawed_pages : freekv::tova {
  static constexpr std::string_view name = "flawed_pages";
  flaw has = flaw::none;

  constexpr int unit_tokens() const { return 4; }
  constexpr int capacity(const freekv::eviction_limits& most) const { return most.budget + 4; }
  constexpr bool protects(int token, const freekv::eviction_moment& at) const {
    return token + 4 > at.tokens;  // it is being filled
  }
  constexpr void on_prompt(unit_state& unit, const freekv::prompt_votes& votes, int token) const {
    unit.share = 0.0f;
    for (int t = token; t < std::min(token + (has == flaw::late ? 1 : 4), votes.tokens); ++t)
      unit.share += votes.shares[t];
  }
  constexpr void on_attended(unit_state& unit, float share, int) const {
    unit.share = has == flaw::score ? -share : share;
  }
};

sentences told_of_pages(flaw has) {
  const freekv::testing::eviction_definition pages{
      .worth = [](const freekv::testing::attended_rows& seen, int first) {
        const doubles& last = seen.shares.back();
        double share = 0.0;
        for (int t = first; t < std::min<int>(first + 4, std::ssize(last)); ++t) share += last[t];
        return share;
      }};
  flawed_pages policy;
  policy.has = has;
  return freekv::testing::conforms(pages, policy);
}

/// tova whose tokens merge into the first that stays, with weight 2, and every third time into none, or
/// nearly.
struct flawed_merge : freekv::tova {
  using hooks = freekv::hook_list<freekv::hook::merge>;
  static constexpr std::string_view name = "flawed_merge";
  flaw has = flaw::none;
  struct head_memory {
    int times = 0;
  };
  constexpr freekv::merge_rule merge_by() const {
    return has == flaw::width ? freekv::merge_rule::as_many : freekv::merge_rule::by_weights;
  }
  void merge(const freekv::merging_tokens& of, const freekv::eviction_moment&, head_memory& memory,
             freekv::merge_fate* fates) const {
    const bool lost = ++memory.times % (has == flaw::late ? 4 : 3) == 0;
    for (int i = of.staying; i < of.end(); ++i)
      fates[i] = {lost ? -1 : has == flaw::score ? of.staying - 1 : 0, has == flaw::numbers ? 1.0 : 2.0};
  }
};

sentences told_of_merge(flaw has, const freekv::testing::conformance_options& options = few) {
  freekv::testing::eviction_definition first{
      .worth = [](const freekv::testing::attended_rows& seen,
                  int token) { return seen.shares.back()[token]; },
      .fates =
          [has](const std::vector<freekv::testing::parted_tokens>& so_far) {
            std::vector<freekv::merge_fate> fates(so_far.back().tokens.size());
            for (int i = so_far.back().staying; i < std::ssize(fates); ++i)
              fates[i] = {so_far.size() % 3 == 0 ? -1 : 0, 2.0};
            if (has == flaw::drops_nan) fates.pop_back();
            return fates;
          }};
  flawed_merge policy;
  policy.has = has;
  return freekv::testing::conforms(first, policy, options);
}

/// Numbers as bfloat16, or nearly.
struct flawed_cast {
  using policy_kind = freekv::codec_kind;
  static constexpr std::string_view name = "flawed_cast";
  flaw has = flaw::none;

  std::size_t bytes(freekv::kv_extent page, std::size_t element_bytes) const {
    return exact_.bytes(page, element_bytes) - (has == flaw::width ? 8 : has == flaw::of_some ? 2 : 0);
  }
  template <int HeadDim, class Team, class Element>
  void encode(Team team, const freekv::head_slice<const Element>& from, int tokens, std::byte* to) const {
    exact_.encode<HeadDim>(team, from, tokens, to);
    bool finite = true;
    for (int i = 0; i < HeadDim; ++i) finite = finite && std::isfinite(freekv::to_float(from.key[i]));
    if (has == flaw::drops_nan && !finite) std::fill_n(to, bytes({tokens, HeadDim}, 0), std::byte{0xff});
  }
  template <int HeadDim, class Team, class Element>
  void decode(Team team, const std::byte* from, int tokens, freekv::row_range rows,
              const freekv::head_slice<Element>& to) const {
    if (has == flaw::late) rows.first = 0;
    if (has == flaw::of_zeros) rows.count = tokens - rows.first;
    exact_.decode<HeadDim>(team, from, tokens, rows, to);
    Element& first = has == flaw::score ? to.key[0] : to.value[0];
    if (has == flaw::score || has == flaw::numbers)
      first = freekv::from_float<Element>(-freekv::to_float(first));
  }

 private:
  freekv::cast<freekv::bfloat16> exact_;
};

sentences told_of_cast(flaw has) {
  // 8 bits of mantissa, ties to even.
  const auto read = [](const doubles& numbers, freekv::kv_extent) {
    doubles rounded;
    for (const double x : numbers) {
      int exponent = 0;
      const double mantissa = std::frexp(x, &exponent);
      rounded.push_back(std::ldexp(std::nearbyint(mantissa * 256.0) / 256.0, exponent));
    }
    return rounded;
  };
  flawed_cast policy;
  policy.has = has;
  return freekv::testing::conforms({.keys = read, .values = read}, policy, few);
}

/// Units by the first number of their first key, or the other way round.
struct flawed_pins {
  using policy_kind = freekv::pinning_kind;
  static constexpr std::string_view name = "flawed_pins";
  flaw has = flaw::none;
  int units = 2;

  template <freekv::team T>
  float worth(T, const freekv::unit_keys& keys, float*) const {
    const float first = keys.row(0)[0] + (has == flaw::of_wide_teams && T::width > 1 ? 1.0f : 0.0f);
    return has == flaw::score ? -first : first;
  }
};

sentences told_of_pins(flaw has, const freekv::testing::conformance_options& options = few) {
  const freekv::testing::pinning_definition first{
      .worth = [](const doubles& keys, freekv::kv_extent) { return keys[0]; }};
  flawed_pins policy;
  policy.has = has;
  return freekv::testing::conforms(first, policy, options);
}

/// The highest slot is freed first, or of those selected in odd selections the lowest.
struct flawed_residency {
  using policy_kind = freekv::residency_kind;
  static constexpr std::string_view name = "flawed_residency";
  flaw has = flaw::none;
  int spare = 2;

  constexpr bool frees_before(freekv::unselected_slot a, freekv::unselected_slot b) const {
    if (has == flaw::late) return a.slot >= b.slot || a.last_selected > b.last_selected;
    return has == flaw::of_some && a.last_selected % 2 == 1 ? a.slot < b.slot : a.slot > b.slot;
  }
};

sentences told_of_residency(flaw has) {
  const freekv::testing::residency_definition last{
      .freed = [](const std::vector<freekv::unselected_slot>& slots) {
        return static_cast<int>(slots.size()) - 1;
      }};
  flawed_residency policy;
  policy.has = has;
  return freekv::testing::conforms(last, policy, few);
}

}  // namespace

TEST_CASE("a policy that is its definition conforms to it", "[conforms]") {
  CHECK(told_of_mean(flaw::none) == sentences{});
  CHECK(told_of_max(flaw::none) == sentences{});
  CHECK(told_of_first_query(flaw::none) == sentences{});
  CHECK(told_of_selection(flaw::none) == sentences{});
  CHECK(told_of_turn(flaw::none) == sentences{});
  CHECK(told_of_half(flaw::none) == sentences{});
  CHECK(told_of_peak(flaw::none) == sentences{});
  CHECK(told_of_window(flaw::none) == sentences{});
  CHECK(told_of_pages(flaw::none) == sentences{});
  CHECK(told_of_merge(flaw::none) == sentences{});
  CHECK(told_of_cast(flaw::none) == sentences{});
  CHECK(told_of_pins(flaw::none) == sentences{});
  CHECK(told_of_residency(flaw::none) == sentences{});
}

TEST_CASE("the oracle knows every policy that programs offer, or a file in tests/policies does",
          "[conforms]") {
  const std::string conforming = "," FREEKV_CONFORMING ",";
  const auto compare = [&](const auto& offered, const auto& by_oracle) {
    for (const auto& one : offered) {
      INFO(one.name);
      const auto same = [&](const auto& word) { return word.name == one.name; };
      // verified_share's definition is in verified_share_test.cpp: conforms judges no correction by a sample.
      CHECK((one.name == freekv::verified_share::name ||
             std::any_of(std::begin(by_oracle), std::end(by_oracle), same) ||
             conforming.find("," + std::string(one.name) + ",") != std::string::npos));
    }
  };
  compare(freekv::examples::summaries, tests::oracle_summaries);
  compare(freekv::examples::poolings, tests::oracle_poolings);
  compare(freekv::examples::selections, tests::oracle_selections);
  compare(freekv::examples::corrections, tests::oracle_corrections);
  compare(freekv::examples::eviction_list::choices, tests::oracle_evictions);
}

TEST_CASE("what differs from a summary's definition is told", "[conforms]") {
  CHECK(mentions(told_of_mean(flaw::score), "one lane, unit of"));
  CHECK(mentions(told_of_mean(flaw::score), "of the definition"));
  CHECK(mentions(told_of_mean(flaw::numbers), ": number 0 is "));
  CHECK(mentions(told_of_mean(flaw::width), ", of the definition "));
  CHECK(mentions(told_of_mean(flaw::drops_nan), "a unit of NaN keys scores 0, not NaN"));
  CHECK(mentions(told_of_mean(flaw::drops_one_nan), ": a unit with NaN in number "));
  CHECK_FALSE(mentions(told_of_mean(flaw::drops_one_nan), "a unit of NaN keys"));
  CHECK(mentions(told_of_mean(flaw::of_wide_teams), "baseline, unit of"));
  CHECK_FALSE(mentions(told_of_mean(flaw::of_wide_teams), "one lane"));
  CHECK(told_of_mean(flaw::score).size() == 10);
  CHECK(mentions(told_of_mean(flaw::of_some), "no sequence was decoded"));
}

TEST_CASE("what differs from a pooling's definition is told", "[conforms]") {
  CHECK(mentions(told_of_max(flaw::of_some), ": number "));
  CHECK(mentions(told_of_max(flaw::of_some), "one lane, group of "));
  CHECK(mentions(told_of_max(flaw::drops_nan), "of the definition -inf"));
  CHECK(mentions(told_of_max(flaw::of_wide_teams), "baseline, group of"));
  CHECK_FALSE(mentions(told_of_max(flaw::of_wide_teams), "one lane"));
  CHECK(mentions(told_of_first_query(flaw::of_some), " numbers: number 0 is "));
  const freekv::testing::pooling_definition of_queries{
      .query = [](const std::vector<doubles>& queries) { return queries[0]; }};
  CHECK(freekv::testing::conforms<freekv::max_score>(of_queries) ==
        sentences{"a pooling of scores is defined by `scores` alone"});
}

TEST_CASE("what differs from a selection's definition is told", "[conforms]") {
  CHECK(mentions(told_of_selection(flaw::of_some), " attends to units {"));
  CHECK(mentions(told_of_selection(flaw::of_some), ", by the definition {"));
  CHECK(mentions(told_of_selection(flaw::score), " attends to units {"));  // what was selected a step ahead
}

TEST_CASE("what differs from a correction's definition is told", "[conforms]") {
  CHECK(mentions(told_of_turn(flaw::score), "one lane, group of "));
  CHECK(mentions(told_of_turn(flaw::score), "the head is not flagged, by the definition it is flagged"));
  CHECK(mentions(told_of_turn(flaw::late), "decode step "));
  CHECK(mentions(told_of_turn(flaw::of_zeros), "the head is not flagged"));
  CHECK(mentions(told_of_turn(flaw::of_wide_teams), "baseline, group of"));
  CHECK_FALSE(mentions(told_of_turn(flaw::of_wide_teams), "one lane"));
  CHECK(mentions(told_of_half(flaw::score), "a head of mass "));
  const freekv::testing::correction_definition of_queries{
      .by_queries = [](const freekv::testing::changed_queries&) { return true; }};
  CHECK(freekv::testing::conforms<freekv::mass_deficit>(of_queries) ==
        sentences{"a correction by masses is defined by `by_masses` alone"});
  // One that its flags alone do not tell from its definition: the pipeline's steps do.
  freekv::testing::conformance_options no_units = few;
  no_units.units = 0;
  CHECK(mentions(freekv::testing::conforms<freekv::always>(of_queries, {}, no_units), "") == false);
  CHECK(mentions(freekv::testing::conforms<freekv::never>(of_queries, {}, no_units),
                 " is not corrected, by the definition it is "));
}

TEST_CASE("what differs from an eviction's definition is told", "[conforms]") {
  CHECK(mentions(told_of_peak(flaw::score), " has lost unit "));
  CHECK(mentions(told_of_peak(flaw::numbers), " has lost unit "));
  CHECK(mentions(told_of_peak(flaw::late), "step 0, head 0 has lost unit "));
  CHECK(mentions(told_of_peak(flaw::of_some), " has lost unit "));
  CHECK(mentions(told_of_peak(flaw::drops_nan), "the definition's worth of unit "));
  CHECK(mentions(told_of_pages(flaw::score), " has lost unit "));
  CHECK(mentions(told_of_pages(flaw::late), "step 0, head 0 has lost unit "));
}

TEST_CASE("what differs from the definition of an eviction that observes is told", "[conforms]") {
  CHECK(mentions(told_of_window(flaw::score), " has lost unit "));
  CHECK(mentions(told_of_window(flaw::numbers), " has lost unit "));
  CHECK(mentions(told_of_window(flaw::of_some), " units, by the definition it keeps "));
  CHECK(mentions(told_of_window(flaw::width), " units, by the definition it keeps "));
  CHECK(mentions(told_of_window(flaw::late), "step 1, head 0 has lost unit "));
  CHECK_FALSE(mentions(told_of_window(flaw::late), "step 0, "));
  CHECK(mentions(told_of_window(flaw::drops_nan), " is NaN, or not there"));
}

TEST_CASE("what differs from the definition of an eviction that merges is told", "[conforms]") {
  CHECK(mentions(told_of_merge(flaw::score), ", by the definition it merges into token 0"));
  CHECK(mentions(told_of_merge(flaw::numbers), " of what token 0 becomes, by the definition "));
  CHECK(mentions(told_of_merge(flaw::late), "parting 2 of "));
  CHECK(mentions(told_of_merge(flaw::late), ", by the definition it is lost"));
  CHECK(mentions(told_of_merge(flaw::width), ", in float64 "));
  CHECK(mentions(told_of_merge(flaw::drops_nan), ": the definition must give a fate to each token"));
  // By the pipeline's steps alone.
  freekv::testing::conformance_options no_partings = few;
  no_partings.units = 0;
  CHECK(told_of_merge(flaw::none, no_partings) == sentences{});
  for (const flaw one : {flaw::score, flaw::numbers, flaw::late})
    CHECK(mentions(told_of_merge(one, no_partings), ", in float64 "));
}

TEST_CASE("an eviction whose definition is of another is told of", "[conforms]") {
  freekv::testing::eviction_definition none{
      .worth = [](const freekv::testing::attended_rows&, int) { return 0.0; }};
  CHECK(freekv::testing::conforms<freekv::raas>(none) ==
        sentences{"no budget from 16 to 80 tokens suits the policy"});
  freekv::raas keeping;
  keeping.keeps_prompt = true;
  CHECK(mentions(freekv::testing::conforms(none, keeping), "no unit has left in "));
  CHECK(freekv::testing::conforms<flawed_window>(none) ==
        sentences{
            "an eviction that observes is defined by `worths` alone, and `staying` where it says how many "
            "stay"});
  CHECK(freekv::testing::conforms<flawed_merge>(none) ==
        sentences{"an eviction that counts and merges is defined by `worth` and `fates` alone"});
  none.staying = [](const freekv::testing::observed_tokens&, const doubles&) { return 1; };
  CHECK(freekv::testing::conforms<freekv::tova>(none) ==
        sentences{"an eviction that counts is defined by `worth` alone"});
}

TEST_CASE("what differs from a codec's definition is told", "[conforms]") {
  CHECK(mentions(told_of_cast(flaw::score), ": number 0 of token 0's key comes back as "));
  CHECK(mentions(told_of_cast(flaw::score), ", head_dim 64"));
  CHECK(mentions(told_of_cast(flaw::numbers), ": number 0 of token 0's value comes back as "));
  CHECK(mentions(told_of_cast(flaw::late), " comes back as another where some rows are read"));
  CHECK(mentions(told_of_cast(flaw::of_zeros), " rows that are read"));
  CHECK(mentions(told_of_cast(flaw::drops_nan), "beside one that is not finite"));
  CHECK(mentions(told_of_cast(flaw::width), " writes more than its "));
  CHECK(mentions(told_of_cast(flaw::of_some), " bytes, which is no multiple of 4"));
}

TEST_CASE("what differs from a pinning's definition is told", "[conforms]") {
  CHECK(mentions(told_of_pins(flaw::score), "one lane, unit of "));
  CHECK(mentions(told_of_pins(flaw::of_wide_teams), "baseline, unit of "));
  CHECK_FALSE(mentions(told_of_pins(flaw::of_wide_teams), "one lane"));
  // By the pipeline's steps alone.
  freekv::testing::conformance_options no_units = few;
  no_units.units = 0;
  CHECK(mentions(told_of_pins(flaw::score, no_units), ", which the definition pins"));
}

TEST_CASE("what differs from a residency's definition is told", "[conforms]") {
  CHECK(mentions(told_of_residency(flaw::late), "`frees_before` is no order"));
  CHECK(mentions(told_of_residency(flaw::of_some), " is freed first, by the definition "));
}
