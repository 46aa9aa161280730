#!/usr/bin/env bash
# The host backend's speed, as ratios to limits and peers measured in the same run: a table, JSON lines and a picture in
# build/bench. `bash bench/run.sh [OPTION...]`; options go to freekv-bench-host, such as --smoke, --part step,
# --threads 1,2, --case 32K. Takes some minutes on 2 cores; other work on them spoils the figures.
#
# `bash bench/run.sh --device` measures the CUDA backend instead, on the first GPU: a table, and JSON lines in
# build/bench/device.jsonl. Compiles for ten minutes on 2 cores, and measures for two.
source "$(dirname "${BASH_SOURCE[0]}")/../cmake/bootstrap.sh"
cd "$root"
commit=$(git describe --always --dirty 2>/dev/null || echo unknown)

if [[ ${1:-} == --device ]]; then
  bootstrap_packages g++ cmake ninja-build libcli11-dev nlohmann-json3-dev libeigen3-dev python3
  bootstrap_cuda nvcc
  say "Building the benches"
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d .) || true
  [[ $capability =~ ^[0-9]+$ ]] || capability=90  # it says on standard output what it lacks, too
  architecture=$((capability < 90 ? 80 : 90))
  cmake --preset cuda -DFREEKV_TESTS=OFF -DFREEKV_HEAD_DIMS=128 -DFREEKV_ENGINE_HEAD_DIMS=128 -DFREEKV_DEVICE_ARCHITECTURES=$architecture \
    -DFREEKV_BENCH_ARCHITECTURE=$architecture \
    -DFREEKV_ENGINE_METHODS="streaming_llm;freekv_paper;full" >build/configure.log || { cat build/configure.log >&2; die "The benches could not be configured."; }
  cmake --build build/cuda --target freekv-bench-cuda-limits freekv-bench-cuda-step freekv-engine -j "$jobs" >&2
  mkdir -p build/bench
  exec python3 bench/cuda/measure.py build/cuda/bench/cuda/freekv-bench-cuda-{limits,step} build/cuda/examples/tools/engine/freekv-engine build/bench/device.jsonl "$commit"
fi

out=build/bench own=()
[[ " $* " == *" --text"* ]] || own=(--text examples/eval/texts/genesis.txt,examples/eval/texts/hacker-folklore.txt,examples/eval/texts/technical.txt)
previous=
for argument; do
  [[ $previous != --out ]] || out=$argument
  [[ $argument != --out=* ]] || out=${argument#--out=}
  previous=$argument
done
bootstrap_packages g++ cmake ninja-build libcli11-dev nlohmann-json3-dev libeigen3-dev
bootstrap_cuda
bootstrap_llama_cpp
bootstrap_model

say "Building the benches"
shapes=()  # of a folder that is new the fewest, as these benches have their own
[[ -f build/host/CMakeCache.txt ]] || shapes=(-DFREEKV_HEAD_DIMS=64 -DFREEKV_ELEMENTS=half)
cmake --preset host "${shapes[@]}" -DFREEKV_TESTS=OFF -DFREEKV_BENCH=ON -DFREEKV_LLAMA_CPP="$LLAMA_CPP" -DFREEKV_LLAMA_CPP_BUILD="$LLAMA_CPP_BUILD" \
  >build/configure.log || { cat build/configure.log >&2; die "The benches could not be configured."; }
cmake --build build/host --target freekv-bench-host -j "$jobs" >&2

build/host/bench/freekv-bench-host --out "$out" --commit "$commit" --model "$MODEL" "${own[@]}" "$@"
[[ " $* " != *" --help "* && " $* " != *" -h "* ]] || exit 0
bootstrap_python
python_packages matplotlib
"$VIRTUAL_ENV/bin/python" bench/plot.py "$out/host.jsonl" "$out"
