// Tiled attention: saves its log-sum-exp beside the result, recomputes P in the backward pass.
#include "strobe/core/ops/attention.h"
#include "strobe/core/autograd.h"

namespace strobe {
namespace {

// The kernels want the elements of a head next to each other.
Tensor contiguous_heads(const Tensor& x) { return x.dim(-1) <= 1 || x.strides().back() == 1 ? x : contiguous(x); }

AttentionResult flash_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                              const AttentionOptions& options) {
  kernels::AttentionArgs args = attention_args(query, key, value, options);
  const AttentionResult result{empty(query.shape(), query.dtype(), query.device()),
                               empty(lse_shape(query), accumulate_dtype(query.dtype()), query.device())};
  args.out = attention_operand(result.out);
  args.lse = result.lse.data();
  args.workspace_bytes = kernels::flash_attention_forward_workspace(args, query.device());
  const Tensor workspace = empty_bytes(args.workspace_bytes, query.device());
  args.workspace = workspace.data();
  kernels::flash_attention_forward(args, query.stream());
  return result;
}

struct AttentionGradients {
  Tensor dquery;
  Tensor dkey;
  Tensor dvalue;
};

// dout and dlse may be undefined, but not both.
void flash_backward(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionResult& result,
                    const AttentionOptions& options, const Grads& douts, const AttentionGradients& gradients) {
  const Tensor dout = dout_or_zeros(douts[0], query);
  const Tensor dlse = douts[1].defined() ? contiguous(douts[1]) : Tensor();
  kernels::AttentionGradArgs args{.forward = attention_args(query, key, value, options),
                                  .dout = attention_operand(dout),
                                  .dout_dim_stride = dout.strides().back(),
                                  .dlse = dlse.defined() ? dlse.data() : nullptr,
                                  .dquery = attention_operand(gradients.dquery),
                                  .dkey = attention_operand(gradients.dkey),
                                  .dvalue = attention_operand(gradients.dvalue)};
  args.forward.out = attention_operand(result.out);
  args.forward.lse = result.lse.data();
  args.workspace_bytes = kernels::flash_attention_backward_workspace(args, query.device());
  const Tensor workspace = empty_bytes(args.workspace_bytes, query.device());
  args.workspace = workspace.data();
  kernels::flash_attention_backward(args, query.stream());
}

AttentionResult flash(const char* name, const Tensor& given_query, const Tensor& given_key, const Tensor& given_value,
                      const AttentionOptions& given_options) {
  const AttentionOptions options = checked_attention(name, given_query, given_key, given_value, given_options);
  const MemoryTag tag("attention");
  const Tensor query = contiguous_heads(given_query);
  const Tensor key = contiguous_heads(given_key);
  const Tensor value = contiguous_heads(given_value);
  const AttentionResult result = flash_forward(query, key, value, options);
  const std::vector<Tensor> outputs =
      record(name, {result.out, result.lse}, {query, key, value},
             [query, key, value, result = AttentionResult{result.out.detach(), result.lse.detach()},
              options](const Grads& douts) -> Grads {
               const AttentionGradients gradients{empty_like(query), empty_like(key), empty_like(value)};
               flash_backward(query, key, value, result, options, douts, gradients);
               return {gradients.dquery, gradients.dkey, gradients.dvalue};
             });
  return {outputs[0], outputs[1]};
}

// One of the three parts of qkv: (..., 3, num_heads, head_dim), as a view.
Tensor part_of(const Tensor& qkv, int64_t index) {
  std::vector<int64_t> sizes(qkv.shape().begin(), qkv.shape().end()),
      strides(qkv.strides().begin(), qkv.strides().end());
  const int64_t step = strides.end()[-3];
  sizes.erase(sizes.end() - 3);
  strides.erase(strides.end() - 3);
  return view_of(qkv, Shape(sizes), Shape(strides), qkv.impl()->offset + index * step);
}

}  // namespace

Tensor flash_attention(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionOptions& options) {
  return flash("flash_attention", query, key, value, options).out;
}

AttentionResult flash_attention_return_lse(const Tensor& query, const Tensor& key, const Tensor& value,
                                           const AttentionOptions& options) {
  return flash("flash_attention_return_lse", query, key, value, options);
}

Tensor flash_attention_qkvpacked(const Tensor& qkv, int64_t num_heads, const AttentionOptions& given_options) {
  constexpr const char* name = "flash_attention_qkvpacked";
  require_floating(name, "qkv", qkv);
  STROBE_CHECK(num_heads > 0, name, ": num_heads ", num_heads, " given, expected at least 1");
  const int rows = is_packed(given_options) ? 1 : 2;  // leading axes: (total), else (batch, seq_len)
  const bool flat = qkv.rank() == rows + 1 && qkv.dim(-1) > 0 && qkv.dim(-1) % (3 * num_heads) == 0;
  STROBE_CHECK(flat || (qkv.rank() == rows + 3 && qkv.dim(-3) == 3 && qkv.dim(-2) == num_heads && qkv.dim(-1) > 0),
               name, ": qkv ", qkv.shape(), " given for ", num_heads, " heads, expected ",
               rows == 1 ? "(total, 3 * num_heads * head_dim) or (total, 3, num_heads, head_dim)"
                         : "(batch, seq_len, 3 * num_heads * head_dim) or (batch, seq_len, 3, num_heads, head_dim)");
  const int64_t head_dim = flat ? qkv.dim(-1) / (3 * num_heads) : qkv.dim(-1);
  const MemoryTag tag("attention");
  const Shape shape =
      rows == 1 ? Shape{qkv.dim(0), 3, num_heads, head_dim} : Shape{qkv.dim(0), qkv.dim(1), 3, num_heads, head_dim};
  const Tensor parts = contiguous_heads(reshape(qkv, shape));
  const Tensor query = part_of(parts, 0), key = part_of(parts, 1), value = part_of(parts, 2);
  const AttentionOptions options = checked_attention(name, query, key, value, given_options);
  const AttentionResult result = flash_forward(query, key, value, options);
  return record(
      name, result.out, {parts},
      [parts, result = AttentionResult{result.out.detach(), result.lse}, options](const Tensor& dout) -> Grads {
        const Tensor dparts = empty_like(parts);
        flash_backward(part_of(parts, 0), part_of(parts, 1), part_of(parts, 2), result, options, {dout, Tensor()},
                       {part_of(dparts, 0), part_of(dparts, 1), part_of(dparts, 2)});
        return {dparts};
      });
}

}  // namespace strobe
