// The sm_80 instructions of tensor-core kernels: mma.sync, ldmatrix and cp.async, and the swizzled tiles they work on.
// For older GPUs this compiles to nothing that works: the kernels are not offered there.
#pragma once

#include <cstdint>
#include <type_traits>

#include "strobe/kernels/types.h"

namespace strobe::kernels::cuda {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes to shared memory in the background; the ones behind `valid_bytes` are not read but set to 0.
__device__ inline void copy_async_16(uint32_t target, const void* source, int valid_bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid_bytes)
               : "memory");
#endif
}
__device__ inline void copy_async_16(uint32_t target, const void* source) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
#endif
}
__device__ inline void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most `pending` of this thread's newest groups are under way.
template <int pending>
__device__ inline void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

// A barrier of all `threads` of a block which, unlike __syncthreads, warps may reach at different places in the code.
template <int threads>
__device__ inline void block_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(threads) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements; lane l names row l % 8 of matrix l / 8. A lane gets elements (lane / 4,
// 2 (lane % 4)) and its right neighbour of each matrix, of its transpose in the second form.
__device__ inline void load_matrices(uint32_t (&matrices)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&matrices)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(address)
               : "memory");
}

// sum (16 x 8, f32) += a (16 x 16) b (16 x 8). With r = lane / 4 and q = lane % 4, sum holds (r, 2q), (r, 2q + 1),
// (r + 8, 2q), (r + 8, 2q + 1); a the pairs (r, 2q), (r + 8, 2q), (r, 2q + 8), (r + 8, 2q + 8); b those of its
// transpose, (r, 2q) and (r, 2q + 8).
template <class T>
__device__ inline void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#endif
}

// Two floats rounded to T in one register, `low` in the lower half.
template <class T>
__device__ inline uint32_t pack(float low, float high) {
  uint32_t packed = 0;
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
#endif
  return packed;
}

__device__ inline float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// A tile of 16-bit elements in shared memory, `columns` a row, as chunks of 16 bytes whose order within a group of 8
// (4 where 64 does not divide columns) depends on the row, so that 8 rows of one chunk lie in different banks.
template <int columns>
struct SwizzledTile {
  static constexpr int row_bytes = 2 * columns;
  static constexpr int chunks = columns / 8;
  static constexpr int group = columns % 64 == 0 ? 8 : 4;
  static_assert(columns % 32 == 0);

  static __device__ int swizzle(int row) { return group == 8 ? row & 7 : (row >> 1) & 3; }
  static __device__ uint32_t offset(int row, int chunk) {
    return static_cast<uint32_t>(row * row_bytes + ((chunk ^ swizzle(row)) << 4));
  }

  // Where a lane reads for load_matrices of a 16 x 16 square at row 0, chunk 0: matrices 0 and 1 below each other, 2
  // and 3 to the right of them ("columns first"), or 0 and 1 side by side, 2 and 3 below ("rows first").
  static __device__ uint32_t columns_first(int lane) { return offset(lane % 16, lane / 16); }
  static __device__ uint32_t rows_first(int lane) { return offset(lane / 16 * 8 + lane % 8, lane / 8 % 2); }
  // The same for the square at `row` (a multiple of 8) and `chunk` (even) of a tile at a multiple of 128 bytes.
  static __device__ uint32_t square(uint32_t lane_address, int row, int chunk) {
    return (lane_address ^ static_cast<uint32_t>(chunk % group << 4)) +
           static_cast<uint32_t>(row * row_bytes + chunk / group * group * 16);
  }

  // Where a lane writes for store_square at row 0, chunk 0.
  static __device__ uint32_t stores(int lane) {
#if __CUDA_ARCH__ >= 900
    return columns_first(lane);
#else
    return offset(lane / 4, 0) + 4 * (lane % 4);
#endif
  }
  // Writes two neighbouring 16 x 8 results of multiply_add, rounded to T, to the square at row, chunk.
  template <class T>
  static __device__ void store_square(uint32_t lane_address, int row, int chunk, const float (&left)[4],
                                      const float (&right)[4]) {
    const uint32_t matrices[4] = {pack<T>(left[0], left[1]), pack<T>(left[2], left[3]), pack<T>(right[0], right[1]),
                                  pack<T>(right[2], right[3])};
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(square(lane_address, row, chunk)),
        "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
        : "memory");
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(square(lane_address, row + i % 2 * 8, chunk + i / 2)),
                   "r"(matrices[i])
                   : "memory");
    }
#endif
  }
};

// sum (16 R x 16 N) += a b over `steps` slices of 16. a_at(r, step) and b_at(n, step) are lane addresses of the 16 x 16
// squares of a and b; a square of a is read columns first, or rows first where it lies transposed in memory; a square
// of b rows first where it lies transposed, or columns first. Each fragment is loaded one product ahead.
template <class T, bool a_transposed, bool b_transposed, int steps, int R, int tiles, class AddressA, class AddressB>
__device__ inline void multiply_tiles(float (&sum)[R][tiles][4], AddressA&& a_at, AddressB&& b_at) {
  constexpr int N = tiles / 2;
  const auto load_a = [&](uint32_t(&square)[4], int r, int step) {
    a_transposed ? load_matrices_transposed(square, a_at(r, step)) : load_matrices(square, a_at(r, step));
  };
  const auto load_b = [&](uint32_t(&square)[4], int n, int step) {
    b_transposed ? load_matrices(square, b_at(n, step)) : load_matrices_transposed(square, b_at(n, step));
  };
  uint32_t a[2][R][4], b[2][4];
#pragma unroll
  for (int r = 0; r < R; ++r) load_a(a[0][r], r, 0);
  load_b(b[0], 0, 0);
#pragma unroll
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int now = step * N + n, next = now + 1;
      if (next < steps * N) load_b(b[next % 2], next % N, next / N);
      if (n == 0 && step + 1 < steps) {
#pragma unroll
        for (int r = 0; r < R; ++r) load_a(a[(step + 1) % 2][r], r, step + 1);
      }
#pragma unroll
      for (int r = 0; r < R; ++r) {
        multiply_add<T>(sum[r][2 * n], a[step % 2][r], b[now % 2][0], b[now % 2][1]);
        multiply_add<T>(sum[r][2 * n + 1], a[step % 2][r], b[now % 2][2], b[now % 2][3]);
      }
    }
  }
}

}  // namespace strobe::kernels::cuda
