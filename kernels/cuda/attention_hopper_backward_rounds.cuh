// The rounds of the two warpgroups of Hopper's attention backward: which product runs beside which work. Products are
// started before the results of earlier ones are worked on, so that the tensor cores are not idle. A round begins when
// no product is under way: ptxas gives up where products last from one round of a loop to the next.
#pragma once

#include "strobe/kernels/cuda/attention_hopper_backward_group.cuh"

namespace strobe::kernels::cuda::hopper {

// head_dim over 64, where a query tile has one part: what the sums leave of the registers holds S and dP at the same
// time, but not P and dS of two tiles. Exponentials are computed beside dkey of the tile before, dS beside dvalue.
template <class T, class Shape, int head_dim>
requires(Shape::parts == 1) __device__ inline void multiply_tiles(GroupWork<T, Shape, head_dim>& work) {
  GradMemory<Shape>& memory = work.memory;
  GroupGradient<T, Shape, head_dim>& state = work.state;
  const KeyBlock<Shape>& block = work.block;
  const int group = work.group;
  auto& queries = work.progress.queries;
  auto& douts = work.progress.douts;
  const auto finish_tile = [&] {
    state.start_dvalue(douts.stage, 0);
    wgmma_wait<1>();
    hold(state.dscores);
    work.differentiate(0);
    wgmma_wait<0>();
    hold(state.dvalue);
    work.free_dout();
    state.pack_some(state.packed, state.dscores, 0, work.sums);
    work.store_dscores(0);
    work.hand_over_dscores();
  };

  work.await_keys();
  work.await_values();
  barrier_wait(&memory.query_full[queries.stage], queries.parity);
  work.read_tile();
  state.start_scores(queries.stage, group, 0);
  barrier_wait(&memory.dout_full[douts.stage], douts.parity);
  wgmma_wait<0>();
  hold(state.scores);
  work.weigh(0, 0);
  state.start_dscores(queries.stage, douts.stage, group, 0);
  work.weigh(0, 1);
  work.pack_weights(0);
  work.pack_weights(1);
  finish_tile();
#pragma unroll 1
  for (int i = 1; i < block.steps; ++i) {
    uint64_t* const query_empty = &memory.query_empty[queries.stage];
    const int before = queries.stage;
    queries.advance();
    barrier_wait(&memory.query_full[queries.stage], queries.parity);
    state.start_scores(queries.stage, group, 0);
    state.start_dkey(before, 0);
    work.read_tile();
    wgmma_wait<1>();
    hold(state.scores);
    work.weigh(0, 0);
    wgmma_wait<0>();
    hold(state.dkey);
    work.pack_weights(0);
    WholeWarp::arrive(query_empty);
    barrier_wait(&memory.dout_full[douts.stage], douts.parity);
    state.start_dscores(queries.stage, douts.stage, group, 0);
    work.weigh(0, 1);
    work.pack_weights(1);
    finish_tile();
  }
  state.start_dkey(queries.stage, 0);
  wgmma_wait<0>();
  hold(state.dkey);
  WholeWarp::arrive(&memory.query_empty[queries.stage]);
  queries.advance();
  work.free_keys();
  work.free_values();
}

// head_dim up to 64, where it has two: keys and values are operands in registers, and there is room to start S of the
// next tile before dS is worked on.
template <class T, class Shape, int head_dim>
requires(Shape::parts == 2) __device__ inline void multiply_tiles(GroupWork<T, Shape, head_dim>& work) {
  GradMemory<Shape>& memory = work.memory;
  GroupGradient<T, Shape, head_dim>& state = work.state;
  const KeyBlock<Shape>& block = work.block;
  const int group = work.group;
  auto& queries = work.progress.queries;
  auto& douts = work.progress.douts;
  const auto weigh = [&](int part) {
    work.weigh(part, 0);
    work.weigh(part, 1);
  };
  const auto pack_weights = [&] {
    work.pack_weights(0);
    work.pack_weights(1);
  };
  // From P and dP of a part to those of the next one, if the block has more.
  const auto half = [&](auto part_constant, auto more_halves) {
    constexpr int part = decltype(part_constant)::value, next_part = (part + 1) % Shape::parts;
    constexpr bool last_part = next_part == 0, more = decltype(more_halves)::value;
    Ring<Shape::query_stages> next = queries;
    next.advance();
    state.start_dvalue(douts.stage, part);
    if constexpr (last_part && more) {
      barrier_wait(&memory.query_full[next.stage], next.parity);
      state.start_scores(next.stage, group, 0);
    } else {
      wgmma_commit();
    }
    work.differentiate(part);
    wgmma_wait<1>();
    hold(state.dvalue);
    if constexpr (last_part) work.free_dout();
    state.pack_some(state.packed, state.dscores, 0, work.sums);
    work.store_dscores(part);
    if constexpr (!last_part) state.start_scores(queries.stage, group, next_part);
    state.start_dkey(queries.stage, part);
    if constexpr (!more) work.stage(state.dvalue, 1);
    if constexpr (last_part) work.hand_over_dscores();
    if constexpr (!more) return work.send(work.params.dvalue);
    uint64_t* const query_empty = &memory.query_empty[queries.stage];
    if constexpr (last_part) {
      queries = next;
      work.read_tile();
      barrier_wait(&memory.dout_full[douts.stage], douts.parity);
    }
    state.start_dscores(queries.stage, douts.stage, group, next_part);
    wgmma_wait<2>();
    hold(state.scores);
    weigh(next_part);
    wgmma_wait<1>();
    hold(state.dkey);
    if constexpr (last_part) WholeWarp::arrive(query_empty);
    pack_weights();
    wgmma_wait<0>();
    hold(state.dscores);
  };

  work.await_keys();
  barrier_wait(&memory.query_full[queries.stage], queries.parity);
  work.read_tile();
  state.start_scores(queries.stage, group, 0);
  work.await_values();
  barrier_wait(&memory.dout_full[douts.stage], douts.parity);
  state.start_dscores(queries.stage, douts.stage, group, 0);
  wgmma_wait<1>();
  hold(state.scores);
  weigh(0);
  pack_weights();
  wgmma_wait<0>();
  hold(state.dscores);
  // The last round shares all it can with the others: instructions that come once a block are slow to fetch.
#pragma unroll 1
  for (int i = 1;; ++i) {
    half(std::integral_constant<int, 0>(), std::true_type());
    if (i == block.steps) break;
    half(std::integral_constant<int, 1>(), std::true_type());
  }
  half(std::integral_constant<int, 1>(), std::false_type());
  wgmma_wait<0>();
  hold(state.dkey);
  hold(state.dvalue);
  WholeWarp::arrive(&memory.query_empty[queries.stage]);
  queries.advance();
  work.free_keys();
  work.stage(state.dkey, static_cast<float>(work.params.base.grad.forward.softmax_scale));
  fence_async_proxy();
  work.send(work.params.dkey);
}

// One warpgroup, of all blocks of keys.
template <class T, class Shape, int head_dim>
__device__ inline void multiply_blocks(const GradParams& params, GradMemory<Shape>& memory, int group) {
  GroupProgress<Shape> progress;
  for_each_block(params, memory, WholeWarp(), [&](const KeyBlock<Shape>& block) {
    GroupGradient<T, Shape, head_dim> state;
    if (block.steps > 0) {
      GroupWork<T, Shape, head_dim> work(params, memory, block, group, progress, state);
      multiply_tiles(work);
      if (Shape::sends_sums && params.sends_sums) return;
    }
    if constexpr (Shape::sends_sums) {  // what was sent before may still be read
      if (fresh_lane() == 0) bulk_wait_read<0>();
      __syncwarp();
    }
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
  if (Shape::sends_sums && fresh_lane() == 0) bulk_wait_read<0>();
}

}  // namespace strobe::kernels::cuda::hopper
