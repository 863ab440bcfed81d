// Comparing tensors: the largest difference, relative to the largest magnitude of the reference.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "strobe/strobe.h"

namespace strobe::testing {

// max |x - reference| / max |reference|; infinity when exactly one of the two is NaN somewhere, or for unequal
// infinities.
inline double relative_difference(const std::vector<double>& x, const std::vector<double>& reference) {
  if (x.size() != reference.size()) return std::numeric_limits<double>::infinity();
  double difference = 0;
  double magnitude = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i]) != std::isnan(reference[i])) return std::numeric_limits<double>::infinity();
    if (std::isnan(x[i]) || x[i] == reference[i]) {
      if (std::isfinite(x[i])) magnitude = std::max(magnitude, std::abs(x[i]));
      continue;
    }
    difference = std::max(difference, std::abs(x[i] - reference[i]));
    magnitude = std::max(magnitude, std::abs(reference[i]));
  }
  return difference == 0 ? 0 : difference / std::max(magnitude, std::numeric_limits<double>::min());
}

inline double relative_difference(const Tensor& x, const Tensor& reference) {
  if (!(x.shape() == reference.shape())) return std::numeric_limits<double>::infinity();
  return relative_difference(x.to_vector<double>(), reference.to_vector<double>());
}

// True when both hold the same bits.
inline bool same_bits(const Tensor& a, const Tensor& b) {
  if (!(a.shape() == b.shape()) || a.dtype() != b.dtype()) return false;
  const NoGrad no_grad;
  const Tensor x = contiguous(a.to(Device::cpu()));
  const Tensor y = contiguous(b.to(Device::cpu()));
  const size_t bytes = static_cast<size_t>(x.size()) * size_of(x.dtype());
  return bytes == 0 || std::memcmp(x.data(), y.data(), bytes) == 0;
}

// How far a result computed in `dtype` may be from the f64 reference.
inline double tolerance(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 1e-12;
    case DType::f32:
      return 1e-5;
    case DType::f16:
      return 2e-3;
    default:
      return 1.6e-2;
  }
}

// The message of the strobe::Error that f throws; fails the test when it throws none.
template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  FAIL_CHECK("expected an error, none was thrown");
  return "";
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace strobe::testing
