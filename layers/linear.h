// Linear: y = x weight^T + bias.
#pragma once

#include "strobe/layers/layer.h"

namespace strobe {

struct Linear {
  Tensor weight;  // (out_features, in_features)
  Tensor bias;    // (out_features), or undefined

  // Weights are drawn from a normal distribution with standard deviation `init_std`; biases start at 0.
  Linear(int64_t in_features, int64_t out_features, bool with_bias = true, double init_std = 0.02)
      : weight(parameter(normal({out_features, in_features}, 0.0, init_std))),
        bias(with_bias ? parameter(zeros({out_features})) : Tensor()) {}

  // x: (..., in_features); result: (..., out_features).
  Tensor operator()(const Tensor& x) const { return linear(x, weight, bias); }

  void visit(auto&& field) const {
    field("weight", weight);
    field("bias", bias);
  }
};

}  // namespace strobe
