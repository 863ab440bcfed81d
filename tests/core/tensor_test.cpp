#include "strobe/core/tensor.h"

#include "support/compare.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

Tensor counting(const Shape& shape, DType dtype = DType::f32) {
  return reshape(arange(shape.numel()).to(dtype), shape);
}

}  // namespace

TEST_CASE("shape: counts elements, broadcasts and prints") {
  CHECK(Shape{2, 3, 4}.numel() == 24);
  CHECK(Shape{}.numel() == 1);
  CHECK(Shape{5, 0, 3}.numel() == 0);
  CHECK(broadcast_shapes("add", {4, 1, 5}, {3, 1}) == Shape{4, 3, 5});
  CHECK(concat_message(Shape{2, 3}) == "(2, 3)");
  CHECK(contains(error_of([] { broadcast_shapes("add", {2, 3}, {2, 4}); }), "add: shapes (2, 3) and (2, 4)"));
  CHECK(contains(error_of([] { Shape{-1}.numel(); }), "no negative size"));
  CHECK(contains(error_of([] { Shape{int64_t{1} << 40, int64_t{1} << 40}.numel(); }), "2^63"));
  CHECK(contains(error_of([] { Shape{1, 1, 1, 1, 1, 1, 1, 1, 1}; }), "at most 8"));
}

TEST_CASE("tensor: factories fill what they say") {
  CHECK(zeros({2, 2}).to_vector<float>() == std::vector<float>(4, 0.0f));
  CHECK(full({3}, 2.5, DType::f64).to_vector<double>() == std::vector<double>(3, 2.5));
  CHECK(arange(4).to_vector<int64_t>() == std::vector<int64_t>{0, 1, 2, 3});
  CHECK(from_vector<float>({1, 2, 3, 4}, {2, 2}).dim(-1) == 2);
  CHECK(full({}, 7.0, DType::i32).item<int>() == 7);
  CHECK(empty({0, 4}).size() == 0);
  CHECK(contains(error_of([] { from_vector<float>({1, 2, 3}, {2, 2}); }), "3 values given, expected 4"));
  CHECK(contains(error_of([] { zeros({2}).item<float>(); }), "expected one element"));
  CHECK(contains(error_of([] { zeros({2}).data<double>(); }), "dtype f64 asked of a tensor of dtype f32"));
  CHECK(contains(error_of([] { Tensor().shape(); }), "undefined"));
  CHECK(contains(error_of([] { zeros({2}).dim(1); }), "axis 1"));
}

TEST_CASE("tensor: 16-bit floats round to nearest even and keep special values") {
  const double inf = std::numeric_limits<double>::infinity();
  const std::vector<double> values{
      0.0, -0.0, 1.0, 1.0 + 1.0 / 2048, 1.0 + 3.0 / 2048, 65504.0, 65519.0, 65520.0, 6e-8, 2.9e-8, -inf, inf};
  const std::vector<double> halves{0.0, -0.0, 1.0, 1.0, 1.0 + 1.0 / 512, 65504.0, 65504.0, inf, 5.9604644775390625e-8,
                                   0.0, -inf, inf};
  CHECK(from_vector(values, {12}).to(DType::f16).to_vector<double>() == halves);
  CHECK(full({1}, 1.0 + 1.0 / 256, DType::bf16).item<double>() == 1.0);
  CHECK(full({1}, 1.0 + 3.0 / 256, DType::bf16).item<double>() == 1.0 + 1.0 / 64);
  CHECK(std::isnan(full({1}, std::nan(""), DType::bf16).item<double>()));
  CHECK(std::isnan(full({1}, std::nan(""), DType::f16).item<double>()));
  CHECK(full({1}, 3.4e38, DType::bf16).item<double>() == inf);
}

TEST_CASE("views: share memory, keep order, and refuse what strides cannot say") {
  const Tensor x = counting({2, 3, 4});
  const Tensor turned = permute(x, {2, 0, 1});
  CHECK(turned.shape() == Shape{4, 2, 3});
  CHECK(turned.data() == x.data());
  CHECK_FALSE(turned.is_contiguous());
  CHECK(turned.to_vector<float>()[1] == 4.0f);
  CHECK(reshape(x, {6, -1}).data() == x.data());
  CHECK(reshape(transpose(x, 0, 1), {3, 8}).to_vector<float>()[4] == 12.0f);
  CHECK(slice(x, 2, 1, 3).to_vector<float>() == std::vector<float>{1, 2, 5, 6, 9, 10, 13, 14, 17, 18, 21, 22});
  // A slice can be reshaped in place when the merged axes are evenly spaced.
  const Tensor packed = slice(counting({2, 5, 12}), 2, 4, 8);
  CHECK(reshape(packed, {2, 5, 2, 2}).data() == packed.data());
  CHECK(reshape(packed, {10, 4}).data() == packed.data());
  CHECK(reshape(packed, {2, 20}).data() != packed.data());
  CHECK(reshape(packed, {2, 20}).to_vector<float>() == packed.to_vector<float>());
  CHECK(expand(counting({3, 1}), {2, 3, 2}).to_vector<float>() ==
        std::vector<float>{0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2});
  CHECK(concat({counting({1, 2}), counting({2, 2})}, 0).to_vector<float>() == std::vector<float>{0, 1, 0, 1, 2, 3});
  CHECK(contains(error_of([&] { reshape(x, {5, 5}); }), "same number of elements"));
  CHECK(contains(error_of([&] { reshape(x, {-1, -1}); }), "at most one -1"));
  CHECK(contains(error_of([&] { permute(x, {0, 0, 1}); }), "given twice"));
  CHECK(contains(error_of([&] { slice(x, 2, 3, 5); }), "end <= 4"));
  CHECK(contains(error_of([&] { split(x, {1, 1}, 1); }), "expected 3"));
  CHECK(contains(error_of([&] { concat({x, zeros({2, 3})}, 0); }), "tensor 1"));
  CHECK(contains(error_of([&] { expand(x, {2, 3, 5}); }), "broadcast"));
}

TEST_CASE("assign: every handle follows to the new memory") {
  const Tensor weight = zeros({2, 2}).set_requires_grad();
  const Tensor same = weight;
  weight.assign(ones({2, 2}, DType::bf16));
  CHECK(same.dtype() == DType::bf16);
  CHECK(same.to_vector<float>() == std::vector<float>(4, 1.0f));
  CHECK(contains(error_of([&] { weight.assign(ones({3})); }), "expected shape (2, 2)"));
  CHECK(contains(error_of([&] { weight.assign(ones({2, 2}, DType::i64)); }), "floating-point"));
}

TEST_CASE("copy_from: source and destination may share memory; repeated elements are refused") {
  const Tensor x = counting({3, 3});
  x.copy_from(transpose(x, 0, 1));
  CHECK(x.to_vector<float>() == std::vector<float>{0, 3, 6, 1, 4, 7, 2, 5, 8});
  const Tensor row = counting({5});
  slice(row, 0, 1, 5).copy_from(slice(row, 0, 0, 4));
  CHECK(row.to_vector<float>() == std::vector<float>{0, 0, 1, 2, 3});
  CHECK(contains(error_of([] { expand(zeros({1}), {3}).copy_from(ones({3})); }), "repeated elements"));
}

TEST_CASE("item: integers keep every digit, floats saturate") {
  CHECK(full({}, 0, DType::i64).item<int64_t>() == 0);
  CHECK(from_vector<int64_t>({9007199254740993}, {1}).item<int64_t>() == 9007199254740993);
  CHECK(full({1}, 1e30).item<int32_t>() == std::numeric_limits<int32_t>::max());
  CHECK(full({1}, std::nan("")).item<int32_t>() == 0);
}

TEST_CASE("set_grad: keeps no graph alive") {
  const size_t before = memory_stats().current;
  {
    const Tensor x = ones({1000}).set_requires_grad();
    x.set_grad(x * 2.0);
  }
  CHECK(memory_stats().current == before);
}
