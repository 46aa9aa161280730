#include "head_list.hpp"

#include <algorithm>
#include <freekv/core/size.hpp>
#include <optional>
#include <sstream>
#include <utility>

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

/// A line of a list: which head of which layer, and another word.
struct listed_head {
  std::size_t at = 0;  // layer * heads + head
  std::string kind;
  std::string where;  // for messages
};

/// The lines of a list of heads, none listed twice, each of `form`.
std::vector<listed_head> read_list(std::istream& in, const std::string& name, int layers, int heads,
                                   const std::string& of, bool has_kind, const std::string& form) {
  std::vector<listed_head> all;
  std::vector<bool> listed(to_size(layers) * to_size(heads));
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    listed_head one{0, {}, cited_path(name) + ", line " + std::to_string(number) + ": "};
    const auto fail = [&](const std::string& what) { throw file_error(one.where + what); };
    std::istringstream words(line.substr(0, line.find('#')));
    std::string first;
    if (!(words >> first)) continue;
    words.clear();
    words.seekg(0);
    long layer = 0, head = 0;
    std::string more;
    if (!(words >> layer >> head) || (has_kind && !(words >> one.kind)) || (words >> more))
      fail("a line is " + form);
    if (layer < 0 || layer >= layers || head < 0 || head >= heads)
      fail("layer " + std::to_string(layer) + ", head " + std::to_string(head) + " is none of " +
           std::to_string(layers) + " layers of " + std::to_string(heads) + " " + of);
    one.at = to_size(layer) * to_size(heads) + to_size(head);
    if (listed[one.at])
      fail("layer " + std::to_string(layer) + ", head " + std::to_string(head) + " is listed twice");
    listed[one.at] = true;
    all.push_back(std::move(one));
  }
  if (in.bad()) throw file_error(cited_path(name) + " cannot be read");
  return all;
}

}  // namespace

std::vector<layer_kind> read_head_list(std::istream& in, const std::string& name, int layers, int kv_heads) {
  std::vector<layer_kind> kinds(to_size(layers) * to_size(kv_heads), layer_kind::window);
  for (const listed_head& one : read_list(in, name, layers, kv_heads, "KV heads", true,
                                          "\"layer head kind\", such as \"3 0 complete\"")) {
    const auto known = kind_named(one.kind);
    if (!known)
      throw file_error(one.where + "kind " + cited(one.kind) +
                       " is unknown; choose retrieval, complete or window");
    kinds[one.at] = *known;
  }
  return kinds;
}

std::vector<layer_kind> read_head_list(const std::filesystem::path& path, int layers, int kv_heads) {
  std::istringstream in(read_text_file(path, "check its name"));
  return read_head_list(in, path.string(), layers, kv_heads);
}

std::vector<std::uint8_t> read_voters(const std::filesystem::path& path, int layers, int query_heads) {
  std::istringstream in(read_text_file(path, "check its name"));
  std::vector<std::uint8_t> voters(to_size(layers) * to_size(query_heads), 0);
  for (const listed_head& one : read_list(in, path.string(), layers, query_heads, "query heads", false,
                                          "\"layer query_head\", such as \"3 0\""))
    voters[one.at] = 1;
  for (auto first = voters.begin(); first != voters.end(); first += query_heads)
    if (std::count(first, first + query_heads, 1) == 0) std::fill_n(first, query_heads, std::uint8_t{1});
  return voters;
}

}  // namespace freekv::examples
