#pragma once

#include <string>

namespace gatedelta::binding {

// A message of the C library with the names the torch functions use: `final_state_indices` for `final_indices`,
// `use_gate_in_kernel is not True` for `gate is not GD_GATE_RAW`.
std::string in_python_names(const std::string& message);

}  // namespace gatedelta::binding
