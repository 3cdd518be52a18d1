// The few instructions of the decode kernels that C++ has no word for. All of them are known to compute capability 8.0.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
#include <type_traits>

#define GD_DEVICE __device__ __forceinline__

namespace gatedelta::cuda {

// The compiler cannot tell what x is from here on.
GD_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Loads the word at `from` into `low` if there is one, and the next into `high` if there are two. Later loads stay
// later, and what is computed from the words is not moved up to them, where it would wait.
GD_DEVICE void load_words_if(bool one, bool two, const char* from, int32_t& low, int32_t& high) {
  asm volatile(
      "{\n"
      ".reg .pred one, two;\n"
      "setp.ne.b32 one, %3, 0;\n"
      "setp.ne.and.b32 two, %4, 0, one;\n"
      "@one ld.global.b32 %0, [%2];\n"
      "@two ld.global.b32 %1, [%2 + 4];\n"
      "}"
      : "+r"(low), "+r"(high)
      : "l"(from), "r"(int{one}), "r"(int{two})
      : "memory");
}

// 16 bytes at a multiple of 16 that nobody reads again soon.
GD_DEVICE void load_streaming(const void* from, uint32_t (&x)[4]) {
  asm volatile("ld.global.cs.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "l"(from));
}

// 16 bytes to shared memory, for this thread alone until it has waited.
GD_DEVICE void copy_async(void* to, const void* from) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
// As many bytes as there are at `to`, or zeros.
template <class T>
GD_DEVICE void copy_async_or_zero(T* to, const void* from, bool is_there) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (sizeof(T) == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(is_there ? 16 : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(sizeof(T)),
                 "r"(is_there ? static_cast<int>(sizeof(T)) : 0)
                 : "memory");
  }
}
// The copies since the last end form a group. Waits for all groups but the last kGroups.
GD_DEVICE void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kGroups>
GD_DEVICE void wait_for_copies_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}
GD_DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// 2^x and 1 / x within 2 ulp; results below the normal numbers are 0.
GD_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
GD_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// C += A B, with tiles A: 16 x 16 or 16 x 8, B: 16 x 8 or 8 x 8, C: 16 x 8. Lane (g, t) of eight by four has
//   A: a0 row g, a1 row g + 8, a2 and a3 the same rows further along; B: column g; C: rows g, g, g + 8, g + 8.
// Along the contracted index it has numbers 2t, 2t + 1 and 2t + 8, 2t + 9 of 16-bit types, and t and t + 4 of tf32.
template <class T>
GD_DEVICE void mma_halves(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}
// Of each operand's fp32 bits the last 13 are ignored.
GD_DEVICE void mma_tf32(float (&c)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

}  // namespace gatedelta::cuda
