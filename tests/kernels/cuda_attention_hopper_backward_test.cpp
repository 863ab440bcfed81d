// The Hopper attention backward where its order of query tiles and its ways of storing gradients change.
#include <doctest/doctest.h>

#include "support/compare.h"
#include "support/gpu_attention.h"

using namespace strobe;
using namespace strobe::kernels;
using namespace strobe::testing;

// Where the query heads of a kv head are more than the L2 cache should hold, each query tile's heads come one after the
// other, in any order from a head and a tile of each block's own.
TEST_CASE("cuda attention hopper: large groups of heads, in turns and in any order" * needs_hopper()) {
  std::mt19937 random(21);
  for (const int64_t dim : {64, 128}) {
    for (const int64_t window : {-1, 500}) {
      for (const bool deterministic : {true, false}) {
        const GpuAttentionCase problem{
            .seq_q = 2500,
            .seq_k = 2700,
            .heads = 14,
            .kv_heads = 2,
            .dim = dim,
            .dtype = DType::bf16,
            .options = {.causal = true, .window_left = window, .deterministic = deterministic}};
        INFO(problem.describe());
        GpuAttention attention(problem, random);
        const AttentionValues given = attention.run(AttentionKernel::hopper);
        const AttentionValues other = attention.run(AttentionKernel::mma);
        for (const size_t i : {0, 2, 3, 4}) {
          INFO(AttentionOutputs::names[i]);
          CHECK(relative_error(given[i], other[i]) <= 1.6e-2);
        }
        CHECK(relative_error(given[1], other[1]) <= 1e-5);
        const AttentionValues again = attention.run(AttentionKernel::hopper);
        for (size_t i = 0; i < 5; ++i) {
          INFO(AttentionOutputs::names[i]);
          if (deterministic) {
            CHECK((again[i] == given[i]));
          } else {
            CHECK(relative_error(again[i], given[i]) <= 1e-2);
          }
        }
      }
    }
  }
}

// Blocks that no query sees write zeros by way of the shared memory that TMA may still read for the block before.
TEST_CASE("cuda attention hopper: dkey and dvalue that TMA stores or not, and keys that nobody sees" * needs_hopper()) {
  std::mt19937 random(22);
  for (const int64_t dim : {40, 64, 128}) {
    for (const int64_t gap : {0, 8, 3}) {  // with the last one rows do not begin at multiples of 16 bytes
      for (const bool packed : {false, true}) {
        GpuAttentionCase problem{.seq_q = 200,
                                 .seq_k = 900,
                                 .heads = 60,
                                 .kv_heads = 60,
                                 .dim = dim,
                                 .dtype = DType::bf16,
                                 .options = {.causal = true, .window_left = 100},
                                 .gradient_gap = gap};
        if (packed) {
          problem.batch = 3;
          problem.lengths_q = {150, 1, 200};
          problem.lengths_k = {900, 300, 70};
        }
        INFO(problem.describe());
        GpuAttention attention(problem, random);
        const AttentionValues other = attention.run(AttentionKernel::mma);
        for (int n = 0; n < 3; ++n) {
          const AttentionValues given = attention.run(AttentionKernel::hopper);
          for (const size_t i : {2, 3, 4}) {
            INFO(AttentionOutputs::names[i]);
            CHECK(relative_error(given[i], other[i]) <= 1.6e-2);
          }
        }
      }
    }
  }
}
