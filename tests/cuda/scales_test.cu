// Keys and values in units of scales, in fp8 and in half, on a device beside the host: steps that are begun,
// and steps of a graph.
//
// Exit status: 0 all right, 1 not, 77 no device.
#include <freekv/freekv.cuh>

#include "both_sides.cuh"
#include "scales_case.hpp"

namespace {

using namespace both_sides;
using namespace scales_case;

/// What both sides are given; a basis of a device is in its own memory.
template <class Row>
struct shared_input {
  pinned<Row> keys[layers], values[layers];
  pinned<float> queries[layers], out, lse, masses, basis;
  float* basis_there = nullptr;
  rows_of_text<Row> of_host, of_device;

  shared_input(bool by_basis, bool in_place)
      : out(scales_case::attending_rows * query_row),
        lse(scales_case::attending_rows * query_heads),
        masses(scales_case::most_masses) {
    random_numbers random(11);
    for (int layer = 0; layer < layers; ++layer) {
      of_host.keys[layer] = keys[layer] = random.normals<Row>(max_tokens * key_row, 2.0f);
      of_host.values[layer] = values[layer] = random.normals<Row>(max_tokens * key_row, 4.0f);
      of_host.queries[layer] = queries[layer] = random.normals<float>(max_tokens * query_row);
    }
    of_host.out = out;
    of_host.lse = lse;
    of_host.masses = masses;
    of_host.in_place = in_place;
    basis = random.normals<float>(to_size(layers * kv_heads * (1 + head_dim) * head_dim), 0.1f);
    const std::size_t bytes = basis.size() * sizeof(float);
    void* there = nullptr;
    require(cudaMalloc(&there, bytes), "cudaMalloc");
    require(cudaMemcpy(there, basis.data(), bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    basis_there = static_cast<float*>(there);
    of_device = of_host;
    if (!by_basis) return;
    of_host.basis = basis.data();
    of_device.basis = basis_there;
  }
  ~shared_input() { cudaFree(basis_there); }
};

/// A device's pipeline and what it stands on.
template <class Element>
struct device_side {
  using pipeline_type = pipeline_on<Element, cuda_backend>;
  device::owned_stream compute, recall;
  device::pinned_memory slow;
  device::device_memory fast;
  cuda_backend backend{compute.get(), recall.get()};
  pipeline_type pipeline;
  template <class Row>
  explicit device_side(const rows_of_text<Row>& in)
      : pipeline(settings_of<pipeline_type>(in), backend, {&slow, &fast}) {}

  /// The outputs of `decode`, of replays of a graph, whose rows are copied to where it reads them.
  template <class Row>
  std::vector<float> replayed(const rows_of_text<Row>& in) {
    const sequence_id id = scales_case::prompt(pipeline, in);
    pinned<Row> k(layers * key_row), v(layers * key_row);
    pinned<float> q(layers * query_row), out(layers * query_row), lse(layers * query_heads);
    const auto part = [](auto& of, int layer, std::size_t row) {
      return std::span(of.data(), of.size()).subspan(to_size(layer) * row, row);
    };
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    require(cudaStreamBeginCapture(compute.get(), cudaStreamCaptureModeThreadLocal),
            "cudaStreamBeginCapture");
    auto step = pipeline.begin_captured_step({.entries = 1});
    for (int layer = 0; layer < layers; ++layer) {
      step.template append<Row, float>(layer, {.keys = part(k, layer, key_row),
                                               .values = part(v, layer, key_row),
                                               .queries = part(q, layer, query_row)});
      step.attend(layer, part(out, layer, query_row), part(lse, layer, query_heads));
    }
    step.end();
    require(cudaStreamEndCapture(compute.get(), &graph), "cudaStreamEndCapture");
    require(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
    std::vector<float> all;
    const step_input one[] = {{id}};
    for (int i = 0; i < steps; ++i) {
      for (int layer = 0; layer < layers; ++layer) {
        const auto rows = in.at(layer, scales_case::prompt_rows + i, 1);
        std::copy(rows.keys.begin(), rows.keys.end(), part(k, layer, key_row).begin());
        std::copy(rows.values.begin(), rows.values.end(), part(v, layer, key_row).begin());
        std::copy(rows.queries.begin(), rows.queries.end(), part(q, layer, query_row).begin());
      }
      while (!pipeline.plan(one)) pipeline.wait();
      require(cudaGraphLaunch(replay, compute.get()), "cudaGraphLaunch");
      pipeline.synchronize();
      for (int layer = 0; layer < layers; ++layer) {
        const auto of_layer = part(out, layer, query_row), sums = part(lse, layer, query_heads);
        all.insert(all.end(), of_layer.begin(), of_layer.end());
        all.insert(all.end(), sums.begin(), sums.end());
      }
    }
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
    return all;
  }
};

results<float> both(const std::vector<float>& host, const std::vector<float>& device) {
  results<float> of_both(pinned<float>(host.begin(), host.end()));
  of_both.device.assign(device.begin(), device.end());
  return of_both;
}

template <class Element, class Row, class OfHost>
void compare(report& checks, const std::string& what, const OfHost& of_host) {
  for (const bool by_basis : {false, true})
    for (const bool in_place : {false, true}) {
      const std::string how =
          what + (by_basis ? ", key_subspace" : ", min_max") + (in_place ? ", in place" : "");
      const shared_input<Row> in(by_basis, in_place);
      device_side<Element> there(in.of_device);
      const auto begun = decode(there.pipeline, in.of_device);
      // The sides sum in other orders.
      std::vector<float> all = begun;
      const std::vector<float> more = attend_prompt(there.pipeline, in.of_device);
      all.insert(all.end(), more.begin(), more.end());
      checks.close(how, both(of_host(in.of_host), all), 200);
      checks.equal(how + ", replayed", both(begun, there.replayed(in.of_device)));
    }
}

}  // namespace

int main() {
  skip_without_device();
  report checks;
  const auto of_half = [](bool in_fp8) {
    return [in_fp8](const rows_of_text<half>& in) { return of_host(in, in_fp8); };
  };
  compare<fp8_e4m3, half>(checks, "rows of half in fp8", of_half(true));
  compare<fp8_e4m3, fp8_e4m3>(checks, "rows of fp8 as they are",
                              [](const rows_of_text<fp8_e4m3>& in) { return of_host(in); });
  compare<half, half>(checks, "rows of half in half", of_half(false));
  return checks.finish();
}
