#!/usr/bin/env bash
# Longer sweeps than the tests': random steps, events and evictions against the oracle, damaged files.
# `bash tests/soak.sh [HOURS]`, half an hour by default; seeds go on where the tests' end, and are printed where something
# fails. Where FREEKV_PTXCPU names the sources of ptxcpu, random steps and events of device code as well, and its tests in
# other orders of lanes, warps, blocks and streams, every other time with a search for races.
source "$(dirname "$0")/../cmake/bootstrap.sh"
cd "$root"
[[ ${1:-0.5} =~ ^[0-9]*\.?[0-9]+$ ]] || die "usage: bash tests/soak.sh [HOURS], half an hour by default"
seconds=$(awk -v hours="${1:-0.5}" 'BEGIN { print int(hours * 3600) }')
bootstrap_packages g++ cmake ninja-build libcli11-dev nlohmann-json3-dev libeigen3-dev catch2
preset=host targets=(step_test events_test eviction_test fuzz_test)
if [[ -n ${FREEKV_PTXCPU:-} ]]; then
  preset=cuda targets+=(cuda_tests)
  bootstrap_packages libzstd-dev
  bootstrap_cuda nvcc
else
  bootstrap_cuda
fi
# The folder may be another script's, which builds no tests and few shapes.
cmake --preset $preset -DFREEKV_TESTS=ON "-DFREEKV_HEAD_DIMS=64;80;96;128;192;256" "-DFREEKV_ELEMENTS=float;half;bfloat16" \
  "-DFREEKV_DEVICE_ARCHITECTURES=80;90" -DFREEKV_BENCH_ARCHITECTURE=90 -DFREEKV_PTXCPU="${FREEKV_PTXCPU:-}" >build/configure-soak.log || { cat build/configure-soak.log >&2; die "Preset $preset could not be configured."; }
cmake --build --preset $preset -j "$jobs" --target "${targets[@]}" >&2
tests=build/$preset/tests
on_device() {  # TEST ARCHITECTURE ROUND
  local log=build/soak-device.log races=$(($3 % 2))
  [[ $1 != engine_tensor ]] || races=0  # all lanes write the same numbers of a query that key_subspace prepares
  if ! PTXCPU_SM=$2 PTXCPU_SEED=$3 PTXCPU_STREAMS=$3 PTXCPU_CHECK=1 PTXCPU_RACE=$races \
    FREEKV_SEED=$(($2 * 1000000 + $3 * 1000)) FREEKV_CASES=300 \
    LD_LIBRARY_PATH=$tests/cuda/ptxcpu/lib "$tests/cuda/cuda_$1_test" >"$log" 2>&1 ||
    grep -aqE 'ptxcpu (RACE|WARNING: __syncthreads)' "$log"; then
    cat "$log" >&2
    die "cuda_$1_test fails as sm_$2 in round $3."
  fi
  tail -1 "$log"
}
started=$SECONDS
for ((round = 1; SECONDS - started < seconds; ++round)); do
  say "Round $round, $((SECONDS - started)) of $seconds s"
  FREEKV_SEED=$((round * 100000)) FREEKV_CASES=2000 "$tests/property/step_test"
  FREEKV_SEED=$((round * 100000)) FREEKV_CASES=1000 "$tests/property/events_test"
  FREEKV_SEED=$((round * 100000)) FREEKV_CASES=1000 "$tests/property/eviction_test" >build/soak-eviction.log || { cat build/soak-eviction.log >&2; exit 1; }
  FREEKV_FUZZ_SEED=$((round * 1000000)) FREEKV_FUZZ_CASES=150000 "$tests/fuzz/fuzz_test"
  [[ $preset == cuda ]] || continue
  for architecture in 80 90; do
    for test in algorithms stages attend score order top_k step capture tables rows engine_tensor prefix scales engine; do on_device $test $architecture $round; done
  done
done
say "$((round - 1)) rounds in $((SECONDS - started)) s, nothing found"
