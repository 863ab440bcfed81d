#include "strobe/optim/grad_scaler.h"

#include <cmath>

#include "strobe/core/ops.h"
#include "strobe/kernels/optimizer.h"

namespace strobe {

GradScaler::GradScaler(const GradScalerOptions& settings, Device device) : options(settings) {
  STROBE_CHECK(options.initial_scale >= 1 && options.initial_scale <= kernels::largest_loss_scale,
               "GradScaler: initial_scale ", options.initial_scale, " given, expected 1 to 2^100");
  STROBE_CHECK(options.growth >= 1 && std::isfinite(options.growth), "GradScaler: growth ", options.growth,
               " given, expected a finite number, at least 1");
  STROBE_CHECK(options.backoff > 0 && options.backoff <= 1, "GradScaler: backoff ", options.backoff,
               " given, expected a number in (0, 1]");
  STROBE_CHECK(options.growth_interval >= 1, "GradScaler: growth_interval ", options.growth_interval,
               " given, expected at least 1");
  scale = full({}, options.initial_scale, DType::f32, device);
  finite_steps = zeros({}, DType::i64, device);
}

Tensor GradScaler::operator()(const Tensor& loss) const {
  require_same_kind("GradScaler", "loss", loss, "scale", scale);
  STROBE_CHECK(loss.size() == 1, "GradScaler: loss of shape ", loss.shape(), " given, expected one element");
  return loss * scale;
}

Clipping GradScaler::clip(const std::vector<Tensor>& parameters, double max_norm) {
  const Clipping clipping = clip_factor(parameters, max_norm, scale);
  const Tensor factor = clipping.factor.to(scale.device());
  kernels::adapt_loss_scale({.loss_scale = scale.data<float>(),
                             .finite_steps = finite_steps.data<int64_t>(),
                             .factor = factor.data<double>(),
                             .growth = options.growth,
                             .backoff = options.backoff,
                             .growth_interval = options.growth_interval},
                            scale.stream());
  return clipping;
}

}  // namespace strobe
