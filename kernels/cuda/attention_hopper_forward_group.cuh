// Warpgroups of the Hopper attention forward pass: 64 queries each, multiplied by wgmma, and a warpgroup's softmax runs
// beside its own next product. The first product of a tile runs beside the way out of the one before it.
#pragma once

#include "strobe/kernels/cuda/attention_hopper_forward_state.cuh"

namespace strobe::kernels::cuda::hopper {

// Warpgroups take turns in giving the tensor cores work: one's softmax then runs beside the products of others.
template <class Shape>
__device__ inline void take_turn(int group) {
  if constexpr (Shape::turns) barrier_sync<256>(9 + group);
}
template <class Shape>
__device__ inline void pass_turn(int group) {
  if constexpr (Shape::turns) barrier_pass<256>(9 + (group + 1 == Shape::groups ? 0 : group + 1));
}

// Values behind the end of a packed sequence are another's, and 0 times infinity is not 0. Each warpgroup does this for
// itself: what the others wrote is the same.
template <class Shape>
__device__ inline void clear_rows(char* value, int first_row) {
#pragma unroll
  for (int chunk = 0; chunk < Shape::tile_columns / 64; ++chunk) {
    uint4* const rows = reinterpret_cast<uint4*>(value + chunk * Shape::keys * 128);
    for (int i = 8 * first_row + static_cast<int>(threadIdx.x) % 128; i < 8 * Shape::keys; i += 128) rows[i] = {};
  }
}

// One warpgroup: its 64 queries of each tile.
template <class T, class Shape>
__device__ inline void multiply_tiles(const ForwardParams& params, ForwardMemory<Shape>& memory, int group) {
  const int warp = static_cast<int>(threadIdx.x) % 128 / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const float scale2 = params.scale2;
  constexpr int slots = ForwardMemory<Shape>::tiles;
  Ring<Shape::stages> keys, values;
  const auto release = [&](uint64_t* empty) {  // by each warp for itself: none may miss a phase
    __syncwarp();
    if (lane == 0) barrier_arrive(empty);
  };
  const auto wait_key = [&] { barrier_wait(&memory.key_full[keys.stage], keys.parity); };
  const auto wait_value = [&] { barrier_wait(&memory.value_full[values.stage], values.parity); };
  const auto free_key = [&] {
    release(&memory.key_empty[keys.stage]);
    keys.advance();
  };
  const auto free_value = [&] {
    release(&memory.value_empty[values.stage]);
    values.advance();
  };
  // Blocks that only other groups see.
  const auto pass_key = [&] {
    wait_key();
    take_turn<Shape>(group);
    pass_turn<Shape>(group);
    free_key();
  };
  const auto pass_value = [&] {
    wait_value();
    free_value();
  };
  const auto pass = [&](int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      pass_key();
      pass_value();
    }
  };

  if (group == Shape::groups - 1) pass_turn<Shape>(group);
  GroupState<T, Shape> state;
  int first_of_tile, seq_len_q;
  Band band;
  const auto read_tile = [&](int number) {
    const ForwardTile& tile = memory.tile[number % slots];
    barrier_wait(&memory.tile_full[number % slots], number / slots % 2);
    first_of_tile = uniform(tile.first_query);
    seq_len_q = uniform(tile.seq_len_q);
    band = Band(uniform(tile.band.lower), uniform(tile.band.upper), uniform(tile.band.seq_len_k));
  };
  read_tile(0);
  for (int number = 0;; ++number) {  // of the tile in hand; the one before still has to go out
    const int query_stage = number % Shape::query_stages;
    const auto wait_query = [&] {
      barrier_wait(&memory.query_full[query_stage][group], number / Shape::query_stages % 2);
    };
    const auto free_query = [&](int stage) { release(&memory.query_empty[stage][group]); };
    const ForwardTile& shared = memory.tile[number % slots];
    const int first_query = first_of_tile + 64 * group;
    const int last_query = min(first_query + 64, seq_len_q) - 1;
    const KeyBlocks own = first_of_tile < 0 ? KeyBlocks{0, 0} : KeyBlocks(band, first_query, last_query, Shape::keys);
    const int finished_stage = (number - 1) % Shape::query_stages;
    const ForwardTile& finished = memory.tile[(number - 1) % slots];
    char* const staging = memory.query[finished_stage][group] + 16 * warp * 128;
    if (number > 0) {
      const GroupResult<T, Shape> result(params, finished, 64 * group + 16 * warp);
      if constexpr (Shape::staged) {
        result.stage(state, staging);
      } else {
        result.store(state);
      }
    }
    const auto finish_store = [&] {
      if constexpr (Shape::staged) {
        if (number == 0) return;
        if (lane == 0) bulk_wait_read<0>();
        free_query(finished_stage);
      }
    };
    char* const query = memory.query[query_stage][group];
    if (own.begin < own.end) {
#pragma unroll 1
      for (int block = uniform(shared.blocks.end); block > own.end; --block) pass_key();
      wait_query();
      if (params.sign != 1) {
        T* const elements = reinterpret_cast<T*>(query);
        for (int i = static_cast<int>(threadIdx.x) % 128; i < 64 * Shape::tile_columns; i += 128) {
          elements[i] = T(static_cast<float>(elements[i]) * params.sign);
        }
        fence_async_proxy();
        barrier_group(group);
      }
      wait_key();
      take_turn<Shape>(group);
    }
    state.start_scores(query, memory.key[keys.stage]);
    if (own.begin < own.end) pass_turn<Shape>(group);
    if (number > 0) {
      const GroupResult<T, Shape> result(params, finished, 64 * group + 16 * warp);
      if constexpr (Shape::staged) result.start_store(staging);
      result.store_lse(state);
      release(&memory.tile_empty[(number - 1) % slots]);
    }
    wgmma_wait<0>();
    hold(state.scores);
    if (first_of_tile < 0) {
      finish_store();
      return;
    }
    state.clear();

    if (own.begin < own.end) {
      // Blocks uncut_begin, ..., uncut_end - 1 are visible to all 64 queries.
      const int uncut_begin = (band.begin(last_query) + Shape::keys - 1) / Shape::keys;
      const int uncut_end = max(band.end(first_query), 0) / Shape::keys;
      const bool capped = params.softcap2 != 0;  // their maximum is always followed: the loop without it stays short
      const auto cut = [&](int block) { return block >= uncut_end || block < uncut_begin; };
      const auto adjust = [&](int block) {
        if (capped) state.cap(params);
        if (cut(block)) state.hide(band, first_query + 16 * warp + lane / 4, block * Shape::keys, lane);
      };
      float factor[2];
      free_key();
      int block = own.end - 1;
      adjust(block);
      for (int h = 0; h < 2; ++h) state.follow_maximum(h, scale2);
      state.pack_weights();
      finish_store();
#pragma unroll 1
      for (int block = uniform(shared.blocks.end); block > own.end; --block) pass_value();
      if (params.args.cu_seqlens_q != nullptr && own.end * Shape::keys > band.seq_len_k) {
        wait_value();
        clear_rows<Shape>(memory.value[values.stage], band.seq_len_k - block * Shape::keys);
        fence_async_proxy();
        barrier_group(group);
      }
      --block;
      do {
#pragma unroll 1
        for (; block >= own.begin && (capped || cut(block)); --block) {
          wait_key();
          take_turn<Shape>(group);
          state.start_scores(query, memory.key[keys.stage]);
          wait_value();
          state.start_out(memory.value[values.stage]);
          pass_turn<Shape>(group);
          wgmma_wait<1>();
          hold(state.scores);
          adjust(block);
          for (int h = 0; h < 2; ++h) factor[h] = state.follow_maximum(h, scale2);
          wgmma_wait<0>();
          hold(state.out);
          free_value();
          state.shrink_out(factor);
          free_key();
          state.pack_weights();
        }
#pragma unroll 1
        for (; block >= own.begin && block >= uncut_begin; --block) {
          wait_key();
          take_turn<Shape>(group);
          state.start_scores(query, memory.key[keys.stage]);
          wait_value();
          state.start_out(memory.value[values.stage]);
          pass_turn<Shape>(group);
          wgmma_wait<1>();
          hold(state.scores);
          float part[2];
          state.keep_maximum(scale2, part);
          wgmma_wait<0>();
          hold(state.out);
          free_value();
          state.add_sums(params, part, query, memory.key[keys.stage], warp);
          free_key();
          state.pack_weights();
        }
      } while (block >= own.begin);
      if constexpr (!Shape::staged) free_query(query_stage);
      wait_value();
      state.start_out(memory.value[values.stage]);
      const int passed = own.begin - uniform(shared.blocks.begin);
      read_tile(number + 1);
      wgmma_wait<0>();
      hold(state.out);
      free_value();
      pass(passed);
    } else {
      finish_store();
      pass(uniform(shared.blocks.end) - uniform(shared.blocks.begin));
      wait_query();
      if constexpr (!Shape::staged) free_query(query_stage);
      read_tile(number + 1);
    }
  }
}

}  // namespace strobe::kernels::cuda::hopper
