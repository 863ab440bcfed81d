// Softmax of rows, and the cross entropy that is fused with it.
#pragma once

#include "strobe/kernels/kernel.h"

namespace strobe::kernels {

// softmax: y_i = exp(x_i) / sum_j exp(x_j). log_softmax: its logarithm. Both subtract the maximum first.
struct SoftmaxArgs {
  void* y;        // (rows, cols)
  const void* x;  // (rows, cols)
  int64_t rows;
  int64_t cols;
  DType dtype;
};

// softmax: dx = y * (dy - sum_j dy_j y_j). log_softmax: dx = dy - exp(y) * sum_j dy_j.
struct SoftmaxGradArgs {
  void* dx;        // (rows, cols)
  const void* dy;  // (rows, cols)
  const void* y;   // (rows, cols), as the forward pass wrote it
  int64_t rows;
  int64_t cols;
  DType dtype;
};

// loss = mean over the counted rows of lse_r - logits[r, targets[r]], lse_r = log sum_j exp(logits[r, j]). A row counts
// unless its target is ignore_index; other targets lie in [0, vocab). Without counted rows the loss is 0.
struct CrossEntropyArgs {
  void* loss;           // one value of accumulate_dtype(dtype)
  double* lse;          // (rows); double for every dtype, so that exp(logit - lse) is exact for large logits as well
  int64_t* counted;     // one value: how many rows count
  const void* logits;   // (rows, vocab)
  const void* targets;  // (rows)
  int64_t rows;
  int64_t vocab;
  int64_t row_stride;  // of logits, in elements; their columns are contiguous
  DType dtype;
  DType index_dtype;  // i32 or i64
  int64_t ignore_index;
  void* workspace = nullptr;  // cross_entropy_forward_workspace(args, device) bytes, aligned to 64
  size_t workspace_bytes = 0;
};

// dlogits[r, j] = dloss / counted * (exp(logits[r, j] - lse_r) - (j == targets[r])), 0 in rows that do not count.
struct CrossEntropyGradArgs {
  void* dlogits;       // (rows, vocab); may be the memory of logits
  const void* dloss;   // one value of accumulate_dtype(dtype)
  const void* logits;  // (rows, vocab)
  const void* targets;
  const double* lse;       // as the forward pass wrote it
  const int64_t* counted;  // as well
  int64_t rows;
  int64_t vocab;
  int64_t dlogits_row_stride;
  int64_t logits_row_stride;
  DType dtype;
  DType index_dtype;
  int64_t ignore_index;
};

STROBE_KERNEL(softmax_forward, SoftmaxArgs)
STROBE_KERNEL(softmax_backward, SoftmaxGradArgs)
STROBE_KERNEL(log_softmax_forward, SoftmaxArgs)
STROBE_KERNEL(log_softmax_backward, SoftmaxGradArgs)
// May be 0.
STROBE_WORKSPACE(cross_entropy_forward_workspace, CrossEntropyArgs)

STROBE_KERNEL(cross_entropy_forward, CrossEntropyArgs)
STROBE_KERNEL(cross_entropy_backward, CrossEntropyGradArgs)

}  // namespace strobe::kernels
