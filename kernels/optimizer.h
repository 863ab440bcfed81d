// Update rules of the optimizers, each one pass over the memory of a parameter, and what gradient clipping needs.
#pragma once

#include "strobe/kernels/kernel.h"

namespace strobe::kernels {

// Arrays of the optimizer's own (velocity, exp_avg, exp_avg_sq, master) hold accumulate_dtype(dtype). `master` is the
// parameter in that precision: updated first, then rounded into `parameter`; null when dtype is that precision already.

// Stochastic gradient descent with momentum (Polyak 1964) and an L2 penalty, t = 1, 2, ...
//   g = gradient + weight_decay * parameter;  velocity = momentum * velocity + g;
//   parameter -= learning_rate * velocity
struct SgdArgs {
  void* parameter;
  const void* gradient;
  void* velocity;  // null: no momentum
  void* master;
  int64_t size;
  DType dtype;
  double learning_rate;
  double momentum = 0;
  double weight_decay = 0;
};

// AdamW (Kingma and Ba 2015; decoupled decay of Loshchilov and Hutter 2019), t = step = 1, 2, ...
//   exp_avg = beta1 * exp_avg + (1 - beta1) * g;  exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g^2;
//   parameter -= learning_rate * (exp_avg / (1 - beta1^t) / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps)
//                                 + weight_decay * parameter)
struct AdamWArgs {
  void* parameter;
  const void* gradient;
  void* exp_avg;
  void* exp_avg_sq;
  void* master;
  int64_t size;
  DType dtype;
  int64_t step;
  double learning_rate;
  double beta1;
  double beta2;
  double eps;
  double weight_decay = 0;
};

// *sum += x_1^2 + ... + x_n^2, summed in f64. x is contiguous; sum is one f64 on the device.
struct AddSquaresArgs {
  double* sum;
  const void* x;
  int64_t size;
  DType dtype;
};

// x *= factor. x is contiguous.
struct ScaleArgs {
  void* x;
  int64_t size;
  DType dtype;
  double factor;
};

STROBE_KERNEL(sgd_step, SgdArgs)
STROBE_KERNEL(adamw_step, AdamWArgs)
STROBE_KERNEL(add_squares, AddSquaresArgs)
STROBE_KERNEL(scale, ScaleArgs)

}  // namespace strobe::kernels
