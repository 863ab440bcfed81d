// Layer and RMS normalization on the GPU: a part of a warp, a warp or a block for each row.
#include "strobe/kernels/cuda/row.cuh"
#include "strobe/kernels/math.h"
#include "strobe/kernels/norm.h"
#include "strobe/kernels/pointwise.h"

namespace strobe::kernels::cuda {
namespace {

using namespace strobe::cuda;

// The reciprocal standard deviation from the sum of squares in all threads of a row; the first one stores statistics.
template <bool centered, class A>
__device__ A finish_statistics(const NormArgs& args, int64_t index, A mean, A squares, A share) {
  const A rstd = A(1) / sqrt_(row_sum(squares) * share + static_cast<A>(args.eps));
  if (threadIdx.x == 0) {
    if constexpr (centered) static_cast<A*>(args.mean)[index] = mean;
    static_cast<A*>(args.rstd)[index] = rstd;
  }
  return rstd;
}

// Rows of whole packs, which stay in registers between their only reading and their only writing. All loads of a thread
// are under way together. added: the row is x + residual.
constexpr int norm_packs = 8;  // of a row that a thread keeps

template <class T, bool centered, int packs, bool added>
__global__ void __launch_bounds__(max_row_threads) normalize_whole_rows(const NormArgs args) {
  using A = accumulate_t<T>;
  constexpr int n = row_pack<T>;
  const int cols = static_cast<int>(args.cols);
  const A share = A(1) / static_cast<A>(cols);
  const T* const weight = static_cast<const T*>(args.weight);
  const T* const bias = centered ? static_cast<const T*>(args.bias) : nullptr;
  const auto position = [](int k) { return static_cast<int>(k * blockDim.x + threadIdx.x) * n; };
  for_each_row(args.rows, [&](int64_t index) {
    const int64_t first = index * args.cols;
    Packed<T, n> loaded[packs] = {}, residual[added ? packs : 1] = {};
#pragma unroll
    for (int k = 0; k < packs; ++k) {
      if (position(k) >= cols) continue;
      loaded[k].load(static_cast<const T*>(args.x) + first + position(k));
      if constexpr (added) residual[k].load(static_cast<const T*>(args.residual) + first + position(k));
    }
    Values<A, n> x[packs];
    A sum = 0;
#pragma unroll
    for (int k = 0; k < packs; ++k) {
      x[k] = loaded[k].template values<A>();
      if constexpr (added) {
        const Values<A, n> others = residual[k].template values<A>();
        for (int j = 0; j < n; ++j) x[k][j] += others[j];
        const Packed<T, n> rounded = Packed<T, n>::rounded(x[k]);
        if (position(k) < cols) rounded.store(static_cast<T*>(args.sum) + first + position(k));
        x[k] = rounded.template values<A>();
      }
      A part = 0;
      for (int j = 0; j < n; ++j) part += x[k][j];
      sum += part;
    }
    const A mean = centered ? row_sum(sum) * share : A(0);
    A squares = 0;
#pragma unroll
    for (int k = 0; k < packs; ++k) {
      if (position(k) >= cols) continue;
      A part = 0;
      for (int j = 0; j < n; ++j) x[k][j] -= mean, part += x[k][j] * x[k][j];
      squares += part;
    }
    const A rstd = finish_statistics<centered>(args, index, mean, squares, share);
#pragma unroll
    for (int k = 0; k < packs; ++k) {
      if (position(k) >= cols) continue;
      for (int j = 0; j < n; ++j) x[k][j] *= rstd;
      Packed<T, n> shared;
      if (weight != nullptr) {
        shared.load_constant(weight + position(k));
        const Values<A, n> weights = shared.template values<A>();
        for (int j = 0; j < n; ++j) x[k][j] *= weights[j];
      }
      if (bias != nullptr) {
        shared.load_constant(bias + position(k));
        const Values<A, n> biases = shared.template values<A>();
        for (int j = 0; j < n; ++j) x[k][j] += biases[j];
      }
      store_values(static_cast<T*>(args.y) + first + position(k), x[k]);
    }
  });
}

// Any other rows.
template <class T, bool centered>
__global__ void __launch_bounds__(max_row_threads) normalize_rows(const NormArgs args) {
  using A = accumulate_t<T>;
  const T* weight = static_cast<const T*>(args.weight);
  const T* bias = centered ? static_cast<const T*>(args.bias) : nullptr;
  const A share = A(1) / static_cast<A>(args.cols);
  const auto normalize = [&](int64_t index, auto& row, T* y) {
    A mean = 0;
    if constexpr (centered) {
      A sum = 0;
      row.template for_each<A>([&]<int n>(int64_t, const Values<A, n>& x) {
        for (int j = 0; j < n; ++j) sum += x[j];
      });
      mean = row_sum(sum) * share;
    }
    A squares = 0;
    row.template for_each<A>([&]<int n>(int64_t, const Values<A, n>& x) {
      for (int j = 0; j < n; ++j) squares += (x[j] - mean) * (x[j] - mean);
    });
    const A rstd = finish_statistics<centered>(args, index, mean, squares, share);
    row.template for_each<A>([&]<int n>(int64_t i, const Values<A, n>& x) {
      Values<A, n> result;
      for (int j = 0; j < n; ++j) result[j] = (x[j] - mean) * rstd;
      if (weight != nullptr) {
        const Values<A, n> weights = load_shared_values<A, n>(weight + i);
        for (int j = 0; j < n; ++j) result[j] *= weights[j];
      }
      if (bias != nullptr) {
        const Values<A, n> biases = load_shared_values<A, n>(bias + i);
        for (int j = 0; j < n; ++j) result[j] += biases[j];
      }
      store_values(y + i, result);
    });
  };
  for_each_row<0, row_pack<T>>(args.rows, args.cols, arrays_of<const T>(args.x), arrays_of<T>(args.y), normalize);
}

template <bool centered>
void forward(const char* operation, const NormArgs& args, const Stream& stream) {
  dispatch_floating(args.dtype, operation, [&]<class T>() {
    const dim3 block = row_block(args.cols, row_pack<T>, norm_packs);
    const auto launch_with = [&]<int packs>() {
      if constexpr (packs > 0) {
        launch_rows(operation,
                    args.residual == nullptr ? normalize_whole_rows<T, centered, packs, false>
                                             : normalize_whole_rows<T, centered, packs, true>,
                    args.rows, block, stream, args);
      } else if (args.residual == nullptr) {
        launch_rows(operation, normalize_rows<T, centered>, args.rows, block, stream, args);
      } else {
        const int64_t size = args.rows * args.cols, stride = 1;
        cuda::add({.out = args.sum,
                   .a = args.x,
                   .b = args.residual,
                   .rank = 1,
                   .sizes = &size,
                   .a_strides = &stride,
                   .b_strides = &stride,
                   .dtype = args.dtype},
                  stream);
        NormArgs of_sum = args;
        of_sum.x = args.sum, of_sum.residual = nullptr;
        forward<centered>(operation, of_sum, stream);
      }
    };
    with_row_packs<1, 2, 3, 4, 6, norm_packs>(args.cols, row_pack<T>, block, launch_with, args.x, args.y, args.residual,
                                              args.sum, args.weight, args.bias);
  });
}

}  // namespace

void layer_norm_forward(const NormArgs& args, const Stream& stream) { forward<true>("layer_norm", args, stream); }

void rms_norm_forward(const NormArgs& args, const Stream& stream) { forward<false>("rms_norm", args, stream); }

}  // namespace strobe::kernels::cuda
