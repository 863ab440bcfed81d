// A random order of 0, ..., size - 1 that is computed where it is needed and never stored.
#pragma once

#include <algorithm>
#include <cstdint>

#include "strobe/kernels/philox.h"

namespace strobe {

// Where `index` goes in permutation number `key` of [0, size): the swap-or-not shuffle of Hoang, Morris and Rogaway
// 2012. Each round pairs x with k - x (mod size) for a random k and swaps a pair or not by a random bit that both
// share; so each round, and all together, is one-to-one.
inline uint64_t permuted(uint64_t index, uint64_t size, uint64_t key) {
  constexpr uint32_t num_rounds = 96;  // the paper's bound asks for some multiple of log2(size)
  const auto random = [&](uint32_t round, uint64_t value, uint32_t purpose) {
    return philox4x32<7>({static_cast<uint32_t>(value), static_cast<uint32_t>(value >> 32), round, purpose}, key);
  };
  uint64_t x = index;
  for (uint32_t round = 0; round < num_rounds; ++round) {
    const PhiloxCounter words = random(round, 0, 0);
    const uint64_t k = (uint64_t{words[0]} << 32 | words[1]) % size;
    const uint64_t partner = k >= x ? k - x : k + (size - x);
    if (random(round, std::max(x, partner), 1)[0] & 1) x = partner;
  }
  return x;
}

}  // namespace strobe
