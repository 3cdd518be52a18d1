// Which instruction sets this build holds and this machine can run.
#include "cpu/backend.hpp"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace gatedelta::cpu {

namespace {

constexpr int bit(gd_isa isa) { return 1 << isa; }

#if defined(__x86_64__)
// A process must request the AMX tile registers from Linux once; further requests are harmless.
bool amx_permitted() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

uint64_t enabled_state() {  // XCR0: register state the operating system saves
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

int detect() {
  int isas = bit(GD_ISA_GENERIC);
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return isas;
  const bool osxsave = c & (1u << 27), fma = c & (1u << 12);
  if (!osxsave || !fma || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return isas;
  const uint64_t state = enabled_state();
  const bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6, tiles = (state & 0x60000) == 0x60000;
  const bool avx2 = b & (1u << 5), f = b & (1u << 16), dq = b & (1u << 17), bw = b & (1u << 30), vl = b & (1u << 31);
  const bool amx_bf16 = d & (1u << 22), amx_tile = d & (1u << 24);
  if (ymm && avx2) isas |= bit(GD_ISA_AVX2);
  if (!(zmm && f && dq && bw && vl)) return isas;
  isas |= bit(GD_ISA_AVX512);
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & (1u << 5))) return isas;
  isas |= bit(GD_ISA_AVX512_BF16);
  if (tiles && amx_bf16 && amx_tile && amx_permitted()) isas |= bit(GD_ISA_AMX);
  return isas;
}
#elif defined(__aarch64__)
int detect() {
  int isas = bit(GD_ISA_GENERIC) | bit(GD_ISA_NEON);
#if defined(__linux__) && defined(HWCAP2_BF16)
  if (getauxval(AT_HWCAP2) & HWCAP2_BF16) isas |= bit(GD_ISA_NEON_BF16);
#endif
  return isas;
}
#else
int detect() { return bit(GD_ISA_GENERIC); }
#endif

}  // namespace

int compiled_isas() {
#if defined(__x86_64__)
  return bit(GD_ISA_GENERIC) | bit(GD_ISA_AVX2) | bit(GD_ISA_AVX512) | bit(GD_ISA_AVX512_BF16) | bit(GD_ISA_AMX);
#elif defined(__aarch64__)
  return bit(GD_ISA_GENERIC) | bit(GD_ISA_NEON) | bit(GD_ISA_NEON_BF16);
#else
  return bit(GD_ISA_GENERIC);
#endif
}

bool bf16_dot_is_slow() {
#if defined(__x86_64__)
  uint32_t a, b, c, d;
  return __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx;
#else
  return false;
#endif
}

int usable_isas() {
  static const int isas = detect() & compiled_isas();  // a fact of the machine, read once
  return isas;
}

}  // namespace gatedelta::cpu
