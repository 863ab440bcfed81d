// Softmax on the GPU: a warp or a block for each row, whose statistics take a single pass.
#include "strobe/kernels/softmax.h"

#include "strobe/kernels/cuda/row.cuh"
#include "strobe/kernels/online_softmax.h"

namespace strobe::kernels::cuda {
namespace {

using namespace strobe::cuda;

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
  mine.raise(row_max(mine.maximum));
  mine.sum = row_sum(mine.sum);
  if (mine.maximum == -static_cast<A>(INFINITY)) mine.sum = static_cast<A>(NAN);
  return mine;
}

template <class T, bool logarithm, int packs>
__global__ void __launch_bounds__(max_row_threads, 2) softmax_rows(const SoftmaxArgs args) {
  using A = accumulate_t<T>;
  const auto visit = [](int64_t, auto& row, T* y) {
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
  };
  for_each_row<packs, row_pack<T>>(args.rows, args.cols, arrays_of<const T>(args.x), arrays_of<T>(args.y), visit);
}

template <class T, bool logarithm, int packs>
__global__ void __launch_bounds__(max_row_threads, 2) softmax_rows_backward(const SoftmaxGradArgs args) {
  using A = accumulate_t<T>;
  const auto visit = [](int64_t, auto& row, T* dx) {
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
  };
  for_each_row<packs, row_pack<T>>(args.rows, args.cols, arrays_of<const T>(args.y, args.dy), arrays_of<T>(args.dx),
                                   visit);
}

template <bool logarithm>
void forward(const char* operation, const SoftmaxArgs& args, const Stream& stream) {
  dispatch_floating(args.dtype, operation, [&]<class T>() {
    // Two packs a lane even of the shortest rows, or too few bytes are under way.
    const dim3 block = row_block(args.cols, row_pack<T>, kept_packs, args.cols <= 8 * row_pack<T> ? 4 : 8);
    const auto launch_with = [&]<int packs>() {
      launch_rows(operation, softmax_rows<T, logarithm, packs>, args.cols > 0 ? args.rows : 0, block, stream, args);
    };
    with_row_packs<1, 2, 3, kept_packs>(args.cols, row_pack<T>, block, launch_with, args.x, args.y);
  });
}

template <bool logarithm>
void backward(const char* operation, const SoftmaxGradArgs& args, const Stream& stream) {
  dispatch_floating(args.dtype, operation, [&]<class T>() {
    const dim3 block = row_block(args.cols, row_pack<T>);
    const auto launch_with = [&]<int packs>() {
      launch_rows(operation, softmax_rows_backward<T, logarithm, packs>, args.cols > 0 ? args.rows : 0, block, stream,
                  args);
    };
    with_row_packs<1, 2, 3, kept_packs>(args.cols, row_pack<T>, block, launch_with, args.y, args.dy, args.dx);
  });
}

}  // namespace

void softmax_forward(const SoftmaxArgs& args, const Stream& stream) { forward<false>("softmax", args, stream); }

void softmax_backward(const SoftmaxGradArgs& args, const Stream& stream) { backward<false>("softmax", args, stream); }

void log_softmax_forward(const SoftmaxArgs& args, const Stream& stream) { forward<true>("log_softmax", args, stream); }

void log_softmax_backward(const SoftmaxGradArgs& args, const Stream& stream) {
  backward<true>("log_softmax", args, stream);
}

}  // namespace strobe::kernels::cuda
