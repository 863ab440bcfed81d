// The tiles that attention says it works in, from which its bytes are counted.
#include "strobe/kernels/attention.h"
#include "support/compare.h"
#include "support/gpu.h"

using namespace strobe;
using namespace strobe::kernels;
using namespace strobe::testing;

namespace {

AttentionArgs args_of(DType dtype, int64_t head_dim) {
  return {.query = {},
          .key = {},
          .value = {},
          .out = {},
          .lse = nullptr,
          .batch = 1,
          .seq_len_q = 4096,
          .seq_len_k = 4096,
          .num_heads = 8,
          .num_kv_heads = 8,
          .head_dim = head_dim,
          .dtype = dtype,
          .softmax_scale = 1};
}

}  // namespace

TEST_CASE("attention tile: only a GPU has one") {
  const std::string message = error_of([] { attention_tile(args_of(DType::f32, 64), false, Device::cpu()); });
  CHECK(contains(message, "device cpu given, expected a GPU"));
}

TEST_CASE("attention tile: both passes, every dtype and head_dim; of the kernel that is asked for" * needs_gpu()) {
  const auto is_whole = [](int64_t size) { return size >= 8 && size <= 256 && size % 8 == 0; };
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    for (const int64_t head_dim : {1, 32, 64, 96, 128, 192, 256}) {
      for (const bool backward : {false, true}) {
        CAPTURE(head_dim);
        CAPTURE(backward);
        AttentionArgs args = args_of(dtype, head_dim);
        const AttentionTile tile = attention_tile(args, backward, Device::cuda());
        CHECK(is_whole(tile.queries));
        CHECK(is_whole(tile.keys));
        args.kernel = AttentionKernel::portable;
        const AttentionTile portable = attention_tile(args, backward, Device::cuda());
        CHECK(is_whole(portable.queries));
        CHECK(is_whole(portable.keys));
        // Tensor cores need the larger tiles.
        CHECK(portable.queries * portable.keys <= tile.queries * tile.keys);
      }
    }
  }
}
