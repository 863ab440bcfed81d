// The innermost matrix product of the CPU kernels: an outer-product loop that keeps a block of C in vector registers.
// Matmul and attention both stand on it; operands are expected to sit in cache.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace strobe::cpu {

#if defined(__AVX512F__)
inline constexpr int vector_bytes = 64;
inline constexpr int tile_rows = 8;  // 8 x 2 accumulators of 32 registers hide the multiply-add latency
#elif defined(__AVX__)
inline constexpr int vector_bytes = 32;
inline constexpr int tile_rows = 6;  // 6 x 2 accumulators + 2 of B + 1 of A of 16 registers
#else
inline constexpr int vector_bytes = 16;
inline constexpr int tile_rows = 6;
#endif

template <class T>
inline constexpr int vector_size = vector_bytes / static_cast<int>(sizeof(T));

// Columns of C that one register block covers.
template <class T>
inline constexpr int tile_columns = 2 * vector_size<T>;

namespace detail {

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(vector_bytes), aligned(sizeof(T)), may_alias));
};
template <class T>
using Vector = typename VectorOf<T>::type;

template <class T>
inline Vector<T> load(const T* source) {
  return *reinterpret_cast<const Vector<T>*>(source);
}
template <class T>
inline Vector<T> load_part(const T* source, int count) {
  Vector<T> result{};
  std::memcpy(&result, source, static_cast<size_t>(count) * sizeof(T));
  return result;
}

// A factor of any strides. Where a stride is std::integral_constant the compiler knows it, which keeps the addresses of
// the innermost loop in registers.
template <class T, class Row, class Column>
struct Factor {
  const T* data;
  [[no_unique_address]] Row row;
  [[no_unique_address]] Column column;
};

// One block of `rows` x (`vectors` vectors); the last vector holds `last` columns, `whole` when that is all of it.
template <int rows, int vectors, bool whole, class T, class Row, class Column>
[[gnu::always_inline]] inline void gemm_block(int64_t k, const Factor<T, Row, Column>& factor, const T* __restrict b,
                                              int64_t b_row, T* __restrict c, int64_t c_row, int last,
                                              bool accumulate) {
  const T* const __restrict a = factor.data;
  constexpr int width = vector_size<T>;
  Vector<T> sum[rows][vectors] = {};
  for (int64_t p = 0; p < k; ++p) {
    Vector<T> b_vector[vectors];
    for (int v = 0; v < vectors; ++v) {
      const T* source = b + p * b_row + v * width;
      b_vector[v] = whole || v + 1 < vectors ? load(source) : load_part(source, last);
    }
    for (int i = 0; i < rows; ++i) {
      const T scalar = a[i * factor.row + p * factor.column];
      for (int v = 0; v < vectors; ++v) sum[i][v] += scalar * b_vector[v];
    }
  }
  for (int i = 0; i < rows; ++i, c += c_row) {
    for (int v = 0; v < vectors; ++v) {
      T* target = c + v * width;
      if (whole || v + 1 < vectors) {
        Vector<T>* wide = reinterpret_cast<Vector<T>*>(target);
        *wide = accumulate ? *wide + sum[i][v] : sum[i][v];
      } else {
        const Vector<T> part = accumulate ? load_part(target, last) + sum[i][v] : sum[i][v];
        std::memcpy(target, &part, static_cast<size_t>(last) * sizeof(T));
      }
    }
  }
}

template <int vectors, bool whole, int rows = tile_rows, class T, class Row, class Column>
inline void gemm_rows(int64_t m, int64_t k, Factor<T, Row, Column> a, const T* b, int64_t b_row, T* c, int64_t c_row,
                      int last, bool accumulate) {
  for (; m >= rows; m -= rows) {
    gemm_block<rows, vectors, whole>(k, a, b, b_row, c, c_row, last, accumulate);
    a.data += rows * a.row;
    c += rows * c_row;
  }
  if constexpr (rows > 1) {
    if (m > 0) gemm_rows<vectors, whole, rows / 2>(m, k, a, b, b_row, c, c_row, last, accumulate);
  }
}

template <class T, class Row, class Column>
void gemm_columns(int64_t m, int64_t n, int64_t k, const Factor<T, Row, Column>& a, const T* b, int64_t b_row, T* c,
                  int64_t c_row, bool accumulate) {
  constexpr int width = vector_size<T>;
  int64_t j = 0;
  for (; j + 2 * width <= n; j += 2 * width) {
    gemm_rows<2, true>(m, k, a, b + j, b_row, c + j, c_row, width, accumulate);
  }
  if (j + width <= n) {
    gemm_rows<1, true>(m, k, a, b + j, b_row, c + j, c_row, width, accumulate);
    j += width;
  }
  if (j < n) gemm_rows<1, false>(m, k, a, b + j, b_row, c + j, c_row, static_cast<int>(n - j), accumulate);
}

}  // namespace detail

// c (m x n) = a (m x k) b (k x n), or += when `accumulate`. Rows of b and c are contiguous with row strides b_row and
// c_row; a has any strides. c must not overlap a or b. Each element is one sum in ascending order of k.
template <class T>
void gemm_tile(int64_t m, int64_t n, int64_t k, const T* a, int64_t a_row, int64_t a_col, const T* b, int64_t b_row,
               T* c, int64_t c_row, bool accumulate) {
  using One = std::integral_constant<int64_t, 1>;
  if (a_col == 1) {
    detail::gemm_columns(m, n, k, detail::Factor<T, int64_t, One>{a, a_row, {}}, b, b_row, c, c_row, accumulate);
  } else if (a_row == 1) {
    detail::gemm_columns(m, n, k, detail::Factor<T, One, int64_t>{a, {}, a_col}, b, b_row, c, c_row, accumulate);
  } else {
    detail::gemm_columns(m, n, k, detail::Factor<T, int64_t, int64_t>{a, a_row, a_col}, b, b_row, c, c_row, accumulate);
  }
}

}  // namespace strobe::cpu
