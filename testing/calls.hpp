// Every call of the C ABI as a list of tensors, with its two functions: for what treats all operations alike.
#pragma once

#include <vector>

#include "gatedelta/gatedelta.h"

namespace gatedelta::testing {

// The tensors of a call, those of rows first, and its query and call functions.
template <class Args>
struct CallOf;
template <>
struct CallOf<gd_forward_args> {
  static constexpr size_t kRowTensors = 4;
  static constexpr auto workspace = gd_forward_workspace;
  static constexpr auto run = gd_forward;
  static constexpr const char* kName = "gd_forward";
  template <class Args>
  static auto tensors(Args& a) {
    return std::vector{&a.in.q,
                       &a.in.k,
                       &a.in.v,
                       &a.out,
                       &a.in.g,
                       &a.in.beta,
                       &a.in.A_log,
                       &a.in.dt_bias,
                       &a.in.cu_seqlens,
                       &a.in.initial_state,
                       &a.in.initial_state_indices,
                       &a.final_state,
                       &a.final_state_indices,
                       &a.checkpoints,
                       &a.checkpoint_indices,
                       &a.checkpoint_offsets};
  }
};
template <>
struct CallOf<gd_backward_args> {
  static constexpr size_t kRowTensors = 7;
  static constexpr auto workspace = gd_backward_workspace;
  static constexpr auto run = gd_backward;
  static constexpr const char* kName = "gd_backward";
  template <class Args>
  static auto tensors(Args& a) {
    return std::vector{&a.in.q,
                       &a.in.k,
                       &a.in.v,
                       &a.do_,
                       &a.dq,
                       &a.dk,
                       &a.dv,
                       &a.in.g,
                       &a.in.beta,
                       &a.in.A_log,
                       &a.in.dt_bias,
                       &a.in.cu_seqlens,
                       &a.in.initial_state,
                       &a.in.initial_state_indices,
                       &a.dht,
                       &a.dg,
                       &a.dbeta,
                       &a.dA_log,
                       &a.d_dt_bias,
                       &a.d_initial_state};
  }
};
template <>
struct CallOf<gd_recurrent_args> {
  static constexpr size_t kRowTensors = 0;  // rows of any alignment are taken
  static constexpr auto workspace = gd_recurrent_workspace;
  static constexpr auto run = gd_recurrent;
  static constexpr const char* kName = "gd_recurrent";
  template <class Args>
  static auto tensors(Args& a) {
    return std::vector{&a.in.q,
                       &a.in.k,
                       &a.in.v,
                       &a.out,
                       &a.in.g,
                       &a.in.beta,
                       &a.in.A_log,
                       &a.in.dt_bias,
                       &a.in.cu_seqlens,
                       &a.in.initial_state,
                       &a.in.initial_state_indices,
                       &a.final_state,
                       &a.final_state_indices,
                       &a.accept_lengths,
                       &a.step_states,
                       &a.step_indices,
                       &a.previous_accept_lengths};
  }
};
template <>
struct CallOf<gd_summary_args> {
  static constexpr size_t kRowTensors = 3;
  static constexpr auto workspace = gd_summary_workspace;
  static constexpr auto run = gd_summary;
  static constexpr const char* kName = "gd_summary";
  template <class Args>
  static auto tensors(Args& a) {
    return std::vector{&a.in.k,       &a.in.q,          &a.in.v,        &a.in.g,       &a.in.beta, &a.in.A_log,
                       &a.in.dt_bias, &a.in.cu_seqlens, &a.local_state, &a.transition, &a.fade};
  }
};
template <>
struct CallOf<gd_backward_summary_args> {
  static constexpr size_t kRowTensors = 3;
  static constexpr auto workspace = gd_backward_summary_workspace;
  static constexpr auto run = gd_backward_summary;
  static constexpr const char* kName = "gd_backward_summary";
  template <class Args>
  static auto tensors(Args& a) {
    return std::vector{&a.in.q,     &a.in.k,       &a.do_,           &a.in.g,   &a.in.beta,
                       &a.in.A_log, &a.in.dt_bias, &a.in.cu_seqlens, &a.d_local};
  }
};
template <>
struct CallOf<gd_merge_args> {
  static constexpr size_t kRowTensors = 0;
  static constexpr auto workspace = gd_merge_workspace;
  static constexpr auto run = gd_merge;
  static constexpr const char* kName = "gd_merge";
  template <class Args>
  static auto tensors(Args& a) {
    return std::vector{&a.values, &a.transitions, &a.first, &a.count, &a.state};
  }
};
template <>
struct CallOf<gd_conv1d_args> {
  static constexpr size_t kRowTensors = 0;
  static constexpr auto workspace = gd_conv1d_workspace;
  static constexpr auto run = gd_conv1d;
  static constexpr const char* kName = "gd_conv1d";
  template <class Args>
  static auto tensors(Args& a) {
    return std::vector{&a.in.x,
                       &a.in.weight,
                       &a.in.bias,
                       &a.in.cu_seqlens,
                       &a.in.initial_state,
                       &a.in.initial_state_indices,
                       &a.out,
                       &a.final_state,
                       &a.final_state_indices,
                       &a.previous_accept_lengths,
                       &a.step_states};
  }
};
template <>
struct CallOf<gd_conv1d_backward_args> {
  static constexpr size_t kRowTensors = 0;
  static constexpr auto workspace = gd_conv1d_backward_workspace;
  static constexpr auto run = gd_conv1d_backward;
  static constexpr const char* kName = "gd_conv1d_backward";
  template <class Args>
  static auto tensors(Args& a) {
    return std::vector{
        &a.in.x, &a.in.weight, &a.in.bias, &a.in.cu_seqlens, &a.in.initial_state, &a.in.initial_state_indices, &a.dy,
        &a.dht,  &a.dx,        &a.dweight, &a.dbias,         &a.d_initial_state};
  }
};
template <>
struct CallOf<gd_gated_norm_args> {
  static constexpr size_t kRowTensors = 0;  // rows of any alignment are taken
  static constexpr auto workspace = gd_gated_norm_workspace;
  static constexpr auto run = gd_gated_norm;
  static constexpr const char* kName = "gd_gated_norm";
  template <class Args>
  static auto tensors(Args& a) {
    return std::vector{&a.x, &a.gate, &a.weight, &a.out};
  }
};
template <>
struct CallOf<gd_gated_norm_backward_args> {
  static constexpr size_t kRowTensors = 0;
  static constexpr auto workspace = gd_gated_norm_backward_workspace;
  static constexpr auto run = gd_gated_norm_backward;
  static constexpr const char* kName = "gd_gated_norm_backward";
  template <class Args>
  static auto tensors(Args& a) {
    return std::vector{&a.x, &a.gate, &a.weight, &a.dy, &a.dx, &a.dgate, &a.dweight};
  }
};
template <>
struct CallOf<gd_layer_step_args> {
  static constexpr size_t kRowTensors = 0;  // rows of any alignment are taken
  static constexpr auto workspace = gd_layer_step_workspace;
  static constexpr auto run = gd_layer_step;
  static constexpr const char* kName = "gd_layer_step";
  template <class Args>
  static auto tensors(Args& a) {
    return std::vector{&a.conv.in.x,
                       &a.conv.in.weight,
                       &a.conv.in.bias,
                       &a.conv.in.initial_state,
                       &a.conv.final_state,
                       &a.conv.step_states,
                       &a.rule.in.g,
                       &a.rule.in.beta,
                       &a.rule.in.A_log,
                       &a.rule.in.dt_bias,
                       &a.rule.in.cu_seqlens,
                       &a.rule.in.initial_state,
                       &a.rule.in.initial_state_indices,
                       &a.rule.final_state,
                       &a.rule.final_state_indices,
                       &a.rule.step_states,
                       &a.rule.step_indices,
                       &a.rule.previous_accept_lengths,
                       &a.norm.gate,
                       &a.norm.weight,
                       &a.norm.out};
  }
};

}  // namespace gatedelta::testing
