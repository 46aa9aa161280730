// Block tables of what decode rows attend to, written on the device: each form is attended through by a
// kernel of the test's own, in steps that are begun and in captured ones.
//
// Exit status: 0 all right, 1 not, 77 no device.
#include <freekv/freekv.cuh>

#include "both_sides.cuh"

namespace {

using namespace both_sides;
using namespace freekv;
using namespace freekv::detail;
using device::table_rows;

constexpr int head_dim = 64, query_heads = 6, kv_heads = 2, group = query_heads / kv_heads, layers = 3;
constexpr int batch = 4;
constexpr std::size_t key_row = kv_heads * head_dim, query_row = query_heads * head_dim;

// The first layer keeps everything. By `top_p` heads have budgets of their own, as HARD-KV gives them: what
// each attends to is then a request of its own length for a kernel that knows nothing of heads.
template <class Selection, int Page, int Unit>
using pipeline_by = retrieval_pipeline<kv_shape<half, head_dim>, cuda_backend, page_size<Page>, unit<Unit>,
                                       layout_pair<hnd, hnd>, mean, Selection, cosine_drift,
                                       complete_first<1>, any_of<resident, in_place>>;

using freekv::to_size;

enum class form { dense, until_minus_one, ragged, united, folded };

/// Row of a table by what a paged-attention kernel of each form reads of it.
struct row_of_table {
  const std::int32_t* blocks;
  int count, tokens;
};
__device__ row_of_table read_row(const device::block_tables& t, form f, int row, int tokens) {
  if (f == form::ragged) {
    const int first = t.indptr[row], count = t.indptr[row + 1] - first;
    return {t.indices + first, count, count == 0 ? 0 : (count - 1) * tokens + t.last_page_len[row]};
  }
  const std::int32_t* const blocks = t.blocks + row * t.max_blocks;
  if (f != form::until_minus_one) return {blocks, (t.seq_lens[row] + tokens - 1) / tokens, t.seq_lens[row]};
  int count = 0;
  while (count < t.max_blocks && blocks[count] >= 0) ++count;
  return {blocks, count, t.block_counts[row] == count ? t.seq_lens[row] : -1};
}

/// The tensor whose blocks have a table's ids. Folded heads are requests of a tensor of one head, whose pages
/// are as far apart as heads are; blocks of less than a page are as far apart as their rows.
paged_tensor<half> tensor_of_ids(paged_tensor<half> kv, const device::block_tables& t) {
  const bool folded = t.rows == table_rows::folded;
  if (t.block_tokens > 0) {
    kv.block_tokens = t.block_tokens;
    kv.block_stride = t.block_tokens * kv.token_stride;
  } else if (folded) {
    kv.block_stride = kv.head_stride;
  }
  if (folded) kv.head_stride = 0;
  return kv;
}

/// Attention by a thread for each sequence and query head, in double precision.
__global__ void attend_by_table(paged_tensor<half> kv, device::block_tables tables, form f,
                                const float* queries, float scale, float* out) {
  const int nth = static_cast<int>(blockIdx.x), query_head = static_cast<int>(threadIdx.x),
            head = query_head / group;
  const int page = kv.block_tokens;
  const row_of_table row = read_row(tables, f,
                                    f == form::united   ? nth
                                    : f == form::folded ? nth * kv_heads + head
                                                        : head * tables.sequences + nth,
                                    page);
  const float* const q = queries + (nth * query_heads + query_head) * head_dim;
  const auto offset = [&](int t) {
    return row.blocks[t / page] * kv.block_stride + t % page * kv.token_stride + head * kv.head_stride;
  };
  double sum = 0.0, sums[head_dim] = {};
  for (int t = 0; t < row.tokens && row.count == (row.tokens + page - 1) / page; ++t) {
    double score = 0.0;
    for (int i = 0; i < head_dim; ++i) score += double{q[i]} * double{to_float(kv.keys[offset(t) + i])};
    const double weight = exp(score * double{scale});
    sum += weight;
    for (int i = 0; i < head_dim; ++i) sums[i] += weight * double{to_float(kv.values[offset(t) + i])};
  }
  for (int i = 0; i < head_dim; ++i)
    out[(nth * query_heads + query_head) * head_dim + i] =
        sum > 0.0 ? static_cast<float>(sums[i] / sum) : 0.0f;
}

/// A table and its memory, which both sides reach; spoiled before each step.
struct table_memory {
  table_memory(table_rows rows, int max_blocks, int tokens)
      : rows_of(rows),
        most(max_blocks),
        block_tokens(tokens),
        blocks(to_size(rows_count()) * to_size(most)),
        seq_lens(to_size(rows_count())),
        block_counts(seq_lens.size()),
        indptr(seq_lens.size() + 1),
        indices(blocks.size()),
        last_page_len(seq_lens.size()) {}
  int rows_count() const { return rows_of == table_rows::all_heads ? batch : batch * kv_heads; }
  device::block_tables view() {
    const bool ragged = rows_of != table_rows::all_heads;
    return {.rows = rows_of,
            .sequences = batch,
            .max_blocks = most,
            .block_tokens = block_tokens,
            .blocks = blocks.data(),
            .seq_lens = seq_lens.data(),
            .block_counts = block_counts.data(),
            .indptr = ragged ? indptr.data() : nullptr,
            .indices = ragged ? indices.data() : nullptr,
            .last_page_len = last_page_len.data()};
  }
  void spoil() {
    for (auto* numbers : {&blocks, &seq_lens, &block_counts, &indptr, &indices, &last_page_len})
      std::fill(numbers->begin(), numbers->end(), 7777777);
  }

  table_rows rows_of;
  int most, block_tokens;
  pinned<std::int32_t> blocks, seq_lens, block_counts, indptr, indices, last_page_len;
};

/// What a layer has of a step.
struct layer_step {
  explicit layer_step(int rows)
      : keys(to_size(rows) * key_row),
        values(keys.size()),
        queries(to_size(rows) * query_row),
        out(queries.size()) {
    for (auto& by : by_table) by.resize(out.size());
  }
  pinned<half> keys, values;
  pinned<float> queries, out;
  pinned<float> by_table[5];  // dense, until -1, ragged, united, folded
};

/// All rows that a sequence has appended, by layer.
struct history {
  sequence_id id{};
  std::vector<half> keys[layers], values[layers];
  int tokens() const { return static_cast<int>(keys[0].size() / key_row); }
};

template <class Selection, int Page, int Unit>
class engine {
  using pipeline = pipeline_by<Selection, Page, Unit>;
  static constexpr bool by_mass = selection_by_mass<Selection>;
  static constexpr int page = Page, in_unit = Unit == 0 ? Page : Unit, sink = Page, window = 16;
  static constexpr int max_tokens = 15 * Page;

 public:
  /// Tables of blocks of as many tokens, of pages where these are 0.
  engine(bool in_place_route, int block_tokens, report& checks)
      : in_place_(in_place_route),
        block_(block_tokens == 0 ? page : block_tokens),
        checks_(checks),
        backend_(compute_.get(), recall_.get()),
        pipeline_(settings(in_place_route), backend_, {&memory_, &memory_}) {
    for (int layer = 0; layer < layers; ++layer) {
      const bool united = (layer == 0 || in_place_route) && in_unit == page;
      auto& of_layer = tables_.emplace_back();
      for (const table_rows rows : {table_rows::by_head, table_rows::folded, table_rows::all_heads})
        if (united || rows != table_rows::all_heads)
          of_layer.emplace_back(rows, pipeline_.most_blocks(layer, rows, block_tokens), block_tokens);
    }
  }
  ~engine() {
    cudaStreamSynchronize(compute_.get());
    if (captured_ != nullptr) cudaGraphExecDestroy(captured_);
  }

  void open(int tokens) {
    history& h = sequences_.emplace_back();
    h.id = pipeline_.open();
    std::vector<layer_step> rows = rows_of({static_cast<int>(sequences_.size()) - 1}, tokens, tokens);
    auto step = pipeline_.begin_step({{h.id, tokens, step_phase::prefill}});
    for (int layer = 0; layer < layers; ++layer)
      step.append(layer,
                  {rows[to_size(layer)].keys, rows[to_size(layer)].values, rows[to_size(layer)].queries});
    step.end();
    pipeline_.synchronize();
  }
  void capture() {
    for (int layer = 0; layer < layers; ++layer) static_rows_.emplace_back(batch);
    device::check(cudaStreamBeginCapture(compute_.get(), cudaStreamCaptureModeThreadLocal),
                  "cudaStreamBeginCapture");
    auto step = pipeline_.begin_captured_step({.entries = batch});
    run_layers(step, static_rows_);
    step.end();
    cudaGraph_t graph = nullptr;
    device::check(cudaStreamEndCapture(compute_.get(), &graph), "cudaStreamEndCapture");
    device::check(cudaGraphInstantiate(&captured_, graph, 0), "cudaGraphInstantiate");
    device::check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
  /// A decode row of each of these sequences; all forms are compared.
  void step(const std::vector<int>& of, const std::string& name) {
    std::vector<step_input> inputs;
    for (const int i : of) inputs.push_back({sequences_[to_size(i)].id});
    std::vector<layer_step> rows = rows_of(of, 1, batch);
    for (auto& of_layer : tables_)
      for (table_memory& t : of_layer) t.spoil();
    if (captured_ != nullptr) {
      if (!pipeline_.plan(inputs)) throw usage_error("the ring is full");
      for (int layer = 0; layer < layers; ++layer) {
        static_rows_[to_size(layer)].keys = rows[to_size(layer)].keys;
        static_rows_[to_size(layer)].values = rows[to_size(layer)].values;
        static_rows_[to_size(layer)].queries = rows[to_size(layer)].queries;
      }
      device::check(cudaGraphLaunch(captured_, compute_.get()), "cudaGraphLaunch");
      pipeline_.synchronize();
      for (int layer = 0; layer < layers; ++layer) {
        rows[to_size(layer)].out = static_rows_[to_size(layer)].out;
        for (int i = 0; i < 5; ++i)
          rows[to_size(layer)].by_table[i] = static_rows_[to_size(layer)].by_table[i];
      }
    } else {
      auto step = pipeline_.begin_step(inputs);
      run_layers(step, rows);
      step.end();
      pipeline_.synchronize();
    }
    for (int layer = 0; layer < layers; ++layer) {
      const std::string what = name_of(name, layer);
      if (!of.empty()) compare(layer, of, rows[to_size(layer)], what);
      compare_ends(layer, of, what);
    }
  }
  /// A step that its only sequence leaves, which is released.
  void step_without(int nth, const std::string& name) {
    std::vector<layer_step> rows = rows_of({nth}, 1, batch);
    for (table_memory& t : tables_[0]) t.spoil();
    auto step = pipeline_.begin_step({{sequences_[to_size(nth)].id}});
    step.append(0, {rows[0].keys, rows[0].values, rows[0].queries});
    step.abandon(sequences_[to_size(nth)].id);
    step.correct(0);
    for (table_memory& t : tables_[0]) step.queue_tables(0, t.view());
    pipeline_.synchronize();
    compare_ends(0, {}, name_of(name, 0));
  }
  /// Times that heads of a sequence had tables of different lengths.
  int uneven() const { return uneven_; }
  bool refuses() {
    int refused = 0;
    const auto expect = [&](const char* words, const auto& call) {
      try {
        call();
      } catch (const usage_error& e) {
        refused += std::string(e.what()).find(words) != std::string::npos;
      }
    };
    std::vector<layer_step> rows = rows_of({0}, 1, 1);
    auto step = pipeline_.begin_step({{sequences_[0].id}});
    step.append(0, {rows[0].keys, rows[0].values, rows[0].queries});
    expect("not corrected yet", [&] { step.queue_tables(0, tables_[0][0].view()); });
    step.correct(0);
    auto few = tables_[0][0].view();
    few.max_blocks = 1;
    expect("room for 1", [&] { step.queue_tables(0, few); });
    few.sequences = 0;
    expect("for 0 sequences", [&] { step.queue_tables(0, few); });
    auto odd = tables_[0][0].view();
    odd.block_tokens = 3;
    expect("blocks of 3 tokens; choose a divisor of", [&] { step.queue_tables(0, odd); });
    auto unplaced = tables_[0][0].view();
    unplaced.indptr = nullptr;
    expect("indices without indptr", [&] { step.queue_tables(0, unplaced); });
    int expected = 5;
    if (in_unit < page) {
      expected += 2;
      odd.block_tokens = 0;
      expect("choose block_tokens of a unit at most", [&] { step.queue_tables(0, odd); });
      expect("take one by head, of block_tokens", [&] { pipeline_.most_blocks(0, table_rows::all_heads); });
    } else {
      ++expected;
      auto ragged = tables_[0][2].view();
      ragged.indptr = tables_[0][2].indptr.data();
      expect("no ragged form", [&] { step.queue_tables(0, ragged); });
    }
    if (!in_place_) {
      ++expected;
      expect("pages that differ by head", [&] { pipeline_.most_blocks(1, table_rows::all_heads); });
    }
    ++expected;
    step.abandon(sequences_[0].id);  // and nothing is left of the step
    expect("for one at least", [&] { step.queue_tables(0, few); });
    if (refused != expected) std::printf("FAILED %d refusals of %d\n", refused, expected);
    return refused == expected;
  }

 private:
  static typename pipeline::settings settings(bool in_place_route) {
    typename pipeline::settings s;
    s.model = {.layers = layers, .query_heads = query_heads, .kv_heads = kv_heads};
    s.budget = {.sink = sink, .window = window, .selected_units = by_mass ? 8 : 3};
    if constexpr (by_mass) s.selection.p = 0.5f;
    s.capacity.max_tokens = max_tokens;
    s.capacity.max_sequences = batch;
    s.correction.tau = 0.3f;
    if (in_place_route)
      s.route = in_place{};
    else
      s.route = resident{};
    return s;
  }
  /// Random rows, `tokens` of each sequence, with room for `most`.
  std::vector<layer_step> rows_of(const std::vector<int>& of, int tokens, int most) {
    std::vector<layer_step> rows;
    for (int layer = 0; layer < layers; ++layer) {
      layer_step& r = rows.emplace_back(most);
      std::size_t at = 0;
      for (const int i : of) {
        history& h = sequences_[to_size(i)];
        for (std::size_t n = 0; n < to_size(tokens) * key_row; ++n, ++at) {
          h.keys[layer].push_back(r.keys[at] = from_float<half>(random_.normal()));
          h.values[layer].push_back(r.values[at] = from_float<half>(random_.normal()));
        }
      }
      for (float& x : r.queries) x = random_.normal();
    }
    return rows;
  }
  std::string name_of(const std::string& name, int layer) const {
    return name + (in_place_ ? ", in place, layer " : ", with slots, layer ") + std::to_string(layer);
  }
  void run_layers(typename pipeline::step& step, std::vector<layer_step>& rows) {
    for (int layer = 0; layer < layers; ++layer) {
      layer_step& r = rows[to_size(layer)];
      step.append(layer, {r.keys, r.values, r.queries});  // of `batch` rows, of which the step may have fewer
      step.correct(layer);
      for (table_memory& t : tables_[to_size(layer)]) step.queue_tables(layer, t.view());
      const paged_tensor<half> kv = pipeline_.paged_kv(layer);
      const auto attend = [&](table_memory& t, form f) {
        attend_by_table<<<batch, query_heads, 0, compute_.get()>>>(
            tensor_of_ids(kv, t.view()), t.view(), f, r.queries.data(),
            pipeline_.configuration().attention.scale, r.by_table[static_cast<int>(f)].data());
        device::check(cudaGetLastError(), "attention by a table");
      };
      for (const form f : {form::dense, form::until_minus_one, form::ragged})
        attend(tables_[to_size(layer)][0], f);
      if (tables_[to_size(layer)].size() > 2) attend(tables_[to_size(layer)][2], form::united);
      attend(tables_[to_size(layer)][1], form::folded);
      step.attend(layer, r.out);
    }
  }
  void compare(int layer, const std::vector<int>& of, layer_step& r, const std::string& name) {
    constexpr const char* names[] = {"dense", "until -1", "ragged", "united", "folded"};
    for (const int i : {0, 1, 2, 4}) {
      results<float> out(
          pinned<float>(r.out.begin(), r.out.begin() + static_cast<long>(of.size() * query_row)));
      std::copy_n(r.by_table[i].begin(), out.device.size(), out.device.begin());
      checks_.close(std::string(names[i]) + ", " + name, out, 40);
    }
    const auto& folded = tables_[to_size(layer)][1].block_counts;
    for (std::size_t nth = 0; nth < of.size(); ++nth)
      uneven_ += folded[nth * kv_heads] != folded[nth * kv_heads + 1];
    compare_blocks(layer, of, name);
    if (tables_[to_size(layer)].size() > 2) compare_united(layer, of, r, name);
  }
  /// Rows of no sequence are empty, and rows end with -1.
  void compare_ends(int layer, const std::vector<int>& of, const std::string& name) {
    results<std::int32_t> ends(pinned<std::int32_t>{});
    for (table_memory& t : tables_[to_size(layer)])
      for (int row = 0; row < t.rows_count(); ++row) {
        const int nth = t.rows_of == table_rows::all_heads ? row
                        : t.rows_of == table_rows::folded  ? row / kv_heads
                                                           : row % batch;
        const bool there = nth < static_cast<int>(of.size());
        const int n = there ? sequences_[to_size(of[to_size(nth)])].tokens() : 0;
        ends.host.push_back(there ? (n - 1) % block_ + 1 : 0);
        ends.device.push_back(t.last_page_len[to_size(row)]);
        ends.host.push_back(there);
        ends.device.push_back(t.block_counts[to_size(row)] > 0);
        for (int i = t.block_counts[to_size(row)]; i < t.most; ++i) {
          ends.host.push_back(-1);
          ends.device.push_back(t.blocks[to_size(row) * to_size(t.most) + to_size(i)]);
        }
      }
    checks_.equal("ends of rows, " + name, ends);
  }
  /// Blocks by head, in ascending order, are those of the units that the report names; of slots, what is in
  /// them comes later.
  void compare_blocks(int layer, const std::vector<int>& of, const std::string& name) {
    if (layer > 0 && !in_place_) return;
    results<std::int32_t> blocks(pinned<std::int32_t>{});
    table_memory& t = tables_[to_size(layer)][0];
    const paged_tensor<half> kv = tensor_of_ids(pipeline_.paged_kv(layer), t.view());
    for (int head = 0; head < kv_heads; ++head)
      for (std::size_t nth = 0; nth < of.size(); ++nth) {
        const history& h = sequences_[to_size(of[nth])];
        const auto expected = blocks_of(layer, h, head);
        const int row = head * batch + static_cast<int>(nth);
        blocks.host.insert(blocks.host.end(), expected.begin(), expected.end());
        for (int i = 0; i < t.block_counts[to_size(row)]; ++i)
          blocks.device.push_back(block_in(kv, t.blocks[to_size(row * t.most + i)], head, h.keys[layer]));
        blocks.device.resize(blocks.host.size(), -1);
      }
    checks_.equal("blocks by head, " + name, blocks);
  }
  /// The block of a sequence's tokens whose first key is that of a block of a table; -1: none.
  static int block_in(const paged_tensor<half>& kv, int block, int head, const std::vector<half>& keys) {
    const half* const first = kv.keys + block * kv.block_stride + head * kv.head_stride;
    for (int b = 0; to_size(b * kv.block_tokens) * key_row < keys.size(); ++b)
      if (std::memcmp(first, keys.data() + to_size(b * kv.block_tokens) * key_row + head * head_dim,
                      head_dim * sizeof(half)) == 0)
        return b;
    return -1;
  }
  /// Blocks of a sequence's tokens that a head attends to.
  std::vector<std::int32_t> blocks_of(int layer, const history& h, int head) const {
    const int n = h.tokens();
    std::vector<std::int32_t> blocks;
    const auto add = [&](int first, int tokens) {
      for (int t = first; t < std::min(first + tokens, n); t += block_) blocks.push_back(t / block_);
    };
    if (layer == 0) {
      add(0, n);
      return blocks;
    }
    add(0, sink);
    const step_report report = pipeline_.report(layer)[h.id];
    const auto of_head = report.attended.subspan(report.attended.size() / kv_heads * to_size(head));
    for (int i = 0; i < report.attended_count[to_size(head)]; ++i)
      add(of_head[to_size(i)] * in_unit, in_unit);
    add(std::max(sink, std::max(0, n - window) / page * page), n);
    return blocks;
  }
  /// Attention to every block that some head attends to.
  void compare_united(int layer, const std::vector<int>& of, const layer_step& r, const std::string& name) {
    results<float> out(of.size() * query_row);
    for (std::size_t nth = 0; nth < of.size(); ++nth) {
      const history& h = sequences_[to_size(of[nth])];
      std::vector<std::int32_t> blocks;
      for (int head = 0; head < kv_heads; ++head) {
        const auto more = blocks_of(layer, h, head);
        blocks.insert(blocks.end(), more.begin(), more.end());
      }
      std::sort(blocks.begin(), blocks.end());
      blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
      for (int query_head = 0; query_head < query_heads; ++query_head) {
        const std::size_t at = nth * query_row + to_size(query_head * head_dim);
        double sum = 0.0;
        std::vector<double> sums(head_dim);
        for (const int b : blocks)
          for (int t = b * block_; t < std::min((b + 1) * block_, h.tokens()); ++t) {
            const std::size_t row = to_size(t) * key_row + to_size(query_head / group * head_dim);
            double score = 0.0;
            for (std::size_t i = 0; i < head_dim; ++i)
              score += double{r.queries[at + i]} * double{to_float(h.keys[layer][row + i])};
            const double weight = std::exp(score * double{pipeline_.configuration().attention.scale});
            sum += weight;
            for (std::size_t i = 0; i < head_dim; ++i)
              sums[i] += weight * double{to_float(h.values[layer][row + i])};
          }
        for (std::size_t i = 0; i < head_dim; ++i) {
          out.host[at + i] = static_cast<float>(sums[i] / sum);
          out.device[at + i] = r.by_table[3][at + i];
        }
      }
    }
    checks_.close("united, " + name, out, 40);
  }

  bool in_place_;
  int block_;
  report& checks_;
  random_numbers random_{5};
  device::owned_stream compute_, recall_;
  cuda_backend backend_;
  device::pinned_memory memory_;  // of both tiers, so that the test reads what is in slots
  pipeline pipeline_;
  std::vector<std::vector<table_memory>> tables_;  // by layer
  std::vector<history> sequences_;
  std::vector<layer_step> static_rows_;
  cudaGraphExec_t captured_ = nullptr;
  int uneven_ = 0;
};

/// Steps that are begun, and captured ones; false if what is to be refused is not, or if budgets by head have
/// been alike.
template <class Selection, int Page = 8, int Unit = 0>
bool run_all(bool in_place_route, int block_tokens, report& checks, const std::string& of_what) {
  const std::string what =
      of_what + (block_tokens == 0 ? "" : "blocks of " + std::to_string(block_tokens) + ", ");
  engine<Selection, Page, Unit> run(in_place_route, block_tokens, checks);
  run.open(70 * Page / 8);
  run.open(41 * Page / 8);
  const auto steps = [&](const std::string& name) {
    for (const std::vector<int>& of : {std::vector{0, 1}, {1}, {1, 0}, {}, {0, 2, 1}})
      run.step(of, what + name);
  };
  run.open(10 * Page);
  steps("begun");
  run.capture();
  const int before = run.uneven();
  steps("replayed");
  steps("replayed");
  const bool differ = run.uneven() > before;
  if (differ != selection_by_mass<Selection>)
    std::printf("FAILED %sheads of a sequence have %s lengths in captured steps\n", what.c_str(),
                differ ? "different" : "the same");
  const bool refuses = run.refuses();
  run.step_without(2, what + "abandoned");
  return refuses && differ == selection_by_mass<Selection>;
}

}  // namespace

int main() {
  skip_without_device();
  report checks;
  bool all_right = true;
  for (const bool in_place_route : {false, true}) {
    for (const int block_tokens : {0, 4})
      all_right = run_all<top_k>(in_place_route, block_tokens, checks, "") && all_right;
    for (const int block_tokens : {2, 8})
      all_right =
          run_all<top_p, 16, 8>(in_place_route, block_tokens, checks, "budgets by head, units of 8, ") &&
          all_right;
  }
  return checks.finish() == 0 && all_right ? 0 : 1;
}
