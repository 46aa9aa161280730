// safetensors files byte by byte: written without the checks of the library's writer, so that they can be
// wrong, and read by code that is not the library's reader.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "../files.hpp"
#include "safetensors.hpp"

namespace tests {

struct tensor_text {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::string bytes;
};
using tensor_map = std::map<std::string, tensor_text>;
using metadata_map = std::map<std::string, std::string>;

/// Floats as bytes of F32, F16 or BF16, rounded.
inline std::string bytes_of(std::span<const float> values, const std::string& dtype) {
  if (dtype == "F32") return {reinterpret_cast<const char*>(values.data()), values.size_bytes()};
  std::string bytes;
  for (const float x : values) {
    const std::uint16_t bits =
        dtype == "F16" ? freekv::examples::float_to_half(x) : freekv::examples::float_to_bfloat16(x);
    bytes.append(reinterpret_cast<const char*>(&bits), 2);
  }
  return bytes;
}

/// The file of a header, whatever it says, and the data behind it.
inline std::string file_of(const std::string& header, const std::string& data) {
  const std::uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

/// Header and data of a correct file.
struct file_parts {
  nlohmann::json header;
  std::string data;
  std::string whole() const { return file_of(header.dump(), data); }
};

inline file_parts parts_of(const tensor_map& tensors, const metadata_map& metadata) {
  file_parts parts{nlohmann::json::object(), ""};
  if (!metadata.empty()) parts.header["__metadata__"] = metadata;
  for (const auto& [name, tensor] : tensors) {
    const std::size_t begin = parts.data.size();
    parts.data += tensor.bytes;
    parts.header[name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, parts.data.size()}}};
  }
  return parts;
}

/// Reads a file and requires that it is complete: ranges in bounds, as long as the shapes say, without gaps.
inline tensor_map read_tensors(const std::string& path, metadata_map* metadata = nullptr) {
  const auto require = [&](bool holds, const std::string& what) {
    if (!holds) throw std::runtime_error(path + ": " + what);
  };
  const std::string file = load(path);
  require(file.size() >= 8, "no header length");
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  require(length <= file.size() - 8, "header behind the end");
  const auto header = nlohmann::json::parse(file.substr(8, length));
  const std::string data = file.substr(8 + length);
  tensor_map tensors;
  std::size_t covered = 0;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      if (metadata != nullptr) *metadata = entry.get<metadata_map>();
      continue;
    }
    tensor_text t{entry.at("dtype"), entry.at("shape"), ""};
    const auto begin = entry.at("data_offsets").at(0).get<std::size_t>();
    const auto end = entry.at("data_offsets").at(1).get<std::size_t>();
    require(begin <= end && end <= data.size(), name + " is out of bounds");
    std::size_t bytes = t.dtype == "U8" ? 1 : t.dtype == "F16" || t.dtype == "BF16" ? 2 : 4;
    for (const std::int64_t extent : t.shape) bytes *= static_cast<std::size_t>(extent);
    require(end - begin == bytes, name + " does not have the bytes of its shape");
    t.bytes = data.substr(begin, bytes);
    covered += bytes;
    tensors[name] = t;
  }
  require(covered == data.size(), "bytes that belong to no tensor");
  return tensors;
}

template <class Element>
std::vector<Element> elements_of(const tensor_text& tensor) {
  std::vector<Element> elements(tensor.bytes.size() / sizeof(Element));
  if (!elements.empty()) std::memcpy(elements.data(), tensor.bytes.data(), tensor.bytes.size());
  return elements;
}

}  // namespace tests
