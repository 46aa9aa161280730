#!/usr/bin/env bash
# The main job: full attention, a sliding window and FreeKV's retrieval side by side, inside llama.cpp, for a real model
# on a real text. Installs what it needs, builds, runs, and shows a table and pictures. Options go to the program:
# `bash examples/run.sh --help` lists them; --model FILE.gguf and --text FILE take others than the defaults.
# Results: build/results/{table.txt,results.jsonl,*.png}.
source "$(dirname "$0")/../cmake/bootstrap.sh"
cd "$root"

bootstrap_packages g++ cmake ninja-build libcli11-dev nlohmann-json3-dev libeigen3-dev
bootstrap_cuda
bootstrap_llama_cpp
given=" $* "
if [[ $given == *" --model "* || $given == *" --model="* ]]; then MODEL=; else bootstrap_model; fi

say "Building FreeKV's examples"
cmake --preset host -DFREEKV_TESTS=OFF -DFREEKV_LLAMA_CPP="$LLAMA_CPP" -DFREEKV_LLAMA_CPP_BUILD="$LLAMA_CPP_BUILD" >build/configure.log ||
  { cat build/configure.log >&2; die "The examples could not be configured."; }
cmake --build --preset host --target freekv-compare -j "$jobs" >&2

results=build/results
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
build/host/examples/llama_cpp/freekv-compare ${MODEL:+--model "$MODEL"} --text examples/llama_cpp/texts/hacker-folklore.txt \
  --needle-text examples/llama_cpp/texts/genesis.txt --cache build/cache --out "$results" --commit "$commit" "$@"
[[ $given == *" --help "* || $given == *" -h "* ]] && exit

bootstrap_python
python_packages matplotlib
"$VIRTUAL_ENV/bin/python" examples/plot.py "$results/results.jsonl" "$results"
