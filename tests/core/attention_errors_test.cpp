// Attention refuses what does not fit together or is not supported: by name, and before it allocates anything.
#include "support/compare.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

// The message of the error that both functions give, without the function's name; nothing was allocated for it.
std::string refusal(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionOptions& options = {}) {
  reset_peak_memory();
  const size_t before = memory_stats().peak;
  const std::string flash = error_of([&] { flash_attention(query, key, value, options); });
  const std::string standard = error_of([&] { standard_attention(query, key, value, options); });
  CHECK(memory_stats().peak == before);
  CHECK(flash.starts_with("flash_attention: "));
  CHECK(standard.starts_with("standard_attention: "));
  const std::string message = flash.substr(flash.find(": ") + 2);
  CHECK(message == standard.substr(standard.find(": ") + 2));
  return message;
}

}  // namespace

TEST_CASE("attention errors: operands that do not fit together") {
  const Tensor x = zeros({2, 5, 4, 8});
  CHECK(contains(refusal(Tensor(), x, x), "query is undefined"));
  CHECK(contains(refusal(x, Tensor(), x), "key is undefined"));
  CHECK(contains(refusal(x, x, Tensor()), "value is undefined"));
  CHECK(contains(refusal(zeros({2, 5, 4, 8}, DType::i32), x, x), "query of dtype i32"));
  CHECK(contains(refusal(x, zeros({2, 5, 4, 8}, DType::f64), x), "key of dtype f64"));
  CHECK(contains(refusal(x, x, zeros({2, 5, 4, 8}, DType::bf16)), "value of dtype bf16"));
  CHECK(contains(refusal(zeros({5, 4, 8}), x, x), "query (5, 4, 8)"));
  CHECK(contains(refusal(x, zeros({2, 5, 32}), zeros({2, 5, 32})), "key (2, 5, 32)"));
  CHECK(contains(refusal(x, x, zeros({2, 6, 4, 8})), "value (2, 6, 4, 8)"));
  CHECK(contains(refusal(x, zeros({3, 5, 4, 8}), zeros({3, 5, 4, 8})), "one batch size"));
  CHECK(contains(refusal(x, zeros({2, 5, 4, 9}), zeros({2, 5, 4, 9})), "one head_dim"));
  CHECK(contains(refusal(zeros({2, 5, 4, 0}), zeros({2, 5, 4, 0}), zeros({2, 5, 4, 0})), "head_dim of at least 1"));
  CHECK(
      contains(refusal(x, zeros({2, 5, 3, 8}), zeros({2, 5, 3, 8})), "num_heads 4 to be a multiple of num_kv_heads 3"));
  CHECK(contains(refusal(x, zeros({2, 5, 0, 8}), zeros({2, 5, 0, 8})), "multiple of num_kv_heads 0"));
  CHECK(contains(refusal(zeros({2, 5, 0, 8}), x, x), "num_heads 0"));
}

TEST_CASE("attention errors: options that make no sense or are not supported yet") {
  const Tensor x = zeros({2, 5, 4, 8});
  CHECK(contains(refusal(x, x, x, {.softmax_scale = NAN}), "softmax_scale nan"));
  CHECK(contains(refusal(x, x, x, {.softmax_scale = -INFINITY}), "softmax_scale -inf"));
  CHECK(contains(refusal(x, x, x, {.dropout_p = 1}), "dropout_p 1"));
  CHECK(contains(refusal(x, x, x, {.dropout_p = -0.1}), "dropout_p -0.1"));
  CHECK(contains(refusal(x, x, x, {.dropout_p = NAN}), "dropout_p nan"));
  CHECK(contains(refusal(x, x, x, {.softcap = -1}), "softcap -1"));
  CHECK(contains(refusal(x, x, x, {.window_left = -2}), "window_left -2"));
  CHECK(contains(refusal(x, x, x, {.window_left = 3}), "sliding windows are not supported yet"));
  CHECK(contains(refusal(x, x, x, {.window_right = 0}), "sliding windows are not supported yet"));
  CHECK(contains(refusal(x, x, x, {.softcap = 30}), "softcap is not supported yet"));
  CHECK(contains(refusal(x, x, x, {.alibi_slopes = ones({4})}), "ALiBi is not supported yet"));
  CHECK(contains(refusal(x, x, x, {.dropout_p = 0.1}), "dropout is not supported yet"));
  CHECK(contains(refusal(x, x, x, {.kernel = AttentionKernel::mma}), "kernel mma"));
  CHECK(contains(refusal(x, x, x, {.kernel = AttentionKernel::hopper}), "kernel hopper"));
  const Tensor starts = zeros({3}, DType::i32), packed = zeros({10, 4, 8});
  CHECK(contains(refusal(packed, packed, packed, {.cu_seqlens_q = starts, .cu_seqlens_k = starts}), "cu_seqlens"));
  CHECK(flash_attention(x, x, x, {.kernel = AttentionKernel::portable, .deterministic = false}).size() == x.size());
}

TEST_CASE("attention errors: packed queries, keys and values") {
  const auto message = [](const Tensor& qkv, int64_t num_heads, const AttentionOptions& options = {}) {
    const std::string text = error_of([&] { flash_attention_qkvpacked(qkv, num_heads, options); });
    CHECK(text.starts_with("flash_attention_qkvpacked: "));
    return text;
  };
  CHECK(contains(message(Tensor(), 2), "qkv is undefined"));
  CHECK(contains(message(zeros({2, 5, 24}, DType::i64), 2), "dtype i64"));
  CHECK(contains(message(zeros({2, 5, 24}), 0), "num_heads 0"));
  CHECK(contains(message(zeros({2, 5, 24}), -1), "num_heads -1"));
  CHECK(contains(message(zeros({2, 5, 24}), 5), "qkv (2, 5, 24) given for 5 heads"));
  CHECK(contains(message(zeros({2, 5, 0}), 5), "qkv (2, 5, 0)"));
  CHECK(contains(message(zeros({2, 5, 25}), 1), "qkv (2, 5, 25)"));
  CHECK(contains(message(zeros({2, 24}), 2), "qkv (2, 24)"));
  CHECK(contains(message(zeros({2, 5, 2, 2, 4}), 2), "qkv (2, 5, 2, 2, 4)"));
  CHECK(contains(message(zeros({2, 5, 3, 2, 4}), 4), "qkv (2, 5, 3, 2, 4) given for 4 heads"));
  CHECK(contains(message(zeros({2, 5, 24}), 2, {.softcap = 5}), "softcap 5"));
}
