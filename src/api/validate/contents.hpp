#pragma once

#include "core/problem.hpp"

namespace gatedelta::api {

// cu_seqlens starts at 0, never decreases and ends within T.
gd_status check_offsets(const Sequences& sequences);
// Every index is below the number of slots.
gd_status check_range(const char* name, const IndexRows& indices, int64_t count, const char* pool, int64_t slots);
// Whether `checkpoints` has room for all of them. Their number depends on shapes alone, with packed sequences on the
// offsets.
gd_status check_checkpoint_count(const ForwardProblem& problem);

}  // namespace gatedelta::api
