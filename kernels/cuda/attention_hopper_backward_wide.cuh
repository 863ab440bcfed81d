// Attention backward on Hopper for head_dim over 128, where the sums for dkey and dvalue of 64 keys fill the registers
// of two warpgroups: one has S, P and dvalue, the other dP, dS and dkey. Additions to dquery of 64 keys at a time would
// be bound by the L2 cache, so a kernel of its own multiplies it (attention_hopper_backward_dquery.cuh), in any mode.
// That one comes first: the shorter blocks of keys fill the multiprocessors that its last ones leave.
// A softcap takes this way at any head_dim: the second warpgroup gets W = P (1 - tanh^2) instead of P, and dS is
// W (dP - delta). One that had dkey and dvalue would have no registers for both P and W.
#pragma once

#include "strobe/kernels/cuda/attention_hopper_backward_group.cuh"
#include "strobe/kernels/cuda/attention_hopper_backward_pieces.cuh"

namespace strobe::kernels::cuda::hopper {

// A tile has 64 queries or keys. Of `steps` times 16 columns, registers hold `key_steps` of the rows of keys and
// values, or in the kernel for dquery `query_steps` of those of queries, as operands for S and dP.
template <int columns_, int stages, int key_steps_, int query_steps_, bool capped_>
struct WideGradShape {
  static constexpr int columns = columns_;  // of tiles; head_dim may be less
  static constexpr int steps = columns / 16, key_steps = key_steps_, query_steps = query_steps_;
  static constexpr bool capped = capped_;  // with a softcap
  static constexpr bool sums_dquery = false, douts_apart = true;
  static constexpr bool publishes_block = false;  // its numbers would spill where each warpgroup keeps them all
  static constexpr int half_queries = 32, queries = 64, keys = 64;
  static constexpr int query_stages = stages, dout_stages = stages, weight_stages = 2;
  static constexpr int groups = 2, warps = 4 * groups, threads = 128 * groups, all_threads = threads + 128;
  static constexpr int key_bytes = keys * columns * 2, query_bytes = queries * columns * 2;
  static constexpr bool rows_as_terms = false;
  static constexpr int row_bytes = RowTable::columns * queries * 4, staging_bytes = 16 * 64 * 2;
  static constexpr int loader_registers = 24, group_registers = 240;
  // The kernel for dquery has 64 queries a warpgroup and rings of keys and values.
  static constexpr int block_queries = groups * queries;
  static constexpr int key_stages = columns > 192 ? 2 : 3, value_stages = columns > 192 ? 1 : 2;

  // Where operands begin in their tiles, in bytes, for step `step` of 16 summed elements; see GradShape.
  static constexpr int chunk_bytes(int rows) { return rows * 128; }
  static constexpr int query_columns_at(int, int step) { return step / 4 * chunk_bytes(queries) + step % 4 * 32; }
  static constexpr int query_rows_at(int, int step) { return step * 16 * 128; }
};

template <int columns, int stages, int key_steps, int query_steps, bool capped>
struct GradMemory<WideGradShape<columns, stages, key_steps, query_steps, capped>> {
  using Shape = WideGradShape<columns, stages, key_steps, query_steps, capped>;
  alignas(1024) char key[1][Shape::key_bytes];
  alignas(1024) char value[Shape::key_bytes];
  alignas(1024) char query[stages][Shape::query_bytes];
  alignas(1024) char dout[stages][Shape::query_bytes];
  alignas(128) uint4 weights[Shape::weight_stages][4][128];  // P or W, of each thread of a warpgroup
  alignas(128) float rows[stages][RowTable::columns * Shape::queries];
  alignas(128) char staging[Shape::warps][Shape::staging_bytes];  // dkey and dvalue on their way out
  uint64_t number_full, number_empty;
  uint64_t key_full[1], key_empty[1];
  uint64_t value_full, value_empty;
  uint64_t query_full[stages], query_empty[stages];
  uint64_t dout_full[stages], dout_empty[stages];
  uint64_t weights_full[Shape::weight_stages], weights_empty[Shape::weight_stages];
  int number;  // of the next block of keys
};

// Brings the tiles of dout. In one thread with those of queries, each would wait for the other's places.
template <class Shape>
__device__ inline void load_douts(const GradParams& params, GradMemory<Shape>& memory) {
  tma_prefetch(params.dout);
  Ring<Shape::dout_stages> douts;
  for_each_step(params, memory, [&](const Step<Shape>& step, uint32_t) {
    uint64_t* const full = &memory.dout_full[douts.stage];
    barrier_wait(&memory.dout_empty[douts.stage], douts.parity ^ 1);
    barrier_expect(full, Shape::query_bytes);
    load_tile<Shape>(memory.dout[douts.stage], params.dout, full, Shape::queries, step.first_query(), step.head,
                     step.block.queries);
    douts.advance();
  });
}

// How far a warpgroup has come in what outlasts a block of keys.
template <class Shape>
struct WideProgress {
  Ring<Shape::query_stages> queries;
  Ring<Shape::dout_stages> douts;
  Ring<Shape::weight_stages> weights;
  uint32_t keys_parity = 0;
};

// A score c tanh(x / c) of a pair, as softcap makes it, in units of log 2. Its log_sum needs no second part: lse is not
// rounded worse than the tanh.
struct Softcap {
  float inner, outer;

  __device__ explicit Softcap(const ScoreFunction<float>& score)
      : inner(score.sign * fminf(score.magnitude / score.softcap, std::numeric_limits<float>::max())),
        outer(score.softcap * log2e) {}

  // Makes x = product * inner the pair's P = 2^(score - log_sum), and returns W = P (1 - tanh^2): dS = W (dP - delta).
  __device__ float weigh(float& x, float log_sum) const {
    const float t = tanh_fast(x);
    x = exp2_fast(fmaf(outer, t, -log_sum));
    return x * fmaf(-t, t, 1.0f);
  }
};

// The 64 rows that a warpgroup owns of a tile, of which registers hold `held` steps: what is read from shared memory
// limits these kernels. Those are every second step, then the others, so that it is read evenly.
template <class T, class Shape, int head_dim, int held>
struct OwnRows {
  uint32_t rows[held == 0 ? 1 : held][4];

  __device__ void load(const char* tile) {
    const int lane = fresh_lane(), row = static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < held; ++i) {
      load_matrices(rows[i], shared_address(tile) +
                                 static_cast<uint32_t>(swizzled_offset(64, row, 2 * held_step(i) + lane / 16)));
    }
  }
  // result = these rows times those of another tile. The tiles lie so many bytes behind places in shared memory.
  __device__ void start_product(float (&result)[32], uint32_t own_place, int own_tile, uint32_t place, int tile) const {
    forget(result);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < head_dim / 16; ++step) {
      const uint64_t b = wgmma_operand(place, tile + Shape::query_columns_at(0, step));
      if (number(step) < held) {
        Wgmma<T, 64>::template registers<false>(result, rows[number(step)], b, step > 0);
      } else {
        Wgmma<T, 64>::tiles(result, wgmma_operand(own_place, own_tile + Shape::query_columns_at(0, step)), b, step > 0);
      }
    }
    wgmma_commit();
  }

 private:
  static constexpr int half = Shape::steps / 2;
  static constexpr int held_step(int i) { return i < half ? 2 * i : 2 * (i - half) + 1; }
  static constexpr int number(int step) { return step % 2 * half + step / 2; }
};

// What a warpgroup has of its 64 keys in registers, in the layout of wgmma. Scores are worked on by halves of the
// queries, so that the first half is multiplied beside the work on the second.
template <class T, class Shape, int head_dim>
struct WideGradient {
  static constexpr int half_sums = Shape::half_queries / 2, half_steps = Shape::half_queries / 16;
  using Memory = GradMemory<Shape>;
  float sum[head_dim / 2] = {};               // dvalue or dkey
  float scores[2 * half_sums];                // S or dP
  float first[half_sums], second[half_sums];  // P or dS
  uint32_t packed[2 * half_steps][4];         // P or dS as an operand
  uint32_t weights[2 * half_steps][4];        // P as dvalue sees it, or W, for dS
  OwnRows<T, Shape, head_dim, Shape::key_steps> keys;

  __device__ void start_scores(int key_tile, int query_tile, int stage) {
    keys.start_product(scores, memory_place(), key_tile,
                       memory_place() + static_cast<uint32_t>(stage * Shape::query_bytes / 16), query_tile);
  }
  // sum += half of the packed rows times a tile of dout or queries
  __device__ void start_sum(int tile, int stage, int half) {
    const uint32_t b = memory_place() + static_cast<uint32_t>(stage * Shape::query_bytes / 16);
    wgmma_fence();
#pragma unroll
    for (int step = half * half_steps; step < (half + 1) * half_steps; ++step) {
      Wgmma<T, head_dim>::registers(
          sum, packed[step], wgmma_operand(b, tile + Shape::query_rows_at(0, step), Shape::chunk_bytes(Shape::queries)),
          true);
    }
    wgmma_commit();
  }
  // P = 2^(S - log_sum), by row table (see GroupGradient). Of the second half the exponents, for now: in other
  // registers than S, as ptxas gives up where sums of a product last from one round to the next.
  __device__ void weigh(const float* rows, float scale2) {
    const int lane = fresh_lane();
    const float2 reference = reinterpret_cast<const float2*>(rows + RowTable::reference * Shape::queries)[lane];
    if (__any_sync(~0u, reference.x != 0 || reference.y != 0)) {
#pragma unroll
      for (int i = 0; i < 2 * half_sums; ++i) {
        const int query = i / 4 * 8 + 2 * (lane % 4) + i % 2;
        scores[i] = fmaf(scores[i], scale2, -rows[RowTable::reference * Shape::queries + query]);
      }
      scale2 = 1;
    }
    each_pair(rows + RowTable::log_sum * Shape::queries,
              [&](float score, float log_sum) { return fmaf(score, scale2, -log_sum); });
#pragma unroll
    for (float& x : first) x = exp2_fast(x);
  }
  __device__ void weigh_second() {
#pragma unroll
    for (float& x : second) x = exp2_fast(x);
  }
  // With a softcap all of the second half's work comes later; that it is scaled here keeps it out of the registers of
  // S.
  __device__ void part_scores(const Softcap& cap) {
#pragma unroll
    for (int i = 0; i < 2 * half_sums; ++i) (i < half_sums ? first[i] : second[i - half_sums]) = scores[i] * cap.inner;
  }
  // P of a half, and W as `weights`.
  __device__ void weigh_capped(float (&values)[half_sums], const float* rows, const Softcap& cap, int half) {
    const float* const log_sums = rows + RowTable::log_sum * Shape::queries + half * Shape::half_queries;
    const int lane = fresh_lane();
#pragma unroll
    for (int i = 0; i < half_sums / 2; ++i) {
      const float2 log_sum = reinterpret_cast<const float2*>(log_sums)[i / 2 * 4 + lane % 4];
      const float left = cap.weigh(values[2 * i], log_sum.x), right = cap.weigh(values[2 * i + 1], log_sum.y);
      weights[half * half_steps + i / 4][i % 4] = pack<T>(left, right);
    }
  }
  // dS = P (dP - delta). Of the second half dP - delta, for now.
  __device__ void differentiate(const float* rows) {
    each_pair(rows + RowTable::delta * Shape::queries, [&](float x, float delta) { return x - delta; });
    multiply_weights(first, 0);
  }
  __device__ void differentiate_second() { multiply_weights(second, 1); }

  // Packs half of P or dS, with 0 for pairs that the mask hides, if any of the tile.
  __device__ void pack_half(float (&values)[half_sums], const KeyBlock<Shape>& block, int first_query, int half) {
    if (block.is_cut(first_query, block.first_key)) {
      const int lane = fresh_lane();
      const int key = block.first_key + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4;
      hide(values, block.band, key, first_query + half * Shape::half_queries + 2 * (lane % 4));
    }
#pragma unroll
    for (int i = 0; i < half_sums / 2; ++i) {
      packed[half * half_steps + i / 4][i % 4] = pack<T>(values[2 * i], values[2 * i + 1]);
    }
  }

 private:
  // first and second = f(score, value of its query) by a column of the row table
  template <class F>
  __device__ void each_pair(const float* column, F&& f) {
    const int lane = fresh_lane();
#pragma unroll
    for (int n = 0; n < half_sums / 2; ++n) {
      const float2 two = reinterpret_cast<const float2*>(column)[4 * n + lane % 4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int i = 4 * n + c;
        (i < half_sums ? first[i] : second[i - half_sums]) = f(scores[i], c % 2 == 0 ? two.x : two.y);
      }
    }
  }
  __device__ void multiply_weights(float (&values)[half_sums], int half) {
#pragma unroll
    for (int i = 0; i < half_sums / 2; ++i) {
      const float2 weight = unpack<T>(weights[half * half_steps + i / 4][i % 4]);
      values[2 * i] *= weight.x;
      values[2 * i + 1] *= weight.y;
    }
  }
  // key: the lane's row h = 0; first: its first query.
  __device__ static void hide(float (&values)[half_sums], const Band& band, int key, int first) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = key + 8 * h, begin = row - band.upper - first;
      const int end = row < band.seq_len_k ? row - band.lower + 1 - first : 0;
#pragma unroll
      for (int n = 0; n < half_sums / 4; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (8 * n + c < begin || 8 * n + c >= end) values[4 * n + 2 * h + c] = 0;
        }
      }
    }
  }
};

// The first warpgroup: S^T = K Q^T, P, and dvalue += P dO.
template <class T, class Shape, int head_dim>
__device__ inline void sum_dvalue(const BackwardParams& params, GradMemory<Shape>& memory, const KeyBlock<Shape>& block,
                                  WideProgress<Shape>& progress, WideGradient<T, Shape, head_dim>& state) {
  using Memory = GradMemory<Shape>;
  const float scale2 = params.score.sign * params.score.magnitude * log2e;
  const Softcap cap(params.score);
  auto& [queries, douts, weights, keys_parity] = progress;
  Step<Shape> step(params, block);
  const auto start_scores = [&] {
    barrier_wait(&memory.query_full[queries.stage], queries.parity);
    state.start_scores(offsetof(Memory, key), offsetof(Memory, query), queries.stage);
  };
  const auto free_query = [&] {
    WholeWarp::arrive(&memory.query_empty[queries.stage]);
    queries.advance();
  };
  const auto weigh = [&] {
    wgmma_wait<0>();
    hold(state.scores);
    if constexpr (Shape::capped) {
      state.part_scores(cap);
      state.weigh_capped(state.first, memory.rows[queries.stage], cap, 0);
    } else {
      state.weigh(memory.rows[queries.stage], scale2);
    }
    state.pack_half(state.first, block, step.first_query(), 0);
    if constexpr (!Shape::capped) free_query();
  };
  barrier_wait(memory.key_full, keys_parity);
  keys_parity ^= 1;
  state.keys.load(memory.key[0]);
  if constexpr (Shape::key_steps == Shape::steps) WholeWarp::arrive(memory.key_empty);
  start_scores();
  weigh();
  const auto round = [&](auto last_round) {
    constexpr bool more = !decltype(last_round)::value;
    barrier_wait(&memory.dout_full[douts.stage], douts.parity);
    state.start_sum(offsetof(Memory, dout), douts.stage, 0);
    if constexpr (Shape::capped) {
      state.weigh_capped(state.second, memory.rows[queries.stage], cap, 1);
      free_query();
    } else {
      state.weigh_second();
    }
    state.pack_half(state.second, block, step.first_query(), 1);
    step.advance(params);
    barrier_wait(&memory.weights_empty[weights.stage], weights.parity ^ 1);
#pragma unroll
    for (int n = 0; n < 2 * state.half_steps; ++n) {
      const uint32_t(&four)[4] = Shape::capped ? state.weights[n] : state.packed[n];
      memory.weights[weights.stage][n][threadIdx.x] = uint4{four[0], four[1], four[2], four[3]};
    }
    WholeWarp::arrive(&memory.weights_full[weights.stage]);
    weights.advance();
    state.start_sum(offsetof(Memory, dout), douts.stage, 1);
    if constexpr (more) start_scores();
    wgmma_wait<more ? 1 : 0>();
    WholeWarp::arrive(&memory.dout_empty[douts.stage]);
    douts.advance();
    if constexpr (more) weigh();
    hold(state.sum);
  };
#pragma unroll 1
  for (int i = 1; i < block.steps; ++i) round(std::false_type());
  if constexpr (Shape::key_steps < Shape::steps) WholeWarp::arrive(memory.key_empty);
  round(std::true_type());
}

// The second one: dP^T = V dO^T, dS = P (dP - delta), and dkey += dS Q.
template <class T, class Shape, int head_dim>
__device__ inline void sum_dkey(const BackwardParams& params, GradMemory<Shape>& memory, const KeyBlock<Shape>& block,
                                WideProgress<Shape>& progress, WideGradient<T, Shape, head_dim>& state) {
  using Memory = GradMemory<Shape>;
  auto& [queries, douts, weights, keys_parity] = progress;
  Step<Shape> step(params, block);
  const auto start_scores = [&] {
    barrier_wait(&memory.dout_full[douts.stage], douts.parity);
    state.start_scores(offsetof(Memory, value), offsetof(Memory, dout), douts.stage);
  };
  const auto differentiate = [&] {
    wgmma_wait<0>();
    hold(state.scores);
    WholeWarp::arrive(&memory.dout_empty[douts.stage]);
    douts.advance();
    barrier_wait(&memory.query_full[queries.stage], queries.parity);  // row values come with the queries
    barrier_wait(&memory.weights_full[weights.stage], weights.parity);
#pragma unroll
    for (int n = 0; n < 2 * state.half_steps; ++n) {
      const uint4 four = memory.weights[weights.stage][n][threadIdx.x % 128];
      uint32_t(&to)[4] = state.weights[n];
      to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    }
    WholeWarp::arrive(&memory.weights_empty[weights.stage]);
    weights.advance();
    state.differentiate(memory.rows[queries.stage]);
    state.pack_half(state.first, block, step.first_query(), 0);
  };
  barrier_wait(&memory.value_full, keys_parity);
  keys_parity ^= 1;
  state.keys.load(memory.value);
  if constexpr (Shape::key_steps == Shape::steps) WholeWarp::arrive(&memory.value_empty);
  start_scores();
  differentiate();
  const auto round = [&](auto last_round) {
    constexpr bool more = !decltype(last_round)::value;
    state.start_sum(offsetof(Memory, query), queries.stage, 0);
    state.differentiate_second();
    state.pack_half(state.second, block, step.first_query(), 1);
    step.advance(params);
    state.start_sum(offsetof(Memory, query), queries.stage, 1);
    if constexpr (more) start_scores();
    wgmma_wait<more ? 1 : 0>();
    WholeWarp::arrive(&memory.query_empty[queries.stage]);
    queries.advance();
    if constexpr (more) differentiate();
    hold(state.sum);
  };
#pragma unroll 1
  for (int i = 1; i < block.steps; ++i) round(std::false_type());
  if constexpr (Shape::key_steps < Shape::steps) WholeWarp::arrive(&memory.value_empty);
  round(std::true_type());
}

// One of the two warpgroups, of all blocks of keys.
template <class T, class Shape, int head_dim, bool is_dkey>
__device__ inline void sum_blocks(const GradParams& params, GradMemory<Shape>& memory) {
  WideProgress<Shape> progress;
  for_each_block(params, memory, WholeWarp(), [&](const KeyBlock<Shape>& block) {
    const BackwardParams& base = params.base;
    const AttentionArgs& args = base.grad.forward;
    WideGradient<T, Shape, head_dim> state;
    if (block.piece == Piece::second) fetch_sums<Shape>(base, block.cut, state.sum);
    if (block.steps > 0) {
      if constexpr (is_dkey) {
        sum_dkey<T, Shape, head_dim>(base, memory, block, progress, state);
      } else {
        sum_dvalue<T, Shape, head_dim>(base, memory, block, progress, state);
      }
    }
    if (block.piece == Piece::first) return keep_sums<Shape>(base, block.cut, state.sum);
    const int warp = static_cast<int>(threadIdx.x) / 32, first_row = block.first_key + warp % 4 * 16;
    const float scale = is_dkey ? static_cast<float>(args.softmax_scale) : 1;
    store_sum<T, Shape, head_dim>(
        state.sum, scale, memory.staging[warp],
        key_view<T>(args, is_dkey ? base.grad.dkey : base.grad.dvalue, SequencePair(args, block.batch), block.kv_head,
                    is_dkey ? base.dkey_vectors : base.dvalue_vectors),
        first_row, fresh_lane());
  });
}

template <class T, class Shape, int head_dim>
__global__ void __launch_bounds__(Shape::all_threads, 1)
    attention_backward_keys(const __grid_constant__ GradParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  auto& memory = *reinterpret_cast<GradMemory<Shape>*>(shared);
  if (threadIdx.x == 0) {
    const auto init = [](auto& barriers, int arrivals) {
      for (uint64_t& barrier : barriers) barrier_init(&barrier, arrivals);
    };
    init(memory.query_full, 1);
    init(memory.query_empty, Shape::warps);
    init(memory.dout_full, 1);
    init(memory.dout_empty, Shape::warps);
    init(memory.weights_full, 4);
    init(memory.weights_empty, 4);
    for (uint64_t* one : {&memory.number_full, memory.key_full, &memory.value_full}) barrier_init(one, 1);
    for (uint64_t* one : {memory.key_empty, &memory.value_empty}) barrier_init(one, 4);
    barrier_init(&memory.number_empty, 32 * Shape::warps + 2);
    barrier_init_fence();
  }
  __syncthreads();
  const int group = uniform(static_cast<int>(threadIdx.x) / 128);
  if (group == Shape::groups) {
    give_registers<Shape::loader_registers>();
    const int role = static_cast<int>(threadIdx.x) - Shape::threads;
    if (role == 0) load_queries<Shape>(params, memory);
    if (role == 32) load_keys<Shape>(params, memory);
    if (role == 64) load_douts<Shape>(params, memory);
  } else {
    take_registers<Shape::group_registers>();
    if (group == 0) {
      sum_blocks<T, Shape, head_dim, false>(params, memory);
    } else {
      sum_blocks<T, Shape, head_dim, true>(params, memory);
    }
  }
  // Who waits for this kernel takes the one for dquery to be over.
  if (blockIdx.x == 0) strobe::cuda::wait_for_earlier_kernels();
#endif
}

}  // namespace strobe::kernels::cuda::hopper
