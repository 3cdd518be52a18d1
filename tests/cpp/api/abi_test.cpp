// The ABI is frozen: programs built with an earlier header must find every field where it was.
#include <gtest/gtest.h>

#include <cstddef>
#include <type_traits>

#include "gatedelta/gatedelta.h"

static_assert(GD_ABI_VERSION == 1, "a new ABI keeps these numbers and appends its own");
static_assert(sizeof(void*) == 8, "the numbers below are those of 64-bit machines");

#define AT(type, field, offset) static_assert(offsetof(type, field) == (offset), #type "." #field " has moved")

static_assert(sizeof(gd_tensor) == 96);
AT(gd_tensor, data, 0);
AT(gd_tensor, dtype, 8);
AT(gd_tensor, rank, 12);
AT(gd_tensor, shape, 16);
AT(gd_tensor, stride, 56);

static_assert(sizeof(gd_tuning) == 40);
AT(gd_tuning, struct_size, 0);
AT(gd_tuning, segment_chunks, 8);
AT(gd_tuning, persistent_segment_chunks, 12);
AT(gd_tuning, segment_halves, 16);
AT(gd_tuning, reserved_flags, 20);
AT(gd_tuning, reserved, 24);

static_assert(sizeof(gd_exec) == 88);
AT(gd_exec, device, 0);
AT(gd_exec, device_index, 4);
AT(gd_exec, stream, 8);
AT(gd_exec, workspace, 16);
AT(gd_exec, workspace_bytes, 24);
AT(gd_exec, isa, 32);
AT(gd_exec, num_threads, 36);
AT(gd_exec, parallel_for, 40);
AT(gd_exec, parallel_for_context, 48);
AT(gd_exec, tuning, 56);
AT(gd_exec, kernels, 64);
AT(gd_exec, reserved_flags, 68);
AT(gd_exec, reserved, 72);

static_assert(sizeof(gd_inputs) == 1016);
AT(gd_inputs, q, 0);
AT(gd_inputs, k, 96);
AT(gd_inputs, v, 192);
AT(gd_inputs, g, 288);
AT(gd_inputs, beta, 384);
AT(gd_inputs, A_log, 480);
AT(gd_inputs, dt_bias, 576);
AT(gd_inputs, cu_seqlens, 672);
AT(gd_inputs, initial_state, 768);
AT(gd_inputs, initial_state_indices, 864);
AT(gd_inputs, gate, 960);
AT(gd_inputs, beta_kind, 964);
AT(gd_inputs, state_layout, 968);
AT(gd_inputs, l2norm, 972);
AT(gd_inputs, has_scale, 976);
AT(gd_inputs, scale, 980);
AT(gd_inputs, first_slot, 984);
AT(gd_inputs, key_head_order, 992);
AT(gd_inputs, reserved_flags, 996);
AT(gd_inputs, reserved, 1000);

static_assert(sizeof(gd_saved_call) == 128);
AT(gd_saved_call, batch, 0);
AT(gd_saved_call, tokens, 8);
AT(gd_saved_call, sequences, 16);
AT(gd_saved_call, key_heads, 24);
AT(gd_saved_call, value_heads, 32);
AT(gd_saved_call, key_dim, 40);
AT(gd_saved_call, value_dim, 48);
AT(gd_saved_call, device, 56);
AT(gd_saved_call, kernels, 60);
AT(gd_saved_call, dtype, 64);
AT(gd_saved_call, gate, 68);
AT(gd_saved_call, beta_kind, 72);
AT(gd_saved_call, state_layout, 76);
AT(gd_saved_call, l2norm, 80);
AT(gd_saved_call, key_head_order, 84);
AT(gd_saved_call, cu_seqlens, 88);
AT(gd_saved_call, dt_bias, 92);
AT(gd_saved_call, initial_state, 96);
AT(gd_saved_call, batch_invariant, 100);
AT(gd_saved_call, scale, 104);
AT(gd_saved_call, reserved_flags, 108);
AT(gd_saved_call, reserved, 112);

static_assert(sizeof(gd_forward_args) == 1888);
AT(gd_forward_args, struct_size, 0);
AT(gd_forward_args, exec, 8);
AT(gd_forward_args, in, 96);
AT(gd_forward_args, out, 1112);
AT(gd_forward_args, final_state, 1208);
AT(gd_forward_args, final_state_indices, 1304);
AT(gd_forward_args, checkpoints, 1400);
AT(gd_forward_args, checkpoint_indices, 1496);
AT(gd_forward_args, checkpoint_every, 1592);
AT(gd_forward_args, saved, 1600);
AT(gd_forward_args, saved_bytes, 1608);
AT(gd_forward_args, context_parallel, 1616);
AT(gd_forward_args, batch_invariant, 1620);
AT(gd_forward_args, prepared, 1624);
AT(gd_forward_args, reserved_flags, 1628);
AT(gd_forward_args, checkpoint_offsets, 1632);
AT(gd_forward_args, saved_call, 1728);
AT(gd_forward_args, reserved, 1856);

static_assert(sizeof(gd_backward_args) == 2456);
AT(gd_backward_args, struct_size, 0);
AT(gd_backward_args, exec, 8);
AT(gd_backward_args, in, 96);
AT(gd_backward_args, do_, 1112);
AT(gd_backward_args, dht, 1208);
AT(gd_backward_args, saved, 1304);
AT(gd_backward_args, saved_bytes, 1312);
AT(gd_backward_args, dq, 1320);
AT(gd_backward_args, dk, 1416);
AT(gd_backward_args, dv, 1512);
AT(gd_backward_args, dg, 1608);
AT(gd_backward_args, dbeta, 1704);
AT(gd_backward_args, dA_log, 1800);
AT(gd_backward_args, d_dt_bias, 1896);
AT(gd_backward_args, d_initial_state, 1992);
AT(gd_backward_args, context_parallel, 2088);
AT(gd_backward_args, batch_invariant, 2092);
AT(gd_backward_args, small_workspace, 2096);
AT(gd_backward_args, reserved_flags, 2100);
AT(gd_backward_args, dht_indices, 2104);
AT(gd_backward_args, d_initial_state_indices, 2200);
AT(gd_backward_args, saved_call, 2296);
AT(gd_backward_args, reserved, 2424);

static_assert(sizeof(gd_summary_args) == 1584);
AT(gd_summary_args, struct_size, 0);
AT(gd_summary_args, exec, 8);
AT(gd_summary_args, in, 96);
AT(gd_summary_args, local_state, 1112);
AT(gd_summary_args, transition, 1208);
AT(gd_summary_args, fade, 1304);
AT(gd_summary_args, first_sequence, 1400);
AT(gd_summary_args, sequence_count, 1408);
AT(gd_summary_args, skip_faded, 1416);
AT(gd_summary_args, prepared, 1420);
AT(gd_summary_args, saved, 1424);
AT(gd_summary_args, saved_bytes, 1432);
AT(gd_summary_args, saved_call, 1440);
AT(gd_summary_args, reserved, 1568);

static_assert(sizeof(gd_backward_summary_args) == 1504);
AT(gd_backward_summary_args, struct_size, 0);
AT(gd_backward_summary_args, exec, 8);
AT(gd_backward_summary_args, in, 96);
AT(gd_backward_summary_args, do_, 1112);
AT(gd_backward_summary_args, d_local, 1208);
AT(gd_backward_summary_args, saved, 1304);
AT(gd_backward_summary_args, saved_bytes, 1312);
AT(gd_backward_summary_args, first_sequence, 1320);
AT(gd_backward_summary_args, sequence_count, 1328);
AT(gd_backward_summary_args, skip_faded, 1336);
AT(gd_backward_summary_args, reserved_flags, 1340);
AT(gd_backward_summary_args, saved_call, 1344);
AT(gd_backward_summary_args, reserved, 1472);

static_assert(sizeof(gd_merge_args) == 616);
AT(gd_merge_args, struct_size, 0);
AT(gd_merge_args, exec, 8);
AT(gd_merge_args, values, 96);
AT(gd_merge_args, transitions, 192);
AT(gd_merge_args, first, 288);
AT(gd_merge_args, count, 384);
AT(gd_merge_args, state, 480);
AT(gd_merge_args, transposed, 576);
AT(gd_merge_args, state_layout, 580);
AT(gd_merge_args, reserved, 584);

static_assert(sizeof(gd_recurrent_args) == 1824);
AT(gd_recurrent_args, struct_size, 0);
AT(gd_recurrent_args, exec, 8);
AT(gd_recurrent_args, in, 96);
AT(gd_recurrent_args, out, 1112);
AT(gd_recurrent_args, final_state, 1208);
AT(gd_recurrent_args, final_state_indices, 1304);
AT(gd_recurrent_args, accept_lengths, 1400);
AT(gd_recurrent_args, step_states, 1496);
AT(gd_recurrent_args, step_indices, 1592);
AT(gd_recurrent_args, previous_accept_lengths, 1688);
AT(gd_recurrent_args, batch_invariant, 1784);
AT(gd_recurrent_args, reserved_flags, 1788);
AT(gd_recurrent_args, reserved, 1792);

static_assert(sizeof(gd_gated_norm_args) == 528);
AT(gd_gated_norm_args, struct_size, 0);
AT(gd_gated_norm_args, exec, 8);
AT(gd_gated_norm_args, x, 96);
AT(gd_gated_norm_args, gate, 192);
AT(gd_gated_norm_args, weight, 288);
AT(gd_gated_norm_args, out, 384);
AT(gd_gated_norm_args, activation, 480);
AT(gd_gated_norm_args, round_before_gate, 484);
AT(gd_gated_norm_args, has_eps, 488);
AT(gd_gated_norm_args, eps, 492);
AT(gd_gated_norm_args, reserved, 496);

static_assert(sizeof(gd_gated_norm_backward_args) == 816);
AT(gd_gated_norm_backward_args, struct_size, 0);
AT(gd_gated_norm_backward_args, exec, 8);
AT(gd_gated_norm_backward_args, x, 96);
AT(gd_gated_norm_backward_args, gate, 192);
AT(gd_gated_norm_backward_args, weight, 288);
AT(gd_gated_norm_backward_args, dy, 384);
AT(gd_gated_norm_backward_args, dx, 480);
AT(gd_gated_norm_backward_args, dgate, 576);
AT(gd_gated_norm_backward_args, dweight, 672);
AT(gd_gated_norm_backward_args, activation, 768);
AT(gd_gated_norm_backward_args, round_before_gate, 772);
AT(gd_gated_norm_backward_args, has_eps, 776);
AT(gd_gated_norm_backward_args, eps, 780);
AT(gd_gated_norm_backward_args, reserved, 784);

static_assert(sizeof(gd_conv1d_inputs) == 624);
AT(gd_conv1d_inputs, x, 0);
AT(gd_conv1d_inputs, weight, 96);
AT(gd_conv1d_inputs, bias, 192);
AT(gd_conv1d_inputs, cu_seqlens, 288);
AT(gd_conv1d_inputs, initial_state, 384);
AT(gd_conv1d_inputs, initial_state_indices, 480);
AT(gd_conv1d_inputs, first_slot, 576);
AT(gd_conv1d_inputs, activation, 584);
AT(gd_conv1d_inputs, reserved_flags, 588);
AT(gd_conv1d_inputs, reserved, 592);

static_assert(sizeof(gd_conv1d_args) == 1232);
AT(gd_conv1d_args, struct_size, 0);
AT(gd_conv1d_args, exec, 8);
AT(gd_conv1d_args, in, 96);
AT(gd_conv1d_args, out, 720);
AT(gd_conv1d_args, final_state, 816);
AT(gd_conv1d_args, final_state_indices, 912);
AT(gd_conv1d_args, previous_accept_lengths, 1008);
AT(gd_conv1d_args, step_states, 1104);
AT(gd_conv1d_args, reserved, 1200);

static_assert(sizeof(gd_conv1d_backward_args) == 1328);
AT(gd_conv1d_backward_args, struct_size, 0);
AT(gd_conv1d_backward_args, exec, 8);
AT(gd_conv1d_backward_args, in, 96);
AT(gd_conv1d_backward_args, dy, 720);
AT(gd_conv1d_backward_args, dht, 816);
AT(gd_conv1d_backward_args, dx, 912);
AT(gd_conv1d_backward_args, dweight, 1008);
AT(gd_conv1d_backward_args, dbias, 1104);
AT(gd_conv1d_backward_args, d_initial_state, 1200);
AT(gd_conv1d_backward_args, reserved, 1296);

constexpr size_t kLayerRule = 96 + sizeof(gd_conv1d_args), kLayerNorm = kLayerRule + sizeof(gd_recurrent_args);
constexpr size_t kLayerHeads = kLayerNorm + sizeof(gd_gated_norm_args);
static_assert(sizeof(gd_layer_step_args) == kLayerHeads + 40);
AT(gd_layer_step_args, struct_size, 0);
AT(gd_layer_step_args, exec, 8);
AT(gd_layer_step_args, conv, 96);
AT(gd_layer_step_args, rule, kLayerRule);
AT(gd_layer_step_args, norm, kLayerNorm);
AT(gd_layer_step_args, key_heads, kLayerHeads);
AT(gd_layer_step_args, reserved, kLayerHeads + 8);

static_assert(sizeof(gd_info) == 80);
AT(gd_info, struct_size, 0);
AT(gd_info, abi_version, 8);
AT(gd_info, version_major, 12);
AT(gd_info, version_minor, 16);
AT(gd_info, version_patch, 20);
AT(gd_info, cpu_isa_compiled, 24);
AT(gd_info, cpu_isa_usable, 28);
AT(gd_info, cpu_isa_best, 32);
AT(gd_info, cpu_count, 36);
AT(gd_info, cuda_compiled, 40);
AT(gd_info, cuda_devices, 44);
AT(gd_info, reserved, 48);

#undef AT

static_assert(GD_OK == 0 && GD_INVALID_ARGUMENT == 1 && GD_UNSUPPORTED == 2 && GD_WORKSPACE_TOO_SMALL == 3 &&
              GD_ABI_MISMATCH == 4 && GD_OUT_OF_RESOURCES == 5 && GD_INTERNAL == 6);
static_assert(GD_DTYPE_NONE == 0 && GD_F32 == 1 && GD_BF16 == 2 && GD_F16 == 3 && GD_I32 == 4 && GD_I64 == 5);
static_assert(GD_CPU == 0 && GD_CUDA == 1);
static_assert(GD_ISA_AUTO == 0 && GD_ISA_GENERIC == 1 && GD_ISA_AVX2 == 2 && GD_ISA_AVX512 == 3 &&
              GD_ISA_AVX512_BF16 == 4 && GD_ISA_AMX == 5 && GD_ISA_NEON == 6 && GD_ISA_NEON_BF16 == 7);
static_assert(GD_GATE_LOG == 0 && GD_GATE_RAW == 1);
static_assert(GD_BETA_VALUE == 0 && GD_BETA_LOGIT == 1 && GD_BETA_LOGIT_DOUBLED == 2);
static_assert(GD_STATE_KV == 0 && GD_STATE_VK == 1);
static_assert(GD_CP_AUTO == 0 && GD_CP_OFF == 1);
static_assert(GD_NORM_SILU == 0 && GD_NORM_SIGMOID == 1);
static_assert(GD_CONV1D_LINEAR == 0 && GD_CONV1D_SILU == 1);
static_assert(GD_MAX_RANK == 5 && GD_CHUNK == 64);

static_assert(std::is_standard_layout_v<gd_forward_args> && std::is_trivially_copyable_v<gd_forward_args>);
static_assert(std::is_standard_layout_v<gd_backward_args> && std::is_trivially_copyable_v<gd_backward_args>);
static_assert(std::is_standard_layout_v<gd_recurrent_args> && std::is_trivially_copyable_v<gd_recurrent_args>);
static_assert(std::is_standard_layout_v<gd_gated_norm_args> && std::is_trivially_copyable_v<gd_gated_norm_args>);
static_assert(std::is_standard_layout_v<gd_gated_norm_backward_args> &&
              std::is_trivially_copyable_v<gd_gated_norm_backward_args>);

static_assert(std::is_standard_layout_v<gd_conv1d_args> && std::is_trivially_copyable_v<gd_conv1d_args>);
static_assert(std::is_standard_layout_v<gd_conv1d_backward_args> &&
              std::is_trivially_copyable_v<gd_conv1d_backward_args>);
static_assert(std::is_standard_layout_v<gd_summary_args> && std::is_trivially_copyable_v<gd_summary_args>);
static_assert(std::is_standard_layout_v<gd_backward_summary_args> &&
              std::is_trivially_copyable_v<gd_backward_summary_args>);
static_assert(std::is_standard_layout_v<gd_tuning> && std::is_trivially_copyable_v<gd_tuning>);
static_assert(std::is_standard_layout_v<gd_merge_args> && std::is_trivially_copyable_v<gd_merge_args>);
static_assert(std::is_standard_layout_v<gd_layer_step_args> && std::is_trivially_copyable_v<gd_layer_step_args>);

// The same sizes, as the library saw them when it was compiled.
TEST(Abi, LibraryAgrees) {
  gd_forward_args forward = {};
  gd_backward_args backward = {};
  gd_recurrent_args recurrent = {};
  gd_conv1d_args conv1d = {};
  gd_conv1d_backward_args conv1d_backward = {};
  gd_layer_step_args layer_step = {};
  gd_summary_args summary = {};
  gd_backward_summary_args backward_summary = {};
  gd_merge_args merge = {};
  size_t bytes = 0;
  for (const size_t less : {size_t{1}, size_t{0}}) {
    const gd_status expected = less ? GD_ABI_MISMATCH : GD_INVALID_ARGUMENT;  // of the right size, but q is missing
    forward.struct_size = sizeof forward - less;
    backward.struct_size = sizeof backward - less;
    recurrent.struct_size = sizeof recurrent - less;
    conv1d.struct_size = sizeof conv1d - less;
    conv1d_backward.struct_size = sizeof conv1d_backward - less;
    layer_step.struct_size = sizeof layer_step - less;
    summary.struct_size = sizeof summary - less;
    backward_summary.struct_size = sizeof backward_summary - less;
    merge.struct_size = sizeof merge - less;
    EXPECT_EQ(gd_summary_workspace(&summary, &bytes), expected) << gd_last_error();
    EXPECT_EQ(gd_backward_summary_workspace(&backward_summary, &bytes), expected) << gd_last_error();
    EXPECT_EQ(gd_merge_workspace(&merge, &bytes), expected) << gd_last_error();
    EXPECT_EQ(gd_layer_step_workspace(&layer_step, &bytes), expected) << gd_last_error();
    EXPECT_EQ(gd_conv1d_workspace(&conv1d, &bytes), expected) << gd_last_error();
    EXPECT_EQ(gd_conv1d_backward_workspace(&conv1d_backward, &bytes), expected) << gd_last_error();
    EXPECT_EQ(gd_forward_workspace(&forward, &bytes), expected) << gd_last_error();
    EXPECT_EQ(gd_backward_workspace(&backward, &bytes), expected) << gd_last_error();
    EXPECT_EQ(gd_recurrent_workspace(&recurrent, &bytes), expected) << gd_last_error();
  }
}
