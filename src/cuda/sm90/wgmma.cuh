// wgmma: D [64 x n] (+)= A [64 x 16] B [16 x n] for a warpgroup, fp32 sums. A is in shared memory (ss) or in registers
// (rs). A and B in shared memory are named by descriptors (tiles.hpp); kTurned says that the contracted dimension runs
// over the tile's rows. What may be touched while products are in flight is ptxas's business: see
// docs/kernels/forward.md.
#pragma once

#include "cuda/sm90/ptx.cuh"

namespace gatedelta::cuda::sm90 {

GD_DEVICE void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
GD_DEVICE void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
GD_DEVICE void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

GD_DEVICE uint64_t make_descriptor(uint32_t low, uint32_t high) {
  uint64_t d;
  asm("mov.b64 %0, {%1,%2};" : "=l"(d) : "r"(low), "r"(high));
  return d;
}
// NOTE(ptxas): steps are added to 64 bits, in one uniform instruction; added to the lower word, each descriptor takes a
// second one for its upper word.
GD_DEVICE uint64_t tile_descriptor(uint32_t address, uint32_t steps) {
  return make_descriptor(tile_descriptor_low(address), kTileDescriptorHigh) + steps;
}
// Rows of two tiles, one behind the other, as one operand of 128 columns; the contracted dimension runs over the rows.
GD_DEVICE uint64_t wide_descriptor(uint32_t address, uint32_t steps) {
  return make_descriptor(wide_descriptor_low(address), kTileDescriptorHigh) + steps;
}
GD_DEVICE uint64_t state_descriptor(uint32_t address) {
  return make_descriptor(state_descriptor_low(address), kStateDescriptorHigh);
}
// Block row I of a triangle: the 16 contracted rows, 16 (I + 1) columns.
GD_DEVICE uint64_t triangle_descriptor(uint32_t address, int I) {
  return make_descriptor(triangle_descriptor_low(address), kTriangleDescriptorHigh) + (triangle_block(I, 0) >> 4);
}

template <class Elem, int kColumns>
struct Wgmma;

#define GD_8(d, i)                                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define GD_16(d, i) GD_8(d, i), GD_8(d, i + 8)
#define GD_32(d, i) GD_16(d, i), GD_16(d, i + 16)

// One shape: N columns, so N / 2 accumulators per thread, whose operands are named PLACES. P0 to P6 are the operands
// after them: rs takes A in four registers, B, the predicate and B's transposition; ss takes A, B, the predicate and
// both.
#define GD_WGMMA(ELEM, TYPE, N, PLACES, ACCUMULATORS, P0, P1, P2, P3, P4, P5, P6)                                      \
  template <>                                                                                                          \
  struct Wgmma<ELEM, N> {                                                                                              \
    template <bool kTransposedB>                                                                                       \
    static GD_DEVICE void rs(float* d, const uint32_t* a, uint64_t b, bool accumulate) {                               \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " P5                                                                 \
                   ", 0;\n"                                                                                            \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" PLACES "}, {" P0 "," P1 "," P2 \
                   "," P3 "}, " P4 ", p, 1, 1, " P6 ";}"                                                               \
                   : ACCUMULATORS                                                                                      \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)),                         \
                     "n"(int(kTransposedB)));                                                                          \
    }                                                                                                                  \
    template <bool kTransposedA, bool kTransposedB>                                                                    \
    static GD_DEVICE void ss(float* d, uint64_t a, uint64_t b, bool accumulate) {                                      \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " P2                                                                 \
                   ", 0;\n"                                                                                            \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" PLACES "}, " P0 ", " P1        \
                   ", p, 1, 1, " P3 ", " P4 ";}"                                                                       \
                   : ACCUMULATORS                                                                                      \
                   : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kTransposedA)), "n"(int(kTransposedB)));            \
    }                                                                                                                  \
  };
#define GD_WGMMA_SHAPES(ELEM, TYPE)                                                                                  \
  GD_WGMMA(ELEM, TYPE, 16, GD_PLACES_16, GD_8(d, 0), "%8", "%9", "%10", "%11", "%12", "%13", "%14")                  \
  GD_WGMMA(ELEM, TYPE, 32, GD_PLACES_32, GD_16(d, 0), "%16", "%17", "%18", "%19", "%20", "%21", "%22")               \
  GD_WGMMA(ELEM, TYPE, 48, GD_PLACES_48, GD_16(d, 0) GD_COMMA GD_8(d, 16), "%24", "%25", "%26", "%27", "%28", "%29", \
           "%30")                                                                                                    \
  GD_WGMMA(ELEM, TYPE, 64, GD_PLACES_64, GD_32(d, 0), "%32", "%33", "%34", "%35", "%36", "%37", "%38")               \
  GD_WGMMA(ELEM, TYPE, 128, GD_PLACES_128, GD_32(d, 0) GD_COMMA GD_32(d, 32), "%64", "%65", "%66", "%67", "%68",     \
           "%69", "%70")
#define GD_COMMA ,
#define GD_PLACES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define GD_PLACES_32 GD_PLACES_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define GD_PLACES_48 GD_PLACES_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define GD_PLACES_64 GD_PLACES_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define GD_PLACES_128                                                                                           \
  GD_PLACES_64                                                                                                  \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
GD_WGMMA_SHAPES(__nv_bfloat16, "bf16")
GD_WGMMA_SHAPES(__half, "f16")

#undef GD_WGMMA_SHAPES
#undef GD_WGMMA
#undef GD_COMMA
#undef GD_32
#undef GD_16
#undef GD_8

}  // namespace gatedelta::cuda::sm90
