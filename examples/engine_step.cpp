// The smallest engine: two layers, a prompt, then decode steps with retrieval.
#include <freekv/freekv.hpp>
#include <vector>

namespace fk = freekv;
using shape = fk::kv_shape<fk::bfloat16, 128>;                 // element, head_dim
using pipeline = fk::retrieval_pipeline<shape, fk::in_place>;  // attends in the store, recalls nothing

int main() {
  fk::host_backend backend({.threads = 2});
  pipeline::settings settings{.model = {.layers = 2, .query_heads = 8, .kv_heads = 2}};
  settings.budget = {.sink = 64, .window = 128, .selected_units = 10};  // tokens, tokens, pages of 32
  settings.capacity = {.max_tokens = 2048};                             // of a sequence
  pipeline retrieval(settings, backend);
  const fk::sequence_id sequence = retrieval.open();

  // The engine's own prefill leaves 1000 rows of keys and values, (rows, kv_heads, head_dim).
  std::vector<float> k(1000 * 2 * 128, 0.1f), v(k), q(8 * 128, 0.1f), out(q.size());
  auto prompt = retrieval.begin_step({{sequence, 1000, fk::step_phase::prefill}});
  for (int layer = 0; layer < 2; ++layer) prompt.append<float>(layer, {.keys = k, .values = v});
  prompt.end();

  k.resize(2 * 128), v.resize(2 * 128);
  for (int token = 0; token < 100; ++token) {
    auto step = retrieval.begin_step({{sequence}});  // one decode row
    for (int layer = 0; layer < 2; ++layer) {
      step.append<float>(layer, {.keys = k, .values = v, .queries = q});  // after RoPE
      step.attend(layer, out);  // (query_heads, head_dim); the next selection goes on behind it
    }
    step.end();
  }
  return retrieval.tokens(sequence) == 1100 ? 0 : 1;
}
