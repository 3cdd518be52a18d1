// The convolution on CUDA: a validated problem becomes one kernel, a backward with dweight or dbias two, on the
// caller's stream. No instruction here is newer than compute capability 8.0.
#include "cuda/backend.hpp"
#include "cuda/conv1d/columns.cuh"
#include "cuda/host/device.cuh"
#include "cuda/host/launch.cuh"

namespace gatedelta::cuda {

namespace {

constexpr Capabilities kConvDevices = {8, 1 << 15, "the convolution supports 8.0 and later"};

bool has_packed_weights(const Conv1dInputs& in, int vector) {
  const TapWeights& w = in.weight;
  const int64_t bytes = vector * in.taps * dtype_bytes(w.dtype);
  const auto align = static_cast<uintptr_t>(bytes < kConvAlign ? bytes : kConvAlign);
  return in.taps != 3 && w.tap_stride == 1 && w.channel_stride == in.taps &&
         reinterpret_cast<uintptr_t>(w.data) % align == 0;
}
bool has_vectors(const ConvStates& states) {
  const int64_t bytes = dtype_bytes(states.dtype);
  return states && states.channel_stride == 1 && reinterpret_cast<uintptr_t>(states.data) % kConvAlign == 0 &&
         states.slot_stride * bytes % kConvAlign == 0 && states.column_stride * bytes % kConvAlign == 0;
}

// kernel<taps> for the problem's taps.
template <class Pick>
auto with_taps(int taps, const Pick& pick) {
  switch (taps) {
    case 2: return pick(std::integral_constant<int, 2>{});
    case 3: return pick(std::integral_constant<int, 3>{});
    default: return pick(std::integral_constant<int, 4>{});
  }
}
template <gd_dtype kType>
using Type = std::integral_constant<gd_dtype, kType>;
template <class Pick>
auto with_type(gd_dtype dtype, const Pick& pick) {
  switch (dtype) {
    case GD_F32: return pick(Type<GD_F32>{});
    case GD_BF16: return pick(Type<GD_BF16>{});
    default: return pick(Type<GD_F16>{});
  }
}

using ForwardKernel = void (*)(ConvParams);
ForwardKernel kernel_of(const Conv1dProblem& problem, ConvKernel kind) {
  return with_taps(problem.in.taps, [&](auto taps) -> ForwardKernel {
    constexpr int kTaps = decltype(taps)::value;
    if (kind == ConvKernel::any) return conv_walk_kernel<1, GD_DTYPE_NONE, kTaps>;
    return with_type(problem.in.x.dtype, [&](auto type) -> ForwardKernel {
      constexpr gd_dtype kType = decltype(type)::value;
      if (kind == ConvKernel::columns) return conv_columns_kernel<kType, kTaps>;
      return conv_walk_kernel<kConvRowVector, kType, kTaps>;
    });
  });
}

using BackwardKernel = void (*)(ConvBackwardParams);
BackwardKernel kernel_of(const Conv1dBackwardProblem& problem, ConvKernel kind) {
  return with_taps(problem.in.taps, [&](auto taps) -> BackwardKernel {
    constexpr int kTaps = decltype(taps)::value;
    if (kind == ConvKernel::any) return conv_walk_backward_kernel<1, GD_DTYPE_NONE, kTaps>;
    return with_type(problem.in.x.dtype, [&](auto type) -> BackwardKernel {
      constexpr gd_dtype kType = decltype(type)::value;
      if (kind == ConvKernel::columns) return conv_columns_backward_kernel<kType, kTaps>;
      return conv_walk_backward_kernel<kConvRowVector, kType, kTaps>;
    });
  });
}

cudaError_t launch(const Conv1dProblem& problem, cudaStream_t stream) {
  const ConvKernel kind = conv_kernel(problem);
  const int vector = kind == ConvKernel::rows ? kConvRowVector : 1;
  const ConvParams params = {problem, conv_grid(problem), has_packed_weights(problem.in, vector),
                             has_vectors(problem.in.initial), has_vectors(problem.final)};
  if (params.grid.ctas() == 0) return cudaSuccess;
  const int threads = kind == ConvKernel::columns ? 32 * kConvWarps : kConvThreads;
  return launch_kernel(false, kernel_of(problem, kind), params.grid.ctas(), threads, 0, stream, params);
}

cudaError_t launch(const Conv1dBackwardProblem& problem, cudaStream_t stream, char* workspace) {
  const ConvKernel kind = conv_kernel(problem);
  const int vector = kind == ConvKernel::rows ? kConvRowVector : 1;
  const ConvBackwardParams params = {problem, conv_grid(problem), has_packed_weights(problem.in, vector),
                                     has_partial_sums(problem) ? reinterpret_cast<float*>(workspace) : nullptr};
  if (params.grid.ctas() > 0) {
    const int threads = kind == ConvKernel::columns ? 32 * kConvWarps : kConvThreads;
    const cudaError_t error =
        launch_kernel(false, kernel_of(problem, kind), params.grid.ctas(), threads, 0, stream, params);
    if (error || !params.partial) return error;
  } else if (!has_partial_sums(problem)) {
    return cudaSuccess;
  }
  const int64_t blocks = (problem.in.taps + 1) * conv_ceil(problem.in.channels, 32);
  const auto sum =
      with_taps(problem.in.taps, [](auto taps) -> BackwardKernel { return conv_sum_kernel<decltype(taps)::value>; });
  return launch_kernel(false, sum, blocks, 32 * kSumRows, 0, stream, params);
}

}  // namespace

Outcome conv1d(const Conv1dProblem& problem, const Context& context) {
  return with_device(context.device, kConvDevices, [&](int) -> Outcome {
    if (const cudaError_t error = launch(problem, static_cast<cudaStream_t>(context.stream)))
      return failure(error, "launch the convolution's kernel");
    return {};
  });
}

Outcome conv1d_backward(const Conv1dBackwardProblem& problem, const Context& context) {
  return with_device(context.device, kConvDevices, [&](int) -> Outcome {
    if (const cudaError_t error = launch(problem, static_cast<cudaStream_t>(context.stream), context.workspace))
      return failure(error, "launch the kernels of the convolution's backward");
    return {};
  });
}

}  // namespace gatedelta::cuda
