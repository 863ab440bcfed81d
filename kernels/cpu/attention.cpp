// What tiled attention computes on the CPU and what it refuses.
#include "strobe/kernels/attention.h"

namespace strobe::kernels {

void require_attention_support(const char* operation, const AttentionArgs& args, Device device) {
  STROBE_CHECK(device.type == DeviceType::cpu, operation, ": device ", device, " given, expected cpu");
  STROBE_CHECK(args.head_dim >= 1 && args.head_dim <= max_attention_head_dim, operation, ": head_dim ", args.head_dim,
               " given, expected 1 to ", max_attention_head_dim);
  STROBE_CHECK((args.cu_seqlens_q == nullptr) == (args.cu_seqlens_k == nullptr), operation,
               ": one of cu_seqlens_q and cu_seqlens_k given, expected both or none");
  STROBE_CHECK(args.kernel == AttentionKernel::auto_select || args.kernel == AttentionKernel::portable, operation,
               ": kernel ", args.kernel == AttentionKernel::mma ? "mma" : "hopper",
               " given, but the CPU has only the portable one");
}

}  // namespace strobe::kernels
