#!/usr/bin/env bash
# cmake/bootstrap.sh builds llama.cpp anew when what it was built with is not what is wanted, says why, and else does not:
# bootstrap_test.sh FOLDER. A stub stands for the build, and others for compilers of other processors.
set -euo pipefail
folder=$1
rm -rf "$folder" && mkdir -p "$folder/llama.cpp"
touch "$folder/llama.cpp/CMakeLists.txt"
export FREEKV_DEPS=$folder
source "$(dirname "$0")/../../cmake/bootstrap.sh"
bootstrap_packages() { :; }
builds=0
build_llama_cpp() {
  builds=$((builds + 1))
  mkdir -p "$LLAMA_CPP_BUILD"
  echo 95 >"$LLAMA_CPP_BUILD/seconds"
  [[ ${interrupted:-} ]] && return 1
  touch "$LLAMA_CPP_BUILD/built-$builds"
}

compiler_for() {  # NAME VERSION FLAG...: a compiler that knows two options
  local name=$1 version=$2
  shift 2
  printf '#!/bin/sh\nfor a; do [ "$a" = --version ] && { echo "%s"; exit; }; done\necho " /usr/lib/cc1plus -E %s -mtune=this" >&2\n' \
    "$version" "$*" >"$folder/$name"
  chmod +x "$folder/$name"
}
compiler_for zen4 "c++ 12.2.0" -march=znver3 -mavx2 -mavx512f -mno-amx-tile
compiler_for skylake "c++ 12.2.0" -march=skylake -mavx2 -mno-avx512f -mno-amx-tile
compiler_for newer "c++ 14.2.0" -march=znver3 -mavx2 -mavx512f -mno-amx-tile
export CC=$folder/zen4 CXX=$folder/zen4

expect() {  # BUILDS TEXT...: so many builds by now, and the last call said these
  local wanted=$1 text
  shift
  [[ $builds == "$wanted" ]] || { echo "$builds builds instead of $wanted: $(cat "$folder/said")"; exit 1; }
  for text in "$@"; do
    grep -qF -- "$text" "$folder/said" || { echo "\"$text\" is not in: $(cat "$folder/said")"; exit 1; }
  done
}
call() { bootstrap_llama_cpp 2>"$folder/said"; }

call
expect 1
[[ -f $LLAMA_CPP_BUILD/built-1 ]]
grep -qx "version: llama-cpp-python $llama_cpp_python" "$LLAMA_CPP_BUILD/complete"
grep -qx "compiler: c++ 12.2.0, c++ 12.2.0" "$LLAMA_CPP_BUILD/complete"
grep -q "^options: .*-DGGML_OPENMP=OFF" "$LLAMA_CPP_BUILD/complete"
grep -qx "march=native: -march=znver3 -mavx2 -mavx512f -mno-amx-tile" "$LLAMA_CPP_BUILD/complete"
[[ $(uname -m) != x86_64 ]] || grep -q "^options: .*-mno-amx-tile" "$LLAMA_CPP_BUILD/complete"
call
expect 1
[[ ! -s $folder/said ]]

: >"$LLAMA_CPP_BUILD/complete"  # as it was before it said with what
call
expect 2 "Building llama.cpp again: its build folder does not say with what it was built."
[[ ! -e $LLAMA_CPP_BUILD/built-1 ]]  # nothing of the old one is left
call
expect 2

CC=$folder/skylake CXX=$folder/skylake
call
expect 3 "it was built for another processor: -march=znver3 -mavx512f there, -march=skylake -mno-avx512f here."
call
expect 3
CC=$folder/newer CXX=$folder/newer
call
expect 4 'compiler was "c++ 12.2.0, c++ 12.2.0" and is now "c++ 14.2.0, c++ 14.2.0"'

sed -i 's/ -DGGML_OPENMP=OFF//' "$LLAMA_CPP_BUILD/complete"
call
expect 5 'options was "'
sed -i 's/^version: .*/version: llama-cpp-python 0.1.0/' "$LLAMA_CPP_BUILD/complete"
call
expect 6 'version was "llama-cpp-python 0.1.0" and is now "llama-cpp-python '

rm "$LLAMA_CPP_BUILD/complete"
call
expect 7 "does not say with what it was built"
rm -rf "$LLAMA_CPP_BUILD"
if (interrupted=yes; call); then echo "a build that failed goes unnoticed"; exit 1; fi
[[ ! -e $LLAMA_CPP_BUILD/complete ]]
touch "$LLAMA_CPP_BUILD/object"
call
expect 8
[[ -e $LLAMA_CPP_BUILD/object && -s $LLAMA_CPP_BUILD/complete && ! -s $folder/said ]]  # it went on
if (rm "$LLAMA_CPP_BUILD/complete"; CXX=$folder/zen4 CC=$folder/zen4 interrupted=yes; call); then exit 1; fi
call  # by yet another compiler than the one interrupted
expect 9 "compiler was"
[[ ! -e $LLAMA_CPP_BUILD/object ]]
echo "llama.cpp is built anew when it must be, and else not: $builds builds"
