// The PTX this library uses, one function per instruction. sm_90a.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/device/ptx.cuh"
#include "cuda/sm90/tiles.hpp"

namespace gatedelta::cuda::sm90 {

// ---- shared memory addresses, loads and stores ---------------------------------------------------------------------

GD_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

GD_DEVICE void store_shared_words(uint32_t p, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
GD_DEVICE void store_shared_if(bool stores, uint32_t p, int x) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %0, 0;\n@p st.shared.b32 [%1], %2;}" ::"r"(int(stores)), "r"(p), "r"(x)
               : "memory");
}
GD_DEVICE void copy_async16(uint32_t dst, const void* src, bool valid) {
  const int bytes = valid ? 16 : 0;  // the rest is filled with zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
GD_DEVICE void copy_async_wait() { asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory"); }

// ---- 8 x 8 matrices ------------------------------------------------------------------------------------------------

GD_DEVICE void ldmatrix(uint32_t (&r)[4], uint32_t p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(p)
               : "memory");
}
GD_DEVICE void ldmatrix_trans(uint32_t* r, uint32_t p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(p)
               : "memory");
}
GD_DEVICE void ldmatrix_x2(uint32_t* r, uint32_t p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(p) : "memory");
}
GD_DEVICE void ldmatrix_x2_trans(uint32_t* r, uint32_t p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(p)
               : "memory");
}
GD_DEVICE void stmatrix(uint32_t p, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(p), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
GD_DEVICE void stmatrix_trans(uint32_t p, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(p), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// c += a b, fp16 operands, fp32 sums: 16 x 8 with 16 or 8 contracted.
GD_DEVICE void mma_k16(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
GD_DEVICE void mma_k8(float* c, uint32_t a0, uint32_t a1, uint32_t b0) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(b0));
}

// ---- numbers -------------------------------------------------------------------------------------------------------

// Two 16-bit numbers in one register; the first is the lower half.
template <class Elem>
GD_DEVICE uint32_t pack(float first, float second);
template <>
GD_DEVICE uint32_t pack<__nv_bfloat16>(float first, float second) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
  return r;
}
template <>
GD_DEVICE uint32_t pack<__half>(float first, float second) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
  return r;
}
template <class Elem>
GD_DEVICE float2 unpack(uint32_t x);
template <>
GD_DEVICE float2 unpack<__nv_bfloat16>(uint32_t x) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
template <>
GD_DEVICE float2 unpack<__half>(uint32_t x) {
  float2 v;
  asm("{.reg .b16 l,h;\nmov.b32 {l,h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;}" : "=f"(v.x), "=f"(v.y) : "r"(x));
  return v;
}

// ---- barriers and fences -------------------------------------------------------------------------------------------

GD_DEVICE void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
GD_DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
GD_DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
GD_DEVICE void barrier_arrive(uint32_t barrier, int times) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(times) : "memory");
}
GD_DEVICE void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
GD_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain_%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// True for one thread of a converged warp.
GD_DEVICE bool elect_one() {
  uint32_t is_elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;}" : "=r"(is_elected));
  return is_elected;
}
// A warp arrives after its lanes' reads and writes: one lane arrives for all. NOTE: racecheck reports this as a race,
// because ptxas drops a __syncwarp() where it knows the warp is converged. In a GD_RACECHECK build every lane arrives.
#ifdef GD_EVERY_LANE_ARRIVES
constexpr int kArrivals = 32;
#else
constexpr int kArrivals = 1;
#endif
GD_DEVICE bool is_arriving() { return kArrivals > 1 || elect_one(); }
GD_DEVICE void warp_arrive(uint32_t barrier) {
  __syncwarp();
  if (is_arriving()) barrier_arrive(barrier);
}
// Named barrier; ids 1 to 15 (0 is __syncthreads()).
GD_DEVICE void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The same for warps that arrive from different code; bar.sync does not allow that.
GD_DEVICE void named_barrier_sync_divergent(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Arrives without waiting.
GD_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Orders this thread's writes to shared memory before reads by TMA or wgmma.
GD_DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// PDL: the next kernel may start once every CTA has called allow_next_kernel or ended; it sees this kernel's writes
// after wait_for_previous_kernel.
GD_DEVICE void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
GD_DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

template <int kRegisters>
GD_DEVICE void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
GD_DEVICE void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Atomic increment if `counts`; returns the old value. Predicated instead of branched: values stay warp-uniform.
GD_DEVICE int atomic_inc_if(int* counter, bool counts) {
  int before;
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p atom.global.add.u32 %0, [%1], 1;}"
               : "=r"(before)
               : "l"(counter), "r"(int(counts))
               : "memory");
  return before;
}

// Counters through which CTAs publish what they wrote to global memory.
GD_DEVICE int load_acquire(const int* counter) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
GD_DEVICE void add_release(int* counter, int n) {
  asm volatile("fence.acq_rel.gpu;\nred.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(n) : "memory");
}
GD_DEVICE void pause() { asm volatile("nanosleep.u32 64;" ::: "memory"); }
// Orders TMA accesses to global memory and ordinary ones.
GD_DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- TMA and bulk copies --------------------------------------------------------------------------------------------

// A box of a 5-D tensor (column, head, token, batch, half of the columns) to shared memory, and back.
GD_DEVICE void tma_load(uint32_t dst, const CUtensorMap* map, uint32_t barrier, int head, int token, int batch,
                        int half) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6,%7}], "
      "[%2];" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(0), "r"(head), "r"(token), "r"(batch), "r"(half)
      : "memory");
}
GD_DEVICE void tma_store(const CUtensorMap* map, uint32_t src, int head, int token, int batch, int half) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2,%3,%4,%5,%6}], [%1];" ::"l"(map),
               "r"(src), "r"(0), "r"(head), "r"(token), "r"(batch), "r"(half)
               : "memory");
}
GD_DEVICE void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(barrier)
               : "memory");
}
GD_DEVICE void bulk_prefetch(const void* src, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}
GD_DEVICE void bulk_store(void* dst, uint32_t src, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes)
               : "memory");
}
GD_DEVICE void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's committed bulk stores still have to read their source.
template <int kPending>
GD_DEVICE void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
GD_DEVICE void store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace gatedelta::cuda::sm90
