// States in global memory: pools, both layouts, fp32, bf16 and fp16.
#pragma once

#include "cuda/sm90/chain/chain.cuh"

namespace gatedelta::cuda::sm90 {

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

// Two neighbouring numbers of a state.
template <class T>
struct alignas(2 * sizeof(T)) StatePair {
  T first, second;
};

// Whether a thread's numbers come in neighbouring pairs that one access can take. The answer is the same for all
// threads. NOTE: the chains of a backward do without: their code stays as it is.
template <class Elem, Pass kPass>
template <class T>
GD_DEVICE bool Chain<Elem, kPass>::has_pairs(const T* at, int k_stride) {
  return kPass == Pass::kForward && k_stride == 1 && reinterpret_cast<uintptr_t>(at) % sizeof(StatePair<T>) == 0;
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
    constexpr int kRow = decltype(v_stride)::value, kColumn = decltype(k_stride)::value;
    if (has_pairs(from, kColumn)) {
#pragma unroll
      for (int i = 0; i < 64; i += 2) {
        const Place at = accumulator_place(0, i);
        const auto pair = reinterpret_cast<const StatePair<std::remove_cvref_t<decltype(*from)>>*>(
            from)[(at.row * kRow + at.column) / 2];
        s[i] = static_cast<float>(pair.first);
        s[i + 1] = static_cast<float>(pair.second);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const Place at = accumulator_place(0, i);
      s[i] = static_cast<float>(from[at.row * kRow + at.column * kColumn]);
    }
  });
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::store_state(const StateRows& states, int64_t slot, int head, int half,
                                               const float (&s)[64]) const {
  if (slot < 0) return;
  with_matrix(states, slot, head, half, [&](auto* to, auto v_stride, auto k_stride) {
    constexpr int kRow = decltype(v_stride)::value, kColumn = decltype(k_stride)::value;
    using T = std::remove_reference_t<decltype(*to)>;
    if (has_pairs(to, kColumn)) {
#pragma unroll
      for (int i = 0; i < 64; i += 2) {
        const Place at = accumulator_place(0, i);
        reinterpret_cast<StatePair<T>*>(to)[(at.row * kRow + at.column) / 2] = {static_cast<T>(s[i]),
                                                                                static_cast<T>(s[i + 1])};
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const Place at = accumulator_place(0, i);
      to[at.row * kRow + at.column * kColumn] = s[i];
    }
  });
}

// Brings an initial state to L2 while the chunks before it are computed. By a warp.
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::prefetch_state(int slot, int head, int half) const {
  if (slot < 0) return;
  const int64_t number_bytes = p.initial.dtype == GD_F32 ? 4 : 2;
  const bool is_part = half >= 0 && p.state_value_first;  // half of the rows
  const char* const from = static_cast<const char*>(p.initial.data) +
                           (p.initial.offset(slot, head) + (is_part ? half * 64 * kHeadDim : 0)) * number_bytes;
  const auto bytes = static_cast<uint32_t>((is_part ? 64 : kHeadDim) * kHeadDim * number_bytes);
  if (reinterpret_cast<uintptr_t>(from) % 16 == 0 && elect_one()) bulk_prefetch(from, bytes);
}

}  // namespace gatedelta::cuda::sm90
