#include "job.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <freekv/core/size.hpp>
#include <fstream>
#include <iostream>
#include <iterator>
#include <set>
#include <utility>

#include "cited.hpp"
#include "fatal_signals.hpp"
#include "frontier.hpp"
#include "head_list.hpp"
#include "self_check.hpp"

namespace freekv::examples {

namespace {

/// The variant that a --head-list begins with, or nullptr.
const named_variant* named_by(std::string_view given) {
  const std::size_t equals = given.find('=');
  const auto found = std::find_if(variants().begin(), variants().end(), [&](const auto& v) {
    return equals != given.npos && v.name == given.substr(0, equals);
  });
  return found == variants().end() ? nullptr : &*found;
}

/// The file of a variant's list of heads; empty if none is given for it. One that is given for no variant by
/// name is all variants', where `by_any_name`.
std::string head_list_of(std::string_view variant, const arguments& a, bool by_any_name) {
  for (const std::string& given : a.head_lists) {
    const named_variant* const named = named_by(given);
    if (named != nullptr && named->name == variant) return given.substr(variant.size() + 1);
    if (named == nullptr && by_any_name) return given;
  }
  return {};
}

/// All rows there are. What is learnt from another text is shown for the first variant of each kind that
/// needs it and is not deep.
std::vector<contender> all_contenders(const arguments& a, const model_shape& shape) {
  std::vector<contender> all;
  bool lent_basis = false, lent_codebooks = false;
  for (const auto& variant : variants()) {
    if (variant.method.takes_worths()) continue;  // the models here have no gates that say them
    contender c{std::string(variant.name), variant.method};
    if (c.method.tau == method_spec{}.tau) c.method.tau = a.tau;
    c.method.codes = a.codes;
    c.page = variant.page;
    c.budget_share = variant.budget_share;
    c.deep = variant.deep;
    const std::string heads = head_list_of(variant.name, a, c.method.needs_head_list());
    if (c.method.needs_head_list() && !heads.empty())
      c.head_kinds = read_head_list(heads, shape.layers, shape.kv_heads);
    if (c.method.takes_voters() && !heads.empty())
      c.voters = read_voters(heads, shape.layers, shape.query_heads);
    if (c.learns()) c.basis = basis_source::prompt;
    all.push_back(c);
    if (c.deep) continue;
    c.basis = basis_source::other_text;
    if (c.method.needs_basis() && !std::exchange(lent_basis, true)) {
      c.name += ", other text's basis";
      all.push_back(c);
    } else if (c.method.needs_codebooks() && !std::exchange(lent_codebooks, true)) {
      c.name += ", other text's codebooks";
      all.push_back(c);
    }
  }
  return all;
}

/// Beside each row whose layers may differ, the same by the list of --by-layer. Throws choice_error where
/// their budgets are not the common one in the mean.
void add_rows_by_layer(std::vector<contender>& all, const arguments& a, const model_shape& shape) {
  const auto by_layer = read_layer_list(a.by_layer, shape.layers);
  const int common = a.common.budget - a.common.sink - a.common.window;
  int layers = 0, tokens = 0;
  for (int layer = a.common.complete_layers; layer < shape.layers; ++layer) {
    if (shape.slides(layer)) continue;
    ++layers;
    tokens += by_layer[to_size(layer)].selected_tokens.value_or(common);
  }
  const std::string file = "--by-layer " + a.by_layer;
  if (tokens != layers * common)
    throw choice_error(file + " selects " + std::to_string(tokens) + " tokens in the " +
                       std::to_string(layers) + " layers that retrieve, and --budget " +
                       std::to_string(a.common.budget) + " is " + std::to_string(layers * common) +
                       " of them; have --section by_layer learn it with this budget");
  const std::size_t rows = all.size();
  for (std::size_t i = 0; i < rows; ++i) {
    contender c = all[i];
    if (!c.may_differ_by_layer() || c.basis == basis_source::other_text) continue;
    const int unit = c.method.unit_tokens(c.page > 0 ? c.page : a.common.page);
    for (const layer_values& of : by_layer)
      if (of.selected_tokens && *of.selected_tokens % unit != 0)
        throw choice_error(file + " has a layer of " + std::to_string(*of.selected_tokens) + " tokens, and " +
                           c.name + " selects " + std::to_string(unit) +
                           " at a time; take multiples, or leave the row out by --variant");
    c.name += std::string(row_by_layer);
    c.by_layer = by_layer;
    c.budget_by_layer = a.common.budget;
    c.deep = true;  // not swept: its budget is this one
    all.push_back(std::move(c));
  }
}

/// Gives a method the correction of a --correction: NAME, NAME=VALUE or NAME=VALUE,SAMPLES.
void correct_by(method_spec& m, const std::string& text) {
  const std::size_t equals = text.find('='), comma = text.find(',', equals == text.npos ? 0 : equals);
  m.correction = text.substr(0, std::min(equals, comma));
  find_by_name("--correction", corrections, m.correction);
  m.delta = m.usual_delta();
  const auto number = [&](std::size_t first, std::size_t last) {
    const std::string digits = text.substr(first, last == text.npos ? last : last - first);
    char* end = nullptr;
    const float value = std::strtof(digits.c_str(), &end);
    if (digits.empty() || *end != '\0')
      throw choice_error("--correction " + text + ": " + cited(digits) + " is not a number");
    return value;
  };
  const auto whole = [&](std::size_t first, std::size_t last) {
    const float value = number(first, last);
    if (!(value >= 1 && value <= 1 << 20) || value != std::floor(value))
      throw choice_error("--correction " + text + ": steps and samples are whole numbers from 1 to " +
                         std::to_string(1 << 20));
    return static_cast<int>(value);
  };
  if (comma != text.npos) {
    if (m.correction != verified_share::name)
      throw choice_error("--correction " + text + ": only verified_share has samples");
    m.samples = whole(comma + 1, text.npos);
  }
  if (equals == text.npos) return;
  if (m.correction == always::name || m.correction == never::name)
    throw choice_error("--correction " + text + ": " + m.correction + " takes no number");
  const float value = number(equals + 1, comma);
  if (m.correction == cosine_drift::name) m.tau = value;
  if (m.correction == verified_share::name) m.epsilon = value;
  if (m.correction == mass_deficit::name || m.correction == missing_share::name) m.delta = value;
  if (m.correction == every_n_steps<>::name) m.every = whole(equals + 1, comma);
}

/// Full attention first, then those asked for.
std::vector<contender> contenders_of(const arguments& a, const model_shape& shape) {
  for (const std::string& given : a.head_lists)
    if (const auto* const variant = named_by(given);
        variant != nullptr && !variant->method.needs_head_list() && !variant->method.takes_voters())
      throw choice_error("--head-list " + given + ": " + std::string(variant->name) +
                         " takes no list of heads");
  std::vector<contender> all = all_contenders(a, shape);
  const std::set<std::string> only(a.only.begin(), a.only.end());
  for (const auto& name : only)
    if (std::none_of(all.begin(), all.end(), [&](const contender& c) { return c.name == name; })) {
      const auto variant =
          std::find_if(variants().begin(), variants().end(), [&](const auto& v) { return v.name == name; });
      if (variant != variants().end() && variant->method.takes_worths())
        throw choice_error(
            "--variant " + name +
            " goes by what trained gates say of each token, and the models that run here have "
            "none; replay a trace that has their worths with freekv-replay, or give them to an "
            "evicting_pipeline");
      std::string names;
      for (const auto& c : all) names += (names.empty() ? "" : "; ") + c.name;
      throw choice_error("--variant " + name + " is unknown; choose among: " + names);
    }
  const auto coded =
      std::find_if(all.begin(), all.end(), [](const contender& c) { return c.name == "freekv_key_codes"; });
  const contender stored = *coded;
  std::vector<contender> corrected{stored};
  std::copy_if(all.begin(), all.end(), std::back_inserter(corrected), [&](const contender& c) {
    return c.name != stored.name && c.method.needs_codebooks() && only.count(c.name) > 0;
  });
  std::set<std::string> asked{"full"};
  for (const auto& correction : a.corrections)
    for (const contender& of : corrected) {
      all.push_back(of);
      all.back().deep = false;
      all.back().name += ", " + correction;
      asked.insert(all.back().name);
      correct_by(all.back().method, correction);
    }
  for (const int pages : a.true_mass)
    for (const int unit : {0, 4}) {
      all.push_back(true_mass_of(unit, pages));
      asked.insert(all.back().name);
    }
  for (const auto& codec : a.codecs) {
    if (codec == low_rank_keys<>::name && !shape.rotary)
      throw choice_error(
          "--codec low_rank_keys needs the model's rotary embedding, which the file does not say in full; "
          "take another model");
    all.push_back(stored);
    all.back().name += ", " + codec + " store";
    asked.insert(all.back().name);
    all.back().method.codec = codec;
  }
  std::erase_if(all, [&](contender& c) {
    const bool is_named = only.count(c.name) > 0;
    if (asked.count(c.name) > 0) return false;
    if (only.empty() ? c.deep && !a.full : !is_named) return true;
    if (is_named) c.deep = false;
    std::string lacks;
    if (shape.sliding_window > 0 && (c.method.needs_head_list() || !c.voters.empty()))
      lacks =
          "is for models whose layers all attend to the whole sequence, and this one's slide; leave it out";
    else if (c.method.needs_head_list() && c.head_kinds.empty())
      lacks = "needs a list of heads; give --head-list FILE";
    else if (c.method.needs_factors() && !shape.rotary)
      lacks = "needs the model's rotary embedding, which the file does not say in full; take another model";
    else if (c.method.basis_of_pairs && !shape.pairs)
      lacks =
          "chooses among rotary pairs, and the file does not say that all of a key turns; take another model";
    else if (!fits(c, a.common))
      lacks = "has no page to select in its share of a budget of " + std::to_string(a.common.budget) +
              " tokens, or pages that sink and window are no multiples of; give a larger --budget";
    if (lacks.empty()) return false;
    if (is_named) throw choice_error("--variant " + c.name + " " + lacks);
    std::cerr << "note: " << c.name << " is left out: it " << lacks << "\n";
    return true;
  });
  if (!a.by_layer.empty()) add_rows_by_layer(all, a, shape);
  return all;
}

/// How much of --text the sections need.
int text_tokens(const arguments& a) {
  int needed = 1;
  for (const char* name : {"quality", "budgets", "taus", "poolings", "sources", "queries", "speed", "stages",
                           "continuation", "generate", "draft", "frontier", "hard_kv", "arkv", "by_layer"})
    if (a.does(name)) needed = std::max(needed, a.prompt + std::max(a.steps, a.deep_steps) + 1);
  if (a.does("batch")) needed = std::max(needed, a.prompt + a.steps + a.batch);  // different parts
  if (a.does("lengths"))
    for (const int length : a.lengths) needed = std::max(needed, length + 1);
  return needed;
}

nlohmann::ordered_json run_of(const arguments& a, const model_shape& shape) {
  return {{"model", shape.name},
          {"sliding_layers", std::count(shape.sliding.begin(), shape.sliding.end(), true)},
          {"text", std::filesystem::path(a.text).filename().string()},
          {"prompt", a.prompt},
          {"steps", a.steps},
          {"page", a.common.page},
          {"sink", a.common.sink},
          {"window", a.common.window},
          {"budget", a.common.budget},
          {"tau", a.tau},
          {"complete_layers", a.common.complete_layers},
          {"basis_tokens", a.basis_tokens},
          {"calibration", std::filesystem::path(a.calibration).filename().string()},
          {"overlap", a.common.overlap},
          {"threads", a.common.threads},
          {"machine", processor_name()},
          {"instructions", host::name_of(host::best_isa())},
          {"compiler", __VERSION__},
          {"commit", a.commit}};
}

std::string sliding_text(const model_shape& shape) {
  if (shape.sliding_window == 0) return {};
  const auto slide = std::count(shape.sliding.begin(), shape.sliding.end(), true);
  return "; " + std::to_string(slide) + " layers slide over " + std::to_string(shape.sliding_window) +
         " tokens, and " + std::to_string(shape.layers - slide) + " retrieve";
}

std::string results_in(const std::string& folder) {
  std::filesystem::create_directories(folder);
  return folder + "/results.jsonl";
}

examples::model checked_model(const std::string& path, std::uint64_t key, int threads) {
  note_stage("loading the model");
  note_remark(processor_and_build() + "; " + rebuild_remedy());
  examples::model loaded(path);
  note_stage("checking the model");
  check_model(loaded, find_known(key), threads);
  note_stage("preparing");
  note_remark("");
  return loaded;
}

constexpr std::array all_sections{section{"needles", compare_needles, 0.53},
                                  section{"quality", compare_quality, 0.37},
                                  section{"budgets", compare_budgets},
                                  section{"taus", compare_taus},
                                  section{"poolings", compare_poolings},
                                  section{"sources", compare_sources},
                                  section{"queries", compare_queries},
                                  section{"speed", compare_speed, 0.1},
                                  section{"lengths", compare_lengths},
                                  section{"stages", compare_stages},
                                  section{"continuation", compare_continuation},
                                  section{"generate", compare_generated},
                                  section{"batch", compare_batch},
                                  section{"draft", compare_drafts},
                                  section{"tasks", compare_tasks},
                                  section{"frontier", compare_frontier},
                                  section{"hard_kv", compare_hard_kv},
                                  section{"arkv", compare_arkv},
                                  section{"by_layer", learn_by_layer}};

}  // namespace

std::span<const section> sections() { return all_sections; }

const section* find_section(const std::string& name) {
  const auto found = std::find_if(all_sections.begin(), all_sections.end(),
                                  [&](const section& s) { return name == s.name; });
  return found == all_sections.end() ? nullptr : &*found;
}

std::string section_names() {
  std::string names;
  for (const section& s : all_sections) names += (names.empty() ? "" : ", ") + std::string(s.name);
  return names;
}

job::job(const arguments& wanted)
    : options_(wanted),
      place_{wanted.cache, key_of_file(wanted.model), wanted.common.threads},
      model_(checked_model(wanted.model, place_.model_key, wanted.common.threads)),
      text_(first_tokens(model_, wanted.text, text_tokens(wanted))),
      contenders_(contenders_of(wanted, model_.shape())),
      lines_(results_in(wanted.out), run_of(wanted, model_.shape())),
      table_(wanted.out + "/table.txt.part") {
  if (!table_)
    throw file_error("'" + wanted.out +
                     "/table.txt.part' cannot be written; choose another folder with --out");
  if (wanted.does("hard_kv") && wanted.common.complete_layers >= model_.shape().layers)
    throw choice_error("--section hard_kv compares layers that forget, and --complete-layers leaves none");
  (void)lenders_beside(wanted.text);  // which may throw, so before there is work
  if (wanted.does("needles")) (void)lenders_beside(wanted.needle_text);
  note_remark("what was measured by then is in '" + wanted.out + "/results.jsonl.part'");
  for (const contender& c : contenders_)
    if (c.method.tau != wanted.tau) lines_.set_case(c.name, {{"tau", c.method.tau}});
  std::copy_if(contenders_.begin(), contenders_.end(), std::back_inserter(principal_),
               [](const contender& c) { return !c.deep; });
  place_.queries = wanted.does("hard_kv") || wanted.does("arkv") ||
                   std::any_of(contenders_.begin(), contenders_.end(), [](const contender& c) {
                     return c.method.evicts() || c.method.basis_of_pairs || c.method.needs_temperatures() ||
                            c.method.needs_channels() || c.method.completes() || c.method.thins();
                   });
  if (std::any_of(contenders_.begin(), contenders_.end(),
                  [](const contender& c) { return c.method.takes_probes(); }))
    place_.probes = std::max(dapq{}.window, epi_cache{}.window);
  const auto& shape = model_.shape();
  const int longest = std::max(
      {static_cast<int>(text_.size()), wanted.does("generate") ? wanted.prompt + wanted.generate + 1 : 0,
       wanted.does("continuation") ? wanted.prompt + wanted.own_continuation + 1 : 0});
  if (longest > shape.trained_context)
    std::cerr << "note: " << longest << " tokens are more than the " << shape.trained_context
              << " the model was trained for\n";
  say(shape.name + ": " + std::to_string(shape.layers) + " layers, " + std::to_string(shape.query_heads) +
      "/" + std::to_string(shape.kv_heads) + " heads of " + std::to_string(shape.head_dim) +
      sliding_text(shape) + "; text " + std::filesystem::path(wanted.text).filename().string() + "\n");
}

std::optional<std::size_t> job::quest() const {
  const auto at = std::find_if(contenders_.begin(), contenders_.end(),
                               [](const contender& c) { return c.name == "quest"; });
  if (at == contenders_.end()) return {};
  return to_size(at - contenders_.begin());
}

const prepared_prompt& job::prompt() {
  if (!prompt_)
    prompt_.emplace(prepare(text().first(to_size(options_.prompt)), options_.text, options_.does("speed")));
  return *prompt_;
}

std::span<const llama_token> job::after_prompt(std::span<const llama_token> text) const {
  return text.subspan(to_size(options_.prompt), to_size(options_.steps) + 1);
}

prepared_prompt job::prepare(std::span<const llama_token> tokens, const std::string& from, bool timed) {
  prompt_cache::place at = place_;
  at.state = timed;
  prompt_cache kv(model_, tokens, at, progress());
  learnt_keys own = learn(kv, basis_source::prompt);
  prepared_prompt prompt{std::move(kv), std::move(own), learnt_beside(from)};
  for (const contender& c : contenders_)
    if (c.method.needs_channels()) prompt.channels.emplace(c.name, prompt.kv.learn_channels(c.method));
  for (const contender& c : contenders_)
    if (c.method.needs_temperatures() && fits(c, options_.common))
      prompt.temperatures.emplace(c.name, prompt.kv.learn_temperatures(options_of(
                                              c, options_.common, model_.shape(), prompt, 0, true)));
  return prompt;
}

bool job::asks_for(basis_source source) const {
  return std::any_of(contenders_.begin(), contenders_.end(),
                     [&](const auto& c) { return c.basis == source; });
}

learnt_keys job::learn(const prompt_cache& keys, basis_source source) {
  learnt_keys learnt;
  std::map<basis_rows, int> ranks;
  int key_rank = 0;
  for (const contender& c : contenders_) {
    if (c.basis != source) continue;
    if (c.method.needs_factors())
      key_rank = std::max(key_rank, c.method.key_rank_of(model_.shape().kv_heads * model_.shape().head_dim));
    if (c.method.needs_basis()) {
      int& most = ranks[c.method.rows_of_basis()];
      most = std::max(most, c.method.basis_rank(keys.tokens()));
    }
    const std::pair of{c.method.codes, c.method.unit};
    if (c.method.needs_codebooks() && !learnt.codebooks.contains(of))
      learnt.codebooks.emplace(
          of, keys.learn_codebooks(codebook_sizes::of_codes(c.method.codes, model_.shape().head_dim,
                                                            c.method.unit_tokens(options_.common.page)),
                                   progress()));
  }
  for (const auto& [rows, rank] : ranks) learnt.bases.emplace(rows, keys.learn_basis(rows, rank));
  if (key_rank > 0) learnt.factors = keys.learn_factors(key_rank);
  return learnt;
}

std::vector<std::string> job::lenders_beside(const std::string& from) const {
  if (!asks_for(basis_source::other_text)) return {};
  const auto is_other = [&](const std::string& path) {
    std::error_code absent;
    return !path.empty() && (from.empty() || !std::filesystem::equivalent(path, from, absent));
  };
  std::vector<std::string> lenders;
  for (const std::string& path : {options_.needle_text, options_.text})
    if (lenders.empty() && is_other(path)) lenders.push_back(path);
  if (is_other(options_.calibration)) lenders.push_back(options_.calibration);
  if (lenders.empty())
    throw choice_error("rows of another text's basis would learn from what they decode, " + cited(from) +
                       "; give another --needle-text, or leave them out by --variant");
  return lenders;
}

const learnt_keys& job::learnt_beside(const std::string& from) {
  const std::vector<std::string> lenders = lenders_beside(from);
  const auto known = learnt_.find(lenders);
  if (known != learnt_.end()) return known->second;
  if (lenders.empty()) return learnt_[lenders];
  const std::size_t most = std::min(to_size(options_.basis_tokens), to_size(model_.shape().trained_context));
  std::vector<llama_token> tokens;
  for (std::size_t i = 0; i < lenders.size(); ++i) {
    const auto more = model_.tokenize(read_text(lenders[i]));
    const std::size_t share = (most - tokens.size()) / (lenders.size() - i);
    const auto end = more.begin() + static_cast<std::ptrdiff_t>(std::min(more.size(), share));
    tokens.insert(tokens.end(), more.begin(), end);
  }
  prompt_cache::place place = place_;
  place.queries = false;
  place.probes = 0;
  const prompt_cache keys(model_, tokens, place, progress());
  return learnt_.emplace(lenders, learn(keys, basis_source::other_text)).first->second;
}

void job::say(const std::string& text) {
  std::cout << text << std::flush;
  table_ << text << std::flush;
  if (!table_)
    throw file_error(
        "'" + options_.out +
        "/table.txt.part' cannot be written, as on a full disk; results.jsonl.part beside it has "
        "what was measured");
}

void job::keep_in_short(std::string_view row, const std::string& column, const std::string& figure) {
  static constexpr std::pair<std::string_view, std::string_view> shown[] = {
      {"full", "full attention"},
      {"freekv", "freekv, as published"},
      {"freekv_key_codes_sticky", "freekv_key_codes_sticky, recommended"}};
  const auto found =
      std::find_if(std::begin(shown), std::end(shown), [&](const auto& of) { return of.first == row; });
  if (found == std::end(shown)) return;
  auto& columns = in_short_.front();
  const auto at = std::find(columns.begin(), columns.end(), column);
  const auto place = at - columns.begin();
  if (at == columns.end()) columns.push_back(column);
  auto of_row = std::find_if(in_short_.begin(), in_short_.end(),
                             [&](const auto& cells) { return cells.front() == found->second; });
  if (of_row == in_short_.end())
    of_row = in_short_.insert(of_row, std::vector<std::string>{std::string(found->second)});
  for (auto& cells : in_short_) cells.resize(in_short_.front().size());
  (*of_row)[to_size(place)] = figure;
}

void job::finish() {
  if (in_short_.size() > 2 && in_short_.front().size() > 2) say("\n" + table(in_short_));
  lines_.finish();
  const std::string table = options_.out + "/table.txt";
  table_.close();
  if (!table_ || std::rename((table + ".part").c_str(), table.c_str()) != 0)
    throw file_error("'" + table + "' cannot be written; what it would say is in '" + table + ".part'");
}

}  // namespace freekv::examples
