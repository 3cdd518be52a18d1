// Scratch memory of one lane of the backward.
#pragma once

#include "cpu/forward.hpp"

namespace gatedelta::cpu::GD_ISA {

// Floats of dq or dk for the chunks of one replay.
inline int64_t replay_rows(const Dims& dims) { return int64_t{kSaveInterval} * C * dims.Kp; }

template <class E>
struct BackwardLane {
  using Elem = typename E::Elem;

  KeyOperands<E> key;
  KeyScratch<E> key_scratch;
  ValueOperands<E> value;
  ValueScratch value_scratch;
  PanelScratch<E> panel;
  // Key side, once per chunk.
  float* Qt;      // [Kp][64], without twin forms
  Elem* Qta;      // A [Kp x 64]
  Elem *Kb, *Qb;  // B [64 x 32] per key panel; with twin forms Kta and Qta
  // Value side.
  float* transposed;                        // [max(Kp, 64)][64] scratch for transposes
  HiLo<Elem> TgtA;                          // A [64 x 64] T_g^T, upper
  HiLo<Elem> PtA, FA;                       // A [64 x 64] P^T, upper; F; low parts where keys are similar
  Elem *FtA, *EA, *EtA;                     // A [64 x 64]
  float *F, *E_;                            // [64][64]
  float *dO, *dV;                           // [64][Vp]
  float* Z;                                 // [64][32]
  Elem *dOa, *dVa;                          // A [64 x Vp]
  HiLo<Elem> Ua;                            // the same; the low part where keys are similar
  HiLo<Elem> Utb[2];                        // B [Vp x 32] of U^T, without twin forms
  HiLo<Elem> dUb;                           // B [64 x 32]
  Elem* dOb;                                // B [64 x 32]
  HiLo<Elem> Yb;                            // B [64 x 32]
  Elem* Sb;                                 // B [Kp x 32]
  HiLo<Elem> Gb;                            // B [Kp x 32]
  Elem *Stb, *Gtb;                          // B [Vp x 32] of S^T, G^T per key panel
  float *dq_panel, *dkw_panel, *dkr_panel;  // [64][32]
  float* scratch;                           // [64][64]
  // Item side.
  float* G;              // state gradients of the item's `heads` heads
  float* state;          // the state while chunks are replayed, panel by panel
  float* replay_states;  // [kSaveInterval] states before each chunk
  float* replay_T;       // [kSaveInterval][64][64]
  float* replay_U;       // [kSaveInterval][64][Vp]
  float *dq, *dk;        // [kSaveInterval][64][Kp], sums over the group

  BackwardLane(Carver& carve, const Dims& d, int64_t heads)
      : key(carve, d), key_scratch(carve, d), value(carve, d), value_scratch(carve, d), panel(carve, d) {
    Qt = carve.take<float>(E::kTwinForms ? 0 : d.Kp * C);
    Qta = carve.take<Elem>(E::a_size(d.Kp, C));
    Kb = E::kTwinForms ? key.Kta : carve.take<Elem>(E::b_size(C) * d.key_panels());
    Qb = E::kTwinForms ? Qta : carve.take<Elem>(E::b_size(C) * d.key_panels());
    transposed = carve.take<float>((d.Kp > C ? d.Kp : C) * C);
    TgtA = take_hi_lo<E>(carve, E::a_size(C, C));
    for (HiLo<Elem>* square : {&PtA, &FA}) *square = take_hi_lo<E>(carve, E::a_size(C, C));
    for (Elem** square : {&FtA, &EA, &EtA}) *square = carve.take<Elem>(E::a_size(C, C));
    F = carve.take<float>(C * C);
    E_ = carve.take<float>(C * C);
    for (float** rows : {&dO, &dV}) *rows = carve.take<float>(C * d.Vp);
    Z = carve.take<float>(C * kPanel);
    for (Elem** rows : {&dOa, &dVa}) *rows = carve.take<Elem>(E::a_size(C, d.Vp));
    Ua = take_hi_lo<E>(carve, E::a_size(C, d.Vp));
    for (HiLo<Elem>& p : Utb) p = take_hi_lo<E>(carve, E::kTwinForms ? 0 : E::b_size(d.Vp));
    dUb = take_hi_lo<E>(carve, E::b_size(C));
    dOb = carve.take<Elem>(E::b_size(C));
    Yb = take_hi_lo<E>(carve, E::b_size(C));
    Sb = carve.take<Elem>(E::b_size(d.Kp));
    Gb = take_hi_lo<E>(carve, E::b_size(d.Kp));
    Stb = carve.take<Elem>(E::b_size(d.Vp) * d.key_panels());
    Gtb = carve.take<Elem>(E::b_size(d.Vp) * d.key_panels());
    for (float** p : {&dq_panel, &dkw_panel, &dkr_panel}) *p = carve.take<float>(C * kPanel);
    scratch = carve.take<float>(C * C);
    G = carve.take<float>(d.state_size() * heads);
    state = carve.take<float>(d.state_size());
    replay_states = carve.take<float>(d.state_size() * kSaveInterval);
    replay_T = carve.take<float>(C * C * kSaveInterval);
    replay_U = carve.take<float>(C * d.Vp * kSaveInterval);
    dq = carve.take<float>(replay_rows(d));
    dk = carve.take<float>(replay_rows(d));
  }
};

}  // namespace gatedelta::cpu::GD_ISA
