// A file that appears under its name complete or not at all.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>

#include "safetensors.hpp"

namespace freekv::examples {

/// Written as ".freekv-PID-N.tmp" beside its target, whose place it takes when told to. Without that it goes
/// again, and so it does if a signal ends the program that calls `remove_temporary_files_on_signals`. What
/// may stand there already, and what is thrown, is as for `write_safetensors`.
class new_file {
 public:
  explicit new_file(const std::filesystem::path& path);
  new_file(new_file&&) noexcept;
  new_file& operator=(new_file&&) noexcept;
  ~new_file();

  void write(std::span<const std::byte> bytes);
  /// After the last write; many files may wait for their places.
  void finish();
  /// When it is finished.
  void take_place();

 private:
  struct state;
  std::unique_ptr<state> state_;
};

/// The file that `write_safetensors` of the content writes, but for taking its place.
new_file new_safetensors(const std::filesystem::path& path, const safetensors_content& content);

}  // namespace freekv::examples
