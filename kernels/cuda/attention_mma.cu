// What the tensor-core attention kernels take and refuse.
#include <algorithm>

#include "strobe/kernels/cuda/attention_mma.h"
#include "strobe/kernels/cuda/cuda.h"

namespace strobe::kernels::cuda {

std::string mma_attention_refusal(const AttentionArgs& args, Device device) {
  if (args.dtype != DType::bf16 && args.dtype != DType::f16) {
    return concat_message("it takes bf16 and f16, dtype is ", args.dtype);
  }
  constexpr int64_t longest = int64_t{1} << 29;  // positions are 32-bit
  if (std::max(args.seq_len_q, args.seq_len_k) > longest) {
    return concat_message("it takes sequences up to ", longest, ", seq_len_q is ", args.seq_len_q, ", seq_len_k ",
                          args.seq_len_k);
  }
  const strobe::cuda::DeviceProperties& gpu = strobe::cuda::device_properties(device);
  if (gpu.compute_capability < 80) {
    return concat_message("it needs compute capability 8.0, ", device, " has ", gpu.compute_capability / 10, ".",
                          gpu.compute_capability % 10);
  }
  const int bytes = std::max(mma_attention_forward_shared_bytes(args), mma_attention_backward_shared_bytes(args));
  if (bytes > gpu.shared_bytes_per_block) {
    return concat_message("head_dim ", args.head_dim, " needs ", bytes, " bytes of shared memory a block, ", device,
                          " has ", gpu.shared_bytes_per_block);
  }
  return {};
}

}  // namespace strobe::kernels::cuda
