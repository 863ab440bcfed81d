// What every attention path accepts as options.
#include "strobe/kernels/attention.h"

namespace strobe::kernels {

void require_attention_options(const char* operation, const AttentionArgs& args) {
  constexpr double largest = 1e30;  // with its inverse well within f32
  STROBE_CHECK(args.head_dim >= 1 && args.head_dim <= max_attention_head_dim, operation, ": head_dim ", args.head_dim,
               " given, expected 1 to ", max_attention_head_dim);
  STROBE_CHECK(std::abs(args.softmax_scale) <= largest, operation, ": softmax_scale ", args.softmax_scale,
               " given, expected a number of magnitude at most ", largest);
  STROBE_CHECK(args.window_left >= -1, operation, ": window_left ", args.window_left,
               " given, expected a size, or -1 for no limit");
  STROBE_CHECK(args.window_right >= -1, operation, ": window_right ", args.window_right,
               " given, expected a size, or -1 for no limit");
  STROBE_CHECK(args.softcap == 0 || (args.softcap >= 1 / largest && args.softcap <= largest), operation, ": softcap ",
               args.softcap, " given, expected 0 for none or a number from ", 1 / largest, " to ", largest);
  STROBE_CHECK(args.dropout_p >= 0 && args.dropout_p < 1 && AttentionDropout(args.dropout_p, 0, 0).keep_below > 0,
               operation, ": dropout_p ", args.dropout_p,
               " given, expected 0 to 255/256, for not all is to be dropped");
  STROBE_CHECK((args.cu_seqlens_q == nullptr) == (args.cu_seqlens_k == nullptr), operation, ": cu_seqlens_",
               args.cu_seqlens_q == nullptr ? 'q' : 'k', " null given, expected both cu_seqlens or neither");
}

}  // namespace strobe::kernels
