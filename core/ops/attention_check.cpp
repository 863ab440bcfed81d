// What the attention operations share: what they accept, said before anything is allocated, and the kernels' view of
// it.
#include <cmath>

#include "strobe/core/ops/attention.h"

namespace strobe {
namespace {

void check_operands(const char* name, const Tensor& query, const Tensor& key, const Tensor& value, bool packed) {
  require_same_kind(name, "query", query, "key", key);
  require_same_kind(name, "query", query, "value", value);
  const int rank = packed ? 3 : 4;
  STROBE_CHECK(query.rank() == rank, name, ": query ", query.shape(), " given, expected ",
               packed ? "(total_q, num_heads, head_dim) with cu_seqlens" : "(batch, seq_len, num_heads, head_dim)");
  STROBE_CHECK(
      key.rank() == rank, name, ": key ", key.shape(), " given, expected ",
      packed ? "(total_k, num_kv_heads, head_dim) with cu_seqlens" : "(batch, seq_len, num_kv_heads, head_dim)");
  STROBE_CHECK(value.shape() == key.shape(), name, ": value ", value.shape(), " given, expected the shape of key, ",
               key.shape());
  STROBE_CHECK(packed || key.dim(0) == query.dim(0), name, ": query ", query.shape(), " and key ", key.shape(),
               " given, expected one batch size");
  STROBE_CHECK(key.dim(-1) == query.dim(-1) && query.dim(-1) > 0, name, ": query ", query.shape(), " and key ",
               key.shape(), " given, expected one head_dim of at least 1");
  STROBE_CHECK(query.dim(-1) <= kernels::max_attention_head_dim, name, ": query ", query.shape(),
               " given, expected a head_dim of at most ", kernels::max_attention_head_dim);
  const int64_t num_heads = query.dim(-2), num_kv_heads = key.dim(-2);
  STROBE_CHECK(num_heads > 0 && num_kv_heads > 0 && num_heads % num_kv_heads == 0, name, ": query ", query.shape(),
               " and key ", key.shape(), " given, expected num_heads ", num_heads, " to be a multiple of num_kv_heads ",
               num_kv_heads);
}

// Small vectors that belong to a call: slopes and sequence starts.
void check_vector(const char* name, const char* argument, const Tensor& x, DType dtype, Device device) {
  STROBE_CHECK(x.dtype() == dtype && x.rank() == 1 && x.is_contiguous(), name, ": ", argument, " ", x.shape(),
               " of dtype ", x.dtype(), " given, expected one contiguous axis of dtype ", dtype);
  STROBE_CHECK(x.device() == device, name, ": ", argument, " on ", x.device(), " given, expected ", device);
}

// The length of the longest sequence, looked up where it is not given. On a GPU that waits for the stream, and sequence
// starts are only looked at for it. Never more than there are rows, for kernels count their blocks by it.
int64_t longest_sequence(const char* name, const char* argument, const Tensor& starts, int64_t total, int64_t given) {
  STROBE_CHECK(given >= -1, name, ": longest sequence ", given, " given for ", argument,
               ", expected a length or -1 to look it up");
  if (given >= 0 && starts.device().type != DeviceType::cpu) return std::min(given, total);
  const std::vector<int32_t> values = starts.to_vector<int32_t>();
  STROBE_CHECK(values.front() == 0, name, ": ", argument, " begins with ", values.front(), ", expected 0");
  STROBE_CHECK(values.back() <= total, name, ": ", argument, " ends with ", values.back(), ", expected at most ", total,
               ", the rows of the tensor");
  int64_t longest = 0;
  for (size_t b = 1; b < values.size(); ++b) {
    STROBE_CHECK(values[b] >= values[b - 1], name, ": ", argument, " decreases from ", values[b - 1], " to ", values[b],
                 " at sequence ", b - 1, ", expected sequence starts in order");
    longest = std::max<int64_t>(longest, values[b] - values[b - 1]);
  }
  STROBE_CHECK(given == -1 || given >= longest, name, ": longest sequence ", given, " given for ", argument,
               ", expected at least ", longest);
  return longest;
}

}  // namespace

AttentionOptions checked_attention(const char* name, const Tensor& query, const Tensor& key, const Tensor& value,
                                   const AttentionOptions& options) {
  require_floating(name, "query", query);
  const Tensor &starts_q = options.cu_seqlens_q, &starts_k = options.cu_seqlens_k;
  STROBE_CHECK(starts_q.defined() == starts_k.defined(), name, ": cu_seqlens_", starts_q.defined() ? 'q' : 'k',
               " given without the other, expected both or none");
  check_operands(name, query, key, value, is_packed(options));
  if (options.alibi_slopes.defined()) {
    check_vector(name, "alibi_slopes", options.alibi_slopes, DType::f32, query.device());
    STROBE_CHECK(options.alibi_slopes.size() == query.dim(-2), name, ": alibi_slopes ", options.alibi_slopes.shape(),
                 " given, expected one for each of the ", query.dim(-2), " heads");
    STROBE_CHECK(!options.alibi_slopes.requires_grad(), name,
                 ": alibi_slopes that require a gradient given, expected constants");
  }
  STROBE_CHECK(is_packed(options) || (options.max_seq_len_q == -1 && options.max_seq_len_k == -1), name,
               ": max_seq_len_q ", options.max_seq_len_q, " and max_seq_len_k ", options.max_seq_len_k,
               " given without cu_seqlens, expected -1");
  AttentionOptions checked = options;
  if (is_packed(options)) {
    check_vector(name, "cu_seqlens_q", starts_q, DType::i32, query.device());
    check_vector(name, "cu_seqlens_k", starts_k, DType::i32, query.device());
    STROBE_CHECK(starts_q.size() >= 1 && starts_q.size() == starts_k.size(), name, ": cu_seqlens_q ", starts_q.shape(),
                 " and cu_seqlens_k ", starts_k.shape(), " given, expected (batch + 1) each");
    checked.max_seq_len_q = longest_sequence(name, "cu_seqlens_q", starts_q, query.dim(0), options.max_seq_len_q);
    checked.max_seq_len_k = longest_sequence(name, "cu_seqlens_k", starts_k, key.dim(0), options.max_seq_len_k);
  }
  kernels::require_attention_support(name, attention_args(query, key, value, checked), query.device());
  return checked;
}

kernels::AttentionTensor attention_operand(const Tensor& x) {
  const Shape& strides = x.strides();
  if (x.rank() == 3) return {.data = x.data(), .seq_stride = strides[0], .head_stride = strides[1]};
  return {.data = x.data(), .batch_stride = strides[0], .seq_stride = strides[1], .head_stride = strides[2]};
}

kernels::AttentionArgs attention_args(const Tensor& query, const Tensor& key, const Tensor& value,
                                      const AttentionOptions& options) {
  const bool packed = is_packed(options);
  return {.query = attention_operand(query),
          .key = attention_operand(key),
          .value = attention_operand(value),
          .out = {},
          .lse = nullptr,
          .batch = packed ? options.cu_seqlens_q.size() - 1 : query.dim(0),
          .seq_len_q = packed ? options.max_seq_len_q : query.dim(1),
          .seq_len_k = packed ? options.max_seq_len_k : key.dim(1),
          .num_heads = query.dim(-2),
          .num_kv_heads = key.dim(-2),
          .head_dim = query.dim(-1),
          .dtype = query.dtype(),
          .softmax_scale = options.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(query.dim(-1)))),
          .causal = options.causal,
          .window_left = options.window_left,
          .window_right = options.window_right,
          .softcap = options.softcap,
          .alibi_slopes = options.alibi_slopes.defined() ? options.alibi_slopes.data<float>() : nullptr,
          .dropout_p = options.dropout_p,
          .dropout_seed = options.dropout_seed,
          .dropout_offset = options.dropout_offset,
          .cu_seqlens_q = packed ? options.cu_seqlens_q.data<int32_t>() : nullptr,
          .cu_seqlens_k = packed ? options.cu_seqlens_k.data<int32_t>() : nullptr,
          .total_q = packed ? query.dim(0) : 0,
          .total_k = packed ? key.dim(0) : 0,
          .kernel = options.kernel,
          .deterministic = options.deterministic};
}

Tensor dout_or_zeros(const Tensor& dout, const Tensor& out) {
  return dout.defined() ? dout : expand(zeros({1}, out.dtype(), out.device()), out.shape());
}

Shape lse_shape(const Tensor& query) {
  return query.rank() == 3 ? Shape{query.dim(1), query.dim(0)} : Shape{query.dim(0), query.dim(2), query.dim(1)};
}

}  // namespace strobe
