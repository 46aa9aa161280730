/* An engine in C on a device: a prompt in a step that is begun, decode steps of a graph captured once. The
 * library has shape half_64. */
#include <cuda_runtime_api.h>
#include <freekv/c_api.h>
#include <stdio.h>
#include <stdlib.h>

enum { layers = 2, query_heads = 4, kv_heads = 2, d = 64, prompt_rows = 100, batch = 4 };

static void expect(freekv_status status) {
  if (status == FREEKV_OK) return;
  fprintf(stderr, "%s: %s\n", freekv_status_name(status), freekv_last_message());
  exit(1);
}
static void expect_cuda(cudaError_t status) {
  if (status == cudaSuccess) return;
  fprintf(stderr, "%s\n", cudaGetErrorString(status));
  exit(1);
}

/* Memory that the device reads and writes, here the host's. */
static float* numbers(int count) {
  float* memory = NULL;
  expect_cuda(cudaHostAlloc((void**)&memory, (size_t)count * sizeof(float), cudaHostAllocMapped));
  for (int i = 0; i < count; ++i) memory[i] = 0.1f;
  return memory;
}

int main(void) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return 77; /* skipped */
  cudaStream_t compute, recall;
  freekv_backend* backend = NULL;
  freekv_pipeline* retrieval = NULL;
  freekv_step* step = NULL;
  freekv_sequence sequence = 0;
  cudaGraph_t graph = NULL;
  cudaGraphExec_t replay = NULL;
  expect_cuda(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking));
  expect_cuda(cudaStreamCreateWithFlags(&recall, cudaStreamNonBlocking));

  const freekv_cuda_options streams = {.size = sizeof streams, .compute = compute, .recall = recall};
  const freekv_settings settings = {.size = sizeof settings,
                                    .method = "freekv",
                                    .element = FREEKV_F16,
                                    .head_dim = d,
                                    .layers = layers,
                                    .query_heads = query_heads,
                                    .kv_heads = kv_heads,
                                    .page_tokens = 16,
                                    .sink = 16,
                                    .window = 32,
                                    .selected_units = 2,
                                    .max_tokens = 256,
                                    .max_sequences = batch};
  expect(freekv_backend_create_cuda(&streams, &backend));
  expect(freekv_pipeline_create(backend, &settings, &retrieval));
  expect(freekv_open(retrieval, &sequence));

  float *k = numbers(prompt_rows * kv_heads * d), *v = numbers(prompt_rows * kv_heads * d);
  float *q = numbers(batch * query_heads * d), *out = numbers(batch * query_heads * d);
  const freekv_step_input prompt = {.sequence = sequence, .tokens = prompt_rows, .phase = FREEKV_PREFILL};
  freekv_rows rows = {
      .size = sizeof rows, .element = FREEKV_F32, .rows = prompt_rows, .keys = k, .values = v};
  expect(freekv_begin_step(retrieval, &prompt, 1, &step));
  for (int layer = 0; layer < layers; ++layer) expect(freekv_append(step, layer, &rows));
  expect(freekv_end_step(step));

  // Once: the graph of a step, of so many sequences at most.
  const freekv_step_bounds most = {.size = sizeof most, .entries = batch};
  const freekv_attention attention = {.size = sizeof attention, .rows = batch, .out = out};
  rows.rows = batch, rows.queries = q;
  expect_cuda(cudaStreamBeginCapture(compute, cudaStreamCaptureModeThreadLocal));
  expect(freekv_begin_captured_step(retrieval, &most, &step));
  for (int layer = 0; layer < layers; ++layer) {
    // here the model's kernels make the layer's k, v and q
    expect(freekv_append(step, layer, &rows));
    expect(freekv_attend(step, layer, &attention));
  }
  expect(freekv_end_step(step));
  expect_cuda(cudaStreamEndCapture(compute, &graph));
  expect_cuda(cudaGraphInstantiate(&replay, graph, 0));

  // Each step: its sequences, which may be fewer than the graph takes, and a launch.
  const freekv_step_input row = {.sequence = sequence, .tokens = 1, .phase = FREEKV_DECODE};
  for (int token = 0; token < 24; ++token) {
    int32_t planned = 0;
    expect(freekv_plan(retrieval, &row, 1, &planned));
    while (!planned) {  // four steps are under way
      expect(freekv_wait(retrieval));
      expect(freekv_plan(retrieval, &row, 1, &planned));
    }
    expect_cuda(cudaGraphLaunch(replay, compute));
  }
  expect(freekv_synchronize(retrieval));
  printf("%s: %g\n", freekv_pipeline_name(retrieval), (double)out[0]);
  const int right = out[0] > 0.0999f && out[0] < 0.1001f; /* all values are 0.1 */

  expect(freekv_pipeline_destroy(retrieval));
  expect(freekv_backend_destroy(backend));
  float* const taken[] = {k, v, q, out};
  for (int i = 0; i < 4; ++i) expect_cuda(cudaFreeHost(taken[i]));
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(recall);
  cudaStreamDestroy(compute);
  return right ? 0 : 1;
}
