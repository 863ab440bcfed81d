// How exact the Hopper attention kernels are where one key counts more than all others.
#include <doctest/doctest.h>

#include "support/gpu_attention.h"

using namespace strobe;
using namespace strobe::kernels;
using namespace strobe::testing;

namespace {

struct Errors {
  double largest = 0, mean = 0;

  Errors(const std::vector<double>& x, const std::vector<double>& exact) {
    for (size_t i = 0; i < x.size(); ++i) {
      const double error = std::isfinite(x[i]) ? std::abs(x[i] - exact[i]) : std::numeric_limits<double>::infinity();
      largest = std::max(largest, error);
      mean += error / static_cast<double>(x.size());
    }
  }
};

}  // namespace

TEST_CASE("cuda attention hopper: a key that counts alone, a little or by far" * needs_hopper()) {
  std::mt19937 random(18);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int64_t dim : {64, 96, 128, 192, 256}) {
      for (const double advantage : {7.0, 10.0, 15.0, 20.0, 30.0, 1000.0}) {
        const GpuAttentionCase problem{.seq_q = 150, .seq_k = 700, .dim = dim, .dtype = dtype};
        GpuAttention attention(problem, random);
        const auto first_column = [&](AttentionOperand& x, auto&& value_of) {
          for (size_t i = 0; i < x.values.size(); i += static_cast<size_t>(dim)) {
            x.values[i] = value_of(i / static_cast<size_t>(dim));
          }
          x.upload();
        };
        first_column(attention.query, [](size_t) { return 8.0; });
        first_column(attention.key,
                     [&](size_t key) { return key == 3 ? advantage / 8 * std::sqrt(static_cast<double>(dim)) : 0.0; });
        INFO(problem.describe(), " advantage ", advantage);
        const AttentionValues exact = attention.reference(), unfused = attention.reference(dtype);
        const AttentionValues given = attention.run(AttentionKernel::hopper);
        for (const size_t i : {0, 2, 3, 4}) {
          INFO(AttentionOutputs::names[i]);
          const Errors ours(given[i], exact[i]), others(unfused[i], exact[i]);
          // Gradients are less exact than unfused ones, as delta is made of a rounded out.
          CHECK(ours.largest <= (i == 0 ? 2 : 8) * others.largest + 1e-6);
          CHECK(ours.mean <= (i == 0 ? 1.5 : 2.5) * others.mean + 1e-7);
        }
      }
    }
  }
}
