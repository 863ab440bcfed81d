// The range check of index arrays.
#pragma once

#include "strobe/kernels/kernel.h"

namespace strobe::kernels {

// Every index lies in [0, limit) or equals ignore_index. The CPU throws when one does not. A GPU only queues the check:
// the next call that waits for the stream (synchronize, a copy to the host) throws, and until then kernels treat such
// an index as one that exists nowhere. The names are string literals for the message.
struct CheckIndicesArgs {
  const char* operation;
  const char* argument;  // what the indices are
  const char* bound;     // what the limit is
  const void* indices;   // contiguous
  int rank;              // at most 8
  const int64_t* sizes;
  int64_t limit;
  DType index_dtype;  // i32 or i64
  int64_t ignore_index;
};

STROBE_KERNEL(check_indices, CheckIndicesArgs)

// The first index of a failed check, with all that the message needs.
struct IndexFault {
  const char* operation = nullptr;
  const char* argument = nullptr;
  const char* bound = nullptr;
  int rank = 0;
  int64_t sizes[8] = {};
  int64_t limit = 0;
  int64_t position = -1;  // in row-major order; -1: no fault
  int64_t value = 0;

  IndexFault() = default;
  explicit IndexFault(const CheckIndicesArgs& args)
      : operation(args.operation), argument(args.argument), bound(args.bound), rank(args.rank), limit(args.limit) {
    for (int axis = 0; axis < rank; ++axis) sizes[axis] = args.sizes[axis];
  }

  [[noreturn]] void raise() const {
    std::string coordinates;
    int64_t rest = position;
    for (int axis = rank - 1; axis >= 0; --axis) {
      coordinates = std::to_string(rest % sizes[axis]) + (coordinates.empty() ? "" : ", ") + coordinates;
      rest /= sizes[axis];
    }
    fail(operation, ": ", argument, " holds ", value, " at position (", coordinates, "), expected 0 to ", limit - 1,
         " (", bound, " is ", limit, ")");
  }
};

}  // namespace strobe::kernels
