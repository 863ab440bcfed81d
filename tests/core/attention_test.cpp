// flash_attention, flash_attention_qkvpacked and standard_attention against the definition and against each other.
#include "support/attention_problem.h"

using namespace strobe;
using namespace strobe::testing;

TEST_CASE("attention: standard equals the definition") {
  seed(3);
  for (const DType dtype : all_dtypes) {
    for (const bool causal : {false, true}) {
      const AttentionProblem problem(2, 40, 33, 4, 2, 12, dtype);
      check_close(problem.run(standard_attention_return_lse, {.causal = causal}), problem.reference({.causal = causal}),
                  tolerance(dtype));
    }
  }
}

TEST_CASE("attention: error at most twice that of unfused attention in 16 bits") {
  seed(4);
  const Tensor slopes = from_vector<float>({0.25f, 0.0625f}, {2});
  const AttentionOptions options_to_try[] = {{},
                                             {.causal = true},
                                             {.window_left = 20, .window_right = 10},
                                             {.softcap = 1.5},
                                             {.alibi_slopes = slopes},
                                             {.dropout_p = 0.25, .dropout_seed = 5}};
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (size_t option = 0; option < std::size(options_to_try); ++option) {
      for (const auto& [seq_q, seq_k, dim] :
           {std::tuple<int64_t, int64_t, int64_t>{64, 64, 64}, {150, 260, 32}, {33, 20, 8}}) {
        INFO(std::string(name_of(dtype)), " options ", option, " seq_len ", seq_q, " and ", seq_k);
        const AttentionProblem problem(1, seq_q, seq_k, 2, 1, dim, dtype);
        const AttentionOptions& options = options_to_try[option];
        const std::vector<Tensor> exact = problem.reference(options).all();
        const std::vector<Tensor> unfused = problem.reference(options, dtype).all();
        const std::vector<Tensor> tiled = problem.run(flash_attention_return_lse, options).all();
        for (size_t i = 0; i < 5; ++i) {
          INFO(AttentionOutputs::names[i]);
          CHECK(relative_difference(tiled[i], exact[i]) <= 2 * relative_difference(unfused[i], exact[i]) + 1e-6);
        }
      }
    }
  }
}

TEST_CASE("attention: lse is f32, f64 for f64 inputs, and asking for it changes no bit of the result") {
  seed(5);
  for (const DType dtype : all_dtypes) {
    const AttentionProblem problem(2, 30, 40, 4, 2, 8, dtype);
    const AttentionOptions options{.causal = true, .softcap = 3, .dropout_p = 0.2};
    const AttentionResult flash = flash_attention_return_lse(problem.query, problem.key, problem.value, options);
    const AttentionResult standard = standard_attention_return_lse(problem.query, problem.key, problem.value, options);
    CHECK(same_bits(flash.out, flash_attention(problem.query, problem.key, problem.value, options)));
    CHECK(same_bits(standard.out, standard_attention(problem.query, problem.key, problem.value, options)));
    for (const Tensor& lse : {flash.lse, standard.lse}) {
      CHECK(lse.dtype() == (dtype == DType::f64 ? DType::f64 : DType::f32));
      CHECK(lse.shape() == Shape{2, 4, 30});
    }
  }
}

TEST_CASE("attention: a gradient through lse alone") {
  seed(6);
  for_each_path([](AttentionFunction attention, DType dtype) {
    AttentionProblem problem(2, 150, 40, 2, 1, 8, dtype);
    problem.with_random_dlse();
    const Tensor q = copy_of(problem.query).set_requires_grad(), k = copy_of(problem.key).set_requires_grad(),
                 v = copy_of(problem.value).set_requires_grad();
    attention(q, k, v, {.softcap = 2}).lse.backward(problem.dlse);
    problem.dout = zeros(problem.dout.shape(), dtype);
    const AttentionOutputs expected = problem.reference({.softcap = 2});
    CHECK(relative_difference(q.grad(), expected.dquery) <= tolerance(dtype));
    CHECK(relative_difference(k.grad(), expected.dkey) <= tolerance(dtype));
    if (v.grad().defined()) check_exact(v.grad(), 0.0);
  });
}

TEST_CASE("attention: batch and heads are independent, bit for bit") {
  seed(8);
  for_each_path([](AttentionFunction attention, DType dtype) {
    const AttentionProblem problem = AttentionProblem(3, 150, 170, 4, 2, 8, dtype).with_random_dlse();
    const AttentionOptions options{.causal = true, .window_left = 60, .softcap = 4};
    const AttentionOutputs whole = problem.run(attention, options);
    const auto map = [](const AttentionOutputs& x, auto f, auto f_lse) {
      return AttentionOutputs{f(x.out), f_lse(x.lse), f(x.dquery), f(x.dkey), f(x.dvalue)};
    };
    for (int64_t b = 0; b < 3; ++b) {
      const auto single = [b](const Tensor& x) { return slice(x, 0, b, b + 1); };
      const AttentionProblem part(single(problem.query), single(problem.key), single(problem.value),
                                  single(problem.dout), single(problem.dlse));
      check_same_bits(part.run(attention, options), map(whole, single, single));
    }
    const auto swap_halves = [](const Tensor& x, int axis) {  // the two kv heads, with their query heads
      const int64_t half = x.dim(axis) / 2;
      return concat({slice(x, axis, half, 2 * half), slice(x, axis, 0, half)}, axis);
    };
    const auto swapped = [&](const Tensor& x) { return swap_halves(x, 2); };
    const auto swapped_lse = [&](const Tensor& x) { return swap_halves(x, 1); };
    const AttentionProblem other(swapped(problem.query), swapped(problem.key), swapped(problem.value),
                                 swapped(problem.dout), swapped_lse(problem.dlse));
    check_same_bits(other.run(attention, options), map(whole, swapped, swapped_lse));
  });
}

TEST_CASE("attention: more than 65,535 heads in all") {
  const Tensor value = reshape(arange(300 * 256, DType::f32), {300, 1, 256, 1});
  CHECK(same_bits(flash_attention(value, value, value), value));
  CHECK(same_bits(standard_attention(value, value, value), value));
}

TEST_CASE("attention: a gradient with strides 0") {
  seed(10);
  for_each_path([](AttentionFunction attention, DType dtype) {
    AttentionProblem problem(2, 20, 30, 2, 1, 8, dtype);
    problem.dout = expand(full({1, 1, 1, 1}, 2, dtype), {2, 20, 2, 8});
    const AttentionOutputs broadcast = problem.run(attention);
    problem.dout = full({2, 20, 2, 8}, 2, dtype);
    check_same_bits(broadcast, problem.run(attention));

    const Tensor q = copy_of(problem.query).set_requires_grad(), other = copy_of(q).set_requires_grad();
    attention(q, problem.key, problem.value, {})
        .lse.backward(expand(ones({1, 1, 1}, broadcast.lse.dtype()), {2, 2, 20}));
    attention(other, problem.key, problem.value, {}).lse.backward(ones({2, 2, 20}, broadcast.lse.dtype()));
    CHECK(same_bits(q.grad(), other.grad()));
  });
}

TEST_CASE("flash_attention_qkvpacked: equals flash_attention of the three parts, bit for bit") {
  seed(11);
  const Tensor slopes = from_vector<float>({0.5f, 0.125f}, {2});
  const AttentionOptions options_to_try[] = {{},
                                             {.causal = true},
                                             {.window_left = 40, .window_right = 20},
                                             {.softcap = 2},
                                             {.alibi_slopes = slopes},
                                             {.dropout_p = 0.3, .dropout_seed = 9},
                                             {.softmax_scale = -0.2,
                                              .causal = true,
                                              .window_left = 90,
                                              .softcap = 5,
                                              .alibi_slopes = slopes,
                                              .dropout_p = 0.1}};
  for (const DType dtype : all_dtypes) {
    for (const AttentionOptions& options : options_to_try) {
      for (const bool five_axes : {false, true}) {
        const Tensor qkv = random_tensor({2, 140, 3, 2, 12}, dtype).set_requires_grad();
        const Tensor parts = copy_of(qkv).set_requires_grad();
        const Tensor dout = random_tensor({2, 140, 2, 12}, dtype);
        const Tensor packed = flash_attention_qkvpacked(five_axes ? qkv : reshape(qkv, {2, 140, 72}), 2, options);
        packed.backward(dout);
        const auto part = [&](int64_t i) { return reshape(slice(parts, 2, i, i + 1), {2, 140, 2, 12}); };
        const Tensor separate = flash_attention(part(0), part(1), part(2), options);
        separate.backward(dout);
        CHECK(same_bits(packed, separate));
        CHECK(same_bits(qkv.grad(), parts.grad()));
      }
    }
  }
}

TEST_CASE("standard_attention: small gradients of many keys survive f16") {
  const Tensor zero = zeros({1, 2048, 1, 4}, DType::f16);
  const AttentionProblem problem(zero, zero, zero, full({1, 2048, 1, 4}, 1e-4, DType::f16));
  for (const double value : problem.run(standard_attention_return_lse).dvalue.to_vector<double>()) {
    CHECK(value == doctest::Approx(1e-4).epsilon(0.01));
  }
}
