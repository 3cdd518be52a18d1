/* C face of the test library: generator, fp64 truth, tolerance table and comparator, for tests in other languages.
 * Not installed, not part of the product. Built as the shared library gatedelta_testing, which does not need the
 * gatedelta library: it fills and reads the same argument structs.
 *
 * Functions that can fail return null, NaN or a negative number and leave a message in gdt_error().
 */
#ifndef GATEDELTA_TESTING_TRUTH_H
#define GATEDELTA_TESTING_TRUTH_H

#include <stdint.h>

#include "gatedelta/gatedelta.h"

#ifdef __cplusplus
extern "C" {
#endif

GD_API const char* gdt_error(void); /* of this thread */

/* ---- cases ------------------------------------------------------------------------------------------------------
 * A case is a line of text, "T=130 Hk=2 Hv=4 K=64 V=32 dtype=bf16 gate=strong ..."; keys in gdt_case_help().
 * "" is a legal case: everything has a default. */
typedef struct gdt_problem gdt_problem;

GD_API const char* gdt_case_help(void); /* one "key  meaning" per line */
GD_API gdt_problem* gdt_create(const char* spec);
GD_API void gdt_destroy(gdt_problem* problem);
GD_API const char* gdt_spec(const gdt_problem* problem); /* the case, normalised */

/* Argument structs over the problem's buffers, valid until gdt_destroy. Every tensor that the case asks for is there;
 * exec.workspace and saved are the caller's to set. Outputs hold NaN, so does everything that must not be read. */
GD_API gd_forward_args* gdt_forward_args(gdt_problem* problem);
GD_API gd_backward_args* gdt_backward_args(gdt_problem* problem);
GD_API gd_recurrent_args* gdt_recurrent_args(gdt_problem* problem);

GD_API void gdt_reset(gdt_problem* problem);               /* outputs NaN again, in-place states as at first */
GD_API const char* gdt_damage(const gdt_problem* problem); /* "" or what was written that must not be, by lines */

/* ---- truth ------------------------------------------------------------------------------------------------------
 * Output arrays are contiguous doubles in the logical shape of the tensor of the same name; null = not wanted.
 * States are one entry per sequence, [N, Hv, ., .] in the call's layout, also if the call uses a pool; checkpoints are
 * in packed order; step_states [B, T, Hv, ., .]. The args may be the problem's or the caller's own; their output
 * tensors are not touched. Returns 0, or -1. */
GD_API int gdt_reference_forward(const gd_forward_args* args, double* o, double* final_state, double* checkpoints);
GD_API int gdt_reference_backward(const gd_backward_args* args, double* dq, double* dk, double* dv, double* dg,
                                  double* dbeta, double* dA_log, double* d_dt_bias, double* d_initial_state);
GD_API int gdt_reference_recurrent(const gd_recurrent_args* args, double* o, double* final_state, double* step_states);

/* ---- judgement --------------------------------------------------------------------------------------------------
 * Tolerance of a quantity ("o", "final_state", "checkpoints", "step_states", "dq", "dk", "dv", "dg", "dbeta", "dA_log",
 * "d_dt_bias", "d_initial_state") stored as `stored`, for inputs of `dtype` on `isa` (GD_ISA_AUTO: the loosest;
 * for a recurrent call, which computes in fp32 everywhere, GD_ISA_GENERIC; GDT_CUDA for the CUDA backend).
 * `spec` is the case, or one of the same sizes that is as hard. Passes if, for each head,
 * |got - truth| <= relative |truth| + absolute sqrt(n) in L2 norms over the head's n values. Returns 0, or -1. */
#define GDT_CUDA 1000
GD_API int gdt_tolerance(const char* quantity, int32_t dtype, int32_t isa, int32_t stored, const char* spec,
                         double* relative, double* absolute);

typedef struct gdt_comparison {
  double error;       /* relative L2 of the worst head */
  double margin;      /* its error over its bound; passes at <= 1 */
  int64_t head;       /* which head that is */
  double max_abs;     /* largest difference of one value */
  int64_t non_finite; /* -1, or where one side is NaN or Inf and the other is not */
  int32_t ok;
  int32_t reserved;
} gdt_comparison;

/* Compares a tensor (any strides) with a truth array of its logical shape. head_axis: 2 for [B, T, H, ...], 1 for
 * states, 0 for vectors whose elements are each a head, -1: all of it is one head. Returns 0, or -1. */
GD_API int gdt_compare(const gd_tensor* got, const double* truth, int32_t head_axis, double relative, double absolute,
                       gdt_comparison* result);

#ifdef __cplusplus
}
#endif
#endif
