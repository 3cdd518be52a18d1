// The instructions that C++ has no word for, one function each: what compute capability 8.0 has, and nothing later.
// tests/cpp/emulate has another file of this name, which stands in for this one on a CPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
#include <type_traits>

#include "cuda/device/instances.hpp"

#define GD_DEVICE __device__ __forceinline__

namespace gatedelta::cuda {

// ---- shared memory -------------------------------------------------------------------------------------------------

GD_DEVICE uint32_t shared_base() {
  extern __shared__ __align__(128) uint8_t dynamic_smem[];
  return static_cast<uint32_t>(__cvta_generic_to_shared(dynamic_smem));
}

GD_DEVICE float load_shared(uint32_t from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from));
  return x;
}
GD_DEVICE float2 load_shared2(uint32_t from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from));
  return x;
}
GD_DEVICE float4 load_shared4(uint32_t from) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from));
  return x;
}
GD_DEVICE uint4 load_shared_words(uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from));
  return x;
}
GD_DEVICE uint32_t load_shared_word(uint32_t from) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from));
  return x;
}
GD_DEVICE void store_shared_word(uint32_t to, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
GD_DEVICE void store_shared(uint32_t to, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}
GD_DEVICE void store_shared4(uint32_t to, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
GD_DEVICE void store_shared_words(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// 16 bytes from global memory, or 16 zero bytes; `from` is not read then.
GD_DEVICE void copy_async(uint32_t to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
GD_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most kPending of this thread's committed groups are on their way.
template <int kPending>
GD_DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8 x 8 matrices; lane 8 m + r names row r of matrix m.
GD_DEVICE void load_matrices(uint32_t (&x)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from));
}
GD_DEVICE void load_matrices_transposed(uint32_t (&x)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from));
}
// An 8 x 8 matrix of 16-bit numbers, two neighbours of a row in every lane.
GD_DEVICE uint32_t transposed(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// ---- global memory -------------------------------------------------------------------------------------------------

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

// 16 bytes at a multiple of 16 that no kernel reads again soon.
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
GD_DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- products ------------------------------------------------------------------------------------------------------

// c += a b, with tiles a: 16 x 16, b: 16 x 8, c: 16 x 8.
template <class Elem>
GD_DEVICE void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1);
template <>
GD_DEVICE void mma<Bf16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
GD_DEVICE void mma<Fp16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// c = a b. NOTE(ptxas): with a literal 0 in the instruction no registers are cleared.
template <class Elem>
GD_DEVICE void mma_first(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1);
template <>
GD_DEVICE void mma_first<Bf16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                               uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}
template <>
GD_DEVICE void mma_first<Fp16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                               uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
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

// ---- numbers -------------------------------------------------------------------------------------------------------

// 2^x; results below the normal numbers are 0.
GD_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x within 2 ulp; results below the normal numbers are 0.
GD_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of a positive number that is not denormal; the number itself where it is a power of two.
GD_DEVICE float power_of_two_below(float x) { return __uint_as_float(__float_as_uint(x) & 0x7f800000u); }

// Two 16-bit numbers in a register; the first is the lower half.
template <class Elem>
GD_DEVICE uint32_t pack(float first, float second);
template <>
GD_DEVICE uint32_t pack<Bf16>(float first, float second) {
  uint32_t x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(second), "f"(first));
  return x;
}
template <>
GD_DEVICE uint32_t pack<Fp16>(float first, float second) {
  uint32_t x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(second), "f"(first));
  return x;
}
template <class Elem>
GD_DEVICE float2 unpack(uint32_t x);
template <>
GD_DEVICE float2 unpack<Bf16>(uint32_t x) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
template <>
GD_DEVICE float2 unpack<Fp16>(uint32_t x) {
  return make_float2(__half2float(__ushort_as_half(static_cast<unsigned short>(x))),
                     __half2float(__ushort_as_half(static_cast<unsigned short>(x >> 16))));
}

// ---- threads -------------------------------------------------------------------------------------------------------

// The compiler cannot tell what x is from here on: what follows from it is computed anew instead of being kept in
// registers through all steps.
GD_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
GD_DEVICE void sync_cta() { __syncthreads(); }
GD_DEVICE void sync_warp() { __syncwarp(); }
GD_DEVICE int shuffle(int x, int lane) { return __shfl_sync(~0u, x, lane); }
GD_DEVICE float shuffle(float x, int lane) { return __shfl_sync(~0u, x, lane); }
GD_DEVICE int shuffle_up(int x, int by) { return __shfl_up_sync(~0u, x, by); }
GD_DEVICE float shuffle_up(float x, int by) { return __shfl_up_sync(~0u, x, by); }
GD_DEVICE unsigned long long shuffle_up(unsigned long long x, int by) { return __shfl_up_sync(~0u, x, by); }
GD_DEVICE int shuffle_down(int x, int by) { return __shfl_down_sync(~0u, x, by); }
GD_DEVICE float shuffle_down(float x, int by) { return __shfl_down_sync(~0u, x, by); }
GD_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
GD_DEVICE uint32_t shuffle_xor(uint32_t x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
// How many lanes say yes.
GD_DEVICE int count_lanes(bool yes) { return __popc(__ballot_sync(~0u, yes)); }

}  // namespace gatedelta::cuda
