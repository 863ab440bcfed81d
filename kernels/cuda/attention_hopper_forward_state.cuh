// What a warpgroup of the Hopper attention forward pass has of its 64 queries in registers, and the way of their result
// out. The maximum of a row is followed only where the mask cuts a tile: elsewhere any reference that keeps the sums in
// range gives the same quotient, and a sum that grows too large brings the maximum back.
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

// Which slices of 16 keys of a block some row of the warp sees.
struct AllSlices {
  __device__ static constexpr bool seen(int) { return true; }
};
struct SomeSlices {
  int begin, end;
  __device__ SomeSlices(const Band& band, int first_row, int first_key)
      : begin((band.begin(first_row) - first_key) >> 4), end((band.end(first_row + 15) - first_key + 15) >> 4) {}
  __device__ bool seen(int slice) const { return slice >= begin && slice < end; }
};

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
  // Of the scores of a lane's row, in order of their columns, those before column `limit` of the lane, as bits.
  __device__ static uint32_t columns_before(int limit) {
    const int count = min(max(limit / 8 * 2 + min(limit % 8, 2), 0), keys / 4);
    return ~__funnelshift_lc(0, ~0u, static_cast<unsigned>(count));
  }
  // -inf for what the lane's rows `row` and row + 8, where meant, do not see of the keys from first_key on.
  __device__ void hide(const Band& band, int row, int first_key, int lane, const bool (&meant)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int first_column = first_key + 2 * (lane % 4);
      const uint32_t seen = columns_before(band.end(row + 8 * h) - first_column) &
                            ~columns_before(band.begin(row + 8 * h) - first_column);
#pragma unroll
      for (int i = 0; i < keys / 4; ++i) {
        if (meant[h] && (seen >> i & 1) == 0) scores[i / 2 * 4 + 2 * h + i % 2] = -infinity;
      }
    }
  }
  // P = exp(S - maximum) of row h with its true maximum so far, unless another row of the warp is meant; 0 for slices
  // that nobody sees. Returns what earlier sums of the row shrink by.
  template <class Slices = AllSlices>
  __device__ float follow_maximum(int h, float scale2, bool meant = true, const Slices& slices = {}) {
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
    for (int slice = 0; slice < keys / 16; ++slice) {
      float* const p[4] = {&scores[8 * slice + 2 * h], &scores[8 * slice + 2 * h + 1], &scores[8 * slice + 2 * h + 4],
                           &scores[8 * slice + 2 * h + 5]};
      if (!slices.seen(slice)) {
        *p[0] = *p[1] = *p[2] = *p[3] = 0;
        continue;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        *p[i] = exp2_fast(fmaf(*p[i], scale2, -reference));
        part += *p[i];
      }
    }
    sum[h] = sum[h] * factor + part;
    return factor;
  }
  __device__ void shrink_out(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < Shape::head_dim / 2; ++i) out[i] *= factor[i / 2 % 2];
  }
  // P = exp(S - maximum) with the references as they are, 0 for the first `hidden` keys; part: the sums of this block.
  template <int hidden = 0>
  __device__ void keep_maximum(float scale2, float (&part)[2]) {
    part[0] = part[1] = 0;
#pragma unroll
    for (int i = 0; i < hidden / 2; ++i) scores[i] = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int n = hidden / 8; n < keys / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& p = scores[4 * n + 2 * h + c];
          p = exp2_fast(fmaf(p, scale2, -maximum[h]));
          part[h] += p;
        }
      }
    }
  }
  // Adds the sums of keep_maximum. Where one is so large that weights lose their place in T, or the rounding of a
  // weight that is nearly all would show, the row's reference grows until that one is 1; where it leaves the range of
  // floats the scores are computed again. Other rows keep their bits.
  template <class Hide>
  __device__ void add_sums(const ForwardParams& params, const float (&part)[2], const char* query, const char* key,
                           int warp, const Hide& hide_again) {
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
      const float grown = overflows[h] || most[h] < params.sum_limit ? 0.0f : log2f(most[h]);
      const float before = maximum[h];
      maximum[h] += grown;
      factor[h] = exp2f(before - maximum[h]);
      if (!overflows[h]) sum[h] = (sum[h] + part[h]) * factor[h];
    }
#pragma unroll
    for (int i = 0; i < keys / 2; ++i) scores[i] *= factor[i / 2 % 2];
    if (__any_sync(~0u, overflows[0] || overflows[1])) {
      recompute_scores<T, Shape::head_dim, keys>(scores, overflows, query, key, warp, fresh_lane());
      hide_again(overflows);
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

// A warp's 16 rows of a tile's result, from `place` on in the tile.
template <class T, class Shape>
struct GroupResult {
  static constexpr int pieces = Shape::head_dim / 8;
  const ForwardParams& params;
  const ForwardTile& tile;
  const int first_row;
  const int lane = fresh_lane();

  __device__ GroupResult(const ForwardParams& params, const ForwardTile& tile, int place)
      : params(params), tile(tile), first_row(tile.first_query + place) {}

  __device__ bool sees(int row) const { return tile.band.begin(row) < tile.band.end(row); }
  __device__ static float total(float sum) {
    sum += __shfl_xor_sync(~0u, sum, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
  }
  // 1 / the sum of row h of the lane; 0 for one that sees nothing.
  __device__ float inverse(const GroupState<T, Shape>& state, int h) const {
    const float sum = total(state.sum[h]);
    return sees(first_row + lane / 4 + 8 * h) ? reciprocal_fast(sum) : 0.0f;
  }
  // Two columns of piece n of row h.
  __device__ static uint32_t two(const GroupState<T, Shape>& state, int h, int n, float inverse) {
    const float* const x = &state.out[4 * n + 2 * h];
    return inverse == 0 ? 0 : pack<T>(x[0] * inverse, x[1] * inverse);
  }
  // By the first two lanes of four, one row each.
  __device__ void store_lse(const GroupState<T, Shape>& state) const {
    const float sums[2] = {total(state.sum[0]), total(state.sum[1])};
    const bool second = lane % 2 != 0;
    const int row = first_row + lane / 4 + 8 * (lane % 2);
    if (lane % 4 > 1 || row < 0 || row >= tile.seq_len_q) return;
    const float lse = ((second ? state.maximum[1] : state.maximum[0]) + log2f(second ? sums[1] : sums[0])) * ln2;
    (static_cast<float*>(params.args.lse) + tile.lse)[row] = sees(row) ? lse : -std::numeric_limits<float>::infinity();
  }
  // Puts the rows into `staging` as a tile of 64 rows lies.
  __device__ void stage(const GroupState<T, Shape>& state, char* staging) const {
    const float inverses[2] = {inverse(state, 0), inverse(state, 1)};
    const uint32_t place =
        shared_address(staging) + static_cast<uint32_t>((lane & 15) * 128 + ((lane >> 4 ^ (lane & 7)) << 4));
#pragma unroll
    for (int n = 0; n < pieces; n += 2) {  // at swizzled_offset(64, lane % 16, n + lane / 16)
      store_matrices((place ^ static_cast<uint32_t>(n % 8 << 4)) + static_cast<uint32_t>(n / 8 * 64 * 128),
                     {two(state, 0, n, inverses[0]), two(state, 1, n, inverses[1]), two(state, 0, n + 1, inverses[0]),
                      two(state, 1, n + 1, inverses[1])});
    }
    fence_async_proxy();
    __syncwarp();
  }
  // Begins to bring them out from there; finish_store() before anything else is written there.
  __device__ void start_store(const char* staging) const {
    if (first_row < 0) return;
    const int rows = tile.seq_len_q - first_row;
    if (params.args.cu_seqlens_q == nullptr || rows >= 16) {
      if (lane == 0) {
#pragma unroll
        for (int chunk = 0; chunk < Shape::tile_columns / 64; ++chunk) {
          tma_store(params.out, staging + chunk * 64 * 128, 64 * chunk, tile.first_q + first_row, tile.head,
                    tile.batch);
        }
        bulk_commit();
      }
      return;
    }
    const int64_t stride = params.args.out.seq_stride;
    T* const out = static_cast<T*>(params.args.out.data) + tile.out + first_row * stride;
#pragma unroll 1
    for (int i = lane; i < rows * pieces; i += 32) {
      const int row = i / pieces, piece = i % pieces;
      if (8 * piece >= params.args.head_dim) continue;
      const auto values =
          strobe::cuda::load_pack<T, 8>(reinterpret_cast<const T*>(staging + swizzled_offset(64, row, piece)));
      strobe::cuda::store_pack_global(out + row * stride + 8 * piece, values);
    }
  }
  // The same without staging.
  __device__ void store(const GroupState<T, Shape>& state) const {
    const int64_t stride = params.args.out.seq_stride;
    T* const out = static_cast<T*>(params.args.out.data) + tile.out;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float inverse_h = inverse(state, h);
      const int row = first_row + lane / 4 + 8 * h;
#pragma unroll
      for (int n = 0; n < pieces; n += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = two(state, h, n + i, inverse_h);
        exchange_pieces(words, lane);
        const int piece = n + lane % 4;
        if (row >= 0 && row < tile.seq_len_q && 8 * piece < params.args.head_dim) {
          __stwb(reinterpret_cast<uint4*>(out + row * stride + 8 * piece),
                 make_uint4(words[0], words[1], words[2], words[3]));
        }
      }
    }
  }
};

}  // namespace strobe::kernels::cuda::hopper
