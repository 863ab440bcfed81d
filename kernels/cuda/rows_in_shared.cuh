// Rows of whole packs in shared memory, where more of them can be under way than in registers.
#pragma once

#include <algorithm>

#include "strobe/kernels/cuda/mma.cuh"
#include "strobe/kernels/cuda/row.cuh"

namespace strobe::cuda {

// In what follows `lanes` threads have a row, 0: all of a block. So many threads a block has at most.
template <int lanes>
inline constexpr int most_threads = lanes > 0 ? static_cast<int>(shared_row_threads) : max_row_threads;

// The values of all threads of a row added up, in every one of them. All threads of the block must call it.
template <int lanes, class T>
__device__ inline T row_sum(T value) {
  if constexpr (lanes > 0) {
    return warp_sum<lanes>(value);
  } else {
    return block_sum(value);
  }
}
// Two sums in the time of one, with one barrier. turn: 0 and 1 by turns.
template <int lanes, class T>
__device__ inline void row_sums(T& a, T& b, int turn) {
  lanes_sums(a, b, lanes > 0 ? lanes : warp_size);
  if constexpr (lanes == 0) {
    __shared__ T partial[2][2][max_row_threads / warp_size];
    auto& [of_a, of_b] = partial[turn];
    const int lane = static_cast<int>(threadIdx.x) % warp_size, warp = static_cast<int>(threadIdx.x) / warp_size;
    if (lane == 0) of_a[warp] = a, of_b[warp] = b;
    __syncthreads();
    const bool exists = lane < static_cast<int>(blockDim.x) / warp_size;
    a = exists ? of_a[lane] : T(0), b = exists ? of_b[lane] : T(0);
    lanes_sums(a, b, warp_size);
  }
}

// Copies a pack from global to shared memory in the background, as copy_async_16 does; older GPUs wait for it.
template <class T, int n>
__device__ inline void copy_in_background(Packed<T, n>& target, const T* source) {
#if __CUDA_ARCH__ >= 800
  kernels::cuda::copy_async_16(kernels::cuda::shared_address(&target), source);
#else
  target.load(source);
#endif
}
// The most bytes of rows in a block that leave room for a second block, and for what kernels declare.
inline size_t most_row_bytes(Device device) {
  const DeviceProperties& properties = device_properties(device);
  return static_cast<size_t>(
      std::min(properties.shared_bytes_per_block, properties.shared_bytes_per_multiprocessor / 2) - 2048);
}

// Places for `arrays` rows of T for each row of a block. A thread reads only what it wrote, pack k being pack
// threadIdx.x + k * lanes of a row, so that threads need not meet. packs: of a thread, 0: as few as the row needs.
// Takes bytes() of dynamic shared memory.
template <class T, int arrays, int lanes, int packs = 0>
class RowsInShared {
 public:
  using Pack = Packed<T, row_pack<T>>;

  static size_t bytes(int64_t cols, dim3 block) {
    return static_cast<size_t>(ceil_div(cols, int64_t{block.x} * row_pack<T>) * arrays) * block.x * block.y *
           sizeof(Pack);
  }

  __device__ explicit RowsInShared(int64_t cols = 0)
      : own_(as<Pack>() + threadIdx.y * width() + threadIdx.x), end_(static_cast<int>(cols) / row_pack<T>) {}

  // All of the memory.
  template <class Element>
  __device__ static Element* as() {
    extern __shared__ uint4 row_memory[];
    return reinterpret_cast<Element*>(row_memory);
  }
  // Where in a row pack k is, and how far on the next.
  __device__ static int position(int k) { return k * step() + static_cast<int>(threadIdx.x) * row_pack<T>; }
  __device__ static int step() { return width() * row_pack<T>; }
  __device__ Pack& at(int array, int k) const { return own_[(array * packs + k) * threads()]; }

  // Calls visit(packs, rows...) for the thread's packs of a row, that of the first array at packs[0], of the next at
  // packs[pitch()], with where they are in `rows`.
  template <class Visit, class... Elements>
  __device__ void for_each(Visit&& visit, Elements*... rows) const {
    static_assert(packs == 0);
    const int mine = (end_ - static_cast<int>(threadIdx.x) + width() - 1) / width();
    Pack* pack = own_;
    ((rows += position(0)), ...);
#pragma unroll 4
    for (int k = 0; k < mine; ++k) {
      visit(pack, rows...);
      pack += threads();
      ((rows += step()), ...);
    }
  }
  __device__ int pitch() const { return (end_ + width() - 1) / width() * threads(); }

 private:
  __device__ static int width() { return lanes > 0 ? lanes : static_cast<int>(blockDim.x); }
  __device__ static int threads() { return lanes > 0 ? most_threads<lanes> : static_cast<int>(blockDim.x); }

  Pack* own_;
  int end_;
};

}  // namespace strobe::cuda
