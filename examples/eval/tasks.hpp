// Questions with known answers, from a file of JSON lines.
#pragma once

#include <filesystem>
#include <istream>
#include <string>
#include <vector>

namespace freekv::examples {

/// What is asked of one prompt, in one of these ways, of which the first that it has counts as its answer:
/// - `choices`: the right one is to be the likeliest, per token;
/// - `answers`: what is decoded, at most a line, is to begin with the one (`anywhere` false), or at most
/// `max_tokens`
///   tokens of any number of lines are to contain all of them;
/// - `continuation`: each of its tokens is to be the most likely after those before it.
/// A question with answers has a loss where it has a `continuation`, which for one answer is that, as the
/// file has it.
struct question {
  std::string text;                  ///< goes behind the prompt; may be empty where it is the only one
  std::vector<std::string> choices;  ///< two or more, or none
  int correct = 0;                   ///< index of one of them
  std::vector<std::string> answers;  ///< without white space around them
  bool anywhere = false;
  int max_tokens = 64;
  std::vector<std::string> stops;  ///< an answer ends before the first of them
  std::string continuation;        ///< with the space that belongs at its beginning
  std::string group;               ///< whose table it counts in; empty: that of the file
  double depth = -1;               ///< of what is asked for, 0 to 1; below 0: not said
};

/// A line of the file: {"prompt": "...", "choices": ["...", "..."], "correct": 0}, {"prompt": "...",
/// "answer": "..."}, {"prompt": "...", "answers": ["...", "..."], "max_tokens": 32} or {"prompt": "...",
/// "continuation": "..."}; or, for several questions on one prompt, {"prompt": "...", "questions":
/// [{"question": "...", "answer": "..."}, ...]}. "group", "depth", "max_tokens" and "stop" (a string, or
/// several) may be the line's or a question's. Other members are left alone.
struct task {
  int line = 0;  ///< from 1
  std::string prompt;
  std::vector<question> questions;  ///< one or more
};

/// Reads to the end; empty lines are skipped. Throws file_error, which calls the source `name` and gives the
/// line.
std::vector<task> parse_tasks(std::istream& lines, const std::string& name);
std::vector<task> read_tasks(const std::filesystem::path& path);

/// `text` without white space around it.
std::string trimmed(const std::string& text);

}  // namespace freekv::examples
