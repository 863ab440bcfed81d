// The range check of index tensors, shared by the operations that take them; internal to core/ops.
#pragma once

#include <limits>

#include "strobe/core/tensor.h"
#include "strobe/kernels/indices.h"

namespace strobe {

constexpr int64_t ignore_none = std::numeric_limits<int64_t>::min();

// Throws when an index lies outside [0, limit) and is not `ignore_index`, naming its position, value and the limit;
// for indices on a GPU when the host next waits for the stream. indices: contiguous, i32 or i64; `argument` and `bound`
// name it and the limit in the message. All names are string literals.
inline void check_indices(const char* operation, const char* argument, const Tensor& indices, const char* bound,
                          int64_t limit, int64_t ignore_index = ignore_none) {
  kernels::check_indices({.operation = operation,
                          .argument = argument,
                          .bound = bound,
                          .indices = indices.data(),
                          .rank = indices.rank(),
                          .sizes = indices.shape().data(),
                          .limit = limit,
                          .index_dtype = indices.dtype(),
                          .ignore_index = ignore_index},
                         indices.stream());
}

}  // namespace strobe
