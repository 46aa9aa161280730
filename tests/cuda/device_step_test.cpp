// The whole step on a device, on random cases, against the float64 oracle: agreement as docs/contract.md,
// 13.8 states it, by the comparison that the host's step is held to.
//
// Exit status: 0 all agree, 1 not, 77 no device.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "../property/compare_case.hpp"
#include "../property/events.hpp"
#include "../property/seeds.hpp"
#include "device_pipeline.hpp"
#include "tensor_pipeline.hpp"

namespace {

using namespace tests;
using namespace freekv::examples;

/// Which of the device's pipelines a case is for.
enum class made_of { shapes, policies, summaries, codecs, tensor_cores };

std::unique_ptr<pipeline> make(made_of what, const random_case& c) {
  const auto options = c.with_basis();
  return what == made_of::shapes      ? make_device_shapes(options)
         : what == made_of::policies  ? make_device_policies(options)
         : what == made_of::summaries ? make_device_summaries(options)
         : what == made_of::codecs    ? make_device_codecs(options)
                                      : make_tensor_pipeline(options);
}

/// Exchanges what these pipelines do not have.
void take_what_devices_have(random_case& c, made_of what) {
  auto& o = c.options;
  const device_shape shape = what == made_of::shapes ? device_shapes[c.seed % std::size(device_shapes)]
                             : what == made_of::tensor_cores ? tensor_shape
                                                             : policy_shape;
  o.element = shape.element;
  o.head_dim = shape.head_dim;
  auto& m = o.method;
  dice of_kind(c.seed + 31);
  if (what == made_of::tensor_cores)
    m.rows = of_kind.below(2) == 0 ? "per_query_head" : "per_kv_head";
  else if (what != made_of::policies)
    m.rows = "per_kv_head";
  const bool int8 = what == made_of::tensor_cores && of_kind.below(2) == 0;
  m.codec = what == made_of::codecs ? dice(c.seed + 29).name_of(codecs) : int8 ? "int8_token" : "identity";
  o.store_file.clear();
  o.copy_engines = m.codec == "identity" && c.seed / 4 % 3 == 0;
  if (what != made_of::policies) {
    m.pinning = "no_pins";
    m.pooling = "mean_softmax";
    m.selection = "top_k";
    m.residency = "first_unselected";
    m.spare = 0;
    m.correction = "cosine_drift";
  }
  if (what != made_of::summaries) {
    m.summary = "min_max";
    m.format = "standard";
  }
  if (m.summary == "key_signatures") m.summary = "key_clusters";
  // The data that was drawn is for another head_dim.
  dice d(c.seed + 17);
  m.rank = std::min(m.rank, o.head_dim);
  c.basis_data = random_basis(d, o.kv_heads, m.rank, o.head_dim);
  o.basis = {nullptr, 1, o.kv_heads, m.rank, o.head_dim};
  o.codebooks.head_dim = o.head_dim;
  if (m.summary == "key_codes") c.codebook_data = random_codebooks(d, o.codebooks);
  give_factors(c, d.between(1, 24));
  give_channels(c);
}

/// More layers that are alike; of a case whose policies have no data of layers.
void give_layers(random_case& c, int layers) {
  auto& o = c.options;
  const auto repeat = [&](auto& of_layer) {
    const auto one = of_layer;
    for (int layer = 1; layer < layers; ++layer) of_layer.insert(of_layer.end(), one.begin(), one.end());
  };
  repeat(o.sink_logits);
  repeat(o.head_kinds);
  o.layers = layers;
  c.steps = (c.steps + 1) / 2;
}

/// A small case for a device.
random_case make_device_case(std::uint64_t seed, made_of what) {
  random_case c = make_case(seed);
  dice d(seed + 0x51ed27);
  take_what_devices_have(c, what);
  auto& o = c.options;
  // Many steps with small pages, so that windows move; few with large ones.
  if (d.below(2) == 0) {
    o.page = 8;
    o.budget = {.sink = 8 * d.below(3), .window = 8 * d.between(1, 3), .selected_units = d.between(1, 5)};
    c.prompt = d.between(60, 300);
    c.steps = d.between(8, 24);
  } else {
    c.prompt = std::min(c.prompt, 6 * o.page + d.below(o.page));
    c.steps = std::min(c.steps, 6);
  }
  if (what == made_of::summaries && d.below(4) == 0) {  // few candidates are kept
    o.method.summary = "coarse_to_fine";
    o.method.times = d.between(1, 2);
    o.budget.selected_units = d.between(1, 4);
  }
  o.max_tokens = c.prompt + c.steps;
  if (seed % 5 == 0) give_unit(c, 1 << seed / 5 % 5);
  if (what == made_of::policies && seed % 2 == 0) {
    // Few policies are all of them drawn often: here each correction is, where much is selected and moved.
    o.method.correction = d.name_of(oracle_corrections);
    o.method.rows = d.name_of(selection_scopes);
    if (judged_by_mass(o.method)) o.method.rows = "per_layer";
    if (o.method.rows == "per_layer" && d.below(2) == 0) o.method.correction = "cosine_drift";  // by head
    o.method.pinning = o.method.rows == "per_layer" ? "no_pins" : d.name_of(pinnings);
    o.method.plan = "retrieval";
    o.method.tau = 0.8f;
    o.method.partial = d.below(3) != 0;
    o.in_place = d.below(3) == 0;
    o.budget.selected_units = d.between(3, 12) * o.page / (o.method.unit == 0 ? o.page : o.method.unit);
    if (o.method.pinning != "no_pins") {  // with a choice among the others
      o.method.pinned = d.between(1, 4);
      o.budget.selected_units = d.between(1, 4);
    }
    c.turn = d.one_of({0.1f, 0.3f, 0.7f});  // with the last, some heads of a layer drift and others do not
  }
  return c;
}

/// The same for many sequences.
random_case make_device_events(std::uint64_t seed, made_of what) {
  random_case c = make_events(seed);
  dice d(seed + 0x2545f4);
  take_what_devices_have(c, what);
  auto& o = c.options;
  if (o.page > 16) {  // an interpreter takes long for long prompts
    o.page = 16;
    o.budget = {.sink = 16, .window = 32, .selected_units = 2};
  }
  if (o.selected_tokens > 0) {
    const std::int64_t one = selected_tokens_of_one(o);
    o.selected_tokens = one + d.below(static_cast<int>(one) * 2);
  }
  o.max_decode_rows = std::min(o.max_decode_rows, 5);
  o.max_tokens = std::min(o.max_tokens, 200);
  o.store_tokens = std::min(o.store_tokens, 3 * std::int64_t{o.max_tokens});
  return c;
}

/// Rows of several sequences, as a step takes them.
struct step_rows {
  std::vector<freekv::step_input> sequences;
  std::vector<float> queries, keys, values;

  void add(freekv::sequence_id id, token_source& source, int tokens, freekv::step_phase kind) {
    sequences.push_back({id, tokens, kind});
    for (int t = 0; t < tokens; ++t) {
      source.next();
      queries.insert(queries.end(), source.queries.begin(), source.queries.end());
      keys.insert(keys.end(), source.keys.begin(), source.keys.end());
      values.insert(values.end(), source.values.begin(), source.values.end());
    }
  }
};

/// A prompt of one sequence in all layers, which does not attend.
void take_prompt(pipeline& p, const random_case& c, freekv::sequence_id id, token_source& source,
                 int tokens) {
  step_rows rows;
  rows.add(id, source, tokens, freekv::step_phase::prefill);
  p.begin_step(rows.sequences);
  for (int layer = 0; layer < c.options.layers; ++layer) p.append(layer, rows.keys, rows.values, {});
  p.end_step();
}

/// What a sequence is given and gives in a run.
struct sequence_run {
  explicit sequence_run(const random_case& c) : source(c) {}
  token_source source;
  freekv::sequence_id id{};
  std::vector<float> outputs;  // and log-sum-exps, of all steps and layers
  std::vector<std::int32_t> reports;
};
/// Whether a layer counts as many flagged heads as are flagged; what differs is printed.
bool counts_flagged(const pipeline& p, int layer, int flagged) {
  const int counted = dynamic_cast<const device_controls&>(p).flagged_heads(layer);
  if (counted != flagged)
    std::printf("FAILED layer %d counts %d flagged heads, and %d are flagged\n", layer, counted, flagged);
  return counted == flagged;
}
int flags_of(const freekv::step_report& report) {
  return static_cast<int>(std::count(report.corrected.begin(), report.corrected.end(), 1));
}
bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// How sequences run together. Reports are read after each step, which waits for recall, or never; then
/// prompts come in many steps that nothing waits for either. Launches are as large as the steps, or larger.
struct run_kind {
  bool reports = true, roomy = false;
};

/// Sequences that step together, each with a prompt of its own length and one or two rows a step. None where
/// flags are counted wrongly.
std::vector<sequence_run> run_together(made_of what, const random_case& c,
                                       const std::vector<random_case>& cases, const run_kind& kind = {}) {
  const auto n = [](int x) { return static_cast<std::size_t>(x); };
  const bool reports = kind.reports;
  const auto p = make(what, c);
  if (kind.roomy) dynamic_cast<device_controls&>(*p).size_launches_for(5, 20, 40);
  std::vector<sequence_run> runs(cases.begin(), cases.end());
  for (sequence_run& run : runs) run.id = p->open();
  constexpr int chunk = 7;
  int prompt_steps = 1;
  for (const random_case& one : cases)
    if (!reports) prompt_steps = std::max(prompt_steps, (one.prompt + chunk - 1) / chunk);
  for (int step = -prompt_steps; step < c.steps; ++step) {
    step_rows rows;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const int before = p->tokens(runs[i].id);
      const int prompt = reports ? cases[i].prompt : std::min(chunk, std::max(0, cases[i].prompt - before));
      const int tokens = step < 0 ? prompt : 1 + static_cast<int>((cases[i].seed + n(step)) % 2);
      rows.add(runs[i].id, runs[i].source, tokens,
               step < 0 ? freekv::step_phase::prefill : freekv::step_phase::decode);
    }
    p->begin_step(rows.sequences);
    const std::size_t heads = n(c.options.query_heads), d = n(c.options.head_dim);
    for (int layer = 0; layer < c.options.layers; ++layer) {
      if (step < 0) {
        p->append(layer, rows.keys, rows.values, {});
        continue;
      }
      for (float& q : rows.queries) q *= 0.75f;  // else all layers would select alike
      std::vector<float> out(rows.queries.size()), lse(rows.queries.size() / d);
      p->append(layer, rows.keys, rows.values, rows.queries);
      p->attend(layer, out, lse);
      std::size_t row = 0;
      for (std::size_t i = 0; i < runs.size(); ++i) {
        const std::size_t end = row + n(rows.sequences[i].tokens);
        const auto take = [&](const std::vector<float>& from, std::size_t width) {
          runs[i].outputs.insert(runs[i].outputs.end(), from.begin() + static_cast<long>(row * width),
                                 from.begin() + static_cast<long>(end * width));
        };
        take(out, heads * d);
        take(lse, heads);
        row = end;
      }
    }
    p->end_step();
    for (int layer = c.options.complete_layers; reports && step >= 0 && layer < c.options.layers; ++layer) {
      int flagged = 0;
      for (sequence_run& run : runs) {
        const auto report = p->report(layer, run.id);
        flagged += flags_of(report);
        for (const auto& numbers : {report.recalled, report.promoted, report.attended_count})
          run.reports.insert(run.reports.end(), numbers.begin(), numbers.end());
      }
      if (!counts_flagged(*p, layer, flagged)) return std::vector<sequence_run>(cases.begin(), cases.end());
    }
  }
  return runs;
}

/// Whether a sequence gives the same bits twice, beside other sequences, with larger launches, and where
/// nothing waits for recall but the streams themselves; what differs is printed.
bool same_bits_in_any_batch(std::uint64_t seed, made_of what) {
  random_case c = make_device_case(seed, what);
  auto& o = c.options;
  o.method.plan = "retrieval";
  // One layer comes again at once; of several the scratch is shared.
  o.layers = seed % 2 == 0 ? 1 : 3;
  o.complete_layers = o.layers / 2;
  give_factors(c, o.factors.rank);
  give_channels(c);
  o.sink_logits.clear();
  o.in_place = false;
  o.copy_engines = false;
  o.max_decode_rows = 2;
  o.max_sequences = 3;
  o.page = 8;
  o.budget = {.sink = 8, .window = 16, .selected_units = 3};
  o.method.unit = 0;
  c.steps = 6;
  std::vector<random_case> cases;
  dice d(seed);
  for (int i = 0; i < 3; ++i) {
    cases.push_back(c);
    cases.back().seed = seed * 10 + static_cast<std::uint64_t>(i);
    cases.back().prompt = d.between(20, i == 0 ? 1300 : 300);
    o.max_tokens = std::max(o.max_tokens, cases.back().prompt + 2 * c.steps);
  }
  const auto alone = run_together(what, c, {cases[0]})[0], again = run_together(what, c, {cases[0]})[0];
  const auto last = run_together(what, c, {cases[1], cases[2], cases[0]})[2];
  const auto roomy = run_together(what, c, {cases[1], cases[0]}, {.roomy = true})[1];
  const auto hurried = run_together(what, c, {cases[0], cases[1]}, {.reports = false})[0];
  o.copy_engines = o.method.codec == "identity";
  const auto copied = run_together(what, c, {cases[0], cases[1]}, {.reports = false})[0];
  const auto differs = [&](const sequence_run& other, const char* when) {
    const bool same =
        same_bits(alone.outputs, other.outputs) && (other.reports.empty() || alone.reports == other.reports);
    if (!same) std::printf("FAILED %s\n  a sequence gives other bits %s\n", sentence(c).c_str(), when);
    return !same;
  };
  const bool failed[] = {differs(again, "the second time"), differs(last, "beside others"),
                         differs(roomy, "where launches are larger than the step"),
                         differs(hurried, "where nothing waits for recall but the streams"),
                         differs(copied, "where copy engines recall")};
  return std::none_of(std::begin(failed), std::end(failed), [](bool one) { return one; });
}

/// One decode step of one layer, `tokens` rows of each sequence; what each attends to is added to its
/// outputs.
void decode_one_layer(pipeline& p, const std::vector<sequence_run*>& runs, int tokens = 1) {
  step_rows rows;
  for (sequence_run* run : runs) rows.add(run->id, run->source, tokens, freekv::step_phase::decode);
  std::vector<float> out(rows.queries.size());
  p.begin_step(rows.sequences);
  p.append(0, rows.keys, rows.values, rows.queries);
  p.attend(0, out, {});
  p.end_step();
  const auto width = static_cast<std::ptrdiff_t>(out.size() / runs.size());
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const auto first = out.begin() + static_cast<std::ptrdiff_t>(i) * width;
    runs[i]->outputs.insert(runs[i]->outputs.end(), first, first + width);
  }
}

/// A case of one layer with pages of 8.
random_case one_layer_case(std::uint64_t seed, made_of what, const char* plan) {
  random_case c = make_device_case(seed, what);
  auto& o = c.options;
  o.method.plan = plan;
  o.method.unit = 0;
  o.page = 8;
  o.layers = 1;
  o.budget = {.sink = 8, .window = 16, .selected_units = 3};
  o.max_tokens = 200;
  o.max_sequences = 2;
  return c;
}

/// Whether a sequence and its fork, one of them cut back inside the open page that they share, both give what
/// they give alone when they write to that page in the same step; what differs is printed.
bool forks_write_to_their_open_page(std::uint64_t seed, made_of what) {
  random_case c = one_layer_case(seed, what, what == made_of::codecs ? "retrieval" : "complete");
  c.options.in_place = true;  // attends to the store alone
  constexpr int prompt = 21, cut = 18, steps = 5;
  const auto begin = [&](pipeline& p, sequence_run& run) {
    run.id = p.open();
    take_prompt(p, c, run.id, run.source, prompt);
  };
  bool all_same = true;
  for (const bool fork_is_cut : {false, true}) {
    std::vector<sequence_run> alone(2, sequence_run(c));
    for (const bool is_fork : {false, true}) {
      sequence_run& run = alone[is_fork];
      const auto p = make(what, c);
      begin(*p, run);
      if (is_fork == fork_is_cut) p->truncate(run.id, cut);
      run.source.diverge(is_fork ? 2 : 1);
      for (int step = 0; step < steps; ++step) decode_one_layer(*p, {&run});
    }
    for (const bool fork_first : {false, true}) {
      const auto p = make(what, c);
      std::vector<sequence_run> runs(2, sequence_run(c));
      begin(*p, runs[0]);
      runs[1].id = p->fork(runs[0].id);
      runs[1].source = runs[0].source;
      p->truncate(runs[fork_is_cut].id, cut);
      for (const bool is_fork : {false, true}) runs[is_fork].source.diverge(is_fork ? 2 : 1);
      for (int step = 0; step < steps; ++step) decode_one_layer(*p, {&runs[fork_first], &runs[!fork_first]});
      for (const bool is_fork : {false, true}) {
        if (same_bits(runs[is_fork].outputs, alone[is_fork].outputs)) continue;
        all_same = false;
        std::printf("FAILED %s\n  the %s gives other bits where the %s is cut back and the %s comes first\n",
                    sentence(c).c_str(), is_fork ? "fork" : "parent", fork_is_cut ? "fork" : "parent",
                    fork_first ? "fork" : "parent");
      }
    }
  }
  return all_same;
}

/// Whether a sequence gives the same bits where another has had its slots in between.
bool restored_slots_are_filled(std::uint64_t seed, made_of what) {
  random_case c = one_layer_case(seed, what, "retrieval");
  c.options.in_place = false;
  c.options.max_resident = 1;
  // Nothing is corrected, so that what was selected before is attended to.
  c.options.method.correction = what == made_of::codecs ? "cosine_drift" : "never";
  c.options.method.tau = -2.0f;
  std::vector<sequence_run> runs(2, sequence_run(c));
  for (const bool disturbed : {false, true}) {
    sequence_run &run = runs[disturbed], other(c);
    other.source.diverge(1);
    const auto p = make(what, c);
    const auto decode = [&](sequence_run& one, int steps) {
      for (int step = 0; step < steps; ++step) decode_one_layer(*p, {&one});
    };
    run.id = p->open();
    take_prompt(*p, c, run.id, run.source, 100);
    decode(run, 3);
    if (disturbed) {
      p->preempt(run.id);
      other.id = p->open();
      take_prompt(*p, c, other.id, other.source, 100);
      decode(other, 2);
      p->release(other.id);
      p->restore(run.id);
    }
    decode(run, 3);
  }
  if (same_bits(runs[0].outputs, runs[1].outputs)) return true;
  std::printf("FAILED %s\n  a restored sequence gives other bits\n", sentence(c).c_str());
  return false;
}

/// Whether a page that a draft has completed holds the rows themselves again, and not what the codec makes of
/// them, when the draft's end is taken back and the next page has not begun: in slots, where nothing else
/// refills them.
bool rows_of_a_reopened_page_come_back(std::uint64_t seed) {
  random_case c = one_layer_case(seed, made_of::codecs, "retrieval");
  c.options.in_place = false;
  c.options.method.codec = "int4_token";
  c.options.budget.selected_units = 40;  // all there are, so that drafts select what single rows do
  c.options.max_decode_rows = 4;
  std::vector<sequence_run> runs(2, sequence_run(c));
  for (const bool drafts : {false, true}) {
    sequence_run& run = runs[drafts];
    const auto p = make(made_of::codecs, c);
    run.id = p->open();
    take_prompt(*p, c, run.id, run.source, 60);
    sequence_run draft = run;
    decode_one_layer(*p, {drafts ? &draft : &run}, drafts ? 4 : 2);
    if (drafts) {
      p->truncate(run.id, 62);
      for (int token = 0; token < 2; ++token) run.source.next();
    }
    run.outputs.clear();
    for (int step = 0; step < 6; ++step) decode_one_layer(*p, {&run});
  }
  if (same_bits(runs[0].outputs, runs[1].outputs)) return true;
  std::printf("FAILED %s\n  other bits where a draft has completed the page\n", sentence(c).c_str());
  return false;
}

/// Whether rows of prompts, which attend to more than the staging area holds, give the same bits beside other
/// prompts as alone, and the same to rounding as a decode row that attends to everything where it is, which
/// several warps share; of a layer whose window slides, whose parts are others, all to rounding. What differs
/// is printed.
bool prompts_attend_alike(std::uint64_t seed, made_of what, const char* plan) {
  random_case c = one_layer_case(seed, what, plan);
  const bool slides = c.options.method.plan == "sliding";
  c.options.sliding_window = 613;
  constexpr int prompts[] = {1300, 90, 700, 9, 520, 33},
                rows = 3;  // sequences take turns, by parts of 512 tokens
  c.options.max_tokens = 1400;
  c.options.max_sequences = static_cast<int>(std::size(prompts));
  c.options.max_resident = 0;
  c.options.store_tokens = 0;
  const auto attend = [&](pipeline& p, const std::vector<sequence_run*>& runs, int tokens,
                          freekv::step_phase kind) {
    step_rows of;
    for (sequence_run* run : runs) of.add(run->id, run->source, tokens, kind);
    std::vector<float> out(of.queries.size());
    p.begin_step(of.sequences);
    p.append(0, of.keys, of.values, of.queries);
    std::vector<float> within(out.size());
    p.attend(0, kind == freekv::step_phase::decode ? within : out, {});
    if (kind == freekv::step_phase::decode) p.attend_full(0, out, {});
    p.end_step();
    const auto width = static_cast<std::ptrdiff_t>(out.size() / runs.size());
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const auto first = out.begin() + static_cast<std::ptrdiff_t>(i) * width;
      runs[i]->outputs.insert(runs[i]->outputs.end(), first, first + width);
    }
  };
  const auto p = make(what, c);
  std::vector<sequence_run> runs(std::size(prompts), sequence_run(c)), alone = runs;
  std::vector<sequence_run*> all;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    runs[i].source.diverge(static_cast<int>(i) + 1);
    runs[i].id = p->open();
    alone[i].source = runs[i].source;
    take_prompt(*p, c, runs[i].id, runs[i].source, prompts[i]);
    all.push_back(&runs[i]);
  }
  attend(*p, all, rows, freekv::step_phase::prefill);
  bool all_same = true;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    p->release(runs[i].id);
    alone[i].id = p->open();
    take_prompt(*p, c, alone[i].id, alone[i].source, prompts[i]);
    attend(*p, {&alone[i]}, rows - 1, freekv::step_phase::prefill);
    attend(*p, {&alone[i]}, 1, freekv::step_phase::decode);
    p->release(alone[i].id);
    const auto rounded = [](float a, float b) { return close(a, b, 2e-5); };
    const auto width = runs[i].outputs.size() / rows;  // the last row is the decode row's
    const auto of_prompt = [&](const sequence_run& run) {
      return std::vector<float>(run.outputs.begin(), run.outputs.end() - static_cast<std::ptrdiff_t>(width));
    };
    if (std::ranges::equal(runs[i].outputs, alone[i].outputs, rounded) &&
        (slides || same_bits(of_prompt(runs[i]), of_prompt(alone[i]))))
      continue;
    all_same = false;
    std::printf(
        "FAILED %s\n  %d rows behind a prompt of %d tokens give other bits beside others than alone\n",
        sentence(c).c_str(), rows, prompts[i]);
  }
  return all_same;
}

/// Whether heads are counted that are flagged behind the append: by their masses, or with another of their
/// layer. What differs is printed, and where none are.
bool late_flags_are_counted(std::uint64_t seed) {
  bool right = true;
  for (const char* correction : {"mass_deficit", "cosine_drift"}) {
    random_case c = one_layer_case(seed, made_of::policies, "retrieval");
    give_heads(c, 4, 8);
    auto& m = c.options.method;
    m.correction = correction;
    m.rows = "per_layer";
    m.pinning = "no_pins";
    m.tau = 0.8f;
    m.delta = 0.001f;
    c.turn = 0.7f;  // some heads of a layer drift and others do not
    sequence_run run(c);
    const auto p = make(made_of::policies, c);
    run.id = p->open();
    take_prompt(*p, c, run.id, run.source, 100);
    int late = 0;  // or of those that the append flags in a layer
    for (int step = 0; step < 8; ++step) {
      decode_one_layer(*p, {&run});
      const int flagged = flags_of(p->report(0, run.id));
      right = counts_flagged(*p, 0, flagged) && right;
      if (step > 0) late += flagged;
    }
    if (late > 0) continue;
    right = false;
    std::printf("FAILED %s\n  no head is flagged behind the first step\n", sentence(c).c_str());
  }
  return right;
}

/// Whether `options` are refused as what the backend does not have.
bool refuses(std::unique_ptr<pipeline> (*make_one)(const pipeline_options&), const pipeline_options& options,
             const std::string& what) {
  try {
    make_one(options);
  } catch (const freekv::settings_error& e) {
    if (std::string(e.what()).find(what) != std::string::npos) return true;
    std::printf("FAILED refusal of %s: %s\n", what.c_str(), e.what());
    return false;
  }
  std::printf("FAILED %s is not refused\n", what.c_str());
  return false;
}
bool refuses_what_it_lacks() {
  random_case c = make_device_case(1, made_of::policies);
  auto with_file = c.options, with_many = c.options, with_many_held = c.options,
       with_large_groups = c.options;
  with_file.store_file = "/tmp";
  with_many.method.selection = "top_p";
  with_many.max_tokens = 1 << 16;
  with_many.budget.selected_units = 1025;
  with_many_held = with_many;
  with_many_held.method.selection = "sticky_top_k";
  with_many_held.budget.selected_units = 513;
  with_large_groups.query_heads = 256 * with_large_groups.kv_heads;
  with_large_groups.sink_logits.clear();
  auto with_codec = make_device_case(2, made_of::codecs).options;
  with_codec.method.codec = "int8_token";
  with_codec.copy_engines = true;
  return refuses(make_device_policies, with_file, "store files") &&
         refuses(make_device_policies, with_many, "1024") &&
         refuses(make_device_policies, with_many_held, "512") &&
         refuses(make_device_policies, with_large_groups, "drift") &&
         refuses(make_device_codecs, with_codec, "copy engines");
}

/// Runs a world whose decode steps are replays of a step that is captured when the first of them comes, three
/// of four; counts the replays.
void replay_events(world& w, const random_case& c, long& replays) {
  auto& controls = dynamic_cast<device_controls&>(w.of());
  const step_runner begun = step_by_step(w.of());
  // Padded: what is captured is for more than there ever is.
  const int sequences = (c.options.max_resident == 0 ? c.options.max_sequences : c.options.max_resident) + 1;
  auto captures = [&, captured = false]() mutable {
    if (!captured) controls.capture_step(sequences, sequences * c.options.max_decode_rows);
    captured = true;
  };
  dice d(c.seed + 3);
  bool replayed = false;
  w.run_steps_by({[&, captures](auto rows) mutable {
                    replayed = d.below(4) != 0 &&
                               std::all_of(rows.begin(), rows.end(), [](const freekv::step_input& r) {
                                 return r.phase == freekv::step_phase::decode;
                               });
                    if (!replayed) return begun.begin(rows);
                    captures();
                    controls.plan_step(rows);
                    ++replays;
                  },
                  [&](const auto& keys, const auto& values, const auto& queries, auto out, auto lse) {
                    if (replayed)
                      controls.replay_step(keys, values, queries, out, lse);
                    else
                      begun.run(keys, values, queries, out, lse);
                  }});
  w.run();
}

/// Whether enough was compared for so many cases and worlds; what is too little is printed.
bool compared_enough(const coverage& seen, const event_counts& counts, long replays, std::uint64_t cases,
                     std::uint64_t worlds) {
  bool enough = true;
  const auto expect = [&](const char* what, long number, long least) {
    if (number >= least) return;
    enough = false;
    std::printf("FAILED only %ld %s, and at least %ld are expected\n", number, what, least);
  };
  if (cases >= 25) {
    expect("firm selections", seen.firm_selections, 200);
    expect("head outputs compared", seen.compared_outputs, 2000);
    expect("heads corrected", seen.corrected, 75);
    expect("slices recalled", seen.recalled, 25);
    expect("slices promoted", seen.promoted, 4);
  }
  if (worlds >= 3) {
    expect("forks", counts.forks, 1);
    expect("truncations", counts.truncations, 8);
    expect("preemptions", counts.preemptions, 4);
    expect("replays of captured steps", replays, 20);
  }
  return enough;
}

}  // namespace

int main() {
  std::string why;
  if (!device_is_there(why)) {
    std::printf("SKIPPED: no NVIDIA device is usable: %s\n", why.c_str());
    return 77;
  }
  const std::uint64_t first = number_from("FREEKV_SEED", 1), count = number_from("FREEKV_CASES", 40);
  const std::uint64_t worlds = number_from("FREEKV_WORLDS", count / 8);
  coverage seen;
  event_counts counts;
  long replays = 0;
  int failed = 0;
  const auto run = [&](const random_case& c, const auto& compare) {
    try {
      compare();
    } catch (const disagreement& d) {
      ++failed;
      std::printf("FAILED %s\n  %s\n", sentence(c).c_str(), d.what.c_str());
    } catch (const std::runtime_error& e) {
      ++failed;
      std::printf("FAILED %s\n  %s\n", sentence(c).c_str(), e.what());
    }
  };
  constexpr made_of all[] = {made_of::shapes, made_of::policies, made_of::summaries, made_of::codecs,
                             made_of::tensor_cores};
  // With seeds that divide by five come units of less than a page.
  const auto kind_of = [&](std::uint64_t seed) { return all[(seed + seed / 5) % std::size(all)]; };
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    const made_of what = kind_of(seed);
    random_case c = make_device_case(seed, what);
    // Of one layer, or of several, which share scratch; the data of summaries and codecs are of one.
    if (seed % 3 == 0 && what != made_of::summaries && what != made_of::codecs)
      give_layers(c, 2 + static_cast<int>(seed / 3 % 2));
    run(c, [&] {
      const auto p = make(what, c);
      compare_with_oracle(c, *p, seen, [&](int layer, const freekv::step_report& report) {
        if (!counts_flagged(*p, layer, flags_of(report))) throw disagreement{"flags are counted wrongly"};
      });
    });
  }
  for (std::uint64_t seed = first; seed < first + worlds; ++seed) {
    const made_of what = kind_of(seed);
    const random_case c = make_device_events(seed, what);
    run(c, [&] { world(c, make(what, c), seen, counts).run(); });
    random_case captured = c;
    captured.options.copy_engines = false;  // which wait for the host
    run(captured, [&] {
      world w(captured, make(what, captured), seen, counts);
      replay_events(w, captured, replays);
    });
  }
  for (std::uint64_t seed = first; seed < first + worlds; ++seed)
    failed += !same_bits_in_any_batch(seed, seed % 3 == 0   ? made_of::codecs
                                            : seed % 3 == 1 ? made_of::tensor_cores
                                                            : made_of::policies);
  for (const made_of what : {made_of::policies, made_of::codecs, made_of::tensor_cores}) {
    failed += !forks_write_to_their_open_page(first, what);
    failed += !restored_slots_are_filled(first, what);
    for (const char* plan : {"retrieval", "sliding"}) failed += !prompts_attend_alike(first, what, plan);
  }
  failed += !rows_of_a_reopened_page_come_back(first);
  failed += !late_flags_are_counted(1);
  failed += !refuses_what_it_lacks();
  std::printf(
      "%d of %d cases and %d worlds failed; compared %ld steps, %ld firm selections, %ld head outputs; "
      "corrected %ld, "
      "recalled %ld, promoted %ld; %ld prompts, %ld forks, %ld truncations, %ld preemptions, %ld pages "
      "copied, %ld refusals for want of blocks, %ld steps replayed\n",
      failed, static_cast<int>(count), static_cast<int>(worlds), seen.steps, seen.firm_selections,
      seen.compared_outputs, seen.corrected, seen.recalled, seen.promoted, counts.prompts, counts.forks,
      counts.truncations, counts.preemptions, counts.pages_copied, counts.refused_blocks, replays);
  return failed == 0 && compared_enough(seen, counts, replays, count, worlds) ? 0 : 1;
}
