// Completion: what is not selected, by estimated masses and pages' values.

#include <algorithm>
#include <map>
#include <optional>

#include "../oracle/key_codes.hpp"
#include "../property/seeds.hpp"
#include "../sanitized.hpp"
#include "failing_file.hpp"
#include "random_settings.hpp"

namespace {

using namespace tests;
using freekv::layer_kind;
using freekv::step_phase;

constexpr int d = 64;

std::uint64_t seed(std::uint64_t of_test) { return 100 * number_from("FREEKV_SEED", 1) + of_test; }

/// Units' masses are known exactly: a basis of head_dim rows, unquantised.
using completed = freekv::retrieval_pipeline<
    freekv::kv_shape<float, d>, freekv::page_size<freekv::dynamic>, freekv::unit<freekv::dynamic>,
    freekv::key_subspace<d, 32>, freekv::any_of<freekv::cosine_drift, freekv::mass_deficit, freekv::never>,
    freekv::any_of<freekv::no_completion, freekv::page_values>,
    freekv::any_of<freekv::resident, freekv::in_place>, freekv::every_layer<layer_kind::retrieval>>;

struct sizes {
  int page, unit, sink, window, k, group, kv_heads, rows;
};

std::ostream& operator<<(std::ostream& out, const sizes& s) {
  return out << "page " << s.page << ", unit " << s.unit << ", sink " << s.sink << ", window " << s.window
             << ", k " << s.k << ", group " << s.group << ", " << s.kv_heads << " KV heads, " << s.rows
             << " rows a step";
}

sizes random_sizes(dice& dice) {
  sizes s;
  s.page = dice.one_of({8, 16, 32, 64});
  s.unit = dice.one_of({0, 0, 4, 8});
  s.sink = dice.below(3) * s.page;
  s.window = (1 + dice.below(3)) * s.page;
  s.k = 1 + dice.below(3);
  s.group = dice.one_of({1, 2, 3, 4, 5, 7, 8, 16});
  s.kv_heads = 1 + dice.below(2);
  s.rows = 1 + dice.below(3);
  return s;
}

completed::settings settings_of(const sizes& s, const std::vector<float>& basis, dice& dice) {
  completed::settings all;
  all.model = {.query_heads = s.group * s.kv_heads, .kv_heads = s.kv_heads};
  all.budget = {.sink = s.sink, .window = s.window, .selected_units = s.k};
  all.page = {{s.page}};
  all.unit = {{s.unit}};
  all.capacity = {.max_tokens = 20 * s.page, .max_sequences = 3, .max_decode_rows = s.rows};
  all.summary.basis = {basis.data(), 1, s.kv_heads, d, d};
  all.completion = freekv::page_values{.prompt_rows = dice.one_of({1, 5, 64}),
                                       .refreshed = dice.one_of({0.3f, 1.0f, 0.05f})};
  if (dice.below(2) == 0) all.route = freekv::in_place{};
  if (dice.below(3) == 0) all.attention.sink_logits = normals(dice, count(all.model.query_heads), 3.0f);
  if (dice.below(3) == 0) all.correction = freekv::never{};
  if (dice.below(3) == 0) all.correction = freekv::mass_deficit{.delta = 0.2f, .partial = true};
  if (dice.below(3) == 0) all.capacity.store_file = {.path = "/tmp"};
  return all;
}

/// Rows of one sequence: queries (tokens, query_heads, d), keys and values (tokens, kv_heads, d).
struct rows_of_text {
  std::vector<float> q, k, v;
  std::size_t query_row, key_row;

  rows_of_text(dice& dice, int tokens, const completed::settings& s)
      : query_row(count(s.model.query_heads * d)), key_row(count(s.model.kv_heads * d)) {
    q = normals(dice, count(tokens) * query_row, 1.5f);
    k = normals(dice, count(tokens) * key_row, 1.0f);
    v = normals(dice, count(tokens) * key_row, 1.0f);
  }
  /// Other numbers from a token on.
  void change_from(dice& dice, int token) {
    for (const auto& [of, row] : {std::pair{&q, query_row}, {&k, key_row}, {&v, key_row}}) {
      const std::size_t first = count(token) * row;
      std::ranges::copy(normals(dice, of->size() - first, 1.5f), of->begin() + static_cast<long>(first));
    }
  }
  std::span<const float> part(const std::vector<float>& of, std::size_t row, int first, int tokens) const {
    return std::span(of).subspan(count(first) * row, count(tokens) * row);
  }
  const float* query(int token, int head) const { return &q[count(token) * query_row + count(head * d)]; }
  const float* key(int token, int head) const { return &k[count(token) * key_row + count(head * d)]; }
  const float* value(int token, int head) const { return &v[count(token) * key_row + count(head * d)]; }
};

struct output {
  std::vector<float> out, lse;
  bool operator==(const output& other) const {
    return same_bits(out, other.out) && same_bits(lse, other.lse);
  }
};

template <class Pipeline>
output run(Pipeline& pipeline, freekv::sequence_id id, const rows_of_text& text, int tokens,
           step_phase phase) {
  const int first = pipeline.tokens(id);
  auto step = pipeline.begin_step({{id, tokens, phase}});
  step.template append<float>(0, {.keys = text.part(text.k, text.key_row, first, tokens),
                                  .values = text.part(text.v, text.key_row, first, tokens),
                                  .queries = text.part(text.q, text.query_row, first, tokens)});
  output result;
  if (phase == step_phase::decode) {
    result = {std::vector<float>(count(tokens) * text.query_row),
              std::vector<float>(count(tokens) * text.query_row / d)};
    step.attend(0, result.out, result.lse);
  }
  step.end();
  return result;
}

/// Appends prompt rows without queries, which weigh no page.
void append_without_queries(completed& pipeline, freekv::sequence_id id, const rows_of_text& text,
                            int tokens) {
  const int first = pipeline.tokens(id);
  auto step = pipeline.begin_step({{id, tokens, step_phase::prefill}});
  step.append<float>(0, {.keys = text.part(text.k, text.key_row, first, tokens),
                         .values = text.part(text.v, text.key_row, first, tokens)});
  step.end();
}

/// The definition, in float64: pages' values of one sequence, and attention that they complete.
class definition {
 public:
  definition(const completed::settings& s, const rows_of_text& text)
      : s_(&s), text_(&text), values_(count(s.model.kv_heads)) {
    freekv::resolve(s.completion, [&]<class C>(const C& chosen) {
      if constexpr (C::completes) completion_ = chosen;
    });
  }

  void prompt(int before, int tokens) {
    for (int head = 0; head < s_->model.kv_heads; ++head) {
      std::map<int, std::vector<double>> sums;
      std::map<int, double> weights;
      for (int row = std::max(0, tokens - completion_.prompt_rows); row < tokens; ++row)
        for (int g = 0; g < group(); ++g) {
          const int length = before + row + 1;
          std::vector<double> w(count(length));
          for (int t = 0; t < length; ++t) w[count(t)] = score(before + row, head, g, t);
          const double lse = log_sum(with_logit(w, head, g));
          for (int t = 0; t < length; ++t) {
            const double share = std::exp(w[count(t)] - lse);
            auto& sum = sums[t / page()];
            sum.resize(d);
            weights[t / page()] += share;
            for (int i = 0; i < d; ++i) sum[count(i)] += share * double{text_->value(t, head)[i]};
          }
        }
      for (auto& [p, sum] : sums) {
        for (double& x : sum) x /= weights[p];
        values_[count(head)][p] = rounded(sum);
      }
    }
  }

  /// Values of pages that have lost a token.
  void truncate(int tokens) {
    for (auto& of_head : values_) of_head.erase(of_head.lower_bound(tokens / page()), of_head.end());
  }

  struct expected {
    std::vector<double> out;
    double lse, within;  // what the rounding of pages' values may change
  };
  expected attend(int row, int before, int head, int g, const std::vector<int>& selected) const {
    const int length = before + row + 1, units = page() / unit();
    const auto roles = freekv::roles_at(before + 1, s_->budget, page());
    std::vector<double> scores;
    std::vector<std::vector<double>> entries;
    const auto add_tokens = [&](int first, int end) {
      for (int t = first; t < end; ++t) {
        scores.push_back(score(before + row, head, g, t));
        entries.emplace_back(text_->value(t, head), text_->value(t, head) + d);
      }
    };
    add_tokens(0, std::min(roles.sink_end * page(), length));
    add_tokens(roles.window_begin * page(), length);
    for (const int one : selected) add_tokens(one * unit(), (one + 1) * unit());
    const std::size_t exact = scores.size();
    double quantum = 0.0;
    for (int one = roles.sink_end * units; one < roles.window_begin * units; ++one) {
      const auto value = values_[count(head)].find(one / units);
      if (value == values_[count(head)].end() || std::count(selected.begin(), selected.end(), one) != 0)
        continue;
      std::vector<double> w;
      for (int t = one * unit(); t < (one + 1) * unit(); ++t) w.push_back(score(before + row, head, g, t));
      scores.push_back(log_sum(w));
      entries.push_back(value->second);
      for (const double x : value->second) quantum = std::max(quantum, std::fabs(x) / 127);
    }
    expected result{std::vector<double>(d), log_sum(with_logit(scores, head, g)), 0.0};
    double tail = 0.0;
    for (std::size_t e = 0; e < scores.size(); ++e) {
      const double share = std::exp(scores[e] - result.lse);
      tail += e >= exact ? share : 0.0;
      for (int i = 0; i < d; ++i) result.out[count(i)] += share * entries[e][count(i)];
    }
    result.within = 1.01 * quantum * tail;
    return result;
  }

  /// After the last row of a step has attended.
  void refresh(int row, int before, int head, const std::vector<int>& selected) {
    const int length = before + row + 1;
    const auto roles = freekv::roles_at(before + 1, s_->budget, page());
    std::vector<int> pages;
    for (int p = roles.window_begin; p * page() < length; ++p) pages.push_back(p);
    if (unit() == page()) pages.insert(pages.end(), selected.begin(), selected.end());
    for (const int p : pages) {
      std::vector<double> fresh(d);
      for (int g = 0; g < group(); ++g) {
        std::vector<double> w;
        for (int t = p * page(); t < std::min(length, (p + 1) * page()); ++t)
          w.push_back(score(before + row, head, g, t));
        const double lse = log_sum(w);
        for (std::size_t t = 0; t < w.size(); ++t)
          for (int i = 0; i < d; ++i)
            fresh[count(i)] += std::exp(w[t] - lse) *
                               double{text_->value(p * page() + static_cast<int>(t), head)[i]} / group();
      }
      if (const auto old = values_[count(head)].find(p); old != values_[count(head)].end())
        for (int i = 0; i < d; ++i)
          fresh[count(i)] = double{completion_.refreshed} * fresh[count(i)] +
                            (1.0 - double{completion_.refreshed}) * old->second[count(i)];
      values_[count(head)][p] = rounded(fresh);
    }
  }

 private:
  int page() const { return s_->page.tokens; }
  int unit() const { return s_->unit_tokens(); }
  int group() const { return s_->model.group(); }
  double score(int row, int head, int g, int token) const {
    return double{s_->attention.scale} * oracle::dot(std::span(text_->query(row, head * group() + g), d),
                                                     std::span(text_->key(token, head), d));
  }
  std::vector<double> with_logit(std::vector<double> scores, int head, int g) const {
    if (!s_->attention.sink_logits.empty())
      scores.push_back(double{s_->attention.sink_logits[count(head * group() + g)]});
    return scores;
  }
  static double log_sum(const std::vector<double>& x) {
    const double top = *std::max_element(x.begin(), x.end());
    double sum = 0.0;
    for (const double one : x) sum += std::exp(one - top);
    return top + std::log(sum);
  }
  /// In 8 bits, as they are kept.
  static std::vector<double> rounded(std::vector<double> x) {
    double largest = 0.0;
    for (const double one : x) largest = std::max(largest, std::fabs(one));
    for (double& one : x) one = std::rint(one * 127 / largest) * largest / 127;
    return x;
  }

  const completed::settings* s_;
  const rows_of_text* text_;
  freekv::page_values completion_;
  std::vector<std::map<int, std::vector<double>>> values_;  // by KV head, by page
};

std::vector<int> attended_of(const completed& pipeline, freekv::sequence_id id, int head) {
  const auto report = pipeline.report(0)[id];
  const std::size_t stride = report.attended.size() / report.attended_count.size();
  const auto first = report.attended.begin() + static_cast<long>(count(head) * stride);
  return {first, first + report.attended_count[count(head)]};
}

/// Values that are all alike in a page, and numbers of 8 bits: what the page's value is kept as.
void make_pages_alike(rows_of_text& text, dice& dice, int page, int kv_heads) {
  for (int head = 0; head < kv_heads; ++head)
    for (std::size_t t = 0; t * text.key_row < text.v.size(); ++t) {
      float* const row = &text.v[t * text.key_row + count(head * d)];
      if (t % count(page) == 0) {
        for (int i = 0; i < d; ++i) row[i] = static_cast<float>(dice.below(255) - 127) / 128.0f;
        row[dice.below(d)] = 127.0f / 128.0f;
      } else {
        std::copy_n(row - text.key_row, d, row);
      }
    }
}

}  // namespace

TEST_CASE("completed attention is what its definition says, row by row", "[completion]") {
  dice dice(seed(71));
  int outputs = 0, off = 0, tails = 0, cut = 0;
  for (int trial = 0; trial < some_of(60); ++trial) {
    const sizes of = random_sizes(dice);
    const auto basis = random_basis(dice, of.kv_heads, d, d);
    freekv::host_backend backend({.threads = 1 + dice.below(3), .overlap = dice.below(2) == 0});
    completed pipeline(settings_of(of, basis, dice), backend);
    const auto& s = pipeline.configuration();
    rows_of_text text(dice, s.capacity.max_tokens, s);
    const auto id = pipeline.open();
    definition expected(s, text);
    INFO(of << ", " << pipeline.name() << ", trial " << trial);
    for (int left = 6 * of.page + dice.below(6 * of.page), tokens; left > 0; left -= tokens) {
      tokens = dice.below(3) == 0 ? std::min(left, 1 + dice.below(2 * of.page)) : left;
      expected.prompt(pipeline.tokens(id), tokens);
      run(pipeline, id, text, tokens, step_phase::prefill);
    }
    for (int step = 0; step < 12; ++step) {
      if (step == 5 && dice.below(2) == 0) {  // another text from a token on, whose pages nobody weighs
        const int tokens = pipeline.tokens(id) - 1 - dice.below(4 * of.page);
        pipeline.truncate(id, tokens);
        expected.truncate(tokens);
        text.change_from(dice, tokens);
        const int room = s.capacity.max_tokens - tokens - 7 * of.rows;
        append_without_queries(pipeline, id, text, std::min(room, of.window + dice.below(4 * of.page)));
        ++cut;
      }
      const int before = pipeline.tokens(id), rows = 1 + dice.below(of.rows);
      const output got = run(pipeline, id, text, rows, step_phase::decode);
      for (int head = 0; head < of.kv_heads; ++head) {
        const auto selected = attended_of(pipeline, id, head);
        for (int row = 0; row < rows; ++row)
          for (int g = 0; g < of.group; ++g) {
            const auto wanted = expected.attend(row, before, head, g, selected);
            const auto at = count((row * of.kv_heads + head) * of.group + g);
            if (!is_near(double{got.lse[at]}, wanted.lse, 1e-4))
              FAIL("lse " << got.lse[at] << " for " << wanted.lse);
            tails += wanted.within > 1e-4;
            for (int i = 0; i < d; ++i, ++outputs) {
              const double difference = std::fabs(double{got.out[at * d + count(i)]} - wanted.out[count(i)]);
              if (!(difference <= wanted.within + 1e-4)) FAIL("output off by " << difference);
              off += difference > 1e-4;
            }
          }
        expected.refresh(rows - 1, before, head, selected);
      }
    }
  }
  // A number that lies between two of 8 bits may be rounded either way.
  INFO(off << " of " << outputs << " numbers are off by a page value's rounding, " << tails
           << " rows have tails");
  CHECK(off < outputs / 100);
  CHECK(tails > some_of(100));
  CHECK(cut > some_of(10) / 2);
}

TEST_CASE("completed attention with scales that are powers of two is that without, bit for bit",
          "[completion]") {
  dice dice(seed(73));
  for (int trial = 0; trial < some_of(20); ++trial) {
    const sizes of = random_sizes(dice);
    const auto basis = random_basis(dice, of.kv_heads, d, d);
    auto stored_basis = basis;
    for (int head = 0; head < of.kv_heads; ++head)
      for (int i = 0; i < d; ++i) stored_basis[count(head * (1 + d) * d + i)] /= head == 0 ? 0.25f : 8.0f;
    freekv::host_backend backend({.threads = 1 + dice.below(3), .overlap = dice.below(2) == 0});
    const auto s = settings_of(of, basis, dice);
    auto scaled = s;
    scaled.summary.basis.data = stored_basis.data();
    scaled.attention.key_scales = {0.25f, 8.0f};
    scaled.attention.value_scales = {4.0f, 0.5f};
    scaled.attention.key_scales.resize(count(of.kv_heads));
    scaled.attention.value_scales.resize(count(of.kv_heads));
    completed plain(s, backend), other(scaled, backend);
    const rows_of_text text(dice, s.capacity.max_tokens, plain.configuration());
    const auto id = plain.open(), same_id = other.open();
    INFO(of << ", " << plain.name() << ", trial " << trial);
    const int prompt = 6 * of.page + dice.below(6 * of.page);
    run(plain, id, text, prompt, step_phase::prefill);
    run(other, same_id, text, prompt, step_phase::prefill);
    for (int step = 0; step < 12; ++step) {
      const int rows = 1 + dice.below(of.rows);
      REQUIRE(run(plain, id, text, rows, step_phase::decode) ==
              run(other, same_id, text, rows, step_phase::decode));
    }
  }
}

TEST_CASE("where a page's values are alike, completed attention is attention to everything", "[completion]") {
  dice dice(seed(72));
  int rows_compared = 0;
  for (int trial = 0; trial < some_of(40); ++trial) {
    const sizes of = random_sizes(dice);
    const auto basis = random_basis(dice, of.kv_heads, d, d);
    freekv::host_backend backend({.threads = 1 + dice.below(3), .overlap = dice.below(2) == 0});
    auto given = settings_of(of, basis, dice);
    given.capacity.max_resident = 2;
    given.attention.sink_logits.clear();
    completed pipeline(given, backend);
    const auto& s = pipeline.configuration();
    rows_of_text text(dice, s.capacity.max_tokens, s);
    make_pages_alike(text, dice, of.page, of.kv_heads);
    INFO(of << ", " << pipeline.name() << ", trial " << trial);
    auto id = pipeline.open();
    run(pipeline, id, text, 3 * of.page + dice.below(8 * of.page), step_phase::prefill);
    for (int event = 0; event < 30 && pipeline.tokens(id) + of.rows <= s.capacity.max_tokens; ++event) {
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
          pipeline.truncate(id, std::max(1, pipeline.tokens(id) - dice.below(of.rows + 1)));
          break;
        default:
          break;
      }
      const int before = pipeline.tokens(id), rows = 1 + dice.below(of.rows);
      const output got = run(pipeline, id, text, rows, step_phase::decode);
      for (int row = 0; row < rows; ++row)
        for (int head = 0; head < s.model.query_heads; ++head, ++rows_compared) {
          std::vector<std::span<const float>> keys, values;
          for (int t = 0; t <= before + row; ++t) {
            keys.emplace_back(text.key(t, head / of.group), d);
            values.emplace_back(text.value(t, head / of.group), d);
          }
          const auto full = oracle::attend(std::span(text.query(before + row, head), d), keys, values,
                                           double{s.attention.scale});
          const auto at = count(row * s.model.query_heads + head);
          if (!is_near(double{got.lse[at]}, full.lse[0], 1e-4))
            FAIL("lse " << got.lse[at] << " for " << full.lse[0]);
          for (int i = 0; i < d; ++i)
            if (!is_near(double{got.out[at * d + count(i)]}, full.out[count(i)], 1e-4))
              FAIL("output " << got.out[at * d + count(i)] << " for " << full.out[count(i)]);
        }
    }
  }
  CHECK(rows_compared > some_of(5000));
}

TEST_CASE("what a correction has scored completes attention as what attention scores itself, bit for bit",
          "[completion]") {
  // Heads that select together leave nothing to attention; one head alone selects as it would by itself.
  using by_layer = completed::with<freekv::per_layer>;
  dice dice(seed(78));
  for (int trial = 0; trial < some_of(30); ++trial) {
    sizes of = random_sizes(dice);
    of.kv_heads = 1;
    const auto basis = random_basis(dice, 1, d, d);
    auto s = settings_of(of, basis, dice);
    if (dice.below(2) == 0) s.correction = freekv::cosine_drift{.tau = 2.0f};  // in every step
    freekv::host_backend backend({.threads = 1 + dice.below(3)});
    completed alone(s, backend);
    by_layer together({.model = s.model,
                       .budget = s.budget,
                       .capacity = s.capacity,
                       .attention = s.attention,
                       .page = s.page,
                       .unit = s.unit,
                       .summary = s.summary,
                       .correction = s.correction,
                       .completion = s.completion,
                       .route = s.route},
                      backend);
    rows_of_text text(dice, s.capacity.max_tokens, s);
    INFO(of << ", " << alone.name() << ", trial " << trial);
    const int tokens = 6 * of.page + dice.below(6 * of.page);
    if (dice.below(3) == 0)  // a query head of one row, which is no matter for the step's other rows
      text.q[count(tokens + dice.below(3)) * text.query_row + count(dice.below(of.group) * d)] = quiet_nan;
    const auto first = alone.open(), second = together.open();
    run(alone, first, text, tokens, step_phase::prefill);
    run(together, second, text, tokens, step_phase::prefill);
    for (int step = 0; step < 8; ++step) {
      const int rows = 1 + dice.below(of.rows);
      CHECK(run(alone, first, text, rows, step_phase::decode) ==
            run(together, second, text, rows, step_phase::decode));
    }
  }
}

TEST_CASE("a query head of NaN among a prompt's last rows leaves pages' values to the others",
          "[completion]") {
  dice dice(seed(79));
  for (int trial = 0; trial < some_of(10); ++trial) {
    sizes of = random_sizes(dice);
    of.group = dice.one_of({2, 3, 8});
    const auto basis = random_basis(dice, of.kv_heads, d, d);
    const auto s = settings_of(of, basis, dice);
    freekv::host_backend backend;
    completed pipeline(s, backend);
    const rows_of_text text(dice, s.capacity.max_tokens, s);
    rows_of_text spoilt = text;
    spoilt.q[count(8 * of.page - 1) * text.query_row] = quiet_nan;  // of the prompt's last row
    INFO(of << ", " << pipeline.name() << ", trial " << trial);
    std::vector<output> got;
    for (const rows_of_text* rows : {&text, &std::as_const(spoilt)}) {
      const auto id = pipeline.open();
      append_without_queries(pipeline, id, *rows, 5 * of.page);
      run(pipeline, id, *rows, 3 * of.page, step_phase::prefill);
      got.push_back(run(pipeline, id, text, 1, step_phase::decode));
    }
    // With exact scores a log-sum-exp has the masses of all pages that have a value.
    for (std::size_t head = 0; head < got[0].lse.size(); ++head)
      CHECK(is_near(got[0].lse[head], got[1].lse[head], 1e-5));
  }
}

TEST_CASE("query heads of NaN in a step leave pages' values to the others, or as they were", "[completion]") {
  dice dice(seed(85));
  for (int trial = 0; trial < some_of(10); ++trial) {
    sizes of = random_sizes(dice);
    of.group = 2, of.unit = 0;
    const auto basis = random_basis(dice, of.kv_heads, d, d);
    auto s = settings_of(of, basis, dice);
    s.completion = freekv::page_values{.refreshed = 1.0f};
    freekv::host_backend backend;
    completed pipeline(s, backend);
    rows_of_text text(dice, s.capacity.max_tokens, s);
    make_pages_alike(text, dice, of.page, of.kv_heads);
    INFO(of << ", " << pipeline.name() << ", trial " << trial);
    std::vector<output> got;
    for (int heads = 0; heads <= 2; ++heads) {
      rows_of_text spoilt = text;
      for (int head = 0; head < of.kv_heads; ++head)
        for (int g = 0; g < heads; ++g)
          spoilt.q[count(9 * of.page) * text.query_row + count((head * 2 + g) * d)] = quiet_nan;
      const auto id = pipeline.open();
      run(pipeline, id, spoilt, 9 * of.page, step_phase::prefill);
      run(pipeline, id, spoilt, 1, step_phase::decode);
      got.push_back(run(pipeline, id, spoilt, 1, step_phase::decode));
    }
    // Where a page's values are alike, and scores exact, it is full attention whatever is selected.
    for (const output& other : {got[1], got[2]}) {
      for (std::size_t i = 0; i < other.lse.size(); ++i) CHECK(is_near(other.lse[i], got[0].lse[i], 1e-4));
      for (std::size_t i = 0; i < other.out.size(); ++i) CHECK(is_near(other.out[i], got[0].out[i], 1e-3));
    }
  }
}

TEST_CASE("a fork completes as its parent does, bit for bit, whoever else is in the step", "[completion]") {
  dice dice(seed(73));
  for (int trial = 0; trial < some_of(10); ++trial) {
    const sizes of = random_sizes(dice);
    const auto basis = random_basis(dice, of.kv_heads, d, d);
    const auto given = settings_of(of, basis, dice);
    freekv::host_backend one_thread({.threads = 1}), more({.threads = 3, .overlap = true});
    completed alone(given, one_thread), shared(given, more);
    const auto& s = alone.configuration();
    const rows_of_text text(dice, s.capacity.max_tokens, s), other(dice, s.capacity.max_tokens, s);
    INFO(of << ", " << alone.name() << ", trial " << trial);
    const int tokens = 6 * of.page + dice.below(4 * of.page);
    const auto first = alone.open(), second = shared.open(), beside = shared.open();
    run(alone, first, text, tokens, step_phase::prefill);
    run(shared, beside, other, tokens / 2 + 1, step_phase::prefill);
    run(shared, second, text, tokens, step_phase::prefill);
    const auto parent = second;
    auto child = parent;
    for (int step = 0; step < 10; ++step) {
      if (step == 4) child = shared.fork(parent);
      const output expected = run(alone, first, text, 1, step_phase::decode);
      run(shared, beside, other, 1, step_phase::decode);
      CHECK(run(shared, parent, text, 1, step_phase::decode) == expected);
      if (child != parent) CHECK(run(shared, child, text, 1, step_phase::decode) == expected);
    }
  }
}

TEST_CASE("whichever read fails, the call can be repeated and completes alike, bit for bit", "[completion]") {
  dice dice(seed(79));
  const sizes of{8, 0, 8, 16, 2, 2, 2, 2};
  const auto basis = random_basis(dice, of.kv_heads, d, d);
  auto given = settings_of(of, basis, dice);
  given.completion = freekv::page_values{};
  given.route = freekv::in_place{};
  given.capacity.store_file = failing_file::options();
  const rows_of_text one(dice, 160, given), two(dice, 160, given);
  freekv::host_backend backend({.overlap = false});
  struct step_kind {
    int tokens;
    step_phase phase;
  };
  // The second prompt ends in the page whose rows are kept where its first page's are.
  std::vector<step_kind> steps{{60, step_phase::prefill}, {18, step_phase::prefill}};
  steps.resize(8, {of.rows, step_phase::decode});
  int refused = 0;
  const auto outputs = [&](std::size_t failing_step, int failing, int& failed, bool then_of_pages = false) {
    completed pipeline(given, backend);
    const auto a = pipeline.open(), b = pipeline.open();
    std::vector<float> all;
    for (std::size_t nth = 0; nth < steps.size(); ++nth) {
      const auto [tokens, phase] = steps[nth];
      const int before = pipeline.tokens(a);
      const auto both = [&](std::vector<float> rows_of_text::*rows, std::size_t row) {
        std::vector<float> joined;
        for (const rows_of_text* text : {&one, &two}) {
          const auto part = text->part(text->*rows, row, before, tokens);
          joined.insert(joined.end(), part.begin(), part.end());
        }
        return joined;
      };
      const auto keys = both(&rows_of_text::k, one.key_row), values = both(&rows_of_text::v, one.key_row),
                 queries = both(&rows_of_text::q, one.query_row);
      std::vector<float> out(queries.size());
      const auto insist = [&](const auto& call) {
        try {
          call();
        } catch (const freekv::store_error&) {
          ++failed;
          call();
        }
      };
      auto step = pipeline.begin_step({{a, tokens, phase}, {b, tokens, phase}});
      if (nth == failing_step) failing_file::reads_left = failing;
      if (nth == failing_step && then_of_pages) {
        CHECK_THROWS_AS(step.append<float>(0, {.keys = keys, .values = values, .queries = queries}),
                        freekv::store_error);
        failing_file::reads_left = -1;
        const std::vector<std::int32_t> ids(static_cast<std::size_t>(before + tokens));
        const auto row = static_cast<std::int64_t>(one.key_row);
        const freekv::paged_blocks<const float> table{.tensor = {.keys = one.k.data(),
                                                                 .values = one.v.data(),
                                                                 .block_stride = row,
                                                                 .token_stride = row,
                                                                 .head_stride = d,
                                                                 .block_tokens = 1},
                                                      .ids = ids};
        const freekv::paged_blocks<const float> tables[] = {table, table};
        try {
          step.append_from<float>(0, tables);
        } catch (const freekv::usage_error& e) {
          CHECK_THAT(e.what(), Catch::Contains("repeat append"));
          ++refused;
        }
        return all;
      }
      insist([&] { step.append<float>(0, {.keys = keys, .values = values, .queries = queries}); });
      if (phase == step_phase::decode) insist([&] { step.attend(0, out); });
      failing_file::reads_left = -1;
      step.end();
      all.insert(all.end(), out.begin(), out.end());
    }
    return all;
  };
  int none = 0;
  const auto expected = outputs(0, -1, none);
  for (const std::size_t step : {1, 2, 3})
    for (int failing = 0, failed = 1; failed > 0; ++failing) {
      failed = 0;
      INFO("read " << failing << " of step " << step);
      CHECK(same_bits(outputs(step, failing, failed), expected));
      CHECK((failed > 0 || failing >= 8));  // of two heads of two sequences, twice
      // Pages whose rows are there, and that are not weighed yet, are no place for other rows.
      if (step == 1 && failed > 0) outputs(step, failing, failed, true);
    }
  CHECK(refused > 0);
}

TEST_CASE("rows that attend on several threads complete as on one, bit for bit", "[completion]") {
  dice dice(seed(80));
  const sizes of{8, 0, 8, 16, 3, 2, 2, 8};
  const auto basis = random_basis(dice, of.kv_heads, d, d);
  auto given = settings_of(of, basis, dice);
  given.completion = freekv::page_values{};
  freekv::host_backend one({.threads = 1}), more({.threads = 3, .bytes_per_thread = 1});
  completed alone(given, one), shared(given, more);
  const rows_of_text text(dice, given.capacity.max_tokens, given);
  const auto first = alone.open(), second = shared.open();
  run(alone, first, text, 80, step_phase::prefill);
  run(shared, second, text, 80, step_phase::prefill);
  for (int step = 0; step < 8; ++step)
    CHECK(run(shared, second, text, of.rows, step_phase::decode) ==
          run(alone, first, text, of.rows, step_phase::decode));
}

TEST_CASE("without queries of a prompt, or without completion, only what is selected is attended to",
          "[completion]") {
  dice dice(seed(74));
  const sizes of{8, 0, 8, 16, 2, 3, 2, 1};
  const auto basis = random_basis(dice, of.kv_heads, d, d);
  auto given = settings_of(of, basis, dice);
  given.capacity.store_file.reset();
  freekv::host_backend backend;
  completed with(given, backend);
  given.completion = freekv::no_completion{};
  completed without(given, backend);
  CHECK_THAT(with.name(), Catch::Contains("page_values("));
  CHECK_THAT(without.name(), !Catch::Contains("completion"));
  const std::size_t pages =
      count(with.configuration().max_pages() * with.configuration().capacity.max_sequences);
  CHECK(with.bytes().summaries - without.bytes().summaries >= pages * count(of.kv_heads) * (d + 4));
  CHECK(with.bytes().summaries - without.bytes().summaries < pages * count(of.kv_heads) * (d + 4) + 256);

  const rows_of_text text(dice, 160, with.configuration());
  std::vector<output> first_steps;
  for (completed* pipeline : {&with, &without}) {
    const auto id = pipeline->open();
    append_without_queries(*pipeline, id, text, 100);
    first_steps.push_back(run(*pipeline, id, text, 1, step_phase::decode));
  }
  for (std::size_t i = 0; i < first_steps[0].out.size(); ++i)
    CHECK(is_near(double{first_steps[0].out[i]}, double{first_steps[1].out[i]}, 1e-5));
}

TEST_CASE("a sequence knows nothing of the values of the one whose place it takes, nor of its prefix's",
          "[completion]") {
  dice dice(seed(83));
  const sizes of{8, 0, 8, 16, 2, 3, 2, 1};
  const auto basis = random_basis(dice, of.kv_heads, d, d);
  const auto given = settings_of(of, basis, dice);
  freekv::host_backend backend;
  completed fresh(given, backend), used(given, backend);
  const rows_of_text text(dice, 160, used.configuration());
  const auto expected_of = [&](completed& pipeline, freekv::sequence_id id) {
    append_without_queries(pipeline, id, text, 100 - pipeline.tokens(id));
    return run(pipeline, id, text, 1, step_phase::decode);
  };
  const output expected = expected_of(fresh, fresh.open());
  auto ids = {used.open(), used.open(), used.open()};  // as many as there are
  for (const auto id : ids) run(used, id, text, 100, step_phase::prefill);
  const auto prefix = used.keep_prefix(*ids.begin(), 64);
  for (const auto id : ids) CHECK_FALSE(run(used, id, text, 1, step_phase::decode) == expected);
  for (const auto id : ids) used.release(id);
  CHECK(expected_of(used, used.open()) == expected);
  CHECK(expected_of(used, used.open(prefix)) == expected);
}

TEST_CASE("masses that a layer's correction leaves are no other layer's", "[completion]") {
  dice dice(seed(84));
  sizes of{8, 0, 8, 16, 2, 3, 2, 1};
  const auto basis = random_basis(dice, of.kv_heads, d, d);
  auto given = settings_of(of, basis, dice);
  std::vector<float> bases = basis;
  bases.insert(bases.end(), basis.begin(), basis.end());
  given.model.layers = 2;
  given.summary.basis = {bases.data(), 2, of.kv_heads, d, d};
  given.attention.sink_logits.clear();
  given.correction = freekv::cosine_drift{.tau = 2.0f};  // so that all heads are corrected
  given.capacity.store_file.reset();
  freekv::host_backend backend;
  const rows_of_text texts[] = {{dice, 160, given}, {dice, 160, given}};
  const auto outputs = [&](bool in_turn) {
    completed pipeline(given, backend);
    const auto id = pipeline.open();
    const auto step_of = [&](int tokens, step_phase phase, const auto& attend) {
      const int first = pipeline.tokens(id);
      auto step = pipeline.begin_step({{id, tokens, phase}});
      attend(step, [&](int layer) {
        const rows_of_text& text = texts[layer];
        step.template append<float>(layer, {.keys = text.part(text.k, text.key_row, first, tokens),
                                            .values = text.part(text.v, text.key_row, first, tokens),
                                            .queries = text.part(text.q, text.query_row, first, tokens)});
      });
      step.end();
    };
    step_of(120, step_phase::prefill, [](auto&, const auto& append) { append(0), append(1); });
    std::vector<float> out(texts[0].query_row), unused(out);
    step_of(1, step_phase::decode, [&](auto& step, const auto& append) {
      append(0);
      if (in_turn) step.attend(0, unused);
      append(1);
      if (!in_turn) {
        step.correct(1);
        step.correct(0);
      }
      step.attend(1, out);
      if (!in_turn) step.finish_layer(0);
    });
    return out;
  };
  CHECK(same_bits(outputs(false), outputs(true)));
}

TEST_CASE("values that are not finite stand for no page", "[completion]") {
  dice dice(seed(75));
  const sizes of{8, 0, 0, 8, 1, 2, 1, 1};
  const auto basis = random_basis(dice, of.kv_heads, d, d);
  auto given = settings_of(of, basis, dice);
  given.capacity.store_file.reset();
  freekv::host_backend backend;
  completed pipeline(given, backend);
  rows_of_text text(dice, 160, pipeline.configuration());
  for (const int token : {3, 20, 41}) text.v[count(token) * text.key_row + 5] = token == 20 ? quiet_nan : inf;
  const auto id = pipeline.open();
  run(pipeline, id, text, 100, step_phase::prefill);
  for (int step = 0; step < 20; ++step) {
    const output got = run(pipeline, id, text, 1, step_phase::decode);
    const auto selected = attended_of(pipeline, id, 0);
    const bool attends =
        std::any_of(selected.begin(), selected.end(), [](int p) { return p == 0 || p == 2 || p == 5; });
    bool finite = true;
    for (const float x : got.out) finite = finite && std::isfinite(x);
    CHECK((finite || attends));
  }
}

TEST_CASE("values too small for 8 bits are kept as values near 0", "[completion]") {
  std::vector<float> numbers(24, 1e-44f), back(24, 7.0f);
  std::vector<std::byte> stored(freekv::detail::page_value_bytes(24));
  freekv::detail::write_page_value(numbers.data(), 24, stored.data());
  CHECK(freekv::detail::read_page_value(stored.data(), 24, back.data()));
  for (const float x : back) CHECK(std::fabs(x) <= 1e-30f);
}

TEST_CASE("key_codes' scores and its term of the mass are the log-mass of decoded keys", "[completion]") {
  dice dice(seed(76));
  for (int trial = 0; trial < some_of(40); ++trial) {
    const int tokens = dice.one_of({2, 8, 32});
    freekv::key_codebooks form{nullptr, 1, 1, d, 2, 2, 3, 2};
    const auto books = random_codebooks(dice, form);
    form.data = books.data();
    const auto policy = freekv::key_codes<3, 2>{{}, {}, form}.at(0, 0);
    const freekv::kv_extent unit{tokens, d};
    const auto keys = normals(dice, count(tokens * d)), query = normals(dice, d);
    std::vector<float> numbers(count(policy.width(unit))), prepared(count(policy.query_width(d)));
    const freekv::scalar_team team;
    policy.summarise(team, freekv::unit_keys{keys.data(), unit}, numbers.data());
    std::vector<std::byte> stored(policy.bytes<float>(unit));
    policy.encode<float>(team, unit, numbers.data(), stored.data());
    policy.prepare(team, freekv::group_query{query.data(), 1, d}, prepared.data());
    const float scale = 0.3f;
    const float score = policy.score(team, {prepared.data(), unit, scale}, stored.data());
    const float term = policy.mass_term(team, freekv::group_query{query.data(), 1, d});

    // A key is both offsets, and the rows times the centroids of its unit's mean and its own.
    const auto product = [&](const freekv::codebook& book, const auto& code_of) {
      double sum = oracle::dot(std::span(book.offset, d), query);
      for (int nth = 0; nth < book.codes; ++nth)
        for (int i = 0; i < book.dims; ++i) {
          const int row = nth * book.dims + i;
          sum += double{book.centroids[row * 256 + code_of(nth)]} *
                 oracle::dot(std::span(book.rows + row * d, d), query);
        }
      return sum;
    };
    double mass = 0.0;
    for (int t = 0; t < tokens; ++t)
      mass += std::exp(double{scale} *
                       (product(policy.mean, [&](int nth) { return static_cast<int>(numbers[count(nth)]); }) +
                        product(policy.token, [&](int nth) {
                          return static_cast<int>(numbers[count(2 + nth * tokens + t)]);
                        })));
    CHECK(is_near(double{score} + double{scale} * double{term}, std::log(mass), 1e-4));
  }
}

TEST_CASE("a pipeline that completes takes no other queries to select by", "[completion]") {
  dice dice(5);
  const sizes s = random_sizes(dice);
  const std::vector<float> basis = random_basis(dice, s.kv_heads, d, d);
  const auto settings = settings_of(s, basis, dice);
  const rows_of_text text(dice, 1, settings);
  freekv::host_backend backend;
  completed pipeline(settings, backend);
  auto step = pipeline.begin_step({{pipeline.open(), 1, step_phase::prefill}});
  CHECK_THROWS_WITH(
      step.append<float>(0, {.keys = text.k, .values = text.v, .queries = text.q, .selecting = text.q}),
      Catch::Contains("a pipeline that completes, samples or verifies takes no other queries to select by"));
}

TEST_CASE("what cannot be completed is refused with what to choose", "[completion]") {
  using by_boxes = freekv::retrieval_pipeline<freekv::kv_shape<float, d>, freekv::page_values>;
  using by_heads = freekv::retrieval_pipeline<freekv::kv_shape<float, d>, freekv::key_subspace<d, 32>,
                                              freekv::page_values, freekv::per_query_head>;
  dice dice(seed(77));
  const auto basis = random_basis(dice, 1, d, d);
  freekv::host_backend backend;
  const auto refused = [&]<class Pipeline>(typename Pipeline::settings s, const char* words) {
    s.model = {.query_heads = 2, .kv_heads = 1};
    s.budget = {.sink = 32, .window = 32, .selected_units = 2};
    s.capacity.max_tokens = 256;
    if constexpr (requires { s.summary.basis; }) s.summary.basis = {basis.data(), 1, 1, d, d};
    CHECK_THROWS_WITH(Pipeline(s, backend), Catch::Contains(words));
  };
  refused.operator()<by_boxes>({}, "choose key_codes or key_subspace");
  refused.operator()<by_heads>({}, "choose per_kv_head or per_layer");
  completed::settings s;
  s.page = {{32}};
  s.completion = freekv::page_values{};
  s.attention.soft_cap = 30.0f;
  refused.operator()<completed>(s, "soft cap");
  s.attention.soft_cap = 0.0f;
  s.attention.selection_scale = 1.0f;
  refused.operator()<completed>(s, "selection_scale");
  s.attention.selection_scale = 0.0f;
  s.completion = freekv::page_values{.prompt_rows = -1};
  refused.operator()<completed>(s, "rows of a prompt");
  s.completion = freekv::page_values{.refreshed = 1.5f};
  refused.operator()<completed>(s, "from 0 to 1");
}
