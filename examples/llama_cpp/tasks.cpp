#include "tasks.hpp"

#include <cstdint>
#include <sstream>

#include <nlohmann/json.hpp>

#include "cited.hpp"
#include "json_text.hpp"
#include "safetensors.hpp"
#include "text_file.hpp"

namespace freekv::examples {

namespace {

using nlohmann::json;

/// One line of the file, whose faults name it.
class reader {
 public:
  reader(const std::string& name, int line) : where_("'" + shortened(name) + "' line " + std::to_string(line) + " ") {}

  task read(const std::string& text) const {
    if (nests_too_deep(text))
      fail("nests objects and arrays deeper than " + std::to_string(deepest_json) + " levels; " + wanted);
    const json object = parse(text);
    if (!object.is_object()) fail("is a JSON " + std::string(object.type_name()) + "; " + wanted);
    task t;
    t.prompt = string_at(object, "prompt");
    const bool chooses = object.contains("choices"), answers = object.contains("answer");
    if (chooses && answers) fail("has both \"choices\" and \"answer\"; leave one out");
    if (!chooses && !answers) fail("has neither \"choices\" nor \"answer\"; " + wanted);
    if (chooses) {
      t.choices = choices_of(object.at("choices"));
      t.correct = index_at(object, t.choices.size());
    } else {
      t.answer = trimmed(string_at(object, "answer"));
      if (t.answer.empty()) fail("has an \"answer\" of white space alone");
      if (t.answer.find('\n') != std::string::npos)
        fail("has an \"answer\" of several lines, but what is decoded ends with its first; ask for one line");
    }
    return t;
  }

 private:
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

  std::vector<std::string> choices_of(const json& value) const {
    if (!value.is_array())
      fail("has \"choices\" that are a " + std::string(value.type_name()) + "; give an array of strings");
    if (value.size() < 2) fail("has " + std::to_string(value.size()) + " \"choices\"; give two or more");
    std::vector<std::string> choices;
    for (const json& choice : value) {
      const std::string which = "choice " + std::to_string(choices.size());
      if (!choice.is_string())
        fail("has a " + which + " that is a " + choice.type_name() + "; give a string");
      choices.push_back(choice.get<std::string>());
      if (choices.back().empty()) fail("has an empty " + which);
    }
    return choices;
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
      "give an object with \"prompt\" and either \"choices\" and \"correct\", or \"answer\"";
  std::string where_;
};

}  // namespace

std::string trimmed(const std::string& text) {
  const char* const space = " \t\r\n\v\f";
  const std::size_t first = text.find_first_not_of(space);
  if (first == std::string::npos) return {};
  return text.substr(first, text.find_last_not_of(space) + 1 - first);
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
  if (lines.bad()) throw file_error("'" + shortened(name) + "' cannot be read after line " + std::to_string(number));
  if (tasks.empty()) throw file_error("'" + shortened(name) + "' has no task; give a JSON object a line");
  return tasks;
}

std::vector<task> read_tasks(const std::filesystem::path& path) {
  std::istringstream lines(read_text_file(path, "give a file of JSON lines"));
  return parse_tasks(lines, path.string());
}

}  // namespace freekv::examples
