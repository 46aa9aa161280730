// freekv-model-shape: the shape that a GGUF model's keys and values have here, "HEAD_DIM ELEMENT", as
// FREEKV_HEAD_DIMS and FREEKV_ELEMENTS know them. Reads the file's header alone and is built in seconds:
// examples/run.sh asks it what to compile.

#include <gguf.h>

#include <cstdint>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>

#include "fatal_signals.hpp"
#include "program.hpp"

namespace {

/// A number under `key`, or the first of an array of one a layer; 0 for none.
std::int64_t number_in(const gguf_context* file, const std::string& key) {
  const std::int64_t id = gguf_find_key(file, key.c_str());
  if (id < 0) return 0;
  const bool is_array = gguf_get_kv_type(file, id) == GGUF_TYPE_ARRAY;
  const gguf_type type = is_array ? gguf_get_arr_type(file, id) : gguf_get_kv_type(file, id);
  if ((type != GGUF_TYPE_UINT32 && type != GGUF_TYPE_INT32) || (is_array && gguf_get_arr_n(file, id) == 0))
    throw std::runtime_error("its " + key + " is no number of 32 bits");
  if (is_array) return *static_cast<const std::int32_t*>(gguf_get_arr_data(file, id));
  return type == GGUF_TYPE_UINT32 ? gguf_get_val_u32(file, id) : gguf_get_val_i32(file, id);
}

std::int64_t head_dim_of(const gguf_context* file) {
  const std::int64_t id = gguf_find_key(file, "general.architecture");
  if (id < 0 || gguf_get_kv_type(file, id) != GGUF_TYPE_STRING)
    throw std::runtime_error("it names no general.architecture");
  const std::string architecture = gguf_get_val_str(file, id);
  if (const auto length = number_in(file, architecture + ".attention.key_length"); length > 0) return length;
  const auto width = number_in(file, architecture + ".embedding_length");
  const auto heads = number_in(file, architecture + ".attention.head_count");
  if (width < 1 || heads < 1) throw std::runtime_error("it does not say how wide its attention heads are");
  return width / heads;
}

void run(const std::string& path) {
  const std::unique_ptr<gguf_context, decltype(&gguf_free)> file(
      gguf_init_from_file(path.c_str(), {true, nullptr}), gguf_free);
  if (!file) throw std::runtime_error("it cannot be read; give the path of a complete GGUF file");
  // The engine asks llama.cpp for a cache of half precision, whatever the weights are.
  std::cout << head_dim_of(file.get()) << " half\n";
}

}  // namespace

int main(int argc, char** argv) {
  using namespace freekv::examples;
  return exit_code_of("freekv-model-shape", [&] {
    if (argc != 2) throw std::runtime_error("give the path of a GGUF file, and nothing else");
    note_stage("reading a model's header");
    note_detail(argv[1]);
    ggml_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    try {
      run(argv[1]);
    } catch (const std::runtime_error& e) {
      throw std::runtime_error("model '" + std::string(argv[1]) + "': " + e.what());
    }
  });
}
