// Blocks of keys that come in two pieces: how the sums of the first one reach the second one.
#pragma once

#include "strobe/kernels/cuda/attention_hopper_backward_sum.cuh"

namespace strobe::kernels::cuda::hopper {

// Of the sums of cut block `cut`, this thread's.
template <class Shape>
__device__ inline float4* cut_place(const BackwardParams& params, int cut) {
  return reinterpret_cast<float4*>(params.cut_sums) + int64_t{cut} * Shape::threads * (Shape::columns / 8) +
         threadIdx.x;
}

template <class Shape, int sums>
__device__ inline void keep_sums(const BackwardParams& params, int cut, const float (&sum)[sums]) {
  float4* const place = cut_place<Shape>(params, cut);
#pragma unroll
  for (int n = 0; n < sums / 4; ++n) {
    place[n * Shape::threads] = {sum[4 * n], sum[4 * n + 1], sum[4 * n + 2], sum[4 * n + 3]};
  }
  __syncwarp();
  if (fresh_lane() != 0) return;
  fence_gpu();
  atomicAdd(params.turns + cut, 1);
}

// First pieces have been drawn long before and wait for nobody.
template <class Shape, int sums>
__device__ inline void fetch_sums(const BackwardParams& params, int cut, float (&sum)[sums]) {
  wait_turn(params.turns + cut, Shape::warps);
  __syncwarp();
  const float4* const place = cut_place<Shape>(params, cut);
#pragma unroll
  for (int n = 0; n < sums / 4; ++n) {
    const float4 four = __ldcg(place + n * Shape::threads);
    sum[4 * n] = four.x, sum[4 * n + 1] = four.y, sum[4 * n + 2] = four.z, sum[4 * n + 3] = four.w;
  }
}

}  // namespace strobe::kernels::cuda::hopper
