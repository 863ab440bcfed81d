// Attention for Hopper GPUs, as attention_hopper_forward.cu and _backward.cu offer it, and what both passes ask of a
// case.
#pragma once

#include <string>

#include "strobe/kernels/attention.h"

namespace strobe::kernels::cuda {

// Axes of operands in memory: packed tensors have no batch axis.
struct HopperRows {
  int64_t batch;
  int64_t queries;
  int64_t keys;

  explicit HopperRows(const AttentionArgs& args) : batch(args.batch), queries(args.seq_len_q), keys(args.seq_len_k) {
    if (args.cu_seqlens_q != nullptr) {
      batch = 1;
      queries = args.total_q;
      keys = args.total_k;
    }
  }
};

// Why neither pass computes a case on a GPU; empty if each of them may.
std::string hopper_attention_refusal(const AttentionArgs& args, Device device);

void hopper_attention_forward(const AttentionArgs& args, const Stream& stream);

// Why it does not compute a case on a GPU; empty if it does.
std::string hopper_attention_forward_refusal(const AttentionArgs& args, Device device);
AttentionTile hopper_attention_forward_tile(const AttentionArgs& args, Device device);

void hopper_attention_backward(const AttentionGradArgs& args, const Stream& stream);
size_t hopper_attention_backward_workspace(const AttentionGradArgs& args);
std::string hopper_attention_backward_refusal(const AttentionArgs& args, Device device);
// Why it cannot read a dout that the forward pass knows nothing of; empty if it can.
std::string hopper_attention_dout_refusal(const AttentionGradArgs& args);
AttentionTile hopper_attention_backward_tile(const AttentionArgs& args, Device device);

}  // namespace strobe::kernels::cuda
