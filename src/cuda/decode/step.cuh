// One token per sequence, K = V = 128, [V, K]: decode. The state goes from memory to registers and back, once. Types
// are compile-time constants, and all loads are issued before the first number is used.
#pragma once

#include "cuda/decode/walk.cuh"

namespace gatedelta::cuda {

template <class State, class Input>
__global__ void __launch_bounds__(StepOf<State>::kThreads) step_kernel(const __grid_constant__ DecodeParams p) {
  using Config = StepOf<State>;
  constexpr gd_dtype kState = kDtype<State>, kInput = kDtype<Input>;
  const RecurrentProblem& problem = p.problem;
  const Layer& in = problem.in;
  const CtaPlace place = locate(p, blockIdx.x);
  const int n = place.sequence, head = place.head;
  Tile<Config> tile(static_cast<int>(threadIdx.x), place.part);

  const int64_t read_slot = in.initial.slot(n);
  if (read_slot >= 0) {
    tile.load(element(in.initial.data, kState, in.initial.offset(read_slot, head)), kState, kStepDim, kStepDim, true);
  } else if (problem.is_padding(n, read_slot)) {
    return clear_outputs(p, {n, 0, 1}, head, tile);
  } else {
    tile.clear();
  }
  RawToken<Config> raw;
  raw.load(in, kInput, n, 0, head, place.key_head, tile.share, tile.column, kStepDim, true);
  HeadGate gate;
  gate.load(in, head);
  const int64_t write_slot = problem.final.slot(n);

  const Token<Config> token(raw, in, kInput, gate);
  tile.widen(kState);
  float o[Config::kColumns];
  token.advance(tile.s, in.scale, o);
  if (problem.o) store_output(problem.o, n, 0, head, tile, o, true);
  if (write_slot < 0) return;
  const char* const to = element(problem.final.data, kState, problem.final.offset(write_slot, head));
  tile.template store<true>(const_cast<char*>(to), kState, kStepDim, kStepDim, true);
}

}  // namespace gatedelta::cuda
