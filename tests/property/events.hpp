// Random events on up to eight sequences in one pipeline of few pages, beside the oracle, which keeps each
// sequence apart.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

#include "compare_step.hpp"

namespace tests {

using freekv::sequence_id;
using freekv::step_phase;

inline constexpr int most_sequences = 8, events = 60;

/// A sequence beside what the oracle knows of it. A copy is a fork.
struct live_sequence {
  sequence_id id{};
  oracle::decoder expected;
  step_comparison comparison;
  token_source source;
  std::vector<std::shared_ptr<int>>
      pages{};  // of the store; one that several sequences share is counted once
  bool preempted = false;
};

struct event_counts {
  long steps = 0, rows = 0, prompts = 0, forks = 0, truncations = 0, selections_dropped = 0, preemptions = 0,
       refused = 0, refused_blocks = 0, pages_copied = 0;
};

/// Tokens that one sequence may have in selected slots, in whole pages.
inline std::int64_t selected_tokens_of_one(const freekv::examples::pipeline_options& o) {
  const int heads = o.method.rows == "per_query_head" ? o.query_heads / o.kv_heads : 1;
  const int pins = o.method.pinning == "pin_outliers" ? o.method.pinned : 0;
  return std::int64_t{o.budget.selected_units * heads + pins + o.method.spare} * o.page;
}

/// Half of the time room for what one sequence may select, or for more, but not for all.
inline void few_frames(random_case& c, dice& d) {
  auto& o = c.options;
  if (d.below(2) == 0) return;
  const std::int64_t one = selected_tokens_of_one(o);
  o.selected_tokens = one + d.below(static_cast<int>(one) * 2);
  if (d.below(2) == 0) o.method.selection = "top_p";
}

/// A random case for many sequences.
inline random_case make_events(std::uint64_t seed) {
  random_case c = make_case(seed);
  dice d(seed ^ 0xabcdefull);
  auto& o = c.options;
  o.max_decode_rows = d.one_of({1, 2, 3, 5, o.page, o.page + 3});
  o.max_sequences = d.between(2, most_sequences);
  o.max_resident = d.between(1, o.max_sequences);
  o.max_tokens = o.page * d.between(6, 14) + d.below(o.page);
  o.store_tokens = std::int64_t{o.max_tokens} * d.between(1, 3);
  few_frames(c, d);
  if (d.below(2) == 0) o.budget.sink = 0, o.budget.window = o.page;  // most pages can be selected
  c.prompt = c.steps = 0;
  if (seed % 5 == 0) give_unit(c, 1 << seed / 5 % 4);
  if (d.below(2) == 0) c.turn = 0.5f;  // so that a row more or less decides about drift
  return c;
}

/// How a world runs a step: `begin` refuses what does not fit, `run` does all of it.
struct step_runner {
  std::function<void(std::span<const freekv::step_input>)> begin;
  std::function<void(const std::vector<float>& keys, const std::vector<float>& values,
                     const std::vector<float>& queries, std::span<float> out, std::span<float> lse)>
      run;
};
inline step_runner step_by_step(freekv::examples::pipeline& p) {
  return {[&p](auto rows) { p.begin_step(rows); },
          [&p](const auto& keys, const auto& values, const auto& queries, auto out, auto lse) {
            p.append(0, keys, values, queries);
            p.attend(0, out, lse);
            p.end_step();
          }};
}

/// Draws events and compares what they give. `c` outlives it.
class world {
 public:
  world(const random_case& c, std::unique_ptr<freekv::examples::pipeline> pipeline, coverage& seen,
        event_counts& counts)
      : c_(c),
        dice_(c.seed ^ 0x5555ull),
        pipeline_(std::move(pipeline)),
        runner_(step_by_step(*pipeline_)),
        free_at_first_(pipeline_->free_pages()),
        seen_(seen),
        counts_(counts) {}

  void run_steps_by(step_runner runner) { runner_ = std::move(runner); }
  freekv::examples::pipeline& of() { return *pipeline_; }

  void run() {
    for (event_ = 0; event_ < events; ++event_) {
      switch (dice_.below(10)) {
        case 0:
          open();
          break;
        case 1:
          fork();
          break;
        case 2:
          truncate();
          break;
        case 3:
          preempt_or_restore();
          break;
        case 4:
          if (dice_.below(3) == 0) release(dice_.below(static_cast<int>(live_.size()) + 1));
          break;
        default:
          step();
          break;
      }
      if (pipeline_->free_pages() != free_at_first_ - pages_in_use())
        throw disagreement{where("after the event") + sentence(pipeline_->free_pages(),
                                                               " pages are free for ",
                                                               free_at_first_ - pages_in_use())};
    }
    while (!live_.empty()) release(0);
    if (pipeline_->free_pages() != free_at_first_) throw disagreement{"pages were lost"};
  }

 private:
  static std::size_t n(int x) { return static_cast<std::size_t>(x); }
  std::string where(const std::string& what) const { return sentence("event ", event_, ", ", what, ": "); }

  int resident() const {
    return static_cast<int>(
        std::count_if(live_.begin(), live_.end(), [](const auto& l) { return !l.preempted; }));
  }
  int pages_in_use() const {
    std::vector<const int*> all;
    for (const auto& l : live_)
      for (const auto& page : l.pages) all.push_back(page.get());
    std::sort(all.begin(), all.end());
    return static_cast<int>(std::unique(all.begin(), all.end()) - all.begin());
  }
  live_sequence* any() {
    return live_.empty() ? nullptr : &live_[n(dice_.below(static_cast<int>(live_.size())))];
  }

  /// Runs a call that is refused exactly if `fits` is false.
  template <class Call>
  bool accepted(bool fits, const std::string& what, const Call& call) {
    try {
      call();
    } catch (const freekv::pool_exhausted& e) {
      const bool of_frames =
          c_.options.selected_tokens > 0 && std::string(e.what()).starts_with("blocks of selected slots");
      if (fits && !of_frames) throw disagreement{where(what) + e.what()};
      ++(of_frames ? counts_.refused_blocks : counts_.refused);
      return false;
    }
    if (!fits) throw disagreement{where(what) + "it does not fit, and was not refused"};
    return true;
  }

  bool room() const {
    return static_cast<int>(live_.size()) < c_.options.max_sequences && resident() < c_.options.max_resident;
  }
  random_case with_seed(std::uint64_t seed) const {
    random_case c = c_;
    c.seed = seed;
    return c;
  }
  void open() {
    sequence_id id{};
    if (!accepted(room(), "open", [&] { id = pipeline_->open(); })) return;
    cases_.push_back(std::make_unique<random_case>(with_seed(c_.seed * 1000 + n(++opened_))));
    live_.push_back({.id = id,
                     .expected = oracle::decoder(oracle_settings(c_)),
                     .comparison = step_comparison(c_.options.kv_heads),
                     .source = token_source(*cases_.back())});
  }
  void fork() {
    const live_sequence* const parent = any();
    if (parent == nullptr || parent->preempted) return;
    sequence_id id{};
    if (!accepted(room(), "fork", [&] { id = pipeline_->fork(parent->id); })) return;
    live_sequence child = *parent;
    child.id = id;
    child.source.diverge(++opened_);
    live_.push_back(std::move(child));
    ++counts_.forks;
  }
  void truncate() {
    live_sequence* const l = any();
    if (l == nullptr || l->preempted) return;
    truncate(*l, dice_.below(l->expected.length() + 1));
  }
  void truncate(live_sequence& l, int tokens) {
    pipeline_->truncate(l.id, tokens);
    l.expected.truncate(tokens);
    if (!l.expected.has_selection()) {
      l.comparison.drop();
      ++counts_.selections_dropped;
    }
    l.pages.resize(n((tokens + c_.options.page - 1) / c_.options.page));
    ++counts_.truncations;
  }
  void preempt_or_restore() {
    live_sequence* const l = any();
    if (l == nullptr) return;
    if (!l->preempted) {
      pipeline_->preempt(l->id);
      l->preempted = true;
      ++counts_.preemptions;
    } else if (accepted(resident() < c_.options.max_resident, "restore",
                        [&] { pipeline_->restore(l->id); })) {
      l->preempted = false;
    }
  }
  void release(int nth) {
    if (nth >= static_cast<int>(live_.size())) return;
    pipeline_->release(live_[n(nth)].id);
    live_.erase(live_.begin() + nth);
  }

  struct part {
    live_sequence* l;
    int tokens;
    step_phase phase;
    std::vector<float> queries{}, keys{}, values{};
  };
  /// Pages that part i needs: those it begins, and a copy of the open one if another sequence will still have
  /// it.
  int pages_needed(const std::vector<part>& parts, std::size_t i) const {
    const part& p = parts[i];
    if (p.tokens == 0) return 0;
    const int length = p.l->expected.length(), page = c_.options.page;
    bool copies = false;
    if (length % page != 0) {
      const auto& open = p.l->pages.back();
      const auto left =
          std::count_if(parts.begin(), parts.begin() + static_cast<long>(i), [&](const part& other) {
            return other.tokens > 0 && other.l->expected.length() % page != 0 &&
                   other.l->pages.back() == open;
          });
      copies = open.use_count() - left > 1;
    }
    return (length + p.tokens + page - 1) / page - static_cast<int>(p.l->pages.size()) + copies;
  }
  std::vector<part> drawn_parts() {
    std::vector<part> parts;
    for (auto& l : live_) {
      if (l.preempted || dice_.below(4) == 0) continue;
      const bool prompt = l.expected.length() == 0 ? dice_.below(4) != 0 : dice_.below(12) == 0;
      const int most = prompt ? std::max(1, c_.options.max_tokens / 2) : c_.options.max_decode_rows;
      parts.push_back({&l, dice_.between(dice_.below(9) == 0 ? 0 : 1, most),
                       prompt ? step_phase::prefill : step_phase::decode});
    }
    if (dice_.below(2) == 0) std::reverse(parts.begin(), parts.end());
    return parts;
  }
  void step() {
    std::vector<part> parts = drawn_parts();
    std::vector<freekv::step_input> rows;
    int needed = 0;
    bool fits = true;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const part& p = parts[i];
      rows.push_back({p.l->id, p.tokens, p.phase});
      needed += pages_needed(parts, i);
      fits = fits && p.l->expected.length() + p.tokens <= c_.options.max_tokens;
    }
    fits = fits && needed <= free_at_first_ - pages_in_use();
    if (!accepted(fits, "step", [&] { runner_.begin(rows); })) return;

    std::vector<float> queries, keys, values;
    for (part& p : parts) {
      for (int i = 0; i < p.tokens; ++i) {
        p.l->source.next();
        const auto append = [](std::vector<float>& to, const std::vector<float>& from) {
          to.insert(to.end(), from.begin(), from.end());
        };
        append(p.queries, p.l->source.queries);
        append(p.keys, p.l->source.keys);
        append(p.values, p.l->source.values);
      }
      queries.insert(queries.end(), p.queries.begin(), p.queries.end());
      keys.insert(keys.end(), p.keys.begin(), p.keys.end());
      values.insert(values.end(), p.values.begin(), p.values.end());
      take_pages(p);
    }
    const auto query_row = n(c_.options.query_heads * c_.options.head_dim);
    std::vector<float> out(queries.size()), lse(queries.size() / query_row * n(c_.options.query_heads));
    runner_.run(keys, values, queries, out, lse);

    std::size_t row = 0;
    for (const part& p : parts) {
      compare(p, std::span(out).subspan(row * query_row, n(p.tokens) * query_row),
              std::span(lse).subspan(row * n(c_.options.query_heads), n(p.tokens * c_.options.query_heads)));
      row += n(p.tokens);
    }
    for (const part& p : parts)  // some of several rows turn out to be wrong
      if (p.phase == step_phase::decode && p.tokens > 1 && dice_.below(2) == 0)
        truncate(*p.l, p.l->expected.length() - dice_.between(1, p.tokens - 1));
  }
  void take_pages(const part& p) {
    if (p.tokens == 0) return;
    const int length = p.l->expected.length(), page = c_.options.page;
    if (length % page != 0 && p.l->pages.back().use_count() > 1) {
      p.l->pages.back() = std::make_shared<int>();
      ++counts_.pages_copied;
    }
    while (static_cast<int>(p.l->pages.size()) * page < length + p.tokens)
      p.l->pages.push_back(std::make_shared<int>());
  }
  void compare(const part& p, std::span<const float> out, std::span<const float> lse) {
    if (p.tokens == 0) return;
    const auto at = sentence("event ", event_, ", sequence ", static_cast<int>(p.l->id), " of ",
                             p.l->expected.length(), " + ", p.tokens, " tokens");
    if (p.phase == step_phase::decode) {
      const auto want = p.l->expected.step(p.queries, p.keys, p.values, p.tokens);
      p.l->comparison.compare(at, c_, want, pipeline_->report(0, p.l->id), out, lse, seen_);
      p.l->comparison.follow(want);
      ++counts_.steps;
      counts_.rows += p.tokens;
      return;
    }
    p.l->expected.prompt(p.keys, p.values, p.tokens);
    p.l->comparison.drop();
    ++counts_.prompts;
    // Each row attends to everything up to itself: the first does, one between, and the last.
    const std::size_t heads = n(c_.options.query_heads), d = n(c_.options.head_dim);
    const int before = p.l->expected.length() - p.tokens;
    for (const int row : {0, static_cast<int>(event_ % p.tokens), p.tokens - 1}) {
      const auto row_at = at + sentence(", prompt row ", row);
      const auto want =
          p.l->expected.full(std::span(p.queries).subspan(n(row) * heads * d, heads * d), before + row + 1);
      for (std::size_t i = 0; i < heads; ++i)
        if (const float got = lse[n(row) * heads + i]; !close(got, want.lse[i], 1e-5))
          throw disagreement{row_at + sentence(": lse ", i, " is ", got, " for ", want.lse[i])};
      for (std::size_t i = 0; i < heads * d; ++i)
        if (!close(out[n(row) * heads * d + i], want.out[i], 2e-5))
          throw disagreement{row_at + sentence(": output ", i, " differs")};
    }
  }

  const random_case& c_;
  dice dice_;
  std::unique_ptr<freekv::examples::pipeline> pipeline_;
  step_runner runner_;
  int free_at_first_;
  coverage& seen_;
  event_counts& counts_;
  std::vector<std::unique_ptr<random_case>> cases_;  // which the sources point to
  std::vector<live_sequence> live_;
  int opened_ = 0, event_ = 0;
};

}  // namespace tests
