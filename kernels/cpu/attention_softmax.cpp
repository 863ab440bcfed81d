// The masked softmax of attention with stored matrices, forward and backward, row by row.
#include "strobe/kernels/cpu/attention_tile.h"
#include "strobe/kernels/cpu/parallel.h"
#include "strobe/kernels/online_softmax.h"

namespace strobe::kernels::cpu {
namespace {

using strobe::cpu::for_each_row;

// Writes the weights of one row and returns their sum.
template <class T, class C>
C weigh(const C* scores, int64_t size, Interval visible, const ScoreScale<C>& scale, T* weights) {
  C largest = -std::numeric_limits<C>::infinity();
#pragma omp simd reduction(max : largest)
  for (int64_t j = visible.begin; j < visible.end; ++j) largest = std::max(largest, scores[j] * scale.sign);
  OnlineSoftmax<C> row;
  row.raise(largest);
  C sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = visible.begin; j < visible.end; ++j) {
    const C weight = row.weight(scores[j] * scale.sign, scale.magnitude);
    weights[j] = static_cast<T>(weight);
    sum += weight;
  }
  std::fill(weights, weights + visible.begin, T(0));
  std::fill(weights + visible.end, weights + size, T(0));
  return visible.empty() ? C(1) : sum;
}

// Writes dscores and turns the weights into probabilities.
template <class T, class C>
void differentiate(T* weights, C sum, const C* dprobabilities, int64_t size, Interval visible, C scale, T* dscores) {
  C dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t j = visible.begin; j < visible.end; ++j) dot += static_cast<C>(weights[j]) * dprobabilities[j];
  dot /= sum;
  const C factor = scale / sum;
  for (int64_t j = visible.begin; j < visible.end; ++j) {
    dscores[j] = static_cast<T>(static_cast<C>(weights[j]) * (dprobabilities[j] - dot) * factor);
    weights[j] = static_cast<T>(static_cast<C>(weights[j]) / sum);
  }
  std::fill(dscores, dscores + visible.begin, T(0));
  std::fill(dscores + visible.end, dscores + size, T(0));
}

}  // namespace

void attention_softmax_forward(const AttentionSoftmaxArgs& args, const Stream&) {
  const Mask mask{args.band, args.seq_len_q, args.seq_len_k};
  const int64_t size = args.seq_len_k;
  dispatch_floating(args.dtype, "attention_softmax_forward", [&]<class T>() {
    using C = accumulate_t<T>;
    const ScoreScale<C> scale(args.scale);
    for_each_row(args.num_matrices * args.seq_len_q, size, [&](int64_t row) {
      static_cast<C*>(args.sums)[row] =
          weigh(static_cast<const C*>(args.scores) + row * size, size, mask.keys_of(row % args.seq_len_q), scale,
                static_cast<T*>(args.weights) + row * size);
    });
  });
}

void attention_softmax_backward(const AttentionSoftmaxGradArgs& args, const Stream&) {
  const Mask mask{args.band, args.seq_len_q, args.seq_len_k};
  const int64_t size = args.seq_len_k;
  dispatch_floating(args.dtype, "attention_softmax_backward", [&]<class T>() {
    using C = accumulate_t<T>;
    for_each_row(args.num_matrices * args.seq_len_q, size, [&](int64_t row) {
      differentiate(static_cast<T*>(args.weights) + row * size, static_cast<const C*>(args.sums)[row],
                    static_cast<const C*>(args.dprobabilities) + row * size, size, mask.keys_of(row % args.seq_len_q),
                    static_cast<C>(args.scale), static_cast<T*>(args.dscores) + row * size);
    });
  });
}

}  // namespace strobe::kernels::cpu
