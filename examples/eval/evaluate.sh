#!/usr/bin/env bash
# All methods on all tasks, cell by cell: bash examples/eval/evaluate.sh [--out FOLDER] [options of evaluate.py,
# which --help lists]. Installs what it needs and builds; says first how long it will take; what is done is kept, and a
# second run goes on from there. Results: FOLDER/table.md, FOLDER/LENGTH.png and FOLDER/cells/, FOLDER being
# build/evaluation; with --out docs/evaluation it goes on with the cells that the repository has.
source "$(dirname "${BASH_SOURCE[0]}")/../../cmake/bootstrap.sh"

evaluate=$root/examples/eval/evaluate.py
own_model=
for word in "$@"; do
  case $word in
    --help | -h) bootstrap_packages python3 && exec python3 "$evaluate" --help ;;
    --model | --model=*) own_model=yes ;;
  esac
done
bootstrap_packages g++ cmake ninja-build libcli11-dev nlohmann-json3-dev libeigen3-dev python3
bootstrap_cuda
bootstrap_llama_cpp
[[ $own_model ]] || bootstrap_model

say "Building FreeKV's examples"
cmake -S "$root" --preset host -DFREEKV_TESTS=OFF -DFREEKV_LLAMA_CPP="$LLAMA_CPP" -DFREEKV_LLAMA_CPP_BUILD="$LLAMA_CPP_BUILD" \
  >"$root/build/configure.log" || { cat "$root/build/configure.log" >&2; die "The examples could not be configured."; }
cmake --build "$root/build/host" --target freekv-compare -j "$jobs" >&2
commit=$(git -C "$root" describe --always --dirty 2>/dev/null || echo unknown)
out=$root/build/evaluation
for ((i = 1; i <= $#; ++i)); do
  case ${!i} in
    --) break ;;
    --out) next=$((i + 1)) && out=${!next-} ;;
    --out=*) out=${!i#*=} ;;
  esac
done
python3 "$evaluate" --commit "$commit" --program "$root/build/host/examples/eval/freekv-compare" --out "$out" \
  --cache "$root/build/evaluation-cache" ${MODEL:+--model "$MODEL"} "$@"
bootstrap_python
python_packages matplotlib
"$VIRTUAL_ENV/bin/python" "$root/examples/eval/plot_evaluation.py" "$out"
