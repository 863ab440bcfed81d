// The tensor-core attention kernels, as attention_mma.cu offers them.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "strobe/kernels/attention.h"

namespace strobe::kernels::cuda {

void mma_attention_forward(const AttentionArgs& args, const Stream& stream);
void mma_attention_backward(const AttentionGradArgs& args, const Stream& stream);
size_t mma_attention_backward_workspace(const AttentionGradArgs& args);

// Why they do not compute a case on a GPU; empty if they do.
std::string mma_attention_refusal(const AttentionArgs& args, Device device);
AttentionTile mma_attention_forward_tile(const AttentionArgs& args, Device device);
AttentionTile mma_attention_backward_tile(const AttentionArgs& args, Device device);
// The least shared memory of a block.
int mma_attention_forward_shared_bytes(const AttentionArgs& args);
int mma_attention_backward_shared_bytes(const AttentionArgs& args);

// A grid of at least `blocks` blocks, numbered blockIdx.y * gridDim.x + blockIdx.x.
inline dim3 grid_of(int64_t blocks) {
  constexpr int64_t widest = int64_t{1} << 30;
  if (blocks <= widest) return dim3(static_cast<unsigned>(blocks));
  return dim3(static_cast<unsigned>(widest), static_cast<unsigned>((blocks + widest - 1) / widest));
}

// Calls f<T, columns>() with the element type and the least width of a tile that holds head_dim.
template <class F>
auto dispatch_mma(const AttentionArgs& args, F&& f) {
  const auto with_type = [&]<class T>() {
    if (args.head_dim <= 64) return f.template operator()<T, 64>();
    if (args.head_dim <= 96) return f.template operator()<T, 96>();
    if (args.head_dim <= 128) return f.template operator()<T, 128>();
    if (args.head_dim <= 192) return f.template operator()<T, 192>();
    return f.template operator()<T, 256>();
  };
  if (args.dtype == DType::bf16) return with_type.template operator()<bfloat16>();
  return with_type.template operator()<float16>();
}

}  // namespace strobe::kernels::cuda
