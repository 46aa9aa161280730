"""Pictures of the main job's results: python plot.py RESULTS.jsonl FOLDER."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

INK, QUIET, GRID = "#1f2430", "#6b7280", "#e5e7eb"
COLOURS = {"full": "#1f2430", "streaming_llm": "#9ca3af", "quest": "#c08a3e", "freekv": "#d97706",
           "freekv_chunk_means": "#5b8db8", "freekv_key_subspace": "#0f766e"}
LABELS = {"full": "full attention", "streaming_llm": "window alone\n(StreamingLLM)", "quest": "Quest\nmin-max",
          "freekv": "FreeKV as published\nmin-max", "freekv_chunk_means": "FreeKV\nchunk means",
          "freekv_key_subspace": "FreeKV\nkey subspace",
          "freekv_key_subspace, other text's basis": "FreeKV\nkey subspace,\nother text's basis"}

plt.rcParams.update({"font.size": 10, "axes.edgecolor": QUIET, "axes.labelcolor": INK, "text.color": INK,
                     "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
                     "axes.titlelocation": "left", "axes.titleweight": "bold", "figure.dpi": 150})


def colour(case):
    return COLOURS.get(case.split(",")[0], QUIET)


def label(case):
    return LABELS.get(case, case)


class Results:
    def __init__(self, path):
        self.lines = [json.loads(line) for line in Path(path).read_text().splitlines()]

    def select(self, bench, metric, **where):
        """{case: value} of the lines that match, in the order of the file."""
        return {line["case"]: line["value"] for line in self.lines
                if line["bench"] == bench and line["metric"] == metric
                and all(line.get(key) == value for key, value in where.items())}

    def values_of(self, bench, key):
        return sorted({line[key] for line in self.lines if line["bench"] == bench})

    def run(self, bench):
        return next(line for line in self.lines if line["bench"] == bench)


def footnote(figure, run, note):
    """`run`: any line of what is shown."""
    figure.text(0.01, 0.005, f"{note}\n{run['model']}, {run['text']}; page {run['page']}, sink {run['sink']}, window {run['window']}, "
                f"tau {run['tau']:.2g}, {run['route']}; "
                f"{run['machine']}, commit {run['commit']}", fontsize=7, color=QUIET, linespacing=1.5)


def needles(results, folder):
    lengths, budgets = results.values_of("needle", "needle_tokens"), results.values_of("needle", "budget")
    if not lengths:
        return
    summary = results.select("needle", "summary_bytes")
    figure, panels = plt.subplots(len(lengths), 1, figsize=(10, 3.6 * len(lengths)), squeeze=False)
    for panel, length in zip(panels[:, 0], lengths):
        cases = list(results.select("needle", "loss_per_digit", needle_tokens=length))
        for i, budget in enumerate(budgets):
            loss = results.select("needle", "loss_per_digit", needle_tokens=length, budget=budget)
            found = results.select("needle", "facts_found", needle_tokens=length, budget=budget)
            for x, case in enumerate(cases):
                at = x + (i - (len(budgets) - 1) / 2) * 0.38
                panel.bar(at, loss[case], 0.35, color=colour(case), alpha=1.0 if i == 0 else 0.55)
                panel.annotate(f"{loss[case]:.2f}\n{int(found[case])}/8", (at, loss[case]), ha="center", va="bottom", fontsize=8)
        full = results.select("needle", "loss_per_digit", needle_tokens=length, budget=budgets[0]).get("full")
        if full is not None:
            panel.axhline(full, color=INK, linewidth=0.8, linestyle=":")
        names = [label(case) + (f"\n{int(summary[case])} B/page/head" if summary.get(case) else "") for case in cases]
        panel.set_xticks(range(len(cases)), names, fontsize=8)
        panel.set_ylabel("loss per digit (nats)")
        panel.set_ylim(0, 1.25 * max(panel.get_ylim()[1], 0.4))
        panel.set_title(f"Eight facts hidden in {length} tokens: which are still found?")
        panel.grid(axis="y", color=GRID)
        panel.set_axisbelow(True)
    shades = " and ".join(f"{'strong' if i == 0 else 'pale'} {budget}" for i, budget in enumerate(budgets))
    footnote(figure, results.run("needle"), f"budgets {shades} tokens; lower is better; n/8: facts found; B/page/head: bytes of the summary")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(folder / "needles.png")


def quality(results, folder):
    perplexity = results.select("quality", "perplexity")
    if len(perplexity) < 2:
        return
    low = results.select("quality", "perplexity_difference_low")
    high = results.select("quality", "perplexity_difference_high")
    mass, memory = results.select("quality", "mass_kept"), results.select("quality", "fast_tier_bytes")
    cases = [case for case in perplexity if case != "full"]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 0.55 * len(cases) + 1.6), sharey=True)
    rows = range(len(cases))
    for y, case in zip(rows, cases):
        left.plot([low[case], high[case]], [y, y], color=colour(case), linewidth=2)
        left.plot(perplexity[case] - perplexity["full"], y, "o", color=colour(case))
        middle.barh(y, 100 * mass[case], color=colour(case), height=0.6)
        middle.annotate(f"{100 * mass[case]:.1f} %", (100 * mass[case], y), va="center", ha="right", fontsize=8, color="white")
        right.barh(y, memory[case] / 1e6, color=colour(case), height=0.6)
        right.annotate(f" {memory[case] / 1e6:.1f}", (memory[case] / 1e6, y), va="center", fontsize=8)
    left.axvline(0, color=INK, linewidth=0.8, linestyle=":")
    left.set_yticks(rows, [label(case).replace("\n", " ") for case in cases])
    left.invert_yaxis()
    run = results.run("quality")
    left.set_title(f"Perplexity over full's {perplexity['full']:.1f}", fontsize=10)
    middle.set_title("Attention mass kept", fontsize=10)
    right.set_title(f"Fast-tier MB (full: {memory['full'] / 1e6:.0f})", fontsize=10)
    for panel in (left, middle, right):
        panel.grid(axis="x", color=GRID)
        panel.set_axisbelow(True)
    footnote(figure, run, f"prompt of {run['prompt']} tokens, then {run['steps']} teacher-forced, budget {run['budget']}")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(folder / "quality.png")


def speed(results, folder):
    rate = results.select("speed", "tokens_per_second")
    if not rate:
        return
    spread = results.select("speed", "spread")
    figure, panel = plt.subplots(figsize=(9, 0.45 * len(rate) + 1.3))
    for y, case in enumerate(rate):
        panel.barh(y, rate[case], color=colour(case), height=0.65)
        panel.annotate(f" {rate[case]:.0f}" + (" (unsteady)" if spread.get(case, 0) > 0.2 else ""), (rate[case], y), va="center", fontsize=9)
    panel.set_yticks(range(len(rate)), [label(case).replace("\n", " ") for case in rate])
    panel.invert_yaxis()
    run = results.run("speed")
    panel.set_title(f"Tokens per second at {run['prompt']} tokens, {run['threads']} threads")
    panel.grid(axis="x", color=GRID)
    panel.set_axisbelow(True)
    footnote(figure, run, f"budget {run['budget']} tokens; {'overlapped' if run['overlap'] else 'nothing overlapped'}")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(folder / "speed.png")


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: python plot.py RESULTS.jsonl FOLDER")
    results, folder = Results(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for picture in (needles, quality, speed):
        picture(results, folder)
    print("pictures: " + ", ".join(str(folder / name) for name in ("needles.png", "quality.png", "speed.png")
                                   if (folder / name).exists()))


if __name__ == "__main__":
    main()
