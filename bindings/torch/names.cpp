#include "names.hpp"

#include <cctype>
#include <string_view>

namespace gatedelta::binding {

namespace {

// What the C ABI calls a thing, and what the torch functions call it. gatedelta/_lib.py has the argument names for
// numpy.
constexpr struct {
  std::string_view c, python;
} kNames[] = {
    {"initial_indices", "initial_state_indices"},
    {"final_indices", "final_state_indices"},
    {"o", "out"},
    {"d_o", "do"},
    {"d_final_state", "dht"},
    {"gate", "use_gate_in_kernel"},
    {"GD_GATE_RAW", "True"},
    {"isa", "GATEDELTA_ISA"},
    {"GD_CPU", "cpu"},
    {"GD_CUDA", "cuda"},
    {"gd_forward", "chunk_gated_delta_rule"},
    {"gd_backward", "chunk_gated_delta_rule_bwd"},
    {"gd_recurrent", "fused_recurrent_gated_delta_rule"},
};

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

std::string_view python_name(std::string_view word) {
  for (const auto& [c, python] : kNames) {
    if (c == word) return python;
  }
  return word;
}

}  // namespace

std::string in_python_names(const std::string& message) {
  std::string result;
  for (size_t begin = 0, end; begin < message.size(); begin = end) {
    end = begin + 1;
    if (!is_word(message[begin])) {
      result += message[begin];
      continue;
    }
    while (end < message.size() && is_word(message[end])) ++end;
    result += python_name(std::string_view(message).substr(begin, end - begin));
  }
  return result;
}

}  // namespace gatedelta::binding
