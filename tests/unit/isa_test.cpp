// The choice of an instruction set, from what processors and operating systems say.

#include <freekv/backend/host/isa.hpp>
#include <string>

#include "../catch.hpp"

namespace {

using freekv::host::isa;
using freekv::host::isa_of;
using freekv::host::x86_features;

/// Bits of leaf 1's ECX, leaf 7's EBX and XCR0 by the names that manuals give them.
enum leaf_1 : std::uint32_t { fma3 = 1u << 12, osxsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29 };
enum leaf_7 : std::uint32_t {
  avx2 = 1u << 5,
  avx512f = 1u << 16,
  avx512dq = 1u << 17,
  avx512bw = 1u << 30,
  avx512vl = 1u << 31
};
enum saved : std::uint64_t {
  x87 = 1,
  sse = 2,
  ymm = 4,
  masks = 1 << 5,
  zmm_high = 1 << 6,
  zmm_16_31 = 1 << 7,
  amx = 3 << 17
};

struct machine {
  std::string name;
  x86_features says;
  isa best;
};

// Words as these processors give them, XCR0 as Linux sets it.
const x86_features skylake_x{0x7ffefbff, 0xd39ffffb, 0x2ff};
const x86_features zen_4{0x7ef8320b, 0xf1bf97a9, 0x2e7};
const x86_features zen_5{0xfed8320b, 0xf1bf97a9, 0xe7};
const x86_features xeon_with_amx{0xfffa3203, 0xf1bf2ffb,
                                 0x600e7};  // of the generations from Sapphire Rapids on

x86_features without(x86_features x, std::uint32_t bits_1, std::uint32_t bits_7, std::uint64_t bits_saved) {
  return {x.leaf_1_ecx & ~bits_1, x.leaf_7_ebx & ~bits_7, x.xcr0 & ~bits_saved};
}

}  // namespace

TEST_CASE("the instruction set follows from cpuid and from what the system saves", "[isa]") {
  constexpr std::uint64_t all_of_zmm = masks | zmm_high | zmm_16_31;
  const machine machines[] = {
      {"Skylake-X", skylake_x, isa::avx512},
      {"Zen 4", zen_4, isa::avx512},
      {"Zen 5", zen_5, isa::avx512},
      {"Sapphire Rapids", xeon_with_amx, isa::avx512},
      {"Zen 3", {0x7ef8320b, 0x219c97a9, 0x207}, isa::avx2},
      {"Sapphire Rapids without AMX's state", without(xeon_with_amx, 0, 0, amx), isa::avx512},
      {"Skylake-X under a system without ZMM", without(skylake_x, 0, 0, all_of_zmm), isa::avx2},
      {"Zen 5 under a system that saves no masks", without(zen_5, 0, 0, masks), isa::avx2},
      {"Zen 5 under a system that saves 16 ZMM alone", without(zen_5, 0, 0, zmm_16_31), isa::avx2},
      {"Zen 5 under a system that saves no upper halves", without(zen_5, 0, 0, zmm_high), isa::avx2},
      {"Zen 4 whose AVX-512 a virtual machine hides",
       without(zen_4, 0, avx512f | avx512dq | avx512bw | avx512vl, all_of_zmm), isa::avx2},
      {"Zen 4 of which a virtual machine hides AVX-512 but not its state",
       without(zen_4, 0, avx512f | avx512dq | avx512bw | avx512vl, 0), isa::avx2},
      {"AVX-512F without VL, as Knights Landing", without(skylake_x, 0, avx512dq | avx512bw | avx512vl, 0),
       isa::avx2},
      {"AVX-512 without VL", without(skylake_x, 0, avx512vl, 0), isa::avx2},
      {"AVX-512 without BW", without(skylake_x, 0, avx512bw, 0), isa::avx2},
      {"AVX-512 without DQ", without(skylake_x, 0, avx512dq, 0), isa::avx2},
      {"AVX-512 without F", without(skylake_x, 0, avx512f, 0), isa::avx2},
      {"AVX2 without its state", without(skylake_x, 0, 0, ymm | all_of_zmm), isa::baseline},
      {"AVX-512's state without AVX's", without(skylake_x, 0, 0, ymm), isa::baseline},
      {"AVX2 without SSE's state", without(skylake_x, 0, 0, sse), isa::baseline},
      {"AVX2 without OSXSAVE, so that XCR0 says nothing", without(skylake_x, osxsave, 0, 0), isa::baseline},
      {"AVX2 without FMA", without(skylake_x, fma3, 0, 0), isa::baseline},
      {"AVX2 without F16C", without(skylake_x, f16c, 0, 0), isa::baseline},
      {"AVX-512 without AVX2", without(skylake_x, 0, avx2, 0), isa::baseline},
      {"AVX2 without AVX", without(skylake_x, avx, 0, 0), isa::baseline},
      {"AVX alone, as Ivy Bridge", {osxsave | avx | f16c, 0x281, x87 | sse | ymm}, isa::baseline},
      {"baseline x86-64", {0x00000001, 0, 0}, isa::baseline},
      {"no leaf 7", {0x7ffefbff, 0, 0xe7}, isa::baseline},
      {"nothing", {}, isa::baseline},
  };
  for (const machine& m : machines) {
    INFO(m.name);
    CHECK(freekv::host::name_of(isa_of(m.says)) == freekv::host::name_of(m.best));
  }
  STATIC_REQUIRE(isa_of({}) == isa::baseline);
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
TEST_CASE("this machine's instruction set is the one that the compiler's own library finds", "[isa]") {
  __builtin_cpu_init();
  isa best = isa::baseline;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    best = isa::avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
      best = isa::avx512;
  }
  CHECK(freekv::host::name_of(isa_of(freekv::host::machine_features())) == freekv::host::name_of(best));
}
#endif
