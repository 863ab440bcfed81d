// The bytes that attention moves, by counting: to and from device memory, and between the GPU's multiprocessors and
// their common L2 cache.
#pragma once

#include <strobe/strobe.h>

#include <string>

namespace examples {

enum class Method { standard, tiled };

// One pass of full attention over (batch, seq_len, num_heads, head_dim).
struct IoCase {
  bool backward = false;
  Method method = Method::tiled;
  int64_t batch = 1;
  int64_t seq_len = 0;
  int64_t num_heads = 1;
  int64_t head_dim = 64;
  strobe::DType dtype = strobe::DType::bf16;
  int64_t tile_queries = 0;  // tiled: what a block of threads holds on chip
  int64_t tile_keys = 0;
};

struct IoBytes {
  double dram = 0;  // read and written
  double l2 = 0;    // 0: not known, as of the matrix products of standard attention
};

// DRAM: what each kernel reads and writes, once. That is all there is where blocks that run at the same time share what
// they read through the L2, and what one kernel leaves for the next is too much to stay there. Gradients summed in a
// fixed order are a different matter: then blocks of all heads run side by side, and the dquery they add to exceeds the
// L2.
//
// Standard attention (core/ops/attention_standard.cpp): S = Q K^T and dP = dO V^T in f32 and P and dS in the dtype are
// matrices of seq_len^2 that one kernel writes and another reads: 8 + 2 w bytes an element forward, w being the width
// of the dtype, 8 + 6 w backward.
//
// Tiled attention reads and writes only tensors of seq_len * head_dim and a few numbers per row. Its L2 bytes are those
// of theorem 2 of FlashAttention (Dao et al. 2022), O(seq_len^2 head_dim^2 / M) with on-chip memory M: forward each
// block of `tile_queries` queries reads all keys and values, backward each block of `tile_keys` keys reads all queries
// and their dout and adds to all of dquery, which is f32. The kernels for f32 add nothing: blocks of `tile_queries`
// queries compute dquery in a second walk over keys and values. Fewer are measured where blocks on one multiprocessor
// share what they read through its own L1 cache.
IoBytes count_bytes(const IoCase& c);

}  // namespace examples
