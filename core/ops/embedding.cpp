// Lookup of rows by index, and rotary positions.
#include "strobe/kernels/embedding.h"

#include "strobe/core/autograd.h"
#include "strobe/core/ops.h"
#include "strobe/core/ops/indices.h"
#include "strobe/kernels/rope.h"

namespace strobe {
namespace {

Tensor rotate(const Tensor& given, double base, int64_t position_offset, bool inverse) {
  const Tensor x = given.strides()[3] == 1 ? given : contiguous(given);
  const Tensor y = empty_like(x);
  kernels::rope({.y = y.data(),
                 .x = x.data(),
                 .x_batch_stride = x.strides()[0],
                 .x_seq_stride = x.strides()[1],
                 .x_head_stride = x.strides()[2],
                 .batch = x.dim(0),
                 .seq_len = x.dim(1),
                 .num_heads = x.dim(2),
                 .head_dim = x.dim(3),
                 .dtype = x.dtype(),
                 .base = base,
                 .position_offset = position_offset,
                 .inverse = inverse},
                x.stream());
  return y;
}

}  // namespace

Tensor embedding(const Tensor& given_indices, const Tensor& given_weight) {
  require_defined("embedding", "indices", given_indices);
  STROBE_CHECK(!is_floating(given_indices.dtype()), "embedding: indices of dtype ", given_indices.dtype(),
               " given, expected i32 or i64");
  require_floating("embedding", "weight", given_weight);
  STROBE_CHECK(given_weight.rank() == 2, "embedding: weight ", given_weight.shape(), " given, expected (vocab, dim)");
  STROBE_CHECK(given_indices.device() == given_weight.device(), "embedding: indices on ", given_indices.device(),
               " and weight on ", given_weight.device(), " given, expected one device (see to)");
  const Tensor indices = contiguous(given_indices);
  check_indices("embedding", "indices", indices, "vocab", given_weight.dim(0));

  const Tensor weight = contiguous(given_weight);
  Shape shape = indices.shape();
  shape.push_back(weight.dim(1));
  const Tensor out = empty(shape, weight.dtype(), weight.device());
  kernels::embedding_forward({.out = out.data(),
                              .weight = weight.data(),
                              .indices = indices.data(),
                              .rows = indices.size(),
                              .vocab = weight.dim(0),
                              .dim = weight.dim(1),
                              .dtype = weight.dtype(),
                              .index_dtype = indices.dtype()},
                             out.stream());
  return record("embedding", out, {weight}, [indices, shape = weight.shape()](const Tensor& gradient) -> Grads {
    const Tensor dout = contiguous(gradient);
    const Tensor dweight = empty(shape, dout.dtype(), dout.device());
    const Tensor workspace = empty_bytes(
        kernels::embedding_backward_workspace(indices.size(), shape[0], shape[1], dout.device()), dout.device());
    kernels::embedding_backward({.dweight = dweight.data(),
                                 .dout = dout.data(),
                                 .indices = indices.data(),
                                 .rows = indices.size(),
                                 .vocab = shape[0],
                                 .dim = shape[1],
                                 .dtype = dout.dtype(),
                                 .index_dtype = indices.dtype(),
                                 .workspace = workspace.data()},
                                dout.stream());
    return {dweight};
  });
}

Tensor rope(const Tensor& x, double base, int64_t position_offset) {
  require_floating("rope", "x", x);
  STROBE_CHECK(x.rank() == 4, "rope: x ", x.shape(), " given, expected (batch, seq_len, num_heads, head_dim)");
  STROBE_CHECK(x.dim(3) % 2 == 0, "rope: x ", x.shape(), " given, expected an even head_dim");
  STROBE_CHECK(base > 0, "rope: base ", base, " given, expected above 0");
  return record(
      "rope", rotate(x, base, position_offset, false), {x},
      [base, position_offset](const Tensor& dout) -> Grads { return {rotate(dout, base, position_offset, true)}; });
}

}  // namespace strobe
