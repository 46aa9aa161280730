// The example engine as its test sees it: what nvcc compiles of it.
#pragma once

#include <cstdint>
#include <freekv/methods.hpp>
#include <span>
#include <vector>

#include "../../examples/tools/engine/engine.hpp"

namespace engine_under_test {

using namespace freekv;
using namespace freekv::examples;

inline constexpr int head_dim = 64;
using method = methods::freekv_paper;
using change = engine_observer::change;

/// Copies of the device's weights, (height, width).
struct host_matrix {
  std::size_t width = 0;
  std::vector<bfloat16> numbers{};

  std::vector<double> row(std::int32_t n) const {
    std::vector<double> x;
    for (std::size_t i = 0; i < width; ++i)
      x.push_back(to_float(numbers.at(static_cast<std::size_t>(n) * width + i)));
    return x;
  }
  std::vector<double> times(const std::vector<double>& x) const {
    std::vector<double> y;
    for (std::size_t first = 0; first < numbers.size(); first += width) {
      double sum = 0.0;
      for (std::size_t i = 0; i < width; ++i) sum += double{to_float(numbers[first + i])} * x[i];
      y.push_back(sum);
    }
    return y;
  }
};
struct model_weights {
  struct layer {
    host_matrix qkv, out, gates, down;
  };
  host_matrix embedding, head;
  std::vector<layer> layers;
};

/// A step that has happened: what the host told of it, and what the device has made of it.
struct step {
  std::vector<step_input> sequences;
  std::vector<row_input> packet;
  bool replayed = false;
  std::span<const row_input> inputs;
  std::span<const std::int32_t> chosen;  // all of the model's choices, as of this step
  struct layer_rows {
    std::span<const float> out;
    std::span<const bfloat16> queries, keys, values;
  };
  std::vector<layer_rows> layers;
};

/// Is told in order of all that happens, a while later.
class peer {
 public:
  virtual ~peer() = default;
  virtual void loaded(const model_weights&) = 0;
  virtual void changed(change, sequence_id, int number) = 0;
  virtual void stepped(const step&) = 0;
};

bool has_device();
engine_result serve(const engine_options&, peer&);

}  // namespace engine_under_test
