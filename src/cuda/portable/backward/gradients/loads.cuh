// Loads of K and Q, of stages of value columns, and of a value head's vectors.
#pragma once

#include "cuda/portable/backward/gradients/gradients.cuh"

namespace gatedelta::cuda::portable {

// K, Q and their norms.
template <class Config>
GD_DEVICE void Gradients<Config>::load_chunk(const float* norms) const {
  if (kScalesKeys && p.l2norm) {
    load_scaled_keys(p.k, p.k_stride, norms, smem + Smem::kK);
    load_scaled_keys(p.q, p.q_stride, norms + kChunkTokens, smem + Smem::kQ);
  } else {
    load_keys(p.k, p.k_stride, smem + Smem::kK);
    load_keys(p.q, p.q_stride, smem + Smem::kQ);
  }
  if (tid < 2 * kChunkTokens) {
    const float norm = norms[tid];
    const float power = kScalesKeys ? power_of_two_below(norm) : 1.0f;
    const bool is_key = tid < kChunkTokens;
    store_shared(vector(is_key ? Smem::kKeyNorm : Smem::kQueryNorm) + tid % kChunkTokens * 4, norm / power);
    if (kScalesKeys) store_shared(vector(is_key ? Smem::kKeyPower : Smem::kQueryPower) + tid % kChunkTokens * 4, power);
  } else if (tid < 3 * kChunkTokens) {
    store_shared(vector(Smem::kDiagonal) + tid % kChunkTokens * 4, 0);
  }
}

// Loads the part's columns of K or Q. Rows past the end and columns past K are zero.
template <class Config>
GD_DEVICE void Gradients<Config>::load_keys(const TokenRows& from, uint32_t stride, uint32_t to) const {
  const auto* const data = static_cast<const uint16_t*>(from.data) + from.offset(batch, token, key_head);
#pragma unroll
  for (int i = 0; i < Config::kTiles * kChunkTokens * 8 / kThreads; ++i) {
    const int packet = tid % 8, r = (tid / 8 + i * (kThreads / 8)) % kChunkTokens,
              tile = i * (kThreads / 8) / kChunkTokens;
    const int first = part * kPart + tile * kTileColumns + packet * kPacketColumns;
    const bool valid = r < rows && first < p.key_dim;
    copy_async(to + tile * Config::kTileBytes + tile_offset(r, packet), data + (valid ? r * stride + first : 0), valid);
  }
}

// The same, each row scaled by the power of two below its norm.
template <class Config>
GD_DEVICE void Gradients<Config>::load_scaled_keys(const TokenRows& from, uint32_t stride, const float* norms,
                                                   uint32_t to) const {
  const auto* const data = static_cast<const uint16_t*>(from.data) + from.offset(batch, token, key_head);
#pragma unroll 1
  for (int i = 0; i < Config::kTiles * kChunkTokens * 8 / kThreads; ++i) {
    const int packet = tid % 8, r = (tid / 8 + i * (kThreads / 8)) % kChunkTokens,
              tile = i * (kThreads / 8) / kChunkTokens;
    const int first = part * kPart + tile * kTileColumns + packet * kPacketColumns;
    const bool valid = r < rows && first < p.key_dim;
    const float power = power_of_two_below(norms[r]);
    const auto scaled = [&](uint32_t x) {
      const float2 two = unpack<Elem>(x);
      return pack<Elem>(power * two.x, power * two.y);
    };
    const uint4 x = valid ? *reinterpret_cast<const uint4*>(data + r * stride + first) : make_uint4(0, 0, 0, 0);
    store_shared_words(to + tile * Config::kTileBytes + tile_offset(r, packet), scaled(x.x), scaled(x.y), scaled(x.z),
                       scaled(x.w));
  }
}

template <class Config>
GD_DEVICE void Gradients<Config>::load_rows(const TokenRows& from, uint32_t stride, int head, int first,
                                            uint32_t to) const {
  static_assert(kThreads == kChunkTokens * Config::kValueColumns / kPacketColumns);
  const int r = tid / 4, packet = tid % 4;
  const auto* const data = static_cast<const uint16_t*>(from.data) + from.offset(batch, token, head);
  const bool valid = r < rows && first + packet * kPacketColumns < p.value_dim;
  copy_async(to + values_offset<Config::kValueColumns>(r, packet),
             data + (valid ? r * stride + first + packet * kPacketColumns : 0), valid);
}

template <class Config>
GD_DEVICE void Gradients<Config>::load_snapshot(const uint8_t* from, int first, uint32_t to) const {
#pragma unroll
  for (int i = 0; i < Smem::kSnapshotBytes / kPacketBytes / kThreads; ++i) {
    const int packet = tid + i * kThreads, key_block = packet / 8 % kKeyBlocks, value_block = packet / kPart;
    const int at = part * kKeyBlocks + key_block;
    const bool valid = first + 8 * value_block < p.value_dim && 8 * at < p.key_dim;
    copy_async(
        to + packet * kPacketBytes,
        from + (valid ? ((first / 8 + value_block) * (p.key_dim / 8) + at) * 128 + packet % 8 * kPacketBytes : 0),
        valid);
  }
}

// Loads value columns from `first` on, of value head v of the group.
template <class Config>
GD_DEVICE void Gradients<Config>::load_stage(int stage, int v, int first) const {
  const uint32_t to = smem + stage * Smem::kStageBytes;
  const int head = key_head * p.group + v;
  load_rows(p.u, p.u_stride, head, first, to + Smem::kU);
  load_rows(p.d_o, p.d_o_stride, head, first, to + Smem::kOutputs);
  load_rows(p.dv, p.dv_stride, head, first, to + Smem::kValues);
  const int64_t at = (int64_t{chunk_index} * p.value_heads + head) * p.snapshot_bytes();
  load_snapshot(p.states + at, first, to + Smem::kStates);
  load_snapshot(p.gradients + at, first, to + Smem::kGradients);
}

// A thread has a row. Prepare writes no vectors for an empty step.
template <class Config>
GD_DEVICE void Gradients<Config>::set_vectors(int v) const {
  if (tid >= kChunkTokens) return;
  const float* const from = p.chunk_vectors(chunk_index, key_head * p.group + v);
  const int step = tid / kStep;
  const bool both = rows > kStep, is_there = step == 0 || both;
  const float first_end = from[kStep - 1], second_end = both ? from[kChunkTokens - 1] : 0.0f;
  const float log = is_there ? from[kLogGamma * kChunkTokens + tid] : 0.0f,
              beta = is_there ? from[kChunkBeta * kChunkTokens + tid] : 0.0f;
  const float gamma = exp2_approx(step == 0 ? log : log + first_end),
              delta = exp2_approx(step == 0 ? first_end - log + second_end : second_end - log);
  const float key_norm = of_row(Smem::kKeyNorm, tid), query_norm = of_row(Smem::kQueryNorm, tid);
  const auto set = [&](typename Smem::Vector to, float x) { store_shared(vector(to) + tid * 4, x); };
  set(Smem::kLogs, log);
  set(Smem::kQueryRow, p.scale * gamma * query_norm);
  set(Smem::kReadRow, -gamma * key_norm);
  set(Smem::kWriteRow, delta * key_norm);
  set(Smem::kPending, stores_unscaled(beta) ? beta : 1.0f);
}

}  // namespace gatedelta::cuda::portable
