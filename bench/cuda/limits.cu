// What bounds a device's stages, measured: memory, the link to the host by copy engines and by the readers
// that recall has, and launches of a graph. JSON lines.
//
//   limits [STORE_GIB 16]
//
// Recall reads slices at random places of a store of STORE_GIB of page-locked memory: keys and values of 8
// to 128 tokens of head_dim 128, BF16. `huge` pages are of 2 MB, registered by cudaHostRegister; others are
// cudaHostAlloc's.
//
// Exit status: 0 all right, 1 an error, 77 no device.
#include <cuda_runtime.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <freekv/backend/cuda/recall.cuh>
#include <freekv/core/size.hpp>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "../../examples/support/fatal_signals.hpp"

namespace {

using namespace freekv;
using device::check;
using device::recall_read;
using examples::note_stage;

constexpr int head_dim = 128;
using pieces = device::slice_pieces<head_dim, bfloat16>;

/// Slices of a store, keys before values, that are copied one behind the other.
struct random_slices {
  bfloat16 *store, *slots;
  const std::int64_t* places;  // slices, from the store's first on
  int tokens, first, step, end;
  using pieces = ::pieces;

  __device__ int parts(int pieces_of_part) const {
    return (pieces{{}, tokens}.size() + pieces_of_part - 1) / pieces_of_part;
  }
  __device__ pieces at(bfloat16* slices, std::int64_t nth) const {
    bfloat16* const key = slices + nth * 2 * tokens * head_dim;
    return {{key, key + tokens * head_dim, head_dim}, tokens};
  }
  __device__ pieces from(int nth) const { return at(store, places[nth]); }
  __device__ pieces to(int nth) const { return at(slots, nth); }
};

template <recall_read Read>
struct tuned {
  static constexpr device::recall_tuning tuning{.read = Read,
                                                .depth = Read == recall_read::bulk_copies ? 5 : 8};
  static_assert(tuning.valid());
};
template <recall_read Read>
__global__ void __launch_bounds__(256) copy_slices(random_slices of) {
  using copier = device::slice_copier<tuned<Read>, device::recall_read_here(Read)>;
  __shared__ typename copier::storage shared;
  of.first = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  of.step = static_cast<int>(gridDim.x * blockDim.x / 32);
  copier(shared).copy(of);
}

__global__ void read_all(const uint4* from, std::size_t n, unsigned* sink) {
  unsigned all = 0;
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + 3 * step < n; i += 4 * step) {
    uint4 x[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) x[k] = __ldg(from + i + k * step);
#pragma unroll
    for (int k = 0; k < 4; ++k) all ^= x[k].x ^ x[k].y ^ x[k].z ^ x[k].w;
  }
  for (; i < n; i += step) all ^= from[i].x;
  if (all == 0x12345678u) *sink = all;
}
__global__ void fill(uint4* to, std::size_t n) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    const unsigned x = static_cast<unsigned>(i) * 2654435761u;
    to[i] = {x, x ^ 0x9e3779b9u, x * 31u, x + 7u};
  }
}
__global__ void nothing() {}

class bench {
 public:
  /// Median microseconds of `call`, which queues on `stream`, of several.
  double microseconds(const std::function<void()>& call, int times = 9) {
    std::vector<float> all;
    for (int i = 0; i < times + 1; ++i) {
      check(cudaEventRecord(begin_, stream.get()), "cudaEventRecord");
      call();
      check(cudaEventRecord(end_, stream.get()), "cudaEventRecord");
      check(cudaEventSynchronize(end_), "cudaEventSynchronize");
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
      if (i > 0) all.push_back(1e3f * ms);
    }
    std::nth_element(all.begin(), all.begin() + times / 2, all.end());
    return static_cast<double>(all[to_size(times / 2)]);
  }
  /// The same of what `call` queues, in a graph.
  double replayed(const std::function<void()>& call) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t launched = nullptr;
    check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    call();
    check(cudaStreamEndCapture(stream.get(), &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&launched, graph, 0), "cudaGraphInstantiate");
    const double us =
        microseconds([&] { check(cudaGraphLaunch(launched, stream.get()), "cudaGraphLaunch"); });
    cudaGraphExecDestroy(launched);
    cudaGraphDestroy(graph);
    return us;
  }
  void print(const std::string& of, const char* metric, double value, const char* unit) const {
    std::printf(
        "{\"bench\": \"limits\", \"case\": \"%s\", \"metric\": \"%s\", \"value\": %.6g, \"unit\": \"%s\", "
        "\"device\": \"%s\"}\n",
        of.c_str(), metric, value, unit, name.c_str());
    std::fflush(stdout);
  }

  device::owned_stream stream;
  std::string name;
  int multiprocessors = 0;

  bench() {
    cudaDeviceProp of{};
    check(cudaGetDeviceProperties(&of, 0), "cudaGetDeviceProperties");
    name = of.name;
    multiprocessors = of.multiProcessorCount;
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
    print("device", "multiprocessors", of.multiProcessorCount, "");
    print("device", "l2", of.l2CacheSize / 1048576.0, "MiB");
  }

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

double gigabytes_per_second(double bytes, double us) { return bytes / us * 1e-3; }

struct store {
  std::byte* data;
  std::size_t bytes;
  std::string pages;
};

/// What recall's readers take for `count` slices of `tokens` tokens at random places.
template <recall_read Read>
void measure_reader(bench& b, const store& from, bfloat16* slots, std::int64_t* places, int tokens, int count,
                    int blocks, const char* reader) {
  const std::size_t slice = to_size(2 * tokens * head_dim) * sizeof(bfloat16);
  const std::string of = std::string(reader) + ", " + from.pages + " pages, " +
                         std::to_string(from.bytes >> 30) + " GiB, " + std::to_string(count) + " slices of " +
                         std::to_string(slice >> 10) + " KiB, " + std::to_string(blocks) + " blocks";
  examples::note_detail(of);
  const std::int64_t in_store = static_cast<std::int64_t>(from.bytes / slice);
  std::mt19937_64 engine(static_cast<std::uint64_t>(tokens * 131 + count));
  constexpr int launches = 8;  // of other slices, one behind the other
  std::vector<std::int64_t> drawn(to_size(count * launches));
  for (std::int64_t& p : drawn)
    p = static_cast<std::int64_t>(engine() % static_cast<std::uint64_t>(in_store));
  check(cudaMemcpy(places, drawn.data(), drawn.size() * sizeof(std::int64_t), cudaMemcpyDefault),
        "cudaMemcpy");
  const double us = b.replayed([&] {
    for (int i = 0; i < launches; ++i)
      device::launch("copy", {blocks, 256, b.stream.get()}, copy_slices<Read>,
                     random_slices{reinterpret_cast<bfloat16*>(from.data), slots, places + i * count, tokens,
                                   0, 0, count});
  }) / launches;
  b.print(of, "time", us, "us");
  b.print(of, "rate", gigabytes_per_second(static_cast<double>(slice) * count, us), "GB/s");
}

void measure_readers(bench& b, const store& from, bfloat16* slots, std::int64_t* places, bool all) {
  const auto each = [&](int tokens, int count, int blocks) {
    measure_reader<recall_read::loads>(b, from, slots, places, tokens, count, blocks, "loads");
    measure_reader<recall_read::async_copies>(b, from, slots, places, tokens, count, blocks, "cp.async");
    measure_reader<recall_read::bulk_copies>(b, from, slots, places, tokens, count, blocks, "bulk");
  };
  for (const int blocks : {4, 8, 16, 32, 64}) each(32, 2048, blocks);
  if (!all) return;
  for (const int tokens : {8, 16, 64, 128}) each(tokens, 2048 * 16 / tokens, 16);
  for (const int count : {1, 4, 16, 64, 256})
    for (const int blocks : {4, 8, 16}) each(32, count, blocks);
}

void run(std::size_t gib) {
  bench b;
  const cudaStream_t on = b.stream.get();
  device::device_memory fast;
  const std::size_t n = std::size_t{4} << 30;
  auto* const here = static_cast<std::byte*>(fast.allocate(n));
  auto* const there = static_cast<std::byte*>(fast.allocate(n));
  const auto fill_with = [&](std::byte* to, std::size_t bytes) {
    device::launch("fill", {1024, 256, on}, fill, reinterpret_cast<uint4*>(to), bytes / 16);
    check(cudaStreamSynchronize(on), "cudaStreamSynchronize");
  };
  note_stage("reading and copying memory");
  fill_with(here, n);
  auto* const sink = reinterpret_cast<unsigned*>(there);
  for (const int a_multiprocessor : {2, 4, 8})
    b.print("read of 4 GiB, " + std::to_string(a_multiprocessor) + " blocks a multiprocessor", "rate",
            gigabytes_per_second(static_cast<double>(n), b.microseconds([&] {
              device::launch("read", {b.multiprocessors * a_multiprocessor, 512, on}, read_all,
                             reinterpret_cast<const uint4*>(here), n / 16, sink);
            })),
            "GB/s");
  b.print("copy of 4 GiB, read and written", "rate",
          gigabytes_per_second(2.0 * static_cast<double>(n), b.microseconds([&] {
            check(cudaMemcpyAsync(there, here, n, cudaMemcpyDeviceToDevice, on), "cudaMemcpyAsync");
          })),
          "GB/s");
  note_stage("launching empty kernels");
  for (const int blocks : {1, 16, 132, 1024}) {
    constexpr int launches = 256;
    b.print("empty kernels of " + std::to_string(blocks) + " blocks in a graph", "time", b.replayed([&] {
      for (int i = 0; i < launches; ++i) device::launch("nothing", {blocks, 256, on}, nothing);
    }) / launches,
            "us");
  }

  note_stage("taking a store of " + std::to_string(gib) + " GiB");
  std::vector<store> stores;
  device::pinned_memory slow;
  const std::size_t bytes = gib << 30;
  stores.push_back({static_cast<std::byte*>(slow.allocate(bytes)), bytes, "small"});
  const std::size_t huge = std::size_t{2} << 20;
  auto* const mapped = static_cast<std::byte*>(
      mmap(nullptr, bytes + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  auto* const aligned =
      reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(mapped) + huge - 1) / huge * huge);
  const bool are_huge = madvise(aligned, bytes, MADV_HUGEPAGE) == 0;
  for (std::size_t i = 0; i < bytes; i += 4096) aligned[i] = std::byte{1};
  if (are_huge &&
      cudaHostRegister(aligned, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable) == cudaSuccess)
    stores.push_back({aligned, bytes, "huge"});
  auto* const places = static_cast<std::int64_t*>(fast.allocate(1 << 20));
  for (const store& from : stores) {
    fill_with(from.data, from.bytes);
    note_stage("copying by copy engines, " + from.pages + " pages");
    const std::size_t big = std::size_t{1} << 28;
    const double to_device = b.microseconds(
        [&] { check(cudaMemcpyAsync(here, from.data, big, cudaMemcpyDefault, on), "cudaMemcpyAsync"); });
    b.print("copy engine, " + from.pages + " pages, 256 MiB to the device", "rate",
            gigabytes_per_second(static_cast<double>(big), to_device), "GB/s");
    b.print("copy engine, " + from.pages + " pages, 256 MiB to the host", "rate",
            gigabytes_per_second(static_cast<double>(big), b.microseconds([&] {
              check(cudaMemcpyAsync(from.data, here, big, cudaMemcpyDefault, on), "cudaMemcpyAsync");
            })),
            "GB/s");
    note_stage("copying by recall's readers");
    measure_readers(b, from, reinterpret_cast<bfloat16*>(here), places, from.pages == stores.back().pages);
    note_stage("copying in batches by copy engines, " + from.pages + " pages");
    // Slices of 16 KiB by copy engines, their keys and values apart, as recall has them.
    std::mt19937_64 engine(5);
    for (const std::size_t slices : {1, 4, 16, 64, 256}) {
      std::vector<void*> to;
      std::vector<const void*> of;
      std::vector<std::size_t> sizes(2 * slices, 8192);
      for (std::size_t i = 0; i < 2 * slices; ++i) {
        to.push_back(here + i * 8192);
        of.push_back(from.data + engine() % (from.bytes / 8192) * 8192);
      }
      cudaMemcpyAttributes in_order{};
      in_order.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
      std::size_t first = 0;
      const double us = b.microseconds([&] {
        check(cudaMemcpyBatchAsync(to.data(), of.data(), sizes.data(), to.size(), &in_order, &first, 1, on),
              "cudaMemcpyBatchAsync");
      });
      b.print(
          "copy engine in batches, " + from.pages + " pages, " + std::to_string(slices) + " slices of 16 KiB",
          "time", us, "us");
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  freekv::examples::report_fatal_signals("freekv-bench-cuda-limits");
  if (int devices = 0; cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return 77;
  try {
    run(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 16);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
