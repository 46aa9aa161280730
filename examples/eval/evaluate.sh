#!/usr/bin/env bash
# All methods on all tasks, cell by cell: bash examples/eval/evaluate.sh [--out FOLDER] [options of evaluate.py,
# which --help lists]. Installs what it needs and builds; says first how long it will take; what is done is kept, and a
# second run goes on from there. Results: FOLDER/table.md, FOLDER/LENGTH.png and FOLDER/cells/, FOLDER being
# build/evaluation; with --out docs/evaluation it goes on with the cells that the repository has. --model gemma3 fetches
# Gemma-3-270M, of which 3 layers of 18 retrieve, and essays that are long enough for 32K tokens: 8,192 tokens unless
# --lengths says otherwise, and docs/gemma are the repository's cells.
source "$(dirname "${BASH_SOURCE[0]}")/../../cmake/bootstrap.sh"
source "$root/examples/eval/build.sh"

evaluate=$root/examples/eval/evaluate.py
own_model="" out=$root/build/evaluation given=()
for ((i = 1; i <= $#; ++i)); do
  next=$((i + 1))
  case ${!i} in
    --model) own_model=${!next-} && ((++i)) && continue ;;
    --model=*) own_model=${!i#*=} && continue ;;
    --out) out=${!next-} ;;
    --out=*) out=${!i#*=} ;;
    --help | -h) bootstrap_packages python3 && exec python3 "$evaluate" --help ;;
    --) given+=("${@:i}") && break ;;
  esac
  given+=("${!i}")
done
bootstrap_packages g++ cmake ninja-build libcli11-dev nlohmann-json3-dev libeigen3-dev python3
bootstrap_cuda
bootstrap_llama_cpp
model=$own_model more=()
case $own_model in
  "") bootstrap_model && model=$MODEL ;;
  gemma3)
    bootstrap_gemma && model=$MODEL
    bootstrap_haystack
    essays=${HAYSTACK%.txt}
    split --number=l/3 --suffix-length=1 --numeric-suffixes=1 --additional-suffix=.txt "$HAYSTACK" "$essays-"
    more=(--lengths 8192 --texts "$root"/examples/eval/texts/{hacker-folklore,genesis}.txt "$essays"-{1,2,3}.txt)
    ;;
esac
build_compare "$model"

commit=$(git -C "$root" describe --always --dirty 2>/dev/null || echo unknown)
python3 "$evaluate" --commit "$commit" --program "$programs/freekv-compare" --out "$out" \
  --cache "$root/build/evaluation-cache" --model "$model" "${more[@]}" "${given[@]}"
bootstrap_python
python_packages matplotlib
"$VIRTUAL_ENV/bin/python" "$root/examples/eval/plot_evaluation.py" "$out"
