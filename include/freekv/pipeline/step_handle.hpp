// The handle of a step: it moves, and abandons a step that it is left without.
#pragma once

#include <freekv/core/error.hpp>
#include <string>

namespace freekv {

/// Handle of the step in progress of `Owner`, which it must not outlive; a pointer, that allocates nothing.
/// It has none once the step has ended or moved to another handle, and if it is made without one: then calls
/// of a step throw usage_error.
template <class Owner>
class step_handle {
 public:
  step_handle() = default;
  step_handle(step_handle&& other) noexcept : owner_(other.owner_) { other.owner_ = nullptr; }
  step_handle& operator=(step_handle&& other) noexcept {
    if (this != &other) {
      abandon();
      owner_ = other.owner_;
      other.owner_ = nullptr;
    }
    return *this;
  }
  /// Abandons a step that has not ended.
  ~step_handle() { abandon(); }

  /// True where it has a step in progress.
  explicit operator bool() const noexcept { return owner_ != nullptr; }

  /// Ends a step that the engine cannot finish, wherever it stands: waits for queued work, then releases the
  /// sequences that brought rows to it, since some layers have those rows and others do not. All other
  /// sequences stay as they are. A captured step has none; its capture is then of no use. Never throws:
  /// errors of a device, behind which the pipeline has to go, are left to later calls. False, and nothing
  /// happens, where there is no step.
  bool abandon() noexcept {
    Owner* const owner = owner_;
    owner_ = nullptr;
    if (owner != nullptr) owner->abandon_step();
    return owner != nullptr;
  }

 protected:
  explicit step_handle(Owner& owner) : owner_(&owner) {}
  Owner& of(const char* call) const {
    if (owner_ == nullptr)
      throw usage_error(std::string(call) +
                        ": no step is in progress here; it has ended or moved, or never began");
    return *owner_;
  }

  Owner* owner_ = nullptr;
};

}  // namespace freekv
