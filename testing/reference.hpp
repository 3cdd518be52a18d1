// The one truth: the token recurrence of gatedelta.h in double precision, forward and backward by hand.
// It takes the library's own argument structs (assumed valid), reads the very bits the library reads, and returns
// contiguous doubles in the logical shape of each output. States are returned per sequence in the call's layout
// ([N, Hv, K, V] or [N, Hv, V, K]), never as a pool.
#pragma once

#include <cstdint>
#include <vector>

#include "gatedelta/gatedelta.h"

namespace gatedelta::testing {

struct ReferenceOptions {
  int64_t key_heads = 0;  // > 0: only the first so many key heads and their value heads (not with tiled ones); the rest
                          // of each output is 0
  int threads = 1;        // the result does not depend on it
};

struct ForwardTruth {
  std::vector<double> o;            // [B, T, Hv, V]
  std::vector<double> final_state;  // [N, Hv, ., .], always
  std::vector<double> checkpoints;  // [C, Hv, ., .] in packed order, or [N, Hv, ., .] at offsets, if asked for
};

struct BackwardTruth {
  std::vector<double> dq, dk;           // [B, T, Hk, K]
  std::vector<double> dv;               // [B, T, Hv, V]
  std::vector<double> dg, dbeta;        // [B, T, Hv]
  std::vector<double> dA_log;           // [Hv], GD_GATE_RAW only
  std::vector<double> d_dt_bias;        // [Hv], GD_GATE_RAW only
  std::vector<double> d_initial_state;  // [N, Hv, ., .]

  // How large results would be if their terms did not cancel. Of dq, dk [B, T, Hk] and dbeta [B, T, Hv]: the root of
  // the sum of the squares of the value columns' terms, as if their signs were random. Of dA_log and d_dt_bias [Hv]:
  // the sum of the absolute values of the tokens' terms.
  struct Sizes {
    std::vector<double> dq, dk, dg, dbeta, dA_log, d_dt_bias;
  } sizes;
};

struct RecurrentTruth {
  std::vector<double> o;            // [B, T, Hv, V]
  std::vector<double> final_state;  // [N, Hv, ., .], after accept_lengths tokens where given
  std::vector<double> step_states;  // [B, T, Hv, ., .], if asked for (also when the call stores them in a pool)
};

// Of the sequences that are summarised, not of the others.
struct SummaryTruth {
  std::vector<double> local_state;  // [n, Hv, ., .]
  std::vector<double> transition;   // [n, Hv, K, K]
};

ForwardTruth reference_forward(const gd_forward_args& args, const ReferenceOptions& options = {});
BackwardTruth reference_backward(const gd_backward_args& args, const ReferenceOptions& options = {});
SummaryTruth reference_summary(const gd_summary_args& args);
std::vector<double> reference_backward_summary(const gd_backward_summary_args& args);  // [n, Hv, ., .]
std::vector<double> reference_merge(const gd_merge_args& args);                        // [R, Hv, ., .]
RecurrentTruth reference_recurrent(const gd_recurrent_args& args, const ReferenceOptions& options = {});

// Number of sequences, and where each one's tokens are.
struct Span {
  int64_t batch, begin, length;
};
std::vector<Span> sequence_spans(const gd_inputs& in);
int64_t index_at(const gd_tensor& indices, int64_t i);
// A slot of a pool by its place in an index tensor; -1 if it is null.
int64_t slot_at(const gd_inputs& in, const gd_tensor& indices, int64_t row, int64_t column = 0);
// The slot sequence n starts from; -1 if none. A recurrent call may pick it from a row.
int64_t read_slot(const gd_inputs& in, int64_t n);
int64_t read_slot(const gd_recurrent_args& args, int64_t n);
// With a pool of step states, the slot for the state after token t of sequence n, which is at `span`; -1 if none.
int64_t step_slot(const gd_recurrent_args& args, int64_t n, const Span& span, int64_t t);
// Whether sequence n is a padded row: it is skipped, its outputs are 0 and no state of it is stored.
bool is_padding(const gd_forward_args& args, int64_t n);
bool is_padding(const gd_recurrent_args& args, int64_t n);

}  // namespace gatedelta::testing
