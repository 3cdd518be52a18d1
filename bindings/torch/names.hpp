#pragma once

#include <string>
#include <string_view>

namespace gatedelta::binding {

// A message of the C library in the names the torch functions use: `final_state_indices` for `final_indices`.
std::string in_python_names(std::string_view message);

}  // namespace gatedelta::binding
