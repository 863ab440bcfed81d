// Layer and RMS normalization on the GPU: a part of a warp, a warp or a block for each row.
#include "strobe/kernels/cuda/rows_in_shared.cuh"
#include "strobe/kernels/math.h"
#include "strobe/kernels/norm.h"
#include "strobe/kernels/pointwise.h"

namespace strobe::kernels::cuda {
namespace {

using namespace strobe::cuda;

// The reciprocal standard deviation from the sum of squares of a row; its first thread stores the statistics.
template <bool centered, class A>
__device__ A finish_statistics(const NormArgs& args, int64_t index, A mean, A squares, A share) {
  const A rstd = A(1) / sqrt_(squares * share + static_cast<A>(args.eps));
  if (threadIdx.x == 0 && index < args.rows) {
    if constexpr (centered) static_cast<A*>(args.mean)[index] = mean;
    static_cast<A*>(args.rstd)[index] = rstd;
  }
  return rstd;
}

constexpr int norm_packs = 8;  // of a row to a thread, where a warp has it

// Rows of whole packs, which wait in shared memory between their only reading and their only writing: in registers,
// half as many rows would be under way. added: the row is x + residual.
template <class T, bool centered, bool added, int lanes>
__global__ void __launch_bounds__(most_threads<lanes>, 1024 / most_threads<lanes>)
    normalize_whole_rows(const NormArgs args) {
  using A = accumulate_t<T>;
  constexpr int n = row_pack<T>;
  const A share = A(1) / static_cast<A>(args.cols);
  const RowsInShared<T, added ? 2 : 1, lanes> rows(args.cols);
  // All threads of a block take as many turns, so that they meet in the sums.
  for (int64_t first = int64_t{blockIdx.x} * blockDim.y; first < args.rows; first += int64_t{gridDim.x} * blockDim.y) {
    const int64_t index = first + threadIdx.y, begin = index * args.cols;
    const auto for_each = [&](auto&& visit, auto*... arrays) {
      if (index < args.rows) rows.for_each(visit, arrays...);
    };
    for_each(
        [&](Packed<T, n>* kept, const T* x, const T* residual) {
          copy_in_background(kept[0], x);
          if constexpr (added) copy_in_background(kept[rows.pitch()], residual);
        },
        static_cast<const T*>(args.x) + begin, static_cast<const T*>(args.residual) + begin);
    copy_async_commit();
    copy_async_wait<0>();
    A mean = 0;
    const auto add_up = [&](Packed<T, n>* kept, [[maybe_unused]] T* sum) {
      Values<A, n> x = kept->template values<A>();
      if constexpr (added) {
        const Values<A, n> residual = kept[rows.pitch()].template values<A>();
        for (int j = 0; j < n; ++j) x[j] += residual[j];
        *kept = Packed<T, n>::rounded(x);
        kept->store(sum);
        x = kept->template values<A>();
      }
      A part = 0;
      for (int j = 0; j < n; ++j) part += x[j];
      mean += part;
    };
    if constexpr (centered || added) for_each(add_up, static_cast<T*>(args.sum) + begin);
    mean = centered ? row_sum<lanes>(mean) * share : A(0);
    A squares = 0;
    for_each([&](const Packed<T, n>* kept) {
      const Values<A, n> x = kept->template values<A>();
      A part = 0;
      for (int j = 0; j < n; ++j) part += (x[j] - mean) * (x[j] - mean);
      squares += part;
    });
    const A rstd = finish_statistics<centered>(args, index, mean, row_sum<lanes>(squares), share);
    const auto finish = [&]<bool all>() {
      const auto visit = [&](const Packed<T, n>* kept, T* y, const T* weight, const T* bias) {
        Values<A, n> x = kept->template values<A>();
        for (int j = 0; j < n; ++j) x[j] = (x[j] - mean) * rstd;
        Packed<T, n> shared;
        if (all || args.weight != nullptr) {
          shared.load_constant(weight);
          const Values<A, n> weights = shared.template values<A>();
          for (int j = 0; j < n; ++j) x[j] *= weights[j];
        }
        if (centered && (all || args.bias != nullptr)) {
          shared.load_constant(bias);
          const Values<A, n> biases = shared.template values<A>();
          for (int j = 0; j < n; ++j) x[j] += biases[j];
        }
        store_values(y, x);
      };
      for_each(visit, static_cast<T*>(args.y) + begin, static_cast<const T*>(args.weight),
               static_cast<const T*>(args.bias));
    };
    // Where nothing is left out there are no branches between the loads.
    if (args.weight != nullptr && (!centered || args.bias != nullptr)) {
      finish.template operator()<true>();
    } else {
      finish.template operator()<false>();
    }
  }
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
    const A rstd = finish_statistics<centered>(args, index, mean, row_sum(squares), share);
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

// Whether the rows are whole and few enough bytes; normalizes them if so.
template <class T, bool centered, bool added>
bool normalize_whole(const char* operation, const NormArgs& args, const Stream& stream) {
  const dim3 block = row_block(args.cols, row_pack<T>, norm_packs);
  const size_t bytes = RowsInShared < T, added ? 2 : 1, 0 > ::bytes(args.cols, block);
  if (args.cols % row_pack<T> != 0 || bytes > most_row_bytes(stream.device) ||
      !aligned_to(16, args.x, args.y, args.residual, args.sum, args.weight, args.bias)) {
    return false;
  }
  const auto run = [&]<int lanes>() {
    launch(operation, normalize_whole_rows<T, centered, added, lanes>, grid_size(args.rows, block.y), block, bytes,
           stream, args);
  };
  if (block.x == 8) {
    run.template operator()<8>();
  } else if (block.x == 16) {
    run.template operator()<16>();
  } else if (block.x == warp_size) {
    run.template operator()<warp_size>();
  } else {
    run.template operator()<0>();
  }
  return true;
}

template <bool centered>
void forward(const char* operation, const NormArgs& args, const Stream& stream) {
  dispatch_floating(args.dtype, operation, [&]<class T>() {
    if (args.residual == nullptr) {
      if (normalize_whole<T, centered, false>(operation, args, stream)) return;
      const dim3 block = row_block(args.cols, row_pack<T>);
      return launch_rows(operation, normalize_rows<T, centered>, args.rows, block, stream, args);
    }
    if (normalize_whole<T, centered, true>(operation, args, stream)) return;
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
  });
}

}  // namespace

void layer_norm_forward(const NormArgs& args, const Stream& stream) { forward<true>("layer_norm", args, stream); }

void rms_norm_forward(const NormArgs& args, const Stream& stream) { forward<false>("rms_norm", args, stream); }

}  // namespace strobe::kernels::cuda
