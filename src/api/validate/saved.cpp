#include "api/validate/saved.hpp"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <span>

#include "core/names.hpp"

namespace gatedelta::api {

namespace {

struct Size {
  const char* name;
  int64_t gd_saved_call::*field;
};
constexpr Size kSizes[] = {
    {"B", &gd_saved_call::batch},      {"T", &gd_saved_call::tokens},       {"N", &gd_saved_call::sequences},
    {"Hk", &gd_saved_call::key_heads}, {"Hv", &gd_saved_call::value_heads}, {"K", &gd_saved_call::key_dim},
    {"V", &gd_saved_call::value_dim},
};

constexpr const char *kKernels[] = {"auto", "portable"}, *kGates[] = {"log", "raw"},
                     *kBetas[] = {"value", "logit", "logit_doubled"}, *kLayouts[] = {"KV", "VK"},
                     *kOrders[] = {"grouped", "tiled"};
struct Choice {
  const char* name;
  int32_t gd_saved_call::*field;
  std::span<const char* const> values;
};
constexpr Choice kChoices[] = {
    {"kernels", &gd_saved_call::kernels, kKernels},
    {"gate", &gd_saved_call::gate, kGates},
    {"beta_kind", &gd_saved_call::beta_kind, kBetas},
    {"state_layout", &gd_saved_call::state_layout, kLayouts},
    {"key_head_order", &gd_saved_call::key_head_order, kOrders},
};

struct Flag {
  const char* name;
  int32_t gd_saved_call::*field;
  bool of_prepared;  // acts on prepare's results, too
};
constexpr Flag kFlags[] = {
    {"cu_seqlens", &gd_saved_call::cu_seqlens, true},
    {"l2norm", &gd_saved_call::l2norm, true},
    {"dt_bias", &gd_saved_call::dt_bias, true},
    {"initial_state", &gd_saved_call::initial_state, false},
    {"batch_invariant", &gd_saved_call::batch_invariant, false},
};

// Two callers may write the default scale with other roundings.
constexpr float kScaleRounding = 1e-6f;

// "with T = 64", "without l2norm".
struct Trait {
  char text[64];
  Trait(const char* name, int64_t value) { std::snprintf(text, sizeof text, "with %s = %" PRId64, name, value); }
  Trait(const char* name, float value) {
    std::snprintf(text, sizeof text, "with %s = %.6g", name, static_cast<double>(value));
  }
  Trait(const char* name, const char* value) { std::snprintf(text, sizeof text, "with %s %s", name, value); }
  Trait(const char* name, bool given) { std::snprintf(text, sizeof text, "%s %s", given ? "with" : "without", name); }
};

template <class Value>
gd_status refuse_other(const char* name, Value saved, Value here) {
  return invalid("saved is of a call %s, but this one is %s: give it what a forward of its own inputs saved",
                 Trait(name, saved).text, Trait(name, here).text);
}

const char* value_name(const Choice& choice, int32_t value) {
  return value >= 0 && static_cast<size_t>(value) < choice.values.size() ? choice.values[static_cast<size_t>(value)]
                                                                         : "unknown";
}

}  // namespace

gd_saved_call saved_call_of(const Layer& layer, const gd_exec& exec, bool batch_invariant) {
  gd_saved_call call{};
  call.batch = layer.sequences.batch;
  call.tokens = layer.sequences.tokens;
  call.sequences = layer.sequences.count;
  call.key_heads = layer.key_heads;
  call.value_heads = layer.value_heads;
  call.key_dim = layer.key_dim;
  call.value_dim = layer.value_dim;
  call.device = exec.device;
  call.kernels = exec.kernels;
  call.dtype = layer.q.dtype;
  call.gate = layer.gate;
  call.beta_kind = layer.beta_kind;
  call.state_layout = layer.layout;
  call.l2norm = layer.l2norm;
  call.key_head_order = layer.tiled ? GD_KEY_HEADS_TILED : GD_KEY_HEADS_GROUPED;
  call.cu_seqlens = static_cast<bool>(layer.sequences.offsets);
  call.dt_bias = static_cast<bool>(layer.dt_bias);
  call.initial_state = static_cast<bool>(layer.initial);
  call.batch_invariant = batch_invariant;
  call.scale = layer.scale;
  return call;
}

gd_status check_saved_call(Stage stage, bool is_read, SavedPart part, const gd_saved_call& given,
                           const gd_saved_call& expected) {
  const char* const bytes = reinterpret_cast<const char*>(&given);
  if (std::all_of(bytes, bytes + sizeof given, [](char byte) { return byte == 0; })) {
    if (!is_read || stage == Stage::query) return GD_OK;
    return invalid("saved is given without saved_call, which says of which call it is: gd_forward_saved_call");
  }
  GD_TRY(check_reserved("saved_call", given.reserved, given.reserved_flags));
  for (const Size& size : kSizes)
    if (given.*size.field != expected.*size.field)
      return refuse_other(size.name, given.*size.field, expected.*size.field);
  if (given.device != expected.device)
    return refuse_other("device", device_name(given.device), device_name(expected.device));
  if (given.dtype != expected.dtype) return refuse_other("dtype", dtype_name(given.dtype), dtype_name(expected.dtype));
  for (const Choice& choice : kChoices)
    if (given.*choice.field != expected.*choice.field)
      return refuse_other(choice.name, value_name(choice, given.*choice.field),
                          value_name(choice, expected.*choice.field));
  for (const Flag& flag : kFlags)
    if ((part == SavedPart::all || flag.of_prepared) && (given.*flag.field != 0) != (expected.*flag.field != 0))
      return refuse_other(flag.name, given.*flag.field != 0, expected.*flag.field != 0);
  if (!(std::fabs(given.scale - expected.scale) <= kScaleRounding * std::fabs(expected.scale)))
    return refuse_other("scale", given.scale, expected.scale);
  return GD_OK;
}

}  // namespace gatedelta::api
