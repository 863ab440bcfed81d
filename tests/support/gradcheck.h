// Gradients against central differences in float64, along one random direction per input.
#pragma once

#include <doctest/doctest.h>

#include <functional>
#include <vector>

#include "support/compare.h"

namespace strobe::testing {

using OpFunction = std::function<Tensor(const std::vector<Tensor>&)>;

// A leaf and the view of it that an operation gets: the leaf itself, or a permuted slice of a larger leaf.
struct Input {
  Tensor leaf;
  Tensor view;
};

inline Input make_input(const Tensor& values, bool strided) {
  if (!strided || values.rank() == 0) {
    const Tensor leaf = empty_like(values);
    leaf.copy_from(values);
    leaf.set_requires_grad(is_floating(values.dtype()));
    return {leaf, leaf};
  }
  std::vector<int> reversed;
  Shape larger;
  for (int axis = values.rank() - 1; axis >= 0; --axis) {
    reversed.push_back(axis);
    larger.push_back(values.dim(axis));
  }
  const int64_t length = larger[larger.size() - 1];
  larger[larger.size() - 1] = length + 3;
  const Tensor leaf = zeros(larger, values.dtype());
  slice(leaf, -1, 1, length + 1).copy_from(permute(values.detach(), reversed));
  leaf.set_requires_grad(is_floating(values.dtype()));
  return {leaf, permute(slice(leaf, -1, 1, length + 1), reversed)};
}

inline double dot(const Tensor& a, const Tensor& b) {
  const std::vector<double> x = a.to_vector<double>();
  const std::vector<double> y = b.to_vector<double>();
  double total = 0;
  for (size_t i = 0; i < x.size(); ++i) total += x[i] * y[i];
  return total;
}

// For a random cotangent w and direction v per input: <gradient of <w, f>, v> against a five-point difference.
inline void gradcheck(const OpFunction& f, const std::vector<Tensor>& values, bool strided = false) {
  std::vector<Input> inputs;
  std::vector<Tensor> views;
  for (const Tensor& value : values) {
    inputs.push_back(make_input(value, strided));
    views.push_back(inputs.back().view);
  }
  const Tensor y = f(views);
  Tensor w = uniform(y.shape(), -1.0, 1.0, DType::f64);
  if (strided && y.rank() > 1) w = transpose(contiguous(transpose(w, 0, -1)), 0, -1);
  y.backward(w);
  const NoGrad no_grad;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!is_floating(values[i].dtype())) continue;
    CAPTURE(i);
    REQUIRE(inputs[i].leaf.grad().defined());
    const Tensor v = uniform(inputs[i].leaf.shape(), -1.0, 1.0, DType::f64);
    const double analytic = dot(inputs[i].leaf.grad(), v);
    const Tensor start = empty_like(inputs[i].leaf);
    start.copy_from(inputs[i].leaf);
    const auto value_at = [&](double step) {
      inputs[i].leaf.copy_from(start + v * step);
      return dot(f(views), w);
    };
    const double h = 2e-4;
    const double numeric = (8 * (value_at(h) - value_at(-h)) - (value_at(2 * h) - value_at(-2 * h))) / (12 * h);
    inputs[i].leaf.copy_from(start);
    const double typical = 0.1 * std::sqrt(dot(inputs[i].leaf.grad(), inputs[i].leaf.grad()));
    const double scale = std::max({std::abs(analytic), std::abs(numeric), typical, 1e-300});
    CAPTURE(analytic);
    CAPTURE(numeric);
    CHECK(std::abs(analytic - numeric) / scale <= 1e-7);
  }
}

// The same for inputs drawn uniformly from [low, high].
inline void gradcheck(const OpFunction& f, const std::vector<Shape>& shapes, bool strided = false, double low = -1.0,
                      double high = 1.0) {
  std::vector<Tensor> values;
  for (const Shape& shape : shapes) values.push_back(uniform(shape, low, high, DType::f64));
  gradcheck(f, values, strided);
}

}  // namespace strobe::testing
