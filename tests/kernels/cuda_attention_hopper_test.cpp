// The Hopper attention kernels where their tiles, the maximum that stands still and their schedules make a difference;
// on other GPUs they must refuse by name.
#include <doctest/doctest.h>

#include "support/gpu_attention.h"

using namespace strobe;
using namespace strobe::kernels;
using namespace strobe::testing;

namespace {

// Whether this GPU has the kernel; where it has not, checks that it says so.
bool has_hopper() {
  std::mt19937 random(1);
  GpuAttention attention({.seq_q = 8, .seq_k = 8, .dim = 64, .dtype = DType::bf16}, random);
  try {
    attention.run(AttentionKernel::hopper);
    return true;
  } catch (const Error& error) {
    CHECK(std::string(error.what()).find("kernel hopper given, but ") != std::string::npos);
    MESSAGE(error.what());
    return false;
  }
}

// out at most twice as far from the exact result as unfused attention with matrices in the dtype.
void check_output(const AttentionValues& given, const AttentionValues& exact, const AttentionValues& unfused, size_t i,
                  DType dtype) {
  INFO(AttentionOutputs::names[i]);
  const double tiny = dtype == DType::bf16 ? 4e-3 : 5e-4;
  CHECK(relative_error(given[i], exact[i]) <= 2 * relative_error(unfused[i], exact[i]) + tiny);
}
void check_forward(GpuAttention& attention, const GpuAttentionCase& problem) {
  INFO(problem.describe());
  const AttentionValues exact = attention.reference(), unfused = attention.reference(problem.dtype);
  const AttentionValues given = attention.run(AttentionKernel::hopper);
  check_output(given, exact, unfused, 0, problem.dtype);
  CHECK(relative_error(given[1], exact[1]) <= 1e-5);
}
// dquery, dkey and dvalue, too; the backward pass takes head_dims that the forward pass leaves to another kernel.
void check_all(const GpuAttentionCase& problem, std::mt19937& random,
               AttentionKernel kernel = AttentionKernel::hopper) {
  INFO(problem.describe());
  GpuAttention attention(problem, random);
  const AttentionValues exact = attention.reference(), unfused = attention.reference(problem.dtype);
  const AttentionValues given = attention.run(kernel);
  for (const size_t i : {0, 2, 3, 4}) check_output(given, exact, unfused, i, problem.dtype);
  CHECK(relative_error(given[1], exact[1]) <= 1e-5);
}

bool same(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

}  // namespace

TEST_CASE("cuda attention hopper: lengths around the edges of tiles" * needs_gpu()) {
  if (!has_hopper()) return;
  std::mt19937 random(1);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int64_t dim : {64, 128}) {
      for (const int64_t seq_q : {1, 63, 64, 65, 128, 129, 191, 192, 193, 400}) {
        for (const int64_t seq_k : {1, 79, 80, 81, 96, 97, 128, 129, 161, 500}) {
          const GpuAttentionCase problem{.seq_q = seq_q,
                                         .seq_k = seq_k,
                                         .heads = 2,
                                         .dim = dim,
                                         .dtype = dtype,
                                         .options = {.causal = (seq_q + seq_k) % 2 == 0}};
          check_all(problem, random);
        }
      }
    }
  }
}

TEST_CASE("cuda attention hopper: windows, scales, strides" * needs_gpu()) {
  if (!has_hopper()) return;
  std::mt19937 random(2);
  for (const int64_t dim : {64, 128}) {
    for (const auto& [left, right] : {std::pair(0, 0), {17, 33}, {-1, 5}, {100, -1}, {1000, 1000}}) {
      for (const double scale : {0.1, 0.0, -0.1}) {
        for (const bool heads_first : {false, true}) {
          const GpuAttentionCase problem{
              .batch = 2,
              .seq_q = 200,
              .seq_k = 270,
              .dim = dim,
              .dtype = DType::bf16,
              .options = {.softmax_scale = scale, .window_left = left, .window_right = right},
              .gap = 8,
              .heads_first = heads_first};
          check_all(problem, random);
        }
      }
    }
  }
}

TEST_CASE("cuda attention hopper: scores that rise block by block, a little or beyond any float" * needs_gpu()) {
  if (!has_hopper()) return;
  std::mt19937 random(3);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int64_t dim : {64, 128}) {
      for (const double growth : {1.0, 30.0, 3000.0}) {
        const GpuAttentionCase problem{.seq_q = 200, .seq_k = 700, .dim = dim, .dtype = dtype};
        GpuAttention attention(problem, random);
        // Keys are visited from the last to the first: norms grow towards key 0, for some queries far more than others.
        for (size_t i = 0; i < attention.key.values.size(); ++i) {
          const double key = static_cast<double>(i / static_cast<size_t>(dim));
          attention.key.values[i] *= growth * (700 - key) / 700;
        }
        for (size_t i = 0; i < attention.query.values.size(); ++i) {
          attention.query.values[i] *= i / static_cast<size_t>(dim) % 3 == 0 ? 1 : 0.01;
        }
        for (AttentionOperand* x : {&attention.key, &attention.query}) x->upload();
        check_forward(attention, problem);
      }
    }
  }
}

TEST_CASE("cuda attention hopper: what a row does not see never changes its bits" * needs_gpu()) {
  if (!has_hopper()) return;
  std::mt19937 random(4);
  for (const int64_t dim : {64, 128}) {
    const int64_t seq = 500, changed = 250;
    GpuAttention attention({.seq_q = seq, .seq_k = seq, .dim = dim, .dtype = DType::bf16, .options = {.causal = true}},
                           random);
    const AttentionValues before = attention.run(AttentionKernel::hopper);
    // Rows from `changed` on now start from a tiny maximum and overflow later.
    for (size_t i = static_cast<size_t>(changed * dim); i < static_cast<size_t>(seq * dim); ++i) {
      attention.query.values[i] = 30;
      attention.key.values[i] = -30;
      attention.value.values[i] = 7;
    }
    for (AttentionOperand* x : {&attention.query, &attention.key, &attention.value}) x->upload();
    const AttentionValues after = attention.run(AttentionKernel::hopper);
    for (const size_t i : {0, 1}) {
      const size_t count = static_cast<size_t>(changed) * (i == 1 ? 1 : static_cast<size_t>(dim));
      CHECK(std::memcmp(before[i].data(), after[i].data(), count * sizeof(double)) == 0);
    }
  }
}

TEST_CASE("cuda attention hopper: NaN and infinity reach the rows that see them" * needs_gpu()) {
  if (!has_hopper()) return;
  std::mt19937 random(5);
  for (const double poison : {std::nan(""), static_cast<double>(INFINITY), -static_cast<double>(INFINITY)}) {
    for (const int64_t at : {0, 150, 399}) {
      GpuAttention attention({.seq_q = 400, .seq_k = 400, .dim = 128, .dtype = DType::bf16}, random);
      attention.key.values[static_cast<size_t>(at * 128 + 5)] = poison;
      attention.key.upload();
      const AttentionValues expected = attention.reference(), given = attention.run(AttentionKernel::hopper);
      CHECK(relative_error(given[0], expected[0]) <= 1.6e-2);
    }
  }
}

TEST_CASE("cuda attention hopper: gradients of groups of heads, of lse, of head_dims between the widths of tiles" *
          needs_gpu()) {
  if (!has_hopper()) return;
  std::mt19937 random(7);
  for (const int64_t dim : {64, 128, 8, 40, 72, 96, 120}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const bool causal : {false, true}) {
        const GpuAttentionCase problem{.batch = 2,
                                       .seq_q = 300,
                                       .seq_k = 350,
                                       .heads = 6,
                                       .kv_heads = 2,
                                       .dim = dim,
                                       .dtype = dtype,
                                       .options = {.causal = causal, .deterministic = causal},
                                       .with_dlse = true};
        const bool both = dim == 64 || dim == 128;
        check_all(problem, random, both ? AttentionKernel::hopper : AttentionKernel::auto_select);
      }
    }
  }
}

TEST_CASE("cuda attention hopper: a single key has gradient 0" * needs_gpu()) {
  if (!has_hopper()) return;
  std::mt19937 random(8);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int64_t dim : {64, 128}) {
      GpuAttention attention({.seq_q = 150, .heads = 2, .kv_heads = 2, .dim = dim, .dtype = dtype}, random);
      const AttentionValues values = attention.run(AttentionKernel::hopper);
      for (const size_t i : {2, 3}) {
        CHECK(std::all_of(values[i].begin(), values[i].end(), [](double x) { return x == 0; }));
      }
    }
  }
}

TEST_CASE("cuda attention hopper: large scores keep their gradients" * needs_gpu()) {
  if (!has_hopper()) return;
  std::mt19937 random(9);
  for (const int64_t dim : {64, 128}) {
    for (const bool causal : {false, true}) {
      check_all({.seq_q = 200,
                 .seq_k = 300,
                 .dim = dim,
                 .dtype = DType::bf16,
                 .options = {.softmax_scale = 100, .causal = causal}},
                random);
    }
  }
}

TEST_CASE("cuda attention hopper: a dout that TMA cannot read is left to another kernel" * needs_gpu()) {
  if (!has_hopper()) return;
  std::mt19937 random(10);
  const GpuAttentionCase problem{.seq_q = 100, .seq_k = 100, .dim = 64, .dtype = DType::bf16, .constant_dout = true};
  check_all(problem, random, AttentionKernel::auto_select);
  CHECK_THROWS_WITH_AS(GpuAttention(problem, random).run(AttentionKernel::hopper),
                       doctest::Contains("kernel hopper given, but dout has stride 0"), Error);
}

TEST_CASE("cuda attention hopper: many tiles for each block of the grid give the same bits on every run" *
          needs_gpu()) {
  if (!has_hopper()) return;
  std::mt19937 random(6);
  for (const bool causal : {false, true}) {
    const GpuAttentionCase problem{.seq_q = 500,
                                   .seq_k = 600,
                                   .heads = 70,
                                   .kv_heads = 10,
                                   .dim = 64,
                                   .dtype = DType::bf16,
                                   .options = {.causal = causal}};
    GpuAttention attention(problem, random);
    const AttentionValues first = attention.run(AttentionKernel::hopper);
    const AttentionValues other = attention.run(AttentionKernel::mma);
    for (const size_t i : {0, 2, 3, 4}) CHECK(relative_error(first[i], other[i]) <= 1.6e-2);
    CHECK(relative_error(first[1], other[1]) <= 1e-5);
    for (int n = 0; n < 19; ++n) {
      const AttentionValues again = attention.run(AttentionKernel::hopper);
      for (size_t i = 0; i < 5; ++i) CHECK(same(again[i], first[i]));
    }
  }
}
