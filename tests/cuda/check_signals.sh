#!/usr/bin/env bash
# check_signals.sh ENGINE STEP LIMITS: a signal in the middle of freekv-engine and of the device's benches, which an interpreter of
# PTX runs, leaves a line that says where, and ends them as it would have.
set -euo pipefail
engine=$1 step=$2 limits=$3
failed=0
# says PATTERN COMMAND...: the last line on stderr, once the program has come to what PATTERN says.
says() {
  local pattern=$1 seconds running status line
  shift
  for seconds in 1 3 9 27; do
    "$@" >/dev/null 2>"$errors" &
    running=$!
    sleep $seconds
    kill -BUS $running 2>/dev/null || { echo "FAILED $*: it ended before the signal"; cat "$errors"; failed=1; return; }
    status=0
    wait $running || status=$?
    line=$(tail -n 1 "$errors")
    [[ $status -eq 135 && $line =~ ^$pattern$ ]] && return
  done
  echo "FAILED $*: exit status $status, '$line'"
  failed=1
}
errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
bus='bus error \(SIGBUS\) while'
says "freekv-engine: $bus decoding with streaming_llm: tiny, batch 8, up to 185 tokens" "$engine" --variant streaming_llm --steps 1000000
says "freekv-bench-cuda-step: $bus (computing a prompt|timing steps) with window: 4096 tokens, batch 1, layers 1" \
  "$step" 4096 20000 0.95 1 window
says "freekv-bench-cuda-limits: $bus reading and copying memory" "$limits" 1
exit $failed
