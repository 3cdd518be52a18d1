// wgmma: D [64 x n] (+)= A [64 x 16] B [16 x n] for a warpgroup, fp32 sums. A is in shared memory (ss) or in registers
// (rs). A and B in shared memory are named by descriptors (tiles.hpp); kTurned says that the contracted dimension runs
// over the tile's rows. What may be touched while products are in flight is ptxas's business: see
// docs/kernels/forward.md.
#pragma once

#include "cuda/sm90/ptx.cuh"

namespace gatedelta::cuda {

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
GD_DEVICE uint64_t tile_descriptor(uint32_t address, uint32_t steps) {
  return make_descriptor(tile_descriptor_low(address) + steps, kTileDescriptorHigh);
}
// Rows of two tiles, one behind the other, as one operand of 128 columns; the contracted dimension runs over the rows.
GD_DEVICE uint64_t wide_descriptor(uint32_t address, uint32_t steps) {
  return make_descriptor(wide_descriptor_low(address) + steps, kTileDescriptorHigh);
}
GD_DEVICE uint64_t state_descriptor(uint32_t address) {
  return make_descriptor(state_descriptor_low(address), kStateDescriptorHigh);
}
// Block row I of a triangle: the 16 contracted rows, 16 (I + 1) columns.
GD_DEVICE uint64_t triangle_descriptor(uint32_t address, int I) {
  return make_descriptor(triangle_descriptor_low(address) + (triangle_block(I, 0) >> 4), kTriangleDescriptorHigh);
}

template <class Elem, int kColumns>
struct Wgmma;

#define GD_8(d, i)                                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])

#define GD_WGMMA_16(ELEM, TYPE)                                                                                \
  template <>                                                                                                  \
  struct Wgmma<ELEM, 16> {                                                                                     \
    template <bool kTransposedB>                                                                               \
    static GD_DEVICE void rs(float* d, const uint32_t* a, uint64_t b, bool accumulate) {                       \
      asm volatile(                                                                                            \
          "{.reg .pred p; setp.ne.b32 p, %13, 0;\n"                                                            \
          "wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE " {" GD_PLACES_16                        \
          "}, {%8,%9,%10,%11}, %12, p, 1, 1, %14;}"                                                            \
          : GD_8(d, 0)                                                                                         \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kTransposedB))); \
    }                                                                                                          \
    template <bool kTransposedA, bool kTransposedB>                                                            \
    static GD_DEVICE void ss(float* d, uint64_t a, uint64_t b, bool accumulate) {                              \
      asm volatile(                                                                                            \
          "{.reg .pred p; setp.ne.b32 p, %10, 0;\n"                                                            \
          "wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE " {" GD_PLACES_16                        \
          "}, %8, %9, p, 1, 1, %11, %12;}"                                                                     \
          : GD_8(d, 0)                                                                                         \
          : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kTransposedA)), "n"(int(kTransposedB)));             \
    }                                                                                                          \
  };
#define GD_PLACES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
GD_WGMMA_16(__nv_bfloat16, "bf16")
GD_WGMMA_16(__half, "f16")

#define GD_WGMMA_32(ELEM, TYPE)                                                                                \
  template <>                                                                                                  \
  struct Wgmma<ELEM, 32> {                                                                                     \
    template <bool kTransposedB>                                                                               \
    static GD_DEVICE void rs(float* d, const uint32_t* a, uint64_t b, bool accumulate) {                       \
      asm volatile(                                                                                            \
          "{.reg .pred p; setp.ne.b32 p, %21, 0;\n"                                                            \
          "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {" GD_PLACES_32                        \
          "}, {%16,%17,%18,%19}, %20, p, 1, 1, %22;}"                                                          \
          : GD_8(d, 0), GD_8(d, 8)                                                                             \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kTransposedB))); \
    }                                                                                                          \
    template <bool kTransposedA, bool kTransposedB>                                                            \
    static GD_DEVICE void ss(float* d, uint64_t a, uint64_t b, bool accumulate) {                              \
      asm volatile(                                                                                            \
          "{.reg .pred p; setp.ne.b32 p, %18, 0;\n"                                                            \
          "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {" GD_PLACES_32                        \
          "}, %16, %17, p, 1, 1, %19, %20;}"                                                                   \
          : GD_8(d, 0), GD_8(d, 8)                                                                             \
          : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kTransposedA)), "n"(int(kTransposedB)));             \
    }                                                                                                          \
  };
#define GD_PLACES_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
GD_WGMMA_32(__nv_bfloat16, "bf16")
GD_WGMMA_32(__half, "f16")

#define GD_WGMMA_48(ELEM, TYPE)                                                                                \
  template <>                                                                                                  \
  struct Wgmma<ELEM, 48> {                                                                                     \
    template <bool kTransposedB>                                                                               \
    static GD_DEVICE void rs(float* d, const uint32_t* a, uint64_t b, bool accumulate) {                       \
      asm volatile(                                                                                            \
          "{.reg .pred p; setp.ne.b32 p, %29, 0;\n"                                                            \
          "wgmma.mma_async.sync.aligned.m64n48k16.f32." TYPE "." TYPE " {" GD_PLACES_48                        \
          "}, {%24,%25,%26,%27}, %28, p, 1, 1, %30;}"                                                          \
          : GD_8(d, 0), GD_8(d, 8), GD_8(d, 16)                                                                \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kTransposedB))); \
    }                                                                                                          \
    template <bool kTransposedA, bool kTransposedB>                                                            \
    static GD_DEVICE void ss(float* d, uint64_t a, uint64_t b, bool accumulate) {                              \
      asm volatile(                                                                                            \
          "{.reg .pred p; setp.ne.b32 p, %26, 0;\n"                                                            \
          "wgmma.mma_async.sync.aligned.m64n48k16.f32." TYPE "." TYPE " {" GD_PLACES_48                        \
          "}, %24, %25, p, 1, 1, %27, %28;}"                                                                   \
          : GD_8(d, 0), GD_8(d, 8), GD_8(d, 16)                                                                \
          : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kTransposedA)), "n"(int(kTransposedB)));             \
    }                                                                                                          \
  };
#define GD_PLACES_48                                                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23"
GD_WGMMA_48(__nv_bfloat16, "bf16")
GD_WGMMA_48(__half, "f16")

#define GD_WGMMA_64(ELEM, TYPE)                                                                                \
  template <>                                                                                                  \
  struct Wgmma<ELEM, 64> {                                                                                     \
    template <bool kTransposedB>                                                                               \
    static GD_DEVICE void rs(float* d, const uint32_t* a, uint64_t b, bool accumulate) {                       \
      asm volatile(                                                                                            \
          "{.reg .pred p; setp.ne.b32 p, %37, 0;\n"                                                            \
          "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" GD_PLACES_64                        \
          "}, {%32,%33,%34,%35}, %36, p, 1, 1, %38;}"                                                          \
          : GD_8(d, 0), GD_8(d, 8), GD_8(d, 16), GD_8(d, 24)                                                   \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kTransposedB))); \
    }                                                                                                          \
    template <bool kTransposedA, bool kTransposedB>                                                            \
    static GD_DEVICE void ss(float* d, uint64_t a, uint64_t b, bool accumulate) {                              \
      asm volatile(                                                                                            \
          "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"                                                            \
          "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" GD_PLACES_64                        \
          "}, %32, %33, p, 1, 1, %35, %36;}"                                                                   \
          : GD_8(d, 0), GD_8(d, 8), GD_8(d, 16), GD_8(d, 24)                                                   \
          : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kTransposedA)), "n"(int(kTransposedB)));             \
    }                                                                                                          \
  };
#define GD_PLACES_64                                                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
GD_WGMMA_64(__nv_bfloat16, "bf16")
GD_WGMMA_64(__half, "f16")

#define GD_WGMMA_128(ELEM, TYPE)                                                                                 \
  template <>                                                                                                    \
  struct Wgmma<ELEM, 128> {                                                                                      \
    template <bool kTransposedB>                                                                                 \
    static GD_DEVICE void rs(float* d, const uint32_t* a, uint64_t b, bool accumulate) {                         \
      asm volatile(                                                                                              \
          "{.reg .pred p; setp.ne.b32 p, %69, 0;\n"                                                              \
          "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" GD_PLACES_128                        \
          "}, {%64,%65,%66,%67}, %68, p, 1, 1, %70;}"                                                            \
          : GD_8(d, 0), GD_8(d, 8), GD_8(d, 16), GD_8(d, 24), GD_8(d, 32), GD_8(d, 40), GD_8(d, 48), GD_8(d, 56) \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kTransposedB)));   \
    }                                                                                                            \
    template <bool kTransposedA, bool kTransposedB>                                                              \
    static GD_DEVICE void ss(float* d, uint64_t a, uint64_t b, bool accumulate) {                                \
      asm volatile(                                                                                              \
          "{.reg .pred p; setp.ne.b32 p, %66, 0;\n"                                                              \
          "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" GD_PLACES_128                        \
          "}, %64, %65, p, 1, 1, %67, %68;}"                                                                     \
          : GD_8(d, 0), GD_8(d, 8), GD_8(d, 16), GD_8(d, 24), GD_8(d, 32), GD_8(d, 40), GD_8(d, 48), GD_8(d, 56) \
          : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kTransposedA)), "n"(int(kTransposedB)));               \
    }                                                                                                            \
  };
#define GD_PLACES_128                                                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63"
GD_WGMMA_128(__nv_bfloat16, "bf16")
GD_WGMMA_128(__half, "f16")

#undef GD_8

}  // namespace gatedelta::cuda
