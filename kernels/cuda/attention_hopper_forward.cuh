// Attention forward on Hopper (FlashAttention-3, Shah et al. 2024, algorithm 2): three warps deal tiles, one thread has
// their operands brought by TMA, for the warpgroups of attention_hopper_forward_group.cuh. Here: shapes, the order of
// tiles, and those two.
#pragma once

#include "strobe/kernels/cuda/attention_mma.cuh"
#include "strobe/kernels/cuda/hopper.cuh"

namespace strobe::kernels::cuda::hopper {

struct ForwardParams {
  CUtensorMap query, key, value, out;
  AttentionArgs args;
  float sign;            // of softmax_scale
  float scale2;          // what scores are multiplied by, in units of log 2
  float softcap2;        // in units of log 2; 0: off
  float softcap_scale;   // the magnitude of softmax_scale / softcap
  float sum_limit;       // of a block's weights: beyond it the reference grows
  float overflow_limit;  // from here on the scores of a block are computed again
  int tiles;             // of all heads
  int query_tiles;       // of a head
  bool longest_first;    // of some heads those tiles with most to do
  bool dealt;            // to the block of the grid that has least to do; else in turn
  int rotation;  // not longest_first: places that a round is ahead of the one before, so that each block has all
  int group;     // heads that share keys and values
  int left;      // how far a query sees from the diagonal
  int right;
  int heads_together;  // whose tiles are near each other in time, so that they find keys and values in the L2 cache
};

inline constexpr int forward_dealers = 96;       // threads that deal tiles
inline constexpr int most_forward_blocks = 192;  // of the grid

template <int head_dim_, int groups_, int keys_, int stages_, int query_stages_, bool windowed_ = false>
struct ForwardShape {
  static constexpr int head_dim = head_dim_;                      // of the products; what a tensor lacks is 0
  static constexpr int tile_columns = (head_dim + 63) / 64 * 64;  // in shared memory
  static constexpr int groups = groups_;                          // warpgroups that multiply, 64 queries each
  static constexpr int queries = 64 * groups;
  static constexpr int keys = keys_;
  static constexpr int stages = stages_;  // of keys, and of values
  static constexpr int query_stages = query_stages_;
  static constexpr bool windowed = windowed_;  // made for tiles that a window cuts: their ends are much of them
  static constexpr int threads = 128 * (groups + 1);
  static constexpr int group_bytes = 64 * tile_columns * 2;
  static constexpr int key_bytes = keys * tile_columns * 2;
  static constexpr bool turns = head_dim <= 64;     // of warpgroups: where softmax takes longer than products
  static constexpr bool staged = query_stages > 1;  // results go out by way of their queries' place
  static constexpr int loader_registers = groups == 3 ? 32 : 40;  // at most what the launch gives all threads
  static constexpr int group_registers = groups == 3 ? 160 : 232;
};

// Blocks begin, ..., end - 1 of keys hold some that a query first, ..., last sees; none if that is no interval.
struct KeyBlocks {
  int begin;
  int end;

  __device__ KeyBlocks(int begin, int end) : begin(begin), end(end) {}
  KeyBlocks() = default;
  __device__ KeyBlocks(const Band& band, int first, int last, int keys)
      : begin(band.begin(first) / keys), end(last < first ? 0 : (band.end(last) + keys - 1) / keys) {}
};

// Some queries of one head, and where they lie.
struct ForwardTile {
  static constexpr int none = -(1 << 30);
  int first_query;  // a multiple of 64; below 0 where the first groups have no queries; none: there are no more tiles
  int seq_len_q;
  int head;
  int kv_head;
  int batch;    // in the tensors
  int first_q;  // packed: rows before the sequence
  int first_k;
  Band band;
  KeyBlocks blocks;  // that some of the queries see
  int64_t out;       // elements from the start of the tensor to the sequence's row 0
  int64_t lse;

  // Tile `index` of all; -1: none. A head's last tile, which sees most where the mask is causal, is a full one.
  __device__ void find(const ForwardParams& params, int index, int queries, int keys) {
    first_query = none;
    if (index < 0) return;
    const AttentionArgs& args = params.args;
    const int num_heads = static_cast<int>(args.num_heads);
    int matrix = index / params.query_tiles, place = index % params.query_tiles;
    if (params.longest_first) {
      const int section = params.heads_together * params.query_tiles;
      const int first_head = index / section * params.heads_together;
      const int heads = min(params.heads_together, params.tiles / params.query_tiles - first_head);
      matrix = first_head + index % section % heads;
      place = params.query_tiles - 1 - index % section / heads;
    } else {
      const int round = (index - place) / static_cast<int>(gridDim.x);
      place = (place + round % params.query_tiles * params.rotation) % params.query_tiles;
    }
    batch = matrix / num_heads;
    head = matrix % num_heads;
    kv_head = head / params.group;
    const bool packed = args.cu_seqlens_q != nullptr;
    first_q = packed ? args.cu_seqlens_q[batch] : 0;
    first_k = packed ? args.cu_seqlens_k[batch] : 0;
    seq_len_q = packed ? args.cu_seqlens_q[batch + 1] - first_q : static_cast<int>(args.seq_len_q);
    first_query = place * queries - (queries - (seq_len_q + 63) / 64 * 64 % queries) % queries;
    const int seq_len_k = packed ? args.cu_seqlens_k[batch + 1] - first_k : static_cast<int>(args.seq_len_k);
    constexpr int far = 1 << 29;  // positions are below
    const int diagonal = seq_len_k - seq_len_q;
    band = Band(max(diagonal - params.left, -far), min(diagonal + params.right, far), seq_len_k);
    blocks = KeyBlocks(band, max(first_query, 0), min(first_query + queries, seq_len_q) - 1, keys);
    out = (packed ? first_q * args.out.seq_stride : batch * args.out.batch_stride) + head * args.out.head_stride;
    lse = packed ? head * args.total_q + first_q : (static_cast<int64_t>(batch) * num_heads + head) * args.seq_len_q;
    if (packed) batch = 0;
  }

  // How long it takes, in products of 64 queries with a block; 0: the sequence has no such queries.
  __device__ int cost(int queries) const {
    constexpr int overhead = 6;
    const int rows = min(seq_len_q, first_query + queries) - max(first_query, 0);
    return rows <= 0 ? 0 : (rows + 63) / 64 * max(blocks.end - blocks.begin, 0) + overhead;
  }
};

template <class Shape>
struct ForwardMemory {
  static constexpr int tiles = 4;
  alignas(1024) char query[Shape::query_stages][Shape::groups][Shape::group_bytes];
  alignas(1024) char key[Shape::stages][Shape::key_bytes];
  alignas(1024) char value[Shape::stages][Shape::key_bytes];
  ForwardTile tile[tiles];
  uint32_t load[most_forward_blocks], cost[most_forward_blocks], dealt[most_forward_blocks], dealt_to_this;
  uint64_t tile_full[tiles], tile_empty[tiles];
  uint64_t query_full[Shape::query_stages][Shape::groups], query_empty[Shape::query_stages][Shape::groups];
  uint64_t key_full[Shape::stages], key_empty[Shape::stages];
  uint64_t value_full[Shape::stages], value_empty[Shape::stages];
};
template <class Shape>
constexpr int forward_shared_bytes = static_cast<int>(sizeof(ForwardMemory<Shape>));

// By one thread, before any other touches them.
template <class Shape>
__device__ inline void init_barriers(ForwardMemory<Shape>& memory) {
  constexpr int warps = 4 * Shape::groups;
  for (int slot = 0; slot < ForwardMemory<Shape>::tiles; ++slot) {
    barrier_init(&memory.tile_full[slot], 1);
    barrier_init(&memory.tile_empty[slot], warps + 1);
  }
  for (int stage = 0; stage < Shape::query_stages; ++stage) {
    for (int group = 0; group < Shape::groups; ++group) {
      barrier_init(&memory.query_full[stage][group], 1);
      barrier_init(&memory.query_empty[stage][group], 4);
    }
  }
  for (int stage = 0; stage < Shape::stages; ++stage) {
    for (uint64_t* full : {&memory.key_full[stage], &memory.value_full[stage]}) barrier_init(full, 1);
    for (uint64_t* empty : {&memory.key_empty[stage], &memory.value_empty[stage]}) barrier_init(empty, warps);
  }
  barrier_init_fence();
}

// For each key of a thread, how many of `keys` are below.
template <int count>
__device__ inline void count_below(const uint32_t* keys, int n, const uint32_t (&mine)[count], int (&below)[count]) {
#pragma unroll
  for (int& x : below) x = 0;
#pragma unroll 4
  for (int i = 0; i < n; ++i) {
    const uint32_t key = keys[i];
#pragma unroll
    for (int k = 0; k < count; ++k) below[k] += key < mine[k];
  }
}

// Deals tiles to the blocks of the grid, one each in a round: in turn, there and back again where the longest come
// first, or the longest of a round to the block that has least to do so far, and so on. Every block computes this for
// all. By threads 0, ..., 95.
template <class Shape>
__device__ inline void deal_tiles(const ForwardParams& params, ForwardMemory<Shape>& memory, int thread) {
  constexpr int threads = forward_dealers, most = most_forward_blocks / threads;
  constexpr uint32_t longest = 0xffffff;
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  Ring<ForwardMemory<Shape>::tiles> slots;
  const auto give = [&](int index) {  // to this block
    if (thread != 0) return;
    barrier_wait(&memory.tile_empty[slots.stage], slots.parity ^ 1);
    memory.tile[slots.stage].find(params, index, Shape::queries, Shape::keys);
    barrier_arrive(&memory.tile_full[slots.stage]);
    slots.advance();
  };
  const auto cost_of = [&](int index) {
    if (index >= params.tiles) return 0u;
    ForwardTile tile;
    tile.find(params, index, Shape::queries, Shape::keys);
    return min(static_cast<uint32_t>(tile.cost(Shape::queries)), longest);
  };
  if (!params.dealt) {
    if (thread >= 32) return;
    for (int first = 0; first < params.tiles; first += 32 * blocks) {
      const int back = params.longest_first && thread % 2 == 1 ? blocks - 1 - block : block;
      const int index = first + thread * blocks + back;
      unsigned left = __ballot_sync(~0u, cost_of(index) > 0);
      for (; left != 0; left &= left - 1) give(__shfl_sync(~0u, index, __ffs(static_cast<int>(left)) - 1));
    }
    give(-1);
    return;
  }
  // Keys have a number in the first 24 bits and a place in a round, or a block, in the last 8.
  uint32_t load[most];  // of the blocks thread, thread + threads, ...
#pragma unroll
  for (int k = 0; k < most; ++k) load[k] = static_cast<uint32_t>(thread + k * threads);
  for (int first = 0; first < params.tiles; first += blocks) {
    uint32_t cost[most];
    int below[most];
#pragma unroll
    for (int k = 0; k < most; ++k) {
      const int place = thread + k * threads;
      const uint32_t missing = longest - (place < blocks ? cost_of(first + place) : 0);
      cost[k] = missing << 8 | static_cast<uint32_t>(place);
      if (first == 0 && place == block) memory.dealt_to_this = cost[k];
      memory.cost[place] = cost[k];
      memory.load[place] = load[k];
    }
    barrier_groups<threads>();
    if (first == 0) {  // at once: all have nothing to do
#pragma unroll
      for (int k = 0; k < most; ++k) load[k] += (longest - (cost[k] >> 8)) << 8;
    } else {
      count_below(memory.cost, blocks, cost, below);
#pragma unroll
      for (int k = 0; k < most; ++k) {
        if (thread + k * threads < blocks) memory.dealt[below[k]] = cost[k];
      }
      count_below(memory.load, blocks, load, below);
      barrier_groups<threads>();
#pragma unroll
      for (int k = 0; k < most; ++k) {
        if (thread + k * threads >= blocks) continue;
        const uint32_t dealt = memory.dealt[below[k]];
        load[k] += (longest - (dealt >> 8)) << 8;
        if (thread + k * threads == block) memory.dealt_to_this = dealt;
      }
      barrier_groups<threads>();
    }
    const uint32_t dealt = memory.dealt_to_this;
    if (dealt >> 8 < longest) give(first + static_cast<int>(dealt % 256));
  }
  give(-1);
}

// Brings the tiles of queries, keys and values in the order in which they are used.
template <class Shape>
__device__ inline void load_tiles(const ForwardParams& params, ForwardMemory<Shape>& memory) {
  tma_prefetch(params.query);
  tma_prefetch(params.key);
  tma_prefetch(params.value);
  tma_prefetch(params.out);
  Ring<ForwardMemory<Shape>::tiles> slots;
  Ring<Shape::query_stages> queries;
  Ring<Shape::stages> keys, values;
  while (true) {
    barrier_wait(&memory.tile_full[slots.stage], slots.parity);
    const ForwardTile tile = memory.tile[slots.stage];
    barrier_arrive(&memory.tile_empty[slots.stage]);
    slots.advance();
    if (tile.first_query == ForwardTile::none) return;
    const bool blind = tile.blocks.begin >= tile.blocks.end;
    const auto load = [&](char* target, const CUtensorMap& map, uint64_t* full, int rows, int first_row, int head) {
      barrier_expect(full, rows * Shape::tile_columns * 2);
#pragma unroll
      for (int chunk = 0; chunk < Shape::tile_columns / 64; ++chunk) {
        tma_load(target + chunk * rows * 128, map, full, 64 * chunk, first_row, head, tile.batch);
      }
    };
    const auto load_key = [&](int block) {
      barrier_wait(&memory.key_empty[keys.stage], keys.parity ^ 1);
      load(memory.key[keys.stage], params.key, &memory.key_full[keys.stage], Shape::keys,
           tile.first_k + block * Shape::keys, tile.kv_head);
      keys.advance();
    };
    const auto load_value = [&](int block) {
      barrier_wait(&memory.value_empty[values.stage], values.parity ^ 1);
      load(memory.value[values.stage], params.value, &memory.value_full[values.stage], Shape::keys,
           tile.first_k + block * Shape::keys, tile.kv_head);
      values.advance();
    };
    if (!blind) load_key(tile.blocks.end - 1);
#pragma unroll 1
    for (int group = 0; group < Shape::groups; ++group) {
      barrier_wait(&memory.query_empty[queries.stage][group], queries.parity ^ 1);
      load(memory.query[queries.stage][group], params.query, &memory.query_full[queries.stage][group], 64,
           tile.first_q + tile.first_query + 64 * group, tile.head);
    }
    queries.advance();
    if (blind) continue;
#pragma unroll 1
    for (int block = tile.blocks.end - 2; block >= tile.blocks.begin; --block) {
      load_key(block);
      load_value(block + 1);
    }
    load_value(tile.blocks.begin);
  }
}

}  // namespace strobe::kernels::cuda::hopper
