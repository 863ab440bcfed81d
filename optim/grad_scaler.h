// Dynamic scaling of the loss, without which most gradients of f16 training are too small for f16.
#pragma once

#include "strobe/optim/clip.h"

namespace strobe {

struct GradScalerOptions {
  double initial_scale = 65536;
  double growth = 2;     // at the end of growth_interval steps in a row with finite gradients
  double backoff = 0.5;  // after a step with infinite or NaN gradients, which no update is made from
  int64_t growth_interval = 2000;
};

// Micikevicius et al., "Mixed Precision Training" (2018). Nothing waits for the device. One step of training:
//   scaler(loss).backward();
//   optimizer.step(rate, scaler.clip(optimizer.parameters, 1.0).factor);
//   optimizer.zero_grad();
struct GradScaler {
  GradScalerOptions options;
  Tensor scale;         // one element, f32; at least 1
  Tensor finite_steps;  // one element, i64: in a row, since the scale changed

  explicit GradScaler(const GradScalerOptions& options = {}, Device device = default_device());

  // loss * scale; loss: one element, f32.
  Tensor operator()(const Tensor& loss) const;

  // clip_factor of the gradients of the loss as it was before it was scaled; adapts the scale to what it found.
  Clipping clip(const std::vector<Tensor>& parameters, double max_norm);
};

}  // namespace strobe
