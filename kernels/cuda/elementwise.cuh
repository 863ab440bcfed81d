// One value of the result per value of the inputs: walks over contiguous and over strided arrays, in packs of 16 bytes
// wherever the addresses allow it.
#pragma once

#include "strobe/kernels/cuda/cuda.h"

namespace strobe::cuda {

inline constexpr int elementwise_threads = 256;

// Elements of T that a thread handles at a time.
template <class T>
inline constexpr int pack_width = 16 / static_cast<int>(sizeof(T));

template <class T>
using FullPack = Pack<T, pack_width<T>>;

// Element i and those behind it, up to a full pack or to `size`; in one access if `packed`.
template <class T>
__device__ inline FullPack<T> load_elements(const T* x, int64_t i, int64_t size, bool packed) {
  if (packed && i + pack_width<T> <= size) return load_pack<T, pack_width<T>>(x + i);
  FullPack<T> pack{};
#pragma unroll
  for (int j = 0; j < pack_width<T>; ++j) {
    if (i + j < size) pack[j] = x[i + j];
  }
  return pack;
}

template <class T>
__device__ inline void store_elements(T* y, int64_t i, int64_t size, bool packed, const FullPack<T>& pack) {
  if (packed && i + pack_width<T> <= size) return store_pack<T, pack_width<T>>(y + i, pack);
#pragma unroll
  for (int j = 0; j < pack_width<T>; ++j) {
    if (i + j < size) y[i + j] = pack[j];
  }
}

// The first element of pack number `pack` of the `packs` that this thread handles.
template <class T, int packs>
__device__ inline int64_t first_element(int pack = 0) {
  return ((int64_t{blockIdx.x} * packs + pack) * elementwise_threads + threadIdx.x) * pack_width<T>;
}

template <class T, int packs>
unsigned elementwise_grid(int64_t size) {
  return grid_size(size, int64_t{packs} * elementwise_threads * pack_width<T>);
}

// With one input each thread handles two packs, so that twice the bytes are under way; with more, the registers that
// takes would keep other threads out.
template <int inputs>
inline constexpr int map_packs = inputs == 1 ? 2 : 1;

template <class T, class F, class... Inputs>
__global__ void __launch_bounds__(elementwise_threads)
    map_kernel(T* y, int64_t size, bool packed, F f, const Inputs*... inputs) {
  constexpr int packs = map_packs<sizeof...(Inputs)>;
  const auto apply = [&](int64_t i, const auto&... values) {
    FullPack<T> result;
#pragma unroll
    for (int j = 0; j < pack_width<T>; ++j) result[j] = T(f(accumulate_t<T>(values[j])...));
    store_elements(y, i, size, packed, result);
  };
  const int64_t i = first_element<T, packs>();
  if constexpr (packs == 2) {
    const int64_t k = first_element<T, packs>(1);
    if (k < size) {
      const FullPack<T> first = load_elements(inputs..., i, size, packed);
      const FullPack<T> second = load_elements(inputs..., k, size, packed);
      apply(i, first);
      return apply(k, second);
    }
  }
  if (i < size) apply(i, load_elements(inputs, i, size, packed)...);
}

// y[i] = f(inputs[i]...), evaluated in accumulate_t<T>. y may be one of the inputs.
template <class T, class F, class... Inputs>
void map(const char* operation, T* y, int64_t size, const Stream& stream, F f, const Inputs*... inputs) {
  static_assert((std::is_same_v<T, Inputs> && ...));
  launch(operation, map_kernel<T, F, Inputs...>, elementwise_grid<T, map_packs<sizeof...(Inputs)>>(size),
         elementwise_threads, 0, stream, y, size, aligned_to(16, y, inputs...), f, inputs...);
}

}  // namespace strobe::cuda
