// What the tensor-core attention kernels share: tiles in and out of strided memory, and scores in units of log 2.
#pragma once

#include <numbers>

#include "strobe/kernels/cuda/attention_common.cuh"
#include "strobe/kernels/cuda/mma.cuh"

namespace strobe::kernels::cuda {

inline constexpr float log2e = std::numbers::log2e_v<float>;
inline constexpr float ln2 = std::numbers::ln2_v<float>;

// A (rows, head_dim) matrix: one head of one sequence.
template <class T>
struct MatrixView {
  T* data;
  int64_t row_stride;
  int64_t dim_stride;
  int rows;
  int head_dim;
  bool vectors;  // rows begin at multiples of 16 bytes and are contiguous
};

// The queries of one sequence in one head, or anything shaped alike, and the keys likewise.
template <class T>
__device__ inline MatrixView<T> query_view(const AttentionArgs& args, const AttentionTensor& tensor,
                                           const SequencePair& pair, int64_t head, bool vectors,
                                           int64_t dim_stride = 1) {
  return {static_cast<T*>(tensor.data) + pair.query_offset(tensor, head),
          tensor.seq_stride,
          dim_stride,
          static_cast<int>(pair.seq_len_q),
          static_cast<int>(args.head_dim),
          vectors};
}
template <class T>
__device__ inline MatrixView<T> key_view(const AttentionArgs& args, const AttentionTensor& tensor,
                                         const SequencePair& pair, int64_t kv_head, bool vectors) {
  return {static_cast<T*>(tensor.data) + pair.key_offset(tensor, kv_head),
          tensor.seq_stride,
          1,
          static_cast<int>(pair.seq_len_k),
          static_cast<int>(args.head_dim),
          vectors};
}

// Whether rows of an operand can be copied 16 bytes at a time.
inline bool rows_are_vectors(const AttentionTensor& tensor, int64_t dim_stride = 1) {
  return dim_stride == 1 && strobe::cuda::aligned_to(16, static_cast<const char*>(tensor.data)) &&
         tensor.batch_stride % 8 == 0 && tensor.seq_stride % 8 == 0 && tensor.head_stride % 8 == 0;
}

// load_tile where rows or columns are missing or no vectors; out of line, since few tiles are such.
template <class T, int columns, int rows, int threads>
__device__ __noinline__ void load_tile_in_part(char* tile, MatrixView<const T> source, int first_row) {
  using Tile = SwizzledTile<columns>;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < rows * Tile::chunks; i += threads) {
    const int row = i / Tile::chunks, chunk = i % Tile::chunks;
    const int elements = first_row + row < source.rows ? source.head_dim - 8 * chunk : 0;
    const T* const from = source.data + (first_row + row) * source.row_stride;
    char* const to = tile + Tile::offset(row, chunk);
    if (source.vectors) {
      const int bytes = elements <= 0 ? 0 : elements >= 8 ? 16 : 2 * elements;
      copy_async_16(shared_address(to), bytes > 0 ? from + 8 * chunk : source.data, bytes);
      continue;
    }
    strobe::cuda::Pack<T, 8> pack{};
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      if (c < elements) pack[c] = from[(8 * chunk + c) * source.dim_stride];
    }
    strobe::cuda::store_pack(reinterpret_cast<T*>(to), pack);
  }
}

// Starts to copy rows first_row, ..., first_row + rows - 1 into a tile; what the matrix lacks becomes 0. All threads of
// the block take part. Complete after copy_async_commit, copy_async_wait and a barrier.
template <class T, int columns, int rows, int threads>
__device__ inline void load_tile(char* tile, const MatrixView<const T>& source, int first_row) {
  using Tile = SwizzledTile<columns>;
  constexpr int rows_at_once = threads / Tile::group;
  static_assert(rows % rows_at_once == 0 && rows_at_once % 8 == 0);
  if (!source.vectors || first_row + rows > source.rows || source.head_dim < columns) {
    return load_tile_in_part<T, columns, rows, threads>(tile, source, first_row);
  }
  const int thread_row = static_cast<int>(threadIdx.x) / Tile::group;
  const int thread_chunk = static_cast<int>(threadIdx.x) % Tile::group;
  const uint32_t target = shared_address(tile) + Tile::offset(thread_row, thread_chunk);
  const T* from = source.data + (first_row + thread_row) * source.row_stride + 8 * thread_chunk;
#pragma unroll
  for (int row = 0; row < rows; row += rows_at_once, from += rows_at_once * source.row_stride) {
#pragma unroll
    for (int chunk = 0; chunk < Tile::chunks; chunk += Tile::group) {
      copy_async_16(target + static_cast<uint32_t>(row * Tile::row_bytes + 16 * chunk), from + 8 * chunk);
    }
  }
}

// Writes `rows` rows of a tile, from tile_row on, to rows first_row, ... of the matrix; the lanes of one warp take
// part.
template <class T, int columns, int rows>
__device__ inline void store_rows(const char* tile, int tile_row, const MatrixView<T>& target, int first_row,
                                  int lane) {
  using Tile = SwizzledTile<columns>;
  using strobe::cuda::Pack;
  const bool whole = target.vectors && first_row + rows <= target.rows && target.head_dim == columns;
  const auto pack_at = [&](int row, int chunk) {
    return strobe::cuda::load_pack<T, 8>(reinterpret_cast<const T*>(tile + Tile::offset(tile_row + row, chunk)));
  };
  if (whole) {
#pragma unroll 4
    for (int i = lane; i < rows * Tile::chunks; i += 32) {
      const int row = i / Tile::chunks, chunk = i % Tile::chunks;
      strobe::cuda::store_pack(target.data + (first_row + row) * target.row_stride + 8 * chunk, pack_at(row, chunk));
    }
    return;
  }
#pragma unroll 1
  for (int i = lane; i < rows * Tile::chunks; i += 32) {
    const int row = i / Tile::chunks, chunk = i % Tile::chunks;
    const int elements = target.head_dim - 8 * chunk;
    if (first_row + row >= target.rows || elements <= 0) continue;
    const auto pack = pack_at(row, chunk);
    T* const to = target.data + (first_row + row) * target.row_stride + 8 * chunk;
    if (target.vectors && elements >= 8) {
      strobe::cuda::store_pack(to, pack);
    } else {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        if (c < elements) to[c] = pack[c];
      }
    }
  }
}

// Multiplies a tile by the sign of softmax_scale, exact in any dtype; the block's barriers are the caller's.
template <class T, int columns, int rows, int threads>
__device__ __noinline__ void multiply_tile(char* tile, float sign) {
  T* const values = reinterpret_cast<T*>(tile);
  for (int i = static_cast<int>(threadIdx.x); i < rows * columns; i += threads) {
    values[i] = T(static_cast<float>(values[i]) * sign);
  }
}

// A band in 32 bits: positions are below 2^29, so limits beyond that hide nothing either.
struct Band {
  int lower;
  int upper;
  int seq_len_k;

  Band() = default;
  __device__ Band(int lower, int upper, int seq_len_k) : lower(lower), upper(upper), seq_len_k(seq_len_k) {}
  __device__ explicit Band(const SequencePair& pair)
      : lower(clamp(pair.band.lower)), upper(clamp(pair.band.upper)), seq_len_k(static_cast<int>(pair.seq_len_k)) {}

  // Query i sees keys begin(i), ..., end(i) - 1; none when that is no interval.
  __device__ int begin(int query) const { return max(query + lower, 0); }
  __device__ int end(int query) const { return min(query + upper + 1, seq_len_k); }

 private:
  static __device__ int clamp(int64_t limit) {
    constexpr int64_t far = int64_t{1} << 29;
    return static_cast<int>(limit < -far ? -far : limit > far ? far : limit);
  }
};

// What the backward pass keeps of every query, in tiles of `queries` that each sequence begins anew: (tile, 3,
// queries) floats. log_sum and reference, in units of log 2, are such that P = 2^((score - reference) - log_sum); delta
// as in the paper. Or, `as_terms`, (tile, queries, 8) bf16: 5 whose sum is to be added to Q K^T, so that P = 2^(scale *
// the result), and 3 whose sum is to be added to dP.
struct RowTable {
  enum Column { log_sum, delta, reference, columns };
  static constexpr int weight_terms = 5, delta_terms = 3, terms = weight_terms + delta_terms;
  float* data;
  int queries;
  int64_t query_tiles;  // of the longest sequence
  int64_t head_tiles;   // from one head to the next
  bool as_terms;
  float scale;  // |softmax_scale| log2(e), not 0

  // The tile that holds query 0 of a sequence in one head. cu_seqlens_q are 32-bit, and so is the division.
  __device__ int64_t first_tile(const AttentionArgs& args, const SequencePair& pair, int64_t head) const {
    const int64_t first = static_cast<uint32_t>(pair.first_q) / static_cast<uint32_t>(queries) + pair.batch;
    return head * head_tiles + (pair.packed ? first : pair.batch * args.num_heads * head_tiles);
  }
  // The log_sum of a query; `queries` floats further on is its delta, and so on.
  __device__ float* at(int64_t sequence_tile, int query) const {
    return data + (sequence_tile + query / queries) * (columns * queries) + query % queries;
  }
  // The terms of a query.
  __device__ uint16_t* terms_at(int64_t sequence_tile, int query) const {
    return reinterpret_cast<uint16_t*>(data) + (sequence_tile * queries + query) * terms;
  }

  // Writes a row. log_sum is infinity where the weight is 0.
  __device__ void put(int64_t sequence_tile, int query, float row_log_sum, float row_delta) const {
    if (as_terms) {
      alignas(16) uint16_t row[terms] = {};
      // Not -infinity: what its first term left would be NaN.
      put_terms<3>(row, row_log_sum == std::numeric_limits<float>::infinity() ? -3e38f : -row_log_sum / scale);
      put_terms<delta_terms>(row + weight_terms, -row_delta);
      *reinterpret_cast<uint4*>(terms_at(sequence_tile, query)) = *reinterpret_cast<const uint4*>(row);
    } else {
      float* const entry = at(sequence_tile, query);
      entry[log_sum * queries] = row_log_sum;
      entry[delta * queries] = row_delta;
      entry[reference * queries] = 0;
    }
  }
  // Replaces its log_sum by two parts.
  __device__ void split(int64_t sequence_tile, int query, float row_log_sum, float row_reference) const {
    if (as_terms) {
      put_terms<weight_terms>(terms_at(sequence_tile, query), -(double{row_reference} + row_log_sum) / scale);
    } else {
      float* const entry = at(sequence_tile, query);
      entry[log_sum * queries] = row_log_sum;
      entry[reference * queries] = row_reference;
    }
  }

 private:
  __device__ static float toward_zero(float x) { return x; }
  __device__ static float toward_zero(double x) { return __double2float_rz(x); }
  // Each term is what the ones before it leave, cut off behind 8 bits: three hold all of a float.
  template <int count, class Float>
  __device__ static void put_terms(uint16_t* to, Float rest) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const uint32_t bits = __float_as_uint(toward_zero(rest));
      to[i] = static_cast<uint16_t>(bits >> 16);
      rest -= __uint_as_float(bits & 0xffff0000u);
    }
  }
};

// Logarithms up to here lose so little to rounding that P = exp(S - lse) is as exact as its dtype.
inline constexpr float exact_lse = 512;

// 1 / x within 1 unit in the last place.
__device__ inline float reciprocal_fast(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// tanh(x) within 2e-7: two fast instructions instead of the eight of tanhf or the 2^-11 of tanh.approx.
__device__ inline float tanh_fast(float x) {
  return fmaf(-2.0f, reciprocal_fast(1.0f + exp2_fast(2 * log2e * x)), 1.0f);
}

// Where |lse| is large, its rounding would show in P: replaces log_sum and reference of such rows by two parts,
// computed as in the forward pass.
void mma_attention_split_lse(const AttentionArgs& args, const RowTable& table, const Stream& stream);

}  // namespace strobe::kernels::cuda
