// Rules about calls on CUDA. No test here needs a device, nor a build with CUDA: arguments are judged first. Addresses
// are made up, so whatever looked into a tensor would crash.
#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

#include "gatedelta/gatedelta.hpp"

namespace gatedelta::test {

constexpr int64_t kB = 2, kT = 300, kHk = 2, kHv = 4, kD = 128;

struct CudaForward : gd_forward_args {
  uintptr_t next_address = 0;

  CudaForward() : gd_forward_args{} {
    struct_size = sizeof(gd_forward_args);
    exec.device = GD_CUDA;
    in.q = made_up(GD_BF16, {kB, kT, kHk, kD});
    in.k = made_up(GD_BF16, {kB, kT, kHk, kD});
    in.v = made_up(GD_BF16, {kB, kT, kHv, kD});
    in.g = made_up(GD_F32, {kB, kT, kHv});
    in.beta = made_up(GD_F32, {kB, kT, kHv});
    o = made_up(GD_BF16, {kB, kT, kHv, kD});
    exec.workspace = place();
    exec.workspace_bytes = size_t{1} << 30;
  }

  void* place() { return reinterpret_cast<void*>(next_address += uintptr_t{1} << 46); }
  gd_tensor made_up(gd_dtype dtype, std::initializer_list<int64_t> shape) { return tensor(place(), dtype, shape); }
  void set_type(gd_dtype dtype) {
    for (gd_tensor* t : {&in.q, &in.k, &in.v, &o}) t->dtype = dtype;
  }
  void set_tokens(int64_t batch, int64_t tokens) {
    for (gd_tensor* t : {&in.q, &in.k, &in.v, &in.g, &in.beta, &o}) {
      t->shape[0] = batch;
      t->shape[1] = tokens;
      t->stride[0] = t->stride[1] * tokens;
    }
  }
  void set_heads(int64_t key_heads, int64_t value_heads) {
    in.q = made_up(GD_BF16, {kB, kT, key_heads, kD});
    in.k = made_up(GD_BF16, {kB, kT, key_heads, kD});
    in.v = made_up(GD_BF16, {kB, kT, value_heads, kD});
    in.g = made_up(GD_F32, {kB, kT, value_heads});
    in.beta = made_up(GD_F32, {kB, kT, value_heads});
    o = made_up(GD_BF16, {kB, kT, value_heads, kD});
  }

  static testing::AssertionResult said(gd_status status, gd_status expected, const std::string& text) {
    if (status == expected && std::string(gd_last_error()).find(text) != std::string::npos)
      return testing::AssertionSuccess();
    return testing::AssertionFailure() << gd_status_name(status) << ": " << gd_last_error();
  }
  // The call and the query refuse alike.
  testing::AssertionResult refuses(gd_status expected, const std::string& text) const {
    size_t bytes = 7;
    if (const auto query = said(gd_forward_workspace(this, &bytes), expected, text); !query) return query;
    if (bytes != 7) return testing::AssertionFailure() << "the refused query has an answer";
    return said(gd_forward(this), expected, text);
  }
  testing::AssertionResult unsupported(const std::string& text) const { return refuses(GD_UNSUPPORTED, text); }
  testing::AssertionResult invalid(const std::string& text) const { return refuses(GD_INVALID_ARGUMENT, text); }
};

class Cuda : public testing::Test {
 protected:
  CudaForward c;
};

TEST_F(Cuda, RightArgumentsFailForWantOfADeviceOnly) {
  if (info().cuda_devices > 0) GTEST_SKIP() << "there is a device: the call would run";
  const char* reason = info().cuda_compiled ? "no CUDA device can be used: " : "this build has no CUDA backend";
  EXPECT_TRUE(CudaForward::said(gd_forward(&c), GD_UNSUPPORTED, reason));
  c.set_type(GD_F16);
  EXPECT_TRUE(CudaForward::said(gd_forward(&c), GD_UNSUPPORTED, reason));
}

TEST_F(Cuda, QueryNeedsTheBuildButNoDevice) {
  for (gd_tensor* t : {&c.in.q, &c.in.k, &c.in.v, &c.in.g, &c.in.beta, &c.o}) t->data = nullptr;
  size_t bytes = 0;
  const gd_status status = gd_forward_workspace(&c, &bytes);
  if (!info().cuda_compiled) {
    EXPECT_TRUE(CudaForward::said(status, GD_UNSUPPORTED, "device is GD_CUDA, but this build has no CUDA backend"));
    return;
  }
  EXPECT_EQ(status, GD_OK) << gd_last_error();
  EXPECT_GT(bytes, 0u);
  EXPECT_LE(bytes, static_cast<size_t>(192 * kB * kT * kHv + (1 << 20)));
  EXPECT_EQ(gd_forward_workspace(&c, nullptr), GD_INVALID_ARGUMENT);
}

TEST_F(Cuda, Workspace) {
  if (!info().cuda_compiled) GTEST_SKIP() << "this build has no CUDA backend";
  size_t needed = 0;
  ASSERT_EQ(gd_forward_workspace(&c, &needed), GD_OK);
  c.exec.workspace_bytes = needed - 1;
  EXPECT_TRUE(CudaForward::said(gd_forward(&c), GD_WORKSPACE_TOO_SMALL, "workspace has "));
  c.exec.workspace_bytes = needed;
  c.exec.workspace = static_cast<char*>(c.exec.workspace) + 32;
  EXPECT_TRUE(CudaForward::said(gd_forward(&c), GD_INVALID_ARGUMENT, "is not 64-byte aligned"));
  c.exec.workspace = nullptr;
  EXPECT_TRUE(CudaForward::said(gd_forward(&c), GD_INVALID_ARGUMENT, "workspace is null"));
  c.exec.workspace = c.o.data;
  EXPECT_TRUE(CudaForward::said(gd_forward(&c), GD_INVALID_ARGUMENT, "o and workspace overlap in memory"));
}

TEST_F(Cuda, HasTheForwardOnly) {
  constexpr char kOnly[] = "device is GD_CUDA, which has gd_forward only for now";
  size_t bytes = 0;
  gd_backward_args backward = GD_BACKWARD_ARGS_INIT;
  gd_recurrent_args recurrent = GD_RECURRENT_ARGS_INIT;
  backward.exec.device = recurrent.exec.device = GD_CUDA;
  EXPECT_TRUE(CudaForward::said(gd_backward(&backward), GD_UNSUPPORTED, kOnly));
  EXPECT_TRUE(CudaForward::said(gd_backward_workspace(&backward, &bytes), GD_UNSUPPORTED, kOnly));
  EXPECT_TRUE(CudaForward::said(gd_recurrent(&recurrent), GD_UNSUPPORTED, kOnly));
  EXPECT_TRUE(CudaForward::said(gd_recurrent_workspace(&recurrent, &bytes), GD_UNSUPPORTED, kOnly));
}

TEST_F(Cuda, SavesNothing) {
  size_t bytes = 0;
  EXPECT_EQ(gd_forward_saved_size(&c, &bytes), GD_UNSUPPORTED);
  if (info().cuda_compiled) {
    EXPECT_STREQ(gd_last_error(), "device is GD_CUDA, which has no backward yet and saves nothing for one");
  }
  c.saved = c.place();
  c.saved_bytes = 1 << 20;
  EXPECT_TRUE(c.unsupported("saved is given, but CUDA has no backward yet"));
}

TEST_F(Cuda, ThingsOfTheCpu) {
  c.exec.isa = GD_ISA_GENERIC;
  EXPECT_TRUE(c.invalid("isa is 1, must be GD_ISA_AUTO on CUDA"));
  c.exec.isa = GD_ISA_AUTO;
  c.exec.num_threads = 1;
  EXPECT_TRUE(c.invalid("num_threads, parallel_for and parallel_for_context must not be set on CUDA"));
  c.exec.num_threads = 0;
  c.exec.parallel_for = [](void*, int64_t, gd_task_fn, void*) {};
  EXPECT_TRUE(c.invalid("num_threads, parallel_for and parallel_for_context must not be set on CUDA"));
  c.exec.parallel_for = nullptr;
  c.exec.parallel_for_context = &c;
  EXPECT_TRUE(c.invalid("num_threads, parallel_for and parallel_for_context must not be set on CUDA"));
}

TEST_F(Cuda, DeviceIndex) {
  c.exec.device_index = -1;
  EXPECT_TRUE(c.invalid("device_index is -1, must not be negative"));
}

TEST_F(Cuda, ReservedExec) {
  c.exec.reserved[2] = 1;
  EXPECT_TRUE(c.invalid("exec: reserved fields must be zero"));
}

TEST_F(Cuda, SharesTheRulesAboutShapes) {
  c.in.beta.shape[2] = 3;
  EXPECT_TRUE(c.invalid("beta: shape is [2, 300, 3], must be [B, T, Hv] = [2, 300, 4]"));
}

TEST_F(Cuda, Segments) {
  c.segment_chunks = -1;
  EXPECT_TRUE(c.invalid("segment_chunks is -1, must not be negative"));
  c.segment_chunks = 2;
  c.context_parallel = GD_CP_OFF;
  EXPECT_TRUE(c.invalid("segment_chunks is 2, but context_parallel is GD_CP_OFF"));
  c.context_parallel = GD_CP_AUTO;
  c.batch_invariant = 1;
  EXPECT_TRUE(c.unsupported("segment_chunks is 2: a batch_invariant call cuts no sequence"));
  c.batch_invariant = 0;
  c.set_tokens(65, 300);
  EXPECT_TRUE(
      c.unsupported("segment_chunks is 2: sequences are cut on CUDA where there are at most 64, with at most 1024 "
                    "heads all together"));
  c.set_tokens(1, 64 * 2000);
  c.segment_chunks = 1;
  EXPECT_TRUE(c.unsupported("segment_chunks is 1, which may make 24012 pieces of work, more than 6144 on CUDA"));
}

TEST_F(Cuda, HeadSizes) {
  c.in.q.shape[3] = c.in.k.shape[3] = 64;
  EXPECT_TRUE(c.unsupported("K is 64, must be 128 on CUDA"));
  c.in.q.shape[3] = c.in.k.shape[3] = kD;
  c.in.v.shape[3] = c.o.shape[3] = 112;
  EXPECT_TRUE(c.unsupported("V is 112, must be 128 on CUDA"));
}

TEST_F(Cuda, Types) {
  c.set_type(GD_F32);
  EXPECT_TRUE(c.unsupported("q, k and v are float32, must be bfloat16 or float16 on CUDA"));
  c.set_type(GD_F16);
  c.o.dtype = GD_BF16;
  EXPECT_TRUE(c.unsupported("o: dtype is bfloat16, must be float16 as that of q on CUDA"));
}

TEST_F(Cuda, Groups) {
  c.set_heads(1, 257);
  EXPECT_TRUE(c.unsupported("Hv / Hk is 257, must be at most 256 on CUDA"));
}

TEST_F(Cuda, Tokens) {
  c.set_heads(1, 1);
  c.set_tokens(1, (int64_t{1} << 31) - 63);
  EXPECT_TRUE(c.unsupported("T is 2147483585, must be at most 2147483584 on CUDA"));
}

TEST_F(Cuda, SequencesTimesHeads) {
  c.set_heads(1, 1);
  c.set_tokens(1, 64);
  const int64_t sequences = (int64_t{1} << 30);
  c.in.cu_seqlens = c.made_up(GD_I32, {sequences + 1});
  EXPECT_TRUE(c.unsupported("N * Hv is 1073741824 * 1, must be at most 1073741823 on CUDA"));
}

TEST_F(Cuda, ChunksTimesHeads) {
  c.set_heads(256, 256);
  c.set_tokens(1, int64_t{1} << 29);
  EXPECT_TRUE(c.unsupported("the call has 2147483648 chunks times key heads, must have at most 2147483606 on CUDA"));
}

TEST_F(Cuda, AlignmentOfRows) {
  struct Tensor {
    const char* name;
    gd_tensor* tensor;
  };
  for (const auto& [name, t] : {Tensor{"q", &c.in.q}, {"k", &c.in.k}, {"v", &c.in.v}, {"o", &c.o}}) {
    t->stride[2] = 2 * kD;  // room enough for an output to stay free of collisions
    t->stride[1] = 2 * kHv * t->stride[2];
    t->stride[0] = 2 * kT * t->stride[1];
    const gd_tensor right = *t;
    t->data = static_cast<char*>(right.data) + 8;
    EXPECT_TRUE(CudaForward::said(gd_forward(&c), GD_UNSUPPORTED, std::string(name) + ": data ("));
    EXPECT_NE(std::string(gd_last_error()).find("is not 16-byte aligned"), std::string::npos) << gd_last_error();
    *t = right;
    t->stride[1] += 4;
    EXPECT_TRUE(c.unsupported(std::string(name) + ": stride[1] is " + std::to_string(t->stride[1]) +
                              ", must be a multiple of 8 (16 bytes) on CUDA"));
    *t = right;
    t->stride[2] += 2;
    EXPECT_TRUE(c.unsupported(std::string(name) + ": stride[2] is 258, must be a multiple of 8"));
    *t = right;
    t->stride[0] += 1;
    EXPECT_TRUE(c.unsupported(std::string(name) + ": stride[0] is "));
    *t = right;
  }
}

TEST_F(Cuda, StridesBeyondTheCopyEngine) {
  c.o.stride[0] = int64_t{1} << 39;
  EXPECT_TRUE(c.unsupported("o: stride[0] is 549755813888, must be less than 2^39 on CUDA"));
}

TEST_F(Cuda, OneEntryMayHaveAnyStride) {
  c.set_tokens(1, kT);
  for (gd_tensor* t : {&c.in.q, &c.in.k, &c.in.v, &c.o}) t->stride[0] = 3;
  size_t bytes = 0;
  const gd_status status = gd_forward_workspace(&c, &bytes);
  EXPECT_EQ(status, info().cuda_compiled ? GD_OK : GD_UNSUPPORTED) << gd_last_error();
  if (status != GD_OK) {
    EXPECT_STREQ(gd_last_error(), "device is GD_CUDA, but this build has no CUDA backend");
  }
}

}  // namespace gatedelta::test
