// Reductions against plain loops: every set of axes, accuracy over long rows, ties, NaN, empty axes, threads.
#include "strobe/kernels/reduce.h"

#include <doctest/doctest.h>

#include <cmath>

#include "support/compare.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

// Sum (or maximum) over the axes whose bit is set in `mask`, as a flat array of the kept elements.
std::vector<double> reduce_by_loop(const Tensor& x, int mask, bool maximum) {
  const std::vector<double> values = x.to_vector<double>();
  int64_t kept_size = 1;
  for (int axis = 0; axis < x.rank(); ++axis) kept_size *= (mask >> axis & 1) != 0 ? 1 : x.dim(axis);
  std::vector<double> result(static_cast<size_t>(kept_size), maximum ? -1e300 : 0.0);
  for (int64_t i = 0; i < x.size(); ++i) {
    int64_t rest = i;
    int64_t position = 0;
    int64_t stride = 1;
    for (int axis = x.rank() - 1; axis >= 0; --axis) {
      if ((mask >> axis & 1) == 0) {
        position += rest % x.dim(axis) * stride;
        stride *= x.dim(axis);
      }
      rest /= x.dim(axis);
    }
    double& target = result[static_cast<size_t>(position)];
    const double value = values[static_cast<size_t>(i)];
    target = maximum ? std::max(target, value) : target + value;
  }
  return result;
}

}  // namespace

TEST_CASE("sum, mean, max: every set of axes, also of permuted inputs") {
  seed(3);
  const Tensor x = uniform({3, 4, 5, 300}, -1.0, 1.0, DType::f64);
  for (const Tensor& input : {x, permute(x, {3, 1, 0, 2})}) {
    for (int mask = 1; mask < 16; ++mask) {
      CAPTURE(mask);
      std::vector<int> axes;
      double count = 1;
      for (int axis = 3; axis >= 0; --axis) {
        if ((mask >> axis & 1) == 0) continue;
        axes.push_back(axis % 2 == 0 ? axis : axis - 4);
        count *= static_cast<double>(input.dim(axis));
      }
      const std::vector<double> expected = reduce_by_loop(input, mask, false);
      CHECK(relative_difference(sum(input, axes).to_vector<double>(), expected) <= 1e-13);
      CHECK(relative_difference((mean(input, axes) * count).to_vector<double>(), expected) <= 1e-13);
      CHECK(max(input, axes).to_vector<double>() == reduce_by_loop(input, mask, true));
      CHECK(sum(input, axes, true).rank() == 4);
    }
  }
}

TEST_CASE("sum: a long f32 row or column loses nothing") {
  const int64_t n = 3000001;
  const Tensor x = uniform({n});
  const double expected = sum(x.to(DType::f64)).item<double>();
  CHECK(std::abs(sum(x).item<double>() - expected) / expected <= 1e-7);
  const Tensor column = uniform({200001, 3});
  CHECK(relative_difference(sum(column, {0}), sum(column.to(DType::f64), {0})) <= 1e-7);
}

TEST_CASE("sum: the same bits for any number of threads") {
  const std::vector<Tensor> inputs{uniform({2000003}), uniform({40000, 70}), uniform({3, 300000})};
  const int threads = num_threads();
  for (const Tensor& x : inputs) {
    for (int axis = 0; axis < x.rank(); ++axis) {
      const Tensor many = sum(x, {axis});
      set_num_threads(1);
      const Tensor one = sum(x, {axis});
      set_num_threads(threads);
      CHECK(same_bits(many, one));
    }
  }
}

TEST_CASE("max: equal maxima share the gradient, NaN wins") {
  const Tensor x = from_vector(std::vector<float>{1, 3, 3, 0, 3, 2, -5, -5}, {2, 4}).set_requires_grad();
  sum(max(x, {1})).backward();
  CHECK(x.grad().to_vector<float>() == std::vector<float>{0, 0.5f, 0.5f, 0, 1, 0, 0, 0});
  x.set_grad(Tensor());
  max(x).backward();
  const float share = 1.0f / 3;
  CHECK(x.grad().to_vector<float>() == std::vector<float>{0, share, share, 0, share, 0, 0, 0});
  const Tensor y = from_vector(std::vector<float>{1, std::nanf(""), 3, 4}, {2, 2});
  CHECK(std::isnan(max(y).item<float>()));
  CHECK(std::isnan(max(y, {0}).to_vector<float>()[1]));
  CHECK(max(y, {1}).to_vector<float>()[1] == 4);
  CHECK(std::isnan(sum(y).item<float>()));
}

TEST_CASE("reductions: no elements") {
  CHECK(sum(zeros({0, 3})).item<float>() == 0);
  CHECK(sum(zeros({0, 3}), {0}).to_vector<float>() == std::vector<float>{0, 0, 0});
  CHECK(sum(zeros({0, 3}), {1}).shape() == Shape{0});
  CHECK(std::isnan(mean(zeros({0})).item<float>()));
  CHECK(contains(error_of([] { max(zeros({2, 0}), {1}); }), "(2, 0)"));
  CHECK(max(zeros({0, 3}), {1}).shape() == Shape{0});
}

TEST_CASE("reductions: bad axes are named") {
  const Tensor x = ones({2, 3});
  CHECK(contains(error_of([&] { sum(x, {2}); }), "axis 2"));
  CHECK(contains(error_of([&] { mean(x, {-3}); }), "axis -3"));
  CHECK(contains(error_of([&] { max(x, {1, -1}); }), "axis -1 given twice"));
  CHECK(contains(error_of([] { sum(ones({2}, DType::i64)); }), "i64"));
}

TEST_CASE("sum_to: the inverse of broadcasting") {
  const Tensor x = uniform({4, 3, 5}, -1.0, 1.0, DType::f64);
  for (const Shape& shape :
       {Shape{4, 3, 5}, Shape{3, 5}, Shape{5}, Shape{}, Shape{1, 3, 1}, Shape{4, 1, 1}, Shape{1}}) {
    const Tensor y = sum_to(x, shape);
    CHECK(y.shape() == shape);
    CHECK(std::abs(sum(y).item<double>() - sum(x).item<double>()) <= 1e-12);
  }
  CHECK(relative_difference(sum_to(x, {3, 1}), reshape(sum(x, {0, 2}), {3, 1})) <= 1e-13);
  CHECK(contains(error_of([&] { sum_to(x, {2, 5}); }), "(2, 5)"));
}
