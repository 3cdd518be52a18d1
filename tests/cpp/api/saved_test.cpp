// What a backward reads must be what a forward of its own inputs has saved. Which call that was travels on the host,
// beside the memory, so the rules are those of both devices and need no data.
#include <cstring>
#include <limits>

#include "cases.hpp"

namespace gatedelta::test {
namespace {

gd_saved_call saved_call_of(const gd_forward_args& args) {
  gd_saved_call call{};
  EXPECT_EQ(gd_forward_saved_call(&args, &call), GD_OK) << gd_last_error();
  return call;
}

void set_dense(gd_tensor& t, std::initializer_list<int64_t> shape) {
  t = dense(t.data, static_cast<gd_dtype>(t.dtype), shape);
}

// A query reads no address, so any shape will do.
struct AnyForward : ForwardCase {
  explicit AnyForward(gd_device device = GD_CPU) {
    exec.device = device;
    if (device == GD_CUDA) set_dtype(GD_BF16);
  }
  void set_shape(int64_t B, int64_t T, int64_t Hk, int64_t Hv, int64_t K, int64_t V) {
    for (gd_tensor* t : {&in.q, &in.k}) set_dense(*t, {B, T, Hk, K});
    for (gd_tensor* t : {&in.v, &out}) set_dense(*t, {B, T, Hv, V});
    for (gd_tensor* t : {&in.g, &in.beta}) set_dense(*t, {B, T, Hv});
  }
  void set_dtype(gd_dtype dtype) {
    for (gd_tensor* t : {&in.q, &in.k, &in.v, &out}) t->dtype = dtype;
  }
  void set_scale(float scale) { in.has_scale = 1, in.scale = scale; }
  void set_raw() { in.gate = GD_GATE_RAW, in.A_log = input({kHv}); }
};

// The same for the backward, with what it needs to get as far as `saved`.
struct AnyBackward : BackwardCase {
  explicit AnyBackward(const AnyForward& forward) {
    exec = forward.exec;
    in = forward.in;
    if (in.q.dtype != GD_F32)
      for (gd_tensor* t : {&do_, &dq, &dk, &dv}) t->dtype = in.q.dtype;
    saved_bytes = size_t{1} << 20;
    saved = memory.take(saved_bytes, 0);
  }
  // The call and the query refuse alike.
  testing::AssertionResult refuses_as_query(const std::string& text) {
    size_t bytes = 0;
    if (query(&bytes) != GD_INVALID_ARGUMENT || std::string(gd_last_error()).find(text) == std::string::npos)
      return testing::AssertionFailure() << "the query says: " << gd_last_error();
    return invalid(text);
  }
};

struct Difference {
  const char* name;
  void (*change)(AnyForward&);
  const char *there, *here;  // the changed forward, and the other
};
const Difference kDifferences[] = {
    {"B", [](auto& f) { f.set_shape(1, kT, kHk, kHv, kK, kV); }, "with B = 1", "with B = 2"},
    {"T", [](auto& f) { f.set_shape(kB, 64, kHk, kHv, kK, kV); }, "with T = 64", "with T = 70"},
    {"LongerT", [](auto& f) { f.set_shape(kB, 700, kHk, kHv, kK, kV); }, "with T = 700", "with T = 70"},
    {"Hk", [](auto& f) { f.set_shape(kB, kT, 1, kHv, kK, kV); }, "with Hk = 1", "with Hk = 2"},
    {"Hv", [](auto& f) { f.set_shape(kB, kT, kHk, 8, kK, kV); }, "with Hv = 8", "with Hv = 4"},
    {"K", [](auto& f) { f.set_shape(kB, kT, kHk, kHv, 32, kV); }, "with K = 32", "with K = 16"},
    {"V", [](auto& f) { f.set_shape(kB, kT, kHk, kHv, kK, 16); }, "with V = 16", "with V = 32"},
    {"Dtype", [](auto& f) { f.set_dtype(GD_F16); }, "with dtype float16", "with dtype "},
    {"Gate", [](auto& f) { f.set_raw(); }, "with gate raw", "with gate log"},
    {"Beta", [](auto& f) { f.in.beta_kind = GD_BETA_LOGIT; }, "with beta_kind logit", "with beta_kind value"},
    {"BetaDoubled", [](auto& f) { f.in.beta_kind = GD_BETA_LOGIT_DOUBLED; }, "with beta_kind logit_doubled",
     "with beta_kind value"},
    {"Layout", [](auto& f) { f.in.state_layout = GD_STATE_VK; }, "with state_layout VK", "with state_layout KV"},
    {"L2norm", [](auto& f) { f.in.l2norm = 1; }, "with l2norm", "without l2norm"},
    {"Scale", [](auto& f) { f.set_scale(0.5f); }, "with scale = 0.5", "with scale = 0.25"},
    {"ScaleOfZero", [](auto& f) { f.set_scale(0); }, "with scale = 0", "with scale = 0.25"},
    {"InitialState", [](auto& f) { f.in.initial_state = f.state(kB); }, "with initial_state", "without initial_state"},
    {"BatchInvariant", [](auto& f) { f.batch_invariant = 1; }, "with batch_invariant", "without batch_invariant"},
};

std::string message_of(const char* there, const char* here) {
  return std::string("saved is of a call ") + there + ", but this one is " + here;
}

TEST(Saved, OfAnotherCall) {
  for (const gd_device device : {GD_CPU, GD_CUDA})
    for (const Difference& difference : kDifferences) {
      SCOPED_TRACE(std::string(difference.name) + (device == GD_CUDA ? " on CUDA" : ""));
      AnyForward forward(device), other(device);
      difference.change(other);
      AnyBackward c(forward);
      c.saved_call = saved_call_of(other);
      EXPECT_TRUE(c.refuses_as_query(message_of(difference.there, difference.here)));
    }
}

// And the other way round: the backward has what the forward did not.
TEST(Saved, WithoutWhatTheBackwardHas) {
  const std::pair<const char*, void (*)(AnyForward&)> given[] = {
      {"initial_state", [](auto& f) { f.in.initial_state = f.state(kB); }},
      {"l2norm", [](auto& f) { f.in.l2norm = 1; }},
  };
  for (const auto& [name, give] : given) {
    AnyForward forward, other;
    give(forward);
    AnyBackward c(forward);
    c.saved_call = saved_call_of(other);
    EXPECT_TRUE(
        c.refuses_as_query(std::string("saved is of a call without ") + name + ", but this one is with " + name));
  }
}

TEST(Saved, OptionalParametersAndPacks) {
  AnyForward plain, biased;
  plain.set_raw(), biased.set_raw();
  biased.in.dt_bias = biased.input({kHv});
  AnyBackward c(plain);
  c.saved_call = saved_call_of(biased);
  EXPECT_TRUE(c.refuses_as_query("saved is of a call with dt_bias, but this one is without dt_bias"));

  AnyForward one, three;
  one.pack(0, 2 * kT), three.pack(0, 70, 100, 2 * kT);
  BackwardCase packed;
  packed.pack(0, 2 * kT);
  packed.saved_bytes = size_t{1} << 20;
  packed.saved = packed.memory.take(packed.saved_bytes, 0);
  packed.saved_call = saved_call_of(three);
  EXPECT_TRUE(packed.invalid("saved is of a call with N = 3, but this one is with N = 1"));
  one.in.cu_seqlens = {};
  packed.saved_call = saved_call_of(one);
  EXPECT_TRUE(packed.invalid("saved is of a call without cu_seqlens, but this one is with cu_seqlens"));
}

TEST(Saved, OfTheOtherDeviceOrKernels) {
  AnyForward here(GD_CUDA), there;
  there.set_dtype(GD_BF16);
  AnyBackward c(here);
  c.saved_call = saved_call_of(there);
  EXPECT_TRUE(c.refuses_as_query("saved is of a call with device cpu, but this one is with device cuda"));
  AnyForward portable(GD_CUDA);
  portable.exec.kernels = GD_KERNELS_PORTABLE;
  c.saved_call = saved_call_of(portable);
  EXPECT_TRUE(c.refuses_as_query("saved is of a call with kernels portable, but this one is with kernels auto"));
}

TEST(Saved, OrderOfKeyHeads) {
  AnyForward tiled, grouped;
  tiled.in.key_head_order = GD_KEY_HEADS_TILED;
  AnyBackward c(grouped);
  c.saved_call = saved_call_of(tiled);
  EXPECT_TRUE(c.refuses_as_query(message_of("with key_head_order tiled", "with key_head_order grouped")));
}

// What the contents do not depend on.
TEST(Saved, OfACallThatSavesTheSame) {
  const std::pair<const char*, void (*)(AnyForward&)> changes[] = {
      {"explicit scale", [](auto& f) { f.set_scale(0.25f); }},
      {"rounded scale", [](auto& f) { f.set_scale(0.25000003f); }},
      {"uncut", [](auto& f) { f.context_parallel = GD_CP_OFF; }},
      {"another instruction set", [](auto& f) { f.exec.isa = GD_ISA_GENERIC; }},
      {"final state", [](auto& f) { f.final_state = f.state_output(kB); }},
  };
  for (const auto& [name, change] : changes) {
    AnyForward forward, other;
    change(other);
    AnyBackward c(forward);
    c.saved_call = saved_call_of(other);
    EXPECT_TRUE(c.accepts()) << name;
  }
  // Slots of a pool, or the states themselves.
  AnyForward pool, states;
  pool.in.initial_state = pool.state(7);
  pool.in.initial_state_indices = pool.indices(3, 5);
  states.in.initial_state = states.state(kB);
  AnyBackward c(states);
  c.saved_call = saved_call_of(pool);
  EXPECT_TRUE(c.accepts());
}

TEST(Saved, OfNoCall) {
  AnyForward forward;
  AnyBackward c(forward);
  size_t bytes = 0;
  EXPECT_TRUE(c.invalid("saved is given without saved_call, which says of which call it is: gd_forward_saved_call"));
  EXPECT_EQ(c.query(&bytes), GD_OK) << "a query needs none";
  std::memset(&c.saved_call, 0x5a, sizeof c.saved_call);
  EXPECT_TRUE(c.refuses_as_query("saved_call: reserved fields must be zero"));
  c.saved_call.reserved_flags = 0;
  std::memset(c.saved_call.reserved, 0, sizeof c.saved_call.reserved);
  EXPECT_TRUE(c.refuses_as_query("saved is of a call with B = 6510615555426900570, but this one is with B = 2"));
  c.saved_call = saved_call_of(forward);
  c.saved_call.gate = 0x5a;
  EXPECT_TRUE(c.refuses_as_query("saved is of a call with gate unknown, but this one is with gate log"));
  c.saved_call = saved_call_of(forward);
  c.saved_call.scale = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(c.refuses_as_query("but this one is with scale = 0.25"));
}

// Of an empty batch nothing is saved, and then there is no memory; what is given is compared all the same.
TEST(Saved, CallWithNothingToRead) {
  AnyForward forward, longer;
  longer.set_shape(kB, 128, kHk, kHv, kK, kV);
  AnyBackward c(forward);
  c.saved = nullptr;
  c.saved_bytes = 0;
  c.saved_call = saved_call_of(longer);
  EXPECT_TRUE(c.refuses_as_query(message_of("with T = 128", "with T = 70")));
  c.saved_call = saved_call_of(forward);
  EXPECT_TRUE(c.accepts());
  forward.saved_call = saved_call_of(longer);
  EXPECT_TRUE(forward.invalid(message_of("with T = 128", "with T = 70")));
  forward.saved_call = saved_call_of(forward);
  EXPECT_TRUE(forward.accepts());
}

TEST(Saved, ReadByStagesOfContextParallelism) {
  AnyForward plain, longer, stateful;
  longer.set_shape(kB, 128, kHk, kHv, kK, kV);
  stateful.in.initial_state = stateful.state(kB);
  void* const saved = plain.memory.take(size_t{1} << 20, 0);

  AnyForward forward;
  forward.saved = saved, forward.saved_bytes = size_t{1} << 20, forward.prepared = 1;
  EXPECT_TRUE(forward.invalid("saved is given without saved_call"));
  forward.saved_call = saved_call_of(longer);
  EXPECT_TRUE(forward.invalid(message_of("with T = 128", "with T = 70")));
  forward.in.initial_state = forward.state(kB);  // no part of what a summary prepares
  forward.saved_call = saved_call_of(plain);
  EXPECT_TRUE(forward.accepts());

  Case<gd_summary_args> summary;
  summary.local_state = summary.output({kB, kHv, kK, kV});
  summary.saved = saved, summary.saved_bytes = size_t{1} << 20;
  EXPECT_TRUE(summary.accepts());
  summary.prepared = 1;
  EXPECT_TRUE(summary.invalid("saved is given without saved_call"));
  summary.saved_call = saved_call_of(longer);
  EXPECT_TRUE(summary.invalid(message_of("with T = 128", "with T = 70")));
  summary.saved_call = saved_call_of(plain);
  EXPECT_TRUE(summary.accepts());

  Case<gd_backward_summary_args> backward;
  backward.in.v = {};
  backward.do_ = backward.input({kB, kT, kHv, kV});
  backward.d_local = backward.output({kB, kHv, kK, kV});
  backward.saved = saved, backward.saved_bytes = size_t{1} << 20;
  EXPECT_TRUE(backward.invalid("saved is given without saved_call"));
  backward.saved_call = saved_call_of(longer);
  EXPECT_TRUE(backward.invalid(message_of("with T = 128", "with T = 70")));
  backward.saved_call = saved_call_of(stateful);  // summaries have no initial state, their forward has
  EXPECT_TRUE(backward.accepts());
}

TEST(Saved, CallIsAskedForAsTheSizeIs) {
  AnyForward c;
  EXPECT_EQ(gd_forward_saved_call(&c, nullptr), GD_INVALID_ARGUMENT);
  EXPECT_STREQ(gd_last_error(), "saved_call is null: there is nowhere to put the answer");
  EXPECT_EQ(gd_forward_saved_call(nullptr, nullptr), GD_INVALID_ARGUMENT);
  c.in.q = {};
  gd_saved_call call{};
  EXPECT_EQ(gd_forward_saved_call(&c, &call), GD_INVALID_ARGUMENT);
  EXPECT_EQ(call.value_heads, 0);
}

}  // namespace
}  // namespace gatedelta::test
