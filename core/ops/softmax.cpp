// Softmax, its logarithm and cross entropy.
#include "strobe/kernels/softmax.h"

#include "strobe/core/autograd.h"
#include "strobe/core/ops.h"
#include "strobe/core/ops/indices.h"
#include "strobe/core/ops/matmul.h"

namespace strobe {
namespace {

using SoftmaxKernel = void (*)(const kernels::SoftmaxArgs&, const Stream&);
using SoftmaxGradKernel = void (*)(const kernels::SoftmaxGradArgs&, const Stream&);

int64_t count_rows(const Tensor& x) { return x.dim(-1) > 0 ? x.size() / x.dim(-1) : 0; }

Tensor softmax_of_rows(const char* name, SoftmaxKernel forward, SoftmaxGradKernel backward, const Tensor& input) {
  const Tensor x = contiguous(input);
  const Tensor y = empty_like(x);
  forward({.y = y.data(), .x = x.data(), .rows = count_rows(x), .cols = x.dim(-1), .dtype = x.dtype()}, x.stream());
  return record(name, y, {x}, [y = y.detach(), backward](const Tensor& dout) -> Grads {
    const Tensor dy = contiguous(dout);
    const Tensor dx = empty_like(y);
    backward(
        {.dx = dx.data(), .dy = dy.data(), .y = y.data(), .rows = count_rows(y), .cols = y.dim(-1), .dtype = y.dtype()},
        y.stream());
    return {dx};
  });
}

Tensor softmax_along(const char* name, SoftmaxKernel forward, SoftmaxGradKernel backward, const Tensor& x, int axis) {
  require_floating(name, "x", x);
  const int along = normalize_axis(name, axis, x.rank());
  if (along == x.rank() - 1) return softmax_of_rows(name, forward, backward, x);
  return transpose(softmax_of_rows(name, forward, backward, transpose(x, along, -1)), along, -1);
}

// x as (num_rows, size of the last axis): a view when its columns are contiguous and its rows evenly apart, else a
// copy.
Tensor rows_apart(const Tensor& x, int64_t num_rows) {
  const Tensor rows = reshape(x, {num_rows, x.dim(-1)});
  const bool columns_contiguous = rows.dim(1) <= 1 || rows.strides()[1] == 1;
  const bool rows_distinct = num_rows <= 1 || rows.strides()[0] >= rows.dim(1);
  return columns_contiguous && rows_distinct ? rows : contiguous(rows);
}

// Uninitialized memory for the gradient of such rows, which starts them aligned as they are.
Tensor empty_like_rows(const Tensor& x) {
  return x.is_contiguous() ? empty_like(x) : empty_rows(x.dim(0), x.dim(1), x.dtype(), x.device());
}

}  // namespace

Tensor softmax(const Tensor& x, int axis) {
  return softmax_along("softmax", kernels::softmax_forward, kernels::softmax_backward, x, axis);
}

Tensor log_softmax(const Tensor& x, int axis) {
  return softmax_along("log_softmax", kernels::log_softmax_forward, kernels::log_softmax_backward, x, axis);
}

Tensor cross_entropy(const Tensor& given_logits, const Tensor& given_targets, const CrossEntropyOptions& options) {
  require_floating("cross_entropy", "logits", given_logits);
  require_defined("cross_entropy", "targets", given_targets);
  STROBE_CHECK(!is_floating(given_targets.dtype()), "cross_entropy: targets of dtype ", given_targets.dtype(),
               " given, expected i32 or i64");
  STROBE_CHECK(given_targets.device() == given_logits.device(), "cross_entropy: logits on ", given_logits.device(),
               " and targets on ", given_targets.device(), " given, expected one device (see to)");
  STROBE_CHECK(given_logits.rank() >= 1, "cross_entropy: logits ", given_logits.shape(),
               " given, expected (..., vocab)");
  Shape expected;
  for (int axis = 0; axis + 1 < given_logits.rank(); ++axis) expected.push_back(given_logits.dim(axis));
  STROBE_CHECK(given_targets.shape() == expected, "cross_entropy: targets ", given_targets.shape(),
               " given for logits ", given_logits.shape(), ", expected ", expected);
  const int64_t vocab = given_logits.dim(-1);
  const Tensor targets = contiguous(given_targets);
  check_indices("cross_entropy", "targets", targets, "vocab", vocab, options.ignore_index);

  const Tensor logits = rows_apart(given_logits, targets.size());
  const Tensor loss = empty({}, accumulate_dtype(logits.dtype()), logits.device());
  const Tensor lse = empty({targets.size()}, DType::f64, logits.device());
  const Tensor counted = empty({}, DType::i64, logits.device());
  kernels::CrossEntropyArgs args{.loss = loss.data(),
                                 .lse = lse.data<double>(),
                                 .counted = counted.data<int64_t>(),
                                 .logits = logits.data(),
                                 .targets = targets.data(),
                                 .rows = targets.size(),
                                 .vocab = vocab,
                                 .row_stride = logits.strides()[0],
                                 .dtype = logits.dtype(),
                                 .index_dtype = targets.dtype(),
                                 .ignore_index = options.ignore_index};
  args.workspace_bytes = kernels::cross_entropy_forward_workspace(args, logits.device());
  const Tensor workspace = empty_bytes(args.workspace_bytes, logits.device());
  args.workspace = workspace.data();
  kernels::cross_entropy_forward(args, logits.stream());
  return record("cross_entropy", loss, {logits},
                [logits, targets, lse, counted, ignore_index = options.ignore_index](const Tensor& dloss) -> Grads {
                  const Tensor dlogits = owns_storage_alone(logits) ? logits.detach() : empty_like_rows(logits);
                  kernels::cross_entropy_backward({.dlogits = dlogits.data(),
                                                   .dloss = dloss.data(),
                                                   .logits = logits.data(),
                                                   .targets = targets.data(),
                                                   .lse = lse.data<double>(),
                                                   .counted = counted.data<int64_t>(),
                                                   .rows = targets.size(),
                                                   .vocab = logits.dim(1),
                                                   .dlogits_row_stride = dlogits.strides()[0],
                                                   .logits_row_stride = logits.strides()[0],
                                                   .dtype = logits.dtype(),
                                                   .index_dtype = targets.dtype(),
                                                   .ignore_index = ignore_index},
                                                  logits.stream());
                  return {dlogits};
                });
}

}  // namespace strobe
