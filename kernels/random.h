// Random tensors and dropout. Element i depends on (seed, offset, i) only: not on threads, nor, before rounding, on
// dtype.
#pragma once

#include "strobe/kernels/kernel.h"

namespace strobe::kernels {

// Elements 2k and 2k + 1 come from call k of philox_at(seed, offset, k): two doubles u, v in [0, 1).
// uniform: low + (high - low) * u and v; rounding to the dtype may reach high.
struct UniformArgs {
  void* out;
  int64_t size;
  DType dtype;
  double low;
  double high;
  uint64_t seed;
  uint64_t offset;
};

// normal: mean + std * sqrt(-2 log(1 - u)) times cos(2 pi v) and sin(2 pi v) (Box and Muller 1958).
struct NormalArgs {
  void* out;
  int64_t size;
  DType dtype;
  double mean;
  double std;
  uint64_t seed;
  uint64_t offset;
};

// y[i] = x[i] / (1 - p) where element i is kept, else 0. Element i is kept when word i % 4 of
// philox_at(seed, offset, i / 4) is at least p * 2^32, rounded. The gradient is the same function of dy.
struct DropoutArgs {
  void* y;
  const void* x;
  int64_t size;
  DType dtype;
  double p;  // in [0, 1)
  uint64_t seed;
  uint64_t offset;
};

STROBE_KERNEL(uniform, UniformArgs)
STROBE_KERNEL(normal, NormalArgs)
STROBE_KERNEL(dropout, DropoutArgs)

}  // namespace strobe::kernels
