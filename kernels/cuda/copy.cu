// Copies on CUDA between arrays of any strides and dtypes: in packs where elements are neighbours in both arrays, in
// squares where they are neighbours along different axes, else singly.
#include <algorithm>

#include "strobe/kernels/convert.h"
#include "strobe/kernels/cuda/elementwise.cuh"
#include "strobe/kernels/cuda/strided.cuh"
#include "strobe/kernels/pointwise.h"

namespace strobe::kernels::cuda {
namespace {

using namespace strobe::cuda;

constexpr int packs_per_thread = 4;  // so that enough bytes are under way

// Converts `width` elements at a time, which lie one behind the other in both arrays.
template <class To, class From, int width>
__global__ void __launch_bounds__(elementwise_threads) copy_packs(To* dst, const From* src, StridedLayout<2> layout) {
  const auto first = [](int pack) {
    return ((int64_t{blockIdx.x} * packs_per_thread + pack) * elementwise_threads + threadIdx.x) * width;
  };
  if (first(packs_per_thread - 1) + width <= layout.size) {
    typename StridedLayout<2>::Offsets offsets[packs_per_thread];
    Pack<From, width> from[packs_per_thread];
#pragma unroll
    for (int pack = 0; pack < packs_per_thread; ++pack) {
      offsets[pack] = layout.offsets(first(pack));
      from[pack] = load_pack<From, width>(src + offsets[pack].of[1]);
    }
#pragma unroll
    for (int pack = 0; pack < packs_per_thread; ++pack) {
      Pack<To, width> to;
#pragma unroll
      for (int j = 0; j < width; ++j) to[j] = convert<To>(from[pack][j]);
      store_pack_global(dst + offsets[pack].of[0], to);
    }
    return;
  }
  for (int pack = 0; pack < packs_per_thread; ++pack) {
    for (int64_t i = first(pack); i < first(pack) + width && i < layout.size; ++i) {
      const auto offsets = layout.offsets(i);
      dst[offsets.of[0]] = convert<To>(src[offsets.of[1]]);
    }
  }
}

template <class To, class From>
__global__ void __launch_bounds__(elementwise_threads)
    copy_elements(To* dst, const From* src, StridedLayout<2> layout) {
  const int64_t step = int64_t{gridDim.x} * elementwise_threads;
  for (int64_t i = int64_t{blockIdx.x} * elementwise_threads + threadIdx.x; i < layout.size; i += step) {
    const auto offsets = layout.offsets(i);
    dst[offsets.of[0]] = convert<To>(src[offsets.of[1]]);
  }
}

// A copy whose elements are neighbours along one axis in dst and along another in src, such as a transposition: a block
// reads a square of both axes along src's and writes it along dst's.
constexpr int square = 64, square_rows = elementwise_threads / square;

struct Squares {
  int64_t along_dst, along_src;    // sizes of the two axes
  int64_t dst_stride, src_stride;  // of dst along src's axis, of src along dst's axis
  uint32_t wide, high;             // squares along dst and along src: no memory holds 2^32 of them

  Squares(int64_t size_along_dst, int64_t size_along_src, int64_t stride_of_dst, int64_t stride_of_src)
      : along_dst(size_along_dst),
        along_src(size_along_src),
        dst_stride(stride_of_dst),
        src_stride(stride_of_src),
        wide(static_cast<uint32_t>(ceil_div(along_dst, square))),
        high(static_cast<uint32_t>(ceil_div(along_src, square))) {}

  // Whether all of it can be moved in packs of `width` elements.
  bool has_packs(int width) const {
    return along_dst % width == 0 && along_src % width == 0 && dst_stride % width == 0 && src_stride % width == 0;
  }

  // Where square number `task` begins, and its size.
  struct Place {
    int64_t along_dst, along_src;
    int width, height;
  };
  // In bands 8 squares wide, so that those which are moved at the same time lie close together in both arrays.
  __device__ Place in_bands(uint32_t task) const {
    constexpr uint32_t band = 8;
    const uint32_t before = task / (band * high) * band, rest = task - before * high;
    const uint32_t width = wide - before < band ? wide - before : band;
    const int64_t i = int64_t{before + rest % width} * square, j = int64_t{rest / width} * square;
    return {i, j, static_cast<int>(std::min<int64_t>(along_dst - i, square)),
            static_cast<int>(std::min<int64_t>(along_src - j, square))};
  }
};

// Calls move(src, dst, width, height) for each square that a block has, at the addresses of its first element.
template <class To, class From, class Move>
__device__ void for_each_square(To* dst, const From* src, const Squares& squares, const StridedLayout<2>& others,
                                Move&& move) {
  const uint32_t each = squares.wide * squares.high;
  const uint32_t tasks = static_cast<uint32_t>(others.size) * each;
  for (uint32_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const auto offsets = others.offsets(task / each);
    const auto [i, j, width, height] = squares.in_bands(task % each);
    move(src + offsets.of[1] + i * squares.src_stride + j, dst + offsets.of[0] + j * squares.dst_stride + i, width,
         height);
  }
}

// Column q of chunks that lie below each other, as one 32-bit word: one element of 4 bytes or two of 2.
template <int rows>
__device__ inline uint32_t word_of_column(const uint4 (&chunk)[rows], int q) {
  const auto part = [&](int row) { return std::bit_cast<Pack<uint32_t, 4>>(chunk[row])[q / rows]; };
  if constexpr (rows == 1) return part(0);
  return __byte_perm(part(0), part(rows - 1), q % 2 == 0 ? 0x5410 : 0x7632);
}

template <class To, class From>
__global__ void __launch_bounds__(elementwise_threads)
    copy_squares(To* dst, const From* src, Squares squares, StridedLayout<2> others) {
  __shared__ To tile[square][square + 4 / sizeof(To) + (sizeof(To) > 4)];
  const int x = static_cast<int>(threadIdx.x) % square, y = static_cast<int>(threadIdx.x) / square;
  for_each_square(dst, src, squares, others, [&](const From* from, To* to, int width, int height) {
    from += y * squares.src_stride + x, to += y * squares.dst_stride + x;
    __syncthreads();  // the square before has been written
#pragma unroll
    for (int k = 0; k < square; k += square_rows, from += square_rows * squares.src_stride) {
      if (k + y < width && x < height) tile[k + y][x] = convert<To>(*from);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < square; k += square_rows, to += square_rows * squares.dst_stride) {
      if (k + y < height && x < width) *to = tile[x][k + y];
    }
  });
}

// The same for words of 2 or 4 bytes that need no conversion, where all squares, strides and addresses are multiples of
// 16 bytes. Shared memory holds the square as rows of dst in chunks of 16 bytes; chunk c of row j is where c ^ (j / n)
// is, so that neither side of the transposition meets bank conflicts. 2-byte words go in pairs of two rows of src.
template <class Word>
__global__ void __launch_bounds__(elementwise_threads)
    transpose_squares(Word* dst, const Word* src, Squares squares, StridedLayout<2> others) {
  constexpr int n = 16 / sizeof(Word);    // words of a chunk
  constexpr int rows = 4 / sizeof(Word);  // of src that a thread reads at a time
  constexpr int pitch = square / rows;    // 32-bit words of a row of dst
  constexpr int chunks = pitch / 4, groups = square / n;
  __shared__ uint4 tile[square * chunks];
  uint32_t* const words = reinterpret_cast<uint32_t*>(tile);
  const auto chunk_of = [](int j, int chunk) { return j * chunks + (chunk ^ (j / n & 7)); };
  // A warp reads 8 chunks of 4 (times `rows`) rows of src.
  const auto group = [](int unit) { return unit % 8 + unit / 32 % (groups / 8) * 8; };
  const auto word = [](int unit) { return unit / 8 % 4 + unit / 32 / (groups / 8) * 4; };
  for_each_square(dst, src, squares, others, [&](const Word* from, Word* to, int width, int height) {
    uint4 loaded[groups * pitch / elementwise_threads][rows];
#pragma unroll
    for (int k = 0; k < groups * pitch / elementwise_threads; ++k) {
      const int unit = k * elementwise_threads + static_cast<int>(threadIdx.x);
      if (word(unit) * rows >= width || group(unit) * n >= height) continue;
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        loaded[k][r] =
            *reinterpret_cast<const uint4*>(from + (word(unit) * rows + r) * squares.src_stride + group(unit) * n);
      }
    }
    __syncthreads();  // the square before has been written
#pragma unroll
    for (int k = 0; k < groups * pitch / elementwise_threads; ++k) {
      const int unit = k * elementwise_threads + static_cast<int>(threadIdx.x);
#pragma unroll
      for (int q = 0; q < n; ++q) {
        const int j = group(unit) * n + q;
        words[4 * chunk_of(j, word(unit) / 4) + word(unit) % 4] = word_of_column<rows>(loaded[k], q);
      }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < square * chunks / elementwise_threads; ++k) {
      const int unit = k * elementwise_threads + static_cast<int>(threadIdx.x);
      const int j = unit / chunks, chunk = unit % chunks;
      if (j >= height || chunk * n >= width) continue;
      __stwb(reinterpret_cast<uint4*>(to + j * squares.dst_stride + chunk * n), tile[chunk_of(j, chunk)]);
    }
  });
}

template <class To, class From>
void copy_strided(const CopyArgs& args, const Stream& stream) {
  const StridedLayout<2> layout(args.rank, args.sizes, {args.dst_strides, args.src_strides});
  if (layout.size == 0) return;
  To* const dst = static_cast<To*>(args.dst);
  const From* const src = static_cast<const From*>(args.src);
  constexpr int width = 16 / (sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From));
  if (layout.inner_stride(0) == 1 && layout.inner_stride(1) == 1 && layout.has_packs(0, width) &&
      layout.has_packs(1, width) && aligned_to(16, dst, src)) {
    launch("copy", copy_packs<To, From, width>, grid_size(layout.size, packs_per_thread * elementwise_threads * width),
           elementwise_threads, 0, stream, dst, src, layout);
  } else if (const int other = layout.axis_of_neighbours(1);
             layout.inner_stride(0) == 1 && other >= 0 && other != layout.rank - 1 &&
             std::min(layout.inner_size(), layout.sizes[other]) >= square / 4) {
    const Squares squares(layout.inner_size(), layout.sizes[other], layout.strides[other][0], layout.inner_stride(1));
    const StridedLayout<2> others = layout.without(other).without(layout.rank - 2);
    const unsigned grid = grid_size(others.size * squares.wide * squares.high, 1);
    if constexpr (std::is_same_v<To, From> && sizeof(To) <= 4) {
      using Word = std::conditional_t<sizeof(To) == 2, uint16_t, uint32_t>;
      if (squares.has_packs(16 / sizeof(To)) && others.has_multiples(16 / sizeof(To)) && aligned_to(16, dst, src)) {
        return launch("copy", transpose_squares<Word>, grid, elementwise_threads, 0, stream,
                      reinterpret_cast<Word*>(dst), reinterpret_cast<const Word*>(src), squares, others);
      }
    }
    launch("copy", copy_squares<To, From>, grid, elementwise_threads, 0, stream, dst, src, squares, others);
  } else {
    launch("copy", copy_elements<To, From>, grid_size(layout.size, elementwise_threads), elementwise_threads, 0, stream,
           dst, src, layout);
  }
}

}  // namespace

void copy(const CopyArgs& args, const Stream& stream) {
  dispatch_any(args.dst_dtype, "copy", [&]<class To>() {
    dispatch_any(args.src_dtype, "copy", [&]<class From>() { copy_strided<To, From>(args, stream); });
  });
}

}  // namespace strobe::kernels::cuda
