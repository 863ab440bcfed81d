// The range check of index arrays on the CPU.
#include "strobe/kernels/indices.h"

#include <algorithm>

namespace strobe::kernels::cpu {

void check_indices(const CheckIndicesArgs& args, const Stream&) {
  int64_t size = 1;
  for (int axis = 0; axis < args.rank; ++axis) size *= args.sizes[axis];
  dispatch_index(args.index_dtype, args.operation, [&]<class Index>() {
    const Index* indices = static_cast<const Index*>(args.indices);
    const Index* end = indices + size;
    const Index* invalid = std::find_if(
        indices, end, [&](Index index) { return (index < 0 || index >= args.limit) && index != args.ignore_index; });
    if (invalid == end) return;
    IndexFault fault(args);
    fault.position = invalid - indices;
    fault.value = *invalid;
    fault.raise();
  });
}

}  // namespace strobe::kernels::cpu
