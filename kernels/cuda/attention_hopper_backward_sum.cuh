// The third warpgroup of Hopper's attention backward: dquery = dS K of each query tile, and how it is added to what
// other blocks of keys have found.
#pragma once

#include "strobe/kernels/cuda/attention_hopper_backward.cuh"

namespace strobe::kernels::cuda::hopper {

__device__ inline void fence_gpu() { STROBE_HOPPER_ASM("fence.acq_rel.gpu;" ::: "memory"); }
__device__ inline int read_turn(const int* counter) {
  int now = 0;
  STROBE_HOPPER_ASM("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  return now;
}
__device__ inline void wait_turn(const int* counter, int turn) {
  while (read_turn(counter) != turn) continue;
}
__device__ inline void end_turn(int* counter, int turn) {
  fence_gpu();
  STROBE_HOPPER_ASM("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(counter), "r"(turn + 1) : "memory");
}

// Whoever comes first to a query tile stores its part of dquery instead of adding it, so that nobody need write zeros
// before. A counter tells how far a tile is: in turns, how many key blocks have added to it, in ascending order;
// otherwise one of these, and the others wait for the first one alone.
inline constexpr int untouched = 0, begun = 1, stored = 2;

// Two threads watch the counters: one awaits that this block may add to a tile, the other tells the next one when all
// warps have. A turn opens when both have arrived, so neither misses a phase.
template <class Shape>
__device__ inline void open_turns(const GradParams& params, GradMemory<Shape>& memory) {
  for_each_step(params, memory, [&](const Step<Shape>& step, uint32_t parity) {
    int* const counter = params.base.turns + step.place;
    bool is_first;
    if (params.base.deterministic) {
      const int turn = step.turn();
      wait_turn(counter, turn);
      is_first = turn == 0;
    } else {
      const int now = read_turn(counter);
      is_first = now == untouched && atomicCAS(counter, untouched, begun) == untouched;
      if (!is_first && now != stored) wait_turn(counter, stored);
    }
    memory.is_first[parity] = is_first;
    memory.place[parity] = step.place;
    barrier_arrive(&memory.turn_open);
    barrier_wait(&memory.turn_open, parity);
  });
}
template <class Shape>
__device__ inline void close_turns(const GradParams& params, GradMemory<Shape>& memory) {
  barrier_arrive(&memory.turn_open);
  for_each_step(params, memory, [&](const Step<Shape>& step, uint32_t parity) {
    barrier_wait(&memory.turn_used, parity);
    const bool was_first = memory.is_first[parity] != 0;
    barrier_arrive(&memory.turn_open);  // the next one opens while others learn of this one
    if (params.base.deterministic) {
      end_turn(params.base.turns + step.place, step.turn());
    } else if (was_first) {
      end_turn(params.base.turns + step.place, begun);
    }
  });
}

// Stores a half of dquery, or adds it to the sums of other blocks.
template <class Shape, int sums>
__device__ inline void put_dquery(const float (&dquery)[sums], float* tile, int half, bool adds) {
  float* const to = tile + half * (Shape::dquery_floats / 2) + lane_floats * (threadIdx.x % Shape::sum_threads);
#pragma unroll
  for (int n = 0; n < sums / 4; ++n) {
    const float* const four = dquery + 4 * n;
    if (adds) {
      add_to<Shape::sum_threads>(to, n, {four[0], four[1], four[2], four[3]});
    } else {
      *reinterpret_cast<float4*>(to + 4 * n * Shape::sum_threads) = float4{four[0], four[1], four[2], four[3]};
    }
  }
}

// dquery = dS K of a half.
template <class T, class Shape, int sums>
__device__ inline void start_dquery(float (&dquery)[sums], int stage, int key_stage, int half) {
  using Memory = GradMemory<Shape>;
  const uint32_t a =
      memory_place() + static_cast<uint32_t>((stage * Shape::score_bytes + Shape::score_columns_at(half, 0)) / 16);
  const uint32_t b =
      memory_place() + static_cast<uint32_t>((key_stage * Shape::key_bytes + Shape::key_rows_at(half, 0)) / 16);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < Shape::keys / 16; ++k) {
    Wgmma<T, 2 * sums>::template tiles<true>(dquery,
                                             wgmma_operand(a, offsetof(Memory, scores) + Shape::score_columns_at(0, k)),
                                             wgmma_operand(b, offsetof(Memory, key) + Shape::key_rows_at(0, k)), k > 0);
  }
  wgmma_commit();
}

template <class T, class Shape, int head_dim>
__device__ inline void sum_dquery(const GradParams& params, GradMemory<Shape>& memory) {
  constexpr int second_columns = Shape::parts == 2 ? 64 : head_dim - 64;
  Ring<Shape::score_stages> scores;
  Ring<Shape::key_stages> keys;
  uint32_t parity = 0;
  for_each_block(params, memory, WholeWarp(), [&](const KeyBlock<Shape>& block) {
#pragma unroll 1
    for (int i = 0; i < block.steps; ++i, parity ^= 1) {
      barrier_wait(&memory.scores_full[scores.stage], scores.parity);
      float first[32];
      start_dquery<T, Shape>(first, scores.stage, keys.stage, 0);
      barrier_wait(&memory.turn_open, parity);
      float* const tile = params.base.dquery + int64_t{memory.place[parity]} * Shape::dquery_floats;
      const bool adds = memory.is_first[parity] == 0;
      wgmma_wait<0>();
      hold(first);
      put_dquery<Shape>(first, tile, 0, adds);
      float second[second_columns / 2];
      start_dquery<T, Shape>(second, scores.stage, keys.stage, 1);
      wgmma_wait<0>();
      hold(second);
      WholeWarp::arrive(&memory.scores_empty[scores.stage]);
      put_dquery<Shape>(second, tile, 1, adds);
      WholeWarp::arrive(&memory.turn_used);
      scores.advance();
    }
    if (block.steps == 0) return;
    WholeWarp::arrive(&memory.key_empty[keys.stage]);
    keys.advance();
  });
}

}  // namespace strobe::kernels::cuda::hopper
