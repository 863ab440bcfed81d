// Standard attention: the matrices S and P in memory, products and a softmax. It is what tiled attention is compared
// with.
#include "strobe/core/autograd.h"
#include "strobe/core/ops/attention.h"
#include "strobe/core/ops/matmul.h"

namespace strobe {
namespace {

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

// What one call keeps for its backward pass besides its inputs.
struct Saved {
  kernels::AttentionArgs args;  // sizes and options; its pointers are not read
  kernels::AttentionBand band;
  int64_t first_matrix;  // batch index * num_heads of the first sequence
  Tensor products;       // (batch, num_kv_heads, group, seq_len_q, seq_len_k), f32 (f64); only with a softcap
  Tensor weights;        // the same, dtype: P before the division by its sums
  Tensor sums;           // (batch, num_heads, seq_len_q, 1), f32 (f64)

  MatmulOptions within_band() const { return {.band_lower = band.lower, .band_upper = band.upper}; }

  // `matrices` after dropout, written to `out`, which may be the same tensor.
  Tensor dropped(const Tensor& matrices, const Tensor& out) const {
    kernels::attention_dropout({.out = out.data(),
                                .x = matrices.data(),
                                .first_matrix = first_matrix,
                                .num_matrices = args.batch * args.num_heads,
                                .seq_len_q = args.seq_len_q,
                                .seq_len_k = args.seq_len_k,
                                .dtype = out.dtype(),
                                .dropout = {args.dropout_p, args.dropout_seed, args.dropout_offset}},
                               out.stream());
    return out;
  }
};

Grads standard_backward(const Tensor& query, const Tensor& key, const Tensor& value, const Saved& saved,
                        const Grads& douts) {
  constexpr const char* name = "standard_attention";
  const kernels::AttentionArgs& args = saved.args;
  const int64_t kv_heads = args.num_kv_heads;
  const Tensor& weights = saved.weights;
  const Tensor dout = dout_or_zeros(douts[0], query);
  const Tensor dlse = douts[1].defined() ? contiguous(douts[1]) : Tensor();
  const bool drops = args.dropout_p > 0;

  const Tensor dp = empty(weights.shape(), saved.sums.dtype(), query.device());
  matmul_into(dp, grouped(dout, kv_heads), transposed(grouped(value, kv_heads)), {}, name);
  if (drops) saved.dropped(dp, dp);
  const Tensor ds = dp.dtype() == query.dtype() ? dp : empty_like(weights);
  kernels::attention_softmax_backward({.dproducts = ds.data(),
                                       .weights = weights.data(),
                                       .sums = saved.sums.data(),
                                       .dprobabilities = dp.data(),
                                       .num_matrices = args.batch * args.num_heads,
                                       .seq_len_q = args.seq_len_q,
                                       .seq_len_k = args.seq_len_k,
                                       .dtype = args.dtype,
                                       .softmax_scale = args.softmax_scale,
                                       .band = saved.band,
                                       .softcap = args.softcap,
                                       .products = saved.products.defined() ? saved.products.data() : nullptr,
                                       .dlse = dlse.defined() ? dlse.data() : nullptr},
                                      query.stream());
  if (drops) saved.dropped(weights, weights);
  const Tensor dquery = empty_like(query);
  matmul_into(grouped(dquery, kv_heads), ds, grouped(key, kv_heads), saved.within_band(), name);
  return {dquery, sum_over_queries(ds, grouped(query, kv_heads), saved.band),
          sum_over_queries(weights, grouped(dout, kv_heads), saved.band)};
}

// Sequences of one length each; options are checked and not packed.
AttentionResult attend(const char* name, const Tensor& query, const Tensor& key, const Tensor& value,
                       const AttentionOptions& options, int64_t first_matrix) {
  const MemoryTag tag("attention");
  Saved saved{.args = attention_args(query, key, value, options),
              .band = {},
              .first_matrix = first_matrix,
              .products = Tensor(),
              .weights = Tensor(),
              .sums = Tensor()};
  const kernels::AttentionArgs& args = saved.args;
  saved.band = kernels::visible_band(args.causal, args.window_left, args.window_right, args.seq_len_q, args.seq_len_k);
  const DType dtype = args.dtype, wide = accumulate_dtype(dtype);
  const int64_t kv_heads = args.num_kv_heads;
  const Shape matrices{args.batch, kv_heads, args.num_heads / kv_heads, args.seq_len_q, args.seq_len_k};

  const Tensor products = empty(matrices, wide, query.device());
  matmul_into(products, grouped(query, kv_heads), transposed(grouped(key, kv_heads)), {}, name);
  if (args.softcap != 0) saved.products = products;
  saved.weights = wide == dtype && args.softcap == 0 ? products : empty(matrices, dtype, query.device());
  saved.sums = empty({args.batch, args.num_heads, args.seq_len_q, 1}, wide, query.device());
  const Tensor lse = empty(lse_shape(query), wide, query.device());
  kernels::attention_softmax_forward({.weights = saved.weights.data(),
                                      .sums = saved.sums.data(),
                                      .lse = lse.data(),
                                      .products = products.data(),
                                      .num_matrices = args.batch * args.num_heads,
                                      .seq_len_q = args.seq_len_q,
                                      .seq_len_k = args.seq_len_k,
                                      .dtype = dtype,
                                      .softmax_scale = args.softmax_scale,
                                      .band = saved.band,
                                      .softcap = args.softcap,
                                      .alibi_slopes = args.alibi_slopes,
                                      .num_heads = args.num_heads},
                                     query.stream());
  const Tensor weighted = empty(query.shape(), wide, query.device());
  matmul_into(grouped(weighted, kv_heads),
              args.dropout_p > 0 ? saved.dropped(saved.weights, empty_like(saved.weights)) : saved.weights,
              grouped(value, kv_heads), saved.within_band(), name);
  const Tensor out = div(weighted, transpose(saved.sums, 1, 2)).to(dtype);
  const std::vector<Tensor> outputs = record(
      name, {out, lse}, {query, key, value},
      [query, key, value, saved](const Grads& douts) { return standard_backward(query, key, value, saved, douts); });
  return {outputs[0], outputs[1]};
}

// Packed sequences one after the other, by operations that differentiate themselves. On a GPU this waits for the
// sequence starts.
AttentionResult attend_packed(const char* name, const Tensor& query, const Tensor& key, const Tensor& value,
                              AttentionOptions options) {
  std::vector<int64_t> starts_q = options.cu_seqlens_q.to_vector<int64_t>();
  std::vector<int64_t> starts_k = options.cu_seqlens_k.to_vector<int64_t>();
  starts_q.push_back(query.dim(0));  // padding, if any, is one more sequence that sees no key
  starts_k.push_back(starts_k.back());
  options.cu_seqlens_q = options.cu_seqlens_k = Tensor();
  const auto sequence = [](const Tensor& x, const std::vector<int64_t>& starts, size_t b) {
    return reshape(slice(x, 0, starts[b], starts[b + 1]), {1, starts[b + 1] - starts[b], x.dim(1), x.dim(2)});
  };
  std::vector<Tensor> outs, lses;
  for (size_t b = 0; b + 1 < starts_q.size(); ++b) {
    const AttentionResult result =
        attend(name, sequence(query, starts_q, b), sequence(key, starts_k, b), sequence(value, starts_k, b), options,
               static_cast<int64_t>(b) * query.dim(1));
    const int64_t length = starts_q[b + 1] - starts_q[b];
    outs.push_back(reshape(result.out, {length, query.dim(1), query.dim(2)}));
    lses.push_back(reshape(result.lse, {query.dim(1), length}));
  }
  return {concat(outs, 0), concat(lses, 1)};
}

AttentionResult standard(const char* name, const Tensor& query, const Tensor& key, const Tensor& value,
                         const AttentionOptions& given_options) {
  const AttentionOptions options = checked_attention(name, query, key, value, given_options);
  return is_packed(options) ? attend_packed(name, query, key, value, options)
                            : attend(name, query, key, value, options, 0);
}

}  // namespace

Tensor standard_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                          const AttentionOptions& options) {
  return standard("standard_attention", query, key, value, options).out;
}

AttentionResult standard_attention_return_lse(const Tensor& query, const Tensor& key, const Tensor& value,
                                              const AttentionOptions& options) {
  return standard("standard_attention_return_lse", query, key, value, options);
}

}  // namespace strobe
