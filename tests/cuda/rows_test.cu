// Rows of an engine's own tensors on a device: queries and outputs of 16 bits, and rows that are parts of
// longer ones, give what the same numbers give as floats that are one behind the other; and so do ranks that
// have a KV head of the rows each. Heads select by other queries where these are given.
//
// Exit status: 0 all right, 1 not, 77 no device.
#include <freekv/freekv.cuh>
#include <string>
#include <vector>

#include "both_sides.cuh"

namespace {

using namespace both_sides;
using namespace freekv;

constexpr std::size_t count(std::int64_t n) { return static_cast<std::size_t>(n); }

constexpr int head_dim = 64, layers = 2, query_heads = 6, kv_heads = 2, max_tokens = 160;
constexpr int query_row = query_heads * head_dim, key_row = kv_heads * head_dim;

template <class Correction>
using pipeline_with = retrieval_pipeline<kv_shape<bfloat16, head_dim>, page_size<8>, Correction,
                                         any_of<resident, in_place>, complete_first<1>, cuda_backend>;

template <class Pipeline>
struct device_side {
  device::owned_stream compute, recall;
  device::pinned_memory slow;
  device::device_memory fast;
  cuda_backend backend{compute.get(), recall.get()};
  Pipeline pipeline;

  explicit device_side(bool slots, int heads = kv_heads, int selected = 3)
      : pipeline(settings(slots, heads, selected), backend, {&slow, &fast}) {}
  static typename Pipeline::settings settings(bool slots, int heads, int selected) {
    typename Pipeline::settings s;
    s.model = {.layers = layers, .query_heads = heads * query_heads / kv_heads, .kv_heads = heads};
    s.budget = {.sink = 8, .window = 16, .selected_units = selected};
    s.capacity.max_tokens = max_tokens;
    s.capacity.max_sequences = 2;
    s.capacity.max_decode_rows = 2;
    if (!slots) s.route = in_place{};
    return s;
  }
};

/// A step's rows: as floats, and in tensors of `Number` with other numbers around.
template <class Number>
struct rows_of_step {
  pinned<float> queries, keys, values;
  pinned<Number> fused, apart;  // queries, keys, values, padding; values with padding
  std::int64_t stride, value_stride;

  rows_of_step(random_numbers& random, int rows)
      : stride(query_row + 2 * key_row + random.below(9)), value_stride(key_row + random.below(9)) {
    const auto rounded = [&](std::size_t n) {
      pinned<float> all = random.normals<float>(n);
      for (float& x : all) x = to_float(from_float<bfloat16>(x));
      return all;
    };
    queries = rounded(count(rows * query_row));
    keys = rounded(count(rows * key_row));
    values = rounded(count(rows * key_row));
    fused.assign(count(rows * stride), from_float<Number>(NAN));
    apart.assign(count(rows * value_stride), from_float<Number>(NAN));
    const auto put = [&](const pinned<float>& from, int width, int row, auto to) {
      for (int i = 0; i < width; ++i) to[i] = from_float<Number>(from[count(row * width + i)]);
    };
    for (int row = 0; row < rows; ++row) {
      put(queries, query_row, row, fused.begin() + row * stride);
      put(keys, key_row, row, fused.begin() + row * stride + query_row);
      put(values, key_row, row, apart.begin() + row * value_stride);
    }
  }
};

template <class Pipeline, class Number, class Out>
void compare(report& checks, const std::string& name, bool slots) {
  random_numbers random(static_cast<unsigned>(name.size()));
  device_side<Pipeline> plain(slots), given(slots);
  const sequence_id ids[] = {plain.pipeline.open(), plain.pipeline.open()};
  given.pipeline.open();
  given.pipeline.open();
  results<float> out(0), lse(0);
  results<std::int32_t> reports(0);
  for (int step = 0; step < 7; ++step) {
    std::vector<step_input> of_step;
    int rows = 0;
    for (const sequence_id id : ids) {
      const bool prompt = step == 0 || (step == 4 && id == ids[1]);
      of_step.push_back({id, prompt ? random.between(30, 50) : random.between(1, 2),
                         prompt ? step_phase::prefill : step_phase::decode});
      rows += of_step.back().tokens;
    }
    auto a = plain.pipeline.begin_step(of_step);
    auto b = given.pipeline.begin_step(of_step);
    for (int layer = 0; layer < layers; ++layer) {
      const rows_of_step<Number> r(random, rows);
      const std::int64_t out_stride = step % 2 == 0 ? 0 : query_row + step;
      const std::int64_t apart = out_stride == 0 ? query_row : out_stride;
      pinned<float> expected(count(rows * query_row), NAN), lse_a(count(rows * query_heads), NAN),
          lse_b(lse_a);
      pinned<Out> found(count(rows * apart), from_float<Out>(NAN));
      a.template append<float>(layer, {.keys = r.keys, .values = r.values, .queries = r.queries});
      b.template append<Number, Number>(layer, {.keys = std::span(r.fused).subspan(query_row),
                                                .values = r.apart,
                                                .queries = r.fused,
                                                .strides = {r.stride, r.value_stride, r.stride}});
      if (layer == step % 2) {
        a.attend_full(layer, expected, lse_a);
        b.template attend_full<Out>(layer, found, lse_b, out_stride);
      } else {
        a.attend(layer, expected, lse_a);
        b.template attend<Out>(layer, found, lse_b, out_stride);
      }
      plain.pipeline.synchronize();
      given.pipeline.synchronize();
      for (int row = 0; row < rows; ++row)
        for (int i = 0; i < apart; ++i) {
          out.host.push_back(i < query_row ? to_float(from_float<Out>(expected[count(row * query_row + i)]))
                                           : NAN);
          out.device.push_back(to_float(found[count(row * apart + i)]));
        }
      lse.host.insert(lse.host.end(), lse_a.begin(), lse_a.end());
      lse.device.insert(lse.device.end(), lse_b.begin(), lse_b.end());
      if (layer == step % 2) {
        a.attend(layer, expected, lse_a);
        b.template attend<Out>(layer, found, lse_b, out_stride);
      }
      plain.pipeline.synchronize();  // before the rows go
      given.pipeline.synchronize();
    }
    a.end();
    b.end();
    const auto add = [&](auto& side, pinned<std::int32_t>& to) {
      for (const sequence_id id : ids) {
        const auto report = side.pipeline.report(1)[id];
        for (const auto x : report.corrected) to.push_back(x);
        for (const auto x : report.recalled) to.push_back(x);
        for (const auto x : report.attended_count) to.push_back(x);
      }
    };
    add(plain, reports.host);
    add(given, reports.device);
  }
  checks.equal(name + ": outputs", out);
  checks.equal(name + ": log-sum-exp", lse);
  checks.equal(name + ": reports", reports);
}

/// Tensor parallel: two pipelines of a KV head and its query heads each, beside one of both.
template <class Pipeline>
void compare_ranks(report& checks, const std::string& name, bool slots) {
  constexpr int group = query_heads / kv_heads;
  random_numbers random(7);
  device_side<Pipeline> whole(slots),
      of_head[kv_heads]{device_side<Pipeline>(slots, 1), device_side<Pipeline>(slots, 1)};
  const sequence_id id = whole.pipeline.open();
  for (auto& rank : of_head) rank.pipeline.open();
  results<float> out(0), lse(0);
  results<std::int32_t> reports(0);
  for (int step = 0; step < 8; ++step) {
    const int rows = step == 0 ? 60 : random.between(1, 2);
    const step_input input{id, rows, step == 0 ? step_phase::prefill : step_phase::decode};
    std::vector<rows_of_step<float>> of_layer;
    for (int layer = 0; layer < layers; ++layer) of_layer.emplace_back(random, rows);
    const auto run = [&](device_side<Pipeline>& side, int first, int heads, pinned<float>& to,
                         pinned<float>& lse_to) {
      auto s = side.pipeline.begin_step({input});
      for (int layer = 0; layer < layers; ++layer) {
        const rows_of_step<float>& r = of_layer[count(layer)];
        const auto from = [&](const pinned<float>& all, int head) {
          return std::span(all).subspan(count(head * head_dim));
        };
        pinned<float> of_heads(count(rows * heads * group * head_dim), NAN),
            of_lse(count(rows * heads * group), NAN);
        s.template append<float>(layer, {.keys = from(r.keys, first),
                                         .values = from(r.values, first),
                                         .queries = from(r.queries, first * group),
                                         .strides = {key_row, key_row, query_row}});
        s.attend(layer, of_heads, of_lse);
        side.pipeline.synchronize();  // before the outputs go
        for (int row = 0; row < rows; ++row)
          for (int head = 0; head < heads * group; ++head) {
            const std::size_t at = count((layer * rows + row) * query_heads + first * group + head),
                              mine = count(row * heads * group + head);
            std::copy_n(of_heads.begin() + static_cast<long>(mine * head_dim), head_dim,
                        to.begin() + static_cast<long>(at * head_dim));
            lse_to[at] = of_lse[mine];
          }
      }
      s.end();
    };
    const std::size_t numbers = count(layers * rows * query_heads);
    results<float> out_of_step(numbers * head_dim, NAN), lse_of_step(numbers, NAN);
    run(whole, 0, kv_heads, out_of_step.host, lse_of_step.host);
    for (int head = 0; head < kv_heads; ++head)
      run(of_head[head], head, 1, out_of_step.device, lse_of_step.device);
    const auto append = [](auto& to, const auto& more) {
      to.host.insert(to.host.end(), more.host.begin(), more.host.end());
      to.device.insert(to.device.end(), more.device.begin(), more.device.end());
    };
    append(out, out_of_step);
    append(lse, lse_of_step);
    if (step == 0) continue;
    const auto report_of = [&](device_side<Pipeline>& side, int head, pinned<std::int32_t>& to) {
      const step_report r = side.pipeline.report(1)[id];
      to.insert(to.end(), {r.corrected[head], r.recalled[head], r.promoted[head], r.attended_count[head]});
      const auto attended = r.attended.subspan(r.attended.size() / r.corrected.size() * count(head),
                                               count(r.attended_count[head]));
      to.insert(to.end(), attended.begin(), attended.end());
    };
    for (int head = 0; head < kv_heads; ++head) {
      report_of(whole, head, reports.host);
      report_of(of_head[head], 0, reports.device);
    }
  }
  reports.device.resize(reports.host.size(), -1);
  checks.equal(name + ": outputs", out);
  checks.equal(name + ": log-sum-exp", lse);
  checks.equal(name + ": selections", reports);
}

/// Heads that select by other queries than those that attend: what is selected is these others', and where
/// that is everything, outputs are those of the queries alone.
template <class Pipeline>
void compare_selecting(report& checks, const std::string& name, bool slots, int selected) {
  random_numbers random(11);
  device_side<Pipeline> given(slots, kv_heads, selected), others(slots, kv_heads, selected),
      own(slots, kv_heads, selected);
  const sequence_id id = given.pipeline.open();
  others.pipeline.open();
  own.pipeline.open();
  const bool selects_all = selected * 8 >= max_tokens;
  results<float> out(0);
  results<std::int32_t> reports(0);
  for (int step = 0; step < 8; ++step) {
    const int rows = step == 0 ? 90 : random.between(1, 2);
    const step_input input{id, rows, step == 0 ? step_phase::prefill : step_phase::decode};
    std::vector<rows_of_step<bfloat16>> of_layer, selecting;
    for (int layer = 0; layer < layers; ++layer) {
      of_layer.emplace_back(random, rows);
      selecting.emplace_back(random, rows);
    }
    const auto run = [&](device_side<Pipeline>& side, const auto& queries_of, pinned<float>& to) {
      auto s = side.pipeline.begin_step({input});
      for (int layer = 0; layer < layers; ++layer) {
        const auto& r = of_layer[count(layer)];
        kv_rows<bfloat16, bfloat16> of{.keys = std::span(r.fused).subspan(query_row),
                                       .values = r.apart,
                                       .strides = {r.stride, r.value_stride, r.stride}};
        queries_of(layer, of);
        s.append(layer, of);
        const std::size_t before = to.size();
        to.resize(before + count(rows * query_row), NAN);
        s.attend(layer, std::span(to).subspan(before));
        side.pipeline.synchronize();  // before outputs move
      }
      s.end();
    };
    const auto by = [&](const auto& from) {
      return [&from](int layer, auto& of) {
        of.queries = from[count(layer)].fused;
        of.strides.queries = from[count(layer)].stride;
      };
    };
    pinned<float> out_of_others;
    run(
        given,
        [&](int layer, auto& of) {
          of.queries = of_layer[count(layer)].fused;
          of.selecting = selecting[count(layer)].fused;
          of.strides.selecting = selecting[count(layer)].stride;
        },
        out.device);
    run(others, by(selecting), out_of_others);
    run(own, by(of_layer), out.host);
    if (step == 0) continue;
    const auto report_of = [&](device_side<Pipeline>& side, pinned<std::int32_t>& to) {
      const step_report r = side.pipeline.report(1)[id];
      for (int head = 0; head < kv_heads; ++head) {
        to.insert(to.end(), {r.corrected[head], r.recalled[head], r.attended_count[head]});
        const auto attended =
            r.attended.subspan(r.attended.size() / kv_heads * count(head), count(r.attended_count[head]));
        to.insert(to.end(), attended.begin(), attended.end());
      }
    };
    report_of(others, reports.host);
    report_of(given, reports.device);
  }
  reports.device.resize(reports.host.size(), -1);
  checks.equal(name + ": selections", reports);
  if (selects_all) checks.equal(name + ": outputs", out);
}

}  // namespace

int main() {
  skip_without_device();
  report checks;
  for (const bool slots : {true, false}) {
    const std::string where = slots ? ", from slots" : ", in place";
    compare<pipeline_with<cosine_drift>, bfloat16, bfloat16>(checks, "bfloat16" + where, slots);
    compare<pipeline_with<cosine_drift>, bfloat16, half>(checks, "bfloat16, outputs of half" + where, slots);
    compare<pipeline_with<mass_deficit>, float, float>(checks, "floats" + where, slots);
    compare_ranks<pipeline_with<cosine_drift>>(checks, "ranks of a KV head" + where, slots);
    for (const int selected : {3, max_tokens / 8}) {
      compare_selecting<pipeline_with<cosine_drift>>(
          checks, "selecting " + std::to_string(selected) + " by other queries" + where, slots, selected);
      compare_selecting<pipeline_with<mass_deficit>>(
          checks, "the same, corrected by mass, " + std::to_string(selected) + where, slots, selected);
    }
    compare_ranks<pipeline_with<mass_deficit>>(checks, "ranks that correct by mass" + where, slots);
  }
  return checks.finish();
}
