// Rules about calls on CUDA. No test here needs a device or a build with CUDA: arguments are judged first, and sizes
// follow from shapes. Addresses are made up, so a call that read a tensor would crash.
#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <type_traits>
#include <vector>

#include "gatedelta/gatedelta.hpp"

namespace gatedelta::test {

constexpr int64_t kB = 2, kT = 300, kHk = 2, kHv = 4, kD = 128;

inline gd_status call(const gd_forward_args& args) { return gd_forward(&args); }
inline gd_status call(const gd_backward_args& args) { return gd_backward(&args); }
inline gd_status query(const gd_forward_args& args, size_t* bytes) { return gd_forward_workspace(&args, bytes); }
inline gd_status query(const gd_backward_args& args, size_t* bytes) { return gd_backward_workspace(&args, bytes); }
inline gd_status call(const gd_summary_args& args) { return gd_summary(&args); }
inline gd_status query(const gd_summary_args& args, size_t* bytes) { return gd_summary_workspace(&args, bytes); }
inline gd_status call(const gd_backward_summary_args& args) { return gd_backward_summary(&args); }
inline gd_status query(const gd_backward_summary_args& args, size_t* bytes) {
  return gd_backward_summary_workspace(&args, bytes);
}
inline gd_status call(const gd_recurrent_args& args) { return gd_recurrent(&args); }
inline gd_status query(const gd_recurrent_args& args, size_t* bytes) { return gd_recurrent_workspace(&args, bytes); }

testing::AssertionResult said(gd_status status, gd_status expected, const std::string& text) {
  if (status == expected && std::string(gd_last_error()).find(text) != std::string::npos)
    return testing::AssertionSuccess();
  return testing::AssertionFailure() << gd_status_name(status) << ": " << gd_last_error();
}

struct NamedTensor {
  const char* name;
  gd_tensor* tensor;
};

// What the operations have in common.
template <class Args>
struct CudaCall : Args {
  using Args::exec;
  using Args::in;

  uintptr_t next_address = 0;

  CudaCall() : Args{} {
    this->struct_size = sizeof(Args);
    exec.device = GD_CUDA;
    exec.workspace = place();
    exec.workspace_bytes = size_t{1} << 30;
  }
  CudaCall(const CudaCall&) = delete;

  void* place() { return reinterpret_cast<void*>(next_address += uintptr_t{1} << 46); }
  gd_tensor made_up(gd_dtype dtype, std::initializer_list<int64_t> shape) { return tensor(place(), dtype, shape); }
  void set_inputs(int64_t key_heads, int64_t value_heads) {
    in.q = made_up(GD_BF16, {kB, kT, key_heads, kD});
    in.k = made_up(GD_BF16, {kB, kT, key_heads, kD});
    in.v = made_up(GD_BF16, {kB, kT, value_heads, kD});
    in.g = made_up(GD_F32, {kB, kT, value_heads});
    in.beta = made_up(GD_F32, {kB, kT, value_heads});
  }
  static void set_tokens_of(gd_tensor& t, int64_t batch, int64_t tokens) {
    t.shape[0] = batch;
    t.shape[1] = tokens;
    t.stride[0] = t.stride[1] * tokens;
  }

  // The call and the query refuse alike.
  testing::AssertionResult refuses(gd_status expected, const std::string& text) const {
    size_t bytes = 7;
    if (const auto asked = said(query(*this, &bytes), expected, text); !asked) return asked;
    if (bytes != 7) return testing::AssertionFailure() << "the refused query has an answer";
    return said(call(*this), expected, text);
  }
  testing::AssertionResult unsupported(const std::string& text) const { return refuses(GD_UNSUPPORTED, text); }
  testing::AssertionResult invalid(const std::string& text) const { return refuses(GD_INVALID_ARGUMENT, text); }
};

struct CudaForward : CudaCall<gd_forward_args> {
  CudaForward() { set_heads(kHk, kHv); }

  std::vector<NamedTensor> rows() { return {{"q", &in.q}, {"k", &in.k}, {"v", &in.v}, {"out", &out}}; }
  std::vector<gd_tensor*> scalars() { return {&in.g, &in.beta}; }
  std::vector<NamedTensor> typed_as_q() { return {{"out", &out}}; }
  gd_tensor& output() { return out; }
  void set_heads(int64_t key_heads, int64_t value_heads) {
    set_inputs(key_heads, value_heads);
    out = made_up(GD_BF16, {kB, kT, value_heads, kD});
  }
};

struct CudaBackward : CudaCall<gd_backward_args> {
  CudaBackward() { set_heads(kHk, kHv); }

  std::vector<NamedTensor> rows() {
    return {{"q", &in.q}, {"k", &in.k}, {"v", &in.v}, {"do", &do_}, {"dq", &dq}, {"dk", &dk}, {"dv", &dv}};
  }
  std::vector<gd_tensor*> scalars() { return {&in.g, &in.beta, &dg, &dbeta}; }
  std::vector<NamedTensor> typed_as_q() { return {{"do", &do_}, {"dq", &dq}, {"dk", &dk}, {"dv", &dv}}; }
  gd_tensor& output() { return dv; }
  void set_heads(int64_t key_heads, int64_t value_heads) {
    set_inputs(key_heads, value_heads);
    do_ = made_up(GD_BF16, {kB, kT, value_heads, kD});
    dq = made_up(GD_BF16, {kB, kT, key_heads, kD});
    dk = made_up(GD_BF16, {kB, kT, key_heads, kD});
    dv = made_up(GD_BF16, {kB, kT, value_heads, kD});
    dg = made_up(GD_F32, {kB, kT, value_heads});
    dbeta = made_up(GD_F32, {kB, kT, value_heads});
  }
};

// As the forward of a backward's inputs has it.
gd_saved_call saved_call_of(const gd_backward_args& args) {
  gd_forward_args forward = GD_FORWARD_ARGS_INIT;
  forward.exec = args.exec;
  forward.in = args.in;
  forward.out = args.do_;
  gd_saved_call call{};
  EXPECT_EQ(gd_forward_saved_call(&forward, &call), GD_OK) << gd_last_error();
  return call;
}

// Rules of both operations.
template <class Call>
class CudaRules : public testing::Test {
 protected:
  Call c;

  void set_type(gd_dtype dtype) {
    for (const NamedTensor& each : c.rows()) each.tensor->dtype = dtype;
  }
  void set_tokens(int64_t batch, int64_t tokens) {
    for (const NamedTensor& each : c.rows()) c.set_tokens_of(*each.tensor, batch, tokens);
    for (gd_tensor* t : c.scalars()) c.set_tokens_of(*t, batch, tokens);
  }
};

struct CudaCallNames {
  template <class Call>
  static std::string GetName(int) {
    return std::is_same_v<Call, CudaForward> ? "Forward" : "Backward";
  }
};
using CudaCalls = testing::Types<CudaForward, CudaBackward>;
TYPED_TEST_SUITE(CudaRules, CudaCalls, CudaCallNames);

// Rules of one of them.
class Cuda : public CudaRules<CudaForward> {};
class CudaGradients : public CudaRules<CudaBackward> {};

TYPED_TEST(CudaRules, RightArgumentsFailForWantOfADeviceOnly) {
  if (info().cuda_devices > 0) GTEST_SKIP() << "there is a device: the call would run";
  const char* reason = info().cuda_compiled ? "no CUDA device can be used: " : "this build has no CUDA backend";
  EXPECT_TRUE(said(call(this->c), GD_UNSUPPORTED, reason));
  this->set_type(GD_F16);
  EXPECT_TRUE(said(call(this->c), GD_UNSUPPORTED, reason));
}

TYPED_TEST(CudaRules, QueryNeedsNeitherBuildNorDevice) {
  auto& c = this->c;
  for (const NamedTensor& each : c.rows()) each.tensor->data = nullptr;
  for (gd_tensor* t : c.scalars()) t->data = nullptr;
  size_t bytes = 0;
  EXPECT_EQ(query(c, &bytes), GD_OK) << gd_last_error();
  EXPECT_GT(bytes, 0u);
  EXPECT_EQ(query(c, nullptr), GD_INVALID_ARGUMENT);
}

TEST_F(Cuda, WorkspaceKeepsItsPromise) {
  size_t bytes = 0;
  ASSERT_EQ(query(c, &bytes), GD_OK) << gd_last_error();
  EXPECT_LE(bytes, static_cast<size_t>(192 * kB * kT * kHv + (1 << 20)));
}

// The chain leaves in dv what the gradients are made of. Without the caller's dv, the workspace has room for it.
TEST_F(CudaGradients, WorkspaceGrowsWithoutDv) {
  size_t with = 0, without = 0;
  ASSERT_EQ(query(c, &with), GD_OK) << gd_last_error();
  c.dv = {};
  ASSERT_EQ(query(c, &without), GD_OK) << gd_last_error();
  EXPECT_GE(without, with + kB * kT * kHv * kD * 2);
}

TYPED_TEST(CudaRules, Workspace) {
  auto& c = this->c;
  size_t needed = 0;
  ASSERT_EQ(query(c, &needed), GD_OK);
  c.exec.workspace_bytes = needed - 1;
  EXPECT_TRUE(said(call(c), GD_WORKSPACE_TOO_SMALL, "workspace has "));
  c.exec.workspace_bytes = needed;
  c.exec.workspace = static_cast<char*>(c.exec.workspace) + 32;
  EXPECT_TRUE(said(call(c), GD_INVALID_ARGUMENT, "is not 64-byte aligned"));
  c.exec.workspace = nullptr;
  EXPECT_TRUE(said(call(c), GD_INVALID_ARGUMENT, "workspace is null"));
  c.exec.workspace = c.output().data;
  EXPECT_TRUE(
      said(call(c), GD_INVALID_ARGUMENT, std::string(c.rows().back().name) + " and workspace overlap in memory"));
}

// Recurrent steps have none of the limits of the chunked kernels: head sizes, types, alignment.
class CudaRecurrent : public testing::Test {
 protected:
  CudaCall<gd_recurrent_args> c;

  void set(gd_dtype dtype, int64_t K, int64_t V) {
    c.in.q = c.made_up(dtype, {kB, kT, kHk, K});
    c.in.k = c.made_up(dtype, {kB, kT, kHk, K});
    c.in.v = c.made_up(dtype, {kB, kT, kHv, V});
    c.in.g = c.made_up(GD_F32, {kB, kT, kHv});
    c.in.beta = c.made_up(GD_F32, {kB, kT, kHv});
    c.out = c.made_up(dtype, {kB, kT, kHv, V});
  }
  void SetUp() override { set(GD_BF16, kD, kD); }

  // There is no device 1000, so the call runs nowhere, whatever devices there are.
  testing::AssertionResult fails_for_want_of_a_device() {
    c.exec.device_index = 1000;
    const gd_status status = call(c);
    if (status == GD_INVALID_ARGUMENT && info().cuda_compiled)
      return said(status, status, "device_index is 1000, and there is no such CUDA device");
    return said(status, GD_UNSUPPORTED,
                info().cuda_compiled ? "no CUDA device can be used: " : "this build has no CUDA backend");
  }
};

TEST_F(CudaRecurrent, RightArgumentsFailForWantOfADeviceOnly) {
  for (const gd_dtype dtype : {GD_F32, GD_BF16, GD_F16})
    for (const auto& [K, V] : {std::pair(16, 256), {256, 16}, {128, 128}, {144, 208}}) {
      set(dtype, K, V);
      EXPECT_TRUE(fails_for_want_of_a_device()) << K << " " << V;
    }
  for (gd_tensor* t : {&c.in.q, &c.in.k, &c.in.v, &c.out}) t->data = static_cast<char*>(t->data) + 2;
  EXPECT_TRUE(fails_for_want_of_a_device());
}

TEST_F(CudaRecurrent, NeedsNoWorkspace) {
  size_t bytes = 7;
  EXPECT_EQ(query(c, &bytes), GD_OK) << gd_last_error();
  EXPECT_EQ(bytes, 0u);
  EXPECT_EQ(query(c, nullptr), GD_INVALID_ARGUMENT);
  c.exec.workspace = nullptr;
  c.exec.workspace_bytes = 0;
  EXPECT_TRUE(fails_for_want_of_a_device());
}

TEST_F(CudaRecurrent, SharesTheRulesAboutArguments) {
  c.out.rank = 3;
  EXPECT_TRUE(c.invalid("out: rank is 3"));
  c.out = {};
  EXPECT_TRUE(c.invalid("nothing to compute: out, final_state and step_states are absent"));
  c.exec.isa = GD_ISA_GENERIC;
  EXPECT_TRUE(c.invalid("isa must be auto on CUDA: it selects CPU instructions"));
}

TEST_F(CudaRecurrent, SequencesTimesHeads) {
  for (gd_tensor* t : {&c.in.q, &c.in.k, &c.in.v, &c.in.g, &c.in.beta, &c.out}) c.set_tokens_of(*t, 1, 64);
  const int64_t most = ((int64_t{1} << 27) - 1) / kHv;
  c.in.cu_seqlens = c.made_up(GD_I32, {most});  // N = most - 1, and one more for the tokens past the last offset
  size_t bytes = 7;
  EXPECT_EQ(query(c, &bytes), GD_OK) << gd_last_error();
  c.in.cu_seqlens.shape[0] += 1;
  EXPECT_TRUE(
      c.unsupported("N * Hv is 33554431 * 4, must be at most 134217727 (and with cu_seqlens N counts one more)"));
}

// Prepared chunks, a state of every 1024 tokens, and what was found out about the lengths.
TEST_F(Cuda, SavedSize) {
  set_tokens(2, 2048 + 1);
  size_t bytes = 7;
  EXPECT_EQ(gd_forward_saved_size(&c, &bytes), GD_OK) << gd_last_error();
  // Two numbers per sequence, in 64 bytes each, the costs of 80 cuts, and a work list.
  EXPECT_EQ(bytes, kHv * (2 * 33 * (6912 + 8) + 2 * 2 * size_t{65536}) + 2 * 64 + 80 * 8 + 65536);
  EXPECT_EQ(gd_forward_saved_size(&c, nullptr), GD_INVALID_ARGUMENT);
  c.exec.kernels = GD_KERNELS_PORTABLE;
  EXPECT_EQ(gd_forward_saved_size(&c, &bytes), GD_OK) << gd_last_error();
  EXPECT_EQ(bytes, size_t{2 * 33} * (kHv * (7200 + 2 * 64 * 4 + 16) + kHk * 2 * 64 * 4));
}

TYPED_TEST(CudaRules, Saved) {
  auto& c = this->c;
  size_t bytes = 0, with = 0;
  EXPECT_EQ(query(c, &bytes), GD_OK) << gd_last_error();
  c.saved_bytes = 1 << 20;
  EXPECT_EQ(query(c, &with), GD_OK) << gd_last_error();  // "there will be one"
  EXPECT_NE(with, bytes);
  c.saved = c.place();
  c.saved_bytes = 64;
  if constexpr (requires { c.do_; }) c.saved_call = saved_call_of(c);
  EXPECT_TRUE(said(call(c), GD_WORKSPACE_TOO_SMALL, "saved has 64 bytes, needs "));
}

TEST_F(Cuda, SavedIsNotForEverything) {
  c.saved_bytes = size_t{1} << 30;
  c.saved = c.place();
  c.checkpoints = c.made_up(GD_F32, {kB * (kT / 64), kHv, kD, kD});
  c.checkpoint_every = 64;
  EXPECT_TRUE(c.unsupported("saved and checkpoints are both given: on CUDA a forward keeps states for one of them"));
  c.checkpoints = {};
  c.checkpoint_every = 0;
  c.in.initial_state = c.made_up(GD_F32, {5, kHv, kD, kD});
  c.final_state = c.made_up(GD_F32, {5, kHv, kD, kD});
  c.in.initial_state_indices = c.made_up(GD_I32, {kB});
  c.final_state_indices = c.made_up(GD_I32, {kB});
  EXPECT_TRUE(
      c.unsupported("saved is given, but on CUDA not together with initial_state_indices and final_state_indices"));
}

TYPED_TEST(CudaRules, ThingsOfTheCpu) {
  auto& c = this->c;
  constexpr char kThreads[] = "num_threads, parallel_for and parallel_for_context must not be set on CUDA";
  c.exec.isa = GD_ISA_GENERIC;
  EXPECT_TRUE(c.invalid("isa must be auto on CUDA: it selects CPU instructions"));
  c.exec.isa = GD_ISA_AUTO;
  c.exec.kernels = 2;
  EXPECT_TRUE(c.invalid("kernels is 2, must be from 0 to 1"));
  c.exec.kernels = GD_KERNELS_AUTO;
  c.exec.num_threads = 1;
  EXPECT_TRUE(c.invalid(kThreads));
  c.exec.num_threads = 0;
  c.exec.parallel_for = [](void*, int64_t, gd_task_fn, void*) {};
  EXPECT_TRUE(c.invalid(kThreads));
  c.exec.parallel_for = nullptr;
  c.exec.parallel_for_context = &c;
  EXPECT_TRUE(c.invalid(kThreads));
}

TYPED_TEST(CudaRules, DeviceIndex) {
  this->c.exec.device_index = -1;
  EXPECT_TRUE(this->c.invalid("device_index is -1, must not be negative"));
}

TYPED_TEST(CudaRules, ReservedExec) {
  this->c.exec.reserved[1] = 1;
  EXPECT_TRUE(this->c.invalid("exec: reserved fields must be zero"));
}

TYPED_TEST(CudaRules, SharesTheRulesAboutShapes) {
  this->c.in.beta.shape[2] = 3;
  EXPECT_TRUE(this->c.invalid("beta: shape is [2, 300, 3], must be [B, T, Hv] = [2, 300, 4]"));
}

TEST_F(CudaGradients, SharesTheRulesAboutOutputs) {
  c.dk.shape[2] = kHv;
  EXPECT_TRUE(c.invalid("dk: shape is [2, 300, 4, 128], must be [B, T, Hk, K] = [2, 300, 2, 128]"));
  c.dk = c.made_up(GD_BF16, {kB, kT, kHk, kD});
  c.dA_log = c.made_up(GD_F32, {kHv});
  EXPECT_TRUE(c.invalid("dA_log is given, but it acts only on a raw g (use_gate_in_kernel): leave it out"));
  c.dA_log = {};
  c.dv.data = c.in.v.data;
  EXPECT_TRUE(said(call(c), GD_INVALID_ARGUMENT, "v and dv overlap in memory"));
  c.dq = c.dk = c.dv = c.dg = c.dbeta = {};
  EXPECT_TRUE(c.invalid("no gradient is asked for"));
}

TYPED_TEST(CudaRules, Segments) {
  auto& c = this->c;
  gd_tuning tuning = GD_TUNING_INIT;
  c.exec.tuning = &tuning;
  tuning.segment_chunks = -1;
  EXPECT_TRUE(c.invalid("segment_chunks is -1, must not be negative"));
  tuning.segment_chunks = 2;
  c.context_parallel = GD_CP_OFF;
  EXPECT_TRUE(c.invalid("segment_chunks is 2, but context_parallel is off"));
  c.context_parallel = GD_CP_AUTO;
  c.batch_invariant = 1;
  EXPECT_TRUE(c.unsupported("segment_chunks is 2: a batch_invariant call cuts no sequence"));
  c.batch_invariant = 0;
  this->set_tokens(65, 300);
  EXPECT_TRUE(
      c.unsupported("segment_chunks is 2: sequences are cut on CUDA where there are at most 64, with at most 1024 "
                    "heads all together"));
  this->set_tokens(1, 64 * 2000);
  tuning.segment_chunks = 1;
  EXPECT_TRUE(c.unsupported("segment_chunks is 1, which may make 24012 work items, more than 6144 on CUDA"));
  tuning.segment_chunks = 0;
  c.context_parallel = 2;
  EXPECT_TRUE(c.invalid("context_parallel is 2, must be from 0 to 1"));
}

TEST_F(CudaGradients, SmallWorkspaceWantsWhatIsSaved) {
  set_tokens(1, 32768);
  c.small_workspace = 1;
  EXPECT_TRUE(c.unsupported("small_workspace is set, but saved is null"));
  size_t small = 0, whole = 0;
  c.saved_bytes = 1;
  ASSERT_EQ(query(c, &small), GD_OK) << gd_last_error();
  c.small_workspace = 0;
  ASSERT_EQ(query(c, &whole), GD_OK) << gd_last_error();
  EXPECT_LT(small, whole);
}

// The portable kernels have all head sizes, Hopper's one.
TYPED_TEST(CudaRules, HeadSizes) {
  auto& c = this->c;
  const auto set_sizes = [&](int64_t K, int64_t V) {
    for (const NamedTensor& each : c.rows()) {
      const gd_tensor& t = *each.tensor;
      *each.tensor = tensor(t.data, GD_BF16, {kB, kT, t.shape[2], t.shape[2] == kHk ? K : V});
    }
  };
  size_t bytes = 0;
  for (const int64_t size : {16, 48, 64, 112, 208, 256}) {
    set_sizes(size, 272 - size);
    c.saved_bytes = 0;
    EXPECT_EQ(query(c, &bytes), GD_OK) << gd_last_error();
    c.saved_bytes = 1;
    EXPECT_EQ(query(c, &bytes), GD_OK) << gd_last_error();
  }
  c.saved_bytes = 0;
  gd_tuning tuning = GD_TUNING_INIT;
  c.exec.tuning = &tuning;
  tuning.segment_chunks = 1;
  EXPECT_EQ(query(c, &bytes), GD_OK) << gd_last_error();
}

// The portable kernels run halves of the key heads. Hopper's run parts of the sequences, of any number of heads.
TEST_F(CudaGradients, SmallWorkspaceOfThePortableKernels) {
  const auto bytes = [&] {
    size_t found = 0;
    EXPECT_EQ(query(c, &found), GD_OK) << gd_last_error();
    return found;
  };
  set_tokens(1, 32768);
  c.saved_bytes = 1;
  for (const int64_t K : {64, 128})
    for (const gd_kernels kernels : {GD_KERNELS_AUTO, GD_KERNELS_PORTABLE}) {
      for (gd_tensor* t : {&c.in.q, &c.in.k, &c.dq, &c.dk}) *t = tensor(t->data, GD_BF16, {1, 32768, kHk, K});
      c.exec.kernels = kernels;
      c.small_workspace = 0;
      const size_t whole = bytes();
      c.small_workspace = 1;
      EXPECT_LT(bytes(), whole);
    }
  c.saved_bytes = 0;
  EXPECT_TRUE(c.unsupported("small_workspace is set, but saved is null"));
  c.saved = c.place();
  c.saved_bytes = size_t{1} << 40;
  for (gd_tensor* t : {&c.in.q, &c.in.k, &c.dq, &c.dk}) *t = tensor(t->data, GD_BF16, {1, 32768, 1, 128});
  c.saved_call = saved_call_of(c);
  EXPECT_TRUE(c.unsupported("small_workspace is set, but Hk is 1: the portable CUDA kernels take halves"));
}

// Summaries have kernels of both kinds; only those of fp32 are missing.
TEST(CudaSummary, HeadSizesAndTypes) {
  CudaCall<gd_summary_args> c;
  CudaCall<gd_backward_summary_args> d;
  const auto set = [&](gd_dtype dtype, int64_t K, int64_t V) {
    for (gd_inputs* in : {&c.in, &d.in}) {
      *in = {};
      in->q = c.made_up(dtype, {kB, kT, kHk, K});
      in->k = c.made_up(dtype, {kB, kT, kHk, K});
      in->g = c.made_up(GD_F32, {kB, kT, kHv});
      in->beta = c.made_up(GD_F32, {kB, kT, kHv});
    }
    c.in.v = c.made_up(dtype, {kB, kT, kHv, V});
    d.do_ = c.made_up(dtype, {kB, kT, kHv, V});
    c.local_state = d.d_local = c.made_up(GD_F32, {kB, kHv, K, V});
    c.transition = c.made_up(GD_F32, {kB, kHv, K, K});
  };
  for (const auto& [K, V] : {std::pair(16, 256), {256, 16}, {128, 128}, {144, 208}}) {
    set(GD_F16, K, V);
    size_t any = 0, portable = 0;
    c.exec.kernels = d.exec.kernels = GD_KERNELS_AUTO;
    ASSERT_EQ(query(c, &any), GD_OK) << gd_last_error();
    c.exec.kernels = GD_KERNELS_PORTABLE;
    ASSERT_EQ(query(c, &portable), GD_OK) << gd_last_error();
    EXPECT_GE(any, portable);
    EXPECT_GT(portable, 0u);
    ASSERT_EQ(query(d, &any), GD_OK) << gd_last_error();
    d.exec.kernels = GD_KERNELS_PORTABLE;
    ASSERT_EQ(query(d, &portable), GD_OK) << gd_last_error();
    EXPECT_GE(any, portable);
    // What is prepared has a place of its own.
    c.saved_bytes = d.saved_bytes = 1;
    size_t less = 0;
    ASSERT_EQ(query(c, &less), GD_OK) << gd_last_error();
    EXPECT_LT(less, portable);
    ASSERT_EQ(query(d, &less), GD_OK) << gd_last_error();
    EXPECT_LT(less, portable);
    c.saved_bytes = d.saved_bytes = 0;
  }
  set(GD_F32, 128, 128);
  EXPECT_TRUE(c.unsupported("q, k and v are float32, must be bfloat16 or float16 in a summary on CUDA"));
  EXPECT_TRUE(d.unsupported("q, k and v are float32, must be bfloat16 or float16 in a summary on CUDA"));
  set(GD_BF16, 64, 64);
  d.do_.dtype = GD_F16;
  EXPECT_TRUE(d.unsupported("do: dtype is float16, must be bfloat16 as that of q on CUDA"));
  c.in.key_head_order = GD_KEY_HEADS_TILED;
  EXPECT_TRUE(c.unsupported("key_head_order is tiled with Hk = 2 and Hv = 4"));
}

// Memory that is enough for the kernels of every device.
TYPED_TEST(CudaRules, WorkspaceDoesNotDependOnTheDevice) {
  auto& c = this->c;
  size_t any = 0, portable = 0;
  ASSERT_EQ(query(c, &any), GD_OK) << gd_last_error();
  c.exec.kernels = GD_KERNELS_PORTABLE;
  ASSERT_EQ(query(c, &portable), GD_OK) << gd_last_error();
  EXPECT_GE(any, portable);
  EXPECT_GT(portable, 0u);
}

TEST_F(Cuda, PortableKernelsCanBeForced) {
  c.exec.kernels = GD_KERNELS_PORTABLE;
  c.exec.device_index = 1000;  // whatever devices there are
  const gd_status status = call(c);
  EXPECT_TRUE(status == GD_INVALID_ARGUMENT || status == GD_UNSUPPORTED) << gd_last_error();
  size_t bytes = 0, cut = 0;
  EXPECT_EQ(query(c, &bytes), GD_OK) << gd_last_error();
  gd_tuning tuning = GD_TUNING_INIT;
  c.exec.tuning = &tuning;
  tuning.segment_chunks = 2;
  EXPECT_EQ(query(c, &cut), GD_OK) << gd_last_error();
  EXPECT_GT(cut, bytes);
  tuning.segment_halves = 1;
  EXPECT_TRUE(c.unsupported("segment_halves is set, but the portable CUDA kernels cut all heads alike"));
  tuning.persistent_segment_chunks = 2;
  EXPECT_TRUE(c.unsupported("persistent_segment_chunks is set, but the portable CUDA kernels cut all heads alike"));
  c.exec.tuning = nullptr;
  c.in.q.stride[1] = int64_t{1} << 25;
  c.in.q.stride[0] = c.in.q.stride[1] * kT;
  EXPECT_TRUE(c.unsupported("q: stride[1] is 33554432, must be less than 33554432 on CUDA"));
  c.in.q = c.made_up(GD_BF16, {kB, kT, kHk, kD});
  c.saved = c.place();
  c.saved_bytes = 1;
  EXPECT_TRUE(said(call(c), GD_WORKSPACE_TOO_SMALL, "saved has 1 bytes, needs "));
  c.in.initial_state = c.final_state = c.made_up(GD_F32, {5, kHv, kD, kD});
  c.in.initial_state_indices = c.final_state_indices = c.made_up(GD_I32, {kB});
  EXPECT_TRUE(
      c.unsupported("saved is given, but on CUDA not together with initial_state_indices and final_state_indices"));
}

TEST_F(CudaGradients, PortableKernelsCanBeForced) {
  c.exec.kernels = GD_KERNELS_PORTABLE;
  c.exec.device_index = 1000;  // whatever devices there are
  const gd_status status = call(c);
  EXPECT_TRUE(status == GD_INVALID_ARGUMENT || status == GD_UNSUPPORTED) << gd_last_error();
  size_t bytes = 0, cut = 0;
  EXPECT_EQ(query(c, &bytes), GD_OK) << gd_last_error();
  gd_tuning tuning = GD_TUNING_INIT;
  c.exec.tuning = &tuning;
  tuning.segment_chunks = 2;
  EXPECT_EQ(query(c, &cut), GD_OK) << gd_last_error();
  EXPECT_GT(cut, bytes);
  tuning.segment_chunks = 0;
  c.dv.stride[1] = int64_t{1} << 25;
  c.dv.stride[0] = c.dv.stride[1] * kT;
  EXPECT_TRUE(c.unsupported("dv: stride[1] is 33554432, must be less than 33554432 on CUDA"));
}

// What a forward saved is for the same kernels: with `saved`, what Hopper's would take otherwise is not left to the
// portable ones.
TEST_F(CudaGradients, SavedIsForTheSameKernels) {
  size_t bytes = 0;
  c.dq.stride[0] = int64_t{1} << 39;  // more than TMA takes
  EXPECT_EQ(query(c, &bytes), GD_OK) << gd_last_error();
  c.saved_bytes = 1;
  EXPECT_TRUE(said(query(c, &bytes), GD_UNSUPPORTED, "dq: stride[0] is 549755813888, must be less than 2^39 on CUDA"));
}

TYPED_TEST(CudaRules, Types) {
  auto& c = this->c;
  for (const auto& [type, type_name] : {std::pair(GD_F16, "float16"), std::pair(GD_F32, "float32")}) {
    this->set_type(type);
    for (const auto& [name, t] : c.typed_as_q()) {
      t->dtype = GD_BF16;
      EXPECT_TRUE(
          c.unsupported(std::string(name) + ": dtype is bfloat16, must be " + type_name + " as that of q on CUDA"));
      t->dtype = type;
    }
  }
}

// fp32 has kernels of its own, on every device, for all head sizes.
TYPED_TEST(CudaRules, Float32) {
  auto& c = this->c;
  this->set_type(GD_F32);
  size_t bytes = 0;
  for (const gd_kernels kernels : {GD_KERNELS_AUTO, GD_KERNELS_PORTABLE}) {
    c.exec.kernels = kernels;
    EXPECT_EQ(query(c, &bytes), GD_OK) << gd_last_error();
    EXPECT_GT(bytes, 0u);
  }
  c.exec.kernels = GD_KERNELS_AUTO;
  gd_tuning tuning = GD_TUNING_INIT;
  c.exec.tuning = &tuning;
  tuning.segment_chunks = 2;
  EXPECT_TRUE(c.unsupported("segment_chunks is 2: the CUDA kernels for float32 cut no sequence"));
  tuning.segment_chunks = 0;
  c.in.key_head_order = GD_KEY_HEADS_TILED;
  EXPECT_TRUE(c.unsupported("key_head_order is tiled with Hk = "));
  c.in.key_head_order = GD_KEY_HEADS_GROUPED;
  c.in.k.stride[1] += 2;
  EXPECT_TRUE(c.unsupported("k: stride[1] is 258, must be a multiple of 4 (16 bytes) on CUDA"));
  c.in.k.stride[1] -= 2;
  c.set_heads(1, 257);
  this->set_type(GD_F32);
  EXPECT_EQ(query(c, &bytes), GD_OK) << gd_last_error();
}
TEST_F(Cuda, Float32IsSaved) {
  for (gd_tensor* t : {&c.in.q, &c.in.k, &c.in.v, &c.out}) t->dtype = GD_F32;
  size_t bytes = 0;
  ASSERT_EQ(gd_forward_saved_size(&c, &bytes), GD_OK) << gd_last_error();
  EXPECT_EQ(bytes, size_t{kB * kT * kHv * (kD * 4 + 32)});
  c.saved = c.place();
  c.saved_bytes = bytes;
  ASSERT_EQ(gd_forward_saved_call(&c, &c.saved_call), GD_OK) << gd_last_error();
  c.prepared = 1;
  EXPECT_TRUE(c.unsupported("prepared is set, but there is no summary of float32 q, k and v on CUDA"));
  c.prepared = 0;
  c.in.initial_state = c.made_up(GD_F32, {kB, kHv, kD, kD}), c.final_state = c.made_up(GD_F32, {kB, kHv, kD, kD});
  c.in.initial_state_indices = c.made_up(GD_I32, {kB}), c.final_state_indices = c.made_up(GD_I32, {kB});
  EXPECT_TRUE(
      c.unsupported("saved is given, but on CUDA not together with initial_state_indices and final_state_indices"));
}
TEST_F(CudaGradients, Float32HasOneSizeOfWorkspace) {
  for (const NamedTensor& each : c.rows()) each.tensor->dtype = GD_F32;
  c.small_workspace = 1;
  EXPECT_TRUE(c.unsupported("small_workspace is set, but the CUDA kernels for float32 have one size of it"));
}

// What Hopper's kernels cannot do, the portable ones take.
TYPED_TEST(CudaRules, Groups) {
  auto& c = this->c;
  size_t bytes = 0;
  c.set_heads(1, 257);
  EXPECT_EQ(query(c, &bytes), GD_OK) << gd_last_error();
  gd_tuning tuning = GD_TUNING_INIT;
  c.exec.tuning = &tuning;
  tuning.segment_chunks = 1;
  EXPECT_EQ(query(c, &bytes), GD_OK) << gd_last_error();
}
TEST_F(Cuda, LimitsOfHopperAreNotThoseOfAForward) {
  size_t bytes = 0;
  c.set_heads(kHk, kHv);
  c.output().stride[0] = int64_t{1} << 39;  // more than TMA takes
  EXPECT_EQ(query(c, &bytes), GD_OK) << gd_last_error();
  c.set_heads(kHk, kHv);
  c.in.initial_state = c.made_up(GD_F32, {int64_t{1} << 31, kHv, kD, kD});
  c.in.initial_state_indices = c.made_up(GD_I32, {kB});
  EXPECT_EQ(query(c, &bytes), GD_OK) << gd_last_error();
  c.saved_bytes = 1;
  EXPECT_TRUE(said(query(c, &bytes), GD_UNSUPPORTED,
                   "initial_state has 2147483648 slots, must have at most 2147483647 on CUDA"));
}

// Strides that TMA cannot read are for the portable kernels, whichever tensor has them.
TYPED_TEST(CudaRules, RowsThatTmaCannotRead) {
  auto& c = this->c;
  const auto bytes = [&](gd_kernels kernels) {
    size_t found = 0;
    c.exec.kernels = kernels;
    EXPECT_EQ(query(c, &found), GD_OK) << gd_last_error();
    return found;
  };
  const size_t hoppers = bytes(GD_KERNELS_AUTO), portable = bytes(GD_KERNELS_PORTABLE);
  ASSERT_GT(hoppers, portable);
  for (const auto& [name, t] : c.rows()) {
    const int64_t stride = t->stride[0];
    t->stride[0] = int64_t{1} << 39;
    EXPECT_EQ(bytes(GD_KERNELS_AUTO), portable) << name;
    t->stride[0] = stride;
  }
  // With `saved` the layer's own tensors name the kernels, of both passes alike.
  c.saved_bytes = 1;
  const size_t saved = bytes(GD_KERNELS_PORTABLE);
  ASSERT_NE(bytes(GD_KERNELS_AUTO), saved);
  for (const auto& [name, t] : {std::pair("q", &c.in.q), {"k", &c.in.k}, {"v", &c.in.v}}) {
    const int64_t stride = t->stride[0];
    t->stride[0] = int64_t{1} << 39;
    EXPECT_EQ(bytes(GD_KERNELS_AUTO), saved) << name;
    t->stride[0] = stride;
  }
}

TYPED_TEST(CudaRules, TiledKeyHeads) {
  this->c.in.key_head_order = GD_KEY_HEADS_TILED;
  EXPECT_TRUE(this->c.unsupported("key_head_order is tiled with Hk = " + std::to_string(kHk) +
                                  " and Hv = " + std::to_string(kHv) +
                                  ", must be grouped on CUDA but in recurrent steps: reorder the value heads"));
  size_t bytes = 0;
  for (const auto& [key_heads, value_heads] : {std::pair<int64_t, int64_t>{3, 3}, {1, 4}}) {  // where orders agree
    this->c.set_heads(key_heads, value_heads);
    this->c.in.key_head_order = GD_KEY_HEADS_TILED;
    EXPECT_EQ(query(this->c, &bytes), GD_OK) << gd_last_error();
  }
}

TYPED_TEST(CudaRules, Tokens) {
  this->c.set_heads(1, 1);
  this->set_tokens(1, (int64_t{1} << 31) - 63);
  EXPECT_TRUE(this->c.unsupported("T is 2147483585, must be at most 2147483584 on CUDA"));
}

TYPED_TEST(CudaRules, SequencesTimesHeads) {
  this->c.set_heads(1, 1);
  this->set_tokens(1, 64);
  const int64_t sequences = (int64_t{1} << 30);
  this->c.in.cu_seqlens = this->c.made_up(GD_I32, {sequences + 1});
  EXPECT_TRUE(this->c.unsupported("N * Hv is 1073741824 * 1, must be at most 134217727 on CUDA"));
}

TYPED_TEST(CudaRules, ChunksTimesHeads) {
  this->c.set_heads(256, 256);
  this->set_tokens(1, int64_t{1} << 29);
  EXPECT_TRUE(
      this->c.unsupported("the call has 2147483648 chunks times key heads, must have at most 2147483647 on CUDA"));
}
TYPED_TEST(CudaRules, ChunksTimesValueHeads) {
  this->c.set_heads(1, 128);
  this->c.exec.kernels = GD_KERNELS_PORTABLE;
  this->set_tokens(1, int64_t{1} << 23);
  EXPECT_TRUE(this->c.unsupported(
      "the call has 16777216 chunks times value heads, must have at most 9544371 for the portable CUDA kernels"));
}

TYPED_TEST(CudaRules, AlignmentOfRows) {
  auto& c = this->c;
  for (const auto& [name, t] : c.rows()) {
    t->stride[2] = 2 * kD;  // room enough for an output to stay free of collisions
    t->stride[1] = 2 * kHv * t->stride[2];
    t->stride[0] = 2 * kT * t->stride[1];
    const gd_tensor right = *t;
    t->data = static_cast<char*>(right.data) + 8;
    EXPECT_TRUE(said(call(c), GD_UNSUPPORTED, std::string(name) + ": data ("));
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

TYPED_TEST(CudaRules, OneEntryMayHaveAnyStride) {
  this->set_tokens(1, kT);
  for (const NamedTensor& each : this->c.rows()) each.tensor->stride[0] = 3;
  size_t bytes = 0;
  EXPECT_EQ(query(this->c, &bytes), GD_OK) << gd_last_error();
}

}  // namespace gatedelta::test
