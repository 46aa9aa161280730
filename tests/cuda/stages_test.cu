// Parts of the CUDA backend on their own, where a whole step does not reach: teams of lanes against one lane,
// selection of up to 1024 among 65,536 scores with ties, and from pages' summaries on, corrections by mass at
// their threshold, every way that a slice is copied, and what is refused.
//
// Exit status: 0 all right, 1 not, 77 no device.
#include <algorithm>
#include <array>
#include <freekv/freekv.cuh>
#include <functional>
#include <numeric>

#include "both_sides.cuh"

namespace {

using namespace both_sides;
using namespace freekv;
using namespace freekv::detail;
using device::lane_team;

using freekv::to_size;
std::string text(int n) { return std::to_string(n); }
// ---- teams ----

/// What each call of a team gives for one pack of random numbers: (calls, width).
template <class Team>
__global__ void call_team(const float* in, const half* halves, const std::uint8_t* codes, const float* table,
                          float* out) {
  const Team team;
  constexpr int width = Team::width;
  int call = 0;
  const auto give = [&](const typename Team::pack& x) { team.store(out + call++ * width, x); };
  const auto a = team.load(in), b = team.load(in + width);
  give(a + b);
  give(a - b);
  give(a * b);
  give(team.load(halves));
  give(team.load(halves + 1));  // no lane's address is a multiple of 4
  give(team.maximum(a, b));
  give(team.minimum(a, b));
  give(team.select_greater(a, b, b, a));
  give(team.template load_codes<3>(codes, 0));
  give(team.template load_codes<4>(codes, width));
  give(team.lookup(table, codes));
  give(typename Team::pack(team.sum(a)));
  give(typename Team::pack(team.max(a)));
  typename Team::pack many[width];
  for (int i = 0; i < width; ++i) many[i] = team.load(in + i * width);
  give(team.sum_each(many));
  for (int i = team.lane(); i < width; i += team.lanes()) out[call * width + i] = static_cast<float>(i);
  ++call;
  team.widen(halves, out + call++ * width, width);
  team.widen(halves + 1, out + call++ * width, width);
  team.widen(in, out + call * width, 2 * width);
  call += 2;
  alignas(16) __shared__ std::byte staging[3 * width * sizeof(float) + 16];
  for (int behind = 0; behind < 4; ++behind, call += 3) {
    const auto* const from = reinterpret_cast<const std::byte*>(in + behind);
    const std::byte* const staged = team.stage(from, (3 * width - behind) * sizeof(float), staging);
    team.sync();
    for (int i = team.lane(); i < 3 * width - behind; i += team.lanes())
      out[call * width + i] = reinterpret_cast<const float*>(staged)[i];
    team.sync();
  }
}

template <int Lanes, int Share>
void team_calls(report& checks, random_numbers& random) {
  using team_type = lane_team<Lanes, Share>;
  constexpr int width = team_type::width, calls = 31;
  pinned<float> in = random.normals<float>(to_size(width * (width + 1))), table = random.normals<float>(256);
  in[0] = -0.0f;
  in[1] = std::numeric_limits<float>::quiet_NaN();
  const bool with_nan = Lanes * Share > 2;
  if (!with_nan) in[1] = 1.0f;
  pinned<half> halves = random.normals<half>(to_size(width + 2));
  pinned<std::uint8_t> codes(to_size(2 * width + 8));
  for (auto& code : codes) code = static_cast<std::uint8_t>(random.bits());
  results<float> out(to_size(calls * width), -9.0f);
  call_team<team_type><<<1, Lanes>>>(in.data(), halves.data(), codes.data(), table.data(), out.device.data());
  require(cudaGetLastError(), "kernel launch");
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");

  // Element by element with one lane; sums with the lanes paired by falling distance.
  const scalar_team one;
  float* to = out.host.data();
  const auto each = [&](const auto& value) {
    for (int i = 0; i < width; ++i) *to++ = value(i);
  };
  const auto sum = [&](const float* x) {
    float lanes[Lanes];
    for (int lane = 0; lane < Lanes; ++lane) {
      lanes[lane] = x[lane * Share];
      for (int i = 1; i < Share; ++i) lanes[lane] += x[lane * Share + i];
    }
    for (int distance = Lanes / 2; distance > 0; distance /= 2)
      for (int lane = 0; lane < distance; ++lane) lanes[lane] += lanes[lane + distance];
    return lanes[0];
  };
  const float *a = in.data(), *b = a + width;
  each([&](int i) { return a[i] + b[i]; });
  each([&](int i) { return a[i] - b[i]; });
  each([&](int i) { return a[i] * b[i]; });
  each([&](int i) { return to_float(halves[to_size(i)]); });
  each([&](int i) { return to_float(halves[to_size(i + 1)]); });
  each([&](int i) { return one.maximum(a[i], b[i]); });
  each([&](int i) { return one.minimum(a[i], b[i]); });
  each([&](int i) { return a[i] > b[i] ? b[i] : a[i]; });
  each([&](int i) { return one.load_codes<3>(codes.data(), i); });
  each([&](int i) { return one.load_codes<4>(codes.data(), width + i); });
  each([&](int i) { return table[codes[to_size(i)]]; });
  each([&](int) { return sum(a); });
  each([&](int) {
    return std::accumulate(a, a + width, a[0], [&](float x, float y) { return one.maximum(x, y); });
  });
  each([&](int i) { return sum(a + i * width); });
  each([&](int i) { return static_cast<float>(i); });
  each([&](int i) { return to_float(halves[to_size(i)]); });
  each([&](int i) { return to_float(halves[to_size(i + 1)]); });
  each([&](int i) { return a[i]; });
  each([&](int i) { return b[i]; });
  for (int behind = 0; behind < 4; ++behind, to += 3 * width)
    std::copy(in.data() + behind, in.data() + 3 * width, to);
  checks.equal("a team of " + text(Lanes) + " lanes with " + text(Share) + " numbers each", out);
}

// ---- codecs ----

/// A slice as bytes, and its rows from `first` on as they come back.
template <int HeadDim, class Element, class Codec>
struct coded_slice {
  Codec codec;
  head_slice<const Element> from;
  int tokens, first;
  std::byte* stored;
  head_slice<Element> back;
  template <class Team>
  FREEKV_HD void operator()(Team team) const {
    codec.template encode<HeadDim>(team, from, tokens, stored);
    team.sync();
    codec.template decode<HeadDim>(team, stored, tokens, row_range{first, tokens - first}, back);
  }
};
template <int HeadDim, class Body>
__global__ void run_row_team(Body body) {
  body(device::row_team<HeadDim>{});
}

template <int HeadDim, class Element, class Codec>
void codec_lanes(report& checks, random_numbers& random, const Codec& codec, bool infinite) {
  const int tokens = 8 * random.between(1, 3), first = random.below(tokens), stride = HeadDim + 8;
  pinned<Element> from = random.normals<Element>(to_size(2 * tokens * stride));
  if (infinite) from[to_size(random.below(HeadDim))] = from_float<Element>(infinity);
  results<std::byte> stored(codec.bytes({tokens, HeadDim}, sizeof(Element)));
  results<Element> back(from.size());
  const auto of = [&](std::byte* bytes, Element* rows) {
    return coded_slice<HeadDim, Element, Codec>{codec,  {from.data(), from.data() + tokens * stride, stride},
                                                tokens, first,
                                                bytes,  {rows, rows + tokens * stride, stride}};
  };
  of(stored.host.data(), back.host.data())(scalar_team{});
  run_row_team<HeadDim>
      <<<1, device::row_team<HeadDim>::lane_count>>>(of(stored.device.data(), back.device.data()));
  require(cudaGetLastError(), "kernel launch");
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  const std::string what = std::string(Codec::name) + " by " + text(device::row_team<HeadDim>::lane_count) +
                           " lanes, head_dim " + text(HeadDim);
  if (!infinite) checks.equal(what + ": stored bytes", stored);  // a NaN has many encodings
  checks.equal(what + ": read back", back);
}
/// The codec of one slice, with its bytes.
struct thin_slices : key_channels::slice_codec {
  static constexpr std::string_view name = key_channels::name;
  std::size_t bytes(kv_extent page, std::size_t element_bytes) const {
    return policy.bytes(page, element_bytes);
  }
};
template <int HeadDim, class Element>
void channels_by_lanes(report& checks, random_numbers& random, bool infinite) {
  const float pruned = infinite ? 0.4f : 0.7f;
  const int kept = key_channels{pruned}.kept(HeadDim);
  pinned<std::uint8_t> lists(2 * HeadDim / 8);  // of two heads, of which the second is used
  for (std::uint8_t& byte : lists) byte = 0;
  for (int left = kept; left > 0;) {
    const int at = HeadDim + random.below(HeadDim), bit = 1 << at % 8;
    std::uint8_t& byte = lists[to_size(at / 8)];
    if ((byte & bit) == 0) --left;
    byte = static_cast<std::uint8_t>(byte | bit);
  }
  const key_channels codec{pruned, {lists.data(), 1, 2, HeadDim}};
  codec_lanes<HeadDim, Element>(checks, random, thin_slices{codec.at({.head = 1, .kv_heads = 2})}, infinite);
}

template <int HeadDim, class Element>
void codecs_by_lanes(report& checks, random_numbers& random) {
  for (const bool infinite : std::array{false, true}) {
    codec_lanes<HeadDim, Element>(checks, random, cast<fp8_e4m3>{}, infinite);
    codec_lanes<HeadDim, Element>(checks, random, int8_token{}, infinite);
    codec_lanes<HeadDim, Element>(checks, random, int8_channel{}, infinite);
    codec_lanes<HeadDim, Element>(checks, random, int4_channel{}, infinite);
    channels_by_lanes<HeadDim, Element>(checks, random, infinite);
  }
}

// ---- selection ----

template <int Threads>
__global__ void select_largest(const float* scores, int count, int k, std::int32_t* out,
                               std::int32_t* written) {
  __shared__ typename device::radix_select<Threads>::storage storage;
  const device::radix_select<Threads> select(storage);
  select.largest([&](int i) { return order_bits(scores[i]); }, count, k,
                 [&](int nth, int i) {
                   out[nth] = i;
                   atomicAdd(written, 1);
                 });
}

void selections(report& checks, random_numbers& random) {
  struct row {
    int count, k, distinct;  // 0: all different
  };
  for (const row r : {row{1, 1, 0}, row{7, 3, 2}, row{256, 256, 0}, row{257, 100, 3}, row{1000, 999, 1},
                      row{5000, 64, 5}, row{65536, 1024, 0}, row{65536, 1024, 40}}) {
    pinned<float> scores = random.normals<float>(to_size(r.count));
    for (float& x : scores) {
      if (r.distinct > 0) x = static_cast<float>(random.below(r.distinct)) - 2.0f;
      const int special = random.below(40);
      if (special == 0) x = -infinity;
      if (special == 1) x = random.below(2) == 0 ? 0.0f : -0.0f;
      if (special == 2) x = std::numeric_limits<float>::max();
    }
    results<std::int32_t> best(to_size(r.k), -7), written(1);
    std::vector<std::uint64_t> keys(to_size(r.count));
    for (int i = 0; i < r.count; ++i) keys[to_size(i)] = ordered_key(scores[to_size(i)], i);
    std::nth_element(keys.begin(), keys.begin() + r.k - 1, keys.end(), std::greater<>());
    for (int i = 0; i < r.k; ++i) best.host[to_size(i)] = unit_of_key(keys[to_size(i)]);
    std::sort(best.host.begin(), best.host.end());
    written.host[0] = r.k;
    select_largest<256><<<1, 256>>>(scores.data(), r.count, r.k, best.device.data(), written.device.data());
    require(cudaGetLastError(), "kernel launch");
    require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    const std::string what = text(r.k) + " of " + text(r.count) + " scores" +
                             (r.distinct > 0 ? ", " + text(r.distinct) + " of them different" : "");
    checks.equal(what, best);
    checks.equal(what + ": each once", written);
  }
}

// ---- scores by codes ----

/// Scores as `score_tiles` does, what is stored staged.
template <class Summary>
__global__ void score_codes(Summary summary, kv_extent page, const std::byte* stored, int units,
                            prepared_queries queries, float* scores) {
  alignas(16) extern __shared__ float shared[];
  const lane_team<8, 1> team;
  const device::scoring_room room = device::scoring_room_of<half>(summary, page);
  const int me = static_cast<int>(threadIdx.x) / 8, teams = static_cast<int>(blockDim.x) / 8;
  float* const numbers = shared + me * room.all();
  for (int j = me; j < units; j += teams) {
    score_unit<half>(team, summary, page, stored + j * summary_bytes<half>(summary, page), queries, numbers,
                     {scores + j, units}, reinterpret_cast<std::byte*>(numbers + room.numbers));
    team.sync();
  }
}

/// Summaries at every multiple of 4 bytes. All numbers are positive, so that no sum depends on its order by
/// much.
template <class Policy>
void codes_scored(report& checks, random_numbers& random, const std::string& what, const Policy& policy) {
  const kv_extent page{8, 16};
  const auto summary = summary_at(policy, 0, 0);
  constexpr int units = 50, group = 3, teams = 8;
  const int width = summary_query_width(summary, page.head_dim), bytes = summary_bytes<half>(summary, page);
  const device::scoring_room room = device::scoring_room_of<half>(policy, page);
  pinned<std::byte> stored(to_size(units * bytes));
  pinned<float> query = random.normals<float>(to_size(group * width), 0.01f),
                numbers(to_size(summary.width(page)));
  for (float& x : query) x = std::fabs(x);
  for (int j = 0; j < units; ++j) {
    for (float& x : numbers) x = static_cast<float>(random.below(255));
    encode_summary<half>(scalar_team{}, summary, page, numbers.data(), stored.data() + j * bytes);
  }
  const prepared_queries queries{query.data(), width, group, 1.0f};
  results<float> scores(to_size(group * units));
  for (int j = 0; j < units; ++j)
    score_unit<half>(scalar_team{}, summary, page, stored.data() + j * bytes, queries, numbers.data(),
                     {scores.host.data() + j, units});
  score_codes<<<1, 8 * teams, teams * room.all() * sizeof(float)>>>(summary, page, stored.data(), units,
                                                                    queries, scores.device.data());
  require(cudaGetLastError(), "kernel launch");
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  if (room.staged == 0) require(cudaErrorUnknown, "room to stage what is stored");
  checks.close("scores by " + what + ", " + text(bytes) + " bytes each", scores, 8);
}

// ---- a long row ----

/// Scores, pools and selects among `next` candidates of a head, and in this step one fewer, many of which
/// score alike: what is pooled against the same in double precision, what is selected against a sort of what
/// is pooled.
void long_row(report& checks, random_numbers& random, int next, int k) {
  constexpr int d = 8, group = 3, first = 2, window = 3;
  const int different = next / 40;
  layer_state<kv_shape<half, d>> s;
  s.heads = {group, 1};
  s.page = s.unit = {8, d};
  s.budget = {first * s.page.tokens, window * s.page.tokens, k};
  s.selection_scale = 0.5f;
  s.max_selected = k;
  s.max_pages = s.store_pages = first + next + window;
  pinned<std::int32_t> page_table(to_size(s.max_pages)), selected_count(1), next_selected_count{-1},
      pinned_count(1), attended(to_size(k)), attended_count(1);
  std::iota(page_table.rbegin(), page_table.rend(), 0);
  pinned<layer_kind> kinds{layer_kind::retrieval};
  pinned<std::uint8_t> corrected{1};
  pinned<std::int32_t> flagged{1};
  pinned<float> query = random.normals<float>(to_size(group * d));
  pinned<half> boxes;  // (store page): low, high
  for (int page = 0; page < s.store_pages; ++page)
    if (page < different) {
      const pinned<half> box = random.normals<half>(2 * d);
      for (int i = 0; i < d; ++i)
        boxes.push_back(std::min(to_float(box[to_size(i)]), to_float(box[to_size(d + i)])));
      for (int i = 0; i < d; ++i)
        boxes.push_back(std::max(to_float(box[to_size(i)]), to_float(box[to_size(d + i)])));
    } else {
      const std::int64_t same = random.below(different) * 2 * d;
      for (int i = 0; i < 2 * d; ++i) boxes.push_back(boxes[to_size(same + i)]);
    }
  results<std::int32_t> selected(to_size(k), -1), next_selected(to_size(k), -1);
  s.page_table = page_table.data();
  s.summaries = reinterpret_cast<std::byte*>(boxes.data());
  s.summary_bytes = summary_bytes<half>(min_max{}, s.unit);
  s.head_kinds = kinds.data();
  s.kept_queries = query.data();
  s.corrected = corrected.data();
  s.flagged_count = flagged.data();
  s.selected = selected.device.data();
  s.selected_count = selected_count.data();
  s.next_selected = next_selected.device.data();
  s.next_selected_count = next_selected_count.data();
  s.attended = attended.data();
  s.attended_count = attended_count.data();
  s.pinned_count = pinned_count.data();

  // The step behind this one is the first in which the last candidate is not in the window.
  const int after = (first + next + window) * s.page.tokens - 1;
  pinned<step_entry> entry{{.before = after - 1, .tokens = 1, .candidates_at = after}};
  pinned<std::int32_t> entries{1};
  const device::step_view step{entry.data(), entries.data(), {.entries = 1}};
  const device::selection_sizes most{.entries = 1,
                                     .kv_heads = 1,
                                     .queries = group,
                                     .max_units = next,
                                     .row_units = k,
                                     .max_selected = k,
                                     .head_dim = d,
                                     .query_width = 2 * d};
  carver count;
  device::selection_scratch::carve(count, most);
  pinned<std::byte> memory(count.used());
  carver carve(memory.data());
  const device::selection_scratch scratch = device::selection_scratch::carve(carve, most);
  const device::selection_job job{.select_all_up_to = k};
  scratch.clear(nullptr);
  device::launch_score<device::scoring::alone>(s, min_max{}, mean_softmax{}, step, scratch, job, nullptr);
  device::launch_select(s, top_k{}, first_unselected<0>{}, device::already_flagged{}, step, scratch, job,
                        nullptr);
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");

  std::vector<double> scores;  // (candidate, query)
  for (int j = 0; j < next; ++j)
    for (int g = 0; g < group; ++g) {
      double score = 0.0;
      for (int i = 0; i < d; ++i) {
        const half* const box = &boxes[to_size(page_table[to_size(first + j)]) * 2 * d];
        const double q = query[to_size(g * d + i)];
        score += std::max(q * to_float(box[i]), q * to_float(box[d + i]));
      }
      scores.push_back(s.selection_scale * score);
    }
  for (const bool for_next : {false, true}) {
    const int candidates = for_next ? next : next - 1;
    double sums[group] = {};
    for (int i = 0; i < candidates * group; ++i) sums[i % group] += std::exp(scores[to_size(i)]);
    results<float> pooled(to_size(candidates));
    const float* const of_device = scratch.pooled_of(for_next, 0, 0);
    std::copy_n(of_device, candidates, pooled.device.begin());
    for (int j = 0; j < candidates; ++j) {
      double share = 0.0;
      for (int g = 0; g < group; ++g) share += std::exp(scores[to_size(j * group + g)]) / sums[g];
      pooled.host[to_size(j)] = static_cast<float>(std::log(share / group));
    }
    const std::string what = text(k) + " of a row of " + text(candidates) + " candidates";
    checks.close(what + ": pooled scores", pooled, 8);
    std::vector<std::int32_t> order(to_size(candidates));
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      return of_device[a] != of_device[b] ? of_device[a] > of_device[b] : a < b;
    });
    results<std::int32_t>& list = for_next ? next_selected : selected;
    for (int i = 0; i < k; ++i) list.host[to_size(i)] = first + order[to_size(i)];
    std::sort(list.host.begin(), list.host.end());
    checks.equal(what, list);
  }
}

// ---- correction by mass ----

/// What a warp has matched.
struct matched_slots {
  std::int32_t *page, *last_selected, *slot_of, *order, *misses;
};
template <class Residency>
__global__ void match_slots(Residency residency, const std::int32_t* wanted, int count, int slots,
                            std::int32_t nth, matched_slots to) {
  __shared__ device::match_storage shared;
  device::match_by_warp(
      residency, wanted, count, {to.page, to.last_selected, slots}, nth, shared,
      [&](int misses) {
        if (threadIdx.x == 0) *to.misses = misses;
      },
      [&](int i, int slot, int miss) {
        to.slot_of[i] = miss < 0 ? slot : ~slot;
        if (miss >= 0) to.order[miss] = i;
      });
}

/// Selections one after the other of units that often come again, matched with slots by a warp and by one
/// thread.
template <class Residency>
void slots_matched(report& checks, random_numbers& random, const Residency& residency, int most) {
  const int slots = most + residency.spare, units = 2 * most + 3;
  results<std::int32_t> page(to_size(slots), -1), last_selected(to_size(slots), 0);
  bool several = false;
  for (std::int32_t nth = 1; nth <= 6; ++nth) {
    const int count = nth == 3 ? 0 : random.between(1, most);
    pinned<std::int32_t> wanted;
    for (int unit = 0; unit < units && static_cast<int>(wanted.size()) < count; ++unit)
      if (random.below(units - unit) < count - static_cast<int>(wanted.size())) wanted.push_back(unit);
    results<std::int32_t> slot_of(to_size(most), -99), order(to_size(most), -1), misses(1, -1);
    misses.host[0] =
        match_slots(residency, wanted.data(), count, {page.host.data(), last_selected.host.data(), slots},
                    nth, slot_of.host.data());
    for (int i = 0, miss = 0; i < count; ++i)
      if (slot_of.host[to_size(i)] < 0) order.host[to_size(miss++)] = i;
    match_slots<<<1, 32>>>(residency, wanted.data(), count, slots, nth,
                           {page.device.data(), last_selected.device.data(), slot_of.device.data(),
                            order.device.data(), misses.device.data()});
    require(cudaGetLastError(), "kernel launch");
    require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    several = several || misses.host[0] > 1;
    const std::string what = std::string(Residency::name) + ", " + text(residency.spare) + " of " +
                             text(slots) + " slots spare, selection " + text(nth) + " of " + text(count) +
                             " units: ";
    checks.equal(what + "slots of units", slot_of);
    checks.equal(what + "misses", misses);
    checks.equal(what + "misses in order", order);
    checks.equal(what + "units in slots", page);
    checks.equal(what + "when they were selected last", last_selected);
  }
  results<std::int32_t> missed(1, most > 1);
  missed.device[0] = several;
  checks.equal("selections that miss several units", missed);
}

/// The lists are of `most` units; counts are (2): of the selected and of the best. `selected` becomes the
/// corrected list, and `result` (2) whether it was corrected and how many it has.
struct mass_case {
  const float* pooled;
  std::int32_t *selected, *result;
  const std::int32_t *best, *counts;
};
__global__ void correct_head(mass_deficit::layer_policy correction, mass_case c, int candidates) {
  __shared__ device::select_storage<true> shared;
  bool corrected = false;
  const int count = device::correct_by_mass(
      correction, c.pooled, 0, candidates, {c.selected, c.best, c.counts[0], c.counts[1]}, corrected, shared);
  if (threadIdx.x != 0) return;
  c.result[0] = corrected;
  c.result[1] = count;
}

/// What a correction gives, in double precision and ascending.
struct corrected_list {
  bool corrected = false;
  std::vector<std::int32_t> units;
};
template <class Mass>
corrected_list corrected_by(const mass_deficit::layer_policy& correction, std::vector<std::int32_t> selected,
                            const std::vector<std::int32_t>& best, const Mass& mass) {
  const auto mass_of = [&](const std::vector<std::int32_t>& units) {
    return std::accumulate(units.begin(), units.end(), 0.0,
                           [&](double sum, std::int32_t u) { return sum + mass(u); });
  };
  const auto lacks = [](const std::vector<std::int32_t>& units, std::int32_t unit) {
    return std::find(units.begin(), units.end(), unit) == units.end();
  };
  const auto less = [&](std::int32_t a, std::int32_t b) { return mass(a) < mass(b); };
  const auto flagged = [&] { return mass_of(selected) < (1.0 - correction.delta) * mass_of(best); };
  if (selected == best || !flagged()) return {false, selected};
  if (!correction.partial) return {true, best};
  while (flagged()) {
    std::vector<std::int32_t> missed, others;
    std::copy_if(best.begin(), best.end(), std::back_inserter(missed),
                 [&](auto u) { return lacks(selected, u); });
    std::copy_if(selected.begin(), selected.end(), std::back_inserter(others),
                 [&](auto u) { return lacks(best, u); });
    if (missed.empty()) break;
    if (!others.empty())
      selected.erase(
          std::find(selected.begin(), selected.end(), *std::min_element(others.begin(), others.end(), less)));
    selected.push_back(*std::max_element(missed.begin(), missed.end(), less));
    std::sort(selected.begin(), selected.end());
  }
  return {true, selected};
}

/// Selections a thousandth above and below what the correction asks for, and those that it exchanges units
/// of.
void mass_corrections(report& checks, random_numbers& random) {
  for (const int candidates : {5, 40, 300, 2000})
    for (const bool partial : {false, true})
      for (const float above : {-1e-3f, 1e-3f, 0.3f, 0.7f}) {
        pinned<float> pooled = random.normals<float>(to_size(candidates), 2.0f);
        pooled[to_size(random.below(candidates))] = -infinity;
        std::vector<std::int32_t> order(to_size(candidates));
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(), [&](auto a, auto b) {
          return ordered_key(pooled[to_size(a)], a) > ordered_key(pooled[to_size(b)], b);
        });
        double all = 0.0;
        for (const float score : pooled) all += std::exp(static_cast<double>(score));
        const auto mass = [&](std::int32_t u) {
          return std::exp(static_cast<double>(pooled[to_size(u)])) / all;
        };
        const int k = std::min(candidates / 2, 12);
        std::vector<std::int32_t> best(order.begin(), order.begin() + k), selected;
        // Some of the best, the others from all over; after a truncation fewer than the best.
        for (std::int32_t unit = 0, taken = random.below(2); unit < candidates && taken < k; ++unit)
          if (random.below(candidates) < 2 * k) selected.push_back(unit), ++taken;
        std::sort(best.begin(), best.end());
        double of_selected = 0.0, of_best = 0.0;
        for (const std::int32_t u : selected) of_selected += mass(u);
        for (const std::int32_t u : best) of_best += mass(u);
        // `above` of what is lacking would be accepted: at -1e-3 the selection has a thousandth less than is
        // asked for.
        const double share = of_selected / of_best,
                     asked = above > 0.01f ? 1.0 - above * (1.0 - share) : share * (1.0 - above);
        // A layer's own delta, which the other's and the common one are not.
        const mass_deficit policy{.partial = partial,
                                  .delta_of_layer = {0.5f, static_cast<float>(1.0 - asked)}};
        const mass_deficit::layer_policy correction = policy.at(1);
        const corrected_list want = corrected_by(correction, selected, best, mass);

        results<std::int32_t> result(2), list(to_size(k), -1);
        result.host[0] = want.corrected;
        result.host[1] = static_cast<std::int32_t>(want.units.size());
        std::copy(want.units.begin(), want.units.end(), list.host.begin());
        std::copy(selected.begin(), selected.end(), list.device.begin());
        pinned<std::int32_t> counts{static_cast<std::int32_t>(selected.size()), k}, of(to_size(k));
        std::copy(best.begin(), best.end(), of.begin());
        correct_head<<<1, device::block_selection_default.threads>>>(
            correction, {pooled.data(), list.device.data(), result.device.data(), of.data(), counts.data()},
            candidates);
        require(cudaGetLastError(), "kernel launch");
        require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        const std::string what = std::string(partial ? "partial " : "") + "correction by mass among " +
                                 text(candidates) + ", " + std::to_string(asked) + " asked for and " +
                                 std::to_string(share) + " there";
        checks.equal(what, result);
        checks.equal(what + ": what is selected", list, [&](std::size_t i) { return i < want.units.size(); });
      }
}

// ---- recall ----

struct two_deep_copies {
  static constexpr device::recall_tuning tuning{
      .read = device::recall_read::async_copies, .blocks = 2, .threads = 64, .depth = 2};
};
struct deep_copies {
  static constexpr device::recall_tuning tuning{
      .read = device::recall_read::async_copies, .blocks = 3, .threads = 128, .depth = 5};
};
struct single_bulk_copies {
  static constexpr device::recall_tuning tuning{
      .read = device::recall_read::bulk_copies, .blocks = 1, .threads = 32, .depth = 1, .buffer_bytes = 256};
};
struct bulk_copies {
  static constexpr device::recall_tuning tuning{
      .read = device::recall_read::bulk_copies, .blocks = 1, .threads = 64, .depth = 3, .buffer_bytes = 1024};
};
// Too much shared memory, and buffers that bulk copies cannot fill.
constexpr bool valid_bulk_copies(int depth, int buffer_bytes) {
  return device::recall_tuning{
      .read = device::recall_read::bulk_copies, .depth = depth, .buffer_bytes = buffer_bytes}
      .valid();
}
static_assert(valid_bulk_copies(2, 2048) && !valid_bulk_copies(3, 2048) && !valid_bulk_copies(2, 1000));
struct batched_copies {
  static constexpr device::copies_tuning tuning{.call = device::copy_call::batched, .slices = 3};
};
struct two_dimensional_copies {
  static constexpr device::copies_tuning tuning{.call = device::copy_call::two_dimensional, .slices = 4};
};
struct single_loads {
  static constexpr device::recall_tuning tuning{.blocks = 1, .threads = 32, .depth = 1};
};

template <class Layout, class Element, int HeadDim>
strided_pages<Element, HeadDim> pages_of(pinned<Element>& data, int pages, page_shape shape) {
  return strided<HeadDim>(make_page_span<Layout, HeadDim>(data.data(), pages, shape));
}

/// Recalls what `scratch` lists, by a kernel or by copy engines.
template <class Tuned, class State>
void recall_listed(const State& s, int sequences, const device::selection_scratch& scratch) {
  using tuning = std::remove_cvref_t<decltype(Tuned::tuning)>;
  if constexpr (std::is_same_v<tuning, device::recall_tuning>) {
    device::launch_recall<Tuned>(s, identity{}, {.bounds = {.entries = sequences}}, scratch, nullptr);
  } else {
    using copied = device::copied_recall<State, Tuned>;
    carver counted;
    copied(*scratch.item_count, s.unit.tokens, counted, counted);
    pinned<std::byte> block(counted.used());
    carver memory(block.data());
    copied copies(*scratch.item_count, s.unit.tokens, memory, memory);
    const device::owned_stream compute, copy_engines;
    device::stream on(compute.get()), transfers(copy_engines.get());
    copies.recall(s, s, scratch, on, transfers);
    on.synchronize();
  }
}

/// A launch has no more on its way than its tuning says, however much may be missing.
template <class Tuned>
void bounds_what_is_in_flight(report& checks, const std::string& how) {
  layer_state<kv_shape<half, 64>> s;
  s.heads = {8, 8};
  s.max_selected = 64;
  const device::owned_stream stream;
  require(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  device::launch_recall<Tuned>(s, identity{}, {.bounds = {.entries = 100}}, {}, stream.get());
  cudaGraph_t graph = nullptr;
  require(cudaStreamEndCapture(stream.get(), &graph), "cudaStreamEndCapture");
  cudaGraphNode_t node = nullptr;
  std::size_t nodes = 1;
  require(cudaGraphGetNodes(graph, &node, &nodes), "cudaGraphGetNodes");
  cudaKernelNodeParams launch{};
  require(cudaGraphKernelNodeGetParams(node, &launch), "cudaGraphKernelNodeGetParams");
  require(cudaGraphDestroy(graph), "cudaGraphDestroy");
  constexpr device::recall_tuning tuning = Tuned::tuning;
  constexpr int of_lane = tuning.read == device::recall_read::bulk_copies ? tuning.buffer_bytes / 32 : 16;
  const unsigned threads = launch.gridDim.x * launch.gridDim.y * launch.gridDim.z * launch.blockDim.x;
  results<std::int32_t> bytes(1, tuning.bytes_in_flight());
  bytes.device[0] = static_cast<int>(threads) * tuning.depth * of_lane;
  checks.equal("bytes in flight, " + how, bytes);
}

/// Recalls random units of a layer by a list, and copies them one by one.
template <class Tuned, class Fast, class Slow, class Element, int HeadDim>
void recalls(report& checks, random_numbers& random, const std::string& how) {
  using state = layer_state<kv_shape<Element, HeadDim>>;
  const int pages = random.between(3, 9), sequences = 2, k = random.between(1, 6);
  const page_shape shape{8 * random.between(1, 4), random.between(1, 3)};
  state s;
  s.heads = {shape.kv_heads, shape.kv_heads};
  s.page = {shape.tokens, HeadDim};
  s.units_per_page = random.below(2) == 0 ? 1 : 4;
  s.unit = {shape.tokens / s.units_per_page, HeadDim};
  s.max_selected = k;
  s.max_pages = pages;
  s.slots = {.sink = 1, .ring = 2, .selected = k, .units_per_page = s.units_per_page};
  const int of_selected = s.slots.selected_blocks_for(k),
            blocks = sequences * (s.slots.fixed() + of_selected);
  pinned<std::int32_t> page_table(to_size(sequences * pages)), slot_sets{1, 0},
      selected_blocks(to_size(sequences * of_selected));
  std::iota(page_table.rbegin(), page_table.rend(), 0);  // the store's pages in another order
  std::iota(selected_blocks.begin(), selected_blocks.end(), sequences * s.slots.fixed());
  s.page_table = page_table.data();
  s.slot_sets = slot_sets.data();
  s.selected_blocks = selected_blocks.data();
  const auto elements = [&](int n) {
    return to_size(n) * to_size(2 * shape.tokens * shape.kv_heads * HeadDim);
  };
  pinned<Element> store = random.normals<Element>(elements(sequences * pages));
  results<Element> slots(random.normals<Element>(elements(blocks)));
  s.store = pages_of<Slow, Element, HeadDim>(store, sequences * pages, shape);

  pinned<device::recall_item> items;
  pinned<std::int32_t> item_count(1);
  pinned<std::uint32_t> blocks_recalling(1);
  for (int sequence = 0; sequence < sequences; ++sequence)
    for (int head = 0; head < shape.kv_heads; ++head)
      for (int slot = 0; slot < k; ++slot)
        if (random.below(4) != 0)
          items.push_back(
              {sequence, head, random.below(pages * s.units_per_page), slot, random.below(4) == 0});
  item_count[0] = static_cast<std::int32_t>(items.size());
  device::selection_scratch scratch;
  scratch.items = items.data();
  scratch.item_count = item_count.data();
  scratch.blocks_recalling = blocks_recalling.data();

  const auto on = [&](pinned<Element>& data) {
    state side = s;
    side.blocks.tensor = tensor_of<Element>(make_page_span<Fast, HeadDim>(data.data(), blocks, shape));
    return side;
  };
  recall_listed<Tuned>(on(slots.device), sequences, scratch);
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  const state host = on(slots.host);
  for (const device::recall_item& item : items) {
    const int page = host.page_of(item.unit);
    const auto from = item.from_ring != 0
                          ? host.block_slice(item.sequence, host.slots.ring_slot(page), item.head)
                          : host.store_slice(item.sequence, page, item.head);
    copy_slice<HeadDim>(as_const(rows_behind(from, host.first_row_of(item.unit))),
                        host.selected_slice(item.sequence, item.slot, item.head), host.unit.tokens);
  }
  checks.equal(how + ", " + std::string(Slow::name) + " to " + std::string(Fast::name) + ", " +
                   std::string(element_name<Element>) + " of " + text(HeadDim) + ": " +
                   text(static_cast<int>(items.size())) + " slices, and nothing else",
               slots);
}

template <class Tuned>
void recall_everywhere(report& checks, random_numbers& random, const std::string& how) {
  for (int round = 0; round < 3; ++round) {
    recalls<Tuned, nhd, hnd, half, 64>(checks, random, how);
    recalls<Tuned, hnd, hnd, half, 128>(checks, random, how);
    recalls<Tuned, nhd, nhd, float, 24>(checks, random, how);
    recalls<Tuned, hnd, nhd, bfloat16, 8>(checks, random, how);
  }
}

// ---- what blocks summarise and prepare ----

/// By one team of eight lanes, as the policies' bodies have it.
template <class Summary>
__global__ void summarise_by_team(Summary summary, unit_keys keys, const float* query, float* numbers,
                                  float* prepared, std::byte* stored) {
  const lane_team<8, 1> team;
  const auto of_head = summary_at(summary, 0, 0);
  of_head.summarise(team, keys, numbers);
  team.sync();
  encode_summary<half>(team, of_head, keys.unit, numbers, stored);
  prepare_query(team, of_head, group_query{query, 1, keys.unit.head_dim}, prepared);
}
/// The same by a block.
template <class Summary>
__global__ void summarise_by_all(Summary summary, unit_keys keys, const float* query, float* numbers,
                                 float* prepared, std::byte* stored, float* coefficients) {
  const auto of_head = summary_at(summary, 0, 0);
  device::summarise_by_block<64>(of_head, keys, numbers, coefficients);
  __syncthreads();
  encode_summary<half>(device::block_team{}, of_head, keys.unit, numbers, stored);
  if constexpr (device::block_summary<Summary>::prepares) {
    __shared__ float of_query[256];
    device::block_summary<Summary>::template prepare<64>(of_head, query, of_query, prepared);
  }
}
template <class Summary>
void summarised(report& checks, random_numbers& random, const std::string& name, const Summary& summary,
                int head_dim, int numbers_stored) {
  for (const int tokens : {8, 24, 32, 96})
    for (const bool infinite : {false, true}) {
      const kv_extent unit{tokens, head_dim};
      pinned<float> keys = random.normals<float>(to_size(tokens * head_dim));
      const pinned<float> query = random.normals<float>(to_size(head_dim));
      if (infinite) keys[to_size(random.below(tokens * head_dim))] = std::numeric_limits<float>::infinity();
      results<float> numbers(to_size(summary.width(unit)), 0.0f),
          prepared(to_size(summary.query_width(head_dim)), 0.0f);
      results<std::byte> stored(summary_bytes<half>(summary, unit));
      pinned<float> coefficients(keys.size());
      summarise_by_team<<<1, 8>>>(summary, {keys.data(), unit}, query.data(), numbers.host.data(),
                                  prepared.host.data(), stored.host.data());
      const int threads = random.below(2) == 0 ? 64 : device::summarise_default.threads;
      summarise_by_all<<<1, threads>>>(summary, {keys.data(), unit}, query.data(), numbers.device.data(),
                                       prepared.device.data(), stored.device.data(), coefficients.data());
      require(cudaGetLastError(), "kernel launch");
      require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      const std::string what = name + " by " + text(threads) + " threads, units of " + text(tokens) +
                               (infinite ? ", an infinite key" : "");
      checks.equal(what + ": numbers", numbers, [&](std::size_t i) {
        return i < to_size(numbers_stored < 0 ? summary.width(unit) : numbers_stored * tokens);
      });
      if (!infinite) checks.equal(what + ": stored bytes", stored);  // a NaN has many encodings
      if constexpr (device::block_summary<Summary>::prepares) checks.equal(what + ": tables", prepared);
    }
}

/// A launch for more units than an int counts summarises the pages that there are.
template <class Summary>
void summarised_of_many(report& checks, random_numbers& random, const Summary& summary) {
  constexpr int d = 64, tokens = 32, page_count = 3, most_pages = 1 << 30, teams = 8;
  layer_state<kv_shape<half, d>> s;
  s.heads = {1, 1};
  s.page = {tokens, d};
  s.units_per_page = 4;
  s.unit = {tokens / s.units_per_page, d};
  s.max_pages = s.store_pages = page_count;
  pinned<std::int32_t> page_table{2, 0, 1};
  pinned<layer_kind> kinds{layer_kind::retrieval};
  pinned<half> store = random.normals<half>(to_size(page_count * 2 * tokens * d));
  s.page_table = page_table.data();
  s.head_kinds = kinds.data();
  s.store = pages_of<nhd, half, d>(store, page_count, {tokens, 1});
  s.summary_bytes = summary_bytes<half>(summary, s.unit);

  // Pages of the only entry come first, and behind them what the launch is sized for.
  pinned<step_entry> entry{{.tokens = page_count * tokens, .phase = step_phase::prefill}};
  pinned<std::int32_t> entries{1};
  const device::step_view step{entry.data(), entries.data(), {.entries = 1, .pages = page_count}};
  device::append_memory<half> memory;
  memory.of_teams = {nullptr, std::int64_t{s.unit.tokens} * d, (summary.width(s.unit) + 3) / 4 * 4, teams};
  pinned<float> scratch(to_size(teams * memory.of_teams.each()));
  memory.of_teams.data = scratch.data();
  results<std::byte> stored(to_size(page_count * s.units_per_page) * s.summary_bytes);
  std::fill(stored.device.begin(), stored.device.end(), std::byte{0xff});
  const auto run = [&](int pages, pinned<std::byte>& to) {
    s.summaries = to.data();
    device::launch_summarise(s, summary, step, {0, pages}, memory, nullptr);
    require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  };
  run(page_count, stored.host);
  run(most_pages, stored.device);
  checks.equal("summaries by a launch for 2^32 units", stored);
}

}  // namespace

int main() {
  skip_without_device();
  report checks;
  random_numbers random(1);
  team_calls<1, 8>(checks, random);
  team_calls<2, 8>(checks, random);
  team_calls<4, 2>(checks, random);
  team_calls<8, 1>(checks, random);
  team_calls<8, 4>(checks, random);
  team_calls<16, 1>(checks, random);
  team_calls<32, 1>(checks, random);
  codecs_by_lanes<40, float>(checks, random);
  codecs_by_lanes<80, float>(checks, random);
  codecs_by_lanes<128, bfloat16>(checks, random);
  codecs_by_lanes<256, half>(checks, random);
  selections(checks, random);
  codes_scored(checks, random, "mean in int8", stored_as<mean, number_format::int8>{});
  codes_scored(checks, random, "key_sketch<4>", key_sketch<4>{});
  const pinned<float> books(1);
  codes_scored(checks, random, "key_codes<3, 2>",
               key_codes<3, 2>{.books = {books.data(), 1, 1, 16, 2, 1, 3, 1}});
  const pinned<float> basis = random.normals<float>(25 * 64);
  summarised(checks, random, "key_subspace<24, 3>",
             key_subspace<24, 3>{.basis = {basis.data(), 1, 1, 24, 64}}, 64, -1);
  summarised_of_many(checks, random, key_subspace<24, 3>{.basis = {basis.data(), 1, 1, 24, 64}});
  summarised(checks, random, "key_subspace<24, 32>",
             key_subspace<24, 32>{.basis = {basis.data(), 1, 1, 24, 64}}, 64, -1);
  key_codebooks of_keys{nullptr, 1, 1, 64, 5, 7, 6, 10};
  const pinned<float> codebooks = random.normals<float>(of_keys.floats_per_head(), 0.2f);
  of_keys.data = codebooks.data();
  summarised(checks, random, "key_codes<6, 5>", key_codes<6, 5>{.books = of_keys}, 64, 6);
  long_row(checks, random, 65536, 1024);
  long_row(checks, random, 4225, 9);
  mass_corrections(checks, random);
  for (const int most : {1, 5, 32, 40, 300}) {
    slots_matched(checks, random, first_unselected<0>{}, most);
    slots_matched(checks, random, first_unselected<3>{}, most);
    slots_matched(checks, random, least_recently_used<17>{}, most);
  }
  recall_everywhere<device::recall_default>(checks, random, "loads");
  recall_everywhere<single_loads>(checks, random, "loads one at a time");
  recall_everywhere<two_deep_copies>(checks, random, "asynchronous copies, two on their way");
  recall_everywhere<deep_copies>(checks, random, "asynchronous copies");
  recall_everywhere<single_bulk_copies>(checks, random, "bulk copies one at a time");
  recall_everywhere<bulk_copies>(checks, random, "bulk copies");
  recall_everywhere<batched_copies>(checks, random, "copy engines in batches");
  recall_everywhere<two_dimensional_copies>(checks, random, "copy engines in two dimensions");
  bounds_what_is_in_flight<device::recall_default>(checks, "loads");
  bounds_what_is_in_flight<deep_copies>(checks, "asynchronous copies");
  bounds_what_is_in_flight<bulk_copies>(checks, "bulk copies");
  return checks.finish();
}
