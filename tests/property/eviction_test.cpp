// Methods that forget, on random sequences that share a pipeline, against the float64 oracle: what is
// attended to equals the oracle's wherever units that left are worth less than those that stayed beyond
// rounding, and outputs always.

#include <map>

#include "../catch.hpp"
#include "../instruction_sets.hpp"
#include "compiled_shapes.hpp"
#include "eviction_case.hpp"
#include "seeds.hpp"

namespace {

using namespace tests;
using freekv::step_phase;

std::size_t n(std::int64_t x) { return static_cast<std::size_t>(x); }

random_case eviction_case(std::uint64_t seed) {
  dice d(seed * 7919);
  random_case c;
  c.seed = seed;
  auto& o = c.options;
  give_shape(c, d);
  o.kv_heads = d.between(1, 3);
  o.query_heads = o.kv_heads * d.between(1, 16);
  o.method.plan = "eviction";
  o.method.eviction = oracle_evictions[seed % std::size(oracle_evictions)].name;
  const std::string& method = o.method.eviction;
  const bool has_window = method == "snapkv" || method == "dapq" || method == "epi_cache" ||
                          method == "pyramid_kv" || method.ends_with("defensive_kv") || method == "cake" ||
                          method == "r_kv" || method == "kv_merger" || method == "compress_kv" ||
                          method.starts_with("arkv") || method.starts_with("hard_kv");
  const bool votes = method == "compress_kv";
  const bool rates_layers = method == "arkv" || method == "arkv_split";
  const bool keeps_prompt = d.below(2) == 0;
  o.page = has_window ? 8 : d.one_of({8, 16, 24});
  o.budget.sink = d.one_of({0, 1, 3, o.page, 2 * o.page + 1});
  o.budget.window = o.method.eviction == "raas" ? d.between(o.page, 3 * o.page) : d.between(1, 40);
  o.budget.selected_units = has_window ? 5 : d.between(1, 6);
  const int budget = o.budget.sink + o.budget.window + o.budget.selected_units * o.page;
  const int interval = d.between(1, std::min(40, budget - 1));
  if (method == "raas" && keeps_prompt) o.method.eviction_values["keeps_prompt"] = 1;
  if (method.starts_with("hard_kv") || method == "r_kv") o.method.eviction_values["interval"] = interval;
  if (method == "lazy_eviction") o.method.eviction_values["window"] = interval;
  if (method == "epi_cache") o.method.eviction_values["block_tokens"] = interval;
  const bool allocates = method == "cake" || method == "layer_defensive_kv";
  if (method == "pyramid_kv" || allocates || rates_layers || votes) {
    o.layers = d.between(1, 5);
    o.complete_layers = d.below(o.layers + 1) / 2;
  }
  for (int layer = 0; votes && seed % 4 != 0 && layer < o.layers; ++layer) {
    const int first = d.below(o.query_heads), more = d.below(3);
    for (int head = 0; head < o.query_heads; ++head)
      o.voters.push_back(head == first || (more > 0 && d.below(4) == 0) ? 1 : 0);
  }
  o.scale = d.one_of({0.0f, method.starts_with("hard_kv") ? 0.3f : 0.05f, 0.3f});
  c.turn = d.one_of({0.05f, 0.3f, 1.0f});
  c.outliers = d.one_of({0.0f, 0.05f});
  o.max_sequences = d.between(1, 3);
  const bool cuts_prompts =  // which is seldom, or shows little, where they are short
      allocates || method == "kv_merger" || method == "epi_cache" || method.starts_with("hard_kv") ||
      rates_layers;
  o.max_prompt = cuts_prompts ? 220 : d.one_of({1, 40, 100, 220});
  c.steps = d.between(1, 120);
  o.max_tokens = o.max_prompt + c.steps;
  if (d.below(2) == 0) give_random_numbers(o.method, budget, d);
  return c;
}

/// A sequence of the library and its twin.
struct live_sequence {
  freekv::sequence_id id;
  eviction_text text;
  oracle::forgetful_decoder expected;
  int done = 0;
  int probed_at = 0;
  std::vector<float> probes{};
};

class run_of_case {
 public:
  run_of_case(const random_case& c, freekv::host_backend& backend, eviction_coverage& seen)
      : c_(c),
        seen_(seen),
        dice_(c.seed + 99),
        pipeline_(freekv::examples::make_pipeline(c.options, backend)),
        tested_(dice_.below(c.options.layers - c.options.complete_layers)) {}

  void run() {
    const int all = c_.options.max_sequences + 2;
    while (opened_ < all || !live_.empty()) {
      while (opened_ < all && live_.size() < n(c_.options.max_sequences) &&
             (live_.empty() || dice_.below(4) == 0))
        live_.empty() || dice_.below(2) == 0 ? open() : fork();
      step();
      for (std::size_t i = live_.size(); i-- > 0;) {
        if (live_[i].done < live_[i].text.tokens) continue;
        seen_.merged += live_[i].expected.merged();
        seen_.lost += live_[i].expected.lost();
        pipeline_->release(live_[i].id);
        live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
  }

 private:
  void open() {
    random_case own = c_;
    own.seed = c_.seed * 31 + static_cast<std::uint64_t>(++opened_);
    const int prompt = dice_.below(6) == 0 ? 0 : dice_.between(1, c_.options.max_prompt);
    const int steps = dice_.between(prompt == 0 ? 1 : 0, c_.steps);
    live_.push_back({pipeline_->open(),
                     {own, prompt, prompt + steps},
                     oracle::forgetful_decoder(eviction_settings_of(c_.options, tested_))});
  }

  /// Another goes on from where one of them is, with rows of its own.
  void fork() {
    const live_sequence& parent = live_[n(dice_.below(static_cast<int>(live_.size())))];
    random_case own = c_;
    own.seed = c_.seed * 31 + static_cast<std::uint64_t>(++opened_);
    const eviction_text rest(own, parent.text.prompt, parent.text.tokens);
    live_sequence child = parent;
    child.id = pipeline_->fork(parent.id);
    child.text = spliced(child.text, child.done, rest);
    ++seen_.forks;
    seen_.forked_prompts += child.done <= child.text.prompt;
    live_.push_back(std::move(child));
  }

  /// Behind some prompts, or blocks, come rows that observe them.
  void probe(live_sequence& l) {
    const bool behind = cuts_blocks() ? l.done <= l.text.prompt : l.done == l.text.prompt;
    if (!behind || l.done == l.probed_at) return;
    l.probed_at = l.done;
    const bool often = c_.options.method.takes_probes();
    if (!observes_probes(c_.options.method) || dice_.below(4) < (often ? 1 : 2)) return;
    l.probes = random_probes(dice_, l.text.queries, c_.options.query_heads * c_.options.head_dim,
                             dice_.one_of({1, dice_.between(1, 40), 32}));
    for (int layer = 0; layer < c_.options.layers; ++layer)
      pipeline_->observe(l.id, layer, of_layer(l.probes, layer));
    l.expected.observe(of_tested_layer(l.probes));
    ++seen_.probed;
  }

  void step() {
    for (live_sequence& l : live_) probe(l);
    std::vector<freekv::step_input> rows;
    std::vector<float> queries, keys, values, worths;
    const bool takes_worths = c_.options.method.takes_worths();
    for (const live_sequence& l : live_) {
      if (live_.size() > 1 && dice_.below(3) == 0) continue;
      const bool prompt = l.done < l.text.prompt;
      const int most = std::min(l.text.prompt - l.done, pipeline_->most_prompt_rows());
      const int tokens = prompt ? dice_.between(cuts_blocks() && dice_.below(2) == 0 ? most : 1, most) : 1;
      rows.push_back({l.id, tokens, prompt ? step_phase::prefill : step_phase::decode});
      const auto add = [&](std::vector<float>& to, const std::vector<float>& of) {
        const auto more = l.text.rows(of, l.done, tokens);
        to.insert(to.end(), more.begin(), more.end());
      };
      add(queries, l.text.queries), add(keys, l.text.keys), add(values, l.text.values);
      if (takes_worths) add(worths, l.text.worths);
    }
    std::vector<float> out(queries.size()), lse(queries.size() / n(c_.options.head_dim));
    pipeline_->begin_step(rows);
    std::vector<float> other_out(out.size()), other_lse(lse.size());
    for (int layer = 0; layer < c_.options.layers; ++layer) {
      const std::vector<float> of_this_layer = of_layer(queries, layer);
      if (takes_worths) pipeline_->give_worths(worths);
      pipeline_->append(layer, keys, values, of_this_layer);
      const bool tested = layer == tested_layer();
      pipeline_->attend(layer, tested ? out : other_out, tested ? lse : other_lse);
    }
    pipeline_->end_step();
    int row = 0;
    for (const auto& r : rows) {
      compare(r, row, out, lse);
      row += r.tokens;
    }
  }

  void compare(const freekv::step_input& r, int first_row, std::span<const float> out,
               std::span<const float> lse) {
    const auto found =
        std::find_if(live_.begin(), live_.end(), [&](const auto& l) { return l.id == r.sequence; });
    live_sequence& l = *found;
    const auto heads = n(c_.options.query_heads), d = n(c_.options.head_dim);
    const auto compare_at = [&](int row, const oracle::attention& want, const std::string& where) {
      compare_row(where, want, out.subspan(n(row) * heads * d, heads * d),
                  lse.subspan(n(row) * heads, heads));
    };
    const auto part = [&](const std::vector<float>& of) { return l.text.rows(of, l.done, r.tokens); };
    if (r.phase == step_phase::prefill) {
      l.expected.prompt(of_tested_layer(part(l.text.queries)), part(l.text.keys), part(l.text.values),
                        part(l.text.worths));
      if (cuts_blocks()) compare_held(l, r.tokens);
      for (const int at : {0, dice_.below(r.tokens), r.tokens - 1}) {
        compare_at(first_row + at, l.expected.prompt_row(l.done + at), sentence("prompt row ", l.done + at));
        ++seen_.prompt_rows;
      }
    } else {
      if (l.done == l.text.prompt && l.done > 0) {
        if (c_.options.method.eviction == "cake") give_budget(l);
        if (c_.options.method.eviction == "layer_defensive_kv") give_head_budgets(l);
        if (rates_layers()) give_ratio(l);
      }
      const std::string where = sentence("token ", l.done, " after a prompt of ", l.text.prompt);
      const auto report = pipeline_->report(tested_layer(), l.id);
      const auto stride = report.attended.size() / report.attended_count.size();
      const int page = eviction_settings_of(c_.options).page;
      for (int head = 0; head < c_.options.kv_heads; ++head) {
        const auto units = report.attended.subspan(n(head) * stride, n(report.attended_count[n(head)]));
        compare_units(where, l.expected, head, {units.begin(), units.end()}, l.done / page, seen_);
        if (!report.coded_count.empty()) {
          const auto coded = report.coded.subspan(n(head) * stride, n(report.coded_count[n(head)]));
          compare_coded(where, l.expected, head, {coded.begin(), coded.end()}, seen_);
        }
        seen_.evicted += l.done / page + 1 - static_cast<int>(units.size());
        const int budget = eviction_settings_of(c_.options).budget;
        seen_.below_budget +=
            static_cast<int>(units.size()) * page <= budget && l.done / page * page > budget;
        if (report.corrected[n(head)] != 0 || report.recalled[n(head)] != 0 || report.promoted[n(head)] != 0)
          throw disagreement{where + ": something was corrected or moved"};
      }
      compare_at(first_row,
                 l.expected
                     .step(of_tested_layer(part(l.text.queries)), part(l.text.keys), part(l.text.values),
                           part(l.text.worths))
                     .attended,
                 where);
      ++seen_.steps;
    }
    l.done += r.tokens;
    if (pipeline_->tokens(l.id) != l.done) throw disagreement{"the sequence has another length"};
  }

  bool cuts_blocks() const { return c_.options.method.cuts_blocks(); }
  /// What the last row of a block attends to.
  void compare_held(live_sequence& l, int block) {
    const auto report = pipeline_->report(tested_layer(), l.id);
    const auto stride = report.attended.size() / report.attended_count.size();
    for (int head = 0; head < c_.options.kv_heads; ++head) {
      const auto units = report.attended.subspan(n(head) * stride, n(report.attended_count[n(head)]));
      const std::vector<int> got(units.begin(), units.end());
      ++seen_.sets;
      seen_.in_prompt += std::ssize(got) < l.done + block;
      if (got == l.expected.held(head)) continue;
      if (!std::is_sorted(got.begin(), got.end()) || !l.expected.accepts(head, got))
        throw disagreement{sentence("block behind token ", l.done, ", KV head ", head, ": ", got.size(),
                                    " tokens are held for ", l.expected.held(head).size(), ", or others")};
      ++seen_.doubtful;
    }
  }
  bool rates_layers() const {
    return c_.options.method.eviction == "arkv" || c_.options.method.eviction == "arkv_split";
  }
  /// Queries are smaller from layer to layer, so that attention differs.
  std::vector<float> of_layer(std::span<const float> queries, int layer) const {
    std::vector<float> smaller(queries.begin(), queries.end());
    const float factor =
        rates_layers() ? std::pow(0.4f, static_cast<float>(layer)) : 1.0f - 0.15f * static_cast<float>(layer);
    for (float& x : smaller) x *= factor;
    return smaller;
  }
  /// The ratio of the tested layer among all layers.
  void give_ratio(live_sequence& l) {
    oracle::eviction_settings s = eviction_settings_of(c_.options, tested_);
    oracle::give_arkv_ratio(s, of_all_layers(l, s, &oracle::forgetful_decoder::sensitivity));
    l.expected.take_ratio(s);
  }
  /// What the prompt of each layer that forgets comes to.
  std::vector<double> of_all_layers(const live_sequence& l, const oracle::eviction_settings& s,
                                    double (oracle::forgetful_decoder::*what)() const) const {
    std::vector<double> of;
    for (const auto& other : all_layers(l, s)) of.push_back((other.*what)());
    return of;
  }
  /// The prompt in each layer that forgets.
  std::vector<oracle::forgetful_decoder> all_layers(const live_sequence& l,
                                                    const oracle::eviction_settings& s) const {
    const auto part = [&](const std::vector<float>& of) { return l.text.rows(of, 0, l.text.prompt); };
    std::vector<oracle::forgetful_decoder> all;
    for (int layer = c_.options.complete_layers; layer < c_.options.layers; ++layer) {
      oracle::forgetful_decoder& other = all.emplace_back(s);
      other.prompt(of_layer(part(l.text.queries), layer), part(l.text.keys), part(l.text.values));
      other.observe(of_layer(l.probes, layer));
    }
    return all;
  }
  std::vector<float> of_tested_layer(std::span<const float> queries) const {
    return of_layer(queries, tested_layer());
  }
  /// The budget of the tested layer's prompt among all layers'.
  void give_budget(live_sequence& l) {
    oracle::eviction_settings s = eviction_settings_of(c_.options, tested_);
    oracle::give_cake_budget(s, of_all_layers(l, s, &oracle::forgetful_decoder::preference), l.text.prompt);
    l.expected.take_budget(s);
    seen_.other_budgets += s.prompt_budget >= 0 && s.prompt_budget != s.budget;
  }
  /// The budgets of the tested layer's heads among all heads.
  void give_head_budgets(live_sequence& l) {
    const oracle::eviction_settings s = eviction_settings_of(c_.options, tested_);
    if (l.text.prompt <= s.budget) return;
    const auto kept_in = [&](int layer) {
      std::vector<int> kept;
      for (const std::int32_t attended : pipeline_->report(layer, l.id).attended_count)
        kept.push_back(attended - 1);  // the row itself
      return kept;
    };
    std::vector<std::vector<double>> worths;
    for (const auto& other : all_layers(l, s))
      for (int head = 0; head < s.kv_heads; ++head) worths.push_back(other.defended_worths(head));
    int all = 0;
    for (int layer = c_.options.complete_layers; layer < c_.options.layers; ++layer)
      for (const int kept : kept_in(layer)) {
        all += kept;
        seen_.other_budgets += kept != s.budget;
      }
    if (all != static_cast<int>(worths.size()) * s.budget)
      throw disagreement{sentence("heads keep ", all, " tokens together")};
    take_head_budgets(l.expected, s, worths, kept_in(tested_layer()));
  }
  int tested_layer() const { return c_.options.complete_layers + tested_; }

  const random_case& c_;
  eviction_coverage& seen_;
  dice dice_;
  std::unique_ptr<freekv::examples::pipeline> pipeline_;
  int tested_;  // of the layers that forget
  std::vector<live_sequence> live_;
  int opened_ = 0;
};

}  // namespace

TEST_CASE("random sequences that forget agree with the float64 oracle", "[property][eviction]") {
  const std::uint64_t first = number_from("FREEKV_SEED", 1),
                      count = number_from("FREEKV_CASES", 20 * std::ssize(oracle_evictions));
  std::map<int, freekv::host_backend> backends;
  for (const auto isa : instruction_sets())
    for (const int threads : {1, 3})
      backends.try_emplace(
          static_cast<int>(backends.size()),
          freekv::host_options{.threads = threads, .bytes_per_thread = 4096, .instructions = isa});
  std::map<std::string, eviction_coverage> seen;
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    const random_case c = eviction_case(seed);
    try {
      run_of_case(c, backends.at(static_cast<int>(seed % backends.size())), seen[c.options.method.eviction])
          .run();
    } catch (const disagreement& d) {
      INFO(c.options.method.eviction << ", budget " << eviction_settings_of(c.options).budget << ", " << c);
      for (const auto& [name, number] : c.options.method.eviction_values)
        UNSCOPED_INFO(name << " " << number);
      INFO(d.what);
      FAIL("the library disagrees with the oracle; FREEKV_SEED=" << seed << " FREEKV_CASES=1 repeats it");
    }
  }
  for (const auto& [method, of] : seen) {
    INFO(method << ": steps " << of.steps << ", sets " << of.sets << ", doubtful " << of.doubtful
                << ", evicted " << of.evicted << ", prompt rows " << of.prompt_rows);
    if (count >= 100) {
      CHECK(of.steps > 500);
      if (method != "mikv") CHECK(of.evicted > 500);
      CHECK(of.doubtful * 50 < of.sets);
      CHECK(of.forks > 5);
      CHECK(of.forked_prompts > 0);
      CHECK(of.forked_prompts < of.forks);
      if (method.starts_with("hard_kv")) CHECK(of.below_budget > 100);
      if (method.find("merge") != std::string::npos || method == "d2o" || method == "hard_kv_pairs")
        CHECK(of.merged > 500);
      if (method == "d2o") CHECK(of.lost > 300);
      if (method == "cake" || method == "layer_defensive_kv") CHECK(of.other_budgets > 10);
      if (method == "epi_cache") CHECK(of.in_prompt > 100);
      freekv::examples::method_spec named;
      named.eviction = method;
      if (observes_probes(named)) CHECK(of.probed > 5);
      if (method == "arkv" || method == "arkv_split" || method == "mikv" || method == "q_hitter") {
        CHECK(of.coded > 500);
        CHECK(of.coded_doubtful * 20 < of.coded_sets);
      }
    }
  }
  for (const auto& [method, of] : seen)
    WARN(method << ": steps " << of.steps << ", sets " << of.sets << ", doubtful " << of.doubtful
                << ", evicted " << of.evicted << ", prompt rows " << of.prompt_rows << ", below the budget "
                << of.below_budget << ", merged " << of.merged << ", lost " << of.lost << ", probed "
                << of.probed << ", within prompts " << of.in_prompt << ", coded " << of.coded
                << ", doubtful of these " << of.coded_doubtful << ", forks " << of.forks
                << ", before decoding " << of.forked_prompts);
}
