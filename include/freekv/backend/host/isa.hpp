// Instruction sets of the host: chosen once at run time, without -march flags and without second copies of
// code. What is compiled for AVX2 throughout, as with -march=native, has no lower choice, and half the code; AVX-512 is for
// what multiplies rows alone.
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
enum class isa : std::uint8_t { baseline, avx2, avx512 };

/// Name of an instruction set for tables and JSON.
inline std::string_view name_of(isa set) {
  switch (set) {
    case isa::avx512:
      return "avx512f+vl+bw+dq";
    case isa::avx2:
      return "avx2+fma+f16c";
    default:
      return "baseline";
  }
}

/// What all code is compiled for: what is lower is that too.
#if defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
inline constexpr isa compiled_for = isa::avx512;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
inline constexpr isa compiled_for = isa::avx2;
#else
inline constexpr isa compiled_for = isa::baseline;
#endif

namespace detail {

inline isa ask_machine() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;  // Clang 14 cannot be asked for f16c by name
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
  const bool has_avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq");
  if (has_avx512 && compiled_for != isa::avx2) return isa::avx512;
  if (has_avx2) return isa::avx2;
#endif
  return isa::baseline;
}

}  // namespace detail

/// The best instruction set of the machine this runs on. It is asked once: in a virtual machine `cpuid` took 17 us.
inline isa best_isa() {
  static const isa best = detail::ask_machine();
  return best;
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
template <class Body>
[[gnu::flatten, gnu::target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]] inline void run_avx512(
    const Body& body) {
  body(avx512_team{});
}
#endif

}  // namespace detail

/// Calls `body(team)` with the team of `set`; what the compiler inlines into it is compiled for that instruction set.
template <class Body>
inline void with_team([[maybe_unused]] isa set, const Body& body) {
#if defined(__x86_64__)
  if (compiled_for >= isa::avx2 || set >= isa::avx2) return detail::run_avx2(body);
#endif
  if constexpr (compiled_for == isa::baseline) detail::run_baseline(body);
}

/// The same for a body that multiplies rows, which AVX-512 has a team of its own for.
template <class Body>
inline void with_wide_team(isa set, const Body& body) {
#if defined(__x86_64__)
  if constexpr (compiled_for != isa::avx2)
    if (set == isa::avx512) return detail::run_avx512(body);
#endif
  with_team(set, body);
}

}  // namespace freekv::host
