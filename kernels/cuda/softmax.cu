// Softmax on the GPU: a warp or a block for each row, whose statistics take a single pass.
#include "strobe/kernels/softmax.h"

#include "strobe/kernels/cuda/row.cuh"
#include "strobe/kernels/online_softmax.h"

namespace strobe::kernels::cuda {
namespace {

using strobe::cuda::for_each_row;
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

}  // namespace strobe::kernels::cuda
