// Tensor maps: what TMA needs to know of an operand in device memory.
#pragma once

#include <cuda.h>

#include <string>

#include "strobe/kernels/attention.h"

namespace strobe::kernels::cuda {

// Why TMA cannot read a (batch, seq_len, num_heads, head_dim) operand of a 16-bit dtype; empty if it can. Strides of
// axes of size 1 do not count, nor does an operand that is not given yet: without data, all strides 0.
std::string tensor_map_refusal(const char* name, const AttentionTensor& tensor, int64_t batch, int64_t seq_len,
                               int64_t num_heads);

// The map of such an operand with boxes of 64 elements of head_dim by `box_rows` positions, in TMA's 128-byte swizzle.
CUtensorMap tensor_map(const char* operation, const AttentionTensor& tensor, DType dtype, int64_t batch,
                       int64_t seq_len, int64_t num_heads, int64_t head_dim, int box_rows);

}  // namespace strobe::kernels::cuda
