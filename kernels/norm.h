// Layer and RMS normalization of the rows of a contiguous (rows, cols) array.
#pragma once

#include "strobe/kernels/kernel.h"

namespace strobe::kernels {

// LayerNorm (Ba et al. 2016): y = (x - mean) * rstd * weight + bias with rstd = 1 / sqrt(variance + eps).
// RMSNorm (Zhang and Sennrich 2019): the same without mean and bias, rstd = 1 / sqrt(mean of x^2 + eps).
// Statistics have accumulate_dtype(dtype). With a residual, x + residual, rounded to the dtype, takes the place of x.
struct NormArgs {
  void* y;             // (rows, cols)
  const void* x;       // (rows, cols)
  const void* weight;  // (cols), or null: all ones
  const void* bias;    // (cols), or null: all zeros; not read by rms_norm
  void* mean;          // (rows); not written by rms_norm
  void* rstd;          // (rows)
  int64_t rows;
  int64_t cols;
  DType dtype;
  double eps;
  const void* residual = nullptr;  // (rows, cols), or null: none
  void* sum = nullptr;             // (rows, cols), x + residual; not written without a residual
};

// With xhat = (x - mean) * rstd and g = dy * weight: dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), without the
// mean(g) for rms_norm; dweight = sum over rows of dy * xhat; dbias = sum over rows of dy. x is the sum where there was
// a residual; the gradient of x, of the residual and of the sum are then one, dx.
struct NormGradArgs {
  void* dx;            // (rows, cols), or null: not wanted
  void* dweight;       // (cols), or null: not wanted
  void* dbias;         // (cols), or null: not wanted; not written by rms_norm
  const void* dy;      // (rows, cols)
  const void* x;       // (rows, cols)
  const void* weight;  // (cols), or null: all ones
  const void* mean;    // (rows); not read by rms_norm
  const void* rstd;    // (rows)
  int64_t rows;
  int64_t cols;
  DType dtype;
  const void* dsum = nullptr;  // (rows, cols), what else reached the sum and is added to dx; null: nothing
  void* workspace = nullptr;   // norm_backward_workspace(args, device) bytes, aligned to 64
  size_t workspace_bytes = 0;
};

// May be 0. Of both kinds of norm.
STROBE_WORKSPACE(norm_backward_workspace, NormGradArgs)

STROBE_KERNEL(layer_norm_forward, NormArgs)
STROBE_KERNEL(layer_norm_backward, NormGradArgs)
STROBE_KERNEL(rms_norm_forward, NormArgs)
STROBE_KERNEL(rms_norm_backward, NormGradArgs)

}  // namespace strobe::kernels
