// Instruction sets of the host: chosen once at run time, without -march flags and without second copies of
// code. What is compiled for AVX2 throughout, as with -march=native, has no other choice, and half the code.
//
// A stage's body is compiled once per instruction set by inlining it into a function that carries the target
// attribute (`flatten`). GCC inlines all of it; Clang only what it would inline anyway, so its avx2 is partly
// baseline code. Only what the compiler cannot express portably, f16 conversion, has a body of its
// own.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdint>
#include <freekv/backend/host/simd_team.hpp>
#include <string_view>

namespace freekv::host {

/// What the machine can execute, lowest first.
enum class isa : std::uint8_t { baseline, avx2 };

/// Name of an instruction set for tables and JSON.
inline std::string_view name_of(isa set) {
  switch (set) {
    case isa::avx2:
      return "avx2+fma+f16c";
    default:
      return "baseline";
  }
}

/// Whether all code is compiled for AVX2: then `baseline` is that too.
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
inline constexpr bool compiled_for_avx2 = true;
#else
inline constexpr bool compiled_for_avx2 = false;
#endif

/// The best instruction set of the machine this runs on.
inline isa best_isa() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;  // Clang 14 cannot be asked for f16c by name
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
  if (f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return isa::avx2;
#endif
  return isa::baseline;
}

namespace detail {

template <class Body>
[[gnu::flatten]] inline void run_baseline(const Body& body) {
  body(simd_team<portable>{});
}
#if defined(__x86_64__)
template <class Body>
[[gnu::flatten, gnu::target("avx2,fma,f16c")]] inline void run_avx2(const Body& body) {
  body(simd_team<avx2>{});
}
#endif

}  // namespace detail

/// Calls `body(team)` with the team of `set`; what the compiler inlines into it is compiled for that instruction set.
template <class Body>
inline void with_team([[maybe_unused]] isa set, const Body& body) {
#if defined(__x86_64__)
  if (compiled_for_avx2 || set == isa::avx2) return detail::run_avx2(body);
#endif
  if constexpr (!compiled_for_avx2) detail::run_baseline(body);
}

}  // namespace freekv::host
