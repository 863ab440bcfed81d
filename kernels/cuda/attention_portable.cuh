// The tiles of the portable attention kernels: how they lie in shared memory and registers, how they are filled, and
// the two products that all of attention consists of, A B^T and W B.
#pragma once

#include "strobe/kernels/cuda/attention_common.cuh"
#include "strobe/kernels/online_softmax.h"

namespace strobe::kernels::cuda::portable {

using strobe::cuda::ceil_div;
using strobe::cuda::load_pack;
using strobe::cuda::Pack;

inline constexpr int block_threads = 128;

// Shared memory is read 16 bytes at a time.
template <class N>
inline constexpr int pack_size = 16 / sizeof(N);

// Elements from row to row of a tile in shared memory: 16 bytes of padding put neighbouring rows into different banks.
template <class N>
constexpr int stride_of(int columns) {
  return columns + pack_size<N>;
}

// A block is a grid of thread_rows x thread_columns threads, and each has `R` rows and `C` columns of a tile of the
// score matrix in registers: thread (y, x) rows y + thread_rows r and columns x + thread_columns c. The threads of a
// row are in one warp. head_dim is rounded up to `depth`. Registers are shared out so that a multiprocessor holds
// `blocks_at_once` blocks, whose loads and products overlap.
template <class N_, int depth_, int R_, int C_, int blocks_at_once_, int thread_rows_ = 8>
struct Tile {
  using N = N_;  // float or double: what the kernel computes in
  static constexpr int depth = depth_;
  static constexpr int R = R_;
  static constexpr int C = C_;
  static constexpr int blocks_at_once = blocks_at_once_;
  static constexpr int thread_rows = thread_rows_;
  static constexpr int thread_columns = block_threads / thread_rows;
  static constexpr int warp_rows = strobe::cuda::warp_size / thread_columns;
  static_assert(warp_rows == 2 || warp_rows == 4);
  static constexpr int rows = thread_rows * R;
  static constexpr int columns = thread_columns * C;
  static constexpr int stride = stride_of<N>(depth);  // of (rows, depth) and (columns, depth)
  // Of (rows, columns): what a warp stores at once lies in as many banks.
  static constexpr int weight_stride = columns + (32 / warp_rows - columns % 32 + 32) % 32;
  static constexpr int outputs = depth / thread_columns;  // columns of a (rows, depth) result for each thread
  static constexpr int output_pack = std::min(outputs, pack_size<N>);  // neighbouring ones

  // Bits of a lane's number take turns in counting rows and columns, beginning with a column. Of any four lanes in a
  // row two then read the same 16 bytes, whichever operand it is, and such pairs cost shared memory one access, not
  // two.
  static constexpr int column_bits = warp_rows == 4 ? 0b10101 : 0b11101;
  __device__ static int thread_row() {
    const int lane = static_cast<int>(threadIdx.x) % strobe::cuda::warp_size;
    const int row = warp_rows == 4 ? (lane >> 1 & 1) | (lane >> 2 & 2) : lane >> 1 & 1;
    return static_cast<int>(threadIdx.x) / strobe::cuda::warp_size * warp_rows + row;
  }
  __device__ static int thread_column() {
    const int lane = static_cast<int>(threadIdx.x) % strobe::cuda::warp_size;
    return warp_rows == 4 ? (lane & 1) | (lane >> 1 & 2) | (lane >> 2 & 4) : (lane & 1) | (lane >> 1 & 14);
  }
  // The values of the threads of a row combined, in each of them.
  template <class Combine>
  __device__ static N reduce_row(N value, Combine combine) {
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) {
      if (column_bits & bit) value = combine(value, __shfl_xor_sync(0xffffffffu, value, bit));
    }
    return value;
  }

  // Column of a (rows, depth) result that a thread holds as its number `index`.
  __device__ static int output_column(int index) {
    return (thread_column() + index / output_pack * thread_columns) * output_pack + index % output_pack;
  }
};

// Calls f.template operator()<T>() with the type of what memory holds, where the kernel computes in N.
template <class N, class F>
__device__ void with_memory_type(DType dtype, F&& f) {
  if constexpr (std::is_same_v<N, double>) {
    f.template operator()<double>();
  } else if (dtype == DType::f32) {
    f.template operator()<float>();
  } else if (dtype == DType::bf16) {
    f.template operator()<bfloat16>();
  } else {
    f.template operator()<float16>();
  }
}

// Rows of one sequence and head, as elements of some type.
struct Rows {
  void* data;
  int64_t offset;
  int64_t row_stride;
  int64_t column_stride = 1;
};

__device__ inline Rows query_rows(const SequencePair& pair, const AttentionTensor& tensor, int64_t head,
                                  int64_t dim_stride = 1) {
  return {tensor.data, pair.query_offset(tensor, head), tensor.seq_stride, dim_stride};
}
__device__ inline Rows key_rows(const SequencePair& pair, const AttentionTensor& tensor, int64_t head) {
  return {tensor.data, pair.key_offset(tensor, head), tensor.seq_stride};
}

// How the threads of a block share out a (rows, depth) tile of which each takes `count` neighbouring columns at a time.
template <int depth, int count>
struct TileShare {
  static constexpr int width = std::min(depth / count, block_threads);  // threads on a row
  static constexpr int row_step = block_threads / width;
  static constexpr int column_step = width * count;
  __device__ static int first_row() { return static_cast<int>(threadIdx.x) / width; }
  __device__ static int first_column() { return static_cast<int>(threadIdx.x) % width * count; }
};

// Whether `count` neighbouring columns can be moved by one instruction, wherever they begin.
template <class T, int count>
__device__ bool in_packs(const T* first_row, const Rows& rows, int64_t head_dim) {
  return rows.column_stride == 1 && rows.row_stride % count == 0 && head_dim % count == 0 &&
         reinterpret_cast<uintptr_t>(first_row) % sizeof(Pack<T, count>) == 0;
}

// Fills a tile with the rows of an interval times `factor`, and zeros behind and beside them. Returns whether this
// thread met only finite numbers.
template <class N, int rows, int depth>
__device__ bool load_tile(const Rows& source, DType dtype, Interval interval, int64_t head_dim, N factor, N* tile) {
  N check = 0;  // x * 0 is NaN for NaN and infinity
  with_memory_type<N>(dtype, [&]<class T>() {
    const T* const begin = static_cast<const T*>(source.data) + source.offset + interval.begin * source.row_stride;
    const auto load = [&]<int count>() {
      using Share = TileShare<depth, count>;
#pragma unroll 1
      for (int column = Share::first_column(); column < depth; column += Share::column_step) {
        const T* from = begin + Share::first_row() * source.row_stride + column * source.column_stride;
        const int present = column < head_dim ? static_cast<int>(interval.end - interval.begin) : 0;
#pragma unroll 8
        for (int row = Share::first_row(); row < rows; row += Share::row_step) {
          Pack<T, count> stored{};
          if (row < present) stored = load_pack<T, count>(from);
          from += Share::row_step * source.row_stride;
          Pack<N, count> pack;
#pragma unroll
          for (int e = 0; e < count; ++e) {
            const N x = static_cast<N>(stored[e]);
            check = fma(x, N(0), check);
            pack[e] = x * factor;
          }
          store_pack(tile + row * stride_of<N>(depth) + column, pack);
        }
      }
    };
    if (in_packs<T, pack_size<N>>(begin, source, head_dim)) {
      load.template operator()<pack_size<N>>();
    } else {
      load.template operator()<1>();
    }
  });
  return check == 0;
}

// Writes the rows of a tile to memory.
template <class N, int depth>
__device__ void store_tile(const N* tile, const Rows& target, DType dtype, Interval interval, int64_t head_dim) {
  with_memory_type<N>(dtype, [&]<class T>() {
    T* const begin = static_cast<T*>(target.data) + target.offset + interval.begin * target.row_stride;
    const int present = static_cast<int>(interval.end - interval.begin);
    const auto store = [&]<int count>() {
      using Share = TileShare<depth, count>;
#pragma unroll 1
      for (int column = Share::first_column(); column < head_dim; column += Share::column_step) {
#pragma unroll 4
        for (int row = Share::first_row(); row < present; row += Share::row_step) {
          Pack<T, count> pack;
#pragma unroll
          for (int e = 0; e < count; ++e) pack[e] = static_cast<T>(tile[row * stride_of<N>(depth) + column + e]);
          store_pack(begin + row * target.row_stride + column, pack);
        }
      }
    };
    if (in_packs<T, pack_size<N>>(begin, target, head_dim)) {
      store.template operator()<pack_size<N>>();
    } else {
      store.template operator()<1>();
    }
  });
}

// Puts a thread's results times `factor` into a (rows, depth) tile in shared memory.
template <class TileType, class N = typename TileType::N>
__device__ void collect_tile(const N (&results)[TileType::R][TileType::outputs], N factor, N* tile) {
#pragma unroll
  for (int r = 0; r < TileType::R; ++r) {
#pragma unroll
    for (int index = 0; index < TileType::outputs; ++index) {
      tile[(TileType::thread_row() + TileType::thread_rows * r) * TileType::stride + TileType::output_column(index)] =
          results[r][index] * factor;
    }
  }
}

// Puts a thread's elements into a (rows, columns) tile in shared memory, from which multiply_add reads them.
template <class TileType, class N = typename TileType::N>
__device__ void store_weights(const N (&weights)[TileType::R][TileType::C], N* tile) {
#pragma unroll
  for (int r = 0; r < TileType::R; ++r) {
#pragma unroll
    for (int c = 0; c < TileType::C; ++c) {
      tile[(TileType::thread_row() + TileType::thread_rows * r) * TileType::weight_stride + TileType::thread_column() +
           TileType::thread_columns * c] = weights[r][c];
    }
  }
}

// products = A B^T for tiles (rows, depth) and (columns, depth). Each is one sum in ascending order, so that every
// kernel that needs a score computes the same bits.
template <class TileType, class N = typename TileType::N>
__device__ void multiply_transposed(const N* a, const N* b, N (&products)[TileType::R][TileType::C]) {
  constexpr int R = TileType::R, C = TileType::C, stride = TileType::stride, pack = pack_size<N>;
  a += TileType::thread_row() * stride;
  b += TileType::thread_column() * stride;
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int c = 0; c < C; ++c) products[r][c] = 0;
  }
#pragma unroll 2
  for (int d = 0; d < TileType::depth; d += pack) {
    Pack<N, pack> columns[C];
#pragma unroll
    for (int c = 0; c < C; ++c) columns[c] = load_pack<N, pack>(b + c * TileType::thread_columns * stride + d);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const Pack<N, pack> row = load_pack<N, pack>(a + r * TileType::thread_rows * stride + d);
#pragma unroll
      for (int e = 0; e < pack; ++e) {
#pragma unroll
        for (int c = 0; c < C; ++c) products[r][c] = fma(row[e], columns[c][e], products[r][c]);
      }
    }
  }
}

// sums += W B for tiles (rows, columns) and (columns, depth).
template <class TileType, class N = typename TileType::N>
__device__ void multiply_add(const N* weights, const N* b, N (&sums)[TileType::R][TileType::outputs]) {
  constexpr int R = TileType::R, pack = pack_size<N>, output_pack = TileType::output_pack;
  constexpr int packs = TileType::outputs / output_pack;
  weights += TileType::thread_row() * TileType::weight_stride;
  b += TileType::thread_column() * output_pack;
#pragma unroll 1
  for (int j = 0; j < TileType::columns; j += pack) {
    Pack<N, pack> row[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      row[r] = load_pack<N, pack>(weights + r * TileType::thread_rows * TileType::weight_stride + j);
    }
#pragma unroll
    for (int e = 0; e < pack; ++e) {
#pragma unroll
      for (int p = 0; p < packs; ++p) {
        const auto values =
            load_pack<N, output_pack>(b + (j + e) * TileType::stride + p * TileType::thread_columns * output_pack);
#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
          for (int v = 0; v < output_pack; ++v) {
            N& sum = sums[r][p * output_pack + v];
            sum = fma(row[r][e], values[v], sum);
          }
        }
      }
    }
  }
}

// Which pairs of a (rows, columns) tile of the score matrix are visible, in positions counted from the tile's first.
struct TileBand {
  int lower;  // row r sees columns r + lower, ..., r + upper
  int upper;
  int count;  // that exist

  __device__ TileBand(AttentionBand band, int64_t first_row, Interval columns)
      : lower(clamp(band.lower + first_row - columns.begin)),
        upper(clamp(band.upper + first_row - columns.begin)),
        count(static_cast<int>(columns.end - columns.begin)) {}

  __device__ int begin(int row) const { return max(row + lower, 0); }
  __device__ int end(int row) const { return min(row + upper + 1, count); }
  __device__ bool shows(int row, int column) const { return begin(row) <= column && column < end(row); }
  __device__ bool shows_all(int rows, int columns) const { return begin(rows - 1) == 0 && end(0) >= columns; }

 private:
  __device__ static int clamp(int64_t x) {
    constexpr int64_t far = int64_t{1} << 30;
    return static_cast<int>(x < -far ? -far : x > far ? far : x);
  }
};

// The same where B is not finite: weights outside of the band, which are 0, take no part, for 0 * NaN must not reach a
// sum.
template <class TileType, class N = typename TileType::N>
__device__ void multiply_add_visible(const TileBand& band, const N* weights, const N* b,
                                     N (&sums)[TileType::R][TileType::outputs]) {
#pragma unroll
  for (int r = 0; r < TileType::R; ++r) {
    const int row = TileType::thread_row() + TileType::thread_rows * r;
#pragma unroll 1
    for (int j = band.begin(row); j < band.end(row); ++j) {
      const N weight = weights[row * TileType::weight_stride + j];
#pragma unroll
      for (int index = 0; index < TileType::outputs; ++index) {
        const N value = b[j * TileType::stride + TileType::output_column(index)];
        sums[r][index] = fma(weight, value, sums[r][index]);
      }
    }
  }
}

__device__ inline int64_t aligned_down(int64_t position, int size) { return position / size * size; }

// What all kernels are given.
template <class N>
struct Problem {
  AttentionArgs args;
  ScoreFunction<N> score;
  AttentionDropout dropout;
  N keep_scale;

  explicit Problem(const AttentionArgs& attention)
      : args(attention), score(attention), dropout(dropout_of(attention)), keep_scale(dropout.template scale<N>()) {}

  // Blocks of `size` rows in the longest sequence.
  __host__ __device__ int64_t query_blocks(int size) const { return ceil_div(args.seq_len_q, size); }
  __host__ __device__ int64_t key_blocks(int size) const { return ceil_div(args.seq_len_k, size); }
};

// Queues a kernel with a block for each of `items` and a Memory of shared memory for each block.
template <class Memory, class P>
void launch(const char* operation, void (*kernel)(P), int64_t items, const Stream& stream, const P& problem) {
  const size_t available = static_cast<size_t>(strobe::cuda::device_properties(stream.device).shared_bytes_per_block);
  STROBE_CHECK(sizeof(Memory) <= available, operation, ": head_dim ", problem.args.head_dim, " in ", problem.args.dtype,
               " needs ", sizeof(Memory), " bytes of shared memory, ", stream.device, " has ", available);
  strobe::cuda::launch(operation, kernel, strobe::cuda::grid_size(items, 1), block_threads, sizeof(Memory), stream,
                       problem);
}

// One block's share of the work: a block of rows of one head of one sequence.
struct Item {
  int64_t batch;
  int64_t head;
  int64_t block;

  __device__ Item(int64_t index, int64_t blocks, int64_t heads)
      : batch(index / blocks / heads), head(index / blocks % heads), block(index % blocks) {}
};

// How far the thread's first key lies right of the diagonal of its first query, in a (queries, keys) tile.
template <class TileType>
__device__ int thread_right(const SequencePair& pair, int64_t first_query, int64_t first_key) {
  return static_cast<int>(first_key - first_query - pair.diagonal()) + TileType::thread_column() -
         TileType::thread_row();
}

// Products of a (queries, keys) tile become scores, -inf where hidden. `right` is thread_right.
template <class TileType, class N = typename TileType::N>
__device__ void score_tile(const ScoreFunction<N>& score, N slope, int right, const TileBand& band,
                           N (&scores)[TileType::R][TileType::C]) {
  if (score.changes_products()) {
#pragma unroll
    for (int r = 0; r < TileType::R; ++r) {
#pragma unroll
      for (int c = 0; c < TileType::C; ++c) {
        scores[r][c] = score(scores[r][c], slope, right + TileType::thread_columns * c - TileType::thread_rows * r);
      }
    }
  }
  if (band.shows_all(TileType::rows, TileType::columns)) return;
#pragma unroll
  for (int r = 0; r < TileType::R; ++r) {
#pragma unroll
    for (int c = 0; c < TileType::C; ++c) {
      if (!band.shows(TileType::thread_row() + TileType::thread_rows * r,
                      TileType::thread_column() + TileType::thread_columns * c)) {
        scores[r][c] = -static_cast<N>(INFINITY);
      }
    }
  }
}

// One step of the online softmax: scores become their weights. The sums of `rows` are those of this thread's columns;
// factors[r] receives what the row's earlier output must be multiplied by.
template <class TileType, class N = typename TileType::N>
__device__ void online_softmax_tile(N magnitude, N (&scores)[TileType::R][TileType::C],
                                    OnlineSoftmax<N> (&rows)[TileType::R], N (&factors)[TileType::R]) {
#pragma unroll
  for (int r = 0; r < TileType::R; ++r) {
    N largest = scores[r][0];
#pragma unroll
    for (int c = 1; c < TileType::C; ++c) largest = fmax(largest, scores[r][c]);  // NaN shows in the sum
    largest = TileType::reduce_row(largest, [](N a, N b) { return fmax(a, b); });
    factors[r] = rows[r].raise(largest, magnitude);
#pragma unroll
    for (int c = 0; c < TileType::C; ++c) {
      scores[r][c] = rows[r].weight(scores[r][c], magnitude);
      rows[r].sum += scores[r][c];
    }
  }
}

// Calls f.template operator()<N, depth>() with the type to compute in and a depth of at least head_dim. f64 is there to
// be exact, not fast, and makes do with two depths.
template <class F>
auto dispatch_tile(DType dtype, int64_t head_dim, F&& f) {
  if (dtype == DType::f64) {
    return head_dim <= 64 ? f.template operator()<double, 64>() : f.template operator()<double, 256>();
  }
  if (head_dim <= 32) return f.template operator()<float, 32>();
  if (head_dim <= 64) return f.template operator()<float, 64>();
  if (head_dim <= 128) return f.template operator()<float, 128>();
  return f.template operator()<float, 256>();
}

}  // namespace strobe::kernels::cuda::portable
