// FreeKV for host compilers: everything but the CUDA backend.
#pragma once

#include <freekv/config.hpp>  // which says what is missing

#include <freekv/backend/host/calibrate_top_p.hpp>
#include <freekv/backend/host/evict.hpp>
#include <freekv/backend/host/host_backend.hpp>
#include <freekv/backend/host/stages.hpp>
#include <freekv/backend/host/thin_prompt.hpp>
#include <freekv/methods.hpp>
#include <freekv/pipeline/evicting_pipeline.hpp>
#include <freekv/pipeline/retrieval_pipeline.hpp>
