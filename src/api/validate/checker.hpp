// Checks the tensors of one call, one rule and one message at a time, and describes them for a problem.
#pragma once

#include <span>

#include "api/error.hpp"
#include "api/validate.hpp"
#include "core/problem.hpp"

namespace gatedelta::api {

constexpr int64_t kAny = INT64_MIN;  // a size the tensor itself decides
constexpr unsigned kFloats = 1u << GD_F32 | 1u << GD_BF16 | 1u << GD_F16;
constexpr unsigned kIntegers = 1u << GD_I32 | 1u << GD_I64;
// Bounds far beyond any memory that keep every product a backend forms within int64.
constexpr int64_t kMaxSize = int64_t{1} << 44;      // of one dimension, and tokens times heads
constexpr int64_t kMaxElements = int64_t{1} << 60;  // of one tensor, counting the gaps between strides

struct Shape {
  const char* text;  // as the public header writes it
  int rank;
  int64_t size[GD_MAX_RANK];
};
Shape key_rows(const Layer& layer);       // [B, T, Hk, K]
Shape value_rows(const Layer& layer);     // [B, T, Hv, V]
Shape value_scalars(const Layer& layer);  // [B, T, Hv]
Shape per_sequence(const Layer& layer);   // [N]

enum class Need { required, optional };
enum class Role { input, output };

bool is_absent(const gd_tensor& tensor);
// The stride of dimension d, or of a dimension with one entry the stride a contiguous tensor would have.
int64_t stride_of(const gd_tensor& tensor, int d);

gd_status check_enum(const char* name, int32_t value, int32_t last);
gd_status check_reserved(const char* name, std::span<const uint64_t> reserved, int32_t flags = 0);

// Records where tensors lie, to find outputs that overlap something at the end. A query reads no address, and its
// descriptions have none.
class Checker {
 public:
  explicit Checker(Stage stage) : stage_(stage) {}

  // [B, T, H, D] with contiguous D, or [B, T, H].
  gd_status rows(const char* name, const gd_tensor& t, const Shape& shape, Need need, Role role, TokenRows& out);
  // [Hv], an input or gradient of the gate from raw `a`.
  gd_status gate_vector(const char* name, const gd_tensor& t, const Layer& layer, Need need, Role role,
                        HeadVector& out);
  // [N + 1], contiguous.
  gd_status offsets(const char* name, const gd_tensor& t, IndexVector& out);
  // [N] or [N, S] with any strides; those of slots that are written must not put several entries in one place.
  gd_status indices(const char* name, const gd_tensor& t, const Shape& shape, Role of, IndexRows& out);
  // One state per sequence, or a pool when the slots are indexed (slots = kAny).
  gd_status states(const char* name, const gd_tensor& t, const Layer& layer, int64_t slots, Role role, StateRows& out,
                   bool may_share = false);
  // A state tensor and the array of its slots, which says whether it is a pool.
  gd_status indexed_states(const char* name, const gd_tensor& t, const char* index_name, const gd_tensor& index,
                           const Shape& index_shape, const Layer& layer, Role role, StateRows& out,
                           bool may_share = true);
  gd_status tensor(const char* name, const gd_tensor& t, const Shape& shape, unsigned dtypes, int contiguous_dims,
                   Role role, bool may_share = false);
  // What a forward saves, or a backward gets.
  gd_status saved(const void* data, size_t bytes, Role role, SavedBuffer& out);

  // Checks overlaps, of the workspace too. To be called last.
  gd_status finish(const gd_exec& exec);

  void* address(const gd_tensor& t) const { return stage_ == Stage::query ? nullptr : t.data; }
  Stage stage() const { return stage_; }

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

  gd_status overlaps() const;
  void remember(const Region& region);
  void remember(const char* name, const void* data, size_t bytes, Role role);

  Stage stage_;
  Region regions_[26];  // backward has the most: 23 tensors, `saved` and the workspace
  int count_ = 0;
};

}  // namespace gatedelta::api
