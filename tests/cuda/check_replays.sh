#!/usr/bin/env bash
# check_replays.sh PROGRAM OUT: counts, with an interpreter of PTX, what the host asks of the runtime while it plans and launches
# four captured steps: nothing that waits, no event, no launch but the graph's; and while it changes sequences: nothing that
# waits, no copy, and few launches for all layers. PROGRAM is capture_test.cu's; OUT is a folder.
set -euo pipefail
program=$1 out=$2
mkdir -p "$out"
failed=0
# count WHAT: the totals of it; nothing of it waits.
count() {
  what=$1
  FREEKV_COUNTED=$what PTXCPU_PROFILE_RANGE=1 PTXCPU_PROFILE=$out/$what.prof "$program"
  totals=$(tail -n 1 "$out/$what.prof")
  expect '"host":{}' "the host waits for the device"
  expect_not synchronisations "the host waits for a stream"
  expect_not queries "the host asks how far the device is"
}
fail() { echo "FAILED $what: $1: $totals"; failed=1; }
expect() { [[ $totals == *"$1"* ]] || fail "$2"; }
expect_not() { [[ $totals != *"$1"* ]] || fail "$2"; }
number() { sed -n "s/.*\"$1\":\([0-9]*\).*/\1/p" <<< "$totals"; }

count replays
expect '"graph_launches":4' "there are other replays than four"
expect_not event "events are recorded or waited for"
[[ $(number launches) -eq $(number graph_kernels) ]] || fail "kernels are launched beside the graph"

# at_most WHAT LAUNCHES: an upload, and what it is in all layers.
at_most() {
  count "$1"
  expect_not '"copies":{"' "something is copied"
  [[ $(number launches) -le $2 ]] || fail "more than $2 launches"
}
at_most fork 3
at_most draft 0
at_most short_draft 0
at_most truncate 3
at_most preempt 2
at_most release 2
exit $failed
