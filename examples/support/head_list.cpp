#include "head_list.hpp"

#include <freekv/core/size.hpp>
#include <optional>
#include <sstream>

#include "cited.hpp"
#include "safetensors.hpp"
#include "text_file.hpp"

namespace freekv::examples {
namespace {

std::optional<layer_kind> kind_named(const std::string& name) {
  if (name == "retrieval") return layer_kind::retrieval;
  if (name == "complete") return layer_kind::complete;
  if (name == "window") return layer_kind::window;
  return std::nullopt;
}

}  // namespace

std::vector<layer_kind> read_head_list(std::istream& in, const std::string& name, int layers, int kv_heads) {
  const auto heads = to_size(kv_heads);
  std::vector<layer_kind> kinds(to_size(layers) * heads, layer_kind::window);
  std::vector<bool> listed(kinds.size());
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    const auto fail = [&](const std::string& what) {
      throw file_error(cited_path(name) + ", line " + std::to_string(number) + ": " + what);
    };
    std::istringstream words(line.substr(0, line.find('#')));
    std::string first;
    if (!(words >> first)) continue;
    words.clear();
    words.seekg(0);
    long layer = 0, head = 0;
    std::string kind, more;
    if (!(words >> layer >> head >> kind) || (words >> more))
      fail("a line is \"layer head kind\", such as \"3 0 complete\"");
    if (layer < 0 || layer >= layers || head < 0 || head >= kv_heads)
      fail("layer " + std::to_string(layer) + ", head " + std::to_string(head) + " is none of " +
           std::to_string(layers) + " layers of " + std::to_string(kv_heads) + " KV heads");
    const auto known = kind_named(kind);
    if (!known) fail("kind " + cited(kind) + " is unknown; choose retrieval, complete or window");
    const std::size_t at = to_size(layer) * heads + to_size(head);
    if (listed[at])
      fail("layer " + std::to_string(layer) + ", head " + std::to_string(head) + " is listed twice");
    listed[at] = true;
    kinds[at] = *known;
  }
  if (in.bad()) throw file_error(cited_path(name) + " cannot be read");
  return kinds;
}

std::vector<layer_kind> read_head_list(const std::filesystem::path& path, int layers, int kv_heads) {
  std::istringstream in(read_text_file(path, "check its name"));
  return read_head_list(in, path.string(), layers, kv_heads);
}

}  // namespace freekv::examples
