#include "ggml_op.h"

#include <string.h>

/* Prompts from so many tokens on go through the chunked kernel; the last tokens, whose states are stored one by one,
 * and everything shorter take recurrent steps. */
enum { MIN_CHUNKED = 64 };

/* The calls an operator becomes: mostly one. Of two, the first leaves its final state where the newest snapshot goes.
 */
typedef struct {
  gd_forward_args forward;
  gd_recurrent_args steps;
  int64_t forward_tokens, step_tokens; /* 0 = no such call */
  size_t index_bytes, workspace_bytes;
} Calls;

static size_t round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

static gd_tensor contiguous(void* data, int32_t dtype, int rank, int64_t d0, int64_t d1, int64_t d2, int64_t d3) {
  const int64_t shape[4] = {d0, d1, d2, d3};
  gd_tensor t;
  int64_t stride = 1;
  int i;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.dtype = dtype;
  t.rank = rank;
  for (i = rank - 1; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.stride[i] = stride;
    stride *= shape[i];
  }
  return t;
}

/* Tokens [first, first + count) of a tensor in GateDelta's terms: the same memory, sizes from the outermost on. */
static gd_tensor rows(const ggml_op_tensor* from, int rank, int64_t first, int64_t count) {
  gd_tensor t;
  int i;
  memset(&t, 0, sizeof t);
  t.data = from->data ? (char*)from->data + (size_t)first * from->nb[2] : NULL;
  t.dtype = GD_F32;
  t.rank = rank;
  for (i = 0; i < rank; ++i) {
    t.shape[i] = from->ne[3 - i];
    t.stride[i] = (int64_t)(from->nb[3 - i] / sizeof(float));
  }
  t.shape[1] = count;
  return t;
}

static gd_inputs inputs(const ggml_op* op, int64_t first, int64_t count) {
  gd_inputs in;
  memset(&in, 0, sizeof in);
  in.q = rows(&op->q, 4, first, count);
  in.k = rows(&op->k, 4, first, count);
  in.v = rows(&op->v, 4, first, count);
  in.g = rows(&op->g, 3, first, count);
  in.beta = rows(&op->beta, 3, first, count);
  in.state_layout = GD_STATE_VK;
  in.key_head_order = GD_KEY_HEADS_TILED;
  return in;
}

static const char* check(const ggml_op* op) {
  const ggml_op_tensor* const all[] = {&op->q, &op->k, &op->v, &op->g, &op->beta};
  const int64_t S = op->v.ne[0], H = op->v.ne[1], T = op->v.ne[2], N = op->v.ne[3];
  size_t stride = sizeof(float);
  int i, d;
  if (op->snapshots < 1) return "K must be at least 1";
  if (op->g.ne[0] != 1) return "g has a decay for each channel (KDA), must have one for each head";
  if (op->beta.ne[0] != 1) return "beta must have one number for each head";
  if (op->q.ne[0] != S || op->k.ne[0] != S) return "q, k and v must have heads of one size";
  for (i = 0; i < 5; ++i) {
    if (all[i]->ne[2] != T || all[i]->ne[3] != N) return "all inputs must have as many tokens and sequences as v";
    for (d = 0; d < 4; ++d)
      if (all[i]->nb[d] % sizeof(float) != 0) return "strides must be whole floats";
  }
  if (T < 1 || N < 1) return "there must be a token and a sequence";
  if (op->state.ne[0] != S || op->state.ne[1] != S || op->state.ne[2] != H || op->state.ne[3] != N)
    return "state must be [S, S, H, N]";
  for (d = 0; d < 4; ++d) {
    if (op->state.nb[d] != stride) return "state must be contiguous";
    stride *= (size_t)op->state.ne[d];
  }
  return NULL;
}

/* `indices` may be null in a query of the work size. */
static const char* make_calls(const ggml_op* op, const gd_exec* exec, int32_t* indices, Calls* calls) {
  const int64_t S = op->v.ne[0], H = op->v.ne[1], T = op->v.ne[2], N = op->v.ne[3], K = op->snapshots;
  const int64_t tail = K == 1 ? 0 : K < T ? K : T; /* tokens whose states are stored beside that of the last one */
  const char* const wrong = check(op);
  gd_tensor outputs, snapshots;
  size_t bytes = 0;
  int64_t n, t;
  if (wrong) return wrong;
  calls->forward_tokens = T - tail >= MIN_CHUNKED ? T - tail : 0;
  calls->step_tokens = T - calls->forward_tokens;
  calls->index_bytes = round_up(sizeof(int32_t) * (size_t)(N * (calls->step_tokens + 1)));
  calls->workspace_bytes = 0;
  outputs = contiguous(op->result, GD_F32, 4, N, T, H, S);
  snapshots = contiguous(op->result ? op->result + N * T * H * S : NULL, GD_F32, 4, K * N, H, S, S);

  if (calls->forward_tokens) {
    const gd_forward_args none = GD_FORWARD_ARGS_INIT;
    gd_forward_args* const args = &calls->forward;
    *args = none;
    args->exec = *exec;
    args->in = inputs(op, 0, calls->forward_tokens);
    args->in.initial_state = contiguous(op->state.data, GD_F32, 4, N, H, S, S);
    args->out = outputs;
    args->out.shape[1] = calls->forward_tokens;
    args->final_state = snapshots;
    args->final_state.shape[0] = N;
    if (gd_forward_workspace(args, &bytes) != GD_OK) return gd_last_error();
    calls->workspace_bytes = bytes;
  }
  if (calls->step_tokens) {
    const gd_recurrent_args none = GD_RECURRENT_ARGS_INIT;
    gd_recurrent_args* const args = &calls->steps;
    *args = none;
    args->exec = *exec;
    args->in = inputs(op, calls->forward_tokens, calls->step_tokens);
    args->out = outputs;
    args->out.shape[1] = calls->step_tokens;
    if (op->result) args->out.data = op->result + calls->forward_tokens * H * S;
    args->step_states = snapshots;
    args->step_indices = contiguous(indices, GD_I32, 2, N, calls->step_tokens, 0, 0);
    for (n = 0; indices && n < N; ++n) {
      for (t = 0; t < calls->step_tokens; ++t) {
        const int64_t age = calls->step_tokens - 1 - t; /* snapshot of that age, sequence n; -1: of no use */
        indices[n * calls->step_tokens + t] = (int32_t)(age < K ? age * N + n : -1);
      }
      indices[N * calls->step_tokens + n] = (int32_t)n;
    }
    if (calls->forward_tokens) {
      args->in.initial_state = snapshots;
      args->in.initial_state_indices =
          contiguous(indices ? indices + N * calls->step_tokens : NULL, GD_I32, 1, N, 0, 0, 0);
    } else {
      args->in.initial_state = contiguous(op->state.data, GD_F32, 4, N, H, S, S);
    }
    if (gd_recurrent_workspace(args, &bytes) != GD_OK) return gd_last_error();
    if (bytes > calls->workspace_bytes) calls->workspace_bytes = bytes;
  }
  return NULL;
}

static gd_exec execution(const gd_thread_pool* threads) {
  gd_exec exec;
  memset(&exec, 0, sizeof exec);
  if (threads) {
    exec.num_threads = gd_thread_pool_size(threads);
    exec.parallel_for = gd_thread_pool_parallel_for;
    exec.parallel_for_context = (void*)threads;
  }
  return exec;
}

const char* ggml_op_work_size(const ggml_op* op, const gd_thread_pool* threads, size_t* bytes) {
  Calls calls;
  const gd_exec exec = execution(threads);
  const char* const wrong = make_calls(op, &exec, NULL, &calls);
  if (!wrong) *bytes = calls.index_bytes + round_up(calls.workspace_bytes) + 64;
  return wrong;
}

const char* ggml_op_run(const ggml_op* op, gd_thread_pool* threads, void* work, size_t work_bytes) {
  Calls calls;
  const gd_exec exec = execution(threads);
  size_t needed;
  char* const aligned = (char*)round_up((uintptr_t)work);
  const char* wrong = ggml_op_work_size(op, threads, &needed);
  if (wrong) return wrong;
  if (!work || work_bytes < needed) return "the work memory is smaller than ggml_op_work_size says";
  wrong = make_calls(op, &exec, (int32_t*)(void*)aligned, &calls);
  if (wrong) return wrong;
  calls.forward.exec.workspace = calls.steps.exec.workspace = aligned + calls.index_bytes;
  calls.forward.exec.workspace_bytes = calls.steps.exec.workspace_bytes = calls.workspace_bytes;
  if (calls.forward_tokens && gd_forward(&calls.forward) != GD_OK) return gd_last_error();
  if (calls.step_tokens && gd_recurrent(&calls.steps) != GD_OK) return gd_last_error();
  return NULL;
}
