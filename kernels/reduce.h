// Reductions of a contiguous (outer, count, inner) array over its middle axis.
#pragma once

#include "strobe/kernels/kernel.h"

namespace strobe::kernels {

// sum: out[o, i] = 1 / divisor * sum over c of x[o, c, i]. max: the largest x[o, c, i], NaN when one is (count >= 1).
struct ReduceArgs {
  void* out;      // (outer, inner)
  const void* x;  // (outer, count, inner)
  int64_t outer;
  int64_t count;
  int64_t inner;
  DType dtype;
  double divisor = 1;  // read by sum only
};

// dx = dout where x is the maximum, shared evenly among equal maxima; 0 elsewhere.
struct MaxGradArgs {
  void* dx;          // (outer, count, inner)
  const void* dout;  // (outer, inner)
  const void* x;     // (outer, count, inner)
  const void* out;   // (outer, inner), as max wrote it
  int64_t outer;
  int64_t count;
  int64_t inner;
  DType dtype;
};

STROBE_KERNEL(sum, ReduceArgs)
STROBE_KERNEL(max, ReduceArgs)
STROBE_KERNEL(max_backward, MaxGradArgs)

}  // namespace strobe::kernels
