// The portable forward on a CPU: what src/cuda/portable/portable_forward.cu launches, CTA after CTA.
#pragma once

#include <stdexcept>
#include <string>

#include "cta.hpp"
#include "cuda/portable/forward.cuh"
#include "cuda/portable/prepare.cuh"
#include "testing/generator.hpp"

namespace gatedelta::testing::emulated {

struct Options {
  int multiprocessors = 1;  // of the device: how many value columns a CTA has follows from it
  bool eager_copies = false;
  unsigned seed = 1;
};

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
inline ForwardProblem problem_of(const gd_forward_args& args) {
  const gd_inputs& a = args.in;
  ForwardProblem p;
  Layer& in = p.in;
  in.key_heads = a.q.shape[2], in.value_heads = a.v.shape[2], in.group = in.value_heads / in.key_heads;
  in.key_dim = static_cast<int>(a.q.shape[3]), in.value_dim = static_cast<int>(a.v.shape[3]);
  in.sequences = {a.q.shape[0], a.q.shape[0], a.q.shape[1], {}};
  if (is_there(a.cu_seqlens)) {
    in.sequences.count = a.cu_seqlens.shape[0] - 1;
    in.sequences.offsets = {a.cu_seqlens.data, a.cu_seqlens.dtype == GD_I64, true};
  }
  in.q = rows_of(a.q), in.k = rows_of(a.k), in.v = rows_of(a.v), in.g = rows_of(a.g), in.beta = rows_of(a.beta);
  in.A_log = vector_of(a.A_log), in.dt_bias = vector_of(a.dt_bias);
  in.initial = states_of(a.initial_state, a.initial_indices, a.first_slot);
  in.gate = static_cast<gd_gate>(a.gate), in.beta_kind = static_cast<gd_beta>(a.beta_kind);
  in.layout = static_cast<gd_state_layout>(a.state_layout);
  in.l2norm = a.l2norm != 0;
  in.scale = a.has_scale ? a.scale : 1.0f / std::sqrt(static_cast<float>(in.key_dim));
  p.o = rows_of(args.o);
  p.final = states_of(args.final_state, args.final_indices, a.first_slot);
  p.checkpoints = states_of(args.checkpoints, args.checkpoint_indices, a.first_slot);
  p.checkpoint_every = args.checkpoint_every;
  p.checkpoint_offsets = indices_of(args.checkpoint_offsets);
  return p;
}

// ---- launches ------------------------------------------------------------------------------------------------------

template <class Config>
void run_kernels(const ForwardProblem& problem, char* workspace, const Options& options) {
  using namespace cuda::portable;
  using Prep = PrepareConfig<typename Config::Elem, Config::kKeys>;
  const Params p = params_of(problem, workspace, Config::kColumns);
  for (int cta = 0; cta < prepare_ctas(problem); ++cta)
    run_cta({Prep::kThreads, Prep::Smem::allocated(p.group), options.eager_copies, options.seed + cta},
            [&](int tid) { Prepare<Prep>::run(p, cta, tid); });
  const int64_t ctas = (problem.in.sequences.count * problem.in.value_heads) << p.log_parts;
  for (int cta = 0; cta < ctas; ++cta)
    run_cta({Config::kThreads, Config::Smem::kBytes, options.eager_copies, options.seed + cta},
            [&](int tid) { Forward<Config>(p, cta, tid).run(); });
}

// Copies of q, k, v and o whose data are aligned, as the kernels want it; the generator aligns nothing. What was
// written to o, and to what must not be written, is copied back.
class AlignedRows {
 public:
  explicit AlignedRows(const gd_forward_args& host) : args(host) {
    for (gd_tensor* t : {&args.in.q, &args.in.k, &args.in.v, &args.o}) {
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
    return intact ? "" : "the guards of q, k, v or o were overwritten";
  }

  gd_forward_args args;

 private:
  struct Copy {
    char* host;
    Buffer buffer;
  };
  std::vector<Copy> copies_;
};

// Returns "" or what went wrong.
template <class Run>
std::string with_workspace(const ForwardProblem& problem, const Run& run) {
  const Buffer workspace(cuda::portable::forward_layout(problem).bytes);
  try {
    run(workspace.data());
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return workspace.guards_intact() ? "" : "the workspace's guards were overwritten";
}

}  // namespace gatedelta::testing::emulated
