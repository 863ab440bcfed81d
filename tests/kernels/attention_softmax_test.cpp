// The kernels of attention with stored matrices, and attention_combine: on raw memory, against their formulas.
#include "strobe/kernels/attention.h"
#include "support/compare.h"

using namespace strobe;
using namespace strobe::kernels;
using namespace strobe::testing;

TEST_CASE_TEMPLATE("attention softmax: hidden entries are 0 and never looked at", T, float, double, bfloat16) {
  using C = accumulate_t<T>;
  const int64_t rows = 6, size = 4;  // two matrices of 3 x 4, causal with one more key than queries
  const AttentionBand band = visible_band(true, -1, -1, 3, 4);
  const std::vector<C> products{1, 2,  NAN, NAN, 0, 0, 0, INFINITY, 1,  1,  1, 1,
                                5, -3, NAN, 1,   2, 2, 2, NAN,      -1, -1, 7, 7};
  const float slopes[] = {0.25f, 0.5f};
  const double scale = -0.5;
  for (const double softcap : {0.0, 1.5}) {
    for (const bool alibi : {false, true}) {
      CAPTURE(softcap);
      CAPTURE(alibi);
      std::vector<T> weights(products.size(), T(NAN)), dproducts(products.size(), T(NAN));
      std::vector<C> sums(rows, NAN), lse(rows, NAN), dlse{1, -2, 0.5f, 0, 3, 1};
      attention_softmax_forward({.weights = weights.data(),
                                 .sums = sums.data(),
                                 .lse = lse.data(),
                                 .products = products.data(),
                                 .num_matrices = 2,
                                 .seq_len_q = 3,
                                 .seq_len_k = size,
                                 .dtype = dtype_of<T>(),
                                 .softmax_scale = scale,
                                 .band = band,
                                 .softcap = softcap,
                                 .alibi_slopes = alibi ? slopes : nullptr,
                                 .num_heads = 2},
                                Stream{});
      std::vector<T> probabilities = weights;
      std::vector<C> dp(products.size(), NAN);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t j = 0; j < r % 3 + 2; ++j) dp[static_cast<size_t>(r * size + j)] = static_cast<C>(j * j - r);
      }
      attention_softmax_backward({.dproducts = dproducts.data(),
                                  .weights = probabilities.data(),
                                  .sums = sums.data(),
                                  .dprobabilities = dp.data(),
                                  .num_matrices = 2,
                                  .seq_len_q = 3,
                                  .seq_len_k = size,
                                  .dtype = dtype_of<T>(),
                                  .softmax_scale = scale,
                                  .band = band,
                                  .softcap = softcap,
                                  .products = products.data(),
                                  .dlse = dlse.data()},
                                 Stream{});
      const double bound = std::is_same_v<T, bfloat16> ? 1e-2 : tolerance(dtype_of<T>());
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t visible = r % 3 + 2;
        const auto at = [&](const auto& x, int64_t j) {
          return static_cast<double>(static_cast<C>(x[static_cast<size_t>(r * size + j)]));
        };
        const auto of_row = [&](const std::vector<C>& x) { return static_cast<double>(x[static_cast<size_t>(r)]); };
        const auto capped = [&](int64_t j) { return std::tanh(scale * at(products, j) / softcap); };
        const auto score = [&](int64_t j) {
          const double s = softcap == 0 ? scale * at(products, j) : softcap * capped(j);
          return alibi ? s - static_cast<double>(slopes[r / 3]) * static_cast<double>(std::abs(r % 3 + 1 - j)) : s;
        };
        double sum = 0, dot = 0;
        for (int64_t j = 0; j < visible; ++j) sum += std::exp(score(j));
        for (int64_t j = 0; j < visible; ++j) dot += std::exp(score(j)) / sum * at(dp, j);
        CHECK(std::abs(of_row(lse) - std::log(sum)) <= std::min(bound, 1e-5));
        for (int64_t j = 0; j < size; ++j) {
          const double p = j < visible ? std::exp(score(j)) / sum : 0;
          CHECK(std::abs(at(weights, j) / of_row(sums) - p) <= bound);
          CHECK(std::abs(at(probabilities, j) - p) <= bound);
          const double slope = softcap == 0 || j >= visible ? 1 : 1 - capped(j) * capped(j);
          const double expected = j < visible ? scale * slope * p * (at(dp, j) - dot + of_row(dlse)) : 0;
          CHECK(std::abs(at(dproducts, j) - expected) <= 8 * bound);
        }
      }
    }
  }
}

TEST_CASE_TEMPLATE("attention dropout kernel: writes every element, zero where dropped, also in place", T, float,
                   double, bfloat16) {
  const int64_t matrices = 3, seq_q = 37, seq_k = 70, size = matrices * seq_q * seq_k;
  const AttentionDropout dropout(0.5, 8, 1);
  const std::vector<T> ones(static_cast<size_t>(size), T(1.0f));
  std::vector<T> out(static_cast<size_t>(size), T(NAN)), in_place = ones;
  const AttentionDropoutArgs args{.out = out.data(),
                                  .x = ones.data(),
                                  .first_matrix = 5,
                                  .num_matrices = matrices,
                                  .seq_len_q = seq_q,
                                  .seq_len_k = seq_k,
                                  .dtype = dtype_of<T>(),
                                  .dropout = dropout};
  attention_dropout(args, Stream{});
  AttentionDropoutArgs same_memory = args;
  same_memory.out = in_place.data();
  same_memory.x = in_place.data();
  attention_dropout(same_memory, Stream{});
  int64_t wrong = 0;
  for (int64_t n = 0; n < size; ++n) {
    const size_t at = static_cast<size_t>(n);
    const bool kept = dropout.keeps(5 + n / (seq_q * seq_k), n / seq_k % seq_q, n % seq_k);
    const auto value = static_cast<accumulate_t<T>>(out[at]);
    wrong += value != (kept ? 2 : 0) || static_cast<accumulate_t<T>>(in_place[at]) != value;
  }
  CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("attention combine kernels: a part without keys is not read, everything is written", T, float,
                   double, bfloat16) {
  using C = accumulate_t<T>;
  const C none = -std::numeric_limits<C>::infinity();
  // Four queries of one head: keys on both sides, on the first, on the second, on neither.
  const std::vector<C> lse_a{0, 3, none, none}, lse_b{0, none, -2, none};
  const T nan = T(NAN), one = T(1.0f), two = T(2.0f), three = T(3.0f), four = T(4.0f);
  const std::vector<T> out_a{one, four, nan, nan}, out_b{three, nan, one, nan}, dout{two, two, two, nan};
  const std::vector<C> dlse{4, 4, 4, C(NAN)};
  std::vector<T> out(6, nan), dout_a(6, nan), dout_b(6, nan);
  std::vector<C> lse(6, C(NAN)), dlse_a(6, C(NAN)), dlse_b(6, C(NAN));
  const AttentionCombineArgs args{.out = out.data() + 1,
                                  .lse = lse.data() + 1,
                                  .out_a = out_a.data(),
                                  .lse_a = lse_a.data(),
                                  .out_b = out_b.data(),
                                  .lse_b = lse_b.data(),
                                  .batch = 1,
                                  .seq_len = 4,
                                  .num_heads = 1,
                                  .head_dim = 1,
                                  .dtype = dtype_of<T>()};
  attention_combine_forward(args, Stream{});
  AttentionCombineGradArgs grad{.forward = args,
                                .dout = dout.data(),
                                .dlse = dlse.data(),
                                .dout_a = dout_a.data() + 1,
                                .dlse_a = dlse_a.data() + 1,
                                .dout_b = dout_b.data() + 1,
                                .dlse_b = dlse_b.data() + 1};
  attention_combine_backward(grad, Stream{});
  const auto check = [](const auto& x, const std::vector<double>& expected) {
    for (size_t i = 0; i < 4; ++i) {
      CAPTURE(i);
      CHECK(static_cast<double>(static_cast<C>(x[i + 1])) == doctest::Approx(expected[i]).epsilon(1e-6));
    }
    CHECK(std::isnan(static_cast<C>(x.front())));
    CHECK(std::isnan(static_cast<C>(x.back())));
  };
  check(out, {2, 4, 1, 0});
  for (const auto& [i, expected] : {std::pair<size_t, double>{1, std::log(2.0)}, {2, 3}, {3, -2}}) {
    CHECK(static_cast<double>(lse[i]) == doctest::Approx(expected).epsilon(1e-6));
  }
  CHECK(lse[4] == none);
  CHECK(std::isnan(lse[5]));
  check(dout_a, {1, 2, 0, 0});
  check(dout_b, {1, 0, 2, 0});
  check(dlse_a, {2 - 1, 4, 0, 0});  // 0.5 dlse + 0.25 dout (a - b)
  check(dlse_b, {2 + 1, 0, 4, 0});
}
