// What the attention operations share: their checks, and tensors as the kernels see them; internal to core/ops.
#pragma once

#include "strobe/core/ops.h"

namespace strobe {

// The options of a call whose arguments fit together, with max_seq_len filled in for packed sequences; throws
// otherwise, and allocates nothing before that.
AttentionOptions checked_attention(const char* name, const Tensor& query, const Tensor& key, const Tensor& value,
                                   const AttentionOptions& options);

// A (batch, seq_len, num_heads, head_dim) or packed (total, num_heads, head_dim) tensor as the kernels see it.
kernels::AttentionTensor attention_operand(const Tensor& x);

// The arguments of a checked call, but for out, lse and workspace.
kernels::AttentionArgs attention_args(const Tensor& query, const Tensor& key, const Tensor& value,
                                      const AttentionOptions& options);

// (batch, num_heads, seq_len_q), packed (num_heads, total_q).
Shape lse_shape(const Tensor& query);

// The gradient of `out`, zeros without memory of their own where none reached it.
Tensor dout_or_zeros(const Tensor& dout, const Tensor& out);

inline bool is_packed(const AttentionOptions& options) { return options.cu_seqlens_q.defined(); }

}  // namespace strobe
