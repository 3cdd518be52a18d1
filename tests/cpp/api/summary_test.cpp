// What the stages of context parallelism refuse, and with which message.
#include "cases.hpp"

namespace gatedelta::test {

namespace {

struct SummaryCase : Case<gd_summary_args> {
  SummaryCase() {
    in.q = {};
    local_state = output({kB, kHv, kK, kV});
    transition = output({kB, kHv, kK, kK});
    fade = output({kB, kHv});
  }
};

struct BackwardSummaryCase : Case<gd_backward_summary_args> {
  BackwardSummaryCase() {
    in.v = {};
    do_ = input({kB, kT, kHv, kV});
    d_local = output({kB, kHv, kK, kV});
  }
};

TEST(Summary, IsAccepted) {
  SummaryCase c;
  EXPECT_TRUE(c.accepts());
  c.skip_faded = 1;
  EXPECT_TRUE(c.accepts());
  c.transition = {};
  EXPECT_TRUE(c.accepts());
  c.in.q = c.in.k;  // it may be given
  EXPECT_TRUE(c.accepts());
}

TEST(Summary, WhatIsMissing) {
  SummaryCase c;
  c.local_state = {};
  EXPECT_TRUE(c.invalid("local_state is missing"));
  SummaryCase d;
  d.in.k = {};
  EXPECT_TRUE(d.invalid("k is missing"));
  SummaryCase e;
  e.skip_faded = 1;
  e.transition = e.fade = {};
  EXPECT_TRUE(e.invalid("skip_faded is set, but transition and fade are absent"));
  SummaryCase f;
  f.prepared = 1;
  EXPECT_TRUE(f.invalid("prepared is set, but saved is null"));
}

TEST(Summary, NoInitialState) {
  SummaryCase c;
  c.in.initial_state = c.state(kB);
  EXPECT_TRUE(c.invalid("initial_state is given, but a summary is of what happens without one"));
}

TEST(Summary, Shapes) {
  SummaryCase c;
  c.transition = c.output({kB, kHv, kK, kV});
  EXPECT_TRUE(c.invalid("transition: shape is [2, 4, 16, 32], must be [n, Hv, K, K] = [2, 4, 16, 16]"));
  SummaryCase d;
  d.transition = d.output({kB, kHv, kK, kK}, GD_BF16);
  EXPECT_TRUE(d.invalid("transition: dtype is bfloat16, must be float32"));
  SummaryCase e;
  e.fade = e.output({kB, kHv, 1});
  EXPECT_TRUE(e.invalid("fade: rank is 3, must be 2: [n, Hv]"));
  SummaryCase f;
  f.sequence_count = 1;
  EXPECT_TRUE(f.invalid("local_state: shape is [2, 4, 16, 32], must be [n, Hv, K, V] = [1, 4, 16, 32]"));
}

TEST(Summary, Ranges) {
  SummaryCase c;
  c.first_sequence = 3;
  EXPECT_TRUE(c.invalid("first_sequence is 3, but there are 2 sequences"));
  c.first_sequence = 1;
  c.sequence_count = 2;
  EXPECT_TRUE(c.invalid("sequence_count is 2, but 1 sequences follow first_sequence = 1"));
  c.sequence_count = -1;
  EXPECT_TRUE(c.invalid("sequence_count is -1, must not be negative"));
  SummaryCase d;
  d.pack(0, 100, 90);
  EXPECT_TRUE(d.invalid("cu_seqlens[2] is 90, less than the 100 before it"));
}

TEST(Summary, WorkspaceAndReserved) {
  SummaryCase c;
  c.exec.workspace_bytes = 64;
  EXPECT_TRUE(c.refuses(GD_WORKSPACE_TOO_SMALL, "workspace has 64 bytes, needs"));
  SummaryCase d;
  d.reserved[1] = 1;
  EXPECT_TRUE(d.invalid("gd_summary_args: reserved fields must be zero"));
}

TEST(Summary, CutsNoSequence) {
  gd_tuning tuning = GD_TUNING_INIT;
  tuning.segment_chunks = 2;
  SummaryCase c;
  c.exec.tuning = &tuning;
  EXPECT_TRUE(c.refuses(GD_UNSUPPORTED, "segment_chunks is 2, but a summary cuts no sequence"));
  BackwardSummaryCase d;
  d.exec.tuning = &tuning;
  EXPECT_TRUE(d.refuses(GD_UNSUPPORTED, "segment_chunks is 2, but a backward summary cuts no sequence"));
}

TEST(Summary, OutputsDoNotOverlap) {
  SummaryCase c;
  c.fade.data = c.transition.data;
  EXPECT_TRUE(c.invalid("transition and fade overlap in memory"));
}

TEST(BackwardSummary, Arguments) {
  BackwardSummaryCase c;
  EXPECT_TRUE(c.accepts());
  c.skip_faded = 1;
  EXPECT_TRUE(c.accepts());
  c.d_local = {};
  EXPECT_TRUE(c.invalid("d_local is missing"));
  BackwardSummaryCase d;
  d.do_ = {};
  EXPECT_TRUE(d.invalid("do is missing"));
  BackwardSummaryCase e;
  e.in.q = {};
  EXPECT_TRUE(e.invalid("q is missing"));
  BackwardSummaryCase f;
  f.do_.shape[1] = 3;
  EXPECT_TRUE(f.invalid("do has B, T = 2, 3, must have those of q, 2, 70"));
  BackwardSummaryCase g;
  g.in.initial_state = g.state(kB);
  EXPECT_TRUE(g.invalid("initial_state is given"));
}

struct MergeCase {
  Memory memory;
  Workspace workspace{size_t{1} << 20};
  MergeArgs args;
  std::vector<int32_t> first = {0, 1}, count = {2, 1};

  MergeCase() {
    const auto floats = [&](std::initializer_list<int64_t> shape, unsigned char fill) {
      return dense(memory.take(static_cast<size_t>(elements(shape)) * 4, fill), GD_F32, shape);
    };
    args.values = floats({3, 2, kK, kV}, 0);
    args.transitions = floats({3, 2, kK, kK}, 0);
    args.state = floats({2, 2, kK, kV}, 0xa5);
    args.first = tensor(first.data(), {2});
    args.count = tensor(count.data(), {2});
    args.exec.workspace = workspace.data();
    args.exec.workspace_bytes = workspace.size();
  }
  testing::AssertionResult invalid(const std::string& text) {
    memory.remember();
    const gd_status status = gd_merge(&args);
    if (status != GD_INVALID_ARGUMENT || std::string(gd_last_error()).find(text) == std::string::npos)
      return testing::AssertionFailure() << gd_status_name(status) << ": " << gd_last_error();
    if (!memory.untouched()) return testing::AssertionFailure() << "the refused call wrote to the caller's memory";
    return testing::AssertionSuccess();
  }
};

TEST(Merge, Arguments) {
  const MergeCase valid;
  EXPECT_EQ(gd_merge(&valid.args), GD_OK) << gd_last_error();
  const auto refused = [](auto&& change, const char* text) {
    MergeCase c;
    change(c);
    EXPECT_TRUE(c.invalid(text));
  };
  refused([](MergeCase& c) { c.args.values = {}; }, "values is missing");
  refused([](MergeCase& c) { c.args.transitions = {}; }, "transitions is missing");
  refused([](MergeCase& c) { c.args.state = {}; }, "state is missing");
  refused([](MergeCase& c) { c.args.first = {}; }, "first is missing");
  refused([](MergeCase& c) { c.args.count.shape[0] = 1; }, "count: shape is [1], must be [R] = [2]");
  refused([](MergeCase& c) { c.args.transitions.dtype = GD_BF16; }, "transitions: dtype is bfloat16, must be float32");
  refused([](MergeCase& c) { c.args.transitions.shape[0] = 2; },
          "transitions: shape is [2, 2, 16, 16], must be [P, Hv, K, K]");
  refused([](MergeCase& c) { c.args.state_layout = 2; }, "state_layout is 2, must be from 0 to 1");
  refused([](MergeCase& c) { c.count[1] = 3; }, "first[1] and count[1] are 1 and 3, but there are 3 segments");
  refused([](MergeCase& c) { c.first[0] = -1; }, "first[0] and count[0] are -1 and 2, but there are 3 segments");
  refused([](MergeCase& c) { c.args.reserved[0] = 1; }, "gd_merge_args: reserved fields must be zero");
  MergeCase tuned;
  gd_tuning tuning = GD_TUNING_INIT;
  tuning.segment_chunks = 2;
  tuned.args.exec.tuning = &tuning;
  EXPECT_EQ(gd_merge(&tuned.args), GD_UNSUPPORTED);
  EXPECT_STREQ(gd_last_error(), "segment_chunks is 2, but a merge cuts no sequence");
  MergeCase none;
  none.first = {7, 7};
  none.count = {0, -1};
  EXPECT_EQ(gd_merge(&none.args), GD_OK) << gd_last_error();  // of no segment
  EXPECT_EQ(static_cast<float*>(none.args.state.data)[0], 0.0f);
}

TEST(Backward, RowsOfGradients) {
  BackwardCase c;
  c.d_initial_state = c.state_output(1);
  EXPECT_TRUE(c.invalid("d_initial_state: shape is [1, 4, 16, 32], must be [N, Hv, K, V] = [2, 4, 16, 32]"));
  c.d_initial_state_indices = c.indices32(-1, 0);
  EXPECT_TRUE(c.accepts());
  c.d_initial_state_indices = c.indices32(0, 0);
  EXPECT_TRUE(c.invalid("d_initial_state_indices[1]: slot 0 is written more than once"));
  c.d_initial_state_indices = c.indices32(-1, 1);
  EXPECT_TRUE(c.invalid("d_initial_state_indices[1] is 1, but d_initial_state has 1 slots"));
  BackwardCase d;
  d.dht = d.state(1);
  d.dht_indices = d.indices32(0, 0);  // several may read one row
  EXPECT_TRUE(d.accepts());
  d.dht_indices = d.indices32(0, 2);
  EXPECT_TRUE(d.invalid("dht_indices[1] is 2, but dht has 1 slots"));
  d.dht = {};
  EXPECT_TRUE(d.invalid("dht_indices is given without dht"));
}

}  // namespace
}  // namespace gatedelta::test
