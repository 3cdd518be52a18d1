// How the CUDA forward would cut the sequences of a case, and why: what its scheduler decides.
#pragma once

#include <string>

#include "testing/generator.hpp"

namespace gatedelta::cli {

// `blocks`: multiprocessors of the device. Needs none.
std::string explain_plan(const testing::Case& c, int blocks);

}  // namespace gatedelta::cli
