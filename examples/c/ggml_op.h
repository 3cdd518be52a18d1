/* What ggml's GGML_OP_GATED_DELTA_NET computes, by GateDelta: an adapter to copy into a ggml backend. It needs no
 * header of ggml's, and works on the CPU in f32, as the operator does there. */
#ifndef GGML_OP_H
#define GGML_OP_H

#include "gatedelta/gatedelta.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The fields of a ggml_tensor that matter: sizes from the innermost on, strides in bytes. */
typedef struct {
  void* data;
  int64_t ne[4];
  size_t nb[4];
} ggml_op_tensor;

typedef struct {
  ggml_op_tensor q, k;    /* [S, Hk, T, N], normalised by the caller; rows contiguous */
  ggml_op_tensor v;       /* [S, H, T, N]; rows contiguous; value head h uses key head h % Hk */
  ggml_op_tensor g, beta; /* [1, H, T, N]; g is the natural logarithm of the decay */
  ggml_op_tensor state;   /* [S, S, H, N], contiguous: a head's [V][K] */
  int64_t snapshots;      /* ggml's K, at least 1 */
  float* result;          /* outputs [S, H, T, N], then the states after the last K tokens, [S, S, H, N] each, newest
                             first. With fewer tokens than K the oldest are left as they are */
} ggml_op;

/* Both return null, or what is wrong with the operator. threads: null = the calling thread does all the work; the work
 * memory needed depends on how many there are. `work` is private to the call; of any alignment. */
const char* ggml_op_work_size(const ggml_op* op, const gd_thread_pool* threads, size_t* bytes);
const char* ggml_op_run(const ggml_op* op, gd_thread_pool* threads, void* work, size_t work_bytes);

#ifdef __cplusplus
}
#endif

#endif
