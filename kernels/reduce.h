// Reductions of a contiguous (outer, count, inner) array over its middle axis.
#pragma once

#include <algorithm>

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
  double divisor = 1;         // read by sum only
  void* workspace = nullptr;  // reduce_workspace(args, device) bytes, aligned to 8
};

// How many parts of the middle axis a GPU reduces at the same time: enough to fill it once, and a function of the shape
// alone, so that the bits are the same on every GPU.
inline int64_t reduce_parts(const ReduceArgs& args) {
  const int64_t columns = 32 * 16 / static_cast<int64_t>(size_of(args.dtype));  // that a block takes
  constexpr int64_t blocks_wanted = 512;
  const int64_t blocks = std::max<int64_t>(args.outer * ((args.inner + columns - 1) / columns), 1);
  const int64_t shortest = args.inner == 1 ? 8192 : 64;
  return std::max<int64_t>(std::min(blocks_wanted / blocks, args.count / shortest), 1);
}

// Bytes of scratch memory that sum and max need on `device`.
inline size_t reduce_workspace(const ReduceArgs& args, Device device) {
  const int64_t parts = device.type == DeviceType::cpu ? 1 : reduce_parts(args);
  return parts == 1 ? 0 : static_cast<size_t>(parts * args.outer * args.inner) * sizeof(double);
}

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
