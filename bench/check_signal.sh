#!/usr/bin/env bash
# check_signal.sh PROGRAM FOLDER: a signal in the middle of freekv-bench-host leaves a line that says where, and the lines measured
# by then.
set -euo pipefail
program=$1 folder=$2
rm -rf "$folder" && mkdir -p "$folder"
again=1$(printf ',1%.0s' {1..20000})  # the same bench so many times
"$program" --smoke --part score --threads "$again" --out "$folder" >"$folder/out" 2>"$folder/err" &
running=$!
until [[ -s $folder/host.jsonl.part ]]; do
  kill -0 "$running" 2>/dev/null || { echo "ended before the signal"; cat "$folder/err"; exit 1; }
  sleep 0.1
done
kill -BUS "$running"
status=0
wait "$running" || status=$?
line=$(tail -n 1 "$folder/err")
pattern="^freekv-bench-host: bus error \(SIGBUS\) while measuring score, --threads 1(: score, .* % done)?; "
pattern+="what was measured by then is in '$folder/host.jsonl.part'$"
[[ $status -eq 135 && $line =~ $pattern && ! -e $folder/host.jsonl ]] || { echo "exit status $status, '$line'"; exit 1; }
head -n 1 "$folder/host.jsonl.part" | grep -q '"bench":"score"'
