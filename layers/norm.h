// Normalization of the last axis: LayerNorm (Ba et al. 2016) and RMSNorm (Zhang & Sennrich 2019).
#pragma once

#include "strobe/layers/layer.h"

namespace strobe {

struct LayerNorm {
  Tensor weight;  // (dim)
  Tensor bias;    // (dim)
  double eps;

  explicit LayerNorm(int64_t dim, double epsilon = 1e-5)
      : weight(parameter(ones({dim}))), bias(parameter(zeros({dim}))), eps(epsilon) {}

  Tensor operator()(const Tensor& x) const { return layer_norm(x, weight, bias, eps); }
  // x + residual and its norm; residual may be undefined.
  AddNormResult operator()(const Tensor& x, const Tensor& residual) const {
    return add_layer_norm(x, residual, weight, bias, eps);
  }

  void visit(auto&& field) const {
    field("weight", weight);
    field("bias", bias);
  }
};

struct RMSNorm {
  Tensor weight;  // (dim)
  double eps;

  explicit RMSNorm(int64_t dim, double epsilon = 1e-5) : weight(parameter(ones({dim}))), eps(epsilon) {}

  Tensor operator()(const Tensor& x) const { return rms_norm(x, weight, eps); }
  AddNormResult operator()(const Tensor& x, const Tensor& residual) const {
    return add_rms_norm(x, residual, weight, eps);
  }

  void visit(auto&& field) const { field("weight", weight); }
};

}  // namespace strobe
