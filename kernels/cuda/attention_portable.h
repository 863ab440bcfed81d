// The portable attention kernels, as attention.cu offers them: every case that AttentionArgs can describe.
#pragma once

#include "strobe/kernels/attention.h"

namespace strobe::kernels::cuda {

void portable_attention_forward(const AttentionArgs& args, const Stream& stream);
void portable_attention_backward(const AttentionGradArgs& args, const Stream& stream);
size_t portable_attention_backward_workspace(const AttentionGradArgs& args);

// Queries x keys of the tiles; backward the rows of the two kernels, for dquery and for dkey and dvalue.
AttentionTile portable_attention_forward_tile(const AttentionArgs& args, Device device);
AttentionTile portable_attention_backward_tile(const AttentionArgs& args, Device device);

}  // namespace strobe::kernels::cuda
