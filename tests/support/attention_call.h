// Calls of the attention kernels on raw memory: every operand lies in a larger buffer of NaN, outputs, lse and
// workspaces are NaN before the call and have guard bands around them.
#pragma once

#include "strobe/kernels/attention.h"
#include "strobe/kernels/device.h"
#include "support/attention_problem.h"

namespace strobe::testing {

// A (batch, seq_len, num_heads, head_dim) operand within a larger buffer: `gap` elements of NaN between its heads and
// around it.
template <class T>
struct Buffer {
  int64_t seq_len, num_heads, head_dim, gap;
  std::vector<T> memory;

  Buffer(int64_t batch, int64_t seq, int64_t heads, int64_t dim, int64_t gap_size)
      : seq_len(seq),
        num_heads(heads),
        head_dim(dim),
        gap(gap_size),
        memory(static_cast<size_t>(gap_size + batch * seq * heads * (dim + gap_size)), T(NAN)) {}

  kernels::AttentionTensor tensor() {
    const int64_t head_stride = head_dim + gap, seq_stride = num_heads * head_stride;
    return {memory.data() + gap, seq_len * seq_stride, seq_stride, head_stride};
  }
  bool in_gap(size_t index) const { return static_cast<int64_t>(index) % (head_dim + gap) < gap; }
  std::vector<double> values() const {
    std::vector<double> result;
    for (size_t i = 0; i < memory.size(); ++i) {
      if (!in_gap(i)) result.push_back(static_cast<double>(static_cast<accumulate_t<T>>(memory[i])));
    }
    return result;
  }
  bool gaps_untouched() const {
    for (size_t i = 0; i < memory.size(); ++i) {
      if (in_gap(i) && !std::isnan(static_cast<accumulate_t<T>>(memory[i]))) return false;
    }
    return true;
  }
  void randomize(std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < memory.size(); ++i) {
      if (!in_gap(i)) memory[i] = T(normal(random));
    }
  }
  // Rows `begin` to `end` - 1 of every batch become NaN.
  void poison_rows(int64_t begin, int64_t end) {
    for (size_t i = 0; i < memory.size(); ++i) {
      const int64_t row = static_cast<int64_t>(i) / ((head_dim + gap) * num_heads) % seq_len;
      if (!in_gap(i) && row >= begin && row < end) memory[i] = T(NAN);
    }
  }
};

struct AttentionSizes {
  int64_t batch, seq_q, seq_k, heads, kv_heads, dim;  // packed: batch 1, seq_q and seq_k rows in all
};

// One forward and backward call.
template <class T>
struct AttentionCall {
  using C = accumulate_t<T>;
  static constexpr int64_t guard = 16;  // elements of NaN on either side of lse, dlse and workspaces

  AttentionSizes sizes;
  AttentionOptions options;
  Buffer<T> query, key, value, out, dout, dquery, dkey, dvalue;
  std::vector<C> lse, dlse;
  bool workspaces_kept = true;  // no call wrote behind the workspace it was given
  kernels::AttentionArgs args;

  AttentionCall(const AttentionSizes& s, const AttentionOptions& o)
      : sizes(s),
        options(o),
        query(s.batch, s.seq_q, s.heads, s.dim, 3),
        key(s.batch, s.seq_k, s.kv_heads, s.dim, 1),
        value(s.batch, s.seq_k, s.kv_heads, s.dim, 2),
        out(s.batch, s.seq_q, s.heads, s.dim, 5),
        dout(s.batch, s.seq_q, s.heads, s.dim, 4),
        dquery(s.batch, s.seq_q, s.heads, s.dim, 7),
        dkey(s.batch, s.seq_k, s.kv_heads, s.dim, 6),
        dvalue(s.batch, s.seq_k, s.kv_heads, s.dim, 1),
        lse(static_cast<size_t>(s.batch * s.heads * s.seq_q + 2 * guard), C(NAN)),
        dlse(lse),
        args{.query = query.tensor(),
             .key = key.tensor(),
             .value = value.tensor(),
             .out = out.tensor(),
             .lse = lse.data() + guard,
             .batch = s.batch,
             .seq_len_q = s.seq_q,
             .seq_len_k = s.seq_k,
             .num_heads = s.heads,
             .num_kv_heads = s.kv_heads,
             .head_dim = s.dim,
             .dtype = dtype_of<T>(),
             .softmax_scale = o.softmax_scale.value_or(1 / std::sqrt(static_cast<double>(s.dim))),
             .causal = o.causal,
             .window_left = o.window_left,
             .window_right = o.window_right,
             .softcap = o.softcap,
             .alibi_slopes = o.alibi_slopes.defined() ? o.alibi_slopes.template data<float>() : nullptr,
             .dropout_p = o.dropout_p,
             .dropout_seed = o.dropout_seed,
             .dropout_offset = o.dropout_offset} {
    if (o.cu_seqlens_q.defined()) {
      args.batch = o.cu_seqlens_q.size() - 1;
      args.cu_seqlens_q = o.cu_seqlens_q.template data<int32_t>();
      args.cu_seqlens_k = o.cu_seqlens_k.template data<int32_t>();
      args.total_q = s.seq_q;
      args.total_k = s.seq_k;
    }
    std::mt19937 random(11);
    for (Buffer<T>* buffer : {&query, &key, &value, &dout}) buffer->randomize(random);
    std::normal_distribution<float> normal;
    for (int64_t i = guard; i < std::ssize(dlse) - guard; ++i) dlse[static_cast<size_t>(i)] = C(normal(random));
  }
  AttentionCall(const AttentionCall&) = delete;

  kernels::AttentionGradArgs grad_args() {
    return {.forward = args,
            .dout = dout.tensor(),
            .dlse = dlse.data() + guard,
            .dquery = dquery.tensor(),
            .dkey = dkey.tensor(),
            .dvalue = dvalue.tensor()};
  }
  void forward() {
    with_workspace(args, flash_attention_forward_workspace(args, Device::cpu()),
                   [](const auto& call) { flash_attention_forward(call, Stream{}); });
  }
  void backward() { backward(grad_args()); }
  void backward(const kernels::AttentionGradArgs& grad) {
    with_workspace(grad, flash_attention_backward_workspace(grad, Device::cpu()),
                   [](const auto& call) { flash_attention_backward(call, Stream{}); });
  }

  std::vector<double> lse_values() const { return std::vector<double>(lse.begin() + guard, lse.end() - guard); }
  bool nothing_else_written() const {
    bool untouched = workspaces_kept;
    for (const Buffer<T>* buffer : {&query, &key, &value, &out, &dout, &dquery, &dkey, &dvalue}) {
      untouched = untouched && buffer->gaps_untouched();
    }
    for (int64_t i = 0; i < guard; ++i) {
      untouched = untouched && std::isnan(lse[static_cast<size_t>(i)]) && std::isnan(lse.end()[-1 - i]);
    }
    return untouched;
  }
  // Out, lse, dquery, dkey, dvalue.
  std::vector<std::vector<double>> results() const {
    return {out.values(), lse_values(), dquery.values(), dkey.values(), dvalue.values()};
  }
  std::vector<std::vector<double>> reference() const {
    const bool packed = options.cu_seqlens_q.defined();
    const auto tensor = [&](const Buffer<T>& x) {
      return from_vector(x.values(), packed ? Shape{x.seq_len, x.num_heads, x.head_dim}
                                            : Shape{sizes.batch, x.seq_len, x.num_heads, x.head_dim});
    };
    const std::vector<double> dlse_values(dlse.begin() + guard, dlse.end() - guard);
    const AttentionOutputs expected =
        reference_attention(tensor(query), tensor(key), tensor(value), tensor(dout), options,
                            from_vector(dlse_values, packed ? Shape{sizes.heads, sizes.seq_q}
                                                            : Shape{sizes.batch, sizes.heads, sizes.seq_q}));
    std::vector<std::vector<double>> values;
    for (const Tensor& x : expected.all()) values.push_back(x.to_vector<double>());
    return values;
  }

 private:
  template <class Args, class Run>
  void with_workspace(Args call, size_t bytes, Run run) {
    const Tensor workspace = full({static_cast<int64_t>(bytes / 4) + guard}, NAN);
    call.workspace = workspace.data();
    call.workspace_bytes = bytes;
    run(call);
    const std::vector<double> behind =
        slice(workspace, 0, static_cast<int64_t>(bytes / 4), workspace.size()).template to_vector<double>();
    for (const double value : behind) workspaces_kept = workspaces_kept && std::isnan(value);
  }
};

// The options that the kernels are tested with: each alone, then together.
inline std::vector<AttentionOptions> every_kernel_option(int64_t heads) {
  const Tensor slopes = uniform({heads}, 0.01, 0.5);
  return {{},
          {.causal = true},
          {.window_left = 20},
          {.window_left = 90, .window_right = 7},
          {.softcap = 1.5},
          {.alibi_slopes = slopes},
          {.dropout_p = 0.3, .dropout_seed = 17, .dropout_offset = 2},
          {.softmax_scale = -0.3,
           .causal = true,
           .window_left = 150,
           .softcap = 4,
           .alibi_slopes = slopes,
           .dropout_p = 0.1}};
}

}  // namespace strobe::testing
