// What the attention kernels of every generation share: where a pair of sequences lies, what its queries see, how a
// product becomes a score, and which probabilities dropout keeps.
#pragma once

#include "strobe/kernels/attention.h"
#include "strobe/kernels/cuda/cuda.h"
#include "strobe/kernels/math.h"

namespace strobe::kernels::cuda {

// Positions begin, ..., end - 1.
struct Interval {
  int64_t begin;
  int64_t end;

  __device__ bool empty() const { return begin >= end; }
};

// Sequence `batch` of the queries and of the keys: where its rows begin, and which pairs are visible. They form a band
// of the score matrix, so every query sees one interval of keys and every key one of queries.
struct SequencePair {
  int64_t batch;
  int64_t first_q;  // packed: rows of query and of key before this sequence; else 0
  int64_t first_k;
  int64_t seq_len_q;
  int64_t seq_len_k;
  AttentionBand band;
  bool packed;

  __device__ SequencePair(const AttentionArgs& args, int64_t batch_index)
      : batch(batch_index),
        first_q(0),
        first_k(0),
        seq_len_q(args.seq_len_q),
        seq_len_k(args.seq_len_k),
        packed(args.cu_seqlens_q != nullptr) {
    if (packed) {
      first_q = args.cu_seqlens_q[batch];
      first_k = args.cu_seqlens_k[batch];
      seq_len_q = args.cu_seqlens_q[batch + 1] - first_q;
      seq_len_k = args.cu_seqlens_k[batch + 1] - first_k;
    }
    band = visible_band(args.causal, args.window_left, args.window_right, seq_len_q, seq_len_k);
  }

  __device__ Interval keys_of(int64_t query) const { return clip(query + band.lower, query + band.upper, seq_len_k); }
  __device__ Interval queries_of(int64_t key) const { return clip(key - band.upper, key - band.lower, seq_len_q); }
  // What some query (some key) of a block that is not empty sees.
  __device__ Interval keys_of(Interval queries) const {
    return {keys_of(queries.begin).begin, keys_of(queries.end - 1).end};
  }
  __device__ Interval queries_of(Interval keys) const {
    return {queries_of(keys.begin).begin, queries_of(keys.end - 1).end};
  }
  // Key i + diagonal() is the last one that a causal mask shows to query i.
  __device__ int64_t diagonal() const { return seq_len_k - seq_len_q; }

  // Elements from the start of an operand to row 0 of this sequence, as a query or as a key, in one head.
  __device__ int64_t query_offset(const AttentionTensor& tensor, int64_t head) const {
    return offset(tensor, first_q, head);
  }
  __device__ int64_t key_offset(const AttentionTensor& tensor, int64_t head) const {
    return offset(tensor, first_k, head);
  }
  // Elements from the start of lse, and of anything shaped alike, to this sequence and head.
  __device__ int64_t lse_offset(const AttentionArgs& args, int64_t head) const {
    return packed ? head * args.total_q + first_q : (batch * args.num_heads + head) * args.seq_len_q;
  }

 private:
  __device__ int64_t offset(const AttentionTensor& tensor, int64_t first, int64_t head) const {
    return (packed ? first * tensor.seq_stride : batch * tensor.batch_stride) + head * tensor.head_stride;
  }
  __device__ static Interval clip(int64_t first, int64_t last, int64_t length) {
    const int64_t begin = first < 0 ? 0 : first > length ? length : first;
    const int64_t end = last + 1 < begin ? begin : last + 1 > length ? length : last + 1;
    return {begin, end};
  }
};

// Elements of lse.
inline int64_t lse_size(const AttentionArgs& args) {
  return args.num_heads * (args.cu_seqlens_q != nullptr ? args.total_q : args.batch * args.seq_len_q);
}

// How the product of a query and a key becomes a score. softmax_scale is split into a sign (-1, 0 or 1), which the
// caller puts into one operand of the product, where it is exact, and a magnitude. Without softcap and ALiBi the
// magnitude waits until the softmax takes differences of products: large ones then lose no digits.
template <class C>
struct ScoreFunction {
  C sign;
  C magnitude;
  C softcap;  // 0: off
  const float* alibi_slopes;

  explicit ScoreFunction(const AttentionArgs& args)
      : softcap(static_cast<C>(args.softcap)), alibi_slopes(args.alibi_slopes) {
    const C scale = static_cast<C>(args.softmax_scale);
    sign = static_cast<C>((scale > 0) - (scale < 0));
    magnitude = scale == 0 ? C(1) : scale * sign;
  }

  __device__ bool changes_products() const { return softcap != 0 || alibi_slopes != nullptr; }
  // What the softmax still has to multiply scores by; positive.
  __device__ C factor() const { return changes_products() ? C(1) : magnitude; }
  __device__ C slope_of(int64_t head) const {
    return alibi_slopes == nullptr ? C(0) : static_cast<C>(alibi_slopes[head]);
  }

  // The score of a pair `right` positions right of the diagonal (right = j - i - d), where changes_products().
  __device__ C operator()(C product, C slope, int right) const {
    C score = product * magnitude;
    if (softcap != 0) score = softcap * tanh_(score / softcap);
    return score - slope * static_cast<C>(right < 0 ? -right : right);
  }
  // d score / d (softmax_scale * query . key).
  __device__ C derivative(C product) const {
    if (softcap == 0) return C(1);
    const C t = tanh_(product * magnitude / softcap);
    return C(1) - t * t;
  }
};

inline AttentionDropout dropout_of(const AttentionArgs& args) {
  return {args.dropout_p, args.dropout_seed, args.dropout_offset};
}

// AttentionDropout::keeps for a pair whose `words` = bytes(matrix, query, key) are known: they serve all pairs of a
// 32 x 32 square of (query, key) that lie a multiple of 8 apart in both directions.
__device__ inline bool keeps(const AttentionDropout& dropout, const PhiloxCounter& words, int64_t query, int64_t key) {
  const int word = static_cast<int>(query % 32 / 8);  // chosen without an address, to stay in registers
  const uint32_t low = word & 1 ? words[1] : words[0];
  const uint32_t high = word & 1 ? words[3] : words[2];
  return ((word & 2 ? high : low) >> (8 * (key % 32 / 8)) & 255) < dropout.keep_below;
}

}  // namespace strobe::kernels::cuda
