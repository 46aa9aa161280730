#include "traces.hpp"

#include <algorithm>
#include <limits>
#include <system_error>
#include <utility>

#include "cited.hpp"
#include "pipeline.hpp"

namespace freekv::examples {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const std::string& sentence) { throw choice_error(sentence); }

/// The same file, under whatever names.
bool same(const fs::path& a, const fs::path& b) {
  std::error_code not_there;
  return fs::equivalent(a, b, not_there);
}

bool reads_basis_file(const replay_options& o) {
  return o.basis != "prompt" && !o.basis.empty() && (o.method.needs_basis() || o.method.needs_codebooks());
}

/// Everything in `folder` that is named like a trace, except the basis, which may lie beside them.
std::vector<fs::path> traces_in(const replay_options& o, const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code fault;
  for (fs::directory_iterator entry(folder, fault), end; !fault && entry != end; entry.increment(fault)) {
    const fs::path& path = entry->path();
    std::error_code ignored;
    if (path.extension() == ".safetensors" && !fs::is_directory(path, ignored) &&
        !(reads_basis_file(o) && same(path, o.basis)))
      found.push_back(path);
  }
  if (fault) refuse(cited_path(folder) + " cannot be listed: " + fault.message());
  if (found.empty())
    refuse(cited_path(folder) +
           " is a directory without a trace: none of its files ends in .safetensors; name a " +
           "folder that freekv-record or record_hf.py wrote");
  return found;
}

void order_by_layer(std::vector<replay_job>& jobs) {
  const auto key = [](const replay_job& job) {  // those that name no layer come last
    return std::pair(job.form.layer.value_or(std::numeric_limits<int>::max()), job.trace.filename());
  };
  std::sort(jobs.begin(), jobs.end(),
            [&](const replay_job& a, const replay_job& b) { return key(a) < key(b); });
}

}  // namespace

void check_output(const replay_options& o, const fs::path& out, const std::vector<fs::path>& read) {
  check_writable(out);
  if (std::any_of(read.begin(), read.end(), [&](const fs::path& path) { return same(out, path); }) ||
      (o.basis != "prompt" && same(out, o.basis)) || (o.heads && same(out, *o.heads)) ||
      (o.by_layer && same(out, *o.by_layer)))
    refuse("--out " + cited_path(out) + " is an input too, and would be overwritten; name another file");
}

output_folder::output_folder(std::filesystem::path path) {
  std::error_code fault;
  if (fs::exists(path, fault)) {
    if (!fs::is_directory(path, fault))
      refuse(
          "--out " + cited_path(path) +
          " is a file, but a folder of traces is replayed into a folder; name one that is there or can be " +
          "made");
    return;
  }
  if (!fs::create_directory(path, fault) && fault)
    refuse("--out " + cited_path(path) + " cannot be made: " + fault.message());
  made_ = std::move(path);
}

output_folder::~output_folder() {
  std::error_code not_empty;
  if (!made_.empty()) fs::remove(made_, not_empty);
}

std::optional<data_type> wanted_element(const std::string& dtype) {
  if (dtype == "f32") return data_type::f32;
  if (dtype == "f16") return data_type::f16;
  if (dtype == "bf16") return data_type::bf16;
  return std::nullopt;
}

replay_jobs jobs_of(const replay_options& o) {
  replay_jobs jobs;
  std::error_code not_there;
  jobs.of_folder = fs::is_directory(o.trace, not_there);
  if (jobs.of_folder) {
    for (fs::path& trace : traces_in(o, o.trace))
      jobs.layers.push_back({.trace = std::move(trace), .out = {}});
    if (o.out) {
      if (same(*o.out, o.trace))
        refuse("--out " + cited_path(*o.out) + " is the folder of the traces; name another folder");
      jobs.out = output_folder(*o.out);
      for (replay_job& job : jobs.layers) job.out = fs::path(*o.out) / job.trace.filename();
    }
  } else {
    jobs.layers.push_back({.trace = o.trace, .out = o.out});
  }
  std::vector<fs::path> read;
  for (const replay_job& job : jobs.layers) read.push_back(job.trace);
  for (const replay_job& job : jobs.layers)
    if (job.out) check_output(o, *job.out, read);
  for (replay_job& job : jobs.layers) job.form = read_form(job.trace, wanted_element(o.dtype));
  order_by_layer(jobs.layers);
  return jobs;
}

}  // namespace freekv::examples
