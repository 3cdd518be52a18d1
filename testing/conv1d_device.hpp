// The convolution's calls on a CUDA device.
#pragma once

#include "testing/device.hpp"

namespace gatedelta::testing {

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

}  // namespace gatedelta::testing
