/* The core of an inference engine around one GDN layer: it loads the library at run time, owns the pools of states, and
 * batches requests continuously: prefill in packs, then windows of a token and its drafts, of which some are accepted.
 *
 *     engine [cpu|cpu-bf16|cuda] [libgatedelta.so]
 *
 * Build: cc -std=c99 engine.c -I.../include -ldl -lm (nothing of GateDelta is linked). The GPU is used through the
 * driver's library, loaded in the same way. Every output of every request is compared with a plain sequential
 * recomputation (engine_model.h); where they differ, the exit status is 1. */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine_model.h"
#include "gatedelta/gatedelta.h"

/* A request owns a block of WINDOW slots: the state after each token of its last window. */
enum { REQUESTS = 7, BLOCKS = 3, WINDOW = 4, SLOTS = BLOCKS * WINDOW, CONV_COLUMNS = W - 2 + WINDOW, MAX_TOKENS = 512 };

static int on_gpu = 0;
static int32_t number_type = GD_F32; /* of activations and weights; states are fp32 */

static void die(const char* what, const char* why) {
  fprintf(stderr, "engine: %s: %s\n", what, why);
  exit(2);
}

/* --- the library, by name --------------------------------------------------------------------------------------- */

static struct {
  gd_status (*get_info)(gd_info*);
  const char* (*last_error)(void);
  gd_status (*conv1d)(const gd_conv1d_args*);
  gd_status (*conv1d_workspace)(const gd_conv1d_args*, size_t*);
  gd_status (*forward)(const gd_forward_args*);
  gd_status (*forward_workspace)(const gd_forward_args*, size_t*);
  gd_status (*gated_norm)(const gd_gated_norm_args*);
  gd_status (*gated_norm_workspace)(const gd_gated_norm_args*, size_t*);
  gd_status (*layer_step)(const gd_layer_step_args*);
  gd_status (*layer_step_workspace)(const gd_layer_step_args*, size_t*);
} gd;

/* Stores a function's address through a pointer to a pointer: ISO C has no cast from void* to a function. */
static void find(void* library, const char* name, void* to) {
  void* const address = dlsym(library, name);
  if (!address) die(name, dlerror());
  memcpy(to, &address, sizeof address);
}

static void load_library(const char* path) {
  gd_info info = GD_INFO_INIT;
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) die("dlopen", dlerror());
#define FIND(name) find(library, "gd_" #name, &gd.name)
  FIND(get_info), FIND(last_error), FIND(conv1d), FIND(conv1d_workspace), FIND(forward), FIND(forward_workspace);
  FIND(gated_norm), FIND(gated_norm_workspace), FIND(layer_step), FIND(layer_step_workspace);
#undef FIND
  /* Structs of another ABI would be refused by every call; here the message can say more. */
  if (gd.get_info(&info) != GD_OK || info.abi_version != GD_ABI_VERSION) die(path, "built for another ABI");
  if (on_gpu && info.cuda_devices == 0) {
    fprintf(stderr, "engine: no GPU, or a library without CUDA\n");
    exit(77); /* to test programs: skipped */
  }
}

static void check(const char* call, gd_status status) {
  if (status != GD_OK) die(call, gd.last_error());
}

/* --- memory: the host's, or the GPU's through its driver --------------------------------------------------------- */

static struct {
  int (*init)(unsigned), (*device)(int*, int), (*retain)(void**, int), (*current)(void*);
  int (*allocate)(uint64_t*, size_t), (*release)(uint64_t), (*set)(uint64_t, unsigned char, size_t);
  int (*to_device)(uint64_t, const void*, size_t), (*to_host)(void*, uint64_t, size_t);
} cu;

static void cuda(const char* call, int result) {
  if (result != 0) die(call, "the CUDA driver returned an error");
}

static void load_driver(void) {
  int device;
  void *context, *const driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (!driver) die("dlopen", dlerror());
  find(driver, "cuInit", &cu.init), find(driver, "cuDeviceGet", &cu.device);
  find(driver, "cuDevicePrimaryCtxRetain", &cu.retain), find(driver, "cuCtxSetCurrent", &cu.current);
  find(driver, "cuMemAlloc_v2", &cu.allocate), find(driver, "cuMemFree_v2", &cu.release);
  find(driver, "cuMemsetD8_v2", &cu.set), find(driver, "cuMemcpyHtoD_v2", &cu.to_device);
  find(driver, "cuMemcpyDtoH_v2", &cu.to_host);
  cuda("cuInit", cu.init(0)), cuda("cuDeviceGet", cu.device(&device, 0));
  cuda("cuDevicePrimaryCtxRetain", cu.retain(&context, device)), cuda("cuCtxSetCurrent", cu.current(context));
}

/* `host` is where the engine writes, `data` what calls get: on the CPU the same. */
typedef struct {
  char* host;
  void* data;
  size_t bytes;
} Buffer;

static Buffer make_buffer(size_t bytes) {
  Buffer b;
  uint64_t address = 0;
  void* host = NULL;
  b.bytes = bytes ? bytes : 64;
  if (posix_memalign(&host, 64, b.bytes) != 0) die("posix_memalign", "no memory");
  memset(host, 0, b.bytes);
  b.host = host;
  b.data = host;
  if (on_gpu) {
    cuda("cuMemAlloc", cu.allocate(&address, b.bytes)), cuda("cuMemset", cu.set(address, 0, b.bytes));
    b.data = (void*)(uintptr_t)address;
  }
  return b;
}
static void free_buffer(Buffer b) {
  if (on_gpu && b.data) cuda("cuMemFree", cu.release((uint64_t)(uintptr_t)b.data));
  free(b.host);
}
/* A real engine copies on its stream from pinned memory; plain copies keep the example short. */
static void upload(Buffer b) {
  if (on_gpu) cuda("cuMemcpyHtoD", cu.to_device((uint64_t)(uintptr_t)b.data, b.host, b.bytes));
}
static void download(Buffer b) {
  if (on_gpu) cuda("cuMemcpyDtoH", cu.to_host(b.host, (uint64_t)(uintptr_t)b.data, b.bytes));
}

static size_t number_bytes(void) { return number_type == GD_BF16 ? 2 : 4; }
static float get_number(Buffer b, int64_t i) {
  return number_type == GD_F32 ? ((const float*)b.host)[i] : from_bf16(((const uint16_t*)b.host)[i]);
}

/* A contiguous tensor. */
static gd_tensor tensor(const void* data, int32_t dtype, int rank, const int64_t* shape) {
  gd_tensor t;
  int64_t stride = 1;
  int i;
  memset(&t, 0, sizeof t);
  t.data = (void*)data;
  t.dtype = dtype;
  t.rank = rank;
  for (i = rank - 1; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.stride[i] = stride;
    stride *= shape[i];
  }
  return t;
}
#define TENSOR(data, dtype, rank, ...) tensor(data, dtype, rank, (const int64_t[]){__VA_ARGS__})

/* --- the model's tensors ----------------------------------------------------------------------------------------- */

typedef struct {
  Buffer x, z, a, b; /* of tokens */
} Rows;

static Buffer conv_weight, A_log, dt_bias, norm_weight;
static Rows table; /* of every token there is */

static Buffer numbers(const float* from, int64_t count) {
  const Buffer b = make_buffer((size_t)count * number_bytes());
  int64_t i;
  for (i = 0; i < count; ++i) {
    if (number_type == GD_F32) ((float*)b.host)[i] = from[i];
    if (number_type == GD_BF16) ((uint16_t*)b.host)[i] = to_bf16(from[i]);
  }
  upload(b);
  return b;
}
static void make_tensors(void) {
  table.x = numbers(&x_of[0][0], VOCAB * D), table.z = numbers(&z_of[0][0], VOCAB * HV * V);
  table.a = numbers(&a_of[0][0], VOCAB * HV), table.b = numbers(&b_of[0][0], VOCAB * HV);
  conv_weight = numbers(&conv_weight_of[0][0], D * W), norm_weight = numbers(norm_weight_of, V);
  A_log = numbers(A_log_of, HV), dt_bias = numbers(dt_bias_of, HV);
}

/* --- the engine -------------------------------------------------------------------------------------------------- */

typedef struct {
  int arrives, prompt, length; /* loop it arrives in; tokens of the prompt, and of all */
  int done;                    /* tokens whose outputs are final */
  int block;                   /* -1: waits, or has finished */
  int kept;                    /* tokens kept of its last window: the state is in slot kept - 1 of its block */
  float* y;                    /* [length][HV * V] */
} Request;

static Request requests[REQUESTS] = {{0, 70, 90, 0, -1, 0, NULL},   {0, 1, 30, 0, -1, 0, NULL},
                                     {0, 200, 215, 0, -1, 0, NULL}, {1, 64, 64, 0, -1, 0, NULL},
                                     {3, 5, 41, 0, -1, 0, NULL},    {4, 129, 150, 0, -1, 0, NULL},
                                     {4, 17, 60, 0, -1, 0, NULL}};
static Buffer states, conv_states;                        /* the pools: [SLOTS, HV, V, K] and [SLOTS, D, columns] */
static Buffer offsets, block_slots, first_slots, lengths; /* index tensors, written anew for every call */
static Buffer convolved, o, y, workspace;
static Rows rows;
static int window_tokens = 0, windows = 0;

static int32_t* ints(Buffer b) { return (int32_t*)b.host; }

static void make_pools(void) {
  states = make_buffer(sizeof(float) * SLOTS * HV * V * K);
  conv_states = make_buffer(number_bytes() * SLOTS * D * CONV_COLUMNS);
  offsets = make_buffer(sizeof(int32_t) * (BLOCKS + 1));
  block_slots = make_buffer(sizeof(int32_t) * SLOTS);
  first_slots = make_buffer(sizeof(int32_t) * BLOCKS);
  lengths = make_buffer(sizeof(int32_t) * BLOCKS);
  rows.x = make_buffer(number_bytes() * MAX_TOKENS * D), rows.z = make_buffer(number_bytes() * MAX_TOKENS * HV * V);
  rows.a = make_buffer(number_bytes() * MAX_TOKENS * HV), rows.b = make_buffer(number_bytes() * MAX_TOKENS * HV);
  convolved = make_buffer(rows.x.bytes), o = make_buffer(rows.z.bytes), y = make_buffer(rows.z.bytes);
  workspace = make_buffer(0);
}

/* Runs a call with a workspace that is large enough. Its size depends on shapes alone, so an engine asks for it once
 * for its largest shapes. Calls on one stream may share it. */
static void grow_workspace(gd_exec* exec, size_t bytes) {
  if (bytes > workspace.bytes) {
    free_buffer(workspace);
    workspace = make_buffer(bytes);
  }
  exec->workspace = workspace.data;
  exec->workspace_bytes = workspace.bytes;
}
#define RUN(call, args)                                                  \
  do {                                                                   \
    size_t bytes_ = 0;                                                   \
    (args)->exec.device = on_gpu ? GD_CUDA : GD_CPU;                     \
    check("gd_" #call "_workspace", gd.call##_workspace(args, &bytes_)); \
    grow_workspace(&(args)->exec, bytes_);                               \
    check("gd_" #call, gd.call(args));                                   \
  } while (0)

static void put_row(Buffer to, Buffer from, int row, int token, size_t width) {
  const size_t bytes = width * number_bytes();
  memcpy(to.host + (size_t)row * bytes, from.host + (size_t)token * bytes, bytes);
}
static void put_token(int row, int token) { /* embedding and input projections of a real model */
  if (row >= MAX_TOKENS) die("batch", "more tokens than the engine has rows");
  put_row(rows.x, table.x, row, token, D), put_row(rows.z, table.z, row, token, HV * V);
  put_row(rows.a, table.a, row, token, HV), put_row(rows.b, table.b, row, token, HV);
}
static void upload_batch(void) {
  upload(rows.x), upload(rows.z), upload(rows.a), upload(rows.b);
  upload(offsets), upload(block_slots), upload(first_slots), upload(lengths);
}
static void keep_output(Request* r, int row) {
  int i;
  for (i = 0; i < HV * V; ++i) r->y[(int64_t)r->done * HV * V + i] = get_number(y, (int64_t)row * HV * V + i);
  ++r->done;
}

/* What prefill and windows have in common: a pack of `count` sequences with `tokens` tokens. */
static gd_inputs rule_inputs(int64_t count, int64_t tokens) {
  gd_inputs in;
  memset(&in, 0, sizeof in);
  in.g = TENSOR(rows.a.data, number_type, 3, 1, tokens, HV);
  in.beta = TENSOR(rows.b.data, number_type, 3, 1, tokens, HV);
  in.A_log = TENSOR(A_log.data, number_type, 1, HV);
  in.dt_bias = TENSOR(dt_bias.data, number_type, 1, HV);
  in.cu_seqlens = TENSOR(offsets.data, GD_I32, 1, count + 1);
  in.gate = GD_GATE_RAW;
  in.beta_kind = GD_BETA_LOGIT;
  in.state_layout = GD_STATE_VK;
  in.l2norm = 1;
  return in;
}
static gd_conv1d_inputs conv_inputs(int64_t tokens) {
  gd_conv1d_inputs in;
  memset(&in, 0, sizeof in);
  in.x = TENSOR(rows.x.data, number_type, 3, 1, tokens, D);
  in.weight = TENSOR(conv_weight.data, number_type, 2, D, W);
  in.activation = GD_CONV1D_SILU;
  return in;
}
static gd_tensor state_pool(void) { return TENSOR(states.data, GD_F32, 4, SLOTS, HV, V, K); }
static gd_tensor conv_pool(int64_t columns) { /* the first columns of each slot */
  gd_tensor t = TENSOR(conv_states.data, number_type, 3, SLOTS, D, CONV_COLUMNS);
  t.shape[2] = columns;
  return t;
}
/* Heads [first, first + heads) of width `dim` of a token's D channels, as a view. */
static gd_tensor channels(int64_t tokens, int64_t first, int64_t heads, int64_t dim) {
  const char* const data = (const char*)convolved.data + (size_t)(first * dim) * number_bytes();
  gd_tensor t = TENSOR(data, number_type, 4, 1, tokens, heads, dim);
  t.stride[1] = D;
  t.stride[0] = D * tokens;
  return t;
}

/* The prompts of new requests, in one pack. State and conv state go to the first slot of a request's block: for the
 * next window that is as if one token of a window before had been accepted. */
static void prefill(Request** batch, int count) {
  gd_conv1d_args conv = GD_CONV1D_ARGS_INIT;
  gd_forward_args rule = GD_FORWARD_ARGS_INIT;
  gd_gated_norm_args norm = GD_GATED_NORM_ARGS_INIT;
  int n, t, tokens = 0;
  for (n = 0; n < count; ++n) {
    ints(offsets)[n] = tokens;
    ints(first_slots)[n] = batch[n]->block * WINDOW;
    for (t = 0; t < batch[n]->prompt; ++t) put_token(tokens++, true_token((int)(batch[n] - requests), t));
  }
  ints(offsets)[count] = tokens;
  upload_batch();

  conv.in = conv_inputs(tokens);
  conv.in.cu_seqlens = TENSOR(offsets.data, GD_I32, 1, count + 1);
  conv.out = TENSOR(convolved.data, number_type, 3, 1, tokens, D);
  conv.final_state = conv_pool(W - 1);
  conv.final_state_indices = TENSOR(first_slots.data, GD_I32, 1, count);
  RUN(conv1d, &conv);

  rule.in = rule_inputs(count, tokens);
  rule.in.q = channels(tokens, 0, HK, K);
  rule.in.k = channels(tokens, HK, HK, K);
  rule.in.v = channels(tokens, 2 * HK * K / V, HV, V);
  rule.out = TENSOR(o.data, number_type, 4, 1, tokens, HV, V);
  rule.final_state = state_pool();
  rule.final_state_indices = conv.final_state_indices;
  RUN(forward, &rule);

  norm.x = rule.out;
  norm.gate = TENSOR(rows.z.data, number_type, 4, 1, tokens, HV, V);
  norm.weight = TENSOR(norm_weight.data, number_type, 1, V);
  norm.out = TENSOR(y.data, number_type, 4, 1, tokens, HV, V);
  RUN(gated_norm, &norm);

  download(y);
  for (n = 0; n < count; ++n) {
    for (t = ints(offsets)[n]; t < ints(offsets)[n + 1]; ++t) keep_output(batch[n], t);
    batch[n]->kept = 1;
  }
}

/* One window of every running request, in one call: the token chosen last and what a drafter guesses after it. The
 * state after each token goes to a slot of its own, so rejected drafts need no undo: the next window starts from the
 * slot of the last token kept. With windows of one token this is plain decode. */
static void decode(Request** batch, int count) {
  gd_layer_step_args step = GD_LAYER_STEP_ARGS_INIT;
  int n, t, tokens = 0, drafts[BLOCKS][WINDOW];
  for (n = 0; n < count; ++n) {
    const int request = (int)(batch[n] - requests), left = batch[n]->length - batch[n]->done;
    const int wanted = 1 + (request + windows) % WINDOW, length = wanted < left ? wanted : left;
    ints(offsets)[n] = tokens;
    ints(lengths)[n] = batch[n]->kept;
    for (t = 0; t < WINDOW; ++t) ints(block_slots)[n * WINDOW + t] = batch[n]->block * WINDOW + t;
    for (t = 0; t < length; ++t) {
      const int token = true_token(request, batch[n]->done + t);
      /* The drafter is wrong about every third time; the first token of a window was chosen, not guessed. */
      drafts[n][t] = t > 0 && (batch[n]->done + t + request) % 3 == 0 ? (token + 1) % VOCAB : token;
      put_token(tokens++, drafts[n][t]);
    }
  }
  ints(offsets)[count] = tokens;
  upload_batch();

  step.conv.in = conv_inputs(tokens);
  step.conv.in.initial_state = conv_pool(CONV_COLUMNS);
  step.conv.final_state = step.conv.in.initial_state;
  step.rule.in = rule_inputs(count, tokens);
  step.rule.in.initial_state = state_pool();
  step.rule.in.initial_state_indices = TENSOR(block_slots.data, GD_I32, 2, count, WINDOW);
  step.rule.previous_accept_lengths = TENSOR(lengths.data, GD_I32, 1, count);
  step.rule.step_states = step.rule.in.initial_state;
  step.rule.step_indices = step.rule.in.initial_state_indices;
  step.norm.gate = TENSOR(rows.z.data, number_type, 4, 1, tokens, HV, V);
  step.norm.weight = TENSOR(norm_weight.data, number_type, 1, V);
  step.norm.out = TENSOR(y.data, number_type, 4, 1, tokens, HV, V);
  step.key_heads = HK;
  RUN(layer_step, &step);

  download(y);
  window_tokens += tokens;
  ++windows;
  for (n = 0; n < count; ++n) {
    const int begin = ints(offsets)[n], length = ints(offsets)[n + 1] - begin, request = (int)(batch[n] - requests);
    /* A token's output counts if the token is what the model chose after the one before. */
    for (t = 0; t < length && drafts[n][t] == true_token(request, batch[n]->done); ++t)
      keep_output(batch[n], begin + t);
    batch[n]->kept = t;
  }
}

static void serve(void) {
  Request *fresh[REQUESTS], *running[REQUESTS];
  int used[BLOCKS] = {0}, loop, i, block, finished = 0;
  for (loop = 0; finished < REQUESTS; ++loop) {
    int fresh_count = 0, count = 0;
    for (i = 0; i < REQUESTS; ++i) {
      Request* const r = &requests[i];
      if (r->block < 0 && r->done < r->length && r->arrives <= loop) { /* admit, where a block is free */
        for (block = 0; block < BLOCKS && used[block]; ++block) continue;
        if (block == BLOCKS) continue;
        used[block] = 1;
        r->block = block;
        r->y = malloc(sizeof(float) * (size_t)r->length * HV * V);
        if (!r->y) die("malloc", "no memory");
        fresh[fresh_count++] = r;
      }
    }
    if (fresh_count) prefill(fresh, fresh_count);
    for (i = 0; i < REQUESTS; ++i)
      if (requests[i].block >= 0 && requests[i].done < requests[i].length) running[count++] = &requests[i];
    if (count) decode(running, count);
    for (i = 0; i < REQUESTS; ++i)
      if (requests[i].block >= 0 && requests[i].done == requests[i].length) { /* its slots need no clearing */
        used[requests[i].block] = 0;
        requests[i].block = -1;
        ++finished;
      }
  }
}

int main(int argc, char** argv) {
  const char* const where = argc > 1 ? argv[1] : "cpu";
  double worst = 0, bound;
  int i, kept = 0;
  on_gpu = strcmp(where, "cuda") == 0;
  if (strcmp(where, "cpu") != 0) number_type = GD_BF16;
  if (!on_gpu && strcmp(where, "cpu") != 0 && strcmp(where, "cpu-bf16") != 0)
    die(where, "must be cpu, cpu-bf16 or cuda");
  load_library(argc > 2 ? argv[2] : "libgatedelta.so.0");
  if (on_gpu) load_driver();
  make_model();
  make_tensors();
  make_pools();
  serve();
  for (i = 0; i < REQUESTS; ++i) {
    worst = fmax(worst, error_of(i, requests[i].length, requests[i].y));
    kept += requests[i].length - requests[i].prompt;
    free(requests[i].y);
  }
  bound = number_type == GD_F32 ? 1e-5 : 2e-2; /* bf16 rounds between the three operations */
  printf("%d requests on %s over %d slots: %d windows of %d tokens, of which %d were kept; worst relative error %.1e\n",
         REQUESTS, where, SLOTS, windows, window_tokens, kept, worst);
  return worst < bound ? 0 : 1;
}
