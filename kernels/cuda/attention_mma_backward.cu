// Attention backward on tensor cores: FlashAttention-2 (Dao 2023), algorithm 2. A block owns some keys of a kv head and
// visits the queries that see them; dkey and dvalue stay in registers, dquery is summed in the workspace.
#include <algorithm>

#include "strobe/kernels/cuda/attention_mma_backward.cuh"

namespace strobe::kernels::cuda {
namespace {

template <class T, class Shape, bool general>
__global__ void __launch_bounds__(Shape::threads, 1) attention_backward(const __grid_constant__ BackwardParams params) {
  constexpr int columns = Shape::columns;
  using Tile = SwizzledTile<columns>;
  using Weights = SwizzledTile<Shape::keys>;
  extern __shared__ __align__(1024) char shared[];
  const AttentionArgs& args = params.grad.forward;

  int64_t index = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (params.deterministic) {
    // Blocks wait for blocks of lower numbers, so these must have started: number them in the order of their starts.
    int* const number = reinterpret_cast<int*>(shared);
    if (threadIdx.x == 0) *number = atomicAdd(params.ticket, 1);
    __syncthreads();
    index = *number;
    __syncthreads();
  }
  if (index >= params.blocks) return;
  // Blocks of one head that run together share its queries, but in deterministic mode they wait for each other: there,
  // the blocks of some heads alternate. The first keys come first: under a causal mask they have most to do.
  const int64_t part = index / (params.heads_together * params.key_blocks);
  const int64_t first_matrix = part * params.heads_together;
  const int64_t part_heads = min(params.heads_together, args.batch * args.num_kv_heads - first_matrix);
  const int64_t part_index = index - first_matrix * params.key_blocks;
  const int key_block = static_cast<int>(part_index / part_heads);
  const int64_t matrix = first_matrix + part_index - key_block * part_heads;
  const int64_t batch = matrix / args.num_kv_heads, kv_head = matrix - batch * args.num_kv_heads;
  const SequencePair pair(args, batch);
  const Band band(pair);
  const int seq_len_q = static_cast<int>(pair.seq_len_q);
  const int first_key = key_block * Shape::keys;
  if (first_key >= band.seq_len_k) return;

  const int group_heads = static_cast<int>(args.num_heads / args.num_kv_heads);
  char* const key_tile = shared;
  char* const value_tile = key_tile + Shape::key_bytes;
  char* const p_tile = value_tile + Shape::key_bytes;
  const auto ds_tile = [&](int stage) { return p_tile + (1 + stage) * Shape::weight_bytes; };
  const auto query_tile = [&](int stage) { return shared + Shape::fixed_bytes + stage * Shape::stage_bytes; };
  const auto dout_tile = [&](int stage) { return query_tile(stage) + Shape::query_bytes; };
  const auto row_values = [&](int stage) { return query_tile(stage) + 2 * Shape::query_bytes; };

  // Query tiles that see these keys.
  const int past = min(seq_len_q, first_key + Shape::keys - band.lower);
  const int first_tile = max(first_key - band.upper, 0) / Shape::queries;
  const int tiles = (past <= 0 ? 0 : (past + Shape::queries - 1) / Shape::queries) - first_tile;
  const int steps = tiles <= 0 ? 0 : tiles * group_heads;
  const int64_t head_places = params.table.head_tiles;
  // One query tile of one head, and its place in the workspace.
  struct Step {
    int head;
    int tile;
    int64_t place;
  };
  const auto after = [&](const Step& step) {
    if (step.tile + 1 < first_tile + tiles) return Step{step.head, step.tile + 1, step.place + 1};
    return Step{step.head + 1, first_tile, step.place + 1 - tiles + head_places};
  };

  const int first_head = static_cast<int>(kv_head) * group_heads;
  // Of the head whose queries are loaded next.
  auto query = query_view<const T>(args, args.query, pair, first_head, params.query_vectors);
  auto dout =
      query_view<const T>(args, params.grad.dout, pair, first_head, params.dout_vectors, params.grad.dout_dim_stride);
  const auto load_queries = [&](const Step& step, int stage) {
    load_tile<T, columns, Shape::queries, Shape::threads>(query_tile(stage), query, step.tile * Shape::queries);
    load_tile<T, columns, Shape::queries, Shape::threads>(dout_tile(stage), dout, step.tile * Shape::queries);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < Shape::row_bytes / 16) {
      copy_async_16(shared_address(row_values(stage)) + 16 * thread, params.table.at(step.place, 0) + 4 * thread);
    }
    copy_async_commit();
  };

  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = warp / Shape::group_warps, member = warp % Shape::group_warps;
  // This warp's place in the products: S and dP, dkey or dvalue, dquery.
  const int score_row = member % Shape::score_warps * 16 * Shape::score_rows;
  const int score_column = group * Shape::group_keys + member / Shape::score_warps * 8 * Shape::score_columns;
  const bool sums_dvalue = member < Shape::group_warps / 2;
  const int key_row = group * Shape::group_keys + member % Shape::key_warps * 16 * Shape::key_rows;
  const int key_column = member % (Shape::group_warps / 2) / Shape::key_warps * 8 * Shape::key_columns;
  const int query_row = warp % Shape::query_warps * 16 * Shape::query_rows;
  const int query_column = warp / Shape::query_warps * 8 * Shape::query_columns;

  float key_sum[Shape::key_rows][Shape::key_columns][4] = {};  // of dvalue or dkey

  Step current{first_head, first_tile, params.table.first_tile(args, pair, first_head) + first_tile};
  Step last{}, last_but_one{};
  int loaded_head = first_head;
  if (steps > 0) {
    load_tile<T, columns, Shape::keys, Shape::threads>(
        key_tile, key_view<const T>(args, args.key, pair, kv_head, params.key_vectors), first_key);
    load_tile<T, columns, Shape::keys, Shape::threads>(
        value_tile, key_view<const T>(args, args.value, pair, kv_head, params.value_vectors), first_key);
    load_queries(current, 0);
    if (params.score.sign != 1) {
      copy_async_wait<0>();
      __syncthreads();
      multiply_tile<T, columns, Shape::keys, Shape::threads>(key_tile, params.score.sign);
    }
  }
  const float scale2 = params.score.magnitude * log2e;
  uint32_t tile_columns = Tile::columns_first(lane), tile_rows = Tile::rows_first(lane);
  uint32_t weight_columns = Weights::columns_first(lane), weight_rows = Weights::rows_first(lane);
  uint32_t weight_stores = Weights::stores(lane);

  // dQ += dS K
  const auto add_dquery = [&](const Step& step, int stage) {
    const uint32_t ds_lane = shared_address(ds_tile(stage)) + weight_columns;
    const uint32_t key_lane = shared_address(key_tile) + tile_columns;
    float dquery[Shape::query_rows][Shape::query_columns][4] = {};
    multiply_tiles<T, false, false, Shape::keys / 16>(
        dquery, [&](int r, int k) { return Weights::square(ds_lane, query_row + 16 * r, 2 * k); },
        [&](int n, int k) { return Tile::square(key_lane, 16 * k, query_column / 8 + 2 * n); });
    float* const sums = params.dquery + step.place * (Shape::queries * columns) + lane_floats * threadIdx.x;
#pragma unroll
    for (int r = 0; r < Shape::query_rows; ++r) {
#pragma unroll
      for (int n = 0; n < Shape::query_columns; ++n) {
        add_to<Shape::threads>(sums, r * Shape::query_columns + n, dquery[r][n]);
      }
    }
  };
  // In deterministic mode key blocks add to dquery of a query tile in ascending order.
  const auto turn_of = [&](const Step& step) {
    return key_block - band.begin(step.tile * Shape::queries) / Shape::keys;
  };
  const auto read_turn = [&](const Step& step) {
    int turn;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(turn) : "l"(params.turns + step.place) : "memory");
    return turn;
  };
  const auto end_turn = [&](const Step& step) {
    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(params.turns + step.place), "r"(turn_of(step) + 1)
                 : "memory");
  };

  // dquery of a step is added during the next one, so that its barrier serves both, by one group before its own
  // products and by the other after them: while one computes exponentials the other keeps the tensor cores busy.
  for (int step = 0; steps > 0; ++step) {
    // Addresses made of these are cheaper to compute again than to keep: the compiler shall not know them.
    asm volatile(""
                 : "+r"(tile_columns), "+r"(tile_rows), "+r"(weight_columns), "+r"(weight_rows), "+r"(weight_stores));
    const int ds_stage = step % 2, stage = ds_stage & (params.stages - 1);
    const Step next = after(current);
    const int arriving = step + params.stages - 1;
    if (params.stages == 2) copy_async_wait<0>();
    __syncthreads();
    if (arriving > 0 && arriving < steps) {
      const Step& arrival = params.stages == 2 ? next : current;
      if (arrival.head != loaded_head) {
        loaded_head = arrival.head;
        query.data += args.query.head_stride;
        dout.data += params.grad.dout.head_stride;
      }
      load_queries(arrival, stage ^ (params.stages - 1));
    }
    if (params.stages == 1) {
      copy_async_wait<0>();
      __syncthreads();
    }
    if (group == 1 && step > 0) add_dquery(last, ds_stage ^ 1);
    if (step < steps) {
      const int first_query = current.tile * Shape::queries;
      const int lane_query = first_query + score_row + lane / 4;
      int turn = 0;
      if (params.deterministic && threadIdx.x == 0) turn = read_turn(current);

      // S = Q K^T, dP = dO V^T
      float p[Shape::score_rows][Shape::score_columns][4] = {};
      float ds[Shape::score_rows][Shape::score_columns][4] = {};
      {
        const uint32_t query_lane = shared_address(query_tile(stage)) + tile_columns;
        const uint32_t dout_lane = shared_address(dout_tile(stage)) + tile_columns;
        const uint32_t key_lane = shared_address(key_tile) + tile_rows;
        const uint32_t value_lane = shared_address(value_tile) + tile_rows;
        multiply_tiles<T, false, true, columns / 16>(
            p, [&](int r, int k) { return Tile::square(query_lane, score_row + 16 * r, 2 * k); },
            [&](int n, int k) { return Tile::square(key_lane, score_column + 16 * n, 2 * k); });
        multiply_tiles<T, false, true, columns / 16>(
            ds, [&](int r, int k) { return Tile::square(dout_lane, score_row + 16 * r, 2 * k); },
            [&](int n, int k) { return Tile::square(value_lane, score_column + 16 * n, 2 * k); });
      }

      // P = exp(S - lse), dS = P (dP - delta); dropout: the P that reaches dvalue is P times the mask, as is dP.
      const int head = current.head;
      const float drop_scale = general ? params.dropout.scale<float>() : 1.0f;
      const float slope2 = general ? params.score.slope_of(head) * log2e : 0.0f;
      PhiloxCounter words[2];
      float log_sum[Shape::score_rows][2], delta[Shape::score_rows][2], reference[Shape::score_rows][2];
      bool has_reference = false;
#pragma unroll
      for (int r = 0; r < Shape::score_rows; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float* const row =
              reinterpret_cast<const float*>(row_values(stage)) + score_row + 16 * r + 8 * h + lane / 4;
          log_sum[r][h] = row[RowTable::log_sum * Shape::queries];
          delta[r][h] = row[RowTable::delta * Shape::queries];
          reference[r][h] = row[RowTable::reference * Shape::queries];
          has_reference |= reference[r][h] != 0;
        }
      }
      float factor = scale2;
      if (!general && __any_sync(~0u, has_reference)) {
        factor = 1;
#pragma unroll
        for (int r = 0; r < Shape::score_rows; ++r) {
#pragma unroll
          for (int n = 0; n < Shape::score_columns; ++n) {
#pragma unroll
            for (int c = 0; c < 4; ++c) p[r][n][c] = fmaf(p[r][n][c], scale2, -reference[r][c / 2]);
          }
        }
      }
#pragma unroll
      for (int n = 0; n < Shape::score_columns; ++n) {
        const int lane_key = first_key + score_column + 8 * n + 2 * (lane % 4);
        if constexpr (general) {
          if (params.dropout.drops() && (n == 0 || lane_key % 32 < 8)) {
            const int64_t matrix = pair.batch * args.num_heads + head;
            words[0] = params.dropout.bytes(matrix, lane_query, lane_key);
            words[1] = params.dropout.bytes(matrix, lane_query, lane_key + 1);
          }
        }
#pragma unroll
        for (int r = 0; r < Shape::score_rows; ++r) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const int query = lane_query + 16 * r + 8 * (c / 2);
            float& weight = p[r][n][c];
            float& gradient = ds[r][n][c];
            if constexpr (general) {
              float slope_of_cap = 1;
              weight *= scale2;
              if (params.score.softcap != 0) {
                const float t = tanh_fast(weight * (ln2 / params.score.softcap));
                weight = params.score.softcap * log2e * t;
                slope_of_cap = 1 - t * t;
              }
              const int right = lane_key + c % 2 - (band.seq_len_k - seq_len_q) - query;
              weight = fmaf(-slope2, fabsf(static_cast<float>(right)), weight);
              weight = exp2_fast(weight - reference[r][c / 2] - log_sum[r][c / 2]);
              const bool dropped = params.dropout.drops() && !keeps(params.dropout, words[c % 2], query, lane_key);
              gradient = weight * ((dropped ? 0.0f : gradient * drop_scale) - delta[r][c / 2]) * slope_of_cap;
              if (dropped) weight = 0;
            } else {
              weight = exp2_fast(fmaf(weight, factor, -log_sum[r][c / 2]));
              gradient = weight * (gradient - delta[r][c / 2]);
            }
          }
        }
      }
      if (first_key < band.begin(min(first_query + Shape::queries, seq_len_q) - 1) ||
          first_key + Shape::keys > band.end(first_query)) {
#pragma unroll
        for (int r = 0; r < Shape::score_rows; ++r) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int query = lane_query + 16 * r + 8 * h;
            const int first = first_key + score_column + 2 * (lane % 4);
            const int begin = band.begin(query) - first, end = band.end(query) - first;
#pragma unroll
            for (int n = 0; n < Shape::score_columns; ++n) {
#pragma unroll
              for (int c = 0; c < 2; ++c) {
                if (8 * n + c < begin || 8 * n + c >= end) p[r][n][2 * h + c] = ds[r][n][2 * h + c] = 0;
              }
            }
          }
        }
      }
      const uint32_t p_lane = shared_address(p_tile) + weight_stores;
      const uint32_t ds_lane = shared_address(ds_tile(ds_stage)) + weight_stores;
#pragma unroll
      for (int n = 0; n < Shape::score_columns; n += 2) {
#pragma unroll
        for (int r = 0; r < Shape::score_rows; ++r) {
          const int row = score_row + 16 * r, chunk = score_column / 8 + n;
          Weights::template store_square<T>(p_lane, row, chunk, p[r][n], p[r][n + 1]);
          Weights::template store_square<T>(ds_lane, row, chunk, ds[r][n], ds[r][n + 1]);
        }
      }
      if (params.deterministic && threadIdx.x == 0) {
        while (turn != turn_of(current)) turn = read_turn(current);
        // Orders the wait before the additions of this step, and those of the last but one before the end of its turn.
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        if (step >= 2) end_turn(last_but_one);
      }
      asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(32 * Shape::group_warps) : "memory");

      // dV += P^T dO or dK += dS^T Q
      const uint32_t weight_lane = shared_address(sums_dvalue ? p_tile : ds_tile(ds_stage)) + weight_rows;
      const uint32_t row_lane = shared_address(sums_dvalue ? dout_tile(stage) : query_tile(stage)) + tile_columns;
      multiply_tiles<T, true, false, Shape::queries / 16>(
          key_sum, [&](int r, int k) { return Weights::square(weight_lane, 16 * k, key_row / 8 + 2 * r); },
          [&](int n, int k) { return Tile::square(row_lane, 16 * k, key_column / 8 + 2 * n); });
    }
    if (group == 0 && step > 0) add_dquery(last, ds_stage ^ 1);
    if (step == steps) break;
    last_but_one = last;
    last = current;
    current = next;
  }

  // Through the places of keys and values to whole rows.
  __syncthreads();
  if (params.deterministic && steps > 0 && threadIdx.x == 0) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    if (steps >= 2) end_turn(last_but_one);
    end_turn(last);
  }
  const float scale =
      sums_dvalue ? (general ? params.dropout.scale<float>() : 1.0f) : static_cast<float>(args.softmax_scale);
  const uint32_t stores = shared_address(sums_dvalue ? value_tile : key_tile) + Tile::stores(lane);
#pragma unroll
  for (int r = 0; r < Shape::key_rows; ++r) {
#pragma unroll
    for (int n = 0; n < Shape::key_columns; ++n) {
#pragma unroll
      for (float& x : key_sum[r][n]) x *= scale;
      if (n % 2 == 0) continue;
      Tile::template store_square<T>(stores, key_row + 16 * r, key_column / 8 + n - 1, key_sum[r][n - 1],
                                     key_sum[r][n]);
    }
  }
  __syncthreads();
  constexpr int rows = Shape::keys / Shape::warps;
  store_rows<T, columns, rows>(key_tile, warp * rows,
                               key_view<T>(args, params.grad.dkey, pair, kv_head, params.dkey_vectors),
                               first_key + warp * rows, lane);
  store_rows<T, columns, rows>(value_tile, warp * rows,
                               key_view<T>(args, params.grad.dvalue, pair, kv_head, params.dvalue_vectors),
                               first_key + warp * rows, lane);
}

template <class T, class Shape>
void launch_backward(const AttentionGradArgs& grad, const Stream& stream) {
  const AttentionArgs& args = grad.forward;
  size_t bytes;
  BackwardParams params = backward_params<Shape>(grad, grad.workspace, bytes);
  const int limit = strobe::cuda::device_properties(stream.device).shared_bytes_per_block;
  params.stages = Shape::shared_bytes(2) <= limit ? 2 : 1;
  STROBE_CHECK(grad.workspace_bytes >= bytes, "flash_attention_backward: workspace of ", grad.workspace_bytes,
               " bytes given, expected ", bytes);
  const int64_t tiles = params.table.query_tiles * args.batch * args.num_heads;
  const bool general = args.softcap != 0 || args.alibi_slopes != nullptr || params.dropout.drops();
  const auto kernel = general ? attention_backward<T, Shape, true> : attention_backward<T, Shape, false>;
  constexpr const char* name = "flash_attention_backward";
  strobe::cuda::launch(name, prepare_backward<T, Shape>, grid_of(std::max<int64_t>(tiles, 1)), dim3(128),
                       2 * Shape::query_bytes, stream, params);
  mma_attention_split_lse(args, params.table, stream);
  strobe::cuda::launch(name, kernel, grid_of(params.blocks), dim3(Shape::threads), Shape::shared_bytes(params.stages),
                       stream, params);
  strobe::cuda::launch(name, finish_backward<T, Shape>, grid_of(tiles), dim3(Shape::threads), Shape::query_bytes,
                       stream, params);
}

}  // namespace

AttentionTile mma_attention_backward_tile(const AttentionArgs& args, Device) {
  return dispatch_mma(args, [&]<class T, int columns>() {
    return AttentionTile{ShapeFor<columns>::queries, ShapeFor<columns>::keys};
  });
}

int mma_attention_backward_shared_bytes(const AttentionArgs& args) {
  return dispatch_mma(args, [&]<class T, int columns>() { return ShapeFor<columns>::shared_bytes(1); });
}

size_t mma_attention_backward_workspace(const AttentionGradArgs& args) {
  size_t bytes = 0;
  dispatch_mma(args.forward, [&]<class T, int columns>() { backward_params<ShapeFor<columns>>(args, nullptr, bytes); });
  return bytes;
}

void mma_attention_backward(const AttentionGradArgs& args, const Stream& stream) {
  dispatch_mma(args.forward, [&]<class T, int columns>() { launch_backward<T, ShapeFor<columns>>(args, stream); });
}

}  // namespace strobe::kernels::cuda
