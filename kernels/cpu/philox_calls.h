// Many calls of Philox at once: the calls are vector lanes.
#pragma once

#include <cstdint>

#include "strobe/kernels/philox.h"

namespace strobe::cpu {

// words[w][i]: word w of the counter of call i, replaced by word w of philox4x32<rounds>(counter, key).
template <int rounds = 10, int calls>
void philox_calls(uint32_t (&words)[4][calls], uint64_t key) {
  const PhiloxKeys<rounds> keys(key);
  for (int round = 0; round < rounds; ++round) {
    const uint32_t low = keys.low[round], high = keys.high[round];
#pragma omp simd
    for (int i = 0; i < calls; ++i) philox_round(words[0][i], words[1][i], words[2][i], words[3][i], low, high);
  }
}

}  // namespace strobe::cpu
