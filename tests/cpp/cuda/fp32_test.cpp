// Shapes and memory of the fp32 kernels. What the kernels compute: tests/cpp/emulate.
#include "cuda/fp32/config.hpp"

#include <gtest/gtest.h>

namespace gatedelta::cuda::fp32 {
namespace {

BackwardProblem problem_of(int64_t batch, int64_t tokens, int64_t heads, int K, int V) {
  BackwardProblem p;
  p.in.key_heads = p.in.value_heads = heads, p.in.group = 1;
  p.in.key_dim = K, p.in.value_dim = V;
  p.in.sequences = {batch, batch, tokens, {}};
  return p;
}

TEST(Fp32, PartsCoverAHead) {
  for (int K = 16; K <= 256; K += 16)
    for (int V = 16; V <= 256; V += 16) {
      const int parts = parts_of(problem_of(1, 64, 1, K, V).in), columns = cta_columns(K);
      EXPECT_GE(parts * columns, V);
      EXPECT_LT((parts - 1) * columns, V);
      EXPECT_LE(parts, 8);
    }
}

template <int kKeys>
void expect_shape(int columns, int forward, int gradients, int keys) {
  EXPECT_EQ(Shape<kKeys>::kCtaColumns, columns);
  EXPECT_EQ(Shape<kKeys>::kPerLane * Shape<kKeys>::kColumns, kStateNumbers);
  EXPECT_EQ((ForwardConfig<kKeys, true>::kBytes), forward);
  EXPECT_EQ(GradientConfig<kKeys>::kBytes, gradients);
  EXPECT_EQ(KeyConfig<kKeys>::kBytes, keys);
}
// docs/kernels/fp32.md.
TEST(Fp32, Shapes) {
  expect_shape<64>(128, 16896, 37376, 45568);
  expect_shape<128>(64, 20992, 37376, 41472);
  expect_shape<256>(32, 35328, 55808, 57856);
}

// Bytes of a token and value head, docs/kernels/fp32.md.
TEST(Fp32, Memory) {
  constexpr int64_t kEntries = 2 * 640 * 4;
  BackwardProblem p = problem_of(2, 640, 4, 128, 128);
  EXPECT_EQ(saved_layout(p.in).bytes, static_cast<size_t>(kEntries * (32 + 512)));
  const size_t recomputing = backward_layout(p).bytes;
  p.saved.present = true;
  EXPECT_EQ(recomputing, backward_layout(p).bytes + saved_layout(p.in).bytes);
  const int64_t of_spans = 2 * 20 * 4 * (128 * 128 * 4 + 2 * 32), of_sequences = 2 * 4 * 2 * 32;
  EXPECT_EQ(backward_layout(p).bytes, static_cast<size_t>(kEntries * (512 + 2 * 1024 + 12) + of_spans + of_sequences));
  p.dA_log.dtype = GD_F32;
  EXPECT_EQ(backward_layout(p).head_sums + 2 * 10 * 4 * 8, backward_layout(p).bytes);
  ForwardProblem forward;
  forward.in = p.in;
  EXPECT_EQ(forward_layout(forward).bytes, static_cast<size_t>(kEntries * 32));
  forward.saved.present = true;
  EXPECT_EQ(forward_layout(forward).bytes, 0u);
}

}  // namespace
}  // namespace gatedelta::cuda::fp32
