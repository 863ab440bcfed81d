// Softmax, cross entropy and attention's masked softmax on the GPU against the CPU in f64.
#include <doctest/doctest.h>

#include "strobe/kernels/attention.h"
#include "strobe/kernels/softmax.h"
#include "support/gpu_operand.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

struct Rows {
  int64_t rows;
  int64_t cols;
};
// A warp or a block for each row, rows that are no multiple of a pack, one element, and more rows than blocks.
constexpr Rows row_cases[] = {{1, 1},     {3, 7},      {130, 64},  {5, 1023}, {4, 2048}, {3, 2049},
                              {2, 16385}, {1, 100003}, {70001, 3}, {37, 384}, {6, 256}};

// Puts NaN, infinity and -inf into the first rows.
void spoil(std::vector<double>& values, int64_t rows, int64_t cols) {
  const auto at = [&](int64_t row, int64_t col) -> double& { return values[static_cast<size_t>(row * cols + col)]; };
  if (rows < 5) return;
  at(0, cols / 2) = not_a_number;
  at(1, cols - 1) = infinity;
  at(2, 0) = -infinity;
  for (int64_t col = 0; col < cols; ++col) at(3, col) = -infinity;
  for (int64_t col = 0; col < cols; ++col) at(4, col) *= 1000;
}

std::vector<double> spoiled_values(const Rows& shape, unsigned seed) {
  std::vector<double> values = random_values(shape.rows * shape.cols, seed, -4, 4);
  spoil(values, shape.rows, shape.cols);
  return values;
}

template <class F>
void for_each_case(F&& f) {
  for (DType dtype : floating_dtypes) {
    for (const Rows& shape : row_cases) {
      for (int64_t shift : {0, 1}) {
        CAPTURE(std::string(name_of(dtype)));
        CAPTURE(shape.rows);
        CAPTURE(shape.cols);
        CAPTURE(shift);
        f(dtype, shape, shift);
      }
    }
  }
}

struct Targets {
  std::vector<int64_t> host;
  GpuMemory gpu;

  Targets(const std::vector<int64_t>& values, DType dtype) : host(values), gpu(values.size() * 8) {
    std::vector<std::byte> bytes(values.size() * size_of(dtype));
    for (size_t i = 0; i < values.size(); ++i) {
      const int32_t narrow = static_cast<int32_t>(values[i]);
      std::memcpy(bytes.data() + i * size_of(dtype),
                  dtype == DType::i32 ? static_cast<const void*>(&narrow) : &values[i], size_of(dtype));
    }
    gpu.write(bytes);
  }
};

}  // namespace

TEST_CASE("cuda softmax: as on the CPU, for all row lengths and special values" * needs_gpu()) {
  for_each_case([](DType dtype, const Rows& shape, int64_t shift) {
    const int64_t size = shape.rows * shape.cols;
    for (bool logarithm : {false, true}) {
      CAPTURE(logarithm);
      Operand x(spoiled_values(shape, 1), dtype, shift), y(Operand::unwritten(size), dtype, shift);
      kernels::SoftmaxArgs args{
          .y = y.host(), .x = x.host(), .rows = shape.rows, .cols = shape.cols, .dtype = DType::f64};
      const auto forward = logarithm ? kernels::log_softmax_forward : kernels::softmax_forward;
      forward(args, Stream{});
      args.y = y.gpu(), args.x = x.gpu(), args.dtype = dtype;
      forward(args, gpu_stream());
      CHECK(y.error() <= gpu_tolerance(dtype));

      const std::vector<double> outputs = logarithm ? random_values(size, 2, -9, 0) : random_values(size, 2, 0, 1);
      Operand out(outputs, dtype, shift), dy(random_values(size, 3), dtype), dx(Operand::unwritten(size), dtype, shift);
      kernels::SoftmaxGradArgs grad{.dx = dx.host(),
                                    .dy = dy.host(),
                                    .y = out.host(),
                                    .rows = shape.rows,
                                    .cols = shape.cols,
                                    .dtype = DType::f64};
      const auto backward = logarithm ? kernels::log_softmax_backward : kernels::softmax_backward;
      backward(grad, Stream{});
      grad.dx = dx.gpu(), grad.dy = dy.gpu(), grad.y = out.gpu(), grad.dtype = dtype;
      backward(grad, gpu_stream());
      CHECK(dx.error() <= gpu_tolerance(dtype));
    }
  });
}

TEST_CASE("cuda cross_entropy: as on the CPU, in place, with ignored targets and rows apart" * needs_gpu()) {
  for_each_case([](DType dtype, const Rows& shape, int64_t shift) {
    const DType wide = accumulate_dtype(dtype);
    for (int ignored_every : {0, 1, 3}) {  // none, all, and every third
      CAPTURE(ignored_every);
      const int64_t row_stride = shape.cols + (ignored_every == 3 ? 8 - shape.cols % 8 : ignored_every);
      const DType index_dtype = ignored_every == 3 ? DType::i32 : DType::i64;
      std::vector<int64_t> values;
      for (int64_t row = 0; row < shape.rows; ++row) {
        values.push_back(ignored_every > 0 && row % ignored_every == 0 ? -100 : row * 7 % shape.cols);
      }
      Targets targets(values, index_dtype);
      std::vector<double> image = random_values(shape.rows * row_stride, 4, -8, 8);
      for (size_t i = 0; i < image.size(); ++i) {
        if (static_cast<int64_t>(i) % row_stride >= shape.cols) image[i] = not_a_number;
      }
      Operand logits(image, dtype, shift);
      int64_t counted = -1;
      const GpuMemory gpu_counted(sizeof(counted));
      Operand loss({0}, wide), lse(Operand::unwritten(shape.rows), DType::f64),
          dloss({0.7 * static_cast<double>(shape.rows)}, wide);
      kernels::CrossEntropyArgs args{.loss = loss.host(),
                                     .lse = lse.host(),
                                     .counted = &counted,
                                     .logits = logits.host(),
                                     .targets = targets.host.data(),
                                     .rows = shape.rows,
                                     .vocab = shape.cols,
                                     .row_stride = row_stride,
                                     .dtype = DType::f64,
                                     .index_dtype = DType::i64,
                                     .ignore_index = -100};
      kernels::cross_entropy_forward(args, Stream{});
      kernels::CrossEntropyGradArgs grad{.dlogits = logits.host(),
                                         .dloss = dloss.host(),
                                         .logits = logits.host(),
                                         .targets = targets.host.data(),
                                         .lse = lse.host(),
                                         .counted = &counted,
                                         .rows = shape.rows,
                                         .vocab = shape.cols,
                                         .dlogits_row_stride = row_stride,
                                         .logits_row_stride = row_stride,
                                         .dtype = DType::f64,
                                         .index_dtype = DType::i64,
                                         .ignore_index = -100};
      args.loss = loss.gpu(), args.lse = static_cast<double*>(lse.gpu()), args.logits = logits.gpu();
      args.targets = targets.gpu.data(), args.dtype = dtype, args.index_dtype = index_dtype;
      args.counted = reinterpret_cast<int64_t*>(gpu_counted.data());
      args.workspace_bytes = kernels::cross_entropy_forward_workspace(args, Device::cuda());
      const GpuMemory workspace(args.workspace_bytes);
      args.workspace = workspace.data();
      kernels::cross_entropy_forward(args, gpu_stream());
      CHECK(lse.error() <= (dtype == DType::f64 ? 1e-12 : 1e-6));
      CHECK(loss.error() <= (dtype == DType::f64 ? 1e-12 : 1e-6));

      kernels::cross_entropy_backward(grad, Stream{});
      grad.dlogits = logits.gpu(), grad.dloss = dloss.gpu(), grad.logits = logits.gpu(), grad.dtype = dtype;
      grad.targets = targets.gpu.data(), grad.lse = static_cast<double*>(lse.gpu()), grad.index_dtype = index_dtype;
      grad.counted = reinterpret_cast<int64_t*>(gpu_counted.data());
      kernels::cross_entropy_backward(grad, gpu_stream());
      CHECK(logits.error() <= gpu_tolerance(dtype));
    }
  });
}

TEST_CASE("cuda cross_entropy: a target out of range makes the loss NaN and reads nothing outside" * needs_gpu()) {
  Targets targets({1, 5, int64_t(1) << 40}, DType::i64);
  Operand logits(random_values(3 * 4, 5), DType::f32), loss({0}, DType::f32), lse({0, 0, 0}, DType::f64);
  const GpuMemory counted(sizeof(int64_t));
  kernels::CrossEntropyArgs args{.loss = loss.gpu(),
                                 .lse = static_cast<double*>(lse.gpu()),
                                 .counted = reinterpret_cast<int64_t*>(counted.data()),
                                 .logits = logits.gpu(),
                                 .targets = targets.gpu.data(),
                                 .rows = 3,
                                 .vocab = 4,
                                 .row_stride = 4,
                                 .dtype = DType::f32,
                                 .index_dtype = DType::i64,
                                 .ignore_index = -100};
  CHECK_THROWS_AS(kernels::cross_entropy_forward(args, gpu_stream()), Error);
  args.workspace_bytes = kernels::cross_entropy_forward_workspace(args, Device::cuda());
  const GpuMemory workspace(args.workspace_bytes);
  args.workspace = workspace.data();
  kernels::cross_entropy_forward(args, gpu_stream());
  CHECK(std::isnan(loss.gpu_values()[0]));
}

TEST_CASE("cuda attention softmax: masks, softcap, ALiBi and negative scales as on the CPU" * needs_gpu()) {
  struct Option {
    double scale;
    double softcap;
    bool alibi;
    bool causal;
    int64_t window_left;
    int64_t window_right;
  };
  const Option options[] = {{0.125, 0, false, false, -1, -1}, {-0.2, 0, false, true, -1, -1},
                            {0.3, 2.5, false, true, 40, -1},  {0.3, 0, true, false, 9, 5},
                            {0, 0, false, false, -1, -1},     {-0.4, 1.5, true, true, -1, -1}};
  const int64_t lengths[][2] = {{1, 1}, {70, 65}, {33, 129}, {5, 1024}, {7, 3001}, {0, 5}, {3, 0}};
  for (DType dtype : floating_dtypes) {
    for (const Option& option : options) {
      for (const auto& [seq_len_q, seq_len_k] : lengths) {
        CAPTURE(std::string(name_of(dtype)));
        CAPTURE(option.scale);
        CAPTURE(option.softcap);
        CAPTURE(option.alibi);
        CAPTURE(seq_len_q);
        CAPTURE(seq_len_k);
        const DType wide = accumulate_dtype(dtype);
        constexpr int64_t num_heads = 3, num_matrices = 6;
        const int64_t rows = num_matrices * seq_len_q, size = rows * seq_len_k;
        const kernels::AttentionBand band =
            kernels::visible_band(option.causal, option.window_left, option.window_right, seq_len_q, seq_len_k);
        std::vector<double> values = random_values(size, 6, -6, 6);
        for (int64_t i = 0; i < size; ++i) {  // what is hidden is NaN, and one row sees a NaN
          const int64_t query = i / std::max<int64_t>(seq_len_k, 1) % seq_len_q, key = i % seq_len_k;
          if (key < query + band.lower || key > query + band.upper) values[static_cast<size_t>(i)] = not_a_number;
        }
        if (size > 3 * seq_len_k) values[static_cast<size_t>(2 * seq_len_k + seq_len_k / 2)] = not_a_number;
        const float slopes[num_heads] = {0.5f, 0.25f, 0.125f};
        GpuMemory gpu_slopes(sizeof(slopes));
        raw_copy(gpu_slopes.data(), Device::cuda(), slopes, Device::cpu(), sizeof(slopes), gpu_stream());
        // Where the dtype allows, weights take the place of the products, as attention does it.
        const bool in_place = dtype == wide && option.softcap == 0;
        Operand products(values, wide), weights(Operand::unwritten(size), dtype), sums(Operand::unwritten(rows), wide),
            lse(Operand::unwritten(rows), wide);
        Operand& target = in_place ? products : weights;
        kernels::AttentionSoftmaxArgs args{.weights = weights.host(),
                                           .sums = sums.host(),
                                           .lse = lse.host(),
                                           .products = products.host(),
                                           .num_matrices = num_matrices,
                                           .seq_len_q = seq_len_q,
                                           .seq_len_k = seq_len_k,
                                           .dtype = DType::f64,
                                           .softmax_scale = option.scale,
                                           .band = band,
                                           .softcap = option.softcap,
                                           .alibi_slopes = option.alibi ? slopes : nullptr,
                                           .num_heads = num_heads};
        args.weights = target.host();
        kernels::attention_softmax_forward(args, Stream{});
        args.weights = target.gpu(), args.sums = sums.gpu(), args.lse = lse.gpu(), args.products = products.gpu();
        args.dtype = dtype;
        if (option.alibi) args.alibi_slopes = reinterpret_cast<const float*>(gpu_slopes.data());
        kernels::attention_softmax_forward(args, gpu_stream());
        CHECK(target.error() <= gpu_tolerance(dtype));
        CHECK(sums.error() <= gpu_tolerance(wide));
        CHECK(lse.error() <= gpu_tolerance(wide));

        Operand p(random_values(size, 7, 0, 1), dtype), total(random_values(rows, 8, 1, 2), wide),
            dp(random_values(size, 9), wide), dlse(random_values(rows, 10), wide),
            separate(Operand::unwritten(size), dtype), scores(random_values(size, 11, -3, 3), wide);
        Operand& gradient = dtype == wide ? dp : separate;
        kernels::AttentionSoftmaxGradArgs grad{.dproducts = gradient.host(),
                                               .weights = p.host(),
                                               .sums = total.host(),
                                               .dprobabilities = dp.host(),
                                               .num_matrices = num_matrices,
                                               .seq_len_q = seq_len_q,
                                               .seq_len_k = seq_len_k,
                                               .dtype = DType::f64,
                                               .softmax_scale = option.scale,
                                               .band = band,
                                               .softcap = option.softcap,
                                               .products = scores.host(),
                                               .dlse = option.causal ? dlse.host() : nullptr};
        kernels::attention_softmax_backward(grad, Stream{});
        grad.dproducts = gradient.gpu(), grad.weights = p.gpu(), grad.sums = total.gpu();
        grad.dprobabilities = dp.gpu(), grad.products = scores.gpu(), grad.dtype = dtype;
        if (option.causal) grad.dlse = dlse.gpu();
        kernels::attention_softmax_backward(grad, gpu_stream());
        CHECK(gradient.error() <= gpu_tolerance(dtype));
        CHECK(p.error() <= gpu_tolerance(dtype));
      }
    }
  }
}

TEST_CASE("cuda attention dropout: drops what the CPU drops" * needs_gpu()) {
  for (DType dtype : floating_dtypes) {
    for (const auto& [seq_len_q, seq_len_k] : {std::pair<int64_t, int64_t>{1, 1}, {70, 65}, {31, 257}}) {
      const int64_t size = 5 * seq_len_q * seq_len_k;
      Operand x(random_values(size, 12), dtype), out(Operand::unwritten(size), dtype, 1);
      kernels::AttentionDropoutArgs args{.out = out.host(),
                                         .x = x.host(),
                                         .first_matrix = 7,
                                         .num_matrices = 5,
                                         .seq_len_q = seq_len_q,
                                         .seq_len_k = seq_len_k,
                                         .dtype = DType::f64,
                                         .dropout = {0.3, 123, 4}};
      kernels::attention_dropout(args, Stream{});
      args.out = out.gpu(), args.x = x.gpu(), args.dtype = dtype;
      kernels::attention_dropout(args, gpu_stream());
      CHECK(out.error() <= gpu_tolerance(dtype));
    }
  }
}
