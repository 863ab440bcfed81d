// matmul, linear and mlp with their backward passes, all of them products by one kernel.
#include "strobe/core/ops/matmul.h"

#include "strobe/core/autograd.h"
#include "strobe/core/ops.h"

namespace strobe {
namespace {

Tensor transposed(const Tensor& x) { return transpose(x, -2, -1); }

// The axes before the last two.
Shape batch_shape(const Tensor& x) {
  return Shape(std::span<const int64_t>(x.shape().data(), static_cast<size_t>(x.rank() - 2)));
}

void check_factors(const char* operation, const Tensor& a, const Tensor& b) {
  require_floating(operation, "a", a);
  require_floating(operation, "b", b);
  require_same_kind(operation, "a", a, "b", b);
  STROBE_CHECK(a.rank() >= 2 && b.rank() >= 2, operation, ": a ", a.shape(), " and b ", b.shape(),
               " given, expected at least 2 axes each");
  STROBE_CHECK(a.dim(-1) == b.dim(-2), operation, ": a ", a.shape(), " and b ", b.shape(),
               " given, expected as many columns of a as rows of b");
}

Shape with_axes(Shape shape, std::initializer_list<int64_t> axes) {
  for (int64_t size : axes) shape.push_back(size);
  return shape;
}

// Strides of x's batch axes under the batch shape of out, 0 where x is repeated.
int64_t batch_stride(const Tensor& x, int axis, int rank) {
  const int own = axis - (rank - x.rank());
  return own < 0 || x.dim(own) == 1 ? 0 : x.strides()[own];
}

// What is added to a product, and what becomes of it.
struct Finish {
  Tensor bias = Tensor();
  kernels::MatmulEpilogue epilogue = kernels::MatmulEpilogue::none;
  Tensor pre = Tensor();  // see MatmulEpilogue
};

void launch(const Tensor& out, const Tensor& a, const Tensor& b, const Finish& finish = {},
            const MatmulOptions& options = {}) {
  kernels::MatmulArgs args{.out = out.data(),
                           .a = a.data(),
                           .b = b.data(),
                           .m = out.dim(-2),
                           .n = out.dim(-1),
                           .k = a.dim(-1),
                           .out_row_stride = out.strides()[out.rank() - 2],
                           .a_row_stride = a.strides()[a.rank() - 2],
                           .a_column_stride = a.strides()[a.rank() - 1],
                           .b_row_stride = b.strides()[b.rank() - 2],
                           .b_column_stride = b.strides()[b.rank() - 1],
                           .dtype = a.dtype(),
                           .out_dtype = out.dtype(),
                           .bias = data_or_null(finish.bias),
                           .accumulate = options.accumulate,
                           .epilogue = finish.epilogue,
                           .pre = data_or_null(finish.pre),
                           .band_lower = options.band_lower,
                           .band_upper = options.band_upper};
  static_assert(Shape::max_rank - 2 <= kernels::MatmulArgs::max_batch_dims);
  for (int axis = 0; axis < out.rank() - 2; ++axis) {
    args.batch[axis] = {out.dim(axis), batch_stride(a, axis, out.rank()), batch_stride(b, axis, out.rank()),
                        out.strides()[axis]};
  }
  args.workspace_bytes = kernels::matmul_workspace(args, out.device());
  const Tensor workspace = empty_bytes(args.workspace_bytes, out.device());
  args.workspace = workspace.data();
  kernels::matmul(args, out.stream());
}

// The parts of linear and mlp.

void check_linear(const char* operation, const Tensor& x, const char* weight_name, const Tensor& weight,
                  const char* bias_name, const Tensor& bias) {
  require_floating(operation, "x", x);
  require_floating(operation, weight_name, weight);
  require_same_kind(operation, "x", x, weight_name, weight);
  STROBE_CHECK(weight.rank() == 2, operation, ": ", weight_name, " ", weight.shape(), " given, expected (out, in)");
  STROBE_CHECK(x.rank() >= 1 && x.dim(-1) == weight.dim(1), operation, ": x ", x.shape(), " given, expected (..., ",
               weight.dim(1), ") for ", weight_name, " ", weight.shape());
  if (!bias.defined()) return;
  require_same_kind(operation, "x", x, bias_name, bias);
  STROBE_CHECK(bias.shape() == Shape{weight.dim(0)}, operation, ": ", bias_name, " ", bias.shape(), " given, expected ",
               Shape{weight.dim(0)}, " for ", weight_name, " ", weight.shape());
}

Shape with_last_axis(Shape shape, int64_t size) {
  shape[shape.size() - 1] = size;
  return shape;
}

// x as (number of rows, size of the last axis).
Tensor rows_of(const Tensor& x) { return reshape(x, {with_last_axis(x.shape(), 1).numel(), x.dim(-1)}); }

Tensor vector_or_none(const Tensor& bias) { return bias.defined() ? contiguous(bias.detach()) : bias; }

// The gradient of the weight in y = rows weight^T, where it needs one.
Tensor weight_gradient(const Tensor& weight, const Tensor& dy, const Tensor& rows) {
  if (!weight.requires_grad()) return Tensor();
  const Tensor gradient = empty(weight.shape(), weight.dtype(), weight.device());
  launch(gradient, transposed(dy), rows);
  return gradient;
}

Tensor bias_gradient(const Tensor& bias, const Tensor& dy) {
  return bias.defined() && bias.requires_grad() ? sum(dy, {0}) : Tensor();
}

}  // namespace

Tensor empty_rows(int64_t rows, int64_t columns, DType dtype, Device device) {
  const int64_t unit = 16 / static_cast<int64_t>(size_of(dtype));
  const int64_t gap = (unit - columns % unit) % unit;
  if (device.type == DeviceType::cpu || gap == 0 || 8 * gap > columns) return empty({rows, columns}, dtype, device);
  return slice(empty({rows, columns + gap}, dtype, device), 1, 0, columns);
}

void matmul_into(const Tensor& out, const Tensor& a, const Tensor& b, const MatmulOptions& options,
                 const char* operation) {
  check_factors(operation, a, b);
  require_floating(operation, "out", out);
  const Shape expected = with_axes(broadcast_shapes(operation, batch_shape(a), batch_shape(b)), {a.dim(-2), b.dim(-1)});
  STROBE_CHECK(out.shape() == expected, operation, ": out ", out.shape(), " given, expected ", expected);
  STROBE_CHECK(out.device() == a.device() && (out.dtype() == a.dtype() || out.dtype() == accumulate_dtype(a.dtype())),
               operation, ": out ", out.dtype(), " on ", out.device(), " given, expected ", a.dtype(), " or ",
               accumulate_dtype(a.dtype()), " on ", a.device());
  STROBE_CHECK(out.dim(-1) <= 1 || out.strides().back() == 1, operation, ": out of column stride ",
               out.strides().back(), " given, expected 1");
  launch(out, a, b, {}, options);
}

Tensor matmul(const Tensor& a, const Tensor& b) {
  check_factors("matmul", a, b);
  const Shape batch = broadcast_shapes("matmul", batch_shape(a), batch_shape(b));
  const Shape shape = with_axes(batch, {a.dim(-2), b.dim(-1)});
  if (a.rank() > 2 && b.rank() == 2) {  // one product of all rows
    const Tensor rows = reshape(a, {batch.numel() * a.dim(-2), a.dim(-1)});
    return reshape(matmul(rows, b), shape);
  }
  const Tensor out = empty(shape, a.dtype(), a.device());
  launch(out, a, b);
  return record("matmul", out, {a, b}, [a, b](const Tensor& dout) -> Grads {
    Grads grads(2);
    if (a.requires_grad()) {
      const Tensor da = empty(with_axes(batch_shape(dout), {a.dim(-2), a.dim(-1)}), a.dtype(), a.device());
      launch(da, dout, transposed(b));
      grads[0] = sum_to(da, a.shape());
    }
    if (b.requires_grad()) {
      const Tensor db = empty(with_axes(batch_shape(dout), {b.dim(-2), b.dim(-1)}), b.dtype(), b.device());
      launch(db, transposed(a), dout);
      grads[1] = sum_to(db, b.shape());
    }
    return grads;
  });
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  check_linear("linear", x, "weight", weight, "bias", bias);
  const Tensor rows = rows_of(x);
  const Tensor y = empty_rows(rows.dim(0), weight.dim(0), x.dtype(), x.device());
  launch(y, rows, transposed(weight.detach()), {.bias = vector_or_none(bias)});
  const Tensor result = record("linear", y, {rows, weight, bias}, [rows, weight, bias](const Tensor& dy) -> Grads {
    Grads grads(3);
    if (rows.requires_grad()) {
      grads[0] = empty(rows.shape(), rows.dtype(), rows.device());
      launch(grads[0], dy, weight);
    }
    grads[1] = weight_gradient(weight, dy, rows);
    grads[2] = bias_gradient(bias, dy);
    return grads;
  });
  return reshape(result, with_last_axis(x.shape(), weight.dim(0)));
}

Tensor mlp(const Tensor& x, const Tensor& fc_weight, const Tensor& fc_bias, const Tensor& proj_weight,
           const Tensor& proj_bias) {
  check_linear("mlp", x, "fc_weight", fc_weight, "fc_bias", fc_bias);
  require_same_kind("mlp", "x", x, "proj_weight", proj_weight);
  STROBE_CHECK(proj_weight.rank() == 2 && proj_weight.dim(1) == fc_weight.dim(0), "mlp: proj_weight ",
               proj_weight.shape(), " given, expected (out, ", fc_weight.dim(0), ") for fc_weight ", fc_weight.shape());
  const Tensor rows = rows_of(x);
  const Tensor hidden = empty({rows.dim(0), fc_weight.dim(0)}, x.dtype(), x.device());
  check_linear("mlp", hidden, "proj_weight", proj_weight, "proj_bias", proj_bias);
  const Tensor pre = empty_like(hidden);
  launch(hidden, rows, transposed(fc_weight.detach()),
         {.bias = vector_or_none(fc_bias), .epilogue = kernels::MatmulEpilogue::gelu, .pre = pre});
  const Tensor y = empty_rows(rows.dim(0), proj_weight.dim(0), x.dtype(), x.device());
  launch(y, hidden, transposed(proj_weight.detach()), {.bias = vector_or_none(proj_bias)});
  const Tensor result =
      record("mlp", y, {rows, fc_weight, fc_bias, proj_weight, proj_bias},
             [rows, fc_weight, fc_bias, proj_weight, proj_bias, pre, hidden](const Tensor& dy) -> Grads {
               Grads grads(5);
               grads[3] = weight_gradient(proj_weight, dy, hidden);
               grads[4] = bias_gradient(proj_bias, dy);
               const Tensor dpre = hidden;  // nobody reads it from here on
               launch(dpre, dy, proj_weight, {.epilogue = kernels::MatmulEpilogue::gelu_backward, .pre = pre});
               if (rows.requires_grad()) {
                 grads[0] = empty(rows.shape(), rows.dtype(), rows.device());
                 launch(grads[0], dpre, fc_weight);
               }
               grads[1] = weight_gradient(fc_weight, dpre, rows);
               grads[2] = bias_gradient(fc_bias, dpre);
               return grads;
             });
  return reshape(result, with_last_axis(x.shape(), proj_weight.dim(0)));
}

}  // namespace strobe
