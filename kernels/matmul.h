// Batched matrix product on raw strided memory.
#pragma once

#include <atomic>
#include <limits>

#include "strobe/kernels/kernel.h"

namespace strobe {

namespace detail {
inline std::atomic<bool> allow_tf32{false};
}
// Whether products of f32 on a GPU may round their factors to TF32, which has 10 bits of mantissa: several times faster
// on tensor cores. For the whole process, from the next product on.
inline bool allow_tf32() { return detail::allow_tf32; }
inline void set_allow_tf32(bool allow) { detail::allow_tf32 = allow; }

}  // namespace strobe

namespace strobe::kernels {

// Bounds of a band that leave every element in; half of the range, so that adding an index cannot overflow.
inline constexpr int64_t no_band_lower = std::numeric_limits<int64_t>::min() / 2;
inline constexpr int64_t no_band_upper = std::numeric_limits<int64_t>::max() / 2;

// What becomes of the sums of a product, with the tanh form of GELU (GeluTanh in pointwise.h).
enum class MatmulEpilogue : uint8_t {
  none,
  gelu,           // pre = sums, out = gelu(sums)
  gelu_backward,  // out = sums * gelu'(pre)
};

// One batch dimension: its size and, in elements, the strides of the operands (0 repeats an operand).
struct MatmulBatch {
  int64_t size = 1;
  int64_t a_stride = 0;
  int64_t b_stride = 0;
  int64_t out_stride = 0;
};

// out (m x n) = [out +] a (m x k) b (k x n) [+ bias (n)] for every index of the batch dimensions, or the epilogue of
// that.
// Strides are in elements. No two elements of out share memory, and out overlaps neither a, b nor bias.
// Element (i, p) of a takes part only where i + band_lower <= p <= i + band_upper; callers keep zeros outside that
// band. Row p of b never influences row i of out from there, NaN and infinity included. f64 is computed in f64,
// everything else in f32; each element of out is one sum, in an order that on the CPU depends on k and the band alone,
// on a GPU on all sizes, the strides and the alignment.
struct MatmulArgs {
  static constexpr int max_batch_dims = 6;
  void* out;
  const void* a;
  const void* b;
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t out_row_stride;  // the columns of out are contiguous
  int64_t a_row_stride;
  int64_t a_column_stride;
  int64_t b_row_stride;
  int64_t b_column_stride;
  DType dtype;                 // of a, b and bias
  DType out_dtype;             // dtype, or accumulate_dtype(dtype)
  const void* bias = nullptr;  // (n), contiguous
  bool accumulate = false;     // add to what out holds
  // With an epilogue there is one product, whose out has no gaps and the dtype of a; no band, no accumulation.
  MatmulEpilogue epilogue = MatmulEpilogue::none;
  void* pre = nullptr;  // (m, n) of out's dtype, contiguous
  int64_t band_lower = no_band_lower;
  int64_t band_upper = no_band_upper;
  MatmulBatch batch[max_batch_dims] = {};  // in any order
  void* workspace = nullptr;               // matmul_workspace(args, device) bytes, aligned to 64
  size_t workspace_bytes = 0;
};

// May be 0. On the CPU it depends on num_threads(); on a GPU on the alignment of out, a, b and bias and on
// allow_tf32().
STROBE_WORKSPACE(matmul_workspace, MatmulArgs)

STROBE_KERNEL(matmul, MatmulArgs)

// For backends: the product whose sums an epilogue is to be applied to, and the epilogue as a pass of its own.
MatmulArgs without_epilogue(const MatmulArgs& args);
void apply_epilogue(const MatmulArgs& args, const Stream& stream);

}  // namespace strobe::kernels
