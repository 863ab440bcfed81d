// Lookup of table rows by index, its gradient, and the check that indices are in range.
#pragma once

#include "strobe/kernels/kernel.h"

namespace strobe::kernels {

// *position = the first i with indices[i] outside [0, limit) and not equal to ignore_index, or -1 when there is none.
struct FindInvalidIndexArgs {
  int64_t* position;
  const void* indices;  // (size)
  int64_t size;
  int64_t limit;
  DType index_dtype;         // i32 or i64
  int64_t ignore_index = 0;  // the default lies in range and so allows nothing more
};

// out[r, :] = weight[indices[r], :]; all indices lie in [0, vocab).
struct EmbeddingArgs {
  void* out;            // (rows, dim)
  const void* weight;   // (vocab, dim)
  const void* indices;  // (rows)
  int64_t rows;
  int64_t dim;
  DType dtype;
  DType index_dtype;
};

// dweight[v, :] = sum over the rows r with indices[r] == v of dout[r, :], in the order of the rows.
struct EmbeddingGradArgs {
  void* dweight;        // (vocab, dim); every element is written
  const void* dout;     // (rows, dim)
  const void* indices;  // (rows)
  int64_t rows;
  int64_t vocab;
  int64_t dim;
  DType dtype;
  DType index_dtype;
  void* workspace;  // embedding_backward_workspace(rows, vocab, device) bytes, aligned to 8
};

// A GPU sorts rows in blocks of this many, and by one digit of the index of this many values at a time.
inline constexpr int64_t embedding_sort_block = 1024;
inline constexpr int64_t embedding_sort_digits = 256;

// Room to list the rows by their index.
inline size_t embedding_backward_workspace(int64_t rows, int64_t vocab, Device device) {
  const int64_t blocks = (rows + embedding_sort_block - 1) / embedding_sort_block;
  const int64_t count = device.type == DeviceType::cpu ? rows + vocab + 1 : 2 * rows + embedding_sort_digits * blocks;
  return static_cast<size_t>(count) * sizeof(int64_t);
}

STROBE_KERNEL(find_invalid_index, FindInvalidIndexArgs)
STROBE_KERNEL(embedding_forward, EmbeddingArgs)
STROBE_KERNEL(embedding_backward, EmbeddingGradArgs)

}  // namespace strobe::kernels
