// Cases, inputs, fp64 truth and bounds of the gated RMSNorm, forward and backward.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gatedelta/gatedelta.h"
#include "testing/generator.hpp"
#include "testing/tolerance.hpp"

namespace gatedelta::testing {

enum class NormGateKind { none, silu, sigmoid };
enum class NormLayout {
  dense,
  gaps,        // between rows, tokens and batch entries, multiples of 16 bytes apart
  odd,         // the same with odd strides, and no tensor begins at a multiple of 4 bytes where its type allows that
  heads_first  // [B, H, T, D] in memory
};

struct NormCase {
  int64_t B = 1, T = 5, H = 3, D = 128;
  gd_dtype x = GD_F32;                                                    // and d_y, dx
  gd_dtype z = GD_DTYPE_NONE, weight = GD_DTYPE_NONE, y = GD_DTYPE_NONE;  // none = that of x
  NormGateKind gate = NormGateKind::silu;
  bool has_weight = true;
  bool round = false;  // round_before_gate
  std::optional<float> eps = {};
  double x_scale = 1, z_scale = 1;
  NormLayout layout = NormLayout::dense;
  uint64_t seed = 1;

  std::string text() const;
};

// Owns the buffers of a case. What must not be read is NaN, as in generator.hpp's Problem.
class NormProblem {
 public:
  explicit NormProblem(const NormCase& c);
  NormProblem(const NormProblem&) = delete;
  NormProblem& operator=(const NormProblem&) = delete;

  const NormCase spec;
  gd_gated_norm_args forward{};
  gd_gated_norm_backward_args backward{};

  void reset();                             // outputs become NaN again
  std::vector<std::string> damage() const;  // what was written although it must not be

 private:
  struct Entry {
    std::string name;
    gd_tensor tensor;
    bool output;
    Buffer buffer;
    std::vector<char> before;
  };
  gd_tensor make(const std::string& name, bool output, gd_dtype dtype, const std::vector<int64_t>& shape);

  std::vector<Entry> entries_;
};

// Contiguous doubles in the logical shape of each output. Roundings before the gate are done as the arguments ask.
std::vector<double> reference_gated_norm(const gd_gated_norm_args& args);
struct NormGradients {
  std::vector<double> dx, dz;   // [B, T, H, D]; dz is empty without z
  std::vector<double> dweight;  // [D]; empty without a weight
};
NormGradients reference_gated_norm_backward(const gd_gated_norm_backward_args& args);

// Bound of y and every gradient stored as `stored`.
Tolerance norm_tolerance(const NormCase& c, gd_dtype stored);

}  // namespace gatedelta::testing
