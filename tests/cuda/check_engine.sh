#!/usr/bin/env bash
# check_engine.sh PROGRAM OUT: counts, with an interpreter of PTX, what the host asks of the runtime while the example engine
# serves requests by captured steps, prefills, forks and takes rows back: it waits for nothing. Then with a batch that stays: it
# launches nothing but graphs, one a step, of two variants. PROGRAM is freekv-engine; OUT is a folder.
set -euo pipefail
program=$1 out=$2
mkdir -p "$out"
failed=0
fail() { echo "FAILED $1: $totals"; failed=1; }
number() { grep -o "\"$1\":[0-9]*" <<< "$totals" | head -n 1 | cut -d: -f2; }
# count NAME OPTION...: the totals of what is queued from the first replay to the last.
count() {
  name=$1; shift
  PTXCPU_PROFILE_RANGE=1 PTXCPU_PROFILE=$out/$name.prof "$program" --report-every 0 "$@" > "$out/$name.json"
  totals=$(tail -n 1 "$out/$name.prof")
  [[ $totals == *'"host":{}'* ]] || fail "the host waits for the device"
  [[ $totals != *synchronisations* ]] || fail "the host waits for a stream"
}
happened() { grep -Eq "\"$1\":[1-9]" "$out/$name.json" || { totals=$(cat "$out/$name.json"); fail "nothing has $1"; }; }

count served --steps 60 --draft 2 --output 40
for what in joined left forked truncated prefill_steps; do happened $what; done
count context --steps 10 --context 64
[[ $(grep -o '"graph_launches":10' <<< "$totals" | wc -l) -eq 2 ]] || fail "there are other launches than one a step"
[[ $(number launches) -eq $(number graph_kernels) ]] || fail "kernels are launched beside the graphs"
exit $failed
