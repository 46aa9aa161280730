// Stages of a step by themselves, beside a read or a copy of the same bytes.

#include <freekv/core/size.hpp>
#include <freekv/freekv.hpp>

#include <array>
#include <cstring>
#include <numeric>

#include "measure.hpp"

namespace freekv::bench {

namespace {

/// min_max summaries of `pages` pages for 8 KV heads, scored for 4 query heads each as a step does, one layer
/// after the other.
template <class Element>
void bench_scores(context& c, int pages) {
  constexpr int d = 128, heads = 8, group = 4;
  constexpr kv_extent page{32, d};
  const min_max summary;
  const std::size_t bytes = summary_bytes<Element>(summary, page);
  const std::size_t layer_bytes = to_size(pages) * to_size(heads) * bytes;
  const int layers = c.smoke ? 2 : static_cast<int>(3 * c.on.last_level_cache / layer_bytes) + 2;
  const std::string of_case = std::string(element_name<Element>) + ", " + std::to_string(pages) + " pages, " +
                              std::to_string(c.threads) + " threads";
  if (!c.begins("score", of_case)) return;
  fast_normals random(1);
  std::vector<Element> stored(to_size(layers) * layer_bytes / sizeof(Element));
  for (Element& x : stored) x = from_float<Element>(random.next());
  std::vector<float> queries(to_size(group * summary_query_width(summary, d)));
  for (float& x : queries) x = random.next();
  const auto stride = host::workspace_sizes::padded(pages);
  std::vector<float> scores(to_size(heads) * to_size(group) * to_size(stride)),
      numbers(to_size(c.threads) * to_size(summary.width(page)));
  host_backend backend({.threads = c.threads, .instructions = c.instructions});
  const auto layer_of = [&](int call) {
    return stored.data() + to_size(call % layers) * layer_bytes / sizeof(Element);
  };
  const prepared_queries prepared{queries.data(), summary_query_width(summary, d), group, 0.1f};
  const std::array<std::function<void(int)>, 3> bodies{
      [&](int call) {
        const auto* const layer = reinterpret_cast<const std::byte*>(layer_of(call));
        backend.parallel(heads, layer_bytes, [&](int head, int worker) {
          host::with_wide_team(backend.options().instructions, [&](auto team) {
            score_units<Element>(team, summary, page, layer + to_size(head) * to_size(pages) * bytes, bytes,
                                 pages, prepared,
                                 numbers.data() + to_size(worker) * to_size(summary.width(page)),
                                 {scores.data() + to_size(head) * to_size(group) * to_size(stride), stride});
          });
        });
      },
      [&](int call) {
        read_all(std::as_bytes(std::span(layer_of(call + layers / 2), layer_bytes / sizeof(Element))),
                 c.threads);
      },
      [&](int) {  // the same number of pages, but always the same few
        constexpr int few = 32;
        backend.parallel(heads, layer_bytes, [&](int head, int worker) {
          host::with_wide_team(backend.options().instructions, [&](auto team) {
            for (int j = 0; j < pages; j += few)
              score_units<Element>(
                  team, summary, page,
                  reinterpret_cast<const std::byte*>(stored.data()) + to_size(worker) * to_size(few) * bytes,
                  bytes, few, prepared, numbers.data() + to_size(worker) * to_size(summary.width(page)),
                  {scores.data() + to_size(head) * to_size(group) * to_size(stride), stride});
          });
        });
      }};
  const auto seconds = seconds_in_turns(c.smoke ? 3 : 4 * c.rounds, bodies);
  c.number("score", of_case, "seconds", seconds[0], "s");
  c.ratio("score", of_case, "scoring of what is in the cache / scoring", seconds[2] / seconds[0]);
  c.ratio("score", of_case, "read of its bytes / scoring", seconds[1] / seconds[0], pages >= 4096 ? 0.8 : 0);
}

/// Random slices of a store much larger than the cache to slots, beside memcpy of the same pieces.
template <class Element>
void bench_recalls(context& c, int tokens) {
  constexpr int d = 128, heads = 8;
  const std::size_t slice = to_size(2 * tokens * d), slice_bytes = slice * sizeof(Element);
  const int slices =
      static_cast<int>((c.smoke ? std::size_t{16} << 20 : 16 * c.on.last_level_cache) / slice_bytes);
  constexpr int slots = 64;
  const std::string of_case = std::to_string(slice_bytes / 1024) + " KB slices";
  if (!c.begins("recall", of_case)) return;
  fast_normals random(2);
  std::vector<Element> store(to_size(slices) * slice), frames(to_size(slots) * slice * to_size(heads));
  for (Element& x : store) x = from_float<Element>(random.next());
  std::vector<int> order(to_size(slices));
  std::iota(order.begin(), order.end(), 0);
  std::uint64_t state = 88172645463325252ull;
  for (std::size_t i = order.size(); i-- > 1;) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    std::swap(order[i], order[state % (i + 1)]);
  }
  const int each = c.smoke ? 64 : 2048;
  const page_shape shape{tokens, heads};
  const auto to = make_page_span<nhd, d>(frames.data(), slots, shape);
  const auto next = [&](int call, int i) {
    return store.data() + to_size(order[to_size((std::int64_t{call} * each + i) % slices)]) * slice;
  };
  const std::array<std::function<void(int)>, 2> bodies{
      [&](int call) {
        for (int i = 0; i < each; ++i) {
          const Element* const from = next(2 * call, i);
          copy_slice<d>(head_slice<const Element>{from, from + tokens * d, d},
                        slice_of(to, i / heads % slots, i % heads), tokens);
        }
      },
      [&](int call) {
        for (int i = 0; i < each; ++i)
          std::memcpy(frames.data() + to_size(i % (slots * heads)) * slice, next(2 * call + 1, i),
                      slice_bytes);
      }};
  const auto seconds = seconds_in_turns(c.smoke ? 3 : c.rounds, bodies);
  c.number("recall", of_case, "seconds", seconds[0] / each, "s");
  c.ratio("recall", of_case, "memcpy / recall", seconds[1] / seconds[0], 0.8);
}

}  // namespace

void bench_scoring(context& c) {
  const int pages = c.smoke ? 256 : 4096;
  bench_scores<float>(c, pages);
  bench_scores<bfloat16>(c, pages);
  bench_scores<half>(c, pages);
}

void bench_recall(context& c) {
  bench_recalls<bfloat16>(c, 16);
  bench_recalls<bfloat16>(c, 32);
}

}  // namespace freekv::bench
