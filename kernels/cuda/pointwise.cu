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

// What an operand has for a pack of results, as it is loaded.
template <class T>
struct OperandPack {
  using A = accumulate_t<T>;
  Packed<T, pack_width<T>> pack;
  T single;

  __device__ void load(const Operand<T>& operand, int64_t offset) {
    if (operand.data == nullptr) return;
    if (operand.repeated) {
      single = operand.data[offset];
    } else {
      pack.load(operand.data + offset);
    }
  }
  __device__ Values<A, pack_width<T>> values(const Operand<T>& operand) const {
    if (operand.data != nullptr && !operand.repeated) return pack.template values<A>();
    Values<A, pack_width<T>> same;
    const A value = operand.data != nullptr ? A(single) : operand.number;
#pragma unroll
    for (int j = 0; j < pack_width<T>; ++j) same[j] = value;
    return same;
  }
};

template <class T, class Functor>
__device__ T combine_elements(const Operand<T>& a, const Operand<T>& b, const StridedLayout<2>& layout, int64_t i) {
  using A = accumulate_t<T>;
  const auto offsets = layout.offsets(i);
  return T(Functor::forward(a.data != nullptr ? A(a.data[offsets.of[0]]) : a.number,
                            b.data != nullptr ? A(b.data[offsets.of[1]]) : b.number));
}

template <class T, class Functor>
__global__ void __launch_bounds__(elementwise_threads)
    binary_packs(T* out, Operand<T> a, Operand<T> b, StridedLayout<2> layout) {
  using A = accumulate_t<T>;
  constexpr int width = pack_width<T>;
  const auto first = [](int pack) { return first_element<T, map_packs>(pack); };
  if (first(map_packs - 1) + width <= layout.size) {
    OperandPack<T> a_packs[map_packs], b_packs[map_packs];
#pragma unroll
    for (int p = 0; p < map_packs; ++p) {
      const auto offsets = layout.offsets(first(p));
      a_packs[p].load(a, offsets.of[0]);
      b_packs[p].load(b, offsets.of[1]);
    }
#pragma unroll
    for (int p = 0; p < map_packs; ++p) {
      const Values<A, width> left = a_packs[p].values(a), right = b_packs[p].values(b);
      Values<A, width> result;
#pragma unroll
      for (int j = 0; j < width; ++j) result[j] = Functor::forward(left[j], right[j]);
      store_values(out + first(p), result);
    }
    return;
  }
  for (int p = 0; p < map_packs; ++p) {
    for (int64_t i = first(p); i < first(p) + width && i < layout.size; ++i) {
      out[i] = combine_elements<T, Functor>(a, b, layout, i);
    }
  }
}

template <class T, class Functor>
__global__ void __launch_bounds__(elementwise_threads)
    binary_elements(T* out, Operand<T> a, Operand<T> b, StridedLayout<2> layout) {
  const int64_t step = int64_t{gridDim.x} * elementwise_threads;
  for (int64_t i = int64_t{blockIdx.x} * elementwise_threads + threadIdx.x; i < layout.size; i += step) {
    out[i] = combine_elements<T, Functor>(a, b, layout, i);
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
