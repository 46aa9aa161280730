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
  cmake --preset cuda -DFREEKV_TESTS=OFF -DFREEKV_HEAD_DIMS=128 -DFREEKV_ENGINE_HEAD_DIMS=128 -DFREEKV_DEVICE_ARCHITECTURES=90 \
    -DFREEKV_ENGINE_METHODS="streaming_llm;freekv_paper;full" >build/configure.log || { cat build/configure.log >&2; die "The benches could not be configured."; }
  cmake --build build/cuda --target freekv-bench-cuda-limits freekv-bench-cuda-step freekv-engine -j "$jobs" >&2
  mkdir -p build/bench
  exec python3 bench/cuda/measure.py build/cuda/bench/cuda/freekv-bench-cuda-{limits,step} build/cuda/examples/tools/engine/freekv-engine build/bench/device.jsonl "$commit"
fi

bootstrap_packages g++ cmake ninja-build libcli11-dev nlohmann-json3-dev libeigen3-dev
bootstrap_cuda
bootstrap_llama_cpp
bootstrap_model

say "Building the benches"
cmake --preset host -DFREEKV_TESTS=OFF -DFREEKV_BENCH=ON -DFREEKV_LLAMA_CPP="$LLAMA_CPP" -DFREEKV_LLAMA_CPP_BUILD="$LLAMA_CPP_BUILD" \
  >build/configure.log || { cat build/configure.log >&2; die "The benches could not be configured."; }
cmake --build build/host --target freekv-bench-host -j "$jobs" >&2

build/host/bench/freekv-bench-host --out build/bench --commit "$commit" \
  --model "$MODEL" --text examples/eval/texts/genesis.txt,examples/eval/texts/hacker-folklore.txt,examples/eval/texts/technical.txt "$@"
bootstrap_python
python_packages matplotlib
"$VIRTUAL_ENV/bin/python" bench/plot.py build/bench/host.jsonl build/bench
