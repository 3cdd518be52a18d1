#pragma once

#include "core/problem.hpp"

namespace gatedelta::api {

// Whether `checkpoints` has room for all of them. Their number depends on shapes alone, with packed sequences on the
// offsets.
gd_status check_checkpoint_count(const ForwardProblem& problem);

}  // namespace gatedelta::api
