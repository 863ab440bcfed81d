// Attention on raw strided memory. Tiled: forward with the online softmax, backward by recomputation (FlashAttention,
// Dao et al. 2022; FlashAttention-2, Dao 2023). And the masked softmax that attention with stored matrices needs.
#pragma once

#include "strobe/kernels/kernel.h"
#include "strobe/kernels/matmul.h"

namespace strobe::kernels {

// Which kernel computes an attention call; auto_select takes the fastest that accepts the case.
enum class AttentionKernel : uint8_t { auto_select, portable, mma, hopper };

// A (batch, seq_len, num_heads, head_dim) operand: strides in elements, head_dim contiguous (stride 1).
struct AttentionTensor {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t seq_stride = 0;
  int64_t head_stride = 0;
};

// out = softmax(softmax_scale * query key^T + mask) value; lse = natural log of the sum of exp of the masked scores.
// Query head h reads key/value head h / (num_heads / num_kv_heads).
// A query that sees no key gets out 0 and lse -inf; what a query does not see never influences it, NaN included.
struct AttentionArgs {
  AttentionTensor query;  // (batch, seq_len_q, num_heads, head_dim)
  AttentionTensor key;    // (batch, seq_len_k, num_kv_heads, head_dim)
  AttentionTensor value;  // (batch, seq_len_k, num_kv_heads, head_dim)
  AttentionTensor out;    // (batch, seq_len_q, num_heads, head_dim)
  void* lse;              // (batch, num_heads, seq_len_q) contiguous; f64 for f64 inputs, else f32
  int64_t batch;
  int64_t seq_len_q;
  int64_t seq_len_k;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  DType dtype;
  double softmax_scale;
  bool causal = false;                  // bottom-right aligned: query i sees key j when j <= i + seq_len_k - seq_len_q
  int64_t window_left = -1;             // -1: unlimited
  int64_t window_right = -1;            // -1: unlimited
  double softcap = 0;                   // 0: off
  const float* alibi_slopes = nullptr;  // (num_heads)
  double dropout_p = 0;
  uint64_t dropout_seed = 0;
  uint64_t dropout_offset = 0;
  const int32_t* cu_seqlens_q = nullptr;  // (batch + 1): packed sequences, query is (total_q, num_heads, head_dim)
  const int32_t* cu_seqlens_k = nullptr;
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
  AttentionTensor dquery;
  AttentionTensor dkey;       // summed over the query heads of a group
  AttentionTensor dvalue;     // summed over the query heads of a group
  void* workspace = nullptr;  // flash_attention_backward_workspace(args) bytes, aligned to 64
  size_t workspace_bytes = 0;
};

// Query i sees key j when i + lower <= j <= i + upper.
struct AttentionBand {
  int64_t lower = no_band_lower;
  int64_t upper = no_band_upper;
};

inline AttentionBand visible_band(bool causal, int64_t seq_len_q, int64_t seq_len_k) {
  return {.upper = causal ? seq_len_k - seq_len_q : no_band_upper};
}

// The softmax of attention with stored matrices, not yet divided by its sums: weights = exp(scale * scores - row
// maximum) and sums = their sum, over the band of each row. Outside of it weights are 0 and scores never looked at;
// a row that sees nothing has sum 1. Products of weights are divided afterwards, which keeps means of values exact.
struct AttentionSoftmaxArgs {
  void* weights;       // (num_matrices, seq_len_q, seq_len_k), dtype
  void* sums;          // (num_matrices, seq_len_q), accumulate_dtype(dtype)
  const void* scores;  // as weights, accumulate_dtype(dtype); may be weights' memory when that is dtype
  int64_t num_matrices;
  int64_t seq_len_q;
  int64_t seq_len_k;
  DType dtype;
  double scale;
  AttentionBand band = {};
};

// dscores = scale * P * (dP - rowsum(P * dP)) with P = weights / sums, within the band; 0 outside of it. The weights
// are replaced by P, which the gradient of value is a product of.
struct AttentionSoftmaxGradArgs {
  void* dscores;               // (num_matrices, seq_len_q, seq_len_k), dtype
  void* weights;               // the same shape, dtype
  const void* sums;            // (num_matrices, seq_len_q), accumulate_dtype(dtype)
  const void* dprobabilities;  // as dscores, accumulate_dtype(dtype); may be dscores' memory when that is dtype
  int64_t num_matrices;
  int64_t seq_len_q;
  int64_t seq_len_k;
  DType dtype;
  double scale;
  AttentionBand band = {};
};

// Throws, naming the option, unless tiled attention can compute this case on `device`.
void require_attention_support(const char* operation, const AttentionArgs& args, Device device);

// Bytes of scratch memory a call needs on `device` with the current num_threads().
size_t flash_attention_forward_workspace(const AttentionArgs& args, Device device);
size_t flash_attention_backward_workspace(const AttentionGradArgs& args, Device device);

STROBE_KERNEL(flash_attention_forward, AttentionArgs)
STROBE_KERNEL(flash_attention_backward, AttentionGradArgs)
STROBE_KERNEL(attention_softmax_forward, AttentionSoftmaxArgs)
STROBE_KERNEL(attention_softmax_backward, AttentionSoftmaxGradArgs)

}  // namespace strobe::kernels
