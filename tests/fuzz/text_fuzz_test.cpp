// Damaged files of tasks and of heads: each is read as what it says, or refused with the reader's own
// exception.

#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "damage.hpp"
#include "head_list.hpp"
#include "safetensors.hpp"
#include "tasks.hpp"

using namespace tests;
using freekv::layer_kind;
using freekv::examples::file_error;

namespace {

struct reached {
  long read = 0, refused = 0;
  std::map<std::string, long> kinds;
};

/// Calls `read`; false where it throws the project's exception, whose message then names the file. Any other
/// exception goes on, and fails the test.
template <class Read>
bool reads(reached& seen, const Read& read) {
  try {
    read();
    ++seen.read;
    return true;
  } catch (const file_error& e) {
    const std::string message = e.what();
    INFO(message);
    REQUIRE(message.find("some-file") != std::string::npos);
    REQUIRE(message.back() != '.');
    ++seen.refused;
    ++seen.kinds[kind_of_message(message)];
    return false;
  }
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

/// A question has what its object says.
void check_question(const nlohmann::json& object, const freekv::examples::question& q) {
  if (!q.choices.empty()) {
    REQUIRE(object.at("choices").get<std::vector<std::string>>() == q.choices);
    REQUIRE(object.at("correct") == q.correct);
    REQUIRE(q.choices.size() >= 2);
    REQUIRE(q.correct >= 0);
    REQUIRE(q.correct < static_cast<int>(q.choices.size()));
  } else if (q.anywhere) {
    REQUIRE(object.at("answers").size() == q.answers.size());
    for (const std::string& answer : q.answers) REQUIRE_FALSE(answer.empty());
  } else if (!q.answers.empty()) {
    REQUIRE(q.answers.size() == 1);
    REQUIRE(freekv::examples::trimmed(object.at("answer")) == q.answers[0]);
    REQUIRE_FALSE(q.answers[0].empty());
  } else {
    REQUIRE(object.at("continuation") == q.continuation);
    REQUIRE_FALSE(q.continuation.empty());
  }
  if (object.contains("question")) REQUIRE(object.at("question") == q.text);
  if (object.contains("max_tokens")) REQUIRE(object.at("max_tokens") == q.max_tokens);
  if (object.contains("group")) REQUIRE(object.at("group") == q.group);
  if (object.contains("depth")) REQUIRE(object.at("depth") == q.depth);
}

std::string damaged(const std::string& text, std::uint64_t seed) {
  source_of_damage d(seed);
  std::string bad = text;
  if (seed % 64 == 0) return bad;
  for (std::size_t faults = 1 + d.below(4); faults > 0; --faults)
    d.one_in(4) ? d.damage_bytes(bad) : d.damage_text(bad);
  return bad;
}

}  // namespace

TEST_CASE("damaged files of tasks are read as what they say or refused in a sentence", "[fuzz]") {
  const std::string correct =
      "{\"prompt\": \"Two and two make\", \"answer\": \" four \"}\n"
      "\n"
      "{\"prompt\": \"The sky is\", \"choices\": [\" blue\", \" green\", \" caf\xc3\xa9\"], \"correct\": 0, "
      "\"id\": 17}\n"
      "{\"prompt\": \"The secret number is\", \"answer\": \"73951\", \"more\": {\"weights\": [0.5, -1, "
      "1e3]}}\n"
      "{\"prompt\": \"Once more\", \"group\": \"two\", \"questions\": [{\"question\": \" a\", \"answers\": "
      "[\"1\", "
      "\"2\"], \"max_tokens\": 12}, {\"question\": \" b\", \"continuation\": \" c\", \"depth\": 0.5}]}\n";
  reached seen;
  const long cases = for_seeds(15000, [&](std::uint64_t seed) {
    const std::string text = damaged(correct, seed);
    std::vector<freekv::examples::task> tasks;
    const bool read = reads(seen, [&] {
      std::istringstream in(text);
      tasks = freekv::examples::parse_tasks(in, "some-file");
    });
    if (seed % 64 == 0) REQUIRE(read);
    if (!read) return;
    const auto lines = lines_of(text);
    std::size_t filled = 0;
    for (const std::string& line : lines) filled += line.find_first_not_of(" \t\r\v\f") != std::string::npos;
    REQUIRE(tasks.size() == filled);
    int last = 0;
    for (const auto& task : tasks) {
      INFO("line " << task.line);
      REQUIRE(task.line > last);
      last = task.line;
      REQUIRE(last <= static_cast<int>(lines.size()));
      const auto object = nlohmann::json::parse(lines[static_cast<std::size_t>(last) - 1]);
      REQUIRE(object.at("prompt") == task.prompt);
      REQUIRE_FALSE(task.prompt.empty());
      REQUIRE_FALSE(task.questions.empty());
      const bool several = object.contains("questions");
      REQUIRE(task.questions.size() == (several ? object.at("questions").size() : 1));
      for (std::size_t i = 0; i < task.questions.size(); ++i)
        check_question(several ? object.at("questions")[i] : object, task.questions[i]);
    }
  });
  INFO(seen.read << " read, " << seen.refused << " refused for " << seen.kinds.size() << " reasons");
  if (cases < 15000) return;
  CHECK(seen.read > cases / 20);
  CHECK(seen.refused > cases / 2);
  CHECK(seen.kinds.size() > 10);
}

TEST_CASE("damaged head lists are read as what they say or refused in a sentence", "[fuzz]") {
  const std::string correct =
      "# layer head kind\n"
      "0 0 complete\n"
      "0 1 window\n"
      "\t3 0  retrieval # as published\n"
      "\n"
      "11 2 complete\n"
      "64 1 retrieval";
  constexpr int layers = 65, heads = 3;
  const std::map<std::string, layer_kind> kinds{{"retrieval", layer_kind::retrieval},
                                                {"complete", layer_kind::complete},
                                                {"window", layer_kind::window}};
  reached seen;
  const long cases = for_seeds(15000, [&](std::uint64_t seed) {
    const std::string text = damaged(correct, seed);
    std::vector<layer_kind> read_kinds;
    const bool read = reads(seen, [&] {
      std::istringstream in(text);
      read_kinds = freekv::examples::read_head_list(in, "some-file", layers, heads);
    });
    if (seed % 64 == 0) REQUIRE(read);
    if (!read) return;
    std::vector<layer_kind> expected(std::size_t{layers} * heads, layer_kind::window);
    for (const std::string& line : lines_of(text)) {
      std::istringstream words(line.substr(0, line.find('#')));
      std::size_t layer = 0, head = 0;
      std::string kind;
      if (!(words >> layer >> head >> kind)) continue;
      REQUIRE(layer < layers);
      REQUIRE(head < heads);
      REQUIRE(kinds.count(kind) == 1);
      expected[layer * heads + head] = kinds.at(kind);
    }
    REQUIRE((read_kinds == expected));
  });
  INFO(seen.read << " read, " << seen.refused << " refused for " << seen.kinds.size() << " reasons");
  if (cases < 15000) return;
  CHECK(seen.read > cases / 20);
  CHECK(seen.refused > cases / 2);
  CHECK(seen.kinds.size() >= 4);
}

TEST_CASE("a sentence about a word does not end in it", "[fuzz]") {
  const auto refusal = [](const std::string& kind) -> std::string {
    std::istringstream in("3 0 " + kind + "\n");
    try {
      freekv::examples::read_head_list(in, "some-file", 4, 1);
    } catch (const file_error& e) {
      return e.what();
    }
    return "";
  };
  CHECK(refusal(std::string("retr\0ieval", 10)) ==
        "\"some-file\", line 1: kind \"retr?ieval\" is unknown; choose retrieval, complete or window");
  CHECK(refusal(std::string(1000, 'x')).size() < 150);
}
