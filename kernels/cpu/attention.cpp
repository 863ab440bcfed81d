// What tiled attention computes on the CPU and what it refuses.
#include "strobe/kernels/attention.h"

namespace strobe::kernels::cpu {

void require_attention_support(const char* operation, const AttentionArgs& args, Device) {
  require_attention_options(operation, args);
  STROBE_CHECK(args.kernel == AttentionKernel::auto_select || args.kernel == AttentionKernel::portable, operation,
               ": kernel ", args.kernel == AttentionKernel::mma ? "mma" : "hopper",
               " given, but the CPU has only the portable one");
}

}  // namespace strobe::kernels::cpu
