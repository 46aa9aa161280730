"""examples/eval/tasks.py: the same file for the same arguments, and answers that stand where they should.

    python3 tasks_generator_test.py examples/eval/tasks.py
"""

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path(sys.argv[1]).resolve()
spec = importlib.util.spec_from_file_location("tasks", SCRIPT)
tasks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tasks)

LENGTHS = [512, 2048]


def made(kind, length=2048, seed=1, prompts=None):
    return list(tasks.make([kind], [length], seed, 4.0, prompts))


def words(text):
    return set(re.findall(r"[a-z]{4,}", text.lower()))


class Generator(unittest.TestCase):
    def test_same_arguments_give_the_same_file(self):
        with tempfile.TemporaryDirectory() as folder:
            def written(name, *more):
                out = Path(folder) / name
                end = subprocess.run([sys.executable, "-B", SCRIPT, out, "--lengths", "512", "--prompts", "2", *more],
                                     capture_output=True, text=True)
                self.assertEqual(end.returncode, 0, end.stderr)
                return out.read_bytes()

            first = written("a")
            self.assertEqual(first, written("b"))
            self.assertNotEqual(first, written("c", "--seed", "2"))
            # A part of the tasks is the same alone and among others.
            for line in written("d", "--tasks", "copy", "lookup").splitlines():
                self.assertIn(line, first.splitlines())

    def test_arguments_that_cannot_be_are_refused(self):
        for wrong in (["--lengths", "100"], ["--prompts", "0"], ["--tasks", "riddles"]):
            end = subprocess.run([sys.executable, "-B", SCRIPT, "/dev/null", *wrong], capture_output=True, text=True)
            self.assertEqual(end.returncode, 2, wrong)

    def test_every_line_is_what_the_reader_takes(self):
        for kind in tasks.KINDS:
            for length in LENGTHS:
                lines = made(kind, length)
                self.assertEqual(len(lines), tasks.KINDS[kind])
                self.assertEqual(len({line["prompt"] for line in lines}), len(lines), kind)
                for line in lines:
                    line = json.loads(json.dumps(line))
                    self.assertEqual(line["group"], f"{kind}, {length}")
                    self.assertTrue(line["prompt"] == line["prompt"].strip())
                    for q in line["questions"]:
                        self.assertTrue(q["question"].startswith("\n\n"))
                        self.assertTrue(("choices" in q) + ("answers" in q) + ("continuation" in q) >= 1)
                        if "choices" in q:
                            self.assertNotIn("continuation", q)
                            self.assertEqual(len(set(q["choices"])), len(q["choices"]))
                            self.assertTrue(0 <= q["correct"] < len(q["choices"]))
                            self.assertTrue(all(c.startswith(" ") for c in q["choices"]))
                        if "continuation" in q:
                            self.assertTrue(q["continuation"].startswith(" "))
                        if "depth" in q:
                            self.assertTrue(0 <= q["depth"] <= 1)

    def test_lengths_are_about_those_asked_for(self):
        for kind in tasks.KINDS:
            for line in made(kind, 2048):
                self.assertLess(abs(len(line["prompt"]) - 4 * 2048), 0.25 * 4 * 2048, kind)

    def test_there_are_96_needles_a_length(self):
        for kind in ("needles", "multikey8", "multikey32", "paraphrased"):
            self.assertEqual(sum(len(line["questions"]) for line in made(kind)), 96, kind)

    def test_facts_stand_once_where_their_depth_says(self):
        for kind, distractors in (("needles", 7), ("multikey8", 8), ("multikey32", 32)):
            for line in made(kind):
                facts = dict(re.findall(r"The secret number of the (\w+) is (\d{5})\.", line["prompt"]))
                self.assertEqual(len(facts), distractors + 1)
                self.assertEqual(len(set(facts.values())), len(facts))
                asked = set()
                for q in line["questions"]:
                    subject = re.search(r"number of the (\w+) is$", q["question"])[1]
                    asked.add(subject)
                    self.assertEqual(q["continuation"], " " + facts[subject])
                    at = line["prompt"].index(f"The secret number of the {subject} is") / len(line["prompt"])
                    self.assertLess(abs(at - q["depth"]), 0.12)
                self.assertEqual(len(asked), len(line["questions"]))
            depths = [q["depth"] for line in made(kind) for q in line["questions"]]
            self.assertLess(min(depths), 0.2)
            self.assertGreater(max(depths), 0.8)

    def test_several_values_and_keys(self):
        for line in made("multivalue"):
            (q,) = line["questions"]
            facts = re.findall(r"One of the three secret numbers of the \w+ is (\d{5})\.", line["prompt"])
            self.assertEqual(facts, q["answers"])
            self.assertEqual(re.findall(r"\d{5}", q["continuation"]), q["answers"])
        for line in made("multiquery"):
            (q,) = line["questions"]
            facts = dict(re.findall(r"The secret number of the (\w+) is (\d{5})\.", line["prompt"]))
            asked = [s for s in re.findall(r"the (\w+)", q["question"]) if s in facts]
            self.assertEqual([facts[s] for s in asked], q["answers"])
            self.assertEqual(re.findall(r"\d{5}", q["continuation"]), q["answers"])

    def test_passkeys(self):
        for line in made("passkey"):
            (q,) = line["questions"]
            self.assertEqual(line["prompt"].count(q["continuation"].strip()), 2)
            at = line["prompt"].index("The pass key is") / len(line["prompt"])
            self.assertLess(abs(at - q["depth"]), 0.03)

    def test_variables_have_the_value_of_their_chain(self):
        for line in made("variables"):
            value = {}
            for left, right in re.findall(r"VAR (\w\d) = (\w+)\.", line["prompt"]):
                value[left] = value.get(right, right)  # in the order of the text, so that nothing is looked up too early
            self.assertEqual(len(value), 12)
            for q in line["questions"]:
                asked = re.search(r"variable (\w\d) is$", q["question"])[1]
                self.assertEqual(q["choices"][q["correct"]], " " + value[asked])

    def test_common_words_are_the_most_common(self):
        for line in made("common_words"):
            (q,) = line["questions"]
            listed = re.findall(r"^\d+\. (\w+)$", line["prompt"], re.M)
            by_count = sorted(set(listed), key=listed.count)
            self.assertEqual(set(by_count[-5:]), set(q["answers"]))
            self.assertEqual(q["continuation"].strip().split(", "), q["answers"])
            self.assertGreater(listed.count(by_count[-5]), 3 * listed.count(by_count[-6]))

    def test_copies_stand_in_the_prompt(self):
        depths = []
        for line in made("copy"):
            (q,) = line["questions"]
            self.assertEqual(line["prompt"].count(q["continuation"] + ". End of passage"), 1)
            self.assertEqual(len(q["continuation"].split()), 120)
            depths.append(q["depth"])
        self.assertGreater(max(depths) - min(depths), 0.3)

    def test_looked_up_lines_are_in_the_table(self):
        for length in LENGTHS:
            for line in made("lookup", length):
                table = dict(re.findall(r'^  "([\w-]+)": (\d{5}),$', line["prompt"], re.M))
                self.assertEqual(len(table) == 100, length == 2048)
                self.assertEqual(len(line["questions"]), 10)
                for q in line["questions"]:
                    self.assertEqual(q["continuation"], " " + table[re.search(r'"([\w-]+)":$', q["question"])[1]])

    def test_classes_are_shown_alike_often(self):
        for line in made("classification"):
            labels = re.findall(r"^Label: (\w+)$", line["prompt"], re.M)
            self.assertEqual(len(labels), 40)
            self.assertEqual({labels.count(label) for label in set(labels)}, {13, 14})
            for q in line["questions"]:
                self.assertEqual({c.strip() for c in q["choices"]}, set(labels))

    def test_long_answers_are_in_their_prompts_or_follow_from_themselves(self):
        for line in made("table"):
            q, = line["questions"]
            rows = re.findall(r"^\| (\w+) \| (\w+) \| (\d+) \|$", line["prompt"], re.M)
            self.assertEqual([number for _, _, number in rows], q["answers"])
            self.assertEqual(q["question"].split("\n")[-1] + q["continuation"],
                             "\n".join(f"{word}: {number}" for word, _, number in rows))
            self.assertEqual(len({word for word, _, _ in rows}), 20)
        for line in made("counting"):
            q, = line["questions"]
            counted = [int(n) for n in re.findall(r"\d+", q["question"] + q["continuation"])]
            self.assertEqual(counted, list(range(counted[0], counted[0] + 60)))
            self.assertEqual(q["answers"], [str(n) for n in counted[3:]])

    def test_paraphrases_share_no_word_with_their_facts(self):
        for fact, question, answers in tasks.PARAPHRASES:
            self.assertEqual(words(fact) & words(question) - tasks.STOP, set(), fact)
            self.assertEqual(len(set(answers)), 4)
            self.assertEqual(fact.count("{}"), 1)
        for line in made("paraphrased"):
            for q in line["questions"]:
                asked = q["question"].split(": ", 1)[1]
                (fact,) = [f for f, text, _ in tasks.PARAPHRASES if text == asked]
                self.assertIn(fact.format(q["choices"][q["correct"]].strip()), line["prompt"])
                for wrong in set(range(4)) - {q["correct"]}:
                    self.assertNotIn(fact.format(q["choices"][wrong].strip()), line["prompt"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
