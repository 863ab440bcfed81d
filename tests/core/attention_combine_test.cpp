// attention_combine: attention over two sets of keys, merged, is attention over all of them.
#include <numbers>

#include "support/attention_problem.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

// The outputs of attention over the first `split` keys and over the others, merged. Causal: the diagonal ends at the
// last key of all, so the first keys have it `seq_len_k - split` to the right of their own.
AttentionOutputs run_in_two(const AttentionProblem& problem, AttentionFunction attention, int64_t split, bool causal) {
  const Tensor q = copy_of(problem.query).set_requires_grad(), k = copy_of(problem.key).set_requires_grad(),
               v = copy_of(problem.value).set_requires_grad();
  const int64_t seq_k = k.dim(1);
  const AttentionResult a =
      attention(q, slice(k, 1, 0, split), slice(v, 1, 0, split), {.window_right = causal ? seq_k - split : -1});
  const AttentionResult b = attention(q, slice(k, 1, split, seq_k), slice(v, 1, split, seq_k), {.causal = causal});
  return problem.differentiate(attention_combine(a.out, a.lse, b.out, b.lse), q, k, v);
}

Tensor minus_infinity(const Shape& shape, DType dtype) {
  return full(shape, -INFINITY, dtype == DType::f64 ? DType::f64 : DType::f32);
}

}  // namespace

TEST_CASE("attention_combine: two parts of the keys give attention over all keys, with its gradients") {
  seed(1);
  for_each_path([](AttentionFunction attention, DType dtype) {
    for (const bool causal : {false, true}) {
      // More queries than keys: causal rows see nothing, or only keys of the first part.
      for (const auto& [seq_q, seq_k] : {std::pair<int64_t, int64_t>{20, 20}, {7, 40}, {60, 30}, {140, 270}}) {
        const AttentionProblem problem = AttentionProblem(1, seq_q, seq_k, 2, 1, 8, dtype).with_random_dlse();
        const AttentionOutputs expected = problem.reference({.causal = causal});
        for (const int64_t split : {int64_t{0}, int64_t{1}, seq_k / 2, seq_k}) {
          INFO("causal ", causal, " seq_len ", seq_q, " and ", seq_k, " split at ", split);
          check_close(run_in_two(problem, attention, split, causal), expected, tolerance(dtype));
        }
      }
    }
  });
}

TEST_CASE("attention_combine: packed sequences") {
  seed(2);
  for_each_path([](AttentionFunction attention, DType dtype) {
    const AttentionProblem problem = AttentionProblem::packed(20, 30, 2, 1, 8, dtype);
    const Tensor other_key = random_tensor({10, 1, 8}, dtype), other_value = random_tensor({10, 1, 8}, dtype);
    const Tensor queries = cu_seqlens({6, 0, 9, 4});
    const AttentionResult a = attention(problem.query, problem.key, problem.value,
                                        {.cu_seqlens_q = queries, .cu_seqlens_k = cu_seqlens({10, 5, 0, 8})});
    const AttentionResult b = attention(problem.query, other_key, other_value,
                                        {.cu_seqlens_q = queries, .cu_seqlens_k = cu_seqlens({4, 0, 0, 6})});
    const AttentionResult merged = attention_combine(a.out, a.lse, b.out, b.lse);
    const auto joined = [](const Tensor& x, const Tensor& y) {
      return concat({slice(x, 0, 0, 10), slice(y, 0, 0, 4), slice(x, 0, 10, 23), slice(y, 0, 4, 10)}, 0);
    };
    const AttentionProblem whole(problem.query, joined(problem.key, other_key), joined(problem.value, other_value),
                                 problem.dout);
    const AttentionOutputs expected =
        whole.reference({.cu_seqlens_q = queries, .cu_seqlens_k = cu_seqlens({14, 5, 0, 14})});
    CHECK(relative_difference(merged.out, expected.out) <= tolerance(dtype));
    CHECK(relative_difference(merged.lse, expected.lse) <= tolerance(dtype));
  });
}

TEST_CASE("attention_combine, exact: equal halves, and a side without keys") {
  seed(3);
  for (const DType dtype : all_dtypes) {
    INFO(std::string(name_of(dtype)));
    const Shape shape{2, 9, 3, 4}, lse_shape{2, 3, 9};
    const Tensor none = minus_infinity(lse_shape, dtype), zero = zeros(shape, dtype);
    const Tensor out = random_tensor(shape, dtype), lse = random_tensor(lse_shape, none.dtype());

    const AttentionResult equal =
        attention_combine(full(shape, 1, dtype), zeros_like(lse), full(shape, 3, dtype), zeros_like(lse));
    check_exact(equal.out, 2.0);
    check_exact(equal.lse, std::numbers::ln2);
    CHECK(equal.out.dtype() == dtype);
    CHECK(equal.lse.dtype() == none.dtype());

    const AttentionResult left = attention_combine(out, lse, zero, none);
    CHECK(same_bits(left.out, out));
    CHECK(same_bits(left.lse, lse));
    const AttentionResult right = attention_combine(zero, none, out, lse);
    CHECK(same_bits(right.out, out));
    CHECK(same_bits(right.lse, lse));
    const AttentionResult neither = attention_combine(zero, none, zero, none);
    check_exact(neither.out, 0.0);
    check_exact(neither.lse, -INFINITY);

    const double huge = 1e5;  // exp of either alone overflows or vanishes
    for (const double sign : {-1.0, 1.0}) {
      const AttentionResult large =
          attention_combine(full(shape, 1, dtype), full(lse_shape, sign * huge, none.dtype()), full(shape, 3, dtype),
                            full(lse_shape, sign * huge, none.dtype()));
      check_exact(large.out, 2.0);
      check_exact(large.lse, sign * huge + std::numbers::ln2);
      const AttentionResult one_sided =
          attention_combine(out, full(lse_shape, sign * huge, none.dtype()), out, full(lse_shape, 0, none.dtype()));
      CHECK(same_bits(one_sided.out, out));
    }
  }
}

TEST_CASE("attention_combine: a side without keys takes no part in any gradient") {
  seed(4);
  for (const DType dtype : all_dtypes) {
    INFO(std::string(name_of(dtype)));
    const Shape shape{2, 9, 3, 4}, lse_shape{2, 3, 9};
    const Tensor none = minus_infinity(lse_shape, dtype), dout = random_tensor(shape, dtype),
                 dlse = random_tensor(lse_shape, none.dtype());
    struct Gradients {
      Tensor out_a, lse_a, out_b, lse_b;
    };
    const auto gradients = [&](const Tensor& lse_a, const Tensor& lse_b) {
      const Tensor a = random_tensor(shape, dtype).set_requires_grad(), la = copy_of(lse_a).set_requires_grad(),
                   b = random_tensor(shape, dtype).set_requires_grad(), lb = copy_of(lse_b).set_requires_grad();
      const AttentionResult merged = attention_combine(a, la, b, lb);
      (sum(cast(merged.out, DType::f64) * dout.to(DType::f64)) +
       sum(cast(merged.lse, DType::f64) * dlse.to(DType::f64)))
          .backward();
      return Gradients{a.grad(), la.grad(), b.grad(), lb.grad()};
    };
    const Gradients left = gradients(zeros_like(dlse), none), right = gradients(none, zeros_like(dlse));
    CHECK(same_bits(left.out_a, dout));
    CHECK(same_bits(right.out_b, dout));
    CHECK(relative_difference(left.lse_a, dlse) <= tolerance(dtype));
    CHECK(relative_difference(right.lse_b, dlse) <= tolerance(dtype));
    for (const Tensor& x : {left.out_b, left.lse_b, right.out_a, right.lse_a}) check_exact(x, 0.0);
    const Gradients neither = gradients(none, none);
    for (const Tensor& x : {neither.out_a, neither.lse_a, neither.out_b, neither.lse_b}) check_exact(x, 0.0);
  }
}

TEST_CASE("attention_combine: only one of its results need be differentiated") {
  seed(5);
  const Shape shape{1, 5, 2, 3}, lse_shape{1, 2, 5};
  const Tensor out_a = normal(shape), out_b = normal(shape), lse_b = normal(lse_shape);
  const auto lse_gradient = [&](bool through_out) {
    const Tensor lse_a = full(lse_shape, 0.5).set_requires_grad();
    const AttentionResult merged = attention_combine(out_a, lse_a, out_b, lse_b);
    through_out ? merged.out.backward(ones(shape)) : merged.lse.backward(ones(lse_shape));
    return lse_a.grad();
  };
  const Tensor weight = exp(full(lse_shape, 0.5) - attention_combine(out_a, full(lse_shape, 0.5), out_b, lse_b).lse);
  CHECK(relative_difference(lse_gradient(false), weight) <= 1e-6);
  const Tensor by_out = weight * (1 - weight) * transpose(sum(out_a - out_b, {3}), 1, 2);
  CHECK(relative_difference(lse_gradient(true), by_out) <= 1e-5);
}
