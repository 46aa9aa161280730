#include "safetensors.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <freekv/core/size.hpp>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <system_error>
#include <utility>

#include "cited.hpp"
#include "new_file.hpp"
#include "temporary_files.hpp"

namespace freekv::examples {
namespace {

// The limit of the format's reference implementation.
constexpr std::uint64_t longest_header = 100'000'000;
constexpr std::uint64_t length_field_bytes = 8;
// A legal header needs 3; the rest is room for fields that this reader does not know.
constexpr int deepest_nesting = 32;
constexpr std::string_view metadata_key = "__metadata__";

struct dtype_entry {
  data_type dtype;
  std::string_view name;
  std::int64_t bits;
};

constexpr std::array dtype_table{
    dtype_entry{data_type::boolean, "BOOL", 8},
    dtype_entry{data_type::f4, "F4", 4},
    dtype_entry{data_type::f6_e2m3, "F6_E2M3", 6},
    dtype_entry{data_type::f6_e3m2, "F6_E3M2", 6},
    dtype_entry{data_type::u8, "U8", 8},
    dtype_entry{data_type::i8, "I8", 8},
    dtype_entry{data_type::f8_e5m2, "F8_E5M2", 8},
    dtype_entry{data_type::f8_e4m3, "F8_E4M3", 8},
    dtype_entry{data_type::f8_e8m0, "F8_E8M0", 8},
    dtype_entry{data_type::f8_e4m3fnuz, "F8_E4M3FNUZ", 8},
    dtype_entry{data_type::f8_e5m2fnuz, "F8_E5M2FNUZ", 8},
    dtype_entry{data_type::i16, "I16", 16},
    dtype_entry{data_type::u16, "U16", 16},
    dtype_entry{data_type::f16, "F16", 16},
    dtype_entry{data_type::bf16, "BF16", 16},
    dtype_entry{data_type::i32, "I32", 32},
    dtype_entry{data_type::u32, "U32", 32},
    dtype_entry{data_type::f32, "F32", 32},
    dtype_entry{data_type::c64, "C64", 64},
    dtype_entry{data_type::f64, "F64", 64},
    dtype_entry{data_type::i64, "I64", 64},
    dtype_entry{data_type::u64, "U64", 64},
};

constexpr bool table_follows_enumerators() {
  for (std::size_t i = 0; i < dtype_table.size(); ++i) {
    if (to_size(dtype_table[i].dtype) != i) return false;
  }
  return true;
}
static_assert(table_follows_enumerators(), "dtype_table is indexed by the enumerators of data_type");

const dtype_entry& entry_of(data_type dtype) {
  const auto index = to_size(dtype);
  if (index >= dtype_table.size()) {
    throw std::invalid_argument("data_type " + std::to_string(index) + " is none of the " +
                                std::to_string(dtype_table.size()) + " dtypes of the safetensors format");
  }
  return dtype_table[index];
}

// Names in a hostile file may hold line breaks or be megabytes long, and a message is one readable line.
std::string quote(std::string_view text, std::size_t longest = 100) {
  const std::size_t end = beginning(text, longest).size();
  std::string result = "'";
  for (const char character : text.substr(0, end)) {
    const auto byte = static_cast<unsigned char>(character);
    if (byte < 0x20 || byte == 0x7f) {
      constexpr std::string_view digits = "0123456789abcdef";
      result += "\\x";
      result += digits[byte >> 4];
      result += digits[byte & 0xfu];
    } else {
      result += character;
    }
  }
  result += "'";
  if (end < text.size()) {
    result += " (the first " + std::to_string(end) + " of " + std::to_string(text.size()) + " bytes)";
  }
  return result;
}

std::string quote_path(const std::filesystem::path& path) {
  return quote(shortened(path.native()), std::numeric_limits<std::size_t>::max());
}

// Every message is the file's name followed by what is true of it.
[[noreturn]] void fail(const std::filesystem::path& path, const std::string& predicate) {
  throw file_error(quote_path(path) + " " + predicate);
}

std::string error_text(int number) { return std::generic_category().message(number); }

std::string counted(std::uint64_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  constexpr std::size_t most = 8;
  std::string result = "[";
  for (std::size_t i = 0; i < std::min(shape.size(), most); ++i) {
    result += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  if (shape.size() > most) result += " and " + std::to_string(shape.size() - most) + " more";
  return result + "]";
}

struct tensor_description {
  const std::string& name;
  data_type dtype;
  const std::vector<std::int64_t>& shape;
};

std::uint64_t checked_byte_count(const std::filesystem::path& path, const tensor_description& tensor) {
  const std::string subject = "has a tensor " + quote(tensor.name);
  std::int64_t bits = bits_per_element(tensor.dtype);
  bool empty = false;
  for (const std::int64_t extent : tensor.shape) {
    if (extent < 0) {
      fail(path, subject + " of shape " + shape_text(tensor.shape) + ", whose entry " +
                     std::to_string(extent) + " is negative");
    }
    empty = empty || extent == 0;
    // Zeros are left out, so that a caller may form strides of an accepted shape without overflow.
    if (extent != 0 && __builtin_mul_overflow(bits, extent, &bits)) {
      fail(path, subject + " of shape " + shape_text(tensor.shape) + " and dtype " +
                     std::string(dtype_name(tensor.dtype)) + ", whose size overflows 64 bits");
    }
  }
  if (empty) return 0;
  if (bits % 8 != 0) {
    fail(path, subject + " of shape " + shape_text(tensor.shape) + " and dtype " +
                   std::string(dtype_name(tensor.dtype)) + ", whose " + std::to_string(bits) +
                   " bits do not fill whole bytes");
  }
  return static_cast<std::uint64_t>(bits) / 8;
}

class file_descriptor {
 public:
  explicit file_descriptor(int number) noexcept : number_(number) {}
  file_descriptor(file_descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  file_descriptor(const file_descriptor&) = delete;
  file_descriptor& operator=(const file_descriptor&) = delete;
  file_descriptor& operator=(file_descriptor&&) = delete;
  ~file_descriptor() {
    if (number_ >= 0) ::close(number_);
  }

  int number() const noexcept { return number_; }

 private:
  int number_;
};

class memory_map {
 public:
  memory_map(void* address, std::size_t size) noexcept : address_(address), size_(size) {}
  memory_map(memory_map&& other) noexcept
      : address_(std::exchange(other.address_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  memory_map(const memory_map&) = delete;
  memory_map& operator=(const memory_map&) = delete;
  memory_map& operator=(memory_map&&) = delete;
  ~memory_map() {
    if (address_ != nullptr) ::munmap(address_, size_);
  }

  const std::byte* begin() const noexcept { return static_cast<const std::byte*>(address_); }

 private:
  void* address_;
  std::size_t size_;
};

struct file_range {
  std::uint64_t offset;
  std::span<std::byte> target;
};

void read_range(const std::filesystem::path& path, const file_descriptor& file, const file_range& range) {
  std::size_t done = 0;
  while (done < range.target.size()) {
    const ssize_t count = ::pread(file.number(), range.target.data() + done, range.target.size() - done,
                                  static_cast<off_t>(range.offset + done));
    if (count > 0) {
      done += to_size(count);
    } else if (count == 0) {
      fail(path, "became shorter while it was read: it ends at byte " + std::to_string(range.offset + done) +
                     ", before the " + counted(range.target.size() - done, "byte") +
                     " still needed, so keep other programs from writing to it");
    } else if (errno != EINTR) {
      const int number = errno;
      fail(path, "cannot be read at byte " + std::to_string(range.offset + done) + ": " + error_text(number));
    }
  }
}

std::string_view kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISCHR(mode)) return "a character device";
  if (S_ISBLK(mode)) return "a block device";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  return "a special file";
}

file_descriptor open_for_reading(const std::filesystem::path& path) {
  // O_NONBLOCK: opening a FIFO that nobody writes to would otherwise wait for ever, before any check.
  const int number = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (number < 0) {
    const int cause = errno;
    fail(path, "cannot be opened for reading: " + error_text(cause));
  }
  return file_descriptor(number);
}

std::uint64_t regular_file_size(const std::filesystem::path& path, const file_descriptor& file) {
  struct stat status {};
  if (::fstat(file.number(), &status) != 0) {
    const int cause = errno;
    fail(path, "cannot be examined: " + error_text(cause));
  }
  if (!S_ISREG(status.st_mode)) {
    fail(path, "is " + std::string(kind_of(status.st_mode)) + ", and only a regular file can be read");
  }
  return static_cast<std::uint64_t>(status.st_size);
}

std::uint64_t read_header_length(const std::filesystem::path& path, const file_descriptor& file,
                                 std::uint64_t file_size) {
  if (file_size == 0) {
    fail(path, "is empty (0 bytes): the program that was to write it did not finish");
  }
  if (file_size < length_field_bytes) {
    fail(path, "is " + counted(file_size, "byte") +
                   " long and so is no safetensors file, which begins with an 8-byte header length");
  }
  std::uint64_t length = 0;
  read_range(path, file, {.offset = 0, .target = std::as_writable_bytes(std::span(&length, 1))});
  if (length > longest_header) {
    fail(path, "begins with a header length of " + std::to_string(length) +
                   " bytes, more than the format's " + std::to_string(longest_header) +
                   ", so it is probably not a safetensors file");
  }
  if (length > file_size - length_field_bytes) {
    fail(path, "begins with a header length of " + counted(length, "byte") + " but has only " +
                   std::to_string(file_size - length_field_bytes) +
                   " bytes after it, so it is truncated (fetch it again) or not a safetensors file");
  }
  return length;
}

struct header_entry {
  std::string name{};
  data_type dtype = data_type::f32;
  std::vector<std::int64_t> shape{};
  std::array<std::uint64_t, 2> data_offsets{};
};

struct header_content {
  std::vector<header_entry> entries;
  std::map<std::string, std::string, std::less<>> metadata;
};

// Takes the header's JSON event by event: a document tree would keep only the last of two equal names, and
// would need many times the memory of a large header. Each event is checked against the one place of the
// header where it can stand, and the first that cannot stand there ends the parse.
class header_reader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit header_reader(const std::filesystem::path& path) : path_(path) {}

  header_content take() { return std::move(content_); }

  bool null() override { return scalar({.kind = scalar_kind::null}); }
  bool boolean(bool value) override {
    return scalar({.kind = value ? scalar_kind::true_literal : scalar_kind::false_literal});
  }
  bool number_integer(number_integer_t value) override {
    return scalar({.kind = scalar_kind::negative_integer, .negative = value});
  }
  bool number_unsigned(number_unsigned_t value) override {
    return scalar({.kind = scalar_kind::unsigned_integer, .integer = value});
  }
  bool number_float(number_float_t, const string_t& token) override {
    return scalar({.kind = scalar_kind::other_number, .text = &token});
  }
  bool string(string_t& value) override { return scalar({.kind = scalar_kind::string, .text = &value}); }
  bool binary(binary_t&) override { return false; }  // JSON text has none

  bool start_object(std::size_t) override {
    switch (place_) {
      case place::outside:
        place_ = place::root;
        return true;
      case place::root:
        if (key_ == metadata_key) {
          place_ = place::metadata;
        } else {
          place_ = place::tensor;
          content_.entries.push_back({.name = std::move(key_)});
          seen_ = {};
        }
        return true;
      default:
        return nested("an object");
    }
  }

  bool start_array(std::size_t) override {
    if (place_ == place::tensor && field_ == field::shape) {
      place_ = place::shape;
      return true;
    }
    if (place_ == place::tensor && field_ == field::data_offsets) {
      place_ = place::data_offsets;
      offset_count_ = 0;
      return true;
    }
    return nested("an array");
  }

  bool key(string_t& name) override {
    switch (place_) {
      case place::root:
        if (name == metadata_key && std::exchange(metadata_seen_, true)) {
          fail(path_, "has a header with two '__metadata__' entries, and only one is allowed");
        }
        key_ = std::move(name);
        break;
      case place::metadata:
        if (content_.metadata.contains(name)) {
          fail(path_, "has the key " + quote(name) + " twice in its '__metadata__'");
        }
        key_ = std::move(name);
        break;
      case place::tensor:
        field_ = name == "dtype"          ? field::dtype
                 : name == "shape"        ? field::shape
                 : name == "data_offsets" ? field::data_offsets
                                          : field::unknown;
        if (field_ != field::unknown && std::exchange(seen_[to_size(field_)], true)) {
          fail_tensor("with two fields " + quote(name) + ", and only one is allowed");
        }
        break;
      default:
        break;
    }
    return true;
  }

  bool end_object() override {
    switch (place_) {
      case place::root:
        place_ = place::outside;
        break;
      case place::metadata:
        place_ = place::root;
        break;
      case place::tensor:
        for (const field required : {field::dtype, field::shape, field::data_offsets}) {
          if (!seen_[to_size(required)]) {
            fail_tensor("without the field '" + std::string(field_name(required)) + "'");
          }
        }
        place_ = place::root;
        break;
      default:
        leave_unknown();
    }
    return true;
  }

  bool end_array() override {
    if (place_ == place::shape) {
      place_ = place::tensor;
    } else if (place_ == place::data_offsets) {
      if (offset_count_ != 2) {
        fail_tensor("with " + std::to_string(offset_count_) + " data_offsets where 2 are needed");
      }
      place_ = place::tensor;
    } else {
      leave_unknown();
    }
    return true;
  }

  // nlohmann's own text is left out: it quotes the faulty token whole, which may be the rest of the file.
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::json::exception& error) override {
    constexpr int number_out_of_range = 406;
    fail(path_,
         error.id == number_out_of_range
             ? "has a number beyond the range of a double near byte " + std::to_string(position) +
                   " of its header"
             : "has a header that is not valid JSON: the fault is near its byte " + std::to_string(position));
  }

 private:
  enum class place { outside, root, metadata, tensor, shape, data_offsets, unknown };
  enum class field { dtype, shape, data_offsets, unknown };
  enum class scalar_kind {
    null,
    true_literal,
    false_literal,
    negative_integer,
    unsigned_integer,
    other_number,
    string,
  };

  struct scalar_value {
    scalar_kind kind = scalar_kind::null;
    std::int64_t negative = 0;
    std::uint64_t integer = 0;
    const std::string* text = nullptr;
  };

  static std::string_view field_name(field which) {
    constexpr std::array<std::string_view, 3> names{"dtype", "shape", "data_offsets"};
    return names[to_size(which)];
  }

  static std::string described(const scalar_value& value) {
    switch (value.kind) {
      case scalar_kind::null:
        return "null";
      case scalar_kind::true_literal:
        return "true";
      case scalar_kind::false_literal:
        return "false";
      case scalar_kind::negative_integer:
        return "the number -" + std::to_string(0 - static_cast<std::uint64_t>(value.negative));
      case scalar_kind::unsigned_integer:
        return "the number " + std::to_string(value.integer);
      case scalar_kind::other_number:
        return "the number " + quote(*value.text);
      case scalar_kind::string:
        break;
    }
    return "the string " + quote(*value.text);
  }

  [[noreturn]] void fail_tensor(const std::string& text) const {
    fail(path_, "describes tensor " + quote(content_.entries.back().name) + " " + text);
  }

  bool scalar(const scalar_value& value) {
    switch (place_) {
      case place::outside:
      case place::root:
        fail_kind(described(value));
      case place::metadata:
        if (value.kind != scalar_kind::string) fail_kind(described(value));
        content_.metadata.emplace(std::move(key_), *value.text);
        break;
      case place::tensor:
        if (field_ == field::dtype) {
          if (value.kind != scalar_kind::string) fail_kind(described(value));
          content_.entries.back().dtype = dtype_of(*value.text);
        } else if (field_ != field::unknown) {
          fail_kind(described(value));
        }
        break;
      case place::shape:
        content_.entries.back().shape.push_back(static_cast<std::int64_t>(whole_number(value)));
        break;
      case place::data_offsets:
        if (offset_count_ == 2) fail_tensor("with more than 2 data_offsets");
        content_.entries.back().data_offsets[offset_count_++] = whole_number(value);
        break;
      case place::unknown:
        break;
    }
    return true;
  }

  // A value of the wrong kind for the place and key that the parse is at.
  [[noreturn]] void fail_kind(const std::string& found) const {
    switch (place_) {
      case place::root:
        if (key_ == metadata_key) {
          fail(path_, "has " + found + " as its '__metadata__' where an object of strings is needed");
        }
        fail(path_, "describes tensor " + quote(key_) + " by " + found + " where an object is needed");
      case place::metadata:
        fail(path_, "has " + found + " under the key " + quote(key_) +
                        " of its '__metadata__' where a string is needed");
      case place::tensor:
        fail_tensor("with " + found + " as its '" + std::string(field_name(field_)) + "' where " +
                    (field_ == field::dtype ? "a string" : "an array of whole numbers") + " is needed");
      case place::shape:
        fail_tensor("with " + found +
                    " in its 'shape' where a whole number from 0 to 9223372036854775807 is needed");
      case place::data_offsets:
        fail_tensor("with " + found +
                    " in its 'data_offsets' where a whole number from 0 to "
                    "9223372036854775807 is needed");
      default:
        fail(path_, "has a header that is " + found + " where a JSON object is needed");
    }
  }

  data_type dtype_of(const std::string& name) const {
    const auto found = std::find_if(dtype_table.begin(), dtype_table.end(),
                                    [&name](const dtype_entry& entry) { return entry.name == name; });
    if (found == dtype_table.end()) {
      fail_tensor("with the dtype " + quote(name) + ", which is none of the " +
                  std::to_string(dtype_table.size()) + " that this reader knows");
    }
    return found->dtype;
  }

  std::uint64_t whole_number(const scalar_value& value) const {
    constexpr auto largest = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    if (value.kind != scalar_kind::unsigned_integer || value.integer > largest) fail_kind(described(value));
    return value.integer;
  }

  bool nested(const std::string& found) {
    if (place_ == place::tensor && field_ == field::unknown) {
      place_ = place::unknown;
      depth_ = 2;
    }
    if (place_ != place::unknown) fail_kind(found);
    if (++depth_ > deepest_nesting) {
      fail_tensor("with JSON nested more than " + std::to_string(deepest_nesting) + " levels deep");
    }
    return true;
  }

  void leave_unknown() {
    if (--depth_ == 2) place_ = place::tensor;
  }

  const std::filesystem::path& path_;
  header_content content_;
  place place_ = place::outside;
  field field_ = field::unknown;
  std::string key_;
  std::array<bool, 3> seen_{};
  std::size_t offset_count_ = 0;
  int depth_ = 0;
  bool metadata_seen_ = false;
};

header_content parse_header(const std::filesystem::path& path, const std::string& header) {
  if (!header.starts_with('{')) {
    fail(path, "has a header of " + counted(header.size(), "byte") +
                   " that does not begin with '{', so it is not a safetensors file");
  }
  // The parser takes a zero byte for the end of its input and would let anything hide behind it.
  if (const std::size_t zero = header.find('\0'); zero != std::string::npos) {
    fail(path,
         "has a header that is not valid JSON: there is a zero byte at its byte " + std::to_string(zero));
  }
  header_reader reader(path);
  nlohmann::json::sax_parse(header, &reader);
  return reader.take();
}

std::optional<std::string_view> first_repeated(std::vector<std::string_view> names) {
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  return twice == names.end() ? std::nullopt : std::optional(*twice);
}

void check_names(const std::filesystem::path& path, const std::vector<header_entry>& entries) {
  std::vector<std::string_view> names;
  names.reserve(entries.size());
  for (const header_entry& entry : entries) names.push_back(entry.name);
  if (const auto repeated = first_repeated(std::move(names))) {
    fail(path, "describes tensor " + quote(*repeated) + " twice in its header");
  }
}

void check_ranges(const std::filesystem::path& path, std::vector<header_entry>& entries,
                  std::uint64_t data_size) {
  for (const header_entry& entry : entries) {
    const auto [begin, end] = entry.data_offsets;
    const std::string subject = "describes tensor " + quote(entry.name);
    if (begin > end) {
      fail(path, subject + " with data_offsets that begin at " + std::to_string(begin) +
                     " and end before that, at " + std::to_string(end));
    }
    if (end > data_size) {
      fail(path, subject + " as ending at byte " + std::to_string(end) + " of the data, but has only " +
                     counted(data_size, "byte") +
                     " of data, so it is truncated (fetch or record it again) or its header is wrong");
    }
    const std::uint64_t needed =
        checked_byte_count(path, {.name = entry.name, .dtype = entry.dtype, .shape = entry.shape});
    if (end - begin != needed) {
      fail(path, subject + " with data_offsets that span " + counted(end - begin, "byte") +
                     " where its shape " + shape_text(entry.shape) + " of " +
                     std::string(dtype_name(entry.dtype)) + " needs " + std::to_string(needed));
    }
  }
  // By both offsets: a tensor without bytes stands before the one that begins at the same place.
  std::stable_sort(entries.begin(), entries.end(), [](const header_entry& left, const header_entry& right) {
    return left.data_offsets < right.data_offsets;
  });
  std::uint64_t reached = 0;
  for (const header_entry& entry : entries) {
    const auto [begin, end] = entry.data_offsets;
    if (begin != reached) {
      fail(path, "describes tensor " + quote(entry.name) + " as beginning at byte " + std::to_string(begin) +
                     " of the data, which " +
                     (begin > reached ? "leaves a gap after the data before it, which ends at "
                                      : "overlaps the data before it, which ends at ") +
                     std::to_string(reached));
    }
    reached = end;
  }
  if (reached != data_size) {
    fail(path, "has " + counted(data_size, "byte") + " of data of which no tensor covers the last " +
                   std::to_string(data_size - reached));
  }
}

void write_all(int descriptor, std::span<const std::byte> bytes, const std::filesystem::path& path) {
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t count = ::write(descriptor, bytes.data() + done, bytes.size() - done);
    if (count > 0) {
      done += to_size(count);
    } else if (count == 0 || errno != EINTR) {
      const int cause = count == 0 ? ENOSPC : errno;
      fail(path, "cannot be written: " + error_text(cause));
    }
  }
}

// Where the finished file goes: through a symbolic link to a file, so that the link survives.
std::filesystem::path checked_target(const std::filesystem::path& path) {
  if (path.empty()) throw file_error("'' is an empty file name: give the name of the file to write");
  // The kernel would stop at a zero byte and write somewhere else.
  if (path.native().find('\0') != std::string::npos) fail(path, "is a file name with a zero byte");
  if (!path.has_filename()) fail(path, "names a folder, and a file name is needed to write to");

  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    const int cause = errno;
    if (cause == ENOENT || cause == ENOTDIR) return path;  // a missing folder is reported by the creation
    fail(path, "cannot be written: " + error_text(cause));
  }
  if (!S_ISREG(status.st_mode)) {
    fail(path, "is " + std::string(kind_of(status.st_mode)) +
                   ", and only a regular file can be written: name one, new or to be replaced");
  }
  std::error_code error;
  std::filesystem::path target = std::filesystem::canonical(path, error);
  if (error) fail(path, "cannot be written: " + error.message());
  return target;
}

std::string json_string(const std::filesystem::path& path, const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::type_error&) {
    fail(path, "cannot be written, because its name or metadata text " + quote(text) + " is not valid UTF-8");
  }
}

struct file_layout {
  std::string header;
  std::vector<const tensor_view*> order;
};

void check_tensors(const std::filesystem::path& path, const std::vector<tensor_view>& tensors) {
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const tensor_view& tensor : tensors) {
    if (tensor.name == metadata_key) {
      fail(path, "cannot be written with a tensor named '__metadata__', which the format reserves");
    }
    if (to_size(tensor.dtype) >= dtype_table.size()) {
      fail(path, "cannot be written with a tensor " + quote(tensor.name) + " of data_type " +
                     std::to_string(static_cast<int>(tensor.dtype)) + ", which is not a dtype of the format");
    }
    const std::uint64_t needed =
        checked_byte_count(path, {.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
    if (needed != tensor.bytes.size()) {
      fail(path, "cannot be written with " + counted(tensor.bytes.size(), "byte") + " for tensor " +
                     quote(tensor.name) + ", whose shape " + shape_text(tensor.shape) + " of " +
                     std::string(dtype_name(tensor.dtype)) + " needs " + std::to_string(needed));
    }
    names.push_back(tensor.name);
  }
  if (const auto repeated = first_repeated(std::move(names))) {
    fail(path, "cannot be written with two tensors named " + quote(*repeated));
  }
}

file_layout laid_out(const std::filesystem::path& path, const safetensors_content& content) {
  check_tensors(path, content.tensors);
  file_layout layout;
  layout.order.reserve(content.tensors.size());
  for (const tensor_view& tensor : content.tensors) layout.order.push_back(&tensor);
  std::stable_sort(layout.order.begin(), layout.order.end(),
                   [](const tensor_view* left, const tensor_view* right) {
                     return bits_per_element(left->dtype) > bits_per_element(right->dtype);
                   });

  std::string& header = layout.header;
  header = "{";
  if (!content.metadata.empty()) {
    header += json_string(path, std::string(metadata_key)) + ":{";
    for (const auto& [key, value] : content.metadata) {
      if (header.back() != '{') header += ',';
      header += json_string(path, key) + ":" + json_string(path, value);
    }
    header += '}';
  }
  std::uint64_t offset = 0;
  for (const tensor_view* tensor : layout.order) {
    if (header.size() > 1) header += ',';
    header += json_string(path, tensor->name) + R"(:{"dtype":")" + std::string(dtype_name(tensor->dtype)) +
              R"(","shape":[)";
    for (const std::int64_t extent : tensor->shape) {
      if (header.back() != '[') header += ',';
      header += std::to_string(extent);
    }
    header += R"(],"data_offsets":[)" + std::to_string(offset) + ",";
    offset += tensor->bytes.size();
    header += std::to_string(offset) + "]}";
  }
  header += '}';
  header.append((8 - header.size() % 8) % 8, ' ');
  if (header.size() > longest_header) {
    fail(path, "cannot be written with a header of " + std::to_string(header.size()) +
                   " bytes, more than the format's " + std::to_string(longest_header) +
                   ": split the tensors over several files");
  }
  return layout;
}

}  // namespace

std::string_view dtype_name(data_type dtype) { return entry_of(dtype).name; }

std::int64_t bits_per_element(data_type dtype) { return entry_of(dtype).bits; }

struct safetensors_file::state {
  std::filesystem::path path;
  file_descriptor descriptor;
  memory_map map;
  std::vector<tensor_view> tensors;
  std::vector<std::size_t> by_name;
  std::map<std::string, std::string, std::less<>> metadata;
};

safetensors_file::safetensors_file(const std::filesystem::path& path) {
  if (path.native().find('\0') != std::string::npos) fail(path, "is a file name with a zero byte");
  file_descriptor descriptor = open_for_reading(path);
  const std::uint64_t file_size = regular_file_size(path, descriptor);
  const std::uint64_t header_length = read_header_length(path, descriptor, file_size);
  const std::uint64_t data_begin = length_field_bytes + header_length;

  header_content content;
  {
    // Read, not mapped: the text that is checked cannot change between two looks at it.
    std::string header(header_length, '\0');
    read_range(path, descriptor,
               {.offset = length_field_bytes, .target = std::as_writable_bytes(std::span(header))});
    content = parse_header(path, header);
  }
  check_names(path, content.entries);
  check_ranges(path, content.entries, file_size - data_begin);

  std::vector<std::size_t> by_name(content.entries.size());
  std::iota(by_name.begin(), by_name.end(), std::size_t{0});
  std::sort(by_name.begin(), by_name.end(), [&content](std::size_t left, std::size_t right) {
    return content.entries[left].name < content.entries[right].name;
  });
  void* const address = ::mmap(nullptr, file_size, PROT_READ, MAP_PRIVATE, descriptor.number(), 0);
  if (address == MAP_FAILED) {
    const int cause = errno;
    fail(path, "cannot be mapped with its " + std::to_string(file_size) + " bytes: " + error_text(cause));
  }
  memory_map map(address, file_size);
  const std::byte* const data = map.begin() + data_begin;

  std::vector<tensor_view> tensors;
  tensors.reserve(content.entries.size());
  for (header_entry& entry : content.entries) {
    const auto [begin, end] = entry.data_offsets;
    tensors.push_back({.name = std::move(entry.name),
                       .dtype = entry.dtype,
                       .shape = std::move(entry.shape),
                       .bytes = std::span(data + begin, end - begin)});
  }
  state_ = std::make_shared<const state>(state{.path = path,
                                               .descriptor = std::move(descriptor),
                                               .map = std::move(map),
                                               .tensors = std::move(tensors),
                                               .by_name = std::move(by_name),
                                               .metadata = std::move(content.metadata)});
}

const std::filesystem::path& safetensors_file::path() const noexcept { return state_->path; }

const std::vector<tensor_view>& safetensors_file::tensors() const noexcept { return state_->tensors; }

std::vector<std::string> safetensors_file::names() const {
  std::vector<std::string> result;
  result.reserve(state_->tensors.size());
  for (const tensor_view& tensor : state_->tensors) result.push_back(tensor.name);
  return result;
}

const std::map<std::string, std::string, std::less<>>& safetensors_file::metadata() const noexcept {
  return state_->metadata;
}

const tensor_view* safetensors_file::find(std::string_view name) const noexcept {
  const std::vector<std::size_t>& by_name = state_->by_name;
  const auto found = std::lower_bound(
      by_name.begin(), by_name.end(), name,
      [this](std::size_t index, std::string_view wanted) { return state_->tensors[index].name < wanted; });
  if (found == by_name.end() || state_->tensors[*found].name != name) return nullptr;
  return &state_->tensors[*found];
}

const tensor_view& safetensors_file::at(std::string_view name) const {
  if (const tensor_view* found = find(name)) return *found;
  constexpr std::size_t most = 5;
  const std::vector<std::size_t>& by_name = state_->by_name;
  std::string present;
  for (std::size_t i = 0; i < std::min(by_name.size(), most); ++i) {
    present += (i == 0 ? ": " : ", ") + quote(state_->tensors[by_name[i]].name);
  }
  if (by_name.size() > most) present += " and " + std::to_string(by_name.size() - most) + " more";
  fail(state_->path,
       "has no tensor " + quote(name) + " among its " + counted(by_name.size(), "tensor") + present);
}

void safetensors_file::require_dtype(const tensor_view& tensor, std::span<const data_type> accepted) const {
  if (std::find(accepted.begin(), accepted.end(), tensor.dtype) != accepted.end()) return;
  std::string wanted;
  for (const data_type dtype : accepted) {
    wanted += (wanted.empty() ? "" : " or ") + std::string(dtype_name(dtype));
  }
  fail(state_->path, "has tensor " + quote(tensor.name) + " with dtype " +
                         std::string(dtype_name(tensor.dtype)) + " where " + wanted + " is needed");
}

void safetensors_file::read(const tensor_view& tensor, std::size_t offset,
                            std::span<std::byte> target) const {
  const auto begin = static_cast<std::uint64_t>(tensor.bytes.data() - state_->map.begin());
  read_range(state_->path, state_->descriptor, {.offset = begin + offset, .target = target});
}

std::vector<float> safetensors_file::copy_as_float(std::string_view name) const {
  const tensor_view& tensor = at(name);
  if (tensor.dtype == data_type::f32) return copy<float>(name);
  constexpr std::array accepted{data_type::f32, data_type::f16, data_type::bf16};
  require_dtype(tensor, accepted);

  // In blocks, so that the conversion needs no second array of the tensor's size.
  std::array<std::uint16_t, 8192> block;
  std::vector<float> elements(tensor.bytes.size() / sizeof(std::uint16_t));
  for (std::size_t done = 0; done < elements.size(); done += block.size()) {
    const std::span part = std::span(block).first(std::min(block.size(), elements.size() - done));
    read(tensor, done * sizeof(std::uint16_t), std::as_writable_bytes(part));
    const auto target = elements.begin() + static_cast<std::ptrdiff_t>(done);
    if (tensor.dtype == data_type::f16) {
      std::transform(part.begin(), part.end(), target,
                     [](std::uint16_t bits) { return half_to_float(bits); });
    } else {
      std::transform(part.begin(), part.end(), target,
                     [](std::uint16_t bits) { return bfloat16_to_float(bits); });
    }
  }
  return elements;
}

struct new_file::state {
  std::filesystem::path path, target, name{};
  int descriptor = -1;
  temporary_name listed{};

  explicit state(const std::filesystem::path& of) : path(of), target(checked_target(of)) {
    // Not derived from the target's name, which may already have the greatest length that a name can have.
    static std::atomic<std::uint64_t> serial{0};
    const std::string prefix = ".freekv-" + std::to_string(::getpid()) + "-";
    constexpr int most_tries = 1000;
    const removal_held until_listed;
    for (int tries = 0; tries < most_tries && descriptor < 0; ++tries) {
      name = target.parent_path() / (prefix + std::to_string(serial++) + ".tmp");
      // Exclusive creation leaves permissions to the umask and never follows or reuses what is there.
      descriptor = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOCTTY, 0666);
      if (descriptor < 0 && errno != EEXIST) break;
    }
    if (descriptor < 0) {
      const int cause = errno;
      const std::filesystem::path folder = target.parent_path().empty() ? "." : target.parent_path();
      fail(path, "cannot be written, because no file can be created in the folder " + quote_path(folder) +
                     ": " + error_text(cause));
    }
    listed = temporary_name(name);
  }
  state(const state&) = delete;
  state& operator=(const state&) = delete;
  ~state() {
    if (descriptor >= 0) ::close(descriptor);
    if (!name.empty()) ::unlink(name.c_str());
  }
};

new_file::new_file(const std::filesystem::path& path) : state_(std::make_unique<state>(path)) {}
new_file::new_file(new_file&&) noexcept = default;
new_file& new_file::operator=(new_file&&) noexcept = default;
new_file::~new_file() = default;

void new_file::write(std::span<const std::byte> bytes) { write_all(state_->descriptor, bytes, state_->path); }

// The close is where some file systems first report that there was no room.
void new_file::finish() {
  if (::close(std::exchange(state_->descriptor, -1)) != 0) {
    const int cause = errno;
    fail(state_->path, "cannot be written: " + error_text(cause));
  }
}

void new_file::take_place() {
  if (::rename(state_->name.c_str(), state_->target.c_str()) != 0) {
    const int cause = errno;
    fail(state_->path, "cannot be replaced by the finished file: " + error_text(cause));
  }
  state_->name.clear();
}

void check_writable(const std::filesystem::path& path) { (void)new_file(path); }

new_file new_safetensors(const std::filesystem::path& path, const safetensors_content& content) {
  (void)checked_target(path);  // before what is wrong with the content
  const file_layout layout = laid_out(path, content);
  const std::uint64_t header_length = layout.header.size();

  new_file file(path);
  file.write(std::as_bytes(std::span(&header_length, 1)));
  file.write(std::as_bytes(std::span(layout.header)));
  for (const tensor_view* tensor : layout.order) file.write(tensor->bytes);
  file.finish();
  return file;
}

void write_safetensors(const std::filesystem::path& path, const safetensors_content& content) {
  new_safetensors(path, content).take_place();
}

}  // namespace freekv::examples
