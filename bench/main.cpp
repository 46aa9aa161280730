// freekv-bench-host: the host backend's speed beside limits and peers measured in the same run.

#include <algorithm>
#include <filesystem>
#include <iostream>

#include "command_line.hpp"
#include "fatal_signals.hpp"
#include "measure.hpp"
#include "program.hpp"

namespace freekv::bench {
namespace {

host::isa instructions_of(const std::string& name) {
  constexpr std::pair<const char*, host::isa> all[] = {
      {"baseline", host::isa::baseline}, {"avx2", host::isa::avx2}, {"avx512", host::isa::avx512}};
  for (const auto& [known, set] : all) {
    if (name != known) continue;
    if (set > host::best_isa())
      throw examples::choice_error("--instructions " + name + ": this machine or build has " +
                                   std::string(host::name_of(host::best_isa())) + " at best");
    return set;
  }
  throw examples::choice_error("--instructions " + name +
                               " is unknown; choose among baseline, avx2 and avx512");
}

void run(int argc, char** argv) {
  std::string out = ".", commit = "unknown";
  std::vector<int> threads{1, 2};
  const std::vector<std::string> all_parts{"score", "recall", "step", "two_levels", "decoding"};
  const std::string part_names = CLI::detail::join(all_parts, ", ");
  std::vector<std::string> parts = all_parts, texts;
  std::string only, model, chosen;
  int rounds = 15;
  bool smoke = false;
  CLI::App app("Measures stages and steps of the host backend beside limits and peers of the same run.",
               "freekv-bench-host");
  app.option_defaults()->always_capture_default();
  app.add_option("--out", out, "Folder for host.jsonl and host.txt")->take_last();
  app.add_option("--commit", commit, "Of this build, for the results");
  app.add_option("--threads", threads, "Threads; several allowed")->delimiter(',');
  app.add_option("--instructions", chosen, "baseline, avx2 or avx512; without it the best there are")
      ->take_last();
  app.add_option("--part", parts, part_names + "; several allowed")->delimiter(',');
  app.add_option("--model", model, "Of decoding: a GGUF file; without one it is left out")->take_last();
  app.add_option("--text", texts, "Of decoding: files to decode; several allowed")->delimiter(',');
  app.add_option("--case", only, "Those alone whose names hold this")->take_last();
  app.add_option("--rounds", rounds, "Of each measurement, whose median counts");
  app.add_flag("--smoke", smoke, "Small sizes, to see that it runs: its figures mean nothing");
  if (!examples::parsed(app, argc, argv)) return;
  if (rounds < 1) throw examples::choice_error("--rounds " + std::to_string(rounds) + " is below 1");
  for (const int count : threads)
    if (count < 1) throw examples::choice_error("--threads " + std::to_string(count) + " is below 1");
  for (const std::string& part : parts)
    if (std::find(all_parts.begin(), all_parts.end(), part) == all_parts.end())
      throw examples::choice_error("--part " + part + " is unknown; choose among: " + part_names);
  const host::isa instructions = chosen.empty() ? host::best_isa() : instructions_of(chosen);
  const machine on = this_machine();
  std::filesystem::create_directories(out);
  examples::json_lines lines(out + "/host.jsonl", {{"machine", on.processor},
                                                   {"last_level_cache", on.last_level_cache},
                                                   {"cores", on.cores},
                                                   {"instructions", host::name_of(instructions)},
                                                   {"compiler", __VERSION__},
                                                   {"smoke", smoke},
                                                   {"commit", commit}});
  examples::note_remark("what was measured by then is in '" + out + "/host.jsonl.part'");
  std::vector<std::vector<std::string>> table{{"bench", "figure", "measured", "target", ""}};
  std::map<std::string, double> kept;
  for (const int count : threads) {
    context c{on, count, instructions, rounds, smoke, only, lines, table, kept};
    for (const std::string& part : parts) {
      examples::note_stage("measuring " + part + ", --threads " + std::to_string(count));
      if (part == "score")
        bench_scoring(c);
      else if (part == "recall") {
        if (count == threads.front()) bench_recall(c);
      } else if (part == "step")
        bench_steps(c);
      else if (part == "two_levels") {
        if (count == threads.front()) bench_two_levels(c);
      } else if (count == threads.back() && !model.empty()) {
        bench_decoding(c, model, texts, out);
      }
    }
  }
  examples::note_stage("finishing");
  lines.finish();
  examples::note_remark("");
  const std::string text = on.processor + ", " + std::to_string(on.last_level_cache >> 20) +
                           " MiB of last-level cache, " + std::string(host::name_of(instructions)) +
                           (smoke ? "; smoke: figures mean nothing" : "") + "\n" + examples::table(table);
  std::cout << text;
  std::ofstream(out + "/host.txt") << text;
}

}  // namespace
}  // namespace freekv::bench

int main(int argc, char** argv) {
  return freekv::examples::exit_code_of("freekv-bench-host", [&] { freekv::bench::run(argc, argv); });
}
