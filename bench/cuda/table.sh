#!/usr/bin/env bash
# table.sh STEP PTXCPU_PROFILE OUT [CASE..]: counts decode steps with an interpreter of PTX, and prints a table of estimates by
# kernel and GPU, each beside its floor: bytes over 0.92 of the memory's peak, or the link's, and 1.2 us of a launch. STEP is
# step.cu's program, OUT a folder for the counts; a CASE is its arguments, "CONTEXT STEPS SIMILARITY BATCH SUMMARY". What
# PTXCPU_PROFILE reads is what the interpreter has counted; nothing here is measured.
set -euo pipefail
step=$1 profile=$2 out=$3
shift 3
mkdir -p "$out"
if [ $# -eq 0 ]; then
  set -- "16384 2 0.95 1 min_max" "16384 2 0.95 1 key_subspace" "16384 2 0.95 1 key_codes" "16384 2 0.95 4 min_max"
fi
export PTXCPU_PROFILE_RANGE=1 PTXCPU_PROFILE_STREAMS=1
files=()
for case in "$@"; do
  file=$out/${case// /_}.prof
  # shellcheck disable=SC2086
  PTXCPU_PROFILE=$file "$step" $case > /dev/null
  for gpu in a100 h100 h200 l40s; do python3 "$profile" --json --gpu $gpu "$file" > "$file.$gpu"; done
  files+=("$file")
done
python3 - "${files[@]}" << 'PYTHON'
import json
import os
import sys

gpus = "a100", "h100", "h200", "l40s"
print("| case | kernel | launches a step | bound by (H100) | sectors' efficiency | conflicts |",
      " | ".join(f"{gpu}, floor" for gpu in gpus), "|")
print("|---" * (6 + len(gpus)) + "|")
for file in sys.argv[1:]:
    case = os.path.basename(file)[:-len(".prof")].split("_", 4)
    steps = int(case[1])
    name = f"{int(case[0]) // 1024}K, batch {case[3]}, {case[4]}"
    of_gpu = [[json.loads(line) for line in open(f"{file}.{gpu}")] for gpu in gpus]
    for kernels in zip(*of_gpu):
        of = kernels[1]
        conflicts = f"{of['conflicts']:.2f}" if of["shared_ideal"] else "-"
        times = " | ".join(f"{k['time_us']:.1f}, {max(k['dram_us'], k['host_us']) + 1.2:.1f}" for k in kernels)
        print(f"| {name} | {of['kernel']}, {list(of['streams'])[0]} | {of['launches'] / steps:g} |",
              f"{of['bound']} | {of['sector_efficiency']:.2f} | {conflicts} | {times} |")
PYTHON
