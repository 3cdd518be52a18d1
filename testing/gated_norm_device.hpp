// The gated norm's calls on a CUDA device.
#pragma once

#include "testing/device.hpp"

namespace gatedelta::testing {

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

}  // namespace gatedelta::testing
