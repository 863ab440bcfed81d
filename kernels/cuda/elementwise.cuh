// One value of the result per value of the inputs: walks over contiguous and over strided arrays, in packs of 16 bytes
// wherever the addresses allow it.
#pragma once

#include <utility>

#include "strobe/kernels/cuda/packed.cuh"

namespace strobe::cuda {

inline constexpr int elementwise_threads = 256;

// Elements of T that a thread handles at a time.
template <class T>
inline constexpr int pack_width = 16 / static_cast<int>(sizeof(T));

// The first element of pack number `pack` of the `packs` that this thread handles.
template <class T, int packs>
__device__ inline int64_t first_element(int pack = 0) {
  return ((int64_t{blockIdx.x} * packs + pack) * elementwise_threads + threadIdx.x) * pack_width<T>;
}

template <class T, int packs>
unsigned elementwise_grid(int64_t size) {
  return grid_size(size, int64_t{packs} * elementwise_threads * pack_width<T>);
}

inline constexpr int map_packs = 2;  // that a thread handles, so that enough bytes are under way

template <class T, class F, class... Inputs>
__global__ void __launch_bounds__(elementwise_threads)
    map_kernel(T* y, int64_t size, bool packed, F f, const Inputs*... inputs) {
  using A = accumulate_t<T>;
  constexpr int width = pack_width<T>, count = sizeof...(Inputs);
  const auto first = [](int pack) { return first_element<T, map_packs>(pack); };
  if (packed && first(map_packs - 1) + width <= size) {
    Packed<T, width> packs[map_packs][count + 1];
#pragma unroll
    for (int p = 0; p < map_packs; ++p) {
      int k = 0;
      (packs[p][k++].load(inputs + first(p)), ...);
    }
#pragma unroll
    for (int p = 0; p < map_packs; ++p) {
      Values<A, width> values[count + 1], result;
#pragma unroll
      for (int k = 0; k < count; ++k) values[k] = packs[p][k].template values<A>();
      [&]<size_t... k>(std::index_sequence<k...>) {
#pragma unroll
        for (int j = 0; j < width; ++j) result[j] = f(values[k][j]...);
      }
      (std::make_index_sequence<count>());
      store_values(y + first(p), result);
    }
    return;
  }
  for (int p = 0; p < map_packs; ++p) {
    for (int64_t i = first(p); i < first(p) + width && i < size; ++i) y[i] = T(f(static_cast<A>(inputs[i])...));
  }
}

// y[i] = f(inputs[i]...), evaluated in accumulate_t<T>. y may be one of the inputs.
template <class T, class F, class... Inputs>
void map(const char* operation, T* y, int64_t size, const Stream& stream, F f, const Inputs*... inputs) {
  static_assert((std::is_same_v<T, Inputs> && ...));
  launch(operation, map_kernel<T, F, Inputs...>, elementwise_grid<T, map_packs>(size), elementwise_threads, 0, stream,
         y, size, aligned_to(16, y, inputs...), f, inputs...);
}

}  // namespace strobe::cuda
