// The matrix product kernel against its definition, and the operations that stand on it.
#include "strobe/kernels/matmul.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "strobe/core/ops/matmul.h"
#include "support/gradcheck.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

enum class Layout { rows, columns, spread };  // which stride is 1: the column's, the row's, none

struct Problem {
  int64_t m, n, k;
  Layout a_layout = Layout::rows, b_layout = Layout::rows;
  DType dtype = DType::f32;
  DType out_dtype = DType::f32;
  bool bias = false;
  bool accumulate = false;
  int64_t band_lower = kernels::no_band_lower;
  int64_t band_upper = kernels::no_band_upper;
  std::vector<kernels::MatmulBatch> batch{};  // strides in matrices
};

bool in_band(const Problem& problem, int64_t i, int64_t p) {
  return i + problem.band_lower <= p && p <= i + problem.band_upper;
}

struct Strides {
  int64_t row, column, matrix;
  int64_t at(int64_t which, int64_t i, int64_t j) const { return which * matrix + i * row + j * column; }
};

Strides strides_of(Layout layout, int64_t rows, int64_t columns) {
  if (layout == Layout::rows) return {columns + 3, 1, rows * (columns + 3) + 5};
  if (layout == Layout::columns) return {1, rows + 2, columns * (rows + 2) + 5};
  return {2, 2 * rows + 3, columns * (2 * rows + 3) + 5};
}

// Values rounded to `dtype`, as bytes and as doubles.
struct Array {
  std::vector<std::byte> bytes;
  std::vector<double> values;
};

Array rounded(std::vector<double> values, DType dtype) {
  Array array{std::vector<std::byte>(values.size() * size_of(dtype)), std::move(values)};
  dispatch_floating(dtype, "test", [&]<class T>() {
    for (size_t i = 0; i < array.values.size(); ++i) {
      const T value = static_cast<T>(static_cast<accumulate_t<T>>(array.values[i]));
      array.values[i] = static_cast<double>(static_cast<accumulate_t<T>>(value));
      std::memcpy(array.bytes.data() + i * sizeof(T), &value, sizeof(T));
    }
  });
  return array;
}

std::vector<double> random_values(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<double> distribution(-1.0, 1.0);
  std::vector<double> values(static_cast<size_t>(count));
  for (double& value : values) value = distribution(generator);
  return values;
}

// Random operands of a problem; with `poison`, whatever lies outside the band of a is NaN or infinity.
struct Operands {
  Strides a_strides, b_strides, out_strides;
  Array a, b, bias, out;

  Operands(const Problem& problem, bool poison)
      : a_strides(strides_of(problem.a_layout, problem.m, problem.k)),
        b_strides(strides_of(problem.b_layout, problem.k, problem.n)),
        out_strides(strides_of(Layout::rows, problem.m, problem.n)) {
    int64_t a_last = 0, b_last = 0, out_last = 0;
    for (const kernels::MatmulBatch& dim : problem.batch) {
      a_last += (dim.size - 1) * dim.a_stride;
      b_last += (dim.size - 1) * dim.b_stride;
      out_last += (dim.size - 1) * dim.out_stride;
    }
    std::vector<double> a_values = random_values((a_last + 1) * a_strides.matrix, 1);
    for (int64_t matrix = 0; poison && matrix <= a_last; ++matrix) {
      for (int64_t i = 0; i < problem.m; ++i) {
        for (int64_t p = 0; p < problem.k; ++p) {
          if (in_band(problem, i, p)) continue;
          a_values[static_cast<size_t>(a_strides.at(matrix, i, p))] = (i + p) % 2 == 0 ? not_a_number : infinity;
        }
      }
    }
    a = rounded(a_values, problem.dtype);
    b = rounded(random_values((b_last + 1) * b_strides.matrix, 2), problem.dtype);
    bias = rounded(random_values(problem.n, 3), problem.dtype);
    std::vector<double> before = random_values((out_last + 1) * out_strides.matrix, 4);
    if (!problem.accumulate) std::fill(before.begin(), before.end(), not_a_number);
    out = rounded(before, problem.out_dtype);
  }
};

std::vector<std::byte> run(const Problem& problem, const Operands& operands) {
  std::vector<std::byte> out = operands.out.bytes;
  kernels::MatmulArgs args{.out = out.data(),
                           .a = operands.a.bytes.data(),
                           .b = operands.b.bytes.data(),
                           .m = problem.m,
                           .n = problem.n,
                           .k = problem.k,
                           .out_row_stride = operands.out_strides.row,
                           .a_row_stride = operands.a_strides.row,
                           .a_column_stride = operands.a_strides.column,
                           .b_row_stride = operands.b_strides.row,
                           .b_column_stride = operands.b_strides.column,
                           .dtype = problem.dtype,
                           .out_dtype = problem.out_dtype,
                           .bias = problem.bias ? operands.bias.bytes.data() : nullptr,
                           .accumulate = problem.accumulate,
                           .band_lower = problem.band_lower,
                           .band_upper = problem.band_upper};
  for (size_t i = 0; i < problem.batch.size(); ++i) {
    const kernels::MatmulBatch& dim = problem.batch[i];
    args.batch[i] = {dim.size, dim.a_stride * operands.a_strides.matrix, dim.b_stride * operands.b_strides.matrix,
                     dim.out_stride * operands.out_strides.matrix};
  }
  args.workspace_bytes = kernels::matmul_workspace(args, Device::cpu());
  void* workspace = raw_malloc(args.workspace_bytes + 64, Device::cpu());
  std::memset(workspace, 0xff, args.workspace_bytes + 64);
  args.workspace = workspace;
  kernels::matmul(args, Stream{});
  raw_free(workspace, Device::cpu());
  return out;
}

// The largest error relative to the largest sum of absolute terms; infinity when memory beside out has changed.
double error_of_product(const Problem& problem, bool poison) {
  const Operands operands(problem, poison);
  const std::vector<std::byte> out = run(problem, operands);
  int64_t num_products = 1;
  for (const kernels::MatmulBatch& dim : problem.batch) num_products *= dim.size;
  double difference = 0, magnitude = 1e-300;
  std::vector<std::byte> untouched = operands.out.bytes;
  for (int64_t product = 0; product < num_products; ++product) {
    int64_t a_matrix = 0, b_matrix = 0, out_matrix = 0, index = product;
    for (const kernels::MatmulBatch& dim : problem.batch) {
      a_matrix += index % dim.size * dim.a_stride;
      b_matrix += index % dim.size * dim.b_stride;
      out_matrix += index % dim.size * dim.out_stride;
      index /= dim.size;
    }
    for (int64_t i = 0; i < problem.m; ++i) {
      for (int64_t j = 0; j < problem.n; ++j) {
        const size_t at = static_cast<size_t>(operands.out_strides.at(out_matrix, i, j));
        long double sum = problem.accumulate ? operands.out.values[at] : 0;
        double absolute = 0;
        if (problem.bias) sum += operands.bias.values[static_cast<size_t>(j)];
        for (int64_t p = 0; p < problem.k; ++p) {
          if (!in_band(problem, i, p)) continue;
          const long double term =
              static_cast<long double>(operands.a.values[static_cast<size_t>(operands.a_strides.at(a_matrix, i, p))]) *
              operands.b.values[static_cast<size_t>(operands.b_strides.at(b_matrix, p, j))];
          sum += term;
          absolute += static_cast<double>(std::abs(term));
        }
        const size_t size = size_of(problem.out_dtype);
        std::memcpy(untouched.data() + at * size, out.data() + at * size, size);
        const double given = dispatch_floating(problem.out_dtype, "test", [&]<class T>() {
          T value;
          std::memcpy(&value, out.data() + at * size, size);
          return static_cast<double>(static_cast<accumulate_t<T>>(value));
        });
        if (!std::isfinite(given)) return infinity;
        difference = std::max(difference, std::abs(given - static_cast<double>(sum)));
        magnitude = std::max({magnitude, std::abs(static_cast<double>(sum)), absolute});
      }
    }
  }
  return untouched == out ? difference / magnitude : infinity;
}

void check_problem(const Problem& problem, bool poison = false) {
  CAPTURE(problem.m);
  CAPTURE(problem.n);
  CAPTURE(problem.k);
  CAPTURE(std::string(name_of(problem.dtype)));
  CAPTURE(static_cast<int>(problem.a_layout));
  CAPTURE(static_cast<int>(problem.b_layout));
  CAPTURE(problem.band_lower);
  CAPTURE(problem.band_upper);
  const double allowed = problem.out_dtype == DType::f64    ? 1e-15
                         : problem.out_dtype == DType::f32  ? 1e-6
                         : problem.out_dtype == DType::bf16 ? 4e-3
                                                            : 5e-4;
  CHECK(error_of_product(problem, poison) <= allowed);
}

class ThreadCount {
 public:
  explicit ThreadCount(int count) : previous_(num_threads()) { set_num_threads(count); }
  ~ThreadCount() { set_num_threads(previous_); }

 private:
  int previous_;
};

constexpr std::pair<DType, DType> dtypes[] = {{DType::f32, DType::f32},   {DType::f64, DType::f64},
                                              {DType::bf16, DType::bf16}, {DType::f16, DType::f16},
                                              {DType::bf16, DType::f32},  {DType::f16, DType::f32}};
constexpr Layout layouts[] = {Layout::rows, Layout::columns, Layout::spread};

}  // namespace

TEST_CASE("matmul kernel: agrees with the definition for odd shapes, any strides and every dtype") {
  for (auto [dtype, out_dtype] : dtypes) {
    for (Layout a_layout : layouts) {
      for (Layout b_layout : layouts) {
        for (int64_t m : {1, 7, 8, 45}) {
          for (int64_t n : {1, 17, 32, 71}) {
            for (int64_t k : {0, 1, 19, 64}) {
              check_problem({.m = m,
                             .n = n,
                             .k = k,
                             .a_layout = a_layout,
                             .b_layout = b_layout,
                             .dtype = dtype,
                             .out_dtype = out_dtype});
            }
          }
        }
      }
    }
  }
}

TEST_CASE("matmul kernel: agrees with the definition where a product takes several blocks") {
  for (auto [dtype, out_dtype] : dtypes) {
    for (auto [m, n, k] :
         {std::tuple(1030, 40, 33), std::tuple(9, 1037, 50), std::tuple(20, 33, 1031), std::tuple(270, 530, 40)}) {
      for (Layout layout : {Layout::rows, Layout::columns}) {
        check_problem(
            {.m = m, .n = n, .k = k, .a_layout = layout, .b_layout = layout, .dtype = dtype, .out_dtype = out_dtype});
      }
    }
  }
}

TEST_CASE("matmul kernel: bias and accumulate start the sums") {
  for (auto [dtype, out_dtype] : dtypes) {
    for (bool bias : {false, true}) {
      for (bool accumulate : {false, true}) {
        for (int64_t k : {0, 5, 500}) {
          CAPTURE(bias);
          CAPTURE(accumulate);
          check_problem({.m = 35,
                         .n = 75,
                         .k = k,
                         .dtype = dtype,
                         .out_dtype = out_dtype,
                         .bias = bias,
                         .accumulate = accumulate});
        }
      }
    }
  }
}

TEST_CASE("matmul kernel: batch dimensions broadcast and come in any order") {
  for (auto [dtype, out_dtype] : dtypes) {
    check_problem({.m = 9, .n = 33, .k = 12, .dtype = dtype, .out_dtype = out_dtype, .batch = {{5, 1, 1, 1}}});
    check_problem(
        {.m = 9, .n = 33, .k = 12, .dtype = dtype, .out_dtype = out_dtype, .batch = {{3, 1, 0, 4}, {4, 0, 1, 1}}});
    check_problem({.m = 3,
                   .n = 5,
                   .k = 4,
                   .dtype = dtype,
                   .out_dtype = out_dtype,
                   .batch = {{2, 1, 0, 1}, {3, 2, 1, 2}, {1, 9, 9, 9}, {2, 0, 3, 6}, {2, 0, 0, 12}, {2, 6, 0, 24}}});
  }
}

TEST_CASE("matmul kernel: nothing outside the band is looked at, NaN and infinity included") {
  for (auto [dtype, out_dtype] : dtypes) {
    for (auto [m, n, k] : {std::tuple(1, 3, 1), std::tuple(20, 33, 20), std::tuple(50, 40, 70), std::tuple(70, 40, 50),
                           std::tuple(300, 17, 900), std::tuple(900, 17, 30)}) {
      for (auto [lower, upper] :
           {std::pair(kernels::no_band_lower, int64_t{k - m}), std::pair(int64_t{m - k}, kernels::no_band_upper),
            std::pair(kernels::no_band_lower, int64_t{0}), std::pair(int64_t{-3}, int64_t{2}),
            std::pair(int64_t{5}, int64_t{40}), std::pair(int64_t{-400}, int64_t{-390}),
            std::pair(int64_t{1}, int64_t{0}), std::pair(int64_t{2000}, kernels::no_band_upper)}) {
        check_problem(
            {.m = m, .n = n, .k = k, .dtype = dtype, .out_dtype = out_dtype, .band_lower = lower, .band_upper = upper},
            true);
      }
    }
    check_problem({.m = 60,
                   .n = 40,
                   .k = 50,
                   .a_layout = Layout::columns,
                   .b_layout = Layout::columns,
                   .dtype = dtype,
                   .out_dtype = out_dtype,
                   .accumulate = true,
                   .band_lower = -20,
                   .band_upper = 7,
                   .batch = {{3, 1, 1, 1}}},
                  true);
  }
}

TEST_CASE("matmul kernel: result bits do not depend on the number of threads") {
  for (auto [dtype, out_dtype] : dtypes) {
    for (const Problem& problem :
         {Problem{.m = 300, .n = 500, .k = 450, .dtype = dtype, .out_dtype = out_dtype},
          Problem{.m = 64, .n = 1100, .k = 390, .b_layout = Layout::columns, .dtype = dtype, .out_dtype = out_dtype},
          Problem{.m = 700, .n = 64, .k = 700, .dtype = dtype, .out_dtype = out_dtype, .band_upper = 3},
          Problem{.m = 90, .n = 65, .k = 120, .dtype = dtype, .out_dtype = out_dtype, .batch = {{7, 1, 1, 1}}}}) {
      const Operands operands(problem, false);
      std::vector<std::byte> with_one_thread;
      for (int threads : {1, 2, 3, 5}) {
        const ThreadCount count(threads);
        CAPTURE(threads);
        const std::vector<std::byte> out = run(problem, operands);
        if (threads == 1) with_one_thread = out;
        CHECK(out == with_one_thread);
      }
    }
  }
}

TEST_CASE("matmul kernel: a NaN or an infinity reaches the elements that it belongs to and no other") {
  for (double special : {not_a_number, infinity}) {
    const Tensor a = ones({40, 30}), b = ones({30, 50});
    a.data<float>()[17 * 30 + 4] = static_cast<float>(special);
    b.data<float>()[11 * 50 + 23] = static_cast<float>(special);
    const std::vector<float> out = matmul(a, b).to_vector<float>();
    for (size_t i = 0; i < 40; ++i) {
      for (size_t j = 0; j < 50; ++j) CHECK(std::isfinite(out[i * 50 + j]) == (i != 17 && j != 23));
    }
  }
}

TEST_CASE("matmul kernel: too small a workspace is refused") {
  std::vector<float> a(100 * 100), b(100 * 100), out(100 * 100);
  kernels::MatmulArgs args{.out = out.data(),
                           .a = a.data(),
                           .b = b.data(),
                           .m = 100,
                           .n = 100,
                           .k = 100,
                           .out_row_stride = 100,
                           .a_row_stride = 100,
                           .a_column_stride = 1,
                           .b_row_stride = 1,
                           .b_column_stride = 100,
                           .dtype = DType::f32,
                           .out_dtype = DType::f32};
  REQUIRE(kernels::matmul_workspace(args, Device::cpu()) > 0);
  CHECK(contains(error_of([&] { kernels::matmul(args, Stream{}); }), "matmul: workspace of 0 bytes given, expected "));
}

TEST_CASE("matmul: shapes broadcast, views are read in place and gradients match finite differences") {
  const auto product = [](const std::vector<Tensor>& x) { return matmul(x[0], x[1]); };
  for (bool strided : {false, true}) {
    for (const auto& shapes : std::vector<std::vector<Shape>>{{{4, 5}, {5, 6}},
                                                              {{2, 3, 4, 5}, {5, 6}},
                                                              {{4, 5}, {2, 3, 5, 6}},
                                                              {{2, 1, 4, 5}, {3, 5, 6}},
                                                              {{1, 4, 1}, {3, 1, 6}}}) {
      gradcheck(product, shapes, strided);
    }
  }
  const Tensor x = uniform({3, 7, 5}, -1, 1), y = uniform({3, 7, 4}, -1, 1);
  CHECK(same_bits(matmul(transpose(x, 1, 2), y), matmul(contiguous(transpose(x, 1, 2)), y)));
  CHECK(matmul(zeros({2, 0, 5}), zeros({5, 3})).shape() == Shape{2, 0, 3});
  CHECK(matmul(zeros({2, 0}), zeros({0, 3})).to_vector<float>() == std::vector<float>(6, 0.0f));
}

TEST_CASE("matmul: a gradient that is not needed is not computed") {
  const Tensor a = ones({3, 4}).set_requires_grad(), b = ones({4, 2});
  sum(matmul(a, b)).backward();
  CHECK(a.grad().to_vector<float>() == std::vector<float>(12, 2.0f));
  CHECK_FALSE(b.grad().defined());
}

TEST_CASE("linear: is x weight^T + bias over all leading axes") {
  const Tensor x = uniform({2, 3, 7}, -1, 1), weight = uniform({5, 7}, -1, 1), bias = uniform({5}, -1, 1);
  const Tensor expected = matmul(x, transpose(weight, 0, 1)) + bias;
  CHECK(relative_difference(linear(x, weight, bias), expected) <= 1e-6);
  CHECK(linear(reshape(x, {6, 7}), weight).shape() == Shape{6, 5});
  CHECK(linear(slice(reshape(x, {42}), 0, 0, 7), weight).shape() == Shape{5});
  CHECK(linear(zeros({0, 7}), weight, bias).shape() == Shape{0, 5});
  const auto layer = [](const std::vector<Tensor>& inputs) { return linear(inputs[0], inputs[1], inputs[2]); };
  for (bool strided : {false, true}) gradcheck(layer, {{2, 3, 7}, {5, 7}, {5}}, strided);
}

TEST_CASE("mlp: is its two linear layers with GELU between them") {
  const Tensor x = uniform({2, 3, 7}, -1, 1), fc_weight = uniform({20, 7}, -1, 1), fc_bias = uniform({20}, -1, 1),
               proj_weight = uniform({5, 20}, -1, 1), proj_bias = uniform({5}, -1, 1);
  const std::vector<Tensor> inputs{x, fc_weight, fc_bias, proj_weight, proj_bias};
  const auto gradients_of = [&](const Tensor& y) {
    y.backward(ones(y.shape()));
    std::vector<Tensor> gradients;
    for (const Tensor& input : inputs) {
      gradients.push_back(input.grad());
      input.set_grad(Tensor());
    }
    return gradients;
  };
  for (const Tensor& input : inputs) input.set_requires_grad();
  const Tensor expected = linear(gelu(linear(x, fc_weight, fc_bias), GeluForm::tanh), proj_weight, proj_bias);
  const Tensor y = mlp(x, fc_weight, fc_bias, proj_weight, proj_bias);
  CHECK(relative_difference(y, expected) <= 1e-6);
  const std::vector<Tensor> gradients = gradients_of(y), expected_gradients = gradients_of(expected);
  for (size_t i = 0; i < inputs.size(); ++i) {
    CAPTURE(i);
    CHECK(relative_difference(gradients[i], expected_gradients[i]) <= 1e-6);
  }
  const NoGrad no_grad;
  CHECK(relative_difference(mlp(x, fc_weight, fc_bias, proj_weight, proj_bias), expected) <= 1e-6);
  CHECK(mlp(zeros({0, 7}), fc_weight, {}, proj_weight, {}).shape() == Shape{0, 5});
}

TEST_CASE("matmul_into: writes views, accumulates and keeps to its band") {
  const Tensor a = uniform({2, 6, 6}, -1, 1), b = uniform({2, 6, 4}, -1, 1);
  const Tensor out = full({6, 2, 4}, 1.0);
  matmul_into(permute(out, {1, 0, 2}), a, b, {.accumulate = true});
  CHECK(relative_difference(permute(out, {1, 0, 2}), matmul(a, b) + 1.0) <= 1e-6);

  const Tensor poisoned = full({3, 2}, not_a_number);
  slice(poisoned, 0, 0, 1).copy_from(ones({1, 2}));
  const Tensor lower = empty({3, 2});
  matmul_into(lower, ones({3, 3}), poisoned, {.band_upper = -1});
  const std::vector<float> rows = lower.to_vector<float>();
  CHECK(rows[0] == 0.0f);
  CHECK(rows[2] == 1.0f);
  CHECK(std::isnan(rows[4]));

  const Tensor half = uniform({3, 5}, -1, 1).to(DType::bf16), wide = empty({3, 3}, DType::f32);
  matmul_into(wide, half, transpose(half, 0, 1));
  CHECK(relative_difference(wide, matmul(half.to(DType::f64), transpose(half.to(DType::f64), 0, 1)).to(DType::f32)) <=
        1e-6);
}

TEST_CASE("matmul, linear and mlp: bad arguments are named") {
  const Tensor a = zeros({2, 3}), b = zeros({3, 4});
  CHECK(error_of([&] { matmul(Tensor(), b); }).starts_with("matmul: a "));
  CHECK(error_of([&] { matmul(a, zeros({3})); }) == "matmul: a (2, 3) and b (3) given, expected at least 2 axes each");
  CHECK(error_of([&] { matmul(a, a); }) ==
        "matmul: a (2, 3) and b (2, 3) given, expected as many columns of a as rows of b");
  CHECK(contains(error_of([&] { matmul(zeros({2, 2, 3}), zeros({3, 3, 4})); }), "matmul: shapes (2) and (3)"));
  CHECK(error_of([&] { matmul(a, b.to(DType::f64)); }).starts_with("matmul: "));
  CHECK(error_of([&] { matmul(a.to(DType::i32), b.to(DType::i32)); }).starts_with("matmul: a "));
  CHECK(error_of([&] { matmul_into(zeros({2, 5}), a, b); }) == "matmul: out (2, 5) given, expected (2, 4)");
  CHECK(contains(error_of([&] { matmul_into(transpose(zeros({4, 2}), 0, 1), a, b); }), "column stride 2"));
  CHECK(contains(error_of([&] { matmul_into(zeros({2, 4}, DType::f64), a, b); }), "out f64"));

  CHECK(error_of([&] { linear(a, b); }) == "linear: x (2, 3) given, expected (..., 4) for weight (3, 4)");
  CHECK(error_of([&] { linear(a, zeros({3})); }) == "linear: weight (3) given, expected (out, in)");
  CHECK(error_of([&] {
          linear(a, zeros({4, 3}), zeros({3}));
        }) == "linear: bias (3) given, expected (4) for weight (4, 3)");
  CHECK(error_of([&] { linear(a, zeros({4, 3}, DType::f64)); }).starts_with("linear: "));

  const Tensor fc_weight = zeros({4, 3}), fc_bias = zeros({4});
  CHECK(error_of([&] { mlp(b, fc_weight, fc_bias, b, {}); }) ==
        "mlp: x (3, 4) given, expected (..., 3) for fc_weight (4, 3)");
  CHECK(error_of([&] { mlp(a, fc_weight, fc_bias, a, {}); }) ==
        "mlp: proj_weight (2, 3) given, expected (out, 4) for fc_weight (4, 3)");
  CHECK(error_of([&] { mlp(a, fc_weight, fc_bias, b, fc_bias); }) ==
        "mlp: proj_bias (4) given, expected (3) for proj_weight (3, 4)");
  CHECK(contains(error_of([&] { mlp(a, fc_weight, fc_bias, Tensor(), {}); }), "proj_weight is undefined"));
}
