/* Decoding over a pool of states, as an inference engine does: requests own slots of one pool, every step advances a
 * batch of them by one token in place. Build: cc -std=c99 decode.c $(pkg-config --cflags --libs gatedelta) -lm */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gatedelta/gatedelta.h"

enum { SLOTS = 8, BATCH = 3, STEPS = 12, HK = 2, HV = 4, K = 32, V = 64 };

/* Inputs of all steps: request by request, then token by token. */
static float q[BATCH][STEPS][HK][K], k[BATCH][STEPS][HK][K], v[BATCH][STEPS][HV][V];
static float a[BATCH][STEPS][HV], b[BATCH][STEPS][HV];
static float A_log[HV], dt_bias[HV];
static float pool[SLOTS][HV][K][V];
static float o[BATCH][STEPS][HV][V];

static void check(gd_status status) {
  if (status == GD_OK) return;
  fprintf(stderr, "%s: %s\n", gd_status_name(status), gd_last_error());
  exit(1);
}

static float uniform(void) { return (float)rand() / (float)RAND_MAX - 0.5f; }

static void fill(float* data, size_t count) {
  size_t i;
  for (i = 0; i < count; ++i) data[i] = uniform();
}

/* A float tensor from sizes and strides, in elements. */
static gd_tensor tensor(void* data, int rank, const int64_t* shape, const int64_t* stride) {
  gd_tensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.dtype = GD_F32;
  t.rank = rank;
  memcpy(t.shape, shape, (size_t)rank * sizeof *shape);
  memcpy(t.stride, stride, (size_t)rank * sizeof *stride);
  return t;
}

/* `tokens` tokens from `step` on, for `batch` requests of [BATCH][STEPS][heads][dim]; dim 0 stands for
 * [BATCH][STEPS][heads]. */
static gd_tensor rows(float* data, int batch, int step, int tokens, int heads, int dim) {
  const int64_t width = dim ? dim : 1;
  const int64_t shape[4] = {batch, tokens, heads, dim};
  const int64_t stride[4] = {STEPS * heads * width, heads * width, width, 1};
  return tensor(data + step * heads * width, dim ? 4 : 3, shape, stride);
}

static gd_tensor states(float* data, int slots) {
  const int64_t shape[4] = {slots, HV, K, V};
  const int64_t stride[4] = {HV * K * V, K * V, V, 1};
  return tensor(data, 4, shape, stride);
}

/* The gate comes from raw `a`, beta from logits `b`, and q and k are normalised inside: what a Qwen layer needs. */
static gd_inputs layer_inputs(int batch, int step, int tokens) {
  gd_inputs in;
  const int64_t heads[1] = {HV}, one[1] = {1};
  memset(&in, 0, sizeof in);
  in.q = rows(&q[0][0][0][0], batch, step, tokens, HK, K);
  in.k = rows(&k[0][0][0][0], batch, step, tokens, HK, K);
  in.v = rows(&v[0][0][0][0], batch, step, tokens, HV, V);
  in.g = rows(&a[0][0][0], batch, step, tokens, HV, 0);
  in.beta = rows(&b[0][0][0], batch, step, tokens, HV, 0);
  in.A_log = tensor(A_log, 1, heads, one);
  in.dt_bias = tensor(dt_bias, 1, heads, one);
  in.gate = GD_GATE_RAW;
  in.beta_kind = GD_BETA_LOGIT;
  in.l2norm = 1;
  return in;
}

static void* allocate_workspace(gd_recurrent_args* args) {
  void* block;
  check(gd_recurrent_workspace(args, &args->exec.workspace_bytes));
  block = malloc(args->exec.workspace_bytes + 64);
  if (!block) exit(1);
  args->exec.workspace = (void*)(((uintptr_t)block + 63) / 64 * 64);
  return block;
}

int main(void) {
  int32_t slots[BATCH] = {5, 0, 6}; /* which slot each request owns */
  static float replayed[STEPS][HV][V], final_state[HV][K][V];
  gd_recurrent_args step_args = GD_RECURRENT_ARGS_INIT, replay = GD_RECURRENT_ARGS_INIT;
  gd_thread_pool* threads = NULL;
  void* block;
  int step, i;
  float worst = 0;

  fill(&q[0][0][0][0], sizeof q / sizeof(float));
  fill(&k[0][0][0][0], sizeof k / sizeof(float));
  fill(&v[0][0][0][0], sizeof v / sizeof(float));
  fill(&a[0][0][0], sizeof a / sizeof(float));
  fill(&b[0][0][0], sizeof b / sizeof(float));
  fill(A_log, HV);
  fill(dt_bias, HV);

  check(gd_thread_pool_create(0, &threads));
  step_args.exec.parallel_for = gd_thread_pool_parallel_for;
  step_args.exec.parallel_for_context = threads;
  step_args.in = layer_inputs(BATCH, 0, 1);
  step_args.in.initial_state = step_args.final_state = states(&pool[0][0][0][0], SLOTS); /* the same tensor: in place */
  {
    const int64_t shape[1] = {BATCH}, stride[1] = {1};
    step_args.in.initial_state_indices = tensor(slots, 1, shape, stride);
    step_args.in.initial_state_indices.dtype = GD_I32;
    step_args.final_state_indices = step_args.in.initial_state_indices;
  }
  step_args.out = rows(&o[0][0][0][0], BATCH, 0, 1, HV, V);
  block = allocate_workspace(&step_args); /* once: it depends on shapes alone */

  for (step = 0; step < STEPS; ++step) {
    const gd_inputs token = layer_inputs(BATCH, step, 1);
    step_args.in.q = token.q;
    step_args.in.k = token.k;
    step_args.in.v = token.v;
    step_args.in.g = token.g;
    step_args.in.beta = token.beta;
    step_args.out = rows(&o[0][0][0][0], BATCH, step, 1, HV, V);
    check(gd_recurrent(&step_args));
  }
  free(block);
  gd_thread_pool_destroy(threads);

  /* The first request again, all its tokens in one call: the same outputs, the same state. */
  replay.in = layer_inputs(1, 0, STEPS);
  replay.out = rows(&replayed[0][0][0], 1, 0, STEPS, HV, V);
  replay.final_state = states(&final_state[0][0][0], 1);
  block = allocate_workspace(&replay);
  check(gd_recurrent(&replay));
  free(block);
  for (i = 0; i < STEPS * HV * V; ++i) worst = fmaxf(worst, fabsf((&replayed[0][0][0])[i] - (&o[0][0][0][0])[i]));
  for (i = 0; i < HV * K * V; ++i)
    worst = fmaxf(worst, fabsf((&final_state[0][0][0])[i] - (&pool[slots[0]][0][0][0])[i]));

  printf("%d steps of %d requests over %d slots; against one call of %d tokens: largest difference %g\n", STEPS, BATCH,
         SLOTS, STEPS, (double)worst);
  return worst < 1e-5f ? 0 : 1;
}
