// freekv-basis: the basis of key_subspace and the codebooks of key_codes for a model, learnt from texts once
// and kept as files.

#include <iostream>
#include <string>
#include <vector>

#include "command_line.hpp"
#include "fatal_signals.hpp"
#include "program.hpp"
#include "prompt.hpp"
#include "report.hpp"

namespace freekv::examples {
namespace {

void run(int argc, char** argv) {
  std::string model_path, out, codebooks;
  std::vector<std::string> texts;
  bool pairs = false, clusters = false, hyperplanes = false;
  int tokens = 7168, rank = 32, codes = 6, page = 32, threads = 2;
  CLI::App app(
      "Learns key_subspace's basis, the leading eigenvectors of every KV head's keys, and key_codes' "
      "codebooks from a "
      "text.",
      "freekv-basis");
  app.option_defaults()->always_capture_default();
  app.add_option("--model", model_path, "GGUF file")->required();
  app.add_option(
         "--text", texts,
         "Text, best as long as the sequences that will be decoded; of several, each gives an equal share")
      ->required();
  app.add_option("--tokens", tokens, "Tokens in all");
  app.add_option(
      "--rank", rank,
      "Dimensions, of which key_subspace may use fewer, clusters, or hyperplanes, bits times tables");
  app.add_flag("--pairs", pairs,
               "The basis is the rotary pairs that the text's last rows choose, as variant fasa has it");
  app.add_flag("--clusters", clusters,
               "The basis is the centroids of as many clusters as --rank says, as key_clusters has them");
  app.add_flag(
      "--hyperplanes", hyperplanes,
      "The basis is the mean key and as many random hyperplanes as --rank says, as key_signatures has "
      "them");
  app.add_option("--codes", codes, "Codes of a token; key_codes must use as many");
  app.add_option("--page", page, "Tokens in the pages whose means have codes");
  app.add_option("--threads", threads, "Threads of llama.cpp and of learning codebooks");
  app.add_option("--out", out, "safetensors file for the basis");
  app.add_option("--codebooks", codebooks, "safetensors file for the codebooks");
  if (!parsed(app, argc, argv)) return;
  if (out.empty() && codebooks.empty())
    throw choice_error("nothing is learnt; give --out for the basis, --codebooks for the codebooks, or both");
  if (page < 1) throw choice_error("--page " + std::to_string(page) + " is not 1 or more");
  note_stage("loading the model");
  const model m(model_path);
  note_stage("learning");
  if (pairs + clusters + hyperplanes > 1)
    throw choice_error("--pairs, --clusters and --hyperplanes are bases of their own; give one of them");
  const basis_rows rows = clusters      ? basis_rows::centroids
                          : hyperplanes ? basis_rows::hyperplanes
                          : pairs       ? basis_rows::pairs
                                        : basis_rows::axes;
  if (rank < 1 || (rank > m.shape().head_dim && !clusters && !hyperplanes))
    throw choice_error("--rank " + std::to_string(rank) + " is not between 1 and head_dim " +
                       std::to_string(m.shape().head_dim));
  if (codes < 1 || codes > m.shape().head_dim)
    throw choice_error("--codes " + std::to_string(codes) + " is not between 1 and head_dim " +
                       std::to_string(m.shape().head_dim));
  if (tokens < static_cast<int>(texts.size()))
    throw choice_error("--tokens " + std::to_string(tokens) + " is less than one for each text");
  std::vector<llama_token> read;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const int left = tokens - static_cast<int>(read.size());
    const auto part = first_tokens(m, texts[i], left / static_cast<int>(texts.size() - i));
    read.insert(read.end(), part.begin(), part.end());
  }
  const prompt_cache keys(m, read, {.folder = {}, .threads = threads, .queries = pairs}, progress_line());
  if (!out.empty()) {
    keys.learn_basis(rows, rank).save(out);
    std::cout << out << "\n";
  }
  if (!codebooks.empty()) {
    keys.learn_codebooks(codebook_sizes::of_codes(codes, m.shape().head_dim, page), progress_line())
        .save(codebooks);
    std::cout << codebooks << "\n";
  }
}

}  // namespace
}  // namespace freekv::examples

int main(int argc, char** argv) {
  return freekv::examples::exit_code_of("freekv-basis", [&] { freekv::examples::run(argc, argv); });
}
