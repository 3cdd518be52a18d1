#include "names.hpp"

#include <cctype>
#include <string_view>

namespace gatedelta::binding {

namespace {

// What the C ABI calls a thing, and what the Python functions call it. gatedelta/_lib.py has the same table for numpy;
// tests/python/test_torch_messages.py compares them.
constexpr struct {
  std::string_view c, python;
} kNames[] = {
    {"initial_indices", "initial_state_indices"},
    {"final_indices", "final_state_indices"},
    {"o", "out"},
    {"d_o", "do"},
    {"d_final_state", "dht"},
    {"z", "gate"},
    {"y", "out"},
    {"d_y", "dy"},
    {"isa", "GATEDELTA_ISA"},
    // Of the layer's step, whose messages say which operation they are about.
    {"conv: x", "mixed_qkv"},
    {"conv: weight", "conv_weight"},
    {"conv: bias", "conv_bias"},
    {"conv: initial_state", "conv_state"},
    {"conv: final_state", "conv_state"},
    {"conv: initial_indices", "state_indices"},
    {"conv: final_indices", "final_state_indices"},
    {"rule: g", "a"},
    {"rule: beta", "b"},
    {"rule: initial_state", "state"},
    {"rule: final_state", "state"},
    {"rule: initial_indices", "state_indices"},
    {"norm: z", "z"},
    {"norm: weight", "norm_weight"},
    {"conv.in.x", "mixed_qkv"},
    {"conv.in.initial_state", "conv_state"},
    {"conv.final_state", "conv_state"},
    {"rule.in.initial_state", "state"},
    {"rule.final_state", "state"},
    {"rule.step_states", "step_states"},
    {"norm.z", "z"},
    {"norm.y", "out"},
    {"gate is not raw", "use_gate_in_kernel is not True"},
};

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

// Whether the text begins with these words, and with no longer one.
bool begins_with(std::string_view text, std::string_view words) {
  return text.starts_with(words) && (text.size() == words.size() || !is_word(text[words.size()]));
}

}  // namespace

std::string in_python_names(std::string_view message) {
  std::string result;
  while (!message.empty()) {
    size_t taken = 1;
    std::string_view python;
    if (is_word(message.front())) {
      while (taken < message.size() && is_word(message[taken])) ++taken;
      for (const auto& name : kNames) {
        if (!begins_with(message, name.c)) continue;
        taken = name.c.size();
        python = name.python;
      }
    }
    result += python.empty() ? message.substr(0, taken) : python;
    message.remove_prefix(taken);
  }
  return result;
}

}  // namespace gatedelta::binding
