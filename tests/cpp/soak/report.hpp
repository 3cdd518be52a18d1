// What a soak found, for people and as JSON (results/SCHEMA.md).
#pragma once

#include <string>

#include "rounds.hpp"

namespace gatedelta::soak {

void print_summary(const Rounds& rounds, double seconds);
// For this the library looks at the machine, so no process may be forked afterwards.
void write_report(const std::string& path, const Setting& setting, const Rounds& rounds, double seconds);

}  // namespace gatedelta::soak
