// A call of the C interface of attention with memory of its own.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "strobe/kernels/attention.h"
#include "strobe/kernels/attention_c.h"
#include "strobe/kernels/device.h"
#include "support/compare.h"

namespace strobe::testing {

// 64-byte aligned memory.
class Bytes {
 public:
  explicit Bytes(size_t size) : data_(raw_malloc(size + 64, Device::cpu()), [](void* x) { raw_free(x, {}); }) {}
  void* get() const { return data_.get(); }

 private:
  std::shared_ptr<void> data_;
};

// A call with its own memory: dense operands, random inputs, NaN in everything that is to be written.
template <class T>
struct CAttentionCall {
  using C = accumulate_t<T>;
  static constexpr int64_t batch = 2, seq_len_q = 37, seq_len_k = 41, num_heads = 4, num_kv_heads = 2, head_dim = 12;
  static constexpr int64_t total_q = 50, total_k = 64;  // when packed
  std::vector<T> query, key, value, out, dout, dquery, dkey, dvalue;
  std::vector<C> lse, dlse;
  std::vector<float> slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
  std::vector<int32_t> cu_seqlens_q = {0, 37, 48}, cu_seqlens_k = {0, 20, 61};
  bool packed;
  strobe_attention_args args;

  explicit CAttentionCall(bool packed_sequences = false) : packed(packed_sequences) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    const auto fill = [&](auto& values, int64_t count) {
      values.resize(static_cast<size_t>(count));
      for (auto& x : values) x = std::remove_reference_t<decltype(x)>(normal(random));
    };
    const int64_t queries = (packed ? total_q : batch * seq_len_q) * num_heads;
    const int64_t keys = (packed ? total_k : batch * seq_len_k) * num_kv_heads;
    fill(query, queries * head_dim);
    fill(key, keys * head_dim);
    fill(value, keys * head_dim);
    fill(dout, queries * head_dim);
    fill(dlse, queries);
    out.assign(query.size(), T(NAN));
    dquery = out;
    dkey.assign(key.size(), T(NAN));
    dvalue = dkey;
    lse.assign(dlse.size(), C(NAN));

    REQUIRE(strobe_attention_args_init(&args, sizeof args) == STROBE_OK);
    args.dtype = static_cast<int32_t>(dtype_of<T>());
    args.batch = batch;
    args.seq_len_q = seq_len_q;
    args.seq_len_k = seq_len_k;
    args.num_heads = num_heads;
    args.num_kv_heads = num_kv_heads;
    args.head_dim = head_dim;
    args.query = of_queries(query);
    args.key = of_keys(key);
    args.value = of_keys(value);
    args.out = of_queries(out);
    args.lse = lse.data();
    args.softmax_scale = 0.3;
    args.dout = of_queries(dout);
    args.dquery = of_queries(dquery);
    args.dkey = of_keys(dkey);
    args.dvalue = of_keys(dvalue);
    if (packed) {
      args.cu_seqlens_q = cu_seqlens_q.data();
      args.cu_seqlens_k = cu_seqlens_k.data();
      args.total_q = total_q;
      args.total_k = total_k;
    }
  }
  CAttentionCall(const CAttentionCall&) = delete;

  static strobe_attention_tensor of_queries(std::vector<T>& x) {
    return {x.data(), seq_len_q * num_heads * head_dim, num_heads * head_dim, head_dim};
  }
  static strobe_attention_tensor of_keys(std::vector<T>& x) {
    return {x.data(), seq_len_k * num_kv_heads * head_dim, num_kv_heads * head_dim, head_dim};
  }

  strobe_status run(strobe_status (*workspace_of)(const strobe_attention_args*, size_t*),
                    strobe_status (*pass)(const strobe_attention_args*)) {
    const strobe_status status = workspace_of(&args, &args.workspace_bytes);
    if (status != STROBE_OK) return status;
    CHECK(args.workspace_bytes % 64 == 0);
    const Bytes memory(args.workspace_bytes);
    args.workspace = memory.get();
    return pass(&args);
  }
  strobe_status forward() { return run(strobe_attention_forward_workspace, strobe_attention_forward); }
  strobe_status backward() { return run(strobe_attention_backward_workspace, strobe_attention_backward); }

  bool untouched() const {
    const auto all_nan = [](const auto& values) {
      return std::all_of(values.begin(), values.end(),
                         [](auto x) { return std::isnan(static_cast<accumulate_t<decltype(x)>>(x)); });
    };
    return all_nan(out) && all_nan(lse) && all_nan(dquery) && all_nan(dkey) && all_nan(dvalue);
  }
  std::vector<std::vector<T>> results() const { return {out, dquery, dkey, dvalue}; }

  // The same call through the C++ interface, each option written down again.
  kernels::AttentionGradArgs cpp_args(const std::function<void(kernels::AttentionArgs&)>& options) {
    const auto cpp = [](const strobe_attention_tensor& x) {
      return kernels::AttentionTensor{x.data, x.batch_stride, x.seq_stride, x.head_stride};
    };
    kernels::AttentionArgs forward{.query = cpp(args.query),
                                   .key = cpp(args.key),
                                   .value = cpp(args.value),
                                   .out = cpp(args.out),
                                   .lse = lse.data(),
                                   .batch = batch,
                                   .seq_len_q = seq_len_q,
                                   .seq_len_k = seq_len_k,
                                   .num_heads = num_heads,
                                   .num_kv_heads = num_kv_heads,
                                   .head_dim = head_dim,
                                   .dtype = dtype_of<T>(),
                                   .softmax_scale = 0.3};
    if (packed) {
      forward.cu_seqlens_q = cu_seqlens_q.data();
      forward.cu_seqlens_k = cu_seqlens_k.data();
      forward.total_q = total_q;
      forward.total_k = total_k;
    }
    options(forward);
    return {.forward = forward,
            .dout = cpp(args.dout),
            .dquery = cpp(args.dquery),
            .dkey = cpp(args.dkey),
            .dvalue = cpp(args.dvalue)};
  }
  void run_cpp(kernels::AttentionGradArgs cpp) {
    cpp.forward.workspace_bytes = kernels::flash_attention_forward_workspace(cpp.forward, Device::cpu());
    cpp.workspace_bytes = kernels::flash_attention_backward_workspace(cpp, Device::cpu());
    const Bytes memory(std::max(cpp.forward.workspace_bytes, cpp.workspace_bytes));
    cpp.workspace = cpp.forward.workspace = memory.get();
    kernels::flash_attention_forward(cpp.forward, Stream{});
    kernels::flash_attention_backward(cpp, Stream{});
  }
};

}  // namespace strobe::testing
