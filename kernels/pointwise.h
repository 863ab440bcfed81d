// Elementwise kernels: the mathematics of every pointwise op stands here once, for all backends, forward and backward.
#pragma once

#include <numbers>

#include "strobe/kernels/kernel.h"
#include "strobe/kernels/math.h"

namespace strobe::kernels {

// Sets every element of a contiguous array of any dtype to `value`.
struct FillArgs {
  void* dst;
  int64_t size;
  DType dtype;
  double value;
};

// dst = src element by element, converting between any two dtypes; strides in elements, rank at most 8.
// Floating to integer truncates toward zero and saturates; NaN becomes 0.
struct CopyArgs {
  void* dst;
  const void* src;
  DType dst_dtype;
  DType src_dtype;
  int rank;
  const int64_t* sizes;
  const int64_t* dst_strides;
  const int64_t* src_strides;
};

// dst += src, both contiguous, of the same floating dtype.
struct AccumulateArgs {
  void* dst;
  const void* src;
  int64_t size;
  DType dtype;
};

STROBE_KERNEL(fill, FillArgs)
STROBE_KERNEL(copy, CopyArgs)
STROBE_KERNEL(accumulate, AccumulateArgs)

// y = f(x) on contiguous arrays.
struct UnaryArgs {
  void* y;
  const void* x;
  int64_t size;
  DType dtype;
};

// dx = dy * f'(x) on contiguous arrays.
struct UnaryGradArgs {
  void* dx;
  const void* dy;
  const void* x;
  int64_t size;
  DType dtype;
};

// out = f(a, b) over the shape `sizes` (rank at most 8); out is contiguous, a and b have strides in elements, 0 where
// they are broadcast. An operand whose pointer is null is the number `scalar` everywhere, with all strides 0.
struct BinaryArgs {
  void* out;
  const void* a;
  const void* b;
  int rank;
  const int64_t* sizes;
  const int64_t* a_strides;
  const int64_t* b_strides;
  DType dtype;
  double scalar = 0;
};

// One functor per unary op: forward(x) and backward(x, dy), evaluated in accumulate_t of the dtype.
struct Neg {
  template <class T>
  STROBE_HD static T forward(T x) {
    return -x;
  }
  template <class T>
  STROBE_HD static T backward(T, T dy) {
    return -dy;
  }
};

struct Exp {
  template <class T>
  STROBE_HD static T forward(T x) {
    return exp_(x);
  }
  template <class T>
  STROBE_HD static T backward(T x, T dy) {
    return dy * exp_(x);
  }
};

struct Log {
  template <class T>
  STROBE_HD static T forward(T x) {
    return log_(x);
  }
  template <class T>
  STROBE_HD static T backward(T x, T dy) {
    return dy / x;
  }
};

struct Sqrt {
  template <class T>
  STROBE_HD static T forward(T x) {
    return sqrt_(x);
  }
  template <class T>
  STROBE_HD static T backward(T x, T dy) {
    return dy / (T(2) * sqrt_(x));
  }
};

struct Square {
  template <class T>
  STROBE_HD static T forward(T x) {
    return x * x;
  }
  template <class T>
  STROBE_HD static T backward(T x, T dy) {
    return dy * T(2) * x;
  }
};

struct Tanh {
  template <class T>
  STROBE_HD static T forward(T x) {
    return tanh_(x);
  }
  template <class T>
  STROBE_HD static T backward(T x, T dy) {
    const T t = tanh_(x);
    return dy * (T(1) - t * t);
  }
};

struct Relu {
  template <class T>
  STROBE_HD static T forward(T x) {
    return x < T(0) ? T(0) : x;  // NaN passes
  }
  template <class T>
  STROBE_HD static T backward(T x, T dy) {
    return x > T(0) ? dy : T(0);
  }
};

// x * sigmoid(x), the SiLU of Elfwing et al. 2018.
struct Silu {
  template <class T>
  STROBE_HD static T forward(T x) {
    return x * sigmoid_(x);
  }
  template <class T>
  STROBE_HD static T backward(T x, T dy) {
    const T s = sigmoid_(x);
    return dy * s * (T(1) + x * (T(1) - s));
  }
};

// x * Phi(x) with the cumulative normal distribution Phi (Hendrycks and Gimpel 2016).
struct Gelu {
  // e^(-x^2 / 2).
  template <class T>
  STROBE_HD static T bell(T x) {
#ifdef __CUDA_ARCH__
    return exp2_(T(-0.5) * std::numbers::log2e_v<T> * x * x);
#else
    return exp_(T(-0.5) * x * x);
#endif
  }
  template <class T>
  STROBE_HD static T phi(T x, [[maybe_unused]] T bell_of_x) {
#ifdef __CUDA_ARCH__
    // Half the work of erf, within 2e-7: Phi(-|x|) / bell(x) as a polynomial in t (the form of Abramowitz and Stegun
    // 7.1.26), fitted for the least largest error of Phi.
    if constexpr (std::is_same_v<T, float>) {
      float t;
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(1.0f + 0.28f * fabsf(x)));
      float p = -0.10632775816f;
      p = p * t + 0.39206387202f;
      p = p * t - 0.24066451286f;
      p = p * t + 0.27196849119f;
      p = p * t + 0.06623099494f;
      p = p * t + 0.11672890185f;
      const float tail = p * t * bell_of_x;
      return x > 0 ? 1.0f - tail : tail;
    }
#endif
    constexpr T sqrt_half = T(0.70710678118654752440);
    return T(0.5) * (T(1) + erf_(x * sqrt_half));
  }
  template <class T>
  STROBE_HD static T forward(T x) {
    return x * phi(x, bell(x));
  }
  template <class T>
  STROBE_HD static T backward(T x, T dy) {
    constexpr T density_at_zero = T(0.39894228040143267794);  // 1 / sqrt(2 pi)
    const T b = bell(x);
    return dy * (phi(x, b) + x * density_at_zero * b);
  }
};

// The tanh approximation of GELU that GPT-2 uses: x / 2 * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
struct GeluTanh {
  template <class T>
  STROBE_HD static T inner_tanh(T x) {
    constexpr T sqrt_2_over_pi = T(0.79788456080286535588);
    const T inner = sqrt_2_over_pi * x * (T(1) + T(0.044715) * x * x);
#ifdef __CUDA_ARCH__
    // A third of the work; exact enough as it is added to 1.
    const T power = exp2_(T(-2) * std::numbers::log2e_v<T> * inner);
    if constexpr (std::is_same_v<T, float>) return __fdividef(2.0f, 1.0f + power) - 1.0f;
    return T(2) / (T(1) + power) - T(1);
#else
    return tanh_(inner);
#endif
  }
  template <class T>
  STROBE_HD static T forward(T x) {
    return T(0.5) * x * (T(1) + inner_tanh(x));
  }
  template <class T>
  STROBE_HD static T backward(T x, T dy) {
    constexpr T sqrt_2_over_pi = T(0.79788456080286535588);
    const T t = inner_tanh(x);
    // Where 1 - t^2 is 0 the rest of the product may not overflow; NaN passes.
    const T bounded = x > T(100) ? T(100) : x < T(-100) ? T(-100) : x;
    const T inner_slope = sqrt_2_over_pi * (T(1) + T(3 * 0.044715) * bounded * bounded);
    return dy * T(0.5) * ((T(1) + t) + bounded * (T(1) - t * t) * inner_slope);
  }
};

struct Add {
  template <class T>
  STROBE_HD static T forward(T a, T b) {
    return a + b;
  }
};

struct Sub {
  template <class T>
  STROBE_HD static T forward(T a, T b) {
    return a - b;
  }
};

struct Mul {
  template <class T>
  STROBE_HD static T forward(T a, T b) {
    return a * b;
  }
};

struct Div {
  template <class T>
  STROBE_HD static T forward(T a, T b) {
    return a / b;
  }
};

// Every op of the list exists as <name>_forward and <name>_backward in each backend, and as strobe::<name> in core.
#define STROBE_UNARY_OPS(X) \
  X(neg, Neg)               \
  X(exp, Exp)               \
  X(log, Log)               \
  X(sqrt, Sqrt)             \
  X(square, Square)         \
  X(tanh, Tanh)             \
  X(relu, Relu)             \
  X(silu, Silu)             \
  X(gelu, Gelu)             \
  X(gelu_tanh, GeluTanh)

// The gradients of the binary ops are themselves sums and products, so core composes them from these kernels.
#define STROBE_BINARY_OPS(X) \
  X(add, Add)                \
  X(sub, Sub)                \
  X(mul, Mul)                \
  X(div, Div)

#define STROBE_DECLARE_UNARY(name, Functor) \
  STROBE_KERNEL(name##_forward, UnaryArgs)  \
  STROBE_KERNEL(name##_backward, UnaryGradArgs)
STROBE_UNARY_OPS(STROBE_DECLARE_UNARY)
#undef STROBE_DECLARE_UNARY

#define STROBE_DECLARE_BINARY(name, Functor) STROBE_KERNEL(name, BinaryArgs)
STROBE_BINARY_OPS(STROBE_DECLARE_BINARY)
#undef STROBE_DECLARE_BINARY

}  // namespace strobe::kernels
