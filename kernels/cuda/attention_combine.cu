// Merges attention over two disjoint sets of keys, and its gradient: a warp for every query of every head.
#include "strobe/kernels/attention.h"
#include "strobe/kernels/cuda/cuda.h"
#include "strobe/kernels/online_softmax.h"

namespace strobe::kernels::cuda {
namespace {

using strobe::cuda::warp_size;

constexpr int block_warps = 8;

// Calls f(row, state) in whole warps for every query of every head: `row` indexes rows of out, `state` elements of lse.
template <class F>
__device__ void for_each_query(const AttentionCombineArgs& args, F&& f) {
  const int64_t rows = args.batch * args.seq_len * args.num_heads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * block_warps + threadIdx.x / warp_size;
  for (int64_t row = first; row < rows; row += static_cast<int64_t>(gridDim.x) * block_warps) {
    const int64_t head = row % args.num_heads, position = row / args.num_heads;
    const int64_t batch = position / args.seq_len;
    f(row, (batch * args.num_heads + head) * args.seq_len + position % args.seq_len);
  }
}

template <class T>
__global__ void combine_forward_kernel(const __grid_constant__ AttentionCombineArgs args) {
  using C = accumulate_t<T>;
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  for_each_query(args, [&](int64_t row, int64_t state) {
    const SoftmaxShares<C> shares(static_cast<const C*>(args.lse_a)[state], static_cast<const C*>(args.lse_b)[state]);
    const T* const a = static_cast<const T*>(args.out_a) + row * args.head_dim;
    const T* const b = static_cast<const T*>(args.out_b) + row * args.head_dim;
    T* const out = static_cast<T*>(args.out) + row * args.head_dim;
    for (int64_t c = lane; c < args.head_dim; c += warp_size) {
      C sum = 0;
      if (shares.sees_a) sum += shares.a * static_cast<C>(a[c]);
      if (shares.sees_b) sum += shares.b * static_cast<C>(b[c]);
      out[c] = static_cast<T>(sum);
    }
    if (lane == 0) static_cast<C*>(args.lse)[state] = shares.lse;
  });
}

template <class T>
__global__ void combine_backward_kernel(const __grid_constant__ AttentionCombineGradArgs args) {
  using C = accumulate_t<T>;
  const AttentionCombineArgs& forward = args.forward;
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  for_each_query(forward, [&](int64_t row, int64_t state) {
    const SoftmaxShares<C> shares(static_cast<const C*>(forward.lse_a)[state],
                                  static_cast<const C*>(forward.lse_b)[state]);
    const int64_t offset = row * forward.head_dim;
    const T* const a = static_cast<const T*>(forward.out_a) + offset;
    const T* const b = static_cast<const T*>(forward.out_b) + offset;
    T* const dout_a = static_cast<T*>(args.dout_a) + offset;
    T* const dout_b = static_cast<T*>(args.dout_b) + offset;
    C difference = 0;  // dout . (a - b), by which a larger share of a pays
    for (int64_t c = lane; c < forward.head_dim; c += warp_size) {
      const C gradient = args.dout == nullptr ? C(0) : static_cast<C>(static_cast<const T*>(args.dout)[offset + c]);
      dout_a[c] = static_cast<T>(shares.sees_a ? shares.a * gradient : C(0));
      dout_b[c] = static_cast<T>(shares.sees_b ? shares.b * gradient : C(0));
      if (shares.sees_a && shares.sees_b) difference += gradient * (static_cast<C>(a[c]) - static_cast<C>(b[c]));
    }
    difference = strobe::cuda::warp_sum(difference);
    if (lane != 0) return;
    const C dlse = args.dlse == nullptr ? C(0) : static_cast<const C*>(args.dlse)[state];
    const C shift = shares.a * shares.b * difference;
    static_cast<C*>(args.dlse_a)[state] = shares.sees_a ? shares.a * dlse + shift : C(0);
    static_cast<C*>(args.dlse_b)[state] = shares.sees_b ? shares.b * dlse - shift : C(0);
  });
}

unsigned blocks_for(const AttentionCombineArgs& args) {
  return strobe::cuda::grid_size(args.batch * args.seq_len * args.num_heads, block_warps);
}

}  // namespace

void attention_combine_forward(const AttentionCombineArgs& args, const Stream& stream) {
  constexpr const char* operation = "attention_combine_forward";
  dispatch_floating(args.dtype, operation, [&]<class T>() {
    strobe::cuda::launch(operation, combine_forward_kernel<T>, blocks_for(args), block_warps * warp_size, 0, stream,
                         args);
  });
}

void attention_combine_backward(const AttentionCombineGradArgs& args, const Stream& stream) {
  constexpr const char* operation = "attention_combine_backward";
  dispatch_floating(args.forward.dtype, operation, [&]<class T>() {
    strobe::cuda::launch(operation, combine_backward_kernel<T>, blocks_for(args.forward), block_warps * warp_size, 0,
                         stream, args);
  });
}

}  // namespace strobe::kernels::cuda
