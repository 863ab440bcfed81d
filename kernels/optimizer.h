// Update rules of the optimizers and what gradient clipping needs: one pass over the memory of all parameters, on a GPU
// in one launch for each dtype.
#pragma once

#include "strobe/kernels/kernel.h"
#include "strobe/kernels/math.h"

namespace strobe::kernels {

// Arrays of the optimizer's own (velocity, exp_avg, exp_avg_sq, master) hold accumulate_dtype(dtype). `master` is the
// parameter in that precision: updated first, then rounded into `parameter`; null when dtype is that precision already.
// Lists of parameters lie in host memory and are read before the call returns.
//
// `grad_factor`, where it is given, is one number in the device's memory, so that the host need not know it: gradients
// are multiplied by it as they are read, and where it is not finite the whole update is left out.

struct SgdParameter {
  void* parameter;
  const void* gradient;
  void* velocity;  // null: no momentum
  void* master;
  int64_t size;
  DType dtype;
  double weight_decay = 0;
};

// Stochastic gradient descent with momentum (Polyak 1964) and an L2 penalty:
//   g = gradient + weight_decay * parameter;  velocity = momentum * velocity + g;
//   parameter -= learning_rate * velocity
struct SgdArgs {
  const SgdParameter* parameters;
  int64_t count;
  double learning_rate;
  double momentum = 0;
  const double* grad_factor = nullptr;
};

struct AdamWParameter {
  void* parameter;
  const void* gradient;
  void* exp_avg;
  void* exp_avg_sq;
  void* master;
  int64_t size;
  DType dtype;
  int64_t step;                // 1, 2, ...
  int64_t* skipped = nullptr;  // one number on the device: how many of these steps were left out; with grad_factor
  double weight_decay = 0;
};

// AdamW (Kingma and Ba 2015; decoupled decay of Loshchilov and Hutter 2019), t = step - skipped:
//   exp_avg = beta1 * exp_avg + (1 - beta1) * g;  exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g^2;
//   parameter -= learning_rate * (exp_avg / (1 - beta1^t) / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps)
//                                 + weight_decay * parameter)
struct AdamWArgs {
  const AdamWParameter* parameters;
  int64_t count;
  double learning_rate;
  double beta1;
  double beta2;
  double eps;
  const double* grad_factor = nullptr;
};

// A contiguous array.
struct GradientArray {
  void* data;
  int64_t size;
  DType dtype;
};

// Elements of a gradient that are squared and summed as one part.
inline constexpr int64_t squares_part = 32768;
inline int64_t squares_parts(int64_t size) { return (size + squares_part - 1) / squares_part; }

// parts[i] = the sum of the squares of part i of the gradients, in f64: those of the first gradient come first.
struct SumSquaresArgs {
  double* parts;  // squares_parts(size) for each gradient, on the device
  const GradientArray* gradients;
  int64_t count;
};

// From the parts of all gradients, which are those of a loss times loss_scale:
//   norm = sqrt(sum of parts) / loss_scale;  factor = min(1, max_norm / norm) / loss_scale, NaN unless norm is finite
struct ClipFactorArgs {
  double* norm;
  double* factor;
  const double* parts;  // (count)
  int64_t count;
  double max_norm;
  const float* loss_scale = nullptr;  // one number on the device; null: 1
};

// A loss never reaches this scale's size, as f16 gradients overflow before.
inline constexpr double largest_loss_scale = 0x1p100;

// Adapts the scale of a loss after a step: `backoff` times it, but not below 1, where the factor of clip_factor is not
// finite; else `growth` times it at the end of each `growth_interval` finite steps in a row.
struct LossScaleArgs {
  float* loss_scale;
  int64_t* finite_steps;
  const double* factor;
  double growth;
  double backoff;
  int64_t growth_interval;
};

// Every gradient *= factor.
struct ScaleArgs {
  const GradientArray* gradients;
  int64_t count;
  double factor;
};

// The end of clip_factor and adapt_loss_scale, for all backends.
STROBE_HD inline void finish_clip_factor(const ClipFactorArgs& args, double squares) {
  const double loss_scale = args.loss_scale != nullptr ? static_cast<double>(*args.loss_scale) : 1;
  const double norm = sqrt_(squares) / loss_scale;
  const bool finite = norm - norm == 0;
  *args.norm = norm;
  *args.factor = finite ? (norm > args.max_norm ? args.max_norm / norm : 1) / loss_scale : norm - norm;
}
STROBE_HD inline void finish_loss_scale(const LossScaleArgs& args) {
  const bool finite = *args.factor - *args.factor == 0;
  const bool grows = finite && *args.finite_steps + 1 >= args.growth_interval;
  const double scale = static_cast<double>(*args.loss_scale) * (grows ? args.growth : finite ? 1 : args.backoff);
  if (scale <= largest_loss_scale) *args.loss_scale = static_cast<float>(scale < 1 ? 1 : scale);
  *args.finite_steps = finite && !grows ? *args.finite_steps + 1 : 0;
}

STROBE_KERNEL(sgd_step, SgdArgs)
STROBE_KERNEL(adamw_step, AdamWArgs)
STROBE_KERNEL(sum_squares, SumSquaresArgs)
STROBE_KERNEL(clip_factor, ClipFactorArgs)
STROBE_KERNEL(adapt_loss_scale, LossScaleArgs)
STROBE_KERNEL(scale, ScaleArgs)

}  // namespace strobe::kernels
