#!/usr/bin/env bash
# All tests: installs what they need, builds with warnings as errors, runs them, first those of several threads under
# ThreadSanitizer, then all under AddressSanitizer and UndefinedBehaviorSanitizer, then as released what depends on
# instruction sets or an optimiser, or is too long under sanitizers. No GPU is needed; what needs one is reported as
# skipped. Where FREEKV_PTXCPU names the sources of ptxcpu, an interpreter of PTX, device code runs on that.
source "$(dirname "$0")/../cmake/bootstrap.sh"
cd "$root"
started=$SECONDS

bootstrap_packages g++ cmake ninja-build git libcli11-dev nlohmann-json3-dev libeigen3-dev liburing-dev catch2
[[ -z ${FREEKV_PTXCPU:-} ]] || bootstrap_packages libzstd-dev  # which ptxcpu needs
bootstrap_cuda nvcc
bootstrap_other_cccl
bootstrap_llama_cpp
bootstrap_model

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
# What is long is taken in turns by the number of commits: shapes, what runs under sanitizers, orders and architectures of
# device code, what compilers alone are asked. Runs with FREEKV_ROUND=0 to 14 take all of it, four in a row all but a shape.
round=${FREEKV_ROUND:-$(git rev-list --count HEAD 2>/dev/null || echo 0)}
head_dims=(80 128 96 192 256)
say "What is taken in turns: FREEKV_ROUND=$round"
threads=(backend_test file_store_test order_test events_test)  # what has more than one
elements=(float half bfloat16)
configure tsan -DFREEKV_HEAD_DIMS="${head_dims[(round + 2) % 5]}" -DFREEKV_ELEMENTS="${elements[round % 3]}"
build_and_test "with ThreadSanitizer" tsan --target "${threads[@]}" -- -R "^($(IFS='|'; echo "${threads[*]}"))(\\..*)?\$"
configure asan -DFREEKV_ROUND="$round"
build_and_test "with AddressSanitizer" asan --

# These depend on neither, so that once is enough: where a sanitizer has not had its turn of them, as released.
case $((round % 4)) in
  1) elsewhere='safetensors_test;fuzz_test;statistics_test;replay_refusals_test' ;;
  3) elsewhere='safetensors_test;fuzz_test;statistics_test' ;;
  *) elsewhere='sequences_test;errors_test;evicting_test;store_in_file_test;engine_blocks_test;plan_test;policy_pack_test;saved_prefix_test;file_store_test' ;;
esac
architecture=$((round / 2 % 2 ? 90 : 80))
# On devices policies that are chosen at run time, or engines' pipelines.
chosen=ON engine=
((round % 2 == 0)) || chosen=OFF engine='streaming_llm;freekv_paper'
configure ci -DFREEKV_ROUND="$round" -DFREEKV_HEAD_DIMS="64;${head_dims[round % 5]}" -DFREEKV_OTHER_ELEMENTS="${elements[round % 3]}" -DFREEKV_DEVICE_SEEDS="$((round % 4 + 1))" -DFREEKV_DEVICE_ARCHITECTURES=$architecture -DFREEKV_TESTED_ELSEWHERE="$elsewhere" -DFREEKV_OTHER_CCCL="$OTHER_CCCL" -DFREEKV_LLAMA_CPP="$LLAMA_CPP" -DFREEKV_LLAMA_CPP_BUILD="$LLAMA_CPP_BUILD" -DFREEKV_MODEL="$MODEL" -DFREEKV_BENCH=$((round % 2)) -DFREEKV_DEVICE_PIPELINES=$chosen -DFREEKV_ENGINE_METHODS="$engine"
device='^(cuda|headers\.nvcc)'
say "Building the host's pipelines, which device code is compared with ($((SECONDS - started)) s so far)"
cmake --build --preset ci -j "$jobs" --target freekv_examples >&2
before=$SECONDS
build_and_test "device code" ci --target cuda_tests -- -R "$device"
on_device=$((SECONDS - before))
say "Device code took $on_device s of the 1500 s that it may take on two cores"
build_and_test "as released" ci -- -E "$device"
say "All tests passed or were skipped ($passed passed, $skipped skipped) in $((SECONDS - started)) s, of which $on_device s were device code"
