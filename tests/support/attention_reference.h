// Attention from its definition, in f64, with loops and no tricks: what every attention kernel is compared with.
#pragma once

#include <cmath>
#include <string_view>
#include <vector>

#include "strobe/kernels/philox.h"
#include "support/compare.h"

namespace strobe::testing {

// What one forward and one backward pass give.
struct AttentionOutputs {
  Tensor out;
  Tensor lse;  // (batch, num_heads, seq_len_q), packed (num_heads, total_q)
  Tensor dquery;
  Tensor dkey;
  Tensor dvalue;

  static constexpr std::string_view names[] = {"out", "lse", "dquery", "dkey", "dvalue"};
  std::vector<Tensor> all() const { return {out, lse, dquery, dkey, dvalue}; }
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

// Whether query i sees key j of sequences of these lengths.
inline bool sees(const AttentionOptions& options, int64_t seq_len_q, int64_t seq_len_k, int64_t i, int64_t j) {
  const int64_t right_of_diagonal = j - (i + seq_len_k - seq_len_q);
  return (!options.causal || right_of_diagonal <= 0) &&
         (options.window_left < 0 || -right_of_diagonal <= options.window_left) &&
         (options.window_right < 0 || right_of_diagonal <= options.window_right);
}

inline uint32_t dropout_keep_below(double dropout_p) {
  return static_cast<uint32_t>(std::lround(256 * (1 - dropout_p)));
}

// Whether dropout keeps element (i, j) of P: byte number (i % 32 / 8) * 4 + j % 32 / 8 of the 16 bytes of one Philox
// call is below round(256 (1 - p)).
inline bool keeps(const AttentionOptions& options, int64_t batch, int64_t num_heads, int64_t head, int64_t i,
                  int64_t j) {
  const PhiloxCounter counter{static_cast<uint32_t>(batch * num_heads + head), static_cast<uint32_t>(i / 32),
                              static_cast<uint32_t>(j / 32), static_cast<uint32_t>(8 * (i % 8) + j % 8)};
  const uint64_t key = options.dropout_seed ^ (options.dropout_offset * 0x9E3779B97F4A7C15u);
  const PhiloxCounter words = philox4x32<7>(counter, key);
  uint8_t bytes[16];
  for (size_t n = 0; n < 16; ++n) bytes[n] = static_cast<uint8_t>(words[n / 4] >> (8 * (n % 4)));
  return bytes[(i % 32) / 8 * 4 + (j % 32) / 8] < dropout_keep_below(options.dropout_p);
}

// Sequence b of packed or stacked ones: its first row and its length.
struct SequenceRows {
  int64_t begin;
  int64_t length;
};

inline SequenceRows sequence_rows(const Tensor& cu_seqlens, const Tensor& x, int64_t b) {
  if (!cu_seqlens.defined()) return {b * x.dim(1), x.dim(1)};
  const std::vector<int64_t> starts = cu_seqlens.to_vector<int64_t>();
  const auto at = [&](int64_t index) { return starts[static_cast<size_t>(index)]; };
  return {at(b), at(b + 1) - at(b)};
}

// Outputs for f64 tensors; dlse may be undefined. With `stored` below f64 this is unfused attention in that dtype: the
// matrices S, P, dP and dS and the results are rounded to it, everything else is exact.
inline AttentionOutputs reference_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                            const Tensor& dout, const AttentionOptions& options = {},
                                            const Tensor& dlse = Tensor(), DType stored = DType::f64) {
  const bool packed = options.cu_seqlens_q.defined();
  const int64_t batch = packed ? options.cu_seqlens_q.size() - 1 : query.dim(0);
  const int64_t heads = query.dim(-2), kv_heads = key.dim(-2), dim = query.dim(-1);
  const double scale = options.softmax_scale.value_or(1 / std::sqrt(static_cast<double>(dim)));
  const double kept_factor = 256.0 / dropout_keep_below(options.dropout_p);
  const std::vector<double> slopes =
      options.alibi_slopes.defined() ? options.alibi_slopes.to_vector<double>() : std::vector<double>{};
  const Tensor q = contiguous(query), k = contiguous(key), v = contiguous(value), g = contiguous(dout);
  const Shape lse_shape = packed ? Shape{heads, query.dim(0)} : Shape{batch, heads, query.dim(1)};
  AttentionOutputs result{zeros(query.shape(), DType::f64), full(lse_shape, -INFINITY, DType::f64),
                          zeros(query.shape(), DType::f64), zeros(key.shape(), DType::f64),
                          zeros(key.shape(), DType::f64)};
  const Tensor dlse_rows = dlse.defined() ? contiguous(dlse) : zeros(lse_shape, DType::f64);
  const auto round = [stored](double x) { return rounded(x, stored); };
  const auto row = [&](const Tensor& x, int64_t position, int64_t head) {
    return x.data<double>() + (position * x.dim(-2) + head) * dim;
  };
  const auto dot = [&](const double* x, const double* y) {
    double sum = 0;
    for (int64_t c = 0; c < dim; ++c) sum += x[c] * y[c];
    return sum;
  };
  const auto add = [&](double* to, double factor, const double* x) {
    for (int64_t c = 0; c < dim; ++c) to[c] += factor * x[c];
  };
  struct Pair {  // a visible key and what one query makes of it
    int64_t j;
    double score, slope;  // and its derivative by softmax_scale * query . key
    double kept = 1;      // what dropout multiplies P by
    double p = 0, dp = 0;
  };

  for (int64_t b = 0; b < batch; ++b) {
    const auto [q_begin, seq_q] = sequence_rows(options.cu_seqlens_q, query, b);
    const auto [k_begin, seq_k] = sequence_rows(options.cu_seqlens_k, key, b);
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t kv = h / (heads / kv_heads);
      for (int64_t i = 0; i < seq_q; ++i) {
        std::vector<Pair> pairs;
        double largest = -INFINITY, sum = 0, delta = 0;
        for (int64_t j = 0; j < seq_k; ++j) {
          if (!sees(options, seq_q, seq_k, i, j)) continue;
          Pair pair{.j = j, .score = scale * round(dot(row(q, q_begin + i, h), row(k, k_begin + j, kv))), .slope = 1};
          if (options.softcap > 0) {
            const double t = std::tanh(pair.score / options.softcap);
            pair.score = options.softcap * t;
            pair.slope = 1 - t * t;
          }
          if (!slopes.empty()) {
            pair.score -= slopes[static_cast<size_t>(h)] * static_cast<double>(std::abs(i + seq_k - seq_q - j));
          }
          if (options.dropout_p > 0) pair.kept = keeps(options, b, heads, h, i, j) ? kept_factor : 0;
          largest = std::max(largest, pair.score);
          pairs.push_back(pair);
        }
        for (Pair& pair : pairs) sum += pair.p = std::exp(pair.score - largest);
        const int64_t lse_row = packed ? h * query.dim(0) + q_begin + i : (b * heads + h) * seq_q + i;
        if (!pairs.empty()) result.lse.data<double>()[lse_row] = largest + std::log(sum);
        for (Pair& pair : pairs) {
          pair.p = round(pair.p / sum);
          pair.dp = round(pair.kept * dot(row(g, q_begin + i, h), row(v, k_begin + pair.j, kv)));
          delta += pair.p * pair.dp;
        }
        for (const Pair& pair : pairs) {
          const double dlse_here = dlse_rows.data<double>()[lse_row];
          const double ds = round(pair.p * (pair.dp - delta + dlse_here) * pair.slope * scale);
          add(row(result.out, q_begin + i, h), pair.kept * pair.p, row(v, k_begin + pair.j, kv));
          add(row(result.dvalue, k_begin + pair.j, kv), pair.kept * pair.p, row(g, q_begin + i, h));
          add(row(result.dquery, q_begin + i, h), ds, row(k, k_begin + pair.j, kv));
          add(row(result.dkey, k_begin + pair.j, kv), ds, row(q, q_begin + i, h));
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
