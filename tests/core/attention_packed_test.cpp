// Packed sequences: each is attention over its own rows, bit for bit, whatever lies around it.
#include "support/attention_problem.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

std::vector<NamedOptions> every_option() {
  const Tensor slopes = from_vector<float>({0.5f, 0.125f, 0.25f, 0.0f}, {4});
  return {{"none", {}},
          {"causal", {.causal = true}},
          {"window", {.window_left = 20, .window_right = 6}},
          {"softcap", {.softcap = 2}},
          {"alibi_slopes", {.alibi_slopes = slopes}},
          {"all", {.softmax_scale = -0.6, .causal = true, .window_left = 40, .softcap = 3, .alibi_slopes = slopes}}};
}

// Rows of one sequence as a batch of one, and back.
Tensor alone(const Tensor& x, int64_t begin, int64_t end) {
  return reshape(slice(x, 0, begin, end), {1, end - begin, x.dim(1), x.dim(2)});
}

AttentionOptions packed_options(const AttentionOptions& options, const std::vector<int64_t>& q_lengths,
                                const std::vector<int64_t>& k_lengths) {
  AttentionOptions packed = options;
  packed.cu_seqlens_q = cu_seqlens(q_lengths);
  packed.cu_seqlens_k = cu_seqlens(k_lengths);
  return packed;
}

}  // namespace

TEST_CASE("attention, packed: one sequence equals the same one unpacked, bit for bit") {
  seed(1);
  for_each_path([](AttentionFunction attention, DType dtype) {
    for (NamedOptions& option : every_option()) {
      INFO(option.name);
      option.options.dropout_p = 0.25;
      option.options.dropout_seed = 6;
      for (const auto& [seq_q, seq_k] : {std::pair<int64_t, int64_t>{140, 150}, {33, 20}, {0, 5}, {5, 0}}) {
        AttentionProblem problem = AttentionProblem::packed(seq_q, seq_k, 4, 2, 8, dtype).with_random_dlse();
        const AttentionOutputs packed = problem.run(attention, packed_options(option.options, {seq_q}, {seq_k}));
        const AttentionProblem single(alone(problem.query, 0, seq_q), alone(problem.key, 0, seq_k),
                                      alone(problem.value, 0, seq_k), alone(problem.dout, 0, seq_q),
                                      reshape(problem.dlse, {1, 4, seq_q}));
        const AttentionOutputs got = single.run(attention, option.options);
        check_same_bits({alone(packed.out, 0, seq_q), reshape(packed.lse, {1, 4, seq_q}),
                         alone(packed.dquery, 0, seq_q), alone(packed.dkey, 0, seq_k), alone(packed.dvalue, 0, seq_k)},
                        got);
      }
    }
  });
}

TEST_CASE("attention, packed: each of several sequences equals it alone, bit for bit; padding gets 0") {
  seed(2);
  const std::vector<int64_t> q_lengths{5, 0, 140, 1, 0, 17, 3}, k_lengths{7, 4, 150, 0, 0, 17, 1};
  const int64_t padding = 6, total_q = 166 + padding, total_k = 179 + padding;
  for_each_path([&](AttentionFunction attention, DType dtype) {
    for (const NamedOptions& option : every_option()) {
      INFO(option.name);
      const AttentionProblem problem = AttentionProblem::packed(total_q, total_k, 4, 2, 8, dtype).with_random_dlse();
      const AttentionOutputs packed = problem.run(attention, packed_options(option.options, q_lengths, k_lengths));
      int64_t q = 0, k = 0;
      for (size_t b = 0; b < q_lengths.size(); ++b) {
        CAPTURE(b);
        const int64_t q_end = q + q_lengths[b], k_end = k + k_lengths[b];
        const auto lse_alone = [&](const Tensor& x) { return reshape(slice(x, 1, q, q_end), {1, 4, q_end - q}); };
        const AttentionProblem single(alone(problem.query, q, q_end), alone(problem.key, k, k_end),
                                      alone(problem.value, k, k_end), alone(problem.dout, q, q_end),
                                      lse_alone(problem.dlse));
        check_same_bits({alone(packed.out, q, q_end), lse_alone(packed.lse), alone(packed.dquery, q, q_end),
                         alone(packed.dkey, k, k_end), alone(packed.dvalue, k, k_end)},
                        single.run(attention, option.options));
        q = q_end;
        k = k_end;
      }
      check_exact(slice(packed.out, 0, q, total_q), 0.0);
      check_exact(slice(packed.lse, 1, q, total_q), -INFINITY);
      check_exact(slice(packed.dquery, 0, q, total_q), 0.0);
      check_exact(slice(packed.dkey, 0, k, total_k), 0.0);
      check_exact(slice(packed.dvalue, 0, k, total_k), 0.0);
    }
  });
}

TEST_CASE("attention, packed: sequences of one length equal the batch, bit for bit, with dropout too") {
  seed(3);
  for_each_path([](AttentionFunction attention, DType dtype) {
    for (NamedOptions& option : every_option()) {
      INFO(option.name);
      option.options.dropout_p = 0.5;
      const AttentionProblem batch = AttentionProblem(3, 40, 50, 4, 2, 8, dtype).with_random_dlse();
      const auto joined = [](const Tensor& x) { return reshape(x, {x.dim(0) * x.dim(1), x.dim(2), x.dim(3)}); };
      const auto joined_lse = [](const Tensor& x) { return reshape(transpose(x, 0, 1), {4, 120}); };
      const AttentionProblem packed(joined(batch.query), joined(batch.key), joined(batch.value), joined(batch.dout),
                                    joined_lse(batch.dlse));
      const AttentionOutputs expected = batch.run(attention, option.options);
      check_same_bits(packed.run(attention, packed_options(option.options, {40, 40, 40}, {50, 50, 50})),
                      {joined(expected.out), joined_lse(expected.lse), joined(expected.dquery), joined(expected.dkey),
                       joined(expected.dvalue)});
    }
  });
}

TEST_CASE("attention, packed: max_seq_len changes no bit") {
  seed(4);
  for_each_path([](AttentionFunction attention, DType dtype) {
    const AttentionProblem problem = AttentionProblem::packed(160, 170, 2, 1, 8, dtype).with_random_dlse();
    AttentionOptions options = packed_options({.causal = true}, {20, 130, 4}, {30, 120, 9});
    const AttentionOutputs looked_up = problem.run(attention, options);
    options.max_seq_len_q = 130;
    options.max_seq_len_k = 120;
    check_same_bits(problem.run(attention, options), looked_up);
    options.max_seq_len_q = 1000;
    options.max_seq_len_k = 999;
    check_same_bits(problem.run(attention, options), looked_up);
    options.max_seq_len_q = options.max_seq_len_k = std::numeric_limits<int64_t>::max();
    check_same_bits(problem.run(attention, options), looked_up);
  });
}

TEST_CASE("attention, packed: no sequence, and none with rows") {
  for_each_path([](AttentionFunction attention, DType dtype) {
    const AttentionProblem problem = AttentionProblem::packed(4, 3, 2, 1, 8, dtype).with_random_dlse();
    for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{}, {0}, {0, 0, 0}}) {
      const AttentionOutputs got = problem.run(attention, packed_options({}, lengths, lengths));
      check_exact(got.out, 0.0);
      check_exact(got.lse, -INFINITY);
      for (const Tensor& gradient : {got.dquery, got.dkey, got.dvalue}) check_exact(gradient, 0.0);
    }
  });
}

TEST_CASE("flash_attention_qkvpacked: packed sequences equal flash_attention of the three parts, bit for bit") {
  seed(5);
  const std::vector<int64_t> lengths{30, 0, 140, 7};
  for (const DType dtype : all_dtypes) {
    for (const bool five_axes : {false, true}) {
      const AttentionOptions options = packed_options({.causal = true, .dropout_p = 0.1}, lengths, lengths);
      const Tensor qkv = random_tensor({180, 3, 2, 12}, dtype).set_requires_grad();
      const Tensor parts = copy_of(qkv).set_requires_grad();
      const Tensor dout = random_tensor({180, 2, 12}, dtype);
      const Tensor packed = flash_attention_qkvpacked(five_axes ? qkv : reshape(qkv, {180, 72}), 2, options);
      packed.backward(dout);
      const auto part = [&](int64_t i) { return reshape(slice(parts, 1, i, i + 1), {180, 2, 12}); };
      const Tensor separate = flash_attention(part(0), part(1), part(2), options);
      separate.backward(dout);
      CHECK(same_bits(packed, separate));
      CHECK(same_bits(qkv.grad(), parts.grad()));
    }
  }
}
