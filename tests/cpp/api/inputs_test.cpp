// Rules about the layer's inputs, which are the same for every operation.
#include <cmath>
#include <limits>

#include "cases.hpp"

namespace gatedelta::test {

template <class Operation>
class Inputs : public testing::Test {
 protected:
  Operation c;
};
TYPED_TEST_SUITE(Inputs, Operations);

#define RULE(name) TYPED_TEST(Inputs, name)
#define CALL auto& c = this->c

RULE(ValidCall) {
  CALL;
  EXPECT_TRUE(c.accepts());
}

RULE(RequiredTensors) {
  CALL;
  const std::pair<gd_tensor*, const char*> required[] = {
      {&c.in.q, "q"}, {&c.in.k, "k"}, {&c.in.v, "v"}, {&c.in.g, "g"}, {&c.in.beta, "beta"}};
  for (const auto& [tensor, name] : required) {
    const gd_tensor given = *tensor;
    *tensor = {};
    EXPECT_TRUE(c.invalid(std::string(name) + " is missing"));
    *tensor = given;
  }
}

RULE(HalfGivenTensor) {
  CALL;
  c.in.initial_state.rank = 4;
  EXPECT_TRUE(c.invalid("initial_state: dtype is 0 (none), must be float32, bfloat16 or float16"));
}

RULE(Rank) {
  CALL;
  c.in.q.rank = 3;
  EXPECT_TRUE(c.invalid("q: rank is 3, must be 4: [B, T, Hk, K]"));
}

RULE(RankBeyondMaximum) {
  CALL;
  c.in.g.rank = 1000000;
  EXPECT_TRUE(c.invalid("g: rank is 1000000, must be 3"));
}

RULE(DtypeNotFloat) {
  CALL;
  c.in.beta.dtype = GD_I32;
  EXPECT_TRUE(c.invalid("beta: dtype is 4 (int32), must be float32, bfloat16 or float16"));
}

RULE(DtypeUnknown) {
  CALL;
  c.in.q.dtype = 77;
  EXPECT_TRUE(c.invalid("q: dtype is 77 (unknown)"));
  c.in.q.dtype = -1;
  EXPECT_TRUE(c.invalid("q: dtype is -1 (unknown)"));
}

RULE(DtypeOfKeysDiffers) {
  CALL;
  c.in.k.dtype = GD_BF16;
  EXPECT_TRUE(c.invalid("k: dtype is bfloat16, must be float32 as that of q"));
}

RULE(DtypeOfValuesDiffers) {
  CALL;
  c.in.v.dtype = GD_F16;
  EXPECT_TRUE(c.invalid("v: dtype is float16, must be float32 as that of q"));
}

RULE(ShapeOfKeys) {
  CALL;
  c.in.k.shape[1] = kT - 1;
  EXPECT_TRUE(c.invalid("k: shape is [2, 69, 2, 16], must be [B, T, Hk, K] = [2, 70, 2, 16]"));
}

RULE(ShapeOfValues) {
  CALL;
  c.in.v.shape[0] = 1;
  EXPECT_TRUE(c.invalid("v: shape is [1, 70, 4, 32], must be [B, T, Hv, V] = [2, 70, any, any]"));
}

RULE(ShapeOfGates) {
  CALL;
  c.in.g.shape[2] = kHk;
  EXPECT_TRUE(c.invalid("g: shape is [2, 70, 2], must be [B, T, Hv] = [2, 70, 4]"));
}

RULE(ShapeOfBeta) {
  CALL;
  c.in.beta.shape[1] = 1;
  EXPECT_TRUE(c.invalid("beta: shape is [2, 1, 4], must be [B, T, Hv] = [2, 70, 4]"));
}

RULE(NegativeSize) {
  CALL;
  c.in.q.shape[1] = -3;
  EXPECT_TRUE(c.invalid("q: shape[1] is -3, out of range"));
}

RULE(SizeBeyondMemory) {
  CALL;
  c.in.q.shape[1] = int64_t{1} << 45;
  EXPECT_TRUE(c.invalid("q: shape[1] is 35184372088832, out of range"));
}

RULE(RowsNotContiguous) {
  CALL;
  c.in.v.stride[3] = 2;
  EXPECT_TRUE(c.invalid("v: stride[3] is 2, must be 1 (rows must be contiguous)"));
}

RULE(NegativeStride) {
  CALL;
  c.in.k.stride[1] = -32;
  EXPECT_TRUE(c.invalid("k: stride[1] is -32, must not be negative"));
}

RULE(StridesBeyondMemory) {
  CALL;
  c.in.q.stride[0] = std::numeric_limits<int64_t>::max();
  EXPECT_TRUE(c.invalid("q: shape [2, 70, 2, 16] with strides [9223372036854775807, 32, 16, 1] does not fit"));
}

RULE(ShapeProductBeyondMemory) {
  CALL;
  c.in.q.shape[0] = c.in.q.shape[1] = int64_t{1} << 40;
  c.in.q.stride[0] = c.in.q.stride[1] = 0;
  EXPECT_TRUE(c.invalid("q: shape [1099511627776, 1099511627776, 2, 16] with strides [0, 0, 16, 1] does not fit"));
}

RULE(AddressesBeyondMemory) {
  CALL;
  c.in.q.data = reinterpret_cast<void*>(~uintptr_t{63});
  EXPECT_TRUE(c.invalid("q: shape [2, 70, 2, 16] with strides [2240, 32, 16, 1] does not fit"));
}

RULE(TooManyTokens) {
  CALL;
  for (gd_tensor* t : {&c.in.q, &c.in.k, &c.in.v, &c.in.g, &c.in.beta}) {
    t->shape[0] = 1 << 21;
    t->shape[1] = int64_t{1} << 22;
    t->stride[0] = t->stride[1] = 0;
  }
  EXPECT_TRUE(c.invalid("tokens with 4 heads are too many to compute"));
}

RULE(NullData) {
  CALL;
  c.in.beta.data = nullptr;
  EXPECT_TRUE(c.invalid("beta: data is null, but shape is [2, 70, 4]"));
}

RULE(MisalignedData) {
  CALL;
  c.in.q.data = static_cast<char*>(c.in.q.data) + 2;
  EXPECT_TRUE(c.invalid("is not aligned to its elements of 4 bytes"));
}

RULE(NoKeyHeads) {
  CALL;
  c.in.q.shape[2] = c.in.k.shape[2] = 0;
  EXPECT_TRUE(c.invalid("Hk is 0"));
}

RULE(HeadRatio) {
  CALL;
  for (gd_tensor* t : {&c.in.v, &c.in.g, &c.in.beta}) t->shape[2] = 3;
  EXPECT_TRUE(c.invalid("v has Hv = 3 heads, must be a multiple of Hk = 2"));
}

RULE(NoValueHeads) {
  CALL;
  c.in.v.shape[2] = 0;
  EXPECT_TRUE(c.invalid("v has Hv = 0 heads, must be a multiple of Hk = 2"));
}

RULE(TooManyHeads) {
  CALL;
  c.in.v.shape[2] = 1 << 17;
  c.in.v.stride[2] = 0;
  EXPECT_TRUE(c.invalid("v has Hv = 131072 heads, must be at most 65536"));
}

RULE(KeyDimension) {
  CALL;
  for (const int64_t size : {0, 8, 24, 272}) {
    c.in.q.shape[3] = size;
    EXPECT_TRUE(c.invalid("K is " + std::to_string(size) + ", must be a multiple of 16 from 16 to 256"));
  }
}

RULE(ValueDimension) {
  CALL;
  c.in.v.shape[3] = 20;
  EXPECT_TRUE(c.invalid("V is 20, must be a multiple of 16 from 16 to 256"));
}

RULE(GateKind) {
  CALL;
  c.in.gate = 2;
  EXPECT_TRUE(c.invalid("gate is 2, must be from 0 to 1"));
}

RULE(BetaKind) {
  CALL;
  c.in.beta_kind = -1;
  EXPECT_TRUE(c.invalid("beta_kind is -1, must be from 0 to 2"));
}

RULE(StateLayout) {
  CALL;
  c.in.state_layout = 3;
  EXPECT_TRUE(c.invalid("state_layout is 3, must be from 0 to 1"));
}

RULE(KeyHeadOrder) {
  CALL;
  c.in.key_head_order = GD_KEY_HEADS_TILED;
  EXPECT_TRUE(c.accepts());
  c.in.key_head_order = 2;
  EXPECT_TRUE(c.invalid("key_head_order is 2, must be from 0 to 1"));
}

RULE(RawGateNeedsALog) {
  CALL;
  c.in.gate = GD_GATE_RAW;
  EXPECT_TRUE(c.invalid("A_log is missing"));
  c.in.A_log = c.input({kHv});
  EXPECT_TRUE(c.accepts());
}

RULE(ALogWithoutRawGate) {
  CALL;
  c.in.A_log = c.input({kHv});
  EXPECT_TRUE(c.invalid("A_log is given, but gate is not raw"));
}

RULE(BiasWithoutRawGate) {
  CALL;
  c.in.dt_bias = c.input({kHv});
  EXPECT_TRUE(c.invalid("dt_bias is given, but gate is not raw"));
}

RULE(ShapeOfALog) {
  CALL;
  c.in.gate = GD_GATE_RAW;
  c.in.A_log = c.input({kHk});
  EXPECT_TRUE(c.invalid("A_log: shape is [2], must be [Hv] = [4]"));
}

RULE(ShapeOfBias) {
  CALL;
  c.in.gate = GD_GATE_RAW;
  c.in.A_log = c.input({kHv});
  c.in.dt_bias = c.input({1, kHv});
  EXPECT_TRUE(c.invalid("dt_bias: rank is 2, must be 1: [Hv]"));
}

RULE(OffsetsRank) {
  CALL;
  c.pack({0, 140});
  c.in.cu_seqlens.rank = 2;
  EXPECT_TRUE(c.invalid("cu_seqlens: rank is 2, must be 1: [N + 1]"));
}

RULE(OffsetsDtype) {
  CALL;
  c.pack({0, 140});
  c.in.cu_seqlens.dtype = GD_F32;
  EXPECT_TRUE(c.invalid("cu_seqlens: dtype is 1 (float32), must be int32 or int64"));
}

RULE(OffsetsEmpty) {
  CALL;
  c.pack({0, 140});
  c.in.cu_seqlens.shape[0] = 0;
  EXPECT_TRUE(c.invalid("cu_seqlens is empty"));
}

RULE(OffsetsNotContiguous) {
  CALL;
  c.pack({0, 0, 140, 140});
  c.in.cu_seqlens.shape[0] = 2;
  c.in.cu_seqlens.stride[0] = 2;
  EXPECT_TRUE(c.invalid("cu_seqlens: stride[0] is 2, must be 1 (offsets must be contiguous)"));
}

RULE(OffsetsWithBatch) {
  CALL;
  c.in.cu_seqlens = c.indices32({0, 70});
  EXPECT_TRUE(c.invalid("B is 2, must be 1 with cu_seqlens"));
}

RULE(OffsetsStart) {
  CALL;
  c.pack({1, 140});
  EXPECT_TRUE(c.invalid("cu_seqlens[0] is 1, must be 0"));
}

RULE(OffsetsDecrease) {
  CALL;
  c.pack({0, 60, 59, 140});
  EXPECT_TRUE(c.invalid("cu_seqlens[2] is 59, less than the 60 before it"));
}

RULE(OffsetsPastEnd) {
  CALL;
  c.pack({0, 70, 141});
  EXPECT_TRUE(c.invalid("cu_seqlens ends at 141, past the T = 140 tokens there are"));
}

RULE(OffsetsOfEitherWidth) {
  CALL;
  c.pack({0, 0, 65, 65, 130});
  EXPECT_TRUE(c.accepts());
  c.in.cu_seqlens = c.indices32({0, 0, 65, 65, 130});
  EXPECT_TRUE(c.accepts());
  c.in.cu_seqlens = c.indices32({0, -1, 65});
  EXPECT_TRUE(c.invalid("cu_seqlens[1] is -1, less than the 0 before it"));
}

RULE(NoSequences) {
  CALL;
  c.pack({0});
  EXPECT_TRUE(c.accepts());
}

RULE(NumberOfInitialStates) {
  CALL;
  c.in.initial_state = c.state(3);
  EXPECT_TRUE(c.invalid("initial_state: shape is [3, 4, 16, 32], must be [N, Hv, K, V] = [2, 4, 16, 32]"));
}

RULE(LayoutOfInitialState) {
  CALL;
  c.in.initial_state = c.state(2);
  c.in.state_layout = GD_STATE_VK;
  EXPECT_TRUE(c.invalid("initial_state: shape is [2, 4, 16, 32], must be [N, Hv, V, K] = [2, 4, 32, 16]"));
}

RULE(InitialStateDtype) {
  CALL;
  c.in.initial_state = c.state(2);
  c.in.initial_state.dtype = GD_I64;
  EXPECT_TRUE(c.invalid("initial_state: dtype is 5 (int64), must be float32, bfloat16 or float16"));
}

RULE(InitialStateMatrices) {
  CALL;
  c.in.initial_state = c.input({2, kHv, kK, 2 * kV});
  c.in.initial_state.shape[3] = kV;
  EXPECT_TRUE(c.invalid("initial_state: stride[2] is 64, must be 32 (each state matrix must be contiguous)"));
}

RULE(InitialStatePoolOfAnotherStride) {
  CALL;
  c.in.initial_state = c.input({2, 3 * kHv, kK, kV});  // as a pool of three layers seen from one of them
  c.in.initial_state.shape[1] = kHv;
  EXPECT_TRUE(c.accepts());
}

RULE(InitialIndicesWithoutState) {
  CALL;
  c.in.initial_indices = c.indices({0, 1});
  EXPECT_TRUE(c.invalid("initial_indices is given without initial_state"));
}

RULE(NumberOfInitialIndices) {
  CALL;
  c.in.initial_state = c.state(5);
  c.in.initial_indices = c.indices({0, 1, 2});
  EXPECT_TRUE(c.invalid("initial_indices: shape is [3], must be [N] = [2]"));
}

RULE(InitialIndicesDtype) {
  CALL;
  c.in.initial_state = c.state(5);
  c.in.initial_indices = c.input({2});
  EXPECT_TRUE(c.invalid("initial_indices: dtype is 1 (float32), must be int32 or int64"));
}

RULE(InitialIndexPastPool) {
  CALL;
  c.in.initial_state = c.state(5);
  c.in.initial_indices = c.indices({4, 5});
  EXPECT_TRUE(c.invalid("initial_indices[1] is 5, but initial_state has 5 slots"));
  c.in.initial_indices = c.indices32({4, 5});
  EXPECT_TRUE(c.invalid("initial_indices[1] is 5, but initial_state has 5 slots"));
}

RULE(SharedAndNegativeInitialSlots) {
  CALL;
  c.in.initial_state = c.state(5);
  c.in.initial_indices = c.indices({4, 4});
  EXPECT_TRUE(c.accepts());
  c.in.initial_indices = c.indices({-1, std::numeric_limits<int64_t>::min()});
  EXPECT_TRUE(c.accepts());
}

RULE(ScaleWithoutFlag) {
  CALL;
  c.in.scale = 0.5f;
  EXPECT_TRUE(c.invalid("scale is 0.5, but has_scale is 0"));
}

RULE(ScaleNotFinite) {
  CALL;
  c.in.has_scale = 1;
  c.in.scale = INFINITY;
  EXPECT_TRUE(c.invalid("scale is inf, must be finite"));
}

RULE(ReservedInputs) {
  CALL;
  c.in.reserved[1] = 1;
  EXPECT_TRUE(c.invalid("in: reserved fields must be zero"));
  c.in.reserved[1] = 0;
  c.in.reserved_flags = 1;
  EXPECT_TRUE(c.invalid("in: reserved fields must be zero"));
}

RULE(BroadcastInputs) {
  CALL;
  c.in.beta.stride[0] = c.in.beta.stride[1] = 0;
  c.in.k.stride[2] = 0;
  EXPECT_TRUE(c.accepts());
}

RULE(InputsShareMemory) {
  CALL;
  c.in.k.data = c.in.q.data;
  EXPECT_TRUE(c.accepts());
}

RULE(StridesOfSingleEntriesAreFree) {
  CALL;
  c.pack({0, 140});
  for (gd_tensor* t : {&c.in.q, &c.in.k, &c.in.v, &c.in.g, &c.in.beta})
    t->stride[0] = std::numeric_limits<int64_t>::min();
  EXPECT_TRUE(c.accepts());
}

}  // namespace gatedelta::test
