"""examples/eval/evaluate.py with a program that only pretends: cells that are kept, and the tables.

    python3 evaluate_test.py examples/eval/evaluate.py
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
from pathlib import Path

SCRIPT = Path(sys.argv[1]).resolve()
sys.path.insert(0, str(SCRIPT.parent))
spec = importlib.util.spec_from_file_location("evaluate", SCRIPT)
evaluate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(evaluate)

# Full has 9 of 10 needles right and quest 4; of copies full has none. It fails where a file "broken" is beside it that
# names one of its methods, or nothing, and waits while there is one "slow".
PRETENDER = r'''#!/usr/bin/env python3
import json, sys, time
from pathlib import Path
here = Path(__file__).parent
arguments = sys.argv[1:]
out = Path(arguments[arguments.index("--out") + 1])
with open(here / "calls", "a") as calls:
    calls.write(" ".join(arguments) + "\n")
methods = [arguments[i + 1] for i, word in enumerate(arguments) if word == "--variant"]
if (here / "broken").exists() and (here / "broken").read_text() in ["", *methods]:
    print("it is broken")
    sys.exit(2)
while (here / "slow").exists():
    time.sleep(0.01)
lines = []
def add(bench, case, metric, value, **more):
    lines.append({"bench": bench, "case": case, "metric": metric, "value": value, **more})
if "quality" in arguments:
    for case, kl in [("full", 0)] + [(method, 0.0123) for method in methods]:
        add("quality", case, "divergence", kl, n=30)
        add("quality", case, "divergence_low", kl / 2, n=30)
        add("quality", case, "divergence_high", kl * 2, n=30)
        add("quality", case, "divergence_99", 10 * kl, n=30)
        add("quality", case, "attention_error", kl, n=30)
        add("quality", case, "perplexity", 9 + kl, n=30)
        for end, apart in ("", 0), ("_low", -0.02), ("_high", 0.02):
            add("quality", case, "perplexity_difference" + end, kl + apart, n=30)
        add("quality", case, "top1_agreement", 1 - 10 * kl, n=30)
        add("quality", case, "fast_tier_bytes", 25.34e6, n=30)
        add("quality", case, "slices_recalled", 10000 * kl, n=30)
        add("quality", case, "slices_critical", 5000 * kl, n=30)
        add("quality", case, "bytes_recalled", 2.5e6 if kl else 0, n=30)
else:
    tasks = [json.loads(line) for line in Path(arguments[arguments.index("--tasks") + 1]).read_text().splitlines()]
    copies = tasks[0]["group"].startswith("copy")
    for case, right, over in [("full", 0.9, 0.0)] + [(method, 0.4, 0.25) for method in methods]:
        add("task", case, "right", right)
        add("task_group", case, "right", 0.0 if copies else right, n=10, prompts=len(tasks))
        if case != "full":
            add("task_group", case, "p_full", 0.0625, n=10, prompts=len(tasks))
            add("task_group", case, "p_quest", 0.03, n=10, prompts=len(tasks))
        add("task_group", case, "loss", 1.5 + over, n=10, prompts=len(tasks))
        add("task_group", case, "loss_difference", over, low=over - 0.1, high=over + 0.1, n=10, prompts=len(tasks))
(out / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
'''

TWO_PARTS = [method for method in evaluate.METHODS if method not in evaluate.OF_LISTED_HEADS][:evaluate.PART + 2]


class Evaluate(unittest.TestCase):
    def setUp(self):
        self.scratch = tempfile.TemporaryDirectory()
        self.folder = Path(self.scratch.name)
        self.program = self.folder / "program"
        self.program.write_text(PRETENDER)
        self.program.chmod(0o755)
        self.addCleanup(self.scratch.cleanup)

    def command(self):
        return [sys.executable, "-B", SCRIPT, "--program", self.program, "--model", "some.gguf", "--out",
                self.folder / "out", "--lengths", "512", "--methods", "quest", "--prompts", "2"]

    def run_it(self, *more, code=0):
        end = subprocess.run([*self.command(), *more], capture_output=True, text=True)
        self.assertEqual(end.returncode, code, end.stderr)
        return end

    def calls(self):
        return (self.folder / "calls").read_text().splitlines()

    def test_what_is_left_is_guessed_by_what_was_done(self):
        sys.path.insert(0, str(Path(SCRIPT).parent))
        import evaluate
        guesses = {"first": 10, "second": 20, "third": 30, "kept": 0}
        self.assertEqual(evaluate.seconds_left(guesses, {}, 2), 30)
        self.assertEqual(evaluate.seconds_left(guesses, {"kept": 0}, 2), 30)
        self.assertEqual(evaluate.seconds_left(guesses, {"kept": 0, "first": 40}, 1), 200)
        self.assertEqual(evaluate.seconds_left(guesses, dict.fromkeys(guesses, 5), 1), 0)

    def test_a_cell_is_kept_and_the_table_says_what_is_one(self):
        end = self.run_it("--tasks", "quality", "needles", "copy")
        self.assertTrue(end.stdout.startswith("3 cells of 2 methods: about "), end.stdout)
        self.assertEqual(len(self.calls()), 3)
        for call in self.calls():
            self.assertIn("--variant quest", call)
            self.assertIn("--budget 512", call)
        table = (self.folder / "out" / "table.md").read_text()
        rows = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]]
                for row in table.splitlines() if row.startswith("|")}
        self.assertEqual(rows["method"], ["KL, 1/1000 nat, n 30", "99th percentile", "output error", "perplexity", "top-1", "fast MB",
                                          "MB recalled a step, before attention", "needles, n 10 on 2: right",
                                          "copy, n 10 on 2: loss over full"])
        self.assertTrue(table.startswith("some.gguf, budget 512 tokens, commit unknown."))
        self.assertEqual(rows["`full`"], ["0", "0", "0.000", "9.000", "100.0 %", "25.3", "", "9", "1.500"])
        self.assertEqual(rows["`quest`"], ["12.3 (6.2 .. 24.6)", "123", "0.012", "9.012, +0.012 (-0.008 .. +0.032)", "87.7 %", "25.3", "2.50, 1.25", "4, p 0.062 +",
                                           "+0.250 (+0.150 .. +0.350) *"])
        results = self.folder / "out" / "cells" / "needles-512" / "results.jsonl"
        self.assertEqual(len(results.read_text().splitlines()), 8)
        self.assertEqual(len((results.parent / "questions.jsonl").read_text().splitlines()), 2)

        # A second run has everything; with another task it runs that alone, with another method that; with another
        # budget all.
        again = self.run_it("--tasks", "quality", "needles", "copy").stdout
        self.assertTrue(again.startswith("3 cells of 2 methods: nothing is left to run"), again)
        self.assertIn("needles at 512: kept from before", again)
        self.assertEqual(len(self.calls()), 3)
        self.run_it("--tasks", "needles", "passkey")
        self.assertEqual(len(self.calls()), 4)
        both = (self.folder / "out" / "table.md").read_text()  # of what is there, not of what was asked for last
        for column in ("top-1", "needles, n 10 on 2: right", "passkey, n 10 on 2: right", "copy, n 10 on 2: loss over full"):
            self.assertIn(column, both)
        self.run_it("--tasks", "needles", "passkey", "--methods", "quest", "h2o")
        self.assertEqual(len(self.calls()), 6)
        self.assertIn("--variant quest --variant h2o", self.calls()[-1])  # to be paired with, and kept as it was
        self.assertEqual(len(results.read_text().splitlines()), 8 + 5)
        self.assertIn("| `h2o` |" + "  |" * 7 + " 4, p 0.062 + |", (self.folder / "out" / "table.md").read_text())
        other = ["--tasks", "needles", "passkey", "--budget", "256"]
        before = results.read_text()
        self.assertIn("needles at 512, passkey at 512: ", self.run_it(*other, code=1).stderr)
        self.assertEqual(results.read_text(), before)
        self.run_it(*other, "--replace")
        self.assertEqual(len(self.calls()), 8)

    def test_other_steps_are_another_quality_and_the_same_tasks(self):
        self.run_it("--tasks", "quality", "needles")
        self.run_it("--tasks", "needles", "--steps", "20")
        self.assertEqual(len(self.calls()), 2)
        self.assertIn("KL, 1/1000 nat, n 30", (self.folder / "out" / "table.md").read_text())  # what it is of, it says
        self.run_it("--tasks", "quality", "--steps", "20", code=1)
        self.run_it("--tasks", "quality", "--steps", "20", "--replace")
        self.assertEqual(len(self.calls()), 3)
        self.assertIn("--steps 20", self.calls()[-1])

    def test_jobs_may_be_called_threads(self):
        for option in "--jobs", "--threads":
            shutil.rmtree(self.folder / "out", ignore_errors=True)
            self.assertIn("on 3 cores", self.run_it("--tasks", "needles", option, "3").stdout)

    def test_a_run_that_fails_goes_on_from_there(self):
        self.run_it("--tasks", "needles")
        (self.folder / "broken").touch()
        end = self.run_it("--tasks", "needles", "copy", code=1)
        self.assertIn("copy at 512 tokens ended with 2; see", end.stderr)
        self.assertIn("needles", (self.folder / "out" / "table.md").read_text())
        (self.folder / "broken").unlink()
        self.run_it("--tasks", "needles", "copy")
        self.assertEqual(len(self.calls()), 3)

    def test_two_runs_do_not_write_to_one_folder(self):
        held = evaluate.held_alone(self.folder / "out" / "cells")
        end = self.run_it("--tasks", "needles", code=1)
        self.assertIn("another run, or a program that one has left, writes to", end.stderr)
        self.assertFalse((self.folder / "calls").exists())
        os.close(held)
        self.run_it("--tasks", "needles")

    def test_a_program_that_is_left_keeps_others_out(self):
        (self.folder / "slow").touch()
        run = subprocess.Popen([*self.command(), "--tasks", "needles"], stdout=subprocess.DEVNULL)
        while not (self.folder / "calls").exists():
            time.sleep(0.01)
        run.kill()
        run.wait()
        self.run_it("--tasks", "needles", code=1)
        (self.folder / "slow").unlink()
        while subprocess.run([*self.command(), "--tasks", "needles"], capture_output=True).returncode == 1:
            time.sleep(0.01)
        self.assertEqual(len(self.calls()), 2)

    def test_a_person_ends_it(self):
        (self.folder / "slow").touch()
        run = subprocess.Popen([*self.command(), "--tasks", "needles", "copy", "passkey", "--jobs", "1"], stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True, start_new_session=True)
        while not (self.folder / "calls").exists():
            time.sleep(0.01)
        os.killpg(run.pid, signal.SIGINT)
        said = run.communicate()[1].splitlines()
        self.assertEqual(run.returncode, 1)
        self.assertEqual(said, ["evaluate.py: interrupted; what was done is kept, and the same command goes on from there"])
        self.assertEqual(len(self.calls()), 1)

    def test_what_cannot_be_kept_is_left_where_it_is(self):
        wanted = argparse.Namespace(out=self.folder / "out", methods=["quest"], program=self.program, model="some.gguf", cache="cache",
                                    budget=512, steps=512, texts=[], prompts=2, seed=1, characters=4.0, commit="none", more=[],
                                    held=os.open(self.folder, os.O_RDONLY), head_list=None)
        with unittest.mock.patch.object(evaluate, "write_whole", side_effect=OSError("no space")):
            with self.assertRaisesRegex(OSError, "no space"):
                evaluate.run_part("needles", 512, 0, ["quest"], wanted)
        os.close(wanted.held)
        unfinished = self.folder / "out" / "cells" / "needles-512" / "now-0" / "results.jsonl"
        self.assertEqual(len(unfinished.read_text().splitlines()), 10)

    def test_wrong_arguments_are_a_sentence(self):
        for wrong, says in (("--jobs 0", "--jobs is 0"), ("--prompts 0", "--prompts is 0"), ("--steps -1", "--steps is -1"),
                            ("--lengths 8", "--lengths 8"), ("--characters 0", "--characters is 0"),
                            ("--characters nan", "--characters is nan"), ("--texts nope.txt", "nope.txt is no file")):
            end = self.run_it("--tasks", "needles", *wrong.split(), code=2)
            self.assertIn(says, end.stderr)
            self.assertNotIn("Traceback", end.stderr)
        (self.folder / "out" / "cells").mkdir(parents=True)
        (self.folder / "out" / "cells" / "notes.txt").touch()
        self.run_it("--tasks", "needles")

    def test_many_methods_are_run_in_parts_beside_the_one_that_they_are_paired_with(self):
        methods = TWO_PARTS
        (self.folder / "broken").write_text(methods[-1])
        self.run_it("--tasks", "needles", "--methods", *methods, code=1)
        self.assertEqual(len(self.calls()), 2)
        for call in self.calls():
            self.assertEqual(call.split().count("quest"), 1)
        cell = self.folder / "out" / "cells" / "needles-512"
        kept = json.loads((cell / "settings.json").read_text())["methods"]
        self.assertGreater(len(methods), len(kept))
        self.assertIn("quest", kept)
        (self.folder / "broken").unlink()
        (cell / "now-7").mkdir()  # of a run that was stopped

        said = self.run_it("--tasks", "needles", "--methods", *methods).stdout
        self.assertIn("needles at 512: ", said)  # what was left is one part
        self.assertEqual(len(self.calls()), 3)
        for method in methods:
            self.assertEqual(method in self.calls()[-1].split(), method not in kept or method == "quest", method)
        self.assertEqual(json.loads((cell / "settings.json").read_text())["methods"], methods)  # as METHODS are
        cases = [json.loads(line)["case"] for line in (cell / "questions.jsonl").read_text().splitlines()]
        self.assertEqual(cases, ["full", *methods])
        self.assertEqual({path.name for path in cell.iterdir()}, {"log.txt", "results.jsonl", "questions.jsonl", "settings.json"})

    def test_parts_of_a_cell_with_other_settings_replace_it(self):
        methods = TWO_PARTS
        self.run_it("--tasks", "quality", "--methods", *methods)
        said = self.run_it("--tasks", "quality", "--methods", *methods, "--steps", "20", "--replace").stdout
        self.assertIn("quality at 512, part 2 of 2: ", said)
        results = [json.loads(line) for line in
                   (self.folder / "out" / "cells" / "quality-512" / "results.jsonl").read_text().splitlines()]
        self.assertEqual([line["case"] for line in results if line["metric"] == "divergence"], ["full", *methods])

    def test_a_difference_inside_its_interval_has_no_star(self):
        self.assertEqual(evaluate.signed(0.05, -0.05, 0.15, 3), "+0.050 (-0.050 .. +0.150)")
        self.assertEqual(evaluate.signed(-0.1, -0.15, -0.05, 2), "-0.10 (-0.15 .. -0.05) *")

    def test_what_differs_from_quest_has_a_plus(self):
        self.assertEqual([evaluate.apart(*of) for of in ((0.1, 0.2), (-0.2, -0.1), (-0.1, 0.2), (None, None))], [" +", " +", "", ""])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
