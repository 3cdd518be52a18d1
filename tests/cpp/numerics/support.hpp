#pragma once

#include <gtest/gtest.h>

#include <string>

#include "gatedelta/gatedelta.h"
#include "testing/judge.hpp"

namespace gatedelta::testing {

// A pool of its own for each test that wants one.
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

// Fails with the command that repeats the case.
inline void expect_ok(const Judgement& judgement, const Case& c, const char* op, gd_isa isa) {
  if (judgement.ok()) return;
  ADD_FAILURE() << "gatedelta check --op " << op << " --isa " << gd_isa_name(isa) << " " << describe(c) << "\n"
                << judgement.text();
}

}  // namespace gatedelta::testing
