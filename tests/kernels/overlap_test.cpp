// Shared memory of strided operands, against the bytes counted one by one.
#include "strobe/kernels/overlap.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <vector>

using strobe::kernels::overlap;
using strobe::kernels::overlaps_itself;
using strobe::kernels::StridedBytes;

namespace {

constexpr size_t memory = 256;

// How often the operand covers each byte.
std::vector<int> covered(const StridedBytes& x) {
  std::vector<int> count(memory, 0);
  const auto visit = [&](auto&& self, size_t axis, int64_t offset) -> void {
    if (axis == x.axes.size()) {
      for (int64_t i = 0; i < x.run_bytes; ++i) ++count.at(x.lowest + static_cast<size_t>(offset + i));
      return;
    }
    for (int64_t i = 0; i < x.axes[axis].size; ++i) self(self, axis + 1, offset + i * x.axes[axis].stride);
  };
  visit(visit, 0, 0);
  return count;
}

StridedBytes random_operand(std::mt19937& random) {
  const auto draw = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  StridedBytes x{.lowest = static_cast<uintptr_t>(draw(0, 60)), .run_bytes = draw(0, 4)};
  for (StridedBytes::Axis& axis : x.axes) axis = {draw(1, 3), draw(0, 4) * draw(1, 6)};
  return x;
}

}  // namespace

TEST_CASE("overlap: true exactly when two operands share a byte") {
  std::mt19937 random(5);
  int shared = 0;
  constexpr int count = 20000;
  for (int i = 0; i < count; ++i) {
    const StridedBytes a = random_operand(random), b = random_operand(random);
    const std::vector<int> in_a = covered(a), in_b = covered(b);
    bool expected = false;
    for (size_t byte = 0; byte < memory; ++byte) expected |= in_a[byte] > 0 && in_b[byte] > 0;
    CHECK(overlap(a, b) == expected);
    shared += expected;
  }
  CHECK(shared > count / 10);
  CHECK(shared < count - count / 10);
}

TEST_CASE("overlap: an operand accepted as free of overlaps has every byte once, dense layouts are accepted") {
  std::mt19937 random(6);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    const StridedBytes x = random_operand(random);
    if (overlaps_itself(x)) continue;
    ++accepted;
    const std::vector<int> counts = covered(x);
    CHECK(*std::max_element(counts.begin(), counts.end()) <= 1);
  }
  CHECK(accepted > 1000);
  CHECK_FALSE(overlaps_itself({.run_bytes = 4, .axes = {{{2, 24}, {3, 8}, {2, 4}, {1, 0}}}}));
  CHECK(overlaps_itself({.run_bytes = 4, .axes = {{{2, 24}, {3, 0}, {2, 4}, {1, 0}}}}));
  CHECK(overlaps_itself({.run_bytes = 4, .axes = {{{2, 23}, {3, 8}, {2, 4}, {1, 0}}}}));
}

TEST_CASE("overlap: large interleaved operands are told apart, and the search ends") {
  // Thirds of (batch, seq_len, 3, num_heads, head_dim) in f32, the shape of packed QKV.
  const int64_t head = 64 * 4, third = 12 * head, row = 3 * third, batch = 4096 * row;
  const auto part = [&](int64_t index) {
    return StridedBytes{.lowest = static_cast<uintptr_t>(1 << 20) + static_cast<uintptr_t>(index * third),
                        .run_bytes = 4,
                        .axes = {{{8, batch}, {4096, row}, {12, head}, {64, 4}}}};
  };
  CHECK_FALSE(overlap(part(0), part(1)));
  CHECK_FALSE(overlap(part(2), part(0)));
  CHECK(overlap(part(1), part(1)));
  StridedBytes shifted = part(0);
  shifted.lowest += 4;
  CHECK(overlap(shifted, part(1)));

  // Even against odd bytes, of strides that do not nest: beyond what is worth telling apart.
  const StridedBytes even{.lowest = 0, .run_bytes = 1, .axes = {{{1 << 20, 6}, {1 << 20, 10}, {1, 0}, {1, 0}}}};
  const StridedBytes odd{.lowest = 1, .run_bytes = 1, .axes = {{{1 << 20, 14}, {1 << 20, 22}, {1, 0}, {1, 0}}}};
  CHECK(overlap(even, odd));
}
