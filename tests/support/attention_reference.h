// Attention from its definition, in f64, with loops and no tricks: what every attention kernel is compared with.
#pragma once

#include <cmath>
#include <vector>

#include "support/compare.h"

namespace strobe::testing {

struct AttentionResult {
  Tensor out;
  Tensor lse;  // (batch, num_heads, seq_len_q)
  Tensor dquery;
  Tensor dkey;
  Tensor dvalue;
};

inline double rounded(double x, DType dtype) {
  switch (dtype) {
    case DType::f32:
      return static_cast<float>(x);
    case DType::bf16:
      return static_cast<float>(bfloat16(static_cast<float>(x)));
    case DType::f16:
      return static_cast<float>(float16(static_cast<float>(x)));
    default:
      return x;
  }
}

// Out, lse and gradients of f64 tensors. With `stored` below f64 this is unfused attention in that dtype: the matrices
// S, P, dP and dS and the results are rounded to it, everything else is exact.
inline AttentionResult reference_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                           const Tensor& dout, double scale, bool causal, DType stored = DType::f64) {
  const int64_t batch = query.dim(0), seq_q = query.dim(1), heads = query.dim(2), dim = query.dim(3);
  const int64_t seq_k = key.dim(1), kv_heads = key.dim(2);
  const Tensor q = contiguous(query), k = contiguous(key), v = contiguous(value), g = contiguous(dout);
  AttentionResult result{zeros(query.shape(), DType::f64), zeros({batch, heads, seq_q}, DType::f64),
                         zeros(query.shape(), DType::f64), zeros(key.shape(), DType::f64),
                         zeros(key.shape(), DType::f64)};
  const auto round = [stored](double x) { return rounded(x, stored); };
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < seq_q; ++i) {
        const int64_t kv = h / (heads / kv_heads);
        const auto row = [&](const Tensor& x, int64_t position, int64_t head) {
          return x.data<double>() + ((b * x.dim(1) + position) * x.dim(2) + head) * dim;
        };
        const int64_t visible = causal ? std::clamp<int64_t>(i + seq_k - seq_q + 1, 0, seq_k) : seq_k;
        const size_t count = static_cast<size_t>(visible);
        const auto dot = [&](const double* x, const double* y) {
          double sum = 0;
          for (int64_t c = 0; c < dim; ++c) sum += x[c] * y[c];
          return sum;
        };
        const auto add = [&](double* to, double factor, const double* x) {
          for (int64_t c = 0; c < dim; ++c) to[c] += factor * x[c];
        };
        std::vector<double> p(count), dp(count);
        double largest = -INFINITY, sum = 0, delta = 0;
        for (size_t j = 0; j < count; ++j) {
          p[j] = scale * round(dot(row(q, i, h), row(k, static_cast<int64_t>(j), kv)));
          largest = std::max(largest, p[j]);
        }
        for (double& x : p) sum += x = std::exp(x - largest);
        result.lse.data<double>()[(b * heads + h) * seq_q + i] = visible > 0 ? largest + std::log(sum) : -INFINITY;
        for (size_t j = 0; j < count; ++j) {
          p[j] = round(p[j] / sum);
          dp[j] = round(dot(row(g, i, h), row(v, static_cast<int64_t>(j), kv)));
          delta += p[j] * dp[j];
        }
        for (size_t j = 0; j < count; ++j) {
          const int64_t position = static_cast<int64_t>(j);
          const double ds = round(p[j] * (dp[j] - delta) * scale);
          add(row(result.out, i, h), p[j], row(v, position, kv));
          add(row(result.dvalue, position, kv), p[j], row(g, i, h));
          add(row(result.dquery, i, h), ds, row(k, position, kv));
          add(row(result.dkey, position, kv), ds, row(q, i, h));
        }
      }
    }
  }
  for (const Tensor& x : {result.out, result.dquery, result.dkey, result.dvalue}) {
    for (int64_t i = 0; i < x.size(); ++i) x.data<double>()[i] = round(x.data<double>()[i]);
  }
  return result;
}

}  // namespace strobe::testing
