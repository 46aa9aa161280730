#!/usr/bin/env bash
# check_replays.sh PROGRAM OUT: counts, with an interpreter of PTX, what the host asks of the runtime while it plans and launches
# four captured steps: nothing that waits, no event, no launch but the graph's. PROGRAM is capture_test.cu's; OUT is a folder.
set -euo pipefail
program=$1 out=$2
mkdir -p "$out"
FREEKV_COUNTED=1 PTXCPU_PROFILE_RANGE=1 PTXCPU_PROFILE=$out/replays.prof "$program"
totals=$(tail -n 1 "$out/replays.prof")
failed=0
# expect WORDS WHAT: that the totals have these words; not WORDS WHAT: that they do not.
expect() { [[ $totals == *"$1"* ]] || { echo "FAILED $2: $totals"; failed=1; }; }
expect_not() { [[ $totals != *"$1"* ]] || { echo "FAILED $2: $totals"; failed=1; }; }
number() { sed -n "s/.*\"$1\":\([0-9]*\).*/\1/p" <<< "$totals"; }
expect '"host":{}' "the host waits for the device"
expect_not synchronisations "the host waits for a stream"
expect '"graph_launches":4' "there are other replays than four"
expect_not queries "the host asks how far the device is"
expect_not event "events are recorded or waited for"
[[ $(number launches) -eq $(number graph_kernels) ]] || { echo "FAILED kernels are launched beside the graph"; failed=1; }
exit $failed
