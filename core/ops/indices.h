// The range check of index tensors, shared by the operations that take them; internal to core/ops.
#pragma once

#include <limits>

#include "strobe/core/ops.h"
#include "strobe/kernels/embedding.h"

namespace strobe {

constexpr int64_t ignore_none = std::numeric_limits<int64_t>::min();

// Throws when an index lies outside [0, limit) and is not `ignore_index`, naming its position, value and the limit.
// indices: contiguous, i32 or i64; `argument` and `bound` name it and the limit in the message.
inline void check_indices(const char* operation, const char* argument, const Tensor& indices, const char* bound,
                          int64_t limit, int64_t ignore_index = ignore_none) {
  const Tensor found = empty({1}, DType::i64, indices.device());
  kernels::find_invalid_index({.position = found.data<int64_t>(),
                               .indices = indices.data(),
                               .size = indices.size(),
                               .limit = limit,
                               .index_dtype = indices.dtype(),
                               .ignore_index = ignore_index},
                              indices.stream());
  const int64_t position = found.item<int64_t>();
  if (position < 0) return;
  Shape coordinates = indices.shape();
  int64_t rest = position;
  for (int axis = indices.rank() - 1; axis >= 0; --axis) {
    coordinates[axis] = rest % indices.dim(axis);
    rest /= indices.dim(axis);
  }
  const Tensor flat = reshape(indices.detach(), {-1});
  fail(operation, ": ", argument, " holds ", slice(flat, 0, position, position + 1).item<int64_t>(), " at position ",
       coordinates, ", expected 0 to ", limit - 1, " (", bound, " is ", limit, ")");
}

}  // namespace strobe
