// Conversion between any two element types, on host and device.
#pragma once

#include <limits>
#include <type_traits>

#include "strobe/kernels/types.h"

namespace strobe {

// Truncates toward zero, saturating; NaN becomes 0.
template <class Integer, class Float>
STROBE_HD inline Integer to_integer(Float value) {
  constexpr Float limit = Float(uint64_t{1} << std::numeric_limits<Integer>::digits);
  if (value != value) return 0;
  if (value >= limit) return std::numeric_limits<Integer>::max();
  if (value < -limit) return std::numeric_limits<Integer>::min();
  return static_cast<Integer>(value);
}

template <class To, class From>
STROBE_HD inline To convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (std::is_integral_v<To> && !std::is_integral_v<From>) {
    return to_integer<To>(accumulate_t<From>(value));
  } else {
    return To(static_cast<accumulate_t<To>>(static_cast<accumulate_t<From>>(value)));
  }
}

}  // namespace strobe
