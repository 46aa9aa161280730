// The main job: full attention, a sliding window and retrieval side by side, in llama.cpp, on a real text.

#include <chrono>
#include <iostream>
#include <vector>

#include "fatal_signals.hpp"
#include "job.hpp"
#include "program.hpp"

namespace freekv::examples {
namespace {

/// Runs the sections asked for, and says before each how long those so far took and, where their usual shares
/// are known, how long is to come.
void run(const arguments& wanted) {
  const auto began = std::chrono::steady_clock::now();
  job j(wanted);
  std::vector<const section*> chosen;
  double to_come = 0, done = 0;
  bool shares_hold = !wanted.full;
  for (const section& s : sections())
    if (wanted.does(s.name)) {
      chosen.push_back(&s);
      to_come += s.usual_share;
      shares_hold = shares_hold && s.usual_share > 0;
    }
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    const section& s = *chosen[i];
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    std::cerr << "part " << i + 1 << " of " << chosen.size() << ", " << s.name << "; " << fixed(seconds, 0)
              << " s so far";
    if (shares_hold && done > 0)
      std::cerr << ", about " << fixed(seconds / done * to_come, 0) << " s to come";
    std::cerr << std::endl;
    note_stage(std::string("measuring ") + s.name);
    s.run(j);
    done += s.usual_share;
    to_come -= s.usual_share;
  }
  note_stage("finishing");
  j.finish();
}

}  // namespace
}  // namespace freekv::examples

int main(int argc, char** argv) {
  using namespace freekv::examples;
  return exit_code_of("freekv-compare", [&] { run(parse_arguments(argc, argv)); });
}
