// Sums and maxima over rows and columns that vectorize and stay accurate: short runs in vector lanes, runs in double.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace strobe::cpu {

// Most columns that sum_columns and max_columns handle at once: their partial results stay in the first-level cache.
inline constexpr int64_t column_block = 256;

// Terms of a row that sum_row and max_row take at a time, each into its own partial result: vector registers' worth.
inline constexpr int64_t lanes = 32;

// f(0) + ... + f(n - 1), terms of type A. Plain lanes rather than an OpenMP reduction, whose order of additions may
// differ between two inlined copies of this code and so between numbers of threads.
template <class A, class F>
double sum_row(int64_t n, F&& f) {
  constexpr int64_t run = 32 * lanes;
  double total = 0;
  int64_t i = 0;
  while (i + lanes <= n) {
    const int64_t end = std::min(i + run, n);
    A sum[lanes] = {};
    for (; i + lanes <= end; i += lanes) {
      for (int64_t lane = 0; lane < lanes; ++lane) sum[lane] += f(i + lane);
    }
    for (int64_t width = lanes / 2; width > 0; width /= 2) {
      for (int64_t lane = 0; lane < width; ++lane) sum[lane] += sum[lane + width];
    }
    total += static_cast<double>(sum[0]);
  }
  for (; i < n; ++i) total += static_cast<double>(f(i));
  return total;
}

// The larger of two values; NaN when either is.
template <class A>
A larger(A a, A b) {
  return a > b || a != a ? a : b;
}

// The largest of f(0), ..., f(n - 1), NaN when one of them is, -inf when there are none.
template <class A, class F>
A max_row(int64_t n, F&& f) {
  A result = -std::numeric_limits<A>::infinity();
  int64_t i = 0;
  if (n >= lanes) {
    A best[lanes];
    std::fill(best, best + lanes, result);
    for (; i + lanes <= n; i += lanes) {
      for (int64_t lane = 0; lane < lanes; ++lane) best[lane] = larger(f(i + lane), best[lane]);
    }
    for (int64_t lane = 0; lane < lanes; ++lane) result = larger(best[lane], result);
  }
  for (; i < n; ++i) result = larger(f(i), result);
  return result;
}

// sums[j] = sum over i < rows of f(i, j) for j < width <= column_block, terms of type A.
template <class A, class F>
void sum_columns(int64_t rows, int64_t width, double* sums, F&& f) {
  constexpr int64_t run = 64;
  std::fill(sums, sums + width, 0.0);
  for (int64_t begin = 0; begin < rows; begin += run) {
    const int64_t end = std::min(begin + run, rows);
    A partial[column_block];
    std::fill(partial, partial + width, A(0));
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < width; ++j) partial[j] += f(i, j);
    }
    for (int64_t j = 0; j < width; ++j) sums[j] += static_cast<double>(partial[j]);
  }
}

// best[j] = the largest f(i, j) over i < rows for j < width <= column_block, as max_row.
template <class A, class F>
void max_columns(int64_t rows, int64_t width, A* best, F&& f) {
  std::fill(best, best + width, -std::numeric_limits<A>::infinity());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < width; ++j) best[j] = larger(f(i, j), best[j]);
  }
}

}  // namespace strobe::cpu
