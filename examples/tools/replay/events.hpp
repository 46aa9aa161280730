// What happens to the sequences of a server, one JSON object a line: the file of --events.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <freekv/pipeline/step_input.hpp>

#include "trace.hpp"

namespace freekv::examples {

/// The rows one sequence brings to a step.
struct event_rows {
  std::size_t sequence = 0;  ///< which, in `event_file::names`
  int tokens = 1;
  step_phase phase = step_phase::decode;
};

struct event {
  enum class kind : std::uint8_t { open, prompt, step, truncate, fork, preempt, restore, release };
  kind what{};
  int line = 0;
  std::size_t sequence = 0;
  std::size_t other = 0;           ///< open: which trace; fork: the child
  int length = 0;                  ///< truncate
  std::vector<event_rows> rows{};  ///< prompt, which has one, and step
};

/// A file of events whose every line has been looked at: whether it says something, of sequences that are
/// there, with rows that their traces have. What may still fail is the room in the pools.
struct event_file {
  std::vector<event> events;
  std::vector<std::string> names;             ///< of sequences
  std::vector<std::filesystem::path> traces;  ///< a file each, in the order of their first use
  std::vector<trace_form> forms;              ///< of the traces, alike in all but lengths
  int most_sequences = 0, longest = 0, most_decode_rows = 1;
};

/// Relative names of traces count from the working directory, or else from the file's folder. `element`: what
/// --dtype asks for. Throws file_error or choice_error, which names the line.
event_file read_events(const std::filesystem::path& path, std::optional<data_type> element,
                       bool scale_is_given = false);

}  // namespace freekv::examples
