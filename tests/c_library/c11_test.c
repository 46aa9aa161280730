/* The C interface from C11: what is attended to, against attention written here; and every error that a host
 * has. */
#define _POSIX_C_SOURCE 200809L
#include <freekv/c_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "c_test.h"

enum { layers = 2, query_heads = 4, kv_heads = 2, d = 64, page = 16, most_tokens = 160, most_rows = 64 };

static freekv_settings covering(const char* method) {
  const freekv_settings settings = {.size = sizeof settings,
                                    .method = method,
                                    .element = FREEKV_F32,
                                    .head_dim = d,
                                    .layers = layers,
                                    .query_heads = query_heads,
                                    .kv_heads = kv_heads,
                                    .page_tokens = page,
                                    .sink = page,
                                    .window = 2 * page,
                                    .selected_units = 8,
                                    .max_tokens = most_tokens,
                                    .max_sequences = 3};
  return settings;
}

/* ---- A sequence as this test knows it, and its attention ---- */

typedef struct {
  freekv_sequence id;
  int tokens;
  float keys[layers][most_tokens][kv_heads][d], values[layers][most_tokens][kv_heads][d];
} sequence;

static float drawn(void) {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (float)(int32_t)(state >> 32) / 2147483648.0f;
}

/* One of the numbers that fp8 has, an eighth's multiple, as a byte too: sign, 4 bits of exponent, 3 of
 * mantissa. */
static float drawn_of_fp8(float scale, uint8_t* stored) {
  const int eighths = (int)(16 * drawn());
  int exponent = 0;
  while (abs(eighths) >> (exponent + 1) > 0) ++exponent;
  *stored = eighths == 0
                ? 0
                : (uint8_t)((eighths < 0) << 7 | (exponent + 4) << 3 | ((abs(eighths) << 3 >> exponent) & 7));
  return scale * (float)eighths / 8;
}

/* Row `at` of a layer attends to itself and what is before it, of which `settings` may leave out. */
static void attended(const freekv_settings* settings, const sequence* s, int layer, int at, const float* q,
                     double* out, double* lse) {
  const int slides = settings->layer_kinds != NULL && settings->layer_kinds[layer] == FREEKV_LAYER_SLIDING;
  const int first = slides && at + 1 > settings->sliding_window ? at + 1 - settings->sliding_window : 0;
  const double scale = settings->scale != 0.0f ? (double)settings->scale : 1.0 / sqrt(d);
  for (int head = 0; head < query_heads; ++head) {
    const int of = head / (query_heads / kv_heads);
    double sum = 0, weighted[d] = {0};
    for (int t = first; t <= at; ++t) {
      double score = 0;
      for (int i = 0; i < d; ++i) score += (double)q[head * d + i] * (double)s->keys[layer][t][of][i];
      score *= scale;
      if (settings->soft_cap != 0.0f)
        score = (double)settings->soft_cap * tanh(score / (double)settings->soft_cap);
      sum += exp(score);
      for (int i = 0; i < d; ++i) weighted[i] += exp(score) * (double)s->values[layer][t][of][i];
    }
    if (settings->sink_logits != NULL) sum += exp((double)settings->sink_logits[layer * query_heads + head]);
    for (int i = 0; i < d; ++i) out[head * d + i] = weighted[i] / sum;
    lse[head] = log(sum) * (settings->log_base == FREEKV_LOG_2 ? 1.4426950408889634 : 1.0);
  }
}

/* A step of `count` sequences, `rows` rows each, whose outputs are compared. Prompt rows attend too. */
static void step_of(freekv_pipeline* p, const freekv_settings* settings, sequence** of, size_t count,
                    int rows, int phase) {
  static float k[most_rows * kv_heads * d], v[most_rows * kv_heads * d], q[most_rows * query_heads * d];
  static uint8_t stored_k[most_rows * kv_heads * d], stored_v[most_rows * kv_heads * d];
  static float out[most_rows * query_heads * d], lse[most_rows * query_heads];
  const int fp8 = settings->element == FREEKV_FP8_E4M3, as_stored = fp8 && rows == 1;
  freekv_step_input entries[3];
  freekv_step* step = NULL;
  for (size_t i = 0; i < count; ++i)
    entries[i] = (freekv_step_input){.sequence = of[i]->id, .tokens = rows, .phase = phase};
  const int all = (int)count * rows;
  OK(freekv_begin_step(p, entries, count, &step));
  for (int layer = 0; layer < layers; ++layer) {
    for (int i = 0; i < all * kv_heads * d; ++i)
      if (fp8) {
        k[i] = drawn_of_fp8(settings->key_scales[layer * kv_heads + i / d % kv_heads], stored_k + i);
        v[i] = drawn_of_fp8(settings->value_scales[layer * kv_heads + i / d % kv_heads], stored_v + i);
      } else {
        k[i] = 2 * drawn(), v[i] = drawn();
      }
    for (int i = 0; i < all * query_heads * d; ++i) q[i] = 2 * drawn();
    for (int row = 0; row < all; ++row) {
      sequence* s = of[row / rows];
      memcpy(s->keys[layer][s->tokens + row % rows], k + row * kv_heads * d, sizeof s->keys[0][0]);
      memcpy(s->values[layer][s->tokens + row % rows], v + row * kv_heads * d, sizeof s->values[0][0]);
    }
    const freekv_rows given = {.size = sizeof given,
                               .element = as_stored ? FREEKV_FP8_E4M3 : FREEKV_F32,
                               .rows = most_rows,
                               .keys = as_stored ? (const void*)stored_k : k,
                               .values = as_stored ? (const void*)stored_v : v,
                               .queries = q};
    const freekv_attention to = {.size = sizeof to, .rows = most_rows, .out = out, .lse = lse};
    memset(out, 0, sizeof out);
    OK(freekv_append(step, layer, &given));
    OK(freekv_attend(step, layer, &to));
    int far = 0;
    for (int row = 0; row < all; ++row) {
      const sequence* s = of[row / rows];
      double expected[query_heads * d], expected_lse[query_heads];
      attended(settings, s, layer, s->tokens + row % rows, q + row * query_heads * d, expected, expected_lse);
      for (int i = 0; i < query_heads * d; ++i)
        far += !(fabs((double)out[row * query_heads * d + i] - expected[i]) < 1e-5);
      for (int i = 0; i < query_heads; ++i)
        far += !(fabs((double)lse[row * query_heads + i] - expected_lse[i]) < 1e-4);
    }
    CHECK(far == 0);
    for (int i = all * query_heads * d; i < most_rows * query_heads * d; ++i) far += out[i] != 0.0f;
    CHECK(far == 0); /* rows behind the step's */
  }
  OK(freekv_end_step(step));
  for (size_t i = 0; i < count; ++i) {
    int32_t tokens = -1;
    of[i]->tokens += rows;
    OK(freekv_tokens(p, of[i]->id, &tokens));
    CHECK(tokens == of[i]->tokens);
  }
}

/* ---- Memory that is counted ---- */

typedef struct {
  size_t in_use, most, blocks;
  int refuses;
} counter;

static void* counted(void* context, size_t bytes, size_t alignment) {
  counter* c = context;
  if (c->refuses) return NULL;
  c->in_use += bytes, ++c->blocks;
  if (c->in_use > c->most) c->most = c->in_use;
  return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}
static void uncounted(void* context, void* memory, size_t bytes, size_t alignment) {
  counter* c = context;
  (void)alignment;
  c->in_use -= bytes, --c->blocks;
  free(memory);
}

/* ---- Decoding ---- */

static void decodes(freekv_settings settings) {
  static sequence first, second, third;
  freekv_backend* backend = NULL;
  freekv_pipeline* p = NULL;
  int32_t pages = 0, pages_at_first = 0;
  sequence* both[] = {&first, &second};
  const int retrieves = strcmp(settings.method, "h2o") != 0;
  counter slow = {0}, fast = {0};
  const freekv_memory slow_memory = {
      .size = sizeof slow_memory, .context = &slow, .allocate = counted, .deallocate = uncounted};
  const freekv_memory fast_memory = {
      .size = sizeof fast_memory, .context = &fast, .allocate = counted, .deallocate = uncounted};
  freekv_footprint needs = {.size = sizeof needs};
  settings.slow_memory = &slow_memory;
  settings.fast_memory = &fast_memory;
  if (retrieves) settings.max_decode_rows = 4, settings.max_resident = 2;

  const freekv_host_options options = {.size = sizeof options, .threads = 2};
  OK(freekv_backend_create_host(&options, &backend));
  OK(freekv_measure(backend, &settings, &needs));
  OK(freekv_pipeline_create(backend, &settings, &p));
  CHECK(slow.most == needs.slow && fast.most == needs.fast && fast.blocks == 1);
  CHECK(needs.slow + needs.fast ==
        needs.store + needs.slots + needs.summaries + needs.codec + needs.state + needs.staging);
  OK(freekv_free_pages(p, &pages_at_first));

  first.tokens = second.tokens = 0;
  OK(freekv_open(p, &first.id));
  step_of(p, &settings, both, 1, 50, FREEKV_PREFILL);
  for (int i = 0; i < 20; ++i) step_of(p, &settings, both, 1, 1, FREEKV_DECODE);
  // A branch, and both in one step.
  second = first;
  OK(freekv_fork(p, first.id, &second.id));
  CHECK(second.id != first.id);
  step_of(p, &settings, both, 2, 1, FREEKV_DECODE);
  if (retrieves) {
    // A draft whose last rows are rejected.
    step_of(p, &settings, both + 1, 1, 4, FREEKV_DECODE);
    second.tokens -= 2;
    OK(freekv_truncate(p, second.id, second.tokens));
    step_of(p, &settings, both, 2, 1, FREEKV_DECODE);

    // A prefix that outlives its sequence; a third sequence while the second one waits.
    freekv_prefix* prefix = NULL;
    OK(freekv_keep_prefix(p, first.id, 3 * page + 5, &prefix));
    OK(freekv_release(p, first.id));
    CHECK(freekv_pipeline_destroy(p) == FREEKV_USAGE_ERROR && SAYS("1 prefixes"));
    OK(freekv_preempt(p, second.id));
    third = first;
    third.tokens = 3 * page;
    OK(freekv_open_with(p, prefix, &third.id));
    OK(freekv_prefix_destroy(prefix));
    sequence* last[] = {&third};
    step_of(p, &settings, last, 1, 20, FREEKV_PREFILL);
    step_of(p, &settings, last, 1, 2, FREEKV_DECODE);
    OK(freekv_restore(p, second.id));
    step_of(p, &settings, both + 1, 1, 1, FREEKV_DECODE);
    OK(freekv_release(p, third.id));
    OK(freekv_release(p, second.id));
  } else {
    OK(freekv_release(p, first.id));
    step_of(p, &settings, both + 1, 1, 1, FREEKV_DECODE);
    OK(freekv_release(p, second.id));
  }
  OK(freekv_synchronize(p));
  OK(freekv_free_pages(p, &pages));
  CHECK(pages == pages_at_first);
  OK(freekv_pipeline_destroy(p));
  CHECK(slow.in_use == 0 && fast.in_use == 0 && slow.blocks + fast.blocks == 0);
  OK(freekv_backend_destroy(backend));
}

static void decoding(void) {
  const char* methods[] = {"full", "quest", "freekv", "h2o"};
  for (int i = 0; i < 4; ++i) decodes(covering(methods[i]));
  // What only a model has: sliding layers, a soft cap, sinks without a value, a scale; and what the engine
  // wants.
  const int32_t kinds[layers] = {FREEKV_LAYER_RETRIEVAL, FREEKV_LAYER_SLIDING};
  float sinks[layers * query_heads];
  for (int i = 0; i < layers * query_heads; ++i) sinks[i] = drawn();
  freekv_settings settings = covering("freekv");
  settings.layer_kinds = kinds;
  settings.sliding_window = 24;
  settings.soft_cap = 3.0f;
  settings.sink_logits = sinks;
  settings.scale = 0.2f;
  settings.log_base = FREEKV_LOG_2;
  settings.route = FREEKV_IN_PLACE;
  decodes(settings);
  // Keys and values in fp8, in units of each head's scale, where the library has this shape.
  if (freekv_shape_count() > 2) {
    const float key_scales[layers * kv_heads] = {0.5f, 1.1f, 0.3f, 2.0f},
                                    value_scales[layers * kv_heads] = {0.7f, 0.01f, 1.0f, 3.0f};
    settings = covering("freekv");
    settings.element = FREEKV_FP8_E4M3;
    settings.key_scales = key_scales;
    settings.value_scales = value_scales;
    settings.scale_count = layers * kv_heads;
    decodes(settings);
  }
}

/* ---- Errors ---- */

static void settings_errors(freekv_backend* backend) {
  freekv_pipeline* p = NULL;
#define REFUSED(change, ...)                                                                             \
  do {                                                                                                   \
    freekv_settings settings = covering("freekv");                                                       \
    change;                                                                                              \
    CHECK(freekv_pipeline_create(backend, &settings, &p) == FREEKV_SETTINGS_ERROR && SAYS(__VA_ARGS__)); \
    CHECK(p == NULL);                                                                                    \
  } while (0)
  REFUSED(settings.kv_heads = 3, "query_heads 4 is not a multiple of kv_heads 3");
  REFUSED(settings.layers = 0, "layers is 0");
  REFUSED(settings.query_heads = -1, "query_heads is -1");
  REFUSED(settings.kv_heads = -1, "kv_heads is -1");
  REFUSED(settings.store_direct = 1, "store_direct", "without a store_file");
  REFUSED((settings.method = "h2o", settings.max_tokens = 0), "max_tokens is 0");
  REFUSED((settings.method = "h2o", settings.max_prompt = settings.max_tokens + 1), "and max_prompt");
  REFUSED((settings.method = "h2o", settings.max_prompt = -2147483647 - 1), "max_prompt -2147483648");
  REFUSED(settings.element = FREEKV_F16, "f16 with head_dim 64 is not among", "f32 64", "FREEKV_C_SHAPES");
  REFUSED(settings.head_dim = 72, "f32 with head_dim 72", "bf16 128");
  REFUSED(settings.element = 0, "element is 0", "FREEKV_F32");
  REFUSED(settings.method = "freekv_paper", "\"freekv_paper\"", "streaming_llm, quest, freekv",
          "FREEKV_C_METHODS");
  REFUSED(settings.page_tokens = 12, "page size 12");
  REFUSED(settings.route = 2, "route is 2");
  REFUSED(settings.log_base = -1, "log_base is -1");
  REFUSED(settings.max_prompt = 20, "max_prompt", "freekv has no use");
  REFUSED(settings.delta = 0.5f, "delta", "freekv has no use");
  REFUSED(settings.tau = NAN, "tau is NaN");
  REFUSED((settings.method = "quest", settings.tau = 0.5f), "tau", "quest has no use");
  REFUSED((settings.method = "h2o", settings.route = FREEKV_IN_PLACE), "route", "h2o has no use");
  REFUSED((settings.method = "h2o", settings.store_file = "."), "store_file", "h2o has no use");
  REFUSED(settings.method = "freekv_key_codes", "codebooks");
  const int32_t kinds[layers] = {0, 4};
  REFUSED(settings.layer_kinds = kinds, "layer_kinds has 4");
  const int32_t ids[1] = {0};
  const freekv_engine_blocks blocks[layers] = {{.ids = ids, .count = 1}, {.ids = ids, .count = 1}};
  REFUSED(settings.blocks = blocks, "blocks");
  const freekv_key_codebooks few = {.size = sizeof few,
                                    .data = (const float*)blocks,
                                    .layers = 1,
                                    .kv_heads = kv_heads,
                                    .head_dim = d,
                                    .mean_codes = 8,
                                    .mean_dims = 4,
                                    .codes = 6,
                                    .dims = 4};
  REFUSED((settings.method = "freekv_key_codes", settings.codebooks = &few), "codebooks have 1 layers");
  REFUSED(settings.codebooks = &few, "codebooks", "freekv has no use");
  const float scales[3] = {1.0f, 2.0f, 0.0f};
  REFUSED(settings.key_scales = scales, "scale_count is 0");
  REFUSED(settings.scale_count = 2, "scale_count is 2", "0 and neither");
  REFUSED((settings.key_scales = scales, settings.scale_count = 2147483647), "scale_count is 2147483647");
  REFUSED((settings.value_scales = scales, settings.scale_count = 3), "value_scales has 3 numbers",
          "one for each layer");
  REFUSED((settings.key_scales = scales + 1, settings.scale_count = 2), "key_scales has 0.0", "above 0");
  REFUSED((settings.method = "h2o", settings.key_scales = scales), "key_scales", "h2o has no use");
  if (freekv_shape_count() > 2)
    REFUSED((settings.element = FREEKV_FP8_E4M3, settings.method = "h2o"), "h2o forgets", "bf16");

  freekv_backend* threads = NULL;
  const freekv_host_options many = {.size = sizeof many, .threads = 2000};
  CHECK(freekv_backend_create_host(&many, &threads) == FREEKV_SETTINGS_ERROR && SAYS("2000 threads"));
  CHECK(threads == NULL);

  if (!freekv_has_cuda()) { /* of a library for devices: cuda_test.c */
    const freekv_cuda_options streams = {.size = sizeof streams};
    CHECK(freekv_backend_create_cuda(&streams, &threads) == FREEKV_SETTINGS_ERROR &&
          SAYS("built without nvcc", "-DFREEKV_C_CUDA=ON", "freekv_backend_create_host"));
    CHECK(threads == NULL);
  }
}

static void usage_errors(freekv_backend* backend) {
  freekv_pipeline *p = NULL, *other = NULL;
  freekv_step* step = NULL;
  freekv_prefix* prefix = NULL;
  freekv_sequence s = -7, t = -7;
  float numbers[query_heads * d] = {0};
  int32_t table[64];
  freekv_resident_table size = {.size = sizeof size};
  freekv_settings settings = covering("freekv");
  const freekv_rows rows = {.size = sizeof rows,
                            .element = FREEKV_F32,
                            .rows = 1,
                            .keys = numbers,
                            .values = numbers,
                            .queries = numbers};
  const freekv_attention to = {.size = sizeof to, .rows = 1, .out = numbers};
#define MISUSED(call, ...) CHECK((call) == FREEKV_USAGE_ERROR && SAYS(__VA_ARGS__))
  MISUSED(freekv_pipeline_create(NULL, &settings, &p), "backend is NULL");
  MISUSED(freekv_pipeline_create(backend, NULL, &p), "settings is NULL");
  MISUSED(freekv_pipeline_create(backend, &settings, NULL), "pipeline is NULL");
  MISUSED(freekv_open(NULL, &s), "open: pipeline is NULL");
  MISUSED(freekv_end_step(NULL), "end_step: step is NULL");
  MISUSED(freekv_shape_at(99, &s, &t), "99 is not one of");
  const freekv_memory nothing = {.size = sizeof nothing};
  settings.slow_memory = &nothing;
  MISUSED(freekv_pipeline_create(backend, &settings, &p), "slow_memory", "NULL");
  CHECK(p == NULL);
  settings.slow_memory = NULL;

  OK(freekv_pipeline_create(backend, &settings, &p));
  MISUSED(freekv_pipeline_create(backend, &settings, &other), "the backend has a pipeline");
  MISUSED(freekv_backend_destroy(backend), "the backend has a pipeline");
  CHECK(other == NULL);
  MISUSED(freekv_open(p, NULL), "open: sequence is NULL");
  MISUSED(freekv_release(p, 0), "sequence 0 is not open");
  MISUSED(freekv_tokens(p, -1, &t), "sequence -1 is not open");
  OK(freekv_open(p, &s));
  MISUSED(freekv_truncate(p, s, 5), "truncat");
  MISUSED(freekv_restore(p, s), "preempted");
  MISUSED(freekv_keep_prefix(p, s, 1, &prefix), "prefix");
  MISUSED(freekv_open_with(p, NULL, &t), "prefix is NULL");
  CHECK(prefix == NULL && t == -7);

  const freekv_step_input row = {.sequence = s, .tokens = 1, .phase = FREEKV_DECODE};
  const freekv_step_input twice[] = {row, row}, odd = {.sequence = s, .tokens = 1, .phase = 2},
                          draft = {.sequence = s, .tokens = 2, .phase = FREEKV_DECODE};
  MISUSED(freekv_begin_step(p, NULL, 1, &step), "entries is NULL");
  MISUSED(freekv_begin_step(p, &row, 1, NULL), "step is NULL");
  MISUSED(freekv_begin_step(p, twice, 2, &step), "listed twice");
  MISUSED(freekv_begin_step(p, &odd, 1, &step), "phase 2");
  MISUSED(freekv_begin_step(p, &draft, 1, &step), "max_decode_rows");
  CHECK(step == NULL);
  OK(freekv_begin_step(p, &row, 1, &step));
  MISUSED(freekv_begin_step(p, &row, 1, &step), "begin_step");
  MISUSED(freekv_fork(p, s, &t), "fork");
  MISUSED(freekv_attend(step, 0, &to), "attend");
  freekv_rows wrong = rows;
  wrong.element = FREEKV_BF16;
  MISUSED(freekv_append(step, 0, &wrong), "element is 3");
  wrong = rows;
  wrong.rows = 0;
  MISUSED(freekv_append(step, 0, &wrong), "keys");
  wrong.rows = -1;
  MISUSED(freekv_append(step, 0, &wrong), "-1 rows");
  wrong = rows;
  wrong.values = NULL;
  MISUSED(freekv_append(step, 0, &wrong), "values");
  wrong = rows;
  wrong.queries = NULL;
  MISUSED(freekv_append(step, 0, &wrong), "queries");
  wrong = rows;
  wrong.query_element = 7;
  MISUSED(freekv_append(step, 0, &wrong), "query_element is 7");
  wrong = rows;
  wrong.key_stride = kv_heads * d - 1;
  MISUSED(freekv_append(step, 0, &wrong), "keys: a stride of ");
  wrong = rows;
  wrong.query_stride = -1;
  MISUSED(freekv_append(step, 0, &wrong), "queries: a stride of -1");
  MISUSED(freekv_append(step, layers, &rows), "layer 2");
  MISUSED(freekv_append(step, 0, NULL), "rows is NULL");
  OK(freekv_append(step, 0, &rows));
  MISUSED(freekv_append(step, 0, &rows), "append");
  const freekv_attention nowhere = {.size = sizeof nowhere, .rows = 1};
  MISUSED(freekv_attend(step, 0, &nowhere), "attention output");
  freekv_attention elsewhere = to;
  elsewhere.out_element = -1;
  MISUSED(freekv_attend(step, 0, &elsewhere), "out_element is -1");
  elsewhere = to;
  elsewhere.out_stride = 1;
  MISUSED(freekv_attend(step, 0, &elsewhere), "attention output: a stride of 1");
  MISUSED(freekv_end_step(step), "end");
  MISUSED(freekv_table(step, 0, s, -1, table, 64, &size), "table");
  OK(freekv_attend(step, 0, &to));
  OK(freekv_append(step, 1, &rows));
  OK(freekv_correct(step, 1));
  MISUSED(freekv_table(step, 1, s, kv_heads, table, 64, &size), "KV head 2");
  MISUSED(freekv_table(step, 1, s, -1, table, 1, &size), "table");
  MISUSED(freekv_table(step, 1, s, -1, NULL, 64, &size), "blocks is NULL");
  OK(freekv_table(step, 1, s, -1, table, 64, &size));
  CHECK(size.pages == 1 && size.tokens == 1);
  OK(freekv_finish_layer(step, 1));
  OK(freekv_end_step(step));
  MISUSED(freekv_append(step, 0, &rows), "append: no step is in progress");

  // What a device alone has.
  const freekv_step_bounds most = {.size = sizeof most, .entries = 1};
  const freekv_block_tables tables = {.size = sizeof tables};
  freekv_engine_blocks kv = {0};
  MISUSED(freekv_begin_captured_step(p, &most, &step), "begin_captured_step: the backend is the host's");
  MISUSED(freekv_begin_captured_step(p, NULL, &step), "bounds is NULL");
  MISUSED(freekv_plan(p, &row, 1, &t), "plan: the backend is the host's");
  MISUSED(freekv_plan(p, &odd, 1, &t), "plan: phase 2");
  MISUSED(freekv_wait(p), "wait: the backend is the host's");
  MISUSED(freekv_queue_tables(step, 0, &tables), "queue_tables: the backend is the host's");
  MISUSED(freekv_most_blocks(p, 0, FREEKV_BY_HEAD, 0, &t), "most_blocks: the backend is the host's");
  MISUSED(freekv_paged_kv(p, 0, &kv), "paged_kv: the backend is the host's");
  OK(freekv_reserve(p, &row, 1)); /* which the host has too */
  MISUSED(freekv_reserve(p, twice, 2), "listed twice");
  OK(freekv_abandon_step(step)); /* nothing */
  OK(freekv_tokens(p, s, &t));
  CHECK(t == 1);
  MISUSED(freekv_report(p, 9, s, &(freekv_step_report){.size = sizeof(freekv_step_report)}), "layer 9");

  OK(freekv_begin_step(p, &row, 1, &step));
  MISUSED(freekv_abandon_sequence(step, 2), "sequence 2");
  OK(freekv_abandon_step(step));
  MISUSED(freekv_tokens(p, s, &t), "not open");
  OK(freekv_open(p, &s));
  OK(freekv_begin_step(p, &row, 1, &step)); /* goes with its pipeline */
  OK(freekv_pipeline_destroy(p));

  settings = covering("h2o");
  OK(freekv_pipeline_create(backend, &settings, &p));
  OK(freekv_open(p, &s));
  MISUSED(freekv_truncate(p, s, 0), "truncate: h2o(0.5)", "choose a method that retrieves");
  MISUSED(freekv_preempt(p, s), "preempt");
  MISUSED(freekv_restore(p, s), "restore");
  MISUSED(freekv_keep_prefix(p, s, 0, &prefix), "keep_prefix");
  MISUSED(freekv_reserve(p, &row, 1), "reserve");
  OK(freekv_begin_step(p, &row, 1, &step));
  OK(freekv_append(step, 0, &rows));
  MISUSED(freekv_correct(step, 0), "correct");
  MISUSED(freekv_table(step, 0, s, -1, table, 64, &size), "table");
  MISUSED(freekv_finish_layer(step, 0), "finish_layer");
  MISUSED(freekv_abandon_sequence(step, s), "abandon_sequence");
  OK(freekv_pipeline_destroy(p));
  OK(freekv_pipeline_destroy(NULL));
  OK(freekv_backend_destroy(NULL));
  OK(freekv_prefix_destroy(NULL));
}

static void other_errors(freekv_backend* backend) {
  freekv_pipeline* p = NULL;
  freekv_step* step = NULL;
  freekv_sequence s = 0, t = 0;
  freekv_settings settings = covering("freekv");
  settings.max_sequences = 1;
  OK(freekv_pipeline_create(backend, &settings, &p));
  OK(freekv_open(p, &s));
  CHECK(freekv_open(p, &t) == FREEKV_POOL_EXHAUSTED && SAYS("sequences exhausted: 1 of 1 in use"));
  const freekv_step_input long_prompt = {.sequence = s, .tokens = most_tokens + 1, .phase = FREEKV_PREFILL};
  CHECK(freekv_begin_step(p, &long_prompt, 1, &step) == FREEKV_POOL_EXHAUSTED && SAYS("161 more"));
  OK(freekv_pipeline_destroy(p));

  settings.store_file = "/nowhere/at/all";
  CHECK(freekv_pipeline_create(backend, &settings, &p) == FREEKV_STORE_ERROR &&
        SAYS("/nowhere/at/all", "No such file"));
  settings.store_file = NULL;

  counter none = {.refuses = 1};
  const freekv_memory memory = {
      .size = sizeof memory, .context = &none, .allocate = counted, .deallocate = uncounted};
  settings.fast_memory = &memory;
  CHECK(freekv_pipeline_create(backend, &settings, &p) == FREEKV_OUT_OF_MEMORY && SAYS("memory"));
  settings.fast_memory = NULL;
  OK(freekv_pipeline_create(backend, &settings, &p)); /* no failure has left anything behind */
  OK(freekv_pipeline_destroy(p));

#if !defined(FREEKV_SANITIZED) /* whose address space has no limit */
  const pid_t child = fork();
  if (child == 0) {
    const struct rlimit little = {.rlim_cur = (rlim_t)1 << 28, .rlim_max = (rlim_t)1 << 28};
    const freekv_host_options many = {.size = sizeof many, .threads = 1000};
    freekv_backend* threads = NULL;
    if (setrlimit(RLIMIT_AS, &little) != 0) _exit(2);
    _exit(freekv_backend_create_host(&many, &threads) == FREEKV_THREAD_ERROR && SAYS("wants 1000 threads")
              ? 0
              : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
#endif
}

/* ---- Structs ---- */

static void sizes(freekv_backend* backend) {
  freekv_pipeline* p = NULL;
  struct {
    freekv_settings known;
    unsigned char more[16];
  } newer = {.known = covering("freekv")};
  newer.known.size = sizeof newer;
  OK(freekv_pipeline_create(backend, &newer.known, &p));
  OK(freekv_pipeline_destroy(p));
  newer.more[15] = 1;
  CHECK(freekv_pipeline_create(backend, &newer.known, &p) == FREEKV_USAGE_ERROR &&
        SAYS("of which this library knows", "not 0"));
  newer.known.size -= 1;
  OK(freekv_pipeline_create(backend, &newer.known, &p));
  OK(freekv_pipeline_destroy(p));

  // Older: what is behind its size is not the caller's settings.
  freekv_settings older = covering("freekv");
  older.size = offsetof(freekv_settings, max_resident);
  memset((char*)&older + older.size, 0x7f, sizeof older - older.size);
  OK(freekv_pipeline_create(backend, &older, &p));
  OK(freekv_pipeline_destroy(p));

  const size_t none[] = {0, sizeof(size_t) - 1, 1 << 20};
  for (int i = 0; i < 3; ++i) {
    older.size = none[i];
    CHECK(freekv_pipeline_create(backend, &older, &p) == FREEKV_USAGE_ERROR &&
          SAYS("settings has size", "sizeof"));
  }

  // What the library fills.
  const freekv_settings settings = covering("freekv");
  freekv_footprint whole = {.size = sizeof whole};
  OK(freekv_measure(backend, &settings, &whole));
  CHECK(whole.slow > 0 && whole.fast > 0 && whole.state > 0);
  struct {
    freekv_footprint known;
    unsigned char more[8];
  } larger;
  memset(&larger, 0x7f, sizeof larger);
  larger.known.size = sizeof larger;
  OK(freekv_measure(backend, &settings, &larger.known));
  CHECK(larger.known.size == sizeof larger && larger.known.state == whole.state);
  for (int i = 0; i < 8; ++i) CHECK(larger.more[i] == 0);
  freekv_footprint smaller;
  memset(&smaller, 0x7f, sizeof smaller);
  smaller.size = offsetof(freekv_footprint, fast);
  OK(freekv_measure(backend, &settings, &smaller));
  CHECK(smaller.slow == whole.slow && smaller.fast == 0x7f7f7f7f7f7f7f7f &&
        smaller.size == offsetof(freekv_footprint, fast));
  smaller.size = 3;
  CHECK(freekv_measure(backend, &settings, &smaller) == FREEKV_USAGE_ERROR && SAYS("footprint has size 3"));
}

/* ---- Names ---- */

static void names(void) {
  const char* expected[] = {
      "full", "streaming_llm", "quest", "freekv", "freekv_key_codes", "freekv_key_codes_deficit", "h2o"};
  const char* statuses[] = {
      "ok",           "settings_error", "usage_error",  "pool_exhausted", "store_error",
      "replay_error", "device_error",   "thread_error", "out_of_memory",  "unexpected_error"};
  int32_t element = 0, head_dim = 0;
  CHECK(freekv_abi() == FREEKV_ABI);
  CHECK(freekv_version() == FREEKV_EXPECTED_VERSION);
  CHECK(freekv_method_count() == 7 && freekv_method_name(7) == NULL && freekv_method_about(7) == NULL);
  for (size_t i = 0; i < 7; ++i)
    CHECK(strcmp(freekv_method_name(i), expected[i]) == 0 && strlen(freekv_method_about(i)) > 10);
  for (int i = 0; i < 10; ++i) CHECK(strcmp(freekv_status_name(i), statuses[i]) == 0);
  CHECK(freekv_status_name(10) == NULL && freekv_status_name(-1) == NULL);
  CHECK(strcmp(freekv_element_name(FREEKV_F16), "f16") == 0 && freekv_element_name(0) == NULL);
  CHECK(freekv_shape_count() == 2 || freekv_shape_count() == 3); /* another one is of fp8 */
  CHECK(strcmp(freekv_element_name(FREEKV_FP8_E4M3), "fp8") == 0);
  OK(freekv_shape_at(0, &element, &head_dim));
  CHECK(element == FREEKV_BF16 && head_dim == 128);
  OK(freekv_shape_at(1, &element, &head_dim));
  CHECK(element == FREEKV_F32 && head_dim == 64);
}

int main(void) {
  freekv_backend* backend = NULL;
  const freekv_host_options options = {.size = sizeof options, .no_overlap = 1};
  CHECK(strcmp(freekv_last_message(), "") == 0);
  names();
  OK(freekv_backend_create_host(&options, &backend));
  settings_errors(backend);
  usage_errors(backend);
  other_errors(backend);
  sizes(backend);
  OK(freekv_backend_destroy(backend));
  decoding();
  return finished();
}
