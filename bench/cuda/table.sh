#!/usr/bin/env bash
# table.sh STEP PTXCPU_PROFILE OUT RESOURCES [CASE..]: counts decode steps with an interpreter of PTX, and prints a table by kernel.
# STEP is step.cu's program, OUT a folder for the counts, RESOURCES what `ptxas -v` says of its PTX; a CASE is its arguments,
# "CONTEXT STEPS SIMILARITY BATCH SUMMARY LAYERS REPLAYS QUERY_HEADS KV_HEADS". What PTXCPU_PROFILE reads is what the interpreter
# has counted; nothing here is measured.
#
# Columns: launches of a step on a stream; bytes needed, which are distinct sectors of 32 bytes, and bytes moved, those of all
# requests; useful bytes over bytes moved; warp instructions over bytes needed; instructions of the longest warp; wavefronts of
# shared memory over the fewest possible; registers of a thread and shared memory of a block; what bounds it; and for each GPU an
# estimate in us beside its floor, bytes over 0.92 of the memory's peak, or the link's, and 1.2 us of a launch.
set -euo pipefail
step=$1 profile=$2 out=$3 resources=$4
shift 4
mkdir -p "$out"
if [ $# -eq 0 ]; then
  for heads in "32 8" "28 4"; do  # Llama-3.1-8B's, Qwen2.5-7B's
    for context in 32768 131072; do
      for batch in 1 4; do set -- "$@" "$context 2 0.95 $batch min_max 1 0 $heads"; done
    done
    for summary in key_subspace key_codes; do set -- "$@" "32768 2 0.95 1 $summary 1 0 $heads"; done
  done
fi
export PTXCPU_PROFILE_RANGE=1 PTXCPU_PROFILE_STREAMS=1
files=()
for case in "$@"; do
  file=$out/${case// /,}.prof
  # shellcheck disable=SC2086
  PTXCPU_PROFILE=$file "$step" $case > /dev/null
  for gpu in a100 h100 h200 l40s; do python3 "$profile" --json --resources "$resources" --gpu $gpu "$file" > "$file.$gpu"; done
  files+=("$file")
done
python3 - "${files[@]}" << 'PYTHON'
import json
import os
import sys

gpus = "a100", "h100", "h200", "l40s"


def lines(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def short(number):
    return f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number / 1e3:.1f}K" if number >= 1e3 else f"{number:.0f}"


columns = ["kernel, stream", "launches", "needed", "moved", "efficiency", "instructions a byte", "longest warp", "conflicts",
           "registers", "shared", "bound"]
for file in sys.argv[1:]:
    context, steps, _, batch, summary, _, _, query_heads, kv_heads = os.path.basename(file)[:-len(".prof")].split(",")
    print(f"\n### {int(context) // 1024}K, batch {batch}, {summary}, {query_heads} query heads of {kv_heads}\n")
    print("|", " | ".join(columns + list(gpus)), "|\n" + "|---" * (len(columns) + len(gpus)) + "|")
    counted = [kernel for kernel in lines(file) if kernel["type"] == "kernel"]
    for of, *by_gpu in zip(counted, *(lines(f"{file}.{gpu}") for gpu in gpus)):
        h100, n = by_gpu[1], of["launches"]
        needed = 32 * sum(count for kind, count in of["footprint"].items() if kind.endswith("_sectors"))
        moved = 32 * sum(kind["sectors"] for kind in of["global"].values())
        row = [f"{of['kernel']}, {list(of['streams'])[0]}", f"{n / int(steps):g}", short(needed / n), short(moved / n),
               f"{h100['sector_efficiency']:.2f}", f"{of['instructions'] / max(needed, 1):.2f}", str(of["longest_warp"]),
               f"{h100['conflicts']:.2f}" if h100["shared_ideal"] else "-", str(h100["registers"]),
               short(of["static_shared"] + of["dynamic_shared"]), h100["bound"]]
        row += [f"{k['time_us']:.1f}, {max(k['dram_us'], k['host_us']) + 1.2:.1f}" for k in by_gpu]
        print("|", " | ".join(row), "|")
PYTHON
