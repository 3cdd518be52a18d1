// Launches of portable kernels whose instances are objects of their own.
#pragma once

#include <cuda_runtime.h>

#include "cuda/host/device.cuh"
#include "cuda/portable/schedule/launches.hpp"

namespace gatedelta::cuda::portable {

struct BackwardParams;

inline DeviceLimits limits_of(const DeviceFacts& facts) { return {facts.multiprocessors, facts.shared_kib * 1024}; }

cudaError_t launch_prepare(const Params& p, int64_t ctas, int device, cudaStream_t stream);
// Where sequences are cut: the segments of all chains, their transitions (by launch_states and launch_grad_chain), then
// the merges of all chains.
cudaError_t launch_segments(const Params& p, const CutCost& cost, cudaStream_t stream);
cudaError_t launch_merges(const Params& p, int device, cudaStream_t stream);
cudaError_t launch_states(const Params& p, const ChainLaunch& how, int device, cudaStream_t stream);
cudaError_t launch_grad_chain(const Params& p, const ChainLaunch& how, int device, cudaStream_t stream);
cudaError_t launch_gradients(const BackwardParams& p, int64_t ctas, int device, cudaStream_t stream);

}  // namespace gatedelta::cuda::portable
