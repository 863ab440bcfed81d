// What the steps of the portable attention backward pass share: what is known of each query, and how a tile of products
// becomes P and dS.
#pragma once

#include "strobe/kernels/cuda/attention_portable.cuh"

namespace strobe::kernels::cuda::portable {

// What the backward pass needs to know of a query. P = exp((S - reference) * factor - log_sum), where lse = reference *
// factor + log_sum: (0, lse), unless lse is so large that its rounding would show in P.
template <class N>
struct QueryFacts {
  N reference;
  N log_sum;
  N delta;  // rowsum(dout * out) - dlse
};

template <class N>
struct GradProblem : Problem<N> {
  AttentionTensor dout;
  int64_t dout_dim_stride;
  const N* dlse;
  AttentionTensor dquery;
  AttentionTensor dkey;
  AttentionTensor dvalue;
  QueryFacts<N>* query_facts;  // in the order of lse

  explicit GradProblem(const AttentionGradArgs& args)
      : Problem<N>(args.forward),
        dout(args.dout),
        dout_dim_stride(args.dout_dim_stride),
        dlse(static_cast<const N*>(args.dlse)),
        dquery(args.dquery),
        dkey(args.dkey),
        dvalue(args.dvalue),
        query_facts(static_cast<QueryFacts<N>*>(args.workspace)) {}
};

// Fills query_facts.
void prepare_backward(const AttentionGradArgs& args, const Stream& stream);

// Products S (before scaling) and dP of a tile become P, as dropout leaves it, and dS / softmax_scale; both are 0 where
// hidden. `query` and `key`: positions of the thread's first element; queries[]: facts of the thread's rows, or of its
// columns where keys are the rows.
template <class TileType, bool keys_are_rows, class N = typename TileType::N>
__device__ void differentiate_tile(const Problem<N>& problem, const SequencePair& pair, int64_t head, int64_t query,
                                   int64_t key, const TileBand& band,
                                   const QueryFacts<N> (&queries)[keys_are_rows ? TileType::C : TileType::R],
                                   N (&p)[TileType::R][TileType::C], N (&ds)[TileType::R][TileType::C]) {
  const ScoreFunction<N>& score = problem.score;
  const int64_t matrix = pair.batch * problem.args.num_heads + head;
  const N slope = score.slope_of(head);
  const N factor = score.factor();
  const int right = static_cast<int>(key - query - pair.diagonal());
#pragma unroll
  for (int c = 0; c < TileType::C; ++c) {
    PhiloxCounter words;
#pragma unroll
    for (int r = 0; r < TileType::R; ++r) {
      const int row = TileType::thread_rows * r, column = TileType::thread_columns * c;
      const int queries_on = keys_are_rows ? column : row, keys_on = keys_are_rows ? row : column;
      const QueryFacts<N>& facts = queries[keys_are_rows ? c : r];
      N kept = 1, derivative = 1;
      if (problem.dropout.drops()) {
        if (TileType::thread_rows * r % 32 == 0)
          words = problem.dropout.bytes(matrix, query + queries_on, key + keys_on);
        kept = keeps(problem.dropout, words, query + queries_on, key + keys_on) ? problem.keep_scale : N(0);
      }
      if (score.changes_products()) {
        derivative = score.derivative(p[r][c]);
        p[r][c] = score(p[r][c], slope, right + keys_on - queries_on);
      }
      const N probability = exp2_(((p[r][c] - facts.reference) * factor - facts.log_sum) * std::numbers::log2e_v<N>);
      const bool visible = band.shows(TileType::thread_row() + row, TileType::thread_column() + column);
      p[r][c] = visible ? probability * kept : N(0);
      ds[r][c] = visible ? probability * (ds[r][c] * kept - facts.delta) * derivative : N(0);
    }
  }
}

// Adds W B to `sums`, where W's elements are those that threads hold: they go through `tile` in shared memory, and a
// barrier lies behind. `finite`: all of B is.
template <class TileType, class N = typename TileType::N>
__device__ void add_product(const N (&weights)[TileType::R][TileType::C], const N* b, bool finite, const TileBand& band,
                            N* tile, N (&sums)[TileType::R][TileType::outputs]) {
  store_weights<TileType>(weights, tile);
  __syncwarp();  // a warp reads what it wrote
  if (finite || band.shows_all(TileType::rows, TileType::columns)) {
    multiply_add<TileType>(tile, b, sums);
  } else {
    multiply_add_visible<TileType>(band, tile, b, sums);
  }
  __syncwarp();
}

}  // namespace strobe::kernels::cuda::portable
