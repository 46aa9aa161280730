#include "examples/support/safetensors.hpp"
#include "../files.hpp"
#include "../mentions.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

using namespace freekv::examples;
using namespace tests;
namespace fs = std::filesystem;

namespace {

std::string length_field(std::uint64_t length) {
  std::string bytes(8, '\0');
  for (char& byte : bytes) {
    byte = static_cast<char>(length & 0xffu);
    length >>= 8;
  }
  return bytes;
}

std::string file_with(const std::string& header, std::size_t data_size) {
  std::string data(data_size, '\0');
  for (std::size_t i = 0; i < data_size; ++i) data[i] = static_cast<char>(i);
  return length_field(header.size()) + header + data;
}

void check_one_sentence(const std::string& message) {
  INFO(message);
  CHECK(message.size() > 10);
  CHECK(message.size() < 2000);
  CHECK(message.front() == '\'');
  CHECK(message.back() != '.');
  CHECK(message.find(". ") == std::string::npos);
  CHECK(std::none_of(message.begin(), message.end(),
                     [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }));
}

// The message of the file_error that `action` must throw; empty, with a failed check, if it throws none.
std::string fault_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const file_error& error) {
    check_one_sentence(error.what());
    return error.what();
  } catch (const std::exception& error) {
    FAIL_CHECK("another exception than file_error: " << error.what());
    return {};
  }
  FAIL_CHECK("no exception");
  return {};
}

std::string fault_of_reading(const fs::path& path) {
  return fault_of([&path] { safetensors_file file(path); });
}

struct broken_header {
  std::string header;
  std::size_t data_size;
  std::vector<std::string> mentions;
};

void check_all_refused(const std::vector<broken_header>& table) {
  const scratch_folder folder;
  const fs::path path = folder / "broken.safetensors";
  for (const broken_header& broken : table) {
    INFO("header " << broken.header.substr(0, 300));
    store(path, file_with(broken.header, broken.data_size));
    const std::string message = fault_of_reading(path);
    check_mentions(message, {path.string()});
    check_mentions(message, broken.mentions);
  }
}

std::string entry(const std::string& dtype, const std::string& shape, const std::string& data_offsets) {
  return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + data_offsets + "}";
}

template <typename Element>
std::span<const std::byte> bytes_of(const std::vector<Element>& elements) {
  return std::as_bytes(std::span(elements));
}

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::size_t open_descriptors() {
  std::error_code error;
  const fs::directory_iterator entries("/proc/self/fd", error);
  return error ? 0 : static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}

// Root ignores permissions, so a root that tests them acts as nobody meanwhile.
class unprivileged_scope {
 public:
  unprivileged_scope() : was_root_(::geteuid() == 0) {
    constexpr uid_t nobody = 65534;
    if (was_root_) effective_ = ::seteuid(nobody) == 0;
  }
  unprivileged_scope(const unprivileged_scope&) = delete;
  unprivileged_scope& operator=(const unprivileged_scope&) = delete;
  ~unprivileged_scope() {
    if (was_root_ && effective_ && ::seteuid(0) != 0) std::abort();
  }
  bool effective() const { return effective_; }

 private:
  bool was_root_;
  bool effective_ = true;
};

class file_size_limit {
 public:
  explicit file_size_limit(rlim_t bytes) {
    previous_handler_ = std::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &previous_);
    const rlimit lowered{bytes, previous_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &lowered);
  }
  file_size_limit(const file_size_limit&) = delete;
  file_size_limit& operator=(const file_size_limit&) = delete;
  ~file_size_limit() {
    ::setrlimit(RLIMIT_FSIZE, &previous_);
    std::signal(SIGXFSZ, previous_handler_);
  }

 private:
  rlimit previous_{};
  void (*previous_handler_)(int) = SIG_DFL;
};

}  // namespace

TEST_CASE("a written file reads back with its names, dtypes, shapes, bytes and metadata", "[safetensors]") {
  const scratch_folder folder;
  const fs::path path = folder / "round.safetensors";
  const std::vector<float> keys{1.0f, -2.5f, 3.25f, 0.0f, 1e-40f, -1e30f};
  const std::vector<std::int64_t> positions{-1, 0, std::numeric_limits<std::int64_t>::max()};
  const std::vector<std::uint8_t> flags{1, 0, 1};
  const std::vector<double> scale{0.125};
  const std::vector<std::uint16_t> halves{0x3c00, 0xc000, 0x0001};

  write_safetensors(
      path, {.tensors =
                 {{.name = "flags", .dtype = data_type::boolean, .shape = {3}, .bytes = bytes_of(flags)},
                  {.name = "layer 0/\"keys\"\n\xc3\xa9",
                   .dtype = data_type::f32,
                   .shape = {2, 3},
                   .bytes = bytes_of(keys)},
                  {.name = "", .dtype = data_type::f16, .shape = {3}, .bytes = bytes_of(halves)},
                  {.name = "none", .dtype = data_type::bf16, .shape = {4, 0, 2}},
                  {.name = "scale", .dtype = data_type::f64, .bytes = bytes_of(scale)},
                  {.name = "positions", .dtype = data_type::i64, .shape = {3}, .bytes = bytes_of(positions)}},
             .metadata = {{"format", "pt"}, {"model \"x\"", "line\nbreak"}}});

  const safetensors_file file(path);
  CHECK(file.path() == path);
  CHECK(file.metadata().size() == 2);
  CHECK(file.metadata().at("format") == "pt");
  CHECK(file.metadata().at("model \"x\"") == "line\nbreak");
  // Wider elements first, then the order given.
  CHECK(file.names() ==
        std::vector<std::string>{"scale", "positions", "layer 0/\"keys\"\n\xc3\xa9", "", "none", "flags"});
  CHECK(file.tensors().size() == 6);

  const tensor_view& stored = file.at("layer 0/\"keys\"\n\xc3\xa9");
  CHECK(stored.dtype == data_type::f32);
  CHECK(stored.shape == std::vector<std::int64_t>{2, 3});
  CHECK(text_of(stored.bytes) == text_of(bytes_of(keys)));
  CHECK(file.copy<float>(stored.name) == keys);
  CHECK(file.copy_as_float(stored.name) == keys);
  CHECK(file.copy<std::int64_t>("positions") == positions);
  CHECK(file.copy<std::uint8_t>("flags") == flags);
  CHECK(file.copy<std::uint16_t>("") == halves);
  CHECK(file.copy_as_float("") == std::vector<float>{1.0f, -2.0f, 0x1p-24f});

  CHECK(file.at("scale").shape.empty());
  CHECK(file.copy<double>("scale") == scale);
  CHECK(file.at("none").shape == std::vector<std::int64_t>{4, 0, 2});
  CHECK(file.at("none").bytes.empty());
  CHECK(file.copy_as_float("none").empty());
  CHECK(file.copy<std::uint16_t>("none").empty());

  CHECK(file.find("positions") == &file.at("positions"));
  CHECK(file.find("position") == nullptr);
  check_mentions(fault_of([&file] { file.at("position"); }),
                 {path.string(), "'position'", "6 tensors", "'flags'", "and 1 more"});

  safetensors_file moved_from(path);
  const safetensors_file moved(std::move(moved_from));
  CHECK(moved.copy<double>("scale") == scale);
}

TEST_CASE("every dtype of the format is written, read and named", "[safetensors]") {
  const scratch_folder folder;
  const std::vector<std::pair<data_type, std::string>> names{{data_type::boolean, "BOOL"},
                                                             {data_type::f4, "F4"},
                                                             {data_type::f6_e2m3, "F6_E2M3"},
                                                             {data_type::f6_e3m2, "F6_E3M2"},
                                                             {data_type::u8, "U8"},
                                                             {data_type::i8, "I8"},
                                                             {data_type::f8_e5m2, "F8_E5M2"},
                                                             {data_type::f8_e4m3, "F8_E4M3"},
                                                             {data_type::f8_e8m0, "F8_E8M0"},
                                                             {data_type::f8_e4m3fnuz, "F8_E4M3FNUZ"},
                                                             {data_type::f8_e5m2fnuz, "F8_E5M2FNUZ"},
                                                             {data_type::i16, "I16"},
                                                             {data_type::u16, "U16"},
                                                             {data_type::f16, "F16"},
                                                             {data_type::bf16, "BF16"},
                                                             {data_type::i32, "I32"},
                                                             {data_type::u32, "U32"},
                                                             {data_type::f32, "F32"},
                                                             {data_type::c64, "C64"},
                                                             {data_type::f64, "F64"},
                                                             {data_type::i64, "I64"},
                                                             {data_type::u64, "U64"}};
  const std::vector<std::uint8_t> data(64, 7);
  safetensors_content content;
  for (const auto& [dtype, name] : names) {
    CHECK(dtype_name(dtype) == name);
    const auto size =
        static_cast<std::size_t>(bits_per_element(dtype));  // 8 elements fill as many bytes as bits
    content.tensors.push_back(
        {.name = name, .dtype = dtype, .shape = {8}, .bytes = bytes_of(data).first(size)});
  }
  write_safetensors(folder / "all", content);
  const safetensors_file file(folder / "all");
  for (const auto& [dtype, name] : names) CHECK(file.at(name).dtype == dtype);
  CHECK(file.copy<std::uint8_t>("F8_E4M3") == std::vector<std::uint8_t>(8, 7));
  CHECK(file.copy<std::complex<float>>("C64").size() == 8);
  CHECK(file.copy<std::int32_t>("I32") == std::vector<std::int32_t>(8, 0x07070707));

  std::uint64_t begin = 0;
  for (const tensor_view& tensor : file.tensors()) {
    const auto width =
        static_cast<std::uint64_t>(std::max<std::int64_t>(bits_per_element(tensor.dtype) / 8, 1));
    CHECK(begin % width == 0);
    begin += tensor.bytes.size();
  }
  CHECK_THROWS_AS(dtype_name(static_cast<data_type>(22)), std::invalid_argument);
  CHECK_THROWS_AS(bits_per_element(static_cast<data_type>(255)), std::invalid_argument);
}

TEST_CASE("a tensor is copied only as the type it has", "[safetensors]") {
  const scratch_folder folder;
  const fs::path path = folder / "typed";
  const std::vector<std::int32_t> numbers{1, 2};
  write_safetensors(
      path, {.tensors = {{.name = "n", .dtype = data_type::i32, .shape = {2}, .bytes = bytes_of(numbers)}}});
  const safetensors_file file(path);
  check_mentions(fault_of([&file] { file.copy<float>("n"); }), {path.string(), "'n'", "I32", "F32"});
  check_mentions(fault_of([&file] { file.copy<std::uint16_t>("n"); }), {"'n'", "I32", "U16 or F16 or BF16"});
  check_mentions(fault_of([&file] { file.copy_as_float("n"); }), {"'n'", "I32", "F32 or F16 or BF16"});
  check_mentions(fault_of([&file] { file.copy_as_float("m"); }), {"'m'", "1 tensor: 'n'"});
  STATIC_REQUIRE_FALSE(tensor_element<bool>);
  STATIC_REQUIRE_FALSE(tensor_element<char>);
}

TEST_CASE("a half-width tensor longer than one conversion block becomes float in order", "[safetensors]") {
  const scratch_folder folder;
  constexpr std::size_t count = 8192 * 2 + 5;
  std::vector<std::uint16_t> bits(count);
  for (std::size_t i = 0; i < count; ++i) bits[i] = static_cast<std::uint16_t>(i % 0x7c00);
  write_safetensors(folder / "f", {.tensors = {{.name = "h",
                                                .dtype = data_type::f16,
                                                .shape = {static_cast<std::int64_t>(count)},
                                                .bytes = bytes_of(bits)},
                                               {.name = "b",
                                                .dtype = data_type::bf16,
                                                .shape = {static_cast<std::int64_t>(count)},
                                                .bytes = bytes_of(bits)}}});
  const safetensors_file file(folder / "f");
  const std::vector<float> halves = file.copy_as_float("h");
  const std::vector<float> bfloats = file.copy_as_float("b");
  REQUIRE(halves.size() == count);
  REQUIRE(bfloats.size() == count);
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (halves[i] != half_to_float(bits[i]) || bfloats[i] != bfloat16_to_float(bits[i])) ++wrong;
  }
  CHECK(wrong == 0);
}

TEST_CASE("unusual but legal files load", "[safetensors]") {
  const scratch_folder folder;
  const fs::path path = folder / "legal";
  const auto opened = [&path](const std::string& header, std::size_t data_size) {
    store(path, file_with(header, data_size));
    return safetensors_file(path);
  };

  SECTION("no tensor at all") {
    CHECK(opened("{}", 0).tensors().empty());
    CHECK(opened("{}      ", 0).names().empty());
    CHECK(opened(R"({"__metadata__":{}})", 0).metadata().empty());
    const safetensors_file empty = opened(R"({"__metadata__":{"k":"v"}})", 0);
    CHECK(empty.metadata().at("k") == "v");
    check_mentions(fault_of([&empty] { empty.at("a"); }), {"'a'", "0 tensors"});
  }
  SECTION("a scalar and tensors without elements, among others at the same offset") {
    const safetensors_file file =
        opened("{\"x\":" + entry("U8", "[2]", "[4,6]") + ",\"e\":" + entry("F32", "[0,7]", "[4,4]") +
                   ",\"s\":" + entry("F32", "[]", "[0,4]") + ",\"z\":" + entry("I64", "[0]", "[6,6]") + "}",
               6);
    CHECK(file.names() == std::vector<std::string>{"s", "e", "x", "z"});
    CHECK(file.copy<float>("s").size() == 1);
    CHECK(file.copy<float>("e").empty());
    CHECK(file.copy<std::uint8_t>("x") == std::vector<std::uint8_t>{4, 5});
  }
  SECTION("data at odd offsets in the file") {
    const safetensors_file file =
        opened("{\"u\":" + entry("U8", "[1]", "[0,1]") + ",\"f\":" + entry("I32", "[2]", "[1,9]") + "}", 9);
    CHECK(file.copy<std::int32_t>("f") == std::vector<std::int32_t>{0x04030201, 0x08070605});
    CHECK(text_of(file.at("f").bytes) == "\x01\x02\x03\x04\x05\x06\x07\x08");
  }
  SECTION("fields and nesting that the reader does not know") {
    const std::string known = R"("dtype":"U8","shape":[1],"data_offsets":[0,1])";
    CHECK(opened(R"({"a":{"x":1,)" + known + R"(,"y":{"shape":[-1],"z":[[],{"q":null}]},"w":1.5e3}})", 1)
              .at("a")
              .shape == std::vector<std::int64_t>{1});
    // The header object, the tensor's object and 30 arrays: 32 levels.
    CHECK(opened(R"({"a":{"x":)" + std::string(30, '[') + std::string(30, ']') + "," + known + "}}", 1)
              .find("a"));
  }
  SECTION("escapes, white space and text beyond ASCII in names") {
    const safetensors_file file =
        opened("{ \"\\u00e9\\n\\u0000\" :\t" + entry("U8", "[ 1 ]", "[0 , 1]") + " \n}  \n", 1);
    CHECK(file.find(std::string_view("\xc3\xa9\n\0", 4)) != nullptr);
  }
  SECTION("a shape whose other extents are large beside a zero") {
    CHECK(opened("{\"a\":" + entry("F32", "[0,144115188075855872]", "[0,0]") + "}", 0).tensors().size() == 1);
  }
  SECTION("thousands of tensors are each found by name") {
    std::string header = "{";
    for (int i = 0; i < 5000; ++i) {
      header += (i == 0 ? "\"t" : ",\"t") + std::to_string(i) +
                "\":" + entry("U8", "[1]", "[" + std::to_string(i) + "," + std::to_string(i + 1) + "]");
    }
    const safetensors_file file = opened(header + "}", 5000);
    std::size_t wrong = 0;
    for (int i = 0; i < 5000; ++i) {
      const tensor_view* tensor = file.find("t" + std::to_string(i));
      if (tensor == nullptr || tensor->bytes[0] != static_cast<std::byte>(i)) ++wrong;
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("what is not a readable regular file is refused", "[safetensors]") {
  const scratch_folder folder;
  check_mentions(fault_of_reading(folder / "missing"), {(folder / "missing").string(), "No such file"});
  check_mentions(fault_of_reading(""), {"''", "No such file"});
  check_mentions(fault_of_reading(folder.path()), {folder.path().string(), "a directory"});
  check_mentions(fault_of_reading("/dev/null"), {"'/dev/null'", "a character device"});
  check_mentions(fault_of_reading(folder / std::string(300, 'n')), {"too long"});
  check_mentions(fault_of_reading(fs::path(std::string("a\0b", 3))), {"zero byte"});

  REQUIRE(::mkfifo((folder / "fifo").c_str(), 0600) == 0);
  check_mentions(fault_of_reading(folder / "fifo"), {"a FIFO"});

  const int listener = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = (folder / "socket").string();
  REQUIRE(name.size() < sizeof(address.sun_path));
  std::memcpy(address.sun_path, name.c_str(), name.size() + 1);
  REQUIRE(::bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  check_mentions(fault_of_reading(name), {name, "cannot be opened"});
  ::close(listener);

  store(folder / "line\nbreak", "short");
  check_mentions(fault_of_reading(folder / "line\nbreak"), {"line\\x0abreak", "5 bytes"});

  store(folder / "secret", file_with("{}", 0));
  fs::permissions(folder.path(), fs::perms::all);
  fs::permissions(folder / "secret", fs::perms::none);
  const unprivileged_scope nobody;
  if (!nobody.effective()) {
    WARN("permissions are not tested: the effective user cannot be changed");
    return;
  }
  check_mentions(fault_of_reading(folder / "secret"), {"Permission denied"});
}

TEST_CASE("a file too short for its header is refused without allocating what it claims", "[safetensors]") {
  const scratch_folder folder;
  const fs::path path = folder / "short";
  const auto refused = [&path](const std::string& bytes) {
    store(path, bytes);
    return fault_of_reading(path);
  };
  check_mentions(refused(""), {path.string(), "empty", "0 bytes"});
  check_mentions(refused("a"), {"1 byte long", "8-byte"});
  check_mentions(refused("1234567"), {"7 bytes long", "8-byte"});
  check_mentions(refused(length_field(0)), {"header of 0 bytes", "'{'"});
  check_mentions(refused(length_field(1)), {"1 byte but has only 0"});
  check_mentions(refused(length_field(3) + "{}"), {"3 bytes but has only 2 bytes", "truncated"});
  check_mentions(refused(length_field(100'000'000) + "{}"), {"100000000", "only 2 bytes"});
  check_mentions(refused(length_field(100'000'001) + "{}"),
                 {"100000001", "more than the format's 100000000"});
  check_mentions(refused(length_field(std::uint64_t{1} << 63) + "{}"), {"9223372036854775808"});
  check_mentions(refused(length_field(~std::uint64_t{0}) + "{}"), {"18446744073709551615"});
  check_mentions(refused(length_field(~std::uint64_t{0} - 7) + "{}"), {"18446744073709551608"});
  check_mentions(refused("version https://git-lfs.github.com/spec/v1\n"), {"not a safetensors file"});

  // The limit itself, not only the size of the file: sparse, so that it costs no disk.
  store(path, length_field(100'000'001));
  fs::resize_file(path, 200'000'000);
  check_mentions(fault_of_reading(path), {"100000001", "more than the format's 100000000"});
}

TEST_CASE("a huge file is opened without reading it", "[safetensors]") {
  const scratch_folder folder;
  const fs::path path = folder / "huge";
  constexpr std::uint64_t size = std::uint64_t{1} << 36;
  const std::string header =
      "{\"a\":" + entry("U8", "[" + std::to_string(size) + "]", "[0," + std::to_string(size) + "]") + "}";
  store(path, length_field(header.size()) + header);
  std::error_code error;
  fs::resize_file(path, 8 + header.size() + size, error);
  if (error) {
    WARN("not tested: no sparse file of 64 GiB can be made here: " << error.message());
    return;
  }
  const safetensors_file file(path);
  CHECK(file.at("a").bytes.size() == size);
  CHECK(file.at("a").bytes.back() == std::byte{0});

  fs::resize_file(path, 8 + header.size() + size - 1);
  check_mentions(fault_of_reading(path), {"'a'", "68719476736", "68719476735", "truncated"});
}

TEST_CASE("a header that is not one JSON object is refused", "[safetensors]") {
  const std::string good = entry("U8", "[1]", "[0,1]");
  check_all_refused({
      {"[]", 0, {"2 bytes", "does not begin with '{'"}},
      {"1234", 0, {"4 bytes", "'{'"}},
      {"\"{}\"", 0, {"'{'"}},
      {" {}", 0, {"3 bytes", "'{'"}},
      {"\xef\xbb\xbf{}", 0, {"5 bytes", "'{'"}},
      {"{", 0, {"not valid JSON", "byte 2"}},
      {"{\"a\"", 0, {"not valid JSON", "byte 5"}},
      {"{\"a\":}", 0, {"not valid JSON", "byte 6"}},
      {"{\"a\" 1}", 0, {"not valid JSON"}},
      {"{a:1}", 0, {"not valid JSON", "byte 2"}},
      {"{} {}", 0, {"not valid JSON", "byte 4"}},
      {"{}x", 0, {"not valid JSON", "byte 3"}},
      {"{}/* */", 0, {"not valid JSON"}},
      {std::string("{}\0\0", 4), 0, {"zero byte at its byte 2"}},
      {std::string("{}\0{\"polyglot\":1}", 17), 0, {"zero byte at its byte 2"}},
      {"{\"a\":" + good + ",}", 1, {"not valid JSON"}},
      {"{\"a\":" + good, 1, {"not valid JSON"}},
      {"{\"\xff\":" + good + "}", 1, {"not valid JSON"}},
      {"{\"\xc0\x80\":" + good + "}", 1, {"not valid JSON"}},
      {"{\"\\ud800\":" + good + "}", 1, {"not valid JSON"}},
      {"{\"a\nb\":" + good + "}", 1, {"not valid JSON"}},
      {"{\"a\":" + entry("U8", "[1e999]", "[0,1]") + "}", 1, {"beyond the range of a double"}},
      {"{\"" + std::string(100'000, 'x'), 0, {"not valid JSON"}},
  });
}

TEST_CASE("names given twice are refused", "[safetensors]") {
  const std::string first = entry("U8", "[1]", "[0,1]");
  check_all_refused({
      {"{\"aa\":" + first + ",\"b\":" + entry("U8", "[1]", "[1,2]") +
           ",\"aa\":" + entry("U8", "[1]", "[2,3]") + "}",
       3,
       {"'aa'", "twice"}},
      {"{\"a\":" + first + ",\"a\":" + first + "}", 1, {"'a'", "twice"}},
      {"{\"a\":" + first + ",\"\\u0061\":" + entry("U8", "[1]", "[1,2]") + "}", 2, {"'a'", "twice"}},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, {"two '__metadata__'"}},
      {R"({"__metadata__":{"k":"1","j":"2","k":"1"}})", 0, {"'k'", "twice"}},
      {R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
       1,
       {"'a'", "two fields 'dtype'"}},
      {R"({"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}})",
       1,
       {"'a'", "two fields 'shape'"}},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"data_offsets":[0,1]}})",
       1,
       {"'a'", "two fields 'data_offsets'"}},
  });
}

TEST_CASE("deep nesting is refused and does not exhaust the stack", "[safetensors]") {
  constexpr std::size_t deep = 2'000'000;
  std::string objects;
  for (std::size_t i = 0; i < deep / 10; ++i) objects += "{\"a\":";
  check_all_refused({
      {R"({"a":{"x":)" + std::string(31, '[') + std::string(31, ']') + "}}",
       0,
       {"'a'", "more than 32 levels"}},
      {R"({"a":{"x":)" + std::string(deep, '[') + std::string(deep, ']') + "}}",
       0,
       {"'a'", "more than 32 levels"}},
      {R"({"a":{"x":)" + std::string(deep, '['), 0, {"'a'", "more than 32 levels"}},
      {R"({"a":{"x":)" + objects, 0, {"'a'", "more than 32 levels"}},
      {objects, 0, {"'a'", "more than 32 levels"}},
      {R"({"a":)" + std::string(deep, '['), 0, {"'a'", "an array"}},
      {R"({"a":{"shape":)" + std::string(deep, '['), 0, {"'a'", "an array in its 'shape'"}},
      {R"({"__metadata__":{"k":)" + std::string(deep, '['), 0, {"'k'", "an array"}},
  });
}

TEST_CASE("metadata other than strings by string is refused", "[safetensors]") {
  check_all_refused({
      {R"({"__metadata__":{"k":1}})", 0, {"'__metadata__'", "'k'", "the number 1", "string"}},
      {R"({"__metadata__":{"k":-7}})", 0, {"'k'", "the number -7"}},
      {R"({"__metadata__":{"k":1.5}})", 0, {"'k'", "the number '1.5'"}},
      {R"({"__metadata__":{"k":null}})", 0, {"'k'", "null"}},
      {R"({"__metadata__":{"k":true}})", 0, {"'k'", "true"}},
      {R"({"__metadata__":{"k":false}})", 0, {"'k'", "false"}},
      {R"({"__metadata__":{"ok":"v","k":{}}})", 0, {"'k'", "an object"}},
      {R"({"__metadata__":{"k":["v"]}})", 0, {"'k'", "an array"}},
      {R"({"__metadata__":"v"})", 0, {"'__metadata__'", "the string 'v'"}},
      {R"({"__metadata__":[]})", 0, {"'__metadata__'", "an array"}},
      {R"({"__metadata__":null})", 0, {"'__metadata__'", "null"}},
  });
}

TEST_CASE("a tensor entry with missing or mistyped fields is refused", "[safetensors]") {
  check_all_refused({
      {R"({"a":1})", 0, {"'a'", "the number 1", "object"}},
      {R"({"a":null})", 0, {"'a'", "null"}},
      {R"({"a":"F32"})", 0, {"'a'", "the string 'F32'"}},
      {R"({"a":[]})", 0, {"'a'", "an array"}},
      {R"({"a":{}})", 0, {"'a'", "without the field 'dtype'"}},
      {R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1, {"'a'", "without the field 'dtype'"}},
      {R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", 1, {"'a'", "without the field 'shape'"}},
      {R"({"a":{"dtype":"U8","shape":[1]}})", 1, {"'a'", "without the field 'data_offsets'"}},
      // The fields of the tensor before must not count.
      {"{\"b\":" + entry("U8", "[1]", "[0,1]") + ",\"a\":{}}", 1, {"'a'", "without the field 'dtype'"}},
      {R"({"a":{"dtype":8,"shape":[1],"data_offsets":[0,1]}})",
       1,
       {"'a'", "the number 8", "'dtype'", "a string"}},
      {R"({"a":{"dtype":["U8"],"shape":[1],"data_offsets":[0,1]}})", 1, {"'a'", "an array", "'dtype'"}},
      {R"({"a":{"dtype":{},"shape":[1],"data_offsets":[0,1]}})", 1, {"'a'", "an object", "'dtype'"}},
      {"{\"a\":" + entry("Q4_0", "[1]", "[0,1]") + "}", 1, {"'a'", "dtype 'Q4_0'"}},
      {"{\"a\":" + entry("f32", "[1]", "[0,4]") + "}", 4, {"dtype 'f32'"}},
      {"{\"a\":" + entry("", "[1]", "[0,1]") + "}", 1, {"dtype ''"}},
      {"{\"a\":" + entry("U8", "1", "[0,1]") + "}", 1, {"'a'", "the number 1", "'shape'", "an array"}},
      {"{\"a\":" + entry("U8", "{}", "[0,1]") + "}", 1, {"'a'", "an object", "'shape'"}},
      {"{\"a\":" + entry("U8", "null", "[0,1]") + "}", 1, {"'a'", "null", "'shape'"}},
      {"{\"a\":" + entry("U8", "[1]", "{}") + "}", 1, {"'a'", "an object", "'data_offsets'"}},
      {"{\"a\":" + entry("U8", "[1]", "1") + "}", 1, {"'a'", "the number 1", "'data_offsets'"}},
  });
}

TEST_CASE("a shape that no tensor can have is refused", "[safetensors]") {
  const auto shaped = [](const std::string& dtype, const std::string& shape) {
    return "{\"a\":" + entry(dtype, shape, "[0,4]") + "}";
  };
  check_all_refused({
      {shaped("F32", "[-1]"), 4, {"'a'", "the number -1", "'shape'"}},
      {shaped("F32", "[-0]"), 4, {"'a'", "'shape'"}},
      {shaped("F32", "[-9223372036854775808]"), 4, {"the number -9223372036854775808"}},
      {shaped("F32", "[1.5]"), 4, {"'a'", "the number '1.5'"}},
      {shaped("F32", "[1.0]"), 4, {"the number '1.0'"}},
      {shaped("F32", "[1e0]"), 4, {"the number '1e0'"}},
      {shaped("F32", "[\"1\"]"), 4, {"the string '1'"}},
      {shaped("F32", "[true]"), 4, {"true"}},
      {shaped("F32", "[null]"), 4, {"null"}},
      {shaped("F32", "[[1]]"), 4, {"an array in its 'shape'"}},
      {shaped("F32", "[{}]"), 4, {"an object in its 'shape'"}},
      {shaped("F32", "[9223372036854775808]"), 4, {"9223372036854775808", "9223372036854775807"}},
      {shaped("F32", "[18446744073709551616]"), 4, {"18446744073709551616"}},
      {shaped("F32", "[9223372036854775807]"), 4, {"'a'", "[9223372036854775807]", "F32", "overflows"}},
      {shaped("U8", "[9223372036854775807]"), 4, {"overflows"}},
      {shaped("F32", "[4294967296, 4294967296]"), 4, {"[4294967296, 4294967296]", "overflows"}},
      {shaped("F32", "[2,2,2,2,2,2,2,2,9223372036854775807]"), 4, {"2, 2 and 1 more]", "overflows"}},
      // Products that wrap around to exactly the right size.
      {shaped("F32", "[9223372036854775807,9223372036854775807]"), 4, {"overflows"}},
      {shaped("F32", "[6148914691236517205,3,1]"), 4, {"overflows"}},
      {"{\"a\":" + entry("F32", "[0,4294967296,4294967296]", "[0,0]") + "}", 0, {"overflows"}},
      {"{\"a\":" + entry("F32", "[4294967296,4294967296,0]", "[0,0]") + "}", 0, {"overflows"}},
      {"{\"a\":" + entry("F4", "[3]", "[0,2]") + "}", 2, {"'a'", "F4", "12 bits"}},
      {"{\"a\":" + entry("F6_E2M3", "[3,3]", "[0,7]") + "}", 7, {"54 bits"}},
  });
}

TEST_CASE("data offsets that are not a range of the right length inside the file are refused",
          "[safetensors]") {
  const auto placed = [](const std::string& data_offsets) {
    return "{\"a\":" + entry("F32", "[2,2]", data_offsets) + "}";
  };
  check_all_refused({
      {placed("[]"), 16, {"'a'", "0 data_offsets", "2"}},
      {placed("[16]"), 16, {"1 data_offsets"}},
      {placed("[0,16,32]"), 16, {"more than 2"}},
      {placed("[-1,16]"), 16, {"the number -1", "'data_offsets'"}},
      {placed("[0,-16]"), 16, {"the number -16"}},
      {placed("[0,16.5]"), 16, {"'16.5'"}},
      {placed("[0,\"16\"]"), 16, {"the string '16'"}},
      {placed("[0,null]"), 16, {"null"}},
      {placed("[[0],16]"), 16, {"an array in its 'data_offsets'"}},
      {placed("[0,18446744073709551615]"), 16, {"18446744073709551615"}},
      {placed("[0,9223372036854775807]"), 16, {"'a'", "9223372036854775807", "only 16 bytes"}},
      {placed("[16,0]"), 16, {"'a'", "begin at 16", "at 0"}},
      {placed("[9223372036854775807,16]"), 16, {"begin at 9223372036854775807"}},
      {placed("[0,16]"), 15, {"'a'", "byte 16", "only 15 bytes", "truncated"}},
      {placed("[0,16]"), 0, {"'a'", "byte 16", "only 0 bytes"}},
      {placed("[0,12]"), 16, {"'a'", "span 12 bytes", "[2, 2]", "F32", "16"}},
      {placed("[0,20]"), 20, {"span 20 bytes", "16"}},
      {placed("[0,1]"), 20, {"span 1 byte ", "16"}},
      {"{\"a\":" + entry("F32", "[]", "[0,0]") + "}", 0, {"span 0 bytes", "[]", "4"}},
      {"{\"a\":" + entry("F32", "[0]", "[0,4]") + "}", 4, {"span 4 bytes", "[0]", "needs 0"}},
  });
}

TEST_CASE("overlaps, gaps and uncovered data are refused", "[safetensors]") {
  const auto two = [](const std::string& first, const std::string& second) {
    return "{\"a\":" + entry("F32", "[2]", first) + ",\"b\":" + entry("F32", "[1]", second) + "}";
  };
  check_all_refused({
      {two("[0,8]", "[4,8]"), 8, {"'b'", "byte 4", "overlaps", "ends at 8"}},
      {two("[0,8]", "[7,11]"), 12, {"'b'", "byte 7", "overlaps", "ends at 8"}},
      {two("[0,8]", "[0,4]"), 8, {"'a'", "byte 0", "overlaps", "ends at 4"}},
      {two("[0,8]", "[9,13]"), 13, {"'b'", "byte 9", "gap", "ends at 8"}},
      {two("[4,12]", "[12,16]"), 16, {"'a'", "byte 4", "gap", "0"}},
      {two("[5,13]", "[0,4]"), 13, {"'a'", "byte 5", "gap", "ends at 4"}},
      {two("[0,8]", "[8,12]"), 13, {"13 bytes of data", "the last 1"}},
      {"{}", 3, {"3 bytes of data", "the last 3"}},
      {"{\"e\":" + entry("F32", "[0]", "[0,0]") + "}", 3, {"the last 3"}},
      {"{\"e\":" + entry("F32", "[0]", "[2,2]") + ",\"f\":" + entry("F32", "[1]", "[0,4]") + "}",
       4,
       {"'e'", "byte 2", "overlaps", "ends at 4"}},
  });
  const scratch_folder folder;
  store(folder / "whole", file_with(two("[4,12]", "[0,4]"), 12));
  CHECK(safetensors_file(folder / "whole").names() == std::vector<std::string>{"b", "a"});
}

TEST_CASE("messages stay one readable line whatever the file's names hold", "[safetensors]") {
  check_all_refused({
      {"{\"a\\nb\\u0000\\u007f\":1}", 0, {"'a\\x0ab\\x00\\x7f'"}},
      {"{\"" + std::string(1'000'000, 'n') + "\":1}", 0, {"1000000 bytes", "nnn' (the first 100 of"}},
      {"{\"" + std::string(99, 'n') + "\xc3\xa9\":1}",
       0,
       {std::string(99, 'n') + "' (the first 99 of 101 bytes)"}},
      {"{\"a\":" + entry(std::string(1'000'000, 'D'), "[1]", "[0,1]") + "}", 1, {"1000000 bytes"}},
      {"{\"a\":" + entry("U8", "[" + std::string(1'000'000, '1') + "." + "5]", "[0,1]") + "}", 1, {"double"}},
      {"{\"a\":" + entry("U8", "[0." + std::string(1'000'000, '1') + "]", "[0,1]") + "}",
       1,
       {"1000002 bytes"}},
  });
}

TEST_CASE("a file that shrinks after it was opened gives an error on copy", "[safetensors]") {
  const scratch_folder folder;
  const fs::path path = folder / "shrinks";
  const std::vector<float> values(40'000, 1.0f);
  const std::vector<std::uint16_t> halves(80'000, 0x3c00);
  write_safetensors(
      path,
      {.tensors = {{.name = "v", .dtype = data_type::f32, .shape = {40'000}, .bytes = bytes_of(values)},
                   {.name = "h", .dtype = data_type::f16, .shape = {80'000}, .bytes = bytes_of(halves)}}});
  const safetensors_file file(path);
  fs::resize_file(path, 100'000);
  check_mentions(fault_of([&file] { file.copy<float>("v"); }), {path.string(), "byte 100000", "shorter"});
  check_mentions(fault_of([&file] { file.copy_as_float("h"); }), {path.string(), "byte", "shorter"});
}

TEST_CASE("a file is laid out as the format asks", "[safetensors]") {
  const scratch_folder folder;
  const fs::path path = folder / "layout";
  const std::vector<std::uint8_t> small{9};
  const std::vector<float> wide{1.0f};
  for (std::size_t length = 0; length < 9; ++length) {
    write_safetensors(path, {.tensors = {{.name = std::string(length, 'n'),
                                          .dtype = data_type::u8,
                                          .shape = {1},
                                          .bytes = bytes_of(small)}}});
    std::uint64_t header_length = 0;
    const std::string bytes = load(path);
    std::memcpy(&header_length, bytes.data(), sizeof(header_length));
    CHECK(header_length % 8 == 0);
    CHECK(bytes.size() == 8 + header_length + 1);
    CHECK(bytes.back() == 9);
    const std::size_t last = bytes.find_last_not_of(' ', 7 + header_length);
    CHECK(bytes[last] == '}');
    CHECK(8 + header_length - last <= 8);
  }
  write_safetensors(
      path, {.tensors = {{.name = "s", .dtype = data_type::u8, .shape = {1}, .bytes = bytes_of(small)},
                         {.name = "w", .dtype = data_type::f32, .shape = {1, 1}, .bytes = bytes_of(wide)}},
             .metadata = {{"k", "v"}}});
  const std::string header = R"({"__metadata__":{"k":"v"},)"
                             R"("w":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]},)"
                             R"("s":{"dtype":"U8","shape":[1],"data_offsets":[4,5]}})";
  CHECK(load(path).substr(8, header.size()) == header);
  CHECK(load(path).substr(load(path).size() - 5) == std::string("\0\0\x80\x3f\x09", 5));
}

TEST_CASE("content that makes no valid file is refused and writes nothing", "[safetensors]") {
  const scratch_folder folder;
  const fs::path path = folder / "out";
  const std::vector<float> four(4, 1.0f);
  const auto refused = [&path](const safetensors_content& content) {
    return fault_of([&path, &content] { write_safetensors(path, content); });
  };
  const tensor_view good{.name = "a", .dtype = data_type::f32, .shape = {4}, .bytes = bytes_of(four)};
  const auto changed = [&good](const std::function<void(tensor_view&)>& change) {
    tensor_view tensor = good;
    change(tensor);
    return safetensors_content{.tensors = {tensor}};
  };

  check_mentions(refused({.tensors = {good, good}}), {path.string(), "'a'", "two tensors"});
  check_mentions(refused(changed([](auto& t) { t.shape = {3}; })), {"16 bytes", "'a'", "[3]", "F32", "12"});
  check_mentions(refused(changed([](auto& t) { t.shape = {}; })), {"16 bytes", "[]", "needs 4"});
  check_mentions(refused(changed([](auto& t) { t.bytes = {}; })), {"0 bytes", "needs 16"});
  check_mentions(refused(changed([](auto& t) { t.dtype = data_type::f16; })), {"16 bytes", "F16", "needs 8"});
  check_mentions(refused(changed([](auto& t) { t.dtype = static_cast<data_type>(99); })),
                 {"'a'", "data_type 99"});
  check_mentions(refused(changed([](auto& t) { t.shape = {-4}; })), {"'a'", "[-4]", "negative"});
  check_mentions(refused(changed([](auto& t) { t.shape = {-2, -2}; })), {"'a'", "-2", "negative"});
  check_mentions(refused(changed([](auto& t) {
                   t.shape = {std::int64_t{1} << 62, 4};
                 })),
                 {"'a'", "overflows"});
  check_mentions(refused(changed([](auto& t) { t.name = "__metadata__"; })), {"'__metadata__'", "reserves"});
  check_mentions(refused(changed([](auto& t) { t.name = "bad \xff name"; })), {"UTF-8"});
  check_mentions(refused({.metadata = {{"k\xff", "v"}}}), {"UTF-8"});
  check_mentions(refused({.metadata = {{"k", "v\xc3"}}}), {"UTF-8"});
  check_mentions(refused({.metadata = {{"k", std::string(100'000'000, 'v')}}}),
                 {"header of 1000000", "100000000"});
  CHECK(folder.listing().empty());
}

TEST_CASE("only a regular file in an existing folder can be written", "[safetensors]") {
  const scratch_folder folder;
  const auto refused = [](const fs::path& path) {
    return fault_of([&path] { write_safetensors(path, {}); });
  };

  check_mentions(refused(""), {"empty file name"});
  check_mentions(refused(folder.path() / std::string("a\0b", 3)), {"zero byte"});
  check_mentions(refused(folder.path()), {folder.path().string(), "a directory"});
  check_mentions(refused(folder.path() / ""), {"a folder"});
  check_mentions(refused(folder.path() / "."), {"a directory"});
  check_mentions(refused("/"), {"'/'", "folder"});
  check_mentions(refused(folder / "missing/out"),
                 {(folder / "missing/out").string(), "No such file or directory"});
  check_mentions(refused(folder / std::string(300, 'n')), {"too long"});
  fs::create_symlink("/dev/full", folder / "full");
  fs::permissions(folder.path(), fs::perms::all);
  {
    // A faulty writer with the rights of root would rename a file over the device.
    const unprivileged_scope nobody;
    if (nobody.effective()) {
      for (const char* device : {"/dev/null", "/dev/full"}) {
        check_mentions(refused(device), {device, "a character device", "regular file"});
        CHECK(fs::is_character_file(device));
      }
      check_mentions(refused(folder / "full"), {"a character device"});
    } else {
      WARN("devices are not tested: the effective user cannot be changed");
    }
  }
  REQUIRE(::mkfifo((folder / "fifo").c_str(), 0600) == 0);
  check_mentions(refused(folder / "fifo"), {"a FIFO"});
  fs::create_symlink("loop", folder / "loop");
  check_mentions(refused(folder / "loop"), {"Too many levels of symbolic links"});
  store(folder / "file", "x");
  check_mentions(refused(folder / "file/out"), {"Not a directory"});
  CHECK(folder.listing() == std::vector<std::string>{"fifo", "file", "full", "loop"});
  CHECK(load(folder / "file") == "x");
}

TEST_CASE("a failed write leaves the old file and no temporary", "[safetensors]") {
  const scratch_folder folder;
  const fs::path path = folder / "out";
  store(path, "old");
  const std::vector<std::uint8_t> bytes(100'000, 1);
  const safetensors_content content{
      .tensors = {{.name = "a", .dtype = data_type::u8, .shape = {100'000}, .bytes = bytes_of(bytes)}}};

  SECTION("in the data") {
    std::string message;
    {
      const file_size_limit limit(50'000);
      message = fault_of([&] { write_safetensors(path, content); });
    }
    check_mentions(message, {path.string(), "File too large"});
  }
  SECTION("in the header") {
    std::string message;
    {
      const file_size_limit limit(4);
      message = fault_of([&] { write_safetensors(path, content); });
    }
    check_mentions(message, {path.string(), "File too large"});
  }
  CHECK(folder.listing() == std::vector<std::string>{"out"});
  CHECK(load(path) == "old");
}

TEST_CASE("missing permissions are reported and leave no temporary", "[safetensors]") {
  const scratch_folder folder;
  fs::permissions(folder.path(), fs::perms::all);
  fs::create_directory(folder / "closed");
  fs::permissions(folder / "closed", fs::perms::owner_read | fs::perms::owner_exec | fs::perms::group_read |
                                         fs::perms::group_exec | fs::perms::others_read |
                                         fs::perms::others_exec);
  fs::create_directory(folder / "sticky");
  fs::permissions(folder / "sticky", fs::perms::all | fs::perms::sticky_bit);
  store(folder / "sticky/out", "old");
  const bool root = ::geteuid() == 0;
  {
    const unprivileged_scope nobody;
    if (!nobody.effective()) {
      WARN("not tested: the effective user cannot be changed");
      return;
    }
    check_mentions(
        fault_of([&folder] { write_safetensors(folder / "closed/out", {}); }),
        {(folder / "closed/out").string(), "Permission denied", (folder / "closed").string() + "'"});
    if (root) {
      // Anyone may create in a sticky folder, but the owner alone may replace: the rename itself fails.
      check_mentions(fault_of([&folder] { write_safetensors(folder / "sticky/out", {}); }),
                     {"replaced", "Operation not permitted"});
    }
  }
  CHECK(fs::is_empty(folder / "closed"));
  CHECK(std::distance(fs::directory_iterator(folder / "sticky"), fs::directory_iterator()) == 1);
  CHECK(load(folder / "sticky/out") == "old");
}

TEST_CASE("a written file replaces the old one whole", "[safetensors]") {
  const scratch_folder folder;
  const fs::path path = folder / "out";
  const std::vector<std::int32_t> old_values(5000, 1);
  const std::vector<std::int32_t> new_values{2};
  const auto content = [](const std::vector<std::int32_t>& values) {
    return safetensors_content{.tensors = {{.name = "v",
                                            .dtype = data_type::i32,
                                            .shape = {static_cast<std::int64_t>(values.size())},
                                            .bytes = bytes_of(values)}}};
  };
  write_safetensors(path, content(old_values));
  const safetensors_file old_file(path);

  SECTION("and its readers keep what they opened") {
    write_safetensors(path, content(new_values));
    CHECK(old_file.copy<std::int32_t>("v") == old_values);
    CHECK(text_of(old_file.at("v").bytes) == text_of(bytes_of(old_values)));
    CHECK(safetensors_file(path).copy<std::int32_t>("v") == new_values);
  }
  SECTION("even from the tensors of the old one") {
    safetensors_content copied{.tensors = old_file.tensors()};
    copied.tensors[0].name = "w";
    write_safetensors(path, copied);
    CHECK(safetensors_file(path).copy<std::int32_t>("w") == old_values);
  }
  SECTION("through a symbolic link, which stays") {
    fs::create_symlink("out", folder / "link");
    write_safetensors(folder / "link", content(new_values));
    CHECK(fs::is_symlink(folder / "link"));
    CHECK(safetensors_file(path).copy<std::int32_t>("v") == new_values);
    fs::remove(folder / "link");
  }
  SECTION("past temporaries that others left") {
    const std::string prefix = ".freekv-" + std::to_string(::getpid()) + "-";
    for (int i = 0; i < 500; ++i) store(folder / (prefix + std::to_string(i) + ".tmp"), "left");
    write_safetensors(path, content(new_values));
    CHECK(safetensors_file(path).copy<std::int32_t>("v") == new_values);
    CHECK(folder.listing().size() == 501);
    for (int i = 0; i < 500; ++i) {
      const fs::path left = folder / (prefix + std::to_string(i) + ".tmp");
      if (load(left) != "left") FAIL_CHECK(left << " was changed");
      fs::remove(left);
    }
  }
  SECTION("under a name as long as names can be") {
    const std::string longest(255, 'n');
    write_safetensors(folder / longest, content(new_values));
    CHECK(safetensors_file(folder / longest).copy<std::int32_t>("v") == new_values);
    fs::remove(folder / longest);
  }
  SECTION("in the current folder") {
    const fs::path before = fs::current_path();
    fs::current_path(folder.path());
    write_safetensors("out", content(new_values));
    fs::current_path(before);
    CHECK(safetensors_file(path).copy<std::int32_t>("v") == new_values);
  }
  CHECK(folder.listing() == std::vector<std::string>{"out"});
}

TEST_CASE("a new file has the permissions of any new file", "[safetensors]") {
  const scratch_folder folder;
  const mode_t previous = ::umask(027);
  write_safetensors(folder / "out", {});
  ::umask(previous);
  CHECK((fs::status(folder / "out").permissions() & fs::perms::mask) ==
        (fs::perms::owner_read | fs::perms::owner_write | fs::perms::group_read));
}

TEST_CASE("corrupted files load or give a file_error, and nothing else", "[safetensors]") {
  const scratch_folder folder;
  const fs::path path = folder / "mutant";
  const auto seed = Catch::rngSeed();
  // Printed before the first mutation, so that a crash shows it too.
  std::cerr << "safetensors mutations: seed " << seed << " (choose another with --rng-seed)" << std::endl;
  std::mt19937 random(seed);
  const auto below = [&random](std::size_t bound) {
    return std::uniform_int_distribution<std::size_t>(0, bound - 1)(random);
  };

  const std::vector<float> floats(6, 0.5f);
  const std::vector<std::uint16_t> halves(8, 0x3c00);
  const std::vector<std::int64_t> positions{1, 2};
  write_safetensors(
      path, {.tensors =
                 {{.name = "keys", .dtype = data_type::f32, .shape = {2, 3}, .bytes = bytes_of(floats)},
                  {.name = "values", .dtype = data_type::f16, .shape = {8}, .bytes = bytes_of(halves)},
                  {.name = "b", .dtype = data_type::bf16, .shape = {2, 2, 2}, .bytes = bytes_of(halves)},
                  {.name = "none", .dtype = data_type::i8, .shape = {3, 0}},
                  {.name = "positions", .dtype = data_type::i64, .shape = {2}, .bytes = bytes_of(positions)}},
             .metadata = {{"format", "pt"}, {"layers", "32"}}});
  const std::string whole = load(path);
  std::uint64_t header_length = 0;
  std::memcpy(&header_length, whole.data(), sizeof(header_length));
  const std::size_t header_end = 8 + header_length;
  const std::vector<std::string> tokens{"{",
                                        "}",
                                        "[",
                                        "]",
                                        ",",
                                        ":",
                                        "\"",
                                        "0",
                                        "-1",
                                        "1e9",
                                        "1.5",
                                        "null",
                                        "true",
                                        "18446744073709551615",
                                        "9223372036854775807",
                                        "\"F32\"",
                                        "\"U8\"",
                                        "[]",
                                        "{}",
                                        "\\",
                                        "\\u0000",
                                        " ",
                                        "__metadata__",
                                        "keys",
                                        "data_offsets",
                                        "\n",
                                        "\xff",
                                        std::string(1, '\0')};

  const std::size_t descriptors_before = open_descriptors();
  std::size_t loaded = 0;
  std::size_t refused = 0;
  const auto try_file = [&](const std::string& bytes) {
    // Some file systems flush a file that is emptied and rewritten, thousands of times here.
    fs::remove(path);
    store(path, bytes);
    try {
      const safetensors_file file(path);
      unsigned sum = 0;
      for (const tensor_view& tensor : file.tensors()) {
        for (const std::byte byte : tensor.bytes) sum += std::to_integer<unsigned>(byte);
        if (file.find(tensor.name) != &tensor) FAIL_CHECK("a tensor is not found under its own name");
        if (tensor.dtype == data_type::f32 || tensor.dtype == data_type::f16 ||
            tensor.dtype == data_type::bf16) {
          const auto count =
              std::accumulate(tensor.shape.begin(), tensor.shape.end(), std::int64_t{1}, std::multiplies<>());
          if (static_cast<std::int64_t>(file.copy_as_float(tensor.name).size()) != count)
            FAIL_CHECK("wrong length");
        }
      }
      volatile unsigned keep = sum;
      static_cast<void>(keep);
      ++loaded;
    } catch (const file_error& error) {
      ++refused;
      check_one_sentence(error.what());
    }
  };

  for (std::size_t length = 0; length < whole.size(); ++length) try_file(whole.substr(0, length));
  CHECK(loaded == 0);
  CHECK(refused == whole.size());

  for (int round = 0; round < 6000; ++round) {
    std::string bytes = whole;
    const std::size_t changes = 1 + below(3);
    for (std::size_t i = 0; i < changes; ++i) {
      // Mostly in the header: a changed data byte proves little.
      const std::size_t at = below(std::min(below(8) == 0 ? bytes.size() : header_end, bytes.size()));
      switch (below(7)) {
        case 0:
          bytes[at] = static_cast<char>(below(256));
          break;
        case 1:
          bytes[at] = static_cast<char>(static_cast<unsigned char>(bytes[at]) ^ (1u << below(8)));
          break;
        case 2:
          bytes.insert(at, tokens[below(tokens.size())]);
          break;
        case 3:
          bytes.erase(at, 1 + below(12));
          break;
        case 4:
          bytes.replace(at, 1, tokens[below(tokens.size())]);
          break;
        case 5: {
          const std::size_t digit = bytes.find_first_of("0123456789", std::max<std::size_t>(at, 8));
          if (digit != std::string::npos) bytes[digit] = static_cast<char>('0' + below(10));
          break;
        }
        default:
          bytes.resize(1 + below(bytes.size()));
      }
      if (bytes.empty()) bytes = whole;
    }
    // Half of the time the header length follows what was inserted or erased, so that the JSON is looked at.
    if (below(2) == 0 && bytes.size() >= header_end) {
      const std::int64_t grown =
          static_cast<std::int64_t>(bytes.size()) - static_cast<std::int64_t>(whole.size());
      const std::int64_t length = static_cast<std::int64_t>(header_length) + grown;
      if (length >= 0) bytes.replace(0, 8, length_field(static_cast<std::uint64_t>(length)));
    }
    try_file(bytes);
  }
  CHECK(loaded > 100);
  CHECK(refused > 4000);
  CHECK(open_descriptors() == descriptors_before);
  CHECK(load("/proc/self/maps").find(path.string()) == std::string::npos);
}

namespace {

// The value of a half by its definition, for finite ones; 0x7c00 counts as the next power of two.
double half_by_definition(std::uint16_t half) {
  const int exponent = (half >> 10) & 0x1f;
  const int mantissa = half & 0x3ff;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return (half & 0x8000) != 0 ? -magnitude : magnitude;
}

bool is_half_nan(std::uint16_t half) { return (half & 0x7fff) > 0x7c00; }
bool is_bfloat16_nan(std::uint16_t bfloat16) { return (bfloat16 & 0x7fff) > 0x7f80; }

}  // namespace

TEST_CASE("every half becomes the float of its value and comes back", "[safetensors]") {
  std::size_t wrong_values = 0;
  std::size_t wrong_returns = 0;
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const float value = half_to_float(bits);
    const std::uint16_t back = float_to_half(value);
    const bool negative = (bits & 0x8000) != 0;
    bool right = std::signbit(value) == negative;
    if (is_half_nan(bits)) {
      right = right && std::isnan(value) &&
              (std::bit_cast<std::uint32_t>(value) & 0x7fffffu) >> 13 == (bits & 0x3ffu);
      if (!is_half_nan(back) || (back & 0x8000) != (bits & 0x8000)) ++wrong_returns;
    } else {
      const bool infinite = (bits & 0x7fff) == 0x7c00;
      right =
          right && (infinite ? std::isinf(value) : static_cast<double>(value) == half_by_definition(bits));
      if (back != bits) ++wrong_returns;
    }
    if (!right) ++wrong_values;
  }
  CHECK(wrong_values == 0);
  CHECK(wrong_returns == 0);
  STATIC_REQUIRE(half_to_float(0x3c00) == 1.0f);
  STATIC_REQUIRE(half_to_float(0x7bff) == 65504.0f);
  STATIC_REQUIRE(half_to_float(0x0001) == 0x1p-24f);
}

TEST_CASE("a float becomes the nearest half, ties to even, between every two halves", "[safetensors]") {
  std::size_t wrong = 0;
  for (std::uint32_t i = 0; i < 0x7c00; ++i) {
    const auto lower = static_cast<std::uint16_t>(i);
    const auto upper = static_cast<std::uint16_t>(i + 1);
    const std::uint16_t even = (lower & 1) == 0 ? lower : upper;
    const double middle = (half_by_definition(lower) + half_by_definition(upper)) / 2;
    const auto tie = static_cast<float>(middle);
    REQUIRE(static_cast<double>(tie) == middle);
    const float below = std::nextafter(tie, 0.0f);
    const float above = std::nextafter(tie, std::numeric_limits<float>::infinity());
    for (const float sign : {1.0f, -1.0f}) {
      const std::uint16_t sign_bit = sign < 0 ? 0x8000 : 0;
      if (float_to_half(sign * tie) != (even | sign_bit)) ++wrong;
      if (float_to_half(sign * below) != (lower | sign_bit)) ++wrong;
      if (float_to_half(sign * above) != (upper | sign_bit)) ++wrong;
    }
  }
  CHECK(wrong == 0);

  CHECK(float_to_half(65519.996f) == 0x7bff);
  CHECK(float_to_half(65520.0f) == 0x7c00);
  CHECK(float_to_half(-65520.0f) == 0xfc00);
  CHECK(float_to_half(std::numeric_limits<float>::max()) == 0x7c00);
  CHECK(float_to_half(std::numeric_limits<float>::infinity()) == 0x7c00);
  CHECK(float_to_half(-std::numeric_limits<float>::infinity()) == 0xfc00);
  CHECK(float_to_half(std::numeric_limits<float>::denorm_min()) == 0);
  CHECK(float_to_half(-std::numeric_limits<float>::min()) == 0x8000);
  CHECK(float_to_half(0.0f) == 0);
  CHECK(float_to_half(-0.0f) == 0x8000);
  // Payloads that the narrower mantissa cannot hold must not turn into an infinity.
  for (const std::uint32_t payload : {0x7f800001u, 0xff800001u, 0x7f801fffu, 0x7fc00000u, 0xffffffffu}) {
    const std::uint16_t bits = float_to_half(std::bit_cast<float>(payload));
    CHECK(is_half_nan(bits));
    CHECK((bits >> 15) == (payload >> 31));
  }
}

TEST_CASE("every bfloat16 becomes the float of its value and comes back", "[safetensors]") {
  std::size_t wrong = 0;
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const auto bfloat16 = static_cast<std::uint16_t>(i);
    const float value = bfloat16_to_float(bfloat16);
    const std::uint16_t back = float_to_bfloat16(value);
    const int exponent = (bfloat16 >> 7) & 0xff;
    const int mantissa = bfloat16 & 0x7f;
    bool right = std::signbit(value) == ((bfloat16 & 0x8000) != 0);
    if (is_bfloat16_nan(bfloat16)) {
      right = right && std::isnan(value) && is_bfloat16_nan(back) && (back & 0x8000) == (bfloat16 & 0x8000);
    } else {
      const double magnitude =
          exponent == 0 ? std::ldexp(mantissa, -133) : std::ldexp(128 + mantissa, exponent - 134);
      right = right && back == bfloat16 &&
              (exponent == 0xff ? std::isinf(value) : std::abs(static_cast<double>(value)) == magnitude);
    }
    if (!right) ++wrong;
  }
  CHECK(wrong == 0);
  STATIC_REQUIRE(bfloat16_to_float(0x3f80) == 1.0f);
  STATIC_REQUIRE(bfloat16_to_float(0xc2f7) == -123.5f);
}

TEST_CASE("a float becomes the nearest bfloat16, ties to even, between every two of them", "[safetensors]") {
  std::size_t wrong = 0;
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const auto lower = static_cast<std::uint16_t>(i);
    if ((lower & 0x7fff) >= 0x7f80) continue;
    const auto upper = static_cast<std::uint16_t>(lower + 1);
    const std::uint16_t even = (lower & 1) == 0 ? lower : upper;
    const std::uint32_t tie = (i << 16) | 0x8000u;
    if (float_to_bfloat16(std::bit_cast<float>(tie)) != even) ++wrong;
    if (float_to_bfloat16(std::bit_cast<float>(tie - 1)) != lower) ++wrong;
    if (float_to_bfloat16(std::bit_cast<float>(tie + 1)) != upper) ++wrong;
  }
  CHECK(wrong == 0);

  CHECK(float_to_bfloat16(1.0f) == 0x3f80);
  CHECK(float_to_bfloat16(1.00390625f) == 0x3f80);  // 1 + 2^-8, the tie above 1
  CHECK(float_to_bfloat16(1.01171875f) == 0x3f82);  // 1 + 3 * 2^-8, the next tie
  CHECK(float_to_bfloat16(std::numeric_limits<float>::max()) == 0x7f80);
  CHECK(float_to_bfloat16(-std::numeric_limits<float>::max()) == 0xff80);
  CHECK(float_to_bfloat16(std::numeric_limits<float>::infinity()) == 0x7f80);
  CHECK(float_to_bfloat16(-0.0f) == 0x8000);
  CHECK(float_to_bfloat16(std::numeric_limits<float>::denorm_min()) == 0);
  for (const std::uint32_t payload : {0x7f800001u, 0xff800001u, 0x7f80ffffu, 0x7fffffffu, 0xffffffffu}) {
    const std::uint16_t bfloat16 = float_to_bfloat16(std::bit_cast<float>(payload));
    CHECK(is_bfloat16_nan(bfloat16));
    CHECK((bfloat16 >> 15) == (payload >> 31));
  }
}
