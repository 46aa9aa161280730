// Declares what nvcc compiles of each shape.
#pragma once

#include <freekv/backend/cuda/cuda_backend.cuh>

#include "pipeline.hpp"

namespace freekv::c_library {

/// Explicitly instantiated, one translation unit each.
template <class Shape>
compiled_shape<cuda_backend> compiled_for_cuda();

}  // namespace freekv::c_library
