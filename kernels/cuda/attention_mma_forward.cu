// Attention forward on tensor cores: FlashAttention-2 (Dao 2023), algorithm 1. A block owns some queries of a head,
// each warp 16 or 32 of them, and nothing but keys and values is shared between warps.
#include <algorithm>

#include "strobe/kernels/cuda/attention_mma.cuh"
#include "strobe/kernels/cuda/attention_mma.h"

namespace strobe::kernels::cuda {
namespace {

struct ForwardParams {
  AttentionArgs args;
  ScoreFunction<float> score;
  AttentionDropout dropout;
  int64_t query_blocks;
  int64_t blocks;
  int64_t group_heads;  // heads that share keys
  int stages;
  bool query_vectors;
  bool key_vectors;
  bool value_vectors;
  bool out_vectors;
  RowTable table;  // with data: only to split large lse of an earlier call in two, for backward; in `general` alone
};

// Up to head_dim 128 a warp has 32 queries, so that a fragment of a key or value feeds two products; above, the
// registers hold the result of 16.
template <int columns, bool general>
struct ForwardTile {
  static constexpr int warps = columns <= 128 ? 4 : 8;
  static constexpr int row_tiles = columns <= 128 ? 2 : 1;
  static constexpr int warp_rows = 16 * row_tiles;
  static constexpr int threads = 32 * warps;
  static constexpr int queries = warps * warp_rows;
  // As many as the registers hold; softcap, ALiBi and dropout need some, too.
  static constexpr int keys = (columns <= 64 ? 128 : 64) / (general && columns <= 128 ? 2 : 1);
  // In a masked block of keys, parts that no query of the warp sees are left out.
  static constexpr int part_keys = keys < 64 ? keys : 64;
  // Whether the products with the first keys begin before their values have come.
  static constexpr bool values_later = columns <= 64;
  static constexpr int blocks_at_once = columns <= 128 ? 2 : 1;
  static constexpr int query_bytes = queries * columns * 2;
  static constexpr int key_bytes = keys * columns * 2;
  // `stages` of keys and values: with two, the next ones come while these are used.
  static constexpr int shared_bytes(int stages) { return query_bytes + stages * 2 * key_bytes; }
};

// Whether a query of a block has an lse that is to be split. All threads take part.
template <class Shape>
__device__ inline bool has_large_lse(const ForwardParams& params, int64_t first, int64_t stride) {
  const AttentionArgs& args = params.args;
  bool large = false;
#pragma unroll 2
  for (int64_t index = first; index < params.blocks; index += stride) {
    const int64_t matrix = index / params.query_blocks;
    const SequencePair pair(args, matrix / args.num_heads);
    const int64_t row = ((matrix + 1) * params.query_blocks - 1 - index) * Shape::queries + threadIdx.x;
    if (threadIdx.x >= Shape::queries || row >= pair.seq_len_q) continue;
    const float lse = fabsf(static_cast<const float*>(args.lse)[pair.lse_offset(args, matrix % args.num_heads) + row]);
    large |= lse > exact_lse && lse < std::numeric_limits<float>::infinity();
  }
  return __syncthreads_or(large);
}

// One block of queries.
template <class T, int columns, bool general>
__device__ inline void attend(const ForwardParams& params, int64_t index) {
  using Shape = ForwardTile<columns, general>;
  using Tile = SwizzledTile<columns>;
  constexpr int R = Shape::row_tiles;
  constexpr int key_tiles = Shape::keys / 8;
  constexpr int dim_tiles = columns / 8;
  constexpr float infinity = std::numeric_limits<float>::infinity();
  extern __shared__ __align__(1024) char shared[];

  const AttentionArgs& args = params.args;
  const int64_t matrix = index / params.query_blocks;  // batch * num_heads + head
  const int64_t batch = matrix / args.num_heads, head = matrix - batch * args.num_heads;
  const int64_t kv_head = head / params.group_heads;
  const SequencePair pair(args, batch);
  const Band band(pair);
  const int seq_len_q = static_cast<int>(pair.seq_len_q);
  // The last queries first: under a causal mask they have most to do.
  const int first_query = static_cast<int>((matrix + 1) * params.query_blocks - 1 - index) * Shape::queries;
  if (first_query >= seq_len_q) return;
  float* const lse = static_cast<float*>(args.lse) + pair.lse_offset(args, head);
  const bool splits_lse = general && params.table.data != nullptr;
  if (splits_lse && !has_large_lse<Shape>(params, index, params.blocks)) return;

  const auto query = query_view<const T>(args, args.query, pair, head, params.query_vectors);
  const auto key = key_view<const T>(args, args.key, pair, kv_head, params.key_vectors);
  const auto value = key_view<const T>(args, args.value, pair, kv_head, params.value_vectors);
  char* const query_tile = shared;
  const auto key_tile = [&](int stage) { return shared + Shape::query_bytes + stage * 2 * Shape::key_bytes; };
  const auto value_tile = [&](int stage) { return key_tile(stage) + Shape::key_bytes; };

  const int last_query = min(first_query + Shape::queries, seq_len_q) - 1;
  const int first_block = band.begin(first_query) / Shape::keys;
  const int end_block = (band.end(last_query) + Shape::keys - 1) / Shape::keys;  // 0 or less: no key is visible

  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_query = first_query + warp * Shape::warp_rows;
  const int warp_last = min(warp_query + Shape::warp_rows, seq_len_q) - 1;
  const int lane_query = warp_query + lane / 4;

  float out[R][dim_tiles][4] = {};
  float maximum[R][2], sum[R][2] = {};  // in units of log 2; of this lane's keys alone
#pragma unroll
  for (int r = 0; r < R; ++r) maximum[r][0] = maximum[r][1] = -infinity;

  if (first_block < end_block) {
    load_tile<T, columns, Shape::queries, Shape::threads>(query_tile, query, first_query);
    load_tile<T, columns, Shape::keys, Shape::threads>(key_tile(0), key, (end_block - 1) * Shape::keys);
    if (Shape::values_later) copy_async_commit();
    load_tile<T, columns, Shape::keys, Shape::threads>(value_tile(0), value, (end_block - 1) * Shape::keys);
    copy_async_commit();
    if (params.score.sign != 1) {
      copy_async_wait<0>();
      __syncthreads();
      multiply_tile<T, columns, Shape::queries, Shape::threads>(query_tile, params.score.sign);
    }
  }

  const float scale2 = (general && params.score.changes_products() ? 1.0f : params.score.magnitude * log2e);
  const uint32_t query_lane = shared_address(query_tile) + Tile::columns_first(lane);
  // The products of this warp with one block of keys; `edge`: some scores may be masked.
  const auto visit = [&]<bool edge>(int first_key, int stage, auto&& wait_for_values) {
    constexpr int parts = edge ? Shape::keys / Shape::part_keys : 1;
    constexpr int part_tiles = key_tiles / parts;
    const auto hidden = [&](int part) {
      const int first = first_key + Shape::part_keys * part;
      return parts > 1 && (first >= band.end(warp_last) || first + Shape::part_keys <= band.begin(warp_query));
    };

    // S = Q K^T
    float scores[R][key_tiles][4] = {};
    const uint32_t key_lane = shared_address(key_tile(stage)) + Tile::rows_first(lane);
    const auto query_at = [&](int r, int step) {
      return Tile::square(query_lane, warp * Shape::warp_rows + 16 * r, 2 * step);
    };
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      if (hidden(part)) continue;
      float products[R][part_tiles][4] = {};
      multiply_tiles<T, false, true, columns / 16>(products, query_at, [&](int n, int step) {
        return Tile::square(key_lane, 8 * part_tiles * part + 16 * n, 2 * step);
      });
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int n = 0; n < part_tiles; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) scores[r][part_tiles * part + n][c] = products[r][n][c];
        }
      }
    }

    if constexpr (general) {
      if (params.score.changes_products()) {
        const float slope2 = params.score.slope_of(head) * log2e;
        const float softcap2 = params.score.softcap * log2e;
        const float inner =
            softcap2 != 0 ? params.score.magnitude / params.score.softcap : params.score.magnitude * log2e;
        const int diagonal = band.seq_len_k - seq_len_q;
#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
          for (int n = 0; n < key_tiles; ++n) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              const int right =
                  first_key + 8 * n + 2 * (lane % 4) + c % 2 - diagonal - (lane_query + 16 * r + c / 2 * 8);
              float score = scores[r][n][c] * inner;
              if (softcap2 != 0) score = softcap2 * tanh_fast(score);
              scores[r][n][c] = fmaf(-slope2, fabsf(static_cast<float>(right)), score);
            }
          }
        }
      }
    }
    if (edge && (first_key < band.begin(warp_last) || first_key + Shape::keys > band.end(warp_query))) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = lane_query + 16 * r + 8 * h;
          const int begin = band.begin(row) - first_key - 2 * (lane % 4);
          const int end = band.end(row) - first_key - 2 * (lane % 4);
#pragma unroll
          for (int n = 0; n < key_tiles; ++n) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              if (8 * n + c < begin || 8 * n + c >= end) scores[r][n][2 * h + c] = -infinity;
            }
          }
        }
      }
    }

    // The maximum that exponents are taken relative to only follows when it is 8 behind: weights up to 2^8 are as
    // exact, and most tiles need not touch the result.
    float factor[R][2];
    bool grows = false;
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float largest = -infinity;
#pragma unroll
        for (int n = 0; n < key_tiles; ++n) {
          largest = fmaxf(largest, fmaxf(scores[r][n][2 * h], scores[r][n][2 * h + 1]));
        }
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2)) * scale2;
        factor[r][h] = 1;
        if (largest > maximum[r][h] + 8) {
          factor[r][h] = exp2_fast(maximum[r][h] - largest);
          maximum[r][h] = largest;
          grows = true;
        }
      }
    }
    if (__any_sync(~0u, grows)) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        sum[r][0] *= factor[r][0];
        sum[r][1] *= factor[r][1];
#pragma unroll
        for (int d = 0; d < dim_tiles; ++d) {
#pragma unroll
          for (int c = 0; c < 4; ++c) out[r][d][c] *= factor[r][c / 2];
        }
      }
    }

    // P = exp(S - maximum), 16 keys at a time.
    const auto weigh = [&](int step) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float offset = maximum[r][h] == -infinity ? 0.0f : -maximum[r][h];
#pragma unroll
          for (int n = 2 * step; n < 2 * step + 2; ++n) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              float& p = scores[r][n][2 * h + c];
              p = exp2_fast(fmaf(p, scale2, offset));
              sum[r][h] += p;
            }
          }
        }
      }
    };
    if constexpr (general) {
#pragma unroll
      for (int step = 0; step < key_tiles / 2; ++step) weigh(step);
      if (params.dropout.drops()) {
#pragma unroll
        for (int n = 0; n < key_tiles; n += 4) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const PhiloxCounter words =
                params.dropout.bytes(matrix, lane_query, first_key + 8 * n + 2 * (lane % 4) + c);
#pragma unroll
            for (int r = 0; r < R; ++r) {
#pragma unroll
              for (int h = 0; h < 2; ++h) {
                const uint32_t word = R == 2 ? words[2 * r + h] : warp % 2 == 0 ? words[h] : words[2 + h];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                  if ((word >> (8 * k) & 255) >= params.dropout.keep_below) scores[r][n + k][2 * h + c] = 0;
                }
              }
            }
          }
        }
      }
    }

    // O += P V
    wait_for_values();
    const uint32_t value_lane = shared_address(value_tile(stage)) + Tile::columns_first(lane);
    constexpr int steps = part_tiles / 2, pairs = dim_tiles / 2;
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      if (hidden(part)) continue;
      if constexpr (!general) weigh(steps * part);
      uint32_t a[R][4], b[2][4];
      load_matrices_transposed(b[0], Tile::square(value_lane, 16 * steps * part, 0));
#pragma unroll
      for (int now = 0; now < steps * pairs; ++now) {
        const int step = steps * part + now / pairs, n = now % pairs, next = now + 1;
        if (n == 0) {
#pragma unroll
          for (int r = 0; r < R; ++r) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float* const p = &scores[r][2 * step + i / 2][i % 2 * 2];
              a[r][i] = pack<T>(p[0], p[1]);
            }
          }
          if (!general && now < (steps - 1) * pairs) weigh(step + 1);
        }
        if (next < steps * pairs) {
          load_matrices_transposed(b[next % 2],
                                   Tile::square(value_lane, 16 * (steps * part + next / pairs), next % pairs * 2));
        }
#pragma unroll
        for (int r = 0; r < R; ++r) {
          multiply_add<T>(out[r][2 * n], a[r], b[now % 2][0], b[now % 2][1]);
          multiply_add<T>(out[r][2 * n + 1], a[r], b[now % 2][2], b[now % 2][3]);
        }
      }
    }
  };

  for (int block = end_block - 1, stage = 0; block >= first_block; --block, stage ^= params.stages - 1) {
    const int first_key = block * Shape::keys;
    const int arriving = block - (params.stages - 1);
    const bool values_pending = Shape::values_later && block == end_block - 1;
    if (params.stages == 2) values_pending ? copy_async_wait<1>() : copy_async_wait<0>();
    __syncthreads();
    if (arriving >= first_block && arriving < end_block - 1) {
      const int other = stage ^ (params.stages - 1);
      load_tile<T, columns, Shape::keys, Shape::threads>(key_tile(other), key, arriving * Shape::keys);
      load_tile<T, columns, Shape::keys, Shape::threads>(value_tile(other), value, arriving * Shape::keys);
    }
    copy_async_commit();
    if (params.stages == 1) {
      copy_async_wait<0>();
      __syncthreads();
    }
    const auto wait_for_values = [&] {
      if (!values_pending) return;
      copy_async_wait<1>();
      block_barrier<Shape::threads>();
    };
    if (warp_query > warp_last || first_key >= band.end(warp_last) ||
        first_key + Shape::keys <= band.begin(warp_query)) {
      wait_for_values();
    } else if (general || first_key < band.begin(warp_last) || first_key + Shape::keys > band.end(warp_query)) {
      visit.template operator()<true>(first_key, stage, wait_for_values);
    } else {
      visit.template operator()<false>(first_key, stage, wait_for_values);
    }
  }

  // The warp's queries are its own: their place holds the result on its way to whole rows.
  if (warp_query > warp_last) return;
  const uint32_t stores = shared_address(query_tile) + Tile::stores(lane);
  const int64_t table_tile = splits_lse ? params.table.first_tile(args, pair, head) : 0;
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane_query + 16 * r + 8 * h;
      const bool sees = band.begin(row) < band.end(row);
      float total = sum[r][h];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const float own_lse = (maximum[r][h] + log2f(total)) * ln2;
      if (splits_lse) {
        // lse may belong to more keys than these: then the two differ by more than rounding.
        if (lane % 4 == 0 && row < seq_len_q && fabsf(own_lse) > exact_lse &&
            fabsf(own_lse - lse[row]) <= 4.8e-7f * fabsf(own_lse)) {
          params.table.split(table_tile, row, log2f(total), maximum[r][h]);
        }
        continue;
      }
      if (lane % 4 == 0 && row < seq_len_q) lse[row] = sees ? own_lse : -infinity;
      const float inverse = params.dropout.scale<float>() / total;
#pragma unroll
      for (int d = 0; d < dim_tiles; ++d) {
#pragma unroll
        for (int c = 2 * h; c < 2 * h + 2; ++c) out[r][d][c] = sees ? out[r][d][c] * inverse : 0.0f;
      }
    }
    if (splits_lse) continue;
#pragma unroll
    for (int d = 0; d < dim_tiles; d += 2) {
      Tile::template store_square<T>(stores, warp * Shape::warp_rows + 16 * r, d, out[r][d], out[r][d + 1]);
    }
  }
  if (splits_lse) return;
  __syncwarp();
  const auto result = query_view<T>(args, args.out, pair, head, params.out_vectors);
  store_rows<T, columns, Shape::warp_rows>(query_tile, warp * Shape::warp_rows, result, warp_query, lane);
}

// `general`: with softcap, ALiBi or dropout, or to split large lse. A grid that splits is small: it has little to find.
template <class T, int columns, bool general>
__global__ void __launch_bounds__(ForwardTile<columns, general>::threads, ForwardTile<columns, general>::blocks_at_once)
    attention_forward(const __grid_constant__ ForwardParams params) {
  int64_t index = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (index >= params.blocks) return;
  if constexpr (!general) return attend<T, columns, general>(params, index);
  const bool splits_lse = params.table.data != nullptr;
  if (splits_lse && !has_large_lse<ForwardTile<columns, general>>(params, index, gridDim.x)) return;
#pragma unroll 1
  do {
    attend<T, columns, general>(params, index);
    __syncthreads();
    index += gridDim.x;
  } while (splits_lse && index < params.blocks);
}

// Calls f<T, columns, general>().
template <class F>
auto dispatch_forward(const AttentionArgs& args, bool splits_lse, F&& f) {
  const bool general = splits_lse || args.softcap != 0 || args.alibi_slopes != nullptr || dropout_of(args).drops();
  return dispatch_mma(args, [&]<class T, int columns>() {
    return general ? f.template operator()<T, columns, true>() : f.template operator()<T, columns, false>();
  });
}

void launch_forward(const AttentionArgs& args, const RowTable& table, const Stream& stream) {
  dispatch_forward(args, table.data != nullptr, [&]<class T, int columns, bool general>() {
    using Shape = ForwardTile<columns, general>;
    const int64_t query_blocks = strobe::cuda::ceil_div(args.seq_len_q, Shape::queries);
    const int64_t blocks = query_blocks * args.batch * args.num_heads;
    const strobe::cuda::DeviceProperties& gpu = strobe::cuda::device_properties(stream.device);
    const ForwardParams params{args,
                               ScoreFunction<float>(args),
                               dropout_of(args),
                               query_blocks,
                               blocks,
                               args.num_heads / args.num_kv_heads,
                               Shape::shared_bytes(2) <= gpu.shared_bytes_per_block ? 2 : 1,
                               rows_are_vectors(args.query),
                               rows_are_vectors(args.key),
                               rows_are_vectors(args.value),
                               rows_are_vectors(args.out),
                               table};
    strobe::cuda::launch("flash_attention_forward", attention_forward<T, columns, general>,
                         grid_of(table.data == nullptr ? blocks : std::min<int64_t>(blocks, 2 * gpu.multiprocessors)),
                         dim3(Shape::threads), Shape::shared_bytes(params.stages), stream, params);
  });
}

}  // namespace

AttentionTile mma_attention_forward_tile(const AttentionArgs& args, Device) {
  return dispatch_forward(args, false, [&]<class T, int columns, bool general>() {
    using Shape = ForwardTile<columns, general>;
    return AttentionTile{Shape::queries, Shape::keys};
  });
}

int mma_attention_forward_shared_bytes(const AttentionArgs& args) {
  return dispatch_forward(args, false, [&]<class T, int columns, bool general>() {
    return ForwardTile<columns, general>::shared_bytes(1);
  });
}

void mma_attention_forward(const AttentionArgs& args, const Stream& stream) { launch_forward(args, {}, stream); }

void mma_attention_split_lse(const AttentionArgs& args, const RowTable& table, const Stream& stream) {
  launch_forward(args, table, stream);
}

}  // namespace strobe::kernels::cuda
