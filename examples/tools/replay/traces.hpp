// Which traces a replay reads, and where what it finds is written.
#pragma once

#include <filesystem>
#include <optional>
#include <utility>
#include <vector>

#include "options.hpp"
#include "trace.hpp"

namespace freekv::examples {

/// One layer to replay.
struct replay_job {
  std::filesystem::path trace;
  std::optional<std::filesystem::path> out;
  trace_form form{};
};

/// The folder of --out where a folder of traces is replayed: made if there is none, and gone with this object
/// if nothing was written into it.
class output_folder {
 public:
  output_folder() = default;
  /// Throws choice_error.
  explicit output_folder(std::filesystem::path path);
  output_folder(output_folder&& other) noexcept : made_(std::exchange(other.made_, {})) {}
  output_folder& operator=(output_folder&& other) noexcept {
    std::swap(made_, other.made_);
    return *this;
  }
  ~output_folder();

 private:
  std::filesystem::path made_;  // empty: none
};

/// All that a command line asks for. Whatever can be seen to fail before data is read or computed has been
/// looked at: a long replay must not end in such a sentence.
struct replay_jobs {
  bool of_folder = false;
  std::vector<replay_job> layers;  ///< a folder's by the layer that they name, then by file name
  output_folder out{};
};

/// Throws file_error or choice_error.
replay_jobs jobs_of(const replay_options& options);

/// Throws choice_error where `out` cannot be written, or is an input: one of `read`, the basis or the head
/// list.
void check_output(const replay_options& o, const std::filesystem::path& out,
                  const std::vector<std::filesystem::path>& read);

/// What --dtype asks for; nothing: as in the trace.
std::optional<data_type> wanted_element(const std::string& dtype);

}  // namespace freekv::examples
