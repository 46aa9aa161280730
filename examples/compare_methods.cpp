// Six methods on one trace, each compiled for itself: no choice at run time. nvcc compiles the same for a
// device, by compare_methods.cu.
#include <cmath>
#include <cstdio>
#include <freekv/freekv.hpp>
#include <random>
namespace fk = freekv;
using namespace fk::methods;
#if !defined(METHODS)
#define METHODS full, streaming_llm, quest, arkvale, freekv_paper, freekv_chunk_means
#endif
using shape = fk::kv_shape<fk::half, 64>;
constexpr int query_heads = 4, kv_heads = 2, width = kv_heads * 64, prompt = 600, tokens = 640;
#if defined(__CUDACC__)
struct machine {
  fk::device::pinned_memory pinned;  // rows and outputs are where the device reads and writes
  fk::device::device_memory fast;
  fk::device::owned_stream compute, recall;
  fk::cuda_backend processor{compute.get(), recall.get()};
  fk::memory_resources memories{&pinned, &fast};
};
#else
struct machine {
  std::pmr::memory_resource& pinned = *std::pmr::get_default_resource();
  fk::host_backend processor{{.threads = 2}};
  fk::memory_resources memories{};
};
#endif
/// Rows near one of 12 directions, which changes every `run` rows.
std::pmr::vector<float> rows(machine& on, int count, int heads, int run, float noise) {
  std::mt19937 random(1), directions(7);
  std::normal_distribution<float> normal;
  std::vector<float> direction(12 * 64);
  for (float& x : direction) x = normal(directions);
  std::pmr::vector<float> numbers(&on.pinned);
  for (int i = 0; i < count * heads * 64; ++i)
    numbers.push_back(direction[i / (heads * 64) / run * 5 % 12 * 64 + i % 64] + noise * normal(random));
  return numbers;
}
/// Prints the error of attention's output and the bytes recalled, of all steps in the last layer.
template <class Method>
bool compare(machine& on) {
  using pipeline = typename Method::template pipeline<shape, fk::page_size<16>, decltype(on.processor)>;
  typename pipeline::settings settings{
      .model = {.layers = 2, .query_heads = query_heads, .kv_heads = kv_heads}};
  settings.budget = {.sink = 16, .window = 32, .selected_units = 4}, settings.capacity.max_tokens = tokens;
  pipeline retrieval(settings, on.processor, on.memories);
  const fk::sequence_id sequence = retrieval.open();
  const auto k = rows(on, tokens, kv_heads, 20, 0.7f), v = rows(on, tokens, kv_heads, 3, 1.0f);
  const auto q = rows(on, tokens, query_heads, 8, 0.3f);
  std::pmr::vector<float> out(2 * width, &on.pinned), exact(2 * width, &on.pinned);
  double error = 0.0, size = 0.0, recalled = 0.0;
  for (int row = 0, count = prompt; row < tokens; row += count, count = 1) {
    const auto part = [&](auto& of, int w) { return std::span(of).subspan(row * w, count * w); };
    auto step = retrieval.begin_step(
        {{sequence, count, row == 0 ? fk::step_phase::prefill : fk::step_phase::decode}});
    for (int layer = 0; layer < 2; ++layer) {
      step.template append<float>(layer, {part(k, width), part(v, width), part(q, 2 * width)});
      if (row > 0) step.attend(layer, out), step.attend_full(layer, exact);
    }
    step.end();
    for (const int slices : retrieval.report(1)[sequence].recalled) recalled += slices;  // waits
    for (std::size_t i = 0; i < out.size(); ++i)
      error += std::pow(out[i] - exact[i], 2), size += std::pow(exact[i], 2);
  }
  recalled *= static_cast<double>(retrieval.slice_bytes()) / 1024;
  std::printf("%-20s %8.4f %12.0f\n", Method::name.data(), std::sqrt(error / size), recalled);
  return Method::name != "full" || error <= 1e-8 * size;
}
int main() {
#if defined(__CUDACC__)
  if (int devices = 0; cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return 77;  // skipped
#endif
  machine on;
  std::printf("%-20s %8s %12s\n", "method", "error", "KB recalled");
  const auto wrong = [&]<class... M>(method_list<M...>) { return (int{!compare<M>(on)} + ...); };
  return wrong(method_list<METHODS>{}) == 0 ? 0 : 1;
}
