// Warpgroups of the Hopper attention forward pass: 64 queries each, multiplied by wgmma, and a warpgroup's softmax runs
// beside its own next product. The maximum of a row is followed only where the mask cuts a tile: elsewhere any
// reference that keeps the sums in range gives the same quotient, and a sum that grows too large brings the maximum
// back.
#pragma once

#include "strobe/kernels/cuda/attention_hopper_forward.cuh"

namespace strobe::kernels::cuda::hopper {

// The scores of one warp's 16 queries once more, for those of its two rows a lane that `wanted` names.
template <class T, int head_dim, int keys>
__device__ inline void recompute_scores(float (&scores)[keys / 2], const bool (&wanted)[2], const char* query,
                                        const char* key, int warp, int lane) {
#pragma unroll
  for (int n = 0; n < keys / 16; ++n) {
    float sums[2][4] = {};
#pragma unroll 1
    for (int step = 0; step < head_dim / 16; ++step) {
      uint32_t a[4], b[4];
      load_matrices(a, shared_address(query) +
                           static_cast<uint32_t>(swizzled_offset(64, 16 * warp + lane % 16, 2 * step + lane / 16)));
      load_matrices(b, shared_address(key) + static_cast<uint32_t>(swizzled_offset(
                                                 keys, 16 * n + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2)));
      multiply_add<T>(sums[0], a, b[0], b[1]);
      multiply_add<T>(sums[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (wanted[i / 2 % 2]) scores[8 * n + i] = sums[i / 4][i % 4];
    }
  }
}

// What a warpgroup has of its 64 queries in registers, in the layout of wgmma: of a lane's rows h = 0 and 1 the columns
// 8 n + 2 (lane % 4) + c stand at 4 n + 2 h + c.
template <class T, class Shape>
struct GroupState {
  static constexpr int keys = Shape::keys;
  static constexpr float infinity = std::numeric_limits<float>::infinity();
  float out[Shape::head_dim / 2];
  float scores[keys / 2];          // S, then P
  uint32_t weights[keys / 16][4];  // P of the block before, packed
  float maximum[2];                // reference of the exponents, in units of log 2
  float sum[2];                    // of this lane's keys alone

  __device__ void clear() {
#pragma unroll
    for (float& x : out) x = 0;
    maximum[0] = maximum[1] = -infinity;
    sum[0] = sum[1] = 0;
  }
  // S = Q K^T
  __device__ void start_scores(const char* query, const char* key) {
    uint64_t a = wgmma_operand(query);
    const uint64_t b = wgmma_operand(key);
    if constexpr (Shape::head_dim > 128) {  // made anew for each block: so many operands do not all keep a register
      a = wgmma_operand(static_cast<uint32_t>(uniform(static_cast<int>(shared_address(query) >> 4))), 0);
    }
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Shape::head_dim / 16; ++step) {
      Wgmma<T, keys>::tiles(scores, a + step / 4 * (64 * 128 / 16) + step % 4 * (32 / 16),
                            b + step / 4 * (keys * 128 / 16) + step % 4 * (32 / 16), step > 0);
    }
    wgmma_commit();
  }
  // O += P V
  __device__ void start_out(const char* value) {
    const uint64_t b = wgmma_operand(value, keys * 128);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < keys / 16; ++step) {
      Wgmma<T, Shape::head_dim>::registers(out, weights[step], b + step * (16 * 128 / 16), true);
    }
    wgmma_commit();
  }
  __device__ void pack_weights() {
#pragma unroll
    for (int i = 0; i < keys / 4; ++i) weights[i / 4][i % 4] = pack<T>(scores[2 * i], scores[2 * i + 1]);
  }
  // S = softcap tanh(S / softcap)
  __device__ void cap(const ForwardParams& params) {
#pragma unroll
    for (float& x : scores) x = params.softcap2 * tanh_fast(x * params.softcap_scale);
  }
  // -inf for what the lane's rows `row` and row + 8 do not see of the keys from first_key on.
  __device__ void hide(const Band& band, int row, int first_key, int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int begin = band.begin(row + 8 * h) - first_key - 2 * (lane % 4);
      const int end = band.end(row + 8 * h) - first_key - 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < keys / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (8 * n + c < begin || 8 * n + c >= end) scores[4 * n + 2 * h + c] = -infinity;
        }
      }
    }
  }
  // P = exp(S - maximum) of row h with its true maximum so far, unless another row of the warp is meant. Returns what
  // earlier sums of the row shrink by.
  __device__ float follow_maximum(int h, float scale2, bool meant = true) {
    float largest = scores[2 * h];
#pragma unroll
    for (int n = 0; n < keys / 8; ++n) {
      largest = fmaxf(largest, fmaxf(scores[4 * n + 2 * h], scores[4 * n + 2 * h + 1]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(maximum[h], fmaxf(largest, __shfl_xor_sync(~0u, largest, 2)) * scale2);
    if (!meant) return 1;
    const float reference = largest == -infinity ? 0.0f : largest;
    const float factor = exp2_fast(maximum[h] - reference);
    maximum[h] = largest;
    float part = 0;
#pragma unroll
    for (int n = 0; n < keys / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& p = scores[4 * n + 2 * h + c];
        p = exp2_fast(fmaf(p, scale2, -reference));
        part += p;
      }
    }
    sum[h] = sum[h] * factor + part;
    return factor;
  }
  __device__ void shrink_out(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < Shape::head_dim / 2; ++i) out[i] *= factor[i / 2 % 2];
  }
  // P = exp(S - maximum) with the references as they are; part: the sums of this block.
  __device__ void keep_maximum(float scale2, float (&part)[2]) {
    part[0] = part[1] = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int n = 0; n < keys / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& p = scores[4 * n + 2 * h + c];
          p = exp2_fast(fmaf(p, scale2, -maximum[h]));
          part[h] += p;
        }
      }
    }
  }
  // Adds the sums of keep_maximum. Where one is so large that weights lose their place in T, the row's reference grows
  // by a power of 2, and where it is infinite or NaN the scores are computed again. Other rows keep their bits.
  __device__ void add_sums(const ForwardParams& params, const float (&part)[2], const char* query, const char* key,
                           int warp) {
    if (!__any_sync(~0u, !(part[0] < params.sum_limit && part[1] < params.sum_limit))) {
      sum[0] += part[0];
      sum[1] += part[1];
      return;
    }
    float most[2], factor[2];
    bool overflows[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      most[h] = part[h] < infinity ? part[h] : infinity;
      most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 1));
      most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 2));
      overflows[h] = most[h] >= params.overflow_limit;
      const float grown = overflows[h] || most[h] < params.sum_limit ? 0.0f : floorf(log2f(most[h]));
      factor[h] = exp2f(-grown);
      maximum[h] += grown;
      if (!overflows[h]) sum[h] = (sum[h] + part[h]) * factor[h];
    }
#pragma unroll
    for (int i = 0; i < keys / 2; ++i) scores[i] *= factor[i / 2 % 2];
    if (__any_sync(~0u, overflows[0] || overflows[1])) {
      recompute_scores<T, Shape::head_dim, keys>(scores, overflows, query, key, warp, fresh_lane());
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float shrunk = follow_maximum(h, params.scale2, overflows[h]);
        if (overflows[h]) factor[h] = shrunk;
      }
    }
    shrink_out(factor);
  }
};

// Lanes 4 i + q have words q of four pieces of 16 bytes each; afterwards lane 4 i + q has all of piece q.
__device__ inline void exchange_pieces(uint32_t (&words)[4], int lane) {
  const bool odd = lane % 2 != 0, upper = lane / 2 % 2 != 0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t come = __shfl_xor_sync(~0u, odd ? words[i] : words[i + 1], 1);
    (odd ? words[i] : words[i + 1]) = come;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t come = __shfl_xor_sync(~0u, upper ? words[i] : words[i + 2], 2);
    (upper ? words[i] : words[i + 2]) = come;
  }
}

// Divides a warp's 16 rows, from first_row on, by their sums and writes them and lse; `staging` is the warp's part of
// shared memory, from which whole rows go out.
template <class T, class Shape>
__device__ inline void store_result(const ForwardParams& params, const SequencePair& pair, const Band& band, int head,
                                    int first_row, const GroupState<T, Shape>& state, char* staging) {
  constexpr int pieces = Shape::head_dim / 8;
  const int lane = fresh_lane();
  const AttentionArgs& args = params.args;
  const int seq_len_q = static_cast<int>(pair.seq_len_q), head_dim = static_cast<int>(args.head_dim);
  float* const lse = static_cast<float*>(args.lse) + pair.lse_offset(args, head);
  T* const out = static_cast<T*>(args.out.data) + pair.query_offset(args.out, head);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + 8 * h;
    float total = state.sum[h];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const bool sees = band.begin(first_row + row) < band.end(first_row + row);
    const float inverse = 1.0f / total;
    const auto two = [&](int piece) {
      const float* const x = &state.out[4 * piece + 2 * h];
      const uint32_t packed = pack<T>(x[0] * inverse, x[1] * inverse);
      return sees ? packed : 0;
    };
    if constexpr (Shape::staged) {
#pragma unroll
      for (int n = 0; n < pieces; ++n) {
        *reinterpret_cast<uint32_t*>(staging + swizzled_offset(64, row, n) + 4 * (lane % 4)) = two(n);
      }
    } else {
#pragma unroll
      for (int n = 0; n < pieces; n += 4) {
        uint32_t words[4] = {two(n), two(n + 1), two(n + 2), two(n + 3)};
        exchange_pieces(words, lane);
        const int piece = n + lane % 4;
        if (first_row + row < seq_len_q && 8 * piece < head_dim) {
          __stwb(reinterpret_cast<uint4*>(out + (first_row + row) * args.out.seq_stride + 8 * piece),
                 make_uint4(words[0], words[1], words[2], words[3]));
        }
      }
    }
    if (lane % 4 == 0 && first_row + row < seq_len_q) {
      lse[first_row + row] = sees ? (state.maximum[h] + log2f(total)) * ln2 : -std::numeric_limits<float>::infinity();
    }
  }
  if constexpr (!Shape::staged) return;
  __syncwarp();
#pragma unroll 4
  for (int i = lane; i < 16 * pieces; i += 32) {
    const int row = i / pieces, piece = i % pieces;
    if (first_row + row >= seq_len_q || 8 * piece >= head_dim) continue;
    const auto values =
        strobe::cuda::load_pack<T, 8>(reinterpret_cast<const T*>(staging + swizzled_offset(64, row, piece)));
    strobe::cuda::store_pack_global(out + (first_row + row) * args.out.seq_stride + 8 * piece, values);
  }
  __syncwarp();
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
  char* const query = memory.query[group];
  Ring<1> queries;
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
  const auto pass = [&](int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      wait_key();
      free_key();
      wait_value();
      free_value();
    }
  };

  int index = ForwardTile<Shape>::index(params, 0);
  for (int round = 0; index < params.tiles; index = ForwardTile<Shape>::index(params, ++round)) {
    const ForwardTile<Shape> tile(params, index);
    const SequencePair pair(params.args, tile.batch);
    const Band band(pair);
    const int seq_len_q = static_cast<int>(pair.seq_len_q), seq_len_k = static_cast<int>(pair.seq_len_k);
    if (tile.first_query >= seq_len_q) continue;  // packed: other sequences have more queries
    const int first_query = tile.first_query + 64 * group;
    const int last_query = min(first_query + 64, seq_len_q) - 1;
    const KeyBlocks all(band, tile.first_query, tile.last_query(seq_len_q), Shape::keys);
    const KeyBlocks own(band, first_query, last_query, Shape::keys);
    GroupState<T, Shape> state;
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
      pass(all.end - own.end);
      barrier_wait(&memory.query_full[group], queries.parity);
      if (params.sign != 1) {
        T* const elements = reinterpret_cast<T*>(query);
        for (int i = static_cast<int>(threadIdx.x) % 128; i < 64 * Shape::tile_columns; i += 128) {
          elements[i] = T(static_cast<float>(elements[i]) * params.sign);
        }
        fence_async_proxy();
        barrier_group(group);
      }
      wait_key();
      state.start_scores(query, memory.key[keys.stage]);
      wgmma_wait<0>();
      hold(state.scores);
      free_key();
      int block = own.end - 1;
      adjust(block);
      for (int h = 0; h < 2; ++h) state.follow_maximum(h, scale2);
      state.pack_weights();
      if (pair.packed && own.end * Shape::keys > seq_len_k) {
        wait_value();
        clear_rows<Shape>(memory.value[values.stage], seq_len_k - block * Shape::keys);
        fence_async_proxy();
        barrier_group(group);
      }
      --block;
      do {
#pragma unroll 1
        for (; block >= own.begin && (capped || cut(block)); --block) {
          wait_key();
          state.start_scores(query, memory.key[keys.stage]);
          wait_value();
          state.start_out(memory.value[values.stage]);
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
          state.start_scores(query, memory.key[keys.stage]);
          wait_value();
          state.start_out(memory.value[values.stage]);
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
      release(&memory.query_empty[group]);
      queries.advance();
      wait_value();
      state.start_out(memory.value[values.stage]);
      wgmma_wait<0>();
      hold(state.out);
      free_value();
      pass(own.begin - all.begin);
    } else if (all.begin < all.end) {
      pass(all.end - all.begin);
      barrier_wait(&memory.query_full[group], queries.parity);
      release(&memory.query_empty[group]);
      queries.advance();
    }
    store_result<T, Shape>(params, pair, band, tile.head, first_query + 16 * warp, state,
                           memory.out[group] + 16 * warp * 128);
  }
}

}  // namespace strobe::kernels::cuda::hopper
