// Elementwise kernels on CUDA: walks over memory, filled in by the functors of the op list.
#include "strobe/kernels/pointwise.h"

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
  const int64_t i = first_element<T, 1>();
  if (i >= layout.size) return;
  const int64_t count = layout.size - i < pack_width<T> ? layout.size - i : pack_width<T>;
  const auto offsets = layout.offsets(i);
  FullPack<T> a_pack{}, b_pack{}, result;
  if (a.data != nullptr) a_pack = load_operand(a, offsets.of[0], count);
  if (b.data != nullptr) b_pack = load_operand(b, offsets.of[1], count);
#pragma unroll
  for (int j = 0; j < pack_width<T>; ++j) {
    result[j] =
        T(Functor::forward(a.data != nullptr ? A(a_pack[j]) : a.number, b.data != nullptr ? A(b_pack[j]) : b.number));
  }
  store_elements(out, i, layout.size, true, result);
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
void binary(const BinaryArgs& args, const char* name, const Stream& stream) {
  dispatch_floating(args.dtype, name, [&]<class T>() {
    using A = accumulate_t<T>;
    const StridedLayout<2> layout(args.rank, args.sizes, {args.a_strides, args.b_strides});
    if (layout.size == 0) return;
    T* const out = static_cast<T*>(args.out);
    const Operand<T> a{static_cast<const T*>(args.a), A(args.scalar), layout.inner_stride(0) == 0};
    const Operand<T> b{static_cast<const T*>(args.b), A(args.scalar), layout.inner_stride(1) == 0};
    constexpr int width = pack_width<T>;
    if (layout.has_packs(0, width) && layout.has_packs(1, width) && aligned_to(16, out) &&
        (a.repeated || aligned_to(16, a.data)) && (b.repeated || aligned_to(16, b.data))) {
      launch(name, binary_packs<T, Functor>, elementwise_grid<T, 1>(layout.size), elementwise_threads, 0, stream, out,
             a, b, layout);
    } else {
      launch(name, binary_elements<T, Functor>, grid_size(layout.size, elementwise_threads), elementwise_threads, 0,
             stream, out, a, b, layout);
    }
  });
}

constexpr int packs_per_thread = 2;  // of a copy, so that twice the bytes are under way

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
      store_pack<To, width>(dst + offsets[pack].of[0], to);
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

struct Sum {
  template <class A>
  __device__ A operator()(A a, A b) const {
    return a + b;
  }
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
    map("accumulate", dst, args.size, stream, Sum(), static_cast<const T*>(dst), static_cast<const T*>(args.src));
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
