// freekv-basis: the basis of key_subspace for a model, learnt from a text once and kept as a file.

#include <iostream>

#include "command_line.hpp"
#include "program.hpp"
#include "prompt.hpp"
#include "report.hpp"

namespace freekv::examples {
namespace {

void run(int argc, char** argv) {
  std::string model_path, text, out;
  int tokens = 7168, rank = 32, threads = 2;
  CLI::App app("Learns key_subspace's basis, the leading eigenvectors of every KV head's keys, from a text.",
               "freekv-basis");
  app.option_defaults()->always_capture_default();
  app.add_option("--model", model_path, "GGUF file")->required();
  app.add_option("--text", text, "Text; best as long as the sequences that will be decoded")->required();
  app.add_option("--tokens", tokens, "Tokens of it, at most");
  app.add_option("--rank", rank, "Dimensions; key_subspace may use fewer");
  app.add_option("--threads", threads, "Threads of llama.cpp");
  app.add_option("--out", out, "safetensors file")->required();
  if (!parsed(app, argc, argv)) return;
  const model m(model_path);
  if (rank < 1 || rank > m.shape().head_dim)
    throw choice_error("--rank " + std::to_string(rank) + " is not between 1 and head_dim " +
                       std::to_string(m.shape().head_dim));
  const auto read = first_tokens(m, text, tokens);
  const prompt_cache keys(m, read, {.folder = {}, .threads = threads}, progress_line());
  keys.learn_basis(rank).save(out);
  std::cout << out << "\n";
}

}  // namespace
}  // namespace freekv::examples

int main(int argc, char** argv) {
  return freekv::examples::exit_code_of("freekv-basis", [&] { freekv::examples::run(argc, argv); });
}
