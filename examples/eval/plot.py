"""Pictures of the main job's results: python plot.py RESULTS.jsonl FOLDER."""

import json
import math
import sys
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

INK, QUIET, GRID = "#1f2430", "#6b7280", "#e5e7eb"
COLOURS = {"full": "#1f2430", "streaming_llm": "#9ca3af", "quest": "#c08a3e", "freekv_long_inputs": "#93c5fd", "freekv_calibrated_top_p": "#1d4e89", "quest_mean_softmax": "#92400e", "arkvale": "#a16207", "twilight": "#57534e", "infinigen": "#0891b2", "fasa": "#0c4a6e", "clusterkv": "#15803d", "magicpig": "#be123c", "mpcache": "#0d9488",
           "shadowkv": "#4f46e5", "think": "#b91c1c", "razor_attention": "#7c6f9f",
           "duo_attention": "#9f6f8f", "freekv": "#d97706", "freekv_chunk_means": "#5b8db8", "freekv_key_subspace": "#0f766e",
           "freekv_key_subspace_deficit": "#65a30d", "freekv_key_codes": "#be185d", "freekv_key_codes_deficit": "#7c3aed", "freekv_key_codes_sticky": "#db2777", "freekv_key_codes_missing": "#0369a1", "freekv_key_codes_units": "#e11d48", "freekv_key_codes_completed": "#a21caf", "freekv_key_codes_units_completed": "#6d28d9",
           "h2o": "#b45309", "tova": "#4d7c0f", "snapkv": "#0369a1", "dapq": "#0284c7", "epi_cache": "#0e7490", "raas": "#86198f",
           "pyramid_kv": "#9a3412", "lazy_eviction": "#3f6212", "hard_kv": "#1e3a8a", "defensive_kv": "#831843", "layer_defensive_kv": "#9f1239", "compress_kv": "#166534",
           "cake": "#713f12", "r_kv": "#134e4a", "arkv_origin": "#4c1d95", "arkv": "#5b21b6", "arkv_split": "#1d4ed8", "mikv": "#a3431f", "q_hitter": "#854d0e",
           "d2o": "#065f46", "exact_merge": "#9d174d", "hard_kv_merge": "#1e40af", "hard_kv_pairs": "#0e7490", "kv_merger": "#7e22ce", "razor_attention_compensated": "#6b21a8",
           "trim_kv": "#155e75", "given_worths": "#7f1d1d"}
LABELS = {"full": "full attention", "streaming_llm": "window alone\n(StreamingLLM)", "quest": "Quest\nmin-max", "quest_mean_softmax": "FreeKV's pooling\nalways corrected",
          "arkvale": "ArkVale\ncentroid and box", "twilight": "Twilight\nmin-max, then 4 bits",
          "infinigen": "InfiniGen\nsingle tokens", "fasa": "FASA\nrotary pairs", "clusterkv": "ClusterKV\nclusters of tokens", "magicpig": "MagicPIG\nsampled tokens", "mpcache": "MPCache\nthinned prompt", "shadowkv": "ShadowKV\nrebuilt keys", "think": "ThinK\nthinner keys",
          "razor_attention": "RazorAttention", "duo_attention": "DuoAttention",
          "freekv": "FreeKV as published\nmin-max", "freekv_long_inputs": "FreeKV, tau 0.8\nmin-max", "freekv_calibrated_top_p": "FreeKV\ncalibrated top-p", "freekv_chunk_means": "FreeKV\nchunk means",
          "freekv_key_subspace": "FreeKV\nkey subspace",
          "freekv_key_subspace, other text's basis": "FreeKV\nkey subspace,\nother text's basis",
          "freekv_key_subspace_deficit": "FreeKV\nkey subspace,\nmass deficit", "freekv_key_codes": "FreeKV\nkey codes",
          "freekv_key_codes, other text's codebooks": "FreeKV\nkey codes,\nother codebooks",
          "freekv_key_codes_deficit": "FreeKV\nkey codes,\nmass deficit",
          "freekv_key_codes_sticky": "FreeKV\nkey codes,\nmass deficit, sticky",
          "freekv_key_codes_units": "FreeKV\nkey codes, sticky,\nunits of 4",
          "freekv_key_codes_completed": "FreeKV\nkey codes, sticky,\ncompleted",
          "freekv_key_codes_units_completed": "FreeKV\nkey codes,\nunits of 4, completed", "h2o": "H2O\nevicts", "tova": "TOVA\nevicts",
          "snapkv": "SnapKV\nevicts", "dapq": "DapQ\nevicts", "epi_cache": "EpiCache\nevicts", "raas": "RaaS\nevicts", "pyramid_kv": "PyramidKV\nevicts", "lazy_eviction": "LazyEviction\nevicts",
          "hard_kv": "HARD-KV\nevicts", "defensive_kv": "DefensiveKV\nevicts", "layer_defensive_kv": "Layer-DefensiveKV\nevicts", "compress_kv": "CompressKV\nevicts", "cake": "CAKE\nevicts",
          "r_kv": "R-KV\nevicts", "arkv_origin": "ARKV's baseline\nevicts", "arkv": "ARKV\nevicts, fp8",
          "arkv_split": "ARKV, split\nevicts, fp8", "mikv": "MiKV\n4 bits", "q_hitter": "Q-Hitter\nevicts, 4 bits",
          "d2o": "D2O\nmerges", "exact_merge": "exact merging\nmerges", "hard_kv_merge": "HARD-KV\nmerges", "hard_kv_pairs": "HARD-KV\nmerges pairs",
          "kv_merger": "KVMerger\nmerges runs",
          "razor_attention_compensated": "RazorAttention,\ncompensated"}

plt.rcParams.update({"font.size": 10, "axes.edgecolor": QUIET, "axes.labelcolor": INK, "text.color": INK,
                     "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
                     "axes.titlelocation": "left", "axes.titleweight": "bold", "figure.dpi": 150})


def colour(case):
    """That of the variant whose name the case begins with, the longest such name."""
    known = [name for name in COLOURS if case.startswith(name)]
    return COLOURS[max(known, key=len)] if known else QUIET


def label(case):
    return LABELS.get(case, textwrap.fill(case.replace("_", " "), 16))


def line_of(case):
    return LABELS.get(case, case).replace("\n", " ")


def style(case):
    return {"color": colour(case), "linestyle": "--" if "other text" in case or case.endswith("off") else "-", "marker": "o", "markersize": 4, "label": line_of(case)}


class Results:
    def __init__(self, path):
        self.lines = [json.loads(line) for line in Path(path).read_text().splitlines()]

    def select(self, bench, metric, **where):
        """{case: value} of the lines that match, in the order of the file."""
        return {line["case"]: line["value"] for line in self.lines
                if line["bench"] == bench and line["metric"] == metric
                and all(line.get(key) == value for key, value in where.items())}

    def values_of(self, bench, key):
        return sorted({line[key] for line in self.lines if line["bench"] == bench and key in line})

    def cases(self, bench):
        return list(dict.fromkeys(line["case"] for line in self.lines if line["bench"] == bench))

    def run(self, bench):
        return next(line for line in self.lines if line["bench"] == bench)


def footnote(figure, run, note):
    """`run`: any line of what is shown."""
    figure.text(0.01, 0.005, f"{note}\n{run['model']}, {run['text']}; page {run['page']}, sink {run['sink']}, window {run['window']}, "
                f"{'' if math.isnan(run['tau']) else 'tau {:.2g}, '.format(run['tau'])}{run['route']}; "
                f"{run['machine']}, commit {run['commit']}", fontsize=7, color=QUIET, linespacing=1.5)


def needles(results, folder):
    budgets = results.values_of("needle", "budget")
    lengths = [length for length in results.values_of("needle", "needle_tokens")
               if all(results.select("needle", "loss_per_digit", needle_tokens=length, budget=budget) for budget in budgets)]
    if not lengths:
        return
    summary = results.select("needle", "summary_bytes")
    width = max(10, 1.3 * len(results.cases("needle")))
    figure, panels = plt.subplots(len(lengths), 1, figsize=(width, 3.6 * len(lengths)), squeeze=False)
    for panel, length in zip(panels[:, 0], lengths):
        cases = list(results.select("needle", "loss_per_digit", needle_tokens=length))
        for i, budget in enumerate(budgets):
            loss = results.select("needle", "loss_per_digit", needle_tokens=length, budget=budget)
            found = results.select("needle", "facts_found", needle_tokens=length, budget=budget)
            for x, case in enumerate(cases):
                if case not in loss:
                    continue
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


def panels_of(cases, columns, size):
    """A figure with a panel for each case, in rows of `columns`; the rest of the last row is left empty."""
    columns = min(columns, len(cases))
    rows = -(-len(cases) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(size[0] * columns + 1.2, size[1] * rows + 0.8), squeeze=False, layout="constrained")
    for panel in grid.flat[len(cases):]:
        panel.set_visible(False)
    figure.get_layout_engine().set(rect=(0, 0.55 / figure.get_figheight(), 1, 1 - 0.55 / figure.get_figheight()))
    return figure, list(grid.flat[:len(cases)])


def depths(results, folder):
    """Loss per digit by the fact's depth and the text's length, a panel a method."""
    lengths = results.values_of("needle_depth", "needle_tokens")
    budgets = [budget for budget in results.values_of("needle_depth", "budget")
               if len({line["needle_tokens"] for line in results.lines if line["bench"] == "needle_depth" and line["budget"] == budget}) == len(lengths)]
    if len(lengths) < 3 or not budgets:
        return
    budget, at_depth = budgets[0], results.values_of("needle_depth", "depth")
    cases = [case for case in results.cases("needle_depth") if any(
        line["case"] == case and line["bench"] == "needle_depth" and line["budget"] == budget for line in results.lines)]
    figure, panels = panels_of(cases, 5, (2.4, 2.9))
    for panel, case in zip(panels, cases):
        loss = {(line["depth"], line["needle_tokens"]): line["value"] for line in results.lines
                if line["bench"] == "needle_depth" and line["case"] == case and line["budget"] == budget}
        table = [[loss.get((depth, length), math.nan) for length in lengths] for depth in at_depth]
        image = panel.imshow(table, cmap="YlOrRd", vmin=0, vmax=3.5, aspect="auto")
        for y, row in enumerate(table):
            for x, value in enumerate(row):
                panel.text(x, y, f"{value:.1f}", ha="center", va="center", fontsize=7, color="white" if value > 2.2 else INK)
        panel.set_xticks(range(len(lengths)), lengths, fontsize=8)
        panel.set_yticks(range(len(at_depth)), [f"{100 * depth:.0f} %" for depth in at_depth], fontsize=7)
        panel.set_title(label(case), fontsize=8)
    figure.colorbar(image, ax=panels, shrink=0.8).set_label("loss per digit (nats)", fontsize=8)
    footnote(figure, results.run("needle_depth"), f"a fact's depth in the text (down) and the text's length (across), budget {budget} tokens; pale is better")
    figure.savefig(folder / "depths.png")


def heads(results, folder):
    """Attention mass kept by layer and KV head, a panel a method."""
    cases = [case for case in results.cases("layer") if case != "full"]
    if not cases:
        return
    figure, panels = panels_of(cases, 9, (1.35, 4.2))
    for panel, case in zip(panels, cases):
        rows = {line["layer"]: line["by_head"] for line in results.lines if line["bench"] == "layer" and line["case"] == case}
        heads_of = len(next(iter(rows.values())))
        by_layer = [rows.get(layer, [math.nan] * heads_of) for layer in range(min(rows), max(rows) + 1)]  # NaN: one that slides
        image = panel.imshow(by_layer, cmap="RdYlGn", vmin=0.5, vmax=1, aspect="auto",
                             extent=(-0.5, heads_of - 0.5, max(rows) + 0.5, min(rows) - 0.5))
        panel.set_xticks(range(heads_of))
        panel.tick_params(labelsize=7)
        panel.set_title(label(case), fontsize=7)
    panels[0].set_ylabel("layer")
    figure.colorbar(image, ax=panels, shrink=0.8).set_label("mass kept", fontsize=8)
    run = results.run("layer")
    footnote(figure, run, f"share of full attention's softmax mass on what is attended, by layer (down) and KV head (across); "
             f"{run['steps']} tokens after {run['prompt']}, budget {run['budget']} tokens")
    figure.savefig(folder / "heads.png")


def queries(results, folder):
    """Cosines of successive steps' queries: by layer and query head, and by how far apart the steps are."""
    adjacent = [line for line in results.lines if line["bench"] == "query_cosine"]
    if not adjacent:
        return
    figure, (cells, apart, steps) = plt.subplots(1, 3, figsize=(13.2, 4.6), width_ratios=(1, 1.3, 1.6), constrained_layout=True)
    figure.get_layout_engine().set(rect=(0, 0.09, 1, 0.91))
    image = cells.imshow([line["by_head"] for line in adjacent], cmap="viridis", vmin=0.5, vmax=1, aspect="auto")
    cells.set_xlabel("query head")
    cells.set_ylabel("layer")
    figure.colorbar(image, ax=cells).set_label("cosine of adjacent steps' queries", fontsize=8)
    for layer in sorted({line["layer"] for line in adjacent}):
        points = sorted((line["apart"], line["value"]) for line in results.lines
                        if line["bench"] == "query_cosine_apart" and line["layer"] == layer)
        apart.plot(*zip(*points), color=plt.get_cmap("plasma")(layer / len(adjacent)), linewidth=1)
    apart.set_xscale("log", base=2)
    apart.axhline(0.84, color=QUIET, linestyle=":", linewidth=1)
    distances = sorted({line["apart"] for line in results.lines if line["bench"] == "query_cosine_apart"})
    apart.set_xticks(distances, [str(distance) for distance in distances])
    apart.set_xlabel("steps apart (dark: first layers; dotted: 0.84)")
    apart.set_ylabel("cosine, mean over heads and steps")
    shades = {"least": "#0f766e", "middle": "#d97706", "most": "#be185d"}
    for line in results.lines:
        if line["bench"] == "query_cosine_steps" and line["metric"] in shades:
            steps.plot(range(1, len(line["by_step"]) + 1), line["by_step"], color=shades[line["metric"]], linewidth=0.9,
                       label=f"{line['metric']} mean: layer {line['layer']}, KV head {line['head']}")
    steps.axhline(results.run("query_cosine")["tau"], color=QUIET, linestyle=":", linewidth=1)
    steps.set_xlabel("step (dotted: tau)")
    steps.set_ylabel("cosine, mean of a KV head's query heads")
    steps.set_ylim(bottom=steps.get_ylim()[0] - 0.1)
    steps.legend(fontsize=7, frameon=False, loc="lower right")
    run = results.run("query_cosine")
    footnote(figure, dict(run, tau=math.nan, route="full attention"), f"rotated queries; mean over {run['steps']} steps after {run['prompt']} tokens")
    figure.savefig(folder / "queries.png")


def lines_picture(results, folder, name, bench, key, panels, note, skip=()):
    """`panels`: (metric, factor, title), each over `key`, a line a case."""
    cases = [case for case in results.cases(bench) if case not in skip]
    if not cases or len(results.values_of(bench, key)) < 2:
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(5.4 * len(panels), 4.6))
    for axis, (metric, factor, title) in zip(axes, panels):
        for case in cases:
            points = [(line[key], factor * line["value"]) for line in results.lines
                      if (line["bench"], line["metric"], line["case"]) == (bench, metric, case)]
            if points:
                axis.plot(*zip(*points), **style(case))
            bounds = [(line[key], factor * line["low"], factor * line["high"]) for line in results.lines
                      if (line["bench"], line["metric"], line["case"]) == (bench, metric, case) and "low" in line]
            if bounds:
                axis.fill_between(*zip(*bounds), color=colour(case), alpha=0.12, linewidth=0)
        ticks = results.values_of(bench, key)
        axis.set_xscale("log")
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.set_title(title, fontsize=10)
        axis.grid(color=GRID)
    handles = {text: handle for axis in axes for handle, text in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="lower center", bbox_to_anchor=(0.5, 0.07), ncols=3, fontsize=8, frameon=False)
    run = results.run(bench)
    footnote(figure, {**run, "tau": math.nan} if key == "tau" else run, note(run))
    figure.tight_layout(rect=(0, 0.08 + 0.045 * -(-len(handles) // 3), 1, 1))
    figure.savefig(folder / f"{name}.png")


def on_texts(run):
    return (f"{run['steps']} tokens, teacher-forced, after {run['prompt']}, of each of {run.get('texts', 1)} texts; "
            "bands: 95 % by a block bootstrap")


def budgets(results, folder):
    lines_picture(results, folder, "budgets", "budget", "budget",
                  [("kl", 1e3, "KL from full attention (1/1000 nat) by budget (tokens)"), ("mass_kept", 100, "Attention mass kept (%) by budget (tokens)")],
                  on_texts, skip=("full",))


def thresholds(results, folder):
    lines_picture(results, folder, "thresholds", "tau_kl", "tau",
                  [("kl", 1e3, "KL from full attention (1/1000 nat) by tau"), ("slices_critical", 1, "Slices recalled before attention, a step, by tau")],
                  on_texts)


def lengths(results, folder):
    lines_picture(results, folder, "lengths", "length", "length",
                  [("tokens_per_second", 1, "Tokens per second by context (tokens)"), ("attention_seconds", 1e3, "Attention, ms per token, by context (tokens)")],
                  lambda run: f"budget {run['budget']} tokens, {run['threads']} threads; attention: with the selection for the next step, "
                              f"{'overlapped' if run['overlap'] else 'which nothing overlaps'}")


def corrections(results, folder):
    """Corrections and pages changed by layer, a line a threshold, a row a method."""
    cases, taus = results.cases("tau"), results.values_of("tau", "tau")
    if not cases:
        return
    figure, rows = plt.subplots(len(cases), 2, figsize=(10, 2.3 * len(cases) + 1), sharex=True, squeeze=False)
    shades = plt.get_cmap("viridis_r")
    for row, case in zip(rows, cases):
        for panel, (metric, factor, title) in zip(row, (("corrected", 100, "heads corrected (%)"), ("pages_changed", 1, "pages changed a step"))):
            for i, tau in enumerate(taus):
                points = [(line["layer"], factor * line["value"]) for line in results.lines
                          if (line["bench"], line["metric"], line["case"], line["tau"] if "tau" in line else None) == ("tau", metric, case, tau)]
                panel.plot(*zip(*points), color=shades(0.15 + 0.8 * i / max(1, len(taus) - 1)), label=f"tau {tau:.3g}", linewidth=1.5)
            panel.set_title(f"{line_of(case)}: {title}", fontsize=9)
            panel.set_ylim(bottom=0)
            panel.grid(color=GRID)
    for panel in rows[-1]:
        panel.set_xlabel("layer")
    rows[0][1].legend(fontsize=8, frameon=False, ncols=2)
    run = results.run("tau")
    footnote(figure, {**run, "tau": math.nan}, f"a KV head's pages attended as selected that were not in the step before; {run['steps']} tokens after "
             f"{run['prompt']}, budget {run['budget']} tokens")
    figure.tight_layout(rect=(0, 0.45 / figure.get_figheight(), 1, 1))
    figure.savefig(folder / "corrections.png")


def quality(results, folder):
    perplexity = results.select("quality", "perplexity")
    if len(perplexity) < 2:
        return
    low = results.select("quality", "perplexity_difference_low")
    high = results.select("quality", "perplexity_difference_high")
    mass, memory = results.select("quality", "mass_kept"), results.select("quality", "fast_tier_bytes")
    cases = [case for case in perplexity if case != "full"]
    divergence = results.select("quality", "divergence")  # results from before it was measured have none
    panels = 4 if divergence else 3
    figure, (*first, left, middle, right) = plt.subplots(1, panels, figsize=(2.6 * panels + 3.2, 0.55 * len(cases) + 1.6), sharey=True)
    rows = range(len(cases))
    for y, case in zip(rows, cases):
        if None not in (low[case], high[case]):
            left.plot([low[case], high[case]], [y, y], color=colour(case), linewidth=2)
        left.plot(perplexity[case] - perplexity["full"], y, "o", color=colour(case))
        middle.barh(y, 100 * mass[case], color=colour(case), height=0.6)
        middle.annotate(f"{100 * mass[case]:.1f} %", (100 * mass[case], y), va="center", ha="right", fontsize=8, color="white")
        right.barh(y, memory[case] / 1e6, color=colour(case), height=0.6)
        right.annotate(f" {memory[case] / 1e6:.1f}", (memory[case] / 1e6, y), va="center", fontsize=8)
    for panel in first:
        least, most = results.select("quality", "divergence_low"), results.select("quality", "divergence_high")
        for y, case in zip(rows, cases):
            if None not in (least[case], most[case]):  # which one step has none of
                panel.plot([1000 * least[case], 1000 * most[case]], [y, y], color=colour(case), linewidth=2)
            panel.plot(1000 * divergence[case], y, "o", color=colour(case))
        panel.set_xlim(left=0)
        panel.set_title("KL from full, 1/1000 nat", fontsize=10)
    left.axvline(0, color=INK, linewidth=0.8, linestyle=":")
    left.set_yticks(rows, [line_of(case) for case in cases])
    left.invert_yaxis()
    run = results.run("quality")
    left.set_title(f"Perplexity over full's {perplexity['full']:.1f}", fontsize=10)
    middle.set_title("Attention mass kept", fontsize=10)
    right.set_title(f"Fast-tier MB (full: {memory['full'] / 1e6:.0f})", fontsize=10)
    for panel in (*first, left, middle, right):
        panel.grid(axis="x", color=GRID)
        panel.set_axisbelow(True)
    footnote(figure, run, f"prompt of {run['prompt']} tokens, then {run['steps']} teacher-forced, budget {run['budget']}")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(folder / "quality.png")


def finish_bars(figure, panel, cases, run, title, note):
    """Of a picture with a bar a case, from the top."""
    panel.set_yticks(range(len(cases)), [line_of(case) for case in cases])
    panel.invert_yaxis()
    panel.set_title(f"{title} at {run['prompt']} tokens, {run['threads']} threads")
    panel.grid(axis="x", color=GRID)
    panel.set_axisbelow(True)
    footnote(figure, run, f"budget {run['budget']} tokens; {note}")
    figure.tight_layout(rect=(0, 0.06, 1, 1))


def speed(results, folder):
    rate = results.select("speed", "tokens_per_second")
    if not rate:
        return
    spread = results.select("speed", "spread")
    figure, panel = plt.subplots(figsize=(9, 0.45 * len(rate) + 1.3))
    for y, case in enumerate(rate):
        panel.barh(y, rate[case], color=colour(case), height=0.65)
        panel.annotate(f" {rate[case]:.0f}" + (" (unsteady)" if spread.get(case, 0) > 0.2 else ""), (rate[case], y), va="center", fontsize=9)
    run = results.run("speed")
    finish_bars(figure, panel, rate, run, "Tokens per second", "overlapped" if run["overlap"] else "nothing overlapped")
    figure.savefig(folder / "speed.png")


def stages(results, folder):
    """What each stage of a decode step takes, all layers together."""
    cases = results.cases("stage")
    if not cases:
        return
    parts = {"append": ("append, and drift", "#9ca3af"), "correct": ("correct", "#be185d"), "attend": ("attend", "#0f766e"),
             "speculate": ("select and recall for the next step", "#fcd34d")}
    figure, panel = plt.subplots(figsize=(9, 0.45 * len(cases) + 1.6))
    ends = dict.fromkeys(cases, 0.0)
    for stage, (label, shade) in parts.items():
        taken = results.select("stage", stage)
        panel.barh(range(len(cases)), [1e3 * taken[case] for case in cases], left=[ends[case] for case in cases], color=shade,
                   height=0.65, label=label)
        ends = {case: ends[case] + 1e3 * taken[case] for case in cases}
    panel.legend(fontsize=8, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.4, -0.08))
    finish_bars(figure, panel, cases, results.run("stage"), "Milliseconds of a token", "each stage alone")
    figure.savefig(folder / "stages.png")


FAMILIES = {"min_max": ("#d97706", "o"), "mean": ("#9ca3af", "s"), "centroid_box": ("#a16207", "D"), "ball": ("#9f6f8f", "P"),
            "chunk_means": ("#5b8db8", "^"), "key_sketch": ("#65a30d", "v"), "key_subspace": ("#0f766e", "o"), "key_codes": ("#be185d", "*"),
            "coarse_to_fine": ("#57534e", "X"), "always": (INK, "s"), "never": ("#9ca3af", "s"), "cosine_drift, mean": ("#d97706", "o"), "cosine_drift, min": ("#a16207", "v"),
            "cosine_drift, max": ("#9f6f8f", "^"), "every_n_steps": ("#5b8db8", "D"), "mass_deficit": ("#65a30d", "o"),
            "mass_deficit, partial": ("#0f766e", "*"), "sticky_top_k, mass_deficit, partial": ("#db2777", "X")}


def points_of(results, bench, x, y, **where):
    """{case: (x, y, line)} of the cases that have both metrics; `where` is for y."""
    at = results.select(bench, x)
    return {line["case"]: (at[line["case"]], line["value"], line) for line in results.lines
            if line["bench"] == bench and line["metric"] == y and line["case"] in at and line["value"] is not None
            and all(line.get(key) == value for key, value in where.items())}


def front_of(points, sign):
    """Cases than which none has as little x and as good a y: little if `sign` is 1, much if it is -1."""
    front, best = [], math.inf
    for case, (_, y, _) in sorted(points.items(), key=lambda point: (point[1][0], sign * point[1][1])):
        if sign * y < best:
            front.append(case)
            best = sign * y
    return front


def frontier_panel(panel, points, sign, factor=1):
    """A marker a case, a line a series, and the front with the names of what is on it."""
    for series in dict.fromkeys(line["series"] for _, _, line in points.values()):
        of_series = sorted((x, factor * y) for x, y, line in points.values() if line["series"] == series)
        family = next(line["family"] for _, _, line in points.values() if line["series"] == series)
        tone, marker = FAMILIES.get(family, (QUIET, "o"))
        panel.plot(*zip(*of_series), color=tone, marker=marker, markersize=5, linewidth=1, alpha=0.9, label=family.replace("_", " "))
    front = front_of(points, sign)
    corners = [(points[case][0], factor * points[case][1]) for case in front]
    panel.step(*zip(*corners), where="post", color=INK, linewidth=5, alpha=0.12, label="best for its price", zorder=0)
    for case, corner in zip(front, corners):
        name = case.removeprefix(points[case][2]["family"]).strip(", ") or case  # the legend has the family
        panel.annotate(name, corner, xytext=(3, -3 if sign > 0 else 3), textcoords="offset points",
                       va="top" if sign > 0 else "bottom", fontsize=6, color=QUIET)
    panel.grid(color=GRID)
    panel.set_axisbelow(True)


def level(panel, value, text, linestyle, x=1.0):
    panel.axhline(value, color=INK, linewidth=0.9, linestyle=linestyle)
    panel.annotate(text, (x, value), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=7)


def save_frontier(figure, axes, folder, name, run, note):
    handles = {text: handle for axis in axes for handle, text in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="lower center", bbox_to_anchor=(0.5, 0.07), ncols=5, fontsize=8, frameon=False)
    footnote(figure, {**run, "tau": math.nan}, note)
    figure.tight_layout(rect=(0, 0.09 + 0.045 * -(-len(handles) // 5), 1, 1))
    figure.savefig(folder / f"{name}.png")


def summary_frontier(results, folder):
    """Summaries by their bytes: loss of hidden facts, recall of the true pages, mass kept."""
    bench = "summary_frontier"
    lengths = results.values_of(bench, "needle_tokens")
    if not points_of(results, bench, "summary_bytes", "recall"):
        return
    panels = [("loss_per_digit", {"needle_tokens": length}, 1, 1, f"Loss per digit (nats), facts in {length} tokens") for length in lengths]
    panels += [("recall", {}, -1, 100, "Pages of most true mass found (%)"), ("mass_kept", {}, -1, 100, "Attention mass kept (%)")]
    figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 5.4))
    for panel, (metric, where, sign, factor, title) in zip(axes, panels):
        frontier_panel(panel, points_of(results, bench, "summary_bytes", metric, **where), sign, factor)
        limits = results.select(bench, metric, **where)
        if metric == "loss_per_digit" and "full" in limits:
            level(panel, limits["full"], "full attention", ":")
        if metric != "recall" and "true page mass" in limits:
            level(panel, factor * limits["true page mass"], "true page mass", "--", 0.8)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:.0f}")
        panel.set_xlabel("bytes a page and head")
        panel.set_title(title, fontsize=10)
    run = next(line for line in results.lines if line["bench"] == bench and line["metric"] == "recall")
    save_frontier(figure, axes, folder, bench, run, f"selected anew before each attention, budget {run['budget']} tokens; a line joins the formats of one "
                  f"summary; true page mass: the pages with the most of it, from the keys themselves; pages and mass: after {run['prompt']} tokens of running text")


def correction_frontier(results, folder):
    """Triggers of correction by the pages that attention waits for: loss of hidden facts, output error."""
    bench = "correction_frontier"
    if not points_of(results, bench, "pages_critical", "attention_error"):
        return
    run = next(line for line in results.lines if line["bench"] == bench and line["metric"] == "attention_error")
    length = results.values_of(bench, "needle_tokens")[0]
    panels = [("loss_per_digit", f"Loss per digit (nats), facts in {length} tokens"), ("attention_error", "Output error (relative L2)")]
    figure, axes = plt.subplots(1, 2, figsize=(11.5, 5.4))
    for panel, (metric, title) in zip(axes, panels):
        frontier_panel(panel, points_of(results, bench, "pages_critical", metric), 1)
        panel.set_xlabel("pages that attention waits for, a head and step")
        panel.set_title(title, fontsize=10)
    full = results.select("summary_frontier", "loss_per_digit", needle_tokens=length).get("full")
    if full is not None:
        level(axes[0], full, "full attention", ":")
    save_frontier(figure, axes, folder, bench, run, f"{run['summary'].replace('_', ' ')}, budget {run['budget']} tokens; pages and error: {run['steps']} tokens, "
                  f"teacher-forced, after {run['prompt']}; a line joins the thresholds of one trigger")


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: python plot.py RESULTS.jsonl FOLDER")
    if not Path(sys.argv[1]).is_file():
        sys.exit(f"plot.py: {sys.argv[1]} is no file; give the results.jsonl of a run")
    results, folder = Results(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    pictures = (needles, quality, speed, depths, budgets, heads, queries, corrections, thresholds, lengths, stages, summary_frontier, correction_frontier)
    files = [folder / f"{picture.__name__}.png" for picture in pictures]
    for picture, file in zip(pictures, files):
        file.unlink(missing_ok=True)  # of other results
        picture(results, folder)
    print("pictures: " + ", ".join(str(file) for file in files if file.exists()))


if __name__ == "__main__":
    main()
