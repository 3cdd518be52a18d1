#include "api/validate/checker.hpp"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "core/names.hpp"

namespace gatedelta::api {

namespace {

constexpr uintptr_t kAlign = 64;  // of workspace and saved

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

bool same_tensor(const gd_tensor& a, const gd_tensor& b) {
  if (a.data != b.data || a.dtype != b.dtype || a.rank != b.rank) return false;
  for (int d = 0; d < a.rank; ++d)
    if (a.shape[d] != b.shape[d] || stride_of(a, d) != stride_of(b, d)) return false;
  return true;
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

gd_status missing(const char* name, Need need) {
  return need == Need::optional ? GD_OK : invalid("%s is missing", name);
}

}  // namespace

bool is_absent(const gd_tensor& t) { return t.dtype == GD_DTYPE_NONE && t.rank == 0 && !t.data; }

int64_t stride_of(const gd_tensor& t, int d) {
  int64_t stride = 1;
  for (int i = t.rank - 1; i > d; --i) stride = t.shape[i] * (t.shape[i] > 1 ? t.stride[i] : stride);
  return t.shape[d] > 1 ? t.stride[d] : stride;
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

gd_status check_enum(const char* name, int32_t value, int32_t last) {
  if (value >= 0 && value <= last) return GD_OK;
  return invalid("%s is %" PRId32 ", must be from 0 to %" PRId32, name, value, last);
}

Shape per_sequence(const Layer& l) { return {"[N]", 1, {l.sequences.count}}; }

gd_status check_reserved(const char* name, std::span<const uint64_t> reserved, int32_t flags) {
  if (flags == 0 && std::all_of(reserved.begin(), reserved.end(), [](uint64_t word) { return word == 0; }))
    return GD_OK;
  return invalid("%s: reserved fields must be zero", name);
}

gd_status Checker::rows(const char* name, const gd_tensor& t, const Shape& shape, Need need, Role role,
                        TokenRows& out) {
  if (is_absent(t)) return missing(name, need);
  GD_TRY(tensor(name, t, shape, kFloats, shape.rank == 4 ? 1 : 0, role));
  out = {address(t), static_cast<gd_dtype>(t.dtype), stride_of(t, 0), stride_of(t, 1), stride_of(t, 2)};
  return GD_OK;
}

gd_status Checker::gate_vector(const char* name, const gd_tensor& t, const Layer& layer, Need need, Role role,
                               HeadVector& out) {
  if (layer.gate != GD_GATE_RAW)
    return is_absent(t) ? GD_OK
                        : invalid("%s is given, but it acts only on a raw g (use_gate_in_kernel): leave it out", name);
  if (is_absent(t)) return missing(name, need);
  GD_TRY(tensor(name, t, {"[Hv]", 1, {layer.value_heads}}, kFloats, 0, role));
  out = {address(t), static_cast<gd_dtype>(t.dtype), stride_of(t, 0)};
  return GD_OK;
}

gd_status Checker::offsets(const char* name, const gd_tensor& t, IndexVector& out) {
  if (is_absent(t)) return GD_OK;
  GD_TRY(tensor(name, t, {"[N + 1]", 1, {kAny}}, kIntegers, 1, Role::input));
  out = {address(t), t.dtype == GD_I64, true};
  return GD_OK;
}

gd_status Checker::indices(const char* name, const gd_tensor& t, const Shape& shape, Role of, IndexRows& out) {
  if (is_absent(t)) return GD_OK;
  GD_TRY(tensor(name, t, shape, kIntegers, 0, Role::input));
  for (int d = 0; of == Role::output && d < t.rank; ++d)
    if (t.shape[d] > 1 && t.stride[d] == 0)
      return invalid("%s: stride[%d] is 0, must be positive: no slot may be written more than once", name, d);
  const bool rows = t.rank == 2;
  out = {address(t), t.dtype == GD_I64, true, stride_of(t, 0), rows ? stride_of(t, 1) : 0, rows ? t.shape[1] : 1};
  return GD_OK;
}

gd_status Checker::states(const char* name, const gd_tensor& t, const Layer& layer, int64_t slots, Role role,
                          StateRows& out, bool may_share) {
  if (is_absent(t)) return GD_OK;
  const bool kv = layer.layout == GD_STATE_KV, pool = slots == kAny;
  const char* text =
      kv ? (pool ? "[slots, Hv, K, V]" : "[N, Hv, K, V]") : (pool ? "[slots, Hv, V, K]" : "[N, Hv, V, K]");
  const Shape shape = {text, 4, {slots, layer.value_heads, rows_of(layer), columns_of(layer)}};
  GD_TRY(tensor(name, t, shape, kFloats, 2, role, may_share));
  out = {address(t),      static_cast<gd_dtype>(t.dtype), t.shape[0], stride_of(t, 0), stride_of(t, 1), out.indices,
         layer.first_slot};
  return GD_OK;
}

gd_status Checker::indexed_states(const char* name, const gd_tensor& t, const char* index_name, const gd_tensor& index,
                                  const Shape& index_shape, const Layer& layer, Role role, StateRows& out,
                                  bool may_share) {
  if (is_absent(t) && !is_absent(index)) return invalid("%s is given without %s", index_name, name);
  GD_TRY(indices(index_name, index, index_shape, role, out.indices));
  return states(name, t, layer, out.indices ? kAny : layer.sequences.count, role, out, may_share);
}

gd_status Checker::tensor(const char* name, const gd_tensor& t, const Shape& shape, unsigned dtypes,
                          int contiguous_dims, Role role, bool may_share) {
  if (t.dtype < 0 || t.dtype > GD_I64 || !(dtypes >> t.dtype & 1))
    return invalid("%s: dtype is %s, must be %s", name, dtype_name(t.dtype),
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
                     dtypes == kIntegers    ? "offsets must be contiguous"
                     : contiguous_dims == 1 ? "rows must be contiguous"
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

gd_status Checker::saved(const void* data, size_t bytes, Role role, SavedBuffer& out) {
  if (stage_ == Stage::query) {
    out = {nullptr, bytes, data != nullptr || bytes != 0};
    return GD_OK;
  }
  if (!data && bytes) return invalid("saved is null, but saved_bytes is %zu", bytes);
  if (reinterpret_cast<uintptr_t>(data) % kAlign) return invalid("saved (%p) is not 64-byte aligned", data);
  out = {const_cast<void*>(data), bytes, data != nullptr};
  remember("saved", data, bytes, role);
  return GD_OK;
}

gd_status Checker::finish(const gd_exec& exec) {
  if (stage_ == Stage::query) return GD_OK;
  remember("workspace", exec.workspace, exec.workspace_bytes, Role::output);
  return overlaps();
}

void Checker::remember(const Region& region) {
  if (stage_ == Stage::call && region.begin != region.end) regions_[count_++] = region;
}
void Checker::remember(const char* name, const void* data, size_t bytes, Role role) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  if (data) remember({name, nullptr, begin, begin + bytes, true, false, role});
}

}  // namespace gatedelta::api
