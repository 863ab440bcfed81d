// Embedding on CUDA: gathers rows; for the gradient it sorts the rows by their index, keeping their order, and adds
// each group up.
#include "strobe/kernels/embedding.h"

#include "strobe/kernels/cuda/elementwise.cuh"

namespace strobe::kernels::cuda {
namespace {

using namespace strobe::cuda;

constexpr int threads = 256;
constexpr int warps = threads / warp_size;

template <class Index>
__global__ void __launch_bounds__(threads)
    find_invalid(unsigned long long* position, const Index* indices, int64_t size, int64_t limit, int64_t ignored) {
  const int64_t step = int64_t{gridDim.x} * threads;
  for (int64_t i = int64_t{blockIdx.x} * threads + threadIdx.x; i < size; i += step) {
    const int64_t index = indices[i];
    if ((index < 0 || index >= limit) && index != ignored) atomicMin(position, static_cast<unsigned long long>(i));
  }
}

// A thread for each pack of `width` elements of the result.
template <class T, class Index, int width>
__global__ void __launch_bounds__(threads)
    gather(T* out, const T* weight, const Index* indices, int64_t rows, int64_t packs_per_row) {
  const int64_t size = rows * packs_per_row;
  const int64_t step = int64_t{gridDim.x} * threads;
  for (int64_t i = int64_t{blockIdx.x} * threads + threadIdx.x; i < size; i += step) {
    const int64_t row = i / packs_per_row;
    const int64_t source = static_cast<int64_t>(indices[row]) * packs_per_row + (i - row * packs_per_row);
    store_pack<T, width>(out + i * width, load_pack<T, width>(weight + source * width));
  }
}

// A stable radix sort, least significant digit first. One pass sorts by one digit: it counts how often each digit
// occurs in each block of rows, turns the counts into the places where each block puts its rows, and puts them there.
constexpr int digits = static_cast<int>(embedding_sort_digits);
constexpr int rows_per_block = static_cast<int>(embedding_sort_block);

template <class Index>
__device__ inline int digit_of(const Index* indices, int64_t row, int shift) {
  return static_cast<int>(static_cast<uint64_t>(indices[row]) >> shift) & (digits - 1);
}

template <class Index>
__global__ void __launch_bounds__(digits)
    count_digits(int64_t* counts, const int64_t* order, const Index* indices, int64_t rows, int shift) {
  __shared__ int own[digits];
  own[threadIdx.x] = 0;
  __syncthreads();
  for (int64_t i = int64_t{blockIdx.x} * rows_per_block + threadIdx.x;
       i < rows && i < (int64_t{blockIdx.x} + 1) * rows_per_block; i += digits) {
    atomicAdd(&own[digit_of(indices, order != nullptr ? order[i] : i, shift)], 1);
  }
  __syncthreads();
  counts[int64_t{threadIdx.x} * gridDim.x + blockIdx.x] = own[threadIdx.x];
}

// Replaces the counts by the sums of all before them; one block.
__global__ void __launch_bounds__(1024) sum_before(int64_t* counts, int64_t size) {
  __shared__ int64_t of_warps[warp_size];
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  const int warp = static_cast<int>(threadIdx.x) / warp_size;
  int64_t before = 0;
  for (int64_t first = 0; first < size; first += blockDim.x) {
    const int64_t i = first + threadIdx.x;
    const int64_t own = i < size ? counts[i] : 0;
    int64_t sum = own;
    for (int offset = 1; offset < warp_size; offset *= 2) {
      const int64_t left = __shfl_up_sync(0xffffffffu, sum, offset);
      if (lane >= offset) sum += left;
    }
    if (lane == warp_size - 1) of_warps[warp] = sum;
    __syncthreads();
    int64_t preceding = 0;
    int64_t total = 0;
    for (int w = 0; w < warp_size; ++w) {
      if (w < warp) preceding += of_warps[w];
      total += of_warps[w];
    }
    if (i < size) counts[i] = before + preceding + sum - own;
    before += total;
    __syncthreads();
  }
}

// Puts each row behind those of its digit that come before it: in earlier blocks, in earlier rounds of `threads` rows,
// in earlier warps of the round and in lower lanes of the warp.
template <class Index>
__global__ void __launch_bounds__(threads) place_rows(int64_t* sorted, const int64_t* order, const int64_t* places,
                                                      const Index* indices, int64_t rows, int shift) {
  static_assert(threads == digits);
  __shared__ int64_t next[digits];
  __shared__ int in_warp[warps][digits];
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  const int warp = static_cast<int>(threadIdx.x) / warp_size;
  next[threadIdx.x] = places[int64_t{threadIdx.x} * gridDim.x + blockIdx.x];
  for (int round = 0; round < rows_per_block; round += threads) {
    for (int w = 0; w < warps; ++w) in_warp[w][threadIdx.x] = 0;
    __syncthreads();
    const int64_t i = int64_t{blockIdx.x} * rows_per_block + round + threadIdx.x;
    const int64_t row = i < rows ? (order != nullptr ? order[i] : i) : 0;
    const int digit = i < rows ? digit_of(indices, row, shift) : digits;
    unsigned same = 0;  // lanes of this warp with the same digit
    for (int other = 0; other < warp_size; ++other) {
      same |= unsigned{__shfl_sync(0xffffffffu, digit, other) == digit} << other;
    }
    const int rank = __popc(same & ((1u << lane) - 1));
    if (i < rows && rank == 0) in_warp[warp][digit] = __popc(same);
    __syncthreads();
    if (i < rows) {
      int64_t place = next[digit] + rank;
      for (int w = 0; w < warp; ++w) place += in_warp[w][digit];
      sorted[place] = row;
    }
    __syncthreads();
    for (int w = 0; w < warps; ++w) next[threadIdx.x] += in_warp[w][threadIdx.x];
  }
}

// The first place in the sorted order whose index is at least `index`, found by a whole warp.
template <class Index>
__device__ int64_t first_place(const int64_t* order, const Index* indices, int64_t rows, int64_t index) {
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  int64_t low = 0;
  int64_t high = rows;
  while (low < high) {
    const int64_t step = ceil_div(high - low, warp_size);
    const int64_t probe = low + lane * step;
    const bool below = probe < high && static_cast<int64_t>(indices[order[probe]]) < index;
    const int count = __popc(__ballot_sync(0xffffffffu, below));
    if (count == 0) return low;
    high = low + count * step < high ? low + count * step : high;
    low += (count - 1) * step + 1;
  }
  return low;
}

template <class T>
struct Columns {
  static constexpr int width = 8 / sizeof(T);
  accumulate_t<T> sum[width] = {};

  // `count` elements from x on, at most `width`.
  __device__ void add(const T* x, int64_t count) {
    if (count >= width && reinterpret_cast<uintptr_t>(x) % 8 == 0) {
      const Pack<T, width> pack = load_pack<T, width>(x);
#pragma unroll
      for (int j = 0; j < width; ++j) sum[j] += accumulate_t<T>(pack[j]);
    } else {
#pragma unroll
      for (int j = 0; j < width; ++j) sum[j] += j < count ? accumulate_t<T>(x[j]) : accumulate_t<T>(0);
    }
  }
  __device__ void store(T* y, int64_t count) const {
#pragma unroll
    for (int j = 0; j < width; ++j) {
      if (j < count) y[j] = T(sum[j]);
    }
  }
};

constexpr int64_t long_group = 32;  // rows from which a group gets a block of its own

// A warp for each row of dweight, but for those of long groups.
template <class T, class Index>
__global__ void __launch_bounds__(threads) add_short_groups(EmbeddingGradArgs args, const int64_t* order) {
  const Index* const indices = static_cast<const Index*>(args.indices);
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  const int64_t step = int64_t{gridDim.x} * warps;
  for (int64_t v = int64_t{blockIdx.x} * warps + threadIdx.x / warp_size; v < args.vocab; v += step) {
    const int64_t begin = first_place(order, indices, args.rows, v);
    static_assert(long_group == warp_size);
    const bool member = begin + lane < args.rows && static_cast<int64_t>(indices[order[begin + lane]]) == v;
    const unsigned members = __ballot_sync(0xffffffffu, member);
    if (members == 0xffffffffu) continue;
    const int64_t end = begin + __popc(members);
    for (int64_t c = lane * Columns<T>::width; c < args.dim; c += warp_size * Columns<T>::width) {
      Columns<T> columns;
      for (int64_t i = begin; i < end; ++i) {
        columns.add(static_cast<const T*>(args.dout) + order[i] * args.dim + c, args.dim - c);
      }
      columns.store(static_cast<T*>(args.dweight) + v * args.dim + c, args.dim - c);
    }
  }
}

// A group of at least long_group rows covers a place that is a multiple of it; the block of the first such place adds
// the group up, each warp taking every `warps`-th row.
template <class T, class Index>
__global__ void __launch_bounds__(threads) add_long_groups(EmbeddingGradArgs args, const int64_t* order) {
  using A = accumulate_t<T>;
  constexpr int width = Columns<T>::width;
  __shared__ A sums[warps][warp_size * width];
  const Index* const indices = static_cast<const Index*>(args.indices);
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  const int warp = static_cast<int>(threadIdx.x) / warp_size;
  for (int64_t place = int64_t{blockIdx.x} * long_group; place < args.rows; place += int64_t{gridDim.x} * long_group) {
    const int64_t v = static_cast<int64_t>(indices[order[place]]);
    const auto belongs = [&](int64_t other) {
      return other >= 0 && other < args.rows && static_cast<int64_t>(indices[order[other]]) == v;
    };
    // A long group whose first multiple this is reaches half its length to one side or the other.
    if (!belongs(place - long_group / 2) && !belongs(place + long_group / 2)) continue;
    const int64_t begin = first_place(order, indices, args.rows, v);
    if (place - begin >= long_group) continue;
    const int64_t end = first_place(order, indices, args.rows, v + 1);
    if (end - begin < long_group) continue;
    for (int64_t first = int64_t{blockIdx.y} * warp_size * width; first < args.dim;
         first += int64_t{gridDim.y} * warp_size * width) {
      const int64_t c = first + lane * width;
      Columns<T> columns;
      if (c < args.dim) {
#pragma unroll 4
        for (int64_t i = begin + warp; i < end; i += warps) {
          columns.add(static_cast<const T*>(args.dout) + order[i] * args.dim + c, args.dim - c);
        }
      }
      __syncthreads();  // the sums of the columns before have been read
#pragma unroll
      for (int j = 0; j < width; ++j) sums[warp][lane * width + j] = columns.sum[j];
      __syncthreads();
      for (int t = static_cast<int>(threadIdx.x); t < warp_size * width && first + t < args.dim; t += threads) {
        A total = 0;
        for (int w = 0; w < warps; ++w) total += sums[w][t];
        static_cast<T*>(args.dweight)[v * args.dim + first + t] = T(total);
      }
    }
  }
}

// The rows in the order of their indices; the result lies in the workspace.
template <class Index>
const int64_t* sort_rows(const EmbeddingGradArgs& args, const Stream& stream) {
  const Index* const indices = static_cast<const Index*>(args.indices);
  int64_t* sorted = static_cast<int64_t*>(args.workspace);
  int64_t* other = sorted + args.rows;
  int64_t* const counts = other + args.rows;
  const int64_t blocks = ceil_div(args.rows, rows_per_block);
  const int64_t* order = nullptr;
  for (int shift = 0; shift == 0 || (shift < 63 && (args.vocab - 1) >> shift > 0); shift += 8) {
    launch("embedding", count_digits<Index>, grid_size(blocks, 1), digits, 0, stream, counts, order, indices, args.rows,
           shift);
    launch("embedding", sum_before, 1, 1024, 0, stream, counts, blocks * digits);
    launch("embedding", place_rows<Index>, grid_size(blocks, 1), threads, 0, stream, sorted, order, counts, indices,
           args.rows, shift);
    order = sorted;
    std::swap(sorted, other);
  }
  return order;
}

}  // namespace

void find_invalid_index(const FindInvalidIndexArgs& args, const Stream& stream) {
  const ActiveDevice active(stream.device);
  // All bits set is -1, and the largest of the unsigned numbers, of which the kernel takes the least.
  check_cuda(cudaMemsetAsync(args.position, 0xff, sizeof(int64_t), cuda_stream(stream)), "find_invalid_index");
  dispatch_index(args.index_dtype, "find_invalid_index", [&]<class Index>() {
    launch("find_invalid_index", find_invalid<Index>, grid_size(args.size, threads), threads, 0, stream,
           reinterpret_cast<unsigned long long*>(args.position), static_cast<const Index*>(args.indices), args.size,
           args.limit, args.ignore_index);
  });
}

void embedding_forward(const EmbeddingArgs& args, const Stream& stream) {
  dispatch_floating(args.dtype, "embedding", [&]<class T>() {
    dispatch_index(args.index_dtype, "embedding", [&]<class Index>() {
      T* const out = static_cast<T*>(args.out);
      const T* const weight = static_cast<const T*>(args.weight);
      const Index* const indices = static_cast<const Index*>(args.indices);
      if (constexpr int width = pack_width<T>; args.dim % width == 0 && aligned_to(16, out, weight)) {
        launch("embedding", gather<T, Index, width>, grid_size(args.rows * (args.dim / width), threads), threads, 0,
               stream, out, weight, indices, args.rows, args.dim / width);
      } else {
        launch("embedding", gather<T, Index, 1>, grid_size(args.rows * args.dim, threads), threads, 0, stream, out,
               weight, indices, args.rows, args.dim);
      }
    });
  });
}

void embedding_backward(const EmbeddingGradArgs& args, const Stream& stream) {
  dispatch_floating(args.dtype, "embedding", [&]<class T>() {
    dispatch_index(args.index_dtype, "embedding", [&]<class Index>() {
      const int64_t* const order = sort_rows<Index>(args, stream);
      launch("embedding", add_short_groups<T, Index>, grid_size(args.vocab, warps), threads, 0, stream, args, order);
      const int64_t tiles = ceil_div(args.dim, warp_size * Columns<T>::width);
      const dim3 grid(grid_size(args.rows, long_group), static_cast<unsigned>(tiles < 65535 ? tiles : 65535));
      launch("embedding", add_long_groups<T, Index>, grid, threads, 0, stream, args, order);
    });
  });
}

}  // namespace strobe::kernels::cuda
