/* The header is C99, and a C program can do everything with it: one layer, forward, backward and decode. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gatedelta/gatedelta.h"

enum { T = 5, H = 2, D = 16, ROWS = T * H * D, STATE = H * D * D };

static void expect(int condition, const char* what) {
  if (condition) return;
  fprintf(stderr, "failed: %s (last error: %s)\n", what, gd_last_error());
  exit(1);
}

static gd_tensor view(void* data, int rank, int64_t a, int64_t b, int64_t c, int64_t d) {
  const int64_t shape[4] = {a, b, c, d};
  gd_tensor t;
  int64_t stride = 1;
  int i;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.dtype = GD_F32;
  t.rank = rank;
  for (i = rank - 1; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.stride[i] = stride;
    stride *= shape[i];
  }
  return t;
}

static void fill(float* data, int count, float value) {
  int i;
  for (i = 0; i < count; ++i) data[i] = value * (float)(1 + i % 3);
}

/* 64-byte aligned memory inside a larger block, which the caller frees. */
static void* aligned(size_t bytes, void** block) {
  *block = malloc(bytes + 64);
  expect(*block != NULL, "malloc");
  return (void*)(((uintptr_t)*block + 63) / 64 * 64);
}

static void add_one(void* task, int64_t index) { ((int*)task)[index] += 1; }

int main(void) {
  static float q[ROWS], k[ROWS], v[ROWS], g[T * H], beta[T * H], o[ROWS], o_steps[ROWS], dv[ROWS];
  static float final_state[STATE], pool_state[STATE];
  gd_forward_args forward = GD_FORWARD_ARGS_INIT;
  gd_backward_args backward = GD_BACKWARD_ARGS_INIT;
  gd_recurrent_args recurrent = GD_RECURRENT_ARGS_INIT;
  gd_layer_step_args layer = GD_LAYER_STEP_ARGS_INIT;
  gd_info info = GD_INFO_INIT;
  gd_thread_pool* threads = NULL;
  void* block;
  size_t bytes = 0;
  int counts[3] = {0, 0, 0};
  int i;

  expect(gd_get_info(&info) == GD_OK && info.abi_version == GD_ABI_VERSION, "gd_get_info");
  expect(gd_isa_name(info.cpu_isa_best) != NULL, "gd_isa_name");
  expect(strcmp(gd_status_name(GD_OK), "GD_OK") == 0, "gd_status_name");

  fill(q, ROWS, 0.05f);
  fill(k, ROWS, 0.04f);
  fill(v, ROWS, 0.3f);
  fill(g, T * H, -0.1f);
  fill(beta, T * H, 0.2f);

  forward.in.q = view(q, 4, 1, T, H, D);
  forward.in.k = view(k, 4, 1, T, H, D);
  forward.in.v = view(v, 4, 1, T, H, D);
  forward.in.g = view(g, 3, 1, T, H, 0);
  forward.in.beta = view(beta, 3, 1, T, H, 0);
  backward.in = recurrent.in = forward.in;

  forward.out = view(o, 4, 1, T, H, D);
  forward.final_state = view(final_state, 4, 1, H, D, D);
  expect(gd_forward(&forward) == GD_WORKSPACE_TOO_SMALL && strlen(gd_last_error()) > 0, "a workspace is asked for");
  expect(gd_forward_workspace(&forward, &bytes) == GD_OK, "gd_forward_workspace");
  forward.exec.workspace = aligned(bytes, &block);
  forward.exec.workspace_bytes = bytes;
  expect(gd_forward(&forward) == GD_OK, "gd_forward");
  free(block);

  backward.do_ = view(o, 4, 1, T, H, D);
  backward.dv = view(dv, 4, 1, T, H, D);
  expect(gd_backward_workspace(&backward, &bytes) == GD_OK, "gd_backward_workspace");
  backward.exec.workspace = aligned(bytes, &block);
  backward.exec.workspace_bytes = bytes;
  expect(gd_backward(&backward) == GD_OK, "gd_backward");
  free(block);
  for (i = 0; i < ROWS && dv[i] == 0; ++i) continue;
  expect(i < ROWS, "dv is written");

  recurrent.out = view(o_steps, 4, 1, T, H, D);
  recurrent.final_state = view(pool_state, 4, 1, H, D, D);
  expect(gd_recurrent_workspace(&recurrent, &bytes) == GD_OK, "gd_recurrent_workspace");
  recurrent.exec.workspace = aligned(bytes, &block);
  recurrent.exec.workspace_bytes = bytes;
  expect(gd_recurrent(&recurrent) == GD_OK, "gd_recurrent");
  free(block);
  for (i = 0; i < ROWS; ++i) expect(o[i] - o_steps[i] < 1e-5f && o_steps[i] - o[i] < 1e-5f, "both forms agree on o");
  for (i = 0; i < STATE; ++i)
    expect(final_state[i] - pool_state[i] < 1e-5f && pool_state[i] - final_state[i] < 1e-5f, "and on the state");

  expect(gd_layer_step_workspace(&layer, &bytes) == GD_INVALID_ARGUMENT, "gd_layer_step_workspace refuses no tensors");
  expect(strcmp(gd_last_error(), "mixed_qkv is missing") == 0, "and says which one is missing");
  expect(gd_layer_step(&layer) == GD_INVALID_ARGUMENT, "gd_layer_step");

  expect(gd_thread_pool_create(2, &threads) == GD_OK && gd_thread_pool_size(threads) == 2, "gd_thread_pool_create");
  gd_thread_pool_parallel_for(threads, 3, add_one, counts);
  expect(counts[0] == 1 && counts[1] == 1 && counts[2] == 1, "gd_thread_pool_parallel_for");
  gd_thread_pool_destroy(threads);
  return 0;
}
