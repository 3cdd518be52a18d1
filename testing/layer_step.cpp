#include "testing/layer_step.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "testing/number.hpp"
#include "testing/tolerance.hpp"

namespace gatedelta::testing {

namespace {

const char* dtype_text(gd_dtype dtype) { return dtype == GD_F32 ? "fp32" : dtype == GD_BF16 ? "bf16" : "fp16"; }

bool absent(const gd_tensor& t) { return t.dtype == GD_DTYPE_NONE; }

gd_tensor rows(const gd_tensor& x, void* data, int64_t row, int64_t first, int64_t heads, int64_t size) {
  gd_tensor t{};
  t.data = static_cast<char*>(data) + first * element_bytes(x.dtype);
  t.dtype = x.dtype;
  t.rank = 4;
  const int64_t shape[] = {x.shape[0], x.shape[1], heads, size}, stride[] = {x.shape[1] * row, row, size, 1};
  std::copy(shape, shape + 4, t.shape);
  std::copy(stride, stride + 4, t.stride);
  return t;
}

template <class Args>
std::string call(const char* name, Args args, gd_status (*query)(const Args*, size_t*), gd_status (*run)(const Args*),
                 gd_thread_pool* pool) {
  const auto refusal = [&] { return std::string(name) + ": " + gd_last_error(); };
  args.struct_size = sizeof args;
  args.exec = {};
  if (pool) {
    args.exec.parallel_for = gd_thread_pool_parallel_for;
    args.exec.parallel_for_context = pool;
    args.exec.num_threads = gd_thread_pool_size(pool);
  }
  if (query(&args, &args.exec.workspace_bytes) != GD_OK) return refusal();
  const Buffer workspace(args.exec.workspace_bytes);
  args.exec.workspace = workspace.data();
  if (run(&args) != GD_OK) return refusal();
  return workspace.guards_intact() ? "" : std::string(name) + " wrote outside of its workspace";
}

}  // namespace

int64_t LayerCase::longest() const { return lengths.empty() ? T : *std::max_element(lengths.begin(), lengths.end()); }

std::string LayerCase::text() const {
  std::string text = "B=" + std::to_string(B) + " T=" + std::to_string(T) + " lengths=";
  for (const int64_t length : lengths) text += std::to_string(length) + "+";
  text += " heads=" + std::to_string(Hk) + "/" + std::to_string(Hv) + " K=" + std::to_string(K) +
          " V=" + std::to_string(V) + " W=" + std::to_string(W) + " x=" + dtype_text(x) + " y=" + dtype_text(y) +
          " conv_state=" + dtype_text(conv_state) + " state=" + dtype_text(state);
  const std::pair<bool, const char*> flags[] = {{value_first, " value_first"},
                                                {conv_states, " conv_states"},
                                                {pool, " pool"},
                                                {tokens_first, " tokens_first"},
                                                {moves, " moves"},
                                                {drafts, " drafts"},
                                                {null_slot, " null_slot"},
                                                {tiled, " tiled"},
                                                {i64, " i64"},
                                                {bias, " bias"},
                                                {transformers, " transformers"}};
  for (const auto& [set, name] : flags) text += set ? name : "";
  return text + " seed=" + std::to_string(seed);
}

ThreeCalls::ThreeCalls(const gd_layer_step_args& step, void* convolved, void* o)
    : conv(step.conv), rule(step.rule), norm(step.norm) {
  const gd_tensor &x = step.conv.in.x, &y = step.norm.out;
  const int64_t D = x.shape[2], Hk = step.key_heads, Hv = y.shape[2], V = y.shape[3], keys = (D - Hv * V) / 2;
  conv.struct_size = sizeof conv;
  rule.struct_size = sizeof rule;
  norm.struct_size = sizeof norm;
  conv.exec = rule.exec = norm.exec = step.exec;
  conv.out = rows(x, convolved, D, 0, D, 1);
  conv.out.rank = 3;
  conv.in.cu_seqlens = rule.in.cu_seqlens;
  gd_tensor slots = rule.in.initial_state_indices;
  slots.rank = std::min(slots.rank, 1);  // the first column
  if (!absent(conv.in.initial_state)) {
    conv.in.initial_state_indices = slots;
    conv.previous_accept_lengths = rule.previous_accept_lengths;
    conv.in.first_slot = rule.in.first_slot;
  }
  if (!absent(conv.final_state))
    conv.final_state_indices = absent(rule.final_state_indices) ? slots : rule.final_state_indices;
  rule.in.q = rows(x, convolved, D, 0, Hk, keys / Hk);
  rule.in.k = rows(x, convolved, D, keys, Hk, keys / Hk);
  rule.in.v = rows(x, convolved, D, 2 * keys, Hv, V);
  rule.out = norm.x = rows(x, o, Hv * V, 0, Hv, V);
}

LayerProblem::LayerProblem(const LayerCase& c) : spec(c) {
  args.struct_size = sizeof args;
  const int64_t B = c.lengths.empty() ? c.B : 1;
  const int64_t T = c.lengths.empty() ? c.T : std::accumulate(c.lengths.begin(), c.lengths.end(), int64_t{0});
  const int64_t D = channels();
  args.key_heads = c.Hk;
  args.conv.in.x = make("x", c.x, {B, T, D}, c.tokens_first ? 24 : 0);
  args.conv.in.weight = make("conv.weight", c.x, {D, c.W});
  if (c.bias) args.conv.in.bias = make("conv.bias", c.x, {D});
  args.conv.in.activation = GD_CONV1D_SILU;
  args.rule.in.g = make("a", c.x, {B, T, c.Hv});
  args.rule.in.beta = make("b", c.x, {B, T, c.Hv});
  args.rule.in.A_log = make("A_log", GD_F32, {c.Hv});
  args.rule.in.dt_bias = make("dt_bias", c.x, {c.Hv});
  args.rule.in.gate = GD_GATE_RAW;
  args.rule.in.beta_kind = GD_BETA_LOGIT;
  args.rule.in.l2norm = 1;
  args.rule.in.key_head_order = c.tiled ? GD_KEY_HEADS_TILED : GD_KEY_HEADS_GROUPED;
  args.rule.in.state_layout = c.value_first ? GD_STATE_VK : GD_STATE_KV;
  args.norm.gate = make("z", c.x, {B, T, c.Hv, c.V});
  args.norm.weight = make("norm.weight", c.x, {c.V});
  args.norm.round_before_gate = c.transformers;
  fill(args.conv.in.x, 1);
  fill(args.conv.in.weight, 0.5);
  if (c.bias) fill(args.conv.in.bias, 0.2);
  for (const gd_tensor* t : {&args.rule.in.g, &args.rule.in.beta, &args.rule.in.A_log, &args.rule.in.dt_bias})
    fill(*t, 1);
  fill(args.norm.gate, 1);
  fill(args.norm.weight, 0.2, 1);
  if (!c.lengths.empty()) {
    std::vector<int64_t> offsets(1);
    for (const int64_t length : c.lengths) offsets.push_back(offsets.back() + length);
    args.rule.in.cu_seqlens = make_indices("cu_seqlens", offsets);
  }
  make_slots();
  args.norm.out = make("y", c.y, {B, T, c.Hv, c.V});
  entries_.back().computed = true;
  for (Entry& entry : entries_) entry.pristine.assign(entry.buffer.data(), entry.buffer.data() + entry.buffer.size());
}

// Slots of the sequences, in no order. With a pool the last one of several sequences is a padded row.
void LayerProblem::make_slots() {
  const LayerCase& c = spec;
  const int64_t N = c.sequences(), columns = c.drafts ? std::max<int64_t>(c.longest(), 1) : 1;
  if (!c.pool) {
    std::vector<int64_t> all(static_cast<size_t>(N));
    std::iota(all.begin(), all.end(), 0);
    return make_states(all);
  }
  const int64_t slots = 2 * N * columns + 5, null_index = c.null_slot ? 0 : -1;
  const auto slot = [&](int64_t i) { return 1 + (slots - 2 - i); };  // never 0
  const auto padded = [&](int64_t n) { return N > 1 && n == N - 1; };
  std::vector<int64_t> read, write, accepted, first;
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t s = 0; s < columns; ++s) read.push_back(padded(n) ? null_index : slot(n * columns + s));
    write.push_back(padded(n) ? null_index : slot((N + n) * columns));
    accepted.push_back(1 + static_cast<int64_t>(uniform(c.seed, 99, static_cast<uint64_t>(n)) * columns));
    first.push_back(read[static_cast<size_t>(n * columns + (c.drafts ? accepted.back() - 1 : 0))]);
  }
  args.rule.in.first_slot = c.null_slot;
  args.rule.in.initial_state_indices = make_indices("initial_state_indices", read, c.drafts ? columns : 0);
  if (c.drafts) {
    args.rule.step_indices = args.rule.in.initial_state_indices;
    args.rule.previous_accept_lengths = make_indices("previous_accept_lengths", accepted);
  } else if (c.moves) {
    args.rule.final_state_indices = make_indices("final_state_indices", write);
  } else {
    args.rule.final_state_indices = args.rule.in.initial_state_indices;
  }
  make_states(first);
  // The conv states of draft windows are in the first slot of each row, and end with the accepted tokens.
  if (c.drafts && c.conv_states) {
    gd_tensor& states = args.conv.in.initial_state;
    Entry& entry =
        *std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.name == "conv.state"; });
    entry.buffer.poison();
    for (int64_t n = 0; n < N; ++n) {
      if (padded(n)) continue;
      gd_tensor part = states;
      part.data = static_cast<char*>(states.data) +
                  read[static_cast<size_t>(n * columns)] * states.stride[0] * element_bytes(states.dtype);
      part.shape[0] = 1;
      part.shape[2] = c.W - 2 + accepted[static_cast<size_t>(n)];
      fill(part, 1);
    }
  }
  // Of a padded row only z is read, and gates a row of zeros. The rule on its own, where it stores the states of
  // drafts, has no padded rows: it reads the gates.
  for (gd_tensor* t : {&args.conv.in.x, &args.rule.in.g, &args.rule.in.beta}) {
    if (N < 2 || (c.drafts && t != &args.conv.in.x)) break;
    const bool packed = !c.lengths.empty();
    const int64_t begin = packed ? t->shape[1] - c.lengths.back() : 0;
    for (int64_t token = begin; token < t->shape[1]; ++token)
      for (int64_t i = 0; i < t->shape[2]; ++i)
        store(t->data, t->dtype, (packed ? 0 : N - 1) * t->stride[0] + token * t->stride[1] + i * t->stride[2],
              std::nan(""));
  }
}

// Filled in the slots that are read, NaN elsewhere.
void LayerProblem::make_states(const std::vector<int64_t>& read) {
  const LayerCase& c = spec;
  const int64_t N = c.sequences(), columns = c.drafts ? std::max<int64_t>(c.longest(), 1) : 1;
  const int64_t slots = c.pool ? 2 * N * columns + 5 : N;
  const auto fill_slots = [&](const gd_tensor& states, double scale) {
    for (const int64_t slot : read) {
      if (slot < args.rule.in.first_slot) continue;
      gd_tensor one = states;
      one.data = static_cast<char*>(states.data) + slot * states.stride[0] * element_bytes(states.dtype);
      one.shape[0] = 1;
      fill(one, scale);
    }
  };
  if (c.conv_states) {
    const int64_t width = c.drafts ? c.W - 2 + columns : c.W - 1;
    gd_tensor states = c.tokens_first ? make("conv.state", c.conv_state, {slots, width, channels()})
                                      : make("conv.state", c.conv_state, {slots, channels(), width});
    entries_.back().computed = true;
    if (c.tokens_first) {
      std::swap(states.shape[1], states.shape[2]);
      std::swap(states.stride[1], states.stride[2]);
    }
    fill_slots(states, 1);
    args.conv.in.initial_state = args.conv.final_state = states;
  }
  args.rule.in.initial_state =
      make("state", c.state, {slots, c.Hv, c.value_first ? c.V : c.K, c.value_first ? c.K : c.V}, c.pool ? 32 : 0);
  entries_.back().computed = true;
  fill_slots(args.rule.in.initial_state, 0.3);
  (c.drafts ? args.rule.step_states : args.rule.final_state) = args.rule.in.initial_state;
}

// Contiguous but for `gap` elements between the entries of the second dimension from the front (rows of tokens), or of
// the first one where the tensor has rank 4 (slots).
gd_tensor LayerProblem::make(const char* name, gd_dtype dtype, const std::vector<int64_t>& shape, int64_t gap) {
  gd_tensor t{};
  t.dtype = dtype;
  t.rank = static_cast<int32_t>(shape.size());
  const int gapped = t.rank == 4 ? 0 : 1;
  int64_t stride = 1;
  for (int d = t.rank - 1; d >= 0; --d) {
    if (d == gapped) stride += gap;
    t.shape[d] = shape[static_cast<size_t>(d)];
    t.stride[d] = stride;
    stride *= t.shape[d];
  }
  entries_.push_back({name, t, Buffer(static_cast<size_t>(stride * element_bytes(dtype))), {}});
  return entries_.back().tensor = (t.data = entries_.back().buffer.data(), t);
}

gd_tensor LayerProblem::make_indices(const char* name, const std::vector<int64_t>& values, int64_t columns) {
  const auto count = static_cast<int64_t>(values.size());
  const gd_tensor t = columns ? make(name, spec.i64 ? GD_I64 : GD_I32, {count / columns, columns})
                              : make(name, spec.i64 ? GD_I64 : GD_I32, {count});
  for (int64_t i = 0; i < count; ++i) store(t.data, t.dtype, i, static_cast<double>(values[static_cast<size_t>(i)]));
  return t;
}

void LayerProblem::fill(const gd_tensor& t, double scale, double mean) {
  ++stream_;
  uint64_t index = 0;
  const auto walk = [&](const auto& self, int d, int64_t offset) -> void {
    if (d == t.rank || d == GD_MAX_RANK)
      return store(t.data, t.dtype, offset, mean + scale * normal(spec.seed, stream_, index++));
    for (int64_t i = 0; i < t.shape[d]; ++i) self(self, d + 1, offset + i * t.stride[d]);
  };
  walk(walk, 0, 0);
}

void LayerProblem::reset() {
  for (Entry& entry : entries_) std::copy(entry.pristine.begin(), entry.pristine.end(), entry.buffer.data());
}

LayerProblem::Bytes LayerProblem::bytes() const {
  Bytes all;
  for (const Entry& entry : entries_) all.emplace_back(entry.buffer.data(), entry.buffer.data() + entry.buffer.size());
  return all;
}

bool LayerProblem::guards_intact() const {
  return std::all_of(entries_.begin(), entries_.end(), [](const Entry& entry) { return entry.buffer.guards_intact(); });
}

std::string LayerProblem::difference(const Bytes& got, const Bytes& expected) const {
  size_t i = 0;
  for (const Entry& entry : entries_) {
    const std::vector<char>&a = got[i], &b = expected[i++];
    if (a == b) continue;
    if (!entry.computed) return entry.name + " was written to";
    const int32_t dtype = entry.tensor.dtype;
    double error = 0, size = 0;
    for (int64_t j = 0; j < static_cast<int64_t>(b.size()) / element_bytes(dtype); ++j) {
      const double x = load(a.data(), dtype, j), y = load(b.data(), dtype, j);
      if (std::isfinite(x) != std::isfinite(y))
        return entry.name + "[" + std::to_string(j) + "] is " + std::to_string(x);
      if (!std::isfinite(y)) continue;
      error += (x - y) * (x - y);
      size += y * y;
    }
    // What lies between the operations is rounded to x's dtype.
    const double bound =
        std::hypot(fp32_tolerance(spec.x).relative, fp32_tolerance(static_cast<gd_dtype>(dtype)).relative);
    if (error > bound * bound * size)
      return entry.name + " is off by " + std::to_string(std::sqrt(error / size)) + ", more than " +
             std::to_string(bound);
  }
  return "";
}

std::string run_layer_step(const gd_layer_step_args& args, gd_thread_pool* pool) {
  return call("gd_layer_step", args, gd_layer_step_workspace, gd_layer_step, pool);
}

std::string run_three_calls(const gd_layer_step_args& args, gd_thread_pool* pool) {
  const int64_t bytes = element_bytes(args.conv.in.x.dtype), tokens = args.conv.in.x.shape[0] * args.conv.in.x.shape[1];
  const Buffer convolved(static_cast<size_t>(tokens * args.conv.in.x.shape[2] * bytes));
  const Buffer o(static_cast<size_t>(element_count(args.norm.out) * bytes));
  const ThreeCalls calls(args, convolved.data(), o.data());
  std::string error = call("gd_conv1d", calls.conv, gd_conv1d_workspace, gd_conv1d, pool);
  if (error.empty()) error = call("gd_recurrent", calls.rule, gd_recurrent_workspace, gd_recurrent, pool);
  if (error.empty()) error = call("gd_gated_norm", calls.norm, gd_gated_norm_workspace, gd_gated_norm, pool);
  return error;
}

std::vector<LayerCase> layer_cases() {
  std::vector<LayerCase> cases;
  for (const int64_t size : {int64_t{32}, int64_t{128}}) {
    for (const gd_dtype x : {GD_F32, GD_BF16, GD_F16}) {
      const gd_dtype state = x == GD_F16 ? GD_BF16 : GD_F32;
      const LayerCase base = {
          .Hk = 2, .Hv = 4, .K = size, .V = size, .x = x, .y = x, .conv_state = x, .state = state, .value_first = true};
      const auto add = [&](auto change) {
        cases.push_back(base);
        change(cases.back());
        cases.back().seed = cases.size();
      };
      add([](LayerCase&) {});
      add([](LayerCase& c) { c.B = 1; });
      add([](LayerCase& c) { c.B = 9, c.tokens_first = true, c.null_slot = true; });
      add([](LayerCase& c) { c.moves = true, c.i64 = true, c.value_first = false; });
      add([](LayerCase& c) { c.pool = false, c.T = 2, c.bias = false; });
      add([](LayerCase& c) { c.conv_states = false, c.T = 3; });
      add([](LayerCase& c) { c.T = 3, c.drafts = true; });
      add([](LayerCase& c) {
        c.T = 4, c.drafts = true, c.null_slot = true, c.tokens_first = true, c.transformers = true;
      });
      add([](LayerCase& c) { c.lengths = {2, 1, 0, 3, 1}; });
      add([](LayerCase& c) { c.lengths = {1, 1, 1, 1}, c.null_slot = true, c.Hv = 2; });
      add([](LayerCase& c) { c.lengths = {2, 4, 0, 1, 3}, c.drafts = true; });
      add([](LayerCase& c) { c.state = GD_BF16, c.conv_state = GD_F32, c.y = GD_F32, c.Hv = 6, c.W = 3; });
      add([](LayerCase& c) { c.W = 2, c.T = 5; });
      add([](LayerCase& c) { c.tiled = true, c.Hv = 6; });
    }
  }
  return cases;
}

}  // namespace gatedelta::testing
