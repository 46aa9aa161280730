#!/usr/bin/env bash
# The tests: installs what they need, builds with warnings as errors, runs them, first those of several threads under
# ThreadSanitizer, then under AddressSanitizer and UndefinedBehaviorSanitizer, then as released. No GPU is needed; what needs
# one is reported as skipped. Where FREEKV_PTXCPU names the sources of ptxcpu, an interpreter of PTX, device code runs on that.
[[ ${1:-} != --help ]] || { sed -n '2,/^[^#]/s/^# //p' "$0"; exit; }
source "$(dirname "$0")/../cmake/bootstrap.sh"
cd "$root"
started=$SECONDS

bootstrap_packages g++ cmake ninja-build git libcli11-dev nlohmann-json3-dev libeigen3-dev liburing-dev catch2
[[ -z ${FREEKV_PTXCPU:-} ]] || bootstrap_packages libzstd-dev  # which ptxcpu needs
bootstrap_cuda nvcc
bootstrap_other_cccl

configure() {  # PRESET CMAKE_OPTION...
  local preset=$1
  shift
  cmake --preset "$preset" -DFREEKV_PTXCPU="${FREEKV_PTXCPU:-}" "$@" >"build/configure-$preset.log" || { cat "build/configure-$preset.log" >&2; die "Preset $preset could not be configured."; }
}
passed=0 skipped=0
build_and_test() {  # NAME PRESET CMAKE_BUILD_OPTION... -- CTEST_OPTION...
  local name=$1 preset=$2 build=() began=$SECONDS built log=build/tested-$2.log here absent
  shift 2
  while [[ $1 != -- ]]; do build+=("$1"); shift; done
  shift
  say "Building $name ($((SECONDS - started)) s so far)"
  cmake --build --preset "$preset" -j "$jobs" "${build[@]}" >&2
  built=$SECONDS
  say "Testing $name, built in $((built - began)) s"
  ctest --preset "$preset" -j "$jobs" "$@" | tee "$log"
  here=$(grep -c '^ *[0-9]*/[0-9]* Test .* Passed ' "$log" || true)
  absent=$(grep -cE '^ *[0-9]*/[0-9]* Test .*\*\*\*(Skipped|Not Run)' "$log" || true)
  passed=$((passed + here)) skipped=$((skipped + absent))
  say "Tested $name in $((SECONDS - built)) s: $here passed, $absent skipped"
}
# What is long is taken in turns by the number of commits: even runs have functions and classes, odd ones the programs. Runs with
# FREEKV_ROUND=0 to 7 take all of it but shapes, orders and architectures, which are others in the next eight.
round=${FREEKV_ROUND:-$(git rev-list --count HEAD 2>/dev/null || echo 0)}
say "What is taken in turns: FREEKV_ROUND=$round"
head_dims=(80 128 96 192 256) elements=(float half bfloat16)
head_dim=${head_dims[round % 5]} element=${elements[round % 3]}  # beside all elements of head_dim 64
architecture=$(((round / 2 + round / 4) % 2 ? 90 : 80)) seed=$(((round + round / 4) % 4 + 1))
threads=()  # what has more than one
sanitized=(-DFREEKV_C_LIBRARY=OFF -DFREEKV_ELEMENTS="float;half;bfloat16")
released=(-DFREEKV_C_LIBRARY=OFF -DFREEKV_DEVICE_PIPELINES=OFF -DFREEKV_ENGINE_METHODS= -DFREEKV_LLAMA_CPP= -DFREEKV_BENCH=OFF)
case $((round % 4)) in
  0) threads=(backend_test file_store_test order_test)
     head_dim=128 element=bfloat16  # freekv-replay's other shape on devices
     released+=(-DFREEKV_DEVICE_PIPELINES=ON) ;;  # policies of a device that are chosen at run time
  1) sanitized+=(-DFREEKV_ELEMENTS="float;half") ;;
  2) threads=(events_test) sanitized+=(-DFREEKV_C_LIBRARY=ON -DBUILD_SHARED_LIBS=OFF)  # as released a shared one
     released+=(-DFREEKV_ENGINE_METHODS="streaming_llm;freekv_paper"
               -DFREEKV_C_LIBRARY=ON -DFREEKV_C_SHAPES="bfloat16_128;float_64;fp8_e4m3_64") ;;
  3) released+=(-DFREEKV_BENCH=ON) ;;
esac
if ((round % 2 == 1)); then
  bootstrap_llama_cpp
  bootstrap_model
  released+=(-DFREEKV_LLAMA_CPP="$LLAMA_CPP" -DFREEKV_LLAMA_CPP_BUILD="$LLAMA_CPP_BUILD" -DFREEKV_MODEL="$MODEL")
fi
if ((${#threads[@]})); then
  configure tsan -DFREEKV_HEAD_DIMS="${head_dims[(round + 2) % 5]}" -DFREEKV_ELEMENTS="${elements[round % 3]}"
  build_and_test "with ThreadSanitizer" tsan --target "${threads[@]}" -- -R "^($(IFS='|'; echo "${threads[*]}"))(\\..*)?\$"
fi
configure asan -DFREEKV_ROUND="$round" "${sanitized[@]}"
build_and_test "with AddressSanitizer" asan --

configure ci -DFREEKV_ROUND="$round" -DFREEKV_HEAD_DIMS="64;$head_dim" -DFREEKV_OTHER_ELEMENTS="$element" \
  -DFREEKV_DEVICE_SEEDS=$seed -DFREEKV_DEVICE_ARCHITECTURES=$architecture -DFREEKV_OTHER_CCCL="$OTHER_CCCL" \
  "${released[@]}"
device='^(cuda|headers\.nvcc)'
say "Building the host's pipelines, which device code is compared with ($((SECONDS - started)) s so far)"
cmake --build --preset ci -j "$jobs" --target freekv_examples >&2
before=$SECONDS
build_and_test "device code" ci --target cuda_tests -- -R "$device"
on_device=$((SECONDS - before))
say "Device code took $on_device s of the 1500 s that it may take on two cores"
build_and_test "as released" ci -- -E "$device"
say "All tests passed or were skipped ($passed passed, $skipped skipped) in $((SECONDS - started)) s, of which $on_device s were device code"
