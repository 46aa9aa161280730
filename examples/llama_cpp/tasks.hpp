// Questions with known answers, from a file of JSON lines.
#pragma once

#include <filesystem>
#include <istream>
#include <string>
#include <vector>

namespace freekv::examples {

/// A line of the file: {"prompt": "...", "choices": ["...", "..."], "correct": 0} or
/// {"prompt": "...", "answer": "..."}. Other members are left alone.
struct task {
  int line = 0;  ///< from 1
  std::string prompt;
  std::vector<std::string> choices;  ///< two or more; none: `answer` is asked for
  int correct = 0;                   ///< index of one of them
  std::string answer;                ///< one line, without white space around it
};

/// Reads to the end; empty lines are skipped. Throws file_error, which calls the source `name` and gives the line.
std::vector<task> parse_tasks(std::istream& lines, const std::string& name);
std::vector<task> read_tasks(const std::filesystem::path& path);

/// `text` without white space around it.
std::string trimmed(const std::string& text);

}  // namespace freekv::examples
