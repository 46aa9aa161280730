// An engine's own paged KV tensor on a device: slots that are blocks of it, in each layout, give the bits
// that the pipeline's own slots give, and tables list its blocks; prompts that come out of it give the bits
// of prompts that are appended. Both against the host's pipeline, and against attention in double precision.
//
// Exit status: 0 all right, 1 not, 77 no device.
#include "engine_tensor.hpp"

#include <algorithm>
#include <freekv/freekv.cuh>

#include "both_sides.cuh"

namespace {

using namespace both_sides;
using namespace freekv;
using namespace engine_tensor;
using device::table_rows;

/// Tensors whose blocks are lent as slots: NaN before.
struct lent_tensor {
  static constexpr int blocks = 48;
  layout of;
  pinned<half> data[layers];
  std::vector<std::int32_t> ids[layers];
  std::vector<paged_blocks<half>> lent;

  template <class Footprint>
  lent_tensor(const Footprint& needs, layout_of how, unsigned seed) : of(how(page, blocks)) {
    random_numbers random(seed);
    for (int layer = 0; layer < layers; ++layer) {
      data[layer].assign(of.numbers(page, blocks), from_float<half>(NAN));
      ids[layer] = draw_ids(random, blocks, static_cast<int>(needs.slots(layer)));
      half* const keys = data[layer].data();
      lent.push_back({{keys, keys + of.values, of.block, of.token, of.head, page}, ids[layer]});
    }
  }
  /// Elements that are no row of a listed block, and those of them that are still NaN.
  results<std::int32_t> others() const {
    results<std::int32_t> spoiled(layers);
    for (int layer = 0; layer < layers; ++layer) {
      std::vector<bool> listed(data[layer].size());
      for (const std::int32_t id : ids[layer])
        for (int t = 0; t < page; ++t)
          for (int head = 0; head < kv_heads; ++head)
            for (const std::int64_t plane : {std::int64_t{0}, of.values}) {
              const auto first = listed.begin() + plane + id * of.block + t * of.token + head * of.head;
              std::fill(first, first + head_dim, true);
            }
      for (std::size_t i = 0; i < listed.size(); ++i)
        spoiled.device[to_size(layer)] += !listed[i] && !std::isnan(to_float(data[layer][i]));
    }
    return spoiled;
  }
};

/// Attention by a block for each sequence and a thread for each query head, in double precision, by tables by
/// head, of pages or of fewer tokens.
__global__ void attend_by_table(paged_tensor<half> kv, device::block_tables tables, const float* queries,
                                float scale, float* out) {
  const int nth = static_cast<int>(blockIdx.x), query_head = static_cast<int>(threadIdx.x),
            head = query_head / group, row = head * tables.sequences + nth;
  const float* const q = queries + (nth * query_heads + query_head) * head_dim;
  const int tokens = tables.block_tokens == 0 ? page : tables.block_tokens;
  const std::int64_t stride = tables.block_tokens == 0 ? kv.block_stride : tokens * kv.token_stride;
  double sum = 0.0, sums[head_dim] = {};
  for (int t = 0; t < tables.seq_lens[row]; ++t) {
    const std::int64_t at = tables.blocks[row * tables.max_blocks + t / tokens] * stride +
                            t % tokens * kv.token_stride + head * kv.head_stride;
    double score = 0.0;
    for (int i = 0; i < head_dim; ++i) score += double{q[i]} * double{to_float(kv.keys[at + i])};
    const double weight = exp(score * double{scale});
    sum += weight;
    for (int i = 0; i < head_dim; ++i) sums[i] += weight * double{to_float(kv.values[at + i])};
  }
  for (int i = 0; i < head_dim; ++i)
    out[(nth * query_heads + query_head) * head_dim + i] = static_cast<float>(sums[i] / sum);
}

struct device_run {
  device::owned_stream compute, recall;
  device::pinned_memory slow;
  device::device_memory fast;
  cuda_backend backend;
  explicit device_run(recall_by by = recall_by::kernel) : backend(compute.get(), recall.get(), by) {}
};
class device_engine final : public engine<cuda_backend> {
 public:
  device_engine(device_run& on, const footprint& needs, const options& o,
                const std::vector<paged_blocks<half>>& lent, report& checks)
      : engine(on.backend, needs, {&on.slow, &on.fast}, o, lent),
        compute_(on.compute.get()),
        checks_(checks) {}

 private:
  void bring(void* to, const void* from, std::size_t bytes) override {
    device::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, compute_), "cudaMemcpyAsync");
  }
  void attend(pipeline_type::step& step, int layer, const std::vector<part>& parts,
              const pinned<float>& queries, pinned<float>& out) override {
    // Of every other layer in halves of a page.
    const int block_tokens = layer % 2 == 0 ? 0 : page / 2, pieces = block_tokens == 0 ? 1 : 2;
    const int sequences = static_cast<int>(parts.size()),
              most = pipeline().most_blocks(layer, table_rows::by_head, block_tokens);
    pinned<std::int32_t> blocks(to_size(kv_heads * sequences * most)), lengths(to_size(kv_heads * sequences));
    const device::block_tables tables{.sequences = sequences,
                                      .max_blocks = most,
                                      .block_tokens = block_tokens,
                                      .blocks = blocks.data(),
                                      .seq_lens = lengths.data()};
    step.correct(layer);
    if (block_tokens > 0) check_folded(step, layer, tables);
    step.queue_tables(layer, tables);
    results<float> attended(out.size());
    attend_by_table<<<sequences, query_heads, 0, compute_>>>(
        pipeline().paged_kv(layer), tables, queries.data(), pipeline().configuration().attention.scale,
        attended.device.data());
    device::check(cudaGetLastError(), "attention by a table");
    pipeline().synchronize();
    results<std::int32_t> listed(pinned<std::int32_t>{});
    const paged_tensor<half> kv = pipeline().paged_kv(layer);
    const auto of_block =
        static_cast<std::int32_t>(block_tokens == 0 ? 1 : kv.block_stride / (block_tokens * kv.token_stride));
    for (int head = 0; head < kv_heads; ++head)
      for (int i = 0; i < sequences; ++i) {
        std::vector<std::int32_t> read(to_size(most));
        const resident_table table = step.table(layer, parts[to_size(i)].id, head, read);
        const auto first = blocks.begin() + (head * sequences + i) * most;
        for (int b = 0; b * (page / pieces) < table.tokens; ++b) {
          listed.host.push_back(read[to_size(b / pieces)] * of_block + b % pieces);
          listed.device.push_back(first[b]);
        }
        listed.host.push_back(table.tokens);
        listed.device.push_back(lengths[to_size(head * sequences + i)]);
      }
    checks_.equal("tables that the host reads, of layer " + std::to_string(layer), listed);
    step.attend(layer, out);
    pipeline().synchronize();
    attended.host = out;
    checks_.close("attention by tables, of layer " + std::to_string(layer), attended, 40);
  }

  /// Tables of folded heads in halves of a page are refused where a head's rows are no such halves.
  void check_folded(pipeline_type::step& step, int layer, device::block_tables tables) {
    const paged_tensor<half> kv = pipeline().paged_kv(layer);
    tables.rows = table_rows::folded;
    results<std::int32_t> refused(1);
    refused.host[0] = kv.head_stride % (tables.block_tokens * kv.token_stride) != 0;
    try {
      step.queue_tables(layer, tables);
    } catch (const usage_error& e) {
      refused.device[0] = std::string(e.what()).find("has a head_stride of") != std::string::npos;
    }
    checks_.equal("refusal of folded heads in halves of a page", refused);
  }

  cudaStream_t compute_;
  report& checks_;
};
class test {
 public:
  explicit test(report& checks) : checks_(checks) {}

  void run(kept what, const std::string& name) {
    const run_results expected = with_rows(what, recall_by::kernel);
    compare_with_host(what, expected, name);
    for (std::size_t i = 0; i < std::size(layouts); ++i)
      if (what == kept::as_is || i == 2 + to_size(static_cast<int>(what)) % 2) {
        slots_in(what, layouts[i], recall_by::kernel, expected, name);
        prompts_from(what, layouts[i], false, expected, name);
        prompts_from(what, layouts[i], true, expected, name);
      }
    if (what == kept::as_is)
      slots_in(what, layout::packed_hnd, recall_by::copy_engines, expected, name + ", copied");
  }
  void refuses() {
    device_run on;
    const device_engine::footprint needs(
        settings<device_engine::pipeline_type::settings>(kept::as_is, basis_), on.backend);
    const auto refused = [&](const char* what, const char* words, const auto& change) {
      lent_tensor tensor(needs, layout::packed_nhd, 1);
      change(tensor.lent[1]);
      results<std::int32_t> found(1, 1);
      found.device[0] = 0;
      try {
        device_engine(on, needs, {}, tensor.lent, checks_);
      } catch (const settings_error& e) {
        found.device[0] = std::string(e.what()).find(words) != std::string::npos;
        if (found.device[0] == 0) std::printf("%s\n", e.what());
      }
      checks_.equal(std::string("refusal of ") + what, found);
    };
    refused("keys at 8 bytes", "layer 1: keys begin 8 bytes behind a multiple of 16",
            [](auto& lent) { lent.tensor.keys += 4; });
    refused("values at 2 bytes", "layer 1: values begin 2 bytes behind",
            [](auto& lent) { lent.tensor.values += 1; });
    refused("tokens of 524 bytes", "token_stride is 12 bytes behind a multiple of 16",
            [](auto& lent) { lent.tensor.token_stride += 6; });
    refused("an id twice", "is listed twice", [](auto& lent) {
      static std::vector<std::int32_t> ids;
      ids.assign(lent.ids.begin(), lent.ids.end());
      ids[1] = ids[0];
      lent.ids = ids;
    });
  }

 private:
  run_results with_rows(kept what, recall_by by) {
    device_run on(by);
    const device_engine::footprint needs(settings<device_engine::pipeline_type::settings>(what, basis_),
                                         on.backend);
    return device_engine(on, needs, {.what = what}, {}, checks_).live(first_, second_);
  }
  void same(const run_results& a, const run_results& b, const std::string& name) {
    results<float> out(a.out);
    out.device = b.out;
    out.device.resize(a.out.size(), NAN);
    checks_.equal(name + ": outputs", out);
    results<std::int32_t> reports(a.reports);
    reports.device = b.reports;
    reports.device.resize(a.reports.size(), -1);
    checks_.equal(name + ": reports", reports);
  }
  void slots_in(kept what, layout_of how, recall_by by, const run_results& expected,
                const std::string& name) {
    device_run on(by);
    const device_engine::footprint needs(settings<device_engine::pipeline_type::settings>(what, basis_),
                                         on.backend);
    const lent_tensor tensor(needs, how, 3);
    device_engine with(on, needs, {.what = what, .by_tables = true}, tensor.lent, checks_);
    const std::string full = name + ", slots in a tensor of " + tensor.of.name;
    same(expected, with.live(first_, second_), full);
    checks_.equal(full + ": what is not lent", tensor.others());
    results<std::int64_t> of_pipeline(2);
    of_pipeline.device[0] = static_cast<std::int64_t>(with.pipeline().bytes().slots);
    of_pipeline.device[1] = with.pipeline().paged_kv(1).keys - tensor.lent[1].tensor.keys;
    checks_.equal(full + ": slots of its own, and where tables begin", of_pipeline);
  }
  void prompts_from(kept what, layout_of how, bool hurried, const run_results& expected,
                    const std::string& name) {
    device_run on;
    const device_engine::footprint needs(settings<device_engine::pipeline_type::settings>(what, basis_),
                                         on.backend);
    device_engine with(on, needs, {.what = what, .prompts_from = how, .hurried = hurried}, {}, checks_);
    same(expected, with.live(first_, second_),
         name + ", prompts from a tensor of " + how(page, 1).name + (hurried ? ", in chunks" : ""));
  }
  void compare_with_host(kept what, const run_results& expected, const std::string& name) {
    const run_results by_host = run_on_host(what, first_, second_, basis_);
    results<float> out(by_host.out);
    out.device = expected.out;
    out.device.resize(out.host.size(), NAN);
    checks_.close(name + ": outputs as the host's", out, 60);
    results<std::int32_t> reports(by_host.reports);
    reports.device = expected.reports;
    reports.device.resize(reports.host.size(), -1);
    checks_.equal(name + ": reports as the host's", reports);
  }

  report& checks_;
  const text first_{1}, second_{2};
  const pinned<float> basis_ = random_numbers(9).normals<float>(layers * kv_heads * 25 * head_dim, 0.125f);
};

}  // namespace

int main() {
  skip_without_device();
  report checks;
  test all(checks);
  all.refuses();
  all.run(kept::as_is, "as it is");
  all.run(kept::encoded, "encoded");
  all.run(kept::by_subspace, "by subspace");
  return checks.finish();
}
