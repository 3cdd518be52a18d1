#include "testing/compare.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace gatedelta::testing {

HeadShape head_shape(const gd_tensor& t, int head_axis) {
  HeadShape shape{1, t.shape[head_axis], 1};
  for (int i = 0; i < head_axis; ++i) shape.outer *= t.shape[i];
  for (int i = head_axis + 1; i < t.rank; ++i) shape.inner *= t.shape[i];
  return shape;
}

Comparison compare(const std::vector<double>& got, const std::vector<double>& truth, HeadShape shape,
                   const Tolerance& tolerance, int64_t limit, const std::vector<double>* size) {
  Comparison result;
  const int64_t heads = limit < 0 ? shape.heads : std::min(limit, shape.heads);
  for (int64_t h = 0; h < heads; ++h) {
    double difference = 0, norm = 0, bounded = 0;
    for (int64_t o = 0; o < shape.outer; ++o) {
      double row = 0;
      for (int64_t i = 0; i < shape.inner; ++i) {
        const int64_t place = (o * shape.heads + h) * shape.inner + i;
        const double x = got[place], y = truth[place];
        if (!std::isfinite(x) || !std::isfinite(y)) {
          const bool same = (std::isnan(x) && std::isnan(y)) || x == y;
          if (!same && (result.non_finite < 0 || place < result.non_finite)) result.non_finite = place;
          continue;
        }
        difference += (x - y) * (x - y);
        row += y * y;
        result.max_abs = std::max(result.max_abs, std::fabs(x - y));
      }
      const double uncancelled = size ? (*size)[o * shape.heads + h] : 0;
      norm += row;
      bounded += std::max(row, uncancelled * uncancelled);
    }
    difference = std::sqrt(difference), norm = std::sqrt(norm);
    const double allowed = tolerance.relative * std::sqrt(bounded) +
                           tolerance.absolute * std::sqrt(static_cast<double>(shape.outer * shape.inner));
    const double margin = difference == 0 ? 0 : difference / allowed;  // allowed == 0: infinite
    if (result.head < 0 || margin > result.margin) {
      result.head = h;
      result.margin = margin;
      result.error = difference == 0 ? 0 : difference / norm;
    }
  }
  result.ok = result.non_finite < 0 && result.margin <= 1;
  return result;
}

std::string Comparison::text() const {
  char buffer[160];
  int used = std::snprintf(buffer, sizeof buffer, "%s error %.2e (%.2f of the bound) in head %lld, max abs %.2e",
                           ok ? "ok" : "FAILED", error, margin, static_cast<long long>(head), max_abs);
  if (non_finite >= 0) {
    std::snprintf(buffer + used, sizeof buffer - static_cast<size_t>(used), ", NaN or Inf at %lld",
                  static_cast<long long>(non_finite));
  }
  return buffer;
}

}  // namespace gatedelta::testing
