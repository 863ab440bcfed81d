// What a query does not see never influences it: hidden keys, other sequences, padding and gaps between rows may hold
// NaN, infinity or any number. What it sees always does.
#include <functional>

#include "support/attention_problem.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

// Every option, with a mask that hides something.
std::vector<NamedOptions> every_option() {
  const Tensor slopes = from_vector<float>({0.125f}, {1});
  return {{"causal", {.causal = true}},
          {"window_left", {.window_left = 30}},
          {"window", {.window_left = 140, .window_right = 5}},
          {"softcap", {.causal = true, .softcap = 2}},
          {"alibi_slopes", {.window_right = 3, .alibi_slopes = slopes}},
          {"dropout", {.causal = true, .dropout_p = 0.5, .dropout_seed = 3}},
          {"all",
           {.softmax_scale = -0.8,
            .causal = true,
            .window_left = 60,
            .softcap = 3,
            .alibi_slopes = slopes,
            .dropout_p = 0.2}}};
}

// f(function, dtype, options): both functions, every option.
template <class F>
void for_each_option(F&& f) {
  for_each_path([&](AttentionFunction attention, DType dtype) {
    if (dtype == DType::f16) return;  // as bf16
    for (const NamedOptions& option : every_option()) {
      INFO(option.name);
      f(attention, dtype, option.options);
    }
  });
}

// A copy whose rows from `begin` to `end` - 1 along the axis before heads hold `value`.
Tensor poisoned(const Tensor& x, int64_t begin, int64_t end, double value) {
  const Tensor copy = copy_of(x);
  const Tensor rows = slice(copy, -3, begin, end);
  rows.copy_from(full(rows.shape(), value, x.dtype()));
  return copy;
}

using Rows = std::function<bool(int64_t)>;

// Rows (for one batch and head, `width` elements each) outside of `affected` hold the same bits as without poison, and
// those within hold nothing but NaN when `nan`.
void check_rows(std::string_view name, const Tensor& x, const Tensor& clean, int64_t width, const Rows& affected,
                bool nan) {
  INFO(name);
  const std::vector<double> values = x.to_vector<double>(), expected = clean.to_vector<double>();
  REQUIRE(values.size() == expected.size());
  int64_t influenced = 0, not_nan = 0;
  for (size_t n = 0; n < values.size(); ++n) {
    const bool inside = affected(static_cast<int64_t>(n) / width);
    if (!inside) influenced += std::memcmp(&values[n], &expected[n], sizeof(double)) != 0;
    if (inside && nan) not_nan += !std::isnan(values[n]);
  }
  CHECK(influenced == 0);
  CHECK(not_nan == 0);
}

}  // namespace

TEST_CASE("attention: hidden keys, queries and gradients never influence a row, visible ones always do") {
  seed(1);
  const int64_t seq_q = 170, seq_k = 200, width = 4, key_at = 150, query_at = 110;
  const Rows no_row = [](int64_t) { return false; };
  for_each_option([&](AttentionFunction attention, DType dtype, const AttentionOptions& options) {
    const AttentionProblem problem = AttentionProblem(1, seq_q, seq_k, 1, 1, width, dtype).with_random_dlse();
    const AttentionOutputs clean = problem.run(attention, options);
    const auto visible = [&](int64_t i, int64_t j) { return sees(options, seq_q, seq_k, i, j); };
    const Rows sees_key = [&](int64_t i) { return visible(i, key_at); };
    const Rows is_query = [&](int64_t i) { return i == query_at; };
    const Rows seen_by_query = [&](int64_t j) { return visible(query_at, j); };
    const Rows beside_key = [&](int64_t j) {  // seen by a query that sees the key
      for (int64_t i = 0; i < seq_q; ++i) {
        if (visible(i, key_at) && visible(i, j)) return true;
      }
      return false;
    };
    for (const double poison : {static_cast<double>(NAN), -static_cast<double>(INFINITY), 1e4}) {
      CAPTURE(poison);
      // A dropped pair may pass NaN on or not.
      const bool nan = std::isnan(poison), nan_if_dropped = nan && options.dropout_p == 0;
      AttentionProblem bad = problem;
      const auto check = [&](const Rows& out, const Rows& lse, const Rows& dquery, const Rows& dkey, const Rows& dvalue,
                             bool in_value = false) {
        const AttentionOutputs got = bad.run(attention, options);
        check_rows("out", got.out, clean.out, width, out, in_value ? nan_if_dropped : nan);
        check_rows("lse", got.lse, clean.lse, 1, lse, nan);
        check_rows("dquery", got.dquery, clean.dquery, width, dquery, in_value ? nan_if_dropped : nan);
        check_rows("dkey", got.dkey, clean.dkey, width, dkey, nan_if_dropped);
        check_rows("dvalue", got.dvalue, clean.dvalue, width, dvalue, nan_if_dropped);
        bad = problem;
      };
      {
        INFO("in one key");
        bad.key = poisoned(problem.key, key_at, key_at + 1, poison);
        check(sees_key, sees_key, sees_key, beside_key, beside_key);
      }
      {
        INFO("in one value");
        bad.value = poisoned(problem.value, key_at, key_at + 1, poison);
        check(sees_key, no_row, sees_key, beside_key, no_row, true);
      }
      {
        INFO("in one query");
        bad.query = poisoned(problem.query, query_at, query_at + 1, poison);
        check(is_query, is_query, is_query, seen_by_query, seen_by_query);
      }
      {
        INFO("in one row of dout");
        bad.dout = poisoned(problem.dout, query_at, query_at + 1, poison);
        check(no_row, no_row, is_query, seen_by_query, seen_by_query);
      }
      {
        INFO("in one number of dlse");
        bad.dlse = copy_of(problem.dlse);
        slice(bad.dlse, 2, query_at, query_at + 1).copy_from(full({1, 1, 1}, poison, bad.dlse.dtype()));
        check(no_row, no_row, is_query, seen_by_query, no_row);
      }
    }
  });
}

TEST_CASE("attention: queries that see no key take no part, whatever they hold") {
  seed(2);
  const int64_t seq_q = 300, seq_k = 140;
  for_each_option([&](AttentionFunction attention, DType dtype, AttentionOptions options) {
    options.causal = true;  // hides all keys from the first 160 queries
    AttentionProblem problem = AttentionProblem(2, seq_q, seq_k, 1, 1, 4, dtype).with_random_dlse();
    const AttentionOutputs clean = problem.run(attention, options);
    for (const double poison : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
      problem.query = poisoned(problem.query, 0, 160, poison);
      problem.dout = poisoned(problem.dout, 0, 160, poison);
      slice(problem.dlse, 2, 0, 160).copy_from(full({2, 1, 160}, poison, problem.dlse.dtype()));
      const AttentionOutputs got = problem.run(attention, options);
      check_same_bits(got, clean);
      check_exact(slice(got.out, 1, 0, 160), 0.0);
      check_exact(slice(got.dquery, 1, 0, 160), 0.0);
      check_exact(slice(got.lse, 2, 0, 160), -INFINITY);
    }
  });
}

TEST_CASE("attention: keys that no query sees take no part, whatever they hold") {
  seed(3);
  const int64_t seq_q = 20, seq_k = 300;  // the windows end before the first keys, at a whole tile and within one
  for_each_option([&](AttentionFunction attention, DType dtype, AttentionOptions options) {
    options.window_left = 110;
    AttentionProblem problem = AttentionProblem(2, seq_q, seq_k, 1, 1, 4, dtype).with_random_dlse();
    const AttentionOutputs clean = problem.run(attention, options);
    for (const double poison : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
      problem.key = poisoned(problem.key, 0, 170, poison);
      problem.value = poisoned(problem.value, 0, 170, poison);
      const AttentionOutputs got = problem.run(attention, options);
      check_same_bits(got, clean);
      check_exact(slice(got.dkey, 1, 0, 170), 0.0);
      check_exact(slice(got.dvalue, 1, 0, 170), 0.0);
    }
  });
}

TEST_CASE("attention, packed: neither padding nor another sequence influences a row") {
  seed(4);
  const std::vector<int64_t> q_lengths{5, 0, 130, 40, 3}, k_lengths{9, 4, 140, 30, 0};
  const int64_t total_q = 185, total_k = 190;  // 7 rows of padding each
  for_each_option([&](AttentionFunction attention, DType dtype, AttentionOptions options) {
    options.cu_seqlens_q = cu_seqlens(q_lengths);
    options.cu_seqlens_k = cu_seqlens(k_lengths);
    const AttentionProblem problem = AttentionProblem::packed(total_q, total_k, 1, 1, 4, dtype).with_random_dlse();
    const AttentionOutputs clean = problem.run(attention, options);
    for (const double poison : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
      CAPTURE(poison);
      const auto poison_rows = [&](int64_t q_begin, int64_t q_end, int64_t k_begin, int64_t k_end) {
        AttentionProblem bad(poisoned(problem.query, q_begin, q_end, poison),
                             poisoned(problem.key, k_begin, k_end, poison),
                             poisoned(problem.value, k_begin, k_end, poison),
                             poisoned(problem.dout, q_begin, q_end, poison), copy_of(problem.dlse));
        slice(bad.dlse, 1, q_begin, q_end).copy_from(full({1, q_end - q_begin}, poison, bad.dlse.dtype()));
        return bad.run(attention, options);
      };
      const AttentionOutputs padding = poison_rows(178, total_q, 183, total_k);
      check_same_bits(padding, clean);
      check_exact(slice(padding.out, 0, 178, total_q), 0.0);
      for (const Tensor& gradient : {padding.dkey, padding.dvalue}) check_exact(slice(gradient, 0, 183, total_k), 0.0);

      const AttentionOutputs sequence = poison_rows(5, 135, 13, 153);
      const Rows in_queries = [](int64_t i) { return i >= 5 && i < 135; };
      const Rows in_keys = [](int64_t j) { return j >= 13 && j < 153; };
      check_rows("out", sequence.out, clean.out, 4, in_queries, false);
      check_rows("lse", sequence.lse, clean.lse, 1, in_queries, false);
      check_rows("dquery", sequence.dquery, clean.dquery, 4, in_queries, false);
      check_rows("dkey", sequence.dkey, clean.dkey, 4, in_keys, false);
      check_rows("dvalue", sequence.dvalue, clean.dvalue, 4, in_keys, false);
    }
  });
}

TEST_CASE("attention: gaps between the rows of strided operands are not read") {
  seed(5);
  for_each_option([](AttentionFunction attention, DType dtype, const AttentionOptions& options) {
    const AttentionProblem problem = AttentionProblem(2, 140, 150, 1, 1, 5, dtype).with_random_dlse();
    const auto within_nan = [&](const Tensor& x) {
      const Tensor larger = full({x.dim(0) + 1, x.dim(1) + 2, x.dim(2) + 1, x.dim(3) + 3}, NAN, dtype);
      const Tensor part = slice(slice(slice(slice(larger, 0, 1, 1 + x.dim(0)), 1, 1, 1 + x.dim(1)), 2, 1, 1 + x.dim(2)),
                                3, 2, 2 + x.dim(3));
      part.copy_from(x);
      return part;
    };
    const Tensor q = within_nan(problem.query).set_requires_grad(), k = within_nan(problem.key).set_requires_grad(),
                 v = within_nan(problem.value).set_requires_grad();
    AttentionProblem strided = problem;
    strided.dout = within_nan(problem.dout);
    check_same_bits(strided.differentiate(attention(q, k, v, options), q, k, v), problem.run(attention, options));
  });
}
