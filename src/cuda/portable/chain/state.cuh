// The state's numbers: to registers, to memory, as snapshots; and outputs.
#pragma once

#include "cuda/portable/chain/chain.cuh"

namespace gatedelta::cuda::portable {

// Calls f with every number of S and its distance from the matrix' first one; not with padded ones.
template <class Config>
template <class F>
GD_DEVICE void Chain<Config>::each_number(int column, int columns, int key_stride, int value_stride, const F& f) {
  const int thread = opaque(lane);
  const int first = thread % 4 * 2 * key_stride + (column + thread / 4) * value_stride;
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int j = 0; j < kJ; ++j) {
      if (column + 16 * i >= columns || 8 * j >= p.key_dim) continue;
#pragma unroll
      for (int c = 0; c < 4; ++c)
        f(S[i][j][c], first + (8 * j + c % 2) * key_stride + (16 * i + c / 2 * 8) * value_stride);
    }
}

template <class Config>
GD_DEVICE void Chain<Config>::zero_state() {
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int j = 0; j < kJ; ++j)
#pragma unroll
      for (float& x : S[i][j]) x = 0;
}

template <class Config>
GD_DEVICE void Chain<Config>::load_matrix(const void* data, gd_dtype dtype, int64_t matrix, int column) {
  with_stored(dtype, [&](auto stored) {
    using Stored = decltype(stored);
    const auto* const from = static_cast<const typename Stored::Word*>(data) + matrix;
    each_number(column, [&](float& x, int i) { x = Stored::widen(from[i]); });
  });
}

// Loads the state that a segment begins with; zeros where it begins with a warm-up.
template <class Config>
GD_DEVICE void Chain<Config>::load_boundary_state(const Segment& segment, const Place& at) {
  zero_state();
  if (segment.begins_at_boundary()) {
    load_matrix(p.boundary_states, GD_F32, work_item() * p.state_numbers(), at.column);
  } else if (segment.warmup == 0) {
    const int64_t slot = p.initial.slot(at.sequence);
    if (slot < 0) return;
    const bool is_copied = p.initial_copy;
    load_matrix(is_copied ? p.initial_copy : p.initial.data, p.initial.dtype,
                is_copied ? (int64_t{at.sequence} * p.value_heads + at.head) * p.state_numbers()
                          : p.initial.offset(slot, at.head),
                at.column);
  }
}

template <class Config>
GD_DEVICE void Chain<Config>::store_state(void* data, gd_dtype dtype, int64_t matrix, int column, int columns,
                                          int key_stride, int value_stride) {
  with_stored(dtype, [&](auto stored) {
    using Stored = decltype(stored);
    auto* const to = static_cast<typename Stored::Word*>(data) + matrix;
    each_number(column, columns, key_stride, value_stride, [&](float& x, int i) { to[i] = Stored::narrow(x); });
  });
}

// A snapshot of a chunk is V x K 16-bit numbers. Eight value columns by eight key dimensions are 128 bytes, which is
// one register of a warp; such tiles are in the order of key dimensions, then of value columns.
template <class Config>
GD_DEVICE uint32_t* Chain<Config>::snapshot_at(const Place& at, int64_t chunk) const {
  const int64_t matrix = (p.sequences.first_chunk_index(at.sequence) + chunk) * p.value_heads + at.head;
  return reinterpret_cast<uint32_t*>(p.snapshots + matrix * p.snapshot_bytes() + at.column * 2 * p.key_dim) + lane;
}

// Stores S^T packed as for a product. NOTE(ptxas): in the loop over products the stores become branches between them.
template <class Config>
GD_DEVICE void Chain<Config>::store_snapshot(uint32_t*& to) {
  const int columns = this->columns();
#pragma unroll
  for (int kk = 0; kk < kKeyBlocks; ++kk) {
    uint32_t s[kI][4];
    pack_state(s, kk);
    const bool is_key = 16 * kk < p.key_dim;
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int h = 0; h < 4; ++h)
        if (is_key & (16 * i < columns)) to[((2 * i + h % 2) * (p.key_dim / 8) + 2 * kk + h / 2) * 32] = s[i][h];
  }
  to += Pass::kDirection * p.value_heads * (p.snapshot_bytes() / 4);
}

// Packs sixteen key dimensions of S^T as a left operand.
template <class Config>
GD_DEVICE void Chain<Config>::pack_state(uint32_t (&s)[kI][4], int kk) const {
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float(&c)[4] = S[i][2 * kk + h];
      s[i][2 * h] = pack<Elem>(c[0], c[1]);
      s[i][2 * h + 1] = pack<Elem>(c[2], c[3]);
    }
}

template <class Config>
GD_DEVICE void Chain<Config>::scale_state(int kk, float by) {
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (float& x : S[i][2 * kk + h]) x *= by;
}

// c has value columns as rows; memory gets tokens as rows. Two lanes exchange a register, so that each has 8 bytes of a
// row and four lanes have 32.
template <class Config>
GD_DEVICE void Chain<Config>::store_outputs(const Tokens& c, int rows) {
  const int columns = this->columns();
  const bool odd = t & 1;
#pragma unroll
  for (int n = 0; n < kT; ++n)
#pragma unroll
    for (int i = 0; i < kI; ++i) {
      const uint32_t a = transposed(pack<Elem>(c[i][n][0], c[i][n][1])),
                     b = transposed(pack<Elem>(c[i][n][2], c[i][n][3]));
      const uint32_t other = shuffle_xor(odd ? a : b, 1);
      if (8 * n + g < rows && 16 * i < columns)
        *reinterpret_cast<uint2*>(o + 8 * n * p.o_stride + 16 * i) = make_uint2(odd ? other : a, odd ? b : other);
    }
  o += step_stride(p.o_stride);
}

}  // namespace gatedelta::cuda::portable
