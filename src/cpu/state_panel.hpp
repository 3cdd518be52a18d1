// States as panels of 32 value columns, and how they come from and go to memory.
#pragma once

#include "cpu/engine_f32.hpp"
#include "cpu/plan.hpp"

namespace gatedelta::cpu::GD_ISA {

// One panel of a state: [Kp][32] floats. A whole state is Vp / 32 of them, one after the other.
inline float* state_panel(float* state, const Dims& dims, int panel) {
  return state + int64_t{panel} * dims.Kp * kPanel;
}

// Columns [32 panel, ...) of the stored state matrix, padded with zeros. A negative slot is the zero state.
inline void load_state_panel(float* dst, const StateRows& src, int64_t slot, int64_t head, gd_state_layout layout,
                             const Dims& dims, int panel) {
  std::memset(dst, 0, sizeof(float) * dims.Kp * kPanel);
  if (!src || slot < 0) return;
  const int first = panel * kPanel, valid = dims.V - first < kPanel ? dims.V - first : kPanel;
  const int64_t base = src.offset(slot, head);
  if (layout == GD_STATE_KV) {
    for (int i = 0; i < dims.K; ++i)
      load_row(dst + i * kPanel, src.data, src.dtype, base + int64_t{i} * dims.V + first, valid);
  } else {
    for (int j = 0; j < valid; j += 16)
      for (int i = 0; i < dims.K; i += 16) {
        float block[16 * 16], transposed[16 * 16];
        for (int r = 0; r < 16; ++r)
          load_row(block + r * 16, src.data, src.dtype, base + int64_t{first + j + r} * dims.K + i, 16);
        transpose(transposed, 16, block, 16, 16, 16);
        for (int r = 0; r < 16; ++r) std::memcpy(dst + (i + r) * kPanel + j, transposed + r * 16, sizeof(float) * 16);
      }
  }
}

inline void store_state_panel(const StateRows& dst, int64_t slot, int64_t head, gd_state_layout layout,
                              const Dims& dims, int panel, const float* src) {
  if (!dst || slot < 0) return;
  const int first = panel * kPanel, valid = dims.V - first < kPanel ? dims.V - first : kPanel;
  const int64_t base = dst.offset(slot, head);
  if (layout == GD_STATE_KV) {
    for (int i = 0; i < dims.K; ++i)
      store_row(dst.data, dst.dtype, base + int64_t{i} * dims.V + first, src + i * kPanel, valid);
  } else {
    for (int j = 0; j < valid; j += 16)
      for (int i = 0; i < dims.K; i += 16) {
        float block[16 * 16];
        transpose(block, 16, src + i * kPanel + j, kPanel, 16, 16);
        for (int r = 0; r < 16; ++r)
          store_row(dst.data, dst.dtype, base + int64_t{first + j + r} * dims.K + i, block + r * 16, 16);
      }
  }
}

}  // namespace gatedelta::cpu::GD_ISA
