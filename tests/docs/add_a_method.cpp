// The code that docs/add-a-method.md shows: a named method, and methods that forget, which run here.
#include <algorithm>
#include <cmath>
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "../catch.hpp"

namespace {

using namespace freekv;

struct my_quest : named_policies<min_max, mean_score, always> {
  static constexpr std::string_view name = "my_quest";
  static constexpr std::string_view about = "quest whose group's pages have their mean score";
  static constexpr std::string_view published = "";
};

/// The tokens with the largest share that any row has given them.
struct peak {
  using policy_kind = eviction_kind;
  static constexpr std::string_view name = "peak";
  struct unit_state {
    float largest;
  };  // trivially copyable

  FREEKV_HD constexpr int unit_tokens() const { return 1; }
  FREEKV_HD constexpr bool stages_prompt() const { return true; }  // and is cut when the prompt ends
  FREEKV_HD constexpr int observed_rows() const { return 32; }     // of the prompt: the last 32 vote
  FREEKV_HD constexpr int capacity(const eviction_limits& most) const { return most.budget + 1; }
  FREEKV_HD constexpr int kept(const eviction_moment& at) const { return at.budget; }
  FREEKV_HD constexpr bool protects(int token, const eviction_moment& at) const {
    return token + 8 >= at.tokens;
  }

  FREEKV_HD constexpr void on_append(unit_state& unit, int) const { unit.largest = 0.0f; }
  FREEKV_HD constexpr void on_prompt(unit_state& unit, const prompt_votes& votes, int token) const {
    unit.largest = votes.shares[token];
  }
  FREEKV_HD constexpr void on_attended(unit_state& unit, float share, int) const {
    if (share > unit.largest) unit.largest = share;
  }
  FREEKV_HD std::uint32_t worth(const unit_state& unit) const { return order_bits(unit.largest); }
};
static_assert(eviction_policy<peak>);

/// Tokens that some query head of the last 16 rows gives a share of a hundredth or more, however many.
struct noticed : tova {
  using hooks = hook_list<hook::observe>;
  static constexpr std::string_view name = "noticed";
  constexpr int observed_rows() const { return 16; }
  constexpr group_rule group() const { return group_rule::each; }  // a row of shares for each query head
  constexpr bool observes_decoding() const { return true; }        // whose queries the pipeline then keeps
  int observe(const observed_units& held, const eviction_moment&, float* worths) const {
    int stay = 0;
    for (int i = 0; i < held.units; ++i) {  // in the order of the text
      worths[i] = 0.0f;
      for (int r = 0; r < held.rows; ++r) worths[i] = std::max(worths[i], held.row(r)[i]);
      stay += worths[i] >= 0.01f;
    }
    return stay;
  }
};
static_assert(eviction_policy<noticed>);

/// noticed, which reads a prompt in blocks of 16 tokens, and keeps the budget of each.
struct briefly : noticed {
  using hooks = hook_list<hook::blocks, hook::observe>;
  static constexpr std::string_view name = "briefly";
  constexpr bool stages_prompt() const { return false; }
  constexpr int block(const eviction_limits&) const { return 16; }  // most prompt rows of a step
  constexpr int capacity(const eviction_limits& most) const { return most.budget + 16; }
};
static_assert(eviction_policy<briefly>);

/// noticed, whose layers' budgets are as their first heads' attention is spread.
struct spread : noticed {
  using hooks = hook_list<hook::allocate, hook::observe>;
  static constexpr std::string_view name = "spread";
  struct statistic {
    float largest;
  };  // trivially copyable
  statistic measure(const observed_units& held, const eviction_moment&) const {
    return {*std::max_element(held.row(0), held.row(0) + held.units)};
  }
  void allocate(const statistic* of, const eviction_heads& over, int* budgets) const {  // (layers, kv_heads)
    float sum = 0.0f;
    for (int layer = 0; layer < over.layers; ++layer) sum += 1.0f - of[layer * over.kv_heads].largest;
    for (int i = 0; i < over.layers * over.kv_heads; ++i) {
      const float part = (1.0f - of[i / over.kv_heads * over.kv_heads].largest) / sum;
      budgets[i] = static_cast<int>(part * static_cast<float>(over.layers * over.budget));
    }
  }
};
static_assert(eviction_policy<spread>);

/// tova whose tokens merge into the one before them, which then weighs as many as they are.
struct runs : tova {
  using hooks = hook_list<hook::merge>;
  static constexpr std::string_view name = "runs";
  struct head_memory {};  // of a head of a sequence; trivially copyable
  constexpr merge_rule merge_by() const { return merge_rule::as_many; }
  void merge(const merging_tokens& of, const eviction_moment&, head_memory&, merge_fate* fates) const {
    for (int i = of.staying; i < of.end(); ++i)  // behind those that stay, by the text
      for (int into = 0; into < of.staying && of.tokens[into] < of.tokens[i]; ++into) fates[i].into = into;
  }
};
static_assert(eviction_policy<runs>);

/// tova that keeps a quarter of its budget as it is, and the rest in 8 bits.
struct faded : tova {
  using hooks = hook_list<hook::demote>;
  static constexpr std::string_view name = "faded";
  constexpr int8_token codec() const { return {}; }
  constexpr int originals(const eviction_moment& at) const { return at.budget / 4; }
  constexpr int most_originals(const eviction_limits& most) const { return most.budget / 4 + 1; }
};
static_assert(eviction_policy<faded>);

/// tova whose shares count as much as the engine says of their tokens, and nothing where it says less than 0.
struct weighed : tova {
  using hooks = hook_list<hook::worths>;
  static constexpr std::string_view name = "weighed";
  struct unit_state {
    float share, weight;
  };
  constexpr void on_append(unit_state& unit, int) const { unit = {}; }
  constexpr void on_given(unit_state& unit, float worth) const { unit.weight = std::max(worth, 0.0f); }
  constexpr void on_prompt(unit_state& unit, const prompt_votes& votes, int token) const {
    unit.share = votes.shares[token];
  }
  constexpr void on_attended(unit_state& unit, float share, int) const { unit.share = share; }
  std::uint32_t worth(const unit_state& unit) const { return order_bits(unit.weight * unit.share); }
};
static_assert(eviction_policy<weighed>);

/// tova whose shares count by the size of their tokens' values.
struct valued : tova {
  using hooks = hook_list<hook::rows>;
  static constexpr std::string_view name = "valued";
  struct unit_state {
    float share, size;
  };
  constexpr void on_append(unit_state& unit, int) const { unit = {}; }
  void on_row(unit_state& unit, const float*, const float* value, int head_dim) const {
    for (int x = 0; x < head_dim; ++x) unit.size += std::fabs(value[x]);
  }
  constexpr void on_prompt(unit_state& unit, const prompt_votes& votes, int token) const {
    unit.share = votes.shares[token];
  }
  constexpr void on_attended(unit_state& unit, float share, int) const { unit.share = share; }
  std::uint32_t worth(const unit_state& unit) const { return order_bits(unit.size * unit.share); }
};
static_assert(eviction_policy<valued>);

/// Most tokens that heads attended to in a decode row, and the last row's output.
struct decoded {
  int most = 0;
  std::vector<float> out;
};

/// Decodes with a policy beyond its budget.
template <class Policy>
decoded decode() {
  host_backend backend({.threads = 1});
  evicting_pipeline<kv_shape<float, 64>, Policy> pipeline(
      {.model = {.layers = 2, .query_heads = 4, .kv_heads = 2},
       .budget = 24,
       .capacity = {.max_prompt = 40, .max_generated = 20},
       .plan = {{0}}},
      backend);
  const sequence_id sequence = pipeline.open();
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  decoded seen;
  const auto step = [&](const step_input& input, int rows) {
    std::vector<float> keys(static_cast<std::size_t>(rows * 2 * 64)), values(keys), queries(2 * keys.size()),
        out(queries), worths;
    if (takes_worths<Policy>) worths.assign(static_cast<std::size_t>(rows * 2), 0.0f);
    auto entered = pipeline.begin_step({input});
    for (int layer = 0; layer < 2; ++layer) {
      for (auto* of : {&keys, &values, &queries})
        for (float& x : *of) x = normal(random);
      for (float& x : worths) x = normal(random);
      entered.template append<float>(layer,
                                     {.keys = keys, .values = values, .queries = queries, .worths = worths});
      entered.attend(layer, out);
    }
    entered.end();
    for (int layer = 0; input.phase == step_phase::decode && layer < 2; ++layer)
      for (const int count : pipeline.report(layer)[sequence].attended_count)
        seen.most = std::max(seen.most, count);
    seen.out = out;
  };
  for (const int rows : {16, 16, 8}) step({sequence, rows, step_phase::prefill}, rows);
  for (int i = 0; i < 20; ++i) step({sequence}, 1);
  return seen;
}

}  // namespace

TEST_CASE("the methods that docs/add-a-method.md shows run", "[conforms]") {
  using quest = my_quest::pipeline<kv_shape<float, 64>>;
  CHECK(std::is_same_v<quest::settings,
                       retrieval_pipeline<kv_shape<float, 64>, min_max, mean_score, always>::settings>);
  const freekv::testing::eviction_definition definition{
      .worth = [](const freekv::testing::attended_rows& seen, int token) {
        double votes = 0.0, largest = 0.0;  // of the prompt's rows together, and of a row since
        for (int row = token; row < std::ssize(seen.shares); ++row) {
          const freekv::testing::doubles& shares = seen.shares[row];
          const double share = shares[token];
          if (row < seen.prompt)
            votes += seen.prompt_is_cut && row >= seen.prompt - 32 ? share : 0.0;
          else
            largest = std::max(largest, share);
        }
        return std::max(votes, largest);
      }};
  const std::vector<std::string> wrong = freekv::testing::conforms<peak>(definition);
  CHECK(wrong == std::vector<std::string>{});
  const freekv::testing::eviction_definition of_window{
      .worths =
          [](const freekv::testing::observed_tokens& held) {
            freekv::testing::doubles worths(held.tokens.size());
            for (const auto& row : held.rows)
              for (const auto& shares : row)  // of a query head
                for (int i = 0; i < std::ssize(worths); ++i) worths[i] = std::max(worths[i], shares[i]);
            return worths;
          },
      .staying =
          [](const freekv::testing::observed_tokens&, const freekv::testing::doubles& worths) {
            const auto is_noticed = [](double worth) { return worth >= 0.01; };
            return static_cast<int>(std::count_if(worths.begin(), worths.end(), is_noticed));
          }};
  CHECK(freekv::testing::conforms<noticed>(of_window) == std::vector<std::string>{});
  const freekv::testing::eviction_definition of_runs{
      .worth = [](const freekv::testing::attended_rows& seen,
                  int token) { return seen.shares.back()[token]; },
      .fates =
          [](const std::vector<freekv::testing::parted_tokens>& so_far) {
            const freekv::testing::parted_tokens& now = so_far.back();
            std::vector<merge_fate> fates(now.tokens.size());
            for (int i = now.staying; i < std::ssize(fates); ++i)
              for (int into = 0; into < now.staying; ++into)
                if (now.tokens[into] < now.tokens[i]) fates[i].into = into;
            return fates;
          },
      .merge_by = merge_rule::as_many};
  CHECK(freekv::testing::conforms<runs>(of_runs) == std::vector<std::string>{});
  const freekv::testing::eviction_definition of_weighed{
      .worth = [](const freekv::testing::attended_rows& seen, int token) {
        return std::max(seen.worths[token], 0.0) * seen.shares.back()[token];
      }};
  CHECK(freekv::testing::conforms<weighed>(of_weighed) == std::vector<std::string>{});
  const freekv::testing::eviction_definition of_valued{
      .worth = [](const freekv::testing::attended_rows& seen, int token) {
        double size = 0.0;
        for (const double x : seen.values[token]) size += std::fabs(x);
        return size * seen.shares.back()[token];
      }};
  CHECK(freekv::testing::conforms<valued>(of_valued) == std::vector<std::string>{});
  // Each does what its base does not.
  const decoded plain = decode<tova>(), few = decode<noticed>(), uneven = decode<spread>(),
                merged = decode<runs>(), cut_early = decode<briefly>(), by_gate = decode<weighed>(),
                coded = decode<faded>(), by_value = decode<valued>();
  CHECK(plain.most == 25);
  CHECK(few.most <= 25);
  CHECK(few.out != plain.out);
  CHECK(cut_early.most <= 25);
  CHECK(cut_early.out != few.out);
  CHECK(uneven.most > 25);
  CHECK(uneven.most <= 49);
  CHECK(coded.most == 25);
  CHECK(coded.out != plain.out);
  CHECK(merged.most == 25);
  CHECK(merged.out != plain.out);
  CHECK(by_gate.most == 25);
  CHECK(by_gate.out != plain.out);
  CHECK(by_value.most == 25);
  CHECK(by_value.out != plain.out);
}
