#!/usr/bin/env bash
# The host backend's speed, as ratios to limits and peers measured in the same run: a table, JSON lines and a picture in
# build/bench. `bash bench/run.sh [OPTION...]`; options go to freekv-bench-host, such as --smoke, --part step,
# --threads 1,2, --case 32K. Takes some minutes on 2 cores; other work on them spoils the figures.
source "$(dirname "${BASH_SOURCE[0]}")/../cmake/bootstrap.sh"
cd "$root"

bootstrap_packages g++ cmake ninja-build libcli11-dev nlohmann-json3-dev libeigen3-dev
bootstrap_cuda
bootstrap_llama_cpp
bootstrap_model

say "Building the benches"
cmake --preset host -DFREEKV_TESTS=OFF -DFREEKV_BENCH=ON -DFREEKV_LLAMA_CPP="$LLAMA_CPP" -DFREEKV_LLAMA_CPP_BUILD="$LLAMA_CPP_BUILD" \
  >build/configure.log || { cat build/configure.log >&2; die "The benches could not be configured."; }
cmake --build build/host --target freekv-bench-host -j "$jobs" >&2

build/host/bench/freekv-bench-host --out build/bench --commit "$(git describe --always --dirty 2>/dev/null || echo unknown)" \
  --model "$MODEL" --text examples/eval/texts/genesis.txt,examples/eval/texts/hacker-folklore.txt,examples/eval/texts/technical.txt "$@"
bootstrap_python
python_packages matplotlib
"$VIRTUAL_ENV/bin/python" bench/plot.py build/bench/host.jsonl build/bench
