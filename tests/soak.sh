#!/usr/bin/env bash
# Longer sweeps than the tests': random steps and events against the oracle, damaged files. `bash tests/soak.sh [HOURS]`,
# half an hour by default; seeds go on where the tests' end, and are printed where something fails.
source "$(dirname "$0")/../cmake/bootstrap.sh"
cd "$root"
seconds=$(awk -v hours="${1:-0.5}" 'BEGIN { print int(hours * 3600) }')
bootstrap_packages g++ cmake ninja-build libcli11-dev nlohmann-json3-dev libeigen3-dev catch2
bootstrap_cuda
cmake --preset host >build/configure-soak.log || { cat build/configure-soak.log >&2; die "Preset host could not be configured."; }
cmake --build --preset host -j "$jobs" --target step_test events_test fuzz_test >&2
started=$SECONDS
for ((round = 1; SECONDS - started < seconds; ++round)); do
  say "Round $round, $((SECONDS - started)) of $seconds s"
  FREEKV_SEED=$((round * 100000)) FREEKV_CASES=2000 build/host/tests/property/step_test
  FREEKV_SEED=$((round * 100000)) FREEKV_CASES=1000 build/host/tests/property/events_test
  FREEKV_FUZZ_SEED=$((round * 1000000)) FREEKV_FUZZ_CASES=150000 build/host/tests/fuzz/fuzz_test
done
say "$((round - 1)) rounds in $((SECONDS - started)) s, nothing found"
