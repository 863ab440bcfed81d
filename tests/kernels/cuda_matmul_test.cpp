// Matrix products on the GPU against a plain f64 sum: layouts, batches, bands, bias, accumulation, alignment.
#include <doctest/doctest.h>

#include "strobe/kernels/matmul.h"
#include "support/compare.h"
#include "support/gpu_operand.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

enum class Layout { rows, columns, strided, repeated };  // repeated: all rows are one

struct Problem {
  int64_t m = 1;
  int64_t n = 1;
  int64_t k = 1;
  DType dtype = DType::f32;
  DType out_dtype = DType::f32;
  Layout a = Layout::rows;
  Layout b = Layout::rows;
  bool bias = false;
  bool accumulate = false;
  int64_t padding = 0;  // elements between the rows of out
  int64_t shift = 0;
  int64_t band_lower = kernels::no_band_lower;
  int64_t band_upper = kernels::no_band_upper;
  std::vector<kernels::MatmulBatch> batch = {};  // strides count matrices
  bool infinite_b = false;
};

struct Strides {
  int64_t row;
  int64_t column;
  int64_t matrix;  // elements
};

Strides strides_of(Layout layout, int64_t rows, int64_t columns) {
  switch (layout) {
    case Layout::rows:
      return {columns, 1, rows * columns};
    case Layout::columns:
      return {1, rows, rows * columns};
    case Layout::strided:
      return {2 * columns + 1, 2, rows * (2 * columns + 1)};
    case Layout::repeated:
      return {0, 1, columns};
  }
  return {};
}

bool in_band(const Problem& problem, int64_t i, int64_t p) {
  return p >= i + problem.band_lower && p <= i + problem.band_upper;
}

struct Index {
  int64_t a = 0, b = 0, out = 0;  // matrices
};
Index index_of(const Problem& problem, int64_t product) {
  Index index;
  for (const kernels::MatmulBatch& dim : problem.batch) {
    index.a += product % dim.size * dim.a_stride;
    index.b += product % dim.size * dim.b_stride;
    index.out += product % dim.size * dim.out_stride;
    product /= dim.size;
  }
  return index;
}

// The largest error relative to the largest sum of absolute terms.
double error_of_product(const Problem& problem) {
  const Strides a_strides = strides_of(problem.a, problem.m, problem.k);
  const Strides b_strides = strides_of(problem.b, problem.k, problem.n);
  const Strides out_strides{problem.n + problem.padding, 1, problem.m * (problem.n + problem.padding)};
  int64_t num_products = 1;
  Index last;
  for (const kernels::MatmulBatch& dim : problem.batch) {
    num_products *= dim.size;
    last.a += (dim.size - 1) * dim.a_stride;
    last.b += (dim.size - 1) * dim.b_stride;
    last.out += (dim.size - 1) * dim.out_stride;
  }
  std::vector<double> a_values = random_values((last.a + 1) * a_strides.matrix + 1, 1);
  const auto a_at = [&](int64_t matrix, int64_t i, int64_t p) {
    return static_cast<size_t>(matrix * a_strides.matrix + i * a_strides.row + p * a_strides.column);
  };
  for (int64_t matrix = 0; matrix <= last.a; ++matrix) {
    for (int64_t i = 0; i < problem.m; ++i) {
      for (int64_t p = 0; p < problem.k; ++p) {
        if (!in_band(problem, i, p)) a_values[a_at(matrix, i, p)] = 0;
      }
    }
  }
  std::vector<double> b_values = random_values((last.b + 1) * b_strides.matrix + 1, 2);
  if (problem.infinite_b) {
    b_values[static_cast<size_t>((problem.k / 2) * b_strides.row)] = not_a_number;
    b_values[static_cast<size_t>((problem.k - 1) * b_strides.row + b_strides.column)] = infinity;
  }
  Operand a(a_values, problem.dtype, problem.shift), b(b_values, problem.dtype, problem.shift);
  Operand bias(random_values(problem.n, 3), problem.dtype, problem.shift);
  const int64_t out_size = (last.out + 1) * out_strides.matrix;
  Operand out(problem.accumulate ? random_values(out_size, 4) : Operand::unwritten(out_size), problem.out_dtype,
              problem.shift);

  kernels::MatmulArgs args{.out = out.gpu(),
                           .a = a.gpu(),
                           .b = b.gpu(),
                           .m = problem.m,
                           .n = problem.n,
                           .k = problem.k,
                           .out_row_stride = out_strides.row,
                           .a_row_stride = a_strides.row,
                           .a_column_stride = a_strides.column,
                           .b_row_stride = b_strides.row,
                           .b_column_stride = b_strides.column,
                           .dtype = problem.dtype,
                           .out_dtype = problem.out_dtype,
                           .bias = problem.bias ? bias.gpu() : nullptr,
                           .accumulate = problem.accumulate,
                           .band_lower = problem.band_lower,
                           .band_upper = problem.band_upper};
  for (size_t i = 0; i < problem.batch.size(); ++i) {
    const kernels::MatmulBatch& dim = problem.batch[i];
    args.batch[i] = {dim.size, dim.a_stride * a_strides.matrix, dim.b_stride * b_strides.matrix,
                     dim.out_stride * out_strides.matrix};
  }
  args.workspace_bytes = kernels::matmul_workspace(args, Device::cuda());
  const GpuMemory workspace(args.workspace_bytes);
  args.workspace = workspace.data();
  kernels::matmul(args, gpu_stream());
  const std::vector<double> given = out.gpu_values();
  if (!problem.accumulate) {
    kernels::matmul(args, gpu_stream());
    const std::vector<double> again = out.gpu_values();
    CHECK(std::memcmp(given.data(), again.data(), given.size() * sizeof(double)) == 0);
  }

  std::vector<bool> is_element(given.size());
  double difference = 0, magnitude = 1e-300;
  for (int64_t product = 0; product < num_products; ++product) {
    const Index index = index_of(problem, product);
    for (int64_t i = 0; i < problem.m; ++i) {
      for (int64_t j = 0; j < problem.n; ++j) {
        const size_t at = static_cast<size_t>(index.out * out_strides.matrix + i * out_strides.row + j);
        double sum = problem.accumulate ? out.values()[at] : 0, absolute = 0;
        if (problem.bias) sum += bias.values()[static_cast<size_t>(j)];
        for (int64_t p = 0; p < problem.k; ++p) {
          if (!in_band(problem, i, p)) continue;
          const double term =
              a.values()[a_at(index.a, i, p)] *
              b.values()[static_cast<size_t>(index.b * b_strides.matrix + p * b_strides.row + j * b_strides.column)];
          sum += term;
          absolute += std::abs(term);
        }
        is_element[at] = true;
        if (std::isnan(sum) && std::isnan(given[at])) continue;
        if (sum == given[at]) continue;
        if (!std::isfinite(sum) || !std::isfinite(given[at])) return infinity;
        difference = std::max(difference, std::abs(given[at] - sum));
        magnitude = std::max({magnitude, std::abs(sum), absolute});
      }
    }
  }
  for (size_t at = 0; at < given.size(); ++at) {  // what lies between the rows is as before
    if (is_element[at]) continue;
    if (std::isnan(given[at]) != std::isnan(out.values()[at])) return infinity;
    if (!std::isnan(given[at]) && given[at] != out.values()[at]) return infinity;
  }
  return difference / magnitude;
}

void check_product(const Problem& problem) {
  CAPTURE(problem.m);
  CAPTURE(problem.n);
  CAPTURE(problem.k);
  CAPTURE(std::string(name_of(problem.dtype)));
  CAPTURE(std::string(name_of(problem.out_dtype)));
  CAPTURE(static_cast<int>(problem.a));
  CAPTURE(static_cast<int>(problem.b));
  CAPTURE(problem.bias);
  CAPTURE(problem.accumulate);
  CAPTURE(problem.shift);
  CAPTURE(problem.band_lower);
  CAPTURE(problem.band_upper);
  const double allowed = problem.out_dtype == DType::f64    ? 1e-15
                         : problem.out_dtype == DType::f32  ? 1e-6
                         : problem.out_dtype == DType::bf16 ? 4e-3
                                                            : 5e-4;
  CHECK(error_of_product(problem) <= allowed);
}

template <class F>
void for_each_dtype(F&& f) {
  for (DType dtype : floating_dtypes) {
    f(dtype, dtype);
    if (accumulate_dtype(dtype) != dtype) f(dtype, accumulate_dtype(dtype));
  }
}

}  // namespace

TEST_CASE("cuda matmul: every layout of the factors, odd sizes and alignments" * needs_gpu()) {
  const int64_t sizes[][3] = {{1, 1, 1},    {1, 65, 33},    {65, 1, 40}, {33, 17, 1},
                              {64, 64, 64}, {129, 71, 200}, {2, 3, 4097}};
  for_each_dtype([&](DType dtype, DType out_dtype) {
    for (const auto& [m, n, k] : sizes) {
      for (Layout a : {Layout::rows, Layout::columns, Layout::strided, Layout::repeated}) {
        for (Layout b : {Layout::rows, Layout::columns, Layout::strided, Layout::repeated}) {
          const int64_t shift = (m + n + k) % 3 == 0 ? 1 : 0;
          check_product(
              {.m = m, .n = n, .k = k, .dtype = dtype, .out_dtype = out_dtype, .a = a, .b = b, .shift = shift});
        }
      }
    }
  });
}

TEST_CASE("cuda matmul: bias, accumulation and rows of out apart" * needs_gpu()) {
  for_each_dtype([](DType dtype, DType out_dtype) {
    for (bool bias : {false, true}) {
      for (bool accumulate : {false, true}) {
        for (int64_t k : {0, 24, 300}) {
          Problem problem{
              .m = 40, .n = 72, .k = k, .dtype = dtype, .out_dtype = out_dtype, .bias = bias, .accumulate = accumulate};
          check_product(problem);
          problem.padding = 3;
          problem.shift = 1;
          problem.n = 37;
          check_product(problem);
        }
      }
    }
  });
}

TEST_CASE("cuda matmul: batches that repeat, transpose and interleave matrices" * needs_gpu()) {
  for_each_dtype([](DType dtype, DType out_dtype) {
    Problem problem{.m = 17, .n = 24, .k = 40, .dtype = dtype, .out_dtype = out_dtype};
    problem.batch = {{3, 1, 1, 1}};
    check_product(problem);
    problem.batch = {{3, 1, 1, 1}, {4, 3, 3, 3}};  // one dimension for cuBLASLt
    check_product(problem);
    problem.batch = {{4, 3, 0, 3}, {3, 1, 1, 1}};  // b repeated
    check_product(problem);
    problem.batch = {{2, 6, 3, 1}, {3, 2, 1, 4}, {2, 1, 0, 2}};
    check_product(problem);
    problem.batch = {{2, 0, 1, 1}, {0, 1, 1, 1}};  // none
    check_product(problem);
    problem.a = Layout::strided;
    problem.batch = {{2, 1, 0, 3}, {3, 0, 1, 1}};
    check_product(problem);
  });
  Problem many{.m = 2, .n = 3, .k = 4};
  many.batch = {{70001, 1, 1, 1}};
  check_product(many);
}

TEST_CASE("cuda matmul: banded products, whose hidden rows of b may hold NaN and infinity" * needs_gpu()) {
  for_each_dtype([](DType dtype, DType out_dtype) {
    for (bool infinite : {false, true}) {
      for (Layout a : {Layout::rows, Layout::columns, Layout::strided}) {
        Problem problem{.m = 70, .n = 33, .k = 90, .dtype = dtype, .out_dtype = out_dtype, .a = a};
        problem.infinite_b = infinite;
        problem.band_upper = 20;
        check_product(problem);
        problem.band_lower = -8;
        problem.batch = {{2, 2, 1, 2}, {2, 1, 0, 1}};
        check_product(problem);
        problem.accumulate = true;
        problem.bias = out_dtype == dtype;
        check_product(problem);
      }
    }
  });
}

TEST_CASE("cuda matmul: GELU of a product and its derivative, as on the CPU" * needs_gpu()) {
  const int64_t sizes[][3] = {{1, 8, 1}, {70, 64, 40}, {33, 17, 20}, {300, 136, 96}, {2048, 768, 192}, {5, 8, 0}};
  for (DType dtype : floating_dtypes) {
    for (const auto& [m, n, k] : sizes) {
      for (const auto& [epilogue, with_bias] : {std::pair{kernels::MatmulEpilogue::gelu, true},
                                                {kernels::MatmulEpilogue::gelu, false},
                                                {kernels::MatmulEpilogue::gelu_backward, false}}) {
        CAPTURE(std::string(name_of(dtype)));
        CAPTURE(m);
        CAPTURE(n);
        CAPTURE(static_cast<int>(epilogue));
        CAPTURE(with_bias);
        const bool forward = epilogue == kernels::MatmulEpilogue::gelu;
        Operand a(random_values(m * k, 1), dtype), b(random_values(k * n, 2), dtype), bias(random_values(n, 3), dtype);
        Operand out(Operand::unwritten(m * n), dtype);
        Operand pre(forward ? Operand::unwritten(m * n) : random_values(m * n, 4, -4, 4), dtype);
        kernels::MatmulArgs args{.out = out.host(),
                                 .a = a.host(),
                                 .b = b.host(),
                                 .m = m,
                                 .n = n,
                                 .k = k,
                                 .out_row_stride = n,
                                 .a_row_stride = k,
                                 .a_column_stride = 1,
                                 .b_row_stride = 1,
                                 .b_column_stride = k,
                                 .dtype = DType::f64,
                                 .out_dtype = DType::f64,
                                 .bias = with_bias ? bias.host() : nullptr,
                                 .epilogue = epilogue,
                                 .pre = pre.host()};
        args.workspace_bytes = kernels::matmul_workspace(args, Device::cpu());
        std::vector<std::byte> host_workspace(args.workspace_bytes + 64);
        args.workspace = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(host_workspace.data()) + 63) / 64 * 64);
        kernels::matmul(args, Stream{});

        args.out = out.gpu(), args.a = a.gpu(), args.b = b.gpu(), args.pre = pre.gpu(),
        args.dtype = args.out_dtype = dtype;
        if (with_bias) args.bias = bias.gpu();
        args.workspace_bytes = kernels::matmul_workspace(args, Device::cuda());
        const GpuMemory workspace(args.workspace_bytes);
        args.workspace = workspace.data();
        kernels::matmul(args, gpu_stream());
        CHECK(out.error() <= gpu_tolerance(dtype));
        CHECK(pre.error() <= gpu_tolerance(dtype));
        const std::vector<double> first = out.gpu_values();
        for (int repeat = 0; repeat < 3; ++repeat) {
          kernels::matmul(args, gpu_stream());
          const std::vector<double> again = out.gpu_values();
          CHECK(std::memcmp(first.data(), again.data(), first.size() * sizeof(double)) == 0);
        }
      }
    }
  }
}

TEST_CASE("cuda linear: its rows start aligned, and cross_entropy differentiates it in place" * needs_gpu()) {
  const DeviceGuard gpu(Device::cuda());
  constexpr int64_t rows = 32768, in = 16, vocab = 1029, padded = 1032;  // multiples of 8 want 1029 cut
  const Tensor targets = from_vector(std::vector<int64_t>(static_cast<size_t>(rows), 7), {4, rows / 4});
  for (DType dtype : {DType::bf16, DType::f32}) {
    CAPTURE(std::string(name_of(dtype)));
    const Tensor x = uniform({4, rows / 4, in}, -1, 1, dtype).set_requires_grad();
    const Tensor weight = uniform({vocab, in}, -1, 1, dtype).set_requires_grad();
    CHECK(linear(x, weight).strides() == Shape{rows / 4 * padded, padded, 1});
    CHECK(linear(x, slice(weight, 0, 0, 3)).is_contiguous());  // padding would double it
    const size_t before = memory_stats().current;
    reset_peak_memory();
    const Tensor loss = cross_entropy(linear(x, weight), targets);
    loss.backward();
    CHECK(memory_stats().peak < before + 2 * rows * vocab * size_of(dtype));
    const Tensor dx = x.grad(), dweight = weight.grad();
    x.set_grad(Tensor()), weight.set_grad(Tensor());
    const Tensor logits = linear(x, weight);  // still used when its gradient comes
    cross_entropy(logits, targets).backward();
    CHECK(same_bits(x.grad(), dx));
    CHECK(same_bits(weight.grad(), dweight));

    const DeviceGuard cpu(Device::cpu());
    const auto reference = [](const Tensor& values) {
      return values.detach().to(Device::cpu()).to(DType::f64).set_requires_grad();
    };
    const Tensor x_reference = reference(x), weight_reference = reference(weight);
    const Tensor logits_reference = linear(x_reference, weight_reference);
    cross_entropy(logits_reference, targets.to(Device::cpu())).backward();
    CHECK(relative_difference(logits, logits_reference) <= tolerance(dtype));
    CHECK(relative_difference(dx, x_reference.grad()) <= tolerance(dtype));
    CHECK(relative_difference(dweight, weight_reference.grad()) <= tolerance(dtype));
  }
}

TEST_CASE("cuda matmul: TF32 only where it is allowed" * needs_gpu()) {
  const Problem problem{.m = 256, .n = 256, .k = 512};
  CHECK(error_of_product(problem) <= 1e-6);
  set_allow_tf32(true);
  const double rounded = error_of_product(problem);
  set_allow_tf32(false);
  CHECK(rounded > 1e-6);
  CHECK(rounded <= 1e-3);
  CHECK(error_of_product(problem) <= 1e-6);
}

TEST_CASE("cuda matmul: a workspace too small is refused" * needs_gpu()) {
  Operand x(random_values(64, 1), DType::f32);
  kernels::MatmulArgs args{.out = x.gpu(),
                           .a = x.gpu(),
                           .b = x.gpu(),
                           .m = 4,
                           .n = 4,
                           .k = 4,
                           .out_row_stride = 4,
                           .a_row_stride = 4,
                           .a_column_stride = 1,
                           .b_row_stride = 4,
                           .b_column_stride = 1,
                           .dtype = DType::f32,
                           .out_dtype = DType::f32,
                           .band_upper = 0};
  CHECK(kernels::matmul_workspace(args, Device::cuda()) > 0);
  CHECK_THROWS_AS(kernels::matmul(args, gpu_stream()), Error);
}
