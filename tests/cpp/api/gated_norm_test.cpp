// Rules about the gated norm's arguments, on the CPU and on CUDA. The calls on CUDA need no device: their addresses are
// made up, and arguments are judged first.
#include <cmath>

#include "cases.hpp"

namespace gatedelta::test {
namespace {

constexpr int64_t kRows = 3, kHeads = 2, kD = 48;

template <class Args>
struct NormCall : Args {
  Memory memory;
  Workspace workspace{size_t{1} << 20};

  NormCall() : Args{} {
    this->struct_size = sizeof(Args);
    this->exec.workspace = workspace.data();
    this->exec.workspace_bytes = workspace.size();
    this->x = input({kB, kRows, kHeads, kD});
    this->z = input({kB, kRows, kHeads, kD});
    this->weight = input({kD});
  }
  gd_tensor input(std::initializer_list<int64_t> shape) {
    const auto count = static_cast<size_t>(elements(shape));
    auto* data = static_cast<float*>(memory.take(count * sizeof(float), 0));
    std::fill(data, data + count, 0.5f);
    return tensor(data, shape);
  }
  gd_tensor output(std::initializer_list<int64_t> shape) {
    return dense(memory.take(static_cast<size_t>(elements(shape)) * sizeof(float), 0xa5), GD_F32, shape);
  }
  testing::AssertionResult refuses(gd_status expected, const std::string& text) {
    memory.remember();
    const gd_status status = call(*this);
    if (status != expected || std::string(gd_last_error()).find(text) == std::string::npos)
      return testing::AssertionFailure() << gd_status_name(status) << ": " << gd_last_error();
    if (!memory.untouched()) return testing::AssertionFailure() << "the refused call wrote to the caller's memory";
    return testing::AssertionSuccess();
  }
  testing::AssertionResult invalid(const std::string& text) { return refuses(GD_INVALID_ARGUMENT, text); }
  testing::AssertionResult accepts() {
    const gd_status status = call(*this);
    if (status == GD_OK) return testing::AssertionSuccess();
    return testing::AssertionFailure() << gd_status_name(status) << ": " << gd_last_error();
  }
  // Sizes no memory holds, on CUDA, where nothing is read before the device is looked for.
  void move_to_cuda() {
    this->exec.device = GD_CUDA;
    uintptr_t next = 0;
    for (gd_tensor* t : all(*this))
      if (t->data) t->data = reinterpret_cast<void*>(next += uintptr_t{1} << 46);
    this->exec.workspace = reinterpret_cast<void*>(next + (uintptr_t{1} << 46));
  }

  static gd_status call(const gd_gated_norm_args& args) { return gd_gated_norm(&args); }
  static gd_status call(const gd_gated_norm_backward_args& args) { return gd_gated_norm_backward(&args); }
  static std::vector<gd_tensor*> all(gd_gated_norm_args& a) { return {&a.x, &a.z, &a.weight, &a.y}; }
  static std::vector<gd_tensor*> all(gd_gated_norm_backward_args& a) {
    return {&a.x, &a.z, &a.weight, &a.d_y, &a.dx, &a.dz, &a.dweight};
  }
};

struct Forward : NormCall<gd_gated_norm_args> {
  Forward() { y = output({kB, kRows, kHeads, kD}); }
  size_t needed() const {
    size_t bytes = ~size_t{0};
    EXPECT_EQ(gd_gated_norm_workspace(this, &bytes), GD_OK) << gd_last_error();
    return bytes;
  }
};
struct Backward : NormCall<gd_gated_norm_backward_args> {
  Backward() {
    d_y = input({kB, kRows, kHeads, kD});
    dx = output({kB, kRows, kHeads, kD});
    dz = output({kB, kRows, kHeads, kD});
    dweight = output({kD});
  }
  size_t needed() const {
    size_t bytes = ~size_t{0};
    EXPECT_EQ(gd_gated_norm_backward_workspace(this, &bytes), GD_OK) << gd_last_error();
    return bytes;
  }
};

template <class Operation>
class GatedNorm : public testing::Test {
 protected:
  Operation c;
};
using NormOperations = testing::Types<Forward, Backward>;
TYPED_TEST_SUITE(GatedNorm, NormOperations);

#define RULE(name) TYPED_TEST(GatedNorm, name)
#define CALL auto& c = this->c

RULE(IsAccepted) {
  CALL;
  EXPECT_TRUE(c.accepts());
  c.weight = {};
  c.z = {};
  if constexpr (std::is_same_v<TypeParam, Backward>) c.dz = c.dweight = {};
  EXPECT_TRUE(c.accepts());
}

RULE(Struct) {
  CALL;
  c.struct_size -= 8;
  EXPECT_TRUE(c.refuses(GD_ABI_MISMATCH, "not set, or a struct from an older ABI"));
  c.struct_size += 8;
  c.reserved[3] = 1;
  EXPECT_TRUE(c.invalid("reserved fields must be zero"));
}

RULE(Exec) {
  CALL;
  c.exec.device = 2;
  EXPECT_TRUE(c.invalid("device is 2, must be from 0 to 1"));
  c.exec.device = GD_CPU;
  c.exec.isa = GD_ISA_COUNT;
  EXPECT_TRUE(c.invalid("isa is 8, must be from 0 to 7"));
  c.exec.isa = 0;
  const int compiled = info().cpu_isa_compiled;
  for (int isa = 1; isa < GD_ISA_COUNT; ++isa) {
    if (compiled & (1 << isa)) continue;
    c.exec.isa = isa;
    EXPECT_TRUE(c.refuses(GD_UNSUPPORTED, std::string("isa is ") + gd_isa_name(isa) + ", which is not in this build"));
  }
}

RULE(MissingX) {
  CALL;
  c.x = {};
  EXPECT_TRUE(c.invalid("x is missing"));
}

RULE(Dtypes) {
  CALL;
  for (gd_tensor* t : c.all(c)) {
    t->dtype = GD_I32;
    EXPECT_TRUE(c.invalid("dtype is 4 (int32), must be float32, bfloat16 or float16"));
    t->dtype = GD_F32;
  }
}

RULE(SizesOfD) {
  CALL;
  for (const int64_t size : {0, 8, 40, 528}) {
    c.x.shape[3] = size;
    EXPECT_TRUE(c.invalid("D is " + std::to_string(size) + ", must be a multiple of 16 from 16 to 512"));
  }
}

RULE(Shapes) {
  CALL;
  for (gd_tensor* t : c.all(c)) {
    if (t == &c.x) continue;
    t->shape[0] += 1;
    EXPECT_TRUE(c.invalid(t->rank == 1 ? "shape is [49], must be [D] = [48]"
                                       : "shape is [3, 3, 2, 48], must be [B, T, H, D] = [2, 3, 2, 48]"));
    t->shape[0] -= 1;
    t->rank -= 1;
    EXPECT_TRUE(c.invalid(t->rank == 0 ? "rank is 0, must be 1: [D]" : "rank is 3, must be 4: [B, T, H, D]"));
    t->rank += 1;
  }
}

RULE(Strides) {
  CALL;
  for (gd_tensor* t : c.all(c)) {
    const int last = t->rank - 1;
    t->stride[last] = 2;
    EXPECT_TRUE(c.invalid("stride[" + std::to_string(last) + "] is 2, must be 1 (rows must be contiguous)"));
    t->stride[last] = 1;
  }
}

RULE(TooManyRows) {
  CALL;
  for (gd_tensor* t : c.all(c)) {
    if (t->rank != 4) continue;
    t->shape[0] = t->shape[1] = t->shape[2] = int64_t{1} << 16;
    t->stride[0] = t->stride[1] = t->stride[2] = 0;
  }
  EXPECT_TRUE(c.invalid("B * T * H is 65536 * 65536 * 65536, too many rows to compute"));
}

RULE(Activation) {
  CALL;
  c.activation = 2;
  EXPECT_TRUE(c.invalid("activation is 2, must be from 0 to 1"));
  c.activation = GD_NORM_SIGMOID;
  EXPECT_TRUE(c.accepts());
  c.z = {};
  if constexpr (std::is_same_v<TypeParam, Backward>) c.dz = {};
  EXPECT_TRUE(c.invalid("activation is 1, but there is no z it would act on: leave it 0"));
}

RULE(Eps) {
  CALL;
  c.eps = 0.5f;
  EXPECT_TRUE(c.invalid("eps is 0.5, but has_eps is 0"));
  c.has_eps = 1;
  EXPECT_TRUE(c.accepts());
  for (const float eps : {-1e-6f, INFINITY, NAN}) {
    c.eps = eps;
    EXPECT_TRUE(c.invalid("must be finite and not negative"));
  }
}

RULE(NullData) {
  CALL;
  for (gd_tensor* t : c.all(c)) {
    void* const data = t->data;
    t->data = nullptr;
    EXPECT_TRUE(c.invalid("data is null, but shape is ["));
    t->data = data;
  }
}

RULE(CudaRows) {
  CALL;
  c.move_to_cuda();
  for (gd_tensor* t : c.all(c)) {
    if (t->rank != 4) continue;
    t->shape[0] = 1;
    t->shape[1] = (int64_t{1} << 31) - 4095;
    t->shape[2] = 1;
    t->stride[1] = kD;
  }
  EXPECT_TRUE(c.refuses(GD_UNSUPPORTED, "B * T * H is 2147479553, must be at most 2147479552 on CUDA"));
}

// Judged as far as it can be without a GPU: what stops the call is the build or the machine, not an argument.
RULE(CudaTakesEveryTypeAndStride) {
  CALL;
  c.move_to_cuda();
  c.x.dtype = GD_BF16;
  c.weight.dtype = GD_F16;
  c.z.stride[0] += 1;
  if (info().cuda_devices > 0) GTEST_SKIP() << "the addresses are made up";
  const std::string reason = info().cuda_compiled ? "no CUDA device can be used" : "this build has no CUDA backend";
  c.memory = {};
  EXPECT_TRUE(c.refuses(GD_UNSUPPORTED, reason));
}

TEST(GatedNormForward, Output) {
  Forward c;
  c.y = {};
  EXPECT_TRUE(c.invalid("y is missing"));
  c.y = c.x;
  EXPECT_TRUE(c.invalid("x and y overlap in memory"));
}

TEST(GatedNormForward, NeedsNoWorkspace) {
  Forward c;
  EXPECT_EQ(c.needed(), 0u);
  c.exec.workspace = nullptr;
  c.exec.workspace_bytes = 0;
  EXPECT_TRUE(c.accepts());
  c.move_to_cuda();
  EXPECT_EQ(c.needed(), 0u);
}

TEST(GatedNormBackward, GradientsOfWhatIsNotThere) {
  Backward c;
  const gd_tensor z = c.z;
  c.z = {};
  EXPECT_TRUE(c.invalid("dz is given, but there is no z"));
  c.z = z;
  c.weight = {};
  EXPECT_TRUE(c.invalid("dweight is given, but there is no weight"));
  c.dx = c.dz = c.dweight = {};
  EXPECT_TRUE(c.invalid("no gradient is asked for: dx, dz and dweight are absent"));
  c.d_y = {};
  EXPECT_TRUE(c.invalid("d_y is missing"));
}

TEST(GatedNormBackward, OverlappingGradients) {
  Backward c;
  c.dz = c.dx;
  EXPECT_TRUE(c.invalid("dx and dz overlap in memory"));
  c.dz = c.d_y;
  EXPECT_TRUE(c.invalid("d_y and dz overlap in memory"));
}

TEST(GatedNormBackward, Workspace) {
  Backward c;
  const size_t bytes = c.needed();
  EXPECT_EQ(bytes, kD * sizeof(float));  // one partial sum of dweight
  c.exec.workspace_bytes = bytes - 1;
  EXPECT_TRUE(c.refuses(GD_WORKSPACE_TOO_SMALL, "workspace has 191 bytes, needs 192"));
  c.dweight = {};
  EXPECT_EQ(c.needed(), 0u);
}

// On CUDA at most 528 partial sums, whatever the number of rows.
TEST(GatedNormBackward, WorkspaceOnCuda) {
  Backward c;
  c.move_to_cuda();
  EXPECT_EQ(c.needed(), kD * sizeof(float));
  for (gd_tensor* t : c.all(c)) {
    if (t->rank != 4) continue;
    t->shape[0] = t->shape[2] = 1;
    t->shape[1] = 1 << 20;
    t->stride[1] = kD;
  }
  EXPECT_EQ(c.needed(), 396 * kD * sizeof(float));
}

}  // namespace
}  // namespace gatedelta::test
