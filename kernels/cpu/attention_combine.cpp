// Merges attention over two disjoint sets of keys, and its gradient, row by row.
#include "strobe/kernels/attention.h"
#include "strobe/kernels/cpu/parallel.h"
#include "strobe/kernels/online_softmax.h"

namespace strobe::kernels::cpu {
namespace {

// Calls f(row, state) for every query of every head: `row` indexes rows of out, `state` elements of lse.
template <class F>
void for_each_query(const AttentionCombineArgs& args, F&& f) {
  strobe::cpu::for_each_row(args.batch * args.seq_len * args.num_heads, args.head_dim, [&](int64_t row) {
    const int64_t head = row % args.num_heads, position = row / args.num_heads;
    const int64_t batch = position / args.seq_len;
    f(row, (batch * args.num_heads + head) * args.seq_len + position % args.seq_len);
  });
}

}  // namespace

void attention_combine_forward(const AttentionCombineArgs& args, const Stream&) {
  dispatch_floating(args.dtype, "attention_combine_forward", [&]<class T>() {
    using C = accumulate_t<T>;
    for_each_query(args, [&](int64_t row, int64_t state) {
      const SoftmaxShares<C> shares(static_cast<const C*>(args.lse_a)[state], static_cast<const C*>(args.lse_b)[state]);
      const T* const a = static_cast<const T*>(args.out_a) + row * args.head_dim;
      const T* const b = static_cast<const T*>(args.out_b) + row * args.head_dim;
      T* const out = static_cast<T*>(args.out) + row * args.head_dim;
      for (int64_t c = 0; c < args.head_dim; ++c) {
        C sum = 0;
        if (shares.sees_a) sum += shares.a * static_cast<C>(a[c]);
        if (shares.sees_b) sum += shares.b * static_cast<C>(b[c]);
        out[c] = static_cast<T>(sum);
      }
      static_cast<C*>(args.lse)[state] = shares.lse;
    });
  });
}

void attention_combine_backward(const AttentionCombineGradArgs& args, const Stream&) {
  const AttentionCombineArgs& forward = args.forward;
  dispatch_floating(forward.dtype, "attention_combine_backward", [&]<class T>() {
    using C = accumulate_t<T>;
    for_each_query(forward, [&](int64_t row, int64_t state) {
      const SoftmaxShares<C> shares(static_cast<const C*>(forward.lse_a)[state],
                                    static_cast<const C*>(forward.lse_b)[state]);
      const int64_t offset = row * forward.head_dim;
      const T* const a = static_cast<const T*>(forward.out_a) + offset;
      const T* const b = static_cast<const T*>(forward.out_b) + offset;
      const T* const dout = args.dout == nullptr ? nullptr : static_cast<const T*>(args.dout) + offset;
      T* const dout_a = static_cast<T*>(args.dout_a) + offset;
      T* const dout_b = static_cast<T*>(args.dout_b) + offset;
      C difference = 0;  // dout . (a - b), by which a larger share of a pays
      for (int64_t c = 0; c < forward.head_dim; ++c) {
        const C gradient = dout == nullptr ? C(0) : static_cast<C>(dout[c]);
        dout_a[c] = shares.sees_a ? static_cast<T>(shares.a * gradient) : T(0);
        dout_b[c] = shares.sees_b ? static_cast<T>(shares.b * gradient) : T(0);
        if (shares.sees_a && shares.sees_b) difference += gradient * (static_cast<C>(a[c]) - static_cast<C>(b[c]));
      }
      const C dlse = args.dlse == nullptr ? C(0) : static_cast<const C*>(args.dlse)[state];
      const C shift = shares.a * shares.b * difference;
      static_cast<C*>(args.dlse_a)[state] = shares.sees_a ? shares.a * dlse + shift : C(0);
      static_cast<C*>(args.dlse_b)[state] = shares.sees_b ? shares.b * dlse - shift : C(0);
    });
  });
}

}  // namespace strobe::kernels::cpu
