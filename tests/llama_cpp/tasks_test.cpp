// The reader of task files. No model is needed.

#include "tasks.hpp"

#include <filesystem>
#include <sstream>

#include "../catch.hpp"
#include "../files.hpp"
#include "../mentions.hpp"
#include "safetensors.hpp"

namespace {

using namespace freekv::examples;

std::vector<task> parse(const std::string& text) {
  std::istringstream lines(text);
  return parse_tasks(lines, "some.jsonl");
}

std::string fault_of(const std::string& text) {
  try {
    parse(text);
  } catch (const file_error& e) {
    return e.what();
  }
  return "no fault";
}

const std::string good = R"({"prompt": "Two and two make", "answer": " four\n"})";

}  // namespace

TEST_CASE("choices and answers are read, with the line they stand on") {
  const auto tasks =
      parse(good + "\r\n\n  \t\n" +
            R"({"id": 7, "prompt": "The sky is", "choices": [" green", " blue"], "correct": 1})" + "\n");
  REQUIRE(tasks.size() == 2);
  CHECK(tasks[0].line == 1);
  CHECK(tasks[0].prompt == "Two and two make");
  REQUIRE(tasks[0].questions.size() == 1);
  const question& two = tasks[0].questions[0];
  CHECK(two.text.empty());
  CHECK(two.answers == std::vector<std::string>{"four"});
  CHECK_FALSE(two.anywhere);
  CHECK(two.continuation == " four");  // whose loss is measured, with the space that belongs there
  CHECK(two.max_tokens == 64);
  CHECK(two.choices.empty());
  CHECK(two.group.empty());
  CHECK(two.depth < 0);
  CHECK(tasks[1].line == 4);
  CHECK(tasks[1].prompt == "The sky is");
  REQUIRE(tasks[1].questions.size() == 1);
  const question& sky = tasks[1].questions[0];
  CHECK(sky.choices == std::vector<std::string>{" green", " blue"});
  CHECK(sky.correct == 1);
  CHECK(sky.answers.empty());
  CHECK(sky.continuation.empty());
}

TEST_CASE("several answers and a text to go on with are read", "[tasks]") {
  const auto tasks =
      parse(R"({"prompt": "p", "answers": ["11", " 22 "], "continuation": " 11 and 22", "max_tokens": 40})"
            "\n"
            R"({"prompt": "p", "continuation": " so it goes", "group": "copies", "depth": 0.25})"
            "\n"
            R"({"prompt": "p", "question": " q", "answer": " x", "continuation": " x."})");
  REQUIRE(tasks.size() == 3);
  const question& several = tasks[0].questions.at(0);
  CHECK(several.answers == std::vector<std::string>{"11", "22"});
  CHECK(several.anywhere);
  CHECK(several.continuation == " 11 and 22");
  CHECK(several.max_tokens == 40);
  const question& copy = tasks[1].questions.at(0);
  CHECK(copy.answers.empty());
  CHECK(copy.choices.empty());
  CHECK(copy.continuation == " so it goes");
  CHECK(copy.group == "copies");
  CHECK(copy.depth == 0.25);
  const question& one = tasks[2].questions.at(0);
  CHECK(one.text == " q");
  CHECK(one.answers == std::vector<std::string>{"x"});
  CHECK(one.continuation == " x.");
}

TEST_CASE("one prompt has several questions, which share what its line says", "[tasks]") {
  const auto tasks = parse(R"({"prompt": "p", "group": "g", "max_tokens": 9, "depth": 1, "questions": [)"
                           R"({"question": " a", "answer": " x"},)"
                           R"( {"question": " b", "choices": ["1", "2"], "correct": 1, "group": "h"},)"
                           R"( {"question": " c", "continuation": " z", "depth": 0, "max_tokens": 3}]})");
  REQUIRE(tasks.size() == 1);
  const auto& q = tasks[0].questions;
  REQUIRE(q.size() == 3);
  CHECK(q[0].text == " a");
  CHECK(q[0].group == "g");
  CHECK(q[0].max_tokens == 9);
  CHECK(q[0].depth == 1);
  CHECK(q[1].text == " b");
  CHECK(q[1].group == "h");
  CHECK(q[1].correct == 1);
  CHECK(q[1].answers.empty());  // nothing of the question before
  CHECK(q[1].continuation.empty());
  CHECK(q[2].group == "g");
  CHECK(q[2].depth == 0);
  CHECK(q[2].max_tokens == 3);
}

TEST_CASE("an answer's stops are a string or several, of a line or of a question", "[tasks]") {
  const auto tasks =
      parse(R"({"prompt": "p", "answer": "x", "stop": "\n\n"})"
            "\n"
            R"({"prompt": "p", "stop": ["a", "b"], "questions": [)"
            R"({"question": "q", "answer": "x"}, {"question": "r", "answer": "x", "stop": ["c"]}]})");
  REQUIRE(tasks.size() == 2);
  CHECK(tasks[0].questions.at(0).stops == std::vector<std::string>{"\n\n"});
  CHECK(tasks[1].questions.at(0).stops == std::vector<std::string>{"a", "b"});
  CHECK(tasks[1].questions.at(1).stops == std::vector<std::string>{"c"});
}

TEST_CASE("a last line without a line break counts, and escapes are text") {
  const auto tasks = parse(R"({"prompt": "a\nb \u00e9", "answer": "x"})");
  REQUIRE(tasks.size() == 1);
  CHECK(tasks[0].prompt == "a\nb \xc3\xa9");
}

TEST_CASE("every fault is a sentence with the file and the line") {
  struct fault {
    std::string line;
    std::vector<std::string> mentions;
  };
  const auto choices = [](const std::string& rest) { return R"({"prompt": "p", "choices": )" + rest + "}"; };
  const std::vector<fault> faults{
      {"prompt: p", {"is not JSON", "\"answer\""}},
      {R"({"prompt": "p", "answer": "a")", {"is not JSON"}},
      {R"({"prompt": "p", "answer": "a"} {})", {"is not JSON"}},
      {"{\"prompt\": \"\xff\", \"answer\": \"a\"}", {"is not JSON"}},
      {std::string(100000, '['), {"deeper than 32"}},
      {"17", {"is a JSON number", "\"prompt\""}},
      {R"(["prompt", "answer"])", {"is a JSON array"}},
      {R"({"answer": "a"})", {"no \"prompt\""}},
      {R"({"prompt": 3, "answer": "a"})", {"\"prompt\"", "number", "string"}},
      {R"({"prompt": "", "answer": "a"})", {"empty \"prompt\""}},
      {R"({"prompt": "p"})", {"neither \"choices\" nor \"answer\""}},
      {R"({"prompt": "p", "correct": 0})", {"neither"}},
      {R"({"prompt": "p", "answer": null})", {"\"answer\"", "null"}},
      {R"({"prompt": "p", "answer": ""})", {"empty \"answer\""}},
      {R"({"prompt": "p", "answer": " \n"})", {"white space"}},
      {R"({"prompt": "p", "answer": "a\nb"})", {"several lines"}},
      {R"({"prompt": "p", "answer": "a", "choices": ["a", "b"], "correct": 0})", {"both"}},
      {R"({"prompt": "p", "answer": "a", "answers": ["a"]})", {"both \"answer\" and \"answers\""}},
      {R"({"prompt": "p", "answers": ["a"], "choices": ["a", "b"], "correct": 0})",
       {"both \"choices\" and \"answers\""}},
      {R"({"prompt": "p", "answers": []})", {"0 \"answers\"", "one or more"}},
      {R"({"prompt": "p", "answers": ["a", "\n"]})", {"answer 1 of white space"}},
      {R"({"prompt": "p", "answers": ["a", ""]})", {"empty answer 1"}},
      {R"({"prompt": "p", "continuation": ""})", {"empty \"continuation\""}},
      {choices(R"(["a", "b"], "correct": 0, "continuation": "a")"),
       {"both \"choices\" and \"continuation\""}},
      {R"({"prompt": "p", "answer": "a", "group": 3})", {"\"group\"", "number"}},
      {R"({"prompt": "p", "answer": "a", "depth": 1.5})", {"\"depth\"", "0 to 1"}},
      {R"({"prompt": "p", "answer": "a", "depth": "deep"})", {"\"depth\"", "0 to 1"}},
      {R"({"prompt": "p", "answer": "a", "max_tokens": 0})", {"\"max_tokens\"", "1 to 4096"}},
      {R"({"prompt": "p", "answer": "a", "max_tokens": 1e9})", {"\"max_tokens\""}},
      {R"({"prompt": "p", "answer": "a", "stop": 3})", {"\"stops\"", "number", "array"}},
      {R"({"prompt": "p", "answer": "a", "stop": ""})", {"empty \"stop\""}},
      {R"({"prompt": "p", "answer": "a", "stop": ["b", 4]})", {"stop 1", "number"}},
      {R"({"prompt": "p", "questions": []})", {"\"questions\"", "one or more"}},
      {R"({"prompt": "p", "questions": {"question": "q", "answer": "a"}})", {"\"questions\"", "array"}},
      {R"({"prompt": "p", "questions": [7]})", {"question 0 is a JSON number"}},
      {R"({"prompt": "p", "questions": [{"question": " q", "answer": "a"}, {"answer": "a"}]})",
       {"question 1 has no \"question\""}},
      {R"({"prompt": "p", "questions": [{"question": " q"}]})", {"question 0 has neither \"choices\""}},
      {R"({"prompt": "p", "questions": [{"question": " q", "answer": "a"}], "answer": "a"})",
       {"both \"questions\" and \"answer\""}},
      {choices(R"("ab", "correct": 0)"), {"\"choices\"", "string", "array"}},
      {choices(R"([], "correct": 0)"), {"0 \"choices\"", "two or more"}},
      {choices(R"(["a"], "correct": 0)"), {"1 \"choices\"", "two or more"}},
      {choices(R"(["a", ""], "correct": 0)"), {"empty choice 1"}},
      {choices(R"(["a", 2], "correct": 0)"), {"choice 1", "number"}},
      {choices(R"(["a", "b"])"), {"no \"correct\"", "2 choices"}},
      {choices(R"(["a", "b"], "correct": "b")"), {"\"correct\"", "whole number"}},
      {choices(R"(["a", "b"], "correct": 0.5)"), {"whole number"}},
      {choices(R"(["a", "b"], "correct": 2)"), {"\"correct\" of 2", "2 choices, from 0"}},
      {choices(R"(["a", "b"], "correct": -1)"), {"\"correct\" of -1"}},
      {choices(R"(["a", "b"], "correct": 18446744073709551615)"), {"\"correct\" of 18446744073709551615"}},
  };
  for (const auto& [line, mentions] : faults) {
    const std::string message = fault_of(good + "\n\n" + line + "\n" + good);
    CAPTURE(line.substr(0, 100));
    tests::check_mentions(message, {"'some.jsonl' line 3 "});
    tests::check_mentions(message, mentions);
  }
}

TEST_CASE("a file without tasks, and no file, are faults") {
  tests::check_mentions(fault_of(""), {"'some.jsonl'", "no task"});
  tests::check_mentions(fault_of("\n \n"), {"no task"});
  const tests::scratch_folder folder;
  CHECK_THROWS_AS(read_tasks(folder / "missing.jsonl"), file_error);
  CHECK_THROWS_AS(read_tasks(folder.path()), file_error);
  tests::store(folder / "one.jsonl", good);
  CHECK(read_tasks(folder / "one.jsonl").size() == 1);
}

TEST_CASE("the sample has choices and answers") {
  const auto tasks = read_tasks(FREEKV_SAMPLE_TASKS);
  REQUIRE(tasks.size() == 5);
  int answers = 0;
  for (const task& t : tasks) {
    const question& q = t.questions.at(0);
    const std::string expected = q.choices.empty() ? q.answers.at(0) : trimmed(q.choices[q.correct]);
    CHECK(t.prompt.find(expected) != std::string::npos);  // it can be known from the prompt
    answers += q.choices.empty();
  }
  CHECK(answers == 2);
}

TEST_CASE("objects and arrays nest no deeper than a task needs") {
  for (const int levels : {100, 100000}) {
    const auto count = static_cast<std::size_t>(levels);
    const std::string deep = std::string(count, '[') + std::string(count, ']');
    for (const std::string& line :
         {deep, R"({"prompt": )" + deep + "}", R"({"prompt": "p", "choices": )" + deep + "}"})
      tests::check_mentions(fault_of(good + "\n" + line), {"some.jsonl", "line 2", "deeper than 32"});
  }
  CHECK(parse(R"({"prompt": "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", "answer": "\"[[["})").size() == 1);
}
