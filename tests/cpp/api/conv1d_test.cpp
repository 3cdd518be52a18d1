// The convolution's arguments: each rule with its message, and nothing written on refusal.
#include <algorithm>
#include <limits>

#include "cases.hpp"

namespace gatedelta::test {
namespace {

constexpr int64_t kBatch = 2, kTokens = 5, kD = 12, kW = 4, kS = 3;

template <class Args>
struct ConvCase : Args {
  using Args::exec;
  using Args::in;
  Memory memory;
  Workspace workspace{size_t{1} << 20};

  ConvCase() : Args{} {
    this->struct_size = sizeof(Args);
    in.x = input({kBatch, kTokens, kD});
    in.weight = input({kD, kW});
    in.bias = input({kD});
    exec.workspace = workspace.data();
    exec.workspace_bytes = workspace.size();
  }
  gd_tensor input(std::initializer_list<int64_t> shape) {
    const auto count = static_cast<size_t>(elements(shape));
    auto* data = static_cast<float*>(memory.take(count * sizeof(float), 0));
    std::fill(data, data + count, 0.1f);
    return tensor(data, shape);
  }
  gd_tensor output(std::initializer_list<int64_t> shape) {
    return dense(memory.take(static_cast<size_t>(elements(shape)) * sizeof(float), 0xa5), GD_F32, shape);
  }
  template <class T = int64_t>
  gd_tensor indices(std::initializer_list<T> values) {
    auto* data = static_cast<T*>(memory.take(values.size() * sizeof(T), 0));
    std::copy(values.begin(), values.end(), data);
    return tensor(data, {static_cast<int64_t>(values.size())});
  }
  // The batch as one row of packed sequences.
  void pack(std::initializer_list<int64_t> offsets, std::initializer_list<gd_tensor*> rows) {
    for (gd_tensor* t : rows) {
      t->shape[1] *= t->shape[0];
      t->shape[0] = 1;
    }
    in.cu_seqlens = indices(offsets);
  }

  testing::AssertionResult accepts() {
    const gd_status status = call();
    if (status == GD_OK) return testing::AssertionSuccess();
    return testing::AssertionFailure() << gd_status_name(status) << ": " << gd_last_error();
  }
  testing::AssertionResult refuses(gd_status expected, const std::string& text) {
    memory.remember();
    const gd_status status = call();
    if (status != expected) return testing::AssertionFailure() << gd_status_name(status) << ": " << gd_last_error();
    if (std::string(gd_last_error()).find(text) == std::string::npos)
      return testing::AssertionFailure() << "the message is: " << gd_last_error();
    if (!memory.untouched()) return testing::AssertionFailure() << "the refused call wrote to the caller's memory";
    return testing::AssertionSuccess();
  }
  testing::AssertionResult invalid(const std::string& text) { return refuses(GD_INVALID_ARGUMENT, text); }

  gd_status call() const {
    if constexpr (std::is_same_v<Args, gd_conv1d_args>) {
      return gd_conv1d(this);
    } else {
      return gd_conv1d_backward(this);
    }
  }
};

struct Forward : ConvCase<gd_conv1d_args> {
  Forward() { y = output({kBatch, kTokens, kD}); }
  void pack(std::initializer_list<int64_t> offsets) { ConvCase::pack(offsets, {&in.x, &y}); }
  void states(int64_t slots, int64_t columns = kS) {
    in.initial_state = input({slots, kD, columns});
    final_state = output({slots, kD, columns});
  }
};
struct Backward : ConvCase<gd_conv1d_backward_args> {
  Backward() {
    d_y = input({kBatch, kTokens, kD});
    dx = output({kBatch, kTokens, kD});
    dweight = output({kD, kW});
  }
  void pack(std::initializer_list<int64_t> offsets) { ConvCase::pack(offsets, {&in.x, &d_y, &dx}); }
};

template <class Case>
class Conv1dInputs : public testing::Test {
 protected:
  Case c;
};
using ConvOperations = testing::Types<Forward, Backward>;
TYPED_TEST_SUITE(Conv1dInputs, ConvOperations);

TYPED_TEST(Conv1dInputs, AreAccepted) { EXPECT_TRUE(this->c.accepts()); }

TYPED_TEST(Conv1dInputs, Reserved) {
  this->c.in.reserved[3] = 1;
  EXPECT_TRUE(this->c.invalid("in: reserved fields must be zero"));
  this->c.in.reserved[3] = 0;
  this->c.in.reserved_flags = 1;
  EXPECT_TRUE(this->c.invalid("in: reserved fields must be zero"));
  this->c.in.reserved_flags = 0;
  this->c.reserved[0] = 1;
  EXPECT_TRUE(this->c.invalid("_args: reserved fields must be zero"));
}

TYPED_TEST(Conv1dInputs, Activation) {
  this->c.in.activation = 2;
  EXPECT_TRUE(this->c.invalid("activation is 2, must be from 0 to 1"));
}

TYPED_TEST(Conv1dInputs, X) {
  this->c.in.x.rank = 2;
  EXPECT_TRUE(this->c.invalid("x: rank is 2, must be 3: [B, T, D]"));
  this->c.in.x = {};
  EXPECT_TRUE(this->c.invalid("x is missing"));
  this->c.in.x = this->c.input({kBatch, kTokens, 0});
  EXPECT_TRUE(this->c.invalid("x has D = 0 channels, must have from 1 to 16777216"));
}

TYPED_TEST(Conv1dInputs, Weight) {
  this->c.in.weight.shape[0] = kD - 1;
  EXPECT_TRUE(this->c.invalid("weight: shape is [11, 4], must be [D, W] = [12, any]"));
  this->c.in.weight = this->c.input({kD, 5});
  EXPECT_TRUE(this->c.invalid("weight has W = 5 taps, must have from 2 to 4"));
  this->c.in.weight = this->c.input({kD, 1});
  EXPECT_TRUE(this->c.invalid("weight has W = 1 taps, must have from 2 to 4"));
  this->c.in.weight = {};
  EXPECT_TRUE(this->c.invalid("weight is missing"));
  this->c.in.weight = this->c.template indices<int64_t>({1, 2});
  EXPECT_TRUE(this->c.invalid("weight: dtype is 5 (int64), must be float32, bfloat16 or float16"));
}

TYPED_TEST(Conv1dInputs, Bias) {
  this->c.in.bias = this->c.input({kD + 1});
  EXPECT_TRUE(this->c.invalid("bias: shape is [13], must be [D] = [12]"));
}

TYPED_TEST(Conv1dInputs, Offsets) {
  this->c.in.cu_seqlens = this->c.indices({0, 5});
  EXPECT_TRUE(this->c.invalid("B is 2, must be 1 with cu_seqlens"));
  this->c.in.cu_seqlens = this->c.indices({});
  EXPECT_TRUE(this->c.invalid("cu_seqlens is empty, must hold N + 1 offsets"));
  this->c.pack({0, 7, 6, 10});
  EXPECT_TRUE(this->c.invalid("cu_seqlens[2] is 6, less than the 7 before it"));
  this->c.in.cu_seqlens = this->c.indices({1, 7});
  EXPECT_TRUE(this->c.invalid("cu_seqlens[0] is 1, must be 0"));
  this->c.in.cu_seqlens = this->c.indices({0, 11});
  EXPECT_TRUE(this->c.invalid("cu_seqlens ends at 11, past the T = 10 tokens there are"));
}

TYPED_TEST(Conv1dInputs, TooMuchWork) {
  for (gd_tensor* t : {&this->c.in.x, &this->c.in.bias}) t->stride[0] = 0;
  this->c.in.x.shape[0] = int64_t{1} << 40;
  this->c.in.x.shape[1] = 1 << 10;
  this->c.in.x.stride[1] = 0;
  EXPECT_TRUE(this->c.invalid("12 channels are too many to compute"));
}

TYPED_TEST(Conv1dInputs, InitialState) {
  this->c.in.initial_state = this->c.input({kBatch, kD, kW - 2});
  EXPECT_TRUE(this->c.invalid("initial_state has S = 2 columns, must have at least W - 1 = 3"));
  this->c.in.initial_state = this->c.input({kBatch + 1, kD, kS});
  EXPECT_TRUE(this->c.invalid("initial_state: shape is [3, 12, 3], must be [N, D, S] = [2, 12, any]"));
  this->c.in.initial_indices = this->c.indices({0, 3});
  EXPECT_TRUE(this->c.invalid("initial_indices[1] is 3, but initial_state has 3 slots"));
  this->c.in.initial_indices = this->c.indices({0, 1, 2});
  EXPECT_TRUE(this->c.invalid("initial_indices: shape is [3], must be [N] = [2]"));
  this->c.in.initial_indices = this->c.indices({0, 2});
  EXPECT_TRUE(this->c.accepts());
  this->c.in.initial_state = {};
  EXPECT_TRUE(this->c.invalid("initial_indices is given without initial_state"));
}

TYPED_TEST(Conv1dInputs, FirstSlot) {
  this->c.in.first_slot = 1;
  EXPECT_TRUE(this->c.invalid("first_slot is 1, but the call has no indices"));
  this->c.in.initial_state = this->c.input({3, kD, kS});
  this->c.in.initial_indices = this->c.indices({0, 2});
  EXPECT_TRUE(this->c.accepts());
  this->c.in.first_slot = -1;
  EXPECT_TRUE(this->c.invalid("first_slot is -1, must not be negative"));
}

TYPED_TEST(Conv1dInputs, Workspace) {
  this->c.exec.workspace_bytes = 0;
  EXPECT_TRUE(this->c.refuses(GD_WORKSPACE_TOO_SMALL, "workspace has 0 bytes, needs "));
}

TEST(Conv1dForward, NothingToCompute) {
  Forward c;
  c.y = {};
  EXPECT_TRUE(c.invalid("nothing to compute: y, final_state and step_states are absent"));
  c.final_state = c.output({kBatch, kD, kS});
  EXPECT_TRUE(c.accepts());
}

TEST(Conv1dForward, Y) {
  Forward c;
  c.y.shape[1] = kTokens - 1;
  EXPECT_TRUE(c.invalid("y: shape is [2, 4, 12], must be [B, T, D] = [2, 5, 12]"));
  c.y.shape[1] = kTokens;
  c.y.stride[1] = 0;
  EXPECT_TRUE(c.invalid("y is an output, but its strides [60, 0, 1] put several elements in one place"));
  c.y = c.in.x;
  EXPECT_TRUE(c.invalid("x and y overlap in memory"));
}

TEST(Conv1dForward, FinalState) {
  Forward c;
  c.final_indices = c.indices({0, 1});
  EXPECT_TRUE(c.invalid("final_indices is given without final_state"));
  c.states(4);
  c.final_indices = c.indices({0, 4});
  c.in.initial_indices = c.indices({0, 1});
  EXPECT_TRUE(c.invalid("final_indices[1] is 4, but final_state has 4 slots"));
  c.final_indices = c.indices({3, 3});
  EXPECT_TRUE(c.invalid("final_indices[1]: slot 3 is written more than once"));
  c.final_indices = c.indices({-1, -7});
  EXPECT_TRUE(c.accepts());
  c.final_state.shape[2] = 2;
  EXPECT_TRUE(c.invalid("final_state has S = 2 columns, must have at least W - 1 = 3"));
}

TEST(Conv1dForward, SlotsOfNobodyAreWrittenByNobody) {
  Forward c;
  c.states(4);
  c.in.initial_indices = c.indices({0, 2});
  c.final_indices = c.indices({0, 2});
  c.in.first_slot = 1;
  ASSERT_TRUE(c.accepts());
  const auto* bytes = static_cast<const unsigned char*>(c.final_state.data);
  EXPECT_TRUE(std::all_of(bytes, bytes + kD * kS * 4, [](unsigned char b) { return b == 0xa5; }));
  EXPECT_EQ(static_cast<const float*>(c.y.data)[0], 0.0f);
  c.final_indices = c.indices({0, 0});
  EXPECT_TRUE(c.accepts()) << "two padded rows may share slot 0";
}

TEST(Conv1dForward, InPlace) {
  Forward c;
  c.states(4);
  c.final_state = c.in.initial_state;
  c.in.initial_indices = c.indices({0, 2});
  c.final_indices = c.indices({2, 0});
  EXPECT_TRUE(c.invalid("sequence 0 starts from slot 0, which another sequence writes in place"));
  c.final_indices = c.indices({0, 2});
  EXPECT_TRUE(c.accepts());
  c.final_state.data = static_cast<float*>(c.final_state.data) + 1;
  EXPECT_TRUE(c.invalid("initial_state and final_state overlap in memory"));
}

TEST(Conv1dForward, AcceptLengths) {
  Forward c;
  c.previous_accept_lengths = c.indices({1, 1});
  EXPECT_TRUE(c.invalid("previous_accept_lengths is given without initial_state"));
  c.states(kBatch, 6);
  EXPECT_TRUE(c.invalid("final_state has S = 6 columns, must have at least W - 2 + 5 = 7 for a draft window of 5"));
  c.states(kBatch, 7);
  EXPECT_TRUE(c.accepts());
  c.previous_accept_lengths = c.indices({1, 6});
  EXPECT_TRUE(c.invalid("previous_accept_lengths[1] is 6, must be from 1 to S - W + 2 = 5"));
  c.previous_accept_lengths = c.indices({0, 5});
  EXPECT_TRUE(c.invalid("previous_accept_lengths[0] is 0, must be from 1 to S - W + 2 = 5"));
  c.previous_accept_lengths = c.indices({1});
  EXPECT_TRUE(c.invalid("previous_accept_lengths: shape is [1], must be [N] = [2]"));
}

TEST(Conv1dForward, PackedDraftWindows) {
  Forward c;
  c.pack({0, 3, 10});
  c.states(2, 6);
  c.previous_accept_lengths = c.indices({1, 1});
  EXPECT_TRUE(c.invalid("must have at least W - 2 + 7 = 9 for a draft window of 7 tokens"));
  c.in.cu_seqlens = c.indices({0, 3, 7});
  EXPECT_TRUE(c.accepts());
}

TEST(Conv1dForward, StepStates) {
  Forward c;
  c.step_states = c.output({kBatch, kTokens, kD, kW});
  EXPECT_TRUE(c.invalid("step_states: shape is [2, 5, 12, 4], must be [B, T, D, W - 1] = [2, 5, 12, 3]"));
  c.step_states = c.output({kBatch, kTokens, kD, kW - 1});
  EXPECT_TRUE(c.accepts());
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
  c.d_final_state = c.input({kBatch, kD, 2});
  EXPECT_TRUE(c.invalid("d_final_state has S = 2 columns, must have at least W - 1 = 3"));
  c.d_final_state = c.input({kBatch, kD, 7});
  EXPECT_TRUE(c.accepts());
  c.d_initial_state = c.d_final_state;
  EXPECT_TRUE(c.invalid("d_final_state and d_initial_state overlap in memory"));
  c.d_initial_state = {};
  c.d_y = {};
  EXPECT_TRUE(c.invalid("d_y is missing"));
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
