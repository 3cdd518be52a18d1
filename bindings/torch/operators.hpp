// What a file of operators gives to the registration in ops.cpp.
#pragma once

#include <cstring>
#include <span>
#include <string>

#include "shim.h"

namespace gatedelta::binding {

struct Operator {
  const char* schema;
  void (*kernel)(StableIValue*, uint64_t, uint64_t);

  std::string name() const { return std::string(schema, std::strchr(schema, '(')); }
};

std::span<const Operator> conv1d_operators();
std::span<const Operator> gated_norm_operators();
std::span<const Operator> layer_step_operators();

}  // namespace gatedelta::binding
