// Kernels with a part of a warp, a warp or a block for each row of a contiguous (rows, cols) array: launches, access,
// reductions.
#pragma once

#include <tuple>

#include "strobe/kernels/cuda/packed.cuh"

namespace strobe::cuda {

// The most threads of a block that row_block returns.
inline constexpr int max_row_threads = 512;

// Elements of a row of T that a thread takes at a time: 16 bytes.
template <class T>
inline constexpr int row_pack = 16 / sizeof(T);

// Packs of a row that a thread keeps in registers, so that rows of up to max_row_threads * kept_packs packs are read
// from memory once, all of their loads in flight together.
inline constexpr int kept_packs = 4;

// The threads of a block that rows share, each a warp or a part of one.
inline constexpr unsigned shared_row_threads = 128;

// Threads for rows of `cols` elements, taken `width` at a time, as few as keep a row in `packs` packs each: rows that a
// warp or a part of one keeps share a block, told apart by threadIdx.y; longer ones have a block of their own.
// least: threads, of which 8 fill a line of the cache with their packs.
inline dim3 row_block(int64_t cols, int width, int packs = kept_packs, unsigned least = 8) {
  unsigned threads = least;
  while (threads < max_row_threads && int64_t{threads} * packs * width < cols) threads *= 2;
  return threads <= warp_size ? dim3(threads, shared_row_threads / threads) : dim3(threads);
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

// The values of the lanes of a warp that share a row combined, in every one of them. All lanes must call it that have
// not ended.
template <class T, class Combine>
__device__ inline T row_lanes_reduce(T value, Combine combine) {
#pragma unroll
  for (unsigned offset = warp_size / 2; offset > 0; offset /= 2) {
    if (offset < blockDim.x) value = combine(value, __shfl_xor_sync(0xffffffffu, value, static_cast<int>(offset)));
  }
  return value;
}

// The values of all threads of a row combined, in every one of them.
template <class T, class Combine>
__device__ inline T row_reduce(T value, T identity, Combine combine) {
  return blockDim.x <= warp_size ? row_lanes_reduce(value, combine) : block_reduce(value, identity, combine);
}
template <class T>
__device__ inline T row_sum(T value) {
  return row_reduce(value, T(0), Plus());
}
// Two sums in the time of one.
template <class T>
__device__ inline void lanes_sums(T& a, T& b, unsigned lanes) {
#pragma unroll
  for (unsigned offset = warp_size / 2; offset > 0; offset /= 2) {
    if (offset >= lanes) continue;
    const T other_a = __shfl_xor_sync(0xffffffffu, a, static_cast<int>(offset));
    const T other_b = __shfl_xor_sync(0xffffffffu, b, static_cast<int>(offset));
    a += other_a, b += other_b;
  }
}
template <class T>
__device__ inline void row_sums(T& a, T& b) {
  lanes_sums(a, b, blockDim.x);
  if (blockDim.x <= warp_size) return;
  __shared__ T partial[2][max_row_threads / warp_size];
  const int lane = static_cast<int>(threadIdx.x) % warp_size, warp = static_cast<int>(threadIdx.x) / warp_size;
  if (lane == 0) partial[0][warp] = a, partial[1][warp] = b;
  __syncthreads();
  const bool exists = lane < static_cast<int>(blockDim.x) / warp_size;
  a = exists ? partial[0][lane] : T(0), b = exists ? partial[1][lane] : T(0);
  lanes_sums(a, b, warp_size);
  __syncthreads();
}
template <class T>
__device__ inline T row_max(T value) {
  return row_reduce(value, -static_cast<T>(INFINITY), Larger());
}

// One row of several arrays that its threads keep in registers, which takes rows of whole packs at addresses that are
// multiples of 16 bytes, at most `packs` to a thread (see is_whole).
template <int packs, int width, class... T>
class WholeRow {
 public:
  __device__ WholeRow(int64_t cols, const T*... addresses)
      : cols_(static_cast<int>(cols)), begin_(0), end_(cols_), inputs_{Input<T>{addresses, {}}...} {}

  // Only elements from `begin` to `end` are wanted; others may come as 0.
  __device__ void only(int64_t begin, int64_t end) { begin_ = static_cast<int>(begin), end_ = static_cast<int>(end); }
  template <class... Outputs>
  __device__ void align(const Outputs*...) {}

  // Calls visit(i, values...) for runs of `width` elements from i that together cover the row.
  template <class A, class Visit>
  __device__ void for_each(Visit&& visit) {
    for_each_pack<A>([&](int, int64_t i, const auto&... values) { visit(i, values...); });
  }
  // The same as visit(k, i, values...) for pack number k of the thread.
  template <class A, class Visit>
  __device__ void for_each_pack(Visit&& visit) {
    std::apply(
        [&](Input<T>&... inputs) {
          load(inputs...);
#pragma unroll
          for (int k = 0; k < packs; ++k) {
            if (position(k) < cols_) visit(k, int64_t{position(k)}, inputs.kept[k].template values<A>()...);
          }
        },
        inputs_);
  }
  // Puts what visit(i, values...) returns, rounded, in the place of the first array's elements, and stores it.
  template <class A, class First, class Visit>
  __device__ void replace_first(First* stored, Visit&& visit) {
    for_each_pack<A>([&](int k, int64_t i, const auto&... values) {
      auto& kept = std::get<0>(inputs_).kept[k];
      kept = Packed<First, width>::rounded(visit(i, values...));
      kept.store(stored + i);
    });
  }

 private:
  template <class Element>
  struct Input {
    const Element* address;
    Packed<Element, width> kept[packs];
  };

  __device__ static int position(int k) { return static_cast<int>(k * blockDim.x + threadIdx.x) * width; }
  __device__ void load(Input<T>&... inputs) {
    if (loaded_) return;
    loaded_ = true;
#pragma unroll
    for (int k = 0; k < packs; ++k) {
      if (position(k) < end_ && position(k) + width > begin_) {
        (inputs.kept[k].load(inputs.address + position(k)), ...);
      } else {
        ((inputs.kept[k] = {}), ...);
      }
    }
  }

  int cols_, begin_, end_;
  bool loaded_ = false;
  std::tuple<Input<T>...> inputs_;
};

// Whether rows of arrays at these addresses can be WholeRows in a block that row_block gave.
template <class... Arrays>
bool is_whole(int64_t cols, int width, dim3 block, const Arrays*... arrays) {
  return cols % width == 0 && cols <= int64_t{block.x} * kept_packs * width && aligned_to(16, arrays...);
}

// Calls f.template operator()<packs>() with the first of the given numbers of packs that hold a whole row at these
// addresses, 0 where rows are not whole.
template <int... choices, class F, class... Arrays>
void with_row_packs(int64_t cols, int width, dim3 block, F&& f, const Arrays*... arrays) {
  const bool whole = cols % width == 0 && aligned_to(16, arrays...);
  bool done = false;
  const auto call_with = [&]<int packs>() {
    if (done || cols > int64_t{block.x} * packs * width) return;
    done = true;
    f.template operator()<packs>();
  };
  if (whole) (call_with.template operator()<choices>(), ...);
  if (!done) f.template operator()<0>();
}

// One row of several arrays, read by all threads that share the row. The elements before the first address that is a
// multiple of 16 bytes, and those after the last whole pack, are read singly; where the arrays are not aligned alike,
// all are.
template <int width, class... T>
class Row {
 public:
  __device__ Row(int64_t cols, int64_t begin, int64_t end, const T*... addresses)
      : cols_(cols), begin_(begin), end_(end), inputs_{Input<T>{addresses, {}}...} {}
  __device__ Row(int64_t cols, const T*... addresses) : Row(cols, 0, cols, addresses...) {}

  // Only elements from `begin` to `end` are wanted; others may come as 0.
  __device__ void only(int64_t begin, int64_t end) { begin_ = begin, end_ = end; }

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

// Untyped arrays as typed ones, in the form for_each_row takes them.
template <class T, class... Arrays>
__device__ inline auto arrays_of(Arrays*... arrays) {
  return std::tuple(static_cast<T*>(arrays)...);
}

// The WholeRow of so many packs; a Row where that is 0.
template <int packs, int width, class... T>
struct RowOf {
  using type = WholeRow<packs, width, T...>;
};
template <int width, class... T>
struct RowOf<0, width, T...> {
  using type = Row<width, T...>;
};

// Calls visit(index, row, outputs...) for the rows that a block of launch_rows has, with the row of the inputs, aligned
// with what is written, and the addresses of the rows of the outputs. packs: of WholeRows; 0: any Row.
template <int packs, int width, class... In, class... Out, class Visit>
__device__ inline void for_each_row(int64_t rows, int64_t cols, const std::tuple<const In*...>& inputs,
                                    const std::tuple<Out*...>& outputs, Visit&& visit) {
  for_each_row(rows, [&](int64_t index) {
    const auto with_row = [&](const In*... in) {
      typename RowOf<packs, width, In...>::type row(cols, in + index * cols...);
      const auto with_outputs = [&](Out*... out) {
        row.align(out + index * cols...);
        visit(index, row, out + index * cols...);
      };
      std::apply(with_outputs, outputs);
    };
    std::apply(with_row, inputs);
  });
}

}  // namespace strobe::cuda
