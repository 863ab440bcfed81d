// The online softmax: a row of scores is taken in piece by piece, in any order, and the pieces are merged exactly
// (Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; the idea under FlashAttention).
#pragma once

#include <limits>
#include <numbers>

#include "strobe/kernels/math.h"

// The iterations of the loop that follows are vector lanes; whoever compiles this without OpenMP is not warned.
#ifdef _OPENMP
#define STROBE_SIMD _Pragma("omp simd")
#else
#define STROBE_SIMD
#endif

namespace strobe {

// What is known of one row after some of its scores: the largest, and the sum of exp(scale * (score - largest)).
// Scores may be raw products whose positive `scale` multiplies differences only, so that large ones lose no digits.
// A row without scores, or with none above -inf, has maximum -inf and sum 0; a NaN score makes the sum NaN.
template <class T>
struct OnlineSoftmax {
  T maximum = -std::numeric_limits<T>::infinity();
  T sum = 0;

  // What scores are measured against. While all are -inf it is 0: -inf - -inf would be NaN, and exp(-inf) is right.
  STROBE_HD T reference() const { return maximum == -std::numeric_limits<T>::infinity() ? T(0) : maximum; }

  // The numerator of the softmax of one score.
  STROBE_HD T weight(T score, T scale = 1) const {
    return exp2_((score - reference()) * (scale * std::numbers::log2e_v<T>));
  }

  // Prepares for scores up to `largest`. Returns exp(scale * (old maximum - new maximum)), by which everything summed
  // so far shrinks: the sum here, and the output that the caller keeps.
  STROBE_HD T raise(T largest, T scale = 1) {
    const T old = maximum;
    maximum = largest > maximum ? largest : maximum;
    const T factor = weight(old, scale);
    sum *= factor;
    return factor;
  }

  // Takes in `other`, a disjoint part of the same row. Returns what the outputs of both must be multiplied by.
  struct Factors {
    T mine;
    T other;
  };
  STROBE_HD Factors merge(const OnlineSoftmax& other, T scale = 1) {
    const T mine = raise(other.maximum, scale);
    const Factors factors{mine, weight(other.maximum, scale)};
    sum += factors.other * other.sum;
    return factors;
  }

  // log of the sum of exp(scale * score).
  STROBE_HD T lse(T scale = 1) const { return maximum * scale + log_(sum); }
};

// What two disjoint parts of one row, known by their lse, are of the whole: shares that sum to 1 unless both parts are
// empty (lse -inf). What an empty part holds is not to be read.
template <class T>
struct SoftmaxShares {
  bool sees_a;
  bool sees_b;
  T a = 0;
  T b = 0;
  T lse;

  STROBE_HD SoftmaxShares(T lse_a, T lse_b)
      : sees_a(lse_a != -std::numeric_limits<T>::infinity()), sees_b(lse_b != -std::numeric_limits<T>::infinity()) {
    OnlineSoftmax<T> whole{.maximum = lse_a, .sum = sees_a ? T(1) : T(0)};
    const OnlineSoftmax<T> other{.maximum = lse_b, .sum = sees_b ? T(1) : T(0)};
    const auto factors = whole.merge(other);
    if (sees_a) a = factors.mine / whole.sum;
    if (sees_b) b = factors.other / whole.sum;
    lse = whole.lse();
  }
};

// Takes a tile of `count` scores into each of `rows` neighbouring rows: score j of row r is scores[j * stride + r], and
// is replaced by its weight. factors[r] receives what the row's earlier output must be multiplied by.
// On the host the rows are vector lanes.
template <int rows, class T>
STROBE_HD inline void online_softmax_update(OnlineSoftmax<T>* states, T* scores, int64_t count, int64_t stride, T scale,
                                            T* factors) {
  T largest[rows];
  for (int r = 0; r < rows; ++r) largest[r] = -std::numeric_limits<T>::infinity();
  for (int64_t j = 0; j < count; ++j) {
    STROBE_SIMD
    for (int r = 0; r < rows; ++r) {
      const T score = scores[j * stride + r];
      largest[r] = score > largest[r] ? score : largest[r];
    }
  }
  T reference[rows];
  T sum[rows] = {};
  for (int r = 0; r < rows; ++r) {
    factors[r] = states[r].raise(largest[r], scale);
    reference[r] = states[r].reference();
  }
  const T binary_scale = scale * std::numbers::log2e_v<T>;
  for (int64_t j = 0; j < count; ++j) {
    STROBE_SIMD
    for (int r = 0; r < rows; ++r) {
      const T weight = exp2_((scores[j * stride + r] - reference[r]) * binary_scale);
      scores[j * stride + r] = weight;
      sum[r] += weight;
    }
  }
  for (int r = 0; r < rows; ++r) states[r].sum += sum[r];
}

}  // namespace strobe
