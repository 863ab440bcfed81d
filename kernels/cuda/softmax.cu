// Softmax and cross entropy on the GPU: a warp or a block for each row, whose statistics take a single pass.
#include "strobe/kernels/softmax.h"

#include "strobe/kernels/cuda/row.cuh"
#include "strobe/kernels/online_softmax.h"

namespace strobe::kernels::cuda {
namespace {

using strobe::cuda::for_each_row;
using strobe::cuda::launch;
using strobe::cuda::launch_rows;
using strobe::cuda::max_row_threads;
using strobe::cuda::Row;
using strobe::cuda::row_block;
using strobe::cuda::row_pack;
using strobe::cuda::row_sum;
using strobe::cuda::store_values;
using strobe::cuda::Values;

// The maximum of a row and its sum of exp(x - maximum), in every thread of the row. The sum is NaN when an element is,
// and when no element is above -inf: such a row has no distribution.
template <class A, class RowType>
__device__ OnlineSoftmax<A> row_statistics(RowType& row) {
  OnlineSoftmax<A> mine;
  row.template for_each<A>([&]<int n>(int64_t, const Values<A, n>& x) {
    A largest = mine.maximum;
    for (int j = 0; j < n; ++j) largest = fmax(largest, x[j]);  // not NaN
    if (largest > mine.maximum) mine.raise(largest);
    for (int j = 0; j < n; ++j) mine.sum += mine.weight(x[j]);
  });
  mine.raise(strobe::cuda::row_max(mine.maximum));
  mine.sum = row_sum(mine.sum);
  if (mine.maximum == -static_cast<A>(INFINITY)) mine.sum = static_cast<A>(NAN);
  return mine;
}

template <class T, bool logarithm>
__global__ void __launch_bounds__(max_row_threads, 2) softmax_rows(const SoftmaxArgs args) {
  using A = accumulate_t<T>;
  for_each_row(args.rows, [&](int64_t index) {
    T* const y = static_cast<T*>(args.y) + index * args.cols;
    Row<row_pack<T>, T> row(args.cols, static_cast<const T*>(args.x) + index * args.cols);
    row.align(y);
    const OnlineSoftmax<A> statistics = row_statistics<A>(row);
    const A maximum = statistics.maximum;
    const A normalizer = logarithm ? log_(statistics.sum) : A(1) / statistics.sum;
    row.template for_each<A>([&]<int n>(int64_t i, const Values<A, n>& x) {
      Values<A, n> result;
      for (int j = 0; j < n; ++j) {
        const A below = x[j] - maximum;
        result[j] = logarithm ? below - normalizer : exp2_(below * std::numbers::log2e_v<A>) * normalizer;
      }
      store_values(y + i, result);
    });
  });
}

template <class T, bool logarithm>
__global__ void __launch_bounds__(max_row_threads, 2) softmax_rows_backward(const SoftmaxGradArgs args) {
  using A = accumulate_t<T>;
  for_each_row(args.rows, [&](int64_t index) {
    const int64_t first = index * args.cols;
    T* const dx = static_cast<T*>(args.dx) + first;
    Row<row_pack<T>, T, T> row(args.cols, static_cast<const T*>(args.y) + first,
                               static_cast<const T*>(args.dy) + first);
    row.align(dx);
    A sum = 0;
    row.template for_each<A>([&]<int n>(int64_t, const Values<A, n>& y, const Values<A, n>& dy) {
      for (int j = 0; j < n; ++j) sum += logarithm ? dy[j] : dy[j] * y[j];
    });
    sum = row_sum(sum);
    row.template for_each<A>([&]<int n>(int64_t i, const Values<A, n>& y, const Values<A, n>& dy) {
      Values<A, n> result;
      for (int j = 0; j < n; ++j) result[j] = logarithm ? dy[j] - exp_(y[j]) * sum : y[j] * (dy[j] - sum);
      store_values(dx + i, result);
    });
  });
}

// The loss of each row is left in the workspace. A target out of range makes it NaN and reads nothing.
template <class T, class Index>
__global__ void __launch_bounds__(max_row_threads, 2) cross_entropy_rows(const CrossEntropyArgs args) {
  using A = accumulate_t<T>;
  const Index* targets = static_cast<const Index*>(args.targets);
  for_each_row(args.rows, [&](int64_t index) {
    const int64_t target = targets[index];
    double lse = 0, loss = 0;
    if (target != args.ignore_index) {
      const T* logits = static_cast<const T*>(args.logits) + index * args.vocab;
      Row<row_pack<T>, T> row(args.vocab, logits);
      row.align();
      const OnlineSoftmax<A> statistics = row_statistics<A>(row);
      lse = static_cast<double>(statistics.maximum) + log_(static_cast<double>(statistics.sum));
      const bool in_range = target >= 0 && target < args.vocab;
      loss = in_range ? lse - static_cast<double>(static_cast<A>(logits[target])) : NAN;
    }
    if (threadIdx.x == 0) {
      args.lse[index] = lse;
      static_cast<double*>(args.workspace)[index] = loss;
    }
  });
}

constexpr int mean_threads = 1024;

// One block: the mean over the counted rows.
template <class A, class Index>
__global__ void __launch_bounds__(mean_threads) cross_entropy_mean(const CrossEntropyArgs args) {
  const double* losses = static_cast<const double*>(args.workspace);
  const Index* targets = static_cast<const Index*>(args.targets);
  double total = 0;
  int64_t counted = 0;
#pragma unroll 8
  for (int64_t row = threadIdx.x; row < args.rows; row += blockDim.x) {
    total += losses[row];
    counted += targets[row] != args.ignore_index;
  }
  total = strobe::cuda::block_sum(total);
  counted = strobe::cuda::block_sum(counted);
  if (threadIdx.x == 0) {
    *static_cast<A*>(args.loss) = counted > 0 ? static_cast<A>(total / static_cast<double>(counted)) : A(0);
  }
}

// Every block counts the targets for itself: few large blocks, each with many rows, make that cheap.
template <class T, class Index>
__global__ void __launch_bounds__(max_row_threads, 2) cross_entropy_rows_backward(const CrossEntropyGradArgs args) {
  using A = accumulate_t<T>;
  const Index* targets = static_cast<const Index*>(args.targets);
  __shared__ unsigned long long counted;
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
  if (thread == 0) counted = 0;
  __syncthreads();
  unsigned long long mine = 0;
#pragma unroll 4
  for (int64_t row = thread; row < args.rows; row += blockDim.x * blockDim.y) mine += targets[row] != args.ignore_index;
  atomicAdd(&counted, mine);
  __syncthreads();
  const A dloss = *static_cast<const A*>(args.dloss);
  const A scale = static_cast<A>(static_cast<double>(dloss) / static_cast<double>(counted > 0 ? counted : 1));
  for_each_row(args.rows, [&](int64_t index) {
    T* const dlogits = static_cast<T*>(args.dlogits) + index * args.vocab;
    const int64_t target = targets[index];
    const bool counts = target != args.ignore_index;
    Row<row_pack<T>, T> row(args.vocab, 0, counts ? args.vocab : 0,
                            static_cast<const T*>(args.logits) + index * args.vocab);
    row.align(dlogits);
    // lse in two parts: logit - lse_high is exact where it matters, whatever the size of the logits.
    const A lse_high = static_cast<A>(args.lse[index]);
    const A lse_low = static_cast<A>(args.lse[index] - static_cast<double>(lse_high));
    row.template for_each<A>([&]<int n>(int64_t i, const Values<A, n>& logits) {
      const int here = target >= i && target < i + n ? static_cast<int>(target - i) : -1;
      Values<A, n> result;
      for (int j = 0; j < n; ++j) {
        const A probability = exp2_(((logits[j] - lse_high) - lse_low) * std::numbers::log2e_v<A>);
        result[j] = counts ? scale * (j == here ? probability - A(1) : probability) : A(0);
      }
      store_values(dlogits + i, result);
    });
  });
}

template <class T, class Args>
void launch_softmax(const char* operation, void (*kernel)(Args), const Args& args, const Stream& stream) {
  launch_rows(operation, kernel, args.cols > 0 ? args.rows : 0, row_block(args.cols, row_pack<T>), stream, args);
}

}  // namespace

void softmax_forward(const SoftmaxArgs& args, const Stream& stream) {
  dispatch_floating(args.dtype, "softmax",
                    [&]<class T>() { launch_softmax<T>("softmax", softmax_rows<T, false>, args, stream); });
}

void softmax_backward(const SoftmaxGradArgs& args, const Stream& stream) {
  dispatch_floating(args.dtype, "softmax",
                    [&]<class T>() { launch_softmax<T>("softmax", softmax_rows_backward<T, false>, args, stream); });
}

void log_softmax_forward(const SoftmaxArgs& args, const Stream& stream) {
  dispatch_floating(args.dtype, "log_softmax",
                    [&]<class T>() { launch_softmax<T>("log_softmax", softmax_rows<T, true>, args, stream); });
}

void log_softmax_backward(const SoftmaxGradArgs& args, const Stream& stream) {
  dispatch_floating(args.dtype, "log_softmax",
                    [&]<class T>() { launch_softmax<T>("log_softmax", softmax_rows_backward<T, true>, args, stream); });
}

size_t cross_entropy_forward_workspace(const CrossEntropyArgs& args, Device) {
  return static_cast<size_t>(args.rows) * sizeof(double);
}

void cross_entropy_forward(const CrossEntropyArgs& args, const Stream& stream) {
  const size_t needed = cuda::cross_entropy_forward_workspace(args, stream.device);
  STROBE_CHECK(args.workspace_bytes >= needed, "cross_entropy: workspace of ", args.workspace_bytes,
               " bytes given, expected ", needed);
  dispatch_floating(args.dtype, "cross_entropy", [&]<class T>() {
    dispatch_index(args.index_dtype, "cross_entropy", [&]<class Index>() {
      launch_rows("cross_entropy", cross_entropy_rows<T, Index>, args.rows, row_block(args.vocab, row_pack<T>), stream,
                  args);
      launch("cross_entropy", cross_entropy_mean<accumulate_t<T>, Index>, dim3(1), dim3(mean_threads), 0, stream, args);
    });
  });
}

void cross_entropy_backward(const CrossEntropyGradArgs& args, const Stream& stream) {
  const int64_t max_blocks = 4 * strobe::cuda::device_properties(stream.device).multiprocessors;
  dispatch_floating(args.dtype, "cross_entropy", [&]<class T>() {
    dim3 block = row_block(args.vocab, row_pack<T>, max_row_threads);
    if (block.y == 1) block.x = max_row_threads;
    dispatch_index(args.index_dtype, "cross_entropy", [&]<class Index>() {
      launch_rows("cross_entropy", cross_entropy_rows_backward<T, Index>, args.rows, block, stream, args, max_blocks);
    });
  });
}

}  // namespace strobe::kernels::cuda
