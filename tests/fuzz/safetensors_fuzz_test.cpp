// Damaged safetensors files: each is read as what it says, or refused with the reader's own exception, and no
// memory is taken by a size that a file only claims.

#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "../examples/tensor_file.hpp"
#include "../files.hpp"
#include "allocations.hpp"
#include "damage.hpp"
#include "trace.hpp"

using namespace tests;
using freekv::examples::data_type;
using freekv::examples::file_error;
using freekv::examples::safetensors_file;

namespace {

const std::map<std::string, std::size_t>& bits_of_dtypes() {
  static const std::map<std::string, std::size_t> all{
      {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
      {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
      {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
      {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64}};
  return all;
}

std::string some_bytes(std::size_t count) {
  std::string bytes(count, '\0');
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<char>(i * 37 + 11);
  return bytes;
}

file_parts trace_parts(const std::string& q_dtype, const std::string& kv_dtype, std::int64_t tokens) {
  const auto tensor = [&](const std::string& dtype, std::int64_t heads) {
    return tensor_text{
        dtype,
        {tokens, heads, 8},
        some_bytes(static_cast<std::size_t>(tokens * heads * 8) * bits_of_dtypes().at(dtype) / 8)};
  };
  return parts_of({{"q", tensor(q_dtype, 4)}, {"k", tensor(kv_dtype, 2)}, {"v", tensor(kv_dtype, 2)}},
                  {{"prompt_len", "3"}, {"layer", "12"}, {"text", "caf\u00e9 \"x\""}});
}

/// Correct files to start from: header and data.
std::vector<file_parts> correct_files() {
  std::vector<file_parts> files{trace_parts("F32", "F32", 5),
                                trace_parts("F16", "BF16", 4),
                                trace_parts("BF16", "F16", 40),
                                {nlohmann::json::object(), ""}};
  file_parts empty = trace_parts("F32", "F32", 0);
  empty.header["__metadata__"]["prompt_len"] = "0";
  files.push_back(empty);
  file_parts every_dtype{nlohmann::json::object(), ""};
  for (const auto& [dtype, bits] : bits_of_dtypes()) {
    const std::size_t begin = every_dtype.data.size();
    every_dtype.data += some_bytes(bits * 8 * 3 / 8);
    every_dtype.header["of " + dtype] = {
        {"dtype", dtype}, {"shape", {8, 3}}, {"data_offsets", {begin, every_dtype.data.size()}}};
  }
  const std::size_t end = every_dtype.data.size();
  every_dtype.header["scalar"] = {
      {"dtype", "F64"}, {"shape", nlohmann::json::array()}, {"data_offsets", {end, end + 8}}};
  every_dtype.data += some_bytes(8);
  files.push_back(every_dtype);
  return files;
}

std::string damaged(std::uint64_t seed) {
  static const std::vector<file_parts> files = correct_files();
  source_of_damage d(seed);
  const file_parts& parts = d.one_of(files);
  std::string header = parts.header.dump(), data = parts.data;
  if (seed % 64 == 0) return file_of(header, data);
  const bool in_header = !d.one_in(4);  // behind it a reader never comes unless the header's length is right
  if (in_header)
    for (std::size_t faults = 1 + d.below(3); faults > 0; --faults) d.damage_text(header);
  std::string file = file_of(header, data);
  if (d.one_in(8)) {  // another length
    const std::uint64_t length = header.size();
    const std::uint64_t other = d.one_of(std::vector<std::uint64_t>{
        0, 1, 2, length - 1, length + 1, length + data.size(), length + data.size() + 1, 100'000'000,
        100'000'001, std::uint64_t{1} << 31, std::uint64_t{1} << 32, std::uint64_t{1} << 63,
        ~std::uint64_t{0} - 7, ~std::uint64_t{0}});
    std::memcpy(file.data(), &other, 8);
  }
  if (!in_header)
    for (std::size_t faults = 1 + d.below(3); faults > 0; --faults) d.damage_bytes(file);
  return file;
}

/// What was reached, so that a test can require it.
struct reached {
  long read = 0, refused = 0, traces = 0;
  std::map<std::string, long> kinds;
};

/// Calls `read`; false where it throws the project's exception, whose message is then a sentence about the
/// file. Any other exception goes on, and fails the test.
template <class Read>
bool reads(const fs::path& path, reached& seen, const Read& read) {
  try {
    read();
    return true;
  } catch (const file_error& e) {
    const std::string message = e.what();
    INFO(message);
    REQUIRE(message.find(path.string()) != std::string::npos);
    REQUIRE(message.size() < 2000);
    REQUIRE(message.back() != '.');
    ++seen.kinds[kind_of_message(message)];
    return false;
  }
}

/// A file that was accepted says what its tensors say, and its tensors are its bytes.
void check_read(const safetensors_file& file, const std::string& bytes) {
  std::uint64_t length = 0;
  REQUIRE(bytes.size() >= 8);
  std::memcpy(&length, bytes.data(), 8);
  REQUIRE(length <= bytes.size() - 8);
  const auto header = nlohmann::json::parse(bytes.substr(8, length));
  const std::string data = bytes.substr(8 + length);
  REQUIRE(header.size() == file.tensors().size() + header.count("__metadata__"));
  if (header.count("__metadata__") != 0) {
    REQUIRE(header.at("__metadata__").size() == file.metadata().size());
    for (const auto& [key, value] : file.metadata()) REQUIRE(header.at("__metadata__").at(key) == value);
  }
  std::size_t covered = 0;
  for (const auto& tensor : file.tensors()) {
    INFO(tensor.name);
    const auto& entry = header.at(tensor.name);
    REQUIRE(entry.at("dtype") == freekv::examples::dtype_name(tensor.dtype));
    REQUIRE(entry.at("shape").get<std::vector<std::int64_t>>() == tensor.shape);
    const auto begin = entry.at("data_offsets").at(0).get<std::size_t>(),
               end = entry.at("data_offsets").at(1).get<std::size_t>();
    REQUIRE(begin == covered);  // in the order of the data, without gaps
    covered = end;
    REQUIRE(end <= data.size());
    REQUIRE(tensor.bytes.size() == end - begin);
    REQUIRE((data.compare(begin, end - begin, reinterpret_cast<const char*>(tensor.bytes.data()),
                          tensor.bytes.size()) == 0));
    long double elements = 1;  // holds what 64 bits do not
    for (const std::int64_t extent : tensor.shape) {
      REQUIRE(extent >= 0);
      elements *= static_cast<long double>(extent);
    }
    const auto bits = static_cast<long double>(bits_of_dtypes().at(entry.at("dtype")));
    REQUIRE(elements * bits == static_cast<long double>(tensor.bytes.size()) * 8);
  }
  REQUIRE(covered == data.size());
}

void check_trace(const freekv::examples::trace& t, const freekv::examples::trace_form& form) {
  const auto tokens = static_cast<std::size_t>(t.tokens), width = static_cast<std::size_t>(t.head_dim);
  const std::size_t element = t.element == data_type::f32 ? 4 : 2;
  REQUIRE(t.queries.size() == tokens * static_cast<std::size_t>(t.query_heads) * width);
  REQUIRE(t.keys.size() == tokens * static_cast<std::size_t>(t.kv_heads) * width * element);
  REQUIRE(t.values.size() == t.keys.size());
  REQUIRE(t.prompt_len >= 0);
  REQUIRE(t.prompt_len <= t.tokens);
  REQUIRE(t.kv_heads >= 1);
  REQUIRE(t.query_heads % t.kv_heads == 0);
  REQUIRE(t.prompt_keys().size() * element * tokens ==
          t.keys.size() * static_cast<std::size_t>(t.prompt_len));
  REQUIRE(form.tokens == t.tokens);
  REQUIRE(form.element == t.element);
}

/// Largest array that a file of `bytes` may make its reader take: F16 become floats, and headers become
/// trees.
std::size_t most_memory(const std::string& bytes) { return 64 * bytes.size() + 65536; }

}  // namespace

TEST_CASE("damaged safetensors files are read as what they say or refused in a sentence", "[fuzz]") {
  const scratch_folder folder;
  const fs::path path = folder / "damaged.safetensors";
  reached seen;
  const long cases = for_seeds(15000, [&](std::uint64_t seed) {
    const std::string bytes = damaged(seed);
    fs::remove(path);  // a truncated file is flushed to its disk
    store(path, bytes);
    largest_allocation = 0;
    std::optional<safetensors_file> file;
    const bool read = reads(path, seen, [&] {
      file.emplace(path);
      for (const auto& tensor : file->tensors()) {
        (void)file->at(tensor.name);
        const auto dtype = tensor.dtype;
        if (dtype == data_type::f32 || dtype == data_type::f16 || dtype == data_type::bf16)
          REQUIRE(file->copy_as_float(tensor.name).size() * freekv::examples::bits_per_element(dtype) / 8 ==
                  tensor.bytes.size());
      }
    });
    REQUIRE(largest_allocation <= most_memory(bytes));
    if (seed % 64 == 0) REQUIRE(read);  // nothing was damaged
    ++(read ? seen.read : seen.refused);
    if (read) check_read(*file, bytes);
  });
  INFO(seen.read << " read, " << seen.refused << " refused for " << seen.kinds.size() << " reasons");
  if (cases < 15000) return;
  CHECK(seen.read > cases / 20);
  CHECK(seen.refused > cases / 2);
  CHECK(seen.kinds.size() > 40);
}

TEST_CASE("damaged traces are read as what they say or refused in a sentence", "[fuzz]") {
  const scratch_folder folder;
  const fs::path path = folder / "damaged.safetensors";
  reached seen;
  const long cases = for_seeds(15000, [&](std::uint64_t seed) {
    const std::string bytes = damaged(seed + 1'000'000'000);
    fs::remove(path);  // a truncated file is flushed to its disk
    store(path, bytes);
    largest_allocation = 0;
    for (const auto element : {std::optional<data_type>{}, std::optional{data_type::f32},
                               std::optional{data_type::f16}, std::optional{data_type::bf16}}) {
      freekv::examples::trace_form form;
      const bool formed = reads(path, seen, [&] { form = read_form(path, element); });
      freekv::examples::trace trace;
      const bool read = reads(path, seen, [&] { trace = read_trace(path, element); });
      REQUIRE(read == formed);
      ++(read ? seen.read : seen.refused);
      if (!read) continue;
      check_trace(trace, form);
      ++seen.traces;
    }
    REQUIRE(largest_allocation <= most_memory(bytes));
  });
  INFO(seen.read << " read, " << seen.refused << " refused for " << seen.kinds.size() << " reasons");
  if (cases < 15000) return;
  CHECK(seen.traces > cases / 20);
  CHECK(seen.kinds.size() > 50);
}
