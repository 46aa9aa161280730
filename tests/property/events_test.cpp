// Random events on up to eight sequences in one pipeline of few pages: each gives what the oracle, which
// keeps each sequence apart, gives it. (docs/contract.md, 13.9 and 13.10)

#include <malloc.h>
#include <unistd.h>

#include <fstream>

#include "../catch.hpp"
#include "../sanitized.hpp"
#include "events.hpp"
#include "seeds.hpp"

namespace {

using namespace tests;

/// Bytes that this process has taken and not given back.
std::size_t bytes_in_use() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}
/// Its bytes that are in memory.
std::size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::size_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

TEST_CASE("random events on several sequences agree with the float64 oracle", "[property]") {
  const std::uint64_t first = number_from("FREEKV_SEED", 1), count = number_from("FREEKV_CASES", 100);
  freekv::host_backend alone, several({.threads = 3, .overlap = true, .bytes_per_thread = 4096});
  coverage seen;
  event_counts counts;
  std::size_t settled = 0;
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    if (seed == first + count / 5) settled = bytes_in_use();
    const random_case c = make_events(seed);
    try {
      auto& backend = seed % 2 == 0 ? alone : several;
      world(c, freekv::examples::make_pipeline(c.with_basis(), backend), seen, counts).run();
    } catch (const disagreement& d) {
      INFO(c);
      INFO(c.options.max_decode_rows << " decode rows, " << c.options.max_sequences << " sequences, "
                                     << c.options.max_resident << " resident, " << c.options.max_tokens
                                     << " and " << c.options.store_tokens << " tokens");
      INFO(d.what);
      FAIL("the library disagrees with the oracle; FREEKV_SEED=" << seed << " FREEKV_CASES=1 repeats it");
    }
  }
  WARN(counts.steps << " steps of " << counts.rows << " rows, " << counts.prompts << " prompts, "
                    << counts.forks << " forks, " << counts.truncations << " truncations ("
                    << counts.selections_dropped << " with nothing selected afterwards), "
                    << counts.preemptions << " preemptions, " << counts.refused << " refusals and "
                    << counts.refused_blocks << " for want of blocks, " << counts.pages_copied
                    << " open pages copied; " << seen.firm_selections << " firm selections, "
                    << seen.compared_outputs << " outputs compared, corrected " << seen.corrected
                    << ", recalled " << seen.recalled << ", promoted " << seen.promoted << "; "
                    << settled / 1024 << " KiB taken after a fifth of the cases, " << bytes_in_use() / 1024
                    << " at the end, " << resident_bytes() / 1048576 << " MiB in memory");
  // What is not given back would add up; how much is in memory depends on the largest case so far.
  if (!sanitized && count >= 100) CHECK(bytes_in_use() < settled + (std::size_t{1} << 20));
  if (count >= 100) {
    const long least = static_cast<long>(count) * 2 / 3;
    for (const long n : {counts.forks, counts.truncations, counts.preemptions, counts.refused,
                         counts.pages_copied, seen.recalled, seen.promoted, seen.corrected})
      CHECK(n > least);
    CHECK(counts.refused_blocks > least / 5);
    CHECK(seen.firm_selections > 10 * least);
  }
}
