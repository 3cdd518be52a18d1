#include "api/validate.hpp"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <utility>

#include "api/error.hpp"
#include "core/thread_pool.hpp"
#include "cuda/workspace/backward.hpp"

namespace gatedelta::api {

namespace {

constexpr int64_t kAny = INT64_MIN;  // a size the tensor itself decides
constexpr unsigned kFloats = 1u << GD_F32 | 1u << GD_BF16 | 1u << GD_F16;
constexpr unsigned kIntegers = 1u << GD_I32 | 1u << GD_I64;
// Bounds far beyond any memory that keep every product a backend forms within int64.
constexpr int64_t kMaxSize = int64_t{1} << 44;      // of one dimension, and tokens times heads
constexpr int64_t kMaxElements = int64_t{1} << 60;  // of one tensor, counting the gaps between strides
constexpr int64_t kMaxHeads = 1 << 16;
constexpr uintptr_t kAlign = 64;  // of workspace and saved

struct Shape {
  const char* text;  // as the public header writes it
  int rank;
  int64_t size[GD_MAX_RANK];
};

enum class Need { required, optional };
enum class Role { input, output };

const char* dtype_name(int64_t dtype) {
  constexpr const char* kNames[] = {"none", "float32", "bfloat16", "float16", "int32", "int64"};
  return dtype >= 0 && dtype <= GD_I64 ? kNames[dtype] : "no gd_dtype";
}

// "[2, 64, any]".
struct SizeText {
  char text[GD_MAX_RANK * 24];
  SizeText(const int64_t* size, int rank) {
    int used = std::snprintf(text, sizeof text, "[");
    for (int d = 0; d < rank; ++d) {
      const char* separator = d ? ", " : "";
      if (size[d] == kAny) {
        used += std::snprintf(text + used, sizeof text - used, "%sany", separator);
      } else {
        used += std::snprintf(text + used, sizeof text - used, "%s%" PRId64, separator, size[d]);
      }
    }
    std::snprintf(text + used, sizeof text - used, "]");
  }
};

bool is_absent(const gd_tensor& t) { return t.dtype == GD_DTYPE_NONE && t.rank == 0 && !t.data; }

// A dimension of one entry may carry any stride; give it the one a contiguous tensor would have.
int64_t stride_of(const gd_tensor& t, int d) {
  int64_t stride = 1;
  for (int i = t.rank - 1; i > d; --i) stride = t.shape[i] * (t.shape[i] > 1 ? t.stride[i] : stride);
  return t.shape[d] > 1 ? t.stride[d] : stride;
}

bool same_tensor(const gd_tensor& a, const gd_tensor& b) {
  if (a.data != b.data || a.dtype != b.dtype || a.rank != b.rank) return false;
  for (int d = 0; d < a.rank; ++d)
    if (a.shape[d] != b.shape[d] || stride_of(a, d) != stride_of(b, d)) return false;
  return true;
}

bool same_pool(const StateRows& a, const StateRows& b) {
  return a && b && a.data == b.data && a.dtype == b.dtype && a.slots == b.slots && a.slot_stride == b.slot_stride &&
         a.head_stride == b.head_stride;
}

// Two elements in one place? Exact for the strides that slicing and permuting give; odd interleavings count as
// colliding.
bool elements_collide(const gd_tensor& t) {
  int order[GD_MAX_RANK], dims = 0;  // by ascending stride
  for (int d = 0; d < t.rank; ++d) {
    if (t.shape[d] <= 1) continue;
    int i = dims++;
    for (; i > 0 && t.stride[order[i - 1]] > t.stride[d]; --i) order[i] = order[i - 1];
    order[i] = d;
  }
  int64_t reach = 0;  // largest offset the dimensions so far span
  for (int i = 0; i < dims; ++i) {
    if (t.stride[order[i]] <= reach) return true;
    reach += (t.shape[order[i]] - 1) * t.stride[order[i]];
  }
  return false;
}

gd_status check_enum(const char* name, int32_t value, int32_t last) {
  if (value >= 0 && value <= last) return GD_OK;
  return invalid("%s is %" PRId32 ", must be from 0 to %" PRId32, name, value, last);
}

gd_status check_reserved(const char* name, const uint64_t (&reserved)[4], int32_t flags = 0) {
  if (flags == 0 && std::all_of(reserved, reserved + 4, [](uint64_t word) { return word == 0; })) return GD_OK;
  return invalid("%s: reserved fields must be zero", name);
}

gd_status check_head_dim(const char* name, int64_t size) {
  if (size >= 16 && size <= 256 && size % 16 == 0) return GD_OK;
  return invalid("%s is %" PRId64 ", must be a multiple of 16 from 16 to 256", name, size);
}

gd_status check_saved(const void* saved, size_t bytes) {
  if (!saved && bytes) return invalid("saved is null, but saved_bytes is %zu", bytes);
  if (reinterpret_cast<uintptr_t>(saved) % kAlign) return invalid("saved (%p) is not 64-byte aligned", saved);
  return GD_OK;
}

template <class Args>
gd_status check_segments(const Args& args) {
  const int32_t chunks = args.segment_chunks;
  GD_TRY(check_enum("context_parallel", args.context_parallel, GD_CP_OFF));
  if (chunks < 0) return invalid("segment_chunks is %" PRId32 ", must not be negative", chunks);
  if (chunks == 0) return GD_OK;
  if (args.exec.device != GD_CUDA)
    return refuse(GD_UNSUPPORTED, "segment_chunks is %" PRId32 ": sequences are cut on CUDA only, it must be 0",
                  chunks);
  if (args.context_parallel == GD_CP_OFF)
    return invalid("segment_chunks is %" PRId32 ", but context_parallel is GD_CP_OFF", chunks);
  if (args.batch_invariant)
    return refuse(GD_UNSUPPORTED, "segment_chunks is %" PRId32 ": a batch_invariant call cuts no sequence", chunks);
  return GD_OK;
}

// Checks tensors one by one, and remembers where they lie to find outputs that overlap something at the end.
class Checker {
 public:
  explicit Checker(Stage stage) : stage_(stage) {}

  gd_status layer(const gd_inputs& in, Layer& layer);

  // [B, T, H, D] with contiguous D, or [B, T, H].
  gd_status rows(const char* name, const gd_tensor& t, const Shape& shape, Need need, Role role, TokenRows& out) {
    if (is_absent(t)) return missing(name, need);
    GD_TRY(tensor(name, t, shape, kFloats, shape.rank == 4 ? 1 : 0, role));
    out = {t.data, static_cast<gd_dtype>(t.dtype), stride_of(t, 0), stride_of(t, 1), stride_of(t, 2)};
    return GD_OK;
  }

  // [Hv], an input or gradient of the gate from raw `a`.
  gd_status gate_vector(const char* name, const gd_tensor& t, const Layer& layer, Need need, Role role,
                        HeadVector& out) {
    if (layer.gate != GD_GATE_RAW)
      return is_absent(t) ? GD_OK : invalid("%s is given, but gate is not GD_GATE_RAW: leave it out", name);
    if (is_absent(t)) return missing(name, need);
    GD_TRY(tensor(name, t, {"[Hv]", 1, {layer.value_heads}}, kFloats, 0, role));
    out = {t.data, static_cast<gd_dtype>(t.dtype), stride_of(t, 0)};
    return GD_OK;
  }

  gd_status indices(const char* name, const gd_tensor& t, const Shape& shape, IndexVector& out) {
    if (is_absent(t)) return GD_OK;
    GD_TRY(tensor(name, t, shape, kIntegers, shape.rank, Role::input));
    out = {t.data, t.dtype == GD_I64, true};
    return GD_OK;
  }

  // One state per sequence, or a pool when the slots are indexed.
  gd_status states(const char* name, const gd_tensor& t, const Layer& layer, int64_t slots, Role role, StateRows& out,
                   bool may_share = false) {
    if (is_absent(t)) return GD_OK;
    const bool kv = layer.layout == GD_STATE_KV, pool = slots == kAny;
    const char* text =
        kv ? (pool ? "[slots, Hv, K, V]" : "[N, Hv, K, V]") : (pool ? "[slots, Hv, V, K]" : "[N, Hv, V, K]");
    const Shape shape = {text, 4, {slots, layer.value_heads, rows_of(layer), columns_of(layer)}};
    GD_TRY(tensor(name, t, shape, kFloats, 2, role, may_share));
    out = {t.data, static_cast<gd_dtype>(t.dtype), t.shape[0], stride_of(t, 0), stride_of(t, 1)};
    return GD_OK;
  }

  // A state tensor and the array of its slots, which says whether it is a pool.
  gd_status indexed_states(const char* name, const gd_tensor& t, const char* index_name, const gd_tensor& index,
                           const Layer& layer, Role role, StateRows& out, IndexVector& out_indices) {
    if (is_absent(t) && !is_absent(index)) return invalid("%s is given without %s", index_name, name);
    GD_TRY(indices(index_name, index, {"[N]", 1, {layer.sequences.count}}, out_indices));
    return states(name, t, layer, out_indices ? kAny : layer.sequences.count, role, out, true);
  }

  gd_status tensor(const char* name, const gd_tensor& t, const Shape& shape, unsigned dtypes, int contiguous_dims,
                   Role role, bool may_share = false);

  // workspace and saved.
  void memory(const char* name, const void* data, size_t bytes, Role role) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
    if (data) remember({name, nullptr, begin, begin + bytes, true, false, role});
  }

  // To be called last.
  gd_status overlaps() const;

  static int64_t rows_of(const Layer& layer) { return layer.layout == GD_STATE_KV ? layer.key_dim : layer.value_dim; }
  static int64_t columns_of(const Layer& layer) {
    return layer.layout == GD_STATE_KV ? layer.value_dim : layer.key_dim;
  }

 private:
  struct Region {
    const char* name;
    const gd_tensor* tensor;
    uintptr_t begin, end;
    bool dense;      // no gaps: a common range means common elements
    bool may_share;  // the very same tensor may be given for several of these, slots are checked later
    Role role;
  };

  static gd_status missing(const char* name, Need need) {
    return need == Need::optional ? GD_OK : invalid("%s is missing", name);
  }
  void remember(const Region& region) {
    if (stage_ == Stage::call && region.begin != region.end) regions_[count_++] = region;
  }

  Stage stage_;
  Region regions_[24];  // backward has the most: 13 inputs, 8 outputs and the workspace
  int count_ = 0;
};

gd_status Checker::tensor(const char* name, const gd_tensor& t, const Shape& shape, unsigned dtypes,
                          int contiguous_dims, Role role, bool may_share) {
  if (t.dtype < 0 || t.dtype > GD_I64 || !(dtypes >> t.dtype & 1))
    return invalid("%s: dtype is %" PRId32 " (%s), must be %s", name, t.dtype, dtype_name(t.dtype),
                   dtypes == kFloats ? "float32, bfloat16 or float16" : "int32 or int64");
  if (t.rank != shape.rank)
    return invalid("%s: rank is %" PRId32 ", must be %d: %s", name, t.rank, shape.rank, shape.text);
  for (int d = 0; d < t.rank; ++d) {
    if (t.shape[d] < 0 || t.shape[d] > kMaxSize)
      return invalid("%s: shape[%d] is %" PRId64 ", out of range", name, d, t.shape[d]);
    if (shape.size[d] != kAny && t.shape[d] != shape.size[d])
      return invalid("%s: shape is %s, must be %s = %s", name, SizeText(t.shape, t.rank).text, shape.text,
                     SizeText(shape.size, shape.rank).text);
  }

  int64_t elements = 1, distinct = 1, last = 0;  // distinct: broadcast dimensions count once; last: largest offset
  bool overflow = false, empty = false;
  for (int d = 0; d < t.rank; ++d) {
    empty |= t.shape[d] == 0;
    if (t.shape[d] <= 1) continue;
    if (t.stride[d] < 0) return invalid("%s: stride[%d] is %" PRId64 ", must not be negative", name, d, t.stride[d]);
    int64_t span = 0;
    overflow |= __builtin_mul_overflow(elements, t.shape[d], &elements) || elements > kMaxElements ||
                __builtin_mul_overflow(t.shape[d] - 1, t.stride[d], &span) ||
                __builtin_add_overflow(last, span, &last) || last >= kMaxElements;
    if (overflow) break;
    if (t.stride[d] != 0) distinct *= t.shape[d];
  }
  const uintptr_t begin = reinterpret_cast<uintptr_t>(t.data);
  const int64_t element_bytes = dtype_bytes(static_cast<gd_dtype>(t.dtype));
  uintptr_t end = begin;
  if (!overflow && !empty)
    overflow = __builtin_add_overflow(begin, static_cast<uintptr_t>(last + 1) * element_bytes, &end);
  if (overflow)
    return invalid("%s: shape %s with strides %s does not fit any memory", name, SizeText(t.shape, t.rank).text,
                   SizeText(t.stride, t.rank).text);

  int64_t expected = 1;
  for (int d = t.rank - 1; d >= t.rank - contiguous_dims; expected *= t.shape[d--])
    if (t.shape[d] > 1 && t.stride[d] != expected)
      return invalid("%s: stride[%d] is %" PRId64 ", must be %" PRId64 " (%s)", name, d, t.stride[d], expected,
                     contiguous_dims == t.rank ? "indices must be contiguous"
                     : contiguous_dims == 1    ? "rows must be contiguous"
                                               : "each state matrix must be contiguous");
  if (empty) return GD_OK;
  if (role == Role::output && elements_collide(t))
    return invalid("%s is an output, but its strides %s put several elements in one place", name,
                   SizeText(t.stride, t.rank).text);
  if (stage_ == Stage::query) return GD_OK;
  if (!t.data) return invalid("%s: data is null, but shape is %s", name, SizeText(t.shape, t.rank).text);
  if (begin % element_bytes)
    return invalid("%s: data (%p) is not aligned to its elements of %d bytes", name, t.data,
                   static_cast<int>(element_bytes));
  remember({name, &t, begin, end, last + 1 == distinct, may_share, role});
  return GD_OK;
}

gd_status Checker::overlaps() const {
  for (const Region* a = regions_; a != regions_ + count_; ++a) {
    for (const Region* b = a + 1; b != regions_ + count_; ++b) {
      if (a->role == Role::input && b->role == Role::input) continue;
      if (a->end <= b->begin || b->end <= a->begin) continue;
      if (a->begin != b->begin && !(a->dense && b->dense)) continue;  // may lie in each other's gaps
      if (a->may_share && b->may_share && same_tensor(*a->tensor, *b->tensor)) continue;
      return invalid("%s and %s overlap in memory", a->name, b->name);
    }
  }
  return GD_OK;
}

Shape key_rows(const Layer& l) {
  return {"[B, T, Hk, K]", 4, {l.sequences.batch, l.sequences.tokens, l.key_heads, l.key_dim}};
}
Shape value_rows(const Layer& l) {
  return {"[B, T, Hv, V]", 4, {l.sequences.batch, l.sequences.tokens, l.value_heads, l.value_dim}};
}
Shape value_scalars(const Layer& l) {
  return {"[B, T, Hv]", 3, {l.sequences.batch, l.sequences.tokens, l.value_heads}};
}

gd_status Checker::layer(const gd_inputs& in, Layer& layer) {
  GD_TRY(check_reserved("in", in.reserved));
  GD_TRY(check_enum("gate", in.gate, GD_GATE_RAW));
  GD_TRY(check_enum("beta_kind", in.beta_kind, GD_BETA_LOGIT_DOUBLED));
  GD_TRY(check_enum("state_layout", in.state_layout, GD_STATE_VK));
  layer.gate = static_cast<gd_gate>(in.gate);
  layer.beta_kind = static_cast<gd_beta>(in.beta_kind);
  layer.layout = static_cast<gd_state_layout>(in.state_layout);
  layer.l2norm = in.l2norm != 0;

  GD_TRY(rows("q", in.q, {"[B, T, Hk, K]", 4, {kAny, kAny, kAny, kAny}}, Need::required, Role::input, layer.q));
  GD_TRY(check_head_dim("K", in.q.shape[3]));
  if (in.q.shape[2] < 1) return invalid("Hk is 0, q must have at least one head");
  Sequences& sequences = layer.sequences;
  sequences.batch = in.q.shape[0];
  sequences.tokens = in.q.shape[1];
  layer.key_heads = in.q.shape[2];
  layer.key_dim = static_cast<int>(in.q.shape[3]);
  GD_TRY(rows("k", in.k, key_rows(layer), Need::required, Role::input, layer.k));
  const Shape v = {"[B, T, Hv, V]", 4, {sequences.batch, sequences.tokens, kAny, kAny}};
  GD_TRY(rows("v", in.v, v, Need::required, Role::input, layer.v));
  GD_TRY(check_head_dim("V", in.v.shape[3]));
  layer.value_heads = in.v.shape[2];
  layer.value_dim = static_cast<int>(in.v.shape[3]);
  if (layer.value_heads < 1 || layer.value_heads % layer.key_heads != 0)
    return invalid("v has Hv = %" PRId64 " heads, must be a multiple of Hk = %" PRId64, layer.value_heads,
                   layer.key_heads);
  if (layer.value_heads > kMaxHeads)
    return invalid("v has Hv = %" PRId64 " heads, must be at most %" PRId64, layer.value_heads, kMaxHeads);
  layer.group = layer.value_heads / layer.key_heads;
  for (const auto& [name, dtype] : {std::pair("k", in.k.dtype), std::pair("v", in.v.dtype)})
    if (dtype != in.q.dtype)
      return invalid("%s: dtype is %s, must be %s as that of q", name, dtype_name(dtype), dtype_name(in.q.dtype));

  GD_TRY(rows("g", in.g, value_scalars(layer), Need::required, Role::input, layer.g));
  GD_TRY(rows("beta", in.beta, value_scalars(layer), Need::required, Role::input, layer.beta));
  GD_TRY(gate_vector("A_log", in.A_log, layer, Need::required, Role::input, layer.A_log));
  GD_TRY(gate_vector("dt_bias", in.dt_bias, layer, Need::optional, Role::input, layer.dt_bias));

  GD_TRY(indices("cu_seqlens", in.cu_seqlens, {"[N + 1]", 1, {kAny}}, sequences.offsets));
  sequences.count = sequences.batch;
  if (sequences.offsets) {
    if (in.cu_seqlens.shape[0] < 1) return invalid("cu_seqlens is empty, must hold N + 1 offsets");
    if (sequences.batch != 1)
      return invalid("B is %" PRId64 ", must be 1 with cu_seqlens: packed sequences share one row of tokens",
                     sequences.batch);
    sequences.count = in.cu_seqlens.shape[0] - 1;
  }
  // Tokens, plus a chunk per sequence, times heads; every workspace is a small multiple of this.
  int64_t tokens, work;
  if (__builtin_mul_overflow(sequences.batch, sequences.tokens, &tokens) ||
      __builtin_add_overflow(tokens, (sequences.count + 1) * kChunk, &work) ||
      __builtin_mul_overflow(work, layer.value_heads, &work) || work > kMaxSize)
    return invalid("%" PRId64 " sequences of B * T = %" PRId64 " * %" PRId64 " tokens with %" PRId64
                   " heads are too many to compute",
                   sequences.count, sequences.batch, sequences.tokens, layer.value_heads);

  GD_TRY(indexed_states("initial_state", in.initial_state, "initial_indices", in.initial_indices, layer, Role::input,
                        layer.initial, layer.initial_indices));

  if (!in.has_scale && in.scale != 0) return invalid("scale is %g, but has_scale is 0", static_cast<double>(in.scale));
  if (!std::isfinite(in.scale)) return invalid("scale is %g, must be finite", static_cast<double>(in.scale));
  layer.scale = in.has_scale ? in.scale : 1.0f / std::sqrt(static_cast<float>(layer.key_dim));
  return GD_OK;
}

// Contents: what lies in offsets and indices.

gd_status check_offsets(const Sequences& sequences) {
  if (!sequences.offsets) return GD_OK;
  const IndexVector& offsets = sequences.offsets;
  if (offsets[0] != 0) return invalid("cu_seqlens[0] is %" PRId64 ", must be 0", offsets[0]);
  for (int64_t n = 0; n < sequences.count; ++n)
    if (offsets[n + 1] < offsets[n])
      return invalid("cu_seqlens[%" PRId64 "] is %" PRId64 ", less than the %" PRId64 " before it", n + 1,
                     offsets[n + 1], offsets[n]);
  if (offsets[sequences.count] > sequences.tokens)
    return invalid("cu_seqlens ends at %" PRId64 ", past the T = %" PRId64 " tokens there are",
                   offsets[sequences.count], sequences.tokens);
  return GD_OK;
}

gd_status check_range(const char* name, const IndexVector& indices, int64_t count, const char* pool, int64_t slots) {
  if (!indices) return GD_OK;
  for (int64_t i = 0; i < count; ++i)
    if (indices[i] >= slots)
      return invalid("%s[%" PRId64 "] is %" PRId64 ", but %s has %" PRId64 " slots", name, i, indices[i], pool, slots);
  return GD_OK;
}

// The states a call writes: one per sequence at its end, and a series of them, one for every `every` tokens.
// The series (checkpoints or steps) is packed sequence by sequence.
struct StateWrites {
  const StateRows& final;
  const IndexVector& final_indices;
  const char* series_name;
  const StateRows& series;
  const char* series_index_name;
  const IndexVector& series_indices;
  int64_t every;

  int64_t entries(const Layer& in, int64_t n) const { return every ? in.sequences[n].length / every : 0; }
};

StateWrites writes_of(const ForwardProblem& p) {
  return {p.final,           p.final_indices, "checkpoints", p.checkpoints, "checkpoint_indices", p.checkpoint_indices,
          p.checkpoint_every};
}
StateWrites writes_of(const RecurrentProblem& p) {
  return {p.final, p.final_indices, "step_states", p.step_states, "step_indices", p.step_indices, 1};
}

int64_t count_entries(const Layer& in, const StateWrites& writes) {
  if (!in.sequences.offsets) return in.sequences.count * (in.sequences.tokens / writes.every);
  int64_t entries = 0;
  for (int64_t n = 0; n < in.sequences.count; ++n) entries += writes.entries(in, n);
  return entries;
}

template <class Problem>
size_t bitmap_bytes(const Problem& p) {
  const StateWrites w = writes_of(p);
  if (!p.in.initial_indices && !w.final_indices && !w.series_indices) return 0;
  const int64_t slots = std::max(w.final.slots, w.series_indices ? w.series.slots : 0);
  return static_cast<size_t>((slots + 511) / 512) * 64;
}

// No slot of `pool` is written twice, and none that one sequence reads is written by another.
// Several sequences may read one slot, and a sequence may overwrite the slot it starts from.
template <class Problem>
gd_status check_slots(const Problem& p, const StateRows& pool, uint64_t* bitmap) {
  const StateWrites writes = writes_of(p);
  const Layer& in = p.in;
  const bool reads = same_pool(pool, in.initial), finals = same_pool(pool, writes.final);
  const bool series = writes.series_indices && same_pool(pool, writes.series);
  const auto word = [&](int64_t slot) -> uint64_t& { return bitmap[slot / 64]; };
  const auto bit = [](int64_t slot) { return uint64_t{1} << slot % 64; };

  // visit(array, position, slot) for every slot sequence n writes in this pool; its series starts at `entry`.
  const auto each_write = [&](int64_t n, int64_t entry, auto&& visit) -> gd_status {
    if (finals && p.final_slot(n) >= 0) GD_TRY(visit("final_indices", n, p.final_slot(n)));
    for (int64_t i = entry; series && i < entry + writes.entries(in, n); ++i)
      if (writes.series_indices[i] >= 0) GD_TRY(visit(writes.series_index_name, i, writes.series_indices[i]));
    return GD_OK;
  };
  // body(n, entry) for every sequence that is somebody.
  const auto each_sequence = [&](auto&& body) -> gd_status {
    for (int64_t n = 0, entry = 0; n < in.sequences.count; entry += writes.entries(in, n++))
      if (!p.is_nobody(n)) GD_TRY(body(n, entry));
    return GD_OK;
  };

  // Only words that will be looked at are cleared: a call uses a few slots of a pool that may have millions.
  GD_TRY(each_sequence([&](int64_t n, int64_t entry) {
    if (reads && in.initial_slot(n) >= 0) word(in.initial_slot(n)) = 0;
    return each_write(n, entry, [&](const char*, int64_t, int64_t slot) { return word(slot) = 0, GD_OK; });
  }));
  GD_TRY(each_sequence([&](int64_t n, int64_t entry) {
    return each_write(n, entry, [&](const char* array, int64_t i, int64_t slot) {
      if (word(slot) & bit(slot))
        return invalid("%s[%" PRId64 "]: slot %" PRId64 " is written more than once", array, i, slot);
      word(slot) |= bit(slot);
      return GD_OK;
    });
  }));
  return each_sequence([&](int64_t n, int64_t entry) {
    const int64_t slot = reads ? in.initial_slot(n) : -1;
    if (slot < 0 || !(word(slot) & bit(slot))) return GD_OK;
    bool own = false;
    each_write(n, entry, [&](const char*, int64_t, int64_t written) { return own |= written == slot, GD_OK; });
    if (own) return GD_OK;
    return invalid("sequence %" PRId64 " starts from slot %" PRId64 ", which another sequence writes in place", n,
                   slot);
  });
}

template <class Problem>
gd_status check_states(const Problem& p, uint64_t* bitmap) {
  const StateWrites w = writes_of(p);
  const int64_t sequences = p.in.sequences.count;
  GD_TRY(check_range("initial_indices", p.in.initial_indices, sequences, "initial_state", p.in.initial.slots));
  GD_TRY(check_range("final_indices", w.final_indices, sequences, "final_state", w.final.slots));
  if (w.series_indices)
    GD_TRY(check_range(w.series_index_name, w.series_indices, count_entries(p.in, w), w.series_name, w.series.slots));
  if (!bitmap) return GD_OK;
  if (w.final) GD_TRY(check_slots(p, w.final, bitmap));
  if (w.series_indices && !same_pool(w.series, w.final)) GD_TRY(check_slots(p, w.series, bitmap));
  return GD_OK;
}

// With packed sequences their number depends on the offsets, otherwise on shapes alone.
gd_status check_checkpoint_count(const gd_forward_args& args, const ForwardProblem& p) {
  if (!p.checkpoints) return GD_OK;
  const int64_t entries = count_entries(p.in, writes_of(p));
  const char* name = p.checkpoint_indices ? "checkpoint_indices" : "checkpoints";
  const int64_t room = p.checkpoint_indices ? args.checkpoint_indices.shape[0] : p.checkpoints.slots;
  if (entries <= room) return GD_OK;
  return invalid("%s has %" PRId64 " entries, but the sequences have %" PRId64 " checkpoints", name, room, entries);
}

}  // namespace

gd_status validate_exec(const gd_exec& exec) {
  GD_TRY(check_enum("device", exec.device, GD_CUDA));
  GD_TRY(check_reserved("exec", exec.reserved));
  if (exec.device == GD_CUDA) {
    if (exec.device_index < 0) return invalid("device_index is %" PRId32 ", must not be negative", exec.device_index);
    if (exec.isa != GD_ISA_AUTO)
      return invalid("isa is %" PRId32 ", must be GD_ISA_AUTO on CUDA: it is about CPUs", exec.isa);
    if (exec.num_threads != 0 || exec.parallel_for || exec.parallel_for_context)
      return invalid("num_threads, parallel_for and parallel_for_context must not be set on CUDA: they are about CPUs");
    return GD_OK;
  }
  if (exec.device_index != 0) return invalid("device_index is %" PRId32 ", must be 0 on the CPU", exec.device_index);
  if (exec.stream) return invalid("stream must be null on the CPU");
  GD_TRY(check_enum("isa", exec.isa, GD_ISA_COUNT - 1));
  if (exec.num_threads < 0 || exec.num_threads > kMaxThreads)
    return invalid("num_threads is %" PRId32 ", must be from 0 to %d", exec.num_threads, kMaxThreads);
  if (exec.parallel_for == gd_thread_pool_parallel_for && !exec.parallel_for_context)
    return invalid("parallel_for is gd_thread_pool_parallel_for, but parallel_for_context is null: pass the pool");
  if (exec.parallel_for) return GD_OK;
  if (exec.num_threads > 1)
    return invalid("num_threads is %" PRId32
                   ", but parallel_for is null: make a gd_thread_pool and pass it with "
                   "gd_thread_pool_parallel_for",
                   exec.num_threads);
  if (exec.parallel_for_context) return invalid("parallel_for_context is given, but parallel_for is null");
  return GD_OK;
}

gd_status validate_shapes(const gd_forward_args& args, Stage stage, ForwardProblem& p) {
  Checker check(stage);
  const Layer& in = p.in;
  GD_TRY(check_reserved("gd_forward_args", args.reserved, args.reserved_flags));
  GD_TRY(check_segments(args));
  GD_TRY(check.layer(args.in, p.in));
  GD_TRY(check.rows("o", args.o, value_rows(in), Need::required, Role::output, p.o));
  GD_TRY(check.indexed_states("final_state", args.final_state, "final_indices", args.final_indices, in, Role::output,
                              p.final, p.final_indices));

  if (is_absent(args.checkpoints)) {
    if (!is_absent(args.checkpoint_indices)) return invalid("checkpoint_indices is given without checkpoints");
    if (args.checkpoint_every != 0)
      return invalid("checkpoint_every is %" PRId64 ", but there are no checkpoints", args.checkpoint_every);
  } else {
    if (args.checkpoint_every <= 0 || args.checkpoint_every % kChunk != 0)
      return invalid("checkpoint_every is %" PRId64 ", must be a positive multiple of %d", args.checkpoint_every,
                     kChunk);
    p.checkpoint_every = args.checkpoint_every;
    GD_TRY(check.indices("checkpoint_indices", args.checkpoint_indices, {"[C]", 1, {kAny}}, p.checkpoint_indices));
    GD_TRY(check.states("checkpoints", args.checkpoints, in, kAny, Role::output, p.checkpoints,
                        static_cast<bool>(p.checkpoint_indices)));
    if (!in.sequences.offsets) GD_TRY(check_checkpoint_count(args, p));
  }

  p.context_parallel = args.context_parallel == GD_CP_AUTO;
  p.batch_invariant = args.batch_invariant != 0;
  p.segment_chunks = args.segment_chunks;
  p.saved = args.saved;
  if (stage == Stage::query) {
    if (args.saved_bytes) p.saved = const_cast<gd_forward_args*>(&args);  // any pointer: there will be a buffer
    return GD_OK;
  }
  GD_TRY(check_saved(args.saved, args.saved_bytes));
  check.memory("saved", args.saved, args.saved_bytes, Role::output);
  check.memory("workspace", args.exec.workspace, args.exec.workspace_bytes, Role::output);
  return check.overlaps();
}

gd_status validate_shapes(const gd_backward_args& args, Stage stage, BackwardProblem& p) {
  Checker check(stage);
  const Layer& in = p.in;
  GD_TRY(check_reserved("gd_backward_args", args.reserved));
  GD_TRY(check_segments(args));
  GD_TRY(check.layer(args.in, p.in));
  GD_TRY(check.rows("d_o", args.d_o, value_rows(in), Need::required, Role::input, p.d_o));
  GD_TRY(check.states("d_final_state", args.d_final_state, in, in.sequences.count, Role::input, p.d_final));

  GD_TRY(check.rows("dq", args.dq, key_rows(in), Need::optional, Role::output, p.dq));
  GD_TRY(check.rows("dk", args.dk, key_rows(in), Need::optional, Role::output, p.dk));
  GD_TRY(check.rows("dv", args.dv, value_rows(in), Need::optional, Role::output, p.dv));
  GD_TRY(check.rows("dg", args.dg, value_scalars(in), Need::optional, Role::output, p.dg));
  GD_TRY(check.rows("dbeta", args.dbeta, value_scalars(in), Need::optional, Role::output, p.dbeta));
  GD_TRY(check.gate_vector("dA_log", args.dA_log, in, Need::optional, Role::output, p.dA_log));
  GD_TRY(check.gate_vector("d_dt_bias", args.d_dt_bias, in, Need::optional, Role::output, p.d_dt_bias));
  GD_TRY(check.states("d_initial_state", args.d_initial_state, in, in.sequences.count, Role::output, p.d_initial));
  if (!p.dq && !p.dk && !p.dv && !p.dg && !p.dbeta && !p.dA_log && !p.d_dt_bias && !p.d_initial)
    return invalid("no gradient is asked for: dq, dk, dv, dg, dbeta, dA_log, d_dt_bias and d_initial_state are absent");

  p.context_parallel = args.context_parallel == GD_CP_AUTO;
  p.batch_invariant = args.batch_invariant != 0;
  p.segment_chunks = args.segment_chunks;
  p.small_workspace = args.small_workspace != 0;
  p.saved = args.saved;
  if (stage == Stage::query && args.saved_bytes) p.saved = &args;  // any pointer: there will be a buffer
  if (p.small_workspace && !p.saved && args.exec.device == GD_CUDA)
    return refuse(GD_UNSUPPORTED,
                  "small_workspace is %" PRId32
                  ", but saved is null: on CUDA give it what the forward saved (in a query saved_bytes), or leave it 0",
                  args.small_workspace);
  if (stage == Stage::query) return GD_OK;
  GD_TRY(check_saved(args.saved, args.saved_bytes));
  check.memory("saved", args.saved, args.saved_bytes, Role::input);
  check.memory("workspace", args.exec.workspace, args.exec.workspace_bytes, Role::output);
  return check.overlaps();
}

gd_status validate_shapes(const gd_recurrent_args& args, Stage stage, RecurrentProblem& p) {
  Checker check(stage);
  const Layer& in = p.in;
  GD_TRY(check_reserved("gd_recurrent_args", args.reserved));
  GD_TRY(check.layer(args.in, p.in));
  const int64_t B = in.sequences.batch, T = in.sequences.tokens;
  GD_TRY(check.rows("o", args.o, value_rows(in), Need::optional, Role::output, p.o));
  GD_TRY(check.indexed_states("final_state", args.final_state, "final_indices", args.final_indices, in, Role::output,
                              p.final, p.final_indices));
  if (!p.final && !is_absent(args.accept_lengths)) return invalid("accept_lengths is given without final_state");
  GD_TRY(check.indices("accept_lengths", args.accept_lengths, {"[N]", 1, {in.sequences.count}}, p.accept_lengths));

  const gd_tensor& steps = args.step_states;
  GD_TRY(check.indices("step_indices", args.step_indices, {"[B, T]", 2, {B, T}}, p.step_indices));
  if (p.step_indices) {
    if (is_absent(steps)) return invalid("step_indices is given without step_states");
    GD_TRY(check.states("step_states", steps, in, kAny, Role::output, p.step_states, true));
  } else if (!is_absent(steps)) {
    const Shape shape = {
        in.layout == GD_STATE_KV ? "[B, T, Hv, K, V] without step_indices" : "[B, T, Hv, V, K] without step_indices",
        5,
        {B, T, in.value_heads, Checker::rows_of(in), Checker::columns_of(in)}};
    GD_TRY(check.tensor("step_states", steps, shape, kFloats, 2, Role::output));
    p.step_states = {steps.data, static_cast<gd_dtype>(steps.dtype), B * T, 0, stride_of(steps, 2)};
    p.step_batch_stride = stride_of(steps, 0);
    p.step_token_stride = stride_of(steps, 1);
  }
  if (!p.o && !p.final && !p.step_states)
    return invalid("nothing to compute: o, final_state and step_states are absent");

  if (stage == Stage::query) return GD_OK;
  check.memory("workspace", args.exec.workspace, args.exec.workspace_bytes, Role::output);
  return check.overlaps();
}

namespace {

// What the kernels ask of a layer.
gd_status check_cuda_layer(const Layer& in) {
  for (const auto& [name, size] : {std::pair("K", in.key_dim), std::pair("V", in.value_dim)})
    if (size != cuda::kHeadDim)
      return refuse(GD_UNSUPPORTED, "%s is %d, must be %d on CUDA", name, size, cuda::kHeadDim);
  if (in.q.dtype != GD_BF16 && in.q.dtype != GD_F16)
    return refuse(GD_UNSUPPORTED, "q, k and v are %s, must be bfloat16 or float16 on CUDA", dtype_name(in.q.dtype));
  if (in.group > cuda::kMaxGroup)
    return refuse(GD_UNSUPPORTED, "Hv / Hk is %" PRId64 ", must be at most %" PRId64 " on CUDA", in.group,
                  cuda::kMaxGroup);

  const Sequences& sequences = in.sequences;
  if (sequences.tokens > cuda::kMaxTokens)
    return refuse(GD_UNSUPPORTED, "T is %" PRId64 ", must be at most %" PRId64 " on CUDA", sequences.tokens,
                  cuda::kMaxTokens);
  if (sequences.count > cuda::kMaxSeqHeads / in.value_heads)
    return refuse(GD_UNSUPPORTED, "N * Hv is %" PRId64 " * %" PRId64 ", must be at most %" PRId64 " on CUDA",
                  sequences.count, in.value_heads, cuda::kMaxSeqHeads);
  if (const int64_t blocks = cuda::prepare_blocks(in); blocks > cuda::kMaxPrepareBlocks)
    return refuse(GD_UNSUPPORTED,
                  "the call has %" PRId64 " chunks times key heads, must have at most %" PRId64 " on CUDA",
                  blocks - cuda::kPrepareHelpers, cuda::kMaxPrepareBlocks - cuda::kPrepareHelpers);
  return GD_OK;
}
gd_status check_cuda_segments(const ForwardProblem& p) {
  if (p.segment_chunks && !cuda::is_planned(p.in.sequences.count, p.in.value_heads))
    return refuse(GD_UNSUPPORTED,
                  "segment_chunks is %" PRId64
                  ": sequences are cut on CUDA where there are at most %d, with at most %d "
                  "heads all together",
                  p.segment_chunks, cuda::kMaxPlannedSequences, cuda::kMaxPlannedSeqHeads);
  if (p.segment_chunks && cuda::max_entries(p) > cuda::kMaxPlannedEntries)
    return refuse(GD_UNSUPPORTED,
                  "segment_chunks is %" PRId64 ", which may make %" PRId64 " pieces of work, more than %d on CUDA",
                  p.segment_chunks, cuda::max_entries(p), cuda::kMaxPlannedEntries);
  return GD_OK;
}
// What the copy engine asks of a tensor of rows, and that it is of the type of q.
gd_status check_cuda_rows(const char* name, const TokenRows* rows, const Layer& in, Stage stage) {
  if (!*rows) return GD_OK;
  if (rows->dtype != in.q.dtype)
    return refuse(GD_UNSUPPORTED, "%s: dtype is %s, must be %s as that of q on CUDA", name, dtype_name(rows->dtype),
                  dtype_name(in.q.dtype));
  if (stage == Stage::call && reinterpret_cast<uintptr_t>(rows->data) % cuda::kRowAlign)
    return refuse(GD_UNSUPPORTED, "%s: data (%p) is not %d-byte aligned, as it must be on CUDA", name, rows->data,
                  static_cast<int>(cuda::kRowAlign));
  const int64_t strides[] = {rows->batch_stride, rows->token_stride, rows->head_stride};
  for (int d = 0; d < 3; ++d) {
    constexpr int64_t kElementBytes = 2;  // bf16 or fp16, by now
    const int64_t bytes = strides[d] * kElementBytes;
    if (bytes % cuda::kRowAlign)
      return refuse(GD_UNSUPPORTED, "%s: stride[%d] is %" PRId64 ", must be a multiple of %d (%d bytes) on CUDA", name,
                    d, strides[d], static_cast<int>(cuda::kRowAlign / kElementBytes),
                    static_cast<int>(cuda::kRowAlign));
    if (bytes >= cuda::kMaxStrideBytes)
      return refuse(GD_UNSUPPORTED, "%s: stride[%d] is %" PRId64 ", must be less than 2^39 on CUDA", name, d,
                    strides[d]);
  }
  return GD_OK;
}

}  // namespace

gd_status validate_cuda(Stage stage, const ForwardProblem& p) {
  const Layer& in = p.in;
  if (p.saved && p.checkpoints)
    return refuse(GD_UNSUPPORTED,
                  "saved and checkpoints are both given: on CUDA a forward keeps states for one of them");
  // A sequence that is nobody would leave gaps in it, and what slots say is not known here.
  if (p.saved && in.initial_indices && p.final_indices)
    return refuse(GD_UNSUPPORTED, "saved is given, but on CUDA not together with initial_indices and final_indices");
  GD_TRY(check_cuda_layer(in));
  GD_TRY(check_cuda_segments(p));
  for (const auto& [name, rows] :
       {std::pair("q", &in.q), std::pair("k", &in.k), std::pair("v", &in.v), std::pair("o", &p.o)})
    GD_TRY(check_cuda_rows(name, rows, in, stage));
  return GD_OK;
}

gd_status validate_cuda(Stage stage, const BackwardProblem& p) {
  GD_TRY(check_cuda_layer(p.in));
  GD_TRY(check_cuda_segments(cuda::forward_of(p)));
  for (const auto& [name, rows] :
       {std::pair("q", &p.in.q), std::pair("k", &p.in.k), std::pair("v", &p.in.v), std::pair("d_o", &p.d_o),
        std::pair("dq", &p.dq), std::pair("dk", &p.dk), std::pair("dv", &p.dv)})
    GD_TRY(check_cuda_rows(name, rows, p.in, stage));
  return GD_OK;
}

size_t slot_bitmap_bytes(const ForwardProblem& p) { return bitmap_bytes(p); }
size_t slot_bitmap_bytes(const BackwardProblem&) { return 0; }  // writes no pool
size_t slot_bitmap_bytes(const RecurrentProblem& p) { return bitmap_bytes(p); }

gd_status validate_contents(const gd_forward_args& args, const ForwardProblem& p, uint64_t* bitmap) {
  GD_TRY(check_offsets(p.in.sequences));
  if (p.in.sequences.offsets) GD_TRY(check_checkpoint_count(args, p));
  GD_TRY(check_states(p, bitmap));
  // A backward could not tell which parts of `saved` were never written.
  for (int64_t n = 0; p.saved && n < p.in.sequences.count; ++n)
    if (p.is_nobody(n))
      return invalid("saved is given, but sequence %" PRId64 " is nobody (its read and write slots are negative)", n);
  return GD_OK;
}

gd_status validate_contents(const gd_backward_args&, const BackwardProblem& p, uint64_t*) {
  GD_TRY(check_offsets(p.in.sequences));
  return check_range("initial_indices", p.in.initial_indices, p.in.sequences.count, "initial_state",
                     p.in.initial.slots);
}

gd_status validate_contents(const gd_recurrent_args&, const RecurrentProblem& p, uint64_t* bitmap) {
  GD_TRY(check_offsets(p.in.sequences));
  for (int64_t n = 0; p.accept_lengths && n < p.in.sequences.count; ++n) {
    const int64_t accepted = p.accept_lengths[n], length = p.in.sequences[n].length;
    if (!p.is_nobody(n) && (accepted < 0 || accepted > length))
      return invalid("accept_lengths[%" PRId64 "] is %" PRId64 ", must be from 0 to the sequence's %" PRId64 " tokens",
                     n, accepted, length);
  }
  return check_states(p, bitmap);
}

}  // namespace gatedelta::api
