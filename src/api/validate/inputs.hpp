#pragma once

#include <initializer_list>

#include "api/validate/checker.hpp"

namespace gatedelta::api {

// K or V.
gd_status check_head_dim(const char* name, int64_t size);
// `picked`: initial_state_indices is [N, S], and previous_accept_lengths picks a column for each sequence.
gd_status validate_layer(Checker& check, const gd_inputs& in, Layer& layer, bool picked = false);
// first_slot acts on indices alone, so there must be some.
gd_status check_first_slot(const Layer& layer, std::initializer_list<const StateRows*> others);

}  // namespace gatedelta::api
