// What tiled attention computes on the CPU and what it refuses.
#include "strobe/kernels/attention.h"

namespace strobe::kernels {

void require_attention_support(const char* operation, const AttentionArgs& args, Device device) {
  STROBE_CHECK(device.type == DeviceType::cpu, operation, ": device ", device, " given, expected cpu");
  STROBE_CHECK(args.window_left == -1 && args.window_right == -1, operation, ": window_left ", args.window_left,
               " and window_right ", args.window_right, " given, but sliding windows are not supported yet");
  STROBE_CHECK(args.softcap == 0, operation, ": softcap ", args.softcap, " given, but softcap is not supported yet");
  STROBE_CHECK(args.alibi_slopes == nullptr, operation, ": alibi_slopes given, but ALiBi is not supported yet");
  STROBE_CHECK(args.dropout_p == 0, operation, ": dropout_p ", args.dropout_p,
               " given, but attention dropout is not supported yet");
  STROBE_CHECK(args.cu_seqlens_q == nullptr && args.cu_seqlens_k == nullptr, operation,
               ": cu_seqlens given, but packed sequences are not supported yet");
  STROBE_CHECK(args.kernel == AttentionKernel::auto_select || args.kernel == AttentionKernel::portable, operation,
               ": kernel ", args.kernel == AttentionKernel::mma ? "mma" : "hopper",
               " given, but the CPU has only the portable one");
}

}  // namespace strobe::kernels
