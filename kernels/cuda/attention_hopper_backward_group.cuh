// What the two warpgroups of Hopper's attention backward do that multiply.
#pragma once

#include "strobe/kernels/cuda/attention_hopper_backward.cuh"

namespace strobe::kernels::cuda::hopper {

// Where shared memory begins, / 16, computed anew where it is used and not kept in registers from before.
__device__ inline uint32_t memory_place() {
  extern __shared__ __align__(1024) char shared[];
  uint32_t place = shared_address(shared) >> 4 & 0x3fff;
  asm volatile("" : "+r"(place));
  return place;
}

// The two floats that were packed.
template <class T>
__device__ inline float2 unpack(uint32_t packed) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
  }
  float2 two;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}\n"
      : "=f"(two.x), "=f"(two.y)
      : "r"(packed));
  return two;
}

// What a warpgroup has of its 64 keys in registers, in the layout of wgmma: of a lane's rows (keys) h = 0 and 1 the
// columns 8 n + 2 (lane % 4) + c stand at 4 n + 2 h + c.
template <class T, class Shape, int head_dim>
struct GroupGradient {
  static constexpr int head_steps = head_dim / 16, part_steps = Shape::part_queries / 16;
  static constexpr int sums = Shape::part_queries / 2;
  using Memory = GradMemory<Shape>;
  float dkey[head_dim / 2] = {}, dvalue[head_dim / 2] = {};
  float scores[sums];   // S, then P
  float dscores[sums];  // dP, then dS
  float dquery[32];
  uint32_t packed[part_steps][4];                     // P, then dS
  uint32_t key[head_steps][4], value[head_steps][4];  // Shape::keys_in_registers

  // The warp's 16 rows of a tile as operands.
  __device__ static void load_rows(uint32_t (&rows)[head_steps][4], const char* tile, int first_row, int lane) {
#pragma unroll
    for (int step = 0; step < head_steps; ++step) {
      load_matrices(rows[step], shared_address(tile) + static_cast<uint32_t>(swizzled_offset(
                                                           Shape::keys, first_row + lane % 16, 2 * step + lane / 16)));
    }
  }
  // result = rows of keys or values times those of queries or dout, which lie `key_tile` and `query_tile` bytes behind
  // the start of shared memory.
  __device__ static void start_product(float (&result)[sums], const uint32_t (&rows)[head_steps][4], int key_tile,
                                       int query_tile, int group, int stage, int part) {
    const uint32_t a = memory_place() + static_cast<uint32_t>(Shape::key_columns_at(group, 0) / 16);
    const uint32_t b = memory_place() + static_cast<uint32_t>(stage * Shape::query_bytes / 16);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < head_steps; ++step) {
      const uint64_t b_step = wgmma_operand(b, query_tile + Shape::query_columns_at(part, step));
      if constexpr (Shape::keys_in_registers) {
        Wgmma<T, Shape::part_queries>::template registers<false>(result, rows[step], b_step, step > 0);
      } else {
        Wgmma<T, Shape::part_queries>::tiles(result, wgmma_operand(a, key_tile + Shape::key_columns_at(0, step)),
                                             b_step, step > 0);
      }
    }
    wgmma_commit();
  }
  // S = K Q^T, dP = V dO^T
  __device__ void start_scores(int stage, int group, int part) {
    start_product(scores, key, offsetof(Memory, key), offsetof(Memory, query), group, stage, part);
  }
  __device__ void start_dscores(int stage, int group, int part) {
    start_product(dscores, value, offsetof(Memory, value), offsetof(Memory, dout), group, stage, part);
  }
  // result += rows times a tile
  __device__ static void start_sum(float (&result)[head_dim / 2], const uint32_t (&rows)[part_steps][4], int tile,
                                   int stage, int part) {
    const uint32_t b = memory_place() + static_cast<uint32_t>(stage * Shape::query_bytes / 16);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < part_steps; ++step) {
      const uint64_t b_step =
          wgmma_operand(b, tile + Shape::query_rows_at(part, step), Shape::chunk_bytes(Shape::queries));
      Wgmma<T, head_dim>::registers(result, rows[step], b_step, true);
    }
    wgmma_commit();
  }
  // dvalue += P dO, dkey += dS Q
  __device__ void start_dvalue(int stage, int part) { start_sum(dvalue, packed, offsetof(Memory, dout), stage, part); }
  __device__ void start_dkey(int stage, int part) { start_sum(dkey, packed, offsetof(Memory, query), stage, part); }
  // dquery = dS K
  __device__ void start_dquery(int stage, int group) {
    const uint32_t a =
        memory_place() + static_cast<uint32_t>((stage * Shape::score_bytes + Shape::score_columns_at(group, 0)) / 16);
    const uint32_t b = memory_place() + static_cast<uint32_t>(Shape::key_rows_at(group, 0) / 16);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Shape::keys / 16; ++step) {
      Wgmma<T, 64>::template tiles<true>(
          dquery, wgmma_operand(a, offsetof(Memory, scores) + Shape::score_columns_at(0, step)),
          wgmma_operand(b, offsetof(Memory, key) + Shape::key_rows_at(0, step)), step > 0);
    }
    wgmma_commit();
  }

  // P = 2^(S - log_sum), by row table. rows: those of the 64 queries.
  __device__ void weigh(const float* rows, float scale2, int lane) {
    const float2 reference = reinterpret_cast<const float2*>(rows + RowTable::reference * Shape::queries)[lane];
    if (__any_sync(~0u, reference.x != 0 || reference.y != 0)) {
#pragma unroll
      for (int i = 0; i < sums; ++i) {
        scores[i] = fmaf(scores[i], scale2, -rows[RowTable::reference * Shape::queries + column(i, lane)]);
      }
      scale2 = 1;
    }
#pragma unroll
    for (int n = 0; n < sums / 4; ++n) {
      const float2 log_sum = at(rows + RowTable::log_sum * Shape::queries, n, lane);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        scores[4 * n + 2 * h] = exp2_fast(fmaf(scores[4 * n + 2 * h], scale2, -log_sum.x));
        scores[4 * n + 2 * h + 1] = exp2_fast(fmaf(scores[4 * n + 2 * h + 1], scale2, -log_sum.y));
      }
    }
  }
  // dS = P (dP - delta), P as dvalue sees it
  __device__ void differentiate(const float* rows, int lane) {
#pragma unroll
    for (int n = 0; n < sums / 4; ++n) {
      const float2 delta = at(rows + RowTable::delta * Shape::queries, n, lane);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 weight = unpack<T>(packed[n / 2][n % 2 * 2 + h]);
        float* const two = dscores + 4 * n + 2 * h;
        two[0] = weight.x * (two[0] - delta.x);
        two[1] = weight.y * (two[1] - delta.y);
      }
    }
  }
  // 0 for pairs outside of the band. key: the lane's row h = 0; first_query: of the 64.
  __device__ static void hide(float (&values)[sums], const Band& band, int key, int first_query, int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = key + 8 * h, first = first_query + 2 * (lane % 4);
      const int begin = row - band.upper - first;
      const int end = row < band.seq_len_k ? row - band.lower + 1 - first : 0;
#pragma unroll
      for (int n = 0; n < sums / 4; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (8 * n + c < begin || 8 * n + c >= end) values[4 * n + 2 * h + c] = 0;
        }
      }
    }
  }
  __device__ static void pack_all(uint32_t (&packed)[part_steps][4], const float (&values)[sums]) {
#pragma unroll
    for (int i = 0; i < sums / 2; ++i) packed[i / 4][i % 4] = pack<T>(values[2 * i], values[2 * i + 1]);
  }

 private:
  __device__ static int column(int i, int lane) { return i / 4 * 8 + 2 * (lane % 4) + i % 2; }
  __device__ static float2 at(const float* column_of_table, int n, int lane) {
    return reinterpret_cast<const float2*>(column_of_table)[4 * n + lane % 4];
  }
};

// How far a warpgroup has come in what outlasts a block of keys.
template <class Shape>
struct GroupProgress {
  Ring<Shape::query_stages> queries;
  Ring<Shape::dout_stages> douts;
  uint32_t keys_parity = 0;
  int rounds = 0;
};

// Where dquery of a query tile is summed, and whose turn it is to add.
struct QueryPlace {
  int place, turn;
};

// Adds what a warpgroup has of dquery of a query tile.
template <class Shape>
__device__ inline void add_dquery(const BackwardParams& params, GradMemory<Shape>& memory, const QueryPlace& at,
                                  uint32_t parity, const float (&dquery)[32]) {
  const auto four = [&](int n) {
    return float4{dquery[4 * n], dquery[4 * n + 1], dquery[4 * n + 2], dquery[4 * n + 3]};
  };
  if constexpr (Shape::bulk) {
    float4* const to = reinterpret_cast<float4*>(memory.dquery) + threadIdx.x;
    barrier_wait(&memory.dquery_empty, parity ^ 1);
#pragma unroll
    for (int n = 0; n < 8; ++n) to[n * Shape::threads] = four(n);
    fence_async_proxy();
    WholeWarp::arrive(&memory.dquery_full);
    return;
  }
  float* const to = params.dquery + int64_t{at.place} * Shape::dquery_floats + lane_floats * threadIdx.x;
  if (params.deterministic) barrier_wait(&memory.turn_open, parity);
  if (params.deterministic && at.turn == 0) {
#pragma unroll
    for (int n = 0; n < 8; ++n) reinterpret_cast<float4*>(to)[n * Shape::threads] = four(n);
  } else {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float4 x = four(n);
      add_to<Shape::threads>(to, n, {x.x, x.y, x.z, x.w});
    }
  }
  if (params.deterministic) WholeWarp::arrive(&memory.turn_used);
}

// One warpgroup: its 64 keys of a block that some query sees. Products are started before the results of earlier ones
// are worked on, so that the tensor cores are not idle: dS is computed beside dvalue and the next S, what leaves for
// dquery beside dkey, exponentials beside dkey and the next dP. dquery is that of the round before, so that neither
// warpgroup waits for the other's dS; in the first round it is made of what lies there, and not used, since ptxas takes
// no product within an if. A round begins after the exponentials, when no product is under way: ptxas gives up where
// products last from one round of a loop to the next.
template <class T, class Shape, int head_dim>
__device__ inline void multiply_tiles(const GradParams& params, GradMemory<Shape>& memory, const KeyBlock<Shape>& block,
                                      int group, GroupProgress<Shape>& progress,
                                      GroupGradient<T, Shape, head_dim>& state) {
  const BackwardParams& base = params.base;
  const float scale2 = base.score.magnitude * log2e;
  auto& [queries, douts, keys_parity, rounds] = progress;
  Step<Shape> step(base, block);
  const auto first_query = [&](int part) { return step.first_query() + part * Shape::part_queries; };
  const auto is_cut = [&](int part) {
    return first_query(part) < block.first_uncut || first_query(part) > block.last_uncut;
  };
  const auto rows = [&](int part) { return memory.rows[queries.stage] + part * Shape::part_queries; };
  const auto hide = [&](float(&values)[Shape::part_queries / 2], int part) {
    const int lane = fresh_lane();
    const int warp = static_cast<int>(threadIdx.x) % 128 / 32;
    state.hide(values, block.band, block.first_key + Shape::group_keys * group + 16 * warp + lane / 4,
               first_query(part), lane);
  };
  const auto weigh = [&](int part) {
    state.weigh(rows(part), scale2, fresh_lane());
    if (is_cut(part)) hide(state.scores, part);
  };

  barrier_wait(&memory.key_full, keys_parity);
  if (base.score.sign != 1) {
    T* const elements = reinterpret_cast<T*>(memory.key);
    for (int i = static_cast<int>(threadIdx.x); i < Shape::key_bytes / 2; i += Shape::threads) {
      elements[i] = T(static_cast<float>(elements[i]) * base.score.sign);
    }
    fence_async_proxy();
    barrier_groups<Shape::threads>();
  }
  const int tile_row = static_cast<int>(threadIdx.x) / 32 * 16;
  if constexpr (Shape::keys_in_registers) state.load_rows(state.key, memory.key, tile_row, fresh_lane());
  barrier_wait(&memory.query_full[queries.stage], queries.parity);
  state.start_scores(queries.stage, group, 0);
  barrier_wait(&memory.value_full, keys_parity);
  keys_parity ^= 1;
  if constexpr (Shape::keys_in_registers) state.load_rows(state.value, memory.value, tile_row, fresh_lane());
  barrier_wait(&memory.dout_full[douts.stage], douts.parity);
  state.start_dscores(douts.stage, group, 0);
  wgmma_wait<1>();
  hold(state.scores);
  weigh(0);
  state.pack_all(state.packed, state.scores);
  wgmma_wait<0>();
  hold(state.dscores);

  QueryPlace before = {};
  const auto round = [&](int i, auto last_round) {
    constexpr bool more = !decltype(last_round)::value;
    const int score_stage = rounds % Shape::score_stages;
    Ring<Shape::query_stages> next = queries;
    next.advance();
#pragma unroll
    for (int part = 0; part < Shape::parts; ++part) {
      const bool last_part = part + 1 == Shape::parts;
      state.start_dvalue(douts.stage, part);
      if (!last_part) {
        state.start_scores(queries.stage, group, part + 1);
      } else if (more) {
        barrier_wait(&memory.query_full[next.stage], next.parity);
        state.start_scores(next.stage, group, 0);
      } else {
        wgmma_commit();
      }
      state.differentiate(rows(part), fresh_lane());
      if (is_cut(part)) hide(state.dscores, part);
      wgmma_wait<1>();
      if (last_part) {
        WholeWarp::arrive(&memory.dout_empty[douts.stage]);
        douts.advance();
      }
      state.pack_all(state.packed, state.dscores);
      if (i > 0 && part == 0) barrier_wait(&memory.scores_full, (rounds ^ 1) & 1);
      const uint32_t store =
          shared_address(memory.scores[score_stage]) +
          static_cast<uint32_t>(Shape::score_store_at(group, static_cast<int>(threadIdx.x) % 128 / 32, fresh_lane()));
#pragma unroll
      for (int n = 0; n < state.part_steps; ++n) {
        store_transposed(store + static_cast<uint32_t>(Shape::score_step(part, n)), state.packed[n]);
      }
      if (last_part) fence_async_proxy();
      if (part == 0) state.start_dquery(score_stage ^ 1, group);
      state.start_dkey(queries.stage, part);
      if (part == 0) {
        wgmma_wait<1>();
        hold(state.dquery);
      }
      if (last_part) WholeWarp::arrive(&memory.scores_full);
      if (i > 0 && part == 0) add_dquery<Shape>(base, memory, before, (rounds ^ 1) & 1, state.dquery);
      if (last_part) {
        ++rounds;
        if (!more) break;
      }
      uint64_t* const query_empty = &memory.query_empty[queries.stage];
      if (last_part) {
        queries = next;
        before = {step.place, step.turn()};
        step.advance(base);
        barrier_wait(&memory.dout_full[douts.stage], douts.parity);
      }
      state.start_dscores(douts.stage, group, last_part ? 0 : part + 1);
      wgmma_wait<2>();
      hold(state.scores);
      weigh(last_part ? 0 : part + 1);
      wgmma_wait<1>();
      if (last_part) WholeWarp::arrive(query_empty);
      state.pack_all(state.packed, state.scores);
      wgmma_wait<0>();
      hold(state.dscores);
      hold(state.dkey);
      hold(state.dvalue);
    }
  };
#pragma unroll 1
  for (int i = 0; i < block.steps - 1; ++i) round(i, std::false_type());
  round(block.steps - 1, std::true_type());
  wgmma_wait<0>();
  hold(state.dkey);
  hold(state.dvalue);
  WholeWarp::arrive(&memory.query_empty[queries.stage]);
  queries.advance();
  barrier_wait(&memory.scores_full, (rounds ^ 1) & 1);
  state.start_dquery((rounds ^ 1) & 1, group);
  wgmma_wait<0>();
  hold(state.dquery);
  WholeWarp::arrive(&memory.keys_empty);
  add_dquery<Shape>(base, memory, {step.place, step.turn()}, (rounds ^ 1) & 1, state.dquery);
}

// Writes a warp's 16 rows of dkey or dvalue, from first_row on, by way of its part of shared memory.
template <class T, class Shape, int head_dim>
__device__ inline void store_sum(const float (&sum)[head_dim / 2], float scale, char* staging, MatrixView<T> target,
                                 int first_row, int lane) {
  using Tile = SwizzledTile<64>;
  const uint32_t stores = shared_address(staging) + Tile::stores(lane);
#pragma unroll
  for (int first = 0; first < head_dim / 8; first += 8) {
#pragma unroll
    for (int n = first; n < first + 8 && n < head_dim / 8; n += 2) {
      float two[2][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) two[i / 4][i % 4] = sum[4 * n + i] * scale;
      Tile::template store_square<T>(stores, 0, n - first, two[0], two[1]);
    }
    __syncwarp();
    store_rows<T, 64, 16>(staging, 0, target, first_row, lane);
    __syncwarp();
    target.data += 64;
    target.head_dim -= 64;
  }
}

// One warpgroup, of all blocks of keys.
template <class T, class Shape, int head_dim>
__device__ inline void multiply_blocks(const GradParams& params, GradMemory<Shape>& memory, int group) {
  GroupProgress<Shape> progress;
  for_each_block(params, memory, WholeWarp(), [&](const KeyBlock<Shape>& block) {
    GroupGradient<T, Shape, head_dim> state;
    if (block.steps > 0) multiply_tiles<T, Shape, head_dim>(params, memory, block, group, progress, state);
    const BackwardParams& base = params.base;
    const AttentionArgs& args = base.grad.forward;
    const SequencePair pair(args, block.batch);
    const int warp = static_cast<int>(threadIdx.x) / 32, first_row = block.first_key + 16 * warp;
    store_sum<T, Shape, head_dim>(state.dvalue, 1, memory.staging[warp],
                                  key_view<T>(args, base.grad.dvalue, pair, block.kv_head, base.dvalue_vectors),
                                  first_row, fresh_lane());
    store_sum<T, Shape, head_dim>(state.dkey, static_cast<float>(args.softmax_scale), memory.staging[warp],
                                  key_view<T>(args, base.grad.dkey, pair, block.kv_head, base.dkey_vectors), first_row,
                                  fresh_lane());
  });
}

}  // namespace strobe::kernels::cuda::hopper
