// What an attention query sees, and which of its probabilities dropout keeps: the same on every device.
#pragma once

#include <cmath>

#include "strobe/kernels/matmul.h"
#include "strobe/kernels/philox.h"

namespace strobe::kernels {

// Query i sees key j when i + lower <= j <= i + upper.
struct AttentionBand {
  int64_t lower = no_band_lower;
  int64_t upper = no_band_upper;
};

// The band of one pair of sequences under a causal mask and windows (-1: unlimited), aligned at the bottom right.
STROBE_HD inline AttentionBand visible_band(bool causal, int64_t window_left, int64_t window_right, int64_t seq_len_q,
                                            int64_t seq_len_k) {
  const int64_t diagonal = seq_len_k - seq_len_q;
  const int64_t everything = seq_len_q + seq_len_k;  // wider windows hide nothing, and their sums could overflow
  AttentionBand band;
  if (window_left >= 0 && window_left < everything) band.lower = diagonal - window_left;
  if (window_right >= 0 && window_right < everything) band.upper = diagonal + window_right;
  if (causal && band.upper > diagonal) band.upper = diagonal;
  return band;
}

// Dropout of P (Srivastava et al. 2014) as a pure function of the position. One Philox4x32-7 call decides for 16 of the
// elements of a 32 x 32 square, 8 apart in both directions, one byte each: tiles of any shape draw the same mask.
struct AttentionDropout {
  uint64_t key = 0;
  uint32_t keep_below = 256;  // an element is kept when its byte is below; 256 keeps all

  AttentionDropout() = default;
  AttentionDropout(double dropout_p, uint64_t seed, uint64_t offset)
      : key(seed ^ (offset * 0x9E3779B97F4A7C15u)),
        keep_below(static_cast<uint32_t>(std::lround(256 * (1 - dropout_p)))) {}

  STROBE_HD bool drops() const { return keep_below < 256; }
  // What kept elements are multiplied by: the inverse of the rate at which they are kept.
  template <class T>
  STROBE_HD T scale() const {
    return T(256) / static_cast<T>(keep_below);
  }
  // The counter of the Philox call whose 16 bytes are those of the elements with the same (query / 32, key / 32) and
  // (query % 8, key % 8): element (query, key) has number (query % 32 / 8) * 4 + key % 32 / 8, the low byte of word 0
  // being number 0. matrix: batch index * num_heads + head.
  STROBE_HD static PhiloxCounter counter(int64_t matrix, int64_t query, int64_t key_position) {
    return {static_cast<uint32_t>(matrix), static_cast<uint32_t>(query / 32), static_cast<uint32_t>(key_position / 32),
            static_cast<uint32_t>(8 * (query % 8) + key_position % 8)};
  }
  static constexpr int rounds = 7;  // of Philox: the fewest that are random enough
  STROBE_HD PhiloxCounter bytes(int64_t matrix, int64_t query, int64_t key_position) const {
    return philox4x32<rounds>(counter(matrix, query, key_position), key);
  }
  STROBE_HD bool keeps(int64_t matrix, int64_t query, int64_t key_position) const {
    const uint32_t word = bytes(matrix, query, key_position)[static_cast<size_t>(query % 32 / 8)];
    return (word >> (8 * (key_position % 32 / 8)) & 255) < keep_below;
  }
};

}  // namespace strobe::kernels
