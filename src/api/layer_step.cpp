// The layer's step: three operations of the C ABI with their intermediates in the workspace. All three are checked
// before the first one runs.
#include <algorithm>
#include <cctype>
#include <iterator>
#include <string_view>

#include "api/operation.hpp"
#include "api/validate/checker.hpp"
#include "cuda/backend.hpp"

namespace gatedelta::api {

namespace {

// The arguments of the three operations, complete.
struct Parts {
  gd_conv1d_args conv;
  gd_recurrent_args rule;
  gd_gated_norm_args norm;
  size_t intermediate_bytes;
};

size_t aligned_bytes(int64_t elements, int32_t dtype) {
  const auto bytes = static_cast<size_t>(elements * dtype_bytes(static_cast<gd_dtype>(dtype)));
  return (bytes + 63) / 64 * 64;
}

gd_status check_absent(const char* name, const gd_tensor& tensor, const char* why) {
  if (is_absent(tensor)) return GD_OK;
  return invalid("%s is given: %s", name, why);
}

// The shapes that say how the channels of x are divided. Everything else is checked with the operation it belongs to.
gd_status check_division(const gd_layer_step_args& args) {
  const gd_tensor &x = args.conv.in.x, &y = args.norm.out;
  if (is_absent(x)) return invalid("mixed_qkv is missing");
  if (x.dtype != GD_F32 && x.dtype != GD_BF16 && x.dtype != GD_F16)
    return invalid("mixed_qkv: dtype is %s, must be float32, bfloat16 or float16", dtype_name(x.dtype));
  if (x.rank != 3) return invalid("mixed_qkv: rank is %d, must be 3: [B, T, D]", x.rank);
  if (is_absent(y)) return invalid("out is missing");
  if (y.rank != 4) return invalid("out: rank is %d, must be 4: [B, T, Hv, V]", y.rank);
  const int64_t B = x.shape[0], T = x.shape[1], D = x.shape[2], Hv = y.shape[2], V = y.shape[3];
  constexpr int64_t kMost = int64_t{1} << 31;  // products of two sizes and a dtype stay below 2^63
  if (B < 0 || T < 0 || D < 0 || Hv < 0 || V < 0 || B >= kMost || T >= kMost || D >= kMost || Hv >= kMost ||
      V >= kMost || (B > 0 && T > (int64_t{1} << 60) / B / (D + Hv * V + 1)))
    return invalid("mixed_qkv or out: a size is negative or too large");
  if (args.key_heads <= 0)
    return invalid("key_heads is %lld, must be positive", static_cast<long long>(args.key_heads));
  const int64_t key_channels = D - Hv * V;
  if (key_channels <= 0 || args.key_heads > key_channels / 2 || key_channels % (2 * args.key_heads) != 0)
    return invalid("mixed_qkv has %lld channels, must have 2 key_heads K + Hv V = 2 * %lld * K + %lld * %lld",
                   static_cast<long long>(D), static_cast<long long>(args.key_heads), static_cast<long long>(Hv),
                   static_cast<long long>(V));
  return GD_OK;
}

gd_status check_intermediates(const gd_layer_step_args& args) {
  constexpr const char* kIntermediate = "it lies between the layer's operations and must be absent";
  constexpr const char* kShared = "the rule's serves the convolution, too, so this one must be absent";
  const gd_conv1d_args& conv = args.conv;
  GD_TRY(check_absent("conv.out", conv.out, kIntermediate));
  GD_TRY(check_absent("rule.in.q", args.rule.in.q, kIntermediate));
  GD_TRY(check_absent("rule.in.k", args.rule.in.k, kIntermediate));
  GD_TRY(check_absent("rule.in.v", args.rule.in.v, kIntermediate));
  GD_TRY(check_absent("rule.out", args.rule.out, kIntermediate));
  GD_TRY(check_absent("norm.x", args.norm.x, kIntermediate));
  GD_TRY(check_absent("conv.in.cu_seqlens", conv.in.cu_seqlens, kShared));
  GD_TRY(check_absent("conv.in.initial_state_indices", conv.in.initial_state_indices, kShared));
  GD_TRY(check_absent("conv.final_state_indices", conv.final_state_indices, kShared));
  GD_TRY(check_absent("conv.previous_accept_lengths", conv.previous_accept_lengths, kShared));
  if (conv.in.first_slot != 0) return invalid("conv.in.first_slot is given: %s", kShared);
  if (!is_absent(args.rule.accept_lengths))
    return refuse(GD_UNSUPPORTED,
                  "rule.accept_lengths is given: a layer's step has previous_accept_lengths alone, because "
                  "the conv state after some of the tokens is not stored");
  return GD_OK;
}

// [B, T, heads, size] from channel `first` of rows of `channels`.
gd_tensor view(const gd_tensor& x, char* rows, int64_t channels, int64_t first, int64_t heads, int64_t size) {
  gd_tensor t{};
  t.dtype = x.dtype;
  t.rank = 4;
  t.data = rows ? rows + first * dtype_bytes(static_cast<gd_dtype>(x.dtype)) : nullptr;
  const int64_t shape[] = {x.shape[0], x.shape[1], heads, size};
  const int64_t stride[] = {x.shape[1] * channels, channels, size, 1};
  std::copy(shape, shape + 4, t.shape);
  std::copy(stride, stride + 4, t.stride);
  return t;
}

// Slots of the conv states: those of the rule, and of a row of slots per draft window the first.
gd_tensor first_column(gd_tensor indices) {
  if (indices.rank == 2) indices.rank = 1;
  return indices;
}

gd_status complete(const gd_layer_step_args& args, char* workspace, Parts& parts) {
  GD_TRY(check_reserved("gd_layer_step_args", args.reserved));
  GD_TRY(check_intermediates(args));
  GD_TRY(check_division(args));
  const gd_tensor &x = args.conv.in.x, &y = args.norm.out;
  const int64_t rows = x.shape[0] * x.shape[1], D = x.shape[2], Hk = args.key_heads, Hv = y.shape[2], V = y.shape[3];
  const int64_t key_channels = (D - Hv * V) / 2;
  const size_t conv_bytes = aligned_bytes(rows * D, x.dtype), o_bytes = aligned_bytes(rows * Hv * V, x.dtype);
  char* const convolved = workspace;
  char* const outputs = workspace ? workspace + conv_bytes : nullptr;
  parts = {args.conv, args.rule, args.norm, conv_bytes + o_bytes};

  parts.conv.struct_size = sizeof parts.conv;
  parts.rule.struct_size = sizeof parts.rule;
  parts.norm.struct_size = sizeof parts.norm;
  parts.conv.exec = parts.rule.exec = parts.norm.exec = args.exec;
  if (workspace) {
    gd_exec& scratch = parts.conv.exec;  // the intermediates lie in front of it
    scratch.workspace = workspace + parts.intermediate_bytes;
    scratch.workspace_bytes -= parts.intermediate_bytes;
    parts.rule.exec = parts.norm.exec = scratch;
  }
  gd_inputs& in = parts.rule.in;
  parts.conv.in.cu_seqlens = in.cu_seqlens;
  parts.conv.previous_accept_lengths = args.rule.previous_accept_lengths;
  const gd_tensor slots = first_column(in.initial_state_indices);
  if (!is_absent(parts.conv.in.initial_state)) parts.conv.in.initial_state_indices = slots;
  if (!is_absent(parts.conv.final_state))
    parts.conv.final_state_indices = is_absent(args.rule.final_state_indices) ? slots : args.rule.final_state_indices;
  if (!is_absent(parts.conv.in.initial_state_indices) || !is_absent(parts.conv.final_state_indices))
    parts.conv.in.first_slot = in.first_slot;
  parts.conv.out = view(x, convolved, D, 0, D, 1);
  parts.conv.out.rank = 3;
  in.q = view(x, convolved, D, 0, Hk, key_channels / Hk);
  in.k = view(x, convolved, D, key_channels, Hk, key_channels / Hk);
  in.v = view(x, convolved, D, 2 * key_channels, Hv, V);
  parts.rule.out = parts.norm.x = view(x, outputs, Hv * V, 0, Hv, V);
  return GD_OK;
}

// What the layer calls the tensors of its operations, and what messages call them.
constexpr struct {
  std::string_view part, field, name;
} kLayerNames[] = {
    {"conv", "x", "mixed_qkv"},
    {"conv", "weight", "conv_weight"},
    {"conv", "bias", "conv_bias"},
    {"conv", "initial_state", "conv_state"},
    {"conv", "final_state", "conv_state"},
    {"conv", "initial_state_indices", "state_indices"},
    {"conv", "final_state_indices", "final_state_indices"},
    {"rule", "g", "a"},
    {"rule", "beta", "b"},
    {"rule", "initial_state", "state"},
    {"rule", "final_state", "state"},
    {"rule", "initial_state_indices", "state_indices"},
    {"rule", "final_state_indices", "final_state_indices"},
    {"norm", "gate", "z"},
    {"norm", "weight", "norm_weight"},
    {"norm", "out", "out"},
};

size_t word_length(std::string_view text) {
  const auto is_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; };
  return std::max<size_t>(std::ranges::find_if_not(text, is_word) - text.begin(), 1);
}

// A refusal by one of the operations, in the layer's names. Where it does not begin with one, it names the operation.
gd_status of_part(std::string_view part, gd_status status) {
  if (status == GD_OK) return GD_OK;
  char message[512];
  size_t size = 0;
  const auto append = [&](std::string_view text) { size += text.copy(message + size, sizeof message - 1 - size); };
  for (std::string_view rest = gd_last_error(); !rest.empty(); rest.remove_prefix(word_length(rest))) {
    const std::string_view word = rest.substr(0, word_length(rest));
    const auto known =
        std::ranges::find_if(kLayerNames, [&](const auto& n) { return n.part == part && n.field == word; });
    const bool found = known != std::end(kLayerNames);
    if (size == 0 && !found) append(part), append(": ");
    append(found ? known->name : word);
  }
  message[size] = 0;
  return refuse(status, "%s", message);
}

struct Calls {
  Call<Conv1dProblem> conv;
  Call<RecurrentProblem> rule;
  Call<GatedNormProblem> norm;
  size_t scratch_bytes;  // of each operation in turn
};

gd_status prepare_parts(const Parts& parts, Stage stage, Calls& calls) {
  GD_TRY(of_part("conv", prepare(kConv1d, &parts.conv, stage, calls.conv)));
  GD_TRY(of_part("rule", prepare(kRecurrent, &parts.rule, stage, calls.rule)));
  // Without a final state a sequence without a slot is a padded row of the convolution: it is one of the rule's, too,
  // also where the rule stores the states after each token.
  const bool conv_pads = calls.conv.problem.in.initial.indices && calls.conv.problem.final.indices;
  if (conv_pads && !calls.rule.problem.final) calls.rule.problem.pads_by_read_index = true;
  GD_TRY(of_part("norm", prepare(kGatedNorm, &parts.norm, stage, calls.norm)));
  calls.scratch_bytes = std::max({calls.conv.workspace_bytes, calls.rule.workspace_bytes, calls.norm.workspace_bytes});
  return GD_OK;
}

// Each operation has looked for overlaps of its own tensors; these are those of all three, and of the workspace.
gd_status check_overlaps(const gd_layer_step_args& args) {
  const gd_conv1d_args& conv = args.conv;
  const gd_recurrent_args& rule = args.rule;
  const gd_gated_norm_args& norm = args.norm;
  struct Place {
    const char* name;
    const gd_tensor& tensor;
    Role role = Role::input;
    bool may_share = false;
  };
  const Place places[] = {
      {"mixed_qkv", conv.in.x},
      {"conv_weight", conv.in.weight},
      {"conv_bias", conv.in.bias},
      {"conv_state", conv.in.initial_state, Role::input, true},
      {"conv_state", conv.final_state, Role::output, true},
      {"conv.step_states", conv.step_states, Role::output},
      {"a", rule.in.g},
      {"b", rule.in.beta},
      {"A_log", rule.in.A_log},
      {"dt_bias", rule.in.dt_bias},
      {"cu_seqlens", rule.in.cu_seqlens},
      {"state", rule.in.initial_state, Role::input, true},
      {"state_indices", rule.in.initial_state_indices},
      {"state", rule.final_state, Role::output, true},
      {"final_state_indices", rule.final_state_indices},
      {"step_states", rule.step_states, Role::output, true},
      {"step_indices", rule.step_indices},
      {"previous_accept_lengths", rule.previous_accept_lengths},
      {"z", norm.gate},
      {"norm_weight", norm.weight},
      {"out", norm.out, Role::output},
  };
  Checker check(Stage::call);
  for (const Place& place : places) {
    if (is_absent(place.tensor)) continue;
    const Shape any = {"", place.tensor.rank, {kAny, kAny, kAny, kAny, kAny}};
    GD_TRY(check.tensor(place.name, place.tensor, any, kFloats | kIntegers, 0, place.role, place.may_share));
  }
  return check.finish(args.exec);
}

template <class Problem>
gd_status check_contents(const Call<Problem>& call, char* scratch) {
  return validate_contents(call.problem, call.bitmap_bytes ? reinterpret_cast<uint64_t*>(scratch) : nullptr);
}

template <class Problem>
gd_status run_part(const Call<Problem>& call, const gd_exec& exec, char* scratch) {
  return report(call.backend->run(call.problem, exec, scratch + call.bitmap_bytes));
}

gd_status run_layer_step(const gd_layer_step_args* args) {
  GD_TRY(check_struct(args, "gd_layer_step_args"));
  GD_TRY(validate_exec(args->exec));
  Parts parts;
  Calls calls;
  char* const workspace = static_cast<char*>(args->exec.workspace);
  GD_TRY(complete(*args, nullptr, parts));
  // Without room for the intermediates the parts are judged by their shapes, and then the workspace is refused.
  const bool room = args->exec.workspace_bytes >= parts.intermediate_bytes &&
                    reinterpret_cast<uintptr_t>(workspace) % 64 == 0 && (workspace || parts.intermediate_bytes == 0);
  if (room) GD_TRY(complete(*args, workspace, parts));
  GD_TRY(prepare_parts(parts, room ? Stage::call : Stage::query, calls));
  GD_TRY(check_workspace(args->exec, parts.intermediate_bytes + calls.scratch_bytes));
  GD_TRY(check_overlaps(*args));

  char* const scratch = workspace + parts.intermediate_bytes;
  if (host_can_read(args->exec)) {
    GD_TRY(of_part("conv", check_contents(calls.conv, scratch)));
    GD_TRY(of_part("rule", check_contents(calls.rule, scratch)));
  }
  const Conv1dProblem& conv = calls.conv.problem;
  const RecurrentProblem& rule = calls.rule.problem;
  const GatedNormProblem& norm = calls.norm.problem;
  if (args->exec.device == GD_CUDA && cuda::supports_layer_step(conv, rule, norm))
    return report(cuda::layer_step(conv, rule, norm, {args->exec.device_index, args->exec.stream, scratch}));
  GD_TRY(run_part(calls.conv, args->exec, scratch));
  GD_TRY(run_part(calls.rule, args->exec, scratch));
  return run_part(calls.norm, args->exec, scratch);
}

}  // namespace

}  // namespace gatedelta::api

using namespace gatedelta::api;

gd_status gd_layer_step(const gd_layer_step_args* args) {
  return guarded([&] { return run_layer_step(args); });
}

gd_status gd_layer_step_workspace(const gd_layer_step_args* args, size_t* bytes) {
  return guarded([&] {
    GD_TRY(check_struct(args, "gd_layer_step_args"));
    GD_TRY(validate_exec(args->exec));
    Parts parts;
    Calls calls;
    GD_TRY(complete(*args, nullptr, parts));
    GD_TRY(prepare_parts(parts, Stage::query, calls));
    return answer(parts.intermediate_bytes + calls.scratch_bytes, bytes);
  });
}
