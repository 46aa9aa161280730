"""All methods on all tasks, cell by cell.

    python3 evaluate.py --program freekv-compare --model FILE.gguf --out FOLDER

A cell is a kind of task (tasks.py) at a length, or the quality on three texts after a prompt of that length. It is run in
parts of some methods, each beside full and quest. What a part gave stays in FOLDER/cells/, and a second run goes on where
the first was stopped, and adds methods that are new. Several parts run at a time, each on one core: llama.cpp's kernels
gain little from a second. FOLDER/table.md has a table for each length, with n and intervals;
FOLDER/cells/*/questions.jsonl what became of each question. Needs nothing but Python; evaluate.sh builds the program.
"""

import argparse
import concurrent.futures
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import tasks

HERE = Path(__file__).resolve().parent
QUALITY = "quality"
PAIRED_WITH = "quest"
METHODS = ["streaming_llm", "razor_attention", "quest", "quest_mean_softmax", "arkvale", "twilight", "infinigen",
           "fasa", "clusterkv", "magicpig", "mpcache", "shadowkv", "think", "h2o", "mikv", "q_hitter", "tova",
           "snapkv", "dapq", "epi_cache", "raas", "pyramid_kv", "lazy_eviction", "hard_kv", "defensive_kv",
           "layer_defensive_kv", "compress_kv", "cake", "r_kv", "arkv_origin", "arkv", "arkv_split", "d2o",
           "exact_merge", "hard_kv_merge", "hard_kv_pairs", "kv_merger", "razor_attention_compensated", "freekv",
           "freekv_long_inputs",
           "freekv_calibrated_top_p", "freekv_key_subspace", "freekv_key_codes", "freekv_key_codes_deficit", "freekv_key_codes_sticky", "freekv_key_codes_missing", "freekv_key_codes_units",
           "freekv_key_codes_completed", "freekv_key_codes_units_completed"]
OF_LISTED_HEADS = ["razor_attention", "razor_attention_compensated"]
VOTERS = {"compress_kv": HERE / "smollm2-135m-voters.txt"}  # query heads, of SmolLM2-135M
PART = 13  # methods of a cell that are run together, at most: with more of them less is kept when a run is stopped
KEEPING = threading.Lock()  # while a cell's files are written
UNFINISHED = "now-"  # begins the name of a part's folder
# For the estimate alone, on one core with a model of 135M: tokens a second that llama.cpp prefills, and that a method
# decodes.
PREFILLED, DECODED = 130, 130


def cells_of(wanted):
    return [(kind, length) for length in wanted.lengths for kind in wanted.tasks]


def settings_of(wanted):
    """What must be the same for a cell to be taken from an earlier run; the commit need not, and the table says it."""
    return {"model": Path(wanted.model).name, "head_list": wanted.head_list.name if wanted.head_list else "", "budget": wanted.budget,
            "steps": wanted.steps, "prompts": wanted.prompts, "seed": wanted.seed, "characters": wanted.characters,
            "more": wanted.more} | ({"texts": [text.name for text in wanted.texts]} if wanted.texts else {})


def parts_of(kind, length, wanted):
    """Lists of the methods that a cell is to be run with yet, as many in each; one that has none where it has all."""
    missing = missing_of(kind, length, wanted)
    parts = max(1, -(-len(missing) // PART))
    return [missing[part::parts] for part in range(parts)]


def run_with(kind, length, part, wanted):
    """Methods that a part is run with: its own, and the one that all are paired with, where the cell has it."""
    beside = [PAIRED_WITH] if PAIRED_WITH in wanted.methods + asked_of(kind, length, wanted) else []
    return [method for method in beside if method not in part] + part


def seconds_of(kind, length, part, wanted):
    """A guess, of one core: its speed is that of one processor, and others take up to four times as long."""
    if not part:
        return 0
    methods = 1 + len(run_with(kind, length, part, wanted))
    if kind == QUALITY:
        return 3 * (length / PREFILLED + 2 * methods * wanted.steps / DECODED)
    lines = list(tasks.make([kind], [length], wanted.seed, wanted.characters, wanted.prompts))
    decoded = 0
    for question in (q for line in lines for q in line["questions"]):
        answers = question.get("choices", []) + [question[k] for k in ("continuation",) if k in question]
        decoded += sum(len(text) for text in [question["question"], *answers]) / wanted.characters
        decoded += question.get("max_tokens", 0)
    return len(lines) * length / PREFILLED + methods * decoded / DECODED


def seconds_left(guesses, took, jobs):
    """Of the parts that are not done: `guesses` are corrected by what those done took. Both are seconds by part; one that
    was kept took none."""
    done = [part for part in took if took[part] > 0 and guesses[part] > 0]
    factor = sum(took[part] for part in done) / sum(guesses[part] for part in done) if done else 1.0
    return factor * sum(guess for part, guess in guesses.items() if part not in took) / jobs


def texts_of(length, wanted):
    """Of the texts that were asked for the first three that have so many tokens, about."""
    most = wanted.characters * (length + wanted.steps)
    return [text for text in wanted.texts if text.stat().st_size >= most][:3]


def command_of(kind, length, methods, wanted, folder):
    genesis, technical = tasks.TEXTS / "genesis.txt", tasks.TEXTS / "technical.txt"
    text, *more_texts = texts_of(length, wanted) or [tasks.TEXTS / "hacker-folklore.txt", genesis, technical]
    command = [wanted.program, "--model", wanted.model, "--text", text, "--needle-text",
               genesis, "--calibration", technical, "--cache", wanted.cache,
               "--out", folder, "--budget", wanted.budget, "--threads", 1, "--commit", wanted.commit]
    for method in methods:
        command += ["--variant", method]
    for method in methods:
        if method in OF_LISTED_HEADS:
            command += ["--head-list", f"{method}={wanted.head_list}"]
        if method in VOTERS:
            command += ["--head-list", f"{method}={VOTERS[method]}"]
    if kind == QUALITY:
        command += ["--section", "quality", "--prompt", length, "--steps", wanted.steps]
        command += ["--more-texts", *more_texts] if more_texts else []
    else:
        file = folder / "tasks.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in
                                tasks.make([kind], [length], wanted.seed, wanted.characters, wanted.prompts)))
        command += ["--section", "tasks", "--tasks", file]
    return [str(word) for word in command + wanted.more]


def lengths_of(cells):
    """Of cells' folders, and not of what else is there."""
    return sorted({int(length) for cell in cells if (length := cell.name.rpartition("-")[2]).isdigit()})


def folder_of(kind, length, wanted):
    return Path(wanted.out) / "cells" / f"{kind}-{length}"


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def held_alone(folder):
    """A descriptor of the folder, for one run and its programs; exits where others have it."""
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"evaluate.py: another run, or a program that one has left, writes to {folder}; wait for its end, or give "
                 "another --out")
    return held


def write_whole(path, text):
    """In one go: the table is made of cells while others are written."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text)
    unfinished.replace(path)


def write_lines(path, lines):
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))


def asked_of(kind, length, wanted, any_steps=False):
    """The methods that a cell has been run with already; of quality those after as many steps, or by `any_steps` any."""
    kept = folder_of(kind, length, wanted) / "settings.json"
    if not kept.exists():
        return []
    found, now = json.loads(kept.read_text()), settings_of(wanted)
    if any_steps or kind != QUALITY:
        found["settings"]["steps"] = now["steps"]
    return found["methods"] if found["settings"] == now else []


def has_other_settings(kind, length, wanted):
    return (folder_of(kind, length, wanted) / "settings.json").exists() and not asked_of(kind, length, wanted)


def missing_of(kind, length, wanted):
    asked = asked_of(kind, length, wanted)
    return [method for method in wanted.methods if method not in asked]


def keep(kind, length, methods, new, wanted):
    """Adds a part's lines to the cell's, but for those of methods that it has; those of a cell with other settings go."""
    folder, asked = folder_of(kind, length, wanted), asked_of(kind, length, wanted)
    has = {"full", *asked} if asked else set()
    places = {method: nth for nth, method in enumerate(["full", *METHODS])}

    def place(method):
        return places.get(method, len(places))

    for name, wants in (("results.jsonl", lambda line: line["bench"] in ("task_group", QUALITY)),
                        ("questions.jsonl", lambda line: line["bench"] == "task")):
        lines = read_lines(folder / name) if asked else []
        lines += [line for line in new if wants(line) and line.get("case") not in has]
        write_lines(folder / name, sorted(lines, key=lambda line: place(line["case"])))
    asked += [method for method in methods if method not in asked]
    write_whole(folder / "settings.json",
                json.dumps({"settings": settings_of(wanted), "methods": sorted(asked, key=place)}, indent=1) + "\n")


def run_part(kind, length, nth, part, wanted):
    """Runs a cell with some methods; returns the seconds, or None where there are none."""
    if not part:
        return None
    folder, methods, start = folder_of(kind, length, wanted), run_with(kind, length, part, wanted), time.monotonic()
    now = folder / f"{UNFINISHED}{nth}"
    now.mkdir(parents=True)
    with open(now / "log.txt", "w") as log:
        end = subprocess.run(command_of(kind, length, methods, wanted, now), stdout=log, stderr=subprocess.STDOUT,
                             pass_fds=[wanted.held])
    said, found = (now / "log.txt").read_text(), read_lines(now / "results.jsonl")
    with KEEPING:
        with open(folder / "log.txt", "a") as log:
            log.write(said)
        if end.returncode == 0:
            keep(kind, length, methods, found, wanted)
    shutil.rmtree(now)
    if end.returncode != 0:
        raise RuntimeError(f"{kind} at {length} tokens ended with {end.returncode}; see {folder / 'log.txt'}")
    return time.monotonic() - start


def signed(value, low, high, digits, unit=1):
    """A difference from full attention's and its interval; a star where 0 is outside."""
    star = "" if low <= 0 <= high else " *"
    return f"{unit * value:+.{digits}f} ({unit * low:+.{digits}f} .. {unit * high:+.{digits}f}){star}"


def apart(low, high):
    """A mark where what was paired with quest differs from it."""
    return "" if low is None or high is None or low <= 0 <= high else " +"


def bytes_waited_for(slices, before_attention, all_bytes):
    """Of what a step recalls, the bytes that attention waits for."""
    return all_bytes * before_attention / slices if slices else 0


def quality_columns(lines):
    value = {(l["case"], l["metric"]): l["value"] for l in lines if l["bench"] == "quality"}
    cases = list(dict.fromkeys(l["case"] for l in lines if l["bench"] == "quality"))
    n = next(l["n"] for l in lines if l["bench"] == "quality")

    def recalled(case):
        slices, all_bytes = value[case, "slices_recalled"], value[case, "bytes_recalled"]
        before = bytes_waited_for(slices, value[case, "slices_critical"], all_bytes)
        return f"{all_bytes / 1e6:.2f}, {before / 1e6:.2f}" if slices else ""

    return [(f"KL, 1/1000 nat, n {n}",
             {case: "0" if case == "full" else
              f"{1000 * value[case, 'divergence']:.1f} ({1000 * value[case, 'divergence_low']:.1f} .. "
              f"{1000 * value[case, 'divergence_high']:.1f})" +
              apart(*(value.get((case, f"divergence_over_quest_{end}")) for end in ("low", "high"))) for case in cases}),
            ("99th percentile", {case: "0" if case == "full" else f"{1000 * value[case, 'divergence_99']:.0f}" for case in cases}),
            ("output error", {case: f"{value[case, 'attention_error']:.3f}" for case in cases}),
            ("perplexity", {case: f"{value[case, 'perplexity']:.3f}" if case == "full" else
                            f"{value[case, 'perplexity']:.3f}, " +
                            signed(*(value[case, f"perplexity_difference{end}"] for end in ("", "_low", "_high")), 3)
                            for case in cases}),
            ("top-1", {case: f"{100 * value[case, 'top1_agreement']:.1f} %" for case in cases}),
            ("fast MB", {case: f"{value[case, 'fast_tier_bytes'] / 1e6:.1f}" for case in cases}),
            ("MB recalled a step, before attention", {case: recalled(case) for case in cases})]


def column_of(kind, lines):
    """(title, {method: cell}) of a task."""
    groups = [l for l in lines if l["bench"] == "task_group"]
    at = {(l["case"], l["metric"]): l for l in groups}
    cases = list(dict.fromkeys(l["case"] for l in groups))
    full = at["full", "right"]
    title = f"{kind}, n {full['n']} on {full['prompts']}"
    if full["value"] >= 0.6:
        cells = {}
        for case in cases:
            right = round(at[case, "right"]["value"] * full["n"])
            p, to_quest = (at.get((case, metric), {"value": 1})["value"] for metric in ("p_full", "p_quest"))
            cells[case] = f"{right}" + ("" if case == "full" else f", p {p:.3f}" + (" *" if p < 0.05 else "") +
                                        (" +" if to_quest < 0.05 else ""))
        return title + ": right", cells
    if ("full", "loss") not in at:
        return title + f": full has {round(full['value'] * full['n'])} right", {case: "" for case in cases}
    cells = {}
    for case in cases:
        over = at[case, "loss_difference"]
        known = over["low"] is not None and over["high"] is not None
        to_quest = at.get((case, "loss_over_quest"), {"low": None, "high": None})
        cells[case] = (f"{at[case, 'loss']['value']:.3f}" if case == "full" else
                       signed(over["value"], over["low"], over["high"], 3) + apart(to_quest["low"], to_quest["high"])
                       if known else f"{over['value']:+.3f}")
    return title + ": loss over full", cells


def table_of(length, columns):
    methods = list(dict.fromkeys(method for _, cells in columns for method in cells))
    rows = [["method"] + [title for title, _ in columns]]
    rows += [[f"`{method}`"] + [cells.get(method, "") for _, cells in columns] for method in methods]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return f"## {length} tokens\n\n" + "\n".join(lines) + "\n"


NOTE = """
right: questions answered, p by McNemar's exact test against full, question by question. loss: nats per token over
full attention's, 95 % by a bootstrap of prompts, where full attention has fewer than 60 % right. KL: of the next
token's distribution from full attention's, teacher-forced on three texts, 95 % by a block bootstrap, and the 99th percentile of
tokens. output error: the relative L2 distance of a query head's output from full attention's of the same query, in the mean.
perplexity: of the same tokens, and its difference from full attention's. top-1: the same most likely token as full attention.
fast MB: slots, summaries with their data, and complete layers, of a sequence. `*`: outside the interval, or p below 0.05;
`+`: against `quest`, paired, p below 0.05 or 0 outside the interval, where both ran together. Of so many cells one in twenty is
so by chance; and p and the intervals of right answers take questions as independent, which those on one prompt are not.
"""


def until_interrupted(pool, running):
    """What is done, as it comes. Nothing else is begun where a person ends it; programs that run have been told so too."""
    try:
        yield from concurrent.futures.as_completed(running)
    except KeyboardInterrupt:
        pool.shutdown(cancel_futures=True)
        sys.exit("evaluate.py: interrupted; what was done is kept, and the same command goes on from there")


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--program", required=True, help="freekv-compare")
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--out", required=True, help="folder; cells that it has are kept")
    parser.add_argument("--cache", help="folder for prompts' keys and values, large (default: OUT/cache)")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--tasks", nargs="+", choices=[QUALITY, *tasks.KINDS], default=[QUALITY, *tasks.KINDS],
                        metavar="TASK", help="quality, and those of tasks.py: " + ", ".join(tasks.KINDS))
    parser.add_argument("--methods", nargs="+", default=METHODS,
                        help="besides full (default: " + ", ".join(METHODS) + "); of SmolLM2-135M alone: " + ", ".join(VOTERS))
    parser.add_argument("--head-list", type=Path,
                        help="of " + " and ".join(OF_LISTED_HEADS) + ", which are left out of a model that has none "
                        "(default: SmolLM2-135M's for it)")
    parser.add_argument("--budget", type=int, default=512, help="tokens a head attends to (default 512)")
    parser.add_argument("--steps", type=int, default=512, help="decoded of each text, for the quality (default 512)")
    parser.add_argument("--texts", nargs="+", type=Path, default=[], metavar="TEXT",
                        help="that the quality is of, at each length the first three that are long enough (default: the "
                        "repository's three, of 7,700 to 13,600 tokens)")
    parser.add_argument("--prompts", type=int, help="of each task and length, instead of tasks.py's")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--characters", type=float, default=4.0, help="of a token, about")
    parser.add_argument("--jobs", "--threads", type=int, default=os.cpu_count(),
                        help="parts of cells at a time (default: the cores)")
    parser.add_argument("--commit", default="unknown", help="noted in the results and the table")
    parser.add_argument("--replace", action="store_true",
                        help="run cells anew that --out has of other settings: model, budget, seed, prompts, steps of the quality")
    parser.add_argument("more", nargs="*", help="behind --: more for the program")
    wanted = parser.parse_args(arguments)
    for option in ("budget", "steps", "prompts", "jobs"):
        if getattr(wanted, option) is not None and getattr(wanted, option) < 1:
            parser.error(f"--{option} is {getattr(wanted, option)}; it is at least 1")
    if min(wanted.lengths) < 256:
        parser.error(f"--lengths {min(wanted.lengths)}: prompts have 256 tokens or more")
    if not 0 < wanted.characters < 1000:
        parser.error(f"--characters is {wanted.characters:g}; a token has more than 0 and fewer than 1,000")
    for text in wanted.texts:
        if not text.is_file():
            parser.error(f"--texts: {text} is no file")
    if "smollm2-135m" not in Path(wanted.model).name.lower():
        wanted.methods = [method for method in wanted.methods if method not in VOTERS]
    elif wanted.head_list is None:
        wanted.head_list = HERE / "smollm2-135m-heads.txt"
    if wanted.head_list is None:
        wanted.methods = [method for method in wanted.methods if method not in OF_LISTED_HEADS]
    wanted.cache = wanted.cache or str(Path(wanted.out) / "cache")

    for length in wanted.lengths if wanted.texts else []:
        if QUALITY in wanted.tasks and not texts_of(length, wanted):
            parser.error(f"none of --texts has {length} + {wanted.steps} tokens of {wanted.characters:g} characters; give a "
                         "longer text or a smaller --lengths or --steps")

    wanted.held = held_alone(Path(wanted.out, "cells"))
    cells = cells_of(wanted)
    lost = [f"{kind} at {length}" for kind, length in cells if has_other_settings(kind, length, wanted)]
    if lost and not wanted.replace:
        sys.exit(f"evaluate.py: {', '.join(lost)}: {wanted.out} has them of other settings (settings.json beside each), which would "
                 "be lost; give the same ones, such as --steps, another --out, or --replace")
    parts = {(*cell, nth): part for cell in cells for nth, part in enumerate(parts_of(*cell, wanted))}
    guesses, took = {(kind, length, nth): seconds_of(kind, length, part, wanted) for (kind, length, nth), part in parts.items()}, {}
    for cell in cells:
        for stopped in folder_of(*cell, wanted).glob(UNFINISHED + "*"):
            shutil.rmtree(stopped)
    guess = seconds_left(guesses, took, wanted.jobs) / 60
    how_long = (f"about {guess:.0f} to {4 * guess:.0f} minutes for a model of 135M on {wanted.jobs} cores, by their speed; what "
                "is done is kept") if guess > 0 else "nothing is left to run"
    print(f"{len(cells)} cells of {1 + len(wanted.methods)} methods: {how_long}", flush=True)

    def write_table():
        """After every part, so that a run that is stopped leaves what there is; of all cells that the folder has."""
        columns, commits = {length: [] for length in lengths_of(Path(wanted.out, "cells").iterdir())}, {}
        for length in columns:
            for kind in (QUALITY, *tasks.KINDS):
                if not asked_of(kind, length, wanted, any_steps=True):  # a column says how many
                    continue
                lines = read_lines(folder_of(kind, length, wanted) / "results.jsonl")
                columns[length] += quality_columns(lines) if kind == QUALITY else [column_of(kind, lines)]
                commits.update(dict.fromkeys(str(line.get("commit", "unknown")) for line in lines))
        done = [table_of(length, found) for length, found in columns.items() if found]
        Path(wanted.out).mkdir(parents=True, exist_ok=True)
        Path(wanted.out, "table.md").write_text(f"{Path(wanted.model).name}, budget {wanted.budget} tokens, commit "
                                                f"{', '.join(commits)}.\n\n" + "\n".join(done) + NOTE)

    failed = []
    with concurrent.futures.ThreadPoolExecutor(wanted.jobs) as pool:
        running = {pool.submit(run_part, *of, part, wanted): of for of, part in parts.items()}
        for done in until_interrupted(pool, running):
            kind, length, nth = running[done]
            if done.exception():
                failed.append(str(done.exception()))
            else:
                took[kind, length, nth] = done.result() or 0
                of_cell = [other for other in parts if other[:2] == (kind, length)]
                name = f"{kind} at {length}" + (f", part {nth + 1} of {len(of_cell)}" if len(of_cell) > 1 else "")
                said = "kept from before" if done.result() is None else f"{done.result():.0f} s"
                left = seconds_left(guesses, took, wanted.jobs) / 60
                print(f"{name}: {said}" + (f"; about {left:.0f} minutes left" if left > 0 else ""), flush=True)
            with KEEPING:
                write_table()
    if failed:
        sys.exit("evaluate.py: " + "; ".join(failed))
    print(Path(wanted.out, "table.md").read_text())


if __name__ == "__main__":
    main(sys.argv[1:])
