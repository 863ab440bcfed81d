#include "strobe/kernels/overlap.h"

#include <algorithm>

namespace strobe::kernels {
namespace {

// One unknown of distance = sum of stride * k over the terms + a distance within the runs: a k of least to most.
struct Term {
  int64_t stride;
  int64_t least;
  int64_t most;
  int64_t lowest_rest;  // what the terms behind this one and the runs can add
  int64_t highest_rest;
};

int64_t floor_quotient(int64_t x, int64_t divisor) { return x / divisor - (x % divisor < 0); }

// Whether the terms from `term` on can add up to a distance that lies between their lowest and highest sum.
bool reaches(const Term* term, const Term* end, int64_t distance, int& steps) {
  if (term == end) return true;
  const int64_t first = std::max(term->least, -floor_quotient(term->highest_rest - distance, term->stride));
  const int64_t last = std::min(term->most, floor_quotient(distance - term->lowest_rest, term->stride));
  for (int64_t k = first; k <= last; ++k) {
    if (--steps < 0 || reaches(term + 1, end, distance - k * term->stride, steps)) return true;
  }
  return false;
}

int64_t span(const StridedBytes& bytes) {
  int64_t sum = bytes.run_bytes;
  for (const StridedBytes::Axis& axis : bytes.axes) sum += (axis.size - 1) * axis.stride;
  return sum;
}

}  // namespace

bool overlaps_itself(const StridedBytes& bytes) {
  if (bytes.run_bytes == 0) return false;
  std::array<StridedBytes::Axis, 4> axes = bytes.axes;
  std::sort(axes.begin(), axes.end(), [](const auto& a, const auto& b) { return a.stride < b.stride; });
  int64_t covered = bytes.run_bytes;
  for (const StridedBytes::Axis& axis : axes) {
    if (axis.size == 1) continue;
    if (axis.stride < covered) return true;
    covered += (axis.size - 1) * axis.stride;
  }
  return false;
}

bool overlap(const StridedBytes& a, const StridedBytes& b) {
  if (a.run_bytes == 0 || b.run_bytes == 0) return false;
  const bool a_is_first = a.lowest <= b.lowest;
  const uintptr_t gap = a_is_first ? b.lowest - a.lowest : a.lowest - b.lowest;
  if (gap >= static_cast<uintptr_t>(span(a_is_first ? a : b))) return false;

  // They share a byte when b.lowest - a.lowest = sum of (a's indices * strides) - sum of (b's) + (place in a's run -
  // place in b's run). Axes of one stride are one unknown; large strides come first, for they decide the most.
  std::array<Term, 8> terms;
  Term* end = terms.data();
  const auto add = [&](int64_t stride, int64_t least, int64_t most) {
    if (stride == 0 || least == most) return;
    Term* term = terms.data();
    while (term != end && term->stride > stride) ++term;
    if (term == end || term->stride != stride) {
      std::move_backward(term, end, end + 1);
      ++end;
      *term = {stride, 0, 0, 0, 0};
    }
    term->least += least;
    term->most += most;
  };
  for (const StridedBytes::Axis& axis : a.axes) add(axis.stride, 0, axis.size - 1);
  for (const StridedBytes::Axis& axis : b.axes) add(axis.stride, 1 - axis.size, 0);
  int64_t lowest = 1 - b.run_bytes, highest = a.run_bytes - 1;
  for (Term* term = end; term != terms.data();) {
    --term;
    term->lowest_rest = lowest;
    term->highest_rest = highest;
    lowest += term->least * term->stride;
    highest += term->most * term->stride;
  }
  int steps = 10000;
  const int64_t distance = static_cast<int64_t>(gap);
  return reaches(terms.data(), end, a_is_first ? distance : -distance, steps);
}

}  // namespace strobe::kernels
