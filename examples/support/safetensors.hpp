// Reads and writes safetensors files: recordings of queries, keys and values, and their replays.
//
// A safetensors file is an 8-byte little-endian header length, a JSON header that gives every tensor a name,
// a dtype, a shape and a byte range, and one data buffer that those ranges cover without holes.
#pragma once

#include <array>
#include <bit>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace freekv::examples {

static_assert(std::endian::native == std::endian::little,
              "safetensors files are little-endian and this code copies their bytes unchanged: a big-endian "
              "host needs byte swaps in copy() and write_safetensors()");

// Any fault of a file that is read or written. what() is one sentence without a final full stop: it begins
// with the file's name in quotes, carries the numbers that disagree, and ends with a remedy where there is
// one.
class file_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Every dtype the format names; the format's own spelling ("F32", "BOOL") comes from dtype_name().
enum class data_type : std::uint8_t {
  boolean,
  f4,
  f6_e2m3,
  f6_e3m2,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,
  f64,
  i64,
  u64,
};

// Both throw std::invalid_argument for a number that is none of the enumerators.
std::string_view dtype_name(data_type dtype);
// Bits, because F4 and F6 elements are packed across byte borders.
std::int64_t bits_per_element(data_type dtype);

// One tensor, in C order, its bytes owned by someone else: by the safetensors_file it came from, or by the
// caller of write_safetensors(). An empty shape is a scalar; a shape with a 0 has no bytes.
struct tensor_view {
  std::string name{};
  data_type dtype = data_type::f32;
  std::vector<std::int64_t> shape{};
  std::span<const std::byte> bytes{};
};

// The dtypes that safetensors_file::copy<Element>() takes. Half-width floats come as their bit patterns
// (half_to_float() and bfloat16_to_float() below), a BOOL as one byte, which need not be 0 or 1.
template <typename Element>
inline constexpr bool copies_from = false;
template <>
inline constexpr std::array copies_from<float>{data_type::f32};
template <>
inline constexpr std::array copies_from<double>{data_type::f64};
template <>
inline constexpr std::array copies_from<std::complex<float>>{data_type::c64};
template <>
inline constexpr std::array copies_from<std::int8_t>{data_type::i8};
template <>
inline constexpr std::array copies_from<std::int16_t>{data_type::i16};
template <>
inline constexpr std::array copies_from<std::int32_t>{data_type::i32};
template <>
inline constexpr std::array copies_from<std::int64_t>{data_type::i64};
template <>
inline constexpr std::array copies_from<std::uint8_t>{
    data_type::u8,      data_type::boolean,     data_type::f8_e5m2,    data_type::f8_e4m3,
    data_type::f8_e8m0, data_type::f8_e4m3fnuz, data_type::f8_e5m2fnuz};
template <>
inline constexpr std::array copies_from<std::uint16_t>{data_type::u16, data_type::f16, data_type::bf16};
template <>
inline constexpr std::array copies_from<std::uint32_t>{data_type::u32};
template <>
inline constexpr std::array copies_from<std::uint64_t>{data_type::u64};

template <typename Element>
concept tensor_element = requires {
  copies_from<Element>.size();
};

// A read-only safetensors file. The constructor checks the whole header against the real size of the file, so
// every tensor it hands out lies inside the file; nothing is allocated by a size that the file only claims.
//
// The data stays in the file until it is asked for. copy() and copy_as_float() read it into a vector; they
// throw file_error if the file shrinks or its disk fails meanwhile, and std::bad_alloc if the tensor does not
// fit in memory. tensor_view::bytes is a view of a read-only memory map, at any alignment: copy from it with
// memcpy, never through a cast pointer. If another program shortens the mapped file, or its disk fails, a
// read through the view ends the process with SIGBUS, which no exception can report. Replacing the file as
// write_safetensors() does is harmless: the map keeps the old one.
//
// Copies of this object share one open file, and the views live as long as the last of them. All members are
// const and may be called from several threads at once. Names are found in O(log tensors).
class safetensors_file {
 public:
  // Throws file_error for whatever is not a complete safetensors file. A tensor's header entry may have
  // fields beyond dtype, shape and data_offsets, which are ignored. Stricter than some other readers: names
  // and known fields given twice, a header that does not begin with '{', nesting beyond 32 levels, and a
  // shape whose extents other than 0 overflow are errors.
  explicit safetensors_file(const std::filesystem::path& path);

  // Declared, so that moving copies: there is no moved-from object without a file.
  safetensors_file(const safetensors_file&) = default;
  safetensors_file& operator=(const safetensors_file&) = default;
  ~safetensors_file() = default;

  const std::filesystem::path& path() const noexcept;

  // In the order of the data in the file.
  const std::vector<tensor_view>& tensors() const noexcept;
  std::vector<std::string> names() const;

  // The header's "__metadata__", empty if it has none.
  const std::map<std::string, std::string, std::less<>>& metadata() const noexcept;

  // find() gives nullptr for an unknown name, at() throws file_error.
  const tensor_view* find(std::string_view name) const noexcept;
  const tensor_view& at(std::string_view name) const;

  // The elements unchanged. Throws file_error if there is no such tensor or its dtype is not one of
  // copies_from<Element>.
  template <tensor_element Element>
  std::vector<Element> copy(std::string_view name) const {
    const tensor_view& tensor = at(name);
    require_dtype(tensor, copies_from<Element>);
    std::vector<Element> elements(tensor.bytes.size() / sizeof(Element));
    read(tensor, 0, std::as_writable_bytes(std::span(elements)));
    return elements;
  }

  // The elements of an F32, F16 or BF16 tensor as float, exactly. Throws file_error for any other dtype.
  std::vector<float> copy_as_float(std::string_view name) const;

 private:
  struct state;

  void require_dtype(const tensor_view& tensor, std::span<const data_type> accepted) const;
  void read(const tensor_view& tensor, std::size_t offset, std::span<std::byte> target) const;

  std::shared_ptr<const state> state_;
};

struct safetensors_content {
  std::vector<tensor_view> tensors{};
  std::map<std::string, std::string, std::less<>> metadata{};
};

// Writes a file that appears under its name complete or not at all: the bytes go to ".freekv-PID-N.tmp" in
// the same folder, which is renamed over `path` at the end and removed on any failure; SIGKILL alone leaves
// it behind (see temporary_files.hpp). The file is not synced: it is safe from a crash of the program, not of
// the host.
//
// An existing regular file is replaced, also through a symbolic link, and the new one has default
// permissions. Anything else that exists is refused, /dev/null, /dev/full and FIFOs included: those cannot be
// renamed over, and writing into them would give up the promise above.
//
// Wider elements come first in the file, which aligns every tensor to its element size; tensors of one width
// keep the order given. Throws file_error, with the text of errno where the system refused, for a name given
// twice or reserved, text that is not UTF-8, a shape that disagrees with the bytes, and a header of more than
// 100 MB.
void write_safetensors(const std::filesystem::path& path, const safetensors_content& content);

// For a program that computes long before it writes: throws the file_error of a name or a folder that
// write_safetensors() would refuse. Leaves nothing behind; that the disk has room is not tried.
void check_writable(const std::filesystem::path& path);

// Conversions to float are exact and keep a NaN's payload. Conversions from float round to nearest, ties to
// even; what is too large becomes an infinity; a NaN stays a NaN of the same sign, made quiet.

constexpr float half_to_float(std::uint16_t half) noexcept {
  const std::uint32_t sign = (half & 0x8000u) << 16;
  const std::uint32_t exponent = (half >> 10) & 0x1fu;
  const std::uint32_t mantissa = half & 0x3ffu;
  if (exponent == 0) {
    // A subnormal half is a normal float: let the multiplication find its exponent.
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
  }
  const std::uint32_t float_exponent = exponent == 0x1fu ? 0xffu : exponent + (127 - 15);
  return std::bit_cast<float>(sign | (float_exponent << 23) | (mantissa << 13));
}

constexpr std::uint16_t float_to_half(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  // 65520 lies halfway between the largest half and the next power of two, and ties go to the even side.
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);

  // `kept` holds the result's bits above `dropped` bits that decide the rounding. A carry out of the mantissa
  // moves into the exponent, which is the right next value.
  std::uint32_t scaled = magnitude - ((127u - 15u) << 23);
  std::uint32_t dropped = 13;
  if (magnitude < 0x38800000u) {
    const std::uint32_t exponent = magnitude >> 23;
    // Below half of the smallest subnormal; this also keeps the shift below 32.
    if (exponent < 102) return static_cast<std::uint16_t>(sign);
    scaled = (magnitude & 0x7fffffu) | 0x800000u;
    dropped = 126 - exponent;
  }
  const std::uint32_t kept = scaled >> dropped;
  const std::uint32_t rest = scaled & ((1u << dropped) - 1);
  const std::uint32_t halfway = 1u << (dropped - 1);
  const bool up = rest > halfway || (rest == halfway && (kept & 1u) != 0);
  return static_cast<std::uint16_t>(sign | (kept + (up ? 1u : 0u)));
}

constexpr float bfloat16_to_float(std::uint16_t bfloat16) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bfloat16) << 16);
}

constexpr std::uint16_t float_to_bfloat16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace freekv::examples
