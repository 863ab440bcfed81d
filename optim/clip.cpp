#include "strobe/optim/clip.h"

#include <cmath>

#include "strobe/core/autograd.h"
#include "strobe/core/ops.h"
#include "strobe/kernels/optimizer.h"
#include "strobe/optim/optimizer.h"

namespace strobe {
namespace {

std::vector<kernels::GradientArray> arrays_of(const std::vector<Tensor>& parameters,
                                              const std::vector<size_t>& positions) {
  std::vector<kernels::GradientArray> gradients;
  for (size_t i : positions) {
    const Tensor gradient = parameters[i].grad();
    gradients.push_back({.data = gradient.data(), .size = gradient.size(), .dtype = gradient.dtype()});
  }
  return gradients;
}

Clipping compute_clipping(const char* name, const std::vector<Tensor>& parameters, double max_norm,
                          const Tensor& loss_scale) {
  STROBE_CHECK(max_norm > 0, name, ": max_norm ", max_norm, " given, expected a number above 0");
  const NoGrad no_grad;
  for (const Tensor& parameter : parameters) require_defined(name, "a parameter", parameter);
  std::vector<Tensor> parts;  // on the first device that has a gradient
  detail::for_each_device(parameters, [&](const std::vector<size_t>& clipped, const Stream& stream) {
    int64_t count = 0;
    for (size_t i : clipped) {
      parameters[i].set_grad(contiguous(parameters[i].grad()));
      count += kernels::squares_parts(parameters[i].size());
    }
    const Tensor squares = empty({count}, DType::f64, stream.device);
    const std::vector<kernels::GradientArray> gradients = arrays_of(parameters, clipped);
    kernels::sum_squares(
        {.parts = squares.data<double>(), .gradients = gradients.data(), .count = std::ssize(gradients)}, stream);
    parts.push_back(parts.empty() ? squares : squares.to(parts[0].device()));
  });
  if (parts.empty()) parts.push_back(empty({0}, DType::f64));
  const Tensor squares = parts.size() == 1 ? parts[0] : concat(parts, 0);
  const Tensor scale = loss_scale.defined() ? loss_scale.to(squares.device()) : loss_scale;
  const Clipping clipping{empty({}, DType::f64, squares.device()), empty({}, DType::f64, squares.device())};
  kernels::clip_factor({.norm = clipping.norm.data<double>(),
                        .factor = clipping.factor.data<double>(),
                        .parts = squares.data<double>(),
                        .count = squares.size(),
                        .max_norm = max_norm,
                        .loss_scale = scale.defined() ? scale.data<float>() : nullptr},
                       squares.stream());
  return clipping;
}

}  // namespace

Clipping clip_factor(const std::vector<Tensor>& parameters, double max_norm, const Tensor& loss_scale) {
  STROBE_CHECK(!loss_scale.defined() || loss_scale.size() == 1, "clip_factor: loss_scale of shape ", loss_scale.shape(),
               " given, expected one element");
  return compute_clipping("clip_factor", parameters, max_norm, loss_scale);
}

double clip_grad_norm(const std::vector<Tensor>& parameters, double max_norm) {
  const Clipping clipping = compute_clipping("clip_grad_norm", parameters, max_norm, Tensor());
  const double norm = clipping.norm.item<double>(), factor = max_norm / norm;
  if (!std::isfinite(norm) || norm <= max_norm) return norm;
  detail::for_each_device(parameters, [&](const std::vector<size_t>& clipped, const Stream& stream) {
    const std::vector<kernels::GradientArray> gradients = arrays_of(parameters, clipped);
    kernels::scale({.gradients = gradients.data(), .count = std::ssize(gradients), .factor = factor}, stream);
  });
  return norm;
}

}  // namespace strobe
