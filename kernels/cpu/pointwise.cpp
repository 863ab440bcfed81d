// Elementwise kernels on the CPU: one loop per kind of memory access, filled in by the functors of the op list.
#include "strobe/kernels/pointwise.h"

#include "strobe/kernels/convert.h"
#include "strobe/kernels/cpu/parallel.h"
#include "strobe/kernels/cpu/strided.h"

namespace strobe::kernels::cpu {
namespace {

using strobe::cpu::parallel_for;
using strobe::cpu::StridedLoop;

constexpr int64_t grain = 16384;  // elements that are worth a thread

template <class Functor>
void unary_forward(const UnaryArgs& args, const char* name) {
  dispatch_floating(args.dtype, name, [&]<class T>() {
    const T* x = static_cast<const T*>(args.x);
    T* y = static_cast<T*>(args.y);
    parallel_for(args.size, grain, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) y[i] = T(Functor::forward(accumulate_t<T>(x[i])));
    });
  });
}

template <class Functor>
void unary_backward(const UnaryGradArgs& args, const char* name) {
  dispatch_floating(args.dtype, name, [&]<class T>() {
    using A = accumulate_t<T>;
    const T* x = static_cast<const T*>(args.x);
    const T* dy = static_cast<const T*>(args.dy);
    T* dx = static_cast<T*>(args.dx);
    parallel_for(args.size, grain, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) dx[i] = T(Functor::backward(A(x[i]), A(dy[i])));
    });
  });
}

// Calls f with a function that loads element i of a run; the common strides get their own, so that loops vectorize.
template <class T, class F>
void with_operand(const T* run, int64_t stride, double scalar, F&& f) {
  using A = accumulate_t<T>;
  if (run == nullptr || stride == 0) {
    f([value = run == nullptr ? A(scalar) : A(*run)](int64_t) { return value; });
  } else if (stride == 1) {
    f([run](int64_t i) { return A(run[i]); });
  } else {
    f([run, stride](int64_t i) { return A(run[i * stride]); });
  }
}

template <class Functor>
void binary(const BinaryArgs& args, const char* name) {
  dispatch_floating(args.dtype, name, [&]<class T>() {
    const T* a = static_cast<const T*>(args.a);
    const T* b = static_cast<const T*>(args.b);
    T* out = static_cast<T*>(args.out);
    const StridedLoop<2> loop(args.rank, args.sizes, {args.a_strides, args.b_strides});
    parallel_for(loop.size(), grain, [&](int64_t begin, int64_t end) {
      loop.run(begin, end, [&](int64_t position, const auto& offsets, int64_t count) {
        const T* a_run = a != nullptr ? a + offsets[0] : nullptr;
        const T* b_run = b != nullptr ? b + offsets[1] : nullptr;
        T* out_run = out + position;
        with_operand(a_run, loop.inner_stride(0), args.scalar, [&](auto load_a) {
          with_operand(b_run, loop.inner_stride(1), args.scalar, [&](auto load_b) {
            for (int64_t i = 0; i < count; ++i) out_run[i] = T(Functor::forward(load_a(i), load_b(i)));
          });
        });
      });
    });
  });
}

template <class To, class From>
void copy_strided(const CopyArgs& args) {
  To* dst = static_cast<To*>(args.dst);
  const From* src = static_cast<const From*>(args.src);
  const StridedLoop<2> loop(args.rank, args.sizes, {args.dst_strides, args.src_strides});
  const int64_t dst_stride = loop.inner_stride(0);
  const int64_t src_stride = loop.inner_stride(1);
  parallel_for(loop.size(), grain, [&](int64_t begin, int64_t end) {
    loop.run(begin, end, [&](int64_t, const auto& offsets, int64_t count) {
      To* to = dst + offsets[0];
      const From* from = src + offsets[1];
      if (dst_stride == 1 && src_stride == 1) {
        for (int64_t i = 0; i < count; ++i) to[i] = convert<To>(from[i]);
      } else {
        for (int64_t i = 0; i < count; ++i) to[i * dst_stride] = convert<To>(from[i * src_stride]);
      }
    });
  });
}

}  // namespace

void fill(const FillArgs& args, const Stream&) {
  dispatch_any(args.dtype, "fill", [&]<class T>() {
    T* dst = static_cast<T*>(args.dst);
    const T value = convert<T>(args.value);
    parallel_for(args.size, grain, [=](int64_t begin, int64_t end) { std::fill(dst + begin, dst + end, value); });
  });
}

void copy(const CopyArgs& args, const Stream&) {
  dispatch_any(args.dst_dtype, "copy", [&]<class To>() {
    dispatch_any(args.src_dtype, "copy", [&]<class From>() { copy_strided<To, From>(args); });
  });
}

void accumulate(const AccumulateArgs& args, const Stream&) {
  dispatch_floating(args.dtype, "accumulate", [&]<class T>() {
    using A = accumulate_t<T>;
    T* dst = static_cast<T*>(args.dst);
    const T* src = static_cast<const T*>(args.src);
    parallel_for(args.size, grain, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) dst[i] = T(A(dst[i]) + A(src[i]));
    });
  });
}

#define STROBE_DEFINE_UNARY(name, Functor)                                                           \
  void name##_forward(const UnaryArgs& args, const Stream&) { unary_forward<Functor>(args, #name); } \
  void name##_backward(const UnaryGradArgs& args, const Stream&) { unary_backward<Functor>(args, #name); }
STROBE_UNARY_OPS(STROBE_DEFINE_UNARY)
#undef STROBE_DEFINE_UNARY

#define STROBE_DEFINE_BINARY(name, Functor) \
  void name(const BinaryArgs& args, const Stream&) { binary<Functor>(args, #name); }
STROBE_BINARY_OPS(STROBE_DEFINE_BINARY)
#undef STROBE_DEFINE_BINARY

}  // namespace strobe::kernels::cpu
