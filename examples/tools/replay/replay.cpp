// freekv-replay: recorded layers through any variant; selections and outputs as tensors, a summary as JSON.

#include <filesystem>
#include <iostream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "choices.hpp"
#include "cited.hpp"
#include "fatal_signals.hpp"
#include "layer_setup.hpp"
#include "options.hpp"
#include "pipeline.hpp"
#include "program.hpp"
#include "progress.hpp"
#include "replay_events.hpp"
#include "replay_layer.hpp"
#include "summary.hpp"
#include "temporary_files.hpp"
#include "traces.hpp"

namespace freekv::examples {
namespace {

/// Runs `body` for one layer of several: whatever is wrong, the sentence says in which file.
template <class Body>
void for_layer(const replay_jobs& jobs, const replay_job& job, const Body& body) {
  if (!jobs.of_folder) return body();
  try {
    body();
  } catch (const file_error&) {
    throw;  // names its file
  } catch (const std::runtime_error& e) {
    throw choice_error(cited_path(job.trace) + ": " + e.what());
  }
}

void print(const nlohmann::ordered_json& summary) {
  std::cout << summary.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << std::endl;
  if (!std::cout)
    throw choice_error("the summary cannot be written to standard output; check where it is redirected");
}

/// A store's file is created with its store and goes with it; listed, also if a signal ends the program.
temporary_name store_name(const replay_options& o) {
  std::error_code ignored;
  if (!o.store_file ||
      std::filesystem::symlink_status(*o.store_file, ignored).type() != std::filesystem::file_type::not_found)
    return {};  // a folder, or what is not ours
  return temporary_name(*o.store_file);
}

void run(int argc, char** argv) {
  const auto parsed = parse_replay_options(argc, argv);
  if (!parsed) return;
  const replay_options& o = *parsed;
  const temporary_name store = store_name(o);
  // Selection for the next step has nothing to hide behind here, so it does not go to a thread of its own.
  const host_options host{.threads = o.threads, .overlap = false};
  host_backend backend(host);
  if (o.events) {
    note_stage("replaying events with " + o.variant);
    auto replayed = replay_events(o, backend);
    print(replayed.summary);
    if (replayed.written) replayed.written->take_place();
    return;
  }
  note_stage("reading headers");
  const replay_jobs jobs = jobs_of(o);
  const basis_file file = basis_file_of(o);
  for (const replay_job& job : jobs.layers)
    for_layer(jobs, job, [&] { check_layer(options_of_layer(o, job.form), job, file); });

  std::vector<layer_result> results;
  note_stage("replaying with " + o.variant);
  {
    progress_line progress("freekv-replay");
    for (const replay_job& job : jobs.layers) {
      if (jobs.of_folder)
        progress.part("layer " + std::to_string(results.size() + 1) + " of " +
                      std::to_string(jobs.layers.size()) + ", " + job.trace.filename().string());
      for_layer(jobs, job, [&] {
        results.push_back(replay_layer(options_of_layer(o, job.form), job, {backend, file, progress}));
      });
    }
  }
  const auto summary = jobs.of_folder
                           ? summary_of(o, host, jobs.layers, results)
                           : summary_of(options_of_layer(o, jobs.layers.front().form), host, results.front());
  print(summary);
  // A replay that fails, if by its summary, has replaced nothing.
  for (layer_result& result : results)
    if (result.written) result.written->take_place();
}

}  // namespace
}  // namespace freekv::examples

int main(int argc, char** argv) {
  return freekv::examples::exit_code_of("freekv-replay", [&] { freekv::examples::run(argc, argv); });
}
