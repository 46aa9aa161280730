// The main job: full attention, a sliding window and retrieval side by side, in llama.cpp, on a real text.

#include "job.hpp"
#include "program.hpp"

int main(int argc, char** argv) {
  using namespace freekv::examples;
  return exit_code_of("freekv-compare", [&] {
    const arguments wanted = parse_arguments(argc, argv);
    job j(wanted);
    for (const section& s : sections())
      if (wanted.does(s.name)) s.run(j);
    j.finish();
  });
}
