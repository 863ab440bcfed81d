// Whether strided operands share memory: exact, so that operands may interleave, as the thirds of packed QKV do.
#pragma once

#include <array>
#include <cstdint>

namespace strobe::kernels {

// The bytes of an operand: a run of `run_bytes` for each index along the axes, none when run_bytes is 0.
// No byte may be further than 2^60 from `lowest`.
struct StridedBytes {
  struct Axis {
    int64_t size = 1;
    int64_t stride = 0;  // bytes, at least 0
  };
  uintptr_t lowest = 0;  // address of the first byte
  int64_t run_bytes = 0;
  std::array<Axis, 4> axes = {};
};

// True unless each axis steps over all that the axes of smaller stride cover, as every usual layout does.
bool overlaps_itself(const StridedBytes& bytes);

// True when some byte belongs to both. Layouts that are not told apart within some thousand steps, which takes
// interleaved operands of different strides, count as overlapping.
bool overlap(const StridedBytes& a, const StridedBytes& b);

}  // namespace strobe::kernels
