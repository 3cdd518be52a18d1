// Which kernels serve a call. This is the only place that chooses between kernel families.
//
//   inputs             families, from special to general
//   fp32               fp32
//   bf16, fp16         sm90 (K = V = 128), portable
//
// A call's shapes and types name the family; the device is looked at when the call runs. A problem that sm90 supports
// runs on the portable kernels where the device is no Hopper, so a workspace query answers for both.
#include <algorithm>
#include <cinttypes>

#include "cuda/backend.hpp"
#include "cuda/conv1d/config.hpp"
#include "cuda/fp32/config.hpp"
#include "cuda/gated_norm/config.hpp"
#include "cuda/kernels.hpp"
#include "cuda/layer/config.hpp"
#include "cuda/limits.hpp"
#include "cuda/portable/backward/config.hpp"
#include "cuda/portable/summary/config.hpp"
#include "cuda/sm90/workspace/backward.hpp"
#include "cuda/sm90/workspace/summary.hpp"

namespace gatedelta::cuda {

namespace {

Context context_of(const gd_exec& exec, char* workspace) { return {exec.device_index, exec.stream, workspace}; }
bool is_ok(const Outcome& outcome) { return outcome.status == GD_OK; }

// ---- memory --------------------------------------------------------------------------------------------------------

size_t sm90_workspace(const ForwardProblem& p) { return sm90::forward_layout(p).bytes; }
size_t sm90_workspace(const BackwardProblem& p) { return sm90::backward_layout(p).bytes; }
size_t sm90_workspace(const SummaryProblem& p) { return sm90::summary_layout(p, true, sm90::kPreparedBytes).bytes; }
size_t sm90_workspace(const BackwardSummaryProblem& p) {
  return sm90::summary_layout(p, false, sm90::kBackwardPreparedBytes).bytes;
}
size_t portable_workspace(const ForwardProblem& p) { return portable::forward_layout(p).bytes; }
size_t portable_workspace(const BackwardProblem& p) { return portable::backward_layout(p).bytes; }
template <class Summary>
size_t portable_workspace(const Summary& p) {
  return portable::summary_layout(p).bytes;
}
size_t fp32_workspace(const ForwardProblem& p) { return fp32::forward_layout(p).bytes; }
size_t fp32_workspace(const BackwardProblem& p) { return fp32::backward_layout(p).bytes; }

// ---- the choice ----------------------------------------------------------------------------------------------------

enum class Family { kSm90, kPortable, kFp32 };
struct Choice {
  Family family;
  Outcome outcome;  // the family's refusal, if it is one
};

// What a forward saves is read by its backward, and a forced segment length has units of its own: such a call stays
// with the family that its layer names, so that both passes choose alike.
template <class Problem>
bool stays_with_sm90(const Problem& p) {
  bool stays = p.saved.present;
  if constexpr (requires { p.segment_chunks; }) stays = stays || p.segment_chunks;
  return stays && sm90::supports_layer(p.in);
}

template <class Problem>
Choice kernels_for(const Problem& p, const gd_exec& exec) {
  if constexpr (requires { fp32::check(p); })
    if (p.in.q.dtype == GD_F32) return {Family::kFp32, fp32::check(p)};
  if (exec.kernels == GD_KERNELS_AUTO) {
    const Outcome outcome = sm90::check(p);
    if (is_ok(outcome) || stays_with_sm90(p)) return {Family::kSm90, outcome};
  }
  return {Family::kPortable, portable::check(p)};
}

// ---- the chunked operations ----------------------------------------------------------------------------------------

template <class Problem>
Outcome supports(const Problem& p, const gd_exec& exec) {
  return kernels_for(p, exec).outcome;
}

template <class Problem>
size_t workspace_bytes(const Problem& p, const gd_exec& exec) {
  switch (kernels_for(p, exec).family) {
    case Family::kSm90: return std::max(sm90_workspace(p), is_ok(portable::check(p)) ? portable_workspace(p) : 0);
    case Family::kPortable: return portable_workspace(p);
    case Family::kFp32: break;
  }
  if constexpr (requires { fp32_workspace(p); }) return fp32_workspace(p);
  return 0;
}

template <class Problem>
size_t saved_bytes(const Problem& p, const gd_exec& exec) {
  const size_t of_portable = portable::saved_bytes(p.in);
  switch (kernels_for(p, exec).family) {
    case Family::kSm90: return std::max(sm90::saved_layout(p.in).bytes, is_ok(portable::check(p)) ? of_portable : 0);
    case Family::kPortable: return of_portable;
    case Family::kFp32: break;
  }
  return fp32::saved_layout(p.in).bytes;
}

template <class Problem>
Outcome run(const Problem& p, const gd_exec& exec, char* workspace) {
  const Context context = context_of(exec, workspace);
  const Family family = kernels_for(p, exec).family;
  if constexpr (requires { fp32::launch(p, context); })
    if (family == Family::kFp32) return fp32::launch(p, context);
  if (family == Family::kSm90) {
    Capability device;
    GD_CHECK(find_capability(context.device, device));
    if (device.major == sm90::kMajor) return sm90::launch(p, context);
    GD_CHECK(portable::check(p));
  }
  return portable::launch(p, context);
}

template <class Problem>
constexpr Backend<Problem> kChunked = {GD_CUDA, supports<Problem>, workspace_bytes<Problem>, saved_bytes<Problem>,
                                       run<Problem>};

// ---- operations with one family ------------------------------------------------------------------------------------

Outcome check(const RecurrentProblem& p) {
  if (decode_pairs(p.in) <= kMaxDecodePairs) return {};
  return refusal(GD_UNSUPPORTED, "N * Hv is %" PRId64 " * %" PRId64 ", must be at most %" PRId64 "%s on CUDA",
                 p.in.sequences.count, p.in.value_heads, kMaxDecodePairs,
                 p.in.sequences.offsets ? " (and with cu_seqlens N counts one more)" : "");
}
Outcome check(const GatedNorm& in) {
  if (in.rows() <= kMaxNormRows) return {};
  return refusal(GD_UNSUPPORTED, "B * T * H is %" PRId64 ", must be at most %" PRId64 " on CUDA", in.rows(),
                 kMaxNormRows);
}
Outcome check(const GatedNormProblem& p) { return check(p.in); }
Outcome check(const GatedNormBackwardProblem& p) { return check(p.in); }
template <class Problem>
Outcome check(const Problem&) {
  return {};
}

size_t scratch(const Conv1dBackwardProblem& p) { return conv1d_backward_workspace(p); }
size_t scratch(const GatedNormBackwardProblem& p) { return norm_backward_workspace(p); }
template <class Problem>
size_t scratch(const Problem&) {
  return 0;
}

template <class Problem>
constexpr Backend<Problem> kSingle = {
    GD_CUDA,
    [](const Problem& p, const gd_exec&) { return check(p); },
    [](const Problem& p, const gd_exec&) { return scratch(p); },
    nullptr,
    [](const Problem& p, const gd_exec& exec, char* workspace) { return launch(p, context_of(exec, workspace)); },
};

}  // namespace

const Backend<ForwardProblem> forward_backend = kChunked<ForwardProblem>;
const Backend<BackwardProblem> backward_backend = kChunked<BackwardProblem>;
const Backend<SummaryProblem> summary_backend = kChunked<SummaryProblem>;
const Backend<BackwardSummaryProblem> backward_summary_backend = kChunked<BackwardSummaryProblem>;
const Backend<MergeProblem> merge_backend = kSingle<MergeProblem>;
const Backend<Conv1dProblem> conv1d_backend = kSingle<Conv1dProblem>;
const Backend<Conv1dBackwardProblem> conv1d_backward_backend = kSingle<Conv1dBackwardProblem>;
const Backend<RecurrentProblem> recurrent_backend = kSingle<RecurrentProblem>;
const Backend<GatedNormProblem> gated_norm_backend = kSingle<GatedNormProblem>;
const Backend<GatedNormBackwardProblem> gated_norm_backward_backend = kSingle<GatedNormBackwardProblem>;

bool supports_layer_step(const Conv1dProblem& conv, const RecurrentProblem& rule, const GatedNormProblem& norm) {
  return supports_layer_step(LayerStepProblem{conv, rule, norm});
}

}  // namespace gatedelta::cuda
