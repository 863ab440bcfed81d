// Embedding on CUDA: gathers rows; for the gradient it sorts the rows by their index, keeping their order, and adds
// each group up in chunks. Rows whose index is out of range belong to no group.
#include "strobe/kernels/embedding.h"

#include <algorithm>

#include "strobe/kernels/cuda/elementwise.cuh"
#include "strobe/kernels/device.h"

namespace strobe::kernels::cuda {
namespace {

using namespace strobe::cuda;

constexpr int threads = 256;
constexpr int warps = threads / warp_size;

// The index of a row; `vocab` where it is out of range.
template <class Index>
__device__ inline int64_t index_of(const Index* indices, int64_t row, int64_t vocab) {
  const int64_t index = indices[row];
  return 0 <= index && index < vocab ? index : vocab;
}

// A thread for each pack of `width` elements of the result.
template <class T, class Index, int width>
__global__ void __launch_bounds__(threads)
    gather(T* out, const T* weight, const Index* indices, int64_t rows, int64_t vocab, int64_t packs_per_row) {
  const int64_t size = rows * packs_per_row;
  const int64_t step = int64_t{gridDim.x} * threads;
  for (int64_t i = int64_t{blockIdx.x} * threads + threadIdx.x; i < size; i += step) {
    const int64_t row = i / packs_per_row;
    const int64_t index = index_of(indices, row, vocab);
    Pack<T, width> pack;
    if (index < vocab) {
      pack = load_pack<T, width>(weight + (index * packs_per_row + (i - row * packs_per_row)) * width);
    } else {
      for (int j = 0; j < width; ++j) pack[j] = T(static_cast<accumulate_t<T>>(NAN));
    }
    store_pack_global(out + i * width, pack);
  }
}

// A stable radix sort, least significant digit first. One pass sorts by one digit: it counts how often each digit
// occurs in each block of rows, turns the counts into the places where each block puts its rows, and puts them there.
constexpr int digits = static_cast<int>(embedding_sort_digits);
constexpr int rows_per_block = static_cast<int>(embedding_sort_block);

template <class Index>
__device__ inline int digit_of(const Index* indices, int64_t row, int64_t vocab, int shift) {
  return static_cast<int>(index_of(indices, row, vocab) >> shift) & (digits - 1);
}

template <class Index>
__global__ void __launch_bounds__(digits)
    count_digits(int64_t* counts, const int64_t* order, const Index* indices, int64_t rows, int64_t vocab, int shift) {
  __shared__ int own[digits];
  own[threadIdx.x] = 0;
  __syncthreads();
  for (int64_t i = int64_t{blockIdx.x} * rows_per_block + threadIdx.x;
       i < rows && i < (int64_t{blockIdx.x} + 1) * rows_per_block; i += digits) {
    atomicAdd(&own[digit_of(indices, order != nullptr ? order[i] : i, vocab, shift)], 1);
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
                                                      const Index* indices, int64_t rows, int64_t vocab, int shift) {
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
    const int digit = i < rows ? digit_of(indices, row, vocab, shift) : digits;
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

// A chunk of the sorted rows, of which a thread adds up `width` columns. Groups within the chunk are done; of one that
// goes on in a neighbouring chunk the sum is left in `partial`, of shape (chunks, 2, dim): that of a group from an
// earlier chunk in row 0, that of one which begins here in row 1.
constexpr int chunk_rows = static_cast<int>(embedding_chunk);

template <class T, class Index, int width>
__global__ void __launch_bounds__(threads)
    add_chunks(EmbeddingGradArgs args, const int64_t* order, accumulate_t<T>* partial) {
  using A = accumulate_t<T>;
  constexpr int loads = 8;  // under way at a time
  static_assert(chunk_rows % loads == 0 && chunk_rows <= threads);
  __shared__ int64_t rows[chunk_rows], index[chunk_rows + 2];  // index[i + 1] is that of place i of the chunk
  const Index* const indices = static_cast<const Index*>(args.indices);
  const int64_t tiles = ceil_div(args.dim, blockDim.x * width);
  const int64_t tasks = ceil_div(args.rows, chunk_rows) * tiles;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t chunk = task / tiles, column = (task % tiles * blockDim.x + threadIdx.x) * width;
    const int64_t first = chunk * chunk_rows;
    __syncthreads();  // the chunk before has been read
    for (int i = static_cast<int>(threadIdx.x) - 1; i <= chunk_rows; i += static_cast<int>(blockDim.x)) {
      const int64_t place = first + i;
      const bool exists = place >= 0 && place < args.rows;
      const int64_t row = exists ? order[place] : 0;
      index[i + 1] = exists ? index_of(indices, row, args.vocab) : args.vocab;
      if (i >= 0 && i < chunk_rows) rows[i] = row;
    }
    __syncthreads();
    if (column >= args.dim) continue;
    A sum[width] = {};
    bool from_before = index[0] == index[1];
    for (int i = 0; i < chunk_rows && index[i + 1] < args.vocab; i += loads) {
      Pack<T, width> packs[loads];
#pragma unroll
      for (int k = 0; k < loads; ++k) {
        if (index[i + k + 1] < args.vocab) {
          packs[k] = load_pack<T, width>(static_cast<const T*>(args.dout) + rows[i + k] * args.dim + column);
        }
      }
#pragma unroll
      for (int k = 0; k < loads; ++k) {
        const int64_t own = index[i + k + 1], next = index[i + k + 2];
        if (own == args.vocab) break;
#pragma unroll
        for (int j = 0; j < width; ++j) sum[j] += A(packs[k][j]);
        const bool goes_on = next == own;
        if (goes_on && i + k + 1 < chunk_rows) continue;
        if (from_before || goes_on) {
          A* const target = partial + (2 * chunk + (from_before ? 0 : 1)) * args.dim + column;
#pragma unroll
          for (int j = 0; j < width; ++j) target[j] = sum[j];
        } else {
          Pack<T, width> result;
#pragma unroll
          for (int j = 0; j < width; ++j) result[j] = T(sum[j]);
          store_pack<T, width>(static_cast<T*>(args.dweight) + own * args.dim + column, result);
        }
        from_before = false;
#pragma unroll
        for (int j = 0; j < width; ++j) sum[j] = 0;
      }
    }
  }
}

// Adds up the partial sums of a group; the chunk in which it begins does.
template <class T, class Index>
__global__ void __launch_bounds__(threads)
    add_partial_sums(EmbeddingGradArgs args, const int64_t* order, const accumulate_t<T>* partial) {
  using A = accumulate_t<T>;
  const Index* const indices = static_cast<const Index*>(args.indices);
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  const int64_t chunks = ceil_div(args.rows, chunk_rows), tiles = ceil_div(args.dim, threads);
  const auto index_at = [&](int64_t place) { return index_of(indices, order[place], args.vocab); };
  for (int64_t task = blockIdx.x; task < (chunks - 1) * tiles; task += gridDim.x) {
    const int64_t chunk = task / tiles;
    const int64_t first = chunk * chunk_rows;
    const int64_t own = index_at(first + chunk_rows - 1);
    if (own == args.vocab || index_at(first + chunk_rows) != own) continue;
    if (first > 0 && index_at(first - 1) == own) continue;  // began in an earlier chunk
    // The group reaches into all following chunks whose first row belongs to it.
    int64_t end = chunk + 1;
    while (true) {
      const bool reached = end + lane < chunks && index_at((end + lane) * chunk_rows) == own;
      const unsigned lanes = __ballot_sync(0xffffffffu, reached);
      end += __popc(lanes);
      if (lanes != 0xffffffffu) break;
    }
    const int64_t column = task % tiles * threads + threadIdx.x;
    if (column >= args.dim) continue;
    A sum = partial[(2 * chunk + 1) * args.dim + column];
#pragma unroll 8
    for (int64_t other = chunk + 1; other < end; ++other) sum += partial[2 * other * args.dim + column];
    static_cast<T*>(args.dweight)[own * args.dim + column] = T(sum);
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
  for (int shift = 0; shift == 0 || (shift < 63 && args.vocab >> shift > 0); shift += 8) {
    launch("embedding", count_digits<Index>, grid_size(blocks, 1), digits, 0, stream, counts, order, indices, args.rows,
           args.vocab, shift);
    launch("embedding", sum_before, 1, 1024, 0, stream, counts, blocks * digits);
    launch("embedding", place_rows<Index>, grid_size(blocks, 1), threads, 0, stream, sorted, order, counts, indices,
           args.rows, args.vocab, shift);
    order = sorted;
    std::swap(sorted, other);
  }
  return order;
}

}  // namespace

void embedding_forward(const EmbeddingArgs& args, const Stream& stream) {
  dispatch_floating(args.dtype, "embedding", [&]<class T>() {
    dispatch_index(args.index_dtype, "embedding", [&]<class Index>() {
      T* const out = static_cast<T*>(args.out);
      const T* const weight = static_cast<const T*>(args.weight);
      const Index* const indices = static_cast<const Index*>(args.indices);
      if (constexpr int width = pack_width<T>; args.dim % width == 0 && aligned_to(16, out, weight)) {
        launch("embedding", gather<T, Index, width>, grid_size(args.rows * (args.dim / width), threads), threads, 0,
               stream, out, weight, indices, args.rows, args.vocab, args.dim / width);
      } else {
        launch("embedding", gather<T, Index, 1>, grid_size(args.rows * args.dim, threads), threads, 0, stream, out,
               weight, indices, args.rows, args.vocab, args.dim);
      }
    });
  });
}

void embedding_backward(const EmbeddingGradArgs& args, const Stream& stream) {
  strobe::cuda::raw_zero(args.dweight, static_cast<size_t>(args.vocab * args.dim) * size_of(args.dtype), stream);
  dispatch_floating(args.dtype, "embedding", [&]<class T>() {
    dispatch_index(args.index_dtype, "embedding", [&]<class Index>() {
      const int64_t* const order = sort_rows<Index>(args, stream);
      const int64_t blocks = ceil_div(args.rows, rows_per_block), chunks = ceil_div(args.rows, chunk_rows);
      auto* const partial =
          reinterpret_cast<accumulate_t<T>*>(static_cast<int64_t*>(args.workspace) + 2 * args.rows + blocks * digits);
      const auto grid = [&](int64_t columns) { return grid_size(chunks * ceil_div(args.dim, columns), 1); };
      constexpr int width = 8 / sizeof(T);
      if (args.dim % width == 0 && aligned_to(8, args.dout, args.dweight)) {
        const int block =
            static_cast<int>(std::min<int64_t>(ceil_div(args.dim, width * warp_size) * warp_size, threads));
        launch("embedding", add_chunks<T, Index, width>, grid(block * width), block, 0, stream, args, order, partial);
      } else {
        launch("embedding", add_chunks<T, Index, 1>, grid(threads), threads, 0, stream, args, order, partial);
      }
      launch("embedding", add_partial_sums<T, Index>, grid(threads), threads, 0, stream, args, order, partial);
    });
  });
}

}  // namespace strobe::kernels::cuda
