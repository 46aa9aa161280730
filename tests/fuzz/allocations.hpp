// The largest piece of memory that this program has asked for at once.
#pragma once

#include <cstddef>

namespace tests {

/// Since it was last set to 0.
extern std::size_t largest_allocation;

}  // namespace tests
