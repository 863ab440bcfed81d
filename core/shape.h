// Shape: the sizes (or strides) of a tensor's axes, a small value type that prints, compares and broadcasts.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "strobe/kernels/kernel.h"

namespace strobe {

// At most max_rank axes, outermost first. Its own type, so that printing one in an error message finds operator<<.
class Shape {
 public:
  static constexpr int max_rank = 8;

  Shape() = default;
  Shape(std::initializer_list<int64_t> sizes) : Shape(std::span<const int64_t>(sizes.begin(), sizes.size())) {}
  explicit Shape(std::span<const int64_t> sizes) {
    for (int64_t size : sizes) push_back(size);
  }

  int size() const { return rank_; }
  bool empty() const { return rank_ == 0; }
  int64_t& operator[](int axis) { return sizes_[static_cast<size_t>(axis)]; }
  int64_t operator[](int axis) const { return sizes_[static_cast<size_t>(axis)]; }
  int64_t* begin() { return sizes_.data(); }
  int64_t* end() { return sizes_.data() + rank_; }
  const int64_t* begin() const { return sizes_.data(); }
  const int64_t* end() const { return sizes_.data() + rank_; }
  const int64_t* data() const { return sizes_.data(); }
  int64_t back() const { return sizes_[static_cast<size_t>(rank_ - 1)]; }

  void push_back(int64_t size) {
    STROBE_CHECK(rank_ < max_rank, "shape: more than ", max_rank, " axes given, expected at most ", max_rank);
    sizes_[static_cast<size_t>(rank_++)] = size;
  }

  // The number of elements. Throws when a size is negative or the product of all that are not 0, and so some stride,
  // overflows 64 bits.
  int64_t numel() const {
    int64_t count = 1;
    bool zero = false;
    for (int64_t size : *this) {
      STROBE_CHECK(size >= 0, "shape: ", *this, " given, expected no negative size");
      zero |= size == 0;
      STROBE_CHECK(size == 0 || !__builtin_mul_overflow(count, size, &count), "shape: ", *this,
                   " given, expected fewer than 2^63 elements");
    }
    return zero ? 0 : count;
  }

  friend bool operator==(const Shape& a, const Shape& b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

  friend std::ostream& operator<<(std::ostream& out, const Shape& shape) {
    out << '(';
    for (int axis = 0; axis < shape.size(); ++axis) out << (axis > 0 ? ", " : "") << shape[axis];
    return out << ')';
  }

 private:
  std::array<int64_t, max_rank> sizes_{};
  int rank_ = 0;
};

// Row-major strides, in elements.
inline Shape contiguous_strides(const Shape& shape) {
  Shape strides = shape;
  int64_t stride = 1;
  for (int axis = shape.size() - 1; axis >= 0; --axis) {
    strides[axis] = stride;
    stride *= std::max<int64_t>(shape[axis], 1);
  }
  return strides;
}

// The shape to which a and b broadcast: axes are aligned at the end, a size of 1 stretches.
inline Shape broadcast_shapes(const char* operation, const Shape& a, const Shape& b) {
  Shape result = a.size() >= b.size() ? a : b;
  const Shape& shorter = a.size() >= b.size() ? b : a;
  const int lead = result.size() - shorter.size();
  for (int axis = 0; axis < shorter.size(); ++axis) {
    int64_t& size = result[lead + axis];
    STROBE_CHECK(size == shorter[axis] || size == 1 || shorter[axis] == 1, operation, ": shapes ", a, " and ", b,
                 " do not broadcast, expected sizes that are equal or 1");
    if (size == 1) size = shorter[axis];
  }
  return result;
}

// Turns an axis counted from the end (negative) into one counted from the start; throws when there is no such axis.
inline int normalize_axis(const char* operation, int axis, int rank) {
  STROBE_CHECK(axis >= -rank && axis < rank, operation, ": axis ", axis, " given, expected one of a tensor of rank ",
               rank);
  return axis < 0 ? axis + rank : axis;
}

}  // namespace strobe
