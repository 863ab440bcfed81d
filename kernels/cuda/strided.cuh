// Several strided arrays of one shape, walked together.
#pragma once

#include "strobe/kernels/cuda/cuda.h"

namespace strobe::cuda {

// Divides numbers below 2^31 by one that stays the same (Granlund and Montgomery 1994): a multiplication and a shift
// take a fifth of the time.
struct Divisor {
  uint32_t divisor = 1;
  uint32_t factor = 1;
  uint32_t shift = 0;

  Divisor() = default;
  // d: from 1 to 2^31 - 1.
  explicit Divisor(uint32_t d) : divisor(d) {
    while (uint64_t{1} << shift < d) ++shift;
    factor = static_cast<uint32_t>(((uint64_t{1} << shift) - d << 32) / d + 1);
  }
  __device__ uint32_t quotient(uint32_t n) const { return (__umulhi(n, factor) + n) >> shift; }
};

// Row-major positions to offsets in each operand. Axes that all operands walk evenly are merged, so that contiguous
// arrays have one axis whatever their rank. Passed to kernels by value.
template <int operands>
struct StridedLayout {
  static constexpr int max_rank = 8;

  int rank = 0;
  bool short_positions = true;  // 31 bits suffice, in which a Divisor takes the place of a division
  int64_t size = 1;
  int64_t sizes[max_rank] = {};
  int64_t strides[max_rank][operands] = {};
  Divisor divisors[max_rank];  // by the sizes, where positions are short

  // Strides in elements, one array per operand.
  StridedLayout(int given_rank, const int64_t* given_sizes, const int64_t* const (&given_strides)[operands]) {
    for (int axis = 0; axis < given_rank; ++axis) {
      size *= given_sizes[axis];
      if (given_sizes[axis] == 1) continue;
      bool merges = rank > 0;
      for (int k = 0; k < operands && merges; ++k) {
        merges = strides[rank - 1][k] == given_strides[k][axis] * given_sizes[axis];
      }
      if (!merges) sizes[rank++] = 1;
      sizes[rank - 1] *= given_sizes[axis];
      for (int k = 0; k < operands; ++k) strides[rank - 1][k] = given_strides[k][axis];
    }
    if (rank == 0) sizes[rank++] = 1;
    find_divisors();
  }

  int64_t inner_size() const { return sizes[rank - 1]; }
  int64_t inner_stride(int operand) const { return strides[rank - 1][operand]; }

  // True when `width` elements from any position that is a multiple of it lie one behind the other in an operand (or
  // are one element, stride 0), and at a multiple of `width` from the operand's start.
  bool has_packs(int operand, int width) const {
    if (inner_size() % width != 0) return rank == 1 && (inner_stride(operand) == 0 || inner_stride(operand) == 1);
    if (inner_stride(operand) == 0) return true;
    for (int axis = 0; axis + 1 < rank; ++axis) {
      if (strides[axis][operand] % width != 0) return false;
    }
    return inner_stride(operand) == 1;
  }

  // True when all strides are multiples of `width`.
  bool has_multiples(int width) const {
    for (int axis = 0; axis < rank; ++axis) {
      for (int k = 0; k < operands; ++k) {
        if (strides[axis][k] % width != 0) return false;
      }
    }
    return true;
  }

  // The axis along which an operand's elements are neighbours, -1 where there is none.
  int axis_of_neighbours(int operand) const {
    for (int axis = rank - 1; axis >= 0; --axis) {
      if (strides[axis][operand] == 1) return axis;
    }
    return -1;
  }

  // The layout of the other axes.
  StridedLayout without(int axis) const {
    StridedLayout rest = *this;
    rest.size /= sizes[axis];
    for (int i = axis; i + 1 < rank; ++i) {
      rest.sizes[i] = sizes[i + 1];
      for (int k = 0; k < operands; ++k) rest.strides[i][k] = strides[i + 1][k];
    }
    --rest.rank;
    rest.find_divisors();
    return rest;
  }

  struct Offsets {
    int64_t of[operands];
  };

  __device__ Offsets offsets(int64_t position) const {
    Offsets result{};
#pragma unroll 1
    for (int axis = rank - 1; axis > 0; --axis) {
      int64_t quotient, index;
      if (short_positions) {
        const uint32_t part = divisors[axis].quotient(static_cast<uint32_t>(position));
        quotient = part, index = static_cast<uint32_t>(position) - part * divisors[axis].divisor;
      } else {
        quotient = position / sizes[axis], index = position - quotient * sizes[axis];
      }
      position = quotient;
#pragma unroll
      for (int k = 0; k < operands; ++k) result.of[k] += index * strides[axis][k];
    }
#pragma unroll
    for (int k = 0; k < operands; ++k) result.of[k] += position * strides[0][k];
    return result;
  }

 private:
  void find_divisors() {
    short_positions = size <= 0x7fffffff;
    for (int axis = 0; axis < rank && short_positions && size > 0; ++axis) {
      divisors[axis] = Divisor(static_cast<uint32_t>(sizes[axis]));
    }
  }
};

}  // namespace strobe::cuda
