// A list of what each KV head keeps: for plan "by_head".
#pragma once

#include <filesystem>
#include <freekv/policies/plan.hpp>
#include <istream>
#include <string>
#include <vector>

namespace freekv::examples {

/// Kinds of all heads, (layers, kv_heads). A line of the file is `layer head kind`, kind one of retrieval,
/// complete and window; heads that are not listed see sink and window alone. `#` starts a comment. Throws
/// file_error, which names the line.
std::vector<layer_kind> read_head_list(const std::filesystem::path& path, int layers, int kv_heads);
/// The same from a stream; `name` stands in messages.
std::vector<layer_kind> read_head_list(std::istream& in, const std::string& name, int layers, int kv_heads);

}  // namespace freekv::examples
