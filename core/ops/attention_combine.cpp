// Merges attention over two sets of keys.
#include "strobe/core/autograd.h"
#include "strobe/core/ops/attention.h"

namespace strobe {
namespace {

// The arguments but for out and lse; all tensors contiguous.
kernels::AttentionCombineArgs combine_args(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                           const Tensor& lse_b) {
  return {.out = nullptr,
          .lse = nullptr,
          .out_a = out_a.data(),
          .lse_a = lse_a.data(),
          .out_b = out_b.data(),
          .lse_b = lse_b.data(),
          .batch = out_a.rank() == 3 ? 1 : out_a.dim(0),
          .seq_len = out_a.dim(-3),
          .num_heads = out_a.dim(-2),
          .head_dim = out_a.dim(-1),
          .dtype = out_a.dtype()};
}

}  // namespace

AttentionResult attention_combine(const Tensor& given_out_a, const Tensor& given_lse_a, const Tensor& given_out_b,
                                  const Tensor& given_lse_b) {
  constexpr const char* name = "attention_combine";
  require_floating(name, "out_a", given_out_a);
  require_same_kind(name, "out_a", given_out_a, "out_b", given_out_b);
  require_same_kind(name, "lse_a", given_lse_a, "lse_b", given_lse_b);
  STROBE_CHECK(given_out_a.rank() == 3 || given_out_a.rank() == 4, name, ": out_a ", given_out_a.shape(),
               " given, expected (batch, seq_len, num_heads, head_dim) or (total, num_heads, head_dim)");
  STROBE_CHECK(given_out_b.shape() == given_out_a.shape(), name, ": out_b ", given_out_b.shape(),
               " given, expected the shape of out_a, ", given_out_a.shape());
  const Shape states = lse_shape(given_out_a);
  for (const Tensor& lse : {given_lse_a, given_lse_b}) {
    STROBE_CHECK(lse.shape() == states && lse.dtype() == accumulate_dtype(given_out_a.dtype()) &&
                     lse.device() == given_out_a.device(),
                 name, ": lse ", lse.shape(), " of dtype ", lse.dtype(), " on ", lse.device(), " given for out ",
                 given_out_a.shape(), " of dtype ", given_out_a.dtype(), " on ", given_out_a.device(), ", expected ",
                 states, " of dtype ", accumulate_dtype(given_out_a.dtype()));
  }
  const Tensor out_a = contiguous(given_out_a), out_b = contiguous(given_out_b);
  const Tensor lse_a = contiguous(given_lse_a), lse_b = contiguous(given_lse_b);
  const Tensor out = empty_like(out_a), lse = empty_like(lse_a);
  kernels::AttentionCombineArgs args = combine_args(out_a, lse_a, out_b, lse_b);
  args.out = out.data();
  args.lse = lse.data();
  kernels::attention_combine_forward(args, out.stream());
  const std::vector<Tensor> outputs =
      record(name, {out, lse}, {out_a, lse_a, out_b, lse_b}, [out_a, lse_a, out_b, lse_b](const Grads& douts) -> Grads {
        const Tensor dout = douts[0].defined() ? contiguous(douts[0]) : Tensor();
        const Tensor dlse = douts[1].defined() ? contiguous(douts[1]) : Tensor();
        const Grads grads{empty_like(out_a), empty_like(lse_a), empty_like(out_b), empty_like(lse_b)};
        kernels::attention_combine_backward({.forward = combine_args(out_a, lse_a, out_b, lse_b),
                                             .dout = dout.defined() ? dout.data() : nullptr,
                                             .dlse = dlse.defined() ? dlse.data() : nullptr,
                                             .dout_a = grads[0].data(),
                                             .dlse_a = grads[1].data(),
                                             .dout_b = grads[2].data(),
                                             .dlse_b = grads[3].data()},
                                            out_a.stream());
        return grads;
      });
  return {outputs[0], outputs[1]};
}

}  // namespace strobe
