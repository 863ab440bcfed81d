// The tensor-core attention kernels where their tiles, their order of sums and their shared memory make a difference;
// what all kernels must do is in cuda_attention_test.cpp.
#include <doctest/doctest.h>

#include "support/gpu_attention.h"

using namespace strobe;
using namespace strobe::kernels;
using namespace strobe::testing;

namespace {

// Errors of out, dquery, dkey and dvalue at most twice those of unfused attention with matrices in the dtype.
void check_mma(const GpuAttentionCase& problem, std::mt19937& random) {
  INFO(problem.describe());
  GpuAttention attention(problem, random);
  const AttentionValues exact = attention.reference(), unfused = attention.reference(problem.dtype);
  const AttentionValues given = attention.run(AttentionKernel::mma);
  for (const size_t i : {0, 2, 3, 4}) {
    INFO(AttentionOutputs::names[i]);
    const double tiny = problem.dtype == DType::bf16 ? 4e-3 : 5e-4;
    CHECK(relative_error(given[i], exact[i]) <= 2 * relative_error(unfused[i], exact[i]) + tiny);
  }
  CHECK(relative_error(given[1], exact[1]) <= 1e-5);
}

bool same(const AttentionValues& a, const AttentionValues& b) {
  for (size_t i = 0; i < 5; ++i) {
    if (a[i].size() != b[i].size()) return false;
    if (!a[i].empty() && std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(double)) != 0) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("cuda attention mma: lengths around the edges of tiles" * needs_gpu()) {
  std::mt19937 random(1);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int64_t dim : {64, 96, 128, 192, 256}) {
      for (const int64_t seq_q : {1, 63, 64, 65, 127, 128, 129, 257}) {
        for (const int64_t seq_k : {1, 64, 65, 128, 129, 200}) {
          check_mma({.seq_q = seq_q,
                     .seq_k = seq_k,
                     .dim = dim,
                     .dtype = dtype,
                     .options = {.causal = (seq_q + seq_k) % 2 == 0}},
                    random);
        }
      }
    }
  }
}

TEST_CASE("cuda attention mma: head_dim between the widths of tiles, rows that are not vectors" * needs_gpu()) {
  std::mt19937 random(2);
  for (const int64_t dim : {1, 7, 8, 33, 65, 72, 97, 100, 129, 136, 193, 255}) {
    for (const int64_t gap : {0, 3, 8}) {
      check_mma({.seq_q = 90, .seq_k = 140, .heads = 2, .kv_heads = 1, .dim = dim, .dtype = DType::bf16, .gap = gap},
                random);
    }
  }
}

TEST_CASE("cuda attention mma: many blocks that add to one dquery give the same bits on every run" * needs_gpu()) {
  std::mt19937 random(3);
  for (const bool causal : {false, true}) {
    GpuAttention attention({.batch = 2,
                            .seq_q = 1500,
                            .seq_k = 1700,
                            .heads = 6,
                            .kv_heads = 2,
                            .dim = 128,
                            .dtype = DType::bf16,
                            .options = {.causal = causal}},
                           random);
    const AttentionValues first = attention.run(AttentionKernel::mma);
    for (int n = 0; n < 19; ++n) CHECK(same(attention.run(AttentionKernel::mma), first));
  }
}

TEST_CASE("cuda attention mma: a single key has gradient 0" * needs_gpu()) {
  std::mt19937 random(4);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int64_t dim : {16, 64, 128, 256}) {
      GpuAttention attention({.seq_q = 150, .heads = 2, .kv_heads = 2, .dim = dim, .dtype = dtype}, random);
      const AttentionValues values = attention.run(AttentionKernel::mma);
      for (const size_t i : {2, 3}) {
        CHECK(std::all_of(values[i].begin(), values[i].end(), [](double x) { return x == 0; }));
      }
    }
  }
}

TEST_CASE("cuda attention mma: more than 65,535 heads" * needs_gpu()) {
  std::mt19937 random(5);
  check_mma({.batch = 70000, .seq_q = 2, .seq_k = 3, .dim = 8, .dtype = DType::bf16}, random);
}
