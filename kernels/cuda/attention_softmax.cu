// The softmax and the dropout of attention with stored matrices on the GPU: a warp or a block for each row.
#include "strobe/kernels/attention.h"
#include "strobe/kernels/cuda/row.cuh"
#include "strobe/kernels/online_softmax.h"

namespace strobe::kernels::cuda {
namespace {

using namespace strobe::cuda;

// The keys that one query sees.
struct Visible {
  int64_t begin;
  int64_t end;

  __device__ Visible(const AttentionBand& band, int64_t query, int64_t seq_len_k)
      : begin(clamp(query + band.lower, 0, seq_len_k)), end(clamp(query + band.upper + 1, begin, seq_len_k)) {}
  __device__ static int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

  // Which of n keys from `first` are seen: those from number `begin` up to `end`.
  struct Part {
    int begin;
    int end;
    __device__ bool contains(int j) const { return begin <= j && j < end; }
  };
  __device__ Part part(int64_t first, int n) const {
    return {static_cast<int>(clamp(begin - first, 0, n)), static_cast<int>(clamp(end - first, 0, n))};
  }
};

// The way from products to the scores of one row. Where neither a softcap nor ALiBi comes between, scores are `plain`
// and the magnitude of softmax_scale is left to the online softmax, which applies it to differences only.
template <class C, bool plain>
struct Scores {
  C sign;
  C magnitude;
  C softcap;
  C slope;
  int64_t diagonal;  // the key that ALiBi counts from

  __device__ Scores(double softmax_scale, double cap, C alibi_slope, int64_t alibi_diagonal)
      : softcap(static_cast<C>(cap)), slope(alibi_slope), diagonal(alibi_diagonal) {
    const C scale = static_cast<C>(softmax_scale);
    sign = static_cast<C>((scale > 0) - (scale < 0));
    magnitude = scale == 0 ? C(1) : std::abs(scale);
  }

  __device__ C rest() const { return plain ? magnitude : C(1); }
  // The softcap's tanh, whose derivative is 1 - tanh^2.
  __device__ C capped(C product) const { return tanh_(product * sign * (magnitude / softcap)); }
  __device__ C operator()(C product, int64_t key) const {
    if constexpr (plain) {
      return product * sign;
    } else {
      const C score = softcap != 0 ? capped(product) * softcap : product * sign * magnitude;
      const int64_t distance = diagonal - key;
      return slope == 0 ? score : score - slope * static_cast<C>(distance < 0 ? -distance : distance);
    }
  }
};

template <class T, bool plain, bool whole>
__global__ void __launch_bounds__(max_row_threads) weigh_rows(const AttentionSoftmaxArgs args) {
  using C = accumulate_t<T>;
  const int64_t size = args.seq_len_k;
  const auto weigh = [&](int64_t index, auto& row, T* weights) {
    const int64_t query = index % args.seq_len_q, head = index / args.seq_len_q % args.num_heads;
    const Visible visible(args.band, query, size);
    const C slope = args.alibi_slopes == nullptr ? C(0) : static_cast<C>(args.alibi_slopes[head]);
    const Scores<C, plain> score(args.softmax_scale, args.softcap, slope, query + size - args.seq_len_q);
    row.only(visible.begin, visible.end);

    C largest = -static_cast<C>(INFINITY);
    row.template for_each<C>([&]<int n>(int64_t i, const Values<C, n>& products) {
      const Visible::Part part = visible.part(i, n);
      for (int j = 0; j < n; ++j) {
        const C value = score(products[j], i + j);
        largest = part.contains(j) ? fmax(largest, value) : largest;  // not NaN
      }
    });
    OnlineSoftmax<C> state;
    state.raise(row_max(largest));
    C sum = 0;
    row.template for_each<C>([&]<int n>(int64_t i, const Values<C, n>& products) {
      const Visible::Part part = visible.part(i, n);
      Values<C, n> result{};
      if (part.begin < part.end) {
        for (int j = 0; j < n; ++j) {
          result[j] = part.contains(j) ? state.weight(score(products[j], i + j), score.rest()) : C(0);
          sum += result[j];
        }
      }
      store_values(weights + i, result);
    });
    state.sum = row_sum(sum);
    if (threadIdx.x == 0) {
      static_cast<C*>(args.sums)[index] = visible.begin == visible.end ? C(1) : state.sum;
      static_cast<C*>(args.lse)[index] = state.lse(score.rest());
    }
  };
  for_each_row<whole ? kept_packs : 0, row_pack<T>>(
      args.num_matrices * args.seq_len_q, size, arrays_of<const C>(args.products), arrays_of<T>(args.weights), weigh);
}

template <class T, bool whole>
__global__ void __launch_bounds__(max_row_threads) differentiate_rows(const AttentionSoftmaxGradArgs args) {
  using C = accumulate_t<T>;
  const int64_t size = args.seq_len_k;
  const auto differentiate = [&](int64_t index, auto& row, T* weights, T* dproducts) {
    const Visible visible(args.band, index % args.seq_len_q, size);
    row.only(visible.begin, visible.end);

    C dot = 0;
    row.template for_each<C>([&]<int n>(int64_t i, const Values<C, n>& weight, const Values<C, n>& dprobability) {
      const Visible::Part part = visible.part(i, n);
      for (int j = 0; j < n; ++j) dot += part.contains(j) ? weight[j] * dprobability[j] : C(0);
    });
    const C inverse = C(1) / static_cast<const C*>(args.sums)[index];
    const C dlse = args.dlse == nullptr ? C(0) : static_cast<const C*>(args.dlse)[index];
    const C delta = row_sum(dot) * inverse - dlse;
    const C factor = static_cast<C>(args.softmax_scale) * inverse;
    row.template for_each<C>([&]<int n>(int64_t i, const Values<C, n>& weight, const Values<C, n>& dprobability) {
      const Visible::Part part = visible.part(i, n);
      Values<C, n> gradient{};
      if (part.begin < part.end) {
        Values<C, n> probability;
        for (int j = 0; j < n; ++j) {
          gradient[j] = part.contains(j) ? weight[j] * (dprobability[j] - delta) * factor : C(0);
          probability[j] = part.contains(j) ? weight[j] * inverse : weight[j];
        }
        store_values(weights + i, probability);
      }
      store_values(dproducts + i, gradient);
    });
  };
  for_each_row<whole ? kept_packs : 0, row_pack<T>>(
      args.num_matrices * args.seq_len_q, size,
      std::tuple(static_cast<const T*>(args.weights), static_cast<const C*>(args.dprobabilities)),
      arrays_of<T>(args.weights, args.dproducts), differentiate);
}

// Multiplies dproducts by the derivative of the softcap. ALiBi has no part in it.
template <class T>
__global__ void differentiate_softcap(const AttentionSoftmaxGradArgs args) {
  using C = accumulate_t<T>;
  const int64_t size = args.seq_len_k, count = args.num_matrices * args.seq_len_q * size;
  const Scores<C, false> score(args.softmax_scale, args.softcap, C(0), 0);
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += int64_t(gridDim.x) * blockDim.x) {
    const Visible visible(args.band, i / size % args.seq_len_q, size);
    if (!visible.part(i % size, 1).contains(0)) continue;
    T& dproduct = static_cast<T*>(args.dproducts)[i];
    const C capped = score.capped(static_cast<const C*>(args.products)[i]);
    dproduct = static_cast<T>(static_cast<C>(dproduct) * (1 - capped * capped));
  }
}

// A thread draws the 16 bytes of one Philox call and decides for the 16 elements that they belong to.
template <class T>
__global__ void drop_elements(const AttentionDropoutArgs args) {
  using C = accumulate_t<T>;
  constexpr int pairs = 64;  // calls for a 32 x 32 square
  const int64_t squares_q = ceil_div(args.seq_len_q, 32), squares_k = ceil_div(args.seq_len_k, 32);
  const int64_t calls = args.num_matrices * squares_q * squares_k * pairs;
  const C scale = args.dropout.scale<C>();
  for (int64_t call = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; call < calls;
       call += int64_t(gridDim.x) * blockDim.x) {
    const int64_t square = call / pairs, matrix = square / (squares_q * squares_k);
    const int64_t first_query = square / squares_k % squares_q * 32 + call % pairs / 8;
    const int64_t first_key = square % squares_k * 32 + call % 8;
    const PhiloxCounter words = args.dropout.bytes(args.first_matrix + matrix, first_query, first_key);
    for (int number = 0; number < 16; ++number) {
      const int64_t query = first_query + number / 4 * 8, key = first_key + number % 4 * 8;
      if (query >= args.seq_len_q || key >= args.seq_len_k) continue;
      const int64_t i = (matrix * args.seq_len_q + query) * args.seq_len_k + key;
      const bool kept = (words[static_cast<size_t>(number / 4)] >> (8 * (number % 4)) & 255) < args.dropout.keep_below;
      static_cast<T*>(args.out)[i] =
          kept ? static_cast<T>(static_cast<C>(static_cast<const T*>(args.x)[i]) * scale) : static_cast<T>(C(0));
    }
  }
}

constexpr int element_threads = 256;

}  // namespace

void attention_softmax_forward(const AttentionSoftmaxArgs& args, const Stream& stream) {
  const bool plain = args.softcap == 0 && args.alibi_slopes == nullptr;
  dispatch_floating(args.dtype, "attention_softmax_forward", [&]<class T>() {
    const dim3 block = row_block(args.seq_len_k, row_pack<T>);
    const bool whole = is_whole(args.seq_len_k, row_pack<T>, block, args.products, args.weights);
    const auto kernel = plain   ? whole ? weigh_rows<T, true, true> : weigh_rows<T, true, false>
                          : whole ? weigh_rows<T, false, true>
                                : weigh_rows<T, false, false>;
    launch_rows("attention_softmax_forward", kernel, args.num_matrices * args.seq_len_q, block, stream, args);
  });
}

void attention_softmax_backward(const AttentionSoftmaxGradArgs& args, const Stream& stream) {
  constexpr const char* name = "attention_softmax_backward";
  const int64_t count = args.num_matrices * args.seq_len_q * args.seq_len_k;
  dispatch_floating(args.dtype, name, [&]<class T>() {
    const dim3 block = row_block(args.seq_len_k, row_pack<T>);
    const bool whole = is_whole(args.seq_len_k, row_pack<T>, block, args.weights, args.dprobabilities, args.dproducts);
    launch_rows(name, whole ? differentiate_rows<T, true> : differentiate_rows<T, false>,
                args.num_matrices * args.seq_len_q, block, stream, args);
    if (args.softcap == 0) return;
    launch(name, differentiate_softcap<T>, dim3(grid_size(count, element_threads)), dim3(element_threads), 0, stream,
           args);
  });
}

void attention_dropout(const AttentionDropoutArgs& args, const Stream& stream) {
  const int64_t calls = args.num_matrices * ceil_div(args.seq_len_q, 32) * ceil_div(args.seq_len_k, 32) * 64;
  dispatch_floating(args.dtype, "attention_dropout", [&]<class T>() {
    launch("attention_dropout", drop_elements<T>, dim3(grid_size(calls, element_threads)), dim3(element_threads), 0,
           stream, args);
  });
}

}  // namespace strobe::kernels::cuda
