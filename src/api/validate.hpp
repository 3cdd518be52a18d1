// Every rule about arguments, each with its own message. Validation turns argument structs into problems
// (core/problem.hpp) in two steps: what shapes, strides and flags tell, and what offsets and indices hold. The second
// step is for the CPU: what lies in a device's memory is not read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.hpp"

namespace gatedelta::api {

// A query sees shapes alone: data pointers may be null and are not looked at.
enum class Stage { query, call };

gd_status validate_exec(const gd_exec& exec);

gd_status validate_shapes(const gd_forward_args& args, Stage stage, ForwardProblem& problem);
gd_status validate_shapes(const gd_backward_args& args, Stage stage, BackwardProblem& problem);
gd_status validate_shapes(const gd_recurrent_args& args, Stage stage, RecurrentProblem& problem);

// What the CUDA backend adds: of a forward whose shapes are right, what its kernels cannot do.
gd_status validate_cuda(Stage stage, const ForwardProblem& problem);
gd_status validate_cuda(Stage stage, const BackwardProblem& problem);

// Scratch memory validate_contents needs: one bit per slot of the largest pool that is written, when slots are given.
size_t slot_bitmap_bytes(const ForwardProblem& problem);
size_t slot_bitmap_bytes(const BackwardProblem& problem);
size_t slot_bitmap_bytes(const RecurrentProblem& problem);

gd_status validate_contents(const gd_forward_args& args, const ForwardProblem& problem, uint64_t* bitmap);
gd_status validate_contents(const gd_backward_args& args, const BackwardProblem& problem, uint64_t* bitmap);
gd_status validate_contents(const gd_recurrent_args& args, const RecurrentProblem& problem, uint64_t* bitmap);

}  // namespace gatedelta::api
