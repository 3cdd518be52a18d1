// One token per sequence, K = V = 128, [V, K]: decode. The state goes from memory to registers and back, once.
#pragma once

#include "cuda/decode/walk.cuh"

namespace gatedelta::cuda {

template <class State>
__global__ void __launch_bounds__(StepVk<16 / sizeof(State)>::kThreads)
    step_kernel(const __grid_constant__ DecodeParams p) {
  using Config = StepVk<16 / sizeof(State)>;
  const RecurrentProblem& problem = p.problem;
  const Layer& in = problem.in;
  const Place place = locate(p, blockIdx.x);
  const int n = place.sequence, head = place.head;
  Tile<Config> tile(static_cast<int>(threadIdx.x), place.part);

  // The state is what takes longest to arrive: it is requested before anything else.
  const int64_t read_slot = in.initial.slot(n);
  if (read_slot >= 0) {
    const auto* states = static_cast<const State*>(in.initial.data);
    tile.load(states + in.initial.offset(read_slot, head), kStepDim, kStepDim, true);
  } else if (problem.is_padding(n)) {
    return clear_outputs(p, {n, 0, 1}, head, tile);
  } else {
    tile.clear();
  }
  Token<Config> token;
  token.load(in, n, 0, head, place.key_head, tile.share, tile.column, kStepDim, true);
  const int64_t write_slot = problem.final.slot(n);
  token.prepare(in.l2norm);
  float o[Config::kColumns];
  token.advance(tile.s, in.scale, o);
  if (problem.o) store_output(problem.o, n, 0, head, tile, o, true);
  if (write_slot < 0) return;
  auto* states = static_cast<State*>(problem.final.data);
  tile.template store<true>(states + problem.final.offset(write_slot, head), kStepDim, kStepDim, true);
}

}  // namespace gatedelta::cuda
