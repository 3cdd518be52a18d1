/* GateDelta: Gated Delta Network linear attention, forward, backward and decode. C ABI (C99).
 *
 * The recurrence, per value head, with state S [K x V], alpha_t = exp(g_t):
 *     S  <- alpha_t S                       decay first
 *     e  =  v_t - S^T k_t                   the key reads the decayed state
 *     S  <- S + beta_t k_t e^T              write
 *     o_t = scale * S^T q_t                 read after write
 *
 * Rules that hold for every call:
 *   - Argument structs are plain data. Set struct_size (the *_INIT macros do) and leave unused fields zero.
 *   - The library allocates, prints and keeps nothing. Scratch memory is the caller's workspace; the *_workspace query
 *     gives its size from shapes alone. A query ignores data pointers, which may be null, and needs no GPU.
 *   - A call returns GD_OK, or another status with a message for this thread in gd_last_error(). A refused call has
 *     written no output (only the workspace, at most). After GD_INTERNAL outputs are undefined.
 *   - Outputs overlap neither each other nor inputs. State pools are the documented exception.
 *   - On CUDA a call launches kernels on the stream and returns; it waits for nothing and can be captured in a graph.
 *     Tensors and workspace are device memory. The contents of cu_seqlens and index tensors are not validated; bad
 *     values are undefined behaviour. Everything needs compute capability 8.0 or later, and the two summaries bf16 or
 *     fp16 (docs/api.md).
 *   - Strides are in elements. A tensor is absent when its dtype is GD_DTYPE_NONE (all-zero struct).
 *   - Results do not depend on the thread count and repeat bit for bit.
 */
#ifndef GATEDELTA_GATEDELTA_H
#define GATEDELTA_GATEDELTA_H

#include <stddef.h>
#include <stdint.h>

#define GD_VERSION_MAJOR 0
#define GD_VERSION_MINOR 1
#define GD_VERSION_PATCH 0
#define GD_ABI_VERSION 1

#if defined(_WIN32)
#define GD_API __declspec(dllexport)
#elif defined(__GNUC__)
#define GD_API __attribute__((visibility("default")))
#else
#define GD_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum gd_status {
  GD_OK = 0,
  GD_INVALID_ARGUMENT = 1,    /* a shape, stride, dtype, index or flag is wrong; the message says which */
  GD_UNSUPPORTED = 2,         /* legal, but not by this backend or build; the message says what is supported */
  GD_WORKSPACE_TOO_SMALL = 3, /* workspace or saved is smaller than its query says */
  GD_ABI_MISMATCH = 4,        /* struct_size does not belong to this library's ABI */
  GD_OUT_OF_RESOURCES = 5,    /* the system refused a thread or its memory (gd_thread_pool_create) */
  GD_INTERNAL = 6
} gd_status;

typedef enum gd_dtype { GD_DTYPE_NONE = 0, GD_F32 = 1, GD_BF16 = 2, GD_F16 = 3, GD_I32 = 4, GD_I64 = 5 } gd_dtype;

typedef enum gd_device { GD_CPU = 0, GD_CUDA = 1 } gd_device;

/* CPU instruction sets. GD_ISA_AUTO picks the best the machine has; any other value forces one, or is refused. */
typedef enum gd_isa {
  GD_ISA_AUTO = 0,
  GD_ISA_GENERIC = 1,
  GD_ISA_AVX2 = 2,
  GD_ISA_AVX512 = 3,
  GD_ISA_AVX512_BF16 = 4,
  GD_ISA_AMX = 5,
  GD_ISA_NEON = 6,
  GD_ISA_NEON_BF16 = 7,
  GD_ISA_COUNT = 8
} gd_isa;

/* CUDA kernels. GD_KERNELS_AUTO picks those made for the device; GD_KERNELS_PORTABLE forces those that run on every
 * device from compute capability 8.0 on. They differ in gd_forward, gd_backward and the summaries, of bf16 and fp16. */
typedef enum gd_kernels { GD_KERNELS_AUTO = 0, GD_KERNELS_PORTABLE = 1 } gd_kernels;

/* What `g` holds. */
typedef enum gd_gate {
  GD_GATE_LOG = 0, /* the natural-log decay itself, g <= 0 */
  GD_GATE_RAW = 1  /* raw `a`: g = -exp(A_log) * softplus(a + dt_bias), softplus(x) = x above 20 */
} gd_gate;

/* What `beta` holds. */
typedef enum gd_beta {
  GD_BETA_VALUE = 0,        /* beta itself, in [0, 2] */
  GD_BETA_LOGIT = 1,        /* sigmoid(beta) is used */
  GD_BETA_LOGIT_DOUBLED = 2 /* 2 * sigmoid(beta) is used (negative eigenvalues) */
} gd_beta;

/* Inner order of every state matrix of a call. With K = V no check can tell the two apart. */
typedef enum gd_state_layout { GD_STATE_KV = 0, GD_STATE_VK = 1 } gd_state_layout;

/* Which key head a value head uses, of Hk and Hv heads. With Hk = 1 or Hv = Hk the two are the same. */
typedef enum gd_key_head_order {
  GD_KEY_HEADS_GROUPED = 0, /* value head h uses key head h / (Hv/Hk): the value heads of a key head are neighbours */
  GD_KEY_HEADS_TILED = 1    /* value head h uses key head h % Hk, as in ggml */
} gd_key_head_order;

/* Cutting one sequence into segments that run in parallel on one GPU. */
typedef enum gd_context_parallel { GD_CP_AUTO = 0, GD_CP_OFF = 1 } gd_context_parallel;

#define GD_MAX_RANK 5
#define GD_CHUNK 64 /* tokens per chunk; checkpoints are multiples of it */

typedef struct gd_tensor {
  void* data;
  int32_t dtype; /* gd_dtype */
  int32_t rank;
  int64_t shape[GD_MAX_RANK];
  int64_t stride[GD_MAX_RANK]; /* in elements */
} gd_tensor;

/* Runs run(task, i) once for each i in [0, count), on any threads, and returns when all are done. */
typedef void (*gd_task_fn)(void* task, int64_t index);
typedef void (*gd_parallel_for_fn)(void* context, int64_t count, gd_task_fn run, void* task);

/* What the library chooses by itself, forced: for tests and tuning, and not part of the stable ABI. A value that cannot
 * act on the operation, the device or the kernels of a call is refused. */
typedef struct gd_tuning {
  size_t struct_size;
  int32_t segment_chunks;            /* gd_forward, gd_backward on CUDA: chunks of a segment; 0 = automatic */
  int32_t persistent_segment_chunks; /* gd_forward by Hopper's kernels, with segment_chunks: chunks of a segment in
                                        heads whose states persist; 0 = segment_chunks */
  int32_t segment_halves;            /* likewise, nonzero: two CTAs share a head, half of its value columns each */
  int32_t reserved_flags;
  uint64_t reserved[2];
} gd_tuning;

/* Where and with what a call runs. */
typedef struct gd_exec {
  int32_t device;       /* gd_device */
  int32_t device_index; /* CUDA ordinal; must be 0 on the CPU */
  void* stream;         /* cudaStream_t; must be null on the CPU */
  void* workspace;      /* caller-owned, 64-byte aligned, private to this call until it has finished */
  size_t workspace_bytes;
  int32_t isa;                     /* CPU: gd_isa; 0 on CUDA */
  int32_t num_threads;             /* CPU: 0 = every CPU of the process if parallel_for is set, otherwise 1 */
  gd_parallel_for_fn parallel_for; /* CPU: null = the calling thread does all the work */
  void* parallel_for_context;
  const gd_tuning* tuning; /* null: automatic */
  int32_t kernels;         /* CUDA: gd_kernels; 0 on the CPU */
  int32_t reserved_flags;
  uint64_t reserved[2];
} gd_exec;

/* The layer's inputs, common to all operations. N = number of sequences: B, or cu_seqlens' length - 1. */
typedef struct gd_inputs {
  gd_tensor q, k;          /* [B, T, Hk, K]  bf16, fp16 or fp32; last stride 1 */
  gd_tensor v;             /* [B, T, Hv, V]  dtype of q; Hv a multiple of Hk, see key_head_order */
  gd_tensor g;             /* [B, T, Hv]     fp32, bf16 or fp16; see gate */
  gd_tensor beta;          /* [B, T, Hv]     fp32, bf16 or fp16; see beta_kind */
  gd_tensor A_log;         /* [Hv]           GD_GATE_RAW only */
  gd_tensor dt_bias;       /* [Hv]           GD_GATE_RAW only, optional (absent = 0) */
  gd_tensor cu_seqlens;    /* [N + 1]        int32 or int64, optional: packed sequences, then B = 1 */
  gd_tensor initial_state; /* [N, Hv, K, V] or [N, Hv, V, K], optional (absent = 0); a pool [slots, ...] with indices */
  gd_tensor initial_state_indices; /* [N]      int32 or int64, optional: slot a sequence starts from; a null slot: it
                                      starts from zero, or is a padded row (see final_state_indices) */
  int32_t gate;                    /* gd_gate */
  int32_t beta_kind;               /* gd_beta */
  int32_t state_layout;            /* gd_state_layout, of every state tensor of the call */
  int32_t l2norm;                  /* nonzero: q and k are divided by sqrt(sum of squares + 1e-6) first */
  int32_t has_scale;               /* nonzero: `scale` is used as given, also 0; otherwise K^-1/2 */
  float scale;
  int64_t first_slot;     /* slots below it are null, in every index tensor of the call: they are neither read nor
                             written. 0: the negative ones; 1 where a pool's block 0 is null. Only with indices */
  int32_t key_head_order; /* gd_key_head_order. On CUDA gd_forward and gd_backward take only grouped ones */
  int32_t reserved_flags;
  uint64_t reserved[2];
} gd_inputs;

/* The call that `saved` is of: all that its contents depend on but the contents of the tensors. The memory itself may
 * be a GPU's, which the host cannot read without waiting for it, so this travels beside it: gd_forward_saved_call()
 * fills it in from a forward's arguments, and a call that reads `saved` takes both and refuses those of another call.
 * All zero: absent. */
typedef struct gd_saved_call {
  int64_t batch, tokens, sequences;                   /* B, T, N */
  int64_t key_heads, value_heads, key_dim, value_dim; /* Hk, Hv, K, V */
  int32_t device;                                     /* gd_device */
  int32_t kernels;                                    /* gd_kernels. Any isa reads what another one saved */
  int32_t dtype;                                      /* gd_dtype of q, k and v */
  int32_t gate, beta_kind, state_layout, l2norm;      /* as in gd_inputs */
  int32_t key_head_order;                             /* grouped where the two are the same */
  int32_t cu_seqlens, dt_bias, initial_state;         /* nonzero: given */
  int32_t batch_invariant;                            /* as in gd_forward_args */
  float scale;                                        /* the one used, also where none was given */
  int32_t reserved_flags;
  uint64_t reserved[2];
} gd_saved_call;

/* Chunked forward. */
typedef struct gd_forward_args {
  size_t struct_size;
  gd_exec exec;
  gd_inputs in;
  gd_tensor out;                 /* [B, T, Hv, V]  bf16, fp16 or fp32; 0 for tokens of no sequence */
  gd_tensor final_state;         /* [N, Hv, ., .]  optional; may be the very tensor initial_state is (in place) */
  gd_tensor final_state_indices; /* [N]            optional: slot each final state goes to, null = not stored.
                                    A sequence with a null slot in both initial_state_indices and
                                    final_state_indices is a padded row: it is not read, its rows of out are 0 and no
                                    state of it is stored */
  gd_tensor checkpoints;         /* [C, Hv, ., .]  optional: state after every checkpoint_every tokens of each sequence,
                                    packed sequence by sequence: sum of floor(length / checkpoint_every) entries */
  gd_tensor checkpoint_indices;  /* [C]            optional: slot of each packed entry, null = not stored */
  int64_t checkpoint_every;      /* a multiple of GD_CHUNK; checkpoints need this or checkpoint_offsets */
  void* saved;                   /* optional: for the backward, gd_forward_saved_size() bytes, 64-byte aligned; not with
                                    a padded row; on CUDA neither with checkpoints nor with both
                                    initial_state_indices and final_state_indices. In a query saved_bytes != 0 stands
                                    for the pointer */
  size_t saved_bytes;
  int32_t context_parallel; /* gd_context_parallel */
  int32_t batch_invariant;  /* nonzero: a sequence's bits do not depend on its neighbours */
  int32_t prepared;         /* nonzero: gd_summary of the same inputs wrote into this `saved`, of which saved_call says
                               the call; not with a padded row */
  int32_t reserved_flags;
  gd_tensor checkpoint_offsets; /* [N]            optional int32 or int64, instead of checkpoint_every: one state of
                                   each sequence, after this many of its tokens, a multiple of GD_CHUNK; 0 or less =
                                   none. checkpoints are [N, Hv, ., .], or a pool with checkpoint_indices [N] */
  gd_saved_call saved_call;     /* with prepared: of any forward of the summary's inputs, gd_forward_saved_call() */
  uint64_t reserved[4];
} gd_forward_args;

/* Chunked backward. Each gradient is optional (absent = not computed). */
typedef struct gd_backward_args {
  size_t struct_size;
  gd_exec exec;
  gd_inputs in;
  gd_tensor do_;     /* [B, T, Hv, V]  gradient of out; "do" in messages, but that is a keyword of C */
  gd_tensor dht;     /* [N, Hv, ., .]  optional: gradient of the final state (absent = 0); see dht_indices */
  const void* saved; /* what the forward of the same inputs and kernels saved, with its saved_call; null: the backward
                        recomputes it */
  size_t saved_bytes;
  gd_tensor dq, dk;          /* [B, T, Hk, K]  summed over the value heads of a group */
  gd_tensor dv;              /* [B, T, Hv, V] */
  gd_tensor dg;              /* [B, T, Hv]     gradient of `g` as given (of raw `a` with GD_GATE_RAW) */
  gd_tensor dbeta;           /* [B, T, Hv]     gradient of `beta` as given (of the logits with GD_BETA_LOGIT*) */
  gd_tensor dA_log;          /* [Hv]           GD_GATE_RAW only */
  gd_tensor d_dt_bias;       /* [Hv]           GD_GATE_RAW only */
  gd_tensor d_initial_state; /* [N, Hv, ., .]  one entry per sequence, also where initial_state is a pool; see
                                d_initial_state_indices */
  int32_t context_parallel;  /* this and the next as in gd_forward_args */
  int32_t batch_invariant;
  int32_t small_workspace; /* nonzero: less scratch memory, more time, the same bits; on CUDA it needs `saved`, bf16
                              or fp16 and on the portable kernels more than one key head */
  int32_t reserved_flags;
  gd_tensor dht_indices;             /* [N]     optional: row of dht, then [rows, Hv, ., .], of each sequence; below
                                        first_slot = its gradient is 0. Several sequences may read one row */
  gd_tensor d_initial_state_indices; /* [N]     optional: row of d_initial_state, then [rows, Hv, ., .], that each
                                        sequence's gradient goes to; below first_slot = not stored */
  gd_saved_call saved_call; /* of the forward that wrote `saved`: gd_forward_saved_call(). A query goes without */
  uint64_t reserved[4];
} gd_backward_args;

/* Context parallelism: one sequence over several calls, devices or machines (docs/context_parallel.md). The state
 * that a segment of a sequence ends with is affine in the one it begins with, and so are gradients, backwards:
 *     S_out = M S_in + S_loc          G_in = M^T G_out + G_loc
 * gd_summary gives S_loc and M of each segment, gd_merge the states at the boundaries between them, and gd_forward
 * computes each segment from there. Backwards, gd_backward_summary gives G_loc, gd_merge the gradients at the
 * boundaries, and gd_backward the rest. The caller moves data between devices. */

/* Summaries of sequences. M acts on states [K x V], in either state_layout. */
typedef struct gd_summary_args {
  size_t struct_size;
  gd_exec exec;
  gd_inputs in;           /* no initial_state. q may be absent: it and scale are not read, unless there is `saved` */
  gd_tensor local_state;  /* [n, Hv, ., .]  S_loc, the final state for an initial one of 0 */
  gd_tensor transition;   /* [n, Hv, K, K]  optional: M, float32; rows are those of the state after the sequence */
  gd_tensor fade;         /* [n, Hv]        optional: a bound of log2 |M|, float32; -inf where M is given as 0 */
  int64_t first_sequence; /* the n sequences summarised are those from here on, */
  int64_t sequence_count; /* so many; 0 = all that follow */
  int32_t skip_faded;     /* nonzero: of heads that fade, only the last chunks that matter are read, and M is 0. What
                             that leaves out of S_loc is below 2^-24 of the older state and of what was written since,
                             as where a sequence is cut on one GPU; M is below 2^-48. Needs transition or fade */
  int32_t prepared;       /* nonzero: an earlier call with the same inputs and `saved` has prepared it; needs its
                             saved_call */
  void* saved;            /* optional: gd_forward_saved_size() bytes that gd_forward of the same inputs will take with
                             `prepared`, so that a GPU prepares the inputs once; the CPU neither reads nor writes it */
  size_t saved_bytes;
  gd_saved_call saved_call; /* with prepared, as in gd_forward_args */
  uint64_t reserved[2];
} gd_summary_args;

/* Gradients of the states sequences begin with, as if their final states had none. */
typedef struct gd_backward_summary_args {
  size_t struct_size;
  gd_exec exec;
  gd_inputs in;      /* without v, which may be absent: it is not read. No initial_state */
  gd_tensor do_;     /* [B, T, Hv, V]  gradient of out */
  gd_tensor d_local; /* [n, Hv, ., .]  G_loc */
  const void* saved; /* optional: what the forward of the same inputs (and all sequences) saved. It spares the
                        GPU work; the CPU does not read it */
  size_t saved_bytes;
  int64_t first_sequence; /* this and the next as in gd_summary_args */
  int64_t sequence_count;
  int32_t skip_faded; /* nonzero: tokens behind which 2^-48 of a gradient is left at most are not read */
  int32_t reserved_flags;
  gd_saved_call saved_call; /* with saved, as in gd_backward_args; its initial_state is not compared */
  uint64_t reserved[4];
} gd_backward_summary_args;

/* Merges segments. The state after segments i = first[r] ... first[r] + count[r] - 1 in the order of time, from zero:
 *     S = 0;  for each i:  S <- M_i S + value_i;  state[r] = S
 * M of the first segment is ignored. Transposed, for gradients: M^T, from the last i to the first. float32 throughout,
 * to float32's accuracy. */
typedef struct gd_merge_args {
  size_t struct_size;
  gd_exec exec;
  gd_tensor values;      /* [P, Hv, ., .]  local states, or gradients; bf16, fp16 or fp32 */
  gd_tensor transitions; /* [P, Hv, K, K]  float32; M of each, not of its transpose */
  gd_tensor first;       /* [R]            int32 or int64, on the device */
  gd_tensor count;       /* [R]            0: the state is 0. On the CPU segments outside [0, P) are refused */
  gd_tensor state;       /* [R, Hv, ., .]  bf16, fp16 or fp32 */
  int32_t transposed;
  int32_t state_layout; /* gd_state_layout, of values and state */
  uint64_t reserved[4];
} gd_merge_args;

GD_API gd_status gd_summary(const gd_summary_args* args);
GD_API gd_status gd_summary_workspace(const gd_summary_args* args, size_t* bytes);
GD_API gd_status gd_backward_summary(const gd_backward_summary_args* args);
GD_API gd_status gd_backward_summary_workspace(const gd_backward_summary_args* args, size_t* bytes);
GD_API gd_status gd_merge(const gd_merge_args* args);
GD_API gd_status gd_merge_workspace(const gd_merge_args* args, size_t* bytes);

/* Recurrent steps: decode (T = 1) and draft verification (T = 2..8). Any T gives the right result. */
typedef struct gd_recurrent_args {
  size_t struct_size;
  gd_exec exec;
  gd_inputs in;
  gd_tensor out;                 /* [B, T, Hv, V]  optional: absent = only states are written (a commit) */
  gd_tensor final_state;         /* as in gd_forward_args; the same tensor as initial_state = in place */
  gd_tensor final_state_indices; /* as in gd_forward_args. In a call with neither final_state nor step_states, a null
                                    slot in initial_state_indices alone makes a padded row */
  gd_tensor accept_lengths; /* [N]            optional int32 or int64: the final state is the one after this many tokens
                               of the sequence (0 = the initial state); outputs are those of all tokens */
  gd_tensor step_states;    /* [B, T, Hv, ., .] optional: the state after each token; or a pool [slots, Hv, ., .] */
  gd_tensor step_indices;   /* [B, T]         with a pool: slot for the state after each token, null = not stored.
                               Packed sequences: [1, T], or [N, S], a row for each with the slots of its tokens */
  gd_tensor previous_accept_lengths; /* [N]   optional int32 or int64, with in.initial_state_indices [N, S]: how many
                                        tokens of its last draft a sequence accepted. It starts from the slot of the
                                        last one, column previous_accept_lengths - 1, the nearest where there is none */
  int32_t batch_invariant; /* nonzero: a sequence's bits depend neither on its neighbours nor, with fp32 states, on how
                              its tokens are spread over calls: draft verification has the bits of plain decode */
  int32_t reserved_flags;
  uint64_t reserved[4];
} gd_recurrent_args;

/* Causal depthwise convolution, what precedes the rule in a layer. Per channel, with W taps:
 *     out_t = act(bias + sum over i < W of weight[i] x_{t - W + 1 + i})
 * The inputs before a sequence's first one are those its state holds (without a state 0). A state [D, S] holds the last
 * S inputs of a sequence, the newest in column S - 1, whether or not there were as many (0 where there were not). */
typedef enum gd_conv1d_activation {
  GD_CONV1D_LINEAR = 0, /* act(z) = z */
  GD_CONV1D_SILU = 1    /* act(z) = z * sigmoid(z) */
} gd_conv1d_activation;

/* The inputs of the convolution and of its backward. N = number of sequences: B, or cu_seqlens' length - 1. Strides of
 * all tensors but indices are free. */
typedef struct gd_conv1d_inputs {
  gd_tensor x;                     /* [B, T, D]  bf16, fp16 or fp32; fast where channels or tokens are contiguous */
  gd_tensor weight;                /* [D, W]     bf16, fp16 or fp32; W from 2 to 4 */
  gd_tensor bias;                  /* [D]        optional (absent = 0) */
  gd_tensor cu_seqlens;            /* [N + 1]    int32 or int64, optional: packed sequences, then B = 1 */
  gd_tensor initial_state;         /* [N, D, S]  optional (absent = 0), S >= W - 1; a pool [slots, D, S] with indices */
  gd_tensor initial_state_indices; /* [N]      optional: slot a sequence starts from; below first_slot: it starts from
                                      zero, or is a padded row (see final_state_indices) */
  int64_t first_slot; /* slots below it are null, in every index tensor of the call: 0, or 1 where slot 0 is not
                         used. Indices may be negative in any case */
  int32_t activation; /* gd_conv1d_activation */
  int32_t reserved_flags;
  uint64_t reserved[4];
} gd_conv1d_inputs;

/* Prefill, decode and draft windows: any number of tokens. */
typedef struct gd_conv1d_args {
  size_t struct_size;
  gd_exec exec;
  gd_conv1d_inputs in;
  gd_tensor out;                 /* [B, T, D]  y; optional: absent = only states are written. 0 for tokens of no
                                    sequence */
  gd_tensor final_state;         /* [N, D, S]  optional; may be the very tensor initial_state is (in place). Its S need
                                    not be that of initial_state */
  gd_tensor final_state_indices; /* [N]        optional: slot each final state goes to, below first_slot = not stored.
                                    A sequence without a slot in both initial_state_indices and final_state_indices
                                    is a padded row: it is not read, its rows of out are 0 and no state of it is
                                    stored */
  gd_tensor previous_accept_lengths; /* [N]        optional int32 or int64, with initial_state: states of draft windows.
                                        Such a state holds, from column 0 on, the W - 2 inputs before a window and then
                                        all tokens of it, of which the first a = previous_accept_lengths[n] count, from
                                        1 to S - W + 2: the sequence goes on after column W - 3 + a. final_state gets
                                        this window in the same way, S >= W - 2 + its tokens; its other columns stay. An
                                        empty sequence's state is copied as it is. The state of a prefill is one of
                                        W - 1 columns, with a = 1 */
  gd_tensor step_states;             /* [B, T, D, W - 1] optional: the last W - 1 inputs after each token; left alone in
                                        padded rows and for tokens of no sequence */
  uint64_t reserved[4];
} gd_conv1d_args;

/* Backward of the convolution. Each gradient is optional (absent = not computed); y is computed again. */
typedef struct gd_conv1d_backward_args {
  size_t struct_size;
  gd_exec exec;
  gd_conv1d_inputs in;
  gd_tensor dy;              /* [B, T, D]  gradient of out */
  gd_tensor dht;             /* [N, D, S]  optional: gradient of the final state (absent = 0), never a pool */
  gd_tensor dx;              /* [B, T, D] */
  gd_tensor dweight;         /* [D, W] */
  gd_tensor dbias;           /* [D]        also without a bias */
  gd_tensor d_initial_state; /* [N, D, S]  never a pool: one entry per sequence; S is that of initial_state */
  uint64_t reserved[4];
} gd_conv1d_backward_args;

GD_API gd_status gd_conv1d(const gd_conv1d_args* args);
GD_API gd_status gd_conv1d_workspace(const gd_conv1d_args* args, size_t* bytes);
GD_API gd_status gd_conv1d_backward(const gd_conv1d_backward_args* args);
GD_API gd_status gd_conv1d_backward_workspace(const gd_conv1d_backward_args* args, size_t* bytes);

GD_API gd_status gd_forward(const gd_forward_args* args);
GD_API gd_status gd_forward_workspace(const gd_forward_args* args, size_t* bytes);
/* What a forward that saves has to hand on to its backward: how many bytes, and which call they are of. */
GD_API gd_status gd_forward_saved_size(const gd_forward_args* args, size_t* bytes);
GD_API gd_status gd_forward_saved_call(const gd_forward_args* args, gd_saved_call* saved_call);
GD_API gd_status gd_backward(const gd_backward_args* args);
GD_API gd_status gd_backward_workspace(const gd_backward_args* args, size_t* bytes);
GD_API gd_status gd_recurrent(const gd_recurrent_args* args);
GD_API gd_status gd_recurrent_workspace(const gd_recurrent_args* args, size_t* bytes);

/* Gated RMSNorm, what follows the rule in a layer: out = weight * x / sqrt(mean of x^2 over D + eps) * act(gate). */
typedef enum gd_norm_activation {
  GD_NORM_SILU = 0,   /* act(z) = z * sigmoid(z) */
  GD_NORM_SIGMOID = 1 /* act(z) = sigmoid(z) */
} gd_norm_activation;

typedef struct gd_gated_norm_args {
  size_t struct_size;
  gd_exec exec;
  gd_tensor x; /* [B, T, H, D]  bf16, fp16 or fp32, as each tensor here; last stride 1; D a multiple of 16, 16..512 */
  gd_tensor gate;            /* [B, T, H, D]  optional: absent = 1 instead of act(gate) */
  gd_tensor weight;          /* [D]           optional: absent = 1; contiguous */
  gd_tensor out;             /* [B, T, H, D] */
  int32_t activation;        /* gd_norm_activation, of gate */
  int32_t round_before_gate; /* nonzero: the normalised row is rounded to x's dtype, and so is its product with a weight
                                of that dtype, before the gate is applied; 0: only y is rounded */
  int32_t has_eps;           /* nonzero: `eps` is used as given, also 0; otherwise 1e-6 */
  float eps;
  uint64_t reserved[4];
} gd_gated_norm_args;

/* Its gradients, each optional (absent = not computed). The norm is computed again: the forward saves nothing. */
typedef struct gd_gated_norm_backward_args {
  size_t struct_size;
  gd_exec exec;
  gd_tensor x, gate, weight; /* as in the forward */
  gd_tensor dy;              /* [B, T, H, D]  gradient of out */
  gd_tensor dx, dgate;       /* [B, T, H, D] */
  gd_tensor dweight;         /* [D]           summed over all rows; contiguous */
  int32_t activation;        /* this and the next three as in the forward; gradients pass roundings unchanged */
  int32_t round_before_gate;
  int32_t has_eps;
  float eps;
  uint64_t reserved[4];
} gd_gated_norm_backward_args;

GD_API gd_status gd_gated_norm(const gd_gated_norm_args* args);
GD_API gd_status gd_gated_norm_workspace(const gd_gated_norm_args* args, size_t* bytes);
GD_API gd_status gd_gated_norm_backward(const gd_gated_norm_backward_args* args);
GD_API gd_status gd_gated_norm_backward_workspace(const gd_gated_norm_backward_args* args, size_t* bytes);

/* The layer's step as one call: convolution, rule and gated norm, for decode (T = 1) and draft windows.
 *     x = [q | k | v] -> convolution -> rule (l2norm, gates as rule.in says) -> norm.out
 * Fill the three structs as for three calls and leave out what lies between them: conv.out, rule.in.q, rule.in.k,
 * rule.in.v, rule.out and norm.x must be absent. The rule's cu_seqlens, initial_state_indices, final_state_indices,
 * first_slot and previous_accept_lengths serve the convolution, too, whose own must be absent; of initial_state_indices
 * [N, S] it takes the first column, and without final_state_indices it writes where it reads. struct_size and exec of
 * the three are not read. The results are those of three calls; where a kernel fuses them, the steps between are
 * rounded to x's dtype all the same.
 * Messages use the layer's own names: mixed_qkv is conv.in.x, conv_weight, conv_bias and conv_state are in conv; a, b,
 * state and state_indices are rule.in.g, rule.in.beta, the rule's states and rule.in.initial_state_indices; z,
 * norm_weight and out are norm.gate, norm.weight and norm.out. */
typedef struct gd_layer_step_args {
  size_t struct_size;
  gd_exec exec;
  gd_conv1d_args conv;     /* in.x [B, T, D]: channels of q, k and v side by side, D = 2 Hk K + Hv V */
  gd_recurrent_args rule;  /* accept_lengths must be absent */
  gd_gated_norm_args norm; /* out [B, T, Hv, V] */
  int64_t key_heads;       /* Hk */
  uint64_t reserved[4];
} gd_layer_step_args;

GD_API gd_status gd_layer_step(const gd_layer_step_args* args);
GD_API gd_status gd_layer_step_workspace(const gd_layer_step_args* args, size_t* bytes);

/* Version, build and machine. */
typedef struct gd_info {
  size_t struct_size;
  int32_t abi_version;
  int32_t version_major, version_minor, version_patch;
  int32_t cpu_isa_compiled; /* bit i set: gd_isa i is in this build */
  int32_t cpu_isa_usable;   /* bit i set: and this machine can run it */
  int32_t cpu_isa_best;     /* what GD_ISA_AUTO means here for bf16 inputs */
  int32_t cpu_count;        /* CPUs this process may run on */
  int32_t cuda_compiled;    /* 0: this build has no CUDA backend */
  int32_t cuda_devices;     /* devices of compute capability 8.0 or later, where every operation runs */
  uint64_t reserved[4];
} gd_info;

GD_API gd_status gd_get_info(gd_info* info);
GD_API const char* gd_isa_name(int32_t isa);         /* "amx", ...; null for an unknown value */
GD_API const char* gd_status_name(gd_status status); /* "GD_OK", ... */
/* Message of the last call of this thread that did not return GD_OK; valid until the thread's next failing call. */
GD_API const char* gd_last_error(void);

/* A thread pool for callers that have none: pass gd_thread_pool_parallel_for and the pool as exec.parallel_for and
 * exec.parallel_for_context. One call at a time may use a pool; calls from several threads queue up. A forked child has
 * none of the threads: there its parent's pools run everything on the calling thread, and destroy does nothing. */
typedef struct gd_thread_pool gd_thread_pool;
GD_API gd_status gd_thread_pool_create(int32_t num_threads, gd_thread_pool** pool); /* 0 = one per CPU */
GD_API void gd_thread_pool_destroy(gd_thread_pool* pool);
GD_API int32_t gd_thread_pool_size(const gd_thread_pool* pool);
GD_API void gd_thread_pool_parallel_for(void* pool, int64_t count, gd_task_fn run, void* task);

#ifdef __cplusplus
}
template <class Struct>
constexpr Struct gd_initial() {
  Struct initial{};
  initial.struct_size = sizeof(Struct);
  return initial;
}
#define GD_INITIAL(type) gd_initial<type>()
#else
#define GD_INITIAL(type) \
  { .struct_size = sizeof(type) }
#endif

/* gd_forward_args args = GD_FORWARD_ARGS_INIT; */
#define GD_FORWARD_ARGS_INIT GD_INITIAL(gd_forward_args)
#define GD_BACKWARD_ARGS_INIT GD_INITIAL(gd_backward_args)
#define GD_SUMMARY_ARGS_INIT GD_INITIAL(gd_summary_args)
#define GD_BACKWARD_SUMMARY_ARGS_INIT GD_INITIAL(gd_backward_summary_args)
#define GD_MERGE_ARGS_INIT GD_INITIAL(gd_merge_args)
#define GD_CONV1D_ARGS_INIT GD_INITIAL(gd_conv1d_args)
#define GD_CONV1D_BACKWARD_ARGS_INIT GD_INITIAL(gd_conv1d_backward_args)
#define GD_RECURRENT_ARGS_INIT GD_INITIAL(gd_recurrent_args)
#define GD_GATED_NORM_ARGS_INIT GD_INITIAL(gd_gated_norm_args)
#define GD_GATED_NORM_BACKWARD_ARGS_INIT GD_INITIAL(gd_gated_norm_backward_args)
#define GD_LAYER_STEP_ARGS_INIT GD_INITIAL(gd_layer_step_args)
#define GD_INFO_INIT GD_INITIAL(gd_info)
#define GD_TUNING_INIT GD_INITIAL(gd_tuning)

#endif
