// Attention for Hopper GPUs, as attention_hopper_forward.cu offers it.
#pragma once

#include <string>

#include "strobe/kernels/attention.h"

namespace strobe::kernels::cuda {

void hopper_attention_forward(const AttentionArgs& args, const Stream& stream);

// Why it does not compute a case on a GPU; empty if it does.
std::string hopper_attention_forward_refusal(const AttentionArgs& args, Device device);
AttentionTile hopper_attention_forward_tile(const AttentionArgs& args, Device device);

}  // namespace strobe::kernels::cuda
