// The chunked forward on devices of compute capability 8.0 and later, for all head sizes: two kernels on the caller's
// stream. No instruction here is newer than 8.0.
#include "cuda/backend.hpp"
#include "cuda/host/device.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/portable/forward.cuh"
#include "cuda/portable/launch.hpp"

namespace gatedelta::cuda {

namespace portable {

namespace {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    portable_forward_kernel(const __grid_constant__ Params p) {
  Forward<Config>(p, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x)).run();
}

template <class Config>
Outcome launch(const ForwardProblem& problem, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const Params p = params_of(problem, context.workspace, Config::kColumns);
  if (const cudaError_t error = launch_prepare(p, prepare_ctas(problem), context.device, stream))
    return failure(error, "launch the prepare kernel");
  const int64_t ctas = (problem.in.sequences.count * problem.in.value_heads) << p.log_parts;
  if (ctas == 0) return {};
  static std::atomic<uint64_t> allowed{0};
  constexpr auto kernel = portable_forward_kernel<Config>;
  cudaError_t error = allow_shared_memory(kernel, Config::Smem::kBytes, context.device, allowed);
  if (!error) error = launch_kernel(false, kernel, ctas, Config::kThreads, Config::Smem::kBytes, stream, p);
  if (error) return failure(error, "launch the forward kernel");
  return {};
}
template <class Elem>
Outcome launch_instance(const ForwardProblem& problem, const Context& context, int multiprocessors) {
  return with_chain<ForwardPass, Elem>(chain_kind(problem.in, multiprocessors),
                                       [&](auto config) { return launch<decltype(config)>(problem, context); });
}

}  // namespace

}  // namespace portable

Outcome portable_forward(const ForwardProblem& problem, const Context& context) {
  return with_device(context.device, kPortableDevices, [&](int multiprocessors) -> Outcome {
    return problem.in.q.dtype == GD_BF16 ? portable::launch_instance<portable::Bf16>(problem, context, multiprocessors)
                                         : portable::launch_instance<portable::Fp16>(problem, context, multiprocessors);
  });
}

}  // namespace gatedelta::cuda
