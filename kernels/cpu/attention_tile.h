// What the forward and the backward pass of tiled attention share: which pairs are visible, tiles in and out of strided
// memory, and products that never touch what the mask hides.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>

#include "strobe/kernels/cpu/attention_scores.h"
#include "strobe/kernels/cpu/gemm_tile.h"
#include "strobe/kernels/cpu/pack.h"
#include "strobe/kernels/device.h"
#include "strobe/kernels/online_softmax.h"

namespace strobe::kernels::cpu {

using strobe::cpu::gemm_tile;
using strobe::cpu::vector_size;

// A tile is a block of queries by a block of keys: with head_dim 64 all that a thread holds of them fills half of L2.
inline constexpr int64_t attention_block = 128;
static_assert(attention_block % vector_size<float> == 0);

constexpr int64_t blocks_of(int64_t length, int64_t block) { return (length + block - 1) / block; }

// `count` rounded up to whole vectors: rows of tiles are that long, so that no product has a ragged edge.
template <class T>
constexpr int64_t whole_vectors(int64_t count) {
  return blocks_of(count, vector_size<T>) * vector_size<T>;
}

// Cuts 64-byte aligned arrays from one run of bytes; without a base it only counts.
class Arena {
 public:
  explicit Arena(void* base = nullptr) : base_(static_cast<std::byte*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    std::byte* const start = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(start);
  }
  size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

// One entry of the batch: where its rows begin in packed tensors (0 in others) and what its queries see.
struct Sequence {
  int64_t batch;
  int64_t first_query;
  int64_t first_key;
  Mask mask;
};

inline Sequence sequence_of(const AttentionArgs& args, int64_t batch) {
  Sequence sequence{batch, 0, 0, {{}, args.seq_len_q, args.seq_len_k}};
  Mask& mask = sequence.mask;
  if (args.cu_seqlens_q != nullptr) {
    sequence.first_query = args.cu_seqlens_q[batch];
    sequence.first_key = args.cu_seqlens_k[batch];
    mask.seq_len_q = args.cu_seqlens_q[batch + 1] - sequence.first_query;
    mask.seq_len_k = args.cu_seqlens_k[batch + 1] - sequence.first_key;
  }
  mask.band = visible_band(args.causal, args.window_left, args.window_right, mask.seq_len_q, mask.seq_len_k);
  return sequence;
}

inline int64_t matrix_of(const AttentionArgs& args, int64_t batch, int64_t head) {
  return batch * args.num_heads + head;
}

// Number of rows of lse and whatever else has one value a query, and where those of a head begin.
inline int64_t count_rows(const AttentionArgs& args) {
  return args.num_heads * (args.cu_seqlens_q == nullptr ? args.batch * args.seq_len_q : args.total_q);
}
inline int64_t first_row(const AttentionArgs& args, const Sequence& sequence, int64_t head) {
  return args.cu_seqlens_q == nullptr ? matrix_of(args, sequence.batch, head) * args.seq_len_q
                                      : head * args.total_q + sequence.first_query;
}

template <class C>
Scores<C> scores_of(const AttentionArgs& args, const Sequence& sequence, int64_t head) {
  return {args.softmax_scale, args.softcap, args.alibi_slopes, head, sequence.mask};
}

inline AttentionDropout dropout_of(const AttentionArgs& args) {
  return {args.dropout_p, args.dropout_seed, args.dropout_offset};
}

// One head's rows of one sequence of an operand.
template <class T>
struct HeadRows {
  T* data;
  int64_t row_stride;
  int64_t column_stride = 1;

  T* row(int64_t index) const { return data + index * row_stride; }
};

template <class T>
HeadRows<T> rows_of(const AttentionArgs& args, const AttentionTensor& tensor, const Sequence& sequence,
                    int64_t first_row, int64_t head, int64_t dim_stride = 1) {
  const int64_t start =
      args.cu_seqlens_q == nullptr ? sequence.batch * tensor.batch_stride : first_row * tensor.seq_stride;
  return {static_cast<T*>(tensor.data) + start + head * tensor.head_stride, tensor.seq_stride, dim_stride};
}
// Of query, out and their gradients; of key, value and theirs.
template <class T>
HeadRows<T> query_rows(const AttentionArgs& args, const AttentionTensor& tensor, const Sequence& sequence, int64_t head,
                       int64_t dim_stride = 1) {
  return rows_of<T>(args, tensor, sequence, sequence.first_query, head, dim_stride);
}
template <class T>
HeadRows<T> key_rows(const AttentionArgs& args, const AttentionTensor& tensor, const Sequence& sequence,
                     int64_t kv_head) {
  return rows_of<T>(args, tensor, sequence, sequence.first_key, kv_head);
}

// Zeros for the padding behind the last sequence of a packed tensor of `total` rows.
template <class T>
void clear_padding(const AttentionTensor& tensor, int64_t used, int64_t total, int64_t num_heads, int64_t head_dim) {
  for (int64_t row = used; row < total; ++row) {
    for (int64_t head = 0; head < num_heads; ++head) {
      T* const start = static_cast<T*>(tensor.data) + row * tensor.seq_stride + head * tensor.head_stride;
      std::fill(start, start + head_dim, T(0));
    }
  }
}

// Asks for a row that is read or written later. Rows lie too far apart for the processor to foresee them; asking for
// one at a time, between other work, hides the way to memory.
template <class T>
void prefetch_row(const HeadRows<T>& source, int64_t index, int64_t head_dim) {
  const char* const row = reinterpret_cast<const char*>(source.row(index));
  const int64_t bytes = head_dim * static_cast<int64_t>(sizeof(T));
  for (int64_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(row + offset);
}

// How many rows ahead a loop over rows asks for them.
inline constexpr int64_t rows_ahead = 8;

// Copies rows into a tile of whole vectors, zeros behind them, converted to the type computed in.
template <class T, class C>
void load_tile(const HeadRows<T>& source, Interval rows, int64_t head_dim, C* tile) {
  const int64_t width = whole_vectors<C>(head_dim);
  for (int64_t i = rows.begin; i < rows.end; ++i, tile += width) {
    if (i + rows_ahead < rows.end) prefetch_row(source, i + rows_ahead, head_dim);
    strobe::cpu::copy_block(tile, width, source.row(i), source.row_stride, source.column_stride, 1, head_dim);
    std::fill(tile + head_dim, tile + width, C(0));
  }
}

template <class C>
bool all_finite(const C* tile, int64_t count) {
  C check = 0;  // x * 0 is NaN for NaN and infinity
#pragma omp simd reduction(+ : check)
  for (int64_t i = 0; i < count; ++i) check += tile[i] * C(0);
  return check == 0;
}

// The transpose of a tile as load_tile leaves it, times `factor`: (head_dim, columns), zeros from `rows` to `columns`.
template <class C>
void transpose_tile(const C* tile, int64_t rows, int64_t head_dim, C factor, C* transposed, int64_t columns) {
  strobe::cpu::transpose_block(transposed, columns, tile, whole_vectors<C>(head_dim), rows, head_dim);
  for (int64_t c = 0; c < head_dim; ++c) {
    C* const row = transposed + c * columns;
    if (factor != 1) std::for_each(row, row + rows, [factor](C& x) { x *= factor; });
    std::fill(row + rows, row + columns, C(0));
  }
}

// out (m x n) = a (m x k) b (k x n), or += when `accumulate`, where row i of a holds zeros outside the interval
// visible(i) of k, whose begin and end never decrease with i; b is a tile of rows of b_row elements. Of the zeros,
// those are left out that a few neighbouring rows share, which changes no sum but the sign of one that is 0; where b is
// not finite all of them, for 0 * NaN must not reach a sum.
template <class C, class Visible>
void masked_product(bool all_visible, int64_t m, int64_t n, int64_t k, const C* a, int64_t a_row, int64_t a_col,
                    const C* b, int64_t b_row, C* out, int64_t out_row, bool accumulate, Visible&& visible) {
  if (all_visible) return gemm_tile<C>(m, n, k, a, a_row, a_col, b, b_row, out, out_row, accumulate);
  const int64_t together = all_finite(b, k * b_row) ? 2 * strobe::cpu::tile_rows : 1;
  for (int64_t i = 0; i < m; i += together) {
    const int64_t rows = std::min(together, m - i);
    const Interval p{visible(i).begin, visible(i + rows - 1).end};
    gemm_tile<C>(rows, n, p.size(), a + i * a_row + p.begin * a_col, a_row, a_col, b + p.begin * b_row, b_row,
                 out + i * out_row, out_row, accumulate);
  }
}

// One step of the online softmax for a block of queries: S^T = K Q^T with hidden pairs at -inf is taken into the rows,
// and replaced by its weights. Transposed, so that each row's maximum and sum run in a vector lane of their own.
template <class C>
void online_softmax_tile(const Mask& mask, const Scores<C>& score, Interval queries, Interval keys, int64_t head_dim,
                         const C* key, const C* query_transposed, C* scores, OnlineSoftmax<C>* rows, C* factors) {
  constexpr int lanes = vector_size<C>;
  constexpr C minus_infinity = -std::numeric_limits<C>::infinity();
  const int64_t columns = whole_vectors<C>(queries.size());
  gemm_tile<C>(keys.size(), columns, head_dim, key, whole_vectors<C>(head_dim), 1, query_transposed, columns, scores,
               columns, false);
  for (int64_t j = 0; !score.plain() && j < keys.size(); ++j) {
    score.finish(scores + j * columns, columns, queries.begin, 1, keys.begin + j, 0);
  }
  if (!mask.shows_all(queries, keys)) {
    for (int64_t j = 0; j < keys.size(); ++j) {
      const Interval visible = mask.queries_of(keys.begin + j).within(queries);
      C* const row = scores + j * columns;
      std::fill(row, row + visible.begin, minus_infinity);
      std::fill(row + visible.end, row + columns, minus_infinity);
    }
  }
  for (int64_t i = 0; i < columns; i += lanes) {
    online_softmax_update<lanes>(rows + i, scores + i, keys.size(), columns, score.rest(), factors + i);
  }
}

// Threads worth starting for `items` items: small problems stay on few.
inline int64_t team_size(const AttentionArgs& args, int64_t items) {
  const double products = static_cast<double>(args.batch * args.num_heads * args.seq_len_q) *
                          static_cast<double>(args.seq_len_k * args.head_dim);
  const int64_t worth = 1 + static_cast<int64_t>(std::min(products / 65536, 1e6));
  return std::min({items, worth, static_cast<int64_t>(num_threads())});
}

// Runs f(item, thread) for items 0, 1, ..., count - 1 on at most `threads` threads. Threads take items in ascending
// order, so an item may wait for a lower one: the lowest unfinished item never waits.
template <class F>
void for_each_in_order(int64_t count, int64_t threads, F&& f) {
  const int team = static_cast<int>(std::min(count, threads));
  if (team <= 1) {
    for (int64_t item = 0; item < count; ++item) f(item, 0);
    return;
  }
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(team)
  for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(item, omp_get_thread_num());
}

}  // namespace strobe::kernels::cpu
