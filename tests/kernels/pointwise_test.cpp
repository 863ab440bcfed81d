// Elementwise kernels over every kind of stride, conversions between all dtypes, and limits.
#include "strobe/kernels/pointwise.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "support/compare.h"
#include "support/threads.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
const double nan_value = std::nan("");

// Element number `i` (row-major over `shape`) of x broadcast to `shape`, read through its strides.
double element(const Tensor& x, const Shape& shape, int64_t i) {
  const double* data = x.data<double>();
  int64_t offset = 0;
  for (int axis = shape.size() - 1; axis >= 0; --axis) {
    const int own = axis - (shape.size() - x.rank());
    if (own >= 0 && x.dim(own) != 1) offset += i % shape[axis] * x.strides()[own];
    i /= shape[axis];
  }
  return data[offset];
}

std::vector<double> values_of(const Tensor& x) { return x.to_vector<double>(); }

}  // namespace

TEST_CASE("binary: broadcast and permuted operands of every rank") {
  seed(1);
  const Tensor cube = uniform({4, 3, 5}, 1.0, 2.0, DType::f64);
  const std::vector<std::pair<Tensor, Tensor>> pairs{
      {cube, cube},
      {cube, uniform({}, 1.0, 2.0, DType::f64)},
      {uniform({3, 1}, 1.0, 2.0, DType::f64), cube},
      {permute(cube, {2, 0, 1}), uniform({5, 4, 3}, 1.0, 2.0, DType::f64)},
      {permute(cube, {2, 1, 0}), uniform({3, 1}, 1.0, 2.0, DType::f64)},
      {slice(cube, 2, 1, 4), slice(cube, 2, 0, 3)},
      {expand(uniform({1, 5}, 1.0, 2.0, DType::f64), {6, 5}), uniform({7, 1, 1}, 1.0, 2.0, DType::f64)},
      {uniform({2, 1, 2, 1, 2, 1, 2, 1}, 1.0, 2.0, DType::f64), uniform({3, 1, 3, 1, 3, 1, 3}, 1.0, 2.0, DType::f64)},
      {uniform({300, 200}, 1.0, 2.0, DType::f64), transpose(uniform({200, 300}, 1.0, 2.0, DType::f64), 0, 1)},
      {zeros({0, 5}, DType::f64), ones({5}, DType::f64)},
      {zeros({3, 0}, DType::f64), ones({3, 1}, DType::f64)},
  };
  for (const auto& [a, b] : pairs) {
    const Tensor quotient = a / b;
    const Tensor difference = a - b;
    CAPTURE(concat_message(a.shape(), " ", b.shape()));
    REQUIRE(quotient.shape() == broadcast_shapes("test", a.shape(), b.shape()));
    const std::vector<double> q = values_of(quotient);
    const std::vector<double> d = values_of(difference);
    bool equal = true;
    for (int64_t i = 0; i < quotient.size(); ++i) {
      const double x = element(a, quotient.shape(), i);
      const double y = element(b, quotient.shape(), i);
      equal = equal && q[static_cast<size_t>(i)] == x / y && d[static_cast<size_t>(i)] == x - y;
    }
    CHECK(equal);
  }
}

TEST_CASE("binary: a number on either side is not rounded to a 16-bit dtype") {
  const Tensor x = from_vector(std::vector<float>{3.0f, -3.0f}, {2}).to(DType::bf16);
  CHECK(values_of((x * 0.3).to(DType::f64)) ==
        values_of(from_vector(std::vector<float>{0.9f, -0.9f}, {2}).to(DType::bf16)));
  CHECK(values_of(6.0 / x) == std::vector<double>{2, -2});
  CHECK(values_of(1.0 - x) == std::vector<double>{-2, 4});
}

TEST_CASE("binary: shapes, dtypes and integers that do not go together are refused") {
  CHECK(contains(error_of([] { ones({2, 3}) + ones({2}); }), "(2, 3) and (2)"));
  CHECK(contains(error_of([] { ones({2}) * ones({2}, DType::f64); }), "f64"));
  CHECK(contains(error_of([] { ones({2}, DType::i32) + 1.0; }), "i32"));
  CHECK(contains(error_of([] { Tensor() - ones({2}); }), "undefined"));
  CHECK(contains(error_of([] { exp(ones({2}, DType::i64)); }), "i64"));
  CHECK(contains(error_of([] { Tensor() * 2.0; }), "undefined"));
}

TEST_CASE("cast: floating to integer truncates and saturates, every pair of dtypes converts") {
  const Tensor x = from_vector(std::vector<double>{-2.7, 2.7, 1e300, -1e300, nan_value, infinity}, {6});
  CHECK(cast(x, DType::i32).to_vector<int32_t>() == std::vector<int32_t>{-2, 2, INT32_MAX, INT32_MIN, 0, INT32_MAX});
  CHECK(cast(x, DType::i64).to_vector<int64_t>() == std::vector<int64_t>{-2, 2, INT64_MAX, INT64_MIN, 0, INT64_MAX});
  const std::vector<DType> dtypes{DType::f32, DType::f64, DType::bf16, DType::f16, DType::i32, DType::i64};
  const Tensor small = from_vector(std::vector<double>{-128, -1, 0, 1, 2, 100}, {2, 3});
  for (DType from : dtypes) {
    for (DType to : dtypes) {
      const Tensor there = transpose(cast(cast(small, from), to), 0, 1);
      CHECK(there.dtype() == to);
      CHECK(values_of(there.to(DType::f64)) == values_of(transpose(small, 0, 1)));
    }
  }
}

TEST_CASE("unary: limits and NaN") {
  const Tensor x = from_vector(std::vector<double>{nan_value, -infinity, infinity, 0.0}, {4});
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    const Tensor given = x.to(dtype);
    CHECK(std::isnan(values_of(relu(given))[0]));
    CHECK(values_of(relu(given))[1] == 0);
    CHECK(values_of(relu(given))[2] == infinity);
    CHECK(std::isnan(values_of(tanh(given))[0]));
    CHECK(values_of(tanh(given))[1] == -1);
    CHECK(values_of(exp(given))[1] == 0);
    CHECK(values_of(exp(given))[2] == infinity);
    CHECK(values_of(gelu(given))[2] == infinity);
    CHECK(values_of(silu(given))[3] == 0);
  }
}

TEST_CASE("pointwise: empty tensors, and sizes around the vector width") {
  for (int64_t size : {0, 1, 2, 15, 16, 17, 31, 33, 1000, 40000}) {
    CAPTURE(size);
    const Tensor x = uniform({size}, -3.0, 3.0);
    CHECK(relative_difference(gelu(x), gelu(x.to(DType::f64))) <= 1e-6);
    CHECK(relative_difference(gelu_tanh(x), gelu_tanh(x.to(DType::f64))) <= 1e-6);
    CHECK(relative_difference(x * 2.0, x.to(DType::f64) * 2.0) == 0);
  }
}

TEST_CASE("unary: the same bits for any number of threads, forward and backward") {
  seed(12);
  const Tensor x = uniform({100001}, -5.0, 5.0).set_requires_grad();
  const auto run = [&](int count) {
    const Threads threads(count);
    x.set_grad(Tensor());
    const Tensor y = gelu(x) + gelu(x, GeluForm::tanh) + silu(x) + tanh(x) + exp(x);
    sum(y).backward();
    return std::vector<Tensor>{y.detach(), x.grad()};
  };
  const std::vector<Tensor> one = run(1);
  for (int count : {2, 3, 7}) {
    const std::vector<Tensor> several = run(count);
    CHECK(same_bits(several[0], one[0]));
    CHECK(same_bits(several[1], one[1]));
  }
}

TEST_CASE("gelu_tanh: gradients far from zero are 0 and 1") {
  const Tensor x = from_vector<float>({-1e20f, -200.0f, 200.0f, 1e20f}, {4}).set_requires_grad();
  sum(gelu(x, GeluForm::tanh)).backward();
  CHECK(x.grad().to_vector<float>() == std::vector<float>{0, 0, 1, 1});
}
