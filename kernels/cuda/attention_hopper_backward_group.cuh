// What the two warpgroups of Hopper's attention backward have in registers, and how they work on it.
#pragma once

#include "strobe/kernels/cuda/attention_hopper_backward.cuh"

namespace strobe::kernels::cuda::hopper {

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
  float scores[sums];                                 // S - lse, then P
  float dscores[sums];                                // dP - delta, then dS
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
    forget(result);
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
  }
  // Adds to each column the terms of its query. A product does so beside others, where every lane would have to load
  // them. They stand for all 16 columns of its operand, of which the last 8 meet zeros.
  template <Pick pick>
  __device__ static void start_terms(float (&result)[sums], int stage, int part) {
    constexpr int square = 128, place = static_cast<int>(pick) * square;
    constexpr int to_zeros = static_cast<int>(Pick::nothing) * square - place;
    const uint32_t b = memory_place() + static_cast<uint32_t>(stage * Shape::row_bytes / 16);
    Wgmma<bfloat16, Shape::part_queries>::tiles(
        result, wgmma_squares(memory_place(), offsetof(Memory, picks) + place, 0, to_zeros),
        wgmma_squares(b, offsetof(Memory, rows) + part * Shape::part_row_bytes, square, 0), true);
  }
  // S = K Q^T - lse / softmax_scale, dP = V dO^T - delta
  __device__ void start_scores(int stage, int group, int part) {
    start_product(scores, key, offsetof(Memory, key), offsetof(Memory, query), group, stage, part);
    start_terms<Pick::weight>(scores, stage, part);
    wgmma_commit();
  }
  __device__ void start_dscores(int query_stage, int dout_stage, int group, int part) {
    start_product(dscores, value, offsetof(Memory, value), offsetof(Memory, dout), group, dout_stage, part);
    start_terms<Pick::delta>(dscores, query_stage, part);
    wgmma_commit();
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
  // P of one half of the 64 queries.
  __device__ void weigh(float scale, int half) {
    constexpr int count = sums / 2;
#pragma unroll
    for (int i = half * count; i < (half + 1) * count; ++i) scores[i] = exp2_fast(scores[i] * scale);
  }
  // dS = P (dP - delta), P as dvalue sees it
  __device__ void differentiate() {
#pragma unroll
    for (int i = 0; i < sums; i += 2) {
      const float2 weight = unpack<T>(packed[i / 8][i / 2 % 4]);
      dscores[i] *= weight.x;
      dscores[i + 1] *= weight.y;
    }
  }
  // 0 for pairs outside of the band, of some columns. key: the lane's row h = 0; first_query: of the 64.
  __device__ static void hide(float (&values)[sums], int from, int to, const Band& band, int key, int first_query,
                              int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = key + 8 * h, first = first_query + 2 * (lane % 4);
      const int begin = row - band.upper - first;
      const int end = row < band.seq_len_k ? row - band.lower + 1 - first : 0;
#pragma unroll
      for (int n = from / 4; n < to / 4; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (8 * n + c < begin || 8 * n + c >= end) values[4 * n + 2 * h + c] = 0;
        }
      }
    }
  }
  __device__ static void pack_some(uint32_t (&packed)[part_steps][4], const float (&values)[sums], int from, int to) {
#pragma unroll
    for (int i = from / 2; i < to / 2; ++i) packed[i / 4][i % 4] = pack<T>(values[2 * i], values[2 * i + 1]);
  }
};

// Lays 64 columns of a warp's 16 rows of dkey or dvalue, from column 8 * first on, into its part of shared memory.
template <class T, int head_dim>
__device__ inline void stage_sum(const float (&sum)[head_dim / 2], float scale, char* staging, int first, int lane) {
  using Tile = SwizzledTile<64>;
  const uint32_t stores = shared_address(staging) + Tile::stores(lane);
#pragma unroll
  for (int n = first; n < first + 8 && n < head_dim / 8; n += 2) {
    float two[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) two[i / 4][i % 4] = sum[4 * n + i] * scale;
    Tile::template store_square<T>(stores, 0, n - first, two[0], two[1]);
  }
}

// Writes a warp's 16 rows of dkey or dvalue, from first_row on, by way of its part of shared memory.
template <class T, class Shape, int head_dim>
__device__ inline void store_sum(const float (&sum)[head_dim / 2], float scale, char* staging, MatrixView<T> target,
                                 int first_row, int lane) {
#pragma unroll
  for (int first = 0; first < head_dim / 8; first += 8) {
    stage_sum<T, head_dim>(sum, scale, staging, first, lane);
    __syncwarp();
    store_rows<T, 64, 16>(staging, 0, target, first_row, lane);
    __syncwarp();
    target.data += 64;
    target.head_dim -= 64;
  }
}

// How far a warpgroup has come in what outlasts a block of keys.
template <class Shape>
struct GroupProgress {
  Ring<Shape::query_stages> queries;
  Ring<Shape::dout_stages> douts;
  Ring<Shape::score_stages> scores;
  Ring<Shape::key_stages> keys;
  Ring<1> values;
};

// A warpgroup at work on its 64 keys of a block.
template <class T, class Shape, int head_dim>
struct GroupWork {
  const GradParams& params;
  GradMemory<Shape>& memory;
  const KeyBlock<Shape>& block;
  const int group;
  GroupProgress<Shape>& progress;
  GroupGradient<T, Shape, head_dim>& state;
  int tile_query = 0;  // the first query of the tile that P belongs to
  static constexpr int sums = GroupGradient<T, Shape, head_dim>::sums;

  __device__ GroupWork(const GradParams& params, GradMemory<Shape>& memory, const KeyBlock<Shape>& block, int group,
                       GroupProgress<Shape>& progress, GroupGradient<T, Shape, head_dim>& state)
      : params(params), memory(memory), block(block), group(group), progress(progress), state(state) {}

  __device__ static int warp_row() { return static_cast<int>(threadIdx.x) / 32 * 16; }
  __device__ int first_key() const { return block.first_key + Shape::group_keys * group; }
  __device__ int first_query(int part) const { return tile_query + part * Shape::part_queries; }
  // Learns which tile has come to the stage.
  __device__ void read_tile() { tile_query = uniform(memory.first_query[progress.queries.stage]); }
  __device__ void hide(float (&values)[sums], int part, int from, int to) {
    if (!block.is_cut(first_query(part), first_key())) return;
    const int lane = fresh_lane(), warp = static_cast<int>(threadIdx.x) % 128 / 32;
    state.hide(values, from, to, block.band, first_key() + 16 * warp + lane / 4, first_query(part), lane);
  }
  // P of one half of the queries of a part.
  __device__ void weigh(int part, int half) {
    state.weigh(params.base.table.scale, half);
    hide(state.scores, part, half * sums / 2, (half + 1) * sums / 2);
  }
  __device__ void pack_weights(int half) {
    state.pack_some(state.packed, state.scores, half * sums / 2, (half + 1) * sums / 2);
  }
  // dS of a part, in f32.
  __device__ void differentiate(int part) {
    state.differentiate();
    hide(state.dscores, part, 0, sums);
  }
  __device__ void free_dout() {
    WholeWarp::arrive(&memory.dout_empty[progress.douts.stage]);
    progress.douts.advance();
  }
  // dS of a part goes to shared memory, and when all have come to the third warpgroup.
  __device__ void store_dscores(int part) {
    auto& scores = progress.scores;
    if (part == 0) barrier_wait(&memory.scores_empty[scores.stage], scores.parity ^ 1);
    const int warp = static_cast<int>(threadIdx.x) % 128 / 32;
    const uint32_t store = shared_address(memory.scores[scores.stage]) +
                           static_cast<uint32_t>(Shape::score_store_at(group, warp, fresh_lane()));
#pragma unroll
    for (int n = 0; n < state.part_steps; ++n) {
      store_transposed(store + static_cast<uint32_t>(Shape::score_step(part, n)), state.packed[n]);
    }
  }
  __device__ void hand_over_dscores() {
    fence_async_proxy();
    WholeWarp::arrive(&memory.scores_full[progress.scores.stage]);
    progress.scores.advance();
  }

  // dkey or dvalue on its way out by TMA, if so: into shared memory and, after fence_async_proxy, from there.
  __device__ void stage(const float (&sum)[head_dim / 2], float scale) {
    if (!params.sends_sums) return;
    const int lane = fresh_lane();
    if (lane == 0) bulk_wait_read<0>();  // what was sent before
    __syncwarp();
    stage_sum<T, head_dim>(sum, scale, memory.staging[static_cast<int>(threadIdx.x) / 32], 0, lane);
  }
  __device__ void send(const CUtensorMap& map) {
    if (!params.sends_sums) return;
    __syncwarp();
    const int warp = static_cast<int>(threadIdx.x) / 32, row = block.first_key + 16 * warp;
    if (fresh_lane() != 0 || row >= block.band.seq_len_k) return;
    tma_store(map, memory.staging[warp], 0, block.keys.row + row, block.kv_head, block.keys.batch);
    bulk_commit();
  }

  // Awaits keys; they get the sign of softmax_scale.
  __device__ void await_keys() {
    const auto& keys = progress.keys;
    char* const key = memory.key[keys.stage];
    barrier_wait(&memory.key_full[keys.stage], keys.parity);
    const float sign = params.base.score.sign;
    if (sign != 1) {
      T* const elements = reinterpret_cast<T*>(key);
      for (int i = static_cast<int>(threadIdx.x); i < Shape::key_bytes / 2; i += Shape::threads) {
        elements[i] = T(static_cast<float>(elements[i]) * sign);
      }
      fence_async_proxy();
      barrier_groups<Shape::threads>();
    }
    if constexpr (Shape::keys_in_registers) state.load_rows(state.key, key, warp_row(), fresh_lane());
  }
  __device__ void await_values() {
    barrier_wait(&memory.value_full, progress.values.parity);
    if constexpr (Shape::keys_in_registers) {
      state.load_rows(state.value, memory.value, warp_row(), fresh_lane());
      free_values();
    }
  }
  __device__ void free_values() {
    WholeWarp::arrive(&memory.value_empty);
    progress.values.advance();
  }
  __device__ void free_keys() {
    WholeWarp::arrive(&memory.key_empty[progress.keys.stage]);
    progress.keys.advance();
  }
};

}  // namespace strobe::kernels::cuda::hopper
