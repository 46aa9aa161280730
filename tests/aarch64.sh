#!/usr/bin/env bash
# Lane teams, algorithms and random steps on 64-bit ARM: cross-compiled, and run under QEMU. `bash tests/aarch64.sh`
source "$(dirname "$0")/../cmake/bootstrap.sh"
cd "$root"
bootstrap_packages g++ g++-aarch64-linux-gnu qemu-user cmake ninja-build libcli11-dev nlohmann-json3-dev libeigen3-dev catch2
bootstrap_cuda
cmake --preset aarch64 >build/configure-aarch64.log || { cat build/configure-aarch64.log >&2; die "Preset aarch64 could not be configured."; }
cmake --build --preset aarch64 -j "$jobs" --target team_test algorithm_test step_test >&2
FREEKV_CASES=100 ctest --preset aarch64 -R '^(team|algorithm|step)_test$'
