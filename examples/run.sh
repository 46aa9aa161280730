#!/usr/bin/env bash
# The main job: full attention, a sliding window and FreeKV's retrieval side by side, inside llama.cpp, for a real model
# on a real text. Installs what it needs, builds, runs, and shows a table and pictures. Options go to the program
# freekv-compare (`bash examples/run.sh --help` lists them); --model FILE.gguf, --text FILE and --out FOLDER are the ones
# most wanted. Results: FOLDER/{table.txt,results.jsonl,*.png}, FOLDER being build/results.
source "$(dirname "${BASH_SOURCE[0]}")/../cmake/bootstrap.sh"

out=$root/build/results
own_model=
for ((i = 1; i <= $#; ++i)); do
  next=$((i + 1))
  case ${!i} in
    --out) out=${!next:-} ;;
    --out=*) out=${!i#--out=} ;;
    --model | --model=*) own_model=yes ;;
    --help | -h) help=yes ;;
  esac
done
program=$root/build/host/examples/llama_cpp/freekv-compare
if [[ ${help:-} ]]; then
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  if [[ -x $program ]]; then "$program" --help; else echo "The program's own options can be listed once it has been built."; fi
  exit
fi

bootstrap_packages g++ cmake ninja-build libcli11-dev nlohmann-json3-dev libeigen3-dev
bootstrap_cuda
bootstrap_llama_cpp
[[ $own_model ]] || bootstrap_model

say "Building FreeKV's examples"
cmake -S "$root" --preset host -DFREEKV_TESTS=OFF -DFREEKV_LLAMA_CPP="$LLAMA_CPP" -DFREEKV_LLAMA_CPP_BUILD="$LLAMA_CPP_BUILD" \
  >"$root/build/configure.log" || { cat "$root/build/configure.log" >&2; die "The examples could not be configured."; }
cmake --build "$root/build/host" --target freekv-compare -j "$jobs" >&2

texts=$root/examples/llama_cpp/texts
commit=$(git -C "$root" describe --always --dirty 2>/dev/null || echo unknown)
"$program" ${MODEL:+--model "$MODEL"} --text "$texts/hacker-folklore.txt" --needle-text "$texts/genesis.txt" \
  --calibration "$texts/technical.txt" ${MODEL:+--head-list "razor_attention=$root/examples/llama_cpp/smollm2-135m-heads.txt"} --cache "$root/build/cache" --out "$out" --commit "$commit" "$@"

bootstrap_python
python_packages matplotlib
"$VIRTUAL_ENV/bin/python" "$root/examples/plot.py" "$out/results.jsonl" "$out"
