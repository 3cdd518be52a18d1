// What a backend gives the API layer: one table of functions for each operation it has. src/api/c_api.cpp lists the
// tables of every operation; a call runs on the one of its device.
#pragma once

#include <cstddef>

#include "core/problem.hpp"

namespace gatedelta {

// GD_OK, or why a call is refused or has failed, with a message.
struct Outcome {
  gd_status status = GD_OK;
  char message[384] = "";
};
[[gnu::format(printf, 2, 3)]] Outcome refusal(gd_status status, const char* format, ...);

// One backend's implementation of one operation. Problems are valid: src/api has checked every rule that does not
// depend on the backend. A query's problem has shapes, types and strides, but no data pointers.
template <class Problem>
struct Backend {
  gd_device device;
  // GD_OK if this backend takes the problem; otherwise the message says what it would take. The answer depends on no
  // data and on no GPU, so a call is refused for the same reason with and without one.
  Outcome (*supports)(const Problem&, const gd_exec&);
  // Sizes of a supported problem, from shapes alone. They need neither a GPU nor a build with CUDA.
  size_t (*workspace_bytes)(const Problem&, const gd_exec&);
  size_t (*saved_bytes)(const Problem&, const gd_exec&);  // null: the operation has no `saved`
  // Runs a supported problem. `workspace` is 64-byte aligned and has workspace_bytes() bytes.
  Outcome (*run)(const Problem&, const gd_exec&, char* workspace);
};

}  // namespace gatedelta

// Leaves the function with the outcome of a rule that does not hold.
#define GD_CHECK(rule) \
  if (const Outcome outcome_ = (rule); outcome_.status != GD_OK) return outcome_
