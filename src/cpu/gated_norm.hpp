// Gated RMSNorm, forward and backward, one row after the other:
//   r = (mean x^2 + eps)^-1/2,  n = r x,  a = w n,  y = a act(z)
//   da = dy act(z),  dz = dy a act'(z),  dw = sum of da n over rows,  dn = w da,  dx = r (dn - n mean(dn n))
// A row passes through the L1 cache as fp32. An item is a block of neighbouring rows.
#pragma once

#include <algorithm>
#include <cmath>

#include "cpu/parallel.hpp"
#include "cpu/plan.hpp"

namespace gatedelta::cpu::GD_ISA {

constexpr int kMaxNormDim = 512;
constexpr int64_t kNormBlockRows = 32;

// act(z), and its derivative.
struct NormGate {
  Vec value, slope;
};
GD_ALWAYS_INLINE NormGate norm_gate(Vec z, gd_norm_activation activation) {
  // e <= 1: no z is too large, and 1 - sigmoid(z) has no cancellation.
  const IntVec negative = z < Vec{};
  const Vec e = exp(negative ? z : -z), q = 1.0f / (1.0f + e);
  const Vec sigmoid = negative ? e * q : q, rest = negative ? q : e * q;
  if (activation == GD_NORM_SIGMOID) return {sigmoid, sigmoid * rest};
  return {z * sigmoid, sigmoid + z * sigmoid * rest};
}

// n is a multiple of 16. Several chains of sums hide the latency of one.
GD_ALWAYS_INLINE float norm_dot(const float* a, const float* b, int n) {
  constexpr int kChains = 16 / kVector;
  Vec chain[kChains] = {};
  for (int i = 0; i < n; i += 16)
    for (int j = 0; j < kChains; ++j) chain[j] += load(a + i + j * kVector) * load(b + i + j * kVector);
  for (int j = 1; j < kChains; ++j) chain[0] += chain[j];
  return sum(chain[0]);
}

GD_ALWAYS_INLINE void round_row(float* x, gd_dtype dtype, int n) {
  if (dtype == GD_BF16) {
    for (int i = 0; i < n; i += kVector) store(x + i, widen_bf16(round_bf16(load(x + i))));
  } else if (dtype == GD_F16) {
    for (int i = 0; i < n; ++i) x[i] = f16_to_f32(f32_to_f16(x[i]));
  }
}

// Base of forward and backward.
class NormRows {
 public:
  NormRows(const GatedNorm& in, const Context& context, int64_t block_rows)
      : in_(in), context_(context), D_(in.dim), block_rows_(block_rows) {}

 protected:
  struct Weight {
    alignas(64) float values[kMaxNormDim];
  };
  int64_t blocks() const { return (in_.rows() + block_rows_ - 1) / block_rows_; }

  // Calls row(batch, token, head, weight, block) for all rows; those of a block one after the other. begin(block) comes
  // before them.
  template <class Begin, class Row>
  void for_each_row(const Begin& begin, const Row& row) const {
    // A lane with fewer numbers than this takes longer to start than it saves.
    constexpr int64_t kLaneNumbers = 16 * 1024;
    Context context = context_;
    context.lanes = static_cast<int>(std::clamp<int64_t>(in_.rows() * D_ / kLaneNumbers, 1, context_.lanes));
    for_each_share(context, blocks(), [&](int, int64_t block) {
      begin(block);
      Weight weight;
      if (in_.weight) {
        load_row(weight.values, in_.weight.data, in_.weight.dtype, 0, D_);
      } else {
        for (int i = 0; i < D_; i += kVector) store(weight.values + i, splat(1.0f));
      }
      const int64_t first = block * block_rows_, end = std::min(first + block_rows_, in_.rows());
      int64_t head = first % in_.heads, token = first / in_.heads % in_.tokens;
      int64_t batch = first / in_.heads / in_.tokens;
      for (int64_t r = first; r < end; ++r) {
        row(batch, token, head, weight.values, block);
        if (++head < in_.heads) continue;
        head = 0;
        if (++token < in_.tokens) continue;
        token = 0;
        ++batch;
      }
    });
  }

  GD_ALWAYS_INLINE void read(float* to, const TokenRows& from, int64_t batch, int64_t token, int64_t head) const {
    load_row(to, from.data, from.dtype, from.offset(batch, token, head), D_);
  }
  GD_ALWAYS_INLINE void write(const TokenRows& to, const float* from, int64_t batch, int64_t token,
                              int64_t head) const {
    store_row(to.data, to.dtype, to.offset(batch, token, head), from, D_);
  }
  GD_ALWAYS_INLINE float inverse_rms(const float* x) const {
    return 1.0f / std::sqrt(norm_dot(x, x, D_) / static_cast<float>(D_) + in_.eps);
  }
  // a = w n with the roundings before the gate; n becomes what is multiplied.
  GD_ALWAYS_INLINE void apply_weight(float* a, float* n, const float* w) const {
    if (in_.round_before_gate) round_row(n, in_.x.dtype, D_);
    for (int i = 0; i < D_; i += kVector) store(a + i, load(n + i) * load(w + i));
    round_row(a, in_.product_dtype(), D_);
  }

  const GatedNorm& in_;
  const Context& context_;
  const int D_;
  const int64_t block_rows_;
};

class GatedNormForward : NormRows {
 public:
  GatedNormForward(const GatedNormProblem& problem, const Context& context)
      : NormRows(problem.in, context, kNormBlockRows), y_(problem.y) {}

  void run() const {
    const auto row = [&](int64_t batch, int64_t token, int64_t head, const float* w, int64_t) {
      forward_row(batch, token, head, w);
    };
    for_each_row([](int64_t) {}, row);
  }

 private:
  void forward_row(int64_t batch, int64_t token, int64_t head, const float* w) const {
    alignas(64) float x[kMaxNormDim], z[kMaxNormDim];
    read(x, in_.x, batch, token, head);
    const float r = inverse_rms(x);
    for (int i = 0; i < D_; i += kVector) store(x + i, r * load(x + i));
    apply_weight(x, x, w);
    if (in_.z) {
      read(z, in_.z, batch, token, head);
      for (int i = 0; i < D_; i += kVector) store(x + i, load(x + i) * norm_gate(load(z + i), in_.activation).value);
    }
    write(y_, x, batch, token, head);
  }

  const TokenRows& y_;
};

// Blocks and the order of their sums follow from the shape alone, so dweight does not depend on lanes.
class GatedNormBackward : NormRows {
 public:
  GatedNormBackward(const GatedNormBackwardProblem& problem, const Context& context)
      : NormRows(problem.in, context, std::max(kNormBlockRows, (problem.in.rows() + kMaxSums - 1) / kMaxSums)),
        problem_(problem) {}

  size_t workspace() const {
    Carver carve;
    if (problem_.dweight) carve.take<float>(blocks() * D_);
    return carve.used();
  }

  void run() const {
    float* const sums = reinterpret_cast<float*>(context_.workspace);  // [blocks][D]
    const auto begin = [&](int64_t block) {
      if (problem_.dweight) clear(sums + block * D_);
    };
    for_each_row(begin, [&](int64_t batch, int64_t token, int64_t head, const float* w, int64_t block) {
      backward_row(batch, token, head, w, problem_.dweight ? sums + block * D_ : nullptr);
    });
    if (!problem_.dweight) return;
    alignas(64) float total[kMaxNormDim];
    clear(total);
    for (int64_t block = 0; block < blocks(); ++block) add(total, sums + block * D_);
    store_row(problem_.dweight.data, problem_.dweight.dtype, 0, total, D_);
  }

 private:
  static constexpr int64_t kMaxSums = 1024;  // blocks, where rows are many

  void clear(float* x) const {
    for (int i = 0; i < D_; i += kVector) store(x + i, Vec{});
  }
  void add(float* to, const float* x) const {
    for (int i = 0; i < D_; i += kVector) store(to + i, load(to + i) + load(x + i));
  }

  void backward_row(int64_t batch, int64_t token, int64_t head, const float* w, float* dw) const {
    alignas(64) float n[kMaxNormDim], factor[kMaxNormDim], a[kMaxNormDim], z[kMaxNormDim], dn[kMaxNormDim];
    read(n, in_.x, batch, token, head);
    const float r = inverse_rms(n);
    for (int i = 0; i < D_; i += kVector) {
      const Vec x = r * load(n + i);
      store(n + i, x);
      store(factor + i, x);
    }
    apply_weight(a, factor, w);
    read(dn, problem_.d_y, batch, token, head);
    if (in_.z) {
      read(z, in_.z, batch, token, head);
      for (int i = 0; i < D_; i += kVector) {
        const NormGate gate = norm_gate(load(z + i), in_.activation);
        const Vec dy = load(dn + i);
        store(z + i, dy * load(a + i) * gate.slope);
        store(dn + i, dy * gate.value);
      }
      if (problem_.dz) write(problem_.dz, z, batch, token, head);
    }
    // dn holds da from here on.
    if (dw)
      for (int i = 0; i < D_; i += kVector) store(dw + i, load(dw + i) + load(dn + i) * load(factor + i));
    if (!problem_.dx) return;
    for (int i = 0; i < D_; i += kVector) store(dn + i, load(dn + i) * load(w + i));
    const float mean = norm_dot(dn, n, D_) / static_cast<float>(D_);
    for (int i = 0; i < D_; i += kVector) store(dn + i, r * (load(dn + i) - mean * load(n + i)));
    write(problem_.dx, dn, batch, token, head);
  }

  const GatedNormBackwardProblem& problem_;
};

}  // namespace gatedelta::cpu::GD_ISA
