// Attention cases whose answer is known without a reference, for both functions and every dtype.
#include <numbers>

#include "support/attention_problem.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

// (1, length, 1, 1): 0, 1, ..., length - 1.
Tensor counting(int64_t length, DType dtype) { return reshape(arange(length, dtype), {1, length, 1, 1}); }

// One head of query and key rows that are 0 and value rows 0, 1, 2, ...: every visible key has the same weight.
AttentionProblem uniform_problem(int64_t seq_q, int64_t seq_k, DType dtype) {
  return {zeros({1, seq_q, 1, 1}, dtype), zeros({1, seq_k, 1, 1}, dtype), counting(seq_k, dtype),
          ones({1, seq_q, 1, 1}, dtype)};
}

Tensor slopes_of(const std::vector<float>& slopes) {
  return from_vector(slopes, {static_cast<int64_t>(slopes.size())});
}

}  // namespace

TEST_CASE("attention, exact: one key, whatever the options") {
  seed(1);
  const AttentionOptions options_to_try[] = {{},
                                             {.causal = true},
                                             {.window_left = 0, .window_right = 0},
                                             {.softcap = 0.5},
                                             {.alibi_slopes = slopes_of({3})},
                                             {.softmax_scale = -7.0, .causal = true, .window_left = 3, .softcap = 20}};
  for_each_path([&](AttentionFunction attention, DType dtype) {
    for (const AttentionOptions& options : options_to_try) {
      const AttentionProblem problem(1, 1, 1, 1, 1, 16, dtype);
      const AttentionOutputs got = problem.run(attention, options);
      check_exact(got.out, problem.value.to_vector<double>());
      check_exact(got.dquery, 0.0);
      check_exact(got.dkey, 0.0);
      check_exact(got.dvalue, problem.dout.to_vector<double>());
    }
  });
}

TEST_CASE("attention, exact: query 0 gives the mean of what is visible") {
  for_each_path([](AttentionFunction attention, DType dtype) {
    for (const int64_t length : {7, 129}) {
      AttentionProblem problem = uniform_problem(length, length, dtype);
      problem.key = full({1, length, 1, 1}, 3, dtype);
      std::vector<double> halves, logarithms, shares(static_cast<size_t>(length));
      for (int64_t i = 0; i < length; ++i) {
        halves.push_back(static_cast<double>(i) / 2);
        logarithms.push_back(std::log(static_cast<double>(i + 1)));
        for (int64_t j = 0; j <= i; ++j) shares[static_cast<size_t>(j)] += 1 / static_cast<double>(i + 1);
      }
      const AttentionOutputs got = problem.run(attention, {.causal = true});
      check_exact(got.out, halves);
      check_exact(got.lse, logarithms);
      check_exact(got.dkey, 0.0);
      CHECK(relative_difference(got.dvalue.to_vector<double>(), shares) <= tolerance(dtype));
    }
    check_exact(uniform_problem(2, 5, dtype).run(attention, {.causal = true}).out, {1.5, 2});
  });
}

TEST_CASE("attention, exact: queries that see no key") {
  for_each_path([](AttentionFunction attention, DType dtype) {
    AttentionProblem problem = uniform_problem(5, 2, dtype);
    problem.value = from_vector<double>({10, 20}, {1, 2, 1, 1}).to(dtype);
    const AttentionOutputs got = problem.run(attention, {.causal = true});
    check_exact(got.out, {0, 0, 0, 10, 15});
    check_exact(got.dvalue, {1.5, 0.5});
    check_exact(got.lse, {-INFINITY, -INFINITY, -INFINITY, 0, std::numbers::ln2});
    for (const auto& [seq_q, seq_k] : {std::pair<int64_t, int64_t>{3, 0}, {0, 3}, {0, 0}}) {
      const AttentionOutputs none = AttentionProblem(2, seq_q, seq_k, 2, 1, 4, dtype).with_random_dlse().run(attention);
      check_exact(none.out, 0.0);
      check_exact(none.lse, -INFINITY);
      check_exact(none.dquery, 0.0);
      check_exact(none.dkey, 0.0);
      check_exact(none.dvalue, 0.0);
    }
    CHECK(AttentionProblem(0, 3, 3, 2, 1, 4, dtype).run(attention).out.size() == 0);
  });
}

TEST_CASE("attention, exact: a window of one key is a copy of the value aligned with the query") {
  seed(2);
  for_each_path([](AttentionFunction attention, DType dtype) {
    for (const auto& [seq_q, seq_k] : {std::pair<int64_t, int64_t>{150, 150}, {20, 300}, {300, 20}, {1, 7}, {7, 1}}) {
      INFO("seq_len ", seq_q, " and ", seq_k);
      AttentionProblem problem(1, seq_q, seq_k, 2, 2, 4, dtype);
      const AttentionOutputs got = problem.run(attention, {.window_left = 0, .window_right = 0});
      const int64_t shared = std::min(seq_q, seq_k);
      const auto tail = [&](const Tensor& x) { return slice(x, 1, x.dim(1) - shared, x.dim(1)); };
      const auto head = [&](const Tensor& x) { return slice(x, 1, 0, x.dim(1) - shared); };
      check_exact(tail(got.out), tail(problem.value).to_vector<double>());
      check_exact(tail(got.dvalue), tail(problem.dout).to_vector<double>());
      check_exact(head(got.out), 0.0);
      check_exact(head(got.dvalue), 0.0);
      check_exact(slice(got.lse, 2, 0, seq_q - shared), -INFINITY);
      check_exact(got.dquery, 0.0);
      check_exact(got.dkey, 0.0);
    }
  });
}

TEST_CASE("attention, exact: the mean of a window") {
  for_each_path([](AttentionFunction attention, DType dtype) {
    // Keys i - 2 to i + 4 around the diagonal, where all of them exist: the mean is i + 1, counted from the diagonal.
    const AttentionOutputs got = uniform_problem(200, 220, dtype).run(attention, {.window_left = 2, .window_right = 4});
    std::vector<double> middle;
    for (int64_t i = 0; i < 196; ++i) middle.push_back(static_cast<double>(i + 21));
    check_exact(slice(got.out, 1, 0, 196), middle);
    check_exact(slice(got.lse, 2, 0, 196), std::log(7.0));
    check_exact(slice(got.dvalue, 1, 0, 18), 0.0);
    CHECK(relative_difference(slice(got.dvalue, 1, 24, 214).to_vector<double>(), std::vector<double>(190, 1)) <=
          tolerance(dtype));
    // One of the two keys of each window ends a block of 128.
    check_exact(uniform_problem(2, 129, dtype).run(attention, {.window_left = 1, .window_right = 0}).out,
                {126.5, 127.5});
  });
}

TEST_CASE("attention, exact: windows that hide nothing more change no bit") {
  seed(3);
  constexpr int64_t largest = std::numeric_limits<int64_t>::max();
  for_each_path([](AttentionFunction attention, DType dtype) {
    for (const auto& [seq_q, seq_k] : {std::pair<int64_t, int64_t>{140, 140}, {60, 150}, {150, 60}}) {
      const AttentionProblem problem = AttentionProblem(1, seq_q, seq_k, 2, 1, 4, dtype).with_random_dlse();
      const AttentionOutputs all = problem.run(attention), causal = problem.run(attention, {.causal = true});
      check_same_bits(problem.run(attention, {.window_left = 209, .window_right = 209}), all);
      check_same_bits(problem.run(attention, {.window_left = largest, .window_right = largest}), all);
      check_same_bits(problem.run(attention, {.window_right = 0}), causal);
      check_same_bits(problem.run(attention, {.causal = true, .window_right = 17}), causal);
      check_same_bits(problem.run(attention, {.causal = true, .window_left = largest, .window_right = largest}),
                      causal);
    }
  });
}

TEST_CASE("attention, exact: options that are off change no bit") {
  seed(4);
  for_each_path([](AttentionFunction attention, DType dtype) {
    const AttentionProblem problem = AttentionProblem(2, 140, 150, 4, 2, 8, dtype).with_random_dlse();
    for (const bool causal : {false, true}) {
      const AttentionOutputs plain = problem.run(attention, {.causal = causal});
      check_same_bits(problem.run(attention, {.causal = causal, .softcap = 0}), plain);
      check_same_bits(problem.run(attention, {.causal = causal, .alibi_slopes = zeros({4})}), plain);
      check_same_bits(problem.run(attention, {.causal = causal, .dropout_seed = 3, .dropout_offset = 4}), plain);
      check_same_bits(problem.run(attention, {.causal = causal, .dropout_p = 0.0019, .dropout_seed = 3}), plain);
    }
  });
}

TEST_CASE("attention, exact: softcap on tiny and on huge scores") {
  seed(5);
  for_each_path([](AttentionFunction attention, DType dtype) {
    const AttentionProblem problem = AttentionProblem(1, 140, 150, 2, 1, 8, dtype).with_random_dlse();
    const double bound = dtype == DType::f64 ? 1e-14 : dtype == DType::f32 ? 1e-6 : tolerance(dtype);
    check_close(problem.run(attention, {.softcap = 1e9}), problem.run(attention), bound);
    check_close(problem.run(attention, {.softcap = 1e30}), problem.run(attention), bound);
    for (const double scale : {1.0, 1e30}) {
      const AttentionOutputs mean =
          uniform_problem(3, 9, dtype).run(attention, {.softmax_scale = scale, .softcap = 1e-30});
      check_exact(mean.out, 4.0);
      check_exact(mean.lse, std::log(9.0));
    }

    // Scores of +-2^20 become +-1: the weights are e and 1 / e, and the derivative of the cap is 0.
    const double e = std::numbers::e, sum = 2 * e + 2 / e;
    const AttentionProblem spikes(full({1, 1, 1, 1}, 1024, dtype),
                                  from_vector<double>({1024, -1024, 1024, -1024}, {1, 4, 1, 1}).to(dtype),
                                  ones({1, 4, 1, 1}, dtype), ones({1, 1, 1, 1}, dtype),
                                  ones({1, 1, 1}, dtype == DType::f64 ? DType::f64 : DType::f32));
    const AttentionOutputs got = spikes.run(attention, {.softmax_scale = 1.0, .softcap = 1});
    check_exact(got.out, 1.0);
    check_exact(got.lse, std::log(sum));
    check_exact(got.dquery, 0.0);
    check_exact(got.dkey, 0.0);
    check_exact(got.dvalue, {e / sum, 1 / e / sum, e / sum, 1 / e / sum});
  });
}

TEST_CASE("attention, exact: the derivative of a softcap keeps its digits where it is small") {
  for (const AttentionPath& path : attention_paths) {
    for (const double score : {1.0, 8.0, 9.5, 30.0}) {
      CAPTURE(path.name);
      CAPTURE(score);
      const auto gradient = [&](DType dtype) {
        const AttentionProblem problem(full({1, 1, 1, 1}, score, dtype), ones({1, 2, 1, 1}, dtype),
                                       from_vector<double>({1, 3}, {1, 2, 1, 1}).to(dtype), ones({1, 1, 1, 1}, dtype));
        return problem.run(path.function, {.softmax_scale = 1.0, .softcap = 1}).dkey.to_vector<double>();
      };
      const std::vector<double> exact = gradient(DType::f64), got = gradient(DType::f32);
      for (size_t j = 0; j < 2; ++j) {
        const double slope = 1 / std::pow(std::cosh(score), 2);
        CHECK(exact[j] == doctest::Approx((j == 0 ? -0.5 : 0.5) * slope * score).epsilon(1e-13));
        CHECK(got[j] == doctest::Approx(exact[j]).epsilon(1e-5));
      }
    }
  }
}

TEST_CASE("attention, exact: ALiBi of known weights") {
  seed(6);
  for_each_path([](AttentionFunction attention, DType dtype) {
    // Two keys at distances 1 and 0.
    AttentionProblem two = uniform_problem(1, 2, dtype);
    const AttentionOutputs got = two.run(attention, {.alibi_slopes = slopes_of({1})});
    const double near = 1 / (1 + std::exp(-1.0));
    check_exact(got.out, near);
    check_exact(got.lse, std::log1p(std::exp(-1.0)));
    check_exact(got.dvalue, {1 - near, near});
    // A slope of 1e5 leaves the key that is aligned with the query, one of -1e5 the farthest.
    const AttentionProblem problem(1, 140, 150, 2, 2, 4, dtype);
    const AttentionOutputs steep = problem.run(attention, {.causal = true, .alibi_slopes = slopes_of({1e5f, -1e5f})});
    const auto of_head = [](const Tensor& x, int64_t head) { return slice(x, 2, head, head + 1); };
    check_exact(of_head(steep.out, 0), of_head(slice(problem.value, 1, 10, 150), 0).to_vector<double>());
    check_exact(of_head(slice(steep.dvalue, 1, 10, 150), 0), of_head(problem.dout, 0).to_vector<double>());
    check_exact(of_head(slice(steep.dvalue, 1, 0, 10), 0), 0.0);
    const std::vector<double> first = of_head(slice(problem.value, 1, 0, 1), 1).to_vector<double>();
    for (int64_t i = 0; i < 140; ++i) check_exact(of_head(slice(steep.out, 1, i, i + 1), 1), first);
    check_exact(of_head(slice(steep.dvalue, 1, 1, 150), 1), 0.0);
    check_exact(steep.dquery, 0.0);
    check_exact(steep.dkey, 0.0);
  });
}

TEST_CASE("attention, exact: large logits, forward and backward") {
  seed(7);
  for_each_path([](AttentionFunction attention, DType dtype) {
    const auto spike = [&](int64_t seq_len, double size) {
      const Tensor x = zeros({1, seq_len, 1, 128}, dtype);
      slice(x, 3, 0, 1).copy_from(full({1, seq_len, 1, 1}, size, dtype));
      return x;
    };
    const AttentionProblem problem(spike(1, 512), spike(4, -1024), ones({1, 4, 1, 128}, dtype),
                                   ones({1, 1, 1, 128}, dtype));
    const AttentionOutputs got = problem.run(attention);
    check_exact(got.out, 1.0);
    check_exact(got.dquery, 0.0);
    check_exact(got.dkey, 0.0);
    check_exact(got.dvalue, 0.25);
  });
  // Logits of +-1e5 that differ by a few units; the large part is in a dimension of its own.
  for (const AttentionPath& path : attention_paths) {
    for (const double scale : {-1.0, 0.3}) {
      for (const AttentionOptions& option :
           {AttentionOptions{}, {.causal = true}, {.window_left = 30, .window_right = 60}, {.dropout_p = 0.5}}) {
        INFO(path.name, " scale ", scale, " causal ", option.causal, " window_left ", option.window_left);
        const int64_t length = 200;
        std::vector<double> query, key;
        for (int64_t i = 0; i < length; ++i) {
          query.insert(query.end(), {1.0, static_cast<double>(i % 3 - 1)});
          key.insert(key.end(), {std::round(100000.0 / scale), static_cast<double>(i % 7 - 3)});
        }
        AttentionProblem problem(1, length, length, 1, 1, 2, DType::f32);
        problem.query = from_vector(query, {1, length, 1, 2}).to(DType::f32);
        problem.key = from_vector(key, {1, length, 1, 2}).to(DType::f32);
        AttentionOptions options = option;
        options.softmax_scale = static_cast<float>(scale);
        const AttentionOutputs outputs = problem.run(path.function, options), expected = problem.reference(options);
        CHECK(relative_difference(outputs.out, expected.out) <= 1e-6);
        CHECK(relative_difference(outputs.lse, expected.lse) <= 1e-7);
        CHECK(relative_difference(outputs.dkey, expected.dkey) <= 2e-6);
        CHECK(relative_difference(outputs.dvalue, expected.dvalue) <= 2e-6);
      }
    }
  }
}

TEST_CASE("attention, exact: a scale of 0 and of either sign") {
  seed(8);
  for_each_path([](AttentionFunction attention, DType dtype) {
    AttentionProblem problem(2, 5, 8, 2, 1, 4, dtype);
    problem.value = reshape(arange(8, dtype), {1, 8, 1, 1}) + zeros({2, 8, 1, 4}, dtype);
    for (const double softcap : {0.0, 2.0}) {
      const AttentionOutputs mean = problem.run(attention, {.softmax_scale = 0.0, .softcap = softcap});
      check_exact(mean.out, 3.5);
      check_exact(mean.lse, std::log(8.0));
      check_exact(mean.dquery, 0.0);
      check_exact(mean.dkey, 0.0);
    }
    problem.value = random_tensor({2, 8, 1, 4}, dtype);
    problem.with_random_dlse();
    for (AttentionOptions options : {AttentionOptions{.causal = true},
                                     {.window_left = 2, .window_right = 1},
                                     {.softcap = 1.5},
                                     {.alibi_slopes = slopes_of({0.5f, 2})},
                                     {.dropout_p = 0.3, .dropout_seed = 1}}) {
      AttentionProblem negated = problem;
      negated.query = -problem.query;
      options.softmax_scale = -0.3;
      const AttentionOutputs negative = problem.run(attention, options);
      options.softmax_scale = 0.3;
      AttentionOutputs positive = negated.run(attention, options);
      positive.dquery = -positive.dquery;
      check_same_bits(negative, positive);
    }
  });
}
