// matmul and linear with their backward passes, all of them products by one kernel.
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

void launch(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias, const MatmulOptions& options) {
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
                           .bias = bias.defined() ? bias.data() : nullptr,
                           .accumulate = options.accumulate,
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

}  // namespace

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
  launch(out, a, b, Tensor(), options);
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
  launch(out, a, b, Tensor(), {});
  return record("matmul", out, {a, b}, [a, b](const Tensor& dout) -> Grads {
    Grads grads(2);
    if (a.requires_grad()) {
      const Tensor da = empty(with_axes(batch_shape(dout), {a.dim(-2), a.dim(-1)}), a.dtype(), a.device());
      launch(da, dout, transposed(b), Tensor(), {});
      grads[0] = sum_to(da, a.shape());
    }
    if (b.requires_grad()) {
      const Tensor db = empty(with_axes(batch_shape(dout), {b.dim(-2), b.dim(-1)}), b.dtype(), b.device());
      launch(db, transposed(a), dout, Tensor(), {});
      grads[1] = sum_to(db, b.shape());
    }
    return grads;
  });
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  require_floating("linear", "x", x);
  require_floating("linear", "weight", weight);
  require_same_kind("linear", "x", x, "weight", weight);
  STROBE_CHECK(weight.rank() == 2, "linear: weight ", weight.shape(), " given, expected (out, in)");
  const int64_t in = weight.dim(1), out = weight.dim(0);
  STROBE_CHECK(x.rank() >= 1 && x.dim(-1) == in, "linear: x ", x.shape(), " given, expected (..., ", in,
               ") for weight ", weight.shape());
  if (bias.defined()) {
    require_same_kind("linear", "x", x, "bias", bias);
    STROBE_CHECK(bias.shape() == Shape{out}, "linear: bias ", bias.shape(), " given, expected ", Shape{out},
                 " for weight ", weight.shape());
  }
  Shape shape = x.shape();
  shape[x.rank() - 1] = 1;
  const int64_t num_rows = shape.numel();
  shape[x.rank() - 1] = out;

  const Tensor rows = reshape(x, {num_rows, in});
  const Tensor y = empty({num_rows, out}, x.dtype(), x.device());
  launch(y, rows, transposed(weight.detach()), bias.defined() ? contiguous(bias.detach()) : bias, {});
  const Tensor result = record("linear", y, {rows, weight, bias}, [rows, weight, bias](const Tensor& dy) -> Grads {
    Grads grads(3);
    if (rows.requires_grad()) {
      grads[0] = empty(rows.shape(), rows.dtype(), rows.device());
      launch(grads[0], dy, weight, Tensor(), {});
    }
    if (weight.requires_grad()) {
      grads[1] = empty(weight.shape(), weight.dtype(), weight.device());
      launch(grads[1], transposed(dy), rows, Tensor(), {});
    }
    if (bias.defined() && bias.requires_grad()) grads[2] = sum(dy, {0});
    return grads;
  });
  return reshape(result, shape);
}

}  // namespace strobe
