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

RULE(Rules) {
  check_rules<TypeParam>({
      {"ValidCall", [](auto&) {}},
      {"HalfGivenTensor", [](auto& c) { c.in.initial_state.rank = 4; },
       "initial_state: dtype is none, must be float32, bfloat16 or float16"},
      {"Rank", [](auto& c) { c.in.q.rank = 3; }, "q: rank is 3, must be 4: [B, T, Hk, K]"},
      {"RankBeyondMaximum", [](auto& c) { c.in.g.rank = 1000000; }, "g: rank is 1000000, must be 3"},
      {"DtypeNotFloat", [](auto& c) { c.in.beta.dtype = GD_I32; },
       "beta: dtype is int32, must be float32, bfloat16 or float16"},
      {"DtypeUnknown", [](auto& c) { c.in.q.dtype = 77; }, "q: dtype is unknown"},
      {"", [](auto& c) { c.in.q.dtype = -1; }, "q: dtype is unknown"},
      {"DtypeOfKeysDiffers", [](auto& c) { c.in.k.dtype = GD_BF16; },
       "k: dtype is bfloat16, must be float32 as that of q"},
      {"DtypeOfValuesDiffers", [](auto& c) { c.in.v.dtype = GD_F16; },
       "v: dtype is float16, must be float32 as that of q"},
      {"ShapeOfKeys", [](auto& c) { c.in.k.shape[1] = kT - 1; },
       "k: shape is [2, 69, 2, 16], must be [B, T, Hk, K] = [2, 70, 2, 16]"},
      {"ShapeOfValues", [](auto& c) { c.in.v.shape[0] = 1; },
       "v: shape is [1, 70, 4, 32], must be [B, T, Hv, V] = [2, 70, any, any]"},
      {"ShapeOfGates", [](auto& c) { c.in.g.shape[2] = kHk; },
       "g: shape is [2, 70, 2], must be [B, T, Hv] = [2, 70, 4]"},
      {"ShapeOfBeta", [](auto& c) { c.in.beta.shape[1] = 1; },
       "beta: shape is [2, 1, 4], must be [B, T, Hv] = [2, 70, 4]"},
      {"NegativeSize", [](auto& c) { c.in.q.shape[1] = -3; }, "q: shape[1] is -3, out of range"},
      {"SizeBeyondMemory", [](auto& c) { c.in.q.shape[1] = int64_t{1} << 45; },
       "q: shape[1] is 35184372088832, out of range"},
      {"RowsNotContiguous", [](auto& c) { c.in.v.stride[3] = 2; },
       "v: stride[3] is 2, must be 1 (rows must be contiguous)"},
      {"NegativeStride", [](auto& c) { c.in.k.stride[1] = -32; }, "k: stride[1] is -32, must not be negative"},
      {"StridesBeyondMemory", [](auto& c) { c.in.q.stride[0] = std::numeric_limits<int64_t>::max(); },
       "q: shape [2, 70, 2, 16] with strides [9223372036854775807, 32, 16, 1] does not fit"},
      {"ShapeProductBeyondMemory",
       [](auto& c) {
         c.in.q.shape[0] = c.in.q.shape[1] = int64_t{1} << 40;
         c.in.q.stride[0] = c.in.q.stride[1] = 0;
       },
       "q: shape [1099511627776, 1099511627776, 2, 16] with strides [0, 0, 16, 1] does not fit"},
      {"AddressesBeyondMemory", [](auto& c) { c.in.q.data = reinterpret_cast<void*>(~uintptr_t{63}); },
       "q: shape [2, 70, 2, 16] with strides [2240, 32, 16, 1] does not fit"},
      {"TooManyTokens",
       [](auto& c) {
         for (gd_tensor* t : {&c.in.q, &c.in.k, &c.in.v, &c.in.g, &c.in.beta}) {
           t->shape[0] = 1 << 21;
           t->shape[1] = int64_t{1} << 22;
           t->stride[0] = t->stride[1] = 0;
         }
       },
       "tokens with 4 heads are too many to compute"},
      {"NullData", [](auto& c) { c.in.beta.data = nullptr; }, "beta: data is null, but shape is [2, 70, 4]"},
      {"MisalignedData", [](auto& c) { c.in.q.data = static_cast<char*>(c.in.q.data) + 2; },
       "is not aligned to its elements of 4 bytes"},
      {"NoKeyHeads", [](auto& c) { c.in.q.shape[2] = c.in.k.shape[2] = 0; }, "Hk is 0"},
      {"HeadRatio",
       [](auto& c) {
         for (gd_tensor* t : {&c.in.v, &c.in.g, &c.in.beta}) t->shape[2] = 3;
       },
       "v has Hv = 3 heads, must be a multiple of Hk = 2"},
      {"NoValueHeads", [](auto& c) { c.in.v.shape[2] = 0; }, "v has Hv = 0 heads, must be a multiple of Hk = 2"},
      {"TooManyHeads", [](auto& c) { c.in.v.shape[2] = 1 << 17, c.in.v.stride[2] = 0; },
       "v has Hv = 131072 heads, must be at most 65536"},
      {"ValueDimension", [](auto& c) { c.in.v.shape[3] = 20; }, "V is 20, must be a multiple of 16 from 16 to 256"},
      {"GateKind", [](auto& c) { c.in.gate = 2; }, "gate is 2, must be from 0 to 1"},
      {"BetaKind", [](auto& c) { c.in.beta_kind = -1; }, "beta_kind is -1, must be from 0 to 2"},
      {"StateLayout", [](auto& c) { c.in.state_layout = 3; }, "state_layout is 3, must be from 0 to 1"},
      {"KeyHeadOrder", [](auto& c) { c.in.key_head_order = GD_KEY_HEADS_TILED; }},
      {"", [](auto& c) { c.in.key_head_order = 2; }, "key_head_order is 2, must be from 0 to 1"},
      {"RawGateNeedsALog", [](auto& c) { c.in.gate = GD_GATE_RAW; }, "A_log is missing"},
      {"", [](auto& c) { c.in.A_log = c.input({kHv}); }},
      {"ALogWithoutRawGate", [](auto& c) { c.in.A_log = c.input({kHv}); },
       "A_log is given, but it acts only on a raw g (use_gate_in_kernel)"},
      {"BiasWithoutRawGate", [](auto& c) { c.in.dt_bias = c.input({kHv}); },
       "dt_bias is given, but it acts only on a raw g (use_gate_in_kernel)"},
      {"ShapeOfALog", [](auto& c) { c.in.gate = GD_GATE_RAW, c.in.A_log = c.input({kHk}); },
       "A_log: shape is [2], must be [Hv] = [4]"},
      {"ShapeOfBias",
       [](auto& c) {
         c.in.gate = GD_GATE_RAW, c.in.A_log = c.input({kHv}), c.in.dt_bias = c.input({1, kHv});
       },
       "dt_bias: rank is 2, must be 1: [Hv]"},
      {"OffsetsRank", [](auto& c) { c.pack(0, 140), c.in.cu_seqlens.rank = 2; },
       "cu_seqlens: rank is 2, must be 1: [N + 1]"},
      {"OffsetsDtype", [](auto& c) { c.pack(0, 140), c.in.cu_seqlens.dtype = GD_F32; },
       "cu_seqlens: dtype is float32, must be int32 or int64"},
      {"OffsetsEmpty", [](auto& c) { c.pack(0, 140), c.in.cu_seqlens.shape[0] = 0; }, "cu_seqlens is empty"},
      {"OffsetsNotContiguous",
       [](auto& c) { c.pack(0, 0, 140, 140), c.in.cu_seqlens.shape[0] = 2, c.in.cu_seqlens.stride[0] = 2; },
       "cu_seqlens: stride[0] is 2, must be 1 (offsets must be contiguous)"},
      {"OffsetsWithBatch", [](auto& c) { c.in.cu_seqlens = c.indices32(0, 70); }, "B is 2, must be 1 with cu_seqlens"},
      {"OffsetsStart", [](auto& c) { c.pack(1, 140); }, "cu_seqlens[0] is 1, must be 0"},
      {"OffsetsDecrease", [](auto& c) { c.pack(0, 60, 59, 140); }, "cu_seqlens[2] is 59, less than the 60 before it"},
      {"OffsetsPastEnd", [](auto& c) { c.pack(0, 70, 141); },
       "cu_seqlens ends at 141, past the T = 140 tokens there are"},
      {"OffsetsOfEitherWidth", [](auto& c) { c.pack(0, 0, 65, 65, 130); }},
      {"", [](auto& c) { c.in.cu_seqlens = c.indices32(0, 0, 65, 65, 130); }},
      {"", [](auto& c) { c.in.cu_seqlens = c.indices32(0, -1, 65); }, "cu_seqlens[1] is -1, less than the 0 before it"},
      {"NoSequences", [](auto& c) { c.pack(0); }},
      {"NumberOfInitialStates", [](auto& c) { c.in.initial_state = c.state(3); },
       "initial_state: shape is [3, 4, 16, 32], must be [N, Hv, K, V] = [2, 4, 16, 32]"},
      {"LayoutOfInitialState", [](auto& c) { c.in.initial_state = c.state(2), c.in.state_layout = GD_STATE_VK; },
       "initial_state: shape is [2, 4, 16, 32], must be [N, Hv, V, K] = [2, 4, 32, 16]"},
      {"InitialStateDtype", [](auto& c) { c.in.initial_state = c.state(2), c.in.initial_state.dtype = GD_I64; },
       "initial_state: dtype is int64, must be float32, bfloat16 or float16"},
      {"InitialStateMatrices",
       [](auto& c) {
         c.in.initial_state = c.input({2, kHv, kK, 2 * kV}), c.in.initial_state.shape[3] = kV;
       },
       "initial_state: stride[2] is 64, must be 32 (each state matrix must be contiguous)"},
      {"InitialStatePoolOfAnotherStride",
       [](auto& c) {
         c.in.initial_state = c.input({2, 3 * kHv, kK, kV});
         // as a pool of three layers seen from one of them
         c.in.initial_state.shape[1] = kHv;
       }},
      {"InitialIndicesWithoutState", [](auto& c) { c.in.initial_state_indices = c.indices(0, 1); },
       "initial_state_indices is given without initial_state"},
      {"NumberOfInitialIndices",
       [](auto& c) { c.in.initial_state = c.state(5), c.in.initial_state_indices = c.indices(0, 1, 2); },
       "initial_state_indices: shape is [3], must be [N] = [2]"},
      {"InitialIndicesDtype",
       [](auto& c) { c.in.initial_state = c.state(5), c.in.initial_state_indices = c.input({2}); },
       "initial_state_indices: dtype is float32, must be int32 or int64"},
      {"InitialIndexPastPool",
       [](auto& c) { c.in.initial_state = c.state(5), c.in.initial_state_indices = c.indices(4, 5); },
       "initial_state_indices[1] is 5, but initial_state has 5 slots"},
      {"", [](auto& c) { c.in.initial_state_indices = c.indices32(4, 5); },
       "initial_state_indices[1] is 5, but initial_state has 5 slots"},
      {"SharedAndNegativeInitialSlots",
       [](auto& c) { c.in.initial_state = c.state(5), c.in.initial_state_indices = c.indices(4, 4); }},
      {"", [](auto& c) { c.in.initial_state_indices = c.indices(-1, std::numeric_limits<int64_t>::min()); }},
      {"ScaleWithoutFlag", [](auto& c) { c.in.scale = 0.5f; }, "scale is 0.5, but has_scale is 0"},
      {"ScaleNotFinite", [](auto& c) { c.in.has_scale = 1, c.in.scale = INFINITY; }, "scale is inf, must be finite"},
      {"ReservedInputs", [](auto& c) { c.in.reserved[1] = 1; }, "in: reserved fields must be zero"},
      {"", [](auto& c) { c.in.reserved[1] = 0, c.in.reserved_flags = 1; }, "in: reserved fields must be zero"},
      {"BroadcastInputs", [](auto& c) { c.in.beta.stride[0] = c.in.beta.stride[1] = 0, c.in.k.stride[2] = 0; }},
      {"InputsShareMemory", [](auto& c) { c.in.k.data = c.in.q.data; }},
      {"StridesOfSingleEntriesAreFree",
       [](auto& c) {
         c.pack(0, 140);
         for (gd_tensor* t : {&c.in.q, &c.in.k, &c.in.v, &c.in.g, &c.in.beta})
           t->stride[0] = std::numeric_limits<int64_t>::min();
       }},
  });
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

RULE(KeyDimension) {
  CALL;
  for (const int64_t size : {0, 8, 24, 272}) {
    c.in.q.shape[3] = size;
    EXPECT_TRUE(c.invalid("K is " + std::to_string(size) + ", must be a multiple of 16 from 16 to 256"));
  }
}

}  // namespace gatedelta::test
