// Instruction sets of the host: chosen once at run time, without -march flags and without second copies of
// code. What is compiled for AVX2 throughout, as with -march=native, has no lower choice, and half the code;
// AVX-512 is for what multiplies rows and for scoring alone.
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

/// Instruction sets that a machine may execute, lowest first.
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

/// Instruction set that all code is compiled for; lower ones count as it.
#if defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
inline constexpr isa compiled_for = isa::avx512;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
inline constexpr isa compiled_for = isa::avx2;
#else
inline constexpr isa compiled_for = isa::baseline;
#endif

/// Vector features of an x86-64 processor and its operating system: two words of `cpuid`, and the register
/// XCR0, whose bits are the states that the system saves when it changes threads. An instruction whose state
/// it does not save is refused by the processor, though `cpuid` knows it: so under a kernel started with
/// `noxsave`, or in a virtual machine that keeps its guests from AVX-512.
struct x86_features {
  std::uint32_t leaf_1_ecx = 0;  ///< 0 where there is no such leaf
  std::uint32_t leaf_7_ebx = 0;  ///< of subleaf 0
  std::uint64_t xcr0 = 0;        ///< read only where `leaf_1_ecx` has OSXSAVE
};

/// The best instruction set that these allow.
constexpr isa isa_of(const x86_features& x) {
  const auto all = [](std::uint64_t word, std::uint64_t bits) { return (word & bits) == bits; };
  const auto bit = [](int n) { return std::uint64_t{1} << n; };
  const std::uint64_t osxsave = bit(27), avx = bit(28), fma = bit(12), f16c = bit(29);       // of leaf 1
  const std::uint64_t avx2 = bit(5), f = bit(16), dq = bit(17), bw = bit(30), vl = bit(31);  // of leaf 7
  const std::uint64_t ymm = bit(1) | bit(2);  // of XCR0: the lower halves, which are SSE's, and the upper
  const std::uint64_t zmm = bit(5) | bit(6) | bit(7);  // masks, the upper halves of ZMM0-15, all of ZMM16-31
  if (!all(x.leaf_1_ecx, osxsave | avx | fma | f16c) || !all(x.leaf_7_ebx, avx2) || !all(x.xcr0, ymm))
    return isa::baseline;
  return all(x.leaf_7_ebx, f | dq | bw | vl) && all(x.xcr0, zmm) ? isa::avx512 : isa::avx2;
}

#if defined(__x86_64__)
/// The features of the machine this runs on.
inline x86_features machine_features() {
  x86_features x;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) != 0) x.leaf_1_ecx = c;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) != 0) x.leaf_7_ebx = b;
  if ((x.leaf_1_ecx & bit_OSXSAVE) != 0) {
    unsigned low = 0, high = 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    x.xcr0 = std::uint64_t{high} << 32 | low;
  }
  return x;
}
#endif

namespace detail {

inline isa ask_machine() {
#if defined(__x86_64__)
  const isa best = isa_of(machine_features());
  return best == isa::avx512 && compiled_for == isa::avx2 ? isa::avx2 : best;
#else
  return isa::baseline;
#endif
}

}  // namespace detail

/// The best instruction set of the machine this runs on. It is asked once: in a virtual machine `cpuid` took
/// 17 us.
inline isa best_isa() {
  static const isa best = detail::ask_machine();
  return best;
}

namespace detail {

template <class Body>
[[gnu::flatten]] inline void run_baseline(const Body& body) {
#if defined(__x86_64__)
  body(sse2_team{});
#else
  body(simd_team<portable>{});
#endif
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

/// Calls `body(team)` with the team of `set`; what the compiler inlines into it is compiled for that
/// instruction set.
template <class Body>
inline void with_team([[maybe_unused]] isa set, const Body& body) {
#if defined(__x86_64__)
  if (compiled_for >= isa::avx2 || set >= isa::avx2) return detail::run_avx2(body);
#endif
  if constexpr (compiled_for == isa::baseline) detail::run_baseline(body);
}

/// Calls a body that uses a team's `wide` with one that may have it, as `with_team` does: that of AVX-512.
template <class Body>
inline void with_wide_team(isa set, const Body& body) {
#if defined(__x86_64__)
  if constexpr (compiled_for != isa::avx2)
    if (set == isa::avx512) return detail::run_avx512(body);
#endif
  with_team(set, body);
}

}  // namespace freekv::host
