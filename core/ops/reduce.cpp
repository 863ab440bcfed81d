// Reductions over axes, and the inverse of broadcasting.
#include "strobe/kernels/reduce.h"

#include "strobe/core/autograd.h"
#include "strobe/core/ops.h"

namespace strobe {
namespace {

// How a reduction sees its input: as a contiguous (outer, count, inner) array that is reduced over the middle.
struct Reduction {
  std::vector<int> order;  // the axes of x in the order of `arranged`; empty when that is x's own
  Tensor arranged;
  int64_t outer = 1;
  int64_t count = 1;
  int64_t inner = 1;
  Shape kept;  // x's shape with the reduced axes of size 1
  Shape out;   // shape of the result
};

// Brings the axes of x in an order that has the reduced ones together: theirs if they are neighbours, else they move to
// the end.
Reduction arrange(const char* name, const Tensor& input, const std::vector<int>& axes, bool keepdim) {
  require_floating(name, "x", input);
  const NoGrad no_grad;
  const Tensor x = input.detach();
  std::vector<bool> reduced(static_cast<size_t>(x.rank()), axes.empty());
  for (int given : axes) {
    const size_t axis = static_cast<size_t>(normalize_axis(name, given, x.rank()));
    STROBE_CHECK(!reduced[axis], name, ": axis ", given, " given twice for shape ", x.shape(), ", expected each once");
    reduced[axis] = true;
  }

  Reduction result;
  std::vector<int> reduced_axes;
  for (int axis = 0; axis < x.rank(); ++axis) {
    const bool reduce_this = reduced[static_cast<size_t>(axis)];
    result.kept.push_back(reduce_this ? 1 : x.dim(axis));
    if (!reduce_this || keepdim) result.out.push_back(result.kept[axis]);
    if (reduce_this) {
      reduced_axes.push_back(axis);
      result.count *= x.dim(axis);
    } else {
      result.order.push_back(axis);
    }
  }
  if (reduced_axes.empty() || reduced_axes.back() - reduced_axes.front() + 1 == static_cast<int>(reduced_axes.size())) {
    result.order.clear();
    result.arranged = contiguous(x);
    for (int axis = 0; axis < x.rank(); ++axis) {
      if (reduced[static_cast<size_t>(axis)]) continue;
      (reduced_axes.empty() || axis < reduced_axes.front() ? result.outer : result.inner) *= x.dim(axis);
    }
  } else {
    result.order.insert(result.order.end(), reduced_axes.begin(), reduced_axes.end());
    result.arranged = contiguous(permute(x, result.order));
    result.outer = result.kept.numel();
  }
  return result;
}

using ReduceKernel = void (*)(const kernels::ReduceArgs&, const Stream&);

Tensor compute(ReduceKernel kernel, const Reduction& reduction, double divisor = 1) {
  const Tensor& x = reduction.arranged;
  const Tensor out = empty(reduction.out, x.dtype(), x.device());
  kernels::ReduceArgs args{.out = out.data(),
                           .x = x.data(),
                           .outer = reduction.outer,
                           .count = reduction.count,
                           .inner = reduction.inner,
                           .dtype = x.dtype(),
                           .divisor = divisor};
  const Tensor workspace = empty_bytes(kernels::reduce_workspace(args, x.device()), x.device());
  args.workspace = workspace.data();
  kernel(args, out.stream());
  return out;
}

}  // namespace

Tensor sum(const Tensor& x, const std::vector<int>& axes, bool keepdim) {
  const Reduction reduction = arrange("sum", x, axes, keepdim);
  return record("sum", compute(kernels::sum, reduction), {x},
                [shape = x.shape(), kept = reduction.kept](const Tensor& dout) -> Grads {
                  return {expand(reshape(dout, kept), shape)};
                });
}

Tensor mean(const Tensor& x, const std::vector<int>& axes, bool keepdim) {
  const Reduction reduction = arrange("mean", x, axes, keepdim);
  const double count = static_cast<double>(reduction.count);
  return record("mean", compute(kernels::sum, reduction, count), {x},
                [shape = x.shape(), kept = reduction.kept, count](const Tensor& dout) -> Grads {
                  return {expand(reshape(dout / count, kept), shape)};
                });
}

Tensor max(const Tensor& x, const std::vector<int>& axes, bool keepdim) {
  const Reduction reduction = arrange("max", x, axes, keepdim);
  STROBE_CHECK(reduction.count > 0, "max: x of shape ", x.shape(),
               " given, expected at least one element along the reduced axes");
  const Tensor out = compute(kernels::max, reduction);
  return record("max", out, {x}, [reduction, out = out.detach()](const Tensor& gradient) -> Grads {
    const Tensor dout = contiguous(gradient);
    const Tensor dx = empty_like(reduction.arranged);
    kernels::max_backward({.dx = dx.data(),
                           .dout = dout.data(),
                           .x = reduction.arranged.data(),
                           .out = out.data(),
                           .outer = reduction.outer,
                           .count = reduction.count,
                           .inner = reduction.inner,
                           .dtype = dx.dtype()},
                          dx.stream());
    if (reduction.order.empty()) return {dx};
    std::vector<int> inverse(reduction.order.size());
    for (size_t to = 0; to < inverse.size(); ++to) {
      inverse[static_cast<size_t>(reduction.order[to])] = static_cast<int>(to);
    }
    return {permute(dx, inverse)};
  });
}

Tensor sum_to(const Tensor& x, const Shape& shape) {
  require_defined("sum_to", "x", x);
  if (x.shape() == shape) return x;
  STROBE_CHECK(broadcast_shapes("sum_to", shape, x.shape()) == x.shape(), "sum_to: shape ", shape, " given for x ",
               x.shape(), ", expected one that broadcasts to it");
  const int lead = x.rank() - shape.size();
  std::vector<int> stretched;
  for (int axis = 0; axis < x.rank(); ++axis) {
    if (axis < lead || shape[axis - lead] != x.dim(axis)) stretched.push_back(axis);
  }
  return reshape(sum(x, stretched, true), shape);
}

}  // namespace strobe
