// What the tests of an operation run on. A program has one engine, chosen when it is compiled (CMakeLists.txt):
//   cpu            every instruction set of the machine in turn
//   cuda           a CUDA device, with the kernels that serve a call by default
//   cuda_portable  the same with the portable kernels forced in forward and backward
// The tests in this folder run on all of them. Tests of one engine alone are in ../numerics and ../gpu.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "testing/conv1d.hpp"
#include "testing/gated_norm_judge.hpp"
#include "testing/judge.hpp"
#include "testing/layer_step.hpp"
#include "testing/number.hpp"
#include "tests/cpp/ops/cases.hpp"
#if defined GD_TEST_CUDA
#include "testing/layer_step_device.hpp"
#endif

namespace gatedelta::testing {

#if defined GD_TEST_CUDA

// Operations without portable kernels take the choice and ignore it.
constexpr gd_kernels kForcedKernels = kIsPortable ? GD_KERNELS_PORTABLE : GD_KERNELS_AUTO;
inline std::vector<gd_isa> engine_isas() { return {GD_ISA_AUTO}; }

// Skips if there is no device that the library supports.
class OnEngine : public ::testing::Test {
 protected:
  void SetUp() override {
    gd_info info{};
    info.struct_size = sizeof info;
    ASSERT_EQ(gd_get_info(&info), GD_OK) << gd_last_error();
    if (info.cuda_devices == 0) GTEST_SKIP() << "no CUDA device of compute capability 8.0 or later";
  }
};

template <class Args>
Args with_kernels(const Args& host) {
  Args args = host;
  args.exec.kernels = kForcedKernels;
  return args;
}
template <class Args>
std::string on_device(const Args& host) {
  DeviceCall<Args> device(with_kernels(host));
  if (std::string error = device.run(); !error.empty()) return error;
  return device.download(host);
}
template <class Args>
std::string run(const Args& host, gd_isa, gd_thread_pool* = nullptr) {
  return on_device(host);
}

// 16-bit operands are multiplied by tensor cores, so fp16 has the bounds of bf16.
inline Compute compute_of(gd_dtype dtype, gd_isa) { return dtype == GD_F32 ? Compute::fp32 : Compute::tensor_cores; }
inline std::string check_command(const char* op, gd_isa) {
  return std::string("gatedelta check --device cuda") + (kIsPortable ? " --kernels portable" : "") + " --op " + op +
         " ";
}

#else

inline std::vector<gd_isa> engine_isas() { return usable_isas(); }
using OnEngine = ::testing::Test;

inline Exec alone(gd_isa isa) { return {.isa = isa, .pool = nullptr, .threads = 0}; }
inline std::string run(const gd_forward_args& args, gd_isa isa) { return run_forward(args, alone(isa)); }
inline std::string run(const gd_backward_args& args, gd_isa isa) { return run_backward(args, alone(isa)); }
inline std::string run(const gd_recurrent_args& args, gd_isa isa) { return run_recurrent(args, alone(isa)); }
inline std::string run(const gd_conv1d_args& args, gd_isa isa, gd_thread_pool* pool = nullptr) {
  return run_conv1d(args, isa, pool);
}
inline std::string run(const gd_conv1d_backward_args& args, gd_isa isa, gd_thread_pool* pool = nullptr) {
  return run_conv1d_backward(args, isa, pool);
}
inline std::string run(const gd_gated_norm_args& args, gd_isa isa) { return run_gated_norm(args, alone(isa)); }
inline std::string run(const gd_gated_norm_backward_args& args, gd_isa isa) {
  return run_gated_norm_backward(args, alone(isa));
}

inline Compute compute_of(gd_dtype dtype, gd_isa isa) { return chunk_compute(dtype, isa); }
inline std::string check_command(const char* op, gd_isa isa) {
  return std::string("gatedelta check --isa ") + gd_isa_name(isa) + " --op " + op + " ";
}

#endif

// Threads of a test's own. Only calls on the CPU use them.
class Pool {
 public:
  explicit Pool(int threads) { EXPECT_EQ(gd_thread_pool_create(threads, &pool_), GD_OK) << gd_last_error(); }
  ~Pool() { gd_thread_pool_destroy(pool_); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  operator gd_thread_pool*() const { return pool_; }

 private:
  gd_thread_pool* pool_ = nullptr;
};

// The arguments and the judge of each operation of the rule.
template <class Args>
struct Operation;
template <>
struct Operation<gd_forward_args> {
  static constexpr const char* kName = "fwd";
  using Run = std::function<std::string(const gd_forward_args&)>;
  static const gd_forward_args& args(Problem& problem) { return problem.forward; }
  static Judgement judge(Judge& judge, gd_isa isa, const Run& run) {
    return judge.forward(compute_of(judge.problem().spec.dtype, isa), run);
  }
};
template <>
struct Operation<gd_backward_args> {
  static constexpr const char* kName = "bwd";
  using Run = std::function<std::string(const gd_backward_args&)>;
  static const gd_backward_args& args(Problem& problem) { return problem.backward; }
  static Judgement judge(Judge& judge, gd_isa isa, const Run& run) {
    return judge.backward(compute_of(judge.problem().spec.dtype, isa), run);
  }
};
template <>
struct Operation<gd_recurrent_args> {
  static constexpr const char* kName = "rec";
  using Run = std::function<std::string(const gd_recurrent_args&)>;
  static const gd_recurrent_args& args(Problem& problem) { return problem.recurrent; }
  static Judgement judge(Judge& judge, gd_isa, const Run& run) { return judge.recurrent(run); }
};

// Fails with the command that repeats the case.
inline void expect_ok(const Judgement& judgement, const Case& c, const char* op, gd_isa isa = GD_ISA_AUTO) {
  if (!judgement.ok()) ADD_FAILURE() << check_command(op, isa) << describe(c) << "\n" << judgement.text();
}

// Judges one call of the problem on every set of kernels of the engine.
template <class Args>
void check_calls(Judge& judge) {
  using Op = Operation<Args>;
  for (const gd_isa isa : engine_isas()) {
    const Judgement judgement = Op::judge(judge, isa, [&](const Args& args) { return run(args, isa); });
    expect_ok(judgement, judge.problem().spec, Op::kName, isa);
  }
}
template <class Args>
void check_calls(const Specs& specs) {
  for (const std::string& spec : selected(specs)) {
    Judge judge(parse_case(spec));
    check_calls<Args>(judge);
  }
}

// On the CPU also from what the forward saved. The GPU's tests of that choose how either of the two is cut.
inline void check_backward(const Specs& specs) {
  for (const std::string& spec : selected(specs)) {
    Judge judge(parse_case(spec));
    check_calls<gd_backward_args>(judge);
#if !defined GD_TEST_CUDA
    SCOPED_TRACE("from what the forward saved");
    for (const gd_isa isa : engine_isas())
      expect_ok(judge.backward(alone(isa), true), judge.problem().spec, "bwd", isa);
#endif
  }
}

inline std::vector<char> bytes_of(const gd_tensor& t) {  // of a tensor without gaps
  const char* data = static_cast<const char*>(t.data);
  return {data, data + element_count(t) * element_bytes(t.dtype)};
}

}  // namespace gatedelta::testing
