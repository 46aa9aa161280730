// The order of the calls of a step: which layer is how far in it, and the sentence for a call that comes too
// early or late.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <freekv/core/error.hpp>
#include <freekv/core/size.hpp>
#include <string>
#include <vector>

namespace freekv::detail {

/// Progress of a layer in a step. Pipelines that correct nothing go from `appended` to `attended`.
enum class layer_progress : std::uint8_t { waiting, appended, corrected, attended };

/// Order of the calls of a pipeline and of its steps. What `expect` it says throws usage_error, and nothing
/// has changed.
class call_order {
 public:
  explicit call_order(int layers) : progress_(to_size(layers)) {}

  bool in_step() const { return in_step_; }
  void begin_step() {
    for (layer_progress& progress : progress_) progress = layer_progress::waiting;
    appended_layer_ = -1;
    in_step_ = true;
  }
  void leave_step() { in_step_ = false; }
  layer_progress of(int layer) const { return progress_[to_size(layer)]; }
  void reached(layer_progress now, int layer) {
    progress_[to_size(layer)] = now;
    if (now == layer_progress::appended) appended_layer_ = layer;
  }

  void expect_outside_step(const char* call) const {
    if (in_step_)
      throw usage_error(std::string(call) + ": the step in progress has not ended; end or abandon it first");
  }
  void expect_layer(int layer, const char* call) const {
    if (layer < 0 || to_size(layer) >= progress_.size())
      throw usage_error(std::string(call) + ": layer " + std::to_string(layer) + " is not one of " +
                        std::to_string(progress_.size()));
  }
  /// A layer that is as far as `first`, and not farther than `last`.
  void expect(int layer, const char* call, layer_progress first, layer_progress last) const {
    expect_layer(layer, call);
    const layer_progress now = of(layer);
    if (now >= first && now <= last) return;
    const bool appends = first == layer_progress::waiting;
    throw usage_error(std::string(call) + ": layer " + std::to_string(layer) + " is " +
                      std::array{"not appended to yet", appends ? "appended to already" : "not corrected yet",
                                 "not attended yet", "attended already"}[to_size(now)] +
                      " in this step");
  }
  /// The layer that was appended to last, with its queries where the step `has_queries` of it or needs none.
  void expect_latest(int layer, const char* call, bool has_queries) const {
    if (layer != appended_layer_)
      throw usage_error(std::string(call) + ": layer " + std::to_string(layer) +
                        " attends before the next is appended to, which was layer " +
                        std::to_string(appended_layer_));
    if (!has_queries) throw usage_error(std::string(call) + ": append was given no queries");
  }
  /// All layers appended to; if the step `decodes`, attended.
  void expect_all(const char* call, bool decodes) const {
    for (std::size_t layer = 0; layer < progress_.size(); ++layer) {
      const bool waits = progress_[layer] == layer_progress::waiting;
      if (waits || (decodes && progress_[layer] != layer_progress::attended))
        throw usage_error(std::string(call) + ": layer " + std::to_string(layer) + " of " +
                          std::to_string(progress_.size()) +
                          (waits ? " was not appended to" : " has not attended its decode rows"));
    }
  }

 private:
  std::vector<layer_progress> progress_;
  int appended_layer_ = -1;
  bool in_step_ = false;
};

}  // namespace freekv::detail
