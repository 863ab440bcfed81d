// Layer and RMS normalization on the GPU against the CPU in f64.
#include <doctest/doctest.h>

#include "strobe/kernels/norm.h"
#include "support/gpu_operand.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

struct Case {
  int64_t rows;
  int64_t cols;
  bool has_weight;
  bool has_bias;
  int64_t shift;
  bool has_residual = false;
};
constexpr Case cases[] = {{1, 1, true, true, 0},
                          {3, 7, true, true, 1},
                          {33, 64, false, false, 0},
                          {257, 768, true, true, 0},
                          {257, 768, true, true, 1},
                          {5000, 128, true, false, 0},
                          {20, 1601, true, true, 0},
                          {9, 4096, false, true, 0},
                          {3, 20000, true, true, 0},
                          {2, 20001, true, true, 1},
                          {70001, 3, true, true, 0},
                          {0, 16, true, true, 0},
                          {257, 768, true, true, 0, true},
                          {100, 384, true, false, 0, true},
                          {300, 768, true, true, 1, true},
                          {40, 24, false, false, 0, true},
                          {70, 1000, true, true, 0, true},
                          {70, 1024, true, true, 0},
                          {5000, 2048, true, true, 0, true},
                          {9, 8192, true, true, 0, true},
                          {7, 20000, true, true, 0, true},
                          {5, 7, true, true, 0, true},
                          {1001, 384, true, true, 0},
                          {77, 1600, true, true, 0, true},
                          {130, 800, false, true, 0},
                          {37, 256, true, true, 0, true},
                          {29, 384, true, true, 0, true},
                          {21, 768, true, true, 0},
                          {9, 4096, true, true, 0, true},
                          {40, 3072, true, true, 0}};

using Forward = void (*)(const kernels::NormArgs&, const Stream&);
using Backward = void (*)(const kernels::NormGradArgs&, const Stream&);

void check_norm(const Case& c, DType dtype, bool centered) {
  CAPTURE(std::string(name_of(dtype)));
  CAPTURE(centered);
  CAPTURE(c.rows);
  CAPTURE(c.cols);
  CAPTURE(c.shift);
  const Forward forward = centered ? kernels::layer_norm_forward : kernels::rms_norm_forward;
  const Backward backward = centered ? kernels::layer_norm_backward : kernels::rms_norm_backward;
  const DType wide = accumulate_dtype(dtype);
  const int64_t size = c.rows * c.cols;
  std::vector<double> values = random_values(size, 1, -1, 3);
  if (c.rows > 4) values[static_cast<size_t>(c.cols + c.cols / 2)] = std::numeric_limits<double>::quiet_NaN();
  Operand x(values, dtype, c.shift), weight(random_values(c.cols, 2), dtype, c.shift),
      bias(random_values(c.cols, 3), dtype), y(Operand::unwritten(size), dtype, c.shift),
      mean(Operand::unwritten(c.rows), wide), rstd(Operand::unwritten(c.rows), wide),
      residual(random_values(size, 8), dtype, c.shift), sum(Operand::unwritten(size), dtype, c.shift);
  kernels::NormArgs args{.y = y.host(),
                         .x = x.host(),
                         .weight = c.has_weight ? weight.host() : nullptr,
                         .bias = c.has_bias ? bias.host() : nullptr,
                         .mean = mean.host(),
                         .rstd = rstd.host(),
                         .rows = c.rows,
                         .cols = c.cols,
                         .dtype = DType::f64,
                         .eps = 1e-3,
                         .residual = c.has_residual ? residual.host() : nullptr,
                         .sum = c.has_residual ? sum.host() : nullptr};
  forward(args, Stream{});
  if (c.has_residual) args.residual = residual.gpu(), args.sum = sum.gpu();
  args.y = y.gpu(), args.x = x.gpu(), args.mean = mean.gpu(), args.rstd = rstd.gpu(), args.dtype = dtype;
  if (c.has_weight) args.weight = weight.gpu();
  if (c.has_bias) args.bias = bias.gpu();
  forward(args, gpu_stream());
  CHECK(y.error() <= (c.has_residual ? 2 : 1) * gpu_tolerance(dtype));
  // A sum is rounded to the dtype before its statistics are taken.
  const double statistics_tolerance = gpu_tolerance(c.has_residual ? dtype : wide);
  CHECK(rstd.error() <= statistics_tolerance);
  if (centered) CHECK(mean.error() <= 2 * statistics_tolerance);
  if (c.has_residual) CHECK(sum.error() <= gpu_tolerance(dtype));

  const std::vector<double> finite = random_values(size, 4);
  Operand input(finite, dtype, c.shift), dy(random_values(size, 5), dtype, c.shift),
      dx(Operand::unwritten(size), dtype, c.shift), dweight(Operand::unwritten(c.cols), dtype),
      dbias(Operand::unwritten(c.cols), dtype), center(random_values(c.rows, 6), wide),
      scale(random_values(c.rows, 7, 0.5, 2), wide), dsum(random_values(size, 9), dtype, c.shift);
  kernels::NormGradArgs grad{.dx = dx.host(),
                             .dweight = dweight.host(),
                             .dbias = dbias.host(),
                             .dy = dy.host(),
                             .x = input.host(),
                             .weight = c.has_weight ? weight.host() : nullptr,
                             .mean = center.host(),
                             .rstd = scale.host(),
                             .rows = c.rows,
                             .cols = c.cols,
                             .dtype = DType::f64,
                             .dsum = c.has_residual ? dsum.host() : nullptr};
  backward(grad, Stream{});
  if (c.has_residual) grad.dsum = dsum.gpu();
  grad.dx = dx.gpu(), grad.dweight = dweight.gpu(), grad.dbias = dbias.gpu(), grad.dy = dy.gpu(), grad.x = input.gpu();
  grad.mean = center.gpu(), grad.rstd = scale.gpu(), grad.dtype = dtype;
  if (c.has_weight) grad.weight = weight.gpu();
  grad.workspace_bytes = kernels::norm_backward_workspace(grad, Device::cuda());
  const GpuMemory workspace(grad.workspace_bytes);
  grad.workspace = workspace.data();
  backward(grad, gpu_stream());
  CHECK(dx.error() <= gpu_tolerance(dtype));
  CHECK(dweight.error() <= gpu_tolerance(dtype));
  if (centered) CHECK(dbias.error() <= gpu_tolerance(dtype));
  const std::vector<double> first = dweight.gpu_values();
  backward(grad, gpu_stream());
  CHECK(first == dweight.gpu_values());
}

template <class Wanted>
void check_cases(Wanted&& wanted) {
  for (DType dtype : floating_dtypes) {
    for (bool centered : {true, false}) {
      for (const Case& c : cases) {
        if (wanted(c.rows * c.cols)) check_norm(c, dtype, centered);
      }
    }
  }
}

}  // namespace

TEST_CASE("cuda norm: short and long rows as on the CPU" * needs_gpu()) {
  check_cases([](int64_t size) { return size <= 100000; });
}

TEST_CASE("cuda norm: many rows as on the CPU" * needs_gpu()) {
  check_cases([](int64_t size) { return size > 100000; });
}

TEST_CASE("cuda norm: a large mean takes nothing from the variance" * needs_gpu()) {
  constexpr int64_t rows = 6;
  for (int64_t cols : {64, 768, 1600, 4096, 1601}) {
    CAPTURE(cols);
    Operand x(random_values(rows * cols, 1, 999, 1001), DType::f32), y(Operand::unwritten(rows * cols), DType::f32),
        mean(Operand::unwritten(rows), DType::f32), rstd(Operand::unwritten(rows), DType::f32);
    kernels::NormArgs args{.y = y.host(),
                           .x = x.host(),
                           .weight = nullptr,
                           .bias = nullptr,
                           .mean = mean.host(),
                           .rstd = rstd.host(),
                           .rows = rows,
                           .cols = cols,
                           .dtype = DType::f64,
                           .eps = 1e-5};
    kernels::layer_norm_forward(args, Stream{});
    args.y = y.gpu(), args.x = x.gpu(), args.mean = mean.gpu(), args.rstd = rstd.gpu(), args.dtype = DType::f32;
    kernels::layer_norm_forward(args, gpu_stream());
    CHECK(rstd.error() <= gpu_tolerance(DType::f32));
    CHECK(mean.error() <= gpu_tolerance(DType::f32));
  }
}

TEST_CASE("cuda norm: only the gradients that are wanted, and no workspace too small" * needs_gpu()) {
  constexpr int64_t rows = 40, cols = 24;
  Operand x(random_values(rows * cols, 1), DType::f32), dbias(Operand::unwritten(cols), DType::f32),
      statistics(random_values(rows, 2, 0.5, 2), DType::f32);
  kernels::NormGradArgs args{.dx = nullptr,
                             .dweight = nullptr,
                             .dbias = dbias.gpu(),
                             .dy = x.gpu(),
                             .x = x.gpu(),
                             .weight = nullptr,
                             .mean = statistics.gpu(),
                             .rstd = statistics.gpu(),
                             .rows = rows,
                             .cols = cols,
                             .dtype = DType::f32};
  CHECK_THROWS_AS(kernels::layer_norm_backward(args, gpu_stream()), Error);
  args.workspace_bytes = kernels::norm_backward_workspace(args, Device::cuda());
  const GpuMemory workspace(args.workspace_bytes);
  args.workspace = workspace.data();
  kernels::layer_norm_backward(args, gpu_stream());
  for (int64_t j = 0; j < cols; ++j) {
    double sum = 0;
    for (int64_t i = 0; i < rows; ++i) sum += x.values()[static_cast<size_t>(i * cols + j)];
    CHECK(dbias.gpu_values()[static_cast<size_t>(j)] == doctest::Approx(sum).epsilon(1e-5));
  }
  args.dbias = nullptr;
  CHECK(kernels::norm_backward_workspace(args, Device::cuda()) == 0);
}
