// Packs of 16 bytes of any dtype: how they are moved, and how they become values to compute with and back.
#pragma once

#include "strobe/kernels/cuda/cuda.h"

namespace strobe::cuda {

// n values in the type they are computed in.
template <class A, int n>
struct Values {
  A values[n];
  __device__ A& operator[](int i) { return values[i]; }
  __device__ const A& operator[](int i) const { return values[i]; }
};

// Two values of a 16-bit T in one word, the first in the low half: the way there takes one instruction, the way back
// two.
template <class T>
__device__ inline uint32_t round_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t bits;
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  }
  return bits;
#else
  return T(first).bits | static_cast<uint32_t>(T(second).bits) << 16;
#endif
}
template <class T>
__device__ inline float widen(uint32_t pair, bool second) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    return std::bit_cast<float>(second ? pair & 0xffff0000u : pair << 16);
  } else {
    T value;
    value.bits = static_cast<uint16_t>(second ? pair >> 16 : pair);
    return static_cast<float>(value);
  }
}

// n values as they lie in memory, a multiple of 16 bytes, moved by instructions of 16 bytes. Where __stwb is not used
// nvcc often takes the store of a struct apart.
template <class T, int n>
struct Packed {
  static constexpr int part = 16 / sizeof(T);
  uint4 parts[n / part];

  __device__ void load(const T* address) {
#pragma unroll
    for (int i = 0; i < n / part; ++i) parts[i] = reinterpret_cast<const uint4*>(address)[i];
  }
  // Of what no thread writes: such a load may go ahead of stores.
  __device__ void load_constant(const T* address) {
#pragma unroll
    for (int i = 0; i < n / part; ++i) parts[i] = __ldg(reinterpret_cast<const uint4*>(address) + i);
  }
  // Makes the compiler compute values() anew in each turn of a loop, where it would hold them in twice as many
  // registers.
  __device__ void stay_packed() {
#pragma unroll
    for (int i = 0; i < n / part; ++i) {
      asm volatile("" : "+r"(parts[i].x), "+r"(parts[i].y), "+r"(parts[i].z), "+r"(parts[i].w));
    }
  }
  __device__ void store(T* address) const {
#pragma unroll
    for (int i = 0; i < n / part; ++i) __stwb(reinterpret_cast<uint4*>(address) + i, parts[i]);
  }

  template <class A>
  __device__ Values<A, n> values() const {
    Values<A, n> result;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if constexpr (sizeof(T) == 2) {
        result[i] = widen<T>(std::bit_cast<Pack<uint32_t, 4>>(parts[i / part])[i % part / 2], i % 2 == 1);
      } else {
        result[i] = static_cast<A>(std::bit_cast<Pack<T, part>>(parts[i / part])[i % part]);
      }
    }
    return result;
  }

  // The values rounded to T.
  template <class A>
  __device__ static Packed rounded(const Values<A, n>& values) {
    Packed result;
#pragma unroll
    for (int i = 0; i < n / part; ++i) {
      if constexpr (sizeof(T) == 2) {
        Pack<uint32_t, 4> pairs;
#pragma unroll
        for (int j = 0; j < 4; ++j) pairs[j] = round_pair<T>(values[8 * i + 2 * j], values[8 * i + 2 * j + 1]);
        result.parts[i] = std::bit_cast<uint4>(pairs);
      } else {
        Pack<T, part> pack;
#pragma unroll
        for (int j = 0; j < part; ++j) pack[j] = static_cast<T>(values[part * i + j]);
        result.parts[i] = std::bit_cast<uint4>(pack);
      }
    }
    return result;
  }
};

// Loads n values, one or whole packs.
template <class A, int n, class T>
__device__ inline Values<A, n> load_values(const T* address) {
  if constexpr (n == 1) {
    return {static_cast<A>(*address)};
  } else {
    Packed<T, n> packed;
    packed.load(address);
    return packed.template values<A>();
  }
}

// Rounds and stores n values, one or whole packs.
template <class T, class A, int n>
__device__ inline void store_values(T* address, const Values<A, n>& values) {
  if constexpr (n == 1) {
    *address = static_cast<T>(values[0]);
  } else {
    Packed<T, n>::rounded(values).store(address);
  }
}

// Values from any address, for vectors that all rows share and caches hold.
template <class A, int n, class T>
__device__ inline Values<A, n> load_shared_values(const T* address) {
  if constexpr (n * sizeof(T) == 16) {
    if (reinterpret_cast<uintptr_t>(address) % 16 == 0) {
      Packed<T, n> packed;
      packed.load(address);
      return packed.template values<A>();
    }
  }
  Values<A, n> result;
#pragma unroll
  for (int i = 0; i < n; ++i) result[i] = static_cast<A>(address[i]);
  return result;
}

}  // namespace strobe::cuda
