// Attention to an engine's own paged KV cache, with and without tensor cores, against one in double precision
// and against a pipeline's.
//
// Exit status: 0 all right, 1 not, 77 no device.
#include <algorithm>
#include <array>
#include <freekv/backend/cuda/attend_paged.cuh>
#include <numeric>

#include "both_sides.cuh"

namespace {

using namespace both_sides;
using namespace freekv;
using namespace freekv::detail;
using device::paged_attention;
using by_fma = device::attend_paged_default;
using by_tensor_cores = device::attend_paged_by_tensor_cores;

using freekv::to_size;
std::string text(int n) { return std::to_string(n); }
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

/// Where a block's rows lie: tokens outermost, keys and values in planes of their own, next to each other in
/// a block, or in turns; or heads outermost, which a cache that is no NHD cache at all has.
enum class layout_of { two_planes, block_of_two, token_of_two, heads_first };

struct paged_case {
  int group = 1, kv_heads = 1, block_tokens = 16, rows = 1;
  std::vector<int> lengths;
  layout_of layout = layout_of::two_planes;
  int padding = 0;  // elements behind each head's row
  float soft_cap = 0.0f;
  bool sink_logits = false;
  float spread = 1.0f;  // of queries

  int query_heads() const { return group * kv_heads; }
  int longest() const { return *std::max_element(lengths.begin(), lengths.end()); }
  int blocks() const { return (longest() + block_tokens - 1) / block_tokens; }
  int table_width() const { return blocks() + 600 / block_tokens + 1; }  // room for more than one part more
  std::string name() const {
    return "group " + text(group) + ", blocks of " + text(block_tokens) + ", " + text(rows) +
           " rows, layout " + text(static_cast<int>(layout)) + (padding > 0 ? " padded" : "") +
           (soft_cap > 0.0f ? ", soft cap" : "") + (sink_logits ? ", sink logits" : "");
  }
};

/// An engine's cache: random where a sequence has tokens, NaN in all other rows, and no block at all behind
/// its last.
template <class Element, int HeadDim>
struct engine_cache {
  pinned<Element> data;
  pinned<std::int32_t> table, lengths;
  device::paged_cache<Element> view;

  engine_cache(const paged_case& c, random_numbers& random) {
    const std::int64_t row = HeadDim + c.padding, tokens = c.block_tokens, heads = c.kv_heads;
    const int sequences = static_cast<int>(c.lengths.size()), most = sequences * c.blocks() + 3;
    const std::int64_t plane = tokens * heads * row;
    std::int64_t values = plane;
    view.tensor.block_stride = 2 * plane;
    view.tensor.token_stride = heads * row;
    view.tensor.head_stride = row;
    if (c.layout == layout_of::two_planes) {
      view.tensor.block_stride = plane;
      values = plane * most;
    }
    if (c.layout == layout_of::token_of_two) {
      view.tensor.token_stride = 2 * heads * row;
      values = heads * row;
    }
    if (c.layout == layout_of::heads_first) {
      view.tensor.token_stride = row;
      view.tensor.head_stride = tokens * row;
    }
    data.assign(to_size(2 * plane * most), from_float<Element>(nan_value));
    view.tensor.keys = data.data();
    view.tensor.values = data.data() + values;
    view.tensor.block_tokens = c.block_tokens;
    view.max_blocks = c.table_width();

    std::vector<std::int32_t> free(to_size(most));
    std::iota(free.begin(), free.end(), 0);
    for (std::size_t i = free.size(); i > 1; --i)
      std::swap(free[i - 1], free[to_size(random.below(static_cast<int>(i)))]);
    table.assign(to_size(sequences * view.max_blocks), 1 << 30);
    for (int s = 0; s < sequences; ++s) {
      lengths.push_back(c.lengths[to_size(s)]);
      for (int t = 0; t < c.lengths[to_size(s)]; ++t) {
        std::int32_t& block = table[to_size(s * view.max_blocks + t / c.block_tokens)];
        if (t % c.block_tokens == 0) block = free.back(), free.pop_back();
        for (int h = 0; h < c.kv_heads; ++h)
          for (int d = 0; d < HeadDim; ++d) {
            data[to_size(offset(block, t, h) + d)] = from_float<Element>(random.normal());
            data[to_size(values + offset(block, t, h) + d)] = from_float<Element>(random.normal());
          }
      }
    }
    view.block_table = table.data();
    view.seq_lens = lengths.data();
  }
  std::int64_t offset(std::int32_t block, int token, int head) const {
    return block * view.tensor.block_stride + token % view.tensor.block_tokens * view.tensor.token_stride +
           head * view.tensor.head_stride;
  }
  const Element* key(int sequence, int token, int head) const {
    return view.tensor.keys +
           offset(table[to_size(sequence * view.max_blocks + token / view.tensor.block_tokens)], token, head);
  }
  const Element* value(int sequence, int token, int head) const {
    return key(sequence, token, head) + (view.tensor.values - view.tensor.keys);
  }
};

/// Output and lse of all rows: the device's beside those in double precision.
struct attended {
  results<float> out, lse;
  attended(std::int64_t rows, int head_dim)
      : out(to_size(rows * head_dim), -9.0f), lse(to_size(rows), -9.0f) {}
};

template <class Element, int HeadDim>
void attend_in_double(const paged_case& c, const engine_cache<Element, HeadDim>& cache,
                      const paged_attention& attention, attended& to) {
  for (std::size_t s = 0; s < c.lengths.size(); ++s)
    for (int row = 0; row < c.rows; ++row)
      for (int head = 0; head < c.query_heads(); ++head) {
        const std::int64_t at = (static_cast<std::int64_t>(s) * c.rows + row) * c.query_heads() + head;
        const int tokens = std::max(0, c.lengths[s] - (c.rows - 1 - row)), kv = head / c.group;
        const float* const query = attention.queries + at * HeadDim;
        std::vector<double> scores;
        for (int t = 0; t < tokens; ++t) {
          const Element* const key = cache.key(static_cast<int>(s), t, kv);
          double score = 0.0;
          for (int d = 0; d < HeadDim; ++d) score += double{query[d]} * to_float(key[d]);
          score *= attention.scale;
          scores.push_back(c.soft_cap > 0.0f ? c.soft_cap * std::tanh(score / c.soft_cap) : score);
        }
        std::vector<double> all = scores, out(HeadDim, 0.0);
        if (attention.sink_logits != nullptr) all.push_back(attention.sink_logits[head]);
        const double most = all.empty() ? 0.0 : *std::max_element(all.begin(), all.end());
        double sum = 0.0;
        for (const double score : all) sum += std::exp(score - most);
        for (int t = 0; t < tokens; ++t) {
          const Element* const value = cache.value(static_cast<int>(s), t, kv);
          for (int d = 0; d < HeadDim; ++d)
            out[to_size(d)] += std::exp(scores[to_size(t)] - most) / sum * to_float(value[d]);
        }
        for (int d = 0; d < HeadDim; ++d)
          to.out.host[to_size(at * HeadDim + d)] = static_cast<float>(out[to_size(d)]);
        to.lse.host[to_size(at)] = all.empty() ? -infinity : static_cast<float>(most + std::log(sum));
      }
}

/// Scratch of a program that has no pipeline.
struct scratch_memory {
  pinned<std::byte> bytes;
  device::attention_scratch_memory view;
  scratch_memory(const paged_attention& attention, int block_tokens, int head_dim) {
    carver counted;
    device::paged_scratch(counted, attention, block_tokens, head_dim);
    bytes.assign(counted.used(), std::byte{0xff});  // NaN
    carver memory(bytes.data());
    view = device::paged_scratch(memory, attention, block_tokens, head_dim);
    view.clear(nullptr);
  }
};

template <class Tuned, class Element, int HeadDim>
void attend(const engine_cache<Element, HeadDim>& cache, const paged_attention& attention,
            const device::attention_scratch_memory& scratch) {
  device::attend_paged<HeadDim, Tuned>(cache.view, attention, scratch, nullptr);
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

template <class Element, int HeadDim>
struct case_memory {
  engine_cache<Element, HeadDim> cache;
  pinned<float> queries, logits;
  paged_attention attention;

  case_memory(const paged_case& c, random_numbers& random)
      : cache(c, random),
        queries(
            random.normals<float>(c.lengths.size() * to_size(c.rows * c.query_heads() * HeadDim), c.spread)),
        logits(random.normals<float>(to_size(c.query_heads()), 3.0f)) {
    attention.heads = {c.query_heads(), c.kv_heads};
    attention.queries = queries.data();
    attention.max_sequences = static_cast<int>(c.lengths.size());
    attention.max_tokens = c.longest();
    attention.rows = c.rows;
    attention.scale = 1.0f / std::sqrt(static_cast<float>(HeadDim));
    attention.soft_cap = c.soft_cap;
    attention.sink_logits = c.sink_logits ? logits.data() : nullptr;
  }
  std::int64_t outputs() const { return std::int64_t{attention.max_rows()} * attention.heads.query; }
};

/// A pipeline's complete layer whose store is the cache: its sequences from `first` to before `end`.
template <device::multiplies By, class Element, int HeadDim>
void attend_as_layer(const paged_case& c, case_memory<Element, HeadDim>& m, attended& to, int first = 0,
                     int end = 1 << 30) {
  layer_state<kv_shape<Element, HeadDim>> s;
  s.kind = layer_kind::complete;
  s.heads = m.attention.heads;
  s.page = s.unit = {c.block_tokens, HeadDim};
  s.scale = m.attention.scale;
  s.soft_cap = m.attention.soft_cap;
  s.sink_logits = m.attention.sink_logits;
  s.max_pages = m.cache.view.max_blocks;
  s.page_table = m.cache.table.data();
  s.store = strided<HeadDim>(make_page_span<nhd, HeadDim>(
      m.cache.data.data(),
      static_cast<std::int64_t>(m.cache.data.size()) / (2 * c.block_tokens * c.kv_heads * HeadDim),
      {c.block_tokens, c.kv_heads}));
  pinned<step_entry> entries;
  for (int nth = first; nth < std::min(end, static_cast<int>(c.lengths.size())); ++nth)
    entries.push_back({.sequence = nth,
                       .before = c.lengths[to_size(nth)] - c.rows,
                       .tokens = c.rows,
                       .first_row = (nth - first) * c.rows});
  const int rows = static_cast<int>(entries.size()) * c.rows, row_before = first * c.rows;
  const std::int64_t row_numbers = std::int64_t{c.query_heads()} * HeadDim;
  pinned<std::int32_t> count(1, static_cast<std::int32_t>(entries.size()));
  const scratch_memory scratch(m.attention, c.block_tokens, HeadDim);
  const int parts = device::paged_parts(m.attention, c.block_tokens);
  device::launch_attend<By>(s, identity{}, {entries.data(), count.data(), {.rows = rows}},
                            {m.queries.data() + row_before * row_numbers, row_numbers},
                            device::rows_attending::all, true, parts,
                            {to.out.host.data() + row_before * row_numbers,
                             to.lse.host.data() + std::int64_t{row_before} * c.query_heads()},
                            scratch.view, nullptr);
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

/// One case as it is; with wider bounds, little scratch and fewer sequences than there is room for; and a
/// sequence alone.
template <class Tuned, class Element, int HeadDim>
void attend_case(report& checks, random_numbers& random, const paged_case& c) {
  case_memory<Element, HeadDim> m(c, random);
  const std::string what = (std::is_same_v<Tuned, by_fma> ? "" : "tensor cores: ") +
                           std::string(element_name<Element>) + " of " + text(HeadDim) + ", " + c.name();
  attended plain(m.outputs(), HeadDim);
  attend_in_double(c, m.cache, m.attention, plain);
  m.attention.to = {plain.out.device.data(), plain.lse.device.data()};
  attend<Tuned>(m.cache, m.attention, scratch_memory(m.attention, c.block_tokens, HeadDim).view);
  checks.close(what + ": outputs", plain.out,
               c.spread == 6.0f ? 128 : 8);  // scores up to 30 multiply what is rounded
  checks.close(what + ": lse", plain.lse, 8);

  // All but the last sequence, one row's scratch. What is not written stays as it is.
  const int last = static_cast<int>(c.lengths.size()) - 1;
  attended others(m.outputs(), HeadDim);
  const std::int64_t written = std::int64_t{last} * c.rows * c.query_heads();
  std::copy_n(plain.out.device.begin(), written * HeadDim, others.out.host.begin());
  std::copy_n(plain.lse.device.begin(), written, others.lse.host.begin());
  pinned<std::int32_t> there(1, last);
  paged_attention wide = m.attention;
  wide.sequences = there.data();
  wide.max_tokens = m.cache.view.max_blocks * c.block_tokens;
  wide.to = {others.out.device.data(), others.lse.device.data()};
  scratch_memory little(wide, c.block_tokens, HeadDim);
  little.view.parts = std::int64_t{c.query_heads()} * device::paged_parts(wide, c.block_tokens);
  attend<Tuned>(m.cache, wide, little.view);
  checks.equal(what + ": outputs of all but the last sequence, row by row", others.out);
  checks.equal(what + ": lse of all but the last sequence, row by row", others.lse);

  paged_attention alone = m.attention;
  attended one(std::int64_t{c.rows} * c.query_heads(), HeadDim);
  std::copy_n(plain.out.device.begin() + written * HeadDim, one.out.host.size(), one.out.host.begin());
  engine_cache<Element, HeadDim>& cache = m.cache;
  cache.view.block_table += std::int64_t{last} * cache.view.max_blocks;
  cache.view.seq_lens += last;
  alone.max_sequences = 1;
  alone.max_tokens = c.lengths.back();
  alone.queries += written * HeadDim;
  alone.to = {one.out.device.data()};
  attend<Tuned>(cache, alone, scratch_memory(alone, c.block_tokens, HeadDim).view);
  checks.equal(what + ": outputs of the last sequence alone", one.out);
}

/// Values of BF16 that are 2^115 times as large give outputs that are, bit for bit: no sum of them leaves
/// float's range.
template <class Tuned>
void large_values(report& checks, random_numbers& random, const std::string& how) {
  constexpr float factor = 0x1p115f;
  const paged_case c{.group = 3, .kv_heads = 2, .lengths = {600, 5}};
  case_memory<bfloat16, 64> m(c, random);
  attended both(m.outputs(), 64);
  const scratch_memory scratch(m.attention, c.block_tokens, 64);
  m.attention.to = {both.out.host.data(), both.lse.host.data()};
  attend<Tuned>(m.cache, m.attention, scratch.view);
  for (float& x : both.out.host) x *= factor;
  for (auto x = m.cache.data.begin() + (m.cache.view.tensor.values - m.cache.view.tensor.keys);
       x != m.cache.data.end(); ++x)
    *x = from_float<bfloat16>(to_float(*x) * factor);
  m.attention.to = {both.out.device.data(), both.lse.device.data()};
  attend<Tuned>(m.cache, m.attention, scratch.view);
  checks.equal("values of 2^115 by " + how + ": outputs", both.out);
  checks.equal("values of 2^115 by " + how + ": lse", both.lse);
}

/// The log-sum-exp of each block, beside outputs that are the same to rounding.
template <class Tuned, class Element, int HeadDim>
void block_by_block(report& checks, random_numbers& random, const paged_case& c) {
  case_memory<Element, HeadDim> m(c, random);
  attended both(m.outputs(), HeadDim);
  m.attention.to = {both.out.host.data(), both.lse.host.data()};
  attend<Tuned>(m.cache, m.attention, scratch_memory(m.attention, c.block_tokens, HeadDim).view);
  results<float> blocks(to_size(m.outputs() * c.table_width()), -9.0f);
  const int rows = m.attention.max_rows(), heads = c.query_heads();
  for (int row = 0; row < rows; ++row)
    for (int head = 0; head < heads; ++head) {
      const std::int64_t at = std::int64_t{row} * heads + head;
      const int tokens = std::max(0, c.lengths[to_size(row / c.rows)] - (c.rows - 1 - row % c.rows));
      for (int first = 0; first < tokens; first += c.block_tokens) {
        double sum = 0.0;
        for (int t = first; t < std::min(tokens, first + c.block_tokens); ++t) {
          const Element* const key = m.cache.key(row / c.rows, t, head / c.group);
          double score = 0.0;
          for (int d = 0; d < HeadDim; ++d)
            score += double{m.queries[to_size(at * HeadDim + d)]} * to_float(key[d]);
          sum += std::exp(score * m.attention.scale);
        }
        blocks.host[to_size(at * c.table_width() + first / c.block_tokens)] =
            static_cast<float>(std::log2(sum));
      }
    }
  m.attention.to = {both.out.device.data(), both.lse.device.data(), 1.44269504f};
  for (float& lse : both.lse.host) lse *= 1.44269504f;
  m.attention.block_lse = blocks.device.data();
  attend<Tuned>(m.cache, m.attention, scratch_memory(m.attention, c.block_tokens, HeadDim).view);
  const std::string what = "block by block, " + c.name();
  checks.close(what + ": outputs", both.out, 8);
  checks.close(what + ": lse", both.lse, 8);
  checks.close(what + ": lse of blocks", blocks, 16);
}

/// The same bits as a pipeline's layer that keeps everything.
template <class Element, int HeadDim>
void as_a_layer(report& checks, random_numbers& random, const paged_case& c) {
  case_memory<Element, HeadDim> m(c, random);
  attended both(m.outputs(), HeadDim);
  attend_as_layer<device::multiplies::fma>(c, m, both);
  m.attention.to = {both.out.device.data(), both.lse.device.data()};
  attend<by_fma>(m.cache, m.attention, scratch_memory(m.attention, c.block_tokens, HeadDim).view);
  const std::string what = "a complete layer, " + c.name();
  checks.equal(what + ": outputs", both.out);
  checks.equal(what + ": lse", both.lse);
}

/// Where there are more parts than a device attends to at a time, blocks take several in turn, by tensor
/// cores. A sequence gets the bits that it gets alone, when they do not.
void parts_in_turn(report& checks, random_numbers& random) {
  constexpr auto by = device::multiplies::tensor_cores;
  paged_case c{
      .group = 3,
      .kv_heads = std::max(2, device::multiprocessors() * 3 / 16),  // four times as many parts as fit
      .block_tokens = 32,
      .lengths = {4096, 5},
      .layout = layout_of::block_of_two};
  while (static_cast<int>(c.lengths.size()) < device::attend_default.rows_of_all)
    c.lengths.push_back(random.between(1, 4096));
  case_memory<half, 64> m(c, random);
  attended all(m.outputs(), 64), alone(m.outputs(), 64);
  attend_as_layer<by>(c, m, all);
  for (int nth = 0; nth < static_cast<int>(c.lengths.size()); ++nth)
    attend_as_layer<by>(c, m, alone, nth, nth + 1);
  const device::paged_attention& of = m.attention;
  const int parts = device::paged_parts(of, c.block_tokens);
  const int blocks = device::blocks_of_row(parts, device::attend_default.part_tokens_of_all,
                                           std::int64_t{of.max_rows()} * c.kv_heads,
                                           device::multiprocessors() * device::attend_default.tensor_blocks);
  results<int> in_turn(1, 1);
  in_turn.device[0] = blocks < parts;
  checks.equal("parts in turn: there are", in_turn);
  all.out.device = alone.out.host;
  all.lse.device = alone.lse.host;
  checks.equal("parts in turn: outputs", all.out);
  checks.equal("parts in turn: lse", all.lse);
}

/// Rows of more tokens than the bound are NaN, whatever they have; others are as they are.
void longer_than_said(report& checks, random_numbers& random) {
  const paged_case c{.group = 3, .kv_heads = 2, .rows = 2, .lengths = {40, 12, 33}};
  case_memory<half, 64> m(c, random);
  attended both(m.outputs(), 64);
  m.attention.to = {both.out.host.data(), both.lse.host.data()};
  attend<by_fma>(m.cache, m.attention, scratch_memory(m.attention, c.block_tokens, 64).view);
  const auto spoil = [&](int row) {
    for (int head = 0; head < c.query_heads(); ++head) {
      const int at = row * c.query_heads() + head;
      std::fill_n(both.out.host.begin() + at * 64, 64, nan_value);
      both.lse.host[to_size(at)] = nan_value;
    }
  };
  for (const int row : std::array{0, 1, 5}) spoil(row);
  m.attention.max_tokens = 32;  // the first row of the last sequence has so many
  m.cache.lengths[0] = 9000;    // more than its table has blocks for
  m.attention.to = {both.out.device.data(), both.lse.device.data()};
  attend<by_fma>(m.cache, m.attention, scratch_memory(m.attention, c.block_tokens, 64).view);
  checks.equal("rows of more tokens than max_tokens: outputs", both.out);
  checks.equal("rows of more tokens than max_tokens: lse", both.lse);
}

/// Slices that some of eight heads attend to.
template <class Element>
struct masked_slice {
  head_slice<const Element> rows;
  int tokens = 0;
  unsigned attending = 0;
};
constexpr int masked_heads = 8;

template <class Attention, int HeadDim, class Element>
__global__ void attend_slices(const float* queries, const masked_slice<Element>* slices, int count,
                              log_sum_exp* log_sums, float* weighted) {
  const typename Attention::team_type team;
  const auto attend_with = [&](Attention& attention, const auto& attend_all) {
    attention.begin(
        team, [&](int h) { return queries + h * HeadDim; }, 0.125f);
    attend_all();
    attention.store(team, [&](int h) { return attention_part{log_sums + h, weighted + h * HeadDim}; });
  };
  if constexpr (requires { typename Attention::storage; }) {
    alignas(16) __shared__ std::byte shared[sizeof(typename Attention::storage)];
    Attention attention(reinterpret_cast<typename Attention::storage&>(shared));
    attend_with(attention, [&] {
      const auto entries = [&](int i) {
        return device::entry_rows<Element>{slices[i].rows, slices[i].tokens, slices[i].attending};
      };
      attention.attend_entries(team, 0, count, entries, 0.0f);
    });
  } else {
    Attention attention;
    attend_with(attention, [&] {
      for (int i = 0; i < count; ++i)
        attention.attend(team, slices[i].rows, slices[i].tokens, 0.0f, slices[i].attending);
    });
  }
}

template <class Attention, int HeadDim, class Element>
void attend_slices_with(const pinned<float>& queries, const pinned<masked_slice<Element>>& slices,
                        pinned<float>& out, pinned<float>& lse) {
  pinned<log_sum_exp> log_sums(masked_heads);
  attend_slices<Attention, HeadDim><<<1, Attention::team_type::lane_count>>>(
      queries.data(), slices.data(), static_cast<int>(slices.size()), log_sums.data(), out.data());
  require(cudaGetLastError(), "kernel launch");
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  for (int h = 0; h < masked_heads; ++h)
    finish_attention<HeadDim>(scalar_team{}, {&log_sums[to_size(h)], &out[to_size(h * HeadDim)]}, 1,
                              &out[to_size(h * HeadDim)], &lse[to_size(h)]);
}

/// Tensor cores attend to what the heads' bits say: NaN is for those heads alone that attend to it, and one
/// head attends to nothing. Behind the last slice memory ends.
template <class Element, int HeadDim>
void masked_heads_alone(report& checks, random_numbers& random) {
  const int stride = HeadDim + 8, each = 40, count = 12;
  pinned<float> queries = random.normals<float>(to_size(masked_heads * HeadDim));
  pinned<Element> keys = random.normals<Element>(to_size(count * each * stride)),
                  values = random.normals<Element>(keys.size());
  pinned<masked_slice<Element>> slices;
  for (int i = 0; i < count; ++i) {
    const std::int64_t first = std::int64_t{i} * each * stride;
    unsigned attending = random.bits() & 0xf7u;
    if (i == 5 || i == 8) {  // a token of NaN, for one head
      attending = 1u << 6;
      (i == 5 ? values : keys)[to_size(first + 3)] = from_float<Element>(nan_value);
    }
    if (i < 8) attending &= ~(1u << 2);  // a head that attends late
    slices.push_back({{keys.data() + first, values.data() + first, stride},
                      i + 1 < count ? random.between(1, each) : each,
                      attending});
  }
  results<float> out(to_size(masked_heads * HeadDim)), lse(masked_heads);
  using by_lanes = register_attention<HeadDim, masked_heads, device::row_team<HeadDim>>;
  attend_slices_with<by_lanes, HeadDim>(queries, slices, out.host, lse.host);
  attend_slices_with<device::tensor_attention<HeadDim, Element>, HeadDim>(queries, slices, out.device,
                                                                          lse.device);
  const std::string what = "heads that attend to some slices, " + std::string(element_name<Element>);
  checks.close(what + ": outputs", out, 8);
  checks.close(what + ": lse", lse, 8);
}

/// What is refused, before anything is launched.
void refusals(report& checks, random_numbers& random) {
  const paged_case c{.group = 3, .kv_heads = 2, .lengths = {40}};
  case_memory<half, 64> m(c, random);
  const scratch_memory scratch(m.attention, c.block_tokens, 64);
  results<std::int32_t> refused(5, 1);
  int nth = 0;
  const auto attempt = [&](const auto& spoil) {
    auto view = m.cache.view;
    auto attention = m.attention;
    auto with = scratch.view;
    spoil(view, attention, with);
    std::int32_t& thrown = refused.device[to_size(nth++)] = 0;
    try {
      device::attend_paged<64>(view, attention, with, nullptr);
    } catch (const settings_error&) {
      thrown = 1;
    }
  };
  attempt([](auto&, auto& attention, auto&) { attention.heads.query = 5; });
  attempt([](auto&, auto& attention, auto&) { attention.rows = 0; });
  attempt([](auto& view, auto&, auto&) { view.tensor.block_tokens = 0; });
  attempt([](auto& view, auto&, auto&) { view.max_blocks = 2; });
  attempt([](auto&, auto&, auto& with) { with.parts = 5; });
  checks.equal("what is refused", refused);
}

/// Lengths around a block's and a part's end, and none at all.
std::vector<int> lengths(random_numbers& random, int sequences) {
  std::vector<int> drawn;
  for (int s = 0; s < sequences; ++s)
    drawn.push_back(std::array{0, 1, random.between(2, 60), 512 - random.below(3), random.between(100, 700),
                               1024 + random.between(1, 200)}[to_size(random.below(6))]);
  return drawn;
}

template <class Tuned, class Element, int HeadDim>
void random_case(report& checks, random_numbers& random, int group) {
  paged_case c{.group = group,
               .kv_heads = random.between(1, group > 4 ? 1 : 2),
               .block_tokens = std::array{8, 16, 24, 32, 64, 128}[to_size(random.below(6))],
               .rows = random.below(2) == 0 ? 1 : random.between(2, 3),
               .lengths = lengths(random, random.between(2, 4)),
               .layout = static_cast<layout_of>(random.below(4)),
               .padding = std::array{0, 0, 8, 3}[to_size(random.below(4))],
               .soft_cap = random.below(3) == 0 ? 4.0f : 0.0f,
               .sink_logits = random.below(3) == 0,
               .spread = random.below(2) == 0 ? 1.0f : 6.0f};
  attend_case<Tuned, Element, HeadDim>(checks, random, c);
}

}  // namespace

int main() {
  skip_without_device();
  report checks;
  random_numbers random(1);
  const paged_case odd_lengths{.group = 2, .kv_heads = 2, .rows = 3, .lengths = {1300, 0, 1, 2, 513}};
  const paged_case single_tokens{.group = 1, .block_tokens = 1, .lengths = {9, 0}, .sink_logits = true};
  attend_case<by_fma, half, 64>(checks, random, odd_lengths);
  attend_case<by_fma, half, 64>(checks, random, single_tokens);
  for (const int group : std::array{1, 2, 3, 4, 5, 7, 8, 16})
    random_case<by_fma, half, 64>(checks, random, group);
  for (const int group : std::array{1, 3, 8}) random_case<by_fma, float, 80>(checks, random, group);
  for (const int group : std::array{2, 4, 7}) random_case<by_fma, bfloat16, 128>(checks, random, group);
  for (const int group : std::array{1, 5}) random_case<by_fma, half, 256>(checks, random, group);
  attend_case<by_tensor_cores, half, 64>(checks, random, odd_lengths);
  attend_case<by_tensor_cores, half, 64>(checks, random, single_tokens);
  for (const int group : std::array{1, 3, 7, 8, 16})
    random_case<by_tensor_cores, half, 64>(checks, random, group);
  for (const int group : std::array{2, 5}) random_case<by_tensor_cores, half, 80>(checks, random, group);
  random_case<by_tensor_cores, bfloat16, 192>(checks, random, 4);
  for (const int group : std::array{3, 8}) random_case<by_tensor_cores, bfloat16, 256>(checks, random, group);
  for (const int group : std::array{2, 4, 11})
    random_case<by_tensor_cores, bfloat16, 128>(checks, random, group);
  for (const float spread : std::array{1e-20f, 1e6f})  // below and beyond what F16 can hold
    attend_case<by_tensor_cores, half, 64>(checks, random,
                                           {.group = 6, .lengths = {77}, .soft_cap = 4.0f, .spread = spread});
  random_case<by_fma, fp8_e4m3, 64>(checks, random, 3);
  attend_case<by_tensor_cores, fp8_e4m3, 64>(checks, random, odd_lengths);
  for (const int group : std::array{1, 11})
    random_case<by_tensor_cores, fp8_e4m3, 128>(checks, random, group);
  random_case<by_tensor_cores, fp8_e4m3, 80>(checks, random, 5);
  random_case<by_tensor_cores, fp8_e4m3, 256>(checks, random, 4);
  const layout_of blocks = layout_of::block_of_two;  // a pipeline's pages
  as_a_layer<bfloat16, 128>(
      checks, random, {.group = 4, .block_tokens = 32, .rows = 2, .lengths = {70, 1100}, .layout = blocks});
  as_a_layer<bfloat16, 128>(checks, random,
                            {.group = 5,
                             .kv_heads = 2,
                             .block_tokens = 24,
                             .lengths = {1, 511},
                             .layout = blocks,
                             .soft_cap = 4.0f,
                             .sink_logits = true});
  block_by_block<by_fma, half, 64>(checks, random,
                                   {.group = 3, .block_tokens = 8, .rows = 2, .lengths = {130, 0, 1, 16}});
  block_by_block<by_tensor_cores, bfloat16, 128>(
      checks, random, {.group = 5, .kv_heads = 2, .block_tokens = 32, .lengths = {33, 700}});
  large_values<by_fma>(checks, random, "FMA");
  large_values<by_tensor_cores>(checks, random, "tensor cores");
  masked_heads_alone<bfloat16, 32>(checks, random);
  masked_heads_alone<fp8_e4m3, 32>(checks, random);
  parts_in_turn(checks, random);
  longer_than_said(checks, random);
  refusals(checks, random);
  return checks.finish();
}
