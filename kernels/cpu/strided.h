// Walks several strided arrays of one shape together, in runs along the innermost axis.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace strobe::cpu {

// Axes that all operands walk evenly are merged, so that a contiguous array is a single run whatever its rank.
template <size_t operands>
class StridedLoop {
 public:
  using Offsets = std::array<int64_t, operands>;

  // rank <= 8; strides in elements, one array per operand.
  StridedLoop(int rank, const int64_t* sizes, const std::array<const int64_t*, operands>& strides) {
    for (int axis = 0; axis < rank; ++axis) {
      if (sizes[axis] == 1) continue;
      Offsets steps;
      for (size_t k = 0; k < operands; ++k) steps[k] = strides[k][axis];
      if (rank_ > 0 && continues_last_axis(sizes[axis], steps)) {
        sizes_[last()] *= sizes[axis];
        strides_[last()] = steps;
      } else {
        ++rank_;
        sizes_[last()] = sizes[axis];
        strides_[last()] = steps;
      }
    }
    if (rank_ == 0) {
      rank_ = 1;
      sizes_[0] = 1;
      strides_[0] = {};
    }
    for (size_t axis = 0; axis < rank_; ++axis) size_ *= sizes_[axis];
  }

  int64_t size() const { return size_; }
  int64_t inner_stride(size_t operand) const { return strides_[last()][operand]; }

  // Calls f(position, offsets, count) for each run of the elements [begin, end) in row-major order: `count` elements
  // from element `position`, which operand k holds at offsets[k].
  template <class F>
  void run(int64_t begin, int64_t end, F&& f) const {
    std::array<int64_t, max_rank> index{};
    Offsets offsets{};
    int64_t rest = begin;
    for (size_t axis = rank_; axis-- > 0;) {
      index[axis] = rest % sizes_[axis];
      rest /= sizes_[axis];
      for (size_t k = 0; k < operands; ++k) offsets[k] += index[axis] * strides_[axis][k];
    }
    for (int64_t position = begin; position < end;) {
      const int64_t count = std::min(sizes_[last()] - index[last()], end - position);
      f(position, offsets, count);
      position += count;
      index[last()] += count;
      for (size_t k = 0; k < operands; ++k) offsets[k] += count * strides_[last()][k];
      for (size_t axis = last(); axis > 0 && index[axis] == sizes_[axis]; --axis) {
        index[axis] = 0;
        ++index[axis - 1];
        for (size_t k = 0; k < operands; ++k) {
          offsets[k] += strides_[axis - 1][k] - sizes_[axis] * strides_[axis][k];
        }
      }
    }
  }

 private:
  static constexpr size_t max_rank = 8;

  size_t last() const { return rank_ - 1; }
  bool continues_last_axis(int64_t size, const Offsets& steps) const {
    for (size_t k = 0; k < operands; ++k) {
      if (strides_[last()][k] != steps[k] * size) return false;
    }
    return true;
  }

  size_t rank_ = 0;
  int64_t size_ = 1;
  std::array<int64_t, max_rank> sizes_{};
  std::array<Offsets, max_rank> strides_{};
};

}  // namespace strobe::cpu
