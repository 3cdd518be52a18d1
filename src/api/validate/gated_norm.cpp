// The gated RMSNorm's tensors and options.
#include <cinttypes>
#include <cmath>

#include "api/validate/checker.hpp"

namespace gatedelta::api {

namespace {

constexpr int64_t kMaxDim = 512;
constexpr float kDefaultEps = 1e-6f;

Shape rows_of(const GatedNorm& in) { return {"[B, T, H, D]", 4, {in.batch, in.tokens, in.heads, in.dim}}; }

gd_status channel_vector(Checker& check, const char* name, const gd_tensor& t, const GatedNorm& in, Role role,
                         HeadVector& out) {
  if (is_absent(t)) return GD_OK;
  GD_TRY(check.tensor(name, t, {"[D]", 1, {in.dim}}, kFloats, 1, role));
  out = {check.address(t), static_cast<gd_dtype>(t.dtype), 1};
  return GD_OK;
}

template <class Args>
gd_status validate_inputs(Checker& check, const Args& args, GatedNorm& in) {
  GD_TRY(check_enum("activation", args.activation, GD_NORM_SIGMOID));
  const Shape any = {"[B, T, H, D]", 4, {kAny, kAny, kAny, kAny}};
  GD_TRY(check.rows("x", args.x, any, Need::required, Role::input, in.x));
  const int64_t dim = args.x.shape[3];
  if (dim < 16 || dim > kMaxDim || dim % 16 != 0)
    return invalid("D is %" PRId64 ", must be a multiple of 16 from 16 to %" PRId64, dim, kMaxDim);
  in.batch = args.x.shape[0];
  in.tokens = args.x.shape[1];
  in.heads = args.x.shape[2];
  in.dim = static_cast<int>(dim);
  int64_t rows = 0;
  if (__builtin_mul_overflow(in.batch, in.tokens, &rows) || __builtin_mul_overflow(rows, in.heads, &rows) ||
      rows > kMaxSize)
    return invalid("B * T * H is %" PRId64 " * %" PRId64 " * %" PRId64 ", too many rows to compute", in.batch,
                   in.tokens, in.heads);
  GD_TRY(check.rows("gate", args.gate, rows_of(in), Need::optional, Role::input, in.z));
  GD_TRY(channel_vector(check, "weight", args.weight, in, Role::input, in.weight));
  if (!in.z && args.activation != GD_NORM_SILU)
    return invalid("activation is sigmoid, but there is no gate it would act on: leave it silu");
  in.activation = static_cast<gd_norm_activation>(args.activation);
  in.round_before_gate = args.round_before_gate != 0;

  if (!args.has_eps && args.eps != 0) return invalid("eps is %g, but has_eps is 0", static_cast<double>(args.eps));
  if (!std::isfinite(args.eps) || args.eps < 0)
    return invalid("eps is %g, must be finite and not negative", static_cast<double>(args.eps));
  in.eps = args.has_eps ? args.eps : kDefaultEps;
  return GD_OK;
}

}  // namespace

gd_status validate_shapes(const gd_gated_norm_args& args, Stage stage, GatedNormProblem& p) {
  Checker check(stage);
  GD_TRY(check_reserved("gd_gated_norm_args", args.reserved));
  GD_TRY(validate_inputs(check, args, p.in));
  GD_TRY(check.rows("out", args.out, rows_of(p.in), Need::required, Role::output, p.y));
  return check.finish(args.exec);
}

gd_status validate_shapes(const gd_gated_norm_backward_args& args, Stage stage, GatedNormBackwardProblem& p) {
  Checker check(stage);
  GD_TRY(check_reserved("gd_gated_norm_backward_args", args.reserved));
  GD_TRY(validate_inputs(check, args, p.in));
  GD_TRY(check.rows("dy", args.dy, rows_of(p.in), Need::required, Role::input, p.d_y));
  GD_TRY(check.rows("dx", args.dx, rows_of(p.in), Need::optional, Role::output, p.dx));
  if (!p.in.z && !is_absent(args.dgate)) return invalid("dgate is given, but there is no gate");
  GD_TRY(check.rows("dgate", args.dgate, rows_of(p.in), Need::optional, Role::output, p.dz));
  if (!p.in.weight && !is_absent(args.dweight)) return invalid("dweight is given, but there is no weight");
  GD_TRY(channel_vector(check, "dweight", args.dweight, p.in, Role::output, p.dweight));
  if (!p.dx && !p.dz && !p.dweight) return invalid("no gradient is asked for: dx, dgate and dweight are absent");
  return check.finish(args.exec);
}

}  // namespace gatedelta::api
