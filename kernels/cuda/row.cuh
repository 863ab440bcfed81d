// Kernels with a warp or a block for each row of a contiguous (rows, cols) array: launches, packed access, reductions.
#pragma once

#include <tuple>

#include "strobe/kernels/cuda/cuda.h"

namespace strobe::cuda {

// The most threads of a block that row_block returns.
inline constexpr int max_row_threads = 512;

// Elements of a row of T that a thread takes at a time: 16 bytes.
template <class T>
inline constexpr int row_pack = 16 / sizeof(T);

// Packs of a row that a thread keeps in registers, so that rows of up to max_row_threads * kept_packs packs are read
// from memory once, all of their loads in flight together.
inline constexpr int kept_packs = 4;

// Threads for rows of `cols` elements, taken `width` at a time: short rows share a block of about `shared_threads` and
// have a warp each, told apart by threadIdx.y; longer ones have a block of their own.
inline dim3 row_block(int64_t cols, int width, int shared_threads = 128) {
  unsigned threads = warp_size;
  while (threads < max_row_threads && threads * kept_packs * static_cast<unsigned>(width) < cols) threads *= 2;
  return threads == warp_size ? dim3(warp_size, static_cast<unsigned>(shared_threads / warp_size)) : dim3(threads);
}

// Launches kernel(args) on at most max_blocks blocks that row_block gave; it visits its rows by for_each_row.
template <class Args>
void launch_rows(const char* operation, void (*kernel)(Args), int64_t rows, dim3 block, const Stream& stream,
                 const Args& args, int64_t max_blocks = 0x7fffffff) {
  const int64_t blocks = ceil_div(rows, block.y);
  const dim3 grid(static_cast<unsigned>(blocks < max_blocks ? blocks : max_blocks));
  launch(operation, kernel, grid, block, 0, stream, args);
}

template <class Visit>
__device__ inline void for_each_row(int64_t rows, Visit&& visit) {
  const int64_t step = int64_t(gridDim.x) * blockDim.y;
  for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < rows; row += step) visit(row);
}

// The values of all threads of a row combined, in every one of them.
template <class T, class Combine>
__device__ inline T row_reduce(T value, T identity, Combine combine) {
  return blockDim.x == warp_size ? warp_reduce(value, combine) : block_reduce(value, identity, combine);
}
template <class T>
__device__ inline T row_sum(T value) {
  return row_reduce(value, T(0), Plus());
}
template <class T>
__device__ inline T row_max(T value) {
  return row_reduce(value, -static_cast<T>(INFINITY), Larger());
}

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

// n values as they lie in memory, a multiple of 16 bytes, moved by instructions of 16 bytes.
template <class T, int n>
struct Packed {
  static constexpr int part = 16 / sizeof(T);
  uint4 parts[n / part];

  __device__ void load(const T* address) {
#pragma unroll
    for (int i = 0; i < n / part; ++i) parts[i] = reinterpret_cast<const uint4*>(address)[i];
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
};

template <class T, class A, int n>
__device__ inline void store_values(T* address, const Values<A, n>& values) {
  if constexpr (n == 1) {
    *address = static_cast<T>(values[0]);
  } else if constexpr (sizeof(T) == 2) {
    Pack<uint32_t, n / 2> pairs;
#pragma unroll
    for (int i = 0; i < n / 2; ++i) pairs[i] = round_pair<T>(values[2 * i], values[2 * i + 1]);
    store_pack_global(reinterpret_cast<uint32_t*>(address), pairs);
  } else {
    Pack<T, n> pack;
#pragma unroll
    for (int i = 0; i < n; ++i) pack[i] = static_cast<T>(values[i]);
    store_pack_global(address, pack);
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

// One row of several arrays, read by all threads that share the row. The elements before the first address that is a
// multiple of 16 bytes, and those after the last whole pack, are read singly; where the arrays are not aligned alike,
// all are.
template <int width, class... T>
class Row {
 public:
  // Only elements from `begin` to `end` are wanted; others may come as 0.
  __device__ Row(int64_t cols, int64_t begin, int64_t end, const T*... addresses)
      : cols_(cols), begin_(begin), end_(end), inputs_{Input<T>{addresses, {}}...} {}
  __device__ Row(int64_t cols, const T*... addresses) : Row(cols, 0, cols, addresses...) {}

  // Aligns the packs with those of arrays that are written, too.
  template <class... Outputs>
  __device__ void align(const Outputs*... outputs) {
    std::apply([&](const Input<T>&... inputs) { head_ = elements_before_packs(inputs.address..., outputs...); },
               inputs_);
    tail_ = head_ + (cols_ - head_) / width * width;
  }

  // Calls visit(i, values...) for runs of the row that together cover it: values of each array, n of them from i,
  // where n is `width` or 1.
  template <class A, class Visit>
  __device__ void for_each(Visit&& visit) {
    std::apply([&](Input<T>&... inputs) { visit_runs<A>(visit, inputs...); }, inputs_);
  }

 private:
  template <class Element>
  struct Input {
    const Element* address;
    Packed<Element, width> kept[kept_packs];
  };

  template <class First, class... Others>
  __device__ int64_t elements_before_packs(const First* first, const Others*... others) const {
    const int64_t head = -static_cast<int64_t>(reinterpret_cast<uintptr_t>(first) / sizeof(First)) & (width - 1);
    const auto agrees = [head]<class Element>(const Element* address) {
      constexpr size_t alignment = width * sizeof(Element) < 16 ? width * sizeof(Element) : 16;
      return reinterpret_cast<uintptr_t>(address + head) % alignment == 0;
    };
    return head < cols_ && (agrees(first) && ... && agrees(others)) ? head : cols_;
  }

  template <class A, class Visit, class... Inputs>
  __device__ void visit_runs(Visit& visit, Inputs&... inputs) {
    const auto visit_singly = [&](int64_t from, int64_t to) {
      for (int64_t i = from + threadIdx.x; i < to; i += blockDim.x) {
        const bool wanted = begin_ <= i && i < end_;
        visit(i, Values<A, 1>{wanted ? static_cast<A>(inputs.address[i]) : A(0)}...);
      }
    };
    if (head_ > 0) visit_singly(0, head_);
    const int step = static_cast<int>(blockDim.x) * width;
    constexpr int far = 1 << 30;  // beyond any round; positions within a round fit into 32 bits
    for (int64_t first = head_ + int64_t(threadIdx.x) * width; first < tail_; first += int64_t(step) * kept_packs) {
      const auto from_first = [first](int64_t i) {
        return static_cast<int>(i - first < -far ? -far : i - first > far ? far : i - first);
      };
      const int tail = from_first(tail_);
      if (!kept_) {
        const int begin = from_first(begin_), end = from_first(end_ < tail_ ? end_ : tail_);
#pragma unroll
        for (int k = 0; k < kept_packs; ++k) {
          if (k * step < end && k * step + width > begin) {
            (inputs.kept[k].load(inputs.address + first + k * step), ...);
          } else {
            ((inputs.kept[k] = {}), ...);
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kept_packs; ++k) {
        if (k * step < tail) visit(first + k * step, inputs.kept[k].template values<A>()...);
      }
    }
    kept_ = tail_ - head_ <= int64_t(step) * kept_packs;
    if (tail_ < cols_) visit_singly(tail_, cols_);
  }

  int64_t cols_, begin_, end_;
  int64_t head_ = 0, tail_ = 0;  // where packs begin and end
  bool kept_ = false;            // all packs of the row are in registers
  std::tuple<Input<T>...> inputs_;
};

}  // namespace strobe::cuda
