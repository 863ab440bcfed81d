// Philox4x32, the counter-based random number generator of Salmon et al. 2011 ("Parallel random numbers: as easy as
// 1, 2, 3"): random words are a pure function of a counter and a key, so any element can be computed anywhere.
#pragma once

#include <array>
#include <cstdint>

#include "strobe/kernels/types.h"

namespace strobe {

using PhiloxCounter = std::array<uint32_t, 4>;

// One round on the four words of a counter.
STROBE_HD inline void philox_round(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t key_low,
                                   uint32_t key_high) {
  const uint64_t product_a = uint64_t{0xd2511f53u} * a;
  const uint64_t product_c = uint64_t{0xcd9e8d57u} * c;
  a = static_cast<uint32_t>(product_c >> 32) ^ b ^ key_low;
  b = static_cast<uint32_t>(product_c);
  c = static_cast<uint32_t>(product_a >> 32) ^ d ^ key_high;
  d = static_cast<uint32_t>(product_a);
}

// The keys of all rounds, for kernels that make many calls with one key.
template <int rounds = 10>
struct PhiloxKeys {
  uint32_t low[rounds];
  uint32_t high[rounds];

  STROBE_HD explicit PhiloxKeys(uint64_t key) {
#ifdef __CUDACC__
#pragma unroll
#else
#pragma GCC unroll 10
#endif
    for (int round = 0; round < rounds; ++round) {
      low[round] = static_cast<uint32_t>(key) + static_cast<uint32_t>(round) * 0x9e3779b9u;         // the golden ratio
      high[round] = static_cast<uint32_t>(key >> 32) + static_cast<uint32_t>(round) * 0xbb67ae85u;  // sqrt(3) - 1
    }
  }
};

// Four random words for a 128-bit counter and a 64-bit key (low word first). Ten rounds are the published default;
// seven are the fewest that pass the statistical test batteries.
template <int rounds>
STROBE_HD inline PhiloxCounter philox4x32(const PhiloxCounter& counter, const PhiloxKeys<rounds>& keys) {
  auto [a, b, c, d] = counter;
#ifdef __CUDACC__
#pragma unroll
#else
#pragma GCC unroll 10
#endif
  for (int round = 0; round < rounds; ++round) philox_round(a, b, c, d, keys.low[round], keys.high[round]);
  return {a, b, c, d};
}
template <int rounds = 10>
STROBE_HD inline PhiloxCounter philox4x32(const PhiloxCounter& counter, uint64_t key) {
  return philox4x32(counter, PhiloxKeys<rounds>(key));
}

// The words of call number `index` of the random operation `offset` under a seed or its keys, and the counter they come
// from.
STROBE_HD inline PhiloxCounter philox_counter(uint64_t offset, uint64_t index) {
  return {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), static_cast<uint32_t>(offset),
          static_cast<uint32_t>(offset >> 32)};
}
template <class Key>
STROBE_HD inline PhiloxCounter philox_at(const Key& key, uint64_t offset, uint64_t index) {
  return philox4x32(philox_counter(offset, index), key);
}

// A double in [0, 1) with 53 random bits.
STROBE_HD inline double uniform_double(uint32_t low, uint32_t high) {
  const uint64_t bits = (uint64_t{high} << 32 | low) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace strobe
