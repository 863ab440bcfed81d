// The softmax and the dropout of attention with stored matrices, forward and backward, row by row.
#include "strobe/kernels/cpu/attention_scores.h"
#include "strobe/kernels/cpu/parallel.h"
#include "strobe/kernels/online_softmax.h"

namespace strobe::kernels::cpu {
namespace {

using strobe::cpu::for_each_row;
using strobe::cpu::parallel_for;

// Calls f(begin, count, scores) for pieces of the visible scores of one row of products. Where they differ from the
// products they are made a piece at a time, in a buffer that stays in the first-level cache.
constexpr int64_t piece = 256;

template <class C, class F>
void for_each_piece(const C* products, int64_t query, Interval visible, const Scores<C>& score, C* softcap_slopes,
                    F&& f) {
  if (score.sign == 1 && score.plain()) return f(visible.begin, visible.size(), products + visible.begin);
  C buffer[piece];
  for (int64_t begin = visible.begin; begin < visible.end; begin += piece) {
    const int64_t count = std::min(piece, visible.end - begin);
    for (int64_t c = 0; c < count; ++c) buffer[c] = products[begin + c] * score.sign;
    score.finish(buffer, count, query, 0, begin, 1, softcap_slopes);
    f(begin, count, buffer);
  }
}

template <class C>
C largest_of(const C* scores, int64_t count) {
  C largest = -std::numeric_limits<C>::infinity();
#pragma omp simd reduction(max : largest)
  for (int64_t c = 0; c < count; ++c) largest = scores[c] > largest ? scores[c] : largest;
  return largest;
}

// weights = exp(scale * (scores - reference)); returns their sum.
template <class T, class C>
C exponentiate(const C* scores, int64_t count, C reference, C scale, T* weights) {
  const OnlineSoftmax<C> row{.maximum = reference};
  C sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < count; ++c) {
    const C weight = row.weight(scores[c], scale);
    weights[c] = static_cast<T>(weight);
    sum += weight;
  }
  return sum;
}

// Writes the weights of one row.
template <class T, class C>
OnlineSoftmax<C> weigh(const C* products, int64_t size, int64_t query, Interval visible, const Scores<C>& score,
                       T* weights) {
  C* const no_slopes = nullptr;
  OnlineSoftmax<C> row;
  for_each_piece(products, query, visible, score, no_slopes, [&](int64_t, int64_t count, const C* scores) {
    row.maximum = std::max(row.maximum, largest_of(scores, count));
  });
  for_each_piece(products, query, visible, score, no_slopes, [&](int64_t begin, int64_t count, const C* scores) {
    row.sum += exponentiate(scores, count, row.reference(), score.rest(), weights + begin);
  });
  std::fill(weights, weights + visible.begin, T(0));
  std::fill(weights + visible.end, weights + size, T(0));
  return row;
}

// Writes dproducts and turns the weights into probabilities. dlse: the gradient of the row's lse.
template <class T, class C>
void differentiate(T* weights, C sum, const C* dprobabilities, const C* products, int64_t size, int64_t query,
                   Interval visible, const Scores<C>& score, C softmax_scale, C dlse, T* dproducts) {
  C dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t j = visible.begin; j < visible.end; ++j) dot += static_cast<C>(weights[j]) * dprobabilities[j];
  const C delta = dot / sum - dlse;
  const C factor = softmax_scale / sum;
  for (int64_t j = visible.begin; j < visible.end; ++j) {
    dproducts[j] = static_cast<T>(static_cast<C>(weights[j]) * (dprobabilities[j] - delta) * factor);
    weights[j] = static_cast<T>(static_cast<C>(weights[j]) / sum);
  }
  if (score.softcap != 0) {
    C slopes[piece];
    for_each_piece(products, query, visible, score, slopes, [&](int64_t begin, int64_t count, const C*) {
      for (int64_t c = 0; c < count; ++c) {
        dproducts[begin + c] = static_cast<T>(static_cast<C>(dproducts[begin + c]) * slopes[c]);
      }
    });
  }
  std::fill(dproducts, dproducts + visible.begin, T(0));
  std::fill(dproducts + visible.end, dproducts + size, T(0));
}

}  // namespace

void attention_softmax_forward(const AttentionSoftmaxArgs& args, const Stream&) {
  const Mask mask{args.band, args.seq_len_q, args.seq_len_k};
  const int64_t size = args.seq_len_k;
  dispatch_floating(args.dtype, "attention_softmax_forward", [&]<class T>() {
    using C = accumulate_t<T>;
    for_each_row(args.num_matrices * args.seq_len_q, size, [&](int64_t row) {
      const int64_t query = row % args.seq_len_q, head = row / args.seq_len_q % args.num_heads;
      const Scores<C> score(args.softmax_scale, args.softcap, args.alibi_slopes, head, mask);
      const Interval visible = mask.keys_of(query);
      const OnlineSoftmax<C> sum = weigh(static_cast<const C*>(args.products) + row * size, size, query, visible, score,
                                         static_cast<T*>(args.weights) + row * size);
      static_cast<C*>(args.sums)[row] = visible.empty() ? C(1) : sum.sum;
      static_cast<C*>(args.lse)[row] = sum.lse(score.rest());
    });
  });
}

void attention_softmax_backward(const AttentionSoftmaxGradArgs& args, const Stream&) {
  const Mask mask{args.band, args.seq_len_q, args.seq_len_k};
  const int64_t size = args.seq_len_k;
  dispatch_floating(args.dtype, "attention_softmax_backward", [&]<class T>() {
    using C = accumulate_t<T>;
    const Scores<C> score(args.softmax_scale, args.softcap, nullptr, 0, mask);  // ALiBi has no part in the derivative
    for_each_row(args.num_matrices * args.seq_len_q, size, [&](int64_t row) {
      const int64_t query = row % args.seq_len_q;
      const C* const products = args.softcap == 0 ? nullptr : static_cast<const C*>(args.products) + row * size;
      differentiate(static_cast<T*>(args.weights) + row * size, static_cast<const C*>(args.sums)[row],
                    static_cast<const C*>(args.dprobabilities) + row * size, products, size, query, mask.keys_of(query),
                    score, static_cast<C>(args.softmax_scale),
                    args.dlse == nullptr ? C(0) : static_cast<const C*>(args.dlse)[row],
                    static_cast<T*>(args.dproducts) + row * size);
    });
  });
}

void attention_dropout(const AttentionDropoutArgs& args, const Stream&) {
  const int64_t bands = (args.seq_len_q + 31) / 32, size = args.seq_len_k;
  dispatch_floating(args.dtype, "attention_dropout", [&]<class T>() {
    parallel_for(args.num_matrices * bands, 1, [&](int64_t first, int64_t last) {
      for (int64_t item = first; item < last; ++item) {
        const int64_t matrix = item / bands, begin = item % bands * 32;
        const Interval queries{begin, std::min(begin + 32, args.seq_len_q)};
        const int64_t offset = (matrix * args.seq_len_q + begin) * size, count = queries.size() * size;
        T* const out = static_cast<T*>(args.out) + offset;
        if (args.out != args.x) std::copy_n(static_cast<const T*>(args.x) + offset, count, out);
        drop(args.dropout, args.first_matrix + matrix, queries, {0, size}, out, size, 1);
      }
    });
  });
}

}  // namespace strobe::kernels::cpu
