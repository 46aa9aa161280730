// FreeKV for nvcc: what a host compiler can take, and the CUDA backend.
#pragma once

#include <freekv/backend/cuda/attend_paged.cuh>
#include <freekv/backend/cuda/cuda_backend.cuh>
#include <freekv/backend/cuda/stages.cuh>
#include <freekv/freekv.hpp>
