// Attention backward on Hopper for head_dim over 128 or a softcap: dquery of 128 queries of a head, 64 a warpgroup.
// Sums stay in registers while the keys and values that these queries see pass by.
#pragma once

#include "strobe/kernels/cuda/attention_hopper_backward_wide.cuh"

namespace strobe::kernels::cuda::hopper {

template <class Shape>
struct DqueryMemory {
  alignas(1024) char query[Shape::groups][Shape::query_bytes];  // then dquery on its way out
  alignas(1024) char dout[Shape::groups][Shape::query_bytes];
  alignas(1024) char key[Shape::key_stages][Shape::key_bytes];
  alignas(1024) char value[Shape::value_stages][Shape::key_bytes];
  uint64_t query_full, dout_full;
  uint64_t key_full[Shape::key_stages], key_empty[Shape::key_stages];
  uint64_t value_full[Shape::value_stages], value_empty[Shape::value_stages];
};

// Some queries and the key tiles that they see, from the last one down. Heads come one after the other, so that few
// keys and values are read at a time. The last queries come first: under a causal mask they have most to do.
template <class Shape>
struct QueryBlock {
  int batch, head;
  int first_query, seq_len_q;
  Band band;
  int begin, end;

  __device__ QueryBlock(const BackwardParams& params, int number) {
    const AttentionArgs& args = params.grad.forward;
    const int heads = static_cast<int>(args.num_heads);
    const int blocks = (static_cast<int>(args.seq_len_q) + Shape::block_queries - 1) / Shape::block_queries;
    const int matrix = number / blocks;
    batch = matrix / heads;
    head = matrix % heads;
    first_query = (blocks - 1 - number % blocks) * Shape::block_queries;
    const SequencePair pair(args, batch);
    seq_len_q = static_cast<int>(pair.seq_len_q);
    band = Band(pair);
    begin = first_tile(first_query);
    end = first_query >= seq_len_q ? begin
                                   : max(past_tile(min(first_query + Shape::block_queries, seq_len_q) - 1), begin);
  }
  __device__ int first_tile(int query) const { return band.begin(query) / Shape::keys; }
  __device__ int past_tile(int query) const { return (max(band.end(query), 0) + Shape::keys - 1) / Shape::keys; }
};

template <class Shape>
__device__ inline void load_block(const GradParams& params, DqueryMemory<Shape>& memory,
                                  const QueryBlock<Shape>& block) {
  if (block.begin >= block.end) return;
  const SequencePair pair(params.base.grad.forward, block.batch);
  const MapPlace queries = query_place(params, pair), key_rows = key_place(params, pair);
  // Only groups that have queries get some: a box must begin in the sequence (sequence_map).
  const int tiles_left = (block.seq_len_q - block.first_query + Shape::queries - 1) / Shape::queries;
  const int groups = min(Shape::groups, tiles_left);
  const auto load_queries = [&](char(&tiles)[Shape::groups][Shape::query_bytes], const CUtensorMap& map,
                                uint64_t* full) {
    barrier_expect(full, groups * Shape::query_bytes);
    for (int group = 0; group < groups; ++group) {
      load_tile<Shape>(tiles[group], map, full, Shape::queries, block.first_query + group * Shape::queries, block.head,
                       queries);
    }
  };
  Ring<Shape::key_stages> keys;
  Ring<Shape::value_stages> values;
  const int kv_head = block.head / params.group_heads;
  const auto load = [&](auto& ring, auto& tiles, const CUtensorMap& map, uint64_t* full, uint64_t* empty, int tile) {
    barrier_wait(&empty[ring.stage], ring.parity ^ 1);
    barrier_expect(&full[ring.stage], Shape::key_bytes);
    load_tile<Shape>(tiles[ring.stage], map, &full[ring.stage], Shape::keys, tile * Shape::keys, kv_head, key_rows);
    ring.advance();
  };
  load_queries(memory.query, params.query, &memory.query_full);
  for (int tile = block.end - 1; tile >= block.begin; --tile) {
    load(keys, memory.key, params.key, memory.key_full, memory.key_empty, tile);
    if (tile == block.end - 1) load_queries(memory.dout, params.dout, &memory.dout_full);
    load(values, memory.value, params.value, memory.value_full, memory.value_empty, tile);
  }
}

// What a warpgroup has of its 64 queries in registers, in the layout of wgmma.
template <class T, class Shape, int head_dim>
struct DquerySums {
  using Memory = DqueryMemory<Shape>;
  static constexpr int sums = Shape::keys / 2, half_steps = Shape::keys / 32;
  float dquery[head_dim / 2] = {};
  float scores[sums], dscores[sums];
  uint32_t packed[Shape::keys / 16][4];      // dS
  float log_sum[2], delta[2], reference[2];  // of the lane's rows
  OwnRows<T, Shape, head_dim, Shape::query_steps> queries;
  OwnRows<T, Shape, head_dim, 0> douts;

  // S = Q K^T, dP = dO V^T
  __device__ void start_scores(int group, int stage) {
    queries.start_product(scores, own_place(group), offsetof(Memory, query), key_place(stage), offsetof(Memory, key));
  }
  __device__ void start_dscores(int group, int stage) {
    douts.start_product(dscores, own_place(group), offsetof(Memory, dout), key_place(stage), offsetof(Memory, value));
  }
  // dquery += dS K of half of the keys
  __device__ void start_dquery(int stage, int half) {
    const uint32_t b = key_place(stage);
    wgmma_fence();
#pragma unroll
    for (int step = half * half_steps; step < (half + 1) * half_steps; ++step) {
      const int at = static_cast<int>(offsetof(Memory, key)) + Shape::query_rows_at(0, step);
      Wgmma<T, head_dim>::registers(dquery, packed[step], wgmma_operand(b, at, Shape::chunk_bytes(Shape::keys)), true);
    }
    wgmma_commit();
  }

  __device__ void load_rows(const RowTable& table, int64_t tile, int first_row) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float* const entry = table.at(tile, first_row + 8 * h);
      log_sum[h] = entry[RowTable::log_sum * Shape::queries];
      delta[h] = entry[RowTable::delta * Shape::queries];
      reference[h] = entry[RowTable::reference * Shape::queries];
    }
  }
  // P = 2^(S - log_sum), or W with a softcap
  __device__ void weigh(const ScoreFunction<float>& score) {
    if constexpr (Shape::capped) {
      const Softcap cap(score);
#pragma unroll
      for (int i = 0; i < sums; ++i) {
        float x = scores[i] * cap.inner;
        scores[i] = cap.weigh(x, log_sum[i / 2 % 2]);
      }
      return;
    }
    float scale2 = score.sign * score.magnitude * log2e;
    if (__any_sync(~0u, reference[0] != 0 || reference[1] != 0)) {
#pragma unroll
      for (int i = 0; i < sums; ++i) scores[i] = fmaf(scores[i], scale2, -reference[i / 2 % 2]);
      scale2 = 1;
    }
#pragma unroll
    for (int i = 0; i < sums; ++i) scores[i] = exp2_fast(fmaf(scores[i], scale2, -log_sum[i / 2 % 2]));
  }
  // dS = P (dP - delta) of half of the keys, packed
  __device__ void differentiate(int half) {
#pragma unroll
    for (int i = half * sums / 4; i < (half + 1) * sums / 4; ++i) {
      const float row_delta = delta[i % 2];
      packed[i / 4][i % 4] =
          pack<T>(scores[2 * i] * (dscores[2 * i] - row_delta), scores[2 * i + 1] * (dscores[2 * i + 1] - row_delta));
    }
  }
  // P and dP become 0 for pairs outside of the band. query: the lane's row h = 0.
  __device__ void hide(const Band& band, int query, int first_key, int lane) {
    const int first = first_key + 2 * (lane % 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int begin = band.begin(query + 8 * h) - first, end = band.end(query + 8 * h) - first;
#pragma unroll
      for (int n = 0; n < sums / 4; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (8 * n + c < begin || 8 * n + c >= end) scores[4 * n + 2 * h + c] = dscores[4 * n + 2 * h + c] = 0;
        }
      }
    }
  }

 private:
  __device__ static uint32_t own_place(int group) {
    return memory_place() + static_cast<uint32_t>(group * Shape::query_bytes / 16);
  }
  __device__ static uint32_t key_place(int stage) {
    return memory_place() + static_cast<uint32_t>(stage * Shape::key_bytes / 16);
  }
};

// One warpgroup: S, then dP beside the exponentials of S, then dquery before the next S.
template <class T, class Shape, int head_dim>
__device__ inline void multiply_block(const GradParams& params, DqueryMemory<Shape>& memory,
                                      const QueryBlock<Shape>& block, int group) {
  const BackwardParams& base = params.base;
  const AttentionArgs& args = base.grad.forward;
  const SequencePair pair(args, block.batch);
  const int seq_len_q = block.seq_len_q, first_query = block.first_query + group * Shape::queries;
  if (first_query >= seq_len_q && block.begin >= block.end) return;
  const int warp = static_cast<int>(threadIdx.x) % 128 / 32;
  DquerySums<T, Shape, head_dim> state;
  Ring<Shape::key_stages> keys;
  Ring<Shape::value_stages> values;
  const int last_query = min(first_query + Shape::queries, seq_len_q) - 1;
  const int begin = first_query < seq_len_q ? block.first_tile(first_query) : block.end;
  const int end = first_query < seq_len_q ? min(block.past_tile(last_query), block.end) : block.end;
  int tile = block.end - 1;
  // Tiles that only the other warpgroup's queries see.
  const auto pass = [&](int until) {
#pragma unroll 1
    for (; tile >= until; --tile) {
      barrier_wait(&memory.key_full[keys.stage], keys.parity);
      WholeWarp::arrive(&memory.key_empty[keys.stage]);
      keys.advance();
      barrier_wait(&memory.value_full[values.stage], values.parity);
      WholeWarp::arrive(&memory.value_empty[values.stage]);
      values.advance();
    }
  };
  const auto round = [&](auto last_round) {
    constexpr bool more = !decltype(last_round)::value;
    barrier_wait(&memory.value_full[values.stage], values.parity);
    state.start_dscores(group, values.stage);
    state.weigh(base.score);
    wgmma_wait<0>();
    hold(state.dscores);
    WholeWarp::arrive(&memory.value_empty[values.stage]);
    values.advance();
    const int first_key = tile * Shape::keys;
    if (block.band.begin(first_query + Shape::queries - 1) > first_key ||
        first_key + Shape::keys > block.band.end(first_query)) {
      const int lane = fresh_lane();
      state.hide(block.band, first_query + 16 * warp + lane / 4, first_key, lane);
    }
    state.differentiate(0);
    state.start_dquery(keys.stage, 0);
    state.differentiate(1);
    state.start_dquery(keys.stage, 1);
    uint64_t* const key_empty = &memory.key_empty[keys.stage];
    keys.advance();
    if constexpr (more) {
      barrier_wait(&memory.key_full[keys.stage], keys.parity);
      state.start_scores(group, keys.stage);
    }
    wgmma_wait<more ? 1 : 0>();
    WholeWarp::arrive(key_empty);
    if constexpr (more) {
      wgmma_wait<0>();
      hold(state.scores);
    }
    hold(state.dquery);
  };
  if (block.begin < block.end) {
    barrier_wait(&memory.query_full, 0);
    barrier_wait(&memory.dout_full, 0);
    if (begin < end) {
      const int lane = fresh_lane();
      state.load_rows(base.table, base.table.first_tile(args, pair, block.head) + first_query / Shape::queries,
                      16 * warp + lane / 4);
      state.queries.load(memory.query[group]);
      pass(end);
      barrier_wait(&memory.key_full[keys.stage], keys.parity);
      state.start_scores(group, keys.stage);
      wgmma_wait<0>();
      hold(state.scores);
#pragma unroll 1
      for (; tile > begin; --tile) round(std::false_type());
      round(std::true_type());
      --tile;
    }
    pass(block.begin);
  }
  store_sum<T, Shape, head_dim>(state.dquery, static_cast<float>(args.softmax_scale),
                                memory.query[group] + warp * Shape::staging_bytes,
                                query_view<T>(args, base.grad.dquery, pair, block.head, base.dquery_vectors),
                                first_query + 16 * warp, fresh_lane());
}

template <class T, class Shape, int head_dim>
__global__ void __launch_bounds__(Shape::all_threads, 1)
    attention_backward_dquery(const __grid_constant__ GradParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  auto& memory = *reinterpret_cast<DqueryMemory<Shape>*>(shared);
  if (threadIdx.x == 0) {
    const auto init = [](auto& barriers, int arrivals) {
      for (uint64_t& barrier : barriers) barrier_init(&barrier, arrivals);
    };
    init(memory.key_full, 1);
    init(memory.key_empty, Shape::warps);
    init(memory.value_full, 1);
    init(memory.value_empty, Shape::warps);
    barrier_init(&memory.query_full, 1);
    barrier_init(&memory.dout_full, 1);
    barrier_init_fence();
  }
  __syncthreads();
  strobe::cuda::wait_for_earlier_kernels();
  strobe::cuda::let_next_kernel_start();  // the one for keys needs what this one has waited for
  const int group = uniform(static_cast<int>(threadIdx.x) / 128);
  const QueryBlock<Shape> block(params.base, static_cast<int>(blockIdx.x));
  if (group == Shape::groups) {
    give_registers<Shape::loader_registers>();
    if (threadIdx.x == Shape::threads) load_block<Shape>(params, memory, block);
  } else {
    take_registers<Shape::group_registers>();
    multiply_block<T, Shape, head_dim>(params, memory, block, group);
  }
#endif
}

}  // namespace strobe::kernels::cuda::hopper
