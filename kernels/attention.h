// Attention on raw strided memory. Tiled: forward with the online softmax, backward by recomputation (FlashAttention,
// Dao et al. 2022; FlashAttention-2, Dao 2023). And the masked softmax that attention with stored matrices needs.
#pragma once

#include "strobe/kernels/attention_mask.h"
#include "strobe/kernels/kernel.h"

namespace strobe::kernels {

inline constexpr int64_t max_attention_head_dim = 256;

// Which kernel computes an attention call; auto_select takes the fastest that accepts the case.
enum class AttentionKernel : uint8_t { auto_select, portable, mma, hopper };

// A (batch, seq_len, num_heads, head_dim) operand: strides in elements, head_dim contiguous (stride 1).
struct AttentionTensor {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t seq_stride = 0;
  int64_t head_stride = 0;
};

// out = softmax(scores) value with scores = softcap(softmax_scale * query key^T) + ALiBi bias, -inf where masked;
// lse = natural log of the sum of exp of the scores. Query head h reads kv head h / (num_heads / num_kv_heads).
// A query that sees no key gets out 0 and lse -inf; what a query does not see never influences it, NaN included.
//
// Packed sequences (cu_seqlens_q and cu_seqlens_k given): sequence b is rows cu_seqlens[b] to cu_seqlens[b + 1] - 1 of
// tensors without a batch axis, (total_q, num_heads, head_dim) and (total_k, num_kv_heads, head_dim), whose
// batch_stride is not read. Positions count from the start of their sequence. Rows behind the last sequence are
// padding: never read, out and gradients 0, lse -inf.
struct AttentionArgs {
  AttentionTensor query;  // (batch, seq_len_q, num_heads, head_dim)
  AttentionTensor key;    // (batch, seq_len_k, num_kv_heads, head_dim)
  AttentionTensor value;  // (batch, seq_len_k, num_kv_heads, head_dim)
  AttentionTensor out;    // (batch, seq_len_q, num_heads, head_dim)
  void* lse;  // (batch, num_heads, seq_len_q), packed (num_heads, total_q), contiguous; f64 for f64 inputs, else f32
  int64_t batch;
  int64_t seq_len_q;  // packed: at least the longest sequence
  int64_t seq_len_k;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  DType dtype;
  double softmax_scale;
  bool causal = false;        // query i sees key j when j <= i + d, d = seq_len_k - seq_len_q (bottom-right aligned)
  int64_t window_left = -1;   // query i sees key j when j >= i + d - window_left; -1: unlimited
  int64_t window_right = -1;  // query i sees key j when j <= i + d + window_right; -1: unlimited
  double softcap = 0;         // scaled scores s become softcap * tanh(s / softcap); 0: off, else 1e-30 to 1e30
  const float* alibi_slopes = nullptr;  // (num_heads): adds -slope * abs(i + d - j)
  double dropout_p = 0;                 // of P: AttentionDropout in kernels/attention_mask.h
  uint64_t dropout_seed = 0;
  uint64_t dropout_offset = 0;
  const int32_t* cu_seqlens_q = nullptr;  // (batch + 1), from 0, not decreasing, at most total_q
  const int32_t* cu_seqlens_k = nullptr;
  int64_t total_q = 0;  // rows of packed query
  int64_t total_k = 0;  // rows of packed key and value
  AttentionKernel kernel = AttentionKernel::auto_select;
  bool deterministic = true;
  void* workspace = nullptr;  // flash_attention_forward_workspace(args) bytes, aligned to 64
  size_t workspace_bytes = 0;
};

// Gradients of `forward`'s inputs given dout, out and lse: P is recomputed tile by tile
// (FlashAttention-2, algorithm 2). Every element of dquery, dkey and dvalue is written.
struct AttentionGradArgs {
  AttentionArgs forward;  // with out and lse as the forward pass wrote them; its workspace fields are not read
  AttentionTensor dout;   // (batch, seq_len_q, num_heads, head_dim); any strides, 0 included, also for head_dim
  int64_t dout_dim_stride = 1;
  const void* dlse = nullptr;  // gradient of lse, as lse; null: none
  AttentionTensor dquery;
  AttentionTensor dkey;       // summed over the query heads of a group
  AttentionTensor dvalue;     // summed over the query heads of a group
  void* workspace = nullptr;  // flash_attention_backward_workspace(args) bytes, aligned to 64
  size_t workspace_bytes = 0;
};

// The softmax of attention with stored matrices, not yet divided by its sums: weights = exp(score - row maximum) and
// sums = their sum, over the band of each row. Outside of it weights are 0 and products never looked at; a row that
// sees nothing has sum 1 and lse -inf. Products of weights are divided afterwards, which keeps means of values exact.
struct AttentionSoftmaxArgs {
  void* weights;         // (num_matrices, seq_len_q, seq_len_k), dtype
  void* sums;            // (num_matrices, seq_len_q), accumulate_dtype(dtype)
  void* lse;             // as sums
  const void* products;  // query key^T, as weights, accumulate_dtype(dtype); may be weights' memory when that is dtype
  int64_t num_matrices;
  int64_t seq_len_q;
  int64_t seq_len_k;
  DType dtype;
  double softmax_scale;
  AttentionBand band = {};
  double softcap = 0;
  const float* alibi_slopes = nullptr;  // (num_heads), of matrix m slope m % num_heads
  int64_t num_heads = 1;
};

// dproducts = softmax_scale * softcap' * P * (dP - rowsum(P * dP) + dlse) with P = weights / sums, within the band; 0
// outside of it. The weights are replaced by P, which the gradient of value is a product of.
struct AttentionSoftmaxGradArgs {
  void* dproducts;             // (num_matrices, seq_len_q, seq_len_k), dtype
  void* weights;               // the same shape, dtype
  const void* sums;            // (num_matrices, seq_len_q), accumulate_dtype(dtype)
  const void* dprobabilities;  // as dproducts, accumulate_dtype(dtype); may be dproducts' memory when that is dtype
  int64_t num_matrices;
  int64_t seq_len_q;
  int64_t seq_len_k;
  DType dtype;
  double softmax_scale;
  AttentionBand band = {};
  double softcap = 0;
  const void* products = nullptr;  // as the forward pass read them; only needed with a softcap
  const void* dlse = nullptr;      // as sums; null: none
};

// Applies dropout to matrices whose element (m, i, j) belongs to query i and key j of matrix first_matrix + m, counted
// as batch index * num_heads + head.
struct AttentionDropoutArgs {
  void* out;      // (num_matrices, seq_len_q, seq_len_k)
  const void* x;  // as out; may be its memory
  int64_t first_matrix;
  int64_t num_matrices;
  int64_t seq_len_q;
  int64_t seq_len_k;
  DType dtype;
  AttentionDropout dropout;
};

// Attention over the union of two disjoint sets of keys: lse = log(exp(lse_a) + exp(lse_b)), out = exp(lse_a - lse)
// out_a + exp(lse_b - lse) out_b. A part that saw no key (lse -inf) is not read. All tensors contiguous.
struct AttentionCombineArgs {
  void* out;          // (batch, seq_len, num_heads, head_dim), dtype
  void* lse;          // (batch, num_heads, seq_len), accumulate_dtype(dtype)
  const void* out_a;  // as out
  const void* lse_a;  // as lse
  const void* out_b;
  const void* lse_b;
  int64_t batch;
  int64_t seq_len;
  int64_t num_heads;
  int64_t head_dim;
  DType dtype;
};

// The gradients of its inputs; `forward`'s out is not read.
struct AttentionCombineGradArgs {
  AttentionCombineArgs forward;
  const void* dout;  // as out; null: none
  const void* dlse;  // as lse; null: none
  void* dout_a;
  void* dlse_a;
  void* dout_b;
  void* dlse_b;
};

// Throws, naming the option, unless the options are what this file says, on whatever device.
void require_attention_options(const char* operation, const AttentionArgs& args);

namespace cpu {
void require_attention_support(const char* operation, const AttentionArgs& args, Device device);
}
namespace cuda {
void require_attention_support(const char* operation, const AttentionArgs& args, Device device);
}
// Throws, naming the option, unless tiled attention can compute this case on `device`.
inline void require_attention_support(const char* operation, const AttentionArgs& args, Device device) {
  if (device.type == DeviceType::cpu) return cpu::require_attention_support(operation, args, device);
  if constexpr (built_with_cuda) {
    cuda::require_attention_support(operation, args, device);
  } else {
    fail(operation, ": device ", device, " given, but this build has no CUDA backend");
  }
}

// Queries and keys that a block of threads of a GPU holds on chip at a time: what the bytes it reads follow from.
struct AttentionTile {
  int64_t queries;
  int64_t keys;
};
namespace cuda {
AttentionTile attention_tile(const AttentionArgs& args, bool backward, Device device);
}
// Of the kernel that flash_attention_forward or _backward takes on `device`. Throws unless that is a GPU.
inline AttentionTile attention_tile(const AttentionArgs& args, bool backward, Device device) {
  STROBE_CHECK(device.type == DeviceType::cuda, "attention_tile: device ", device, " given, expected a GPU");
  if constexpr (built_with_cuda) {
    return cuda::attention_tile(args, backward, device);
  } else {
    fail("attention_tile: this build has no CUDA backend");
  }
}

// With the current num_threads() on the CPU.
STROBE_WORKSPACE(flash_attention_forward_workspace, AttentionArgs)
STROBE_WORKSPACE(flash_attention_backward_workspace, AttentionGradArgs)

STROBE_KERNEL(flash_attention_forward, AttentionArgs)
STROBE_KERNEL(flash_attention_backward, AttentionGradArgs)
STROBE_KERNEL(attention_softmax_forward, AttentionSoftmaxArgs)
STROBE_KERNEL(attention_softmax_backward, AttentionSoftmaxGradArgs)
STROBE_KERNEL(attention_dropout, AttentionDropoutArgs)
STROBE_KERNEL(attention_combine_forward, AttentionCombineArgs)
STROBE_KERNEL(attention_combine_backward, AttentionCombineGradArgs)

}  // namespace strobe::kernels
