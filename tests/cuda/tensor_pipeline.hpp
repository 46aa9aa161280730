// A pipeline that attends by tensor cores and recalls by bulk copies, for tests: programs have none yet.
#pragma once

#include <memory>

#include "device_pipeline.hpp"

namespace tests {

/// What it is compiled for: published policies, rows of KV heads or of query heads, and the codecs identity
/// and int8_token.
inline constexpr freekv::examples::device_shape tensor_shape{freekv::examples::data_type::bf16, 64};

/// Attention that gives log-sum-exps asks for log_masses as well, and throws std::runtime_error where they do
/// not add up to them.
std::unique_ptr<freekv::examples::pipeline> make_tensor_pipeline(
    const freekv::examples::pipeline_options& options);

}  // namespace tests
