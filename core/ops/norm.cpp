// Normalization over the last axis.
#include "strobe/kernels/norm.h"

#include "strobe/core/autograd.h"
#include "strobe/core/ops.h"

namespace strobe {
namespace {

using NormKernel = void (*)(const kernels::NormArgs&, const Stream&);
using NormGradKernel = void (*)(const kernels::NormGradArgs&, const Stream&);

void check_parameter(const char* name, const char* argument, const Tensor& parameter, const Tensor& x) {
  if (!parameter.defined()) return;
  require_same_kind(name, argument, parameter, "x", x);
  STROBE_CHECK(parameter.shape() == Shape{x.dim(-1)}, name, ": ", argument, " ", parameter.shape(), " given for x ",
               x.shape(), ", expected ", Shape{x.dim(-1)});
}

Tensor normalize(const char* name, NormKernel forward, NormGradKernel backward, const Tensor& input,
                 const Tensor& given_weight, const Tensor& given_bias, double eps) {
  require_floating(name, "x", input);
  STROBE_CHECK(input.rank() >= 1, name, ": x ", input.shape(), " given, expected rank 1 or more");
  check_parameter(name, "weight", given_weight, input);
  check_parameter(name, "bias", given_bias, input);
  STROBE_CHECK(eps >= 0, name, ": eps ", eps, " given, expected at least 0");
  const Tensor x = contiguous(input);
  const Tensor weight = given_weight.defined() ? contiguous(given_weight) : Tensor();
  const Tensor bias = given_bias.defined() ? contiguous(given_bias) : Tensor();
  const int64_t cols = x.dim(-1);
  const int64_t rows = cols > 0 ? x.size() / cols : 0;
  const Tensor y = empty_like(x);
  const Tensor mean = empty({rows}, accumulate_dtype(x.dtype()), x.device());
  const Tensor rstd = empty_like(mean);
  forward({.y = y.data(),
           .x = x.data(),
           .weight = data_or_null(weight),
           .bias = data_or_null(bias),
           .mean = mean.data(),
           .rstd = rstd.data(),
           .rows = rows,
           .cols = cols,
           .dtype = x.dtype(),
           .eps = eps},
          x.stream());
  return record(name, y, {x, weight, bias},
                [x, weight, mean, rstd, backward, wants_dx = needs_grad({x}), wants_dweight = needs_grad({weight}),
                 wants_dbias = needs_grad({bias})](const Tensor& dout) -> Grads {
                  const Tensor dy = contiguous(dout);
                  const Shape parameter_shape{x.dim(-1)};
                  const Tensor dx = wants_dx ? empty_like(x) : Tensor();
                  const Tensor dweight = wants_dweight ? empty_like(weight) : Tensor();
                  const Tensor dbias = wants_dbias ? empty(parameter_shape, x.dtype(), x.device()) : Tensor();
                  kernels::NormGradArgs args{.dx = data_or_null(dx),
                                             .dweight = data_or_null(dweight),
                                             .dbias = data_or_null(dbias),
                                             .dy = dy.data(),
                                             .x = x.data(),
                                             .weight = data_or_null(weight),
                                             .mean = mean.data(),
                                             .rstd = rstd.data(),
                                             .rows = rstd.size(),
                                             .cols = x.dim(-1),
                                             .dtype = x.dtype()};
                  args.workspace_bytes = kernels::norm_backward_workspace(args, x.device());
                  const Tensor workspace = empty_bytes(args.workspace_bytes, x.device());
                  args.workspace = workspace.data();
                  backward(args, x.stream());
                  return {dx, dweight, dbias};
                });
}

}  // namespace

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  return normalize("layer_norm", kernels::layer_norm_forward, kernels::layer_norm_backward, x, weight, bias, eps);
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  return normalize("rms_norm", kernels::rms_norm_forward, kernels::rms_norm_backward, x, weight, Tensor(), eps);
}

}  // namespace strobe
