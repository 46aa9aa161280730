// FreeKV inside llama.cpp: `full` agrees with llama.cpp's own attention, and retrieval with room for everything with
// `full`.

#include "retrieval_attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "../catch.hpp"
#include "prompt.hpp"

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

std::unique_ptr<pipeline> make(const model_shape& shape, const method& does, freekv::host_backend& backend) {
  pipeline_options o;
  o.head_dim = shape.head_dim;
  o.layers = shape.layers;
  o.query_heads = shape.query_heads;
  o.kv_heads = shape.kv_heads;
  o.page = 16;
  o.budget = {16, 32, 100};
  o.max_tokens = 512;
  o.scale = shape.scale;
  o.does = does;
  o.in_place = true;
  return make_pipeline(o, backend);
}

double loss_of(std::span<const float> logits, llama_token token) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  return std::log(sum) + largest - logits[static_cast<std::size_t>(token)];
}

/// Attends prompt rows with FreeKV and compares with what llama.cpp computed for them.
class prompt_comparison : public attention {
 public:
  prompt_comparison(pipeline& p, const model_shape& shape) : pipeline_(p), shape_(shape) {}
  void attend(const layer_rows& r, float* output) override {
    const auto n = [&](int heads) { return static_cast<std::size_t>(r.rows * heads * shape_.head_dim); };
    if (r.layer == 0) pipeline_.begin_step(r.rows, freekv::row_kind::prompt);
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
      d.add(e.decode_stock(tokens[static_cast<std::size_t>(i)], i), tokens[static_cast<std::size_t>(i) + 1]);
    }
    return d;
  };
  const prompt_cache kv(m, first, {.folder = {}, .threads = 1}, [](const std::string&, double) {});
  const auto ours = [&](const method& does) {
    freekv::host_backend backend;
    const auto p = make(m.shape(), does, backend);
    kv.restore(*p);
    retrieval_attention attention(*p, m.shape(), 0);
    engine e(m, {.threads = 1, .context = 1, .rows = 1});
    decoded d;
    for (int i = prompt; i < prompt + steps; ++i) {
      d.add(e.decode(tokens[static_cast<std::size_t>(i)], i, attention),
            tokens[static_cast<std::size_t>(i) + 1]);
    }
    return d;
  };
  const decoded flash = stock(true), plain = stock(false), full = ours({.plan = "complete"});
  // The quantised model rounds activations to 8 bits, so any rounding upstream moves the logits: llama.cpp's two
  // attentions say by how much.
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
      p->begin_step(1, freekv::row_kind::decode);
      kv.restore(*p);
    }
    retrieval_attention attention(*p, m.shape(), 0);
    engine e(m, {.threads = 1, .context = 1, .rows = 1});
    const auto row = e.decode(tokens[100], 100, attention);
    logits.emplace_back(row.begin(), row.end());
  }
  CHECK((logits[0] == logits[1]));
}
