// Rules about what each operation writes.
#include <limits>

#include "cases.hpp"

namespace gatedelta::test {

// Forward.

TEST(Forward, OutputMissing) {
  ForwardCase c;
  c.o = {};
  EXPECT_TRUE(c.invalid("o is missing"));
}

TEST(Forward, OutputShape) {
  ForwardCase c;
  c.o.shape[2] = kHk;
  EXPECT_TRUE(c.invalid("o: shape is [2, 70, 2, 32], must be [B, T, Hv, V] = [2, 70, 4, 32]"));
}

TEST(Forward, OutputDtype) {
  ForwardCase c;
  c.o.dtype = GD_I32;
  EXPECT_TRUE(c.invalid("o: dtype is 4 (int32)"));
}

TEST(Forward, OutputOfAnotherFloat) {
  ForwardCase c;
  for (const gd_dtype dtype : {GD_BF16, GD_F16}) {
    c.o = c.output({kB, kT, kHv, kV}, dtype);
    EXPECT_TRUE(c.accepts());
  }
}

TEST(Forward, OutputNull) {
  ForwardCase c;
  c.o.data = nullptr;
  EXPECT_TRUE(c.invalid("o: data is null, but shape is [2, 70, 4, 32]"));
}

TEST(Forward, OutputBroadcast) {
  ForwardCase c;
  c.o.stride[0] = 0;
  EXPECT_TRUE(c.invalid("o is an output, but its strides [0, 128, 32, 1] put several elements in one place"));
}

TEST(Forward, OutputStridesOverlap) {
  ForwardCase c;
  c.o.stride[2] = 31;
  EXPECT_TRUE(c.invalid("o is an output, but its strides [8960, 128, 31, 1] put several elements in one place"));
}

TEST(Forward, OutputPermuted) {
  ForwardCase c;
  c.o = tensor(static_cast<float*>(c.o.data), {kB, kT, kHv, kV}, {kHv * kT * kV, kV, kT * kV, 1});
  EXPECT_TRUE(c.accepts());
}

TEST(Forward, OutputIsValues) {
  ForwardCase c;
  c.o = c.in.v;
  EXPECT_TRUE(c.invalid("v and o overlap in memory"));
}

TEST(Forward, OutputOverlapsInput) {
  ForwardCase c;
  c.o.data = static_cast<float*>(c.in.v.data) + 4;  // refused before the end of v's memory could matter
  EXPECT_TRUE(c.invalid("v and o overlap in memory"));
}

TEST(Forward, OutputBesideValuesInOneBuffer) {
  ForwardCase c;
  float* both = static_cast<float*>(c.input({kB, kT, kHv, 2 * kV}).data);
  c.in.v = tensor(both, {kB, kT, kHv, kV}, {kT * kHv * 2 * kV, kHv * 2 * kV, 2 * kV, 1});
  c.o = c.in.v;
  c.o.data = both + kV;
  EXPECT_TRUE(c.accepts());
  c.o.data = both;
  EXPECT_TRUE(c.invalid("v and o overlap in memory"));
}

TEST(Forward, NumberOfFinalStates) {
  ForwardCase c;
  c.final_state = c.state_output(3);
  EXPECT_TRUE(c.invalid("final_state: shape is [3, 4, 16, 32], must be [N, Hv, K, V] = [2, 4, 16, 32]"));
}

TEST(Forward, FinalStateMatrices) {
  ForwardCase c;
  c.final_state = c.state_output(2);
  std::swap(c.final_state.stride[2], c.final_state.stride[3]);
  EXPECT_TRUE(c.invalid("final_state: stride[3] is 32, must be 1 (each state matrix must be contiguous)"));
}

TEST(Forward, FinalIndicesWithoutState) {
  ForwardCase c;
  c.final_indices = c.indices({0, 1});
  EXPECT_TRUE(c.invalid("final_indices is given without final_state"));
}

TEST(Forward, FinalIndexPastPool) {
  ForwardCase c;
  c.final_state = c.state_output(5);
  c.final_indices = c.indices({4, 7});
  EXPECT_TRUE(c.invalid("final_indices[1] is 7, but final_state has 5 slots"));
}

TEST(Forward, FinalSlotTwice) {
  ForwardCase c;
  c.final_state = c.state_output(5);
  c.final_indices = c.indices32({3, 3});
  EXPECT_TRUE(c.invalid("final_indices[1]: slot 3 is written more than once"));
  c.final_indices = c.indices({-1, -1});
  EXPECT_TRUE(c.accepts());
}

TEST(Forward, InPlace) {
  ForwardCase c;
  c.final_state = c.in.initial_state = c.state(2);
  EXPECT_TRUE(c.accepts());
}

TEST(Forward, StatesOverlap) {
  ForwardCase c;
  const gd_tensor pool = c.state(3);
  c.in.initial_state = c.final_state = pool;
  c.in.initial_state.shape[0] = c.final_state.shape[0] = 2;
  c.final_state.data = static_cast<float*>(pool.data) + pool.stride[0];
  EXPECT_TRUE(c.invalid("initial_state and final_state overlap in memory"));
}

TEST(Forward, InPlacePool) {
  ForwardCase c;
  c.final_state = c.in.initial_state = c.state(200);
  c.in.initial_indices = c.indices({130, 199});
  c.final_indices = c.indices({130, 65});
  EXPECT_TRUE(c.accepts());
}

TEST(Forward, SlotReadByAnotherSequence) {
  ForwardCase c;
  c.final_state = c.in.initial_state = c.state(200);
  c.in.initial_indices = c.indices({130, 131});
  c.final_indices = c.indices({131, 130});
  EXPECT_TRUE(c.invalid("sequence 0 starts from slot 130, which another sequence writes in place"));
  c.in.initial_indices = c.indices({130, 130});
  c.final_indices = c.indices({130, 5});
  EXPECT_TRUE(c.invalid("sequence 1 starts from slot 130, which another sequence writes in place"));
  c.final_state = c.state_output(200);  // not in place: no conflict
  EXPECT_TRUE(c.accepts());
}

TEST(Forward, SlotReadByAnotherSequenceWithoutFinalIndices) {
  ForwardCase c;
  c.final_state = c.in.initial_state = c.state(2);
  c.in.initial_indices = c.indices({1, 0});
  EXPECT_TRUE(c.invalid("sequence 0 starts from slot 1, which another sequence writes in place"));
  c.in.initial_indices = c.indices({0, -1});
  EXPECT_TRUE(c.accepts());
}

TEST(Forward, CheckpointsNeedInterval) {
  ForwardCase c;
  c.checkpoints = c.state_output(2);
  for (const int64_t every : {int64_t{0}, int64_t{-64}, int64_t{32}, int64_t{100}}) {
    c.checkpoint_every = every;
    EXPECT_TRUE(c.invalid("checkpoint_every is " + std::to_string(every) + ", must be a positive multiple of 64"));
  }
  c.checkpoint_every = kChunkTokens;
  EXPECT_TRUE(c.accepts());
}

TEST(Forward, IntervalWithoutCheckpoints) {
  ForwardCase c;
  c.checkpoint_every = 64;
  EXPECT_TRUE(c.invalid("checkpoint_every is 64, but there are no checkpoints"));
}

TEST(Forward, CheckpointIndicesWithoutCheckpoints) {
  ForwardCase c;
  c.checkpoint_indices = c.indices({0, 1});
  EXPECT_TRUE(c.invalid("checkpoint_indices is given without checkpoints"));
}

TEST(Forward, CheckpointShape) {
  ForwardCase c;
  c.checkpoints = c.output({2, kHv, kV, kK});
  c.checkpoint_every = 64;
  EXPECT_TRUE(c.invalid("checkpoints: shape is [2, 4, 32, 16], must be [slots, Hv, K, V]"));
}

TEST(Forward, TooFewCheckpoints) {
  ForwardCase c;
  c.checkpoints = c.state_output(1);
  c.checkpoint_every = 64;
  EXPECT_TRUE(c.invalid("checkpoints has 1 entries, but the sequences have 2 checkpoints"));
}

TEST(Forward, TooFewCheckpointsOfPackedSequences) {
  ForwardCase c;
  c.pack({0, 128, 138});
  c.checkpoints = c.state_output(1);
  c.checkpoint_every = 64;
  EXPECT_TRUE(c.invalid("checkpoints has 1 entries, but the sequences have 2 checkpoints"));
  c.in.cu_seqlens = c.indices({0, 65, 128});
  EXPECT_TRUE(c.accepts());
}

TEST(Forward, TooFewCheckpointIndices) {
  ForwardCase c;
  c.checkpoints = c.state_output(8);
  c.checkpoint_every = 64;
  c.checkpoint_indices = c.indices({7});
  EXPECT_TRUE(c.invalid("checkpoint_indices has 1 entries, but the sequences have 2 checkpoints"));
}

TEST(Forward, CheckpointIndexPastPool) {
  ForwardCase c;
  c.checkpoints = c.state_output(8);
  c.checkpoint_every = 64;
  c.checkpoint_indices = c.indices({8, 0});
  EXPECT_TRUE(c.invalid("checkpoint_indices[0] is 8, but checkpoints has 8 slots"));
}

TEST(Forward, CheckpointSlotTwice) {
  ForwardCase c;
  c.checkpoints = c.state_output(8);
  c.checkpoint_every = 64;
  c.checkpoint_indices = c.indices({6, 6, 6});  // the third belongs to no checkpoint
  EXPECT_TRUE(c.invalid("checkpoint_indices[1]: slot 6 is written more than once"));
  c.checkpoint_indices = c.indices({6, -1, 6});
  EXPECT_TRUE(c.accepts());
}

TEST(Forward, CheckpointsInTheStatePool) {
  ForwardCase c;
  c.in.initial_state = c.final_state = c.checkpoints = c.state(8);
  c.checkpoint_every = 64;
  c.in.initial_indices = c.indices({0, 1});
  c.final_indices = c.indices({0, 1});
  c.checkpoint_indices = c.indices({2, 3});
  EXPECT_TRUE(c.accepts());
  c.checkpoint_indices = c.indices({2, 1});
  EXPECT_TRUE(c.invalid("slot 1 is written more than once"));
  c.final_indices = c.indices({5, 6});
  c.checkpoint_indices = c.indices({1, 4});
  EXPECT_TRUE(c.invalid("sequence 1 starts from slot 1, which another sequence writes in place"));
  c.checkpoint_indices = {};
  EXPECT_TRUE(c.invalid("initial_state and checkpoints overlap in memory"));
}

TEST(Forward, StatesInOnePoolAreTheSame) {
  ForwardCase shared, apart;
  for (ForwardCase* c : {&shared, &apart}) {
    c->in.initial_state = c->final_state = c->checkpoints = c->state(8);
    c->checkpoint_every = 64;
    c->in.initial_indices = c->indices({4, 6});
    c->final_indices = c->indices({4, 5});
    c->checkpoint_indices = c->indices({7, 6});  // the second over the slot its sequence starts from
  }
  apart.final_state = apart.state_output(8);
  apart.checkpoints = apart.state_output(8);
  ASSERT_TRUE(shared.accepts());
  ASSERT_TRUE(apart.accepts());
  const int64_t state = kHv * kK * kV;
  const auto same = [&](const gd_tensor& a, int64_t slot) {
    return std::memcmp(static_cast<float*>(shared.final_state.data) + slot * state,
                       static_cast<float*>(a.data) + slot * state, state * sizeof(float)) == 0;
  };
  EXPECT_TRUE(same(apart.final_state, 4) && same(apart.final_state, 5));
  EXPECT_TRUE(same(apart.checkpoints, 7) && same(apart.checkpoints, 6));
}

TEST(Forward, SavedTooSmall) {
  ForwardCase c;
  size_t bytes = 0;
  ASSERT_EQ(gd_forward_saved_size(&c, &bytes), GD_OK);
  ASSERT_GT(bytes, 0u);
  c.saved = c.memory.take(bytes, 0xa5);
  c.saved_bytes = bytes - 1;
  EXPECT_TRUE(c.refuses(GD_WORKSPACE_TOO_SMALL,
                        "saved has " + std::to_string(bytes - 1) + " bytes, needs " + std::to_string(bytes)));
  c.saved_bytes = bytes;
  EXPECT_TRUE(c.accepts());
}

TEST(Forward, SavedNull) {
  ForwardCase c;
  c.saved_bytes = 64;
  EXPECT_TRUE(c.invalid("saved is null, but saved_bytes is 64"));
}

TEST(Forward, SavedMisaligned) {
  ForwardCase c;
  c.saved_bytes = size_t{1} << 20;
  c.saved = static_cast<char*>(c.memory.take(c.saved_bytes + 16, 0xa5)) + 16;
  EXPECT_TRUE(c.invalid("is not 64-byte aligned"));
}

TEST(Forward, SavedOverOutput) {
  ForwardCase c;
  c.saved_bytes = 64;
  c.saved = c.o.data;
  EXPECT_TRUE(c.invalid("o and saved overlap in memory"));
}

TEST(Forward, ContextParallelRange) {
  ForwardCase c;
  c.context_parallel = 2;
  EXPECT_TRUE(c.invalid("context_parallel is 2, must be from 0 to 1"));
  c.context_parallel = GD_CP_OFF;
  c.batch_invariant = 1;
  EXPECT_TRUE(c.accepts());
}

TEST(Forward, SegmentsAreForOtherBackends) {
  ForwardCase c;
  c.segment_chunks = 2;
  EXPECT_TRUE(c.refuses(GD_UNSUPPORTED, "segment_chunks is 2: sequences are cut on CUDA only, it must be 0"));
  c.segment_chunks = -2;
  EXPECT_TRUE(c.invalid("segment_chunks is -2, must not be negative"));
}

TEST(Forward, CutsByKindOfHeadNeedALength) {
  ForwardCase c;
  c.persistent_segment_chunks = -1;
  EXPECT_TRUE(c.invalid("persistent_segment_chunks is -1, must not be negative"));
  c.persistent_segment_chunks = 3;
  EXPECT_TRUE(c.invalid("persistent_segment_chunks is 3, but segment_chunks is 0"));
  c.persistent_segment_chunks = 0;
  c.segment_halves = 1;
  EXPECT_TRUE(c.invalid("segment_halves is set, but segment_chunks is 0"));
}

TEST(Forward, ReservedFields) {
  ForwardCase c;
  c.reserved[2] = 1;
  EXPECT_TRUE(c.invalid("gd_forward_args: reserved fields must be zero"));
}

TEST(Forward, PreparedNeedsSaved) {
  ForwardCase c;
  c.prepared = 1;
  EXPECT_TRUE(c.invalid("prepared is set, but saved is null: give it gd_summary's"));
}

TEST(Forward, EmptyBatchAndEmptySequences) {
  for (const int dimension : {0, 1}) {
    ForwardCase c;
    for (gd_tensor* t : {&c.in.q, &c.in.k, &c.in.v, &c.in.g, &c.in.beta, &c.o}) {
      t->shape[dimension] = 0;
      t->data = nullptr;
    }
    EXPECT_TRUE(c.accepts());
  }
}

// Backward.

TEST(Backward, OutputGradientMissing) {
  BackwardCase c;
  c.d_o = {};
  EXPECT_TRUE(c.invalid("d_o is missing"));
}

TEST(Backward, OutputGradientShape) {
  BackwardCase c;
  c.d_o.shape[3] = kK;
  EXPECT_TRUE(c.invalid("d_o: shape is [2, 70, 4, 16], must be [B, T, Hv, V] = [2, 70, 4, 32]"));
}

TEST(Backward, NoGradientWanted) {
  BackwardCase c;
  c.dq = c.dk = c.dv = c.dg = c.dbeta = {};
  EXPECT_TRUE(c.invalid("no gradient is asked for"));
}

TEST(Backward, EachGradientAlone) {
  using Field = gd_tensor gd_backward_args::*;
  for (const Field field : {&gd_backward_args::dq, &gd_backward_args::dk, &gd_backward_args::dv, &gd_backward_args::dg,
                            &gd_backward_args::dbeta}) {
    BackwardCase c;
    const gd_tensor wanted = c.*field;
    c.dq = c.dk = c.dv = c.dg = c.dbeta = {};
    c.*field = wanted;
    EXPECT_TRUE(c.accepts());
  }
}

TEST(Backward, GradientShapes) {
  const std::pair<gd_tensor gd_backward_args::*, const char*> gradients[] = {{&gd_backward_args::dq, "dq"},
                                                                             {&gd_backward_args::dk, "dk"},
                                                                             {&gd_backward_args::dv, "dv"},
                                                                             {&gd_backward_args::dg, "dg"},
                                                                             {&gd_backward_args::dbeta, "dbeta"}};
  for (const auto& [field, name] : gradients) {
    BackwardCase c;
    (c.*field).shape[1] = 3;
    EXPECT_TRUE(c.invalid(std::string(name) + ": shape is [2, 3, "));
  }
}

TEST(Backward, GradientsOfTheGateNeedRawGate) {
  BackwardCase c;
  c.dA_log = c.output({kHv});
  EXPECT_TRUE(c.invalid("dA_log is given, but gate is not raw"));
  c.dA_log = {};
  c.d_dt_bias = c.output({kHv});
  EXPECT_TRUE(c.invalid("d_dt_bias is given, but gate is not raw"));
  c.in.gate = GD_GATE_RAW;
  c.in.A_log = c.input({kHv});
  c.dA_log = c.output({kHv});
  EXPECT_TRUE(c.accepts());
}

TEST(Backward, GateGradientBroadcast) {
  BackwardCase c;
  c.in.gate = GD_GATE_RAW;
  c.in.A_log = c.input({kHv});
  c.dA_log = c.output({kHv});
  c.dA_log.stride[0] = 0;
  EXPECT_TRUE(c.invalid("dA_log is an output, but its strides [0] put several elements in one place"));
}

TEST(Backward, GradientsOverlap) {
  BackwardCase c;
  c.dk = c.dq;
  EXPECT_TRUE(c.invalid("dq and dk overlap in memory"));
}

TEST(Backward, GradientIsOutputGradient) {
  BackwardCase c;
  c.dv = c.d_o;
  EXPECT_TRUE(c.invalid("d_o and dv overlap in memory"));
}

TEST(Backward, GradientsInOneBuffer) {
  BackwardCase c;
  float* rows = static_cast<float*>(c.output({kB, kT, kHk, 2 * kK}).data);
  c.dq = tensor(rows, {kB, kT, kHk, kK}, {kT * kHk * 2 * kK, kHk * 2 * kK, 2 * kK, 1});
  c.dk = c.dq;
  c.dk.data = rows + kK;
  EXPECT_TRUE(c.accepts());
}

TEST(Backward, StateGradients) {
  BackwardCase c;
  c.d_final_state = c.state(3);
  EXPECT_TRUE(c.invalid("d_final_state: shape is [3, 4, 16, 32], must be [N, Hv, K, V] = [2, 4, 16, 32]"));
  c.d_final_state = c.state(2);
  c.d_initial_state = c.state_output(5);
  EXPECT_TRUE(c.invalid("d_initial_state: shape is [5, 4, 16, 32], must be [N, Hv, K, V] = [2, 4, 16, 32]"));
  c.d_initial_state = c.d_final_state;
  EXPECT_TRUE(c.invalid("d_final_state and d_initial_state overlap in memory"));
  c.d_initial_state = c.state_output(2);
  EXPECT_TRUE(c.accepts());
}

TEST(Backward, InitialStateFromPool) {
  BackwardCase c;
  c.in.initial_state = c.state(9);
  c.in.initial_indices = c.indices({8, -1});
  c.d_initial_state = c.state_output(2);
  EXPECT_TRUE(c.accepts());
}

TEST(Backward, Saved) {
  ForwardCase forward;
  size_t bytes = 0;
  ASSERT_EQ(gd_forward_saved_size(&forward, &bytes), GD_OK);
  BackwardCase c;
  void* saved = c.memory.take(bytes + 64, 0);
  forward.saved = saved;
  forward.saved_bytes = bytes;
  ASSERT_TRUE(forward.accepts());

  c.saved_bytes = bytes;
  EXPECT_TRUE(c.invalid("saved is null, but saved_bytes is " + std::to_string(bytes)));
  c.saved = static_cast<char*>(saved) + 8;
  EXPECT_TRUE(c.invalid("is not 64-byte aligned"));
  c.saved = saved;
  c.saved_bytes = bytes - 1;
  EXPECT_TRUE(c.refuses(GD_WORKSPACE_TOO_SMALL, "saved has " + std::to_string(bytes - 1) + " bytes, needs "));
  c.saved_bytes = bytes;
  EXPECT_TRUE(c.accepts());
}

TEST(Backward, SmallWorkspaceIsNoneOfTheCpusConcern) {
  BackwardCase c;
  c.small_workspace = 1;
  EXPECT_TRUE(c.accepts());
}

TEST(Backward, ContextParallelAndSegments) {
  BackwardCase c;
  c.context_parallel = -1;
  EXPECT_TRUE(c.invalid("context_parallel is -1, must be from 0 to 1"));
  c.context_parallel = GD_CP_OFF;
  c.segment_chunks = 1;
  EXPECT_TRUE(c.invalid("segment_chunks is 1, but context_parallel is off"));
  c.context_parallel = GD_CP_AUTO;
  EXPECT_TRUE(c.refuses(GD_UNSUPPORTED, "segment_chunks is 1: sequences are cut on CUDA only, it must be 0"));
}

// Recurrent.

TEST(Recurrent, NothingToCompute) {
  RecurrentCase c;
  c.o = {};
  EXPECT_TRUE(c.invalid("nothing to compute: o, final_state and step_states are absent"));
}

TEST(Recurrent, CommitWithoutOutput) {
  RecurrentCase c;
  c.o = {};
  c.final_state = c.in.initial_state = c.state(2);
  EXPECT_TRUE(c.accepts());
}

TEST(Recurrent, OutputShape) {
  RecurrentCase c;
  c.o.rank = 3;
  EXPECT_TRUE(c.invalid("o: rank is 3, must be 4: [B, T, Hv, V]"));
}

TEST(Recurrent, SlotTwice) {
  RecurrentCase c;
  c.in.initial_state = c.final_state = c.state(6);
  c.in.initial_indices = c.indices({1, 2});
  c.final_indices = c.indices({2, 2});
  EXPECT_TRUE(c.invalid("final_indices[1]: slot 2 is written more than once"));
  c.final_indices = c.indices({2, 1});
  EXPECT_TRUE(c.invalid("sequence 0 starts from slot 1, which another sequence writes in place"));
  c.final_indices = c.indices({1, 2});
  EXPECT_TRUE(c.accepts());
}

TEST(Recurrent, AcceptLengthsWithoutFinalState) {
  RecurrentCase c;
  c.accept_lengths = c.indices({1, 1});
  EXPECT_TRUE(c.invalid("accept_lengths is given without final_state"));
}

TEST(Recurrent, NumberOfAcceptLengths) {
  RecurrentCase c;
  c.final_state = c.state_output(2);
  c.accept_lengths = c.indices({1});
  EXPECT_TRUE(c.invalid("accept_lengths: shape is [1], must be [N] = [2]"));
}

TEST(Recurrent, AcceptLengthRange) {
  RecurrentCase c;
  c.final_state = c.state_output(2);
  c.accept_lengths = c.indices({0, 71});
  EXPECT_TRUE(c.invalid("accept_lengths[1] is 71, must be from 0 to the sequence's 70 tokens"));
  c.accept_lengths = c.indices32({-1, 0});
  EXPECT_TRUE(c.invalid("accept_lengths[0] is -1, must be from 0 to the sequence's 70 tokens"));
  c.accept_lengths = c.indices({0, 70});
  EXPECT_TRUE(c.accepts());
}

TEST(Recurrent, AcceptLengthRangeOfPackedSequences) {
  RecurrentCase c;
  c.pack({0, 3, 10});
  c.final_state = c.state_output(2);
  c.accept_lengths = c.indices({4, 7});
  EXPECT_TRUE(c.invalid("accept_lengths[0] is 4, must be from 0 to the sequence's 3 tokens"));
}

TEST(Recurrent, StepIndicesWithoutStates) {
  RecurrentCase c;
  c.step_indices = dense(c.memory.take(kB * kT * 8, 0), GD_I64, {kB, kT});
  EXPECT_TRUE(c.invalid("step_indices is given without step_states"));
}

TEST(Recurrent, StepStatesShape) {
  RecurrentCase c;
  c.step_states = c.state_output(kB * kT);
  EXPECT_TRUE(c.invalid("step_states: rank is 4, must be 5: [B, T, Hv, K, V] without step_indices"));
  c.step_states = c.output({kB, kT, kHv, kV, kK});
  EXPECT_TRUE(c.invalid("step_states: shape is [2, 70, 4, 32, 16], must be [B, T, Hv, K, V]"));
  c.step_states = c.output({kB, kT, kHv, kK, kV});
  EXPECT_TRUE(c.accepts());
}

TEST(Recurrent, StepStatesBroadcast) {
  RecurrentCase c;
  c.step_states = c.output({kB, kT, kHv, kK, kV});
  c.step_states.stride[1] = 0;
  EXPECT_TRUE(c.invalid("step_states is an output, but its strides"));
}

// Two drafts of three tokens over one pool.
struct Drafts : RecurrentCase {
  Drafts() {
    pack({0, 3, 6});
    for (gd_tensor* t : {&in.q, &in.k, &in.v, &in.g, &in.beta, &o}) t->shape[1] = 8;  // two rows of padding
    in.initial_state = step_states = state(12);
    in.initial_indices = indices({2, 8});
    steps({1, 2, 3, 7, 8, 9, 99, 99});
  }
  void steps(std::initializer_list<int64_t> slots) {
    step_indices = indices(slots);
    step_indices.rank = 2;
    step_indices.shape[0] = 1;
    step_indices.shape[1] = 8;
    step_indices.stride[0] = 8;
    step_indices.stride[1] = 1;
  }
};

TEST(Recurrent, StepsOverTheSlotTheyStartFrom) {
  Drafts c;
  EXPECT_TRUE(c.accepts());
}

// Sharing one pool is a matter of memory only: the states come out as they do apart.
TEST(Recurrent, StepsInTheirOwnPoolAreTheSame) {
  Drafts shared, apart;
  apart.step_states = apart.state_output(12);
  ASSERT_TRUE(shared.accepts());
  ASSERT_TRUE(apart.accepts());
  const auto same = [](const gd_tensor& a, const gd_tensor& b, int64_t begin, int64_t count) {
    return std::memcmp(static_cast<float*>(a.data) + begin, static_cast<float*>(b.data) + begin, count * 4) == 0;
  };
  EXPECT_TRUE(same(shared.o, apart.o, 0, elements({1, 8, kHv, kV})));
  const int64_t state = kHv * kK * kV;
  for (const int64_t slot : {1, 2, 3, 7, 8, 9})
    EXPECT_TRUE(same(shared.step_states, apart.step_states, slot * state, state));
}

TEST(Recurrent, StepPoolShape) {
  Drafts c;
  c.step_states = c.output({1, 8, kHv, kK, kV});
  EXPECT_TRUE(c.invalid("step_states: rank is 5, must be 4: [slots, Hv, K, V]"));
}

TEST(Recurrent, StepIndicesShape) {
  Drafts c;
  c.step_indices.shape[1] = 6;
  EXPECT_TRUE(c.invalid("step_indices: shape is [1, 6], must be [N, S] or [B, T] = [1, 8]"));
}

TEST(Recurrent, StepIndexPastPool) {
  Drafts c;
  c.steps({1, 2, 3, 7, 8, 12, 99, 99});
  EXPECT_TRUE(c.invalid("step_indices[0, 5] is 12, but step_states has 12 slots"));
}

TEST(Recurrent, StepSlotTwice) {
  Drafts c;
  c.steps({1, 2, 1, 7, 8, 9, 0, 0});
  EXPECT_TRUE(c.invalid("step_indices[0, 2]: slot 1 is written more than once"));
  c.steps({1, 2, -1, 7, 8, -1, 0, 0});
  EXPECT_TRUE(c.accepts());
}

TEST(Recurrent, StepSlotAnotherSequenceStartsFrom) {
  Drafts c;
  c.steps({1, 8, 3, 7, 4, 9, 0, 0});
  EXPECT_TRUE(c.invalid("sequence 1 starts from slot 8, which another sequence writes in place"));
}

TEST(Recurrent, StepSlotThatIsAFinalSlot) {
  Drafts c;
  c.final_state = c.step_states;
  c.final_indices = c.indices({2, 10});
  EXPECT_TRUE(c.invalid("slot 2 is written more than once"));
  c.final_indices = c.indices({0, 10});
  EXPECT_TRUE(c.accepts());
}

// Queries.

template <class Operation>
class Query : public testing::Test {};
TYPED_TEST_SUITE(Query, Operations);

TYPED_TEST(Query, IsEnoughForTheCall) {
  TypeParam c;
  ThreadPool pool(3);
  for (const int threads : {0, 1, 2, 3}) {
    for (const gd_dtype dtype : {GD_F32, GD_BF16}) {
      pool.apply(c.exec);
      c.exec.num_threads = threads;
      c.in.q.dtype = c.in.k.dtype = c.in.v.dtype = dtype;
      size_t bytes = 0;
      ASSERT_EQ(c.query(&bytes), GD_OK) << gd_last_error();
      Workspace exact(bytes);
      c.exec.workspace = exact.data();
      c.exec.workspace_bytes = bytes;
      EXPECT_TRUE(c.accepts());
      c.exec.workspace_bytes = bytes - 1;
      EXPECT_TRUE(c.refuses(GD_WORKSPACE_TOO_SMALL, "needs " + std::to_string(bytes)));
    }
  }
}

TYPED_TEST(Query, NeedsNoData) {
  TypeParam c;
  c.pack({0, 70, 140});
  c.in.initial_state = c.state(5);
  c.in.initial_indices = c.indices({4, 3});
  size_t with = 0, without = 0;
  ASSERT_EQ(c.query(&with), GD_OK) << gd_last_error();
  for (gd_tensor* t :
       {&c.in.q, &c.in.k, &c.in.v, &c.in.g, &c.in.beta, &c.in.cu_seqlens, &c.in.initial_state, &c.in.initial_indices})
    t->data = nullptr;
  c.exec.workspace = nullptr;
  c.exec.workspace_bytes = 0;
  ASSERT_EQ(c.query(&without), GD_OK) << gd_last_error();
  EXPECT_EQ(with, without);
}

TYPED_TEST(Query, RefusesWhatTheCallRefuses) {
  TypeParam c;
  c.in.v.shape[3] = 20;
  size_t bytes = 77;
  EXPECT_EQ(c.query(&bytes), GD_INVALID_ARGUMENT);
  EXPECT_EQ(bytes, 77u);
  EXPECT_STREQ(gd_last_error(), "V is 20, must be a multiple of 16 from 16 to 256");
}

TEST(QuerySizes, CountsTheSlotsOfWrittenPools) {
  ForwardCase c;
  c.final_state = c.state_output(2);
  size_t without = 0, with = 0;
  ASSERT_EQ(c.query(&without), GD_OK);
  c.final_state.shape[0] = 5121;
  c.final_indices = c.indices({0, 1});
  ASSERT_EQ(c.query(&with), GD_OK);
  EXPECT_EQ(with - without, 11u * 64);  // a bit each, in 64-byte lines
}

TEST(QuerySizes, SavedIsAnnouncedByItsSize) {
  BackwardCase c;
  Workspace saved(size_t{1} << 20);
  c.saved_bytes = saved.size();
  size_t announced = 0, given = 0;
  ASSERT_EQ(c.query(&announced), GD_OK) << gd_last_error();
  c.saved = saved.data();
  ASSERT_EQ(c.query(&given), GD_OK);
  EXPECT_EQ(announced, given);
}

TEST(QuerySizes, SavedSize) {
  ForwardCase c;
  EXPECT_EQ(gd_forward_saved_size(&c, nullptr), GD_INVALID_ARGUMENT);
  EXPECT_STREQ(gd_last_error(), "bytes is null: there is nowhere to put the answer");
  c.in.q = {};
  size_t bytes = 77;
  EXPECT_EQ(gd_forward_saved_size(&c, &bytes), GD_INVALID_ARGUMENT);
  EXPECT_EQ(bytes, 77u);
}

}  // namespace gatedelta::test
