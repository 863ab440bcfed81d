// Attention kernels on raw memory: every element is written and nothing else, the bits do not depend on threads, lse,
// the masked softmax, and what is refused.
#include "strobe/kernels/attention.h"

#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <vector>

#include "strobe/kernels/device.h"
#include "support/attention_reference.h"
#include "support/threads.h"

using namespace strobe;
using namespace strobe::kernels;
using namespace strobe::testing;

namespace {

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

  AttentionTensor tensor() {
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
};

// One forward and backward call over NaN-filled outputs and workspaces.
template <class T>
struct Call {
  int64_t batch, seq_q, seq_k, heads, kv_heads, dim;
  Buffer<T> query, key, value, out, dout, dquery, dkey, dvalue;
  std::vector<accumulate_t<T>> lse;
  AttentionArgs args;

  Call(int64_t b, int64_t sq, int64_t sk, int64_t h, int64_t hk, int64_t d, bool causal, double scale)
      : batch(b),
        seq_q(sq),
        seq_k(sk),
        heads(h),
        kv_heads(hk),
        dim(d),
        query(b, sq, h, d, 3),
        key(b, sk, hk, d, 1),
        value(b, sk, hk, d, 2),
        out(b, sq, h, d, 5),
        dout(b, sq, h, d, 4),
        dquery(b, sq, h, d, 7),
        dkey(b, sk, hk, d, 6),
        dvalue(b, sk, hk, d, 1),
        lse(static_cast<size_t>(b * h * sq), NAN),
        args{.query = query.tensor(),
             .key = key.tensor(),
             .value = value.tensor(),
             .out = out.tensor(),
             .lse = lse.data(),
             .batch = b,
             .seq_len_q = sq,
             .seq_len_k = sk,
             .num_heads = h,
             .num_kv_heads = hk,
             .head_dim = d,
             .dtype = dtype_of<T>(),
             .softmax_scale = scale,
             .causal = causal} {
    std::mt19937 random(11);
    for (Buffer<T>* buffer : {&query, &key, &value, &dout}) buffer->randomize(random);
  }
  Call(const Call&) = delete;

  AttentionGradArgs grad_args() {
    return {.forward = args,
            .dout = dout.tensor(),
            .dquery = dquery.tensor(),
            .dkey = dkey.tensor(),
            .dvalue = dvalue.tensor()};
  }
  template <class Args, class Run>
  void with_workspace(Args call, size_t bytes, Run run) {
    const Tensor workspace = full({static_cast<int64_t>(bytes / 4 + 1)}, NAN);
    call.workspace = workspace.data();
    call.workspace_bytes = bytes;
    run(call, Stream{});
  }
  void forward() {
    with_workspace(args, flash_attention_forward_workspace(args, Device::cpu()), flash_attention_forward);
  }
  void backward() {
    const AttentionGradArgs grad = grad_args();
    with_workspace(grad, flash_attention_backward_workspace(grad, Device::cpu()), flash_attention_backward);
  }
  AttentionResult reference() const {
    const auto tensor = [&](const Buffer<T>& x) {
      return from_vector(x.values(), {batch, x.seq_len, x.num_heads, dim});
    };
    return reference_attention(tensor(query), tensor(key), tensor(value), tensor(dout), args.softmax_scale,
                               args.causal);
  }
};

}  // namespace

TEST_CASE_TEMPLATE("attention kernels: write every element and nothing else, equal the definition", T, float, double,
                   bfloat16, float16) {
  const double bound = tolerance(dtype_of<T>());
  for (const bool causal : {false, true}) {
    for (const auto& [sq, sk, h, hk, d] :
         std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>>{{9, 13, 4, 2, 8},
                                                                              {70, 200, 2, 1, 64},
                                                                              {300, 70, 2, 2, 40},
                                                                              {1, 129, 3, 1, 16},
                                                                              {257, 257, 1, 1, 1},
                                                                              {0, 5, 2, 1, 4},
                                                                              {5, 0, 2, 1, 4},
                                                                              {130, 260, 2, 1, 129}}) {
      CAPTURE(causal);
      CAPTURE(sq);
      CAPTURE(sk);
      Call<T> call(2, sq, sk, h, hk, d, causal, 1 / std::sqrt(static_cast<double>(d)));
      call.forward();
      call.backward();
      const AttentionResult expected = call.reference();
      CHECK(relative_difference(call.out.values(), expected.out.to_vector<double>()) <= bound);
      CHECK(relative_difference(std::vector<double>(call.lse.begin(), call.lse.end()),
                                expected.lse.to_vector<double>()) <= std::min(bound, 1e-6));
      CHECK(relative_difference(call.dquery.values(), expected.dquery.to_vector<double>()) <= bound);
      CHECK(relative_difference(call.dkey.values(), expected.dkey.to_vector<double>()) <= bound);
      CHECK(relative_difference(call.dvalue.values(), expected.dvalue.to_vector<double>()) <= bound);
      for (const Buffer<T>* buffer : {&call.query, &call.out, &call.dquery, &call.dkey, &call.dvalue}) {
        CHECK(buffer->gaps_untouched());
      }
    }
  }
}

TEST_CASE_TEMPLATE("attention kernels: the same bits for any number of threads", T, float, double, bfloat16) {
  for (const bool causal : {false, true}) {
    std::vector<std::vector<double>> first;
    for (const int count : {1, 2, 5}) {
      CAPTURE(count);
      const Threads threads(count);
      Call<T> call(1, 700, 900, 2, 1, 24, causal, 0.2);
      for (int repeat = 0; repeat < 2; ++repeat) {
        call.forward();
        call.backward();
        const std::vector<std::vector<double>> now{call.out.values(), call.dquery.values(), call.dkey.values(),
                                                   call.dvalue.values()};
        if (first.empty()) first = now;
        CHECK(first == now);
      }
    }
  }
}

TEST_CASE("attention kernels: lse is the natural logarithm of the sum of visible weights") {
  for (const int64_t length : {7, 129}) {
    Call<double> call(1, length, length, 1, 1, 4, true, 1.0);
    for (double& x : call.query.memory) x = std::isnan(x) ? x : 0;
    call.forward();
    for (int64_t i = 0; i < length; ++i) {
      CHECK(call.lse[static_cast<size_t>(i)] == doctest::Approx(std::log(i + 1.0)).epsilon(1e-15));
    }
  }
  Call<float> call(1, 5, 2, 1, 1, 4, true, 1.0);
  for (float& x : call.query.memory) x = std::isnan(x) ? x : 0;
  call.forward();
  CHECK(call.lse == std::vector<float>{-INFINITY, -INFINITY, -INFINITY, 0, std::log(2.0f)});
}

// Backward over a part of the keys with lse and out of all of them, as when keys are spread over machines.
TEST_CASE("attention kernels: gradients over parts of the keys add up") {
  for (const double scale : {0.3, 30.0}) {  // the second makes lse so large that its rounding matters
    CAPTURE(scale);
    Call<float> all(1, 150, 200, 1, 1, 8, false, scale);
    all.forward();
    all.backward();
    const std::vector<double> whole = all.dquery.values(), dkey = all.dkey.values();
    std::vector<double> sum(whole.size());
    std::vector<double> dkey_parts;
    for (const int64_t begin : {int64_t{0}, int64_t{90}}) {
      Call<float> part(1, 150, begin == 0 ? 90 : 110, 1, 1, 8, false, scale);
      part.query = all.query;
      part.out = all.out;
      part.dout = all.dout;
      part.lse = all.lse;
      const auto copy_rows = [&](const Buffer<float>& from, Buffer<float>& to) {
        const std::ptrdiff_t row = from.head_dim + from.gap;
        std::copy_n(from.memory.begin() + begin * row, to.memory.size(), to.memory.begin());
      };
      copy_rows(all.key, part.key);
      copy_rows(all.value, part.value);
      part.args.query = part.query.tensor();
      part.args.out = part.out.tensor();
      part.args.lse = part.lse.data();
      part.backward();
      const std::vector<double> share = part.dquery.values(), rows = part.dkey.values();
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += share[i];
      dkey_parts.insert(dkey_parts.end(), rows.begin(), rows.end());
    }
    const double bound = scale < 1 ? 1e-6 : 1e-4;
    CHECK(relative_difference(sum, whole) <= bound);
    CHECK(relative_difference(dkey_parts, dkey) <= bound);
  }
}

TEST_CASE_TEMPLATE("attention softmax: hidden entries are 0 and never looked at", T, float, double, bfloat16) {
  using C = accumulate_t<T>;
  const int64_t rows = 6, size = 4;  // two matrices of 3 x 4, causal with one more key than queries
  const AttentionBand band = visible_band(true, 3, 4);
  const std::vector<C> scores{1, 2, NAN, NAN, 0, 0, 0, INFINITY, 1, 1, 1, 1, 5, -3, NAN, 1, 2, 2, 2, NAN, -1, -1, 7, 7};
  std::vector<T> weights(scores.size(), T(NAN)), ds(scores.size(), T(NAN));
  std::vector<C> sums(rows, NAN);
  attention_softmax_forward({.weights = weights.data(),
                             .sums = sums.data(),
                             .scores = scores.data(),
                             .num_matrices = 2,
                             .seq_len_q = 3,
                             .seq_len_k = size,
                             .dtype = dtype_of<T>(),
                             .scale = -0.5,
                             .band = band},
                            Stream{});
  std::vector<T> probabilities = weights;
  std::vector<C> dp(scores.size(), NAN);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < r % 3 + 2; ++j) dp[static_cast<size_t>(r * size + j)] = static_cast<C>(j * j - r);
  }
  attention_softmax_backward({.dscores = ds.data(),
                              .weights = probabilities.data(),
                              .sums = sums.data(),
                              .dprobabilities = dp.data(),
                              .num_matrices = 2,
                              .seq_len_q = 3,
                              .seq_len_k = size,
                              .dtype = dtype_of<T>(),
                              .scale = -0.5,
                              .band = band},
                             Stream{});
  const double bound = std::is_same_v<T, bfloat16> ? 1e-2 : tolerance(dtype_of<T>());
  for (int64_t r = 0; r < rows; ++r) {
    double sum = 0, dot = 0;
    const int64_t visible = r % 3 + 2;
    const auto at = [&](const auto& x, int64_t j) {
      return static_cast<double>(static_cast<C>(x[static_cast<size_t>(r * size + j)]));
    };
    for (int64_t j = 0; j < visible; ++j) sum += std::exp(-0.5 * at(scores, j));
    for (int64_t j = 0; j < visible; ++j) dot += std::exp(-0.5 * at(scores, j)) / sum * at(dp, j);
    for (int64_t j = 0; j < size; ++j) {
      const double expected = j < visible ? std::exp(-0.5 * at(scores, j)) / sum : 0;
      CHECK(std::abs(at(weights, j) / static_cast<double>(sums[static_cast<size_t>(r)]) - expected) <= bound);
      CHECK(std::abs(at(probabilities, j) - expected) <= bound);
      CHECK(std::abs(at(ds, j) - (j < visible ? -0.5 * expected * (at(dp, j) - dot) : 0)) <= 4 * bound);
    }
  }
}

TEST_CASE("attention kernels: what is not supported is refused by name, whatever the memory") {
  Call<float> call(1, 4, 4, 1, 1, 4, false, 1.0);
  const float slopes[] = {1};
  const int32_t starts[] = {0, 4};
  const auto refusal = [&](auto change) {
    AttentionArgs changed = call.args;
    change(changed);
    changed.query.data = nullptr;
    CHECK(error_of([&] { flash_attention_forward(changed, Stream{}); }).starts_with("flash_attention_forward: "));
    AttentionGradArgs grad = call.grad_args();
    grad.forward = changed;
    CHECK(error_of([&] { flash_attention_backward_workspace(grad, Device::cpu()); }) ==
          error_of([&] { flash_attention_backward(grad, Stream{}); }));
    return error_of([&] { flash_attention_forward_workspace(changed, Device::cpu()); });
  };
  CHECK(refusal([](AttentionArgs& a) { a.window_left = 3; }).find("window_left 3") != std::string::npos);
  CHECK(refusal([](AttentionArgs& a) { a.window_right = 0; }).find("window_right 0") != std::string::npos);
  CHECK(refusal([](AttentionArgs& a) { a.softcap = 30; }).find("softcap 30") != std::string::npos);
  CHECK(refusal([&](AttentionArgs& a) { a.alibi_slopes = slopes; }).find("alibi_slopes") != std::string::npos);
  CHECK(refusal([](AttentionArgs& a) { a.dropout_p = 0.1; }).find("dropout_p 0.1") != std::string::npos);
  CHECK(refusal([&](AttentionArgs& a) { a.cu_seqlens_k = starts; }).find("cu_seqlens") != std::string::npos);
  CHECK(refusal([](AttentionArgs& a) { a.kernel = AttentionKernel::mma; }).find("kernel mma") != std::string::npos);
  CHECK(refusal([](AttentionArgs& a) { a.kernel = AttentionKernel::hopper; }).find("hopper") != std::string::npos);
  CHECK(error_of([&] { flash_attention_forward(call.args, Stream{}); }).find("workspace") != std::string::npos);
  CHECK(error_of([&] { flash_attention_backward(call.grad_args(), Stream{}); }).find("workspace") != std::string::npos);
}
