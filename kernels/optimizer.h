// Update rules of the optimizers and what gradient clipping needs: one pass over the memory of all parameters, on a GPU
// in one launch for each dtype.
#pragma once

#include "strobe/kernels/kernel.h"

namespace strobe::kernels {

// Arrays of the optimizer's own (velocity, exp_avg, exp_avg_sq, master) hold accumulate_dtype(dtype). `master` is the
// parameter in that precision: updated first, then rounded into `parameter`; null when dtype is that precision already.
// Lists of parameters lie in host memory and are read before the call returns.

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
};

struct AdamWParameter {
  void* parameter;
  const void* gradient;
  void* exp_avg;
  void* exp_avg_sq;
  void* master;
  int64_t size;
  DType dtype;
  int64_t step;  // 1, 2, ...
  double weight_decay = 0;
};

// AdamW (Kingma and Ba 2015; decoupled decay of Loshchilov and Hutter 2019), t = step:
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

// Every gradient *= factor.
struct ScaleArgs {
  const GradientArray* gradients;
  int64_t count;
  double factor;
};

STROBE_KERNEL(sgd_step, SgdArgs)
STROBE_KERNEL(adamw_step, AdamWArgs)
STROBE_KERNEL(sum_squares, SumSquaresArgs)
STROBE_KERNEL(scale, ScaleArgs)

}  // namespace strobe::kernels
