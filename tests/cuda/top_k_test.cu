// Every algorithm that selects from rows of scores at once against a partial sort on the host: the same
// indices, whatever the rows' lengths and ties, called or captured and replayed.
//
// Exit status: 0 all right, 1 not, 77 no device.
#include <algorithm>
#include <freekv/backend/cuda/top_k_by_cub.cuh>
#include <freekv/core/error.hpp>
#include <functional>

#include "both_sides.cuh"

namespace {

using namespace both_sides;
using namespace freekv;
using namespace freekv::detail;
using device::select_by;

using freekv::to_size;
std::string text(int n) { return std::to_string(n); }

struct row_case {
  int count, wanted, distinct = 0;  // 0: all different
};

/// Rows, what the host selects of them, and memory for what the device does.
struct batch {
  std::vector<row_case> cases;
  device::score_rows rows;
  pinned<float> scores;
  pinned<std::int32_t> counts, wanted;
  results<std::int32_t> selected{0};

  batch(random_numbers& random, const std::vector<row_case>& of) : cases(of) {
    device::top_k_sizes& most = rows.most;
    most.rows = static_cast<int>(cases.size());
    for (const row_case& r : cases) {
      most.scores = std::max(most.scores, r.count);
      most.selected = std::max(most.selected, r.wanted);
    }
    most.scores += 3;  // no row's scores begin at a multiple of 16 bytes
    scores.resize(to_size(most.all_scores()));
    counts.resize(to_size(most.rows));
    wanted.resize(to_size(most.rows));
    selected = results<std::int32_t>(to_size(most.rows) * to_size(most.selected));
    rows.scores = scores.data();
    rows.counts = counts.data();
    rows.wanted = wanted.data();
    rows.selected = selected.device.data();
    fill(random);
  }
  void fill(random_numbers& random) {
    const device::top_k_sizes& most = rows.most;
    for (auto* side : {&selected.host, &selected.device}) std::fill(side->begin(), side->end(), -7);
    std::fill(scores.begin(), scores.end(),
              std::numeric_limits<float>::infinity());  // what is behind a row would be selected
    for (int row = 0; row < most.rows; ++row) {
      const row_case& of = cases[to_size(row)];
      counts[to_size(row)] = of.count;
      wanted[to_size(row)] = of.wanted;
      float* const to = scores.data() + std::int64_t{row} * most.scores;
      for (int i = 0; i < of.count; ++i) {
        to[i] = of.distinct > 0 ? static_cast<float>(random.below(of.distinct)) - 2.0f : random.normal();
        const int special = random.below(of.distinct > 0 ? 40 : 1000);
        if (special == 0) to[i] = -std::numeric_limits<float>::infinity();
        if (special == 1) to[i] = random.below(2) == 0 ? 0.0f : -0.0f;
        if (special == 2) to[i] = std::numeric_limits<float>::max();
        if (special == 3) to[i] = -std::numeric_limits<float>::max();
      }
      select(to, of, selected.host.data() + std::int64_t{row} * most.selected);
    }
  }
  static void select(const float* scores, const row_case& of, std::int32_t* to) {
    std::vector<std::uint64_t> keys(to_size(of.count));
    for (int i = 0; i < of.count; ++i) keys[to_size(i)] = ordered_key(scores[i], i);
    const int count = std::min(of.count, of.wanted);
    std::nth_element(keys.begin(), keys.begin() + count, keys.end(), std::greater<>());
    for (int i = 0; i < count; ++i) to[i] = unit_of_key(keys[to_size(i)]);
    std::sort(to, to + count);
  }
};

/// What an algorithm takes beside the rows, of exactly the size that it asks for.
template <select_by By>
struct scratch_of {
  device::device_memory memory;
  memory_block block;
  device::top_k_scratch<By> scratch;
  explicit scratch_of(const device::top_k_sizes& most) {
    carver counting;
    device::top_k_scratch<By>::carve(counting, most);
    block = memory_block(memory, counting.used());
    carver carving(block.data());
    scratch = device::top_k_scratch<By>::carve(carving, most);
  }
};

template <select_by By>
void selects(report& checks, random_numbers& random, const std::string& how, const std::string& what,
             const std::vector<row_case>& cases) {
  batch of(random, cases);
  const scratch_of<By> memory(of.rows.most);
  device::launch_top_k(of.rows, memory.scratch, nullptr);
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  checks.equal(how + ": " + what, of.selected);
}

/// Captured once, replayed with other scores and other lengths.
template <select_by By>
void replays(report& checks, random_numbers& random, const std::string& how) {
  batch of(random, {{900, 64}, {300, 70, 3}, {10, 20}});
  const scratch_of<By> memory(of.rows.most);
  const device::owned_stream stream;
  cudaGraph_t graph;
  cudaGraphExec_t replayed;
  require(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  device::launch_top_k(of.rows, memory.scratch, stream.get());
  require(cudaStreamEndCapture(stream.get(), &graph), "cudaStreamEndCapture");
  require(cudaGraphInstantiate(&replayed, graph, 0), "cudaGraphInstantiate");
  for (int replay = 0; replay < 3; ++replay) {
    for (row_case& r : of.cases) r = {random.below(900), random.below(70), random.below(4)};
    of.fill(random);
    require(cudaGraphLaunch(replayed, stream.get()), "cudaGraphLaunch");
    require(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
    checks.equal(how + ": replay " + text(replay), of.selected);
  }
  cudaGraphExecDestroy(replayed);
  cudaGraphDestroy(graph);
}

template <select_by By>
void every_case(report& checks, const std::string& how) {
  if constexpr (device::has_top_k<By>) {
    random_numbers random(1);
    for (const row_case& r : std::vector<row_case>{{1, 1},
                                                   {7, 3, 2},
                                                   {256, 256},
                                                   {257, 100, 3},
                                                   {1000, 999, 1},
                                                   {5000, 64, 5},
                                                   {65536, 1024},
                                                   {65536, 1024, 40},
                                                   {40000, 4096, 3000}})
      selects<By>(checks, random, how,
                  text(r.wanted) + " of " + text(r.count) + " scores" +
                      (r.distinct > 0 ? ", " + text(r.distinct) + " of them different" : ""),
                  {r});
    selects<By>(
        checks, random, how, "rows of many lengths",
        {{0, 5}, {300, 0, 2}, {3, 40}, {8192, 40, 1}, {8300, 700, 2}, {17000, 600}, {40, 40}, {1, 1}});
    replays<By>(checks, random, how);
  }
}

/// What an algorithm has no room for is refused before anything is launched.
template <select_by By>
void refuses(report& checks, const std::string& what, const device::top_k_sizes& most) {
  if constexpr (device::has_top_k<By>) {
    results<int> refused(1);
    refused.host[0] = 1;
    try {
      carver counting;
      device::top_k_scratch<By>::carve(counting, most);
    } catch (const settings_error&) {
      refused.device[0] = 1;
    }
    checks.equal(what, refused);
  }
}

}  // namespace

int main() {
  skip_without_device();
  report checks;
  every_case<select_by::block_radix>(checks, "block_radix");
  every_case<select_by::segmented_sort>(checks, "segmented_sort");
  every_case<select_by::batched_top_k>(checks, "batched_top_k");
  refuses<select_by::segmented_sort>(checks, "a sort of 2^31 scores is refused", {1 << 16, 1 << 15, 1});
  refuses<select_by::batched_top_k>(checks, "4097 of a row are refused", {1, 1 << 16, 4097});
  return checks.finish();
}
