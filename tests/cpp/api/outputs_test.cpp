// Rules about what each operation writes.
#include <limits>

#include "cases.hpp"

namespace gatedelta::test {

// Forward.

TEST(Forward, Rules) {
  check_rules<ForwardCase>({
      {"OutputMissing", [](auto& c) { c.out = {}; }, "out is missing"},
      {"OutputShape", [](auto& c) { c.out.shape[2] = kHk; },
       "out: shape is [2, 70, 2, 32], must be [B, T, Hv, V] = [2, 70, 4, 32]"},
      {"OutputDtype", [](auto& c) { c.out.dtype = GD_I32; }, "out: dtype is int32"},
      {"OutputNull", [](auto& c) { c.out.data = nullptr; }, "out: data is null, but shape is [2, 70, 4, 32]"},
      {"OutputBroadcast", [](auto& c) { c.out.stride[0] = 0; },
       "out is an output, but its strides [0, 128, 32, 1] put several elements in one place"},
      {"OutputStridesOverlap", [](auto& c) { c.out.stride[2] = 31; },
       "out is an output, but its strides [8960, 128, 31, 1] put several elements in one place"},
      {"OutputPermuted",
       [](auto& c) {
         c.out = tensor(static_cast<float*>(c.out.data), {kB, kT, kHv, kV}, {kHv * kT * kV, kV, kT * kV, 1});
       }},
      {"OutputIsValues", [](auto& c) { c.out = c.in.v; }, "v and out overlap in memory"},
      {"NumberOfFinalStates", [](auto& c) { c.final_state = c.state_output(3); },
       "final_state: shape is [3, 4, 16, 32], must be [N, Hv, K, V] = [2, 4, 16, 32]"},
      {"FinalStateMatrices",
       [](auto& c) {
         c.final_state = c.state_output(2);
         std::swap(c.final_state.stride[2], c.final_state.stride[3]);
       },
       "final_state: stride[3] is 32, must be 1 (each state matrix must be contiguous)"},
      {"FinalIndicesWithoutState", [](auto& c) { c.final_state_indices = c.indices(0, 1); },
       "final_state_indices is given without final_state"},
      {"FinalIndexPastPool",
       [](auto& c) { c.final_state = c.state_output(5), c.final_state_indices = c.indices(4, 7); },
       "final_state_indices[1] is 7, but final_state has 5 slots"},
      {"FinalSlotTwice", [](auto& c) { c.final_state = c.state_output(5), c.final_state_indices = c.indices32(3, 3); },
       "final_state_indices[1]: slot 3 is written more than once"},
      {"", [](auto& c) { c.final_state_indices = c.indices(-1, -1); }},
      {"InPlace", [](auto& c) { c.final_state = c.in.initial_state = c.state(2); }},
      {"StatesOverlap",
       [](auto& c) {
         const gd_tensor pool = c.state(3);
         c.in.initial_state = c.final_state = pool;
         c.in.initial_state.shape[0] = c.final_state.shape[0] = 2;
         c.final_state.data = static_cast<float*>(pool.data) + pool.stride[0];
       },
       "initial_state and final_state overlap in memory"},
      {"InPlacePool",
       [](auto& c) {
         c.final_state = c.in.initial_state = c.state(200);
         c.in.initial_state_indices = c.indices(130, 199);
         c.final_state_indices = c.indices(130, 65);
       }},
      {"SlotReadByAnotherSequenceWithoutFinalIndices",
       [](auto& c) {
         c.final_state = c.in.initial_state = c.state(2);
         c.in.initial_state_indices = c.indices(1, 0);
       },
       "sequence 0 starts from slot 1, which another sequence writes in place"},
      {"", [](auto& c) { c.in.initial_state_indices = c.indices(0, -1); }},
      {"IntervalWithoutCheckpoints", [](auto& c) { c.checkpoint_every = 64; },
       "checkpoint_every is 64, but there are no checkpoints"},
      {"CheckpointIndicesWithoutCheckpoints", [](auto& c) { c.checkpoint_indices = c.indices(0, 1); },
       "checkpoint_indices is given without checkpoints"},
      {"CheckpointShape",
       [](auto& c) {
         c.checkpoints = c.output({2, kHv, kV, kK}), c.checkpoint_every = 64;
       },
       "checkpoints: shape is [2, 4, 32, 16], must be [slots, Hv, K, V]"},
      {"TooFewCheckpoints", [](auto& c) { c.checkpoints = c.state_output(1), c.checkpoint_every = 64; },
       "checkpoints has 1 entries, but the sequences have 2 checkpoints"},
      {"TooFewCheckpointsOfPackedSequences",
       [](auto& c) { c.pack(0, 128, 138), c.checkpoints = c.state_output(1), c.checkpoint_every = 64; },
       "checkpoints has 1 entries, but the sequences have 2 checkpoints"},
      {"", [](auto& c) { c.in.cu_seqlens = c.indices(0, 65, 128); }},
      {"TooFewCheckpointIndices",
       [](auto& c) {
         c.checkpoints = c.state_output(8);
         c.checkpoint_every = 64;
         c.checkpoint_indices = c.indices(7);
       },
       "checkpoint_indices has 1 entries, but the sequences have 2 checkpoints"},
      {"CheckpointIndexPastPool",
       [](auto& c) {
         c.checkpoints = c.state_output(8);
         c.checkpoint_every = 64;
         c.checkpoint_indices = c.indices(8, 0);
       },
       "checkpoint_indices[0] is 8, but checkpoints has 8 slots"},
      {"CheckpointsInTheStatePool",
       [](auto& c) {
         c.in.initial_state = c.final_state = c.checkpoints = c.state(8);
         c.checkpoint_every = 64;
         c.in.initial_state_indices = c.indices(0, 1);
         c.final_state_indices = c.indices(0, 1);
         c.checkpoint_indices = c.indices(2, 3);
       }},
      {"", [](auto& c) { c.checkpoint_indices = c.indices(2, 1); }, "slot 1 is written more than once"},
      {"", [](auto& c) { c.final_state_indices = c.indices(5, 6), c.checkpoint_indices = c.indices(1, 4); },
       "sequence 1 starts from slot 1, which another sequence writes in place"},
      {"", [](auto& c) { c.checkpoint_indices = {}; }, "initial_state and checkpoints overlap in memory"},
      {"SavedNull", [](auto& c) { c.saved_bytes = 64; }, "saved is null, but saved_bytes is 64"},
      {"SavedMisaligned",
       [](auto& c) {
         c.saved_bytes = size_t{1} << 20;
         c.saved = static_cast<char*>(c.memory.take(c.saved_bytes + 16, 0xa5)) + 16;
       },
       "is not 64-byte aligned"},
      {"SavedOverOutput", [](auto& c) { c.saved_bytes = 64, c.saved = c.out.data; }, "out and saved overlap in memory"},
      {"ContextParallelRange", [](auto& c) { c.context_parallel = 2; }, "context_parallel is 2, must be from 0 to 1"},
      {"", [](auto& c) { c.context_parallel = GD_CP_OFF, c.batch_invariant = 1; }},
      {"ReservedFields", [](auto& c) { c.reserved[2] = 1; }, "gd_forward_args: reserved fields must be zero"},
      {"PreparedNeedsSaved", [](auto& c) { c.prepared = 1; },
       "prepared is set, but saved is null: give it gd_summary's"},
  });
}

TEST(Forward, OutputOfAnotherFloat) {
  ForwardCase c;
  for (const gd_dtype dtype : {GD_BF16, GD_F16}) {
    c.out = c.output({kB, kT, kHv, kV}, dtype);
    EXPECT_TRUE(c.accepts());
  }
}

TEST(Forward, OutputOverlapsInput) {
  ForwardCase c;
  c.out.data = static_cast<float*>(c.in.v.data) + 4;  // refused before the end of v's memory could matter
  EXPECT_TRUE(c.invalid("v and out overlap in memory"));
}

TEST(Forward, OutputBesideValuesInOneBuffer) {
  ForwardCase c;
  float* both = static_cast<float*>(c.input({kB, kT, kHv, 2 * kV}).data);
  c.in.v = tensor(both, {kB, kT, kHv, kV}, {kT * kHv * 2 * kV, kHv * 2 * kV, 2 * kV, 1});
  c.out = c.in.v;
  c.out.data = both + kV;
  EXPECT_TRUE(c.accepts());
  c.out.data = both;
  EXPECT_TRUE(c.invalid("v and out overlap in memory"));
}

TEST(Forward, SlotReadByAnotherSequence) {
  ForwardCase c;
  c.final_state = c.in.initial_state = c.state(200);
  c.in.initial_state_indices = c.indices(130, 131);
  c.final_state_indices = c.indices(131, 130);
  EXPECT_TRUE(c.invalid("sequence 0 starts from slot 130, which another sequence writes in place"));
  c.in.initial_state_indices = c.indices(130, 130);
  c.final_state_indices = c.indices(130, 5);
  EXPECT_TRUE(c.invalid("sequence 1 starts from slot 130, which another sequence writes in place"));
  c.final_state = c.state_output(200);  // not in place: no conflict
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

TEST(Forward, CheckpointSlotTwice) {
  ForwardCase c;
  c.checkpoints = c.state_output(8);
  c.checkpoint_every = 64;
  c.checkpoint_indices = c.indices(6, 6, 6);  // the third belongs to no checkpoint
  EXPECT_TRUE(c.invalid("checkpoint_indices[1]: slot 6 is written more than once"));
  c.checkpoint_indices = c.indices(6, -1, 6);
  EXPECT_TRUE(c.accepts());
}

TEST(Forward, StatesInOnePoolAreTheSame) {
  ForwardCase shared, apart;
  for (ForwardCase* c : {&shared, &apart}) {
    c->in.initial_state = c->final_state = c->checkpoints = c->state(8);
    c->checkpoint_every = 64;
    c->in.initial_state_indices = c->indices(4, 6);
    c->final_state_indices = c->indices(4, 5);
    c->checkpoint_indices = c->indices(7, 6);  // the second over the slot its sequence starts from
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

TEST(Forward, SegmentsAreForOtherBackends) {
  ForwardCase c;
  gd_tuning tuning = GD_TUNING_INIT;
  c.exec.tuning = &tuning;
  EXPECT_TRUE(c.accepts());
  tuning.segment_chunks = 2;
  EXPECT_TRUE(c.refuses(GD_UNSUPPORTED, "segment_chunks is 2: sequences are cut on CUDA only, it must be 0"));
  tuning.segment_chunks = -2;
  EXPECT_TRUE(c.invalid("segment_chunks is -2, must not be negative"));
}

TEST(Forward, CutsByKindOfHeadNeedALength) {
  ForwardCase c;
  gd_tuning tuning = GD_TUNING_INIT;
  c.exec.tuning = &tuning;
  tuning.persistent_segment_chunks = -1;
  EXPECT_TRUE(c.invalid("persistent_segment_chunks is -1, must not be negative"));
  tuning.persistent_segment_chunks = 3;
  EXPECT_TRUE(c.invalid("persistent_segment_chunks is 3, but segment_chunks is 0"));
  tuning.persistent_segment_chunks = 0;
  tuning.segment_halves = 1;
  EXPECT_TRUE(c.invalid("segment_halves is set, but segment_chunks is 0"));
}

TEST(Forward, EmptyBatchAndEmptySequences) {
  for (const int dimension : {0, 1}) {
    ForwardCase c;
    for (gd_tensor* t : {&c.in.q, &c.in.k, &c.in.v, &c.in.g, &c.in.beta, &c.out}) {
      t->shape[dimension] = 0;
      t->data = nullptr;
    }
    EXPECT_TRUE(c.accepts());
  }
}

// Backward.

TEST(Backward, Rules) {
  check_rules<BackwardCase>({
      {"OutputGradientMissing", [](auto& c) { c.do_ = {}; }, "do is missing"},
      {"OutputGradientShape", [](auto& c) { c.do_.shape[3] = kK; },
       "do: shape is [2, 70, 4, 16], must be [B, T, Hv, V] = [2, 70, 4, 32]"},
      {"NoGradientWanted", [](auto& c) { c.dq = c.dk = c.dv = c.dg = c.dbeta = {}; }, "no gradient is asked for"},
      {"GradientsOfTheGateNeedRawGate", [](auto& c) { c.dA_log = c.output({kHv}); },
       "dA_log is given, but it acts only on a raw g (use_gate_in_kernel)"},
      {"", [](auto& c) { c.dA_log = {}, c.d_dt_bias = c.output({kHv}); },
       "d_dt_bias is given, but it acts only on a raw g (use_gate_in_kernel)"},
      {"", [](auto& c) { c.in.gate = GD_GATE_RAW, c.in.A_log = c.input({kHv}), c.dA_log = c.output({kHv}); }},
      {"GateGradientBroadcast",
       [](auto& c) {
         c.in.gate = GD_GATE_RAW;
         c.in.A_log = c.input({kHv});
         c.dA_log = c.output({kHv});
         c.dA_log.stride[0] = 0;
       },
       "dA_log is an output, but its strides [0] put several elements in one place"},
      {"GradientsOverlap", [](auto& c) { c.dk = c.dq; }, "dq and dk overlap in memory"},
      {"GradientIsOutputGradient", [](auto& c) { c.dv = c.do_; }, "do and dv overlap in memory"},
      {"StateGradients", [](auto& c) { c.dht = c.state(3); },
       "dht: shape is [3, 4, 16, 32], must be [N, Hv, K, V] = [2, 4, 16, 32]"},
      {"", [](auto& c) { c.dht = c.state(2), c.d_initial_state = c.state_output(5); },
       "d_initial_state: shape is [5, 4, 16, 32], must be [N, Hv, K, V] = [2, 4, 16, 32]"},
      {"", [](auto& c) { c.d_initial_state = c.dht; }, "dht and d_initial_state overlap in memory"},
      {"", [](auto& c) { c.d_initial_state = c.state_output(2); }},
      {"InitialStateFromPool",
       [](auto& c) {
         c.in.initial_state = c.state(9);
         c.in.initial_state_indices = c.indices(8, -1);
         c.d_initial_state = c.state_output(2);
       }},
      {"SmallWorkspaceIsNoneOfTheCpusConcern", [](auto& c) { c.small_workspace = 1; }},
  });
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

TEST(Backward, GradientsInOneBuffer) {
  BackwardCase c;
  float* rows = static_cast<float*>(c.output({kB, kT, kHk, 2 * kK}).data);
  c.dq = tensor(rows, {kB, kT, kHk, kK}, {kT * kHk * 2 * kK, kHk * 2 * kK, 2 * kK, 1});
  c.dk = c.dq;
  c.dk.data = rows + kK;
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
  ASSERT_EQ(gd_forward_saved_call(&forward, &c.saved_call), GD_OK);
  c.saved_bytes = bytes - 1;
  EXPECT_TRUE(c.refuses(GD_WORKSPACE_TOO_SMALL, "saved has " + std::to_string(bytes - 1) + " bytes, needs "));
  c.saved_bytes = bytes;
  EXPECT_TRUE(c.accepts());
}

TEST(Backward, ContextParallelAndSegments) {
  BackwardCase c;
  c.context_parallel = -1;
  EXPECT_TRUE(c.invalid("context_parallel is -1, must be from 0 to 1"));
  c.context_parallel = GD_CP_OFF;
  gd_tuning tuning = GD_TUNING_INIT;
  c.exec.tuning = &tuning;
  tuning.segment_chunks = 1;
  EXPECT_TRUE(c.invalid("segment_chunks is 1, but context_parallel is off"));
  c.context_parallel = GD_CP_AUTO;
  EXPECT_TRUE(c.refuses(GD_UNSUPPORTED, "segment_chunks is 1: sequences are cut on CUDA only, it must be 0"));
  tuning.segment_halves = 1;
  EXPECT_TRUE(c.refuses(GD_UNSUPPORTED, "segment_halves is set, but a backward cuts all heads alike"));
  tuning.persistent_segment_chunks = 1;
  EXPECT_TRUE(c.refuses(GD_UNSUPPORTED, "persistent_segment_chunks is set, but a backward cuts all heads alike"));
}

// Recurrent.

TEST(Recurrent, CutsNoSequence) {
  RecurrentCase c;
  gd_tuning tuning = GD_TUNING_INIT;
  tuning.segment_chunks = 2;
  c.exec.tuning = &tuning;
  EXPECT_TRUE(c.refuses(GD_UNSUPPORTED, "segment_chunks is 2, but a recurrent step cuts no sequence"));
}

TEST(Recurrent, Rules) {
  check_rules<RecurrentCase>({
      {"NothingToCompute", [](auto& c) { c.out = {}; },
       "nothing to compute: out, final_state and step_states are absent"},
      {"CommitWithoutOutput", [](auto& c) { c.out = {}, c.final_state = c.in.initial_state = c.state(2); }},
      {"OutputShape", [](auto& c) { c.out.rank = 3; }, "out: rank is 3, must be 4: [B, T, Hv, V]"},
      {"SlotTwice",
       [](auto& c) {
         c.in.initial_state = c.final_state = c.state(6);
         c.in.initial_state_indices = c.indices(1, 2);
         c.final_state_indices = c.indices(2, 2);
       },
       "final_state_indices[1]: slot 2 is written more than once"},
      {"", [](auto& c) { c.final_state_indices = c.indices(2, 1); },
       "sequence 0 starts from slot 1, which another sequence writes in place"},
      {"", [](auto& c) { c.final_state_indices = c.indices(1, 2); }},
      {"AcceptLengthsWithoutFinalState", [](auto& c) { c.accept_lengths = c.indices(1, 1); },
       "accept_lengths is given without final_state"},
      {"NumberOfAcceptLengths", [](auto& c) { c.final_state = c.state_output(2), c.accept_lengths = c.indices(1); },
       "accept_lengths: shape is [1], must be [N] = [2]"},
      {"AcceptLengthRange", [](auto& c) { c.final_state = c.state_output(2), c.accept_lengths = c.indices(0, 71); },
       "accept_lengths[1] is 71, must be from 0 to the sequence's 70 tokens"},
      {"", [](auto& c) { c.accept_lengths = c.indices32(-1, 0); },
       "accept_lengths[0] is -1, must be from 0 to the sequence's 70 tokens"},
      {"", [](auto& c) { c.accept_lengths = c.indices(0, 70); }},
      {"AcceptLengthRangeOfPackedSequences",
       [](auto& c) { c.pack(0, 3, 10), c.final_state = c.state_output(2), c.accept_lengths = c.indices(4, 7); },
       "accept_lengths[0] is 4, must be from 0 to the sequence's 3 tokens"},
      {"StepIndicesWithoutStates",
       [](auto& c) {
         c.step_indices = dense(c.memory.take(kB * kT * 8, 0), GD_I64, {kB, kT});
       },
       "step_indices is given without step_states"},
      {"StepStatesShape", [](auto& c) { c.step_states = c.state_output(kB * kT); },
       "step_states: rank is 4, must be 5: [B, T, Hv, K, V] without step_indices"},
      {"",
       [](auto& c) {
         c.step_states = c.output({kB, kT, kHv, kV, kK});
       },
       "step_states: shape is [2, 70, 4, 32, 16], must be [B, T, Hv, K, V]"},
      {"",
       [](auto& c) {
         c.step_states = c.output({kB, kT, kHv, kK, kV});
       }},
      {"StepStatesBroadcast",
       [](auto& c) {
         c.step_states = c.output({kB, kT, kHv, kK, kV}), c.step_states.stride[1] = 0;
       },
       "step_states is an output, but its strides"},
  });
}

// Two drafts of three tokens over one pool.
struct Drafts : RecurrentCase {
  Drafts() {
    pack(0, 3, 6);
    for (gd_tensor* t : {&in.q, &in.k, &in.v, &in.g, &in.beta, &out}) t->shape[1] = 8;  // two rows of padding
    in.initial_state = step_states = state(12);
    in.initial_state_indices = indices(2, 8);
    steps(1, 2, 3, 7, 8, 9, 99, 99);
  }
  template <class... T>
  void steps(T... slots) {
    step_indices = indices(slots...);
    step_indices.rank = 2;
    step_indices.shape[0] = 1;
    step_indices.shape[1] = 8;
    step_indices.stride[0] = 8;
    step_indices.stride[1] = 1;
  }
};

TEST(Recurrent, RulesOfDrafts) {
  check_rules<Drafts>({
      {"StepsOverTheSlotTheyStartFrom", [](auto&) {}},
      {"StepPoolShape",
       [](auto& c) {
         c.step_states = c.output({1, 8, kHv, kK, kV});
       },
       "step_states: rank is 5, must be 4: [slots, Hv, K, V]"},
      {"StepIndicesShape", [](auto& c) { c.step_indices.shape[1] = 6; },
       "step_indices: shape is [1, 6], must be [N, S] or [B, T] = [1, 8]"},
      {"StepIndexPastPool", [](auto& c) { c.steps(1, 2, 3, 7, 8, 12, 99, 99); },
       "step_indices[0, 5] is 12, but step_states has 12 slots"},
      {"StepSlotTwice", [](auto& c) { c.steps(1, 2, 1, 7, 8, 9, 0, 0); },
       "step_indices[0, 2]: slot 1 is written more than once"},
      {"", [](auto& c) { c.steps(1, 2, -1, 7, 8, -1, 0, 0); }},
      {"StepSlotAnotherSequenceStartsFrom", [](auto& c) { c.steps(1, 8, 3, 7, 4, 9, 0, 0); },
       "sequence 1 starts from slot 8, which another sequence writes in place"},
      {"StepSlotThatIsAFinalSlot",
       [](auto& c) { c.final_state = c.step_states, c.final_state_indices = c.indices(2, 10); },
       "slot 2 is written more than once"},
      {"", [](auto& c) { c.final_state_indices = c.indices(0, 10); }},
  });
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
  EXPECT_TRUE(same(shared.out, apart.out, 0, elements({1, 8, kHv, kV})));
  const int64_t state = kHv * kK * kV;
  for (const int64_t slot : {1, 2, 3, 7, 8, 9})
    EXPECT_TRUE(same(shared.step_states, apart.step_states, slot * state, state));
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
  c.pack(0, 70, 140);
  c.in.initial_state = c.state(5);
  c.in.initial_state_indices = c.indices(4, 3);
  size_t with = 0, without = 0;
  ASSERT_EQ(c.query(&with), GD_OK) << gd_last_error();
  for (gd_tensor* t : {&c.in.q, &c.in.k, &c.in.v, &c.in.g, &c.in.beta, &c.in.cu_seqlens, &c.in.initial_state,
                       &c.in.initial_state_indices})
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
  c.final_state_indices = c.indices(0, 1);
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
