// The forward on Hopper: a validated problem becomes one to four kernels on the caller's stream.
#include "cuda/kernels.hpp"
#include "cuda/sm90/chain/launch.cuh"
#include "cuda/sm90/forward/launch.cuh"
#include "cuda/sm90/forward/short_sequences.hpp"
#include "cuda/sm90/host/params.cuh"
#include "cuda/sm90/host/tensor_map.cuh"
#include "cuda/sm90/prepare/launch.cuh"

namespace gatedelta::cuda::sm90 {

namespace {

// Tensor maps for TMA.
Outcome encode_maps(CallParams& p, bool bf16) {
  for (const MappedTensor& t : {MappedTensor{"q", &p.q_map, p.q, p.key_heads},
                                {"k", &p.k_map, p.k, p.key_heads},
                                {"v", &p.v_map, p.v, p.value_heads},
                                {"out", &p.o_map, p.o, p.value_heads}})
    if (Outcome outcome = encode_map(t, p.sequences, bf16); outcome.status != GD_OK) return outcome;
  return {};
}

template <class Elem>
Outcome launch(const CallParams& p, int device, cudaStream_t stream) {
  if (const cudaError_t error = launch_prepare<Elem>(p, device, stream))
    return failure(error, "launch the prepare kernel");
  if (p.sequences.count == 0) return {};  // prepare has zeroed the outputs of padding
  if (p.list == kPlannedList)
    if (const cudaError_t error = launch_schedule(p, stream)) return failure(error, "launch the schedule kernel");
  if (const cudaError_t error = launch_main<Elem>(p, device, stream))
    return failure(error, "launch the forward kernel");
  return {};
}

}  // namespace

cudaError_t launch_prepare(const CallParams& p, bool bf16, int device, cudaStream_t stream) {
  return bf16 ? launch_prepare<__nv_bfloat16>(p, device, stream) : launch_prepare<__half>(p, device, stream);
}

cudaError_t launch_forward_chain(const CallParams& p, bool bf16, int device, cudaStream_t stream) {
  return bf16 ? launch_main<__nv_bfloat16>(p, device, stream) : launch_main<__half>(p, device, stream);
}

Outcome launch(const ForwardProblem& problem, const Context& context) {
  return with_device(context.device, kDevices, [&](const DeviceFacts& facts) -> Outcome {
    const auto stream = static_cast<cudaStream_t>(context.stream);
    const ShortPlan plan = short_plan(problem);
    const auto run_short = [&](Pdl pdl) -> Outcome {
      if (const cudaError_t error = launch_short_sequences(problem, plan, pdl, stream))
        return failure(error, "launch the kernel for short sequences");
      return {};
    };
    if (plan.which == ShortSequences::kAll) return run_short(Pdl::kOff);
    CallParams p = call_params(problem, context.workspace, facts.multiprocessors);
    p.may_balance = may_balance(problem, p.limits);
    if (!problem.saved) p.limits.merged_halves = kMostMergedHalves;
    if (plan.which == ShortSequences::kSome) p.short_tokens = static_cast<int>(plan.longest);
    const bool bf16 = problem.in.q.dtype == GD_BF16;
    if (p.sequences.batch > 0 && p.sequences.tokens > 0)  // an empty tensor has no map, and no kernel uses one
      if (Outcome outcome = encode_maps(p, bf16); outcome.status != GD_OK) return outcome;
    Outcome outcome =
        bf16 ? launch<__nv_bfloat16>(p, context.device, stream) : launch<__half>(p, context.device, stream);
    return outcome.status != GD_OK || plan.which == ShortSequences::kNone ? outcome : run_short(Pdl::kOn);
  });
}

}  // namespace gatedelta::cuda::sm90
