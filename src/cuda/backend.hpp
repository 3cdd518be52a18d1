// What the CUDA backend offers the API layer; no CUDA header is needed to include it, and a build without CUDA has it
// too. Problems that come here have passed api::validate_cuda.
#pragma once

#include <cstddef>

#include "core/problem.hpp"

namespace gatedelta::cuda {

struct Context {
  int device = 0;
  void* stream = nullptr;     // cudaStream_t
  char* workspace = nullptr;  // 64-byte aligned
};

// Status of a call, with a message unless it is GD_OK.
struct Outcome {
  gd_status status = GD_OK;
  char message[256] = "";
};

bool is_compiled();
// Devices the kernels run on; 0 where there is no driver.
int usable_devices();

size_t forward_workspace(const ForwardProblem&);
// Launches the kernels and returns: no synchronisation, allocation or readback.
Outcome forward(const ForwardProblem&, const Context&);

size_t saved_bytes(const Layer&);  // that a forward keeps for its backward, if asked to
size_t backward_workspace(const BackwardProblem&);
Outcome backward(const BackwardProblem&, const Context&);

}  // namespace gatedelta::cuda
