// FreeKV inside llama.cpp: `full` agrees with llama.cpp's own attention, and retrieval with room for
// everything with `full`.

#include "retrieval_attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <vector>

#include "../catch.hpp"
#include "../files.hpp"
#include "prompt.hpp"
#include "safetensors.hpp"

namespace {

using namespace freekv::examples;

const char* const text =
    "The valley had two mills. The lower one ground wheat for the town, the upper one had stood still since "
    "the flood "
    "took its wheel. In spring the miller's daughter went up there with a lantern and a bag of tools, and by "
    "summer the "
    "stones were turning again. People came to look. Some said the sound of it kept them awake, others that "
    "they slept "
    "better for hearing it. She charged less than the lower mill, at first, and then the same. When the two "
    "millers met "
    "at the market they spoke about the weather, the price of oats and the state of the road, and never "
    "about wheels. "
    "Years later, when both were old, they would sit on the wall between the mills and argue about which of "
    "them had "
    "been the first to laugh.";

const model& shared_model() {
  const char* path = std::getenv("FREEKV_MODEL");
  static const model loaded(path != nullptr ? path : FREEKV_MODEL);
  return loaded;
}

pipeline_options options(const model_shape& shape, const method_spec& method) {
  pipeline_options o;
  o.head_dim = shape.head_dim;
  o.layers = shape.layers;
  o.query_heads = shape.query_heads;
  o.kv_heads = shape.kv_heads;
  o.page = 16;
  o.budget = {16, 32, 100};
  o.max_tokens = 512;
  o.scale = shape.scale;
  o.method = method;
  o.in_place = true;
  return o;
}

std::unique_ptr<pipeline> make(const model_shape& shape, const method_spec& method,
                               freekv::host_backend& backend) {
  return make_pipeline(options(shape, method), backend);
}

double loss_of(std::span<const float> logits, llama_token token) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  return std::log(sum) + largest - logits[token];
}

/// Attends prompt rows with FreeKV and compares with what llama.cpp computed for them.
class prompt_comparison : public attention {
 public:
  prompt_comparison(pipeline& p, const model_shape& shape) : pipeline_(p), shape_(shape) {}
  void attend(const layer_rows& r, float* output) override {
    const auto n = [&](int heads) { return static_cast<std::size_t>(r.rows * heads * shape_.head_dim); };
    if (r.layer == 0) pipeline_.begin_step(r.rows, freekv::step_phase::prefill);
    pipeline_.append(r.layer, {r.key, n(shape_.kv_heads)}, {r.value, n(shape_.kv_heads)},
                     {r.query, n(shape_.query_heads)});
    std::vector<float> ours(n(shape_.query_heads));
    pipeline_.attend(r.layer, ours, {});
    double difference = 0, size = 0;
    for (std::size_t i = 0; i < ours.size(); ++i) {
      difference += std::pow(double{ours[i]} - output[i], 2);
      size += std::pow(double{output[i]}, 2);
    }
    worst = std::max(worst, std::sqrt(difference / size));
    std::copy(ours.begin(), ours.end(), output);
    if (r.layer + 1 == shape_.layers) pipeline_.end_step();
  }
  double worst = 0;

 private:
  pipeline& pipeline_;
  model_shape shape_;
};

struct decoded {
  std::vector<double> losses;
  std::vector<std::vector<float>> logits;  // by step
  void add(std::span<const float> row, llama_token next) {
    losses.push_back(loss_of(row, next));
    logits.emplace_back(row.begin(), row.end());
  }
};

/// Of the losses, over the steps.
double mean_difference(const decoded& a, const decoded& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.losses.size(); ++i) sum += std::fabs(a.losses[i] - b.losses[i]);
  return sum / static_cast<double>(a.losses.size());
}

/// Root mean square of the logits' differences, over steps and vocabulary.
double logit_difference(const decoded& a, const decoded& b) {
  double squares = 0, count = 0;
  for (std::size_t step = 0; step < a.logits.size(); ++step)
    for (std::size_t token = 0; token < a.logits[step].size(); ++token, ++count)
      squares += std::pow(double{a.logits[step][token]} - b.logits[step][token], 2);
  return std::sqrt(squares / count);
}

const auto no_progress = [](const std::string&, double) {};

/// A part of the text: a prompt, the tokens decoded after it, and one more to predict.
struct part {
  std::span<const llama_token> tokens;
  int prompt;
  std::size_t steps() const { return tokens.size() - static_cast<std::size_t>(prompt) - 1; }
};

/// Of different lengths.
std::vector<part> parts_of(std::span<const llama_token> tokens) {
  return {{tokens.subspan(0, 125), 100}, {tokens.subspan(20, 90), 70}, {tokens.subspan(45, 122), 97}};
}

using decode_function = std::function<std::span<const float>(std::span<const sequence_tokens>)>;

/// Decodes all parts, a sequence each. Of several, one after the other sits a step out.
std::vector<decoded> decode_parts(std::span<const part> parts, const decode_function& decode) {
  std::vector<decoded> all(parts.size());
  std::vector<sequence_tokens> step;
  for (std::size_t round = 0;; ++round) {
    step.clear();
    bool done = true;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::size_t at = all[i].losses.size();
      if (at == parts[i].steps()) continue;
      done = false;
      if (parts.size() > 1 && round % 4 == i) continue;
      const int position = parts[i].prompt + static_cast<int>(at);
      step.push_back(
          {static_cast<int>(i), position, parts[i].tokens.subspan(static_cast<std::size_t>(position), 1)});
    }
    if (done) return all;
    if (step.empty()) continue;
    const auto logits = decode(step);
    const std::size_t vocabulary = logits.size() / step.size();
    for (std::size_t row = 0; row < step.size(); ++row) {
      const auto i = static_cast<std::size_t>(step[row].sequence);
      all[i].add(logits.subspan(row * vocabulary, vocabulary),
                 parts[i].tokens[static_cast<std::size_t>(step[row].position) + 1]);
    }
  }
}

/// Attends with all sequences in one pipeline, and gives the same rows to a pipeline of each one's own.
class beside_alone : public attention {
 public:
  beside_alone(const model_shape& shape, retrieval_attention& together,
               std::vector<retrieval_attention>& alone)
      : shape_(shape), together_(together), alone_(alone) {}
  void attend(const layer_rows& rows, float* output) override {
    const auto heads_size = [&](int heads) { return static_cast<std::size_t>(heads * shape_.head_dim); };
    const std::size_t query_row = heads_size(shape_.query_heads), key_row = heads_size(shape_.kv_heads);
    together_.attend(rows, output);
    std::size_t first = 0;
    for (const sequence_tokens& of : rows.of) {
      const sequence_tokens own{0, of.position, of.tokens};
      std::vector<float> theirs(of.tokens.size() * query_row);
      alone_[of.sequence].attend({.layer = rows.layer,
                                  .rows = static_cast<int>(of.tokens.size()),
                                  .position = of.position,
                                  .of = {&own, 1},
                                  .query = rows.query + first * query_row,
                                  .key = rows.key + first * key_row,
                                  .value = rows.value + first * key_row},
                                 theirs.data());
      differing += !std::equal(theirs.begin(), theirs.end(), output + first * query_row);
      first += of.tokens.size();
      ++compared;
    }
  }
  int compared = 0, differing = 0;

 private:
  model_shape shape_;
  retrieval_attention& together_;
  std::vector<retrieval_attention>& alone_;
};

}  // namespace

TEST_CASE("prompt rows attend as llama.cpp does, layer by layer") {
  const auto& m = shared_model();
  const auto tokens = m.tokenize(text);
  freekv::host_backend backend;
  const auto p = make(m.shape(), {.plan = "complete"}, backend);
  prompt_comparison comparison(*p, m.shape());
  engine decoding(m, {.threads = 1, .context = static_cast<int>(tokens.size())});
  decoding.decode(tokens, 0, comparison);
  INFO("worst relative difference of a layer: " << comparison.worst);
  CHECK(comparison.worst > 0);
  CHECK(comparison.worst < 4e-3);  // llama.cpp sums few rows' values in half precision
}

TEST_CASE("decoding with full attention through FreeKV agrees with llama.cpp's own") {
  const auto& m = shared_model();
  const auto tokens = m.tokenize(text);
  const int prompt = 100, steps = 32;
  REQUIRE(static_cast<int>(tokens.size()) > prompt + steps);
  const std::span<const llama_token> first(tokens.data(), prompt);

  const auto stock = [&](bool flash) {
    engine e(m, {.threads = 1, .context = 512, .flash_attention = flash});
    e.prefill(first, 0);
    decoded d;
    for (int i = prompt; i < prompt + steps; ++i) {
      d.add(e.decode_stock(tokens[i], i), tokens[static_cast<std::size_t>(i) + 1]);
    }
    return d;
  };
  const prompt_cache kv(m, first, {.folder = {}, .threads = 1}, [](const std::string&, double) {});
  const auto ours = [&](const method_spec& method) {
    freekv::host_backend backend;
    const auto p = make(m.shape(), method, backend);
    kv.restore(*p);
    retrieval_attention attention(*p, m.shape(), 0);
    engine e(m, {.threads = 1, .context = 1, .rows = 1});
    decoded d;
    for (int i = prompt; i < prompt + steps; ++i) {
      d.add(e.decode(tokens[i], i, attention), tokens[static_cast<std::size_t>(i) + 1]);
    }
    return d;
  };
  const decoded flash = stock(true), plain = stock(false), full = ours({.plan = "complete"});
  // The quantised model rounds activations to 8 bits, so any rounding upstream moves the logits: llama.cpp's
  // two attentions say by how much.
  const double tolerance = 3 * mean_difference(flash, plain),
               logit_tolerance = 1.5 * logit_difference(flash, plain);
  INFO("flash and plain differ by " << mean_difference(flash, plain) << " nats, FreeKV and flash by "
                                    << mean_difference(full, flash) << ", FreeKV and plain by "
                                    << mean_difference(full, plain));
  CHECK(mean_difference(full, flash) < tolerance);
  CHECK(mean_difference(full, plain) < tolerance);
  INFO("root mean square of logits: flash and plain "
       << logit_difference(flash, plain) << ", FreeKV and flash " << logit_difference(full, flash)
       << ", FreeKV and plain " << logit_difference(full, plain));
  CHECK(logit_difference(full, flash) < logit_tolerance);
  CHECK(logit_difference(full, plain) < logit_tolerance);

  SECTION("and retrieval with room for every page gives the same logits bit for bit") {
    for (const char* correction : {"cosine_drift", "always", "never"}) {
      const decoded all = ours({.correction = correction});
      CHECK((all.logits == full.logits));
    }
  }
  SECTION("and a window alone does not") {
    const decoded window = ours({.plan = "window"});
    CHECK(mean_difference(window, full) > tolerance);
    CHECK(logit_difference(window, full) > logit_tolerance);
  }
}

TEST_CASE("texts decoded together get what each gets alone") {
  const auto& m = shared_model();
  const auto tokens = m.tokenize(text);
  const auto parts = parts_of(tokens);
  std::vector<prompt_cache> prompts;
  for (const part& of : parts)
    prompts.emplace_back(m, of.tokens.first(static_cast<std::size_t>(of.prompt)),
                         prompt_cache::place{.folder = {}, .threads = 1}, no_progress);
  // A pipeline whose budget leaves one page to select.
  const auto make_for = [&](int sequences, const method_spec& method, bool in_place,
                            freekv::host_backend& backend) {
    pipeline_options o = options(m.shape(), method);
    o.budget = {16, 32, 1};
    o.max_sequences = sequences;
    o.in_place = in_place;
    return make_pipeline(o, backend);
  };
  freekv::host_backend backend;

  SECTION("in attention, from the same rows, bit for bit") {
    const bool in_place = GENERATE(true, false);
    const char* correction = GENERATE("cosine_drift", "always", "never");
    const bool swapped = GENERATE(false, true);
    CAPTURE(in_place, correction, swapped);
    const auto p = make_for(3, {.correction = correction}, in_place, backend);
    std::vector<freekv::sequence_id> ids;
    for (const auto& prompt : prompts) ids.push_back(prompt.open(*p));
    if (swapped) std::swap(ids[0], ids[2]);
    retrieval_attention together(*p, ids, m.shape(), 0);
    std::vector<std::unique_ptr<pipeline>> own;
    std::vector<retrieval_attention> alone;
    for (const auto& prompt : prompts) {
      own.push_back(make_for(1, {.correction = correction}, in_place, backend));
      prompt.restore(*own.back());
      alone.emplace_back(*own.back(), m.shape(), 0);
    }
    beside_alone both(m.shape(), together, alone);
    engine e(m, {.threads = 1, .context = 3, .rows = 3, .sequences = 3});
    decode_parts(parts, [&](auto step) { return e.decode(step, both); });
    CHECK(both.compared == (24 + 19 + 24) * m.shape().layers);
    if (swapped)
      CHECK(both.differing > both.compared / 2);
    else
      CHECK(both.differing == 0);
  }
  SECTION("in logits, as nearly as llama.cpp's own") {
    const auto stock = [&](std::span<const part> some, bool unified) {
      engine e(m, {.threads = 1,
                   .context = 256 * static_cast<int>(some.size()),
                   .sequences = static_cast<int>(some.size()),
                   .unified = unified});
      for (std::size_t i = 0; i < some.size(); ++i)
        e.prefill(some[i].tokens.first(static_cast<std::size_t>(some[i].prompt)), 0,
                  {.sequence = static_cast<int>(i)});
      return decode_parts(some, [&](auto step) { return e.decode_stock(step); });
    };
    const auto ours = [&](std::span<const part> some, std::span<const prompt_cache> held) {
      const auto p = make_for(static_cast<int>(held.size()), {}, true, backend);
      std::vector<freekv::sequence_id> ids;
      for (const auto& prompt : held) ids.push_back(prompt.open(*p));
      retrieval_attention attention(*p, ids, m.shape(), 0);
      const auto count = static_cast<int>(some.size());
      engine e(m, {.threads = 1, .context = count, .rows = count, .sequences = count});
      return decode_parts(some, [&](auto step) { return e.decode(step, attention); });
    };
    const auto together = ours(parts, prompts), stock_together = stock(parts, false),
               stock_unified = stock(parts, true);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const decoded alone = ours(std::span(parts).subspan(i, 1), std::span(prompts).subspan(i, 1)).front();
      const decoded stock_alone = stock(std::span(parts).subspan(i, 1), true).front();
      const double tolerance = std::max(logit_difference(stock_together[i], stock_alone),
                                        logit_difference(stock_unified[i], stock_alone));
      const double loss_tolerance = std::max(mean_difference(stock_together[i], stock_alone),
                                             mean_difference(stock_unified[i], stock_alone));
      CAPTURE(i, tolerance, loss_tolerance);
      CHECK(logit_difference(together[i], alone) <= 1.5 * tolerance);
      CHECK(mean_difference(together[i], alone) <= 3 * loss_tolerance);
      CHECK(logit_difference(together[i], stock_alone) > 0);  // it is no copy of llama.cpp's
    }
  }
}

TEST_CASE("tokens that were guessed wrongly and taken back leave no trace") {
  const auto& m = shared_model();
  const auto tokens = m.tokenize(text);
  const std::span<const llama_token> all(tokens);
  const int prompt = 100;
  const std::size_t rows = 4;
  const prompt_cache kv(m, all.first(prompt), {.folder = {}, .threads = 1}, no_progress);

  // Four tokens a step, the first `1 + step % 4` of them as the text goes on.
  const auto drafted = [&](const decode_function& decode, const std::function<void(int)>& truncate) {
    decoded d;
    for (std::size_t step = 0; d.losses.size() < 40; ++step) {
      const std::size_t at = prompt + d.losses.size(), kept = 1 + step % rows;
      std::vector<llama_token> draft(all.begin() + static_cast<std::ptrdiff_t>(at),
                                     all.begin() + static_cast<std::ptrdiff_t>(at + rows));
      for (std::size_t i = kept; i < rows; ++i) draft[i] = all[(at + 31 * i) % 90];
      const sequence_tokens of{0, static_cast<int>(at), draft};
      const auto logits = decode({&of, 1});
      const std::size_t vocabulary = logits.size() / rows;
      for (std::size_t i = 0; i < kept; ++i)
        d.add(logits.subspan(i * vocabulary, vocabulary), all[at + i + 1]);
      truncate(static_cast<int>(at + kept));
    }
    return d;
  };
  const auto ours = [&](const method_spec& method, bool in_place, bool takes_back) {
    freekv::host_backend backend;
    pipeline_options o = options(m.shape(), method);
    o.max_decode_rows = rows;
    o.in_place = in_place;
    const auto p = make_pipeline(o, backend);
    const freekv::sequence_id id = kv.open(*p);
    retrieval_attention attention(*p, {id}, m.shape(), 0);
    attention.compare_with_full(true);
    engine e(m, {.threads = 1, .context = rows, .rows = rows});
    const decoded d = drafted([&](auto step) { return e.decode(step, attention); },
                              [&](int to) {
                                if (takes_back) p->truncate(id, to);
                              });
    for (const auto& head : attention.by_head()) {
      CHECK(head.heads == 16 * 4 * m.shape().query_heads / m.shape().kv_heads);
      CHECK(head.rows == 16);
      CHECK(head.mean_mass() == Approx(1));  // there is room for every page
      CHECK(head.mean_error() < 1e-5);
    }
    return d;
  };
  const auto stock = [&](bool flash) {
    engine e(m, {.threads = 1, .context = 256, .flash_attention = flash});
    e.prefill(all.first(prompt), 0);
    return drafted([&](auto step) { return e.decode_stock(step); }, [&](int to) { e.truncate(to); });
  };
  const auto one_by_one = [&](bool flash) {
    engine e(m, {.threads = 1, .context = 256, .flash_attention = flash});
    e.prefill(all.first(prompt), 0);
    decoded d;
    for (std::size_t at = prompt; at < prompt + 40; ++at)
      d.add(e.decode_stock(all[at], static_cast<int>(at)), all[at + 1]);
    return d;
  };
  const decoded flash = one_by_one(true);
  const double tolerance =
      3 * std::max(mean_difference(stock(true), flash), mean_difference(one_by_one(false), flash));
  const decoded full = ours({.plan = "complete"}, true, true);
  CAPTURE(tolerance, mean_difference(full, flash));
  CHECK(mean_difference(full, flash) < tolerance);
  for (const bool in_place : {true, false})
    for (const char* correction : {"cosine_drift", "never"})
      CHECK((ours({.correction = correction}, in_place, true).logits == full.logits));
  CHECK(mean_difference(ours({.plan = "complete"}, true, false), flash) > tolerance);
}

TEST_CASE("a sequence that stopped in the middle of a step is restored") {
  const auto& m = shared_model();
  const auto tokens = m.tokenize(text);
  const std::span<const llama_token> first(tokens.data(), 100);
  const prompt_cache kv(m, first, {.folder = {}, .threads = 1}, [](const std::string&, double) {});
  freekv::host_backend backend;
  std::vector<std::vector<float>> logits;
  for (const bool stops : {false, true}) {
    const auto p = make(m.shape(), {}, backend);
    kv.restore(*p);
    if (stops) {
      p->begin_step(1, freekv::step_phase::decode);
      kv.restore(*p);
    }
    retrieval_attention attention(*p, m.shape(), 0);
    engine e(m, {.threads = 1, .context = 1, .rows = 1});
    const auto row = e.decode(tokens[100], 100, attention);
    logits.emplace_back(row.begin(), row.end());
  }
  CHECK((logits[0] == logits[1]));
}

TEST_CASE("pseudo tokens have the queries of tokens at the positions behind the prompt") {
  // Of one word alone, so that a longer text has these words there.
  const auto& m = shared_model();
  constexpr int prompt = 100, probes = 40;
  const std::vector<llama_token> words(prompt + probes, m.tokenize(text).at(7));
  const std::span<const llama_token> all(words);
  const tests::scratch_folder folder;
  int reports = 0;
  const auto counts = [&](const std::string&, double) { ++reports; };
  const prompt_cache::place place{.folder = folder.path(), .threads = 1, .queries = true, .probes = probes};
  const prompt_cache kv(m, all.first(prompt), place, counts);
  const prompt_cache longer(m, all, {.folder = folder.path(), .threads = 1, .queries = true}, counts);
  std::vector<std::uint16_t> behind, of_text;
  for (const std::string& name : folder.listing()) {
    const safetensors_file file(folder / name);
    if (name.ends_with("100.probes.safetensors")) behind = file.copy<std::uint16_t>("q");
    if (name.ends_with("140.q.safetensors")) of_text = file.copy<std::uint16_t>("q");
  }
  const auto row = static_cast<std::size_t>(m.shape().query_heads * m.shape().head_dim);
  const auto layers = static_cast<std::size_t>(m.shape().layers);
  REQUIRE(behind.size() == layers * probes * row);
  REQUIRE(of_text.size() == layers * all.size() * row);
  const auto difference =
      [&](std::size_t first) {  // relative to their size, of rows from that of the text on
        double apart = 0, size = 0;
        for (std::size_t layer = 0; layer < layers; ++layer)
          for (std::size_t i = 0; i < probes * row; ++i) {
            const double a = double{half_to_float(behind[layer * probes * row + i])},
                         b = double{half_to_float(of_text[(layer * all.size() + first) * row + i])};
            apart += std::fabs(a - b), size += std::fabs(b);
          }
        return apart / size;
      };
  CHECK(difference(prompt) < 0.02);  // as llama.cpp rounds by the number of rows
  CHECK(difference(prompt - 1) > 5 * difference(prompt));

  // What is kept is read again, and given to who takes it.
  const int before = reports;
  const prompt_cache again(m, all.first(prompt), place, counts);
  CHECK(reports == before);
  freekv::host_backend backend;
  for (const char* eviction : {"dapq", "epi_cache"}) {
    auto o = options(m.shape(), {.plan = "eviction", .eviction = eviction});
    if (o.method.cuts_blocks()) o.method.eviction_values["block_tokens"] = 16;
    o.budget = {16, 32, 1};
    const auto decode = [&](const prompt_cache& held) {
      const auto p = make_pipeline(o, backend);
      held.restore(*p);
      CHECK(p->tokens(p->only()) == prompt);
      retrieval_attention attention(*p, m.shape(), 0);
      engine e(m, {.threads = 1, .context = 1, .rows = 1});
      const auto of = e.decode(words[0], prompt, attention);
      return std::vector<float>(of.begin(), of.end());
    };
    CHECK(decode(again) == decode(kv));
    const prompt_cache without(m, all.first(prompt), {.folder = {}, .threads = 1, .queries = true}, counts);
    CHECK_THROWS_AS(decode(without), freekv::usage_error);
  }
}
