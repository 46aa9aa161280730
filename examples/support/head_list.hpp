// Lists of heads: of what each KV head keeps, for plan "by_head", and of query heads that vote.
#pragma once

#include <cstdint>
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

/// Query heads that choose for their layer, (layers, query_heads), 1 of those and else 0. A line of the file
/// is `layer query_head`; in a layer of which none is listed all do. `#` starts a comment. Throws file_error,
/// which names the line.
std::vector<std::uint8_t> read_voters(const std::filesystem::path& path, int layers, int query_heads);

}  // namespace freekv::examples
