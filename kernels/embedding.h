// Lookup of table rows by index, and its gradient.
#pragma once

#include "strobe/kernels/kernel.h"

namespace strobe::kernels {

// out[r, :] = weight[indices[r], :]; NaN on a GPU where the index is not in [0, vocab), which the CPU is never given.
struct EmbeddingArgs {
  void* out;            // (rows, dim)
  const void* weight;   // (vocab, dim)
  const void* indices;  // (rows)
  int64_t rows;
  int64_t vocab;
  int64_t dim;
  DType dtype;
  DType index_dtype;
};

// dweight[v, :] = sum over the rows r with indices[r] == v of dout[r, :], always in the same order.
struct EmbeddingGradArgs {
  void* dweight;        // (vocab, dim); every element is written
  const void* dout;     // (rows, dim)
  const void* indices;  // (rows)
  int64_t rows;
  int64_t vocab;
  int64_t dim;
  DType dtype;
  DType index_dtype;
  void* workspace;  // embedding_backward_workspace(rows, vocab, dim, device) bytes, aligned to 8
};

// A GPU sorts rows in blocks of this many, and by one digit of the index of this many values at a time; then it adds up
// the sorted rows in chunks of this many.
inline constexpr int64_t embedding_sort_block = 1024;
inline constexpr int64_t embedding_sort_digits = 256;
inline constexpr int64_t embedding_chunk = 32;

// Room to list the rows by their index and, on a GPU, for two sums of each chunk.
inline size_t embedding_backward_workspace(int64_t rows, int64_t vocab, int64_t dim, Device device) {
  const int64_t blocks = (rows + embedding_sort_block - 1) / embedding_sort_block;
  const int64_t chunks = (rows + embedding_chunk - 1) / embedding_chunk;
  const int64_t count =
      device.type == DeviceType::cpu ? rows + vocab + 1 : 2 * rows + embedding_sort_digits * blocks + 2 * chunks * dim;
  return static_cast<size_t>(count) * sizeof(int64_t);
}

STROBE_KERNEL(embedding_forward, EmbeddingArgs)
STROBE_KERNEL(embedding_backward, EmbeddingGradArgs)

}  // namespace strobe::kernels
