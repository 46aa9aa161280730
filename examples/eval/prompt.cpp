#include "prompt.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <freekv/core/size.hpp>
#include <fstream>
#include <future>
#include <system_error>

#include "cited.hpp"
#include "text_file.hpp"

namespace freekv::examples {

namespace {

constexpr const char* flash_state = ".flash.state";
constexpr std::uint64_t fnv_start = 14695981039346656037u;

std::uint64_t fnv(std::span<const std::byte> bytes, std::uint64_t hash) {
  for (const std::byte b : bytes) hash = (hash ^ static_cast<std::uint64_t>(b)) * 1099511628211u;
  return hash;
}

std::string hexadecimal(std::uint64_t key) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(key));
  return text.data();
}

std::filesystem::path file_for(const prompt_cache::place& place, std::span<const llama_token> tokens,
                               const std::string& what) {
  if (place.folder.empty()) return {};
  std::filesystem::create_directories(place.folder);
  const std::uint64_t key = fnv(std::as_bytes(tokens), place.model_key);
  return place.folder / (hexadecimal(key) + "-" + std::to_string(tokens.size()) + what);
}

/// The file of that name and ending; none for an empty name.
std::filesystem::path beside(std::filesystem::path name, const std::string& ending) {
  if (!name.empty()) name += ending;
  return name;
}

/// Collects what passes by during a prefill of `tokens` tokens, from position `first` on.
class collector : public observer {
 public:
  struct into {
    std::vector<std::uint16_t>*keys, *values, *queries;  // null: not wanted
  };
  collector(const model_shape& shape, int first, int tokens, const into& to)
      : first_(first), tokens_(to_size(tokens)) {
    const auto kv_row = to_size(shape.kv_heads * shape.head_dim);
    parts_ = {{{to.keys, &layer_rows::key, kv_row},
               {to.values, &layer_rows::value, kv_row},
               {to.queries, &layer_rows::query, to_size(shape.query_heads * shape.head_dim)}}};
    for (const part& p : parts_)
      if (p.to != nullptr) p.to->resize(to_size(shape.layers) * tokens_ * p.row);
  }
  void observe(const layer_rows& rows) override {
    const std::size_t at = to_size(rows.layer) * tokens_ + to_size(rows.position - first_);
    for (const part& p : parts_)
      for (std::size_t i = 0; p.to != nullptr && i < to_size(rows.rows) * p.row; ++i)
        (*p.to)[at * p.row + i] =
            float_to_half((rows.*p.from)[i]);  // keys and values come from a half's cache
  }

 private:
  struct part {
    std::vector<std::uint16_t>* to;
    const float* layer_rows::*from;
    std::size_t row;
  };
  int first_;
  std::size_t tokens_;
  std::array<part, 3> parts_;
};

/// Pseudo tokens behind a prompt: tokens of it from all over, in their order. DapQ finds that positions tell
/// more than what the tokens are.
std::vector<llama_token> pseudo_tokens(std::span<const llama_token> prompt, int count) {
  std::vector<llama_token> tokens;
  for (std::size_t i = 0; i < to_size(count); ++i)
    tokens.push_back(prompt[i * prompt.size() / to_size(count)]);
  return tokens;
}

engine::prefill_options reporting(observer* seen_by, std::span<const llama_token> tokens,
                                  const progress_function& progress, const std::string& what) {
  return {seen_by, [&progress, what, total = tokens.size()](int done) {
            progress(what, static_cast<double>(done) / static_cast<double>(total));
          }};
}

}  // namespace

std::string read_text(const std::filesystem::path& path) { return read_text_file(path, "give a text file"); }

std::vector<llama_token> first_tokens(const model& model, const std::filesystem::path& path, int count) {
  auto tokens = model.tokenize(read_text(path));
  if (static_cast<int>(tokens.size()) < count)
    throw choice_error(cited_path(path) + " has " + std::to_string(tokens.size()) + " tokens, but " +
                       std::to_string(count) + " are needed; give a longer text or ask for fewer tokens");
  tokens.resize(to_size(count));
  return tokens;
}

std::uint64_t key_of_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw file_error(cited_path(path) + " cannot be read; give the path of a file that can");
  std::vector<char> block(1 << 20);
  std::uint64_t hash = fnv_start;
  while (file.read(block.data(), static_cast<std::streamsize>(block.size())), file.gcount() > 0)
    hash = fnv(std::as_bytes(std::span(block)).first(to_size(file.gcount())), hash);
  return hash;
}

prompt_cache::prompt_cache(const model& model, std::span<const llama_token> tokens, const place& at,
                           const progress_function& progress)
    : shape_(model.shape()),
      tokens_(static_cast<int>(tokens.size())),
      threads_(at.threads),
      name_(file_for(at, tokens, "")) {
  const auto path = beside(name_, ".kv.safetensors"), query_path = beside(name_, ".q.safetensors"),
             probe_path = beside(name_, ".probes.safetensors");
  const auto shape_of = [&](int rows, int heads) {
    return std::vector<std::int64_t>{shape_.layers, rows, heads, shape_.head_dim};
  };
  const auto expected = shape_of(tokens_, shape_.kv_heads),
             expected_queries = shape_of(tokens_, shape_.query_heads),
             expected_probes = shape_of(at.probes, shape_.query_heads);
  const auto read_queries = [](const std::filesystem::path& from, const std::vector<std::int64_t>& shape,
                               std::vector<std::uint16_t>& to) {
    if (!std::filesystem::exists(from)) return false;
    const safetensors_file file(from);
    if (file.at("q").shape != shape) return false;
    to = file.copy<std::uint16_t>("q");
    return true;
  };
  if (!path.empty() && std::filesystem::exists(path)) {
    const safetensors_file file(path);
    if (file.at("k").shape == expected && file.at("v").shape == expected &&
        (!at.queries || read_queries(query_path, expected_queries, queries_)) &&
        (at.probes == 0 || read_queries(probe_path, expected_probes, probes_))) {
      keys_ = file.copy<std::uint16_t>("k");
      values_ = file.copy<std::uint16_t>("v");
      return;
    }
  }
  collector collected(shape_, 0, tokens_, {&keys_, &values_, at.queries ? &queries_ : nullptr});
  engine prefilling(model, {.threads = at.threads, .context = tokens_ + at.probes});
  prefilling.prefill(
      tokens, 0,
      reporting(&collected, tokens, progress, "prefill of " + std::to_string(tokens_) + " tokens"));
  if (!path.empty() && at.state) prefilling.save_state(file_for(at, tokens, flash_state).string());
  if (at.probes > 0) {
    collector probes(shape_, tokens_, at.probes, {nullptr, nullptr, &probes_});
    prefilling.prefill(pseudo_tokens(tokens, at.probes), tokens_, {.seen_by = &probes});
  }
  if (path.empty()) return;
  write_safetensors(path, {.tensors = {{"k", data_type::f16, expected, std::as_bytes(std::span(keys_))},
                                       {"v", data_type::f16, expected, std::as_bytes(std::span(values_))}},
                           .metadata = {{"model", shape_.name}}});
  const auto write_queries = [&](const std::filesystem::path& to, const std::vector<std::int64_t>& shape,
                                 const std::vector<std::uint16_t>& queries) {
    write_safetensors(to, {.tensors = {{"q", data_type::f16, shape, std::as_bytes(std::span(queries))}},
                           .metadata = {{"model", shape_.name}}});
  };
  if (at.queries) write_queries(query_path, expected_queries, queries_);
  if (at.probes > 0) write_queries(probe_path, expected_probes, probes_);
}

std::vector<float> prompt_cache::float_keys(int layer) const {
  const auto bytes = keys(layer);
  std::vector<float> result(bytes.size() / 2);
  for (std::size_t i = 0; i < result.size(); ++i) {
    std::uint16_t bits;
    std::memcpy(&bits, bytes.data() + 2 * i, 2);
    result[i] = half_to_float(bits);
  }
  return result;
}

void prompt_cache::restore(pipeline& pipeline) const { append_to(pipeline, pipeline.reopen()); }

sequence_id prompt_cache::open(pipeline& pipeline) const {
  const sequence_id sequence = pipeline.open();
  append_to(pipeline, sequence);
  return sequence;
}

std::vector<float> prompt_cache::layer_of(const std::vector<std::uint16_t>& queries, int layer) const {
  std::vector<float> of(queries.size() / to_size(shape_.layers));
  const auto first = queries.begin() + static_cast<std::ptrdiff_t>(to_size(layer) * of.size());
  std::transform(first, first + static_cast<std::ptrdiff_t>(of.size()), of.begin(), half_to_float);
  return of;
}

void prompt_cache::append_to(pipeline& pipeline, sequence_id sequence) const {
  const int most = std::min(tokens_, pipeline.most_prompt_rows());
  std::vector<float> queries;
  for (int done = 0; done < tokens_; done += most) {
    const step_input rows{sequence, std::min(most, tokens_ - done), step_phase::prefill};
    const auto part = [&](const auto& all) {
      const std::size_t row = all.size() / to_size(tokens_);
      return std::span(all).subspan(to_size(done) * row, to_size(rows.tokens) * row);
    };
    pipeline.begin_step({&rows, 1});
    for (int layer = 0; layer < shape_.layers; ++layer) {
      if (pipeline.observes_prompts() && !queries_.empty())
        queries = queries_before(layer, done + rows.tokens, rows.tokens, "votes");
      pipeline.append_stored(layer, part(keys(layer)), part(values(layer)), queries);
    }
    pipeline.end_step();
    if (!pipeline.takes_probes() || (!pipeline.cuts_blocks() && done + rows.tokens < tokens_)) continue;
    for (int layer = 0; layer < shape_.layers; ++layer)
      pipeline.observe(sequence, layer, layer_of(probes_, layer));
  }
}

key_basis prompt_cache::learn_basis(basis_rows rows, int rank) const {
  if (rows == basis_rows::pairs) return choose_pairs(rank);
  if (rows == basis_rows::axes && rank > shape_.head_dim)
    throw choice_error("a basis of " + std::to_string(rank) +
                       " axes is for keys of at least as many numbers, and this "
                       "model's have " +
                       std::to_string(shape_.head_dim) + "; leave the row out by --variant");
  key_basis basis(shape_.layers, shape_.kv_heads, rank, shape_.head_dim);
  for (int layer = 0; layer < shape_.layers; ++layer)
    if (rows == basis_rows::axes)
      basis.learn(layer, float_keys(layer));
    else if (rows == basis_rows::hyperplanes)
      basis.draw(layer, float_keys(layer));
    else
      basis.cluster(layer, float_keys(layer));
  return basis;
}

std::vector<float> prompt_cache::queries_before(int layer, int end, int rows, const char* what) const {
  if (queries_.empty())
    throw usage_error(std::string(what) + " are found by queries, and this prompt has none kept");
  const std::size_t row = to_size(shape_.query_heads * shape_.head_dim);
  std::vector<float> queries(to_size(rows) * row);
  const auto first =
      queries_.begin() + static_cast<std::ptrdiff_t>(to_size(layer * tokens_ + end - rows) * row);
  std::transform(first, first + static_cast<std::ptrdiff_t>(queries.size()), queries.begin(), half_to_float);
  return queries;
}

key_basis prompt_cache::choose_pairs(int rank) const {
  if (!shape_.pairs)
    throw choice_error(
        "rotary pairs are chosen of keys whose numbers all turn, and this model's file says of no such ones; "
        "take another model");
  key_basis basis(shape_.layers, shape_.kv_heads, rank, shape_.head_dim);
  const int rows = std::min(tokens_, rows_that_choose);
  for (int layer = 0; layer < shape_.layers; ++layer)
    basis.choose_pairs(layer, float_keys(layer), queries_before(layer, tokens_, rows, "rotary pairs"), rows,
                       *shape_.pairs);
  return basis;
}

std::vector<float> prompt_cache::learn_temperatures(const pipeline_options& options) const {
  std::vector<float> all(to_size(shape_.layers * shape_.kv_heads));
  const int rows = std::min(tokens_, rows_that_calibrate);
  for (int layer = 0; layer < shape_.layers; ++layer)
    calibrate(options, layer, float_keys(layer), queries_before(layer, tokens_, rows, "temperatures"),
              std::span(all).subspan(to_size(layer * shape_.kv_heads), to_size(shape_.kv_heads)));
  return all;
}

std::vector<std::uint8_t> prompt_cache::learn_channels(const method_spec& method) const {
  const std::size_t of_layer = to_size(shape_.kv_heads * shape_.head_dim / 8);
  std::vector<std::uint8_t> all(to_size(shape_.layers) * of_layer);
  const int rows = std::min(tokens_, rows_that_choose_channels);
  for (int layer = 0; layer < shape_.layers; ++layer)
    choose_key_channels({shape_.query_heads, shape_.kv_heads}, shape_.head_dim,
                        key_channels{method.pruned}.kept(shape_.head_dim), float_keys(layer),
                        queries_before(layer, tokens_, rows, "channels of keys"),
                        std::span(all).subspan(to_size(layer) * of_layer, of_layer));
  return all;
}

key_basis prompt_cache::learn_factors(int rank) const {
  key_basis factors(shape_.layers, shape_.kv_heads, std::min(rank, shape_.kv_heads * shape_.head_dim),
                    shape_.head_dim);
  for (int layer = 0; layer < shape_.layers; ++layer)
    factors.factorise(
        layer, rotated(float_keys(layer), shape_.kv_heads, shape_.head_dim, shape_.rotary.value(), -1.0f));
  return factors;
}

codebook_set prompt_cache::learn_codebooks(const codebook_sizes& sizes,
                                           const progress_function& progress) const {
  constexpr int recipe = 3;  // counts up when the same keys would give other codebooks
  codebook_set set(shape_.layers, shape_.kv_heads, shape_.head_dim, sizes);
  const key_codebooks wanted = set.view();
  const auto text = [](int n) { return std::to_string(n); };
  const auto path = beside(name_, ".codebooks-" + text(wanted.codes) + "x" + text(wanted.dims) + "-" +
                                      text(wanted.mean_codes) + "x" + text(wanted.mean_dims) + "-page-" +
                                      text(sizes.page) + "-" + text(recipe) + ".safetensors");
  if (!path.empty() && std::filesystem::exists(path)) {
    codebook_set kept = codebook_set::load(path);
    const key_codebooks found = kept.view();
    if (found.layers == wanted.layers && found.kv_heads == wanted.kv_heads &&
        found.head_dim == wanted.head_dim && found.mean_codes == wanted.mean_codes &&
        found.mean_dims == wanted.mean_dims && found.codes == wanted.codes && found.dims == wanted.dims)
      return kept;
  }
  std::atomic<int> next = 0;
  const auto learn = [&](bool tells) {
    for (int layer; (layer = next++) < shape_.layers;) {
      if (tells)
        progress("codebooks of " + text(tokens_) + " tokens", static_cast<double>(layer) / shape_.layers);
      set.learn(layer, float_keys(layer));
    }
  };
  std::vector<std::future<void>> others;
  try {
    for (int thread = 1; thread < threads_; ++thread)
      others.push_back(std::async(std::launch::async, learn, false));
  } catch (const std::system_error&) {  // those that there are learn all of it
  }
  learn(true);
  for (auto& other : others) other.get();
  if (!path.empty()) set.save(path);
  return set;
}

void restore_stock(engine& stock, std::span<const llama_token> tokens, bool flash_attention,
                   const prompt_cache::place& place, const progress_function& progress, int sequence) {
  const auto path = file_for(place, tokens, flash_attention ? flash_state : ".plain.state");
  if (!path.empty() && std::filesystem::exists(path)) {
    try {
      return stock.load_state(path.string(), sequence);
    } catch (const engine_error&) {
      std::filesystem::remove(path);  // of another llama.cpp, or cut short
    }
  }
  stock.truncate(0, sequence);
  const std::string what =
      std::string("prefill by llama.cpp ") + (flash_attention ? "with" : "without") + " flash attention";
  auto how = reporting(nullptr, tokens, progress, what);
  how.sequence = sequence;
  stock.prefill(tokens, 0, how);
  if (!path.empty()) stock.save_state(path.string(), sequence);
}

}  // namespace freekv::examples
