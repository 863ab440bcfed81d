// Portable attention, backward, first step: delta of every query, and lse split in two so that P keeps its digits.
#include "strobe/kernels/cuda/attention_portable_backward.cuh"

namespace strobe::kernels::cuda::portable {
namespace {

// As many rows as columns: what holds a block of keys holds one of rows of out at first.
template <class N, int depth>
struct TileFor : Tile<N, depth, 4, 2, 3> {};
template <class N>
struct TileFor<N, 256> : Tile<N, 256, 2, 1, 3> {};

template <class TileType, class N = typename TileType::N>
struct PrepareMemory {
  N query[TileType::rows * TileType::stride];   // dout; then queries times the sign of softmax_scale
  N key[TileType::columns * TileType::stride];  // out; then keys
};

// lse is accepted as it is while its rounding is far below that of P.
template <class N>
__device__ bool is_large(N lse) {
  return isfinite(lse) && fabs(lse) > N(32);
}

// m and l of every query computed again, as in the forward pass, where lse is large. They are not used if they differ
// from lse by more than rounding: lse may belong to more keys than these.
template <class TileType, class N = typename TileType::N>
__device__ void split_lse(const GradProblem<N>& problem, const Item& item, const SequencePair& pair, Interval queries,
                          PrepareMemory<TileType>& memory) {
  const AttentionArgs& args = problem.args;
  const int64_t kv_head = item.head / (args.num_heads / args.num_kv_heads);
  const Rows key = key_rows(pair, args.key, kv_head);
  const N factor = problem.score.factor();
  const N slope = problem.score.slope_of(item.head);
  OnlineSoftmax<N> rows[TileType::R];
  load_tile<N, TileType::rows, TileType::depth>(query_rows(pair, args.query, item.head), args.dtype, queries,
                                                args.head_dim, problem.score.sign, memory.query);
  const Interval seen = pair.keys_of(queries);
  for (int64_t begin = aligned_down(seen.begin, TileType::columns); begin < seen.end; begin += TileType::columns) {
    const Interval keys{begin, min(begin + TileType::columns, seen.end)};
    N scores[TileType::R][TileType::C], factors[TileType::R];
    load_tile<N, TileType::columns, TileType::depth>(key, args.dtype, keys, args.head_dim, N(1), memory.key);
    __syncthreads();
    multiply_transposed<TileType>(memory.query, memory.key, scores);
    score_tile<TileType>(problem.score, slope, thread_right<TileType>(pair, queries.begin, begin),
                         TileBand(pair.band, queries.begin, keys), scores);
    online_softmax_tile<TileType>(factor, scores, rows, factors);
    __syncthreads();
  }
  const int64_t offset = pair.lse_offset(args, item.head) + queries.begin;
#pragma unroll
  for (int r = 0; r < TileType::R; ++r) {
    rows[r].sum = TileType::reduce_row(rows[r].sum, strobe::cuda::Plus());
    const int row = TileType::thread_row() + TileType::thread_rows * r;
    if (TileType::thread_column() != 0 || queries.begin + row >= queries.end) continue;
    const N lse = static_cast<const N*>(args.lse)[offset + row];
    const N rounding = 2 * std::numeric_limits<N>::epsilon() * fabs(lse);
    if (is_large(lse) && fabs(rows[r].lse(factor) - lse) <= rounding) {
      problem.query_facts[offset + row].reference = rows[r].maximum;
      problem.query_facts[offset + row].log_sum = log_(rows[r].sum);
    }
  }
}

template <class TileType, class N = typename TileType::N>
__device__ void prepare(const GradProblem<N>& problem, const Item& item, PrepareMemory<TileType>& memory) {
  static_assert(TileType::rows == TileType::columns && TileType::rows <= block_threads);
  const AttentionArgs& args = problem.args;
  const SequencePair pair(args, item.batch);
  const int64_t first = item.block * TileType::rows;
  if (first >= pair.seq_len_q) return;
  const Interval queries{first, min(first + TileType::rows, pair.seq_len_q)};
  load_tile<N, TileType::rows, TileType::depth>(query_rows(pair, problem.dout, item.head, problem.dout_dim_stride),
                                                args.dtype, queries, args.head_dim, N(1), memory.query);
  load_tile<N, TileType::rows, TileType::depth>(query_rows(pair, args.out, item.head), args.dtype, queries,
                                                args.head_dim, N(1), memory.key);
  __syncthreads();
  const int row = static_cast<int>(threadIdx.x);
  bool large = false;
  if (first + row < queries.end) {
    // One sum in ascending order, as in multiply_transposed: dP - delta is then exactly 0 where one key has all the
    // weight.
    N delta = 0;
    for (int d = 0; d < TileType::depth; d += pack_size<N>) {
      const auto dout = load_pack<N, pack_size<N>>(memory.query + row * TileType::stride + d);
      const auto out = load_pack<N, pack_size<N>>(memory.key + row * TileType::stride + d);
#pragma unroll
      for (int e = 0; e < pack_size<N>; ++e) delta = fma(dout[e], out[e], delta);
    }
    const int64_t index = pair.lse_offset(args, item.head) + first + row;
    if (problem.dlse != nullptr) delta -= problem.dlse[index];
    const N lse = static_cast<const N*>(args.lse)[index];
    problem.query_facts[index] = {N(0), lse, delta};
    large = is_large(lse);
  }
  if (__syncthreads_or(large)) split_lse(problem, item, pair, queries, memory);
}

template <class TileType, class N = typename TileType::N>
__global__ void __launch_bounds__(block_threads, TileType::blocks_at_once)
    prepare_kernel(const __grid_constant__ GradProblem<N> problem) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int64_t blocks = problem.query_blocks(TileType::rows);
  const int64_t count = problem.args.batch * problem.args.num_heads * blocks;
  for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
    prepare<TileType>(problem, Item(index, blocks, problem.args.num_heads),
                      *reinterpret_cast<PrepareMemory<TileType>*>(shared));
    __syncthreads();
  }
}

}  // namespace

void prepare_backward(const AttentionGradArgs& args, const Stream& stream) {
  dispatch_tile(args.forward.dtype, args.forward.head_dim, [&]<class N, int depth>() {
    using TileType = TileFor<N, depth>;
    const GradProblem<N> problem(args);
    const int64_t count = args.forward.batch * args.forward.num_heads * problem.query_blocks(TileType::rows);
    launch<PrepareMemory<TileType>>("flash_attention_backward", prepare_kernel<TileType, N>, count, stream, problem);
  });
}

}  // namespace strobe::kernels::cuda::portable
