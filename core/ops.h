// Every differentiable function of tensors. Shapes are in parentheses; inputs may have any strides; mixed dtypes or
// devices are errors. Results are new row-major tensors unless a comment says view.
#pragma once

#include <optional>
#include <vector>

#include "strobe/core/tensor.h"
#include "strobe/kernels/attention.h"

namespace strobe {

// ---- pointwise: floating dtypes; results have the input's dtype. Two tensors must agree in dtype and device.

// a op b, element by element; shapes broadcast as in numpy (aligned at the last axis, a size of 1 stretches).
Tensor add(const Tensor& a, const Tensor& b);
Tensor sub(const Tensor& a, const Tensor& b);
Tensor mul(const Tensor& a, const Tensor& b);
Tensor div(const Tensor& a, const Tensor& b);

// The same as operators, also with a number on either side.
Tensor operator+(const Tensor& a, const Tensor& b);
Tensor operator+(const Tensor& a, double b);
Tensor operator+(double a, const Tensor& b);
Tensor operator-(const Tensor& a, const Tensor& b);
Tensor operator-(const Tensor& a, double b);
Tensor operator-(double a, const Tensor& b);
Tensor operator*(const Tensor& a, const Tensor& b);
Tensor operator*(const Tensor& a, double b);
Tensor operator*(double a, const Tensor& b);
Tensor operator/(const Tensor& a, const Tensor& b);
Tensor operator/(const Tensor& a, double b);
Tensor operator/(double a, const Tensor& b);
Tensor operator-(const Tensor& x);

// f(x) element by element, x of any shape.
Tensor neg(const Tensor& x);        // -x
Tensor exp(const Tensor& x);        // e^x
Tensor log(const Tensor& x);        // natural logarithm
Tensor sqrt(const Tensor& x);       // square root
Tensor square(const Tensor& x);     // x^2
Tensor tanh(const Tensor& x);       // hyperbolic tangent
Tensor relu(const Tensor& x);       // max(x, 0); derivative 0 at 0
Tensor silu(const Tensor& x);       // x / (1 + e^-x) (Elfwing et al. 2018)
Tensor gelu(const Tensor& x);       // x Phi(x), Phi the normal distribution function (Hendrycks and Gimpel 2016)
Tensor gelu_tanh(const Tensor& x);  // its approximation in GPT-2: x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
enum class GeluForm : uint8_t { exact, tanh };
Tensor gelu(const Tensor& x, GeluForm form);  // gelu(x) or gelu_tanh(x)

// x converted to any dtype; floating to integer truncates toward zero and saturates. The gradient is converted back.
Tensor cast(const Tensor& x, DType dtype);

// ---- matmul

// The matrix product of the last two axes: out[..., i, j] = sum over p of a[..., i, p] b[..., p, j].
// a: (..., m, k), b: (..., k, n), rank >= 2 each (there is no product of vectors), one floating dtype; leading axes
// broadcast; result: (..., m, n), same dtype. 16-bit inputs are summed in f32. Transposed views are read without a
// copy.
Tensor matmul(const Tensor& a, const Tensor& b);
// y = x weight^T + bias. x: (..., in), weight: (out, in), bias: (out) or undefined, one floating dtype;
// result: (..., out), same dtype. On a GPU up to 16 bytes may lie between its rows, so that each starts aligned.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = Tensor());
// linear(gelu_tanh(linear(x, fc_weight, fc_bias)), proj_weight, proj_bias), the MLP of GPT-2: the same with fewer
// passes over memory, as a GPU applies GELU and its derivative to 16-bit results before they leave the product. x:
// (..., in), fc_weight: (hidden, in), proj_weight: (out, hidden), biases: (hidden) and (out) or undefined; result:
// (..., out).
Tensor mlp(const Tensor& x, const Tensor& fc_weight, const Tensor& fc_bias, const Tensor& proj_weight,
           const Tensor& proj_bias);

// ---- reduce: over the given axes (negative ones count from the end; none given: all). Reduced axes are dropped, or
// kept with size 1 if keepdim. Floating dtypes; sums are accumulated in f32 blocks that are added in f64.

// Over no elements: 0.
Tensor sum(const Tensor& x, const std::vector<int>& axes = {}, bool keepdim = false);
// sum / number of elements. Over no elements: NaN.
Tensor mean(const Tensor& x, const std::vector<int>& axes = {}, bool keepdim = false);
// The largest element, NaN when there is one. The gradient is shared evenly among equal maxima. Over no elements:
// error.
Tensor max(const Tensor& x, const std::vector<int>& axes = {}, bool keepdim = false);

// The inverse of broadcasting: sums x over the axes along which `shape` was stretched to x's shape.
Tensor sum_to(const Tensor& x, const Shape& shape);

// ---- norm: over the last axis. x: (..., n), floating; result: same shape and dtype. Statistics in f32 (f64 for f64).

// LayerNorm (Ba et al. 2016): (x - mean) / sqrt(variance + eps) * weight + bias, the variance being that of the row
// (divided by n). weight and bias: (n) of x's dtype, or undefined: no such term.
Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps = 1e-5);
// RMSNorm (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + eps) * weight. weight: (n) of x's dtype, or undefined.
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps = 1e-5);

struct AddNormResult {
  Tensor sum;         // x + residual, rounded to the dtype
  Tensor normalized;  // the norm of sum
};
// x + residual and its norm in one pass over memory, as a pre-norm residual block needs both; backward adds what
// reaches the sum to the norm's gradient in one pass, too. residual: x's shape, or undefined: sum is x itself.
AddNormResult add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias,
                             double eps = 1e-5);
AddNormResult add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps = 1e-5);

// ---- softmax: the maximum is subtracted first, so logits of any finite size are exact.

// y_i = exp(x_i) / sum_j exp(x_j) along an axis, and its logarithm. x: any shape of rank >= 1, floating; result: same
// shape and dtype. A row that is -inf everywhere gives NaN.
Tensor softmax(const Tensor& x, int axis = -1);
Tensor log_softmax(const Tensor& x, int axis = -1);

struct CrossEntropyOptions {
  int64_t ignore_index = -100;  // rows with this target do not count
};
// -log softmax(logits)[target], averaged over the rows that count; 0, with zero gradients, when none does.
// logits: (..., vocab), floating; targets: (...), i32 or i64 in [0, vocab) or ignore_index; result: one element, f32
// (f64 for f64). Keeps one number per row besides the logits, and writes the gradient over the logits when nothing but
// the autograd graph refers to them.
Tensor cross_entropy(const Tensor& logits, const Tensor& targets, const CrossEntropyOptions& options = {});

// ---- embedding

// Row indices[...] of weight. indices: (...), i32 or i64 in [0, vocab); weight: (vocab, dim), floating; result:
// (..., dim). The gradient of weight is summed in the order of the indices: always the same bits.
Tensor embedding(const Tensor& indices, const Tensor& weight);

// Rotary position embedding (RoFormer, Su et al. 2021). x: (batch, seq_len, num_heads, head_dim), floating, head_dim
// even; result: same shape and dtype. At position s, with theta_i = (position_offset + s) base^(-2 i / head_dim),
// element i < head_dim / 2 of a head is paired with element i + head_dim / 2 (as in GPT-NeoX and Llama): (y_i, y_{i +
// half}) = (x_i cos theta_i - x_{i + half} sin theta_i, x_{i + half} cos theta_i + x_i sin theta_i).
Tensor rope(const Tensor& x, double base = 10000, int64_t position_offset = 0);

// ---- random: Philox numbers of this thread's random state (see seed); the same on every device and thread count.

// Independent normal numbers.
Tensor normal(const Shape& shape, double mean = 0, double std = 1, DType dtype = DType::f32,
              Device device = default_device());
// Independent numbers, uniform in [low, high) before rounding to the dtype.
Tensor uniform(const Shape& shape, double low = 0, double high = 1, DType dtype = DType::f32,
               Device device = default_device());
// Each element of x is set to 0 with probability p, 0 <= p < 1, else divided by 1 - p (Srivastava et al. 2014). The
// mask is computed again in the backward pass; nothing is kept for it.
Tensor dropout(const Tensor& x, double p);

// ---- view: shared memory wherever strides can describe the result

// x itself when it is row-major without gaps, else a copy that is.
Tensor contiguous(const Tensor& x);
// The same elements under another shape; one size may be -1 and is inferred. A view unless x's strides forbid it.
Tensor reshape(const Tensor& x, const Shape& shape);
// Axis i of the result is axis axes[i] of x.
Tensor permute(const Tensor& x, const std::vector<int>& axes);
// Two axes exchanged.
Tensor transpose(const Tensor& x, int axis_a, int axis_b);
// x repeated, without a copy, along axes of size 1 and new leading axes.
Tensor expand(const Tensor& x, const Shape& shape);
// Positions begin to end - 1 along an axis.
Tensor slice(const Tensor& x, int axis, int64_t begin, int64_t end);
// Consecutive parts of the given sizes along an axis; the sizes sum to the axis.
std::vector<Tensor> split(const Tensor& x, const std::vector<int64_t>& sizes, int axis);
// Tensors that agree in all but one axis, one behind the other along that axis.
Tensor concat(const std::vector<Tensor>& tensors, int axis);

// ---- attention: FlashAttention (Dao et al. 2022, 2023) and the textbook form, the same function

using kernels::AttentionKernel;

struct AttentionOptions {
  std::optional<double> softmax_scale = std::nullopt;  // 1 / sqrt(head_dim) when not given; at most 1e30 either way
  bool causal = false;        // bottom-right aligned: query i sees key j when j <= i + seq_len_k - seq_len_q
  int64_t window_left = -1;   // query i sees key j when j >= i + seq_len_k - seq_len_q - window_left; -1: unlimited
  int64_t window_right = -1;  // query i sees key j when j <= i + seq_len_k - seq_len_q + window_right; -1: unlimited
  double softcap = 0;         // scores s become softcap * tanh(s / softcap); 0: off, else 1e-30 to 1e30
  Tensor alibi_slopes = Tensor();  // (num_heads), f32: adds -slope * abs(i + seq_len_k - seq_len_q - j)
  // Elements of P are dropped with probability dropout_p, in steps of 1 / 256 and below 1: a pure function of the seed,
  // the offset and the position (kernels/attention_mask.h), the same on every device, forward and backward.
  double dropout_p = 0;
  uint64_t dropout_seed = 0;
  uint64_t dropout_offset = 0;
  // Packed sequences: (batch + 1), i32, from 0, not decreasing. query is (total_q, num_heads, head_dim), key and value
  // are (total_k, num_kv_heads, head_dim), and sequence b is rows cu_seqlens[b] to cu_seqlens[b + 1] - 1 of them; rows
  // behind the last sequence are padding, with out and gradients 0. Both or neither.
  Tensor cu_seqlens_q = Tensor();
  Tensor cu_seqlens_k = Tensor();
  int64_t max_seq_len_q = -1;  // at least the longest packed sequence; -1: looked up in cu_seqlens
  int64_t max_seq_len_k = -1;
  AttentionKernel kernel = AttentionKernel::auto_select;
  bool deterministic = true;  // the same inputs give the same bits; on the CPU they always do
};

// softmax(softmax_scale * query key^T + mask) value, for each head: tiled, with the online softmax forward and P
// recomputed backward; besides the result only its log-sum-exp (batch, num_heads, seq_len_q) is kept.
// query: (batch, seq_len_q, num_heads, head_dim); key, value: (batch, seq_len_k, num_kv_heads, head_dim), where
// num_heads is a multiple of num_kv_heads and query head h reads kv head h / (num_heads / num_kv_heads); head_dim 1 to
// 256; one floating dtype, any strides (a copy is made only when head_dim is not contiguous); result: query's shape and
// dtype. Packed sequences: see AttentionOptions.
// A query that sees no key gets 0 and takes no part in any gradient. What a query does not see never influences it,
// NaN and infinity included.
Tensor flash_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                       const AttentionOptions& options = {});
// The same from the matrices themselves: S = query key^T in f32 (f64), P in the dtype, kept for the backward pass.
Tensor standard_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                          const AttentionOptions& options = {});
// flash_attention of the three parts of one tensor, which are neither split nor copied, nor are their gradients.
// qkv: (batch, seq_len, 3 * num_heads * head_dim) or (batch, seq_len, 3, num_heads, head_dim);
// result: (batch, seq_len, num_heads, head_dim).
Tensor flash_attention_qkvpacked(const Tensor& qkv, int64_t num_heads, const AttentionOptions& options = {});

struct AttentionResult {
  Tensor out;  // as flash_attention's
  Tensor lse;  // (batch, num_heads, seq_len_q), packed (num_heads, total_q); f64 for f64 inputs, else f32
};

// The same with the natural logarithm of the sum of exp of each query's scores (after scale, softcap, bias and mask),
// -inf where it sees no key. Both are differentiable.
AttentionResult flash_attention_return_lse(const Tensor& query, const Tensor& key, const Tensor& value,
                                           const AttentionOptions& options = {});
AttentionResult standard_attention_return_lse(const Tensor& query, const Tensor& key, const Tensor& value,
                                              const AttentionOptions& options = {});

// Attention over the union of two disjoint sets of keys from the attention over each, exactly: lse = log(exp(lse_a) +
// exp(lse_b)), out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b. Shapes and dtypes as in AttentionResult.
AttentionResult attention_combine(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b);

}  // namespace strobe
