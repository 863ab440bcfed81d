// Operands of kernels for tests that compare a GPU with the CPU in f64: the same values on both, whatever the dtype.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "strobe/kernels/device.h"
#include "support/gpu.h"

namespace strobe::testing {

inline constexpr DType floating_dtypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};

inline Stream gpu_stream() { return {Device::cuda(), nullptr}; }

// Bytes of GPU memory that differ from call to call, so that nothing can rely on what was there before.
class GpuMemory {
 public:
  explicit GpuMemory(size_t bytes) : data_(raw_malloc(bytes + 256, Device::cuda())) {
    REQUIRE(data_ != nullptr);
    write(std::vector<std::byte>(bytes, std::byte(0xff)));
  }
  ~GpuMemory() { raw_free(data_, Device::cuda()); }
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  void write(const std::vector<std::byte>& bytes) const {
    raw_copy(data_, Device::cuda(), bytes.data(), Device::cpu(), bytes.size(), gpu_stream());
  }
  std::vector<std::byte> read(size_t bytes) const {
    std::vector<std::byte> result(bytes);
    raw_copy(result.data(), Device::cpu(), data_, Device::cuda(), bytes, gpu_stream());
    return result;
  }

 private:
  void* data_;
};

// Floating-point values, rounded to `dtype`, as f64 on the host and as `dtype` on the GPU, there `shift` elements
// behind an aligned address and between two guards that nothing may write to.
class Operand {
 public:
  Operand(const std::vector<double>& values, DType dtype, int64_t shift = 0)
      : dtype_(dtype), shift_(static_cast<size_t>(shift)), values_(values), memory_(bytes()) {
    std::vector<std::byte> image(bytes(), guard);
    dispatch_floating(dtype_, "operand", [&]<class T>() {
      for (size_t i = 0; i < values_.size(); ++i) {
        const T value(static_cast<accumulate_t<T>>(values_[i]));
        std::memcpy(image.data() + (first() + i) * sizeof(T), &value, sizeof(T));
        values_[i] = static_cast<double>(static_cast<accumulate_t<T>>(value));
      }
    });
    memory_.write(image);
  }
  // What a kernel is to overwrite: NaN on both.
  static std::vector<double> unwritten(int64_t count) {
    return std::vector<double>(static_cast<size_t>(count), std::numeric_limits<double>::quiet_NaN());
  }

  double* host() { return values_.data(); }
  const std::vector<double>& values() const { return values_; }
  void* gpu() const { return memory_.data() + first() * size_of(dtype_); }

  // What is on the GPU, as f64. Fails the test when a guard has changed.
  std::vector<double> gpu_values() const {
    const std::vector<std::byte> image = memory_.read(bytes());
    std::vector<double> result(values_.size());
    dispatch_floating(dtype_, "operand", [&]<class T>() {
      const size_t begin = first() * sizeof(T), end = (first() + values_.size()) * sizeof(T);
      bool untouched = true;
      for (size_t i = 0; i < image.size(); ++i) untouched &= (i >= begin && i < end) || image[i] == guard;
      CHECK(untouched);
      for (size_t i = 0; i < result.size(); ++i) {
        T value;
        std::memcpy(&value, image.data() + begin + i * sizeof(T), sizeof(T));
        result[i] = static_cast<double>(static_cast<accumulate_t<T>>(value));
      }
    });
    return result;
  }

  // The largest difference between the GPU and the host, relative to the host's largest magnitude; infinity where only
  // one is NaN or infinities differ.
  double error() const {
    const std::vector<double> given = gpu_values();
    double difference = 0, magnitude = std::numeric_limits<double>::min();
    for (size_t i = 0; i < given.size(); ++i) {
      const double expected = values_[i];
      if (std::isnan(given[i]) && std::isnan(expected)) continue;
      if (std::isfinite(expected)) magnitude = std::max(magnitude, std::abs(expected));
      if (given[i] == expected) continue;
      if (!std::isfinite(given[i]) || !std::isfinite(expected)) return std::numeric_limits<double>::infinity();
      difference = std::max(difference, std::abs(given[i] - expected));
    }
    return difference / magnitude;
  }

 private:
  static constexpr std::byte guard{0xa5};
  static constexpr size_t guard_elements = 64;
  size_t first() const { return guard_elements + shift_; }
  size_t bytes() const { return (first() + values_.size() + guard_elements) * size_of(dtype_); }

  DType dtype_;
  size_t shift_;
  std::vector<double> values_;
  GpuMemory memory_;
};

inline std::vector<double> random_values(int64_t count, unsigned seed, double low = -1, double high = 1) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<double> uniform(low, high);
  std::vector<double> values(static_cast<size_t>(count));
  for (double& value : values) value = uniform(generator);
  return values;
}

// How far a GPU may be from the CPU in f64 after rounding to `dtype` and a few hundred additions.
inline double gpu_tolerance(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 1e-12;
    case DType::f32:
      return 5e-6;
    case DType::f16:
      return 1e-3;
    default:
      return 8e-3;
  }
}

}  // namespace strobe::testing
