// Around the main kernel of attention backward: how its work is divided, its workspace, what comes before and after it.
#pragma once

#include "strobe/kernels/cuda/attention_mma.cuh"
#include "strobe/kernels/cuda/attention_mma.h"

namespace strobe::kernels::cuda {

// How 8 warps divide the products of one query tile and one key tile. Each group of 4 warps owns half of the keys: S
// and dP (score_warps x the rest) are its own affair, dvalue that of its first two warps and dkey of the others
// (key_warps x the rest): larger squares of one product read shared memory less often. The sum for dquery runs over all
// keys and is divided among all warps (query_warps x the rest).
template <int columns_, int queries_, int keys_, int score_warps_, int key_warps_, int query_warps_>
struct BackwardShape {
  static constexpr int columns = columns_, queries = queries_, keys = keys_;
  static constexpr bool sums_dquery = true;  // in the workspace, over blocks of keys
  static constexpr bool rows_as_terms = false;
  static constexpr int groups = 2, group_warps = 4, warps = groups * group_warps, threads = 32 * warps;
  static constexpr int sum_threads = threads;  // that have a part of dquery together
  static constexpr int group_keys = keys / groups;
  static constexpr int score_warps = score_warps_, key_warps = key_warps_, query_warps = query_warps_;
  // Of one warp: rows in tiles of 16, columns in tiles of 8.
  static constexpr int score_rows = queries / score_warps / 16;
  static constexpr int score_columns = group_keys / (group_warps / score_warps) / 8;
  static constexpr int key_rows = group_keys / key_warps / 16;
  static constexpr int key_columns = columns / (group_warps / 2 / key_warps) / 8;
  static constexpr int query_rows = queries / query_warps / 16, query_columns = columns / (warps / query_warps) / 8;
  static constexpr int key_bytes = keys * columns * 2, query_bytes = queries * columns * 2;
  static constexpr int weight_bytes = queries * keys * 2;
  static constexpr int row_bytes = RowTable::columns * queries * 4;
  // Keys, values, P, two tiles of dS, and `stages` of queries, their dout and row values: with two, the next ones come
  // while these are used.
  static constexpr int fixed_bytes = 2 * key_bytes + 3 * weight_bytes;
  static constexpr int stage_bytes = 2 * query_bytes + row_bytes;
  static constexpr int shared_bytes(int stages) { return fixed_bytes + stages * stage_bytes; }
  static_assert(score_rows > 0 && score_columns % 2 == 0 && key_rows > 0 && key_columns % 2 == 0 && query_rows > 0 &&
                query_columns % 2 == 0);
};

template <int columns>
using ShapeFor =
    std::conditional_t<columns == 64, BackwardShape<64, 128, 128, 4, 2, 4>,
                       std::conditional_t<columns <= 128, BackwardShape<columns, 64, 128, 2, 1, columns == 96 ? 4 : 2>,
                                          BackwardShape<columns, 64, 64, 2, 1, 2>>>;

struct BackwardParams {
  AttentionGradArgs grad;
  ScoreFunction<float> score;
  AttentionDropout dropout;
  int64_t all_query_tiles = 0;
  int64_t key_blocks = 0;
  int64_t blocks = 0;
  int64_t heads_together = 1;  // whose key blocks alternate
  int64_t cut_blocks = 0;      // so many of the first ones come in two pieces, their second ones last of all
  float* dquery = nullptr;     // (all_query_tiles, elements of a tile)
  RowTable table = {};         // log_sum is infinity where there is no query or no key
  int* turns = nullptr;        // (all_query_tiles): how far the sums for dquery, or first pieces of cut blocks, are
  int* ticket = nullptr;       // (1)
  float* cut_sums = nullptr;   // (cut_blocks, dvalue and dkey of a block): what their first pieces have found
  int stages = 2;
  bool deterministic = true;
  bool stores_first = false;  // the first key block of a query tile writes its part of dquery, adds to nothing
  bool query_vectors = false;
  bool key_vectors = false;
  bool value_vectors = false;
  bool out_vectors = false;
  bool dout_vectors = false;
  bool dquery_vectors = false;
  bool dkey_vectors = false;
  bool dvalue_vectors = false;
};

// delta = rowsum(dout * out) - dlse, lse in units of log 2, and zeros to add dquery to. A block per tile. delta is the
// diagonal of dout out^T, multiplied in the order of dP: where one key has all the weight, dP - delta is exactly 0.
// Without the 4 ptxas spills in favour of more blocks than shared memory has room for.
template <class T, class Shape>
__global__ void __launch_bounds__(128, 4) prepare_backward(const __grid_constant__ BackwardParams params) {
  constexpr int columns = Shape::columns;
  using Tile = SwizzledTile<columns>;
  extern __shared__ __align__(1024) char shared[];
  const AttentionArgs& args = params.grad.forward;
  const int64_t index = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (index == 0 && threadIdx.x == 0) *params.ticket = 0;
  const int64_t query_tiles = params.table.query_tiles;
  if (index >= query_tiles * args.batch * args.num_heads) return;
  const int64_t matrix = index / query_tiles;
  const int64_t head = matrix % args.num_heads;
  const SequencePair pair(args, matrix / args.num_heads);
  const Band band(pair);
  const int seq_len_q = static_cast<int>(pair.seq_len_q);
  const int first_query = static_cast<int>(index % query_tiles) * Shape::queries;
  if (first_query >= seq_len_q) return;

  char* const out_tile = shared;
  char* const dout_tile = out_tile + Shape::query_bytes;
  load_tile<T, columns, Shape::queries, 128>(
      out_tile, query_view<const T>(args, args.out, pair, head, params.out_vectors), first_query);
  load_tile<T, columns, Shape::queries, 128>(
      dout_tile,
      query_view<const T>(args, params.grad.dout, pair, head, params.dout_vectors, params.grad.dout_dim_stride),
      first_query);
  copy_async_commit();

  const int64_t tile = params.table.first_tile(args, pair, head) + first_query / Shape::queries;
  if (threadIdx.x == 0) params.turns[tile] = 0;
  constexpr int tile_elements = Shape::queries * columns;
  auto* const dquery = reinterpret_cast<float4*>(params.dquery + tile * tile_elements);
  const int first_block = band.begin(first_query) / Shape::keys;
  const bool is_written =
      !Shape::sums_dquery ||
      (params.stores_first && first_block * Shape::keys < band.end(first_query + Shape::queries - 1));
  for (int i = static_cast<int>(threadIdx.x); !is_written && i < tile_elements / 4; i += 128) {
    dquery[i] = float4{0, 0, 0, 0};
  }
  copy_async_wait<0>();
  __syncthreads();

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t dout_lane = shared_address(dout_tile) + Tile::columns_first(lane);
  const uint32_t out_lane = shared_address(out_tile) + Tile::rows_first(lane);
  const int64_t lse_offset = pair.lse_offset(args, head);
  for (int row = static_cast<int>(threadIdx.x) / 32 * 16; row < Shape::queries; row += 64) {
    float products[1][2][4] = {};
    multiply_tiles<T, false, true, columns / 16>(
        products, [&](int, int k) { return Tile::square(dout_lane, row, 2 * k); },
        [&](int, int k) { return Tile::square(out_lane, row, 2 * k); });
    if (lane / 8 != lane % 4) continue;  // only these lanes hold elements of the diagonal: row lane / 4, and 8 more
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int tile_row = row + 8 * h + lane / 4, query = first_query + tile_row;
      const bool sees = query < seq_len_q && band.begin(query) < band.end(query);
      float delta = sees ? products[0][h][2 * h + lane / 4 % 2] : 0.0f;
      float log_sum = std::numeric_limits<float>::infinity();
      if (sees) {
        if (params.grad.dlse != nullptr) delta -= static_cast<const float*>(params.grad.dlse)[lse_offset + query];
        log_sum = static_cast<const float*>(args.lse)[lse_offset + query] * log2e;
      }
      params.table.put(tile, tile_row, log_sum, delta);
    }
  }
}

// Adds four floats of a thread to a tile of sums, as one operation where the GPU has it. thread_sums: of the tile, at
// lane_floats * threadIdx.x; all threads of the block together fill `fragment`.
#if __CUDA_ARCH__ >= 900
inline constexpr int lane_floats = 4;
#else
inline constexpr int lane_floats = 1;
#endif
template <int threads>
__device__ inline void add_to(float* thread_sums, int fragment, const float (&values)[4]) {
  float* const to = thread_sums + 4 * fragment * threads;
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(values[0]), "f"(values[1]),
               "f"(values[2]), "f"(values[3])
               : "memory");
#else
#pragma unroll
  for (int c = 0; c < 4; ++c) atomicAdd(to + c * threads, values[c]);
#endif
}
// What add_to summed.
template <int threads>
__device__ inline void read_sum(float (&values)[4], const float* thread_sums, int fragment) {
  const float* const from = thread_sums + 4 * fragment * threads;
#if __CUDA_ARCH__ >= 900
  const float4 sum = *reinterpret_cast<const float4*>(from);
  values[0] = sum.x, values[1] = sum.y, values[2] = sum.z, values[3] = sum.w;
#else
#pragma unroll
  for (int c = 0; c < 4; ++c) values[c] = from[c * threads];
#endif
}

// dquery = softmax_scale * the sum, rounded. A block per tile.
template <class T, class Shape>
__global__ void __launch_bounds__(Shape::threads) finish_backward(const __grid_constant__ BackwardParams params) {
  using Tile = SwizzledTile<Shape::columns>;
  extern __shared__ __align__(1024) char shared[];
  strobe::cuda::wait_for_earlier_kernels();
  const AttentionArgs& args = params.grad.forward;
  const int64_t number = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  const int64_t query_tiles = params.table.query_tiles;
  // The last heads come first: the main kernel left those in the L2 cache.
  const int64_t index = query_tiles * args.batch * args.num_heads - 1 - number;
  if (index < 0) return;
  const int64_t matrix = index / query_tiles;
  const int64_t head = matrix % args.num_heads;
  const SequencePair pair(args, matrix / args.num_heads);
  const int first_query = static_cast<int>(index % query_tiles) * Shape::queries;
  if (first_query >= pair.seq_len_q) return;
  const int64_t tile = params.table.first_tile(args, pair, head) + first_query / Shape::queries;
  const int part = static_cast<int>(threadIdx.x) / Shape::sum_threads;
  const float* const sums = params.dquery + tile * (Shape::queries * Shape::columns) +
                            part * (Shape::queries * Shape::columns / 2) +
                            lane_floats * (threadIdx.x % Shape::sum_threads);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int query_row = warp % Shape::query_warps * 16 * Shape::query_rows;
  const int query_column = warp / Shape::query_warps * 8 * Shape::query_columns;
  const float scale = params.score.magnitude;  // the keys that were summed have its sign
  const uint32_t stores = shared_address(shared) + Tile::stores(lane);
#pragma unroll
  for (int r = 0; r < Shape::query_rows; ++r) {
#pragma unroll
    for (int n = 0; n < Shape::query_columns; n += 2) {
      if (query_column + 8 * n >= args.head_dim) continue;  // nobody may have written these
      float sum[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        read_sum<Shape::sum_threads>(sum[i], sums, r * Shape::query_columns + n + i);
#pragma unroll
        for (float& x : sum[i]) x *= scale;
      }
      Tile::template store_square<T>(stores, query_row + 16 * r, query_column / 8 + n, sum[0], sum[1]);
    }
  }
  __syncthreads();
  const auto rows = query_view<T>(args, params.grad.dquery, pair, head, params.dquery_vectors);
  constexpr int count = Shape::queries / Shape::warps;
  store_rows<T, Shape::columns, count>(shared, warp * count, rows, first_query + warp * count, lane);
}

// The workspace, cut into its arrays; without a base it is only measured.
template <class Shape>
BackwardParams backward_params(const AttentionGradArgs& grad, void* base, size_t& bytes) {
  const AttentionArgs& args = grad.forward;
  BackwardParams params{.grad = grad, .score = ScoreFunction<float>(args), .dropout = dropout_of(args)};
  const bool packed = args.cu_seqlens_q != nullptr;
  const int64_t query_tiles = strobe::cuda::ceil_div(args.seq_len_q, Shape::queries);
  const int64_t head_tiles = packed ? args.total_q / Shape::queries + args.batch : query_tiles;
  // Where the scale is next to 0 all scores are equal, and this one leaves them so.
  constexpr float least_scale = 1e-35f;
  params.table = {.data = nullptr,
                  .queries = Shape::queries,
                  .query_tiles = query_tiles,
                  .head_tiles = head_tiles,
                  .as_terms = Shape::rows_as_terms,
                  .scale = std::max(params.score.magnitude * log2e, least_scale)};
  params.all_query_tiles = args.num_heads * head_tiles * (packed ? 1 : args.batch);
  params.key_blocks = strobe::cuda::ceil_div(args.seq_len_k, Shape::keys);
  params.blocks = params.key_blocks * args.batch * args.num_kv_heads;
  bytes = 0;
  const auto take = [&]<class E>(E*& array, int64_t count) {
    array = reinterpret_cast<E*>(static_cast<char*>(base) + bytes);
    bytes += (static_cast<size_t>(count) * sizeof(E) + 63) / 64 * 64;
  };
  take(params.dquery, Shape::sums_dquery ? params.all_query_tiles * Shape::queries * Shape::columns : 0);
  take(params.table.data, params.all_query_tiles * (Shape::row_bytes / 4));
  take(params.turns, params.all_query_tiles);
  take(params.ticket, 1);
  params.deterministic = args.deterministic;
  // In turns, more heads would not share the L2 cache well, and fewer would wait more for each other's blocks.
  if (params.deterministic) params.heads_together = 64;
  params.query_vectors = rows_are_vectors(args.query);
  params.key_vectors = rows_are_vectors(args.key);
  params.value_vectors = rows_are_vectors(args.value);
  params.out_vectors = rows_are_vectors(args.out);
  params.dout_vectors = rows_are_vectors(grad.dout, grad.dout_dim_stride);
  params.dquery_vectors = rows_are_vectors(grad.dquery);
  params.dkey_vectors = rows_are_vectors(grad.dkey);
  params.dvalue_vectors = rows_are_vectors(grad.dvalue);
  return params;
}

}  // namespace strobe::kernels::cuda
