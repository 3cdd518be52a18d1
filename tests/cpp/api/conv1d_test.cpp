// The convolution's arguments: each rule with its message, and nothing written on refusal.
#include <algorithm>
#include <limits>

#include "cases.hpp"

namespace gatedelta::test {
namespace {

constexpr int64_t kBatch = 2, kTokens = 5, kD = 12, kW = 4, kS = 3;

template <class Args>
struct ConvCase : Call<Args> {
  using Args::in;

  ConvCase() {
    in.x = this->input({kBatch, kTokens, kD});
    in.weight = this->input({kD, kW});
    in.bias = this->input({kD});
  }
  // The batch as one row of packed sequences.
  void pack(std::initializer_list<gd_tensor*> rows, std::initializer_list<int64_t> offsets) {
    for (gd_tensor* t : rows) {
      t->shape[1] *= t->shape[0];
      t->shape[0] = 1;
    }
    in.cu_seqlens = this->indices(offsets);
  }
};

struct Forward : ConvCase<gd_conv1d_args> {
  Forward() { out = output({kBatch, kTokens, kD}); }
  template <class... T>
  void pack(T... offsets) {
    ConvCase::pack({&in.x, &out}, {offsets...});
  }
  void states(int64_t slots, int64_t columns = kS) {
    in.initial_state = input({slots, kD, columns});
    final_state = output({slots, kD, columns});
  }
};
struct Backward : ConvCase<gd_conv1d_backward_args> {
  Backward() {
    dy = input({kBatch, kTokens, kD});
    dx = output({kBatch, kTokens, kD});
    dweight = output({kD, kW});
  }
  template <class... T>
  void pack(T... offsets) {
    ConvCase::pack({&in.x, &dy, &dx}, {offsets...});
  }
};

template <class Case>
class Conv1dInputs : public testing::Test {
 protected:
  Case c;
};
using ConvOperations = testing::Types<Forward, Backward>;
TYPED_TEST_SUITE(Conv1dInputs, ConvOperations);

TYPED_TEST(Conv1dInputs, Rules) {
  check_rules<TypeParam>({
      {"AreAccepted", [](auto&) {}},
      {"Reserved", [](auto& c) { c.in.reserved[3] = 1; }, "in: reserved fields must be zero"},
      {"", [](auto& c) { c.in.reserved[3] = 0, c.in.reserved_flags = 1; }, "in: reserved fields must be zero"},
      {"", [](auto& c) { c.in.reserved_flags = 0, c.reserved[0] = 1; }, "_args: reserved fields must be zero"},
      {"Activation", [](auto& c) { c.in.activation = 2; }, "activation is 2, must be from 0 to 1"},
      {"X", [](auto& c) { c.in.x.rank = 2; }, "x: rank is 2, must be 3: [B, T, D]"},
      {"", [](auto& c) { c.in.x = {}; }, "x is missing"},
      {"",
       [](auto& c) {
         c.in.x = c.input({kBatch, kTokens, 0});
       },
       "x has D = 0 channels, must have from 1 to 16777216"},
      {"Weight", [](auto& c) { c.in.weight.shape[0] = kD - 1; },
       "weight: shape is [11, 4], must be [D, W] = [12, any]"},
      {"",
       [](auto& c) {
         c.in.weight = c.input({kD, 5});
       },
       "weight has W = 5 taps, must have from 2 to 4"},
      {"",
       [](auto& c) {
         c.in.weight = c.input({kD, 1});
       },
       "weight has W = 1 taps, must have from 2 to 4"},
      {"", [](auto& c) { c.in.weight = {}; }, "weight is missing"},
      {"", [](auto& c) { c.in.weight = c.indices(1, 2); },
       "weight: dtype is int64, must be float32, bfloat16 or float16"},
      {"Bias", [](auto& c) { c.in.bias = c.input({kD + 1}); }, "bias: shape is [13], must be [D] = [12]"},
      {"Offsets", [](auto& c) { c.in.cu_seqlens = c.indices(0, 5); }, "B is 2, must be 1 with cu_seqlens"},
      {"", [](auto& c) { c.in.cu_seqlens = c.indices(); }, "cu_seqlens is empty, must hold N + 1 offsets"},
      {"", [](auto& c) { c.pack(0, 7, 6, 10); }, "cu_seqlens[2] is 6, less than the 7 before it"},
      {"", [](auto& c) { c.in.cu_seqlens = c.indices(1, 7); }, "cu_seqlens[0] is 1, must be 0"},
      {"", [](auto& c) { c.in.cu_seqlens = c.indices(0, 11); },
       "cu_seqlens ends at 11, past the T = 10 tokens there are"},
      {"TooMuchWork",
       [](auto& c) {
         for (gd_tensor* t : {&c.in.x, &c.in.bias}) t->stride[0] = 0;
         c.in.x.shape[0] = int64_t{1} << 40;
         c.in.x.shape[1] = 1 << 10;
         c.in.x.stride[1] = 0;
       },
       "12 channels are too many to compute"},
      {"InitialState",
       [](auto& c) {
         c.in.initial_state = c.input({kBatch, kD, kW - 2});
       },
       "initial_state has S = 2 columns, must have at least W - 1 = 3"},
      {"",
       [](auto& c) {
         c.in.initial_state = c.input({kBatch + 1, kD, kS});
       },
       "initial_state: shape is [3, 12, 3], must be [N, D, S] = [2, 12, any]"},
      {"", [](auto& c) { c.in.initial_state_indices = c.indices(0, 3); },
       "initial_state_indices[1] is 3, but initial_state has 3 slots"},
      {"", [](auto& c) { c.in.initial_state_indices = c.indices(0, 1, 2); },
       "initial_state_indices: shape is [3], must be [N] = [2]"},
      {"", [](auto& c) { c.in.initial_state_indices = c.indices(0, 2); }},
      {"", [](auto& c) { c.in.initial_state = {}; }, "initial_state_indices is given without initial_state"},
      {"FirstSlot", [](auto& c) { c.in.first_slot = 1; }, "first_slot is 1, but the call has no indices"},
      {"",
       [](auto& c) {
         c.in.initial_state = c.input({3, kD, kS}), c.in.initial_state_indices = c.indices(0, 2);
       }},
      {"", [](auto& c) { c.in.first_slot = -1; }, "first_slot is -1, must not be negative"},
      {"Workspace", [](auto& c) { c.exec.workspace_bytes = 0; }, "workspace has 0 bytes, needs ",
       GD_WORKSPACE_TOO_SMALL},
  });
}

TYPED_TEST(Conv1dInputs, CutNoSequence) {
  gd_tuning tuning = GD_TUNING_INIT;
  tuning.segment_chunks = 2;
  this->c.exec.tuning = &tuning;
  EXPECT_TRUE(this->c.refuses(GD_UNSUPPORTED, "segment_chunks is 2, but a convolution"));
}

TEST(Conv1dForward, Rules) {
  check_rules<Forward>({
      {"NothingToCompute", [](auto& c) { c.out = {}; },
       "nothing to compute: out, final_state and step_states are absent"},
      {"",
       [](auto& c) {
         c.final_state = c.output({kBatch, kD, kS});
       }},
      {"Y", [](auto& c) { c.out.shape[1] = kTokens - 1; }, "out: shape is [2, 4, 12], must be [B, T, D] = [2, 5, 12]"},
      {"", [](auto& c) { c.out.shape[1] = kTokens, c.out.stride[1] = 0; },
       "out is an output, but its strides [60, 0, 1] put several elements in one place"},
      {"", [](auto& c) { c.out = c.in.x; }, "x and out overlap in memory"},
      {"FinalState", [](auto& c) { c.final_state_indices = c.indices(0, 1); },
       "final_state_indices is given without final_state"},
      {"",
       [](auto& c) {
         c.states(4);
         c.final_state_indices = c.indices(0, 4);
         c.in.initial_state_indices = c.indices(0, 1);
       },
       "final_state_indices[1] is 4, but final_state has 4 slots"},
      {"", [](auto& c) { c.final_state_indices = c.indices(3, 3); },
       "final_state_indices[1]: slot 3 is written more than once"},
      {"", [](auto& c) { c.final_state_indices = c.indices(-1, -7); }},
      {"", [](auto& c) { c.final_state.shape[2] = 2; }, "final_state has S = 2 columns, must have at least W - 1 = 3"},
      {"InPlace",
       [](auto& c) {
         c.states(4);
         c.final_state = c.in.initial_state;
         c.in.initial_state_indices = c.indices(0, 2);
         c.final_state_indices = c.indices(2, 0);
       },
       "sequence 0 starts from slot 0, which another sequence writes in place"},
      {"", [](auto& c) { c.final_state_indices = c.indices(0, 2); }},
      {"", [](auto& c) { c.final_state.data = static_cast<float*>(c.final_state.data) + 1; },
       "initial_state and final_state overlap in memory"},
      {"AcceptLengths", [](auto& c) { c.previous_accept_lengths = c.indices(1, 1); },
       "previous_accept_lengths is given without initial_state"},
      {"", [](auto& c) { c.states(kBatch, 6); },
       "final_state has S = 6 columns, must have at least W - 2 + 5 = 7 for a draft window of 5"},
      {"", [](auto& c) { c.states(kBatch, 7); }},
      {"", [](auto& c) { c.previous_accept_lengths = c.indices(1, 6); },
       "previous_accept_lengths[1] is 6, must be from 1 to S - W + 2 = 5"},
      {"", [](auto& c) { c.previous_accept_lengths = c.indices(0, 5); },
       "previous_accept_lengths[0] is 0, must be from 1 to S - W + 2 = 5"},
      {"", [](auto& c) { c.previous_accept_lengths = c.indices(1); },
       "previous_accept_lengths: shape is [1], must be [N] = [2]"},
      {"PackedDraftWindows",
       [](auto& c) { c.pack(0, 3, 10), c.states(2, 6), c.previous_accept_lengths = c.indices(1, 1); },
       "must have at least W - 2 + 7 = 9 for a draft window of 7 tokens"},
      {"", [](auto& c) { c.in.cu_seqlens = c.indices(0, 3, 7); }},
      {"StepStates",
       [](auto& c) {
         c.step_states = c.output({kBatch, kTokens, kD, kW});
       },
       "step_states: shape is [2, 5, 12, 4], must be [B, T, D, W - 1] = [2, 5, 12, 3]"},
      {"",
       [](auto& c) {
         c.step_states = c.output({kBatch, kTokens, kD, kW - 1});
       }},
  });
}

TEST(Conv1dForward, NullSlotsAreNotWritten) {
  Forward c;
  c.states(4);
  c.in.initial_state_indices = c.indices(0, 2);
  c.final_state_indices = c.indices(0, 2);
  c.in.first_slot = 1;
  ASSERT_TRUE(c.accepts());
  const auto* bytes = static_cast<const unsigned char*>(c.final_state.data);
  EXPECT_TRUE(std::all_of(bytes, bytes + kD * kS * 4, [](unsigned char b) { return b == 0xa5; }));
  EXPECT_EQ(static_cast<const float*>(c.out.data)[0], 0.0f);
  c.final_state_indices = c.indices(0, 0);
  EXPECT_TRUE(c.accepts()) << "two padded rows may share slot 0";
}

TEST(Conv1dBackward, Gradients) {
  Backward c;
  c.dx = c.dweight = {};
  EXPECT_TRUE(c.invalid("no gradient is asked for: dx, dweight, dbias and d_initial_state are absent"));
  c.dbias = c.output({kD});
  EXPECT_TRUE(c.accepts());
  c.d_initial_state = c.output({kBatch, kD, kS});
  EXPECT_TRUE(c.accepts());
  c.in.initial_state = c.input({kBatch, kD, kS + 1});
  EXPECT_TRUE(c.invalid("d_initial_state has S = 3 columns, must have 4 as initial_state"));
  c.d_initial_state = c.output({kBatch, kD, 2});
  EXPECT_TRUE(c.invalid("d_initial_state has S = 2 columns, must have at least W - 1 = 3"));
}

TEST(Conv1dBackward, Incoming) {
  Backward c;
  c.dht = c.input({kBatch, kD, 2});
  EXPECT_TRUE(c.invalid("dht has S = 2 columns, must have at least W - 1 = 3"));
  c.dht = c.input({kBatch, kD, 7});
  EXPECT_TRUE(c.accepts());
  c.d_initial_state = c.dht;
  EXPECT_TRUE(c.invalid("dht and d_initial_state overlap in memory"));
  c.d_initial_state = {};
  c.dy = {};
  EXPECT_TRUE(c.invalid("dy is missing"));
}

// On CUDA queries answer without a GPU; what runs there needs one.
TEST(Conv1dOnCuda, SizesNeedNoGpu) {
  Forward forward;
  forward.exec = {};
  forward.exec.device = GD_CUDA;
  size_t bytes = 1;
  EXPECT_EQ(gd_conv1d_workspace(&forward, &bytes), GD_OK) << gd_last_error();
  EXPECT_EQ(bytes, 0u);
  Backward backward;
  backward.exec = {};
  backward.exec.device = GD_CUDA;
  EXPECT_EQ(gd_conv1d_backward_workspace(&backward, &bytes), GD_OK) << gd_last_error();
  EXPECT_EQ(bytes, 2 * (kW + 1) * kD * sizeof(float));  // a partial sum for each batch row
  backward.dweight = {};
  EXPECT_EQ(gd_conv1d_backward_workspace(&backward, &bytes), GD_OK) << gd_last_error();
  EXPECT_EQ(bytes, 0u);
}

}  // namespace
}  // namespace gatedelta::test
