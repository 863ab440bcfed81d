#include "strobe/optim/clip.h"

#include <cmath>

#include "strobe/core/autograd.h"
#include "strobe/core/ops.h"
#include "strobe/kernels/optimizer.h"
#include "strobe/optim/optimizer.h"

namespace strobe {

double clip_grad_norm(const std::vector<Tensor>& parameters, double max_norm) {
  STROBE_CHECK(max_norm > 0, "clip_grad_norm: max_norm ", max_norm, " given, expected a number above 0");
  const NoGrad no_grad;
  for (const Tensor& parameter : parameters) require_defined("clip_grad_norm", "a parameter", parameter);
  std::vector<Tensor> sums;  // one per device
  detail::for_each_device(parameters, [&](const std::vector<size_t>& clipped, const Stream& stream) {
    std::vector<kernels::GradientArray> gradients;
    int64_t parts = 0;
    for (size_t i : clipped) {
      const Tensor gradient = contiguous(parameters[i].grad());
      parameters[i].set_grad(gradient);
      gradients.push_back({.data = gradient.data(), .size = gradient.size(), .dtype = gradient.dtype()});
      parts += kernels::squares_parts(gradient.size());
    }
    const Tensor squares = empty({parts}, DType::f64, stream.device);
    kernels::sum_squares(
        {.parts = squares.data<double>(), .gradients = gradients.data(), .count = std::ssize(gradients)}, stream);
    sums.push_back(sum(squares));
  });
  double squares = 0;
  for (const Tensor& sum : sums) squares += sum.item<double>();
  const double norm = std::sqrt(squares);
  if (!std::isfinite(norm) || norm <= max_norm) return norm;
  detail::for_each_device(parameters, [&](const std::vector<size_t>& clipped, const Stream& stream) {
    std::vector<kernels::GradientArray> gradients;
    for (size_t i : clipped) {
      const Tensor gradient = parameters[i].grad();
      gradients.push_back({.data = gradient.data(), .size = gradient.size(), .dtype = gradient.dtype()});
    }
    kernels::scale({.gradients = gradients.data(), .count = std::ssize(gradients), .factor = max_norm / norm}, stream);
  });
  return norm;
}

}  // namespace strobe
