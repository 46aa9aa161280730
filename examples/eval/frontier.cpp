#include "frontier.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <freekv/core/size.hpp>
#include <iostream>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "job.hpp"
#include "logits.hpp"
#include "needle_text.hpp"
#include "quality.hpp"
#include "retrieval_attention.hpp"

namespace freekv::examples {

namespace {

// The true mass of pages, from the keys themselves.

/// Which pages a head attends to.
struct page_rule {
  int page, sink, window, selected;

  int first_candidate() const { return sink / page; }
  /// Candidates are complete and hold none of the window's tokens.
  int end_of_candidates(int length) const {
    return std::max(first_candidate(), std::max(0, length - window) / page);
  }
};

/// Keys of all layers, each head's tokens in a row.
class exact_keys {
 public:
  /// `prompt` and room for `more` tokens.
  exact_keys(const model_shape& shape, const prompt_cache& prompt, int more)
      : shape_(shape), capacity_(prompt.tokens() + more) {
    const auto heads = to_size(shape.layers * shape.kv_heads);
    keys_.resize(heads * to_size(capacity_ * shape.head_dim));
    for (int layer = 0; layer < shape.layers; ++layer) widen(prompt.keys(layer), layer);
  }

  /// One token, in place of what stood at its position.
  void put(const layer_rows& rows) {
    for (int head = 0; head < shape_.kv_heads; ++head)
      std::copy_n(rows.key + head * shape_.head_dim, shape_.head_dim,
                  keys_.begin() + static_cast<std::ptrdiff_t>(start(rows.layer, head, rows.position)));
  }

  const float* key(int layer, int head, int token) const { return keys_.data() + start(layer, head, token); }

 private:
  std::size_t start(int layer, int head, int token) const {
    const auto row = to_size(layer * shape_.kv_heads + head) * to_size(capacity_) + to_size(token);
    return row * to_size(shape_.head_dim);
  }
  /// `halves`: (tokens, kv_heads, head_dim).
  void widen(std::span<const std::byte> halves, int layer) {
    const auto d = to_size(shape_.head_dim), kv_heads = to_size(shape_.kv_heads);
    for (std::size_t i = 0; i < halves.size() / 2; ++i) {
      std::uint16_t bits;
      std::memcpy(&bits, halves.data() + 2 * i, 2);
      const auto head = static_cast<int>(i / d % kv_heads), token = static_cast<int>(i / d / kv_heads);
      keys_[start(layer, head, token) + i % d] = half_to_float(bits);
    }
  }

  model_shape shape_;
  int capacity_;
  std::vector<float> keys_;
};

/// In eight sums, so that a compiler may use vectors.
float inner_product(const float* a, const float* b, int count) {
  std::array<float, 8> sums{};
  int i = 0;
  for (; i + 8 <= count; i += 8)
    for (int lane = 0; lane < 8; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  for (; i < count; ++i) sums[0] += a[i] * b[i];
  return std::accumulate(sums.begin(), sums.end(), 0.0f);
}

/// Full attention's softmax of one query head over `length` tokens.
std::vector<double> token_masses(const exact_keys& keys, const model_shape& shape, const layer_rows& rows,
                                 int query_head) {
  const int kv_head = query_head / (shape.query_heads / shape.kv_heads);
  const float* query = rows.query + query_head * shape.head_dim;
  std::vector<double> masses(to_size(rows.position) + 1);
  const float* key = keys.key(rows.layer, kv_head, 0);
  for (double& mass : masses) {
    mass = shape.scale * inner_product(query, key, shape.head_dim);
    key += shape.head_dim;
  }
  const double top = *std::max_element(masses.begin(), masses.end());
  double sum = 0;
  for (double& mass : masses) sum += mass = std::exp(mass - top);
  for (double& mass : masses) mass /= sum;
  return masses;
}

/// A KV head's queries: the masses of all tokens for each, and the pages that have the most.
struct true_selection {
  std::vector<std::vector<double>> masses;  ///< by query head of the group
  std::vector<std::int32_t> pages;          ///< ascending
};

double mass_of_page(const std::vector<double>& masses, int page, const page_rule& rule) {
  const auto first = masses.begin() + page * rule.page;
  return std::accumulate(first, std::min(first + rule.page, masses.end()), 0.0);
}

/// The candidates with the most mass: each query head's share of its candidates' mass, mean over the group;
/// of equals the smaller page.
std::vector<std::int32_t> best_pages(const std::vector<std::vector<double>>& masses, const page_rule& rule) {
  const int first = rule.first_candidate(), end = rule.end_of_candidates(static_cast<int>(masses[0].size()));
  std::vector<double> pooled(to_size(end), 0.0);
  for (const auto& of_head : masses) {
    std::vector<double> by_page(pooled.size(), 0.0);
    for (int page = first; page < end; ++page) by_page[page] = mass_of_page(of_head, page, rule);
    const double all = std::accumulate(by_page.begin(), by_page.end(), 0.0);
    for (std::size_t i = 0; all > 0 && i < pooled.size(); ++i) pooled[i] += by_page[i] / all;
  }
  std::vector<std::int32_t> pages(to_size(end - first));
  std::iota(pages.begin(), pages.end(), first);
  std::stable_sort(pages.begin(), pages.end(),
                   [&](std::int32_t a, std::int32_t b) { return pooled[a] > pooled[b]; });
  pages.resize(std::min(pages.size(), to_size(rule.selected)));
  std::sort(pages.begin(), pages.end());
  return pages;
}

true_selection select_truly(const exact_keys& keys, const model_shape& shape, const layer_rows& rows,
                            int kv_head, const page_rule& rule) {
  const int group = shape.query_heads / shape.kv_heads;
  true_selection s;
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head)
    s.masses.push_back(token_masses(keys, shape, rows, head));
  s.pages = best_pages(s.masses, rule);
  return s;
}

/// Runs of tokens that a head attends to, each a first token and the one behind the last: sink, `selected`,
/// window.
std::vector<std::pair<int, int>> attended_tokens(std::span<const std::int32_t> selected,
                                                 const page_rule& rule, int length) {
  std::vector<std::pair<int, int>> runs{{0, std::min(length, rule.first_candidate() * rule.page)}};
  for (const int page : selected) runs.emplace_back(page * rule.page, (page + 1) * rule.page);
  runs.emplace_back(std::min(length, rule.end_of_candidates(length) * rule.page), length);
  return runs;
}

double mass_of(const std::vector<double>& masses, const std::vector<std::pair<int, int>>& runs) {
  double kept = 0;
  for (const auto& [first, end] : runs)
    kept = std::accumulate(masses.begin() + first, masses.begin() + end, kept);
  return kept;
}

/// What a selection found of the true one: sums over steps, layers and heads.
struct selection_statistics {
  double recall = 0, mass = 0;
  long long kv_heads = 0, query_heads = 0;

  void add(const true_selection& truth, std::span<const std::int32_t> pages, const page_rule& rule) {
    const auto found = std::count_if(pages.begin(), pages.end(), [&](std::int32_t page) {
      return std::binary_search(truth.pages.begin(), truth.pages.end(), page);
    });
    recall += truth.pages.empty() ? 1 : static_cast<double>(found) / static_cast<double>(truth.pages.size());
    ++kv_heads;
    const auto runs = attended_tokens(pages, rule, static_cast<int>(truth.masses[0].size()));
    for (const auto& masses : truth.masses) mass += mass_of(masses, runs);
    query_heads += static_cast<long long>(truth.masses.size());
  }
  double mean_recall() const { return kv_heads > 0 ? recall / static_cast<double>(kv_heads) : 0; }
  double mean_mass() const { return query_heads > 0 ? mass / static_cast<double>(query_heads) : 0; }
};

/// What selections are held against.
struct exact_setting {
  const model_shape& shape;
  page_rule rule;
  int complete_layers;
  exact_keys& keys;
};

/// A pipeline as attention, its selections held against the true ones.
class judged_retrieval : public attention {
 public:
  judged_retrieval(pipeline& p, const exact_setting& s)
      : pipeline_(p), setting_(s), retrieval_(p, s.shape, s.complete_layers) {}

  void attend(const layer_rows& rows, float* output) override {
    retrieval_.attend(rows, output);
    setting_.keys.put(rows);
    if (rows.layer < setting_.complete_layers || setting_.shape.slides(rows.layer)) return;
    const step_report report = pipeline_.report(rows.layer);
    const std::size_t most = report.attended.size() / report.attended_count.size();
    for (int head = 0; head < setting_.shape.kv_heads; ++head) {
      const auto h = to_size(head);
      statistics_.add(select_truly(setting_.keys, setting_.shape, rows, head, setting_.rule),
                      report.attended.subspan(h * most, to_size(report.attended_count[h])), setting_.rule);
    }
  }
  const selection_statistics& statistics() const { return statistics_; }

 private:
  pipeline& pipeline_;
  exact_setting setting_;
  retrieval_attention retrieval_;
  selection_statistics statistics_;
};

// What is compared.

/// A point of a picture: its family has a colour, its series a line.
struct frontier_case {
  std::string family, series, form;
  method_spec method;

  std::string name() const { return form.empty() ? series : series + ", " + form; }
};

void add_formats(std::vector<frontier_case>& cases, const std::string& series, const method_spec& method) {
  for (const auto& format : formats) {
    cases.push_back({method.summary, series, std::string(format.name), method});
    cases.back().method.format = format.name;
  }
}

std::string bits_of(int bits) { return std::to_string(bits) + (bits == 1 ? " bit" : " bits"); }

/// Ranks and bits of key_subspace from the cheapest that are of any use to the dearest that still gain.
void add_subspaces(std::vector<frontier_case>& cases, int head_dim, method_spec method) {
  const std::pair<int, std::vector<int>> choices[] = {
      {8, {4, 8}}, {16, {2, 3, 4, 8}}, {24, {2, 3, 4}}, {32, {2, 3, 4}}};
  for (const auto& [rank, all_bits] : choices)
    for (const int bits : all_bits) {
      if (rank > head_dim) continue;
      method.rank = rank;
      method.bits = bits;
      cases.push_back({method.summary, method.summary + " r " + std::to_string(rank), bits_of(bits), method});
    }
}

/// All summaries that programs offer, selecting anew before every attention, so that only selection counts.
std::vector<frontier_case> summary_cases(int head_dim) {
  std::vector<frontier_case> cases;
  for (const auto& summary : summaries) {
    method_spec method{.summary = std::string(summary.name), .correction = "always"};
    if (method.summary == "key_subspace") {
      add_subspaces(cases, head_dim, method);
    } else if (method.summary == "key_sketch") {
      for (method.bits = 1; method.bits <= 4; method.bits *= 2)
        cases.push_back({method.summary, method.summary, bits_of(method.bits), method});
    } else if (method.summary == "key_codes") {
      for (method.codes = 4; method.codes <= 8; method.codes += 2)
        cases.push_back({method.summary, method.summary, std::to_string(method.codes) + " codes", method});
    } else if (method.summary == "coarse_to_fine") {
      for (method.times = 2; method.times <= 4; method.times *= 2)
        cases.push_back({method.summary, method.summary, std::to_string(method.times) + " times", method});
    } else if (method.summary == "chunk_means") {
      for (method.chunk = 4; method.chunk <= 8; method.chunk *= 2)
        add_formats(cases, method.summary + " u " + std::to_string(method.chunk), method);
    } else if (method.summary != "key_signatures") {  // which samples tokens, and does not rank pages
      add_formats(cases, method.summary, method);
    }
  }
  return cases;
}

std::string short_of(double value) {
  std::string text = fixed(value, 2);
  text.erase(text.find_last_not_of('0') + 1);
  return text;
}

/// All triggers, each with thresholds from strict to lax.
std::vector<frontier_case> correction_cases(const method_spec& base) {
  std::vector<frontier_case> cases;
  const auto add = [&](const std::string& series, const std::string& form, method_spec method) {
    cases.push_back({series, series, form, std::move(method)});
  };
  method_spec method = base;
  for (const char* name : {"always", "never"}) method.correction = name, add(name, "", method);
  method.correction = "cosine_drift";
  const std::pair<const char*, std::vector<float>> taus[] = {
      {"mean", {0.5f, 0.7f, 0.8f, 0.9f, 0.95f, 0.99f}}, {"min", {0.8f, 0.9f}}, {"max", {0.8f, 0.9f}}};
  for (const auto& [pool, all] : taus)
    for (const float tau : all) {
      method.drift_pool = pool, method.tau = tau;
      add(std::string("cosine_drift, ") + pool, "tau " + short_of(tau), method);
    }
  method = base;
  method.correction = "every_n_steps";
  for (method.every = 2; method.every <= 16; method.every *= 2)
    add("every_n_steps", "n " + std::to_string(method.every), method);
  method.correction = "mass_deficit";
  for (const bool partial : {false, true})
    for (const float delta : {0.05f, 0.1f, 0.2f, 0.4f}) {
      method.partial = partial, method.delta = delta;
      add(partial ? "mass_deficit, partial" : "mass_deficit", "delta " + short_of(delta), method);
    }
  method.delta = 0.2f;
  method.selection = "sticky_top_k";
  for (const float bonus : {0.35f, 0.69f, 1.4f, 2.8f}) {
    method.bonus = bonus;
    add("sticky_top_k, mass_deficit, partial", "delta 0.2, bonus " + short_of(bonus), method);
  }
  return cases;
}

contender contender_of(const frontier_case& c) {
  contender it{c.name(), c.method};
  if (it.learns()) it.basis = basis_source::prompt;
  return it;
}

// Measurements.

struct needle_score {
  double loss = 0;  ///< nats per digit, mean over the facts
  int found = 0;
};

/// A text with facts, which is the prompt, and what is asked for.
struct needle_setting : needle_text {
  prepared_prompt prompt;

  int longest() const {
    std::size_t most = 0;
    for (const auto& q : questions) most = std::max(most, q.tokens.size());
    return static_cast<int>(most);
  }
};

struct summary_point {
  std::size_t bytes = 0;
  std::map<std::size_t, needle_score> needles;  ///< by tokens
  selection_statistics selection;
};

/// Both parts, on the same prompts.
class frontier {
 public:
  explicit frontier(job& j);
  void compare_summaries();
  void compare_corrections();

 private:
  static constexpr int judged_steps = 16;  // of all heads of all layers: thousands of selections

  const model_shape& shape() const { return j_.model().shape(); }
  engine::options decoding() const { return {.threads = settings_.threads, .context = 1, .rows = 1}; }
  prepared_prompt prepare(std::span<const llama_token> tokens);
  needle_setting hide(int tokens);
  std::span<const llama_token> running_text(int steps) const;
  nlohmann::ordered_json at(const frontier_case& c, const char* route) const;

  needle_score measure_needles(const contender& c, const needle_setting& needles);
  std::optional<std::size_t> bytes_of(const contender& c);
  summary_point measure(const contender& c, exact_keys& keys);
  summary_point measure_full();
  void write(const frontier_case& c, const summary_point& p);
  std::vector<std::string> row(const frontier_case& c, const summary_point& p) const;

  job& j_;
  common_settings settings_;
  page_rule rule_;
  const learnt_keys of_other_text_{};  // nobody's: all learn from the prompt
  prepared_prompt text_;
  std::vector<needle_setting> needles_;  // the first is of the corrections too
};

common_settings settings_of(const arguments& a) {
  common_settings s = a.common;
  s.budget = a.needle_budgets.front();
  return s;
}

frontier::frontier(job& j)
    : j_(j),
      settings_(settings_of(j.options())),
      rule_{settings_.page, settings_.sink, settings_.window,
            (settings_.budget - settings_.sink - settings_.window) / settings_.page},
      text_(prepare(j.text().first(to_size(j.options().prompt)))) {
  const arguments& a = j.options();
  std::set<int> lengths{*std::max_element(a.needle_tokens.begin(), a.needle_tokens.end())};
  if (a.full) lengths.insert(*std::max_element(a.lengths.begin(), a.lengths.end()));
  for (const int length : lengths) needles_.push_back(hide(length));
}

/// With what all summaries learn from it. The first rows of a basis are the basis of a smaller rank.
prepared_prompt frontier::prepare(std::span<const llama_token> tokens) {
  prompt_cache kv(j_.model(), tokens, j_.place(), j_.progress());
  learnt_keys learnt;
  std::map<basis_rows, int> ranks;
  for (const auto& c : summary_cases(shape().head_dim)) {
    if (c.method.needs_basis()) {
      int& most = ranks[c.method.rows_of_basis()];
      most = std::max(most, c.method.basis_rank(kv.tokens()));
    }
    if (c.method.needs_codebooks())
      learnt.codebooks.emplace(
          std::pair(c.method.codes, c.method.unit),
          kv.learn_codebooks(codebook_sizes::of_codes(c.method.codes, j_.model().shape().head_dim,
                                                      c.method.unit_tokens(settings_.page)),
                             j_.progress()));
  }
  for (const auto& [rows, rank] : ranks) learnt.bases.emplace(rows, kv.learn_basis(rows, rank));
  return {std::move(kv), std::move(learnt), of_other_text_};
}

needle_setting frontier::hide(int tokens) {
  needle_text hidden = hide_needles(j_.model(), read_text(j_.options().needle_text), tokens);
  prepared_prompt prompt = prepare(hidden.tokens);
  return {std::move(hidden), std::move(prompt)};
}

/// `steps` tokens after the prompt, and one more.
std::span<const llama_token> frontier::running_text(int steps) const {
  return j_.text().subspan(to_size(j_.options().prompt), to_size(steps) + 1);
}

nlohmann::ordered_json frontier::at(const frontier_case& c, const char* route) const {
  return {{"family", c.family},
          {"series", c.series},
          {"form", c.form},
          {"budget", settings_.budget},
          {"route", route}};
}

needle_score frontier::measure_needles(const contender& c, const needle_setting& needles) {
  host_backend backend({.threads = settings_.threads, .overlap = settings_.overlap});
  const auto p = make_contender(c, settings_, shape(), needles.prompt, needles.longest(), true, backend);
  engine model(j_.model(), decoding());
  retrieval_attention attention(*p, shape(), settings_.complete_layers);
  needle_score score;
  for (const auto& q : needles.questions) {
    needles.prompt.kv.restore(*p);
    double loss = 0;
    bool found = true;
    for (std::size_t i = 0; i + 1 < q.tokens.size(); ++i) {
      const auto logits =
          model.decode(q.tokens[i], needles.prompt.kv.tokens() + static_cast<int>(i), attention);
      if (i + 1 < q.tokens.size() - to_size(q.digits)) continue;
      loss += loss_of(logits, q.tokens[i + 1]);
      found = found && most_likely(logits) == q.tokens[i + 1];
    }
    score.loss += loss / static_cast<double>(q.digits) / static_cast<double>(needles.questions.size());
    score.found += found;
  }
  return score;
}

/// Nothing for a summary that this model or these settings cannot have; says why.
std::optional<std::size_t> frontier::bytes_of(const contender& c) {
  try {
    host_backend backend({.threads = 1});
    return summary_bytes_of(c, *make_contender(c, settings_, shape(), text_, 1, true, backend));
  } catch (const settings_error& error) {
    std::cerr << "note: " << c.name << " is left out: " << error.what() << "\n";
    return std::nullopt;
  }
}

summary_point frontier::measure(const contender& c, exact_keys& keys) {
  summary_point point;
  for (const auto& needles : needles_) point.needles[needles.tokens.size()] = measure_needles(c, needles);
  host_backend backend({.threads = settings_.threads, .overlap = settings_.overlap});
  const auto p = make_contender(c, settings_, shape(), text_, judged_steps, true, backend);
  text_.kv.restore(*p);
  engine model(j_.model(), decoding());
  judged_retrieval attention(*p, {shape(), rule_, settings_.complete_layers, keys});
  const auto text = running_text(std::min(judged_steps, j_.options().deep_steps));
  for (std::size_t i = 0; i + 1 < text.size(); ++i)
    model.decode(text[i], text_.kv.tokens() + static_cast<int>(i), attention);
  point.bytes = summary_bytes_of(c, *p);
  point.selection = attention.statistics();
  return point;
}

summary_point frontier::measure_full() {
  summary_point point;
  for (const auto& needles : needles_)
    point.needles[needles.tokens.size()] = measure_needles({"full", {.plan = "complete"}}, needles);
  point.selection = {1, 1, 1, 1};  // all pages, all mass
  return point;
}

void frontier::write(const frontier_case& c, const summary_point& p) {
  const auto add = [&](const char* metric, double value, const char* unit, nlohmann::ordered_json more) {
    j_.lines().add("summary_frontier", c.name(), metric, value, unit, more);
  };
  const auto here = at(c, "in_place");
  if (p.bytes > 0) add("summary_bytes", static_cast<double>(p.bytes), "per page and KV head", here);
  for (const auto& [tokens, score] : p.needles) {
    auto there = here;
    there["needle_tokens"] = tokens;
    there["text"] = std::filesystem::path(j_.options().needle_text).filename().string();
    add("loss_per_digit", score.loss, "nats", there);
    add("facts_found", score.found, "of 8", there);
  }
  add("recall", p.selection.mean_recall(), "of the pages of most true mass", here);
  add("mass_kept", p.selection.mean_mass(), "", here);
}

std::vector<std::string> frontier::row(const frontier_case& c, const summary_point& p) const {
  std::vector<std::string> cells{c.name(), p.bytes > 0 ? std::to_string(p.bytes) : ""};
  for (const auto& [tokens, score] : p.needles)
    cells.insert(cells.end(), {fixed(score.loss, 2), std::to_string(score.found) + "/8"});
  cells.push_back(fixed(100 * p.selection.mean_recall(), 1) + " %");
  cells.push_back(fixed(100 * p.selection.mean_mass(), 1) + " %");
  return cells;
}

void frontier::compare_summaries() {
  std::vector<std::vector<std::string>> rows{
      {"summaries, always corrected, budget " + std::to_string(settings_.budget), "bytes/page/head"}};
  for (const auto& needles : needles_)
    rows[0].insert(rows[0].end(), {"loss/digit, " + std::to_string(needles.tokens.size()), "found"});
  rows[0].insert(rows[0].end(), {"recall", "mass"});
  const auto keep = [&](const frontier_case& c, const summary_point& p) {
    write(c, p);
    rows.push_back(row(c, p));
  };
  const auto cases = summary_cases(shape().head_dim);
  exact_keys keys(shape(), text_.kv, judged_steps);
  j_.progress()("frontier of summaries: full attention and true page mass", 0);
  keep({"full", "full", "", {}}, measure_full());
  const contender best = true_mass_of(0);
  summary_point truth = measure(best, keys);
  truth.bytes = 0;  // no summary that it is beside would have its keys
  keep({best.name, best.name, "", best.method}, truth);
  // A format that takes as many bytes as the summary's own is that one.
  std::map<std::pair<std::string, std::size_t>, summary_point> known;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const contender c = contender_of(cases[i]);
    j_.progress()(
        "frontier of summaries " + std::to_string(i + 1) + "/" + std::to_string(cases.size()) + ": " + c.name,
        static_cast<double>(i + 1) / static_cast<double>(cases.size()));
    const auto bytes = bytes_of(c);
    if (!bytes) continue;
    const bool has_format = std::any_of(std::begin(formats), std::end(formats),
                                        [&](const auto& f) { return f.name == cases[i].form; });
    const std::pair key{has_format ? cases[i].series : c.name, *bytes};
    if (!known.contains(key)) known[key] = measure(c, keys);
    keep(cases[i], known[key]);
  }
  j_.say("\n" + table(rows) + "facts as in the section needles; recall: of the " +
         std::to_string(rule_.selected) +
         " candidate pages with the most attention mass (softmax over\nthe candidates, mean over the group), "
         "in " +
         std::to_string(std::min(judged_steps, j_.options().deep_steps)) + " tokens after " +
         std::to_string(j_.options().prompt) +
         "; mass: share of full attention's softmax mass on\nwhat is attended; "
         "true page mass: those pages themselves, chosen by the keys. Route in_place.\n");
}

void frontier::compare_corrections() {
  const arguments& a = j_.options();
  const needle_setting& needles = needles_.front();
  std::vector<std::vector<std::string>> rows{
      {"corrections of " + a.frontier_summary + ", budget " + std::to_string(settings_.budget),
       "loss/digit, " + std::to_string(needles.tokens.size()), "found", "error", "corrected", "critical",
       "recalled"}};
  const auto cases = correction_cases({.summary = a.frontier_summary});
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const contender c = contender_of(cases[i]);
    j_.progress()("frontier of corrections " + std::to_string(i + 1) + "/" + std::to_string(cases.size()) +
                      ": " + c.name,
                  static_cast<double>(i + 1) / static_cast<double>(cases.size()));
    const needle_score score = measure_needles(c, needles);
    const quality q = measure_quality(c, settings_, j_.model(), {text_, running_text(a.deep_steps), "steps"},
                                      [](const std::string&, double) {});
    const auto& s = q.attention;
    const auto per_head = [&](long long sum) {
      return s.rows > 0 ? static_cast<double>(sum) / static_cast<double>(s.rows) : 0.0;
    };
    const double critical = per_head(s.recalled_before_attention), recalled = per_head(s.recalled);
    auto here = at(cases[i], "resident");
    here["summary"] = a.frontier_summary;
    here["steps"] = a.deep_steps;
    auto there = here;
    there["needle_tokens"] = needles.tokens.size();
    there["text"] = std::filesystem::path(a.needle_text).filename().string();
    there["route"] = "in_place";
    const auto add = [&](const char* metric, double value, const char* unit,
                         const nlohmann::ordered_json& more) {
      j_.lines().add("correction_frontier", c.name, metric, value, unit, more);
    };
    add("loss_per_digit", score.loss, "nats", there);
    add("facts_found", score.found, "of 8", there);
    add("attention_error", s.mean_error(), "relative L2", here);
    add("corrected", s.corrected_share(), "of heads", here);
    add("pages_critical", critical, "per KV head and step", here);
    add("pages_recalled", recalled, "per KV head and step", here);
    rows.push_back({c.name, fixed(score.loss, 2), std::to_string(score.found) + "/8",
                    fixed(s.mean_error(), 3), fixed(100 * s.corrected_share(), 0) + " %", fixed(critical, 2),
                    fixed(recalled, 2)});
  }
  j_.say("\n" + table(rows) + "error: relative L2 of a head's attention output, in " +
         std::to_string(a.deep_steps) + " tokens after " + std::to_string(a.prompt) +
         ", as are the columns behind it; corrected: KV heads\nthat "
         "select or exchange pages before they attend, in the first step all of them; recalled: pages "
         "brought to the "
         "slots, a KV head\nand step; critical: those of them that attention waits for. Facts on route "
         "in_place, the "
         "rest resident.\n");
}

}  // namespace

void compare_frontier(job& j) {
  frontier both(j);
  both.compare_summaries();
  both.compare_corrections();
}

}  // namespace freekv::examples
