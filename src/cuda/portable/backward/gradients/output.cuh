// dQ and dK of a key head to memory.
#pragma once

#include "cuda/portable/backward/gradients/gradients.cuh"

namespace gatedelta::cuda::portable {

template <class Config>
GD_DEVICE void Gradients<Config>::finish() {
  const uint32_t K = smem + Smem::kK, Q = smem + Smem::kQ;
  add_diagonal(dq, K);
  add_diagonal(dk, Q);
  if (kScalesKeys && p.l2norm) {
    scale_rows(dq, Smem::kQueryPower);
    scale_rows(dk, Smem::kKeyPower);
  }
  if (p.key_sums) {
    store_key_sums(dq, 0);
    store_key_sums(dk, 1);
    return;
  }
  if (p.l2norm) {  // dx = r dy - (dy . y) r y, and the first r is in dy already
    float along[4];
    sync_cta();  // the last head's sums are not read any more
    find_dots(along, dq, Q);
    store_sums(along, 0);
    find_dots(along, dk, K);
    store_sums(along, 1);
    sync_cta();
    project(dq, 0, Smem::kQueryNorm, Q);
    project(dk, 1, Smem::kKeyNorm, K);
  }
  sync_cta();  // K and Q are not read any more
  put(dq, Q);
  put(dk, K);
  sync_cta();
  store_rows(p.dq, Q);
  store_rows(p.dk, K);
}

// c += f o X
template <class Config>
GD_DEVICE void Gradients<Config>::add_diagonal(Rows& c, uint32_t X) const {
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) add_row(c, i, h, of_row(Smem::kDiagonal, row(i, h)), X);
}

template <class Config>
GD_DEVICE void Gradients<Config>::project(Rows& c, int which, typename Smem::Vector norm, uint32_t X) const {
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float r = of_row(norm, row(i, h));
      add_row(c, i, h, -r * r * sum_of(which, row(i, h)), X);
    }
}

template <class Config>
GD_DEVICE void Gradients<Config>::add_row(Rows& c, int i, int h, float by, uint32_t X) const {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float2 x = unpack<Elem>(load_shared_word(keys_at(X, i, h, n)));
    c[i][n][2 * h] += by * x.x;
    c[i][n][2 * h + 1] += by * x.y;
  }
}

template <class Config>
GD_DEVICE void Gradients<Config>::store_key_sums(const Rows& c, int which) const {
  float* const to = p.key_sums_of(chunk_index, key_head, which) + part * kPart + column + 2 * t;
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int n = 0; n < kN; ++n)
        if (part * kPart + column + 8 * n < p.key_dim)
          *reinterpret_cast<float2*>(to + row(i, h) * p.key_dim + 8 * n) =
              make_float2(c[i][n][2 * h], c[i][n][2 * h + 1]);
}

// Packs into the tiles of Q and K, so that a row is stored in packets.
template <class Config>
GD_DEVICE void Gradients<Config>::put(const Rows& c, uint32_t X) const {
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int n = 0; n < kN; ++n)
        store_shared_word(keys_at(X, i, h, n), pack<Elem>(c[i][n][2 * h], c[i][n][2 * h + 1]));
}

template <class Config>
GD_DEVICE void Gradients<Config>::store_rows(const TokenRows& to, uint32_t X) const {
  if (!to) return;
  auto* const data = static_cast<uint16_t*>(to.data) + to.offset(batch, token, key_head);
#pragma unroll
  for (int i = 0; i < Config::kTiles * kChunkTokens * 8 / kThreads; ++i) {
    const int packet = tid % 8, r = (tid / 8 + i * (kThreads / 8)) % kChunkTokens,
              tile = i * (kThreads / 8) / kChunkTokens;
    const int first = part * kPart + tile * kTileColumns + packet * kPacketColumns;
    if (r < rows && first < p.key_dim)
      *reinterpret_cast<uint4*>(data + r * to.token_stride + first) =
          load_shared_words(X + tile * Config::kTileBytes + tile_offset(r, packet));
  }
}

// Zeros for tokens of no sequence.
template <class Config>
GD_DEVICE void Gradients<Config>::zero_rows() const {
  if (part > 0) return;
  zero(p.dq, key_head, 1, p.key_dim);
  zero(p.dk, key_head, 1, p.key_dim);
  zero(p.dv, key_head * p.group, p.group, p.value_dim);
}

template <class Config>
GD_DEVICE void Gradients<Config>::zero(const TokenRows& to, int first_head, int heads, int columns) const {
  if (!to) return;
  const int packets = columns / kPacketColumns, per_token = heads * packets;
  for (int i = tid; i < rows * per_token; i += kThreads) {
    const int r = i / per_token, packet = i - r * per_token, head = packet / packets;
    auto* const row = static_cast<uint16_t*>(to.data) + to.offset(batch, token + r, first_head + head);
    reinterpret_cast<uint4*>(row)[packet - head * packets] = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace gatedelta::cuda::portable
