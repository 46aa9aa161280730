// A decode step of one layer after the other: FreeKV's beside full attention over the same store, llama.cpp's
// flash attention on the same shape, and the time that a read of the same bytes takes.

#include <freekv/core/size.hpp>
#include <freekv/freekv.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>

#include "measure.hpp"

namespace freekv::bench {

namespace {

struct model_form {
  const char* name;
  int query_heads, kv_heads;
};
constexpr model_form llama_8b{"Llama-3.1-8B", 32, 8}, smollm2{"SmolLM2-135M", 9, 3};

constexpr int page = 32;
constexpr budget published{.sink = 512, .window = 512, .selected_units = 1024 / page};  // 2048 tokens

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
/// Layers whose keys and values together are twice what the last cache holds, at least one.
int layers_beyond_cache(const context& c, std::size_t bytes_each) {
  return static_cast<int>(2 * c.on.last_level_cache / bytes_each) + 1;
}

/// Pooling and selection of all KV heads of a layer by scores that are there already.
class selection_of_scores {
 public:
  selection_of_scores(host_backend& backend, int kv_heads, int group, int candidates, fast_normals& random)
      : backend_(backend),
        kv_heads_(kv_heads),
        group_(group),
        candidates_(candidates),
        stride_(host::workspace_sizes::padded(candidates)) {
    scores_.assign(to_size(group) * to_size(stride_), -infinity);
    for (int g = 0; g < group; ++g)
      for (int j = 0; j < candidates; ++j)
        scores_[to_size(g) * to_size(stride_) + to_size(j)] = 4.0f * random.next();
    pooled_.resize(to_size(backend.threads()) * to_size(stride_));
    keys_.resize(to_size(backend.threads()) * to_size(candidates));
    log_sums_.resize(to_size(backend.threads() * group));
  }
  void run() {
    const auto bytes = to_size(kv_heads_ * candidates_) * 512;  // as for_heads counts them
    backend_.parallel(kv_heads_, bytes, [&](int, int worker) {
      host::workspace w;
      w.scores = scores_.data();
      w.pooled = pooled_.data() + worker * stride_;
      w.keys = keys_.data() + std::ptrdiff_t{worker} * candidates_;
      w.log_sums = log_sums_.data() + worker * group_;
      host::pool_candidates(backend_.options().instructions, mean_softmax{}, group_, stride_, stride_, w);
      host::order_candidates(0, candidates_, {}, std::min(candidates_, published.selected_units), w);
    });
  }

 private:
  host_backend& backend_;
  int kv_heads_, group_, candidates_;
  std::int64_t stride_;
  std::vector<float> scores_, pooled_, log_sums_;
  std::vector<std::uint64_t> keys_;
};

/// Attention to pages that stay in the nearest cache: what multiplications alone take.
template <class Element, int HeadDim>
class attention_in_cache {
 public:
  attention_in_cache(host_backend& backend, int group, fast_normals& random)
      : backend_(backend), group_(group) {
    rows_.resize(to_size(backend.threads() * 2 * page * HeadDim));
    for (Element& x : rows_) x = from_float<Element>(random.next());
    queries_.resize(to_size(group * HeadDim));
    for (float& x : queries_) x = random.next() / 8.0f;
    weighted_.resize(to_size(backend.threads() * group * HeadDim));
    scratch_.resize(to_size(backend.threads() * attention_scratch<HeadDim>));
    log_sums_.resize(to_size(backend.threads() * group));
  }
  void run(int slices) {
    const int tasks = 8 * backend_.threads();
    backend_.parallel(tasks, to_size(slices) << 14, [&](int, int worker) {
      const Element* const rows = rows_.data() + std::ptrdiff_t{worker} * 2 * page * HeadDim;
      const attention_part part{log_sums_.data() + worker * group_,
                                weighted_.data() + std::ptrdiff_t{worker} * group_ * HeadDim};
      for (int i = 0; i < slices / tasks; ++i)
        host::attend_slice<HeadDim>(
            backend_.options().instructions, group_query{queries_.data(), group_, HeadDim},
            head_slice<const Element>{rows, rows + page * HeadDim, HeadDim}, page, part,
            scratch_.data() + std::ptrdiff_t{worker} * attention_scratch<HeadDim>);
    });
  }

 private:
  host_backend& backend_;
  int group_;
  std::vector<Element> rows_;
  std::vector<float> queries_, weighted_, scratch_;
  std::vector<log_sum_exp> log_sums_;
};

/// A summary with the data it needs, random as keys and queries are: what a step costs does not depend on it.
template <class Summary>
Summary summary_with(std::vector<float>&, int, int, int, fast_normals&) {
  return {};
}
template <>
key_codes<> summary_with(std::vector<float>& data, int layers, int kv_heads, int head_dim,
                         fast_normals& random) {
  const key_codes<> codes;
  // As many dimensions as those that are learnt have, 4 a mean's code and 5 a code at head_dim 128.
  const int mean_dims = head_dim / 4 / codes.mean_codes, dims = head_dim / 4 / codes.codes;
  key_codebooks books{nullptr, layers, kv_heads, head_dim, codes.mean_codes, mean_dims, codes.codes, dims};
  data.resize(books.bytes() / sizeof(float));
  for (float& x : data) x = random.next() / 8.0f;
  books.data = data.data();
  return {{}, {}, books};
}

template <class Element, int HeadDim, class Route, class Summary = min_max>
void bench_step(context& c, const model_form& form, int tokens, const std::string& route) {
  using pipeline_type = retrieval_pipeline<kv_shape<Element, HeadDim>, page_size<page>, Summary, Route,
                                           every_layer<layer_kind::retrieval>>;
  constexpr bool boxes = std::is_same_v<Summary, min_max>;
  const std::size_t kv_row = to_size(form.kv_heads * HeadDim),
                    query_row = to_size(form.query_heads * HeadDim);
  const std::size_t full_bytes = to_size(tokens) * kv_row * 2 * sizeof(Element);
  const bool long_context = tokens > 131072;  // without the peer and with fewer rounds
  const int layers = layers_beyond_cache(c, full_bytes), rounds = c.smoke ? 3 : long_context ? 5 : c.rounds;
  const std::string of_case = std::string(form.name) + ", " + std::string(element_name<Element>) + ", " +
                              std::to_string(tokens / 1024) + "K, " +
                              (boxes ? "" : std::string(Summary::name) + ", ") + route + ", " +
                              std::to_string(c.threads) + " threads";
  if (2 * to_size(layers) * full_bytes > c.on.memory || !c.begins("step", of_case)) return;

  host_backend backend(
      {.threads = c.threads, .overlap = route != "in_place", .instructions = c.instructions});
  typename pipeline_type::settings s;
  s.model = {.layers = layers, .query_heads = form.query_heads, .kv_heads = form.kv_heads};
  s.budget = published;
  s.capacity.max_tokens = tokens + 2 * (rounds + 1);
  fast_normals random(to_size(tokens));
  std::vector<float> data;
  s.summary = summary_with<Summary>(data, layers, form.kv_heads, HeadDim, random);
  pipeline_type pipeline(s, backend);
  const sequence_id id = pipeline.open();
  std::vector<Element> keys, values;
  const auto fill = [&](std::vector<Element>& rows, std::size_t count) {
    rows.resize(count);
    for (Element& x : rows) x = from_float<Element>(random.next());
  };
  for (int done = 0; done < tokens;) {
    const int chunk = std::min(4096, tokens - done);
    auto prompt = pipeline.begin_step({{id, chunk, step_phase::prefill}});
    for (int layer = 0; layer < layers; ++layer) {
      fill(keys, to_size(chunk) * kv_row);
      fill(values, to_size(chunk) * kv_row);
      prompt.append(layer, {.keys = keys, .values = values, .queries = {}});
    }
    prompt.end();
    done += chunk;
  }
  // Queries turn a little each step: cosine 0.95 between one and the next.
  std::vector<float> queries(to_size(layers) * query_row), out(query_row);
  for (float& x : queries) x = random.next();
  const std::size_t read = to_size(layers) * full_bytes;
  std::vector<std::byte> memory(std::min(read, std::size_t{1} << 30), std::byte{1});
  std::unique_ptr<flash_attention> peer;
  if (!long_context)
    peer = std::make_unique<flash_attention>(form.query_heads, form.kv_heads, HeadDim, tokens, c.threads,
                                             std::is_same_v<Element, bfloat16>, random);
  selection_of_scores selecting(backend, form.kv_heads, form.query_heads / form.kv_heads,
                                std::max(1, (tokens - 1024) / page), random);
  attention_in_cache<Element, HeadDim> cached(backend, form.query_heads / form.kv_heads, random);

  std::vector<double> step_seconds, full_seconds, read_seconds, peer_seconds, select_seconds, cached_seconds,
      recalls;
  for (int round = 0; round < rounds + 1; ++round) {
    for (float& x : queries) x = 0.95f * x + 0.312f * random.next();
    double step = 0, full = 0;
    long recalled = 0;
    // Full attention has a step of its own, so that none of the two finds a layer's rows in the cache.
    for (const bool fully : {false, true}) {
      auto decoding = pipeline.begin_step({{id}});
      for (int layer = 0; layer < layers; ++layer) {
        fill(keys, kv_row);
        fill(values, kv_row);
        const std::span<const float> query =
            std::span(queries).subspan(to_size(layer) * query_row, query_row);
        double start = now();
        decoding.append(layer, {.keys = keys, .values = values, .queries = query});
        if (fully) {
          start = now();
          decoding.attend_full(layer, out);
          full += now() - start;
          decoding.attend(layer, out);
          continue;
        }
        decoding.attend(layer, out);
        if (route == "in_place") pipeline.synchronize();
        step += now() - start;
        pipeline.synchronize();
        for (const std::int32_t slices : pipeline.report(layer)[id].recalled) recalled += slices;
      }
      decoding.end();
    }
    double start = now();
    read_all(memory, c.threads);
    const double reading =
        (now() - start) * static_cast<double>(full_bytes) / static_cast<double>(memory.size());
    const auto timed = [&](const auto& body) {
      start = now();
      body();
      return now() - start;
    };
    const double peering = peer == nullptr ? 0.0 : timed([&] { peer->run(); });
    const double selection = timed([&] { selecting.run(); });
    const int slices = std::min(tokens / page, 4096) * form.kv_heads;
    const double in_cache = timed([&] { cached.run(slices); }) * tokens / page * form.kv_heads / slices;
    if (round == 0) continue;
    select_seconds.push_back(selection);
    cached_seconds.push_back(in_cache);
    step_seconds.push_back(step / layers);
    full_seconds.push_back(full / layers);
    read_seconds.push_back(reading);
    peer_seconds.push_back(peering);
    recalls.push_back(static_cast<double>(recalled) / layers / form.kv_heads);
  }
  const double step = median(step_seconds), full = median(full_seconds), reading = median(read_seconds);
  const double peered = median(peer_seconds);
  const std::size_t candidates = to_size(std::max(0, (tokens - 1024) / page));
  const std::size_t step_bytes = candidates * to_size(form.kv_heads) * pipeline.summary_bytes() +
                                 std::min(to_size(tokens), std::size_t{2048}) * kv_row * 2 * sizeof(Element);
  const double limit = reading * static_cast<double>(step_bytes) / static_cast<double>(full_bytes);
  const double bandwidth = static_cast<double>(full_bytes) / reading;
  c.number("step", of_case, "read_bandwidth", bandwidth, "bytes/s");
  c.number("step", of_case, "step", step, "s");
  c.number("step", of_case, "full_attention", full, "s");
  if (peer != nullptr) c.number("step", of_case, "llama_cpp_flash_attention", peered, "s");
  c.number("step", of_case, "recalled_per_head", median(recalls), "slices");
  const bool named = route == "in_place" && tokens >= 32768;
  if (boxes && route == "in_place") {
    c.ratio("attention", of_case, "read of its bytes / full attention", reading / full,
            tokens == 32768 ? 0.7 : 0);
    c.ratio("attention", of_case, "attention to what is in the cache / full attention",
            median(cached_seconds) / full);
    if (peer != nullptr)
      c.ratio("attention", of_case, "llama.cpp's flash attention / full attention", peered / full,
              tokens == 32768 ? 1 : 0);
  }
  // Of routes that are timed one after the other full attention, the same for both, is the measure.
  const std::string other_route = std::string(form.name) + element_name<Element>.data() +
                                  std::to_string(tokens) + "/" + std::to_string(c.threads);
  if (boxes && route == "in_place") c.kept[other_route] = step / full;
  if (const auto with_boxes = c.kept.find(other_route); !boxes && with_boxes != c.kept.end())
    c.ratio("step", of_case, "step / step with boxes", step / full / with_boxes->second);
  if (const auto in_place_step = c.kept.find(other_route);
      route == "resident" && in_place_step != c.kept.end() && tokens >= 8192)
    c.ratio("step", of_case, "step for the caller / step in place", step / full / in_place_step->second, 1.15,
            true);
  if (boxes && route == "in_place" && form.kv_heads == 8 && tokens >= 131072)
    c.ratio("step", of_case, "pool and select / step", median(select_seconds) / step,
            tokens == 131072 ? 0.15 : 0, true);
  if (boxes && route == "in_place" && tokens == 131072) c.kept["128K/" + std::to_string(c.threads)] = step;
  if (const auto at_128k = c.kept.find("128K/" + std::to_string(c.threads));
      boxes && tokens == 1048576 && at_128k != c.kept.end())
    c.ratio("step", of_case, "step / step at 128K", step / at_128k->second, 2, true);
  c.ratio("step", of_case, "step / full attention", step / full,
          !named || form.kv_heads != 8 ? 0
          : tokens == 32768            ? boxes ? 0.13 : 0.15
          : boxes && tokens == 131072  ? 0.065
                                       : 0,
          true);
  c.ratio("step", of_case, "step / read of its bytes", step / limit,
          boxes && named && form.kv_heads == 8 && !long_context ? 1.4 : 0, true);
}

}  // namespace

void bench_steps(context& c) {
  const std::vector<int> lengths =
      c.smoke ? std::vector{2048} : std::vector{1024, 4096, 8192, 32768, 131072, 524288, 1048576};
  for (const int tokens : lengths) {
    bench_step<bfloat16, 128, in_place>(c, llama_8b, tokens, "in_place");
    if (tokens <= 131072) bench_step<bfloat16, 128, in_place, key_codes<>>(c, llama_8b, tokens, "in_place");
    if (tokens > 32768 || tokens == 4096) continue;
    bench_step<bfloat16, 128, resident>(c, llama_8b, tokens, "resident");
    bench_step<half, 128, in_place>(c, llama_8b, tokens, "in_place");
    bench_step<half, 64, in_place>(c, smollm2, tokens, "in_place");
    bench_step<half, 64, in_place, key_codes<>>(c, smollm2, tokens, "in_place");
  }
}

}  // namespace freekv::bench
