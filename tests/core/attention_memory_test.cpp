// What attention asks the allocator for: tiled grows with seq_len, standard with its square.
#include <cmath>

#include "strobe/kernels/attention.h"
#include "support/compare.h"
#include "support/threads.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t longest = 4096;
#else
constexpr int64_t longest = 16384;
#endif
constexpr int64_t head_dim = 16;

using AttentionFunction = Tensor (*)(const Tensor&, const Tensor&, const Tensor&, const AttentionOptions&);

// Bytes of one (1, seq_len, 1, head_dim) f32 tensor, and of one number per row.
size_t rows_bytes(int64_t seq_len) { return static_cast<size_t>(seq_len * head_dim) * sizeof(float); }
size_t row_bytes(int64_t seq_len) { return static_cast<size_t>(seq_len) * sizeof(float); }

// Bytes under the tag "attention" for one head: at most and at the end of each pass.
struct Usage {
  size_t forward_peak, forward_kept, peak;
};

Usage measure(AttentionFunction attention, int64_t seq_len) {
  seed(1);
  const Shape shape{1, seq_len, 1, head_dim};
  std::vector<Tensor> x;
  for (int i = 0; i < 3; ++i) x.push_back(normal(shape).set_requires_grad());
  const Tensor dout = normal(shape);
  const size_t before = memory_stats("attention").current;
  const auto used = [before](size_t bytes) { return bytes - before; };
  Usage usage{};
  reset_peak_memory();
  const Tensor out = attention(x[0], x[1], x[2], {});
  usage.forward_peak = used(memory_stats("attention").peak);
  usage.forward_kept = used(memory_stats("attention").current);
  out.backward(dout);
  usage.peak = used(memory_stats("attention").peak);
  CHECK(used(memory_stats("attention").current) == 4 * rows_bytes(seq_len));  // out and three gradients
  return usage;
}

// The slope of log(bytes) over log(seq_len), by least squares, for seq_len 256 to 16,384. `beyond_results` leaves out
// what any attention must return: the result, lse and three gradients.
double exponent(AttentionFunction attention, bool beyond_results) {
  std::vector<double> x, y;
  double mean_x = 0, mean_y = 0;
  for (int64_t seq_len = 256; seq_len <= longest; seq_len *= 2) {
    const size_t results = beyond_results ? 4 * rows_bytes(seq_len) + row_bytes(seq_len) : 0;
    x.push_back(std::log(static_cast<double>(seq_len)));
    y.push_back(std::log(static_cast<double>(measure(attention, seq_len).peak - results)));
    mean_x += x.back();
    mean_y += y.back();
  }
  mean_x /= static_cast<double>(x.size());
  mean_y /= static_cast<double>(x.size());
  double covariance = 0, variance = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    covariance += (x[i] - mean_x) * (y[i] - mean_y);
    variance += (x[i] - mean_x) * (x[i] - mean_x);
  }
  return covariance / variance;
}

}  // namespace

TEST_CASE("attention memory: linear in seq_len when tiled, quadratic when standard") {
  const Threads two(2);
  const double tiled = exponent(flash_attention, false);
  const double standard = exponent(standard_attention, true);
  MESSAGE("fitted exponents of seq_len: tiled ", tiled, ", standard ", standard);
  CHECK(tiled <= 1.05);
  CHECK(standard >= (longest < 16384 ? 1.8 : 1.9));  // scratch memory of fixed size shows in the shorter ones
}

TEST_CASE("attention memory: tiled takes the results, lse and blocks of a fixed size, to the byte") {
  const Threads two(2);  // each has a block
  const int64_t shorter = 1024, longer = 4096;
  const Usage a = measure(flash_attention, shorter), b = measure(flash_attention, longer);
  const auto blocks = [](const Usage& usage, int64_t seq_len) {
    return usage.forward_peak - rows_bytes(seq_len) - row_bytes(seq_len);
  };
  CHECK(blocks(a, shorter) == blocks(b, longer));
  CHECK(a.forward_kept == rows_bytes(shorter) + row_bytes(shorter));
  CHECK(b.forward_kept == rows_bytes(longer) + row_bytes(longer));
  // Backward: the gradients, delta, lse in two parts, and a counter for each block of 128 queries.
  const auto backward_blocks = [](const Usage& usage, int64_t seq_len) {
    return usage.peak - usage.forward_kept - 3 * rows_bytes(seq_len) - 3 * row_bytes(seq_len) -
           static_cast<size_t>(seq_len / 128) * sizeof(int64_t);
  };
  CHECK(backward_blocks(a, shorter) == backward_blocks(b, longer));
  {
    const NoGrad no_grad;
    const Tensor x = normal({1, shorter, 1, head_dim});
    const size_t before = memory_stats("attention").current;
    const Tensor out = flash_attention(x, x, x);
    CHECK(memory_stats("attention").current - before == rows_bytes(shorter));
  }
}

TEST_CASE("attention memory: packed queries, keys and values need one gradient and no copies") {
  seed(2);
  const int64_t seq_len = 1024;
  const Tensor qkv = normal({1, seq_len, 3 * head_dim}).set_requires_grad();
  const Tensor dout = normal({1, seq_len, 1, head_dim});
  const size_t before = memory_stats().current;
  const Tensor out = flash_attention_qkvpacked(qkv, 1);
  CHECK(memory_stats().current - before == rows_bytes(seq_len) + row_bytes(seq_len));
  reset_peak_memory();
  out.backward(dout);
  const Usage separate = measure(flash_attention, seq_len);
  CHECK(memory_stats("attention").peak <= before + separate.peak);
  CHECK(memory_stats().current - before == 4 * rows_bytes(seq_len));
}
