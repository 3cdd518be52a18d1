// How far a result is from the truth: relative L2 per head.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gatedelta/gatedelta.h"
#include "testing/tolerance.hpp"

namespace gatedelta::testing {

// Values seen as [outer, heads, inner]: o is [B*T, Hv, V], a gate gradient [B*T, Hv, 1], states [N, Hv, K*V].
struct HeadShape {
  int64_t outer, heads, inner;
};
HeadShape head_shape(const gd_tensor& t, int head_axis);

struct Comparison {
  double error = 0;         // of the worst head: |got - truth| / |truth|, both L2 norms over the head
  double margin = 0;        // of the worst head: |got - truth| / (relative |truth| + absolute sqrt(n)); passes at <= 1
  int64_t head = -1;        // the head with the worst margin
  double max_abs = 0;       // largest single difference anywhere
  int64_t non_finite = -1;  // first place (in [outer, heads, inner] order) where one is NaN or Inf and the other is not
  bool ok = true;

  std::string text() const;
};

// Heads from `limit` on are left out (limit < 0: none). `size` [outer, heads], if given, is what rows of a head
// would be if no terms cancelled: where a row of the truth is smaller, the relative bound is of this size.
Comparison compare(const std::vector<double>& got, const std::vector<double>& truth, HeadShape shape,
                   const Tolerance& tolerance, int64_t limit = -1, const std::vector<double>* size = nullptr);

}  // namespace gatedelta::testing
