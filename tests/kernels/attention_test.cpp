// Attention kernels on raw memory: every element is written and nothing else, the bits do not depend on threads, lse,
// and what is refused.
#include "support/attention_call.h"
#include "support/threads.h"

using namespace strobe;
using namespace strobe::kernels;
using namespace strobe::testing;

namespace {

template <class T>
void check_call(AttentionCall<T>& call) {
  call.forward();
  call.backward();
  const std::vector<std::vector<double>> got = call.results(), expected = call.reference();
  for (size_t i = 0; i < got.size(); ++i) {
    INFO(AttentionOutputs::names[i]);
    const double bound = tolerance(dtype_of<T>());
    CHECK(relative_difference(got[i], expected[i]) <= (i == 1 ? std::min(bound, 1e-5) : bound));
  }
  CHECK(call.nothing_else_written());
}

}  // namespace

TEST_CASE_TEMPLATE("attention kernels: write every element and nothing else, equal the definition", T, float, double,
                   bfloat16, float16) {
  seed(1);
  for (const AttentionSizes& sizes : {AttentionSizes{2, 9, 13, 4, 2, 8},
                                      {1, 70, 200, 2, 1, 64},
                                      {1, 300, 70, 2, 2, 20},
                                      {2, 1, 129, 3, 1, 16},
                                      {2, 257, 257, 1, 1, 1},
                                      {2, 0, 5, 2, 1, 4},
                                      {2, 5, 0, 2, 1, 4},
                                      {1, 130, 260, 2, 1, 33},
                                      {1, 40, 50, 1, 1, 256}}) {
    for (const AttentionOptions& options : every_kernel_option(sizes.heads)) {
      INFO("seq_len ", sizes.seq_q, " and ", sizes.seq_k, " head_dim ", sizes.dim, " causal ", options.causal,
           " window_left ", options.window_left, " softcap ", options.softcap, " dropout ", options.dropout_p);
      AttentionCall<T> call(sizes, options);
      check_call(call);
    }
  }
}

TEST_CASE_TEMPLATE("attention kernels: every head_dim from 1 to 256", T, float, bfloat16) {
  for (int64_t dim = 1; dim <= 256; ++dim) {
    CAPTURE(dim);
    AttentionCall<T> call({1, 5, 7, 1, 1, dim}, {.causal = true});
    check_call(call);
  }
}

TEST_CASE_TEMPLATE("attention kernels, packed: write every row and nothing else, equal the definition", T, float,
                   double, bfloat16, float16) {
  seed(2);
  struct Lengths {
    std::vector<int64_t> queries, keys;
    int64_t padding;
  };
  for (const Lengths& lengths : {Lengths{{5, 0, 140, 1, 3}, {7, 4, 150, 0, 3}, 9},
                                 {{33}, {20}, 0},
                                 {{0, 0}, {0, 0}, 3},
                                 {{}, {}, 2},
                                 {{0, 2}, {260, 1}, 1}}) {
    int64_t total_q = lengths.padding, total_k = lengths.padding, longest_q = 0, longest_k = 0;
    for (const int64_t length : lengths.queries) total_q += length, longest_q = std::max(longest_q, length);
    for (const int64_t length : lengths.keys) total_k += length, longest_k = std::max(longest_k, length);
    for (AttentionOptions options : every_kernel_option(4)) {
      INFO("sequences ", lengths.queries.size(), " causal ", options.causal, " window_left ", options.window_left,
           " softcap ", options.softcap, " dropout ", options.dropout_p);
      options.cu_seqlens_q = cu_seqlens(lengths.queries);
      options.cu_seqlens_k = cu_seqlens(lengths.keys);
      AttentionCall<T> call({1, total_q, total_k, 4, 2, 12}, options);
      call.args.seq_len_q = longest_q;
      call.args.seq_len_k = longest_k;
      check_call(call);

      AttentionCall<T> padded({1, total_q, total_k, 4, 2, 12}, options);
      padded.args.seq_len_q = longest_q + 150;  // and nothing is read from the padding
      padded.args.seq_len_k = longest_k + 300;
      for (Buffer<T>* buffer : {&padded.query, &padded.dout}) buffer->poison_rows(total_q - lengths.padding, total_q);
      for (Buffer<T>* buffer : {&padded.key, &padded.value}) buffer->poison_rows(total_k - lengths.padding, total_k);
      padded.forward();
      padded.backward();
      CHECK(padded.results() == call.results());
      CHECK(padded.nothing_else_written());
    }
  }
}

TEST_CASE_TEMPLATE("attention kernels: the same bits for any number of threads", T, float, double, bfloat16) {
  seed(3);
  for (const bool packed : {false, true}) {
    for (AttentionOptions options : every_kernel_option(2)) {
      if (packed) {
        options.cu_seqlens_q = cu_seqlens({300, 0, 150});
        options.cu_seqlens_k = cu_seqlens({310, 40, 250});
      }
      std::vector<std::vector<double>> first;
      for (const int count : {1, 2, 5}) {
        INFO("threads ", count, " packed ", packed, " causal ", options.causal, " window_left ", options.window_left);
        const Threads threads(count);
        AttentionCall<T> call({1, packed ? 450 : 400, 600, 2, 1, 12}, options);
        for (int repeat = 0; repeat < 2; ++repeat) {
          call.forward();
          call.backward();
          if (first.empty()) first = call.results();
          CHECK(first == call.results());
        }
      }
    }
  }
}

TEST_CASE_TEMPLATE("attention kernels: dout and dlse of any strides, and no dlse", T, float, double, bfloat16) {
  AttentionCall<T> call({2, 140, 150, 2, 1, 8}, {.causal = true});
  call.forward();
  for (size_t i = 0; i < call.dout.memory.size(); ++i) {
    if (!call.dout.in_gap(i)) call.dout.memory[i] = T(0.5f);
  }
  std::fill(call.dlse.begin(), call.dlse.end(), accumulate_t<T>(0));
  call.backward();
  const std::vector<std::vector<double>> stored = call.results();
  T half(0.5f);
  AttentionGradArgs grad = call.grad_args();
  grad.dout = {&half, 0, 0, 0};
  grad.dout_dim_stride = 0;
  grad.dlse = nullptr;
  call.backward(grad);
  CHECK(call.results() == stored);
}

TEST_CASE("attention kernels: lse is the natural logarithm of the sum of visible weights") {
  const auto lse_of = [](const AttentionSizes& sizes, const AttentionOptions& options) {
    AttentionCall<double> call(sizes, options);
    for (double& x : call.query.memory) x = std::isnan(x) ? x : 0;
    call.forward();
    return call.lse_values();
  };
  for (const int64_t length : {7, 129}) {
    const std::vector<double> lse = lse_of({1, length, length, 1, 1, 4}, {.causal = true});
    for (int64_t i = 0; i < length; ++i) {
      CHECK(lse[static_cast<size_t>(i)] == doctest::Approx(std::log(i + 1.0)).epsilon(1e-15));
    }
  }
  CHECK(lse_of({1, 5, 2, 1, 1, 4}, {.causal = true}) ==
        std::vector<double>{-INFINITY, -INFINITY, -INFINITY, 0, std::log(2.0)});
  // Dropout takes no part: P is dropped after the softmax.
  CHECK(lse_of({1, 40, 50, 1, 1, 4}, {.dropout_p = 0.5}) == lse_of({1, 40, 50, 1, 1, 4}, {}));
}

// Backward over a part of the keys with lse and out of all of them, as when keys are spread over machines.
TEST_CASE("attention kernels: gradients over parts of the keys add up") {
  for (const AttentionOptions& options :
       {AttentionOptions{.softmax_scale = 0.3},
        {.softmax_scale = 0.3, .softcap = 2},
        {.softmax_scale = 30.0}}) {  // the last makes lse so large that its rounding matters
    CAPTURE(*options.softmax_scale);
    AttentionCall<float> all({1, 150, 200, 1, 1, 8}, options);
    all.forward();
    all.backward();
    const std::vector<double> whole = all.dquery.values(), dkey = all.dkey.values();
    std::vector<double> sum(whole.size());
    std::vector<double> dkey_parts;
    for (const int64_t begin : {int64_t{0}, int64_t{90}}) {
      AttentionCall<float> part({1, 150, begin == 0 ? 90 : 110, 1, 1, 8}, options);
      const auto copy_rows = [&](const Buffer<float>& from, Buffer<float>& to) {
        const std::ptrdiff_t row = from.head_dim + from.gap;
        std::copy_n(from.memory.begin() + begin * row, to.memory.size(), to.memory.begin());
      };
      copy_rows(all.key, part.key);
      copy_rows(all.value, part.value);
      part.args.query = all.query.tensor();
      part.args.out = all.out.tensor();
      part.args.lse = all.args.lse;
      AttentionGradArgs grad = part.grad_args();
      grad.dout = all.dout.tensor();
      grad.dlse = all.dlse.data() + all.guard;
      part.backward(grad);
      const std::vector<double> share = part.dquery.values(), rows = part.dkey.values();
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += share[i];
      dkey_parts.insert(dkey_parts.end(), rows.begin(), rows.end());
    }
    const double bound = *options.softmax_scale < 1 ? 2e-6 : 1e-4;
    CHECK(relative_difference(sum, whole) <= bound);
    CHECK(relative_difference(dkey_parts, dkey) <= bound);
  }
}

TEST_CASE("attention kernels: what is not supported is refused by name, whatever the memory") {
  AttentionCall<float> call({1, 4, 4, 1, 1, 4}, {});
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
  CHECK(contains(refusal([](AttentionArgs& a) { a.head_dim = 0; }), "head_dim 0"));
  CHECK(contains(refusal([](AttentionArgs& a) { a.head_dim = 257; }), "head_dim 257"));
  CHECK(contains(refusal([&](AttentionArgs& a) { a.cu_seqlens_k = starts; }), "cu_seqlens"));
  CHECK(contains(refusal([&](AttentionArgs& a) { a.cu_seqlens_q = starts; }), "cu_seqlens"));
  CHECK(contains(refusal([](AttentionArgs& a) { a.kernel = AttentionKernel::mma; }), "kernel mma"));
  CHECK(contains(refusal([](AttentionArgs& a) { a.kernel = AttentionKernel::hopper; }), "kernel hopper"));
  CHECK(contains(error_of([&] { flash_attention_forward(call.args, Stream{}); }), "workspace"));
  CHECK(contains(error_of([&] { flash_attention_backward(call.grad_args(), Stream{}); }), "workspace"));
}
