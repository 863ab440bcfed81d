// What attention makes of a product of a query and a key on the CPU: which pairs are visible, and the way from the
// product to the score (scale, softcap, ALiBi) and its dropout. Shared by tiled and standard attention.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "strobe/kernels/attention.h"
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

// Applies dropout to what belongs to the pairs of `queries` and `keys`. Counted from their begins, pair (i, j) lies at
// data[i * query_stride + j * key_stride]. matrix: batch index * num_heads + head.
template <class T>
void drop(const AttentionDropout& dropout, int64_t matrix, Interval queries, Interval keys, T* data,
          int64_t query_stride, int64_t key_stride) {
  using C = accumulate_t<T>;
  const C scale = dropout.scale<C>();
  const auto drop_sixteen = [&](int64_t first_query, int64_t first_key) {
    const PhiloxCounter words = dropout.bytes(matrix, first_query, first_key);
    for (int64_t number = 0; number < 16; ++number) {
      const int64_t i = first_query + number / 4 * 8, j = first_key + number % 4 * 8;
      if (!queries.contains(i) || !keys.contains(j)) continue;
      T& x = data[(i - queries.begin) * query_stride + (j - keys.begin) * key_stride];
      const bool kept = (words[static_cast<size_t>(number / 4)] >> (8 * (number % 4)) & 255) < dropout.keep_below;
      x = kept ? static_cast<T>(static_cast<C>(x) * scale) : T(0);
    }
  };
  for (int64_t i = queries.begin / 32 * 32; i < queries.end; i += 32) {
    for (int64_t j = keys.begin / 32 * 32; j < keys.end; j += 32) {
      for (int64_t pair = 0; pair < 64; ++pair) drop_sixteen(i + pair / 8, j + pair % 8);
    }
  }
}

}  // namespace strobe::kernels::cpu
