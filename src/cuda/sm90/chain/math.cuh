// math: the loop over work items, and the steps of a chunk that the passes share.
#pragma once

#include "cuda/sm90/chain/chain.cuh"

namespace gatedelta::cuda::sm90 {

// Calls body for every item of which this warpgroup has columns: with the stage of the item, the item, its first chunk,
// the half of the value columns, whether the chain starts from the identity, the state, the positions in the pipelines,
// and the value stage whose O is being stored (negative: none).
template <class Elem, Pass kPass>
template <class Body>
GD_DEVICE void Chain<Elem, kPass>::for_each_item(int math_wg, const Body& body) const {
  LoadStage load;
  OperandStage operand;
  State state;
  int storing_stage = -1;
  state.value_offset = opaque(tile_offset(transposed_row(lane), 16 * warp + transposed_column(lane)));
  state.vector_offset = opaque(8 * (lane & 3));
  WorkPipelineState work;
  for (int i = get_next_work(work); i != kEndOfWork; i = get_next_work(work)) {
    const WorkItem& item = work_item(i);
    if (item.kind == kMerge) {
      merge(state, math_wg, item, load, storing_stage);
      continue;
    }
    Chunk chunk = first_chunk_of(item);
    const bool is_identity = item.kind == kTransition && math_wg == 1;
    const int half = is_identity ? chunk.half : half_of(chunk, math_wg);
    if (half < 0) {
#pragma unroll 1
      for (; chunk.tokens_left > 0; chunk = chunk.next()) {
        skip_chunk(load, operand, storing_stage);
        load.advance();
        operand.advance();
      }
      continue;
    }
    if (is_identity) {
      begin_identity(state.s, half);
    } else {
      begin_state(state.s, item, half);
    }
    pack_state(state);
    body(i, item, chunk, half, is_identity, state, load, operand, storing_stage);
  }
  if (warp == 0 && elect_one()) store_wait_read<0>();
}

// A chunk of which this warpgroup has no columns: it only passes the barriers.
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::skip_chunk(const LoadStage& load, const OperandStage& operand,
                                              int& storing_stage) const {
  load_pipe.wait_full(load);
  warp_arrive(load_pipe.empty(load.stage));
  skip_values(load, storing_stage);
  operand_pipe.wait_full(operand);
  warp_arrive(operand_pipe.empty(operand.stage));
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::skip_values(const LoadStage& load, int& storing_stage) const {
  release_value_stage(storing_stage);
  storing_stage = -1;
  barrier_wait(value_pipe.full(load.stage), load.phase);
  warp_arrive(value_pipe.empty(load.stage));
}

// Copies the initial state of every sequence without tokens to its final state.
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::copy_empty_sequences(State& state, int math_wg) const {
  for (int n = blockIdx.x; n < p.sequences.count; n += gridDim.x) {
    if (p.sequences[n].length > 0 || p.is_padding(n)) continue;
#pragma unroll 1
    for (int i = math_wg; i < 2 * p.value_heads; i += kMathWarpgroups) {
      load_state(state.s, p.initial, p.initial.slot(n), i / 2, i % 2);
      store_state(p.final, p.final.slot(n), i / 2, i % 2, state.s);
    }
  }
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::pack_state(State& state) {
#pragma unroll
  for (int i = 0; i < 32; ++i) state.packed[i] = pack<Elem>(state.s[2 * i], state.s[2 * i + 1]);
}

// (tile S)^T for kRows rows of an operand whose two tiles hold the halves of the key dimensions. One wgmma group.
template <class Elem, Pass kPass>
template <int kRows>
GD_DEVICE void Chain<Elem, kPass>::multiply_state(float* to, const State& state, uint32_t tile) {
#pragma unroll
  for (int step = 0; step < 8; ++step)
    Wgmma<Elem, kRows>::template rs<false>(to, state.packed + 4 * step,
                                           tile_descriptor(tile, step / 4 * 2 * kStepTile + step % 4 * kStepContiguous),
                                           step > 0);
  mma_commit();
}

// S *= gamma_L
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::decay_state(State& state, int load) const {
  const float gamma_L = exp2_approx(load_shared(vector(load, kLogGamma) + 63 * 4));
#pragma unroll
  for (int i = 0; i < 64; ++i) state.s[i] *= gamma_L;
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::load_values_transposed(uint32_t (&v)[16], uint32_t from) const {
#pragma unroll
  for (int n = 0; n < 4; ++n) ldmatrix_trans(v + 4 * n, from + n * 2048);
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::load_scales(float2 (&scale)[8], uint32_t from) const {
#pragma unroll
  for (int n = 0; n < 8; ++n) scale[n] = load_shared2(from + n * 32);
}

// W = V - gamma o (K S), transposed.
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::subtract(uint32_t (&w)[16], const uint32_t (&v)[16], const float2 (&scale)[8],
                                            const float* ks) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float* c = ks + 4 * n;
    const float2 v0 = unpack<Elem>(v[2 * n]), v1 = unpack<Elem>(v[2 * n + 1]), a = scale[n];
    w[2 * n] = pack<Elem>(v0.x - a.x * c[0], v0.y - a.y * c[1]);
    w[2 * n + 1] = pack<Elem>(v1.x - a.x * c[2], v1.y - a.y * c[3]);
  }
}

// S += X^T W
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::add_written(State& state, const uint32_t (&w)[16], int operand) const {
#pragma unroll
  for (int step = 0; step < 4; ++step)
    Wgmma<Elem, 128>::template rs<false>(state.s, w + 4 * step,
                                         tile_descriptor(x_tile(operand), step * kStepContiguous), true);
  mma_commit();
}

// A chunk that only advances the state: a warm-up chunk, or (without values) a chunk of the transition M.
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::advance_warmup(State& state, int math_wg, const LoadStage& load,
                                                  const OperandStage& operand, bool has_values,
                                                  int& storing_stage) const {
  float ks[32];
  uint32_t w[16], v[16];
  float2 scale[8];
  // K S; V and its row scales load under the product.
  load_pipe.wait_full(load);
  mma_fence();
  multiply_state<64>(ks, state, key_tile(load.stage, 0));
  release_value_stage(storing_stage);
  storing_stage = -1;
  barrier_wait(value_pipe.full(load.stage), load.phase);
  if (has_values) {
    load_values_transposed(v, value_tile(load.stage, math_wg) + state.value_offset);
  } else {
#pragma unroll
    for (int n = 0; n < 16; ++n) v[n] = 0;
  }
  load_scales(scale, vector(load.stage, kReadKey) + state.vector_offset);
  mma_wait<0>();
  // W = V - gamma o (K S)
  subtract(w, v, scale, ks);
  if (has_values) {
    warp_arrive(value_pipe.empty(load.stage));
  } else {
    storing_stage = load.stage;  // store_transition may need it
  }
  // S <- gamma_L S + X^T W
  decay_state(state, load.stage);
  operand_pipe.wait_full(operand);
  mma_fence();
  add_written(state, w, operand.stage);
  warp_arrive(load_pipe.empty(load.stage));
  mma_wait<0>();
  pack_state(state);
  warp_arrive(operand_pipe.empty(operand.stage));
}

// Forces x to be computed here. NOTE(ptxas): it otherwise sinks the packing below the next wgmma group, onto the
// critical path. The stores behind the branch never happen; ptxas does not know that `smem` is not 0.
template <class Elem, Pass kPass>
template <int kCount>
GD_DEVICE void Chain<Elem, kPass>::materialize(const uint32_t (&x)[kCount]) const {
#pragma unroll
  for (int i = 0; i < kCount; i += 16)
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %0, 0;\n@p bra never_%=;\nst.shared.v4.b32 [%0], {%1,%2,%3,%4};\n"
        "st.shared.v4.b32 [%0], {%5,%6,%7,%8};\nst.shared.v4.b32 [%0], {%9,%10,%11,%12};\n"
        "st.shared.v4.b32 [%0], {%13,%14,%15,%16};\nnever_%=:\n}" ::"r"(smem),
        "r"(x[i]), "r"(x[i + 1]), "r"(x[i + 2]), "r"(x[i + 3]), "r"(x[i + 4]), "r"(x[i + 5]), "r"(x[i + 6]),
        "r"(x[i + 7]), "r"(x[i + 8]), "r"(x[i + 9]), "r"(x[i + 10]), "r"(x[i + 11]), "r"(x[i + 12]), "r"(x[i + 13]),
        "r"(x[i + 14]), "r"(x[i + 15])
        : "memory");
}

// O^T to the stage that held V: a warp writes only where it alone has read.
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::stage_output(const float* o, uint32_t at) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float* c = o + 8 * n;
    stmatrix_trans(at + n * 2048, pack<Elem>(c[0], c[1]), pack<Elem>(c[2], c[3]), pack<Elem>(c[4], c[5]),
                   pack<Elem>(c[6], c[7]));
  }
}

// Stores a staged chunk of O under the next chunk's products; only warp 0 waits for the other warps.
// NOTE: no warp is two chunks ahead of another (operand_pipe.empty waits for all), so no warp reaches the barrier of a
// stage twice before all warps have reached it once.
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::store_output(int math_wg, const Chunk& chunk, int stage) const {
  const int barrier = kOutputStaged + math_wg * kValueStages + stage;
  fence_async_shared();
  if (warp != 0) return named_barrier_arrive(barrier, kWarpgroupThreads);
  named_barrier_sync(barrier, kWarpgroupThreads);
  store_output_tile(math_wg, chunk, stage);
}

// Stores the O of an item's last chunk, which may be ragged. It has no next chunk to hide under: all warps wait.
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::store_last_output(int math_wg, const Chunk& chunk, int stage) const {
  fence_async_shared();
  named_barrier_sync(kItemDone + math_wg, kWarpgroupThreads);
  if (chunk.is_whole()) {
    if (warp == 0) store_output_tile(math_wg, chunk, stage);
    return;
  }
  if (!p.o) return;
  const uint32_t tile = value_tile(stage, math_wg);
  auto* to = static_cast<uint16_t*>(p.o.data) + p.o.offset(chunk.batch, chunk.token, chunk.head) +
             half_of(chunk, math_wg) * 64;
#pragma unroll 1
  for (int i = tid; i < chunk.tokens() * 8; i += kWarpgroupThreads)
    *reinterpret_cast<uint4*>(to + i / 8 * p.o.token_stride + i % 8 * 8) =
        load_shared_words(tile + tile_offset(i / 8, i % 8 * 8));
  named_barrier_sync(kItemDone + math_wg, kWarpgroupThreads);  // before the stage is released
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::store_output_tile(int math_wg, const Chunk& chunk, int stage) const {
  if (!p.o || !elect_one()) return;
  tma_store(&p.o_map, value_tile(stage, math_wg), chunk.head, chunk.token, chunk.batch, half_of(chunk, math_wg));
  store_commit();
}

// Releases a stage once TMA has read it; warp 0 issued the store. Negative: none to release.
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::release_value_stage(int stage) const {
  if (stage < 0 || !is_arriving()) return;
  if (warp == 0) store_wait_read<0>();
  barrier_arrive(value_pipe.empty(stage));
}

}  // namespace gatedelta::cuda::sm90
