// What this machine executes, for tests that compare instruction sets.
#pragma once

#include <array>
#include <freekv/backend/host/isa.hpp>
#include <vector>

namespace tests {

/// The instruction sets of this machine that the library is compiled for, lowest first.
inline std::vector<freekv::host::isa> instruction_sets() {
  using freekv::host::isa;
  std::vector<isa> sets;
  for (const isa set : std::array{isa::baseline, isa::avx2, isa::avx512})
    if (set <= freekv::host::best_isa()) sets.push_back(set);
  return sets;
}

}  // namespace tests
