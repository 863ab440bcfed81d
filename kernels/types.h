// The plain values every kernel speaks in: data types, devices, streams and the 16-bit storage floats.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define STROBE_HD __host__ __device__
#else
#define STROBE_HD
#endif

namespace strobe {

enum class DType : uint8_t { f32, f64, bf16, f16, i32, i64 };

enum class DeviceType : uint8_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;
  static constexpr Device cpu() { return {}; }
  static constexpr Device cuda(int index = 0) { return {DeviceType::cuda, index}; }
  friend bool operator==(const Device&, const Device&) = default;
};

// Where work is queued. The CPU stream is synchronous and has no handle; on CUDA the handle is a cudaStream_t.
struct Stream {
  Device device;
  void* handle = nullptr;
};

// Storage for bfloat16: the upper half of a float, rounded to nearest even. Arithmetic happens in float. GPUs convert
// in one instruction.
struct bfloat16 {
  uint16_t bits;
  bfloat16() = default;
  STROBE_HD explicit bfloat16(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    const uint32_t u = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    bits = static_cast<uint16_t>(value != value ? (u >> 16) | 0x40u : rounded);
#endif
  }
  STROBE_HD explicit operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

// Storage for IEEE half precision, rounded to nearest even. Arithmetic happens in float.
struct float16 {
  uint16_t bits;
  float16() = default;
  STROBE_HD explicit float16(float value) {
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    const uint32_t u = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t magnitude = u & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u) {
      half = 0x7e00u;
    } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
      half = 0x7c00u;
    } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 lets the FPU round to a multiple of 2^-24
      half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    } else {
      half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    }
    bits = static_cast<uint16_t>(sign | half);
#endif
  }
  STROBE_HD explicit operator float() const {
#ifdef __CUDA_ARCH__
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fu;
    const uint32_t mantissa = bits & 0x3ffu;
    if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
    if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
      const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
      return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
    }
    return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
#endif
  }
};

template <class T>
struct AccumulateType {
  using type = T;
};
template <>
struct AccumulateType<bfloat16> {
  using type = float;
};
template <>
struct AccumulateType<float16> {
  using type = float;
};
// The type a kernel computes in: float for the 16-bit floats, T itself otherwise.
template <class T>
using accumulate_t = typename AccumulateType<T>::type;

constexpr size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
  }
  return 0;
}

constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f64:
      return "f64";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
  }
  return "unknown dtype";
}

constexpr const char* name_of(DeviceType type) { return type == DeviceType::cpu ? "cpu" : "cuda"; }

constexpr bool is_floating(DType dtype) { return dtype != DType::i32 && dtype != DType::i64; }

// The dtype in which kernels accumulate values of `dtype`.
constexpr DType accumulate_dtype(DType dtype) {
  return dtype == DType::bf16 || dtype == DType::f16 ? DType::f32 : dtype;
}

template <class T>
constexpr DType dtype_of();
template <>
constexpr DType dtype_of<float>() {
  return DType::f32;
}
template <>
constexpr DType dtype_of<double>() {
  return DType::f64;
}
template <>
constexpr DType dtype_of<bfloat16>() {
  return DType::bf16;
}
template <>
constexpr DType dtype_of<float16>() {
  return DType::f16;
}
template <>
constexpr DType dtype_of<int32_t>() {
  return DType::i32;
}
template <>
constexpr DType dtype_of<int64_t>() {
  return DType::i64;
}

}  // namespace strobe
