#!/usr/bin/env python3
"""trace.py FILE..: of each file of trace.cpp, a table of kernels: launches, microseconds of one (median, and what a tenth are
below and above), and microseconds of all together. Kernels overlap, so their sum may be more than what the program took.
Needs c++filt."""
import collections
import re
import statistics
import subprocess
import sys


def short(name):
    """A kernel's name without namespaces and arguments, and the template argument that tells launches of it apart:
    `score_tiles, recall_now`, or `attend_parts, multiplies 1`."""
    first = re.search(r"<\((?:\w+::)*(\w+)\)(\d+)", name)
    kind = next((f", {word}" for word in ("recall_now", "pools_apart") if word in name), f", {first[1]} {first[2]}" if first else "")
    return re.sub(r"[<(].*", "", name).split("::")[-1].removeprefix("void ") + kind


def main():
    for path in sys.argv[1:]:
        times = collections.defaultdict(list)
        with open(path, encoding="utf-8") as file:
            named = subprocess.run(["c++filt"], stdin=file, capture_output=True, text=True, check=True).stdout
        for line in named.splitlines():
            name, _, begin, end = line.split("\t")
            times[short(name)].append((int(end) - int(begin)) / 1e3)
        print(f"| {path} | launches | median, us | 10 % | 90 % | sum, us |\n|---|---|---|---|---|---|")
        for name, us in sorted(times.items(), key=lambda item: -sum(item[1])):
            us.sort()
            print(f"| {name} | {len(us)} | {statistics.median(us):.1f} | {us[len(us) // 10]:.1f} | {us[len(us) * 9 // 10]:.1f} | "
                  f"{sum(us):.0f} |")
        print()


main()
