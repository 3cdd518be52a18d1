// The cases of the gated norm that the CPU's and the GPU's tests share.
#pragma once

#include <vector>

#include "testing/gated_norm.hpp"

namespace gatedelta::testing {

using NormCases = std::vector<NormCase>;
inline constexpr gd_dtype kNormTypes[] = {GD_F32, GD_BF16, GD_F16};

// Every size a row may have.
inline NormCases norm_sizes() {
  NormCases cases;
  for (int64_t D = 16; D <= 512; D += 16)
    cases.push_back({.B = 2, .T = 3, .H = 3, .D = D, .x = kNormTypes[D / 16 % 3], .seed = static_cast<uint64_t>(D)});
  for (const int64_t D : {64, 128, 256})  // layers' sizes, which may have kernels of their own
    for (const gd_dtype x : kNormTypes) cases.push_back({.B = 2, .T = 7, .H = 3, .D = D, .x = x});
  return cases;
}

// Every type of every tensor, and with a layer's size of rows every type of the weight beside rows of one type.
inline NormCases norm_types() {
  NormCases cases;
  for (const gd_dtype x : kNormTypes)
    for (const gd_dtype z : kNormTypes)
      for (const gd_dtype weight : kNormTypes)
        for (const gd_dtype y : kNormTypes)
          for (const bool round : {false, true}) {
            cases.push_back({.D = 48, .x = x, .z = z, .weight = weight, .y = y, .round = round});
            if (x == z && x == y)
              for (const NormGateKind gate : {NormGateKind::silu, NormGateKind::sigmoid})
                cases.push_back(
                    {.T = 21, .D = 128, .x = x, .z = z, .weight = weight, .y = y, .gate = gate, .round = round});
          }
  return cases;
}

inline NormCases norm_options() {
  NormCases cases;
  for (const gd_dtype x : kNormTypes)
    for (const NormGateKind gate : {NormGateKind::none, NormGateKind::silu, NormGateKind::sigmoid})
      for (const bool has_weight : {false, true})
        for (const bool round : {false, true})
          for (const int64_t D : {128, 80})
            cases.push_back({.B = 2, .D = D, .x = x, .gate = gate, .has_weight = has_weight, .round = round});
  return cases;
}

inline NormCases norm_layouts() {
  NormCases cases;
  for (const gd_dtype x : kNormTypes)
    for (const NormLayout layout : {NormLayout::gaps, NormLayout::odd, NormLayout::heads_first})
      for (const int64_t D : {16, 32, 64, 128, 144, 256, 400})
        cases.push_back({.B = 3, .T = 4, .H = 5, .D = D, .x = x, .layout = layout});
  return cases;
}

// An eps that acts or is none, rows of any length, gates far outside of where exp() is finite.
inline NormCases norm_numbers() {
  NormCases cases;
  for (const gd_dtype x : kNormTypes) {
    for (const float eps : {0.0f, 1e-5f, 0.5f}) cases.push_back({.x = x, .eps = eps});
    for (const double scale : {1e-3, 30.0, 1000.0}) cases.push_back({.x = x, .x_scale = scale});
    for (const NormGateKind gate : {NormGateKind::silu, NormGateKind::sigmoid})
      for (const double scale : {1e-3, 20.0, 200.0}) cases.push_back({.x = x, .gate = gate, .z_scale = scale});
  }
  return cases;
}

// Sums of dweight in one part and in many, the last of which is not full.
inline NormCases norm_lengths() {
  NormCases cases;
  for (const gd_dtype x : kNormTypes)
    for (const int64_t D : {16, 128, 512})
      for (const int64_t T : {1, 2, 31, 133}) cases.push_back({.B = 3, .T = T, .H = 1, .D = D, .x = x});
  cases.push_back({.B = 3, .T = 1001, .H = 3, .D = 128, .x = GD_BF16, .weight = GD_F32});
  cases.push_back({.T = 40001, .H = 1, .D = 16, .x = GD_BF16, .weight = GD_F32});
  return cases;
}

// No row at all: dweight is 0.
inline NormCases norm_empty() {
  return {{.B = 0}, {.T = 0}, {.H = 0}, {.T = 0, .D = 128, .x = GD_BF16}, {.B = 0, .T = 0, .H = 0, .D = 512}};
}

}  // namespace gatedelta::testing
