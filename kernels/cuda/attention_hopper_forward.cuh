// Attention forward on Hopper (FlashAttention-3, Shah et al. 2024, algorithm 2): one thread has tiles brought by TMA,
// for the warpgroups of attention_hopper_forward_group.cuh. Here: shapes, the order of tiles, and that thread.
#pragma once

#include "strobe/kernels/cuda/attention_mma.cuh"
#include "strobe/kernels/cuda/hopper.cuh"

namespace strobe::kernels::cuda::hopper {

struct ForwardParams {
  CUtensorMap query, key, value;
  AttentionArgs args;
  float sign;            // of softmax_scale
  float scale2;          // what scores are multiplied by, in units of log 2
  float softcap2;        // in units of log 2; 0: off
  float softcap_scale;   // the magnitude of softmax_scale / softcap
  float sum_limit;       // of a block's weights: beyond it they lose their place in T
  float overflow_limit;  // from here on the scores of a block are computed again
  int tiles;             // of all heads
  int query_tiles;       // of a head
  bool longest_first;
  int heads_together;  // whose tiles are near each other in time, so that they find keys and values in the L2 cache
};

template <int head_dim_, int groups_, int keys_, int stages_, bool staged_>
struct ForwardShape {
  static constexpr int head_dim = head_dim_;                      // of the products; what a tensor lacks is 0
  static constexpr int tile_columns = (head_dim + 63) / 64 * 64;  // in shared memory
  static constexpr int groups = groups_;                          // warpgroups that multiply, 64 queries each
  static constexpr int queries = 64 * groups;
  static constexpr int keys = keys_;
  static constexpr int stages = stages_;  // of keys, and of values
  static constexpr int threads = 128 * (groups + 1);
  static constexpr int group_bytes = 64 * tile_columns * 2;
  static constexpr int key_bytes = keys * tile_columns * 2;
  static constexpr bool staged = staged_;                          // whether results go out by way of shared memory
  static constexpr int staging_bytes = staged ? group_bytes : 16;  // an array has at least one element
  static constexpr int loader_registers = groups == 3 ? 32 : 24;   // at most 65,536 in all
  static constexpr int group_registers = groups == 3 ? 160 : 240;
};

template <class Shape>
struct ForwardMemory {
  alignas(1024) char query[Shape::groups][Shape::group_bytes];
  alignas(1024) char key[Shape::stages][Shape::key_bytes];
  alignas(1024) char value[Shape::stages][Shape::key_bytes];
  alignas(16) char out[Shape::groups][Shape::staging_bytes];
  uint64_t query_full[Shape::groups], query_empty[Shape::groups];
  uint64_t key_full[Shape::stages], key_empty[Shape::stages];
  uint64_t value_full[Shape::stages], value_empty[Shape::stages];
};
template <class Shape>
constexpr int forward_shared_bytes = static_cast<int>(sizeof(ForwardMemory<Shape>)) + 1024;  // to align it

// Blocks begin, ..., end - 1 of keys hold some that a query first, ..., last sees; none if that is no interval.
struct KeyBlocks {
  int begin;
  int end;

  __device__ KeyBlocks(const Band& band, int first, int last, int keys)
      : begin(band.begin(first) / keys), end(last < first ? 0 : (band.end(last) + keys - 1) / keys) {}
};

// Some queries of one head. Tiles are dealt to the blocks of the grid one by one, there and back again where they
// differ (causal or packed): of some heads those with most to do first, so that each block gets as much to do as the
// others.
template <class Shape>
struct ForwardTile {
  int batch;
  int head;
  int first_query;

  __device__ ForwardTile(const ForwardParams& params, int index) {
    int matrix = index / params.query_tiles, place = index % params.query_tiles;
    if (params.longest_first) {
      const int section = params.heads_together * params.query_tiles;
      const int first_head = index / section * params.heads_together;
      const int heads = min(params.heads_together, params.tiles / params.query_tiles - first_head);
      matrix = first_head + index % section % heads;
      place = params.query_tiles - 1 - index % section / heads;
    }
    batch = matrix / static_cast<int>(params.args.num_heads);
    head = matrix % static_cast<int>(params.args.num_heads);
    first_query = place * Shape::queries;
  }

  // The tile of a block in a round.
  __device__ static int index(const ForwardParams& params, int round) {
    const bool back = params.longest_first && round % 2 == 1;
    return round * static_cast<int>(gridDim.x) + static_cast<int>(back ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  }
  __device__ int last_query(int seq_len_q) const { return min(first_query + Shape::queries, seq_len_q) - 1; }
};

// Brings the tiles of queries, keys and values in the order in which they are used.
template <class Shape>
__device__ inline void load_tiles(const ForwardParams& params, ForwardMemory<Shape>& memory) {
  tma_prefetch(params.query);
  tma_prefetch(params.key);
  tma_prefetch(params.value);
  const AttentionArgs& args = params.args;
  Ring<1> queries;
  Ring<Shape::stages> keys, values;
  int index = ForwardTile<Shape>::index(params, 0);
  for (int round = 0; index < params.tiles; index = ForwardTile<Shape>::index(params, ++round)) {
    const ForwardTile<Shape> tile(params, index);
    const SequencePair pair(args, tile.batch);
    const Band band(pair);
    const KeyBlocks blocks(band, tile.first_query, tile.last_query(static_cast<int>(pair.seq_len_q)), Shape::keys);
    if (blocks.begin >= blocks.end) continue;
    const int kv_head = tile.head / static_cast<int>(args.num_heads / args.num_kv_heads);
    const int first_q = static_cast<int>(pair.first_q), first_k = static_cast<int>(pair.first_k);
    const int batch = pair.packed ? 0 : tile.batch;
    const auto load = [&](char* target, const CUtensorMap& map, uint64_t* full, int rows, int first_row, int head) {
      barrier_expect(full, rows * Shape::tile_columns * 2);
#pragma unroll
      for (int chunk = 0; chunk < Shape::tile_columns / 64; ++chunk) {
        tma_load(target + chunk * rows * 128, map, full, 64 * chunk, first_row, head, batch);
      }
    };
    const auto load_key = [&](int block) {
      barrier_wait(&memory.key_empty[keys.stage], keys.parity ^ 1);
      load(memory.key[keys.stage], params.key, &memory.key_full[keys.stage], Shape::keys, first_k + block * Shape::keys,
           kv_head);
      keys.advance();
    };
    const auto load_value = [&](int block) {
      barrier_wait(&memory.value_empty[values.stage], values.parity ^ 1);
      load(memory.value[values.stage], params.value, &memory.value_full[values.stage], Shape::keys,
           first_k + block * Shape::keys, kv_head);
      values.advance();
    };
    load_key(blocks.end - 1);
#pragma unroll 1
    for (int group = 0; group < Shape::groups; ++group) {
      barrier_wait(&memory.query_empty[group], queries.parity ^ 1);
      load(memory.query[group], params.query, &memory.query_full[group], 64, first_q + tile.first_query + 64 * group,
           tile.head);
    }
    queries.advance();
    for (int block = blocks.end - 2; block >= blocks.begin; --block) {
      load_key(block);
      load_value(block + 1);
    }
    load_value(blocks.begin);
  }
}

}  // namespace strobe::kernels::cuda::hopper
