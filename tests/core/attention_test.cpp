// flash_attention, flash_attention_qkvpacked and standard_attention against each other, against exact answers and
// against the rules of masked attention.
#include <algorithm>
#include <random>

#include "support/attention_reference.h"
#include "support/gradcheck.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

using AttentionFunction = Tensor (*)(const Tensor&, const Tensor&, const Tensor&, const AttentionOptions&);
struct Path {
  const char* name;
  AttentionFunction function;
};
constexpr Path paths[] = {{"flash_attention", flash_attention}, {"standard_attention", standard_attention}};
constexpr DType all_dtypes[] = {DType::f32, DType::f64, DType::bf16, DType::f16};

Tensor leaf(const Tensor& x) {
  const Tensor copy = empty_like(x);
  copy.copy_from(x);
  return copy.set_requires_grad();
}

Tensor random_tensor(const Shape& shape, DType dtype) { return normal(shape, 0, 1, DType::f64).to(dtype); }

// Result and gradients: out, dquery, dkey, dvalue.
std::vector<Tensor> run(AttentionFunction attention, const Tensor& query, const Tensor& key, const Tensor& value,
                        const Tensor& dout, const AttentionOptions& options) {
  const Tensor q = leaf(query), k = leaf(key), v = leaf(value);
  const Tensor out = attention(q, k, v, options);
  out.backward(dout);
  return {out.detach(), q.grad(), k.grad(), v.grad()};
}

// A random problem: query, key, value, dout of one dtype.
struct Problem {
  Tensor query, key, value, dout;

  Problem(int64_t batch, int64_t seq_q, int64_t seq_k, int64_t heads, int64_t kv_heads, int64_t dim, DType dtype)
      : query(random_tensor({batch, seq_q, heads, dim}, dtype)),
        key(random_tensor({batch, seq_k, kv_heads, dim}, dtype)),
        value(random_tensor({batch, seq_k, kv_heads, dim}, dtype)),
        dout(random_tensor({batch, seq_q, heads, dim}, dtype)) {}
  std::vector<Tensor> run_with(AttentionFunction attention, const AttentionOptions& options) const {
    return run(attention, query, key, value, dout, options);
  }
};

double unit_in_last_place(double x, DType dtype) {
  const int digits = dtype == DType::f64 ? 52 : dtype == DType::f32 ? 23 : dtype == DType::bf16 ? 7 : 10;
  return std::ldexp(1.0, std::ilogb(x) - digits);
}

void check_exact(const Tensor& x, const std::vector<double>& expected) {
  const std::vector<double> values = x.to_vector<double>();
  REQUIRE(values.size() == expected.size());
  for (size_t i = 0; i < values.size(); ++i) {
    CAPTURE(i);
    const double bound = expected[i] == 0 ? 0 : 2 * unit_in_last_place(expected[i], x.dtype());
    CHECK(std::abs(values[i] - expected[i]) <= bound);
  }
}

// Rows of a (batch, seq_len, num_heads, head_dim) tensor.
Tensor rows(const Tensor& x, int64_t begin, int64_t end) { return slice(x, 1, begin, end); }
bool all_nan(const Tensor& x) {
  const std::vector<double> values = x.to_vector<double>();
  return std::all_of(values.begin(), values.end(), [](double value) { return std::isnan(value); });
}

template <class F>
void for_each_path(F&& f) {
  for (const Path& path : paths) {
    for (const DType dtype : all_dtypes) {
      INFO(path.name, " in ", name_of(dtype));
      f(path.function, dtype);
    }
  }
}

}  // namespace

TEST_CASE("attention: gradients match central differences") {
  seed(1);
  for (const Path& path : paths) {
    for (const bool causal : {false, true}) {
      for (const bool strided : {false, true}) {
        const auto check = [&](int64_t seq_q, int64_t seq_k, int64_t heads, int64_t kv_heads, int64_t dim,
                               std::optional<double> scale) {
          INFO(path.name, " causal ", causal, " strided ", strided, " seq_len ", seq_q, " and ", seq_k);
          gradcheck(
              [&](const std::vector<Tensor>& x) {
                return path.function(x[0], x[1], x[2], {.softmax_scale = scale, .causal = causal});
              },
              {{2, seq_q, heads, dim}, {2, seq_k, kv_heads, dim}, {2, seq_k, kv_heads, dim}}, strided);
        };
        check(9, 13, 4, 2, 8, std::nullopt);
        check(13, 9, 2, 1, 5, 0.9);
        check(140, 150, 1, 1, 3, -0.7);
      }
    }
  }
  for (const bool strided : {false, true}) {
    gradcheck([](const std::vector<Tensor>& x) { return flash_attention_qkvpacked(x[0], 2, {.causal = true}); },
              {{2, 17, 3 * 2 * 5}}, strided);
  }
}

TEST_CASE("attention: tiled and standard agree on random shapes with every option") {
  seed(2);
  std::mt19937 random(2);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  int causal_count = 0, unequal_count = 0, grouped_count = 0, strided_count = 0, packed_count = 0, odd_count = 0,
      scale_count = 0;
  for (int shape = 0; shape < 320; ++shape) {
    const bool large = shape % 8 == 0;  // several tiles
    const bool packed = draw(0, 3) == 0, strided = !packed && draw(0, 2) == 0;
    const int64_t batch = draw(1, large ? 1 : 3), dim = draw(1, large ? 24 : 72);
    const int64_t kv_heads = draw(1, 2), group = packed ? 1 : draw(1, 3), heads = kv_heads * group;
    const int64_t seq_q = draw(1, large ? 400 : 70),
                  seq_k = packed || draw(0, 2) == 0 ? seq_q : draw(1, large ? 400 : 70);
    AttentionOptions options{.causal = draw(0, 1) == 0};
    if (draw(0, 2) == 0) options.softmax_scale = std::uniform_real_distribution<double>(-1, 1)(random);
    causal_count += options.causal;
    unequal_count += seq_q != seq_k;
    grouped_count += group > 1;
    strided_count += strided;
    packed_count += packed;
    odd_count += dim % 2 == 1;
    scale_count += options.softmax_scale.has_value();
    INFO("batch ", batch, " seq_len ", seq_q, " and ", seq_k, " heads ", heads, " and ", kv_heads, " head_dim ", dim,
         " causal ", options.causal, " packed ", packed, " strided ", strided);
    for (const DType dtype : {DType::f32, DType::f64}) {
      Problem problem(batch, seq_q, seq_k, heads, kv_heads, dim, dtype);
      if (strided) {  // heads before positions, and query a part of wider rows
        const auto heads_first = [](const Tensor& x) { return transpose(contiguous(transpose(x, 1, 2)), 1, 2); };
        problem.key = heads_first(problem.key);
        problem.dout = heads_first(problem.dout);
        problem.query = slice(concat({problem.query, problem.query}, 3), 3, dim / 2, dim / 2 + dim);
      }
      std::vector<Tensor> tiled;
      if (packed) {
        const Tensor qkv = leaf(concat({problem.query, problem.key, problem.value}, 2));
        const Tensor out = flash_attention_qkvpacked(reshape(qkv, {batch, seq_q, -1}), heads, options);
        out.backward(problem.dout);
        tiled = split(qkv.grad(), {heads, heads, heads}, 2);
        tiled.insert(tiled.begin(), out.detach());
      } else {
        const Tensor q = problem.query.detach().set_requires_grad(), k = problem.key.detach().set_requires_grad(),
                     v = problem.value.detach().set_requires_grad();
        const Tensor out = flash_attention(q, k, v, options);
        out.backward(problem.dout);
        tiled = {out.detach(), q.grad(), k.grad(), v.grad()};
      }
      const std::vector<Tensor> standard = problem.run_with(standard_attention, options);
      for (size_t i = 0; i < 4; ++i) {
        CAPTURE(i);
        CHECK(relative_difference(tiled[i], standard[i]) <= tolerance(dtype));
      }
    }
  }
  for (const int count :
       {causal_count, unequal_count, grouped_count, strided_count, packed_count, odd_count, scale_count}) {
    CHECK(count >= 30);
  }
}

TEST_CASE("attention: standard equals the definition") {
  seed(3);
  for (const DType dtype : all_dtypes) {
    for (const bool causal : {false, true}) {
      const Problem problem(2, 40, 33, 4, 2, 12, dtype);
      const std::vector<Tensor> got = problem.run_with(standard_attention, {.causal = causal});
      const AttentionResult expected =
          reference_attention(problem.query.to(DType::f64), problem.key.to(DType::f64), problem.value.to(DType::f64),
                              problem.dout.to(DType::f64), 1 / std::sqrt(12.0), causal);
      CHECK(relative_difference(got[0], expected.out) <= tolerance(dtype));
      CHECK(relative_difference(got[1], expected.dquery) <= tolerance(dtype));
      CHECK(relative_difference(got[2], expected.dkey) <= tolerance(dtype));
      CHECK(relative_difference(got[3], expected.dvalue) <= tolerance(dtype));
    }
  }
}

TEST_CASE("attention: error at most twice that of unfused attention in 16 bits") {
  seed(4);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const bool causal : {false, true}) {
      for (const auto& [seq_q, seq_k, dim] :
           {std::tuple<int64_t, int64_t, int64_t>{64, 64, 64}, {150, 260, 32}, {33, 20, 8}}) {
        INFO(name_of(dtype), " causal ", causal, " seq_len ", seq_q, " and ", seq_k);
        const Problem problem(1, seq_q, seq_k, 2, 1, dim, dtype);
        const auto reference = [&](DType stored) {
          const AttentionResult x = reference_attention(problem.query.to(DType::f64), problem.key.to(DType::f64),
                                                        problem.value.to(DType::f64), problem.dout.to(DType::f64),
                                                        1 / std::sqrt(static_cast<double>(dim)), causal, stored);
          return std::vector<Tensor>{x.out, x.dquery, x.dkey, x.dvalue};
        };
        const std::vector<Tensor> exact = reference(DType::f64), unfused = reference(dtype);
        const std::vector<Tensor> tiled = problem.run_with(flash_attention, {.causal = causal});
        for (size_t i = 0; i < 4; ++i) {
          CAPTURE(i);
          CHECK(relative_difference(tiled[i], exact[i]) <= 2 * relative_difference(unfused[i], exact[i]) + 1e-6);
        }
      }
    }
  }
}

TEST_CASE("attention, exact: one key") {
  seed(5);
  for_each_path([](AttentionFunction attention, DType dtype) {
    for (const bool causal : {false, true}) {
      const Problem problem(1, 1, 1, 1, 1, 16, dtype);
      const std::vector<Tensor> got = problem.run_with(attention, {.causal = causal});
      check_exact(got[0], problem.value.to_vector<double>());
      check_exact(got[1], std::vector<double>(16));
      check_exact(got[2], std::vector<double>(16));
      check_exact(got[3], problem.dout.to_vector<double>());
    }
  });
}

TEST_CASE("attention, exact: query 0 gives the mean of what is visible") {
  for_each_path([](AttentionFunction attention, DType dtype) {
    for (const int64_t length : {7, 129}) {
      const Tensor query = zeros({1, length, 1, 1}, dtype);
      const Tensor value = reshape(arange(length, dtype), {1, length, 1, 1});
      std::vector<double> halves;
      for (int64_t i = 0; i < length; ++i) halves.push_back(static_cast<double>(i) / 2);
      check_exact(attention(query, full({1, length, 1, 1}, 3, dtype), value, {.causal = true}), halves);
    }
    const Tensor value = reshape(arange(5, dtype), {1, 5, 1, 1});
    check_exact(attention(zeros({1, 2, 1, 1}, dtype), value, value, {.causal = true}), {1.5, 2});
  });
}

TEST_CASE("attention, exact: queries that see no key") {
  for_each_path([](AttentionFunction attention, DType dtype) {
    const Tensor value = from_vector<double>({10, 20}, {1, 2, 1, 1}).to(dtype);
    const std::vector<Tensor> got = run(attention, zeros({1, 5, 1, 1}, dtype), zeros({1, 2, 1, 1}, dtype), value,
                                        ones({1, 5, 1, 1}, dtype), {.causal = true});
    check_exact(got[0], {0, 0, 0, 10, 15});
    check_exact(got[3], {1.5, 0.5});
    for (const auto& [seq_q, seq_k] : {std::pair<int64_t, int64_t>{3, 0}, {0, 3}, {0, 0}}) {
      const Problem problem(2, seq_q, seq_k, 2, 1, 4, dtype);
      const std::vector<Tensor> none = problem.run_with(attention, {});
      check_exact(none[0], std::vector<double>(static_cast<size_t>(16 * seq_q)));
      check_exact(none[1], std::vector<double>(static_cast<size_t>(16 * seq_q)));
      check_exact(none[2], std::vector<double>(static_cast<size_t>(8 * seq_k)));
      check_exact(none[3], std::vector<double>(static_cast<size_t>(8 * seq_k)));
    }
    CHECK(attention(zeros({0, 3, 2, 4}, dtype), zeros({0, 3, 2, 4}, dtype), zeros({0, 3, 2, 4}, dtype), {}).size() ==
          0);
  });
}

TEST_CASE("attention, exact: large logits, forward and backward") {
  seed(6);
  for_each_path([](AttentionFunction attention, DType dtype) {
    const auto spike = [&](int64_t seq_len, double size) {
      const Tensor x = zeros({1, seq_len, 1, 128}, dtype);
      slice(x, 3, 0, 1).copy_from(full({1, seq_len, 1, 1}, size, dtype));
      return x;
    };
    const std::vector<Tensor> got =
        run(attention, spike(1, 512), spike(4, -1024), ones({1, 4, 1, 128}, dtype), ones({1, 1, 1, 128}, dtype), {});
    check_exact(got[0], std::vector<double>(128, 1));
    check_exact(got[1], std::vector<double>(128));
    check_exact(got[2], std::vector<double>(4 * 128));
    check_exact(got[3], std::vector<double>(4 * 128, 0.25));
  });
  // Logits of +-1e5 that differ by a few units; the large part is in a dimension of its own.
  for (const Path& path : paths) {
    for (const double scale : {-1.0, 0.3}) {
      for (const bool causal : {false, true}) {
        INFO(path.name, " scale ", scale, " causal ", causal);
        const int64_t length = 200;
        const Problem shared(1, length, length, 1, 1, 2, DType::f32);
        std::vector<double> query, key;
        for (int64_t i = 0; i < length; ++i) {
          query.insert(query.end(), {1.0, static_cast<double>(i % 3 - 1)});
          key.insert(key.end(), {std::round(100000.0 / scale), static_cast<double>(i % 7 - 3)});
        }
        const Tensor q = from_vector(query, {1, length, 1, 2}), k = from_vector(key, {1, length, 1, 2});
        const std::vector<Tensor> got = run(path.function, q.to(DType::f32), k.to(DType::f32), shared.value,
                                            shared.dout, {.softmax_scale = scale, .causal = causal});
        const AttentionResult expected = reference_attention(
            q, k, shared.value.to(DType::f64), shared.dout.to(DType::f64), static_cast<float>(scale), causal);
        CHECK(relative_difference(got[0], expected.out) <= 1e-6);
        CHECK(relative_difference(got[2], expected.dkey) <= 2e-6);
        CHECK(relative_difference(got[3], expected.dvalue) <= 2e-6);
      }
    }
  }
}

TEST_CASE("attention, exact: a scale of 0 and of either sign") {
  seed(7);
  for_each_path([](AttentionFunction attention, DType dtype) {
    Problem problem(2, 5, 8, 2, 1, 4, dtype);
    problem.value = reshape(arange(8, dtype), {1, 8, 1, 1}) + zeros({2, 8, 1, 4}, dtype);
    const std::vector<Tensor> mean = problem.run_with(attention, {.softmax_scale = 0.0});
    check_exact(mean[0], std::vector<double>(80, 3.5));
    check_exact(mean[1], std::vector<double>(80));
    check_exact(mean[2], std::vector<double>(64));
    problem.value = random_tensor({2, 8, 1, 4}, dtype);
    const std::vector<Tensor> negative = problem.run_with(attention, {.softmax_scale = -0.3, .causal = true});
    problem.query = -problem.query;
    const std::vector<Tensor> positive = problem.run_with(attention, {.softmax_scale = 0.3, .causal = true});
    CHECK(same_bits(negative[0], positive[0]));
    CHECK(same_bits(negative[1], -positive[1]));
    CHECK(same_bits(negative[2], positive[2]));
    CHECK(same_bits(negative[3], positive[3]));
  });
}

TEST_CASE("attention: batch and heads are independent, bit for bit") {
  seed(8);
  for_each_path([](AttentionFunction attention, DType dtype) {
    const Problem problem(3, 150, 170, 4, 2, 8, dtype);
    const AttentionOptions options{.causal = true};
    const std::vector<Tensor> whole = problem.run_with(attention, options);
    for (int64_t b = 0; b < 3; ++b) {
      const auto single = [b](const Tensor& x) { return slice(x, 0, b, b + 1); };
      const std::vector<Tensor> got = run(attention, single(problem.query), single(problem.key), single(problem.value),
                                          single(problem.dout), options);
      for (size_t i = 0; i < 4; ++i) CHECK(same_bits(got[i], single(whole[i])));
    }
    const auto swapped = [](const Tensor& x) {  // the two kv heads, with their query heads
      const int64_t half = x.dim(2) / 2;
      return concat({slice(x, 2, half, 2 * half), slice(x, 2, 0, half)}, 2);
    };
    const std::vector<Tensor> got = run(attention, swapped(problem.query), swapped(problem.key), swapped(problem.value),
                                        swapped(problem.dout), options);
    for (size_t i = 0; i < 4; ++i) CHECK(same_bits(got[i], swapped(whole[i])));
  });
}

TEST_CASE("attention: more than 65,535 heads in all") {
  for (const Path& path : paths) {
    const Tensor value = reshape(arange(300 * 256, DType::f32), {300, 1, 256, 1});
    CHECK(same_bits(path.function(value, value, value, {}), value));
  }
}

TEST_CASE("attention: what a row cannot see never influences it, NaN and infinity included") {
  seed(9);
  const int64_t length = 300, at = 200;
  const AttentionOptions options{.causal = true};
  for_each_path([&](AttentionFunction attention, DType dtype) {
    const Problem problem(1, length, length, 1, 1, 8, dtype);
    const std::vector<Tensor> clean = problem.run_with(attention, options);
    for (const double poison : {static_cast<double>(NAN), static_cast<double>(INFINITY), 1e4}) {
      CAPTURE(poison);
      const bool nan = std::isnan(poison);
      const auto poisoned = [&](const Tensor& x) {
        const Tensor copy = empty_like(x);
        copy.copy_from(x);
        rows(copy, at, at + 1).copy_from(full({1, 1, 1, 8}, poison, dtype));
        return copy;
      };
      const auto check_before = [&](const Tensor& x, const Tensor& expected) {  // rows below `at` unchanged
        CHECK(same_bits(rows(x, 0, at), rows(expected, 0, at)));
        if (nan) CHECK(all_nan(rows(x, at, length)));
      };
      const auto check_after = [&](const Tensor& x, const Tensor& expected) {  // rows above `at` unchanged
        CHECK(same_bits(rows(x, at + 1, length), rows(expected, at + 1, length)));
        if (nan) CHECK(all_nan(rows(x, 0, at + 1)));
      };
      const auto check_only = [&](const Tensor& x, const Tensor& expected) {
        CHECK(same_bits(rows(x, 0, at), rows(expected, 0, at)));
        CHECK(same_bits(rows(x, at + 1, length), rows(expected, at + 1, length)));
        if (nan) CHECK(all_nan(rows(x, at, at + 1)));
      };
      const auto run_with = [&](const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dout) {
        return run(attention, query, key, value, dout, options);
      };
      std::vector<Tensor> got = run_with(problem.query, poisoned(problem.key), problem.value, problem.dout);
      check_before(got[0], clean[0]);
      check_before(got[1], clean[1]);
      got = run_with(problem.query, problem.key, poisoned(problem.value), problem.dout);
      check_before(got[0], clean[0]);
      check_before(got[1], clean[1]);
      CHECK(same_bits(got[3], clean[3]));
      got = run_with(problem.query, problem.key, problem.value, poisoned(problem.dout));
      CHECK(same_bits(got[0], clean[0]));
      check_only(got[1], clean[1]);
      check_after(got[2], clean[2]);
      check_after(got[3], clean[3]);
      got = run_with(poisoned(problem.query), problem.key, problem.value, problem.dout);
      check_only(got[0], clean[0]);
      check_only(got[1], clean[1]);
      check_after(got[2], clean[2]);
      check_after(got[3], clean[3]);
    }
    // Queries that see nothing: the first 100 of 300 against 200 keys.
    Problem short_keys(1, length, 200, 1, 1, 8, dtype);
    const std::vector<Tensor> expected = short_keys.run_with(attention, options);
    rows(short_keys.query, 0, 100).copy_from(full({1, 100, 1, 8}, NAN, dtype));
    rows(short_keys.dout, 0, 100).copy_from(full({1, 100, 1, 8}, INFINITY, dtype));
    const std::vector<Tensor> got = short_keys.run_with(attention, options);
    for (size_t i = 0; i < 4; ++i) CHECK(same_bits(got[i], expected[i]));
    check_exact(rows(got[0], 0, 100), std::vector<double>(800));
    check_exact(rows(got[1], 0, 100), std::vector<double>(800));
  });
}

TEST_CASE("attention: a gradient with strides 0") {
  seed(10);
  for_each_path([](AttentionFunction attention, DType dtype) {
    const Problem problem(2, 20, 30, 2, 1, 8, dtype);
    const Tensor two = full({1, 1, 1, 1}, 2, dtype);
    const std::vector<Tensor> broadcast =
        run(attention, problem.query, problem.key, problem.value, expand(two, problem.dout.shape()), {});
    const std::vector<Tensor> stored =
        run(attention, problem.query, problem.key, problem.value, full(problem.dout.shape(), 2, dtype), {});
    for (size_t i = 0; i < 4; ++i) CHECK(same_bits(broadcast[i], stored[i]));
  });
}

TEST_CASE("flash_attention_qkvpacked: equals flash_attention of the three parts, bit for bit") {
  seed(11);
  for (const DType dtype : all_dtypes) {
    for (const bool five_axes : {false, true}) {
      const Tensor qkv = leaf(random_tensor({2, 140, 3, 2, 12}, dtype));
      const Tensor parts = leaf(qkv.detach());
      const Tensor dout = random_tensor({2, 140, 2, 12}, dtype);
      const Tensor packed =
          flash_attention_qkvpacked(five_axes ? qkv : reshape(qkv, {2, 140, 72}), 2, {.causal = true});
      packed.backward(dout);
      const auto part = [&](int64_t i) { return reshape(slice(parts, 2, i, i + 1), {2, 140, 2, 12}); };
      const Tensor separate = flash_attention(part(0), part(1), part(2), {.causal = true});
      separate.backward(dout);
      CHECK(same_bits(packed, separate));
      CHECK(same_bits(qkv.grad(), parts.grad()));
    }
  }
}

TEST_CASE("standard_attention: small gradients of many keys survive f16") {
  const Tensor zero = zeros({1, 2048, 1, 4}, DType::f16);
  const std::vector<Tensor> got =
      run(standard_attention, zero, zero, zero, full({1, 2048, 1, 4}, 1e-4, DType::f16), {});
  for (const double value : got[3].to_vector<double>()) CHECK(value == doctest::Approx(1e-4).epsilon(0.01));
}
