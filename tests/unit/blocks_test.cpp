// Prompts that are cut block by block: what blocks see of those before, what they take, what is refused.

#include <cmath>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../agreement.hpp"
#include "../catch.hpp"
#include "reports.hpp"
#include "steps.hpp"

namespace {

using namespace tests;
using Catch::Contains;
using freekv::epi_cache;
using freekv::settings_error;
using freekv::step_phase;
using freekv::usage_error;

using in_blocks = freekv::evicting_pipeline<freekv::kv_shape<freekv::half, 24>, epi_cache>;
using everything = freekv::retrieval_pipeline<freekv::kv_shape<freekv::half, 24>,
                                              freekv::every_layer<freekv::layer_kind::complete>>;
constexpr std::size_t row_bytes = 2 * 24 * sizeof(freekv::half);  // a KV head's keys and values of a token

/// Three layers, the first of them complete; 6 query heads on 2 KV heads.
in_blocks::settings settings_of(const epi_cache& eviction, int budget = 24) {
  in_blocks::settings s;
  s.model = {.layers = 3, .query_heads = 6, .kv_heads = 2};
  s.budget = budget;
  s.capacity.max_prompt = 150;
  s.capacity.max_generated = 20;
  s.capacity.max_sequences = 2;
  s.eviction = eviction;
  return s;
}

std::vector<int> both(std::vector<int> a, const std::vector<int>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// Rows of a text observe the last block of a sequence in all layers.
void probe(in_blocks& p, freekv::sequence_id id, const text& of, int first, int rows) {
  for (int layer = 0; layer < p.configuration().model.layers; ++layer)
    p.observe(id, layer, of.at(layer, first, rows).queries);
}

/// One layer in which tokens have keys, and rows queries, that look for each other by a number from 0 to 23;
/// a token's value is its number.
class marked {
 public:
  explicit marked(const epi_cache& eviction) : p_(settings(eviction), backend_) {}

  void mark(int token, int number) { marks_.insert({token, number}); }
  void look(int row, int number) { looks_.insert({row, number}); }
  /// Mean of the values that each row of a step attends to.
  std::vector<double> step(int tokens, step_phase phase = step_phase::prefill) {
    std::vector<float> keys, values, queries, out(count(tokens * 6 * 24));
    for (int row = done_; row < done_ + tokens; ++row) {
      add(keys, marks_, row, 2);
      add(queries, looks_, row, 6);
      values.insert(values.end(), 2 * 24, static_cast<float>(row));
    }
    auto begun = p_.begin_step({{id_, tokens, phase}});
    begun.append<float>(0, {.keys = keys, .values = values, .queries = queries});
    begun.attend(0, out);
    begun.end();
    done_ += tokens;
    most_ = std::max(most_, p_.kept_bytes(id_) / (2 * row_bytes));
    std::vector<double> means;
    for (std::size_t row = 0; row < out.size(); row += 6 * 24) {
      for (std::size_t i = row; i < row + 6 * 24; ++i)
        CHECK(std::fabs(static_cast<double>(out[i] - out[row])) < 1e-4);
      means.push_back(static_cast<double>(out[row]));
    }
    return means;
  }
  std::vector<double> decode() { return step(1, step_phase::decode); }
  /// So many probe rows that look for a number.
  void observe(int rows, int number) {
    std::vector<float> queries(count(rows * 6 * 24));
    for (std::size_t at = 0; at < queries.size(); at += 24) queries[at + count(number)] = 30.0f;
    p_.observe(id_, 0, queries);
  }
  /// Mean of the values that a row behind the prompt attends to, which looks for a number.
  double attend_behind(int number) {
    std::vector<float> queries(6 * 24), out(6 * 24), lse(6);
    for (std::size_t at = 0; at < queries.size(); at += 24) queries[at + count(number)] = 30.0f;
    p_.attend_behind(id_, 0, queries, out, lse);
    for (const float x : out) CHECK(std::fabs(static_cast<double>(x - out[0])) < 1e-4);
    return static_cast<double>(out[0]);
  }
  /// What the last row attended to.
  std::vector<int> attended() const {
    CHECK(tests::attended(p_, 0, id_, 0) == tests::attended(p_, 0, id_, 1));
    return tests::attended(p_, 0, id_, 0);
  }
  /// Tokens that a head has ever had.
  std::size_t most() const { return most_; }

 private:
  using numbered = std::set<std::pair<int, int>>;
  static in_blocks::settings settings(const epi_cache& eviction) {
    in_blocks::settings s = settings_of(eviction, 4);
    s.model.layers = 1;
    s.plan = {{0}};
    return s;
  }
  static void add(std::vector<float>& to, const numbered& of, int row, int heads) {
    for (int i = 0; i < heads * 24; ++i) to.push_back(of.count({row, i % 24}) != 0 ? 30.0f : 0.0f);
  }

  freekv::host_backend backend_;
  in_blocks p_;
  freekv::sequence_id id_ = p_.open();
  numbered marks_, looks_;
  int done_ = 0;
  std::size_t most_ = 0;
};

double mean_of(const std::vector<int>& tokens) {
  double sum = 0;
  for (const int token : tokens) sum += token;
  return sum / static_cast<double>(tokens.size());
}

}  // namespace

TEST_CASE("what left behind a block is not attended to in the next", "[eviction][blocks]") {
  marked m({.window = 2, .block_tokens = 8});
  // The first probes look for token 2. Row 9 and the second probes look for token 3, which has left, and for
  // token 10, which has come.
  m.mark(2, 0), m.mark(3, 1), m.mark(10, 1), m.look(9, 1), m.look(11, 1);
  const auto first = m.step(8);
  for (int row = 0; row < 8; ++row) CHECK(first[count(row)] == Approx(mean_of(from_to(0, row))).margin(1e-4));
  CHECK(m.attended() == from_to(0, 7));
  m.observe(2, 0);
  const auto second = m.step(8);
  // Of the others, which no probe looks for, the latest stay.
  CHECK(m.attended() == both({2, 5, 6, 7}, from_to(8, 15)));
  CHECK(second[0] == Approx(mean_of({2, 5, 6, 7, 8})).margin(1e-4));
  CHECK(second[1] == Approx(mean_of({2, 5, 6, 7, 8, 9})).margin(1e-4));
  CHECK(second[3] == Approx(10).margin(1e-4));
  CHECK(second[7] == Approx(mean_of(both({2, 5, 6, 7}, from_to(8, 15)))).margin(1e-4));
  m.observe(2, 1);
  m.step(5);
  CHECK(m.attended() == both({10, 13, 14, 15}, from_to(16, 20)));
  // The prompt's end is the last block's; then everything stays.
  CHECK(m.most() == 12);  // the budget and a block
  m.observe(1, 10);
  m.decode();
  CHECK(m.attended() == both(from_to(17, 20), {21}));
  for (int row = 0; row < 9; ++row) m.decode();
  CHECK(m.attended() == from_to(17, 30));
}

TEST_CASE("without probe rows a block's own last rows observe, and none before", "[eviction][blocks]") {
  for (const int window : {2, 6, 8, 30}) {
    INFO("window " << window);
    marked m({.window = window, .block_tokens = 8});
    // Rows of the first block look for token 1, its probes for 1, 2 and 3, rows of the second first for token
    // 2, its last two for 3; those between see all alike.
    for (const int token : {1, 2, 3}) m.mark(token, token), m.mark(token, 5);
    for (int row = 4; row < 8; ++row) m.look(row, 1);
    for (const int row : {8, 9}) m.look(row, 2);
    for (const int row : {12, 13}) m.look(row, 3);
    m.step(8);
    m.observe(window, 5);
    m.step(6);
    CHECK(m.attended() == both({1, 2, 3, 7}, from_to(8, 13)));
    m.step(1);
    const auto stays = window == 2 ? std::vector<int>{3, 11, 12, 13} : std::vector<int>{2, 3, 9, 10};
    CHECK(m.attended() == both(stays, {14}));
    // The last block is of one row, which looks for nothing and sees all alike, whatever those before saw.
    m.decode();
    CHECK(m.attended() == both(std::vector<int>(stays.end() - 3, stays.end()), {14, 15}));
  }
}

TEST_CASE("probe rows observe their block alone", "[eviction][blocks]") {
  for (const int rows : {1, 8, 20}) {
    INFO(rows << " probe rows");
    marked m({.window = 8, .block_tokens = 8});
    // What probes of the first block look for leaves behind the second, whose rows look for others. Where
    // there are fewer probes than rows that observe, the block's own, which see all alike, are among these.
    m.mark(2, 0), m.mark(1, 1), m.mark(6, 1);
    for (int row = 8; row < 10; ++row) m.look(row, 1);
    m.step(8);
    m.observe(rows, 0);
    m.step(2);
    CHECK(m.attended() == (rows == 1 ? both(from_to(0, 3), {8, 9}) : both({2, 5, 6, 7}, {8, 9})));
    m.step(1);
    CHECK(m.attended() == (rows == 1 ? std::vector<int>{1, 3, 8, 9, 10} : from_to(6, 10)));
  }
}

TEST_CASE("a prompt of one block, and the first of several, are full attention", "[eviction][blocks]") {
  const auto s = settings_of({.window = 8, .block_tokens = 60}, 60);
  const text source(s, 24, 170, 3), behind(s, 24, 20, 4);
  freekv::host_backend backend({.threads = 2, .bytes_per_thread = 64});
  in_blocks p(s, backend);
  everything full({.model = s.model, .capacity = {.max_tokens = 170}}, backend);
  const auto apart = [&](freekv::sequence_id id, freekv::sequence_id same, int tokens, step_phase phase) {
    const auto got = run_step(p, id, source, tokens, phase),
               want = run_step(full, same, source, tokens, phase);
    double worst = 0;
    for (std::size_t i = 0; i < got.out.size(); ++i)
      worst = std::max(worst, std::fabs(static_cast<double>(got.out[i]) - static_cast<double>(want.out[i])));
    return worst;
  };
  auto id = p.open(), same = full.open();
  CHECK(apart(id, same, 60, step_phase::prefill) < 2e-6);
  probe(p, id, behind, 0, 20);
  for (int step = 0; step < 10; ++step) CHECK(apart(id, same, 1, step_phase::decode) < 2e-6);
  CHECK(attended(p, 1, id, 0) == from_to(0, 69));
  p.release(id), full.release(same);
  id = p.open(), same = full.open();
  CHECK(apart(id, same, 60, step_phase::prefill) < 2e-6);
  CHECK(apart(id, same, 30, step_phase::prefill) < 2e-6);  // nothing has left
  CHECK(apart(id, same, 30, step_phase::prefill) > 1e-3);
}

TEST_CASE("rows behind a block attend to what is held of the prompt, and leave nothing",
          "[eviction][blocks]") {
  marked m({.window = 2, .block_tokens = 8});
  m.mark(2, 0), m.mark(9, 1);
  m.step(8);
  CHECK(m.attend_behind(3) == Approx(mean_of(from_to(0, 7))).margin(1e-4));
  CHECK(m.attend_behind(0) == Approx(2).margin(1e-4));
  m.observe(2, 0);
  m.step(8);
  CHECK(m.attend_behind(3) == Approx(mean_of(both({2, 5, 6, 7}, from_to(8, 15)))).margin(1e-4));
  m.observe(2, 1);
  m.step(1);
  CHECK(m.attend_behind(0) == Approx(mean_of({9, 13, 14, 15, 16})).margin(1e-4));
  CHECK(m.attend_behind(1) == Approx(9).margin(1e-4));
}

namespace {

/// With its own key and value a row behind a prompt attends as the decode row of that key and value does.
template <class Eviction>
void compare_behind(const Eviction& eviction) {
  using forgetful = freekv::evicting_pipeline<freekv::kv_shape<freekv::half, 24>, Eviction>;
  typename forgetful::settings s;
  s.model = {.layers = 2, .query_heads = 6, .kv_heads = 2};
  s.budget = 60;
  s.capacity = {.max_prompt = 60, .max_generated = 1};
  s.eviction = eviction;
  const text source(s, 24, 61, 11);
  freekv::host_backend backend({.threads = 3, .bytes_per_thread = 64});
  forgetful p(s, backend);
  const auto id = p.open();
  run_step(p, id, source, 40, step_phase::prefill);
  run_step(p, id, source, 20, step_phase::prefill);
  std::vector<std::vector<float>> outs, lses;
  for (int layer = 0; layer < 2; ++layer) {
    const auto at = source.at(layer, 58, 3);  // the last of three rows
    std::vector<float> out(at.queries.size()), lse(18);
    p.attend_behind(id, layer, at.queries, out, lse);
    std::vector<freekv::half> queries, halfs(at.queries.size());
    for (const float x : at.queries) queries.push_back(freekv::from_float<freekv::half>(x));
    p.template attend_behind<freekv::half, freekv::half>(id, layer, queries, halfs);
    for (std::size_t i = 0; i < out.size(); ++i)
      CHECK(std::fabs(freekv::to_float(halfs[i]) - out[i]) < 1e-2f);
    outs.push_back(out), lses.push_back(lse);
  }
  const auto decoded = run_step(p, id, source, 1, step_phase::decode);
  for (int layer = 0; layer < 2; ++layer)
    for (int head = 0; head < 6; ++head) {
      const auto at = source.at(layer, 60, 1);
      double score = 0;
      for (std::size_t x = 0; x < 24; ++x)
        score += static_cast<double>(at.queries[count(head * 24) + x]) *
                 static_cast<double>(at.keys[count(head / 3 * 24) + x]);
      score /= std::sqrt(24.0);
      const auto lse = static_cast<double>(lses[count(layer)][count(12 + head)]);
      const double own = 1 / (1 + std::exp(lse - score));
      const std::size_t to = count(layer * 6 + head);
      CHECK(static_cast<double>(decoded.lse[to]) == Approx(lse - std::log(1 - own)).margin(1e-4));
      for (std::size_t x = 0; x < 24; ++x)
        CHECK(static_cast<double>(decoded.out[to * 24 + x]) ==
              Approx((1 - own) * static_cast<double>(outs[count(layer)][count((12 + head) * 24) + x]) +
                     own * static_cast<double>(at.values[count(head / 3 * 24) + x]))
                  .margin(1e-4));
    }
}

}  // namespace

TEST_CASE("rows behind a prompt attend as its next row without its own key", "[eviction][blocks][probes]") {
  compare_behind(epi_cache{.window = 8, .block_tokens = 40});
  compare_behind(freekv::dapq{});
}

TEST_CASE("blocks depend neither on threads nor on other sequences", "[eviction][blocks]") {
  const auto s = settings_of({.window = 16, .block_tokens = 40});
  const text source(s, 24, 170, 5), other(s, 24, 170, 6), behind(s, 24, 64, 7);
  const std::vector<int> blocks{40, 3, 1, 40, 40, 26};
  const auto run = [&](in_blocks& p, bool beside) {
    const auto id = p.open();
    std::vector<sequence_result> results;
    freekv::sequence_id second{};
    if (beside) second = p.open();
    int done = 0;
    for (const int tokens : blocks) {
      if (beside)
        results.push_back(run_step(p, {{second, &other, 1 + done % 20, step_phase::prefill},
                                       {id, &source, tokens, step_phase::prefill}})[1]);
      else
        results.push_back(run_step(p, id, source, tokens, step_phase::prefill));
      done += tokens;
      if (beside) probe(p, second, other, done % 30, 8);
      if (tokens != 3) probe(p, id, behind, done % 40, tokens == 1 ? 5 : 16);
    }
    for (int step = 0; step < 20; ++step) results.push_back(run_step(p, id, source, 1, step_phase::decode));
    p.release(id);
    if (beside) p.release(second);
    return results;
  };
  freekv::host_backend one, three({.threads = 3, .bytes_per_thread = 64});
  in_blocks alone(s, one), threaded(s, three);
  const auto expected = run(alone, false);
  CHECK(run(alone, false) == expected);  // nothing is left of the first
  CHECK(run(alone, true) == expected);
  CHECK(run(threaded, true) == expected);
}

TEST_CASE("no head has more than its budget and a block, however long the prompt is",
          "[eviction][blocks][memory]") {
  freekv::host_backend backend;
  auto s = settings_of({.window = 8, .block_tokens = 32});
  s.plan = {{0}};
  const auto bytes_of = [&](int max_prompt) {
    s.capacity.max_prompt = max_prompt;
    return in_blocks::footprint(s, backend).bytes();
  };
  const auto few = bytes_of(150), many = bytes_of(1 << 20);
  CHECK(few.slots == 2 * 3 * 2 * (24 + 32) * row_bytes);  // sequences, layers, KV heads
  CHECK(few.staging == 0);
  CHECK(few.total() == many.total());
  const std::vector<std::int32_t> budgets{8, 40, 24};
  s.eviction.layer_budgets = budgets.data();
  CHECK(bytes_of(1 << 20).slots == 2 * 2 * (8 + 40 + 24 + 3 * 32) * row_bytes);
  s.capacity.max_prompt = 1000;

  const text source(s, 24, 1010, 8);
  for (const bool by_layer : {false, true}) {
    s.eviction.layer_budgets = by_layer ? budgets.data() : nullptr;
    in_blocks p(s, backend);
    const auto id = p.open();
    std::size_t most = 0;
    for (int done = 0; done < 1000; done += 25) {
      run_step(p, id, source, 25, step_phase::prefill);
      most = std::max(most, p.kept_bytes(id));
    }
    CHECK(most == 3 * 2 * (24 + 25) * row_bytes);  // these budgets are 24 on average
    decode(p, id, source, 10);
    for (int layer = 0; layer < 3; ++layer)
      CHECK(std::ssize(attended(p, layer, id, 1)) == (by_layer ? budgets[count(layer)] : 24) + 10);
  }
}

TEST_CASE("budgets of layers are by how much blocks matter to them", "[eviction][blocks]") {
  const auto budgets = [](std::vector<float> similarities, int budget, float alpha) {
    std::vector<std::int32_t> of(similarities.size());
    freekv::epi_cache_budgets(similarities.data(), static_cast<int>(similarities.size()), budget, alpha,
                              of.data());
    return of;
  };
  // Weights of 0, 1 and 1/2; to the power of 2 of 0, 1 and 1/4.
  CHECK(budgets({0.75f, 0.25f, 0.5f}, 30, 1.0f) == std::vector<std::int32_t>{7, 60, 30});
  CHECK(budgets({0.75f, 0.25f, 0.5f}, 30, 2.0f) == std::vector<std::int32_t>{7, 72, 18});
  CHECK(budgets({0.75f, 0.25f, 0.5f}, 3, 1.0f) == std::vector<std::int32_t>{1, 6, 3});
  CHECK(budgets({0.5f, 0.5f}, 30, 2.0f) == std::vector<std::int32_t>{30, 30});
  CHECK(budgets({0.5f}, 30, 2.0f) == std::vector<std::int32_t>{30});
}

TEST_CASE("where all layers keep everything a prompt has no blocks", "[eviction][blocks]") {
  auto s = settings_of({.window = 8, .block_tokens = 32});
  s.plan = {{3}};
  const text source(s, 24, 170, 12);
  freekv::host_backend backend;
  in_blocks p(s, backend);
  everything full({.model = s.model, .capacity = {.max_tokens = 170}}, backend);
  const auto id = p.open(), same = full.open();
  CHECK(p.most_prompt_rows() == 150);
  for (const int tokens : {100, 50}) {
    const auto got = run_step(p, id, source, tokens, step_phase::prefill);
    CHECK(same_bits(got.out, run_step(full, same, source, tokens, step_phase::prefill).out));
    probe(p, id, source, 0, 8);  // no notice is taken
  }
}

TEST_CASE("what blocks cannot be is refused and changes nothing", "[eviction][blocks][errors]") {
  const auto s = settings_of({.window = 8, .block_tokens = 32});
  const text source(s, 24, 170, 9), behind(s, 24, 20, 10);
  freekv::host_backend backend;
  in_blocks p(s, backend), same(s, backend);
  CHECK(p.name() == "epi_cache(8, blocks of 32), budget 24, complete_first(1), f16");
  CHECK(p.most_prompt_rows() == 32);
  const auto refuses = [](const char* words, const auto& call) {
    try {
      call();
      FAIL_CHECK("nothing was thrown: " << words);
    } catch (const usage_error& e) {
      CHECK_THAT(e.what(), Contains(words));
    }
  };
  const auto id = p.open(), other = same.open();
  refuses("sequence 0 brings 33 prompt rows, and epi_cache(8, blocks of 32) cuts blocks of 32; append", [&] {
    (void)p.begin_step({{id, 33, step_phase::prefill}});
  });
  std::vector<float> out(8 * 144);
  const auto attend = [&](std::span<float> to) { p.attend_behind(id, 1, behind.at(1, 0, 8).queries, to); };
  refuses("observe: sequence 0 has no prompt yet", [&] { probe(p, id, behind, 0, 8); });
  refuses("attend_behind: sequence 0 has no prompt yet", [&] { attend(out); });
  for (const int tokens : {32, 20}) {
    run_step(p, id, source, tokens, step_phase::prefill);
    run_step(same, other, source, tokens, step_phase::prefill);
    probe(p, id, behind, 0, 8);
    probe(same, other, behind, 0, 8);
    refuses("sequence 0 has probe rows in layer 1 already; give all of them at once",
            [&] { p.observe(id, 1, behind.at(1, 0, 8).queries); });
    attend(out);
    refuses("attention output", [&] { attend(std::span(out).first(8 * 144 - 1)); });
    refuses("attend_behind: sequence 0 is given 145 numbers of queries for layer 1; give one or more rows",
            [&] { p.attend_behind(id, 1, behind.at(1, 0, 8).queries.first(145), out); });
    refuses("sequence 0 brings 40 prompt rows", [&] { (void)p.begin_step({{id, 40, step_phase::prefill}}); });
  }
  CHECK(decode(p, id, source, 10) == decode(same, other, source, 10));
  refuses("observe: sequence 0 has decoded, and its prompt is cut", [&] { probe(p, id, behind, 0, 8); });
  refuses("attend_behind: sequence 0 has decoded, and its prompt is cut", [&] { attend(out); });
  refuses("sequence 0 has decoded and forgotten tokens", [&] {
    (void)p.begin_step({{id, 1, step_phase::prefill}});
  });

  const auto refuses_settings = [&](const char* words, const epi_cache& eviction) {
    try {
      in_blocks never(settings_of(eviction), backend);
      FAIL_CHECK("nothing was thrown: " << words);
    } catch (const settings_error& e) {
      CHECK_THAT(e.what(), Contains(words));
    }
  };
  refuses_settings("epi_cache observes 0 rows'", {.window = 0});
  refuses_settings("epi_cache cuts prompts by blocks of 0 tokens; give blocks of 1 to 536870912",
                   {.block_tokens = 0});
  refuses_settings("by blocks of 536870913 tokens", {.block_tokens = (1 << 29) + 1});
  constexpr std::int32_t without[] = {8, 0};
  refuses_settings("epi_cache: a budget of 0 tokens for layer 1 of those that forget",
                   {.layer_budgets = without});
}
