// The portable forward on a CPU: what src/cuda/portable/portable_forward.cu launches, CTA after CTA.
#pragma once

#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>

#include "cta.hpp"
#include "cuda/portable/backward/config.hpp"
#include "cuda/portable/backward/states_chain.cuh"
#include "cuda/portable/cut/merge.cuh"
#include "cuda/portable/cut/segments.cuh"
#include "cuda/portable/forward/forward_chain.cuh"
#include "cuda/portable/prepare/inverse.cuh"
#include "cuda/portable/prepare/loads.cuh"
#include "cuda/portable/prepare/outputs.cuh"
#include "cuda/portable/prepare/products.cuh"
#include "cuda/portable/schedule/launches.hpp"
#include "cuda/portable/summary/config.hpp"
#include "testing/generator.hpp"

namespace gatedelta::testing::emulated {

struct Options {
  int multiprocessors = 1;  // of the device: how many value columns a CTA has follows from it
  bool eager_copies = false;
  unsigned seed = 1;
  bool has_whole_grid = false;  // packs that may be cut have one, also where the host would not give them one
};
// With shared memory as on Hopper.
inline cuda::portable::DeviceLimits device_of(const Options& options) { return {options.multiprocessors, 228 << 10}; }
template <class Problem, class Layout>
cuda::portable::Cut cut_of(const Problem& problem, const Layout& layout, const Options& options) {
  using cuda::portable::ChainKind;
  cuda::portable::Cut cut = cuda::portable::choose_cut(problem, layout, device_of(options));
  if (!options.has_whole_grid || cut.cost.chain_count == 0) return cut;
  cut.cost.has_whole_grid = true;
  if (cuda::compiled_keys(problem.in.key_dim) == 128)  // an instance of its own
    cut.whole_kind = cut.kind == ChainKind::k128Half ? ChainKind::k128Quarter : ChainKind::k128Half;
  return cut;
}

// ---- what src/api makes of valid arguments -------------------------------------------------------------------------

inline bool is_there(const gd_tensor& t) { return t.dtype != GD_DTYPE_NONE; }
inline TokenRows rows_of(const gd_tensor& t) {
  if (!is_there(t)) return {};
  return {t.data, static_cast<gd_dtype>(t.dtype), t.stride[0], t.stride[1], t.stride[2]};
}
inline HeadVector vector_of(const gd_tensor& t) {
  if (!is_there(t)) return {};
  return {t.data, static_cast<gd_dtype>(t.dtype), t.stride[0]};
}
inline IndexRows indices_of(const gd_tensor& t) {
  if (!is_there(t)) return {};
  return {t.data, t.dtype == GD_I64, true, t.stride[0], 0, 1};
}
inline StateRows states_of(const gd_tensor& t, const gd_tensor& indices, int64_t first_slot) {
  if (!is_there(t)) return {};
  return {t.data,    static_cast<gd_dtype>(t.dtype), t.shape[0], t.stride[0], t.stride[1], indices_of(indices),
          first_slot};
}
inline Layer layer_of(const gd_inputs& a) {
  Layer in;
  in.key_heads = a.q.shape[2], in.value_heads = a.v.shape[2], in.group = in.value_heads / in.key_heads;
  in.key_dim = static_cast<int>(a.q.shape[3]), in.value_dim = static_cast<int>(a.v.shape[3]);
  in.sequences = {a.q.shape[0], a.q.shape[0], a.q.shape[1], {}};
  if (is_there(a.cu_seqlens)) {
    in.sequences.count = a.cu_seqlens.shape[0] - 1;
    in.sequences.offsets = {a.cu_seqlens.data, a.cu_seqlens.dtype == GD_I64, true};
  }
  in.q = rows_of(a.q), in.k = rows_of(a.k), in.v = rows_of(a.v), in.g = rows_of(a.g), in.beta = rows_of(a.beta);
  in.A_log = vector_of(a.A_log), in.dt_bias = vector_of(a.dt_bias);
  in.initial = states_of(a.initial_state, a.initial_state_indices, a.first_slot);
  in.gate = static_cast<gd_gate>(a.gate), in.beta_kind = static_cast<gd_beta>(a.beta_kind);
  in.layout = static_cast<gd_state_layout>(a.state_layout);
  in.l2norm = a.l2norm != 0;
  in.scale = a.has_scale ? a.scale : 1.0f / std::sqrt(static_cast<float>(in.key_dim));
  return in;
}
inline ForwardProblem problem_of(const gd_forward_args& args) {
  ForwardProblem p;
  p.in = layer_of(args.in);
  p.o = rows_of(args.out);
  p.final = states_of(args.final_state, args.final_state_indices, args.in.first_slot);
  p.checkpoints = states_of(args.checkpoints, args.checkpoint_indices, args.in.first_slot);
  p.checkpoint_every = args.checkpoint_every;
  p.checkpoint_offsets = indices_of(args.checkpoint_offsets);
  p.saved = {args.saved, args.saved_bytes, args.saved != nullptr};
  p.prepared = args.prepared != 0;
  p.context_parallel = args.context_parallel == GD_CP_AUTO;
  p.batch_invariant = args.batch_invariant != 0;
  p.segment_chunks = args.exec.tuning ? args.exec.tuning->segment_chunks : 0;
  return p;
}

inline BackwardProblem problem_of(const gd_backward_args& args) {
  BackwardProblem p;
  p.in = layer_of(args.in);
  p.d_o = rows_of(args.do_);
  p.dq = rows_of(args.dq), p.dk = rows_of(args.dk), p.dv = rows_of(args.dv);
  p.dg = rows_of(args.dg), p.dbeta = rows_of(args.dbeta);
  p.dA_log = vector_of(args.dA_log), p.d_dt_bias = vector_of(args.d_dt_bias);
  p.d_final = states_of(args.dht, args.dht_indices, args.in.first_slot);
  p.d_initial = states_of(args.d_initial_state, args.d_initial_state_indices, args.in.first_slot);
  p.saved = {const_cast<void*>(args.saved), args.saved_bytes, args.saved != nullptr};
  p.context_parallel = args.context_parallel == GD_CP_AUTO;
  p.batch_invariant = args.batch_invariant != 0;
  p.segment_chunks = args.exec.tuning ? args.exec.tuning->segment_chunks : 0;
  p.small_workspace = args.small_workspace != 0;
  return p;
}

inline SummaryProblem problem_of(const gd_summary_args& args) {
  gd_inputs in = args.in;
  if (!args.saved) in.q = in.k, in.has_scale = 1, in.scale = 0;
  SummaryProblem p;
  p.in = layer_of(in);
  p.local = states_of(args.local_state, {}, 0);
  p.transition = states_of(args.transition, {}, 0);
  if (is_there(args.fade))
    p.fade = {args.fade.data, static_cast<gd_dtype>(args.fade.dtype), args.fade.stride[0], 0, args.fade.stride[1]};
  p.first = args.first_sequence;
  p.count = args.sequence_count ? args.sequence_count : p.in.sequences.count - p.first;
  p.skip_faded = args.skip_faded != 0;
  p.saved = {args.saved, args.saved_bytes, args.saved != nullptr};
  p.prepared = args.prepared != 0;
  return p;
}
inline BackwardSummaryProblem problem_of(const gd_backward_summary_args& args) {
  gd_inputs in = args.in;
  in.v = args.do_;
  BackwardSummaryProblem p;
  p.in = layer_of(in);
  p.in.v = {};
  p.d_o = rows_of(args.do_);
  p.d_local = states_of(args.d_local, {}, 0);
  p.first = args.first_sequence;
  p.count = args.sequence_count ? args.sequence_count : p.in.sequences.count - p.first;
  p.skip_faded = args.skip_faded != 0;
  p.saved = {const_cast<void*>(args.saved), args.saved_bytes, args.saved != nullptr};
  return p;
}

// ---- launches ------------------------------------------------------------------------------------------------------

// body(cta, thread) for all threads of all CTAs, which come in any order.
template <class Body>
void launch(int64_t ctas, int threads, int smem_bytes, const Options& options, const Body& body) {
  std::vector<int> order(static_cast<size_t>(ctas));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(options.seed));
  for (const int cta : order)
    run_cta({threads, smem_bytes, options.eager_copies, options.seed + cta}, [&](int tid) { body(cta, tid); });
}
template <class Elem, int kKeys>
void run_prepare(const cuda::portable::Params& p, int64_t ctas, const Options& options) {
  using namespace cuda;
  using namespace cuda::portable;
  using Config = PrepareConfig<Elem, kKeys>;
  launch(ctas, Config::kThreads, Config::Smem::allocated(p.group), options,
         [&](int cta, int tid) { Prepare<Config>::run(p, cta, tid); });
}
template <class Pass, class Config>
using WithPass = cuda::portable::ChainConfig<Pass, typename Config::Elem, Config::kKeys, Config::kWarpColumns,
                                             Config::kWarps, Config::kCtasPerSm>;

// The instance of a pass that runs the transitions of another one's (transition_kind).
template <class Pass, class Config>
using Transitions =
    cuda::portable::ChainConfig<Pass, typename Config::Elem, Config::kKeys, 16, Config::kWarps, Config::kCtasPerSm>;

inline void run_segments(const cuda::portable::Params& p, const cuda::portable::CutCost& cost, const Options& options) {
  using namespace cuda;
  using namespace cuda::portable;
  const auto most_segments = static_cast<int>(p.segment_length().most_segments(p.sequences));
  launch(segment_ctas(p), kSegmentThreads, 0, options,
         [&](int cta, int tid) { FindSegments::run(p, cost, cta, most_segments, tid); });
}
template <template <class> class Chain, class Config>
void run_chain(const cuda::portable::Params& p, const Options& options) {
  launch(cuda::portable::chain_ctas(p), Config::kThreads, Config::Smem::kBytes, options,
         [&](int cta, int tid) { Chain<Config>(p, cta, tid).run(); });
}
template <template <class> class Chain, class Config>
void run_transitions(const cuda::portable::Params& p, cuda::portable::ChainKind kind, const Options& options) {
  using namespace cuda;
  using namespace cuda::portable;
  run_chain<Chain, Config>(transition_params(p, kind, std::is_same_v<typename Config::Pass, StatesPass>), options);
}
template <int kKeys>
void run_merges(const cuda::portable::Params& p, const Options& options) {
  using namespace cuda;
  using namespace cuda::portable;
  using Config = MergeConfig<kKeys>;
  launch(merge_ctas(p), Config::kThreads, Config::Smem::kBytes, options,
         [&](int cta, int tid) { Merge<Config>(p, cta, tid).run(); });
}

// For programs with one instance, whose calls have no grid for whole sequences.
struct NoWholeGrid {
  template <class Body>
  void operator()(cuda::portable::ChainKind, const Body&) const {
    throw std::runtime_error("no instance for whole sequences");
  }
};
// run_whole(kind, body) calls body with that instance.
template <class Config, class RunWhole = NoWholeGrid>
void run_kernels(const ForwardProblem& problem, char* workspace, const Options& options,
                 const RunWhole& run_whole = {}) {
  using namespace cuda;
  using namespace cuda::portable;
  const ForwardWorkspace layout = forward_layout(problem);
  const Cut cut = cut_of(problem, layout, options);
  const Params p = params_of(problem, layout, workspace, cut);
  run_prepare<typename Config::Elem, Config::kKeys>(p, prepare_ctas(problem), options);
  if (p.segment_chunks) {
    run_segments(p, cut.cost, options);
    run_transitions<States, Transitions<StatesPass, Config>>(p, cut.kind, options);
    run_merges<Config::kKeys>(p, options);
  }
  run_chain<Forward, Config>(p, options);
  if (cut.cost.has_whole_grid)
    run_whole(cut.whole_kind,
              [&](auto config) { run_chain<Forward, decltype(config)>(whole_params(p, cut.whole_kind), options); });
}

inline std::vector<gd_tensor*> aligned_rows(gd_forward_args& args) {
  return {&args.in.q, &args.in.k, &args.in.v, &args.out};
}
inline std::vector<gd_tensor*> aligned_rows(gd_backward_args& args) {
  return {&args.in.q, &args.in.k, &args.in.v, &args.do_, &args.dq, &args.dk, &args.dv};
}
inline std::vector<gd_tensor*> aligned_rows(gd_summary_args& args) { return {&args.in.q, &args.in.k, &args.in.v}; }
inline std::vector<gd_tensor*> aligned_rows(gd_backward_summary_args& args) {
  return {&args.in.q, &args.in.k, &args.do_};
}

// Copies of tensors of rows whose data are aligned, as the kernels want it; the generator aligns nothing. What was
// written to them, and to what must not be written, is copied back.
template <class Args>
class AlignedRows {
 public:
  explicit AlignedRows(const Args& host) : args(host) {
    for (gd_tensor* t : aligned_rows(args)) {
      if (!is_there(*t)) continue;
      int64_t last = -1;
      if (element_count(*t) > 0) {
        last = 0;
        for (int d = 0; d < t->rank; ++d) last += (t->shape[d] - 1) * t->stride[d];
      }
      const auto bytes = static_cast<size_t>((last + 1) * element_bytes(t->dtype));
      copies_.push_back({static_cast<char*>(t->data), Buffer(bytes)});
      std::memcpy(copies_.back().buffer.data(), t->data, bytes);
      t->data = copies_.back().buffer.data();
    }
  }
  std::string give_back() const {
    bool intact = true;
    for (const auto& [host, buffer] : copies_) {
      std::memcpy(host, buffer.data(), buffer.size());
      intact = intact && buffer.guards_intact();
    }
    return intact ? "" : "the guards of rows were overwritten";
  }

  Args args;

 private:
  struct Copy {
    char* host;
    Buffer buffer;
  };
  std::vector<Copy> copies_;
};

inline size_t workspace_bytes(const ForwardProblem& p) { return cuda::portable::forward_layout(p).bytes; }
inline size_t workspace_bytes(const BackwardProblem& p) { return cuda::portable::backward_layout(p).bytes; }
inline size_t workspace_bytes(const SummaryProblem& p) { return cuda::portable::summary_layout(p).bytes; }
inline size_t workspace_bytes(const BackwardSummaryProblem& p) { return cuda::portable::summary_layout(p).bytes; }

// Calls run(problem, workspace). Returns "" or what went wrong.
template <class Args, class Run>
std::string with_workspace(const Args& args, const Run& run) {
  const AlignedRows<Args> aligned(args);
  const auto problem = problem_of(aligned.args);
  const Buffer workspace(workspace_bytes(problem));
  std::string problems;
  try {
    run(problem, workspace.data());
  } catch (const std::runtime_error& error) {
    problems = error.what();
  }
  if (!workspace.guards_intact()) problems += " the workspace's guards were overwritten";
  return problems + aligned.give_back();
}

}  // namespace gatedelta::testing::emulated
