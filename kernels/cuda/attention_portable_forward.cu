// Portable attention, forward: FlashAttention-2 (Dao 2023), algorithm 1. A block of threads takes a block of queries,
// and the keys and values they see pass through its shared memory.
#include "strobe/kernels/cuda/attention_portable.cuh"
#include "strobe/kernels/cuda/attention_portable.h"

namespace strobe::kernels::cuda {
namespace portable {
namespace {

// Fit into the 64 KiB of shared memory that every GPU has.
template <class N, int depth>
struct TileFor;
template <>
struct TileFor<float, 32> : Tile<float, 32, 4, 8, 3, 16> {};
template <>
struct TileFor<float, 64> : Tile<float, 64, 4, 8, 3, 16> {};
template <>
struct TileFor<float, 128> : Tile<float, 128, 4, 4, 3, 16> {};
template <>
struct TileFor<float, 256> : Tile<float, 256, 4, 1, 3> {};
template <>
struct TileFor<double, 64> : Tile<double, 64, 4, 2, 2> {};
template <>
struct TileFor<double, 256> : Tile<double, 256, 1, 1, 2> {};

// Larger ones for GPUs that have the room: a number in shared memory then feeds more products.
template <class N, int depth>
struct LargeTileFor : TileFor<N, depth> {};
template <>
struct LargeTileFor<float, 128> : Tile<float, 128, 8, 4, 2> {};

// What a block keeps in shared memory.
template <class TileType, class N = typename TileType::N>
struct ForwardMemory {
  N query[TileType::rows * TileType::stride];            // times the sign of softmax_scale
  N key_or_value[TileType::columns * TileType::stride];  // the keys of a step, then its values
  N weights[TileType::rows * TileType::weight_stride];
};

// Zeroes the weights that dropout drops.
template <class TileType, class N = typename TileType::N>
__device__ void drop_tile(const AttentionDropout& dropout, int64_t matrix, int64_t first_query, int64_t first_key,
                          N (&weights)[TileType::R][TileType::C]) {
#pragma unroll
  for (int c = 0; c < TileType::C; ++c) {
    const int64_t key = first_key + TileType::thread_column() + TileType::thread_columns * c;
    PhiloxCounter words;
#pragma unroll
    for (int r = 0; r < TileType::R; ++r) {
      const int64_t query = first_query + TileType::thread_row() + TileType::thread_rows * r;
      if (TileType::thread_rows * r % 32 == 0) words = dropout.bytes(matrix, query, key);
      if (!keeps(dropout, words, query, key)) weights[r][c] = 0;
    }
  }
}

template <class TileType, class N = typename TileType::N>
__device__ void attend(const Problem<N>& problem, const Item& item, ForwardMemory<TileType>& memory) {
  constexpr int R = TileType::R;
  const AttentionArgs& args = problem.args;
  const SequencePair pair(args, item.batch);
  // With a causal mask late queries see most keys: they go first, and short blocks fill the gaps at the end.
  const int64_t first = (problem.query_blocks(TileType::rows) - 1 - item.block) * TileType::rows;
  if (first >= pair.seq_len_q) return;
  const Interval queries{first, min(first + TileType::rows, pair.seq_len_q)};
  const auto query_of = [&](int r) { return first + TileType::thread_row() + TileType::thread_rows * r; };
  const int64_t kv_head = item.head / (args.num_heads / args.num_kv_heads);
  const Rows key = key_rows(pair, args.key, kv_head), value = key_rows(pair, args.value, kv_head);
  const N factor = problem.score.factor();
  const N slope = problem.score.slope_of(item.head);

  OnlineSoftmax<N> rows[R];
  N sums[R][TileType::outputs] = {};
  load_tile<N, TileType::rows, TileType::depth>(query_rows(pair, args.query, item.head), args.dtype, queries,
                                                args.head_dim, problem.score.sign, memory.query);

  const Interval seen = pair.keys_of(queries);
  for (int64_t begin = aligned_down(seen.begin, TileType::columns); begin < seen.end; begin += TileType::columns) {
    const Interval keys{begin, min(begin + TileType::columns, seen.end)};
    const TileBand band(pair.band, first, keys);

    // S = Q K^T
    N scores[R][TileType::C];
    __syncthreads();
    load_tile<N, TileType::columns, TileType::depth>(key, args.dtype, keys, args.head_dim, N(1), memory.key_or_value);
    __syncthreads();
    multiply_transposed<TileType>(memory.query, memory.key_or_value, scores);
    __syncthreads();
    const bool finite = load_tile<N, TileType::columns, TileType::depth>(value, args.dtype, keys, args.head_dim, N(1),
                                                                         memory.key_or_value);

    // m_old = m, m = max(m, rowmax(S)), P = exp(S - m), l = exp(m_old - m) l + rowsum(P)
    score_tile<TileType>(problem.score, slope, thread_right<TileType>(pair, first, begin), band, scores);
    N factors[R];
    online_softmax_tile<TileType>(factor, scores, rows, factors);
    if (problem.dropout.drops()) {
      drop_tile<TileType>(problem.dropout, item.batch * args.num_heads + item.head, first, begin, scores);
    }
    store_weights<TileType>(scores, memory.weights);

    // O = diag(exp(m_old - m)) O + P V
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int index = 0; index < TileType::outputs; ++index) sums[r][index] *= factors[r];
    }
    if (__syncthreads_and(finite) || band.shows_all(TileType::rows, TileType::columns)) {
      multiply_add<TileType>(memory.weights, memory.key_or_value, sums);
    } else {
      multiply_add_visible<TileType>(band, memory.weights, memory.key_or_value, sums);
    }
  }

  // O = diag(l)^-1 O, L = m + log(l)
  N* const lse = static_cast<N*>(args.lse) + pair.lse_offset(args, item.head);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    rows[r].sum = TileType::reduce_row(rows[r].sum, strobe::cuda::Plus());
    if (TileType::thread_column() == 0 && query_of(r) < queries.end) lse[query_of(r)] = rows[r].lse(factor);
    const bool sees_nothing = pair.keys_of(query_of(r)).empty();  // its sums are 0
    const N divided = sees_nothing ? N(0) : problem.keep_scale / rows[r].sum;
#pragma unroll
    for (int index = 0; index < TileType::outputs; ++index) sums[r][index] *= divided;
  }
  __syncthreads();
  collect_tile<TileType>(sums, N(1), memory.query);
  __syncthreads();
  store_tile<N, TileType::depth>(memory.query, query_rows(pair, args.out, item.head), args.dtype, queries,
                                 args.head_dim);
  __syncthreads();
}

template <class TileType, class N = typename TileType::N>
__global__ void __launch_bounds__(block_threads, TileType::blocks_at_once)
    forward_kernel(const __grid_constant__ Problem<N> problem) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int64_t blocks = problem.query_blocks(TileType::rows);
  const int64_t count = problem.args.batch * problem.args.num_heads * blocks;
  for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
    attend<TileType>(problem, Item(index, blocks, problem.args.num_heads),
                     *reinterpret_cast<ForwardMemory<TileType>*>(shared));
  }
}

// Calls f<TileType>() with the tile for a case.
template <class F>
auto dispatch_forward(const AttentionArgs& args, Device device, F&& f) {
  return dispatch_tile(args.dtype, args.head_dim, [&]<class N, int depth>() {
    using Small = TileFor<N, depth>;
    using Large = LargeTileFor<N, depth>;
    if constexpr (!std::is_base_of_v<Small, Large>) {
      constexpr int reserved = 1024;  // by CUDA, of each block
      const int needed = Large::blocks_at_once * (static_cast<int>(sizeof(ForwardMemory<Large>)) + reserved);
      if (needed <= strobe::cuda::device_properties(device).shared_bytes_per_multiprocessor) {
        return f.template operator()<Large>();
      }
    }
    return f.template operator()<Small>();
  });
}

}  // namespace
}  // namespace portable

AttentionTile portable_attention_forward_tile(const AttentionArgs& args, Device device) {
  return portable::dispatch_forward(args, device, [&]<class TileType>() {
    return AttentionTile{TileType::rows, TileType::columns};
  });
}

void portable_attention_forward(const AttentionArgs& args, const Stream& stream) {
  portable::dispatch_forward(args, stream.device, [&]<class TileType>() {
    using N = typename TileType::N;
    const portable::Problem<N> problem(args);
    const int64_t count = args.batch * args.num_heads * problem.query_blocks(TileType::rows);
    portable::launch<portable::ForwardMemory<TileType>>("flash_attention_forward",
                                                        portable::forward_kernel<TileType, N>, count, stream, problem);
  });
}

}  // namespace strobe::kernels::cuda
