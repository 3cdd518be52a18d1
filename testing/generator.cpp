#include "testing/generator.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "testing/contents.hpp"
#include "testing/number.hpp"

namespace gatedelta::testing {

// ---- numbers ------------------------------------------------------------------------------------------------------

namespace {

uint64_t mix(uint64_t x) {  // splitmix64's finaliser
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

uint64_t bits_at(uint64_t seed, uint64_t stream, uint64_t index) {
  const uint64_t key = mix(seed * 0x9e3779b97f4a7c15 + stream + 1);
  return mix(key + index * 0x9e3779b97f4a7c15);
}

double uniform(uint64_t seed, uint64_t stream, uint64_t index) {
  return static_cast<double>(bits_at(seed, stream, index) >> 11) * 0x1p-53;
}

// Sum of twelve 16-bit uniforms: integer arithmetic alone, so every machine and every libm gives the same bits.
double normal(uint64_t seed, uint64_t stream, uint64_t index) {
  int64_t sum = 0;
  for (uint64_t part = 0; part < 3; ++part) {
    const uint64_t word = bits_at(seed, stream, index * 3 + part);
    sum += (word & 0xffff) + ((word >> 16) & 0xffff) + ((word >> 32) & 0xffff) + (word >> 48);
  }
  return static_cast<double>(sum - 6 * 65535) * (1.0 / 65536);
}

// ---- buffers ------------------------------------------------------------------------------------------------------

namespace {
constexpr size_t kGuard = 4096;
}  // namespace

Buffer::Buffer(size_t bytes, size_t misalign) : storage_(bytes + 2 * kGuard + 64 + misalign, kPoison), size_(bytes) {
  const auto address = reinterpret_cast<uintptr_t>(storage_.data());
  begin_ = kGuard + (64 - (address + kGuard) % 64) % 64 + misalign;
}

void Buffer::poison() { std::memset(data(), kPoison, size_); }

bool Buffer::guards_intact() const {
  const auto poisoned = [](char c) { return c == kPoison; };
  const auto payload = storage_.begin() + static_cast<std::ptrdiff_t>(begin_);
  return std::all_of(storage_.begin(), payload, poisoned) &&
         std::all_of(payload + static_cast<std::ptrdiff_t>(size_), storage_.end(), poisoned);
}

// ---- a problem ----------------------------------------------------------------------------------------------------

namespace {

gd_tensor describe_tensor(gd_dtype dtype, const std::vector<int64_t>& shape, const std::vector<int64_t>& stride) {
  gd_tensor t{};
  t.dtype = dtype;
  t.rank = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape);
  std::copy(stride.begin(), stride.end(), t.stride);
  return t;
}

// Contiguous; or, strided, with gaps between everything but the `inner` innermost axes. Gates [B, T, H] of a strided
// case are stored head first.
std::vector<int64_t> choose_strides(const std::vector<int64_t>& shape, bool strided, int inner) {
  const int rank = static_cast<int>(shape.size());
  if (strided && rank == 3) return {shape[2] * (shape[1] + 3) + 5, 1, shape[1] + 3};
  std::vector<int64_t> stride(rank);
  int64_t step = 1;
  for (int axis = rank - 1; axis >= 0; --axis) {
    stride[axis] = step;
    step *= std::max<int64_t>(shape[axis], 1);
    if (strided && axis <= rank - inner) step += 8 * (axis + 1);
  }
  return stride;
}

int64_t extent(const gd_tensor& t) {  // elements from the first to the last, inclusive
  int64_t last = 0;
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] == 0) return 0;
    last += (t.shape[i] - 1) * t.stride[i];
  }
  return last + 1;
}

constexpr int kNoSuchSlot = 1 << 30;

}  // namespace

gd_tensor Problem::make(const std::string& name, Role role, gd_dtype dtype, const std::vector<int64_t>& shape) {
  const bool vector = shape.size() == 1;
  const bool state =
      name.find("state") != name.npos || name == "checkpoints" || name == "dht";  // each matrix is contiguous
  const auto stride = choose_strides(shape, spec.strided && !vector, state ? 2 : 1);
  Entry e{name, describe_tensor(dtype, shape, stride), role, {}, 0, {}, {}};
  // A strided case also starts at the element's own alignment, not at the allocator's.
  const size_t bytes = static_cast<size_t>(extent(e.tensor) * element_bytes(dtype));
  e.buffer = Buffer(bytes, spec.strided ? static_cast<size_t>(element_bytes(dtype)) : 0);
  e.tensor.data = e.buffer.data();
  entries_.push_back(std::move(e));
  return entries_.back().tensor;
}

gd_tensor Problem::make_indices(const std::string& name, const std::vector<int64_t>& values, int64_t columns) {
  const auto count = static_cast<int64_t>(values.size());
  const std::vector<int64_t> shape = columns ? std::vector{count / columns, columns} : std::vector{count};
  std::vector<int64_t> stride = columns ? std::vector{columns, int64_t{1}} : std::vector{int64_t{1}};
  if (spec.strided && name != "cu_seqlens")
    stride = columns ? std::vector{2 * columns + 3, int64_t{2}} : std::vector{int64_t{3}};
  Entry e{name, describe_tensor(spec.i64 ? GD_I64 : GD_I32, shape, stride), Role::input, {}, 0, {}, {}};
  const int64_t size = extent(e.tensor);
  e.buffer = Buffer(static_cast<size_t>(size * element_bytes(e.tensor.dtype)));
  e.tensor.data = e.buffer.data();
  // Elements between strides name a slot that no pool has.
  for (int64_t i = 0; i < size; ++i) store(e.tensor.data, e.tensor.dtype, i, kNoSuchSlot);
  for_each_element(e.tensor, [&](int64_t offset, int64_t i) {
    store(e.tensor.data, e.tensor.dtype, offset, double(values[static_cast<size_t>(i)]));
  });
  entries_.push_back(std::move(e));
  return entries_.back().tensor;
}

Problem::Entry& Problem::entry(const gd_tensor& t) {
  return *std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.tensor.data == t.data; });
}

std::vector<int64_t> Problem::matrices(std::vector<int64_t> outer) const {
  const Case& c = spec;
  outer.insert(outer.end(), {c.Hv, c.layout == GD_STATE_KV ? c.K : c.V, c.layout == GD_STATE_KV ? c.V : c.K});
  return outer;
}
std::vector<int64_t> Problem::named(const std::vector<int64_t>& indices) const {
  std::vector<int64_t> result;
  std::copy_if(indices.begin(), indices.end(), std::back_inserter(result),
               [&](int64_t i) { return i >= spec.first_slot && i != kNoSuchSlot; });
  return result;
}

gd_inputs Problem::make_inputs() {
  const Case& c = spec;
  const int64_t B = c.B, T = c.total_tokens(), N = c.sequences();
  gd_inputs in{};
  in.q = make("q", Role::input, c.dtype, {B, T, c.Hk, c.K});
  in.k = make("k", Role::input, c.dtype, {B, T, c.Hk, c.K});
  in.v = make("v", Role::input, c.dtype, {B, T, c.Hv, c.V});
  in.g = make("g", Role::input, c.gdtype, {B, T, c.Hv});
  in.beta = make("beta", Role::input, c.gdtype, {B, T, c.Hv});
  if (c.gate == GateKind::raw) {
    in.gate = GD_GATE_RAW;
    in.A_log = make("A_log", Role::input, GD_F32, {c.Hv});
    if (c.dt_bias) in.dt_bias = make("dt_bias", Role::input, GD_F32, {c.Hv});
  }
  in.beta_kind = c.beta == BetaKind::logit           ? GD_BETA_LOGIT
                 : c.beta == BetaKind::logit_doubled ? GD_BETA_LOGIT_DOUBLED
                                                     : GD_BETA_VALUE;
  in.state_layout = c.layout;
  in.l2norm = c.l2norm;
  in.key_head_order = c.tiled ? GD_KEY_HEADS_TILED : GD_KEY_HEADS_GROUPED;
  in.has_scale = c.scale.has_value();
  in.scale = c.scale.value_or(0);
  if (!c.lengths.empty()) {
    std::vector<int64_t> offsets(N + 1, 0);
    std::partial_sum(c.lengths.begin(), c.lengths.end(), offsets.begin() + 1);
    in.cu_seqlens = make_indices("cu_seqlens", offsets);
  }
  fill_inputs(in);
  return in;
}

Problem::Slots Problem::choose_slots() const {
  const Case& c = spec;
  const int64_t N = c.sequences(), first = c.first_slot;
  Slots slots;
  // Pools have twice the slots needed and three more, in a scrambled order, after the null slots; what no index
  // names stays NaN.
  slots.count = c.pool ? first + 2 * N + 3 : N;
  std::vector<int64_t>& scrambled = slots.scrambled;
  scrambled.resize(slots.count - first);
  std::iota(scrambled.begin(), scrambled.end(), first);
  if (c.pool) {
    std::sort(scrambled.begin(), scrambled.end(), [&](int64_t a, int64_t b) {
      return bits_at(c.seed, sSlots, static_cast<uint64_t>(a)) < bits_at(c.seed, sSlots, static_cast<uint64_t>(b));
    });
  }
  slots.read.assign(scrambled.begin(), scrambled.begin() + N);
  slots.write = slots.read;
  if (c.pool && !c.inplace) slots.write.assign(scrambled.begin() + N, scrambled.begin() + 2 * N);
  if (c.pool) {  // of every five sequences one starts from zero, one is not stored, one is a padded row
    for (int64_t n = 0; n < N; ++n) {
      if (n % 5 == 1 || n % 5 == 4) slots.read[n] = n % 5 == 1 ? first - 1 : -7;
      if (n % 5 == 2 || n % 5 == 4) slots.write[n] = n % 5 == 2 ? -1 : first - 1;
    }
  }
  return slots;
}

void Problem::make_checkpoints(const Slots& slots) {
  const Case& c = spec;
  const int64_t T = c.total_tokens(), N = c.sequences(), first = c.first_slot;
  if (c.every > 0) {
    int64_t count = 0;
    for (int64_t n = 0; n < N; ++n) count += (c.lengths.empty() ? T : c.lengths[n]) / c.every;
    std::vector<int64_t> place(count);
    for (int64_t i = 0; i < count; ++i) place[i] = c.pool ? (i % 4 == 3 ? first - 1 : first + count + 1 - i) : i;
    forward.checkpoints = make("checkpoints", Role::pool, c.state, matrices({c.pool ? first + count + 2 : count}));
    if (c.pool) forward.checkpoint_indices = make_indices("checkpoint_indices", place);
    entry(forward.checkpoints).written_slots = named(place);
    forward.checkpoint_every = c.every;
  }
  if (c.offsets) {  // of every four sequences one has none; the others anywhere, often after the last whole chunk
    std::vector<int64_t> offset(N), place(N), written;
    for (int64_t n = 0; n < N; ++n) {
      const int64_t chunks = (c.lengths.empty() ? T : c.lengths[n]) / 64;
      const auto random = static_cast<int64_t>(bits_at(c.seed, sOffsets, uint64_t(n)) % 1024);
      offset[n] = n % 4 == 3 || chunks == 0 ? (n % 2 ? 0 : -5) : n % 4 == 1 ? 64 * chunks : 64 * (1 + random % chunks);
      place[n] = !c.pool ? n : n % 4 == 2 ? first - 1 : first + 2 * N - n;
      const bool padded = c.pool && c.h0 && c.ht && slots.read[n] < first && slots.write[n] < first;
      if (offset[n] > 0 && place[n] >= first && !padded) written.push_back(place[n]);
    }
    forward.checkpoint_offsets = make_indices("checkpoint_offsets", offset);
    forward.checkpoints = make("checkpoints", Role::pool, c.state, matrices({c.pool ? first + 2 * N + 1 : N}));
    if (c.pool) forward.checkpoint_indices = make_indices("checkpoint_indices", place);
    entry(forward.checkpoints).written_slots = written;
  }
}

void Problem::make_gradients() {
  const Case& c = spec;
  const int64_t B = c.B, T = c.total_tokens(), N = c.sequences();
  backward.do_ = make("d_o", Role::input, c.dtype, {B, T, c.Hv, c.V});
  fill(backward.do_, [&](int64_t i) { return normal(c.seed, sDo, static_cast<uint64_t>(i)); });
  if (c.dht) {
    backward.dht = make("dht", Role::input, c.state, matrices({N}));
    std::vector<int64_t> all(N);
    std::iota(all.begin(), all.end(), 0);
    fill_states(backward.dht, sDht, all);
  }
  backward.dq = make("dq", Role::output, c.dtype, {B, T, c.Hk, c.K});
  backward.dk = make("dk", Role::output, c.dtype, {B, T, c.Hk, c.K});
  backward.dv = make("dv", Role::output, c.dtype, {B, T, c.Hv, c.V});
  backward.dg = make("dg", Role::output, GD_F32, {B, T, c.Hv});
  backward.dbeta = make("dbeta", Role::output, GD_F32, {B, T, c.Hv});
  if (c.gate == GateKind::raw) {
    backward.dA_log = make("dA_log", Role::output, GD_F32, {c.Hv});
    if (c.dt_bias) backward.d_dt_bias = make("d_dt_bias", Role::output, GD_F32, {c.Hv});
  }
  backward.d_initial_state = make("d_initial_state", Role::output, c.state, matrices({N}));
}

void Problem::make_steps(const Slots& slots) {
  const Case& c = spec;
  const int64_t B = c.B, T = c.total_tokens(), N = c.sequences(), first = c.first_slot;
  if (c.accept) {
    std::vector<int64_t> lengths(N);
    for (int64_t n = 0; n < N; ++n) lengths[n] = n % ((c.lengths.empty() ? T : c.lengths[n]) + 1);
    recurrent.accept_lengths = make_indices("accept_lengths", lengths);
  }
  if (c.picked > 0) {  // lengths from 0 to two beyond the last column; other columns name slots that are NaN
    std::vector<int64_t> lengths(N), rows(N * c.picked);
    for (int64_t i = 0; i < N * c.picked; ++i) rows[i] = slots.scrambled[2 * N + i % 3];
    for (int64_t n = 0; n < N; ++n) {
      lengths[n] = n % (c.picked + 3);
      rows[n * c.picked + std::clamp<int64_t>(lengths[n] - 1, 0, c.picked - 1)] = slots.read[n];
    }
    recurrent.in.initial_state_indices = make_indices("initial_state_indices", rows, c.picked);
    recurrent.previous_accept_lengths = make_indices("previous_accept_lengths", lengths);
  }
  if (c.steps == StepKind::dense) {
    recurrent.step_states = make("step_states", Role::output, c.state, matrices({B, T}));
  } else if (c.steps == StepKind::pool) {
    recurrent.step_states = make("step_states", Role::pool, c.state, matrices({first + B * T + 2}));
    std::vector<int64_t> place(B * T);
    for (int64_t i = 0; i < B * T; ++i) place[i] = i % 3 == 2 ? first - 1 : first + B * T + 1 - i;
    recurrent.step_indices = make_indices("step_indices", place, std::max<int64_t>(T, 1));
    recurrent.step_indices.shape[0] = B, recurrent.step_indices.shape[1] = T;
    entry(recurrent.step_states).written_slots = named(place);
  } else if (c.steps == StepKind::rows) {  // one column more than the longest sequence has tokens
    recurrent.step_states = make("step_states", Role::pool, c.state, matrices({first + T + 2}));
    const int64_t columns = *std::max_element(c.lengths.begin(), c.lengths.end()) + 1;
    std::vector<int64_t> place(N * columns, kNoSuchSlot);
    for (int64_t n = 0, token = 0; n < N; ++n)
      for (int64_t t = 0; t < c.lengths[n]; ++t, ++token)
        place[n * columns + t] = token % 3 == 2 ? first - 1 : first + T + 1 - token;
    recurrent.step_indices = make_indices("step_indices", place, columns);
    entry(recurrent.step_states).written_slots = named(place);
  }
}

Problem::Problem(const Case& c) : spec((check_case(c), c)) {
  forward.struct_size = sizeof forward;
  backward.struct_size = sizeof backward;
  recurrent.struct_size = sizeof recurrent;
  const int64_t T = c.total_tokens();
  gd_inputs in = make_inputs();
  const Slots slots = choose_slots();
  if (c.pool) in.first_slot = c.first_slot;
  gd_tensor final_state{}, final_state_indices{};
  if (c.h0) {
    in.initial_state = make("initial_state", c.inplace ? Role::pool : Role::input, c.state, matrices({slots.count}));
    fill_states(in.initial_state, sH0, slots.read);
    if (c.pool) in.initial_state_indices = make_indices("initial_state_indices", slots.read);
  }
  if (c.ht) {
    final_state = c.inplace ? in.initial_state : make("final_state", Role::pool, c.state, matrices({slots.count}));
    if (c.pool) final_state_indices = make_indices("final_state_indices", slots.write);
    entry(final_state).written_slots = named(slots.write);
  }

  forward.in = backward.in = recurrent.in = in;
  forward.out = make("o", Role::output, c.odtype == GD_DTYPE_NONE ? c.dtype : c.odtype, {c.B, T, c.Hv, c.V});
  recurrent.out = forward.out;
  forward.final_state = recurrent.final_state = final_state;
  forward.final_state_indices = recurrent.final_state_indices = final_state_indices;

  tuning.segment_chunks = static_cast<int32_t>(c.segment);
  forward.exec.tuning = backward.exec.tuning = &tuning;
  make_checkpoints(slots);
  make_gradients();
  make_steps(slots);
  for (const gd_tensor* t : {&in.q, &in.k, &in.v, &in.g, &in.beta, &backward.do_}) poison_tail(*t, T - c.pad);
  seal();
}

namespace {

uint64_t hash_bytes(const char* data, size_t size) {
  uint64_t hash = size;
  for (; size >= 8; data += 8, size -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    hash = mix(hash ^ word);
  }
  for (; size; ++data, --size) hash = mix(hash ^ static_cast<unsigned char>(*data));
  return hash;
}

}  // namespace

void Problem::seal() {
  for (Entry& e : entries_) {
    if (e.role == Role::input) e.hash = hash_bytes(e.buffer.data(), e.buffer.size());
    if (e.role == Role::pool) e.pristine.assign(e.buffer.data(), e.buffer.data() + e.buffer.size());
  }
}

void Problem::reset() {
  for (Entry& e : entries_) {
    if (e.role == Role::output) e.buffer.poison();
    if (e.role == Role::pool) std::copy(e.pristine.begin(), e.pristine.end(), e.buffer.data());
  }
}

std::vector<std::string> Problem::damage() const {
  std::vector<std::string> found;
  for (const Entry& e : entries_) {
    if (!e.buffer.guards_intact()) found.push_back(e.name + ": written outside of the tensor");
    if (e.role == Role::input) {
      if (e.hash != hash_bytes(e.buffer.data(), e.buffer.size())) found.push_back(e.name + ": an input was changed");
      continue;
    }
    const int64_t bytes = std::max<int64_t>(element_bytes(e.tensor.dtype), 1),
                  elements = static_cast<int64_t>(e.buffer.size()) / bytes;
    if (e.role == Role::output && elements == element_count(e.tensor)) continue;  // no gaps
    std::vector<bool> may_change(elements, false);
    if (elements == 0) continue;
    const int64_t per_slot = std::max<int64_t>(element_count(e.tensor) / e.tensor.shape[0], 1);
    std::vector<bool> slot_written(e.tensor.shape[0], e.role == Role::output);
    for (int64_t slot : e.written_slots) slot_written[slot] = true;
    for_each_element(e.tensor, [&](int64_t offset, int64_t i) {
      if (slot_written[i / per_slot]) may_change[offset] = true;
    });
    for (int64_t i = 0; i < elements; ++i) {
      const char* now = e.buffer.data() + i * bytes;
      const bool same = e.role == Role::pool ? std::memcmp(now, e.pristine.data() + i * bytes, bytes) == 0
                                             : std::all_of(now, now + bytes, [](char x) { return x == kPoison; });
      if (!same && !may_change[i]) {
        found.push_back(e.name + ": element at offset " + std::to_string(i) +
                        " was changed; no index or stride leads there");
        break;
      }
    }
  }
  return found;
}

}  // namespace gatedelta::testing
