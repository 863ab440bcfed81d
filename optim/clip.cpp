#include "strobe/optim/clip.h"

#include <cmath>

#include "strobe/core/autograd.h"
#include "strobe/core/ops.h"
#include "strobe/kernels/optimizer.h"

namespace strobe {

double clip_grad_norm(const std::vector<Tensor>& parameters, double max_norm) {
  STROBE_CHECK(max_norm > 0, "clip_grad_norm: max_norm ", max_norm, " given, expected a number above 0");
  const NoGrad no_grad;
  double squares = 0;
  std::vector<Tensor> sums;  // one per device
  for (size_t i = 0; i < parameters.size(); ++i) {
    require_defined("clip_grad_norm", "a parameter", parameters[i]);
    if (!parameters[i].grad().defined()) continue;
    const Tensor gradient = contiguous(parameters[i].grad());
    if (sums.empty() || sums.back().device() != gradient.device())
      sums.push_back(zeros({}, DType::f64, gradient.device()));
    kernels::add_squares(
        {.sum = sums.back().data<double>(), .x = gradient.data(), .size = gradient.size(), .dtype = gradient.dtype()},
        gradient.stream());
  }
  for (const Tensor& sum : sums) squares += sum.item<double>();
  const double norm = std::sqrt(squares);
  if (!std::isfinite(norm) || norm <= max_norm) return norm;
  for (const Tensor& parameter : parameters) {
    if (!parameter.grad().defined()) continue;
    const Tensor gradient = contiguous(parameter.grad());
    kernels::scale(
        {.x = gradient.data(), .size = gradient.size(), .dtype = gradient.dtype(), .factor = max_norm / norm},
        gradient.stream());
    parameter.set_grad(gradient);
  }
  return norm;
}

}  // namespace strobe
