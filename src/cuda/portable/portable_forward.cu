// The chunked forward on devices of compute capability 8.0 and later, for all head sizes: two kernels on the caller's
// stream, or five where sequences are cut. No instruction here is newer than 8.0.
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

template <class Elem>
cudaError_t launch_uncut(const Params& p, ChainKind kind, int device, cudaStream_t stream) {
  return with_chain<ForwardPass, Elem>(kind, [&](auto config) {
    using Config = decltype(config);
    static std::atomic<uint64_t> allowed{0};
    constexpr auto kernel = portable_forward_kernel<Config>;
    if (const cudaError_t e = allow_shared_memory(kernel, Config::Smem::kBytes, device, allowed)) return e;
    return launch_kernel(false, kernel, chain_ctas(p), Config::kThreads, Config::Smem::kBytes, stream, p);
  });
}

Outcome launch(const ForwardProblem& problem, const Context& context, int multiprocessors) {
  const Cut cut = choose_cut(problem, multiprocessors);
  const Params p = params_of(problem, context.workspace, chain_columns(cut.kind), cut);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const int device = context.device;
  Outcome outcome;
  const auto ran = [&](cudaError_t error, const char* what) {
    if (error) outcome = failure(error, what);
    return !error;
  };
  if (!ran(launch_prepare(p, prepare_ctas(problem), device, stream), "launch the prepare kernel")) return outcome;
  if (chain_ctas(p) == 0) return outcome;
  if (p.segment_chunks == 0) {
    ran(p.q.dtype == GD_BF16 ? launch_uncut<Bf16>(p, cut.kind, device, stream)
                             : launch_uncut<Fp16>(p, cut.kind, device, stream),
        "launch the forward kernel");
    return outcome;
  }
  const bool begun = ran(launch_segments(p, stream), "launch the kernel that finds segments") &&
                     ran(launch_transitions(p, cut.kind, device, stream), "launch the transitions") &&
                     ran(launch_folds(p, device, stream), "launch the folds");
  if (begun) ran(launch_cut_forward(p, cut.kind, device, stream), "launch the forward kernel");
  return outcome;
}

}  // namespace

}  // namespace portable

Outcome portable_forward(const ForwardProblem& problem, const Context& context) {
  return with_device(context.device, kPortableDevices, [&](int multiprocessors) -> Outcome {
    return portable::launch(problem, context, multiprocessors);
  });
}

}  // namespace gatedelta::cuda
