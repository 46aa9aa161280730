// What a profiler sees of a pipeline that is compiled with FREEKV_WITH_NVTX: a range for each stage that the
// host queues, by name, which ends where it should; of a replay that it was planned.
//
// Exit status: 0 all right, 1 not, 77 no device.
#include <freekv/freekv.cuh>
#include <map>
#include <vector>

#include "both_sides.cuh"

namespace {

using namespace freekv;
using pipeline = retrieval_pipeline<kv_shape<half, 64>, page_size<16>, cuda_backend>;
constexpr int layers = 2;

/// In a profiler's place: ranges begun, by name and what they are about, and how many are open.
std::map<std::pair<std::string, int>, int> ranges;
int depth = 0, deepest = 0;
int push(const nvtxEventAttributes_t* range) {
  ++ranges[{range->message.ascii, range->payload.iValue}];
  deepest = std::max(deepest, ++depth);
  return depth - 1;
}
int pop() { return --depth; }
int inject(NvtxGetExportTableFunc_t table_of) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(table_of(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions = nullptr;
  unsigned size = 0;
  callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &functions, &size);
  *functions[NVTX_CBID_CORE_RangePushEx] = reinterpret_cast<NvtxFunctionPointer>(&push);
  *functions[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(&pop);
  return 1;
}

}  // namespace

int main() {
  both_sides::skip_without_device();
  InitializeInjectionNvtx2_fnptr = &inject;
  device::owned_stream compute, recall;
  device::pinned_memory slow;
  device::device_memory fast;
  cuda_backend backend(compute.get(), recall.get());
  pipeline tested({.model = {.layers = layers, .query_heads = 4, .kv_heads = 2},
                   .budget = {.sink = 16, .window = 32, .selected_units = 2},
                   .capacity = {.max_tokens = 256}},
                  backend, {&slow, &fast});
  std::pmr::vector<float> k(100 * 2 * 64, 0.1f, &slow), v(k, &slow), q(4 * 64, 0.1f, &slow), out(q, &slow);
  const auto run_layers = [&](pipeline::step of) {
    for (int layer = 0; layer < layers; ++layer) {
      of.append<float>(layer, {.keys = k, .values = v, .queries = q});
      of.attend(layer, out);
    }
    of.end();
  };
  const sequence_id sequence = tested.open();
  auto prompt = tested.begin_step({{sequence, 100, step_phase::prefill}});
  for (int layer = 0; layer < layers; ++layer) prompt.append<float>(layer, {.keys = k, .values = v});
  prompt.end();

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t step = nullptr;
  device::check(cudaStreamBeginCapture(compute.get(), cudaStreamCaptureModeThreadLocal),
                "cudaStreamBeginCapture");
  run_layers(tested.begin_captured_step({.entries = 1}));
  device::check(cudaStreamEndCapture(compute.get(), &graph), "cudaStreamEndCapture");
  device::check(cudaGraphInstantiate(&step, graph, 0), "cudaGraphInstantiate");
  for (int token = 0; token < 3; ++token) {
    if (!tested.plan({{sequence}})) return 1;
    device::check(cudaGraphLaunch(step, compute.get()), "cudaGraphLaunch");
  }
  tested.truncate(sequence, 40);
  tested.synchronize();
  cudaGraphExecDestroy(step);
  cudaGraphDestroy(graph);

  // The first layer keeps everything; sequence and layers are those of pipelines that are new.
  const decltype(ranges) expected{
      {{"freekv begin step", -1}, 1}, {{"freekv append", 0}, 2},     {{"freekv append", 1}, 2},
      {{"freekv attend", 0}, 1},      {{"freekv correct", 1}, 1},    {{"freekv attend", 1}, 1},
      {{"freekv speculate", 1}, 1},   {{"freekv plan step", -1}, 3}, {{"freekv truncate", 0}, 1}};
  for (const auto& [range, times] : ranges)
    std::printf("%s of %d: %d times\n", range.first.c_str(), range.second, times);
  const bool right = ranges == expected && depth == 0 && deepest == 1;
  std::printf("%s\n", right ? "ok" : "FAILED");
  return right ? 0 : 1;
}
