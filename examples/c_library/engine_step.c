/* The smallest engine in C: two layers, a prompt, then decode steps with retrieval. */
#include <freekv/c_api.h>
#include <stdio.h>
#include <stdlib.h>

enum { layers = 2, query_heads = 8, kv_heads = 2, d = 128, prompt_rows = 1000 };

static float k[prompt_rows * kv_heads * d], v[prompt_rows * kv_heads * d], q[query_heads * d],
    out[query_heads * d];

static void expect(freekv_status status) {
  if (status == FREEKV_OK) return;
  fprintf(stderr, "%s: %s\n", freekv_status_name(status), freekv_last_message());
  exit(1);
}

int main(void) {
  freekv_backend* backend = NULL;
  freekv_pipeline* retrieval = NULL;
  freekv_step* step = NULL;
  freekv_sequence sequence = 0;
  int32_t tokens = 0;
  for (int i = 0; i < prompt_rows * kv_heads * d; ++i) k[i] = v[i] = 0.1f;
  for (int i = 0; i < query_heads * d; ++i) q[i] = 0.1f;

  const freekv_host_options threads = {.size = sizeof threads, .threads = 2};
  const freekv_settings settings = {.size = sizeof settings,
                                    .method = "freekv",
                                    .element = FREEKV_BF16,
                                    .head_dim = d,
                                    .layers = layers,
                                    .query_heads = query_heads,
                                    .kv_heads = kv_heads,
                                    .sink = 64,
                                    .window = 128,
                                    .selected_units = 10,
                                    .max_tokens = 2048,
                                    .route = FREEKV_IN_PLACE};
  expect(freekv_backend_create_host(&threads, &backend));
  expect(freekv_pipeline_create(backend, &settings, &retrieval));
  expect(freekv_open(retrieval, &sequence));

  // The engine's own prefill leaves rows of keys and values, (rows, kv_heads, head_dim).
  const freekv_step_input prompt = {.sequence = sequence, .tokens = prompt_rows, .phase = FREEKV_PREFILL};
  freekv_rows rows = {
      .size = sizeof rows, .element = FREEKV_F32, .rows = prompt_rows, .keys = k, .values = v};
  expect(freekv_begin_step(retrieval, &prompt, 1, &step));
  for (int layer = 0; layer < layers; ++layer) expect(freekv_append(step, layer, &rows));
  expect(freekv_end_step(step));

  const freekv_step_input row = {.sequence = sequence, .tokens = 1, .phase = FREEKV_DECODE};
  const freekv_attention attention = {.size = sizeof attention, .rows = 1, .out = out};
  rows.rows = 1, rows.queries = q;
  for (int token = 0; token < 100; ++token) {
    expect(freekv_begin_step(retrieval, &row, 1, &step));
    for (int layer = 0; layer < layers; ++layer) {
      expect(freekv_append(step, layer, &rows));  // after RoPE
      expect(freekv_attend(step, layer, &attention));
    }
    expect(freekv_end_step(step));
  }

  expect(freekv_tokens(retrieval, sequence, &tokens));
  printf("%s: %g\n", freekv_pipeline_name(retrieval), (double)out[0]);
  expect(freekv_pipeline_destroy(retrieval));
  expect(freekv_backend_destroy(backend));
  return tokens == 1100 && out[0] > 0.0999f && out[0] < 0.1001f ? 0 : 1;  // all values are 0.1
}
