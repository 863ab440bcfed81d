// Elementary functions for kernel code, on host and device: exp_, exp2_, log_, sqrt_, tanh_, erf_, sigmoid_.
// In float on the host they are branch-free, so a loop over them vectorizes; in double all but exp2_ are the standard
// library's.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "strobe/kernels/types.h"

namespace strobe {

// e^x. In float within 2 units in the last place; results below 2e-38 (x < -86.9) become 0.
// Range reduction x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial for e^r (Cephes expf), then 2^n by exponent bits.
template <class T>
[[gnu::always_inline]] STROBE_HD inline T exp_(T x) {
#ifdef __CUDA_ARCH__
  return ::exp(x);
#else
  if constexpr (std::is_same_v<T, float>) {
    const float clamped = x > 89.0f ? 89.0f : x < -88.0f ? -88.0f : x;  // NaN passes
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
    const float shifted = clamped * 1.44269504f + magic;
    const float n = shifted - magic;
    const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    // 2^(n-1) and then twice that: n reaches 128, which has no exponent bits, but not -126.
    const float half_scale = std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) << 23) + (126u << 23));
    return x < -86.9f ? 0.0f : p * half_scale * 2.0f;
  } else {
    return std::exp(x);
  }
#endif
}

// 2^x, branch-free in float and in double: within 2 units in the last place; results below about 2^-126 (2^-1022)
// become 0, above 2^127 (2^1023) infinity. x = n + r with |r| <= 1/2, a minimax polynomial for 2^r, and n put straight
// into the exponent bits, where the extreme values of n are the bit patterns of 0 and infinity.
template <class T>
[[gnu::always_inline]] STROBE_HD inline T exp2_(T x) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<T, float>) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  } else {
    return ::exp2(x);
  }
#else
  constexpr bool is_float = std::is_same_v<T, float>;
  using Bits = std::conditional_t<is_float, uint32_t, uint64_t>;
  constexpr int mantissa_bits = is_float ? 23 : 52;
  constexpr T bias = is_float ? 127 : 1023;
  constexpr T magic = T(1.5) * T(Bits(1) << mantissa_bits) + bias;  // adding it leaves n + bias in the low bits
  constexpr Bits top = std::bit_cast<Bits>(magic + bias + 1);
  const T clamped = x < -bias ? -bias : x;  // NaN passes
  // Above, bounding n is cheaper and enough: infinity times whatever 2^r becomes is infinity.
  const Bits bits = std::bit_cast<Bits>(clamped + magic);
  const T shifted = std::bit_cast<T>(bits < top ? bits : top);
  const T r = clamped - (shifted - magic);
  T p;
  if constexpr (is_float) {
    p = 1.55946781613e-4f;
    p = p * r + 1.34066439024e-3f;
    p = p * r + 9.61769297297e-3f;
    p = p * r + 5.55031055101e-2f;
    p = p * r + 2.40226527829e-1f;
    p = p * r + 6.93147214968e-1f;
  } else {
    p = 4.078071929588336665e-10;
    p = p * r + 7.0725704128144235096e-9;
    p = p * r + 1.0180647659234138888e-7;
    p = p * r + 1.3215442675329822143e-6;
    p = p * r + 1.5252727385193868197e-5;
    p = p * r + 1.540353044157213033e-4;
    p = p * r + 1.3333558153439964747e-3;
    p = p * r + 9.6181291076070023796e-3;
    p = p * r + 5.5504108664790394552e-2;
    p = p * r + 2.4022650695910098007e-1;
    p = p * r + 6.9314718055994569675e-1;
  }
  p = p * r + T(1);
  return p * std::bit_cast<T>(std::bit_cast<Bits>(shifted) << mantissa_bits);
#endif
}

template <class T>
STROBE_HD inline T log_(T x) {
  using std::log;
  return log(x);
}

template <class T>
STROBE_HD inline T sqrt_(T x) {
  using std::sqrt;
  return sqrt(x);
}

// Hyperbolic tangent, in float within 3 units in the last place: an odd polynomial near 0 (Cephes tanhf), else by exp.
template <class T>
[[gnu::always_inline]] STROBE_HD inline T tanh_(T x) {
#ifdef __CUDA_ARCH__
  return ::tanh(x);
#else
  if constexpr (std::is_same_v<T, float>) {
    const float magnitude = std::fabs(x);
    const float z = x * x;
    float p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    const float near_zero = p * z * x + x;
    const float far = 1.0f - 2.0f / (exp_(2.0f * magnitude) + 1.0f);
    return magnitude < 0.625f ? near_zero : std::copysign(far, x);
  } else {
    return std::tanh(x);
  }
#endif
}

// Error function 2 / sqrt(pi) * integral of exp(-t^2) over [0, x], in float within 2 units in the last place: an odd
// polynomial near 0, else 1 - exp of a polynomial, both fitted for the least largest error.
template <class T>
[[gnu::always_inline]] STROBE_HD inline T erf_(T x) {
#ifdef __CUDA_ARCH__
  return ::erf(x);
#else
  if constexpr (std::is_same_v<T, float>) {
    const float magnitude = std::fabs(x);
    const float t = magnitude > 4.0f ? 4.0f : magnitude;  // where erf rounds to 1; NaN passes
    const float z = x * x;
    float p = -5.9640978e-4f;
    p = p * z + 4.98797372e-3f;
    p = p * z - 2.67631039e-2f;
    p = p * z + 1.12817205e-1f;
    p = p * z - 3.76124859e-1f;
    p = p * z + 1.28379151e-1f;
    const float near_zero = p * x + x;
    float q = 1.97178393e-4f;  // log(1 - erf(t)) + t
    q = q * t - 3.05535598e-3f;
    q = q * t + 2.22751535e-2f;
    q = q * t - 1.04031317e-1f;
    q = q * t - 6.37069046e-1f;
    q = q * t - 1.27742603e-1f;
    q = q * t - 1.79529874e-4f;
    q = q - t;
    return t > 0.927734375f ? std::copysign(1.0f - exp_(q), x) : near_zero;
  } else {
    return std::erf(x);
  }
#endif
}

// 1 / (1 + e^-x).
template <class T>
[[gnu::always_inline]] STROBE_HD inline T sigmoid_(T x) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<T, float>) return __fdividef(1.0f, 1.0f + exp_(-x));  // within 2 units in the last place
#endif
  return T(1) / (T(1) + exp_(-x));
}

}  // namespace strobe
