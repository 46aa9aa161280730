#include "tasks.hpp"

#include <cstdint>
#include <sstream>
#include <utility>

#include <nlohmann/json.hpp>

#include "cited.hpp"
#include "json_text.hpp"
#include "safetensors.hpp"
#include "text_file.hpp"

namespace freekv::examples {

namespace {

using nlohmann::json;

constexpr const char* white_space = " \t\r\n\v\f";

/// One line of the file, whose faults name it.
class reader {
 public:
  reader(const std::string& name, int line)
      : where_("'" + shortened(name) + "' line " + std::to_string(line) + " ") {}

  task read(const std::string& text) const {
    if (nests_too_deep(text))
      fail("nests objects and arrays deeper than " + std::to_string(deepest_json) + " levels; " + wanted);
    const json object = parse(text);
    if (!object.is_object()) fail("is a JSON " + std::string(object.type_name()) + "; " + wanted);
    task t;
    t.prompt = string_at(object, "prompt");
    if (!object.contains("questions")) {
      t.questions.push_back(question_of(object));
      return t;
    }
    for (const char* key : {"question", "choices", "answer", "answers", "continuation"})
      if (object.contains(key))
        fail("has both \"questions\" and \"" + std::string(key) + "\"; leave one out");
    const json& questions = object.at("questions");
    if (!questions.is_array() || questions.empty())
      fail("has \"questions\" that are no array of one or more objects");
    question usual;
    add_common(object, usual);
    for (const json& asked : questions) {
      const reader one(where_ + "question " + std::to_string(t.questions.size()) + " ");
      if (!asked.is_object()) one.fail("is a JSON " + std::string(asked.type_name()) + "; give an object");
      if (!asked.contains("question")) one.fail("has no \"question\", the text that goes behind the prompt");
      t.questions.push_back(one.question_of(asked, usual));
    }
    return t;
  }

 private:
  explicit reader(std::string where) : where_(std::move(where)) {}

  /// One question; `usual` has what its line says for all.
  question question_of(const json& object, question q = {}) const {
    const bool chooses = object.contains("choices"), one = object.contains("answer"),
               several = object.contains("answers"), continues = object.contains("continuation");
    if (chooses + one + several > 1)
      fail(chooses ? "has both \"choices\" and " + std::string(one ? "\"answer\"" : "\"answers\"") +
                         "; leave one out"
                   : "has both \"answer\" and \"answers\"; leave one out");
    if (!chooses && !one && !several && !continues)
      fail("has neither \"choices\" nor \"answer\", \"answers\" or \"continuation\"; " + wanted);
    if (object.contains("question")) q.text = string_at(object, "question");
    add_common(object, q);
    if (continues) q.continuation = string_at(object, "continuation");
    if (chooses) {
      if (continues)
        fail("has both \"choices\" and \"continuation\", which is a free answer's; leave one out");
      q.choices = strings_of(object.at("choices"), "choice", 2);
      q.correct = index_at(object, q.choices.size());
    } else if (one) {
      const std::string answer = string_at(object, "answer");
      q.answers = {line_of(answer, "an \"answer\"")};
      if (!continues) q.continuation = answer.substr(0, answer.find_last_not_of(white_space) + 1);
    } else if (several) {
      for (const std::string& answer : strings_of(object.at("answers"), "answer", 1))
        q.answers.push_back(line_of(answer, "answer " + std::to_string(q.answers.size())));
      q.anywhere = true;
    }
    return q;
  }

  void add_common(const json& object, question& q) const {
    if (object.contains("group")) q.group = string_at(object, "group");
    if (object.contains("depth")) {
      const json& depth = object.at("depth");
      if (!depth.is_number() || !(depth.get<double>() >= 0 && depth.get<double>() <= 1))
        fail("has a \"depth\" that is no number from 0 to 1");
      q.depth = depth.get<double>();
    }
    if (object.contains("max_tokens")) {
      const json& most = object.at("max_tokens");
      if (!most.is_number_integer() || most.get<std::int64_t>() < 1 || most.get<std::int64_t>() > 4096)
        fail("has a \"max_tokens\" that is no whole number from 1 to 4096");
      q.max_tokens = most.get<int>();
    }
    if (object.contains("stop")) {
      const json& stop = object.at("stop");
      q.stops = stop.is_string() ? std::vector{string_at(object, "stop")} : strings_of(stop, "stop", 1);
    }
  }

  std::string line_of(const std::string& answer, const std::string& what) const {
    const std::string line = trimmed(answer);
    if (line.empty()) fail("has " + what + " of white space alone");
    if (line.find('\n') != std::string::npos)
      fail("has " + what + " of several lines, but each is looked for in one line; ask for one line");
    return line;
  }

  [[noreturn]] void fail(const std::string& fault) const { throw file_error(where_ + fault); }

  json parse(const std::string& text) const {
    try {
      return json::parse(text);
    } catch (const json::parse_error& e) {
      fail("is not JSON from its byte " + std::to_string(e.byte) + " on; " + wanted);
    } catch (const json::out_of_range&) {
      fail("has a number beyond double's range; leave it out");
    }
  }

  std::string string_at(const json& object, const char* key) const {
    const std::string quoted = "\"" + std::string(key) + "\"";
    if (!object.contains(key)) fail("has no " + quoted + "; " + wanted);
    const json& value = object.at(key);
    if (!value.is_string()) fail("has a " + quoted + " that is a " + value.type_name() + "; give a string");
    if (value.get_ref<const std::string&>().empty()) fail("has an empty " + quoted);
    return value.get<std::string>();
  }

  /// An array of strings, at least `fewest`, each called `what`.
  std::vector<std::string> strings_of(const json& value, const std::string& what, std::size_t fewest) const {
    if (!value.is_array())
      fail("has \"" + what + "s\" that are a " + std::string(value.type_name()) +
           "; give an array of strings");
    if (value.size() < fewest)
      fail("has " + std::to_string(value.size()) + " \"" + what + "s\"; give " +
           (fewest == 2 ? "two or more" : "one or more"));
    std::vector<std::string> strings;
    for (const json& one : value) {
      const std::string which = what + " " + std::to_string(strings.size());
      if (!one.is_string()) fail("has a " + which + " that is a " + one.type_name() + "; give a string");
      strings.push_back(one.get<std::string>());
      if (strings.back().empty()) fail("has an empty " + which);
    }
    return strings;
  }

  int index_at(const json& object, std::size_t choices) const {
    const std::string remedy =
        "; give the index of one of the " + std::to_string(choices) + " choices, from 0";
    if (!object.contains("correct")) fail("has \"choices\" but no \"correct\"" + remedy);
    const json& value = object.at("correct");
    if (!value.is_number_integer()) fail("has a \"correct\" that is no whole number" + remedy);
    if (value.get<std::uint64_t>() >= choices)  // a negative one is a large one
      fail("has a \"correct\" of " + value.dump() + remedy);
    return value.get<int>();
  }

  const std::string wanted =
      "give an object with \"prompt\" and either \"choices\" and \"correct\", or \"answer\", \"answers\" or "
      "\"continuation\"";
  std::string where_;
};

}  // namespace

std::string trimmed(const std::string& text) {
  const std::size_t first = text.find_first_not_of(white_space);
  if (first == std::string::npos) return {};
  return text.substr(first, text.find_last_not_of(white_space) + 1 - first);
}

std::vector<task> parse_tasks(std::istream& lines, const std::string& name) {
  std::vector<task> tasks;
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (trimmed(line).empty()) continue;
    tasks.push_back(reader(name, number).read(line));
    tasks.back().line = number;
  }
  if (lines.bad())
    throw file_error("'" + shortened(name) + "' cannot be read after line " + std::to_string(number));
  if (tasks.empty()) throw file_error("'" + shortened(name) + "' has no task; give a JSON object a line");
  return tasks;
}

std::vector<task> read_tasks(const std::filesystem::path& path) {
  std::istringstream lines(read_text_file(path, "give a file of JSON lines"));
  return parse_tasks(lines, path.string());
}

}  // namespace freekv::examples
