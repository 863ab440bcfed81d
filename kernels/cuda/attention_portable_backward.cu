// Portable attention, backward: FlashAttention-2 (Dao 2023), algorithm 2, split in two. One kernel goes from keys to
// the queries that see them and owns dkey and dvalue, the other from queries to keys and owns dquery: S and dP are
// computed twice, and nothing is ever added to memory, so that the bits never change.
#include "strobe/kernels/cuda/attention_portable.h"
#include "strobe/kernels/cuda/attention_portable_backward.cuh"

namespace strobe::kernels::cuda {
namespace portable {
namespace {

// Fit into the 64 KiB of shared memory that every GPU has, but for f64 above head_dim 64.
template <class N, int depth>
struct KeyTileFor;
template <>
struct KeyTileFor<float, 32> : Tile<float, 32, 8, 2, 3> {};
template <>
struct KeyTileFor<float, 64> : Tile<float, 64, 8, 2, 3> {};
template <>
struct KeyTileFor<float, 128> : Tile<float, 128, 4, 1, 4> {};
template <>
struct KeyTileFor<float, 256> : Tile<float, 256, 1, 1, 4> {};
template <>
struct KeyTileFor<double, 64> : Tile<double, 64, 2, 2, 2> {};
template <>
struct KeyTileFor<double, 256> : Tile<double, 256, 1, 1, 2> {};

template <class N, int depth>
struct QueryTileFor : KeyTileFor<N, depth> {};
template <>
struct QueryTileFor<float, 128> : Tile<float, 128, 4, 2, 4> {};
template <>
struct QueryTileFor<float, 256> : Tile<float, 256, 2, 1, 4> {};

template <class TileType, class N = typename TileType::N>
struct KeyMemory {
  N key[TileType::rows * TileType::stride];  // times the sign of softmax_scale
  N value[TileType::rows * TileType::stride];
  N query[TileType::columns * TileType::stride];
  N dout[TileType::columns * TileType::stride];
  N weights[TileType::rows * TileType::weight_stride];
};

// dkey and dvalue of a block of keys: tiles are (keys, queries).
template <class TileType, class N = typename TileType::N>
__device__ void differentiate_keys(const GradProblem<N>& problem, const Item& item, KeyMemory<TileType>& memory) {
  constexpr int R = TileType::R, C = TileType::C;
  const AttentionArgs& args = problem.args;
  const SequencePair pair(args, item.batch);
  const int64_t first = item.block * TileType::rows;
  if (first >= pair.seq_len_k) return;
  const Interval keys{first, min(first + TileType::rows, pair.seq_len_k)};
  const AttentionBand band{-pair.band.upper, -pair.band.lower};  // of queries around a key
  const Interval seen = pair.queries_of(keys);
  load_tile<N, TileType::rows, TileType::depth>(key_rows(pair, args.key, item.head), args.dtype, keys, args.head_dim,
                                                problem.score.sign, memory.key);
  load_tile<N, TileType::rows, TileType::depth>(key_rows(pair, args.value, item.head), args.dtype, keys, args.head_dim,
                                                N(1), memory.value);
  N dkey[R][TileType::outputs] = {}, dvalue[R][TileType::outputs] = {};

  const int64_t group = args.num_heads / args.num_kv_heads;
  for (int64_t head = item.head * group; head < (item.head + 1) * group; ++head) {
    const Rows query = query_rows(pair, args.query, head);
    const Rows dout = query_rows(pair, problem.dout, head, problem.dout_dim_stride);
    const QueryFacts<N>* const facts = problem.query_facts + pair.lse_offset(args, head);
    for (int64_t begin = aligned_down(seen.begin, TileType::columns); begin < seen.end; begin += TileType::columns) {
      const Interval queries{begin, min(begin + TileType::columns, seen.end)};
      const TileBand tile_band(band, first, queries);
      QueryFacts<N> columns[C];
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const int64_t position = begin + TileType::thread_column() + TileType::thread_columns * c;
        columns[c] = position < queries.end ? facts[position] : QueryFacts<N>{};
      }
      __syncthreads();
      bool query_finite = load_tile<N, TileType::columns, TileType::depth>(query, args.dtype, queries, args.head_dim,
                                                                           N(1), memory.query);
      bool dout_finite =
          load_tile<N, TileType::columns, TileType::depth>(dout, args.dtype, queries, args.head_dim, N(1), memory.dout);
      query_finite = __syncthreads_and(query_finite);
      dout_finite = __syncthreads_and(dout_finite);

      // S^T = K Q^T, dP^T = V dO^T, then P^T and dS^T
      N p[R][C], ds[R][C];
      multiply_transposed<TileType>(memory.key, memory.query, p);
      multiply_transposed<TileType>(memory.value, memory.dout, ds);
      differentiate_tile<TileType, true>(problem, pair, head, begin + TileType::thread_column(),
                                         first + TileType::thread_row(), tile_band, columns, p, ds);
      // dV += P^T dO, dK += dS^T Q
      add_product<TileType>(p, memory.dout, dout_finite, tile_band, memory.weights, dvalue);
      add_product<TileType>(ds, memory.query, query_finite, tile_band, memory.weights, dkey);
    }
  }

  __syncthreads();
  collect_tile<TileType>(dkey, static_cast<N>(args.softmax_scale), memory.key);
  collect_tile<TileType>(dvalue, N(1), memory.value);
  __syncthreads();
  store_tile<N, TileType::depth>(memory.key, key_rows(pair, problem.dkey, item.head), args.dtype, keys, args.head_dim);
  store_tile<N, TileType::depth>(memory.value, key_rows(pair, problem.dvalue, item.head), args.dtype, keys,
                                 args.head_dim);
  __syncthreads();
}

template <class TileType, class N = typename TileType::N>
struct QueryMemory {
  N query[TileType::rows * TileType::stride];  // times the sign of softmax_scale
  N dout[TileType::rows * TileType::stride];
  N value_or_key[TileType::columns * TileType::stride];  // the values of a step, then its keys
  N weights[TileType::rows * TileType::weight_stride];
};

// dquery of a block of queries: tiles are (queries, keys).
template <class TileType, class N = typename TileType::N>
__device__ void differentiate_queries(const GradProblem<N>& problem, const Item& item, QueryMemory<TileType>& memory) {
  constexpr int R = TileType::R, C = TileType::C;
  const AttentionArgs& args = problem.args;
  const SequencePair pair(args, item.batch);
  const int64_t first = (problem.query_blocks(TileType::rows) - 1 - item.block) * TileType::rows;
  if (first >= pair.seq_len_q) return;
  const Interval queries{first, min(first + TileType::rows, pair.seq_len_q)};
  const int64_t kv_head = item.head / (args.num_heads / args.num_kv_heads);
  const Rows key = key_rows(pair, args.key, kv_head), value = key_rows(pair, args.value, kv_head);
  load_tile<N, TileType::rows, TileType::depth>(query_rows(pair, args.query, item.head), args.dtype, queries,
                                                args.head_dim, problem.score.sign, memory.query);
  load_tile<N, TileType::rows, TileType::depth>(query_rows(pair, problem.dout, item.head, problem.dout_dim_stride),
                                                args.dtype, queries, args.head_dim, N(1), memory.dout);
  const QueryFacts<N>* const facts = problem.query_facts + pair.lse_offset(args, item.head);
  QueryFacts<N> rows[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int64_t position = first + TileType::thread_row() + TileType::thread_rows * r;
    rows[r] = position < queries.end ? facts[position] : QueryFacts<N>{};
  }
  N dquery[R][TileType::outputs] = {};

  const Interval seen = pair.keys_of(queries);
  for (int64_t begin = aligned_down(seen.begin, TileType::columns); begin < seen.end; begin += TileType::columns) {
    const Interval keys{begin, min(begin + TileType::columns, seen.end)};
    const TileBand band(pair.band, first, keys);

    // dP = dO V^T, S = Q K^T, then P and dS
    N p[R][C], ds[R][C];
    __syncthreads();
    load_tile<N, TileType::columns, TileType::depth>(value, args.dtype, keys, args.head_dim, N(1), memory.value_or_key);
    __syncthreads();
    multiply_transposed<TileType>(memory.dout, memory.value_or_key, ds);
    __syncthreads();
    const bool finite = __syncthreads_and(load_tile<N, TileType::columns, TileType::depth>(
        key, args.dtype, keys, args.head_dim, N(1), memory.value_or_key));
    multiply_transposed<TileType>(memory.query, memory.value_or_key, p);
    differentiate_tile<TileType, false>(problem, pair, item.head, first + TileType::thread_row(),
                                        begin + TileType::thread_column(), band, rows, p, ds);
    // dQ += dS K
    add_product<TileType>(ds, memory.value_or_key, finite, band, memory.weights, dquery);
  }

  __syncthreads();
  collect_tile<TileType>(dquery, static_cast<N>(args.softmax_scale), memory.query);
  __syncthreads();
  store_tile<N, TileType::depth>(memory.query, query_rows(pair, problem.dquery, item.head), args.dtype, queries,
                                 args.head_dim);
  __syncthreads();
}

template <class TileType, class N = typename TileType::N>
__global__ void __launch_bounds__(block_threads, TileType::blocks_at_once)
    keys_kernel(const __grid_constant__ GradProblem<N> problem) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int64_t blocks = problem.key_blocks(TileType::rows);
  const int64_t count = problem.args.batch * problem.args.num_kv_heads * blocks;
  for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
    differentiate_keys<TileType>(problem, Item(index, blocks, problem.args.num_kv_heads),
                                 *reinterpret_cast<KeyMemory<TileType>*>(shared));
  }
}

template <class TileType, class N = typename TileType::N>
__global__ void __launch_bounds__(block_threads, TileType::blocks_at_once)
    queries_kernel(const __grid_constant__ GradProblem<N> problem) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int64_t blocks = problem.query_blocks(TileType::rows);
  const int64_t count = problem.args.batch * problem.args.num_heads * blocks;
  for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
    differentiate_queries<TileType>(problem, Item(index, blocks, problem.args.num_heads),
                                    *reinterpret_cast<QueryMemory<TileType>*>(shared));
  }
}

}  // namespace
}  // namespace portable

size_t portable_attention_backward_workspace(const AttentionGradArgs& args) {
  const size_t bytes =
      args.forward.dtype == DType::f64 ? sizeof(portable::QueryFacts<double>) : sizeof(portable::QueryFacts<float>);
  return bytes * static_cast<size_t>(lse_size(args.forward));
}

AttentionTile portable_attention_backward_tile(const AttentionArgs& args, Device) {
  return portable::dispatch_tile(args.dtype, args.head_dim, [&]<class N, int depth>() {
    return AttentionTile{portable::QueryTileFor<N, depth>::rows, portable::KeyTileFor<N, depth>::rows};
  });
}

void portable_attention_backward(const AttentionGradArgs& args, const Stream& stream) {
  constexpr const char* operation = "flash_attention_backward";
  portable::prepare_backward(args, stream);
  portable::dispatch_tile(args.forward.dtype, args.forward.head_dim, [&]<class N, int depth>() {
    using KeyTile = portable::KeyTileFor<N, depth>;
    using QueryTile = portable::QueryTileFor<N, depth>;
    const portable::GradProblem<N> problem(args);
    const int64_t batch = args.forward.batch;
    const int64_t key_items = batch * args.forward.num_kv_heads * problem.key_blocks(KeyTile::rows);
    const int64_t query_items = batch * args.forward.num_heads * problem.query_blocks(QueryTile::rows);
    portable::launch<portable::KeyMemory<KeyTile>>(operation, portable::keys_kernel<KeyTile, N>, key_items, stream,
                                                   problem);
    portable::launch<portable::QueryMemory<QueryTile>>(operation, portable::queries_kernel<QueryTile, N>, query_items,
                                                       stream, problem);
  });
}

}  // namespace strobe::kernels::cuda
