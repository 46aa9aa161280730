// A decode step of all layers, captured once and replayed for sequences that come, go, branch and are cut
// back: the same bits as steps that are begun one by one, whatever is queued ahead.
//
// With FREEKV_CARELESS=1, 2, 3 or 4: that other bits come where one of the orders that a captured step is
// made of is left out. With FREEKV_COUNTED=replays, fork, draft, short_draft, truncate, preempt or release:
// nothing but that, between cudaProfilerStart and cudaProfilerStop. With FREEKV_FAILED=1: that calls throw
// behind a kernel that has failed.
//
// Exit status: 0 all right, 1 not, 77 no device.
#include <cuda_profiler_api.h>

#include <deque>
#include <freekv/freekv.cuh>
#include <functional>
#include <optional>

#include "both_sides.cuh"

namespace capture_test {

using namespace freekv;

/// A CUDA backend; where `waits` is false its compute stream waits for no recall of steps that are not
/// captured.
struct test_backend {
  using policy_kind = backend_kind;
  using event = device::event;
  template <class State, class Settings>
  using stages = device::stages<State, Settings>;
  struct compute_stream {
    device::stream& stream;
    bool waits;
    void wait(const event& e) {
      if (waits || stream.is_capturing()) stream.wait(e);
    }
    event record() { return stream.record(); }
    void synchronize() const { stream.synchronize(); }
    bool is_capturing() const { return stream.is_capturing(); }
  };

  test_backend(cudaStream_t compute, cudaStream_t recall, bool waits_for_recall)
      : backend(compute, recall), waits(waits_for_recall) {}
  compute_stream compute() { return {backend.compute(), waits}; }
  device::stream& recall() { return backend.recall(); }
  operator cuda_backend&() { return backend; }
  cuda_backend backend;
  bool waits;
};

}  // namespace capture_test

namespace {

using namespace both_sides;
using namespace freekv;
using capture_test::test_backend;

constexpr int head_dim = 64, query_heads = 4, kv_heads = 2, layers = 3, page = 8, max_tokens = 160;
constexpr std::size_t key_row = kv_heads * head_dim, query_row = query_heads * head_dim;
constexpr int most_rows = 8, most_prompt_rows = 160;  // of a captured step

// The first layer keeps everything. Heads are corrected seldom, so that what recall has brought is what they
// attend to.
using pipeline = retrieval_pipeline<kv_shape<half, head_dim>, test_backend, page_size<page>, mean,
                                    cosine_drift, complete_first<1>, any_of<resident, in_place>>;

using freekv::to_size;

/// What a layer has of a step, in memory that both sides reach.
struct layer_rows {
  pinned<half> keys, values;
  pinned<float> queries, out;

  explicit layer_rows(int rows)
      : keys(to_size(rows) * key_row),
        values(keys.size()),
        queries(to_size(rows) * query_row),
        out(queries.size()) {}
};
using step_rows = std::vector<layer_rows>;

/// Rows by number.
class texts {
 public:
  explicit texts(random_numbers random)
      : keys_(random.normals<half>(rows * key_row)),
        values_(random.normals<half>(rows * key_row)),
        queries_(random.normals<float>(rows * query_row)) {}

  /// Queries turn slowly, so that what they select is not always new.
  void put(int sequence, int step, int layer, layer_rows& to, int row) const {
    const auto row_of = [&](int nth) { return to_size((sequence * 131 + nth * 7 + layer * 29) % rows); };
    const auto copy = [&](const auto& all, auto& into, std::size_t width) {
      std::copy_n(all.begin() + static_cast<std::ptrdiff_t>(row_of(step) * width), width,
                  into.begin() + static_cast<std::ptrdiff_t>(to_size(row) * width));
    };
    copy(keys_, to.keys, key_row);
    copy(values_, to.values, key_row);
    for (std::size_t i = 0; i < query_row; ++i)
      to.queries[to_size(row) * query_row + i] =
          0.2f * queries_[row_of(step) * query_row + i] + queries_[row_of(step / 4) * query_row + i];
  }

 private:
  static constexpr int rows = 499;
  pinned<half> keys_, values_;
  pinned<float> queries_;
};

/// Something that happens to sequences, which are named by the order in which they came.
struct happening {
  enum what { open, fork, release, truncate, preempt, restore, step } is = step;
  int sequence = 0;
  int number = 0;  // tokens that stay
  struct part {
    int sequence = 0, tokens = 1;
    step_phase phase = step_phase::decode;
  };
  std::vector<part> parts{};
};

/// Random happenings: every kind of them, pages that fill, several rows of one sequence.
std::vector<happening> random_trace(unsigned seed, int steps) {
  random_numbers random(seed);
  struct known {
    int tokens = 0;
    bool open = true, resident = true;
  };
  std::vector<known> all;
  std::vector<happening> trace;
  const auto live = [&](bool resident) {
    std::vector<int> found;
    for (int i = 0; i < static_cast<int>(all.size()); ++i)
      if (all[to_size(i)].open && (all[to_size(i)].resident || !resident)) found.push_back(i);
    return found;
  };
  const auto prompt = [&](int sequence, int tokens) {
    trace.push_back({.parts = {{sequence, tokens, step_phase::prefill}}});
    all[to_size(sequence)].tokens += tokens;
  };
  const auto open = [&] {
    trace.push_back({.is = happening::open});
    all.emplace_back();
    prompt(static_cast<int>(all.size()) - 1, random.between(50, 100));
  };
  open();
  open();
  for (int step = 0; step < steps; ++step) {
    const std::vector<int> resident = live(true), open_ones = live(false);
    const int one = open_ones[to_size(random.below(static_cast<int>(open_ones.size())))];
    known& k = all[to_size(one)];
    switch (random.below(9)) {
      case 0:
        if (open_ones.size() < 5 && resident.size() < 4) open();
        break;
      case 1:
        if (k.resident && open_ones.size() < 5 && resident.size() < 4) {
          trace.push_back({.is = happening::fork, .sequence = one});
          all.push_back(all[to_size(one)]);
        }
        break;
      case 2:
        if (k.resident) {
          k.tokens = std::max(1, k.tokens - (random.below(3) > 0 ? random.below(4) : random.below(30)));
          trace.push_back({.is = happening::truncate, .sequence = one, .number = k.tokens});
        }
        break;
      case 3:
        if (!k.resident && resident.size() < 4) {
          k.resident = true;
          trace.push_back({.is = happening::restore, .sequence = one});
        } else if (k.resident && resident.size() > 1) {
          k.resident = false;
          trace.push_back({.is = happening::preempt, .sequence = one});
        }
        break;
      case 4:
        if (k.resident && resident.size() > 2) {
          k.open = false;
          trace.push_back({.is = happening::release, .sequence = one});
        }
        break;
      default:
        break;
    }
    happening h;
    for (const int i : live(true))
      if (const int tokens = random.below(5) == 0   ? 2
                             : random.below(8) == 0 ? 0
                                                    : 1;
          all[to_size(i)].tokens + tokens <= max_tokens) {
        h.parts.push_back({i, tokens});
        all[to_size(i)].tokens += tokens;
      }
    if (random.below(2) == 0) std::reverse(h.parts.begin(), h.parts.end());
    trace.push_back(h);
  }
  return trace;
}

/// What runs a trace's decode steps.
enum class runs { begun, replayed, in_turn };

struct run_kind {
  runs steps = runs::begun;
  bool in_place_route = false;
  bool waits_for_recall = true;  // of a step that is begun, in the next
  bool changes_wait = true;      // of a sequence, for the recall of steps before
  bool synchronizes = false;     // behind each step
  bool prompts_too = false;      // are replayed
  bool reports = false;          // of each layer are queued in a captured step
  std::int64_t store_tokens = 0;
  int without_edge = -1;  // of those from the compute to the recall stream, in the order of the recall stream
};

/// The edges of a captured step from its compute stream to its recall stream. They are from what attends last
/// in a layer, which has two successors: selection for the next step, and later what the compute stream goes
/// on with.
std::vector<std::pair<cudaGraphNode_t, cudaGraphNode_t>> edges_to_recall(cudaGraph_t graph) {
  std::size_t count = 0;
  require(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &count), "cudaGraphGetEdges");
  std::vector<cudaGraphNode_t> from(count), to(count);
  std::vector<cudaGraphEdgeData> data(count);  // of launches that overlap
  require(cudaGraphGetEdges(graph, from.data(), to.data(), data.data(), &count), "cudaGraphGetEdges");
  std::vector<std::pair<cudaGraphNode_t, cudaGraphNode_t>> found;
  std::size_t nodes = 0;
  require(cudaGraphGetNodes(graph, nullptr, &nodes), "cudaGraphGetNodes");
  std::vector<cudaGraphNode_t> captured(nodes);
  require(cudaGraphGetNodes(graph, captured.data(), &nodes), "cudaGraphGetNodes");
  for (const cudaGraphNode_t next : captured)
    for (std::size_t i = 0; i < count; ++i) {
      const auto known = [&](const auto& edge) { return edge.first == from[i]; };
      if (to[i] == next && std::count(from.begin(), from.end(), from[i]) == 2 &&
          std::none_of(found.begin(), found.end(), known))
        found.emplace_back(from[i], next);
    }
  return found;
}

std::size_t nodes_of(cudaGraph_t graph, cudaGraphNodeType type) {
  std::size_t count = 0;
  require(cudaGraphGetNodes(graph, nullptr, &count), "cudaGraphGetNodes");
  std::vector<cudaGraphNode_t> nodes(count);
  require(cudaGraphGetNodes(graph, nodes.data(), &count), "cudaGraphGetNodes");
  return to_size(std::count_if(nodes.begin(), nodes.end(), [&](cudaGraphNode_t node) {
    cudaGraphNodeType is{};
    require(cudaGraphNodeGetType(node, &is), "cudaGraphNodeGetType");
    return is == type;
  }));
}

/// A pipeline on streams and memory of its own, and a captured step of it.
class engine {
 public:
  explicit engine(const texts& of, const run_kind& kind = {})
      : texts_(of),
        kind_(kind),
        backend_(compute_.get(), recall_.get(), kind.waits_for_recall),
        pipeline_(settings(kind), backend_, {&slow_, &fast_}) {
    for (int layer = 0; layer < layers; ++layer)
      captured_.emplace_back(kind.prompts_too ? most_prompt_rows : most_rows);
  }
  ~engine() {
    cudaStreamSynchronize(compute_.get());
    if (launched_ != nullptr) cudaGraphExecDestroy(launched_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
  }

  pipeline& of() { return pipeline_; }
  cudaGraph_t graph() const { return graph_; }
  cudaStream_t compute() const { return compute_.get(); }
  void replay() { device::check(cudaGraphLaunch(launched_, compute_.get()), "cudaGraphLaunch"); }

  void capture(int sequences = 6, int rows = most_rows) {
    capture_only(sequences, rows, graph_);
    if (kind_.without_edge >= 0) {
      const auto edges = edges_to_recall(graph_);
      const auto& [from, to] = edges[to_size(kind_.without_edge)];
      device::check(cudaGraphRemoveDependencies(graph_, &from, &to, nullptr, 1),
                    "cudaGraphRemoveDependencies");
    }
    device::check(cudaGraphInstantiate(&launched_, graph_, 0), "cudaGraphInstantiate");
  }
  void capture_only(int sequences, int rows, cudaGraph_t& graph) {
    device::check(cudaStreamBeginCapture(compute_.get(), cudaStreamCaptureModeThreadLocal),
                  "cudaStreamBeginCapture");
    pipeline::step step = kind_.prompts_too
                              ? pipeline_.begin_captured_step({.entries = sequences,
                                                               .rows = most_prompt_rows,
                                                               .pages = max_tokens / page,
                                                               .tokens = max_tokens,
                                                               .prompts = true})
                              : pipeline_.begin_captured_step({.entries = sequences, .rows = rows});
    run_layers(step, captured_, kind_.reports);
    // What the engine does with the last layer's output, beside its recall.
    device::check(cudaMemcpyAsync(tail_.data(), captured_.back().out.data(), tail_.size() * sizeof(float),
                                  cudaMemcpyDefault, compute_.get()),
                  "cudaMemcpyAsync");
    step.end();
    device::check(cudaStreamEndCapture(compute_.get(), &graph), "cudaStreamEndCapture");
  }

  /// The outputs of all its steps, one behind the other.
  pinned<float> run(const std::vector<happening>& trace) {
    bool replays = false;
    for (const happening& h : trace) {
      backend_.waits = h.is == happening::step ? kind_.waits_for_recall : kind_.changes_wait;
      switch (h.is) {
        case happening::open:
          names_.push_back(pipeline_.open());
          break;
        case happening::fork:
          names_.push_back(pipeline_.fork(id(h.sequence)));
          break;
        case happening::release:
          pipeline_.release(id(h.sequence));
          break;
        case happening::truncate:
          pipeline_.truncate(id(h.sequence), h.number);
          break;
        case happening::preempt:
          pipeline_.preempt(id(h.sequence));
          break;
        case happening::restore:
          pipeline_.restore(id(h.sequence));
          break;
        case happening::step: {
          const bool decodes =
              kind_.prompts_too || std::all_of(h.parts.begin(), h.parts.end(),
                                               [](const auto& p) { return p.phase == step_phase::decode; });
          replays = decodes && (kind_.steps == runs::replayed || (kind_.steps == runs::in_turn && !replays));
          step(h, replays);
          if (kind_.synchronizes) pipeline_.synchronize();
        }
      }
    }
    pipeline_.synchronize();
    pinned<float> all;
    for (const step_rows& rows : steps_)
      for (const layer_rows& of_layer : rows) all.insert(all.end(), of_layer.out.begin(), of_layer.out.end());
    return all;
  }

  /// One step, begun or replayed; its rows stay until the engine goes.
  void step(const happening& h, bool replays) {
    const std::vector<step_input> inputs = inputs_of(h);
    step_rows& rows = rows_of(h);
    if (replays) {
      if (launched_ == nullptr) capture();
      while (!pipeline_.plan(inputs)) pipeline_.wait();
      launch(rows);
    } else {
      pipeline::step begun = pipeline_.begin_step(inputs);
      run_layers(begun, rows);
      begun.end();
    }
  }
  std::vector<step_input> inputs_of(const happening& h) const {
    std::vector<step_input> inputs;
    for (const auto& part : h.parts) inputs.push_back({id(part.sequence), part.tokens, part.phase});
    return inputs;
  }
  /// Rows of a step that is planned next.
  step_rows& rows_of(const happening& h) {
    int count = 0;
    for (const auto& part : h.parts) count += part.tokens;
    step_rows& rows = steps_.emplace_back();
    for (int layer = 0; layer < layers; ++layer) {
      rows.emplace_back(count);
      int row = 0;
      for (const auto& part : h.parts)
        for (int t = 0; t < part.tokens; ++t, ++row)
          texts_.put(part.sequence, static_cast<int>(steps_.size()) + 3 * t, layer, rows.back(), row);
    }
    return rows;
  }
  /// The rows go to where the captured step reads them, and its outputs to the rows, in the order of the
  /// compute stream.
  void launch(step_rows& rows) {
    const auto copy = [&]<class T>(pinned<T>& to, const pinned<T>& from, std::size_t count) {
      if (count > 0)
        device::check(
            cudaMemcpyAsync(to.data(), from.data(), count * sizeof(T), cudaMemcpyDefault, compute_.get()),
            "cudaMemcpyAsync");
    };
    for (std::size_t i = 0; i < rows.size(); ++i) {
      copy(captured_[i].keys, rows[i].keys, rows[i].keys.size());
      copy(captured_[i].values, rows[i].values, rows[i].values.size());
      copy(captured_[i].queries, rows[i].queries, rows[i].queries.size());
    }
    replay();
    for (std::size_t i = 0; i < rows.size(); ++i) copy(rows[i].out, captured_[i].out, rows[i].out.size());
  }
  sequence_id id(int name) const { return names_[to_size(name)]; }

 private:
  static pipeline::settings settings(const run_kind& kind) {
    pipeline::settings s;
    s.model = {.layers = layers, .query_heads = query_heads, .kv_heads = kv_heads};
    s.budget = {.sink = page, .window = 2 * page, .selected_units = 3};
    s.capacity.max_tokens = max_tokens;
    s.capacity.max_sequences = 5;
    s.capacity.max_resident = 4;
    s.capacity.max_decode_rows = 2;
    s.correction.tau = 0.3f;
    s.capacity.store_tokens = kind.store_tokens;
    if (kind.in_place_route)
      s.route = in_place{};
    else
      s.route = resident{};
    return s;
  }
  void run_layers(pipeline::step& step, step_rows& rows, bool reports = false) {
    for (int layer = 0; layer < layers; ++layer) {
      layer_rows& r = rows[to_size(layer)];
      step.append(layer, {.keys = r.keys, .values = r.values, .queries = r.queries});
      step.attend(layer, r.out);
      if (reports) pipeline_.queue_report(layer, side_);
    }
  }

  const texts& texts_;
  run_kind kind_;
  device::owned_stream compute_, recall_, own_side_;
  device::stream side_{own_side_.get()};
  test_backend backend_;
  device::device_memory fast_;
  device::pinned_memory slow_;
  pipeline pipeline_;
  std::vector<sequence_id> names_;
  std::deque<step_rows> steps_;
  step_rows captured_;
  pinned<float> tail_ = pinned<float>(most_rows * query_row);
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t launched_ = nullptr;
};

/// Whether `call` throws an `Error` whose sentence has `words`; what it does else is printed.
template <class Error>
bool refused(const char* what, const char* words, const std::function<void()>& call) {
  std::string got = "nothing";
  try {
    call();
  } catch (const Error& e) {
    got = e.what();
    if (got.find(words) != std::string::npos) {
      std::printf("ok     %s: %s\n", what, got.c_str());
      return true;
    }
  } catch (const error& e) {
    got = std::string("another error, ") + e.what();
  }
  std::printf("FAILED %s: %s\n", what, got.c_str());
  return false;
}

const happening two_open[] = {{.is = happening::open},
                              {.is = happening::open},
                              {.parts = {{0, 90, step_phase::prefill}, {1, 61, step_phase::prefill}}}};
std::vector<happening> decode_steps(int count) {
  std::vector<happening> trace(std::begin(two_open), std::end(two_open));
  for (int step = 0; step < count; ++step) trace.push_back({.parts = {{0, 1}, {1, 1 + step % 2}}});
  return trace;
}

/// The outputs of steps of which as many are planned as the ring takes before the first of them is launched.
pinned<float> planned_ahead(const texts& source, int steps, report& checks) {
  engine run(source);
  const std::vector<happening> trace = decode_steps(steps);
  run.run({trace.begin(), trace.begin() + 3});
  run.capture();
  constexpr int depth = device::step_ring::depth;
  results<std::int32_t> tokens(pinned<std::int32_t>{});
  results<std::uint8_t> planned(pinned<std::uint8_t>{});
  for (int first = 0; first < steps; first += depth) {
    std::vector<step_rows*> rows;
    for (int step = first; step < first + depth; ++step) {
      rows.push_back(&run.rows_of(trace[to_size(3 + step)]));
      planned.host.push_back(true);
      planned.device.push_back(run.of().plan(run.inputs_of(trace[to_size(3 + step)])));
    }
    // There is no room, and nothing has happened.
    tokens.host.push_back(run.of().tokens(run.id(0)));
    planned.host.push_back(false);
    planned.device.push_back(run.of().plan(run.inputs_of(trace[3])));
    tokens.device.push_back(run.of().tokens(run.id(0)));
    for (step_rows* of_step : rows) run.launch(*of_step);
    run.of().wait();  // for one of them, or more
    run.of().synchronize();
  }
  checks.equal("plans of a ring that is full", planned);
  checks.equal("tokens behind a plan that was refused", tokens);
  return run.run({});
}

bool refuses_what_has_no_order(const texts& source) {
  bool all = true;
  const auto expect = [&](bool refusal) { all = all && refusal; };
  const std::vector<happening> trace = decode_steps(4);
  const auto prepared = [&](engine& run, int rows = most_rows) {
    run.run({trace.begin(), trace.begin() + 4});
    run.capture(2, rows);
  };
  const auto plan = [](engine& run, const happening& h) { return run.of().plan(run.inputs_of(h)); };
  {
    engine run(source);
    prepared(run);
    run.replay();
    run.of().synchronize();
    expect(refused<replay_error>("a replay without a plan", "before it was planned",
                                 [&] { (void)plan(run, trace[4]); }));
    expect(refused<replay_error>("a step behind it", "has to go", [&] { run.step(trace[4], false); }));
  }
  {
    engine run(source);
    prepared(run, 2);
    expect(refused<usage_error>("more rows than any captured step takes", "no captured step takes 3 rows",
                                [&] { (void)plan(run, trace[4]); }));
    expect(plan(run, trace[3]));
    run.replay();
    run.of().release(run.id(0));
    run.of().synchronize();
    run.of().report(1);  // all is in order
  }
  {
    engine run(source);
    prepared(run);
    expect(plan(run, trace[3]));
    run.of().release(run.id(0));
    run.of().synchronize();
    expect(refused<replay_error>("a release before the replay of a step planned", "a sequence changed",
                                 [&] { run.of().report(1); }));
  }
  {
    engine run(source);
    prepared(run);
    expect(plan(run, trace[3]));
    run.step(trace[3], false);
    run.of().synchronize();
    expect(refused<replay_error>("a step begun before the replay of one planned",
                                 "begun, or a sequence changed, before its replay",
                                 [&] { run.of().report(1); }));
  }
  {
    engine run(source, {.store_tokens = 160});
    prepared(run);
    const int before = run.of().tokens(run.id(0));
    expect(plan(run, {.parts = {{0, 2}}}) && plan(run, {.parts = {{0, 2}}}));
    expect(refused<pool_exhausted>("a plan that the store has no page for", "page pool exhausted", [&] {
      (void)plan(run, {.parts = {{1, 1}, {0, 2}}});
    }));
    for (int i = 0; i < 2; ++i) run.replay();
    run.of().synchronize();
    expect(run.of().tokens(run.id(0)) == before + 4);
    run.of().report(1);  // both have happened, and no more
  }
  {
    engine run(source);
    prepared(run);
    run.run({{.is = happening::open}});
    for (int i = 0; i < device::step_ring::depth; ++i) expect(plan(run, trace[3]));
    expect(refused<usage_error>("a wait for replays that are not queued", "no replay of them is queued",
                                [&] { run.of().wait(); }));
    const happening prompt{.parts = {{2, 40, step_phase::prefill}}};
    const std::int32_t pages = run.of().free_pages();
    expect(refused<usage_error>("a step begun while the ring is full of them", "no replay of them is queued",
                                [&] { (void)run.of().begin_step(run.inputs_of(prompt)); }));
    const bool unchanged = run.of().tokens(run.id(2)) == 0 && run.of().free_pages() == pages;
    if (!unchanged) std::printf("FAILED a step that was refused has changed its sequence\n");
    expect(unchanged);
    for (int i = 0; i < device::step_ring::depth; ++i) run.replay();
    run.run({prompt});
    expect(run.of().tokens(run.id(2)) == 40);
  }
  {
    engine run(source);
    prepared(run);
    require(cudaStreamBeginCapture(run.compute(), cudaStreamCaptureModeThreadLocal),
            "cudaStreamBeginCapture");
    expect(refused<usage_error>("a step that is begun in a capture", "begin_captured_step",
                                [&] { (void)run.of().begin_step({{run.id(0)}}); }));
    expect(refused<usage_error>("a capture for no sequence", "entries is 0",
                                [&] { (void)run.of().begin_captured_step({}); }));
    expect(refused<usage_error>("a capture for 2^31 pages", "capture for fewer", [&] {
      (void)run.of().begin_captured_step({.entries = 1 << 12, .pages = 1 << 19});
    }));
    expect(refused<usage_error>("a capture for more sequences than a grid has room for", "entries is 40000",
                                [&] { (void)run.of().begin_captured_step({.entries = 40000}); }));
    const auto refuses_changes = [&] {
      const std::pair<const char*, std::function<void()>> calls[] = {
          {"fork", [&] { (void)run.of().fork(run.id(0)); }},
          {"truncate", [&] { run.of().truncate(run.id(0), 20); }},
          {"preempt", [&] { run.of().preempt(run.id(0)); }},
          {"release", [&] { run.of().release(run.id(0)); }},
          {"report", [&] { run.of().report(1); }}};
      for (const auto& [name, call] : calls)
        expect(refused<usage_error>((std::string(name) + " in a capture of the engine's").c_str(),
                                    "the compute stream is captured", call));
    };
    refuses_changes();
    auto step = run.of().begin_captured_step({.entries = 2});
    expect(refused<usage_error>("a report in a capture", "is being captured", [&] { run.of().report(1); }));
    expect(refused<usage_error>("a plan in a capture", "has not ended", [&] { (void)plan(run, trace[3]); }));
    step.abandon();
    refuses_changes();
    cudaGraph_t graph = nullptr;
    require(cudaStreamEndCapture(run.compute(), &graph), "cudaStreamEndCapture");
    cudaGraphDestroy(graph);
    run.step(trace[3], true);  // as if nothing had been
  }
  return all;
}

/// A graph that was captured for less than the step brings, where another is large enough.
bool refuses_a_small_graph(const texts& source) {
  engine run(source);
  const std::vector<happening> trace = decode_steps(4);
  run.run({trace.begin(), trace.begin() + 4});
  run.capture(2, 2);
  // One that would be large enough is captured, and not launched.
  cudaGraph_t graph = nullptr;
  run.capture_only(2, 4, graph);
  cudaGraphDestroy(graph);
  if (!run.of().plan(run.inputs_of(trace[4]))) return false;
  run.replay();
  run.of().synchronize();
  return refused<replay_error>("a replay of too small a graph", "captured for less",
                               [&] { (void)run.of().plan(run.inputs_of(trace[3])); });
}

/// A capture that was abandoned is no graph that a step could be planned for.
bool abandons_a_capture(const texts& source) {
  engine run(source);
  const std::vector<happening> trace = decode_steps(4);
  run.run({trace.begin(), trace.begin() + 4});
  run.capture(2, 2);
  require(cudaStreamBeginCapture(run.compute(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  (void)run.of().begin_captured_step({.entries = 2, .rows = 4}).abandon();
  cudaGraph_t graph = nullptr;
  require(cudaStreamEndCapture(run.compute(), &graph), "cudaStreamEndCapture");
  cudaGraphDestroy(graph);
  return refused<usage_error>("a plan of what only an abandoned capture would take",
                              "no captured step takes 3 rows",
                              [&] { (void)run.of().plan(run.inputs_of(trace[4])); });
}

/// Settings whose steps may have more pages than launches count.
bool refuses_too_many_pages() {
  const device::owned_stream compute, recall;
  test_backend backend(compute.get(), recall.get(), true);
  pipeline::settings s;
  s.model = {.layers = 1, .query_heads = query_heads, .kv_heads = kv_heads};
  s.capacity.max_tokens = 1 << 30;
  s.capacity.max_sequences = 16;
  s.capacity.store_tokens = 1 << 20;
  return refused<settings_error>("settings of 2^31 pages in a step",
                                 "16 resident sequences of 134217728 pages",
                                 [&] { (void)pipeline::footprint(s, backend); });
}

/// Reports that are queued in a captured step, those of the first layer before anything recalls, are those
/// that are read behind its replay.
bool reports_of_replays(const texts& source, report& checks) {
  engine run(source, {.reports = true});
  const std::vector<happening> trace = decode_steps(8);
  run.run({trace.begin(), trace.begin() + 4});
  bool recalls = false;
  const auto numbers_of = [&](const auto& reports) {
    pinned<std::int32_t> all;
    all.push_back(reports.flagged_heads());
    for (int name : {0, 1}) {
      const step_report one = reports[run.id(name)];
      recalls = recalls || std::any_of(one.recalled.begin(), one.recalled.end(), [](int n) { return n > 0; });
      for (const auto& numbers : {one.recalled, one.promoted, one.attended_count, one.attended})
        all.insert(all.end(), numbers.begin(), numbers.end());
    }
    return all;
  };
  for (std::size_t step = 4; step < trace.size(); ++step) {
    run.step(trace[step], true);
    run.of().synchronize();
    for (int layer = 0; layer < layers; ++layer) {
      results<std::int32_t> reports(pinned<std::int32_t>{});
      reports.device = numbers_of(run.of().queued_report(layer));
      reports.host = numbers_of(run.of().report(layer));
      checks.equal("a captured step's report, layer " + std::to_string(layer), reports);
    }
  }
  if (!recalls) std::printf("FAILED no captured step's report has a recall\n");
  return recalls;
}

/// Steps, and between them truncations that drop a selection.
std::vector<happening> cut_steps() {
  std::vector<happening> trace(std::begin(two_open), std::end(two_open));
  for (int step = 0; step < 8; ++step) {
    trace.push_back({.parts = {{0, 1}, {1, 1}}});
    trace.push_back({.is = happening::truncate, .sequence = step % 2, .number = 60 - step});
  }
  return trace;
}

/// Whether some run without one of the orders gives other outputs than one with them, or fails; under an
/// interpreter that draws orders. The first two are the recall stream's waits for the attention of a layer.
bool careless(const texts& source, int order) {
  const bool cuts = order > layers;
  const auto trace = cuts ? cut_steps() : decode_steps(12);
  const run_kind kinds[] = {{.steps = runs::replayed, .without_edge = 0},
                            {.steps = runs::replayed, .without_edge = 1},
                            {.steps = runs::in_turn, .waits_for_recall = false},
                            {.changes_wait = false}};
  static_assert(std::size(kinds) == layers + 1);
  constexpr const char* names[] = {
      "the recall stream's wait for layer 1", "the recall stream's wait for layer 2",
      "a replay's wait for the recall of steps that were begun", "a truncation's wait for recall"};
  const pinned<float> expected = engine(source, {.synchronizes = true}).run(trace);
  if (engine(source, {.steps = runs::in_turn}).run(trace) != expected) {
    std::printf("FAILED: other outputs with all orders\n");
    return false;
  }
  std::string seen;
  for (int run = 1; run <= 40 && seen.empty(); ++run) try {
      if (engine(source, kinds[order - 1]).run(trace) != expected)
        seen = "other outputs in run " + std::to_string(run);
    } catch (const device_error& e) {
      seen = e.what();
    }
  std::printf("%s without %s: %s\n", seen.empty() ? "FAILED" : "ok    ", names[order - 1],
              seen.empty() ? "the same outputs in 40 runs" : seen.c_str());
  return !seen.empty();
}

/// Nothing between the profiler's marks but replays, or calls that change sequences while steps are under
/// way.
int count_alone(const texts& source, const std::string& what) {
  engine run(source);
  const std::vector<happening> trace = decode_steps(12);
  run.run({trace.begin(), trace.begin() + 6});
  run.capture();
  run.step(trace[6], true);   // of two rows of the second; it waits for the recall of those that were begun
  if (what == "short_draft")  // of a sequence of less than a page
    run.run({{.is = happening::open}, {.parts = {{2, 5, step_phase::prefill}}}, {.parts = {{2, 2}}}});
  run.of().synchronize();  // so that the ring has room for four
  require(cudaProfilerStart(), "cudaProfilerStart");
  if (what == "replays") {
    for (int step = 7; step < 11; ++step) run.step(trace[to_size(step)], true);
  } else if (what == "fork") {
    (void)run.of().fork(run.id(0));
  } else if (what == "draft") {
    run.of().truncate(run.id(1), run.of().tokens(run.id(1)) - 1);
  } else if (what == "short_draft") {
    run.of().truncate(run.id(2), 6);
  } else if (what == "truncate") {
    run.of().truncate(run.id(0), 40);
  } else if (what == "preempt") {
    run.of().preempt(run.id(0));
    run.of().restore(run.id(0));
  } else if (what == "release") {
    run.of().release(run.id(0));
  }
  require(cudaProfilerStop(), "cudaProfilerStop");
  run.of().synchronize();
  return 0;
}

__global__ void end_in_error() { __trap(); }

/// Behind an error that CUDA keeps: every call that reaches the device throws it, a step can be abandoned,
/// and what is left of the pipeline goes without a word.
bool fails_behind_a_failure(const texts& source) {
  engine run(source);
  run.run(decode_steps(3));
  run.run({{.is = happening::open}, {.parts = {{2, 20, step_phase::prefill}}}});
  run.capture();
  const happening next = decode_steps(3).back();
  pipeline& of = run.of();
  of.preempt(run.id(2));
  const sequence_id first = run.id(0);
  const auto inputs = run.inputs_of(next);
  pipeline::step begun = of.begin_step(inputs);
  step_rows& rows = run.rows_of(next);
  end_in_error<<<1, 1, 0, run.compute()>>>();
  (void)cudaStreamSynchronize(run.compute());

  bool right = true;
  const auto throws = [&](const char* name, const auto& call) {
    std::string seen = "nothing";
    try {
      call();
    } catch (const device_error& e) {
      seen = e.what();
      if (e.status != cudaSuccess) return;
    } catch (const error& e) {
      seen = e.what();
    }
    std::printf("FAILED: %s behind an error of the device throws %s\n", name, seen.c_str());
    right = false;
  };
  layer_rows& r = rows[0];
  throws("append", [&] { begun.append(0, {.keys = r.keys, .values = r.values, .queries = r.queries}); });
  right &= begun.abandon() && !begun;
  throws("synchronize", [&] { of.synchronize(); });
  throws("report", [&] { (void)of.report(1); });
  throws("fork", [&] { (void)of.fork(first); });
  throws("truncate", [&] { of.truncate(first, of.tokens(first) - 3); });
  throws("restore", [&] { of.restore(run.id(2)); });
  throws("keeping a prefix in a file", [&] {
    of.save_prefix(
        of.keep_prefix(first, page), [](std::span<const std::byte>) {}, 1);
  });
  throws("a replay", [&] {
    if (of.plan(inputs)) run.replay();
  });
  throws("a step", [&] {
    pipeline::step step = of.begin_step(inputs);
    step.append(0, {.keys = r.keys, .values = r.values, .queries = r.queries});
  });
  throws("release", [&] { of.release(first); });
  std::printf("%s calls behind an error of the device\n", right ? "ok    " : "FAILED");
  return right;
}

/// Kernels of a captured step and what else it has, held to what it had when this was written.
bool has_few_nodes(const texts& source) {
  engine run(source);
  run.run(decode_steps(1));
  run.capture();
  const std::size_t kernels = nodes_of(run.graph(), cudaGraphNodeTypeKernel);
  const std::size_t copies = nodes_of(run.graph(), cudaGraphNodeTypeMemcpy);
  const std::size_t others = nodes_of(run.graph(), cudaGraphNodeTypeEventRecord) +
                             nodes_of(run.graph(), cudaGraphNodeTypeWaitEvent) +
                             nodes_of(run.graph(), cudaGraphNodeTypeHost) +
                             nodes_of(run.graph(), cudaGraphNodeTypeMemset);
  const std::size_t edges = edges_to_recall(run.graph()).size();
  // An upload and copies of shared rows; of a layer that keeps everything append and attention; of another
  // five besides, of correction and speculation.
  constexpr std::size_t most = 2 + 2 * layers + 5 * (layers - 1);
  const bool few = kernels <= most && copies == 1 && others == 0 && edges == layers - 1;
  std::printf(
      "%s a captured step of %d layers has %zu kernels, %zu of them at most, %zu copies, the test's one, "
      "%zu other nodes, %zu orders of streams\n",
      few ? "ok    " : "FAILED", layers, kernels, most, copies, others, edges);
  return few;
}

}  // namespace

int main() {
  skip_without_device();
  const texts source(random_numbers(1));
  if (const char* const order = std::getenv("FREEKV_CARELESS"))
    return careless(source, std::atoi(order)) ? 0 : 1;
  if (const char* const what = std::getenv("FREEKV_COUNTED")) return count_alone(source, what);
  if (std::getenv("FREEKV_FAILED") != nullptr) return fails_behind_a_failure(source) ? 0 : 1;
  report checks;
  const char* const text = std::getenv("FREEKV_SEED");
  const unsigned seed = text == nullptr ? 1 : static_cast<unsigned>(std::atoi(text));
  for (const bool in_place_route : {false, true}) {
    const auto trace = random_trace(seed * 2 + in_place_route, 16);
    const std::string route = in_place_route ? "in place" : "with slots";
    const auto run = [&](run_kind kind) {
      kind.in_place_route = in_place_route;
      return engine(source, kind).run(trace);
    };
    results<float> out(run({.synchronizes = true}));
    out.device = run({.steps = runs::replayed});
    checks.equal("replayed steps " + route, out);
    out.device = run({.steps = runs::in_turn});
    checks.equal("replayed and begun steps in turn " + route, out);
    if (in_place_route) continue;
    out.device = run({.steps = runs::replayed, .prompts_too = true});
    checks.equal("replayed steps and prompts " + route, out);
  }
  results<float> ahead(engine(source, {.synchronizes = true}).run(decode_steps(12)));
  ahead.device = planned_ahead(source, 12, checks);
  checks.equal("steps that are planned ahead", ahead);
  const bool right = refuses_what_has_no_order(source) & refuses_a_small_graph(source) &
                     abandons_a_capture(source) & refuses_too_many_pages() &
                     reports_of_replays(source, checks) & has_few_nodes(source);
  return checks.finish() == 0 && right ? 0 : 1;
}
