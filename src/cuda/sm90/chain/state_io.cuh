// States in global memory: pools, both layouts, fp32, bf16 and fp16.
#pragma once

#include "cuda/sm90/chain/chain.cuh"

namespace gatedelta::cuda {

// Calls f with a pointer to this thread's first element of the head's matrix in a slot, and with the strides of value
// columns and key dimensions. The strides are compile-time constants: each of the 64 accesses becomes an immediate
// offset.
template <class Elem, Pass kPass>
template <class F>
GD_DEVICE void Chain<Elem, kPass>::with_matrix(const StateRows& states, int64_t slot, int head, int half,
                                               const F& f) const {
  const int64_t matrix = slot * states.slot_stride + head * states.head_stride;
  const auto with_layout = [&](auto* data) {
    uint32_t thread;  // NOTE(ptxas): read again, so that nothing derived from it stays in registers through all chunks
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    const uint32_t v = half * 64 + thread / 32 % 4 * 16 + thread % 32 / 4, k = thread % 4 * 2;
    using One = std::integral_constant<int, 1>;
    using Row = std::integral_constant<int, kHeadDim>;
    if (p.state_value_first) {
      f(data + matrix + v * kHeadDim + k, Row{}, One{});
    } else {
      f(data + matrix + k * kHeadDim + v, One{}, Row{});
    }
  };
  if (states.dtype == GD_F32) {
    with_layout(static_cast<float*>(states.data));
  } else if (states.dtype == GD_BF16) {
    with_layout(static_cast<__nv_bfloat16*>(states.data));
  } else {
    with_layout(static_cast<__half*>(states.data));
  }
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::load_state(float (&s)[64], const StateRows& states, int64_t slot, int head,
                                              int half) const {
  if (slot < 0) {
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] = 0;
    return;
  }
  with_matrix(states, slot, head, half, [&](const auto* from, auto v_stride, auto k_stride) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const Place at = accumulator_place(0, i);
      s[i] = static_cast<float>(from[at.row * decltype(v_stride)::value + at.column * decltype(k_stride)::value]);
    }
  });
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::store_state(const StateRows& states, int64_t slot, int head, int half,
                                               const float (&s)[64]) const {
  if (slot < 0) return;
  with_matrix(states, slot, head, half, [&](auto* to, auto v_stride, auto k_stride) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const Place at = accumulator_place(0, i);
      to[at.row * decltype(v_stride)::value + at.column * decltype(k_stride)::value] = s[i];
    }
  });
}

}  // namespace gatedelta::cuda
