// Which cases both passes of attention on Hopper take.
#include "strobe/kernels/cuda/attention_hopper.h"

#include <algorithm>

#include "strobe/kernels/cuda/attention_common.cuh"
#include "strobe/kernels/cuda/tensor_map.h"

namespace strobe::kernels::cuda {

std::string hopper_attention_refusal(const AttentionArgs& args, Device device) {
#ifndef STROBE_CUDA_HOPPER
  return "this build has no code for sm_90a (see CMAKE_CUDA_ARCHITECTURES)";
#endif
  const strobe::cuda::DeviceProperties& gpu = strobe::cuda::device_properties(device);
  if (gpu.compute_capability != 90) {
    return concat_message("it needs compute capability 9.0, ", device, " has ", gpu.compute_capability / 10, ".",
                          gpu.compute_capability % 10);
  }
  if (args.dtype != DType::bf16 && args.dtype != DType::f16) {
    return concat_message("it takes bf16 and f16, dtype is ", args.dtype);
  }
  if (args.head_dim % 8 != 0) {
    return concat_message("it takes head_dim in multiples of 8, head_dim is ", args.head_dim);
  }
  if (args.alibi_slopes != nullptr) return "it does not take alibi_slopes";
  if (dropout_of(args).drops()) return "it does not take dropout_p";
  const HopperRows rows(args);
  if (args.seq_len_k == 0) return "seq_len_k is 0";
  if (rows.keys == 0) return "total_k is 0";
  constexpr int64_t longest = int64_t{1} << 29, most = int64_t{1} << 30;  // positions and tiles are 32-bit
  const int64_t query_tiles = strobe::cuda::ceil_div(args.seq_len_q, 64) * args.batch * args.num_heads;
  const int64_t key_tiles = strobe::cuda::ceil_div(args.seq_len_k, 64) * args.batch * args.num_kv_heads;
  if (std::max({args.seq_len_q, args.seq_len_k, rows.queries, rows.keys}) > longest ||
      std::max(query_tiles, key_tiles) > most) {
    return concat_message("it takes sequences up to ", longest, " and ", most,
                          " tiles of 64 queries or keys, batch is ", args.batch, ", seq_len_q ", args.seq_len_q,
                          ", seq_len_k ", args.seq_len_k, ", num_heads ", args.num_heads, ", num_kv_heads ",
                          args.num_kv_heads, ", rows ", rows.queries, " and ", rows.keys);
  }
  std::string refusal = tensor_map_refusal("query", args.query, rows.batch, rows.queries, args.num_heads);
  for (const auto& [name, tensor] : {std::pair("key", &args.key), {"value", &args.value}}) {
    if (refusal.empty()) refusal = tensor_map_refusal(name, *tensor, rows.batch, rows.keys, args.num_kv_heads);
  }
  return refusal;
}

}  // namespace strobe::kernels::cuda
