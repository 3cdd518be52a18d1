// What the tests of the CUDA backend have in common.
#pragma once

#include <gtest/gtest.h>

#include "testing/device.hpp"

namespace gatedelta::testing {

// Skips without a device the library supports.
class Gpu : public ::testing::Test {
 protected:
  void SetUp() override {
    gd_info info{};
    info.struct_size = sizeof info;
    ASSERT_EQ(gd_get_info(&info), GD_OK) << gd_last_error();
    if (info.cuda_devices == 0) GTEST_SKIP() << "no CUDA device of compute capability 9.0";
  }
};

}  // namespace gatedelta::testing
