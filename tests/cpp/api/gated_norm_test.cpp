// Rules about the gated norm's arguments, on the CPU and on CUDA. The calls on CUDA need no device: their addresses are
// made up, and arguments are judged first.
#include <cmath>

#include "cases.hpp"

namespace gatedelta::test {
namespace {

constexpr int64_t kRows = 3, kHeads = 2, kD = 48;

template <class Args>
struct NormCall : Call<Args> {
  NormCall() {
    this->x = this->input({kB, kRows, kHeads, kD});
    this->gate = this->input({kB, kRows, kHeads, kD});
    this->weight = this->input({kD});
  }
  // Sizes no memory holds, on CUDA, where nothing is read before the device is looked for.
  void move_to_cuda() {
    this->exec.device = GD_CUDA;
    uintptr_t next = 0;
    for (gd_tensor* t : all(*this))
      if (t->data) t->data = reinterpret_cast<void*>(next += uintptr_t{1} << 46);
    this->exec.workspace = reinterpret_cast<void*>(next + (uintptr_t{1} << 46));
  }

  static std::vector<gd_tensor*> all(gd_gated_norm_args& a) { return {&a.x, &a.gate, &a.weight, &a.out}; }
  static std::vector<gd_tensor*> all(gd_gated_norm_backward_args& a) {
    return {&a.x, &a.gate, &a.weight, &a.dy, &a.dx, &a.dgate, &a.dweight};
  }
};

struct Forward : NormCall<gd_gated_norm_args> {
  Forward() { out = output({kB, kRows, kHeads, kD}); }
  size_t needed() const {
    size_t bytes = ~size_t{0};
    EXPECT_EQ(gd_gated_norm_workspace(this, &bytes), GD_OK) << gd_last_error();
    return bytes;
  }
};
struct Backward : NormCall<gd_gated_norm_backward_args> {
  Backward() {
    dy = input({kB, kRows, kHeads, kD});
    dx = output({kB, kRows, kHeads, kD});
    dgate = output({kB, kRows, kHeads, kD});
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

RULE(Rules) {
  check_rules<TypeParam>({
      {"IsAccepted", [](auto&) {}},
      {"",
       [](auto& c) {
         c.weight = {};
         c.gate = {};
         if constexpr (std::is_same_v<TypeParam, Backward>) c.dgate = c.dweight = {};
       }},
      {"Struct", [](auto& c) { c.struct_size -= 8; }, "not set, or a struct from an older ABI", GD_ABI_MISMATCH},
      {"", [](auto& c) { c.struct_size += 8, c.reserved[3] = 1; }, "reserved fields must be zero"},
      {"MissingX", [](auto& c) { c.x = {}; }, "x is missing"},
      {"TooManyRows",
       [](auto& c) {
         for (gd_tensor* t : c.all(c)) {
           if (t->rank != 4) continue;
           t->shape[0] = t->shape[1] = t->shape[2] = int64_t{1} << 16;
           t->stride[0] = t->stride[1] = t->stride[2] = 0;
         }
       },
       "B * T * H is 65536 * 65536 * 65536, too many rows to compute"},
      {"Activation", [](auto& c) { c.activation = 2; }, "activation is 2, must be from 0 to 1"},
      {"", [](auto& c) { c.activation = GD_NORM_SIGMOID; }},
      {"",
       [](auto& c) {
         c.gate = {};
         if constexpr (std::is_same_v<TypeParam, Backward>) c.dgate = {};
       },
       "activation is sigmoid, but there is no gate it would act on: leave it silu"},
      {"CudaRows",
       [](auto& c) {
         c.move_to_cuda();
         for (gd_tensor* t : c.all(c)) {
           if (t->rank != 4) continue;
           t->shape[0] = 1;
           t->shape[1] = (int64_t{1} << 31) - 4095;
           t->shape[2] = 1;
           t->stride[1] = kD;
         }
       },
       "B * T * H is 2147479553, must be at most 2147479552 on CUDA", GD_UNSUPPORTED},
  });
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

RULE(Dtypes) {
  CALL;
  for (gd_tensor* t : c.all(c)) {
    t->dtype = GD_I32;
    EXPECT_TRUE(c.invalid("dtype is int32, must be float32, bfloat16 or float16"));
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

// Judged as far as it can be without a GPU: what stops the call is the build or the machine, not an argument.
RULE(CudaTakesEveryTypeAndStride) {
  CALL;
  c.move_to_cuda();
  c.x.dtype = GD_BF16;
  c.weight.dtype = GD_F16;
  c.gate.stride[0] += 1;
  if (info().cuda_devices > 0) GTEST_SKIP() << "the addresses are made up";
  const std::string reason = info().cuda_compiled ? "no CUDA device can be used" : "this build has no CUDA backend";
  c.memory = {};
  EXPECT_TRUE(c.refuses(GD_UNSUPPORTED, reason));
}

TEST(GatedNormForward, Output) {
  Forward c;
  c.out = {};
  EXPECT_TRUE(c.invalid("out is missing"));
  c.out = c.x;
  EXPECT_TRUE(c.invalid("x and out overlap in memory"));
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
  const gd_tensor z = c.gate;
  c.gate = {};
  EXPECT_TRUE(c.invalid("dgate is given, but there is no gate"));
  c.gate = z;
  c.weight = {};
  EXPECT_TRUE(c.invalid("dweight is given, but there is no weight"));
  c.dx = c.dgate = c.dweight = {};
  EXPECT_TRUE(c.invalid("no gradient is asked for: dx, dgate and dweight are absent"));
  c.dy = {};
  EXPECT_TRUE(c.invalid("dy is missing"));
}

TEST(GatedNormBackward, OverlappingGradients) {
  Backward c;
  c.dgate = c.dx;
  EXPECT_TRUE(c.invalid("dx and dgate overlap in memory"));
  c.dgate = c.dy;
  EXPECT_TRUE(c.invalid("dy and dgate overlap in memory"));
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
