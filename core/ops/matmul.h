// The matrix product without autograd, for the operations that write their own backward pass; internal to core/ops.
#pragma once

#include "strobe/core/tensor.h"
#include "strobe/kernels/matmul.h"

namespace strobe {

struct MatmulOptions {
  // Element (i, p) of a takes part only where i + band_lower <= p <= i + band_upper; a holds zeros outside that band.
  // The rows of b there never influence row i, NaN and infinity included.
  int64_t band_lower = kernels::no_band_lower;
  int64_t band_upper = kernels::no_band_upper;
  bool accumulate = false;  // add to what out holds
};

// out = a b [+ out], without recording.
// out: (..., m, n) of any strides but contiguous columns, no element twice; dtype of a, or f32 for 16-bit a and b.
// a: (..., m, k) and b: (..., k, n) of one floating dtype with any strides; their batch dimensions broadcast to out's.
// `operation` names the caller in error messages.
void matmul_into(const Tensor& out, const Tensor& a, const Tensor& b, const MatmulOptions& options = {},
                 const char* operation = "matmul");

// Uninitialized, (rows, columns), for the result of a product. On a GPU each row starts at a multiple of 16 bytes,
// which tensor cores ask for, unless the columns are so few that the gaps would be more than an eighth.
Tensor empty_rows(int64_t rows, int64_t columns, DType dtype, Device device);

}  // namespace strobe
