// Attention, tiled and from stored matrices, with their backward passes.
#include "strobe/kernels/attention.h"

#include <cmath>

#include "strobe/core/autograd.h"
#include "strobe/core/ops.h"
#include "strobe/core/ops/matmul.h"

namespace strobe {
namespace {

// A (batch, seq_len, num_heads, head_dim) tensor as the kernels see it.
kernels::AttentionTensor operand(const Tensor& x) {
  return {
      .data = x.data(), .batch_stride = x.strides()[0], .seq_stride = x.strides()[1], .head_stride = x.strides()[2]};
}

double scale_of(const AttentionOptions& options, const Tensor& query) {
  return options.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(query.dim(3))));
}

// The arguments of a call but for its tensors.
kernels::AttentionArgs option_args(const AttentionOptions& options) {
  return {.query = {},
          .key = {},
          .value = {},
          .out = {},
          .lse = nullptr,
          .batch = 0,
          .seq_len_q = 0,
          .seq_len_k = 0,
          .num_heads = 0,
          .num_kv_heads = 0,
          .head_dim = 0,
          .dtype = DType::f32,
          .softmax_scale = 0,
          .causal = options.causal,
          .window_left = options.window_left,
          .window_right = options.window_right,
          .softcap = options.softcap,
          .dropout_p = options.dropout_p,
          .dropout_seed = options.dropout_seed,
          .dropout_offset = options.dropout_offset,
          .kernel = options.kernel,
          .deterministic = options.deterministic};
}

kernels::AttentionArgs attention_args(const Tensor& query, const Tensor& key, const Tensor& value,
                                      const AttentionOptions& options) {
  kernels::AttentionArgs args = option_args(options);
  args.query = operand(query);
  args.key = operand(key);
  args.value = operand(value);
  args.batch = query.dim(0);
  args.seq_len_q = query.dim(1);
  args.seq_len_k = key.dim(1);
  args.num_heads = query.dim(2);
  args.num_kv_heads = key.dim(2);
  args.head_dim = query.dim(3);
  args.dtype = query.dtype();
  args.softmax_scale = scale_of(options, query);
  return args;
}

// Throws unless the options make sense and can be computed on `device`.
void check_options(const char* name, const AttentionOptions& options, Device device) {
  constexpr double largest_scale = 1e30;
  const double scale = options.softmax_scale.value_or(1.0);
  STROBE_CHECK(std::abs(scale) <= largest_scale, name, ": softmax_scale ", scale,
               " given, expected a number of magnitude at most ", largest_scale);
  STROBE_CHECK(options.dropout_p >= 0 && options.dropout_p < 1, name, ": dropout_p ", options.dropout_p,
               " given, expected 0 <= dropout_p < 1");
  STROBE_CHECK(options.softcap >= 0 && std::isfinite(options.softcap), name, ": softcap ", options.softcap,
               " given, expected a number of at least 0");
  STROBE_CHECK(options.window_left >= -1 && options.window_right >= -1, name, ": window_left ", options.window_left,
               " and window_right ", options.window_right, " given, expected sizes or -1 for no limit");
  STROBE_CHECK(!options.alibi_slopes.defined(), name, ": alibi_slopes given, but ALiBi is not supported yet");
  STROBE_CHECK(!options.cu_seqlens_q.defined() && !options.cu_seqlens_k.defined(), name,
               ": cu_seqlens given, but packed sequences are not supported yet");
  kernels::require_attention_support(name, option_args(options), device);
}

// Throws unless the tensors fit together; nothing has been allocated by then.
void check_operands(const char* name, const Tensor& query, const Tensor& key, const Tensor& value) {
  require_same_kind(name, "query", query, "key", key);
  require_same_kind(name, "query", query, "value", value);
  STROBE_CHECK(query.rank() == 4, name, ": query ", query.shape(),
               " given, expected (batch, seq_len, num_heads, head_dim)");
  STROBE_CHECK(key.rank() == 4, name, ": key ", key.shape(),
               " given, expected (batch, seq_len, num_kv_heads, head_dim)");
  STROBE_CHECK(value.shape() == key.shape(), name, ": value ", value.shape(), " given, expected the shape of key, ",
               key.shape());
  STROBE_CHECK(key.dim(0) == query.dim(0), name, ": query ", query.shape(), " and key ", key.shape(),
               " given, expected one batch size");
  STROBE_CHECK(key.dim(3) == query.dim(3) && query.dim(3) > 0, name, ": query ", query.shape(), " and key ",
               key.shape(), " given, expected one head_dim of at least 1");
  STROBE_CHECK(query.dim(2) > 0 && key.dim(2) > 0 && query.dim(2) % key.dim(2) == 0, name, ": query ", query.shape(),
               " and key ", key.shape(), " given, expected num_heads ", query.dim(2),
               " to be a multiple of num_kv_heads ", key.dim(2));
}

void check_attention(const char* name, const Tensor& query, const Tensor& key, const Tensor& value,
                     const AttentionOptions& options) {
  require_floating(name, "query", query);
  check_options(name, options, query.device());
  check_operands(name, query, key, value);
}

// The kernels want the elements of a head next to each other.
Tensor contiguous_heads(const Tensor& x) { return x.dim(-1) <= 1 || x.strides().back() == 1 ? x : contiguous(x); }

struct FlashResult {
  Tensor out;  // (batch, seq_len_q, num_heads, head_dim)
  Tensor lse;  // (batch, num_heads, seq_len_q), f32 (f64 for f64)
};

FlashResult flash_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                          const AttentionOptions& options) {
  kernels::AttentionArgs args = attention_args(query, key, value, options);
  const FlashResult result{
      empty(query.shape(), query.dtype(), query.device()),
      empty({query.dim(0), query.dim(2), query.dim(1)}, accumulate_dtype(query.dtype()), query.device())};
  args.out = operand(result.out);
  args.lse = result.lse.data();
  args.workspace_bytes = kernels::flash_attention_forward_workspace(args, query.device());
  const Tensor workspace = empty_bytes(args.workspace_bytes, query.device());
  args.workspace = workspace.data();
  kernels::flash_attention_forward(args, query.stream());
  return result;
}

void flash_backward(const Tensor& query, const Tensor& key, const Tensor& value, const FlashResult& result,
                    const AttentionOptions& options, const Tensor& dout, const Tensor& dquery, const Tensor& dkey,
                    const Tensor& dvalue) {
  kernels::AttentionGradArgs args{.forward = attention_args(query, key, value, options),
                                  .dout = operand(dout),
                                  .dout_dim_stride = dout.strides()[3],
                                  .dquery = operand(dquery),
                                  .dkey = operand(dkey),
                                  .dvalue = operand(dvalue)};
  args.forward.out = operand(result.out);
  args.forward.lse = result.lse.data();
  args.workspace_bytes = kernels::flash_attention_backward_workspace(args, query.device());
  const Tensor workspace = empty_bytes(args.workspace_bytes, query.device());
  args.workspace = workspace.data();
  kernels::flash_attention_backward(args, query.stream());
}

// One of the three parts of qkv: (batch, seq_len, 3, num_heads, head_dim), as a view.
Tensor part_of(const Tensor& qkv, int64_t index) {
  const Shape& sizes = qkv.shape();
  const Shape& strides = qkv.strides();
  return view_of(qkv, {sizes[0], sizes[1], sizes[3], sizes[4]}, {strides[0], strides[1], strides[3], strides[4]},
                 qkv.impl()->offset + index * strides[2]);
}

// (batch, seq_len, num_heads, head_dim) as (batch, num_kv_heads, num_heads / num_kv_heads, seq_len, head_dim): against
// keys, whose group has size 1, products broadcast over the query heads of a group.
Tensor grouped(const Tensor& x, int64_t num_kv_heads) {
  const int64_t group = x.dim(2) / num_kv_heads;
  const Shape& strides = x.strides();
  return view_of(x, {x.dim(0), num_kv_heads, group, x.dim(1), x.dim(3)},
                 {strides[0], strides[2] * group, strides[2], strides[1], strides[3]}, x.impl()->offset);
}

Tensor transposed(const Tensor& x) { return transpose(x, -2, -1); }

// The gradient of keys or values: matrices^T rows, summed over each group of query heads.
// matrices: (batch, num_kv_heads, group, seq_len_q, seq_len_k), rows: (..., seq_len_q, head_dim).
Tensor sum_over_queries(const Tensor& matrices, const Tensor& rows, const kernels::AttentionBand& band) {
  Shape shape = rows.shape();
  shape[3] = matrices.dim(4);
  const Tensor per_head = empty(shape, accumulate_dtype(rows.dtype()), rows.device());
  matmul_into(per_head, transposed(matrices), rows, {.band_lower = -band.upper, .band_upper = -band.lower},
              "standard_attention");
  return transpose(sum(per_head, {2}).to(rows.dtype()), 1, 2);
}

}  // namespace

Tensor flash_attention(const Tensor& given_query, const Tensor& given_key, const Tensor& given_value,
                       const AttentionOptions& options) {
  check_attention("flash_attention", given_query, given_key, given_value, options);
  const MemoryTag tag("attention");
  const Tensor query = contiguous_heads(given_query);
  const Tensor key = contiguous_heads(given_key);
  const Tensor value = contiguous_heads(given_value);
  const FlashResult result = flash_forward(query, key, value, options);
  return record(
      "flash_attention", result.out, {query, key, value},
      [query, key, value, result = FlashResult{result.out.detach(), result.lse}, options](const Tensor& dout) -> Grads {
        const Tensor dquery = empty_like(query), dkey = empty_like(key), dvalue = empty_like(value);
        flash_backward(query, key, value, result, options, dout, dquery, dkey, dvalue);
        return {dquery, dkey, dvalue};
      });
}

Tensor flash_attention_qkvpacked(const Tensor& qkv, int64_t num_heads, const AttentionOptions& options) {
  constexpr const char* name = "flash_attention_qkvpacked";
  require_floating(name, "qkv", qkv);
  check_options(name, options, qkv.device());
  STROBE_CHECK(num_heads > 0, name, ": num_heads ", num_heads, " given, expected at least 1");
  const bool flat = qkv.rank() == 3 && qkv.dim(2) > 0 && qkv.dim(2) % 3 == 0 && qkv.dim(2) / 3 % num_heads == 0;
  STROBE_CHECK(flat || (qkv.rank() == 5 && qkv.dim(2) == 3 && qkv.dim(3) == num_heads && qkv.dim(4) > 0), name,
               ": qkv ", qkv.shape(), " given for ", num_heads, " heads, expected (batch, seq_len, 3 * num_heads * ",
               "head_dim) or (batch, seq_len, 3, num_heads, head_dim)");
  const int64_t head_dim = flat ? qkv.dim(2) / (3 * num_heads) : qkv.dim(4);
  const MemoryTag tag("attention");
  const Tensor parts = contiguous_heads(reshape(qkv, {qkv.dim(0), qkv.dim(1), 3, num_heads, head_dim}));
  const FlashResult result = flash_forward(part_of(parts, 0), part_of(parts, 1), part_of(parts, 2), options);
  return record(name, result.out, {parts},
                [parts, result = FlashResult{result.out.detach(), result.lse}, options](const Tensor& dout) -> Grads {
                  const Tensor dparts = empty_like(parts);
                  flash_backward(part_of(parts, 0), part_of(parts, 1), part_of(parts, 2), result, options, dout,
                                 part_of(dparts, 0), part_of(dparts, 1), part_of(dparts, 2));
                  return {dparts};
                });
}

Tensor standard_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                          const AttentionOptions& options) {
  constexpr const char* name = "standard_attention";
  check_attention(name, query, key, value, options);
  const MemoryTag tag("attention");
  const int64_t batch = query.dim(0), seq_len_q = query.dim(1), num_heads = query.dim(2), kv_heads = key.dim(2);
  const DType dtype = query.dtype(), wide = accumulate_dtype(dtype);
  const double scale = scale_of(options, query);
  const kernels::AttentionBand band = kernels::visible_band(options.causal, seq_len_q, key.dim(1));
  const MatmulOptions within_band{.band_lower = band.lower, .band_upper = band.upper};
  const Shape matrices{batch, kv_heads, num_heads / kv_heads, seq_len_q, key.dim(1)};

  const Tensor scores = empty(matrices, wide, query.device());
  matmul_into(scores, grouped(query, kv_heads), transposed(grouped(key, kv_heads)), {}, name);
  const Tensor weights = wide == dtype ? scores : empty(matrices, dtype, query.device());
  const Tensor sums = empty({batch, num_heads, seq_len_q, 1}, wide, query.device());
  kernels::attention_softmax_forward({.weights = weights.data(),
                                      .sums = sums.data(),
                                      .scores = scores.data(),
                                      .num_matrices = batch * num_heads,
                                      .seq_len_q = seq_len_q,
                                      .seq_len_k = key.dim(1),
                                      .dtype = dtype,
                                      .scale = scale,
                                      .band = band},
                                     query.stream());
  const Tensor weighted = empty(query.shape(), wide, query.device());
  matmul_into(grouped(weighted, kv_heads), weights, grouped(value, kv_heads), within_band, name);
  const Tensor out = div(weighted, transpose(sums, 1, 2)).to(dtype);

  return record(name, out, {query, key, value},
                [query, key, value, weights, sums, scale, band, within_band](const Tensor& dout) -> Grads {
                  const int64_t kv_heads = key.dim(2);
                  const Tensor dp = empty(weights.shape(), sums.dtype(), query.device());
                  matmul_into(dp, grouped(dout, kv_heads), transposed(grouped(value, kv_heads)), {}, name);
                  const Tensor ds = dp.dtype() == query.dtype() ? dp : empty_like(weights);
                  kernels::attention_softmax_backward({.dscores = ds.data(),
                                                       .weights = weights.data(),
                                                       .sums = sums.data(),
                                                       .dprobabilities = dp.data(),
                                                       .num_matrices = query.dim(0) * query.dim(2),
                                                       .seq_len_q = query.dim(1),
                                                       .seq_len_k = key.dim(1),
                                                       .dtype = query.dtype(),
                                                       .scale = scale,
                                                       .band = band},
                                                      query.stream());
                  const Tensor dquery = empty_like(query);
                  matmul_into(grouped(dquery, kv_heads), ds, grouped(key, kv_heads), within_band, name);
                  return {dquery, sum_over_queries(ds, grouped(query, kv_heads), band),
                          sum_over_queries(weights, grouped(dout, kv_heads), band)};
                });
}

}  // namespace strobe
