// Embedding lookups with repeated and invalid indices, rotary positions and normalization against their definitions.
#include "strobe/kernels/embedding.h"

#include <doctest/doctest.h>

#include <cmath>

#include "support/compare.h"

using namespace strobe;
using namespace strobe::testing;

TEST_CASE("embedding: rows of the table; repeated indices add up, in f32 also for bf16") {
  const Tensor weight = uniform({5, 300}, -1.0, 1.0, DType::bf16).set_requires_grad();
  std::vector<int32_t> values(1000, 3);
  values[17] = 0;
  const Tensor indices = from_vector(values, {10, 100});
  const Tensor out = embedding(indices, weight);
  CHECK(out.shape() == Shape{10, 100, 300});
  CHECK(same_bits(slice(slice(out, 0, 0, 1), 1, 17, 18), reshape(slice(weight.detach(), 0, 0, 1), {1, 1, 300})));
  out.backward(ones(out.shape(), DType::bf16));
  const std::vector<double> gradient = weight.grad().to_vector<double>();
  CHECK(gradient[0] == 1);
  CHECK(gradient[299] == 1);
  CHECK(gradient[300] == 0);
  CHECK(gradient[3 * 300] == 1000);  // adding ones in bf16 would stop at 256
  CHECK(gradient[4 * 300 - 1] == 1000);
}

TEST_CASE("embedding: the same bits for any number of threads") {
  const Tensor weight = uniform({50, 33}).set_requires_grad();
  const Tensor indices = cast(uniform({4000}, 0.0, 50.0), DType::i64);
  const Tensor dout = uniform({4000, 33});
  const int threads = num_threads();
  embedding(indices, weight).backward(dout);
  const Tensor many = weight.grad();
  weight.set_grad(Tensor());
  set_num_threads(1);
  embedding(indices, weight).backward(dout);
  set_num_threads(threads);
  CHECK(same_bits(many, weight.grad()));
  CHECK(sum(weight.grad().to(DType::f64)).item<double>() ==
        doctest::Approx(sum(dout.to(DType::f64)).item<double>()).epsilon(1e-6));
}

TEST_CASE("embedding: an index out of range is named; empty index lists are fine") {
  const Tensor weight = uniform({5, 3}).set_requires_grad();
  const std::string message = error_of([&] {
    embedding(from_vector(std::vector<int64_t>{0, 1, 5, 7}, {2, 2}), weight);
  });
  CHECK(contains(message, "5 at position (1, 0)"));
  CHECK(contains(message, "vocab is 5"));
  CHECK(contains(error_of([&] { embedding(from_vector(std::vector<int32_t>{-1}, {1}), weight); }), "-1"));
  CHECK(contains(error_of([&] { embedding(ones({2}), weight); }), "i32 or i64"));
  CHECK(contains(error_of([&] { embedding(zeros({2}, DType::i64), ones({5})); }), "(vocab, dim)"));
  const Tensor nothing = embedding(zeros({0}, DType::i64), weight);
  CHECK(nothing.shape() == Shape{0, 3});
  nothing.backward(zeros({0, 3}));
  CHECK(weight.grad().to_vector<float>() == std::vector<float>(15, 0.0f));
}

TEST_CASE("embedding: a table without rows has no row 0") {
  CHECK(contains(error_of([] { embedding(zeros({1}, DType::i64), zeros({0, 4})); }), "holds 0 at position"));
}

TEST_CASE("rope: rotates the halves of a head by position, keeps dot products of equal distance") {
  const Tensor x = from_vector(std::vector<double>{1, 2, 3, 4, 1, 2, 3, 4}, {1, 2, 1, 4});
  const std::vector<double> y = rope(x, 100.0, 3).to_vector<double>();
  for (int s = 0; s < 2; ++s) {
    const double fast = 3 + s;
    const double slow = (3 + s) / 10.0;
    const double* row = y.data() + 4 * s;
    CHECK(row[0] == doctest::Approx(std::cos(fast) - 3 * std::sin(fast)));
    CHECK(row[1] == doctest::Approx(2 * std::cos(slow) - 4 * std::sin(slow)));
    CHECK(row[2] == doctest::Approx(3 * std::cos(fast) + std::sin(fast)));
    CHECK(row[3] == doctest::Approx(4 * std::cos(slow) + 2 * std::sin(slow)));
  }
  const Tensor query = uniform({1, 1, 1, 16}, -1.0, 1.0, DType::f64);
  const Tensor key = uniform({1, 1, 1, 16}, -1.0, 1.0, DType::f64);
  const auto score = [&](int64_t i, int64_t j) { return sum(rope(query, 1e4, i) * rope(key, 1e4, j)).item<double>(); };
  CHECK(score(5, 2) == doctest::Approx(score(1003, 1000)));
}

TEST_CASE("rope: reads strided heads, wide heads and refuses odd ones") {
  const Tensor qkv = uniform({2, 7, 3, 4, 260});
  const Tensor key = reshape(slice(qkv, 2, 1, 2), {2, 7, 4, 260});
  CHECK_FALSE(key.is_contiguous());
  CHECK(same_bits(rope(key), rope(contiguous(key))));
  CHECK(relative_difference(rope(key), rope(key.to(DType::f64))) <= 1e-6);
  CHECK(rope(zeros({0, 3, 2, 4})).size() == 0);
  CHECK(contains(error_of([] { rope(ones({1, 2, 3, 5})); }), "even head_dim"));
  CHECK(contains(error_of([] { rope(ones({2, 3, 4})); }), "(batch, seq_len, num_heads, head_dim)"));
}

TEST_CASE("layer_norm, rms_norm: rows far from zero keep their accuracy; parameters are optional and checked") {
  const Tensor x = uniform({7, 1000}, 999.0, 1001.0);
  const Tensor y = layer_norm(x, Tensor(), Tensor());
  CHECK(relative_difference(y, layer_norm(x.to(DType::f64), Tensor(), Tensor())) <= 2e-4);
  CHECK(std::abs(mean(square(layer_norm(x.to(DType::f64), Tensor(), Tensor()))).item<double>() - 1) <= 1e-4);
  CHECK(std::abs(mean(square(rms_norm(x.to(DType::f64), Tensor()))).item<double>() - 1) <= 1e-4);
  CHECK(layer_norm(zeros({0, 4}), ones({4}), ones({4})).shape() == Shape{0, 4});
  CHECK(contains(error_of([&] { layer_norm(x, ones({999}), Tensor()); }), "weight (999)"));
  CHECK(contains(error_of([&] { layer_norm(x, Tensor(), ones({1000}, DType::f64)); }), "bias of dtype f64"));
  CHECK(contains(error_of([] { rms_norm(ones({}), Tensor()); }), "rank 1"));
  CHECK(contains(error_of([&] { add_layer_norm(x, ones({7, 1}), {}, {}); }), "add_layer_norm: residual (7, 1)"));
  CHECK(contains(error_of([&] { add_rms_norm(x, x.to(DType::f64), {}); }), "residual of dtype f64"));
}

TEST_CASE("add_layer_norm, add_rms_norm: the same bits as the sum and then its norm") {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    const Tensor x = normal({9, 100}).to(dtype), residual = normal({9, 100}, 0, 3).to(dtype);
    const Tensor weight = normal({100}).to(dtype), bias = normal({100}).to(dtype);
    const AddNormResult layer = add_layer_norm(x, residual, weight, bias), rms = add_rms_norm(x, residual, weight);
    CHECK(same_bits(layer.sum, x + residual));
    CHECK(same_bits(rms.sum, x + residual));
    CHECK(same_bits(layer.normalized, layer_norm(x + residual, weight, bias)));
    CHECK(same_bits(rms.normalized, rms_norm(x + residual, weight)));
    CHECK(same_bits(add_layer_norm(x, Tensor(), weight, bias).sum, x));
    CHECK(same_bits(add_layer_norm(x, Tensor(), weight, bias).normalized, layer_norm(x, weight, bias)));
  }
}

TEST_CASE("layer_norm: parameter gradients have the same bits for any number of threads") {
  const Tensor x = uniform({1003, 600});
  const Tensor weight = uniform({600}).set_requires_grad();
  const Tensor bias = uniform({600}).set_requires_grad();
  const Tensor dout = uniform({1003, 600});
  const int threads = num_threads();
  layer_norm(x, weight, bias).backward(dout);
  const Tensor many_weight = weight.grad();
  const Tensor many_bias = bias.grad();
  weight.set_grad(Tensor());
  bias.set_grad(Tensor());
  set_num_threads(1);
  layer_norm(x, weight, bias).backward(dout);
  set_num_threads(threads);
  CHECK(same_bits(many_weight, weight.grad()));
  CHECK(same_bits(many_bias, bias.grad()));
}
