#!/usr/bin/env bash
# All tests: installs what they need, builds with warnings as errors, runs them, first those of several threads under
# ThreadSanitizer, then all under AddressSanitizer and UndefinedBehaviorSanitizer, then as released. No GPU is needed;
# what needs one is reported as skipped. Where FREEKV_PTXCPU names the sources of ptxcpu, an interpreter of PTX, device
# code runs on that.
source "$(dirname "$0")/../cmake/bootstrap.sh"
cd "$root"
started=$SECONDS

bootstrap_packages g++ cmake ninja-build git libcli11-dev nlohmann-json3-dev libeigen3-dev liburing-dev catch2
[[ -z ${FREEKV_PTXCPU:-} ]] || bootstrap_packages libzstd-dev  # which ptxcpu needs
bootstrap_cuda nvcc
bootstrap_other_cccl
bootstrap_llama_cpp
bootstrap_model

run() {  # PRESET CMAKE_OPTION...
  local preset=$1
  shift
  say "Building preset $preset ($((SECONDS - started)) s so far)"
  cmake --preset "$preset" "$@" >"build/configure-$preset.log" || { cat "build/configure-$preset.log" >&2; die "Preset $preset could not be configured."; }
  cmake --build --preset "$preset" -j "$jobs" >&2
  say "Testing preset $preset ($((SECONDS - started)) s so far)"
  ctest --preset "$preset" -j "$jobs"
}
run_those() {  # PRESET TARGET...: of a preset these alone
  local preset=$1
  shift
  say "Building and testing $* of preset $preset ($((SECONDS - started)) s so far)"
  cmake --preset "$preset" >"build/configure-$preset.log" || { cat "build/configure-$preset.log" >&2; die "Preset $preset could not be configured."; }
  cmake --build --preset "$preset" -j "$jobs" --target "$@" >&2
  ctest --preset "$preset" -j "$jobs" -R "^($(IFS='|'; echo "$*"))(\\..*)?\$"
}
run_those tsan backend_test file_store_test order_test events_test
run asan
run ci -DFREEKV_OTHER_CCCL="$OTHER_CCCL" -DFREEKV_LLAMA_CPP="$LLAMA_CPP" -DFREEKV_LLAMA_CPP_BUILD="$LLAMA_CPP_BUILD" -DFREEKV_MODEL="$MODEL"
say "All tests passed in $((SECONDS - started)) s" # what ran and what was skipped stands above
