// The whole step on a device, on random cases, against the float64 oracle: agreement as invariant 8 of the specification
// states it, by the comparison that the host's step is held to.
//
// Exit status: 0 all agree, 1 not, 77 no device.
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <string>

#include "../property/compare_case.hpp"
#include "../property/events.hpp"
#include "../property/seeds.hpp"
#include "device_pipeline.hpp"

namespace {

using namespace tests;

/// Which of the device's pipelines a case is for.
enum class made_of { shapes, policies, summaries };

device_pipeline make(made_of what, const random_case& c) {
  const auto options = c.with_basis();
  return what == made_of::shapes     ? make_device_pipeline(options)
         : what == made_of::policies ? make_device_policies(options)
                                     : make_device_summaries(options);
}

/// Exchanges what these pipelines do not have.
void take_what_devices_have(random_case& c, made_of what) {
  auto& o = c.options;
  const auto shapes = device_shapes();
  const device_shape shape =
      what == made_of::shapes ? shapes[static_cast<std::size_t>(c.seed % shapes.size())] : policy_shape;
  o.element = shape.element;
  o.head_dim = shape.head_dim;
  auto& m = o.does;
  m.rows = "per_kv_head";
  m.pinning = "no_pins";
  m.codec = "identity";
  o.store_file.clear();
  if (what != made_of::policies) {
    m.pooling = "mean_softmax";
    m.selection = "top_k";
    m.residency = "first_unselected";
    m.spare = 0;
    m.correction = "cosine_drift";
  } else if (m.correction == "mass_deficit") {
    m.correction = "cosine_drift";
  }
  if (what != made_of::summaries) {
    m.summary = "min_max";
    m.format = "standard";
  } else if (m.summary == "coarse_to_fine") {
    m.summary = "key_subspace";
  }
  // The data that was drawn is for another head_dim.
  dice d(c.seed + 17);
  m.rank = std::min(m.rank, o.head_dim);
  c.basis_data = random_basis(d, o.kv_heads, m.rank, o.head_dim);
  o.basis = {nullptr, 1, o.kv_heads, m.rank, o.head_dim};
  o.codebooks.head_dim = o.head_dim;
  if (m.summary == "key_codes") c.codebook_data = random_codebooks(d, o.codebooks);
}

/// A small case for a device.
random_case make_device_case(std::uint64_t seed, made_of what) {
  random_case c = make_case(seed);
  dice d(seed + 0x51ed27);
  take_what_devices_have(c, what);
  auto& o = c.options;
  // Many steps with small pages, so that windows move; few with large ones.
  if (d.below(2) == 0) {
    o.page = 8;
    o.budget = {.sink = 8 * d.below(3), .window = 8 * d.between(1, 3), .selected_pages = d.between(1, 5)};
    c.prompt = d.between(60, 300);
    c.steps = d.between(8, 24);
  } else {
    c.prompt = std::min(c.prompt, 6 * o.page + d.below(o.page));
    c.steps = std::min(c.steps, 6);
  }
  o.max_tokens = c.prompt + c.steps;
  if (seed % 5 == 0) give_unit(c, 1 << seed / 5 % 5);
  return c;
}

/// The same for many sequences.
random_case make_device_events(std::uint64_t seed, made_of what) {
  random_case c = make_events(seed);
  take_what_devices_have(c, what);
  auto& o = c.options;
  o.selected_tokens = 0;
  if (o.page > 16) {  // an interpreter takes long for long prompts
    o.page = 16;
    o.budget = {.sink = 16, .window = 32, .selected_pages = 2};
  }
  o.max_decode_rows = std::min(o.max_decode_rows, 5);
  o.max_tokens = std::min(o.max_tokens, 200);
  o.store_tokens = std::min(o.store_tokens, 3 * std::int64_t{o.max_tokens});
  return c;
}

}  // namespace

int main() {
  std::string why;
  if (!device_is_there(why)) {
    std::printf("SKIPPED: no NVIDIA device is usable: %s\n", why.c_str());
    return 77;
  }
  const std::uint64_t first = number_from("FREEKV_SEED", 1), count = number_from("FREEKV_CASES", 40);
  const std::uint64_t worlds = number_from("FREEKV_WORLDS", count / 8);
  coverage seen;
  event_counts counts;
  int failed = 0;
  const auto run = [&](const random_case& c, const auto& compare) {
    try {
      compare();
    } catch (const disagreement& d) {
      ++failed;
      std::printf("FAILED %s\n  %s\n", sentence(c).c_str(), d.what.c_str());
    }
  };
  constexpr made_of all[] = {made_of::shapes, made_of::policies, made_of::summaries};
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    const made_of what = all[seed % std::size(all)];
    const random_case c = make_device_case(seed, what);
    run(c, [&] { compare_with_oracle(c, *make(what, c), seen); });
  }
  for (std::uint64_t seed = first; seed < first + worlds; ++seed) {
    const made_of what = all[seed % std::size(all)];
    const random_case c = make_device_events(seed, what);
    run(c, [&] { world(c, make(what, c), seen, counts).run(); });
  }
  std::printf(
      "%d of %d cases and %d worlds failed; compared %ld steps, %ld firm selections, %ld head outputs; "
      "corrected %ld, "
      "recalled %ld, promoted %ld; %ld prompts, %ld forks, %ld truncations, %ld preemptions, %ld pages "
      "copied\n",
      failed, static_cast<int>(count), static_cast<int>(worlds), seen.steps, seen.firm_selections,
      seen.compared_outputs, seen.corrected, seen.recalled, seen.promoted, counts.prompts, counts.forks,
      counts.truncations, counts.preemptions, counts.pages_copied);
  return failed == 0 ? 0 : 1;
}
