// Operations that only rearrange: most share memory with their input.
#include <numeric>

#include "strobe/core/autograd.h"
#include "strobe/core/ops.h"
#include "strobe/kernels/pointwise.h"

namespace strobe {
namespace {

// Strides that describe x's memory under another shape, or nothing when only a copy can.
bool reshaped_strides(const Tensor& x, const Shape& shape, Shape& strides) {
  strides = contiguous_strides(shape);
  if (x.is_contiguous() || x.size() == 0) return true;
  // Walk both shapes from the end in groups of equal element count; within a group x must be evenly spaced.
  int from = x.rank() - 1;
  int to = shape.size() - 1;
  while (from >= 0) {
    if (x.shape()[from] == 1) {
      --from;
      continue;
    }
    int64_t stride = x.strides()[from];
    int64_t count = x.shape()[from];
    for (--from; from >= 0 && (x.shape()[from] == 1 || x.strides()[from] == stride * count); --from) {
      count *= x.shape()[from];
    }
    for (; to >= 0 && count > 1; --to) {
      if (shape[to] == 1) continue;
      if (count % shape[to] != 0) return false;
      strides[to] = stride;
      stride *= shape[to];
      count /= shape[to];
    }
    if (count != 1) return false;
  }
  return true;
}

// Replaces one -1 by the size that keeps the number of elements.
Shape infer_shape(const Tensor& x, Shape shape) {
  int inferred = -1;
  int64_t known = 1;
  for (int axis = 0; axis < shape.size(); ++axis) {
    if (shape[axis] == -1) {
      STROBE_CHECK(inferred < 0, "reshape: shape ", shape, " given, expected at most one -1");
      inferred = axis;
    } else {
      known *= shape[axis];
    }
  }
  if (inferred >= 0 && known > 0) shape[inferred] = x.size() / known;
  STROBE_CHECK((inferred < 0 || known > 0) && shape.numel() == x.size(), "reshape: shape ", shape, " given for ",
               x.shape(), ", expected the same number of elements");
  return shape;
}

Tensor slice_view(const Tensor& x, int axis, int64_t begin, int64_t length) {
  Shape shape = x.shape();
  shape[axis] = length;
  return view_of(x, shape, x.strides(), x.impl()->offset + begin * x.strides()[axis]);
}

}  // namespace

Tensor contiguous(const Tensor& x) {
  if (x.is_contiguous()) return x;
  const Tensor y = empty_like(x);
  y.copy_from(x);
  return record("contiguous", y, {x}, [](const Tensor& dout) -> Grads { return {dout}; });
}

Tensor reshape(const Tensor& x, const Shape& shape) {
  require_defined("reshape", "x", x);
  const Shape target = infer_shape(x, shape);
  Shape strides;
  if (!reshaped_strides(x, target, strides)) return reshape(contiguous(x), target);
  return record("reshape", view_of(x, target, strides, x.impl()->offset), {x},
                [original = x.shape()](const Tensor& dout) -> Grads { return {reshape(dout, original)}; });
}

Tensor permute(const Tensor& x, const std::vector<int>& axes) {
  require_defined("permute", "x", x);
  STROBE_CHECK(static_cast<int>(axes.size()) == x.rank(), "permute: ", axes.size(), " axes given, expected ", x.rank(),
               " for shape ", x.shape());
  Shape shape = x.shape();
  Shape strides = x.strides();
  std::vector<int> inverse(axes.size(), -1);
  for (int to = 0; to < x.rank(); ++to) {
    const int from = normalize_axis("permute", axes[static_cast<size_t>(to)], x.rank());
    STROBE_CHECK(inverse[static_cast<size_t>(from)] < 0, "permute: axis ", from, " given twice, expected each once");
    inverse[static_cast<size_t>(from)] = to;
    shape[to] = x.shape()[from];
    strides[to] = x.strides()[from];
  }
  return record("permute", view_of(x, shape, strides, x.impl()->offset), {x},
                [inverse](const Tensor& dout) -> Grads { return {permute(dout, inverse)}; });
}

Tensor transpose(const Tensor& x, int axis_a, int axis_b) {
  require_defined("transpose", "x", x);
  std::vector<int> axes(static_cast<size_t>(x.rank()));
  std::iota(axes.begin(), axes.end(), 0);
  std::swap(axes[static_cast<size_t>(normalize_axis("transpose", axis_a, x.rank()))],
            axes[static_cast<size_t>(normalize_axis("transpose", axis_b, x.rank()))]);
  return permute(x, axes);
}

Tensor expand(const Tensor& x, const Shape& shape) {
  require_defined("expand", "x", x);
  shape.numel();  // refuses negative sizes
  STROBE_CHECK(broadcast_shapes("expand", x.shape(), shape) == shape, "expand: shape ", shape, " given for ", x.shape(),
               ", expected one that it broadcasts to");
  Shape strides = shape;
  const int lead = shape.size() - x.rank();
  for (int axis = 0; axis < shape.size(); ++axis) {
    const bool stretched = axis < lead || (x.shape()[axis - lead] == 1 && shape[axis] != 1);
    strides[axis] = stretched ? 0 : x.strides()[axis - lead];
  }
  return record("expand", view_of(x, shape, strides, x.impl()->offset), {x},
                [original = x.shape()](const Tensor& dout) -> Grads { return {sum_to(dout, original)}; });
}

Tensor slice(const Tensor& x, int axis, int64_t begin, int64_t end) {
  require_defined("slice", "x", x);
  const int along = normalize_axis("slice", axis, x.rank());
  STROBE_CHECK(0 <= begin && begin <= end && end <= x.dim(along), "slice: range ", begin, " to ", end, " of axis ",
               axis, " given for shape ", x.shape(), ", expected 0 <= begin <= end <= ", x.dim(along));
  if (begin == 0 && end == x.dim(along)) return x;  // backward then has nothing to put into zeros
  return record("slice", slice_view(x, along, begin, end - begin), {x},
                [shape = x.shape(), along, begin](const Tensor& dout) -> Grads {
                  const Tensor dx = zeros(shape, dout.dtype(), dout.device());
                  slice_view(dx, along, begin, dout.dim(along)).copy_from(dout);
                  return {dx};
                });
}

std::vector<Tensor> split(const Tensor& x, const std::vector<int64_t>& sizes, int axis) {
  require_defined("split", "x", x);
  const int along = normalize_axis("split", axis, x.rank());
  int64_t total = 0;
  for (int64_t size : sizes) {
    STROBE_CHECK(size >= 0, "split: size ", size, " given, expected none below 0");
    total += size;
  }
  STROBE_CHECK(!sizes.empty() && total == x.dim(along), "split: sizes that sum to ", total, " given for axis ", axis,
               " of ", x.shape(), ", expected ", x.dim(along));
  std::vector<Tensor> parts;
  int64_t begin = 0;
  for (int64_t size : sizes) {
    parts.push_back(slice_view(x, along, begin, size));
    begin += size;
  }
  return record("split", std::move(parts), {x},
                [shape = x.shape(), dtype = x.dtype(), device = x.device(), sizes, along](const Grads& douts) -> Grads {
                  const Tensor dx = empty(shape, dtype, device);
                  int64_t start = 0;
                  for (size_t i = 0; i < sizes.size(); ++i) {
                    const Tensor part = slice_view(dx, along, start, sizes[i]);
                    part.copy_from(douts[i].defined() ? douts[i] : expand(zeros({}, dtype, device), part.shape()));
                    start += sizes[i];
                  }
                  return {dx};
                });
}

Tensor concat(const std::vector<Tensor>& tensors, int axis) {
  STROBE_CHECK(!tensors.empty(), "concat: no tensors given, expected at least one");
  require_defined("concat", "tensor 0", tensors[0]);
  const int along = normalize_axis("concat", axis, tensors[0].rank());
  Shape shape = tensors[0].shape();
  shape[along] = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    require_same_kind("concat", "a tensor", tensors[i], "tensor 0", tensors[0]);
    Shape expected = shape;
    if (tensors[i].rank() == shape.size()) expected[along] = tensors[i].dim(along);
    STROBE_CHECK(tensors[i].shape() == expected, "concat: tensor ", i, " of shape ", tensors[i].shape(),
                 " given, expected that of tensor 0, ", tensors[0].shape(), ", except along axis ", axis);
    shape[along] += tensors[i].dim(along);
  }
  const Tensor y = empty(shape, tensors[0].dtype(), tensors[0].device());
  std::vector<int64_t> sizes;
  int64_t begin = 0;
  for (const Tensor& tensor : tensors) {
    sizes.push_back(tensor.dim(along));
    slice_view(y, along, begin, sizes.back()).copy_from(tensor);
    begin += sizes.back();
  }
  return record("concat", y, tensors, [sizes, along](const Tensor& dout) -> Grads {
    Grads grads;
    int64_t start = 0;
    for (int64_t size : sizes) {
      grads.push_back(slice_view(dout, along, start, size));
      start += size;
    }
    return grads;
  });
}

}  // namespace strobe
