// Shared by the tests of the CUDA backend.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "testing/device.hpp"
#include "testing/judge.hpp"

namespace gatedelta::testing {

// Skips if there is no device that the library supports.
class Gpu : public ::testing::Test {
 protected:
  void SetUp() override {
    gd_info info{};
    info.struct_size = sizeof info;
    ASSERT_EQ(gd_get_info(&info), GD_OK) << gd_last_error();
    if (info.cuda_devices == 0) GTEST_SKIP() << "no CUDA device of compute capability 8.0 or later";
  }
};

// Every case runs with both row types, at the only head size.
inline const Specs kTypes = {"K=128 V=128 dtype=bf16", "K=128 V=128 dtype=fp16"};

// The kernels under test. gpu_portable has the portable ones forced in forward and backward, and asks for them where
// there are no others: decode, convolution, norm and the layer's step.
#ifdef GD_TEST_PORTABLE
constexpr gd_isa kForcedIsa = GD_ISA_CUDA_PORTABLE;
#else
constexpr gd_isa kForcedIsa = GD_ISA_AUTO;
#endif
constexpr bool kIsPortable = kForcedIsa == GD_ISA_CUDA_PORTABLE;

template <class Args>
Args with_isa(const Args& host) {
  Args args = host;
  args.exec.isa = kForcedIsa;
  return args;
}
template <class Args>
std::string on_device(const Args& host) {
  DeviceCall<Args> device(with_isa(host));
  if (std::string error = device.run(); !error.empty()) return error;
  return device.download(host);
}

inline void expect_ok(const Judgement& judgement, const Case& c) {
  if (!judgement.ok()) ADD_FAILURE() << describe(c) << "\n" << judgement.text();
}

inline std::vector<char> bytes_of(const gd_tensor& t) {  // of a tensor without gaps
  const char* data = static_cast<const char*>(t.data);
  return {data, data + element_count(t) * element_bytes(t.dtype)};
}

}  // namespace gatedelta::testing
