#include "engine.hpp"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using namespace freekv::examples;
using tokens = std::vector<llama_token>;

#ifndef FREEKV_MODEL
#define FREEKV_MODEL ""
#endif

std::string model_path() {
  const char* path = std::getenv("FREEKV_MODEL");
  return path ? path : FREEKV_MODEL;
}

const model& shared_model() {
  static const model loaded(model_path());
  return loaded;
}

const char* const text =
    "The harbour of the small town lies behind a long wall of grey stones. Every morning at six the baker "
    "opens "
    "his shop, and the smell of warm bread goes down the street to the boats. The fishermen come up in their "
    "heavy boots and buy two loaves each, one for the day and one for the evening. An old woman named Marta "
    "sells "
    "oranges next to the church; she knows the name of every child in the town and the date of every storm "
    "of the "
    "last forty years. When the wind turns to the north she takes her oranges home, and the fishermen, who "
    "trust "
    "her more than the radio, leave their boats in the harbour. In the winter of the great flood she was the "
    "only "
    "one who had taken her oranges home. Since then nobody in the town has asked the radio about the "
    "weather, and "
    "the baker keeps the first loaf of every morning for Marta.";

constexpr int prompt_length = 100;
constexpr int steps = 32;

tokens text_tokens() {
  auto all = shared_model().tokenize(text);
  REQUIRE(all.size() > prompt_length + steps);
  all.resize(prompt_length + steps + 1);
  return all;
}

std::span<const llama_token> prompt_of(const tokens& all) { return std::span(all).first(prompt_length); }

double loss(std::span<const float> logits, llama_token next) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const double logit : logits) sum += std::exp(logit - largest);
  return std::log(sum) + largest - logits[next];
}

/// Full attention in double precision over everything it was given: what every faster attention should equal.
class naive_attention : public attention, public observer {
 public:
  explicit naive_attention(model_shape shape)
      : shape_(std::move(shape)), keys_(shape_.layers), values_(shape_.layers) {}

  void observe(const layer_rows& rows) override {
    const auto size = static_cast<std::size_t>(rows.rows * shape_.kv_heads * shape_.head_dim);
    keys_[rows.layer].insert(keys_[rows.layer].end(), rows.key, rows.key + size);
    values_[rows.layer].insert(values_[rows.layer].end(), rows.value, rows.value + size);
  }

  void attend(const layer_rows& rows, float* output) override {
    const int d = shape_.head_dim, heads = shape_.query_heads, group = heads / shape_.kv_heads;
    const int stride = shape_.kv_heads * d;
    const int before = static_cast<int>(keys_[rows.layer].size()) / stride;
    observe(rows);
    const auto &keys = keys_[rows.layer], &values = values_[rows.layer];
    std::vector<double> weights, sum(d);
    for (int row = 0; row < rows.rows; ++row) {
      const int length = before + row + 1;
      for (int head = 0; head < heads; ++head) {
        const float* q = rows.query + (row * heads + head) * d;
        const std::size_t offset = head / group * d;
        weights.assign(length, 0);
        for (int t = 0; t < length; ++t) {
          for (int i = 0; i < d; ++i) weights[t] += double{q[i]} * keys[offset + t * stride + i];
          weights[t] *= shape_.scale;
        }
        const double largest = *std::max_element(weights.begin(), weights.end());
        double total = 0;
        for (auto& weight : weights) total += weight = std::exp(weight - largest);
        sum.assign(d, 0);
        for (int t = 0; t < length; ++t) {
          for (int i = 0; i < d; ++i) sum[i] += weights[t] / total * values[offset + t * stride + i];
        }
        std::copy(sum.begin(), sum.end(), output + (row * heads + head) * d);
      }
    }
  }

 private:
  model_shape shape_;
  std::vector<std::vector<float>> keys_, values_;
};

struct prediction {
  std::vector<float> logits;
  double loss;
};

template <class step_function>
std::vector<prediction> predict(const tokens& all, step_function step) {
  std::vector<prediction> predictions;
  for (int at = prompt_length; at < prompt_length + steps; ++at) {
    const std::span<const float> logits = step(all[at], at);
    predictions.push_back({{logits.begin(), logits.end()}, loss(logits, all[at + 1])});
  }
  return predictions;
}

std::vector<prediction> predict_stock(const tokens& all, bool flash_attention) {
  engine stock(shared_model(), {.threads = 1, .context = 256, .flash_attention = flash_attention});
  stock.prefill(prompt_of(all), 0);
  return predict(all, [&](llama_token token, int position) { return stock.decode_stock(token, position); });
}

struct difference {
  double logit = 0, loss = 0, mean_loss = 0;
};

difference compare(const std::vector<prediction>& a, const std::vector<prediction>& b) {
  REQUIRE(a.size() == b.size());
  difference worst;
  for (std::size_t i = 0; i < a.size(); ++i) {
    for (std::size_t j = 0; j < a[i].logits.size(); ++j) {
      worst.logit = std::max(worst.logit, std::abs(double{a[i].logits[j]} - b[i].logits[j]));
    }
    worst.loss = std::max(worst.loss, std::abs(a[i].loss - b[i].loss));
    worst.mean_loss += (a[i].loss - b[i].loss) / static_cast<double>(a.size());
  }
  worst.mean_loss = std::abs(worst.mean_loss);
  return worst;
}

/// Compares what it computes with llama.cpp's own output, layer by layer.
class checked_attention : public attention {
 public:
  explicit checked_attention(const model_shape& shape) : shape_(shape), ours_(shape) {}
  double worst = 0;  ///< of any output, relative to the layer's largest

  void attend(const layer_rows& rows, float* output) override {
    const std::vector<float> theirs(output, output + rows.rows * shape_.query_heads * shape_.head_dim);
    ours_.attend(rows, output);
    double largest = 0, difference = 0;
    for (std::size_t i = 0; i < theirs.size(); ++i) {
      largest = std::max(largest, std::abs(double{theirs[i]}));
      difference = std::max(difference, std::abs(double{theirs[i]} - output[i]));
    }
    worst = std::max(worst, difference / largest);
  }

 private:
  model_shape shape_;
  naive_attention ours_;
};

class zero_attention : public attention {
 public:
  explicit zero_attention(const model_shape& shape) : row_size_(shape.query_heads * shape.head_dim) {}
  void attend(const layer_rows& rows, float* output) override {
    std::fill_n(output, rows.rows * row_size_, 0.0f);
  }

 private:
  int row_size_;
};

/// Keeps the first layer's rows, whose numbers depend on the token and its position only, and all calls'
/// headers.
class recorder : public observer, public attention {
 public:
  struct call {
    int layer, rows, position;
    bool operator==(const call&) const = default;
  };
  explicit recorder(const model_shape& shape) : shape_(shape) {}
  std::vector<call> calls;
  std::vector<call> whose;  ///< the first layer's: sequence, rows, position
  std::vector<float> query, key, value;

  void observe(const layer_rows& rows) override {
    calls.push_back({rows.layer, rows.rows, rows.position});
    if (rows.layer > 0) return;
    for (const auto& of : rows.of)
      whose.push_back({of.sequence, static_cast<int>(of.tokens.size()), of.position});
    const auto heads_size = [&](int heads) {
      return static_cast<std::size_t>(rows.rows) * heads * shape_.head_dim;
    };
    query.insert(query.end(), rows.query, rows.query + heads_size(shape_.query_heads));
    key.insert(key.end(), rows.key, rows.key + heads_size(shape_.kv_heads));
    value.insert(value.end(), rows.value, rows.value + heads_size(shape_.kv_heads));
  }
  void attend(const layer_rows& rows, float*) override { observe(rows); }

 private:
  model_shape shape_;
};

double largest_difference(std::span<const float> a, std::span<const float> b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(double{a[i]} - b[i]));
  return largest;
}

std::vector<float> copy(std::span<const float> logits) { return {logits.begin(), logits.end()}; }

struct broken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class throwing : public attention, public observer {
 public:
  explicit throwing(int layer) : layer_(layer) {}
  void observe(const layer_rows& rows) override {
    ++calls;
    if (rows.layer == layer_) throw broken("layer " + std::to_string(rows.layer) + " broke");
  }
  void attend(const layer_rows& rows, float*) override { observe(rows); }
  int calls = 0;

 private:
  int layer_;
};

std::filesystem::path temporary(const std::string& name) {
  return std::filesystem::temp_directory_path() / ("freekv_engine_test_" + name);
}

void write_file(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string read_file(const std::filesystem::path& path, std::size_t bytes) {
  std::string beginning(bytes, '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(beginning.data(), static_cast<std::streamsize>(bytes));
  beginning.resize(static_cast<std::size_t>(file.gcount()));
  return beginning;
}

}  // namespace

TEST_CASE("the model's shape is read from its graph") {
  const auto& shape = shared_model().shape();
  CAPTURE(shape.name, shape.layers, shape.query_heads, shape.kv_heads, shape.head_dim, shape.scale);
  CHECK(shape.layers > 0);
  CHECK(shape.query_heads % shape.kv_heads == 0);
  CHECK(shape.head_dim % 8 == 0);
  CHECK(shape.scale == Approx(1 / std::sqrt(shape.head_dim)));
  CHECK(shape.trained_context > 0);
  REQUIRE(shape.pairs.has_value());  // as of every model whose keys turn whole
  if (shape.rotary) CHECK(shape.rotary->of == *shape.pairs);
  std::string again;
  for (const auto token : shared_model().tokenize(text, false)) {
    CHECK((token >= 0 && token < shape.vocabulary));
    again += shared_model().to_text(token);
  }
  CHECK(again == text);
}

TEST_CASE("a double precision attention equals llama.cpp's own, layer by layer", "[.threads]") {
  const auto all = text_tokens();
  const int threads = GENERATE(1, 2);
  engine host(shared_model(), {.threads = threads, .context = 256, .rows = prompt_length});
  checked_attention ours(host.shape());
  host.decode(prompt_of(all), 0, ours);
  CAPTURE(threads, ours.worst);
  // llama.cpp sums the values in half precision, 11 bits: a few of its roundings, of the largest output
  CHECK(ours.worst < 8 * std::ldexp(1.0, -11));
}

TEST_CASE("a double precision attention predicts what llama.cpp predicts") {
  const auto all = text_tokens();
  const auto flash = predict_stock(all, true), plain = predict_stock(all, false);

  engine host(shared_model(), {.threads = 1, .context = 256, .rows = 40});
  naive_attention ours(host.shape());
  SECTION("when it has read the prompt itself, several rows at a time") {
    for (int at = 0; at < prompt_length; at += 40) {
      const auto rows = std::min(40, prompt_length - at);
      host.decode(std::span(all).subspan(at, rows), at, ours);
    }
  }
  SECTION("when it has seen the prompt in another engine") {
    engine other(shared_model(), {.threads = 1, .context = 256, .rows = 64});
    other.prefill(prompt_of(all), 0, {.seen_by = &ours});
  }
  const auto predicted =
      predict(all, [&](llama_token token, int position) { return host.decode(token, position, ours); });

  // A quantised model rounds every activation to 8 bits: the last bit of one attention output becomes a
  // different logit. How much is seen from llama.cpp's own two attentions, which compute the same as well.
  const auto rounding = compare(flash, plain);
  for (const auto& stock : {flash, plain}) {
    const auto seen = compare(stock, predicted);
    CAPTURE(rounding.logit, rounding.loss, rounding.mean_loss, seen.logit, seen.loss, seen.mean_loss);
    CHECK(seen.logit < 3 * rounding.logit);
    CHECK(seen.loss < 3 * rounding.loss);
    CHECK(seen.mean_loss < 3 * rounding.loss / std::sqrt(steps));
  }
}

TEST_CASE("an attention that returns zeros predicts something else") {
  const auto all = text_tokens();
  const auto stock = predict_stock(all, true), plain = predict_stock(all, false);
  engine host(shared_model(), {.threads = 1, .context = 256});
  zero_attention zeros(host.shape());
  const auto wrong =
      predict(all, [&](llama_token token, int position) { return host.decode(token, position, zeros); });
  const auto rounding = compare(stock, plain), seen = compare(stock, wrong);
  CAPTURE(rounding.logit, rounding.loss, seen.logit, seen.loss, seen.mean_loss);
  CHECK(seen.logit > 4 * rounding.logit);
  CHECK(seen.mean_loss > 2 * rounding.loss);
}

TEST_CASE("an observer sees every layer of every chunk once, with its rows in order") {
  const auto all = text_tokens();
  engine chunked(shared_model(), {.threads = 1, .context = 256, .rows = 48});
  recorder chunks(chunked.shape());
  std::vector<int> progress;
  const auto logits = copy(chunked.prefill(
      prompt_of(all), 0, {.seen_by = &chunks, .progress = [&](int done) { progress.push_back(done); }}));

  std::vector<recorder::call> expected;
  for (const int at : {0, 48, 96}) {
    for (int layer = 0; layer < chunked.shape().layers; ++layer) {
      expected.push_back({layer, std::min(48, prompt_length - at), at});
    }
  }
  CHECK(chunks.calls == expected);
  CHECK(progress == std::vector<int>{48, 96, 100});
  CHECK(chunked.length() == prompt_length);

  engine single(shared_model(), {.threads = 1, .context = 256, .rows = 1});
  recorder rows(single.shape());
  const auto last = copy(single.prefill(prompt_of(all), 0, {.seen_by = &rows}));
  CHECK(std::abs(loss(logits, all[prompt_length]) - loss(last, all[prompt_length])) <
        0.5);  // the last token's
  CHECK(largest_difference(chunks.query, rows.query) < 0.01);
  CHECK(largest_difference(chunks.key, rows.key) < 0.01);
  CHECK(largest_difference(chunks.value, rows.value) < 0.01);

  chunked.clear();
  CHECK(copy(chunked.prefill(prompt_of(all), 0)) == logits);  // watching changes nothing
}

TEST_CASE("positions may go beyond the context of an engine that decodes") {
  auto all = text_tokens();
  while (all.size() < 400) all.insert(all.end(), all.begin(), all.begin() + 100);
  all.resize(400);
  engine large(shared_model(), {.threads = 1, .context = 512});
  recorder expected(large.shape());
  large.prefill(all, 0, {.seen_by = &expected});

  engine small(shared_model(), {.threads = 1, .context = 256});
  recorder seen(small.shape());
  for (int at = 250; at < 400; at += 50) small.decode(std::span(all).subspan(at, 50), at, seen);
  const auto tail = [&](const std::vector<float>& rows) {
    return std::span(rows).last(rows.size() / 400 * 150);
  };
  CHECK(largest_difference(tail(expected.query), seen.query) < 0.01);
  CHECK(largest_difference(tail(expected.key), seen.key) < 0.01);
  CHECK(largest_difference(tail(expected.value), seen.value) < 0.01);
}

TEST_CASE("the rows of several sequences are handed over together, with whose they are") {
  const auto all = text_tokens();
  const std::span<const llama_token> text_rows(all);
  const std::vector<sequence_tokens> step{
      {2, 300, text_rows.subspan(50, 3)}, {0, 7, text_rows.subspan(7, 1)}, {3, 0, text_rows.subspan(90, 20)}};
  engine together(shared_model(), {.threads = 1, .context = 256, .sequences = 4});
  recorder seen(together.shape());
  CHECK(together.decode(step, seen).size() == 24u * static_cast<std::size_t>(together.shape().vocabulary));
  CHECK(std::ssize(seen.calls) == together.shape().layers);
  CHECK(seen.whose == std::vector<recorder::call>{{2, 3, 300}, {0, 1, 7}, {3, 20, 0}});

  engine single(shared_model(), {.threads = 1, .context = 256});
  recorder alone(single.shape());
  for (const auto& of : step) single.decode(of.tokens, of.position, alone);
  CHECK(largest_difference(seen.query, alone.query) < 0.01);
  CHECK(largest_difference(seen.key, alone.key) < 0.01);
  CHECK(largest_difference(seen.value, alone.value) < 0.01);
}

TEST_CASE("sequences of llama.cpp's own attention do not see each other") {
  const auto all = text_tokens();
  engine alone(shared_model(), {.threads = 1, .context = 256});
  const auto expected = copy(alone.prefill(prompt_of(all), 0));
  engine host(shared_model(), {.threads = 1, .context = 768, .sequences = 3, .unified = false});
  host.prefill(std::span(all).subspan(30, 60), 0, {.sequence = 2});
  CHECK((copy(host.prefill(prompt_of(all), 0, {.sequence = 1})) == expected));
  CHECK((host.length(0) == 0 && host.length(1) == prompt_length && host.length(2) == 60));

  SECTION("a part of one is taken back") {
    host.truncate(60, 1);
    CHECK((host.length(1) == 60 && host.length(2) == 60));
    alone.truncate(60);
    CHECK((copy(host.prefill(prompt_of(all).subspan(60), 60, {.sequence = 1})) ==
           copy(alone.prefill(prompt_of(all).subspan(60), 60))));
    host.clear();
    CHECK((host.length(1) == 0 && host.length(2) == 0));
  }
  SECTION("a saved one continues as another") {
    const auto path = temporary("sequence");
    host.save_state(path.string(), 1);
    const sequence_tokens next{1, prompt_length, std::span(all).subspan(prompt_length, 1)};
    const auto logits = copy(host.decode_stock({&next, 1}));
    host.load_state(path.string(), 0);
    CHECK((host.length(0) == prompt_length && host.length(1) == prompt_length + 1));
    const sequence_tokens same{0, prompt_length, next.tokens};
    CHECK((copy(host.decode_stock({&same, 1})) == logits));
    std::filesystem::remove(path);
  }
}

TEST_CASE("an attention that throws stops its step, and the engine goes on") {
  const auto all = text_tokens();
  engine host(shared_model(), {.threads = 1, .context = 256});
  throwing attention_breaks(7);

  naive_attention before(host.shape());
  const auto logits = copy(host.decode(prompt_of(all), 0, before));
  CHECK_THROWS_AS(host.decode(all[prompt_length], prompt_length, attention_breaks), broken);
  CHECK(attention_breaks.calls == 8);
  naive_attention after(host.shape());
  CHECK(copy(host.decode(prompt_of(all), 0, after)) == logits);
}

TEST_CASE("an observer that throws leaves no tokens of its chunk behind") {
  const auto all = text_tokens();
  engine host(shared_model(), {.threads = 1, .context = 256, .rows = 60});
  const auto logits = copy(host.prefill(prompt_of(all), 0));
  host.truncate(60);

  throwing observer_breaks(host.shape().layers - 1);
  CHECK_THROWS_WITH(host.prefill(prompt_of(all).subspan(60), 60, {.seen_by = &observer_breaks}),
                    "layer " + std::to_string(host.shape().layers - 1) + " broke");
  CHECK(host.length() == 60);
  CHECK(copy(host.prefill(prompt_of(all).subspan(60), 60)) == logits);
}

TEST_CASE("a saved state continues in another engine") {
  const auto all = text_tokens();
  const auto path = temporary("state");
  engine first(shared_model(), {.threads = 1, .context = 256});
  first.prefill(prompt_of(all), 0);
  first.save_state(path.string());
  const auto logits = copy(first.decode_stock(all[prompt_length], prompt_length));

  engine second(shared_model(), {.threads = 1, .context = 512, .rows = 16});
  second.load_state(path.string());
  CHECK(second.length() == prompt_length);
  CHECK(copy(second.decode_stock(all[prompt_length], prompt_length)) == logits);

  engine plain(shared_model(), {.threads = 1, .context = 256, .flash_attention = false});
  CHECK_THROWS_AS(plain.load_state(path.string()), engine_error);
  CHECK(plain.length() == 0);
  write_file(path, read_file(path, std::filesystem::file_size(path) / 2));
  CHECK_THROWS_AS(second.load_state(path.string()), engine_error);
  CHECK(second.length() == 0);
  write_file(path, "no state at all");
  CHECK_THROWS_AS(second.load_state(path.string()), engine_error);
  std::filesystem::remove(path);
  CHECK_THROWS_AS(second.load_state(path.string()), engine_error);
  CHECK_THROWS_AS(second.save_state((path / "in" / "no" / "folder").string()), engine_error);
  CHECK_NOTHROW(second.prefill(prompt_of(all), 0));
}

TEST_CASE("a sequence moves behind another") {
  const auto all = text_tokens();
  const auto head = prompt_of(all).first(40), tail = prompt_of(all).subspan(40);
  engine host(shared_model(), {.threads = 1, .context = 256, .rows = 64, .sequences = 2});
  host.prefill(tail, 0);
  const auto expected = copy(host.decode_stock(all[prompt_length], host.length()));
  host.clear();
  host.prefill(tail, 0, {.sequence = 1});
  host.join(1, 0);
  CHECK(host.length() == static_cast<int>(tail.size()));
  CHECK(host.length(1) == 0);
  CHECK(copy(host.decode_stock(all[prompt_length], host.length())) == expected);

  host.clear();
  host.prefill(head, 0);
  host.prefill(tail, 0, {.sequence = 1});
  host.join(1, 0);
  CHECK(host.length() == prompt_length);
  CHECK_NOTHROW(host.decode_stock(all[prompt_length], prompt_length));
  CHECK_THROWS_AS(host.join(0, 0), engine_error);
  CHECK_THROWS_AS(host.join(2, 0), engine_error);
  engine apart(shared_model(), {.threads = 1, .context = 256, .rows = 64, .sequences = 2, .unified = false});
  CHECK_THROWS_WITH(apart.join(1, 0), Catch::Contains("unified = true"));
}

TEST_CASE("what an engine cannot do is an error, and the engine goes on") {
  using Catch::Contains;
  const auto all = text_tokens();
  engine host(shared_model(), {.threads = 1, .context = 256, .rows = 20});
  zero_attention zeros(host.shape());

  CHECK_THROWS_WITH(host.decode_stock(1, 5), Contains("position 5") && Contains("the 0 tokens"));
  CHECK_THROWS_WITH(host.decode(prompt_of(all), 0, zeros), Contains("100 tokens") && Contains("1 to 20"));
  CHECK_THROWS_WITH(host.decode(1, -1, zeros), Contains("position -1"));
  CHECK_THROWS_AS(host.decode(-1, 0, zeros), engine_error);
  CHECK_THROWS_AS(host.decode(host.shape().vocabulary, 0, zeros), engine_error);
  tokens too_long(300, 1);
  CHECK_THROWS_WITH(host.prefill(too_long, 0), Contains("256 fit in its context"));
  CHECK(host.length() == 240);  // whole chunks that did fit stay
  CHECK_NOTHROW(host.decode(all[0], 0, zeros));

  engine plain(shared_model(), {.threads = 1, .context = 256, .flash_attention = false});
  recorder seen(plain.shape());
  CHECK_THROWS_WITH(plain.decode(all[0], 0, zeros), Contains("flash_attention"));
  CHECK_THROWS_WITH(plain.prefill(prompt_of(all), 0, {.seen_by = &seen}), Contains("flash_attention"));
  CHECK_THROWS_AS(engine(shared_model(), {.threads = 0}), engine_error);
  CHECK_THROWS_AS(engine(shared_model(), {.threads = 1, .rows = 0}), engine_error);
  CHECK_THROWS_WITH(engine(shared_model(), {.threads = 1, .sequences = 0}), Contains("1 to 256 sequences"));
  CHECK_THROWS_WITH(engine(shared_model(), {.threads = 1, .context = 2, .sequences = 3}),
                    Contains("3 sequences") && Contains("context of 2"));
  CHECK_THROWS_AS(engine(shared_model(), {.threads = 1, .rows = 2, .sequences = 3}), engine_error);

  engine pair(shared_model(), {.threads = 1, .context = 512, .sequences = 2, .unified = false});
  sequence_tokens step{2, 0, prompt_of(all).first(1)};
  CHECK_THROWS_WITH(pair.decode_stock({&step, 1}), Contains("sequence 2") && Contains("0 to 1"));
  step.sequence = 0;
  CHECK_THROWS_WITH(pair.decode({&step, 1}, zeros), Contains("unified"));
  CHECK_THROWS_AS(pair.decode_stock(std::span<const sequence_tokens>{}), engine_error);
  CHECK_NOTHROW(pair.decode_stock({&step, 1}));
}

TEST_CASE("a file that is not a whole model is an error") {
  using Catch::Contains;
  CHECK_THROWS_WITH(model(temporary("missing").string()), Contains("No such file"));
  CHECK_THROWS_AS(model(std::filesystem::temp_directory_path().string()), engine_error);
  const auto path = temporary("bad.gguf");
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{3}, std::size_t{700}, std::size_t{100000},
        std::filesystem::file_size(model_path()) / 2, std::filesystem::file_size(model_path()) - 1}) {
    CAPTURE(bytes);
    write_file(path, read_file(model_path(), bytes));
    CHECK_THROWS_AS(model(path.string()), engine_error);
  }
  write_file(path, std::string(5000, 'x'));
  CHECK_THROWS_WITH(model(path.string()), Contains("magic"));
  std::filesystem::remove(path);
}
