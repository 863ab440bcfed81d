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

Tensor contiguous_or_undefined(const Tensor& x) { return x.defined() ? contiguous(x) : x; }

// Without a residual the sum is x itself.
AddNormResult normalize(const char* name, NormKernel forward, NormGradKernel backward, const Tensor& input,
                        const Tensor& given_residual, const Tensor& given_weight, const Tensor& given_bias,
                        double eps) {
  require_floating(name, "x", input);
  STROBE_CHECK(input.rank() >= 1, name, ": x ", input.shape(), " given, expected rank 1 or more");
  if (given_residual.defined()) {
    require_same_kind(name, "residual", given_residual, "x", input);
    STROBE_CHECK(given_residual.shape() == input.shape(), name, ": residual ", given_residual.shape(), " given for x ",
                 input.shape(), ", expected the same shape");
  }
  check_parameter(name, "weight", given_weight, input);
  check_parameter(name, "bias", given_bias, input);
  STROBE_CHECK(eps >= 0, name, ": eps ", eps, " given, expected at least 0");
  const Tensor x = contiguous(input);
  const Tensor residual = contiguous_or_undefined(given_residual);
  const Tensor weight = contiguous_or_undefined(given_weight);
  const Tensor bias = contiguous_or_undefined(given_bias);
  const int64_t cols = x.dim(-1);
  const int64_t rows = cols > 0 ? x.size() / cols : 0;
  const Tensor sum = residual.defined() ? empty_like(x) : x;
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
           .eps = eps,
           .residual = data_or_null(residual),
           .sum = residual.defined() ? sum.data() : nullptr},
          x.stream());

  // The gradients of sum, weight and bias from those of the two outputs.
  const auto differentiate = [sum = residual.defined() ? sum.detach() : x, weight, mean, rstd, backward,
                              wants_dx = needs_grad({x, residual}), wants_dweight = needs_grad({weight}),
                              wants_dbias = needs_grad({bias})](const Tensor& dsum, const Tensor& dout) -> Grads {
    if (!dout.defined()) return {dsum, Tensor(), Tensor()};
    const Tensor dy = contiguous(dout), others = contiguous_or_undefined(dsum);
    const Tensor dx = wants_dx ? empty_like(sum) : Tensor();
    const Tensor dweight = wants_dweight ? empty_like(weight) : Tensor();
    const Tensor dbias = wants_dbias ? empty({sum.dim(-1)}, sum.dtype(), sum.device()) : Tensor();
    kernels::NormGradArgs args{.dx = data_or_null(dx),
                               .dweight = data_or_null(dweight),
                               .dbias = data_or_null(dbias),
                               .dy = dy.data(),
                               .x = sum.data(),
                               .weight = data_or_null(weight),
                               .mean = mean.data(),
                               .rstd = rstd.data(),
                               .rows = rstd.size(),
                               .cols = sum.dim(-1),
                               .dtype = sum.dtype(),
                               .dsum = data_or_null(others)};
    args.workspace_bytes = kernels::norm_backward_workspace(args, sum.device());
    const Tensor workspace = empty_bytes(args.workspace_bytes, sum.device());
    args.workspace = workspace.data();
    backward(args, sum.stream());
    return {dx, dweight, dbias};
  };
  if (!residual.defined()) {
    return {x, record(name, y, {x, weight, bias},
                      [differentiate](const Tensor& dout) -> Grads { return differentiate(Tensor(), dout); })};
  }
  const std::vector<Tensor> outputs =
      record(name, {sum, y}, {x, residual, weight, bias}, [differentiate](const Grads& douts) -> Grads {
        const Grads grads = differentiate(douts[0], douts[1]);
        return {grads[0], grads[0], grads[1], grads[2]};
      });
  return {outputs[0], outputs[1]};
}

}  // namespace

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  return normalize("layer_norm", kernels::layer_norm_forward, kernels::layer_norm_backward, x, {}, weight, bias, eps)
      .normalized;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  return normalize("rms_norm", kernels::rms_norm_forward, kernels::rms_norm_backward, x, {}, weight, {}, eps)
      .normalized;
}

AddNormResult add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias,
                             double eps) {
  return normalize("add_layer_norm", kernels::layer_norm_forward, kernels::layer_norm_backward, x, residual, weight,
                   bias, eps);
}

AddNormResult add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  return normalize("add_rms_norm", kernels::rms_norm_forward, kernels::rms_norm_backward, x, residual, weight, {}, eps);
}

}  // namespace strobe
