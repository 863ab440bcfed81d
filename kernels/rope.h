// Rotary position embedding of attention queries and keys.
#pragma once

#include "strobe/kernels/kernel.h"

namespace strobe::kernels {

// RoFormer (Su et al. 2021) with the half-split pairing of GPT-NeoX and Llama: element i of a head is rotated with
// element i + head_dim / 2 by the angle (position_offset + s) * base^(-2 i / head_dim) at sequence position s:
//   y[i]     = x[i] cos - x[i + half] sin
//   y[i + half] = x[i + half] cos + x[i] sin
// `inverse` turns the other way, which is the backward pass. Angles are computed in double.
struct RopeArgs {
  void* y;        // (batch, seq_len, num_heads, head_dim), contiguous
  const void* x;  // same shape; strides in elements, head_dim contiguous
  int64_t x_batch_stride;
  int64_t x_seq_stride;
  int64_t x_head_stride;
  int64_t batch;
  int64_t seq_len;
  int64_t num_heads;
  int64_t head_dim;  // even
  DType dtype;
  double base;
  int64_t position_offset = 0;
  bool inverse = false;
};

STROBE_KERNEL(rope, RopeArgs)

}  // namespace strobe::kernels
