// Files of text, read whole.
#pragma once

#include <filesystem>
#include <string>

namespace freekv::examples {

/// All of a file, pipes included, but for one that nobody writes to, which is not waited for. Throws
/// file_error, whose sentence ends with `remedy`, such as "give a text file".
std::string read_text_file(const std::filesystem::path& path, const std::string& remedy);

}  // namespace freekv::examples
