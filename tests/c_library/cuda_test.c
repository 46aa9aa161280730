/* The C interface on a device: what the host's backend gives, by the same calls; captured steps, the bits of
 * those that are begun; tables; and every error that a device has.
 *
 * Exit status: 0 all right, 1 not, 77 no device. */
#include <cuda_runtime_api.h>
#include <float.h>
#include <freekv/c_api.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "c_test.h"

enum { layers = 3, query_heads = 4, kv_heads = 2, d = 64, page = 8, most_tokens = 160, draft = 3 };
enum { kv_row = kv_heads * d, query_row = query_heads * d, most_sequences = 3, most_rows = 64 };
enum { captured_rows = most_sequences * draft, most_out = 1 << 18, most_counts = 1 << 11 };

#define CUDA(call) CHECK((call) == cudaSuccess)

/* ---- Rows, in memory that both sides read ---- */

static float *keys[layers], *values[layers], *queries[layers], *outs[layers], *lses[layers];

static void take_rows(void) {
  for (int layer = 0; layer < layers; ++layer) {
    float** const all[] = {keys + layer, values + layer, queries + layer, outs + layer, lses + layer};
    const size_t numbers[] = {kv_row, kv_row, query_row, query_row, query_heads};
    for (int i = 0; i < 5; ++i)
      CUDA(cudaHostAlloc((void**)all[i], most_rows * numbers[i] * sizeof(float), cudaHostAllocMapped));
  }
}

/* Number `i` of something. */
static float drawn(uint64_t of, int i) {
  uint64_t x = (of * 1000003u + (uint64_t)i + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return (float)(int32_t)(x >> 32) / 2147483648.0f;
}

/* Rows of position `at` of a text. Neighbouring queries are alike. */
static void put_row(int text, int at, int layer, int row) {
  const uint64_t of = ((uint64_t)text * 1000 + (uint64_t)at) * layers + (uint64_t)layer;
  const uint64_t turning = ((uint64_t)text * 1000 + (uint64_t)(at / 6)) * layers + (uint64_t)layer;
  for (int i = 0; i < kv_row; ++i) {
    keys[layer][row * kv_row + i] = 2 * drawn(of, i);
    values[layer][row * kv_row + i] = drawn(of, 1000 + i);
  }
  for (int i = 0; i < query_row; ++i)
    queries[layer][row * query_row + i] = 2 * drawn(turning, 2000 + i) + 0.5f * drawn(of, 3000 + i);
}

/* ---- A side: a backend, its pipeline, and what it has given ---- */

typedef struct {
  freekv_backend* backend;
  freekv_pipeline* p;
  cudaStream_t compute;   /* NULL: of the host */
  cudaGraphExec_t replay; /* NULL: steps are begun */
  float* out;
  int32_t* counts;
  size_t numbers, count;
} side;

typedef struct {
  freekv_sequence id;
  int text, tokens;
} sequence;

static freekv_rows rows_of(int layer, int rows) {
  const freekv_rows r = {.size = sizeof r,
                         .element = FREEKV_F32,
                         .rows = rows,
                         .keys = keys[layer],
                         .values = values[layer],
                         .queries = queries[layer]};
  return r;
}
static freekv_attention output_of(int layer, int rows) {
  const freekv_attention to = {.size = sizeof to, .rows = rows, .out = outs[layer], .lse = lses[layer]};
  return to;
}

static void step_of(side* on, sequence** of, size_t count, int rows, int phase) {
  freekv_step_input entries[most_sequences];
  freekv_step* step = NULL;
  const int all = (int)count * rows;
  for (size_t i = 0; i < count; ++i) {
    entries[i] = (freekv_step_input){.sequence = of[i]->id, .tokens = rows, .phase = phase};
    for (int layer = 0; layer < layers; ++layer)
      for (int row = 0; row < rows; ++row)
        put_row(of[i]->text, of[i]->tokens + row, layer, (int)i * rows + row);
    of[i]->tokens += rows;
  }
  if (on->replay != NULL && phase == FREEKV_DECODE) {
    int32_t planned = 0;
    while (OK(freekv_plan(on->p, entries, count, &planned)) && !planned) OK(freekv_wait(on->p));
    CUDA(cudaGraphLaunch(on->replay, on->compute));
  } else {
    OK(freekv_begin_step(on->p, entries, count, &step));
    for (int layer = 0; layer < layers; ++layer) {
      const freekv_rows given = rows_of(layer, all);
      const freekv_attention to = output_of(layer, all);
      OK(freekv_append(step, layer, &given));
      OK(freekv_attend(step, layer, &to));
    }
    OK(freekv_end_step(step));
  }
  OK(freekv_synchronize(on->p));
  for (int layer = 0; layer < layers; ++layer) {
    memcpy(on->out + on->numbers, outs[layer], (size_t)(all * query_row) * sizeof(float));
    memcpy(on->out + on->numbers + all * query_row, lses[layer], (size_t)(all * query_heads) * sizeof(float));
    on->numbers += (size_t)(all * (query_row + query_heads));
    for (size_t i = 0; i < count && phase == FREEKV_DECODE; ++i) {
      freekv_step_report r = {.size = sizeof r};
      OK(freekv_report(on->p, layer, of[i]->id, &r));
      const int32_t counts[] = {r.corrected_heads, r.attended, r.recalled, r.promoted};
      memcpy(on->counts + on->count, counts, sizeof counts);
      on->count += 4;
    }
  }
  for (size_t i = 0; i < count; ++i) {
    int32_t tokens = -1;
    OK(freekv_tokens(on->p, of[i]->id, &tokens));
    CHECK(tokens == of[i]->tokens);
  }
}

static freekv_settings settings_of(const char* method) {
  static const int32_t kinds[layers] = {FREEKV_LAYER_COMPLETE, FREEKV_LAYER_RETRIEVAL,
                                        FREEKV_LAYER_RETRIEVAL};
  const freekv_settings settings = {.size = sizeof settings,
                                    .method = method,
                                    .element = FREEKV_F16,
                                    .head_dim = d,
                                    .layers = layers,
                                    .query_heads = query_heads,
                                    .kv_heads = kv_heads,
                                    .page_tokens = page,
                                    .sink = page,
                                    .window = 2 * page,
                                    .selected_units = 3,
                                    .max_tokens = most_tokens,
                                    .max_sequences = 4,
                                    .max_resident = most_sequences,
                                    .max_decode_rows = draft,
                                    .layer_kinds = strcmp(method, "full") == 0 ? NULL : kinds};
  return settings;
}

/* Prompts, decode rows, a branch, a draft of which rows are rejected, a prefix, and one that waits. */
static void happens(side* on) {
  sequence a = {.text = 1}, b = {.text = 2}, c, e;
  sequence *first[] = {&a}, *second[] = {&b}, *both[] = {&a, &b}, *three[] = {&a, &b, &c};
  OK(freekv_open(on->p, &a.id));
  step_of(on, first, 1, 50, FREEKV_PREFILL);
  step_of(on, first, 1, 40, FREEKV_PREFILL);
  OK(freekv_open(on->p, &b.id));
  step_of(on, second, 1, 37, FREEKV_PREFILL);
  for (int i = 0; i < 6; ++i) step_of(on, both, 2, 1, FREEKV_DECODE);
  c = a;
  c.text = 3;
  OK(freekv_fork(on->p, a.id, &c.id));
  step_of(on, three, 3, 1, FREEKV_DECODE);
  step_of(on, three, 3, draft, FREEKV_DECODE);
  b.tokens -= 2;
  OK(freekv_truncate(on->p, b.id, b.tokens));
  step_of(on, three, 3, 1, FREEKV_DECODE);

  freekv_prefix* prefix = NULL;
  OK(freekv_keep_prefix(on->p, a.id, 8 * page, &prefix));
  OK(freekv_release(on->p, a.id));
  e = (sequence){.text = 4, .tokens = 8 * page};
  OK(freekv_open_with(on->p, prefix, &e.id));
  OK(freekv_prefix_destroy(prefix));
  sequence *others[] = {&b, &c, &e}, *last[] = {&e}, *awake[] = {&b, &e};
  step_of(on, last, 1, 10, FREEKV_PREFILL);
  for (int i = 0; i < 3; ++i) step_of(on, others, 3, 1, FREEKV_DECODE);
  OK(freekv_preempt(on->p, c.id));
  for (int i = 0; i < 3; ++i) step_of(on, awake, 2, 1, FREEKV_DECODE);
  OK(freekv_restore(on->p, c.id));
  for (int i = 0; i < 3; ++i) step_of(on, others, 3, 1, FREEKV_DECODE);
  OK(freekv_release(on->p, b.id));
  OK(freekv_release(on->p, c.id));
  OK(freekv_release(on->p, e.id));
}

/* ---- What is on both sides ---- */

static freekv_backend* threads(void) {
  freekv_backend* backend = NULL;
  const freekv_host_options options = {.size = sizeof options, .no_overlap = 1};
  OK(freekv_backend_create_host(&options, &backend));
  return backend;
}
static freekv_backend* streams_and(cudaStream_t compute, cudaStream_t recall, int copy_engines) {
  freekv_backend* backend = NULL;
  const freekv_cuda_options options = {
      .size = sizeof options, .compute = compute, .recall = recall, .copy_engines = copy_engines};
  OK(freekv_backend_create_cuda(&options, &backend));
  return backend;
}
static freekv_backend* streams(cudaStream_t compute, cudaStream_t recall) {
  return streams_and(compute, recall, 0);
}

static side new_side(freekv_backend* backend, cudaStream_t compute, const freekv_settings* settings) {
  side s = {.backend = backend, .compute = compute};
  s.out = malloc(most_out * sizeof(float));
  s.counts = malloc(most_counts * sizeof(int32_t));
  OK(freekv_pipeline_create(backend, settings, &s.p));
  return s;
}
static void end_side(side* s) {
  OK(freekv_pipeline_destroy(s->p));
  OK(freekv_backend_destroy(s->backend));
  free(s->out);
  free(s->counts);
}

static cudaGraphExec_t captured(side* on) {
  freekv_step* step = NULL;
  cudaGraph_t graph = NULL;
  cudaGraphExec_t replay = NULL;
  const freekv_step_bounds most = {.size = sizeof most, .entries = most_sequences};
  CUDA(cudaStreamBeginCapture(on->compute, cudaStreamCaptureModeThreadLocal));
  OK(freekv_begin_captured_step(on->p, &most, &step));
  for (int layer = 0; layer < layers; ++layer) {
    const freekv_rows given = rows_of(layer, captured_rows);
    const freekv_attention to = output_of(layer, captured_rows);
    OK(freekv_append(step, layer, &given));
    OK(freekv_attend(step, layer, &to));
  }
  OK(freekv_end_step(step));
  CUDA(cudaStreamEndCapture(on->compute, &graph));
  CUDA(cudaGraphInstantiate(&replay, graph, 0));
  CUDA(cudaGraphDestroy(graph));
  return replay;
}

/* Numbers within 400 units in the last place of the larger one or of 1: the sides sum in other orders. */
static int far_numbers(const side* a, const side* b) {
  int far = 0;
  for (size_t i = 0; i < a->numbers; ++i)
    far += !(fabsf(a->out[i] - b->out[i]) <=
             400 * FLT_EPSILON * fmaxf(fmaxf(fabsf(a->out[i]), fabsf(b->out[i])), 1.0f));
  return far;
}

/* ---- Memory of the caller's ---- */

typedef struct {
  size_t in_use, most;
} counter;
static void* of_device(void* context, size_t bytes, size_t alignment) {
  counter* c = context;
  void* memory = NULL;
  (void)alignment;
  c->in_use += bytes;
  if (c->in_use > c->most) c->most = c->in_use;
  return cudaMalloc(&memory, bytes) == cudaSuccess ? memory : NULL;
}
static void back_to_device(void* context, void* memory, size_t bytes, size_t alignment) {
  (void)alignment;
  ((counter*)context)->in_use -= bytes;
  cudaFree(memory);
}

/* An engine's tensor, (blocks, 2, page, kv_heads, d), whose blocks are a layer's slots, in no order of
 * theirs.
 */
static void give_blocks(freekv_backend* backend, const freekv_settings* settings,
                        freekv_engine_blocks blocks[layers]) {
  int64_t slots[layers];
  OK(freekv_slots(backend, settings, slots, NULL));
  for (int layer = 0; layer < layers; ++layer) {
    uint16_t* tensor = NULL;
    const size_t count = (size_t)slots[layer];
    int32_t* const ids = malloc((count + 1) * sizeof(int32_t));
    for (size_t i = 0; i < count; ++i) ids[i] = (int32_t)(count - i);
    CUDA(cudaMalloc((void**)&tensor, (count + 1) * 2 * page * kv_row * sizeof *tensor));
    blocks[layer] = (freekv_engine_blocks){.keys = tensor,
                                           .values = tensor + page * kv_row,
                                           .block_stride = 2 * page * kv_row,
                                           .token_stride = kv_row,
                                           .head_stride = d,
                                           .ids = ids,
                                           .count = count};
  }
}
static void take_back(freekv_engine_blocks blocks[layers]) {
  for (int layer = 0; layer < layers; ++layer) {
    CUDA(cudaFree(blocks[layer].keys));
    free((void*)(uintptr_t)blocks[layer].ids);
  }
}

/* ---- Tests ---- */

static int same(const side* a, const side* b) {
  return a->numbers == b->numbers && a->count == b->count &&
         memcmp(a->out, b->out, a->numbers * sizeof(float)) == 0 &&
         memcmp(a->counts, b->counts, a->count * sizeof(int32_t)) == 0;
}

static void decodes(const char* method, cudaStream_t compute, cudaStream_t recall) {
  freekv_settings settings = settings_of(method);
  side host = new_side(threads(), NULL, &settings);
  happens(&host);
  CHECK(host.numbers > 30000 && host.numbers < most_out && host.count < most_counts);

  counter fast = {0};
  const freekv_memory fast_memory = {
      .size = sizeof fast_memory, .context = &fast, .allocate = of_device, .deallocate = back_to_device};
  settings.fast_memory = &fast_memory;
  side begun = new_side(streams(compute, recall), compute, &settings);
  freekv_footprint needs = {.size = sizeof needs};
  OK(freekv_measure(begun.backend, &settings, &needs));
  CHECK(needs.fast > 0 && needs.slow > 0 && fast.most == needs.fast);
  happens(&begun);
  CHECK(strcmp(freekv_pipeline_name(begun.p), freekv_pipeline_name(host.p)) == 0);
  CHECK(begun.numbers == host.numbers && far_numbers(&begun, &host) == 0);
  CHECK(begun.count == host.count && memcmp(begun.counts, host.counts, host.count * sizeof(int32_t)) == 0);
  int32_t corrected = 0, recalled = 0;
  for (size_t i = 0; i < host.count; i += 4) corrected += host.counts[i], recalled += host.counts[i + 2];
  const int selects = strcmp(method, "full") != 0;
  CHECK((corrected > 5 && recalled > 50) == selects);

  settings.fast_memory = NULL;
  side replayed = new_side(streams(compute, recall), compute, &settings);
  replayed.replay = captured(&replayed);
  happens(&replayed);
  CHECK(same(&replayed, &begun));
  CUDA(cudaGraphExecDestroy(replayed.replay));
  end_side(&replayed);

  if (strcmp(method, "freekv") == 0) {
    freekv_engine_blocks blocks[layers];
    freekv_backend* const backend = streams_and(compute, recall, 1);
    give_blocks(backend, &settings, blocks);
    settings.blocks = blocks;
    side copied = new_side(backend, compute, &settings);
    happens(&copied);
    CHECK(same(&copied, &begun));
    end_side(&copied);
    take_back(blocks);
  }
  end_side(&begun);
  CHECK(fast.in_use == 0);
  end_side(&host);
}

/* Tables on the device are those that the host reads back, and blocks have the keys. */
static void tables(cudaStream_t compute, cudaStream_t recall) {
  enum { layer = 1, room = 64 };
  const freekv_settings settings = settings_of("freekv");
  side on = new_side(streams(compute, recall), compute, &settings);
  sequence s = {.text = 1};
  sequence* one[] = {&s};
  freekv_step* step = NULL;
  int32_t most = 0, read[room], *written = NULL;
  OK(freekv_open(on.p, &s.id));
  step_of(&on, one, 1, 60, FREEKV_PREFILL);
  step_of(&on, one, 1, 1, FREEKV_DECODE);
  OK(freekv_most_blocks(on.p, layer, FREEKV_BY_HEAD, 0, &most));
  CHECK(most > 6 && most <= room);
  const int32_t pages = most;
  OK(freekv_most_blocks(on.p, layer, FREEKV_BY_HEAD, page / 2, &most));
  CHECK(most == 2 * pages && most <= room);
  CHECK(freekv_most_blocks(on.p, layer, FREEKV_ALL_HEADS, 0, &most) == FREEKV_USAGE_ERROR &&
        SAYS("differ by head"));
  CHECK(freekv_most_blocks(on.p, layer, 3, 0, &most) == FREEKV_USAGE_ERROR && SAYS("rows is 3"));
  CUDA(cudaHostAlloc((void**)&written, (room + 2) * kv_heads * sizeof(int32_t), cudaHostAllocMapped));

  const freekv_step_input row = {.sequence = s.id, .tokens = 1, .phase = FREEKV_DECODE};
  for (int i = 0; i < layers; ++i) put_row(s.text, s.tokens, i, 0);
  OK(freekv_begin_step(on.p, &row, 1, &step));
  for (int i = 0; i < layers; ++i) {
    const freekv_rows given = rows_of(i, 1);
    const freekv_attention to = output_of(i, 1);
    OK(freekv_append(step, i, &given));
    if (i == layer) {
      freekv_block_tables there = {.size = sizeof there,
                                   .rows = FREEKV_BY_HEAD,
                                   .sequences = 1,
                                   .max_blocks = room,
                                   .blocks = written,
                                   .seq_lens = written + room * kv_heads,
                                   .block_counts = written + (room + 1) * kv_heads};
      OK(freekv_correct(step, layer));
      OK(freekv_queue_tables(step, layer, &there));
      CUDA(cudaStreamSynchronize(compute));
      for (int head = 0; head < kv_heads; ++head) {
        freekv_resident_table table = {.size = sizeof table};
        OK(freekv_table(step, layer, s.id, head, read, room, &table));
        CHECK(table.pages == 7 && table.tokens == 6 * page + (s.tokens + 1) % page);
        CHECK(there.seq_lens[head] == table.tokens && there.block_counts[head] == table.pages);
        CHECK(memcmp(written + head * room, read, (size_t)table.pages * sizeof(int32_t)) == 0);
        CHECK(written[head * room + table.pages] == -1);

        // The open page's last row is the step's.
        freekv_engine_blocks kv = {0};
        uint16_t key = 0;
        OK(freekv_paged_kv(on.p, layer, &kv));
        const int64_t at = read[table.pages - 1] * kv.block_stride + (s.tokens % page) * kv.token_stride +
                           head * kv.head_stride;
        CUDA(cudaMemcpy(&key, (uint16_t*)kv.keys + at, sizeof key, cudaMemcpyDeviceToHost));
        const int exponent = (key >> 10) & 31;
        const double size =
            ldexp((key & 1023) + (exponent > 0 ? 1024 : 0), (exponent > 0 ? exponent : 1) - 25);
        CHECK(fabs((key >> 15 ? -size : size) - (double)keys[layer][head * d]) < 1e-3);
      }
      /* Of halves of a page. */
      there.block_tokens = page / 2;
      OK(freekv_queue_tables(step, layer, &there));
      CUDA(cudaStreamSynchronize(compute));
      for (int head = 0; head < kv_heads; ++head) {
        freekv_resident_table table = {.size = sizeof table};
        freekv_engine_blocks kv = {0};
        OK(freekv_table(step, layer, s.id, head, read, room, &table));
        OK(freekv_paged_kv(on.p, layer, &kv));
        CHECK(there.seq_lens[head] == table.tokens);
        CHECK(there.block_counts[head] == (table.tokens + page / 2 - 1) / (page / 2));
        for (int b = 0; b < there.block_counts[head]; ++b)
          CHECK(written[head * room + b] ==
                read[b / 2] * (kv.block_stride / (page / 2 * kv.token_stride)) + b % 2);
      }
      there.block_tokens = 3;
      CHECK(freekv_queue_tables(step, layer, &there) == FREEKV_USAGE_ERROR && SAYS("choose a divisor of 8"));
      there.block_tokens = 0;
      there.max_blocks = 1;
      CHECK(freekv_queue_tables(step, layer, &there) == FREEKV_USAGE_ERROR && SAYS("there is room for 1"));
    }
    OK(freekv_attend(step, i, &to));
  }
  OK(freekv_end_step(step));
  end_side(&on);
  CUDA(cudaFreeHost(written));
}

static void errors(cudaStream_t compute, cudaStream_t recall) {
  freekv_backend* backend = NULL;
  freekv_pipeline* p = NULL;
  freekv_step* step = NULL;
  int32_t planned = -1;
  freekv_cuda_options options = {.size = sizeof options, .compute = compute};
  CHECK(freekv_backend_create_cuda(&options, &backend) == FREEKV_USAGE_ERROR &&
        SAYS("recall is the legacy default stream"));
  CHECK(backend == NULL);

  backend = streams(compute, recall);
  freekv_settings settings = settings_of("h2o");
  CHECK(freekv_pipeline_create(backend, &settings, &p) == FREEKV_SETTINGS_ERROR &&
        SAYS("does not have method \"h2o\"", "full, quest, freekv;", "freekv_backend_create_host"));
  freekv_footprint needs = {.size = sizeof needs};
  CHECK(freekv_measure(backend, &settings, &needs) == FREEKV_SETTINGS_ERROR && SAYS("\"h2o\""));
  settings = settings_of("freekv");
  settings.store_file = ".";
  CHECK(freekv_pipeline_create(backend, &settings, &p) == FREEKV_SETTINGS_ERROR && SAYS("store files"));
  settings.store_file = NULL;
  settings.element = FREEKV_BF16;
  CHECK(freekv_pipeline_create(backend, &settings, &p) == FREEKV_SETTINGS_ERROR && SAYS("f16 64"));
  CHECK(p == NULL);
  OK(freekv_backend_destroy(backend));

  settings = settings_of("freekv");
  side on = new_side(streams(compute, recall), compute, &settings);
  sequence s = {.text = 1};
  OK(freekv_open(on.p, &s.id));
  const freekv_step_input row = {.sequence = s.id, .tokens = 1, .phase = FREEKV_DECODE};
  const freekv_step_bounds most = {.size = sizeof most, .entries = 1};
  CHECK(freekv_begin_captured_step(on.p, &most, &step) == FREEKV_USAGE_ERROR && SAYS("is not captured"));
  CHECK(freekv_plan(on.p, &row, 1, &planned) == FREEKV_USAGE_ERROR && SAYS("no captured step takes 1 rows"));
  CHECK(step == NULL && planned == -1);
  OK(freekv_reserve(on.p, &row, 1));

  // What a captured stream refuses is an error of the device's, and the message names the call.
  cudaGraph_t graph = NULL;
  CUDA(cudaStreamBeginCapture(compute, cudaStreamCaptureModeThreadLocal));
  CHECK(freekv_synchronize(on.p) == FREEKV_DEVICE_ERROR && SAYS("cudaStreamSynchronize failed: "));
  cudaStreamEndCapture(compute, &graph);
  cudaGetLastError();

  // A ring that is full says so; no launch will make room.
  on.replay = captured(&on);
  CHECK(freekv_plan(on.p, &row, 1, NULL) == FREEKV_USAGE_ERROR && SAYS("planned is NULL"));
  for (int i = 0; i < 4; ++i) OK(freekv_plan(on.p, &row, 1, &planned)), CHECK(planned == 1);
  OK(freekv_plan(on.p, &row, 1, &planned));
  CHECK(planned == 0);
  CHECK(freekv_wait(on.p) == FREEKV_USAGE_ERROR);
  for (int i = 0; i < 4; ++i) CUDA(cudaGraphLaunch(on.replay, compute));
  OK(freekv_wait(on.p));
  OK(freekv_synchronize(on.p));
  OK(freekv_tokens(on.p, s.id, &s.tokens));
  CHECK(s.tokens == 4);

  // A launch without a plan.
  CUDA(cudaGraphLaunch(on.replay, compute));
  CUDA(cudaStreamSynchronize(compute));
  CHECK(freekv_plan(on.p, &row, 1, &planned) == FREEKV_REPLAY_ERROR && SAYS("replay"));
  CUDA(cudaGraphExecDestroy(on.replay));
  end_side(&on);

  // The host captures nothing.
  on = new_side(threads(), NULL, &settings);
  OK(freekv_open(on.p, &s.id));
  CHECK(freekv_begin_captured_step(on.p, &most, &step) == FREEKV_USAGE_ERROR &&
        SAYS("the backend is the host's"));
  end_side(&on);
}

int main(void) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    printf("SKIPPED: no NVIDIA device is usable\n");
    return 77;
  }
  cudaStream_t compute, recall;
  CUDA(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking));
  CUDA(cudaStreamCreateWithFlags(&recall, cudaStreamNonBlocking));
  CHECK(freekv_has_cuda() == 1);
  take_rows();
  const char* methods[] = {"freekv", "quest", "full"};
  for (int i = 0; i < 3; ++i) decodes(methods[i], compute, recall);
  tables(compute, recall);
  errors(compute, recall);
  return finished();
}
