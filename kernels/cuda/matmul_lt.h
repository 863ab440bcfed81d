// Products that cuBLASLt computes: two strided matrices and one batch dimension at a time.
#pragma once

#include <cublasLt.h>

#include <optional>

#include "strobe/kernels/matmul.h"

namespace strobe::kernels::cuda {

// A matrix in column-major terms: `first` neighbours in memory, `second` runs of them, `leading` elements apart.
struct LtMatrix {
  int64_t first;
  int64_t second;
  int64_t leading;
  bool transposed;
  int64_t batch_stride;
  int alignment;  // in bytes, of the matrices of every batch, at most 16
  auto operator<=>(const LtMatrix&) const = default;
};

// All that the choice of an algorithm depends on.
struct LtProblem {
  int device;
  DType dtype;
  DType out_dtype;
  bool has_bias;
  MatmulEpilogue epilogue;
  bool tf32;
  int64_t batch_size;
  LtMatrix a;
  LtMatrix b;
  LtMatrix out;
  auto operator<=>(const LtProblem&) const = default;
};

// How cuBLASLt computes a product: one call for every index of the batch dimensions but `batch_dim`.
struct LtPlan {
  LtProblem problem;
  int batch_dim;
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace_bytes;
};

// Nothing where cuBLASLt cannot express the product or has no algorithm for it, and for an epilogue of f32 or f64,
// whose tanh it computes with fewer digits than those have. The algorithm is its own first choice, not a measured one,
// so that equal calls always take the same; it is kept for later calls. `args` has k > 0 and at least one element of
// out, and its bias is aligned to 16; its band is not looked at.
std::optional<LtPlan> plan_lt(const MatmulArgs& args, Device device);

// The workspace is that of the plan, aligned to 256. False, with nothing queued, where cuBLASLt finds only now that it
// cannot: its choice looks at no bias, for one.
bool run_lt(const LtPlan& plan, const MatmulArgs& args, void* workspace, const Stream& stream);

}  // namespace strobe::kernels::cuda
