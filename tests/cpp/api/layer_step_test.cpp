// The layer's step: its own rules and those of its three operations, each with its message; a refused call writes
// nothing, whichever operation refuses.
#include <algorithm>

#include "cases.hpp"

namespace gatedelta::test {
namespace {

constexpr int64_t kBatch = 3, kSlots = 8, kTaps = 4, kChannels = 2 * kHk * kK + kHv * kV;

struct Step : Call<gd_layer_step_args> {
  explicit Step(int64_t tokens = 1) {
    key_heads = kHk;
    conv.in.x = input({kBatch, tokens, kChannels});
    conv.in.weight = input({kChannels, kTaps});
    conv.in.initial_state = conv.final_state = input({kSlots, kChannels, kTaps - 1});
    rule.in.g = input({kBatch, tokens, kHv});
    rule.in.beta = input({kBatch, tokens, kHv});
    rule.in.A_log = input({kHv});
    rule.in.gate = GD_GATE_RAW;
    rule.in.initial_state = rule.final_state = input({kSlots, kHv, kK, kV});
    rule.in.initial_state_indices = rule.final_state_indices = indices(5, 2, 7);
    norm.gate = input({kBatch, tokens, kHv, kV});
    norm.weight = input({kV});
    norm.out = output({kBatch, tokens, kHv, kV});
  }
};

TEST(LayerStepRules, IsAccepted) {
  const Step step;
  EXPECT_TRUE(step.accepts());
}

TEST(LayerStepRules, Struct) {
  Step step;
  step.struct_size -= 8;
  EXPECT_TRUE(step.refuses(GD_ABI_MISMATCH, "gd_layer_step_args.struct_size is "));
  step.struct_size += 8;
  step.reserved[3] = 1;
  EXPECT_TRUE(step.invalid("gd_layer_step_args: reserved fields must be zero"));
  step.reserved[3] = 0;
  step.exec.device = 7;
  EXPECT_TRUE(step.invalid("device is 7"));
  EXPECT_EQ(gd_layer_step(nullptr), GD_INVALID_ARGUMENT);
  EXPECT_STREQ(gd_last_error(), "gd_layer_step_args is null");
  const Step other;
  EXPECT_EQ(gd_layer_step_workspace(&other, nullptr), GD_INVALID_ARGUMENT);
}

// struct_size and exec of the three operations are not read.
TEST(LayerStepRules, ExecOfPartsIsNotRead) {
  Step step;
  step.conv.struct_size = step.rule.struct_size = step.norm.struct_size = 3;
  step.conv.exec.device = step.rule.exec.num_threads = step.norm.exec.isa = -5;
  EXPECT_TRUE(step.accepts());
}

TEST(LayerStepRules, Intermediates) {
  const Step valid;
  const gd_tensor some = valid.norm.gate;
  const auto refused = [&](const char* name, auto field) {
    Step step;
    field(step) = some;
    EXPECT_TRUE(step.invalid(std::string(name) + " is given: it lies between the layer's operations")) << name;
  };
  refused("conv.out", [](Step& s) -> gd_tensor& { return s.conv.out; });
  refused("rule.in.q", [](Step& s) -> gd_tensor& { return s.rule.in.q; });
  refused("rule.in.k", [](Step& s) -> gd_tensor& { return s.rule.in.k; });
  refused("rule.in.v", [](Step& s) -> gd_tensor& { return s.rule.in.v; });
  refused("rule.out", [](Step& s) -> gd_tensor& { return s.rule.out; });
  refused("norm.x", [](Step& s) -> gd_tensor& { return s.norm.x; });
}

TEST(LayerStepRules, WhatTheRuleGivesTheConvolution) {
  const auto refused = [](const char* name, auto field) {
    Step step;
    field(step) = step.rule.in.initial_state_indices;
    EXPECT_TRUE(step.invalid(std::string(name) + " is given: the rule's serves the convolution, too")) << name;
  };
  refused("conv.in.cu_seqlens", [](Step& s) -> gd_tensor& { return s.conv.in.cu_seqlens; });
  refused("conv.in.initial_state_indices", [](Step& s) -> gd_tensor& { return s.conv.in.initial_state_indices; });
  refused("conv.final_state_indices", [](Step& s) -> gd_tensor& { return s.conv.final_state_indices; });
  refused("conv.previous_accept_lengths", [](Step& s) -> gd_tensor& { return s.conv.previous_accept_lengths; });
  Step step;
  step.conv.in.first_slot = 1;
  EXPECT_TRUE(step.invalid("conv.in.first_slot is given: the rule's serves the convolution, too"));
}

TEST(LayerStepRules, AcceptLengths) {
  Step step;
  step.rule.accept_lengths = step.indices(1, 1, 1);
  EXPECT_TRUE(step.refuses(GD_UNSUPPORTED, "rule.accept_lengths is given: a layer's step has previous_accept_lengths"));
}

TEST(LayerStepRules, Channels) {
  Step step;
  step.key_heads = 0;
  EXPECT_TRUE(step.invalid("key_heads is 0, must be positive"));
  step.key_heads = 3;
  EXPECT_TRUE(step.invalid("mixed_qkv has 192 channels, must have 2 key_heads K + Hv V = 2 * 3 * K + 4 * 32"));
  step.key_heads = int64_t{1} << 62;
  EXPECT_TRUE(step.invalid("mixed_qkv has 192 channels"));
  step.key_heads = kHk;
  step.norm.out.shape[2] = 8;
  EXPECT_TRUE(step.invalid("mixed_qkv has 192 channels, must have 2 key_heads K + Hv V = 2 * 2 * K + 8 * 32"));
  step.norm.out.shape[2] = -1;
  EXPECT_TRUE(step.invalid("mixed_qkv or out: a size is negative or too large"));
  step.norm.out.rank = 3;
  EXPECT_TRUE(step.invalid("out: rank is 3, must be 4: [B, T, Hv, V]"));
  step.norm.out = {};
  EXPECT_TRUE(step.invalid("out is missing"));
  step.conv.in.x.dtype = 95;
  EXPECT_TRUE(step.invalid("mixed_qkv: dtype is unknown, must be float32, bfloat16 or float16"));
  step.conv.in.x.dtype = GD_F32;
  step.conv.in.x.rank = 2;
  EXPECT_TRUE(step.invalid("mixed_qkv: rank is 2, must be 3: [B, T, D]"));
  step.conv.in.x = {};
  EXPECT_TRUE(step.invalid("mixed_qkv is missing"));
}

TEST(LayerStepRules, SizesTooLarge) {
  Step step;
  step.conv.in.x.shape[0] = int64_t{1} << 30;
  step.conv.in.x.shape[1] = int64_t{1} << 30;
  EXPECT_TRUE(step.invalid("mixed_qkv or out: a size is negative or too large"));
  step.conv.in.x.shape[1] = int64_t{1} << 40;
  EXPECT_TRUE(step.invalid("mixed_qkv or out: a size is negative or too large"));
}

// Each message says which operation it is about, and the last operation's refusal comes before the first one runs.
TEST(LayerStepRules, OfTheParts) {
  Step conv;
  conv.conv.in.weight = conv.input({kChannels, 5});
  EXPECT_TRUE(conv.invalid("conv_weight has W = 5 taps, must have from 2 to 4"));
  Step narrow;
  narrow.conv.in.initial_state = narrow.conv.final_state = narrow.input({kSlots, kChannels, 2});
  EXPECT_TRUE(narrow.invalid("conv_state has S = 2 columns, must have at least W - 1 = 3"));
  Step rule;
  rule.rule.in.A_log = {};
  EXPECT_TRUE(rule.invalid("rule: A_log is missing"));
  Step state;
  state.rule.in.initial_state.shape[1] = 3;
  EXPECT_TRUE(state.invalid("state: shape is [8, 3, 16, 32], must be [slots, Hv, K, V] = [any, 4, 16, 32]"));
  Step norm;
  norm.norm.weight = norm.input({kV + 1});
  EXPECT_TRUE(norm.invalid("norm_weight: shape is [33], must be [D] = [32]"));
  Step eps;
  eps.norm.has_eps = 1;
  eps.norm.eps = -1;
  EXPECT_TRUE(eps.invalid("norm: eps is -1, must be finite and not negative"));
  Step y;
  y.norm.out = y.output({kBatch, 2, kHv, kV});
  EXPECT_TRUE(y.invalid("out: shape is [3, 2, 4, 32], must be [B, T, H, D] = [3, 1, 4, 32]"));
}

TEST(LayerStepRules, Contents) {
  Step step;
  step.rule.in.initial_state_indices = step.rule.final_state_indices = step.indices(5, 9, 7);
  EXPECT_TRUE(step.invalid("state_indices[1] is 9, but conv_state has 8 slots"));
  step.conv.in.initial_state = step.conv.final_state = step.input({10, kChannels, kTaps - 1});
  EXPECT_TRUE(step.invalid("state_indices[1] is 9, but state has 8 slots"));
  step.rule.in.initial_state_indices = step.rule.final_state_indices = step.indices(5, 5, 7);
  EXPECT_TRUE(step.invalid("final_state_indices[1]: slot 5 is written more than once"));
  step.conv.final_state = {};
  EXPECT_TRUE(step.invalid("final_state_indices[1]: slot 5 is written more than once"));
}

// Draft windows: the conv state must hold the window.
TEST(LayerStepRules, Drafts) {
  Step step(2);
  step.rule.final_state = step.rule.final_state_indices = {};
  step.rule.in.initial_state_indices = step.indices(1, 2, 3, 4, 5, 6);
  step.rule.in.initial_state_indices.rank = 2;
  step.rule.in.initial_state_indices.shape[0] = 3;
  step.rule.in.initial_state_indices.shape[1] = 2;
  step.rule.in.initial_state_indices.stride[0] = 2;
  step.rule.in.initial_state_indices.stride[1] = 1;
  step.rule.step_indices = step.rule.in.initial_state_indices;
  step.rule.step_states = step.rule.in.initial_state;
  step.rule.previous_accept_lengths = step.indices(1, 2, 1);
  EXPECT_TRUE(step.invalid("conv_state has S = 3 columns, must have at least W - 2 + 2 = 4 for a draft window"));
  step.conv.in.initial_state = step.conv.final_state = step.input({kSlots, kChannels, kTaps});
  EXPECT_TRUE(step.accepts());
  step.rule.previous_accept_lengths = step.indices(1, 3, 1);
  EXPECT_TRUE(step.invalid("conv: previous_accept_lengths[1] is 3, must be from 1 to S - W + 2 = 2"));
  step.conv.in.initial_state = step.conv.final_state = {};
  EXPECT_TRUE(step.invalid("conv: previous_accept_lengths is given without conv_state"));
}

TEST(LayerStepRules, Overlaps) {
  Step step;
  step.norm.out.data = step.conv.in.x.data;
  EXPECT_TRUE(step.invalid("mixed_qkv and out overlap in memory"));
  step.norm.out = step.norm.gate;
  EXPECT_TRUE(step.invalid("z and out overlap in memory"));
  Step states;
  states.conv.in.initial_state.data = states.conv.final_state.data = states.rule.final_state.data;
  EXPECT_TRUE(states.invalid("conv_state and state overlap in memory"));
  Step gates;
  gates.conv.step_states = gates.output({kBatch, 1, kChannels, kTaps - 1});
  EXPECT_TRUE(gates.accepts());
  gates.rule.in.g.data = gates.conv.step_states.data;
  EXPECT_TRUE(gates.invalid("conv.step_states and a overlap in memory"));
  Step inside;
  inside.norm.out.data = inside.exec.workspace;
  EXPECT_TRUE(inside.invalid("out and workspace overlap in memory"));
}

// Pages that hold the conv state and the state of one slot, as engines lay them out.
TEST(LayerStepRules, PagesOfBothStates) {
  Step step;
  constexpr int64_t kConv = kChannels * (kTaps - 1), kPage = kConv + kHv * kK * kV;
  gd_tensor pages = step.input({kSlots, kPage});
  gd_tensor conv = step.conv.final_state, state = step.rule.final_state;
  conv.data = pages.data;
  state.data = static_cast<float*>(pages.data) + kConv;
  conv.stride[0] = state.stride[0] = kPage;
  step.conv.in.initial_state = step.conv.final_state = conv;
  step.rule.in.initial_state = step.rule.final_state = state;
  EXPECT_TRUE(step.accepts());
}

TEST(LayerStepRules, Workspace) {
  Step step;
  size_t bytes = 0;
  ASSERT_EQ(gd_layer_step_workspace(&step, &bytes), GD_OK) << gd_last_error();
  EXPECT_GE(bytes, sizeof(float) * kBatch * (kChannels + kHv * kV));
  const std::string needs = ", needs " + std::to_string(bytes);
  for (const size_t given : {bytes - 1, size_t{64}, size_t{0}}) {
    step.exec.workspace_bytes = given;
    EXPECT_TRUE(step.refuses(GD_WORKSPACE_TOO_SMALL, "workspace has " + std::to_string(given) + " bytes" + needs));
  }
  step.exec.workspace_bytes = bytes;
  EXPECT_TRUE(step.accepts());
  step.exec.workspace = static_cast<char*>(step.workspace.data()) + 1;
  EXPECT_TRUE(step.invalid("is not 64-byte aligned"));
  step.exec.workspace = nullptr;
  EXPECT_TRUE(step.invalid("workspace is null, but workspace_bytes is "));
}

// States of the rule by slots, and none of the convolution: every window begins with zeros.
TEST(LayerStepRules, WithoutConvStates) {
  Step step;
  step.rule.in.first_slot = 1;
  step.conv.in.initial_state = step.conv.final_state = {};
  EXPECT_TRUE(step.accepts());
  step.conv.final_state = step.output({kSlots, kChannels, kTaps - 1});
  step.rule.final_state_indices = step.indices(5, 2, 7);
  EXPECT_TRUE(step.accepts());
  const auto* unused = static_cast<const unsigned char*>(step.conv.final_state.data);
  EXPECT_TRUE(std::all_of(unused, unused + 2 * kChannels * (kTaps - 1) * 4, [](unsigned char b) { return b == 0xa5; }));
}

// On CUDA a query needs no GPU; a call does.
TEST(LayerStepRules, OnCuda) {
  Step step;
  size_t on_cpu = 0, bytes = 0;
  ASSERT_EQ(gd_layer_step_workspace(&step, &on_cpu), GD_OK) << gd_last_error();
  step.exec.device = GD_CUDA;
  ASSERT_EQ(gd_layer_step_workspace(&step, &bytes), GD_OK) << gd_last_error();
  EXPECT_GE(bytes, sizeof(float) * kBatch * (kChannels + kHv * kV));
}

}  // namespace
}  // namespace gatedelta::test
