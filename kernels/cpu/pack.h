// Copies blocks of strided matrices into compact buffers of the computing type, for gemm_tile to read at full speed.
#pragma once

#include <utility>

#include "strobe/kernels/cpu/gemm_tile.h"
#include "strobe/kernels/types.h"

namespace strobe::cpu {

// target[o * target_stride + i] = source[o * outer_stride + i * inner_stride], converted to T.
template <class T, class Source>
void copy_block(T* __restrict target, int64_t target_stride, const Source* __restrict source, int64_t outer_stride,
                int64_t inner_stride, int64_t outer, int64_t inner) {
  for (int64_t o = 0; o < outer; ++o) {
    const Source* from = source + o * outer_stride;
    T* to = target + o * target_stride;
    if (inner_stride == 1) {
      for (int64_t i = 0; i < inner; ++i) to[i] = static_cast<T>(from[i]);
    } else {
      for (int64_t i = 0; i < inner; ++i) to[i] = static_cast<T>(from[i * inner_stride]);
    }
  }
}

namespace detail {

// Interleaves the lower (or upper) halves of two vectors: a0 b0 a1 b1 ...
template <bool upper, class T>
inline Vector<T> interleave(Vector<T> a, Vector<T> b) {
  constexpr int width = vector_size<T>;
  return [&]<int... lane>(std::integer_sequence<int, lane...>) {
    return __builtin_shufflevector(a, b, (lane / 2 + (lane % 2) * width + (upper ? width / 2 : 0))...);
  }
  (std::make_integer_sequence<int, width>{});
}

// Transposes a square of vectors: each of the log2(width) rounds halves the distance between neighbours of a column.
template <class T>
inline void transpose_square(Vector<T> (&square)[vector_size<T>]) {
  constexpr int width = vector_size<T>;
  for (int round = 1; round < width; round *= 2) {
    Vector<T> next[width];
    for (int i = 0; i < width / 2; ++i) {
      next[2 * i] = interleave<false, T>(square[i], square[i + width / 2]);
      next[2 * i + 1] = interleave<true, T>(square[i], square[i + width / 2]);
    }
    for (int i = 0; i < width; ++i) square[i] = next[i];
  }
}

}  // namespace detail

// target[c * target_stride + r] = source[r * source_stride + c] for r < rows and c < columns, converted to T.
template <class T, class Source>
void transpose_block(T* __restrict target, int64_t target_stride, const Source* __restrict source,
                     int64_t source_stride, int64_t rows, int64_t columns) {
  constexpr int width = vector_size<T>;
  const int64_t whole_rows = rows / width * width, whole_columns = columns / width * width;
  for (int64_t r = 0; r < whole_rows; r += width) {
    for (int64_t c = 0; c < whole_columns; c += width) {
      detail::Vector<T> square[width];
      for (int i = 0; i < width; ++i) {
        copy_block(reinterpret_cast<T*>(&square[i]), 0, source + (r + i) * source_stride + c, 0, 1, 1, width);
      }
      detail::transpose_square<T>(square);
      for (int i = 0; i < width; ++i) {
        *reinterpret_cast<detail::Vector<T>*>(target + (c + i) * target_stride + r) = square[i];
      }
    }
  }
  copy_block(target + whole_rows, target_stride, source + whole_rows * source_stride, 1, source_stride, columns,
             rows - whole_rows);
  copy_block(target + whole_columns * target_stride, target_stride, source + whole_columns, 1, source_stride,
             columns - whole_columns, whole_rows);
}

}  // namespace strobe::cpu
