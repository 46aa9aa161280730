"""Pictures of an evaluation's cells: python plot_evaluation.py FOLDER, which evaluate.py has filled.

Of cells with other settings, as of another budget, those are drawn that are as the newest; how many steps the quality
is over may differ, as in the table. FOLDER/LENGTH.png has a row for each method: KL from full attention, and for each
task what is answered right, or the loss over full attention's where that answers fewer than 60 %, with intervals;
FOLDER/LENGTH-costs.png has KL, and facts where they were asked for, against bytes, with intervals and a line through
what nothing beats in both."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from matplotlib import ticker

import evaluate
import plot

WIDTH = 2.3  # of a panel


def settings_at(cell):
    """But for the steps; None of a cell that has not been run."""
    file = cell / "settings.json"
    if not file.exists():
        return None
    settings = json.loads(file.read_text())["settings"]
    settings.pop("steps", None)
    return settings


@dataclass
class Panel:
    kind: str
    title: str
    values: dict  # of a method: (value, low, high)
    of_full: float | None = None  # what full attention has
    logarithmic: bool = False
    more_is_better: bool = False


def panels_of(folder, length, settings):
    for kind in [evaluate.QUALITY, *evaluate.tasks.KINDS]:
        cell = folder / "cells" / f"{kind}-{length}"
        file = cell / "results.jsonl"
        if settings_at(cell) != settings:
            continue
        results = plot.Results(file)
        if kind == evaluate.QUALITY:
            kl, low, high = (results.select("quality", metric) for metric in
                             ("divergence", "divergence_low", "divergence_high"))
            yield Panel(kind, "KL from full, 1/1000 nat",
                        {case: tuple(1000 * of[case] for of in (kl, low, high)) for case in kl if case != "full"},
                        logarithmic=True)
            continue
        group = [line for line in results.lines if line["bench"] == "task_group"]
        right = {line["case"]: line for line in group if line["metric"] == "right"}
        if right["full"]["value"] >= 0.6:
            yield Panel(kind, f"{kind}: % right of {right['full']['n']}",
                        {case: tuple(100 * line[key] for key in ("value", "low", "high")) for case, line in right.items()
                         if case != "full"}, 100 * right["full"]["value"], more_is_better=True)
        else:
            loss = {line["case"]: line for line in group if line["metric"] == "loss_difference"}
            yield Panel(kind, f"{kind}: loss over full, nats",
                        {case: tuple(line["value"] if line[key] is None else line[key] for key in ("value", "low", "high"))
                         for case, line in loss.items() if case != "full"}, 0)


def name_numbers(logarithmic):
    """1, 2, 5, 10 and so on, of an axis."""
    logarithmic.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    logarithmic.set_major_formatter(ticker.FormatStrFormatter("%g"))
    logarithmic.set_minor_formatter(ticker.NullFormatter())


def picture(folder, length, settings):
    panels = list(panels_of(folder, length, settings))
    if not panels:
        return None
    present = {method for panel in panels for method in panel.values}
    methods = [method for method in evaluate.METHODS if method in present]
    methods += sorted(present - set(methods))
    figure, axes = plot.plt.subplots(1, len(panels), figsize=(2.6 + WIDTH * len(panels), 0.26 * len(methods) + 1.4),
                                     sharey=True, squeeze=False)
    for axis, panel in zip(axes[0], panels):
        for y, method in enumerate(methods):
            if method in panel.values:
                value, low, high = panel.values[method]
                axis.plot([low, high], [y, y], color=plot.colour(method), linewidth=2)
                axis.plot(value, y, "o", markersize=4, color=plot.colour(method))
        if panel.of_full is not None:
            axis.axvline(panel.of_full, color=plot.INK, linewidth=0.8, linestyle=":")
        if panel.logarithmic:
            axis.set_xscale("log")
            name_numbers(axis.xaxis)
        axis.set_title(panel.title, fontsize=9)
        axis.grid(axis="x", color=plot.GRID)
        axis.set_axisbelow(True)
    axes[0][0].set_yticks(range(len(methods)), methods, fontsize=8)
    axes[0][0].set_ylim(len(methods) - 0.5, -0.5)
    file = folder / f"{length}.png"
    figure.tight_layout()
    figure.savefig(file, bbox_inches="tight")
    plot.plt.close(figure)
    return file


def front(points):
    """Methods that no other beats in both coordinates, from the least of the first on."""
    best, kept = float("inf"), []
    for method, (cost, loss) in sorted(points.items(), key=lambda of: of[1]):
        if loss < best:
            best = loss
            kept.append(method)
    return kept


def name_points(axis, points, best):
    """Each name beside its point, or a little above where others are; those of the best, and of what others are compared
    with, first. A point without room has none."""
    first = [*best, "quest", "freekv", "streaming_llm"]
    taken, wide, high, most = [], 100, 9, 20  # pixels of a name, and how far it goes up
    for name, point in sorted(points.items(), key=lambda of: (of[0] not in first, of[1][1])):
        x, y = at = axis.transData.transform(point)
        while any(abs(x - a) < wide and abs(y - b) < high for a, b in taken):
            y += 1
        if y - at[1] > most:
            continue
        taken.append((x, y))
        axis.annotate(name, point, fontsize=5, xytext=(4, (y - at[1]) * 72 / axis.figure.dpi - 2),
                      textcoords="offset points", color=plot.INK)


def costs(folder, length, settings):
    """KL and facts against what a step waits for and against fast memory."""
    rows = [panel for panel in panels_of(folder, length, settings) if panel.kind in (evaluate.QUALITY, "needles")]
    if not rows or rows[0].kind != evaluate.QUALITY:
        return None
    results = plot.Results(folder / "cells" / f"{evaluate.QUALITY}-{length}" / "results.jsonl")
    of = {metric: results.select("quality", metric) for metric in
          ("slices_recalled", "slices_critical", "bytes_recalled", "fast_tier_bytes")}

    def waited_for(case):
        return evaluate.bytes_waited_for(*(of[metric][case] for metric in
                                           ("slices_recalled", "slices_critical", "bytes_recalled"))) / 1e6

    figure, axes = plot.plt.subplots(len(rows), 2, figsize=(11, 6.5 * len(rows)), sharex="col", sharey="row", squeeze=False)
    for panel, pair in zip(rows, axes):
        sign = -1 if panel.more_is_better else 1
        for axis, cost in zip(pair, (waited_for, lambda case: of["fast_tier_bytes"][case] / 1e6)):
            points = {case: (cost(case), value[0]) for case, value in panel.values.items() if case in of["fast_tier_bytes"]}
            best = front({case: (x, sign * y) for case, (x, y) in points.items()})
            axis.plot(*zip(*(points[case] for case in best)), color=plot.GRID, linewidth=2, zorder=0)
            for case, (x, y) in points.items():
                axis.plot([x, x], panel.values[case][1:], color=plot.colour(case), linewidth=0.7, alpha=0.5)
                axis.plot(x, y, "o", markersize=5, color=plot.colour(case))
            if panel.of_full is not None:
                axis.axhline(panel.of_full, color=plot.INK, linewidth=0.8, linestyle=":")
            if panel.logarithmic:
                axis.set_yscale("log")
                name_numbers(axis.yaxis)
            axis.grid(color=plot.GRID)
            axis.set_axisbelow(True)
            if cost is not waited_for:
                axis.set_xscale("log")
                name_numbers(axis.xaxis)
            name_points(axis, points, best)
        pair[0].set_ylabel(panel.title)
    axes[-1][0].set_xlabel("MB recalled before attention, a step")
    axes[-1][1].set_xlabel("fast MB, summaries included")
    file = folder / f"{length}-costs.png"
    figure.tight_layout()
    figure.savefig(file)
    plot.plt.close(figure)
    return file


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: python plot_evaluation.py FOLDER")
    folder = Path(sys.argv[1])
    if not (folder / "cells").is_dir():
        sys.exit(f"plot_evaluation.py: {folder} has no folder cells; give what evaluate.py wrote to, its --out")
    cells = [cell for cell in (folder / "cells").iterdir() if settings_at(cell)]
    newest = max(cells, key=lambda cell: (cell / "settings.json").stat().st_mtime, default=None)
    files = [file for length in evaluate.lengths_of(cells) for draw in (picture, costs)
             if (file := draw(folder, length, settings_at(newest)))]
    print("pictures: " + ", ".join(map(str, files)))


if __name__ == "__main__":
    main()
