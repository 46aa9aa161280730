// An engine's own kernel attends to blocks of its paged tensor; a second pipeline attends itself, to compare.
#include <cmath>
#include <freekv/freekv.hpp>
#include <random>
#include <vector>

namespace fk = freekv;
namespace {
constexpr int layers = 2, query_heads = 8, kv_heads = 2, d = 64, page = 32, plane = page * kv_heads * d;
using pipeline = fk::retrieval_pipeline<fk::kv_shape<fk::bfloat16, d>>;  // route resident, which has slots
using tensor = std::vector<fk::bfloat16>;  // a layer's: (blocks, keys and values, page, kv_heads, d)

/// The engine's kernel: each query head attends to the first `tokens` tokens of the blocks listed.
void attend_paged(const tensor& paged, const std::vector<std::int32_t>& blocks, int tokens,
                  const std::vector<float>& queries, std::vector<float>& out) {
  for (int head = 0; head < query_heads; ++head) {
    double weights = 0.0, sum[d] = {};
    for (int token = 0; token < tokens; ++token) {
      const fk::bfloat16* const key = paged.data() + blocks[token / page] * 2 * plane +
                                      (token % page * kv_heads + head * kv_heads / query_heads) * d;
      double score = 0.0;
      for (int i = 0; i < d; ++i) score += queries[head * d + i] * fk::to_float(key[i]);
      const double weight = std::exp(score / std::sqrt(d));
      weights += weight;
      for (int i = 0; i < d; ++i) sum[i] += weight * fk::to_float(key[plane + i]);
    }
    for (int i = 0; i < d; ++i) out[head * d + i] = static_cast<float>(sum[i] / weights);
  }
}
}  // namespace

int main() {
  pipeline::settings settings{.model = {.layers = layers, .query_heads = query_heads, .kv_heads = kv_heads}};
  settings.capacity.max_tokens = 2048;
  settings.budget = {.sink = 64, .window = 128, .selected_units = 10};
  fk::host_backend backend, peers_backend;  // each serves one pipeline
  const pipeline::footprint needs(settings, backend);
  std::vector<tensor> paged(layers, tensor(64 * 2 * plane));
  std::vector<std::vector<std::int32_t>> lent(layers), tables(layers);
  std::vector<fk::paged_blocks<fk::bfloat16>> lent_blocks(layers);
  for (int layer = 0; layer < layers; ++layer) {
    for (int i = 0; i < needs.slots(layer); ++i)
      lent[layer].push_back(63 - 2 * i);  // blocks that the engine does not use itself, in any order
    fk::bfloat16* const keys = paged[layer].data();
    const fk::paged_tensor<fk::bfloat16> blocks{keys, keys + plane, 2 * plane, kv_heads * d, d, page};
    lent_blocks[layer] = {blocks, lent[layer]};
    tables[layer].resize(needs.slots_per_sequence(layer));
  }
  pipeline retrieval(needs, backend, {}, lent_blocks), peer(settings, peers_backend);
  const fk::sequence_id sequence = retrieval.open(), peers = peer.open();
  std::mt19937 random(1);
  std::vector<float> k, v, q, out(query_heads * d), expected(out);
  for (int row = 0; row < 50; ++row) {  // the first brings a prompt
    const fk::step_input rows{sequence, row == 0 ? 1000 : 1,
                              row == 0 ? fk::step_phase::prefill : fk::step_phase::decode};
    auto step = retrieval.begin_step({rows}), same = peer.begin_step({{peers, rows.tokens, rows.phase}});
    for (int layer = 0; layer < layers; ++layer) {
      k.resize(rows.tokens * kv_heads * d), v.resize(k.size()), q.resize(rows.tokens * query_heads * d);
      for (auto* numbers : {&k, &v, &q})
        for (float& x : *numbers) x = static_cast<float>(random() % 4001) / 1000.0f - 2.0f;
      same.append<float>(layer, {.keys = k, .values = v, .queries = q});
      step.append<float>(layer, {.keys = k, .values = v, .queries = q});
      if (rows.phase == fk::step_phase::prefill) continue;
      if (tables[layer].empty()) {  // it keeps everything, as the first layer does by default
        step.attend(layer, out);
      } else {
        step.correct(layer);
        const fk::resident_table held = step.table(layer, sequence, tables[layer]);
        attend_paged(paged[layer], tables[layer], held.tokens, q, out);
        step.finish_layer(layer);  // selection and recall for the next step go on behind it
      }
      same.attend(layer, expected);
      for (std::size_t i = 0; i < out.size(); ++i)
        if (!(std::abs(out[i] - expected[i]) < 1e-5f)) return 1;
    }
    step.end(), same.end();
  }
  return 0;
}
