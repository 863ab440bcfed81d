// Warpgroups of the Hopper attention forward pass: 64 queries each, multiplied by wgmma, and a warpgroup's softmax runs
// beside its own next product. The first product of a tile runs beside the last one of the tile before and its way out.
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

// The 64 queries of a tile that a warpgroup takes, in registers that are the same in all lanes.
template <class Shape>
struct GroupQueries {
  bool none;  // there are no more tiles
  int first;
  int last;
  Band band;
  KeyBlocks tile;    // that some queries of the tile see
  KeyBlocks blocks;  // that some of these see

  __device__ bool see() const { return blocks.begin < blocks.end; }

  __device__ void read(ForwardMemory<Shape>& memory, int group, int number) {
    constexpr int slots = ForwardMemory<Shape>::tiles;
    const ForwardTile& shared = memory.tile[number % slots];
    barrier_wait(&memory.tile_full[number % slots], number / slots % 2);
    const int first_of_tile = uniform(shared.first_query);
    none = first_of_tile == ForwardTile::none;
    band = Band(uniform(shared.band.lower), uniform(shared.band.upper), uniform(shared.band.seq_len_k));
    tile = KeyBlocks(uniform(shared.blocks.begin), uniform(shared.blocks.end));
    first = first_of_tile + 64 * group;
    last = min(first + 64, uniform(shared.seq_len_q)) - 1;
    blocks = first < 0 ? KeyBlocks(0, 0) : KeyBlocks(band, first, last, Shape::keys);
  }
};

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
  const auto free_query = [&](int number) { release(&memory.query_empty[number % Shape::query_stages][group]); };
  const auto wait_query = [&](int number) {
    barrier_wait(&memory.query_full[number % Shape::query_stages][group], number / Shape::query_stages % 2);
  };

  GroupState<T, Shape> state;
  GroupQueries<Shape> mine;  // of the tile in hand
  // The first product of tile `number`.
  const auto begin_tile = [&](const GroupQueries<Shape>& next, int number) {
    char* const query = memory.query[number % Shape::query_stages][group];
    if (next.see()) {
#pragma unroll 1
      for (int block = next.tile.end; block > next.blocks.end; --block) pass_key();
      wait_query(number);
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
    if (next.see()) pass_turn<Shape>(group);
  };
  const auto finish_store = [&](int number) {
    if constexpr (Shape::staged) {
      if (number < 0) return;
      if (lane == 0) bulk_wait_read<0>();
      free_query(number);
    }
  };

  if (group == Shape::groups - 1) pass_turn<Shape>(group);
  mine.read(memory, group, 0);
  begin_tile(mine, 0);
  wgmma_wait<0>();
  hold(state.scores);
#pragma unroll 1
  for (int number = 0; !mine.none; ++number) {
    char* const query = memory.query[number % Shape::query_stages][group];
    state.clear();
    if (mine.see()) {
      const Band& band = mine.band;
      const KeyBlocks own = mine.blocks;
      // Blocks uncut_begin, ..., uncut_end - 1 are visible to all 64 queries.
      const int uncut_begin = (band.begin(mine.last) + Shape::keys - 1) / Shape::keys;
      const int uncut_end = max(band.end(mine.first), 0) / Shape::keys;
      const int half_hidden = band.begin(mine.first) - own.begin * Shape::keys >= Shape::keys / 2;
      const bool capped = params.softcap2 != 0;  // their maximum is always followed: the loop without it stays short
      const auto cut = [&](int block) { return block >= uncut_end || block < uncut_begin; };
      const auto hide = [&](int block, const bool(&meant)[2]) {
        state.hide(band, mine.first + 16 * warp + lane / 4, block * Shape::keys, lane, meant);
      };
      const auto adjust = [&](int block) {
        if (capped) state.cap(params);
        if (cut(block)) hide(block, {true, true});
      };
      float factor[2];
      free_key();
      int block = own.end - 1;
      adjust(block);
      if constexpr (Shape::windowed) {
        const SomeSlices slices(band, uniform(mine.first + 16 * warp), block * Shape::keys);
        for (int h = 0; h < 2; ++h) state.follow_maximum(h, scale2, true, slices);
      } else {
        for (int h = 0; h < 2; ++h) state.follow_maximum(h, scale2);
      }
      state.pack_weights();
      finish_store(number - 1);
#pragma unroll 1
      for (int block = mine.tile.end; block > own.end; --block) pass_value();
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
          free_key();
          adjust(block);
          for (int h = 0; h < 2; ++h) factor[h] = state.follow_maximum(h, scale2);
          wgmma_wait<0>();
          hold(state.out);
          free_value();
          state.shrink_out(factor);
          state.pack_weights();
        }
        // A block that only the window's left edge may cut; nobody sees its first `hidden` keys.
        const auto uncut_block = [&]<int hidden>(std::integral_constant<int, hidden>) {
          wait_key();
          take_turn<Shape>(group);
          state.start_scores(query, memory.key[keys.stage]);
          wait_value();
          state.start_out(memory.value[values.stage]);
          pass_turn<Shape>(group);
          wgmma_wait<1>();
          hold(state.scores);
          if (Shape::windowed && block < uncut_begin) hide(block, {true, true});
          float part[2];
          state.template keep_maximum<hidden>(scale2, part);
          wgmma_wait<0>();
          hold(state.out);
          free_value();
          state.add_sums(params, part, query, memory.key[keys.stage], warp, [&](const bool(&meant)[2]) {
            if (Shape::windowed && block < uncut_begin) hide(block, meant);
          });
          free_key();
          state.pack_weights();
        };
#pragma unroll 1
        for (; block >= own.begin && block >= (Shape::windowed ? own.begin + half_hidden : uncut_begin); --block) {
          uncut_block(std::integral_constant<int, 0>());
        }
        if constexpr (Shape::windowed) {
#pragma unroll 1
          for (; block >= own.begin; --block) uncut_block(std::integral_constant<int, Shape::keys / 2>());
        }
      } while (block >= own.begin);
    } else {
      finish_store(number - 1);
      pass(mine.tile.end - mine.tile.begin);
      wait_query(number);
    }
    if constexpr (!Shape::staged) free_query(number);
    // The next tile begins while this one's last values are held: the ring has room for what is passed over until then.
    // What a group that sees nothing multiplies here is not used.
    static_assert(Shape::keys >= 64 && Shape::groups <= Shape::stages);
    const bool seen = mine.see();
    const int passed = seen ? mine.blocks.begin - mine.tile.begin : 0;
    if (seen) wait_value();
    state.start_out(memory.value[values.stage]);
    mine.read(memory, group, number + 1);
#pragma unroll 1
    for (int i = 0; i < passed; ++i) pass_key();
    begin_tile(mine, number + 1);
    wgmma_wait<1>();
    hold(state.out);
    if (seen) free_value();
#pragma unroll 1
    for (int i = 0; i < passed; ++i) pass_value();
    const GroupResult<T, Shape> result(params, memory.tile[number % slots], 64 * group + 16 * warp);
    if constexpr (Shape::staged) {
      char* const staging = query + 16 * warp * 128;
      result.stage(state, staging);
      result.start_store(staging);
    } else {
      result.store(state);
    }
    result.store_lse(state);
    release(&memory.tile_empty[number % slots]);
    wgmma_wait<0>();
    hold(state.scores);
  }
  if (Shape::staged && lane == 0) bulk_wait_read<0>();
}

}  // namespace strobe::kernels::cuda::hopper
