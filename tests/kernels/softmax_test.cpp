// Softmax and cross entropy where plain formulas fail: huge logits, long rows, ignored targets, memory.
#include "strobe/kernels/softmax.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "support/compare.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

// One value in each of `rows` rows of uniform noise is a large one.
Tensor logits_with_spikes(int64_t rows, int64_t vocab, double spike, DType dtype) {
  seed(11);
  std::vector<double> values = uniform({rows, vocab}, -1.0, 1.0, DType::f64).to_vector<double>();
  for (int64_t row = 0; row < rows; ++row) values[static_cast<size_t>(row * vocab + row % vocab)] += spike;
  return from_vector(values, {rows, vocab}).to(dtype);
}

Tensor targets_of(const std::vector<int64_t>& values) {
  return from_vector(values, {static_cast<int64_t>(values.size())});
}

}  // namespace

TEST_CASE("softmax: logits of any finite size are exact") {
  const float big = 1e5f;
  const Tensor x = from_vector(std::vector<float>{big, big, -big, -big, -big, -big, big, 0.0f, -big}, {3, 3});
  const std::vector<float> expected{0.5f, 0.5f, 0.0f, 1.0f / 3, 1.0f / 3, 1.0f / 3, 1.0f, 0.0f, 0.0f};
  const std::vector<float> y = softmax(x).to_vector<float>();
  for (size_t i = 0; i < y.size(); ++i) CHECK(y[i] == doctest::Approx(expected[i]));
  const std::vector<float> log_y = log_softmax(x).to_vector<float>();
  CHECK(log_y[0] == doctest::Approx(-std::log(2.0f)));
  CHECK(log_y[2] == doctest::Approx(-2 * big));
  CHECK(log_y[6] == 0.0f);
}

TEST_CASE("softmax: -inf is probability 0, NaN spreads over its row only") {
  const float inf = std::numeric_limits<float>::infinity();
  const Tensor x = from_vector(std::vector<float>{-inf, 0.0f, 1.0f, std::nanf("")}, {2, 2});
  const std::vector<float> y = softmax(x).to_vector<float>();
  CHECK(y[0] == 0.0f);
  CHECK(y[1] == 1.0f);
  CHECK(std::isnan(y[2]));
  CHECK(std::isnan(y[3]));
}

TEST_CASE("softmax: a long row sums to one, and any axis will do") {
  const Tensor x = uniform({2, 100003}, -8.0, 8.0);
  const Tensor y = softmax(x);
  CHECK(relative_difference(y, softmax(x.to(DType::f64))) <= 2e-6);
  CHECK(std::abs(sum(y.to(DType::f64)).item<double>() - 2) <= 1e-6);
  const Tensor z = uniform({3, 5, 4});
  CHECK(relative_difference(softmax(z, 1), transpose(softmax(transpose(z, 1, 2)), 1, 2)) == 0);
  CHECK(relative_difference(sum(softmax(z, 0), {0}), ones({5, 4})) <= 1e-6);
}

TEST_CASE("cross_entropy: equals the mean of minus log_softmax at the targets") {
  const Tensor logits = logits_with_spikes(5, 1009, 3.0, DType::f64);
  const std::vector<int64_t> targets{0, 1008, 7, -1, 400};
  const std::vector<double> log_y = log_softmax(logits).to_vector<double>();
  double expected = 0;
  for (size_t row = 0; row < 5; ++row) {
    if (targets[row] >= 0) expected -= log_y[row * 1009 + static_cast<size_t>(targets[row])] / 4;
  }
  const double loss = cross_entropy(logits, targets_of(targets), {.ignore_index = -1}).item<double>();
  CHECK(loss == doctest::Approx(expected).epsilon(1e-13));
}

TEST_CASE("cross_entropy: f32 is exact for huge logits, forward and backward") {
  for (double spike : {0.0, 100.0, 1e5}) {
    CAPTURE(spike);
    const Tensor logits = logits_with_spikes(40, 37, spike, DType::f32);
    std::vector<int64_t> targets(40);
    for (size_t row = 0; row < 40; ++row) targets[row] = static_cast<int64_t>(row * 5 % 37);
    std::vector<Tensor> losses;
    std::vector<Tensor> gradients;
    for (DType dtype : {DType::f32, DType::f64}) {
      const Tensor x = (logits * 1.0).to(dtype).set_requires_grad();
      const Tensor loss = cross_entropy(x, targets_of(targets));
      loss.backward();
      losses.push_back(loss);
      gradients.push_back(x.grad());
    }
    CHECK(relative_difference(losses[0], losses[1]) <= 1e-6);
    CHECK(relative_difference(gradients[0], gradients[1]) <= 1e-6);
  }
}

TEST_CASE("cross_entropy: without counted targets loss and gradient are 0") {
  const Tensor logits = uniform({3, 4}).set_requires_grad();
  const Tensor loss = cross_entropy(logits, targets_of({-100, -100, -100}));
  loss.backward();
  CHECK(loss.item<float>() == 0.0f);
  CHECK(logits.grad().to_vector<float>() == std::vector<float>(12, 0.0f));
  CHECK(cross_entropy(uniform({0, 4}), targets_of({})).item<float>() == 0.0f);
}

TEST_CASE("cross_entropy: keeps one number per row and reuses the memory of the logits") {
  const int64_t rows = 64;
  const int64_t vocab = 1024;
  const size_t logits_bytes = static_cast<size_t>(rows * vocab) * sizeof(float);
  const Tensor x = uniform({rows, vocab}).set_requires_grad();
  const Tensor targets = targets_of(std::vector<int64_t>(static_cast<size_t>(rows), 3));
  const Tensor kept = x * 2.0;
  const Tensor reference = cross_entropy(kept, targets);
  const size_t small = 16 * static_cast<size_t>(rows);
  size_t before = memory_stats().current;
  reset_peak_memory();
  reference.backward();
  CHECK(memory_stats().peak >= before + logits_bytes);  // `kept` is still used, so it must not be written over
  CHECK(same_bits(kept, x.detach() * 2.0));
  const Tensor expected = x.grad();
  x.set_grad(Tensor());

  before = memory_stats().current;
  reset_peak_memory();
  const Tensor loss = cross_entropy(x * 2.0, targets);
  CHECK(memory_stats().peak <= before + logits_bytes + small);
  loss.backward();
  CHECK(memory_stats().peak <= before + 2 * logits_bytes + small);  // the second is the gradient of x itself
  CHECK(same_bits(x.grad(), expected));
}

TEST_CASE("cross_entropy: rows of logits may lie apart, or be one") {
  const Tensor targets = targets_of({0, 10, -100, 4});
  const Tensor wide = uniform({4, 16}).set_requires_grad();
  const auto gradient_of = [&](Tensor logits) {
    wide.set_grad(Tensor());
    const Tensor loss = cross_entropy(logits, targets);
    logits = Tensor();
    loss.backward();
    return std::pair(loss.detach(), wide.grad());
  };
  const auto expected = gradient_of(contiguous(slice(wide, 1, 2, 13)));
  const auto kept = gradient_of(slice(wide, 1, 2, 13));
  CHECK(same_bits(kept.first, expected.first));
  CHECK(same_bits(kept.second, expected.second));
  const auto overwritten = gradient_of(slice(wide * 1.0, 1, 2, 13));
  CHECK(same_bits(overwritten.second, expected.second));
  const auto repeated = gradient_of(expand(slice(wide * 1.0, 0, 0, 1), {4, 16}));
  const Tensor row = slice(wide, 0, 0, 1);
  CHECK(relative_difference(repeated.second, gradient_of(concat({row, row, row, row}, 0)).second) <= 1e-6);
}

TEST_CASE("cross_entropy: the same bits for any number of threads") {
  const Tensor logits = logits_with_spikes(97, 501, 5.0, DType::f32).set_requires_grad();
  std::vector<int64_t> targets(97);
  std::iota(targets.begin(), targets.end(), 0);
  const int threads = num_threads();
  const auto run = [&] {
    logits.set_grad(Tensor());
    const Tensor loss = cross_entropy(logits, targets_of(targets));
    loss.backward();
    return std::pair(loss.detach(), logits.grad());
  };
  const auto many = run();
  set_num_threads(1);
  const auto one = run();
  set_num_threads(threads);
  CHECK(same_bits(many.first, one.first));
  CHECK(same_bits(many.second, one.second));
}

TEST_CASE("cross_entropy: a target out of range is named with its position and the vocabulary") {
  const Tensor logits = uniform({2, 3, 10});
  const auto with = [&](std::vector<int64_t> values) {
    return error_of([&] { cross_entropy(logits, from_vector(values, {2, 3})); });
  };
  const std::string too_large = with({0, 1, 2, 3, 10, 5});
  CHECK(contains(too_large, "cross_entropy"));
  CHECK(contains(too_large, "10 at position (1, 1)"));
  CHECK(contains(too_large, "vocab is 10"));
  CHECK(contains(with({0, 1, -1, 3, 4, 5}), "-1 at position (0, 2)"));
  CHECK(contains(error_of([&] { cross_entropy(logits, from_vector(std::vector<int64_t>{1, 2}, {2})); }), "(2, 3)"));
  CHECK(contains(error_of([&] { cross_entropy(logits, uniform({2, 3})); }), "i32 or i64"));
}
