"""Pictures of a bench's results: python plot.py host.jsonl FOLDER. Time of a decode step against context length."""

import json
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SERIES = {"full_attention": ("full attention, FreeKV's kernel", "#1f2430"),
          "llama_cpp_flash_attention": ("full attention, llama.cpp's", "#9ca3af"),
          "step": ("a FreeKV step, 2048 tokens", "#0f766e")}


def main(path, folder):
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    times = defaultdict(lambda: defaultdict(dict))  # threads -> metric -> {K tokens: seconds}
    for line in lines:
        if line["bench"] == "step" and line["unit"] == "s" and line["case"].startswith("Llama-3.1-8B, bf16") and line["case"].split(", ")[3] == "in_place":
            length = int(line["case"].split(", ")[2].rstrip("K"))
            times[line["threads"]][line["metric"]][length] = line["value"]
    if not times:
        return
    figure, axes = plt.subplots(1, len(times), figsize=(5.2 * len(times), 4), squeeze=False, sharey=True)
    for axis, (threads, series) in zip(axes[0], sorted(times.items())):
        for metric, (label, colour) in SERIES.items():
            points = sorted(series[metric].items())
            axis.plot([x for x, _ in points], [1e3 * y for _, y in points], marker="o", markersize=4, color=colour, label=label)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("context, thousand tokens")
        axis.set_title(f"{threads} thread{'s' if threads > 1 else ''}", loc="left")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("milliseconds a layer and step")
    axes[0][0].legend(frameon=False, fontsize=8)
    machine = lines[0]
    figure.suptitle(f"Llama-3.1-8B's shape, bf16, page 32, min_max, in place; {machine['machine']}, commit {machine['commit']}",
                    fontsize=9, x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(Path(folder) / "step-by-length.png", dpi=150)


if __name__ == "__main__":
    main(*sys.argv[1:])
