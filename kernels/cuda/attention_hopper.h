// Attention for Hopper GPUs, as attention_hopper_forward.cu and _backward.cu offer it.
#pragma once

#include <string>

#include "strobe/kernels/attention.h"

namespace strobe::kernels::cuda {

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
