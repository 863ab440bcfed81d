// What attention makes of a product of a query and a key on the CPU: which pairs are visible, and the way from the
// product to the score (scale, softcap, ALiBi) and its dropout. Shared by tiled and standard attention.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "strobe/kernels/attention.h"
#include "strobe/kernels/cpu/philox_calls.h"
#include "strobe/kernels/math.h"

namespace strobe::kernels::cpu {

struct Interval {
  int64_t begin;
  int64_t end;
  bool empty() const { return begin >= end; }
  int64_t size() const { return end - begin; }
  bool contains(int64_t index) const { return begin <= index && index < end; }
  bool contains(Interval other) const { return begin <= other.begin && other.end <= end; }
  bool overlaps(Interval other) const { return std::max(begin, other.begin) < std::min(end, other.end); }
  // The part within `other`, counted from other's begin.
  Interval within(Interval other) const {
    const int64_t first = std::clamp(begin, other.begin, other.end);
    return {first - other.begin, std::clamp(end, first, other.end) - other.begin};
  }
};

// Which pairs are visible: a band of the score matrix, so that every row and every column sees one interval.
struct Mask {
  AttentionBand band;
  int64_t seq_len_q;
  int64_t seq_len_k;

  Interval keys_of(int64_t query) const { return clip(query + band.lower, query + band.upper, seq_len_k); }
  Interval queries_of(int64_t key) const { return clip(key - band.upper, key - band.lower, seq_len_q); }

  // Keys that some query of the block sees.
  Interval keys_of(Interval queries) const { return {keys_of(queries.begin).begin, keys_of(queries.end - 1).end}; }
  // Whether every query of the block sees every key of the block.
  bool shows_all(Interval queries, Interval keys) const {
    return keys_of(queries.begin).contains(keys) && keys_of(queries.end - 1).contains(keys);
  }

 private:
  static Interval clip(int64_t first, int64_t last, int64_t length) {
    const int64_t begin = std::clamp<int64_t>(first, 0, length);
    return {begin, std::clamp<int64_t>(last + 1, begin, length)};
  }
};

// The scores of one head. softmax_scale is split into a sign, exact on any operand, and a positive magnitude, which the
// online softmax applies to differences only, so that large products lose no digits. That works for plain scores; with
// a softcap or ALiBi `finish` makes scores of the products first.
template <class C>
struct Scores {
  C sign;       // -1, 0 or 1
  C magnitude;  // > 0
  C softcap;    // 0: none
  C slope;      // of ALiBi, 0: none
  int64_t diagonal;

  Scores(double softmax_scale, double cap, const float* alibi_slopes, int64_t head, const Mask& mask)
      : softcap(static_cast<C>(cap)),
        slope(alibi_slopes == nullptr ? C(0) : static_cast<C>(alibi_slopes[head])),
        diagonal(mask.seq_len_k - mask.seq_len_q) {
    const C scale = static_cast<C>(softmax_scale);
    sign = static_cast<C>((scale > 0) - (scale < 0));
    magnitude = scale == 0 ? C(1) : std::abs(scale);
  }

  bool plain() const { return softcap == 0 && slope == 0; }
  // What is left to multiply after `finish`.
  C rest() const { return plain() ? magnitude : C(1); }

  // Turns `count` values sign * query . key into scores, unless they are plain. The first belongs to the pair (query,
  // key); the next query and key lie query_step and key_step further. `slopes`, when given, receives the derivative of
  // the softcap.
  void finish(C* row, int64_t count, int64_t query, int64_t query_step, int64_t key, int64_t key_step,
              C* slopes = nullptr) const {
    if (softcap != 0) {
      const C inner = std::min(magnitude / softcap, std::numeric_limits<C>::max());  // 0 * infinity would be NaN
#pragma omp simd
      for (int64_t c = 0; c < count; ++c) row[c] *= inner;
      if (slopes != nullptr) tanh_slopes(row, count, slopes);
#pragma omp simd
      for (int64_t c = 0; c < count; ++c) row[c] = softcap * tanh_(row[c]);
    } else if (slope != 0) {
      for (int64_t c = 0; c < count; ++c) row[c] *= magnitude;
    }
    if (slope == 0) return;
    const int64_t distance = query + diagonal - key, step = query_step - key_step;
    for (int64_t c = 0; c < count; ++c) row[c] -= slope * static_cast<C>(std::abs(distance + c * step));
  }

 private:
  // The derivative of tanh, 1 - tanh^2 = 4 e / (1 + e)^2 with e = exp(-2 |x|): far from 0 the first form has no digits.
  static void tanh_slopes(const C* row, int64_t count, C* slopes) {
#pragma omp simd
    for (int64_t c = 0; c < count; ++c) {
      const C e = exp_(-2 * std::abs(row[c]));
      slopes[c] = 4 * e / ((1 + e) * (1 + e));
    }
  }
};

// The bytes of dropout of 32 x 32 pairs from (query, key) on, both multiples of 32; rows are queries, or keys when
// `transposed`.
template <bool transposed>
void dropout_bytes(const AttentionDropout& dropout, int64_t matrix, int64_t query, int64_t key,
                   uint8_t (&bytes)[32][32]) {
  constexpr int group = 8, calls = group * group;
  const PhiloxCounter first = AttentionDropout::counter(matrix, query, key);
  uint32_t words[4][calls];
  // The calls of a block differ in the last word of their counters.
  for (size_t w = 0; w < 3; ++w) std::fill(words[w], words[w] + calls, first[w]);
  for (int i = 0; i < calls; ++i) {
    words[3][i] = static_cast<uint32_t>(transposed ? i % group * group + i / group : i);
  }
  strobe::cpu::philox_calls<AttentionDropout::rounds>(words, dropout.key);
  for (int row = 0; row < 32; ++row) {
    for (int column = 0; column < 32; column += group) {
      const int of_query = (transposed ? column : row) / group, of_key = (transposed ? row : column) / group;
      const uint32_t* const from = words[of_query] + row % group * group;
#pragma omp simd
      for (int i = 0; i < group; ++i) bytes[row][column + i] = static_cast<uint8_t>(from[i] >> (8 * of_key));
    }
  }
}

// Applies dropout to what belongs to the pairs of `queries` and `keys`. Counted from their begins, pair (i, j) lies at
// data[i * query_stride + j * key_stride]; at least one of the strides is 1. matrix: batch index * num_heads + head.
template <class T>
void drop(const AttentionDropout& dropout, int64_t matrix, Interval queries, Interval keys, T* data,
          int64_t query_stride, int64_t key_stride) {
  using C = accumulate_t<T>;
  constexpr int64_t block = 32;
  const C scale = dropout.scale<C>();
  const bool transposed = query_stride == 1;
  const Interval outer = transposed ? keys : queries, inner = transposed ? queries : keys;
  const int64_t stride = transposed ? key_stride : query_stride;
  uint8_t bytes[block][block];
  for (int64_t o = outer.begin / block * block; o < outer.end; o += block) {
    for (int64_t n = inner.begin / block * block; n < inner.end; n += block) {
      if (transposed) {
        dropout_bytes<true>(dropout, matrix, n, o, bytes);
      } else {
        dropout_bytes<false>(dropout, matrix, o, n, bytes);
      }
      const Interval rows = outer.within({o, o + block}), columns = inner.within({n, n + block});
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        T* const x = data + (o + row - outer.begin) * stride;
#pragma omp simd
        for (int64_t column = columns.begin; column < columns.end; ++column) {
          T& element = x[n + column - inner.begin];
          const bool kept = bytes[row][column] < dropout.keep_below;
          element = kept ? static_cast<T>(static_cast<C>(element) * scale) : T(0);
        }
      }
    }
  }
}

}  // namespace strobe::kernels::cpu
