// Attention refuses what does not fit together or makes no sense: by name, and before it allocates anything.
#include "support/attention_problem.h"

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
  CHECK(contains(refusal(zeros({2, 5, 4, 257}), zeros({2, 5, 4, 257}), zeros({2, 5, 4, 257})),
                 "head_dim of at most 256"));
  CHECK(
      contains(refusal(x, zeros({2, 5, 3, 8}), zeros({2, 5, 3, 8})), "num_heads 4 to be a multiple of num_kv_heads 3"));
  CHECK(contains(refusal(x, zeros({2, 5, 0, 8}), zeros({2, 5, 0, 8})), "multiple of num_kv_heads 0"));
  CHECK(contains(refusal(zeros({2, 5, 0, 8}), x, x), "num_heads 0"));
}

TEST_CASE("attention errors: options that make no sense") {
  const Tensor x = zeros({2, 5, 4, 8});
  CHECK(contains(refusal(x, x, x, {.softmax_scale = NAN}), "softmax_scale nan"));
  CHECK(contains(refusal(x, x, x, {.softmax_scale = -INFINITY}), "softmax_scale -inf"));
  CHECK(contains(refusal(x, x, x, {.softmax_scale = 1e31}), "softmax_scale 1e+31"));
  CHECK(contains(refusal(x, x, x, {.softcap = -1}), "softcap -1"));
  CHECK(contains(refusal(x, x, x, {.softcap = NAN}), "softcap nan"));
  CHECK(contains(refusal(x, x, x, {.softcap = 1e-31}), "softcap 1e-31"));
  CHECK(contains(refusal(x, x, x, {.softcap = 1e31}), "softcap 1e+31"));
  CHECK(contains(refusal(x, x, x, {.softcap = INFINITY}), "softcap inf"));
  CHECK(contains(refusal(x, x, x, {.window_left = -2}), "window_left -2"));
  CHECK(contains(refusal(x, x, x, {.window_right = -7}), "window_right -7"));
  CHECK(contains(refusal(x, x, x, {.dropout_p = 1}), "dropout_p 1"));
  CHECK(contains(refusal(x, x, x, {.dropout_p = -0.1}), "dropout_p -0.1"));
  CHECK(contains(refusal(x, x, x, {.dropout_p = NAN}), "dropout_p nan"));
  CHECK(contains(refusal(x, x, x, {.dropout_p = 0.999}), "dropout_p 0.999"));  // keeps nothing in steps of 1 / 256
  CHECK(contains(refusal(x, x, x, {.alibi_slopes = ones({3})}), "alibi_slopes (3)"));
  CHECK(contains(refusal(x, x, x, {.alibi_slopes = ones({4, 1})}), "alibi_slopes (4, 1)"));
  CHECK(contains(refusal(x, x, x, {.alibi_slopes = ones({4}, DType::f64)}), "alibi_slopes (4) of dtype f64"));
  CHECK(contains(refusal(x, x, x, {.kernel = AttentionKernel::mma}), "kernel mma"));
  CHECK(contains(refusal(x, x, x, {.kernel = AttentionKernel::hopper}), "kernel hopper"));
  CHECK(flash_attention(x, x, x, {.kernel = AttentionKernel::portable, .deterministic = false}).size() == x.size());
}

TEST_CASE("attention errors: slopes and sequence starts on another device" * doctest::skip(!built_with_cuda)) {
  if (!cuda_available()) {
    MESSAGE("no GPU here: nothing shown");
    return;
  }
  const Tensor x = zeros({2, 5, 4, 8}), packed = zeros({10, 4, 8});
  CHECK(contains(refusal(x, x, x, {.alibi_slopes = ones({4}).to(Device::cuda())}), "alibi_slopes on cuda"));
  const Tensor starts = cu_seqlens({4, 6}), away = starts.to(Device::cuda());
  CHECK(contains(refusal(packed, packed, packed, {.cu_seqlens_q = away, .cu_seqlens_k = starts}), "cu_seqlens_q on"));
  CHECK(contains(refusal(packed, packed, packed, {.cu_seqlens_q = starts, .cu_seqlens_k = away}), "cu_seqlens_k on"));
}

TEST_CASE("attention errors: options that would be without effect") {
  const Tensor x = zeros({2, 5, 4, 8});
  CHECK(contains(refusal(x, x, x, {.alibi_slopes = ones({4}).set_requires_grad()}), "alibi_slopes that require"));
  CHECK(contains(refusal(x, x, x, {.max_seq_len_q = 5}), "max_seq_len_q 5 and max_seq_len_k -1 given without"));
}

TEST_CASE("attention errors: packed sequences") {
  const Tensor x = zeros({10, 4, 8}), longer = zeros({12, 4, 8});
  const Tensor starts = cu_seqlens({4, 6});
  const auto of = [](const std::vector<int32_t>& values) {
    return from_vector(values, {static_cast<int64_t>(values.size())});
  };
  const auto refuse = [&](const Tensor& starts_q, const Tensor& starts_k, int64_t max_q = -1, int64_t max_k = -1) {
    return refusal(
        x, longer, longer,
        {.cu_seqlens_q = starts_q, .cu_seqlens_k = starts_k, .max_seq_len_q = max_q, .max_seq_len_k = max_k});
  };
  CHECK(contains(refuse(starts, Tensor()), "cu_seqlens_q given without the other"));
  CHECK(contains(refuse(Tensor(), starts), "cu_seqlens_k given without the other"));
  CHECK(contains(refuse(starts.to(DType::i64), starts), "cu_seqlens_q (3) of dtype i64"));
  CHECK(contains(refuse(starts, starts.to(DType::f32)), "cu_seqlens_k (3) of dtype f32"));
  CHECK(contains(refuse(reshape(starts, {1, 3}), starts), "cu_seqlens_q (1, 3)"));
  CHECK(contains(refuse(starts, reshape(starts, {3, 1})), "cu_seqlens_k (3, 1)"));
  CHECK(contains(refuse(view_of(of({0, 9, 4, 9, 10}), {3}, {2}, 0), starts), "contiguous"));
  CHECK(contains(refuse(starts, of({0, 12})), "cu_seqlens_q (3) and cu_seqlens_k (2)"));
  CHECK(contains(refuse(of({}), of({})), "cu_seqlens_q (0)"));
  CHECK(contains(refuse(of({1, 4, 10}), starts), "cu_seqlens_q begins with 1"));
  CHECK(contains(refuse(starts, of({-1, 4, 10})), "cu_seqlens_k begins with -1"));
  CHECK(contains(refuse(of({0, 4, 3}), starts), "cu_seqlens_q decreases from 4 to 3"));
  CHECK(contains(refuse(starts, of({0, -1, 10})), "cu_seqlens_k decreases from 0 to -1"));
  CHECK(contains(refuse(of({0, 4, 11}), starts), "cu_seqlens_q ends with 11"));
  CHECK(contains(refuse(starts, of({0, 4, 13})), "cu_seqlens_k ends with 13"));
  CHECK(contains(refuse(of({0, 11, 10}), starts), "cu_seqlens_q decreases from 11 to 10"));
  CHECK(contains(refuse(starts, starts, 5), "longest sequence 5 given for cu_seqlens_q, expected at least 6"));
  CHECK(contains(refuse(starts, starts, 6, 0), "longest sequence 0 given for cu_seqlens_k, expected at least 6"));
  CHECK(contains(refuse(starts, starts, -2), "longest sequence -2 given for cu_seqlens_q"));
  const AttentionOptions fine{.cu_seqlens_q = starts, .cu_seqlens_k = starts};
  CHECK(contains(refusal(zeros({2, 5, 4, 8}), longer, longer, fine), "query (2, 5, 4, 8)"));
  CHECK(contains(refusal(x, zeros({2, 5, 4, 8}), zeros({2, 5, 4, 8}), fine), "key (2, 5, 4, 8)"));
  CHECK(contains(refusal(x, longer, x, fine), "value (10, 4, 8)"));
  CHECK(contains(refusal(x, zeros({12, 3, 8}), zeros({12, 3, 8}), fine), "num_kv_heads 3"));
  CHECK(contains(refusal(x, longer, longer), "query (10, 4, 8)"));  // without cu_seqlens there is a batch
  CHECK(flash_attention(x, longer, longer, fine).shape() == x.shape());
}

TEST_CASE("attention errors: attention_combine of what does not fit together") {
  const Tensor out = zeros({2, 5, 4, 8}), lse = zeros({2, 4, 5}), half = zeros({2, 5, 4, 8}, DType::bf16);
  const auto refuse = [](const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b) {
    reset_peak_memory();
    const size_t before = memory_stats().peak;
    const std::string message = error_of([&] { attention_combine(out_a, lse_a, out_b, lse_b); });
    CHECK(memory_stats().peak == before);
    CHECK(message.starts_with("attention_combine: "));
    return message;
  };
  CHECK(contains(refuse(Tensor(), lse, out, lse), "out_a is undefined"));
  CHECK(contains(refuse(out, Tensor(), out, lse), "lse_a is undefined"));
  CHECK(contains(refuse(out, lse, Tensor(), lse), "out_b is undefined"));
  CHECK(contains(refuse(out, lse, out, Tensor()), "lse_b is undefined"));
  CHECK(contains(refuse(out.to(DType::i32), lse, out, lse), "out_a of dtype i32"));
  CHECK(contains(refuse(out, lse, half, lse), "out_b of dtype bf16"));
  CHECK(contains(refuse(out, lse, zeros({2, 5, 4, 9}), lse), "out_b (2, 5, 4, 9)"));
  CHECK(contains(refuse(out, lse, zeros({10, 4, 8}), lse), "out_b (10, 4, 8)"));
  CHECK(contains(refuse(zeros({5, 8}), zeros({5}), zeros({5, 8}), zeros({5})), "out_a (5, 8)"));
  CHECK(contains(refuse(out, zeros({2, 5, 4}), out, zeros({2, 5, 4})), "lse (2, 5, 4)"));
  CHECK(contains(refuse(out, lse, out, zeros({2, 4, 6})), "lse (2, 4, 6)"));
  CHECK(contains(refuse(out, lse.to(DType::f64), out, lse), "lse_b of dtype f32"));
  CHECK(contains(refuse(out, lse.to(DType::f64), out, lse.to(DType::f64)), "of dtype f64"));
  CHECK(contains(refuse(half, lse.to(DType::bf16), half, lse.to(DType::bf16)), "of dtype bf16"));
  CHECK(attention_combine(half, lse, half, lse).out.dtype() == DType::bf16);
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
  CHECK(contains(message(zeros({2, 5, 3 * 257}), 1), "257"));
  CHECK(contains(message(zeros({2, 5, 24}), 2, {.softcap = -5}), "softcap -5"));
  CHECK(contains(message(zeros({2, 5, 24}), 2, {.alibi_slopes = ones({4})}), "alibi_slopes (4)"));
  const Tensor starts = cu_seqlens({4, 6});
  CHECK(contains(message(zeros({10, 24}), 2, {.cu_seqlens_q = starts}), "cu_seqlens_q given without the other"));
  CHECK(contains(message(zeros({2, 5, 24}), 2, {.cu_seqlens_q = starts, .cu_seqlens_k = starts}), "qkv (2, 5, 24)"));
  CHECK(contains(message(zeros({9, 24}), 2, {.cu_seqlens_q = starts, .cu_seqlens_k = starts}), "ends with 10"));
  CHECK(flash_attention_qkvpacked(zeros({2, 5, 24}), 2, {.softcap = 5}).shape() == Shape{2, 5, 2, 4});
}
