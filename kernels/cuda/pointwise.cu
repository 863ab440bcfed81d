// Elementwise kernels on CUDA: walks over memory, filled in by the functors of the op list.
#include "strobe/kernels/pointwise.h"

#include <algorithm>

#include "strobe/kernels/convert.h"
#include "strobe/kernels/cuda/elementwise.cuh"
#include "strobe/kernels/cuda/strided.cuh"

namespace strobe::kernels::cuda {
namespace {

using namespace strobe::cuda;

template <class Functor>
struct Forward {
  template <class A>
  __device__ A operator()(A x) const {
    return Functor::forward(x);
  }
};

template <class Functor>
struct Backward {
  template <class A>
  __device__ A operator()(A x, A dy) const {
    return Functor::backward(x, dy);
  }
};

template <class Functor>
void unary_forward(const UnaryArgs& args, const char* name, const Stream& stream) {
  dispatch_floating(args.dtype, name, [&]<class T>() {
    map(name, static_cast<T*>(args.y), args.size, stream, Forward<Functor>(), static_cast<const T*>(args.x));
  });
}

template <class Functor>
void unary_backward(const UnaryGradArgs& args, const char* name, const Stream& stream) {
  dispatch_floating(args.dtype, name, [&]<class T>() {
    map(name, static_cast<T*>(args.dx), args.size, stream, Backward<Functor>(), static_cast<const T*>(args.x),
        static_cast<const T*>(args.dy));
  });
}

// One side of a binary operation.
template <class T>
struct Operand {
  const T* data;  // null: the number
  accumulate_t<T> number;
  bool repeated;  // stride 0 along the innermost axis
};

template <class T>
__device__ inline FullPack<T> load_operand(const Operand<T>& operand, int64_t offset, int64_t count) {
  if (!operand.repeated && count == pack_width<T>) return load_pack<T, pack_width<T>>(operand.data + offset);
  FullPack<T> pack{};
#pragma unroll
  for (int j = 0; j < pack_width<T>; ++j) {
    if (j < count) pack[j] = operand.data[offset + (operand.repeated ? 0 : j)];
  }
  return pack;
}

template <class T, class Functor>
__global__ void __launch_bounds__(elementwise_threads)
    binary_packs(T* out, Operand<T> a, Operand<T> b, StridedLayout<2> layout) {
  using A = accumulate_t<T>;
  FullPack<T> a_pack[map_packs]{}, b_pack[map_packs]{};
  const auto first = [](int pack) { return first_element<T, map_packs>(pack); };
  const auto count = [&](int pack) {
    const int64_t left = layout.size - first(pack);
    return left < pack_width<T> ? left : pack_width<T>;
  };
#pragma unroll
  for (int pack = 0; pack < map_packs; ++pack) {
    if (count(pack) <= 0) break;
    const auto offsets = layout.offsets(first(pack));
    if (a.data != nullptr) a_pack[pack] = load_operand(a, offsets.of[0], count(pack));
    if (b.data != nullptr) b_pack[pack] = load_operand(b, offsets.of[1], count(pack));
  }
#pragma unroll
  for (int pack = 0; pack < map_packs; ++pack) {
    Values<A, pack_width<T>> result;
#pragma unroll
    for (int j = 0; j < pack_width<T>; ++j) {
      result[j] = Functor::forward(a.data != nullptr ? A(a_pack[pack][j]) : a.number,
                                   b.data != nullptr ? A(b_pack[pack][j]) : b.number);
    }
    if (count(pack) == pack_width<T>) {
      store_values(out + first(pack), result);
    } else {
      for (int j = 0; j < count(pack); ++j) out[first(pack) + j] = T(result[j]);
    }
  }
}

template <class T, class Functor>
__global__ void __launch_bounds__(elementwise_threads)
    binary_elements(T* out, Operand<T> a, Operand<T> b, StridedLayout<2> layout) {
  using A = accumulate_t<T>;
  const int64_t step = int64_t{gridDim.x} * elementwise_threads;
  for (int64_t i = int64_t{blockIdx.x} * elementwise_threads + threadIdx.x; i < layout.size; i += step) {
    const auto offsets = layout.offsets(i);
    out[i] = T(Functor::forward(a.data != nullptr ? A(a.data[offsets.of[0]]) : a.number,
                                b.data != nullptr ? A(b.data[offsets.of[1]]) : b.number));
  }
}

template <class Functor>
struct OfBoth {
  template <class A>
  __device__ A operator()(A a, A b) const {
    return Functor::forward(a, b);
  }
};

// The operation with a number on one side.
template <class Functor, class A, bool number_first>
struct WithNumber {
  A number;
  __device__ A operator()(A x) const {
    return number_first ? Functor::forward(number, x) : Functor::forward(x, number);
  }
};

template <class Functor>
void binary(const BinaryArgs& args, const char* name, const Stream& stream) {
  dispatch_floating(args.dtype, name, [&]<class T>() {
    using A = accumulate_t<T>;
    const StridedLayout<2> layout(args.rank, args.sizes, {args.a_strides, args.b_strides});
    if (layout.size == 0) return;
    T* const out = static_cast<T*>(args.out);
    const Operand<T> a{static_cast<const T*>(args.a), A(args.scalar), layout.inner_stride(0) == 0};
    const Operand<T> b{static_cast<const T*>(args.b), A(args.scalar), layout.inner_stride(1) == 0};
    constexpr int width = pack_width<T>;
    const bool plain = layout.rank == 1 && (a.data == nullptr || layout.inner_stride(0) == 1) &&
                       (b.data == nullptr || layout.inner_stride(1) == 1);
    if (plain && a.data == nullptr) {
      map(name, out, layout.size, stream, WithNumber<Functor, A, true>{a.number}, b.data);
    } else if (plain && b.data == nullptr) {
      map(name, out, layout.size, stream, WithNumber<Functor, A, false>{b.number}, a.data);
    } else if (plain) {
      map(name, out, layout.size, stream, OfBoth<Functor>(), a.data, b.data);
    } else if (layout.has_packs(0, width) && layout.has_packs(1, width) && aligned_to(16, out) &&
               (a.repeated || aligned_to(16, a.data)) && (b.repeated || aligned_to(16, b.data))) {
      launch(name, binary_packs<T, Functor>, elementwise_grid<T, map_packs>(layout.size), elementwise_threads, 0,
             stream, out, a, b, layout);
    } else {
      launch(name, binary_elements<T, Functor>, grid_size(layout.size, elementwise_threads), elementwise_threads, 0,
             stream, out, a, b, layout);
    }
  });
}

constexpr int packs_per_thread = 4;  // of a copy, so that enough bytes are under way

// Converts `width` elements at a time, which lie one behind the other in both arrays.
template <class To, class From, int width>
__global__ void __launch_bounds__(elementwise_threads) copy_packs(To* dst, const From* src, StridedLayout<2> layout) {
  typename StridedLayout<2>::Offsets offsets[packs_per_thread];
  Pack<From, width> from[packs_per_thread];
  const auto first = [](int pack) {
    return ((int64_t{blockIdx.x} * packs_per_thread + pack) * elementwise_threads + threadIdx.x) * width;
  };
#pragma unroll
  for (int pack = 0; pack < packs_per_thread; ++pack) {
    if (first(pack) >= layout.size) continue;
    offsets[pack] = layout.offsets(first(pack));
    if (first(pack) + width <= layout.size) from[pack] = load_pack<From, width>(src + offsets[pack].of[1]);
  }
#pragma unroll
  for (int pack = 0; pack < packs_per_thread; ++pack) {
    if (first(pack) + width <= layout.size) {
      Pack<To, width> to;
#pragma unroll
      for (int j = 0; j < width; ++j) to[j] = convert<To>(from[pack][j]);
      store_pack_global(dst + offsets[pack].of[0], to);
    } else {  // the end of an array without gaps
      for (int j = 0; first(pack) + j < layout.size; ++j) {
        dst[offsets[pack].of[0] + j] = convert<To>(src[offsets[pack].of[1] + j]);
      }
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
};

template <class To, class From>
__global__ void __launch_bounds__(elementwise_threads)
    copy_squares(To* dst, const From* src, Squares squares, StridedLayout<2> others) {
  __shared__ To tile[square][square + 4 / sizeof(To) + (sizeof(To) > 4)];
  const int64_t wide = ceil_div(squares.along_dst, square), high = ceil_div(squares.along_src, square);
  const int x = static_cast<int>(threadIdx.x) % square, y = static_cast<int>(threadIdx.x) / square;
  for (int64_t task = blockIdx.x; task < others.size * wide * high; task += gridDim.x) {
    const auto offsets = others.offsets(task / (wide * high));
    const int64_t i = task % wide * square, j = task / wide % high * square;  // along dst, along src
    const int width = static_cast<int>(std::min<int64_t>(squares.along_dst - i, square));
    const int height = static_cast<int>(std::min<int64_t>(squares.along_src - j, square));
    const From* from = src + offsets.of[1] + (i + y) * squares.src_stride + j + x;
    To* to = dst + offsets.of[0] + (j + y) * squares.dst_stride + i + x;
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
  }
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
    const Squares squares{layout.inner_size(), layout.sizes[other], layout.strides[other][0], layout.inner_stride(1)};
    const StridedLayout<2> others = layout.without(other).without(layout.rank - 2);
    const int64_t tasks = others.size * ceil_div(squares.along_dst, square) * ceil_div(squares.along_src, square);
    launch("copy", copy_squares<To, From>, grid_size(tasks, 1), elementwise_threads, 0, stream, dst, src, squares,
           others);
  } else {
    launch("copy", copy_elements<To, From>, grid_size(layout.size, elementwise_threads), elementwise_threads, 0, stream,
           dst, src, layout);
  }
}

template <class A>
struct Constant {
  A value;
  __device__ A operator()() const { return value; }
};

}  // namespace

void fill(const FillArgs& args, const Stream& stream) {
  dispatch_any(args.dtype, "fill", [&]<class T>() {
    using A = accumulate_t<T>;
    map("fill", static_cast<T*>(args.dst), args.size, stream, Constant<A>{static_cast<A>(convert<T>(args.value))});
  });
}

void copy(const CopyArgs& args, const Stream& stream) {
  dispatch_any(args.dst_dtype, "copy", [&]<class To>() {
    dispatch_any(args.src_dtype, "copy", [&]<class From>() { copy_strided<To, From>(args, stream); });
  });
}

void accumulate(const AccumulateArgs& args, const Stream& stream) {
  dispatch_floating(args.dtype, "accumulate", [&]<class T>() {
    T* const dst = static_cast<T*>(args.dst);
    map("accumulate", dst, args.size, stream, OfBoth<Add>(), static_cast<const T*>(dst),
        static_cast<const T*>(args.src));
  });
}

#define STROBE_DEFINE_UNARY(name, Functor)                                                                \
  void name##_forward(const UnaryArgs& args, const Stream& s) { unary_forward<Functor>(args, #name, s); } \
  void name##_backward(const UnaryGradArgs& args, const Stream& s) { unary_backward<Functor>(args, #name, s); }
STROBE_UNARY_OPS(STROBE_DEFINE_UNARY)
#undef STROBE_DEFINE_UNARY

#define STROBE_DEFINE_BINARY(name, Functor) \
  void name(const BinaryArgs& args, const Stream& stream) { binary<Functor>(args, #name, stream); }
STROBE_BINARY_OPS(STROBE_DEFINE_BINARY)
#undef STROBE_DEFINE_BINARY

}  // namespace strobe::kernels::cuda
