// Softmax and cross entropy on the CPU, one thread per row.
#include "strobe/kernels/softmax.h"

#include <cmath>

#include "strobe/kernels/cpu/parallel.h"
#include "strobe/kernels/cpu/row.h"
#include "strobe/kernels/math.h"

namespace strobe::kernels::cpu {
namespace {

using strobe::cpu::for_each_row;
using strobe::cpu::max_row;
using strobe::cpu::sum_row;

template <class A>
struct RowStatistics {
  A maximum;
  double sum;  // of exp(x - maximum)
};

template <class T>
RowStatistics<accumulate_t<T>> row_statistics(const T* x, int64_t cols) {
  using A = accumulate_t<T>;
  const A maximum = max_row<A>(cols, [x](int64_t i) { return A(x[i]); });
  return {maximum, sum_row<A>(cols, [x, maximum](int64_t i) { return exp_(A(x[i]) - maximum); })};
}

template <class T>
void softmax_rows(const SoftmaxArgs& args) {
  using A = accumulate_t<T>;
  for_each_row(args.rows, args.cols, [&](int64_t row) {
    const T* x = static_cast<const T*>(args.x) + row * args.cols;
    T* y = static_cast<T*>(args.y) + row * args.cols;
    const auto [maximum, sum] = row_statistics(x, args.cols);
    const A inverse = static_cast<A>(1 / sum);
    for (int64_t i = 0; i < args.cols; ++i) y[i] = T(exp_(A(x[i]) - maximum) * inverse);
  });
}

template <class T>
void softmax_rows_backward(const SoftmaxGradArgs& args) {
  using A = accumulate_t<T>;
  for_each_row(args.rows, args.cols, [&](int64_t row) {
    const T* y = static_cast<const T*>(args.y) + row * args.cols;
    const T* dy = static_cast<const T*>(args.dy) + row * args.cols;
    T* dx = static_cast<T*>(args.dx) + row * args.cols;
    const A dot = static_cast<A>(sum_row<A>(args.cols, [=](int64_t i) { return A(dy[i]) * A(y[i]); }));
    for (int64_t i = 0; i < args.cols; ++i) dx[i] = T(A(y[i]) * (A(dy[i]) - dot));
  });
}

template <class T>
void log_softmax_rows(const SoftmaxArgs& args) {
  using A = accumulate_t<T>;
  for_each_row(args.rows, args.cols, [&](int64_t row) {
    const T* x = static_cast<const T*>(args.x) + row * args.cols;
    T* y = static_cast<T*>(args.y) + row * args.cols;
    const auto [maximum, sum] = row_statistics(x, args.cols);
    const A log_sum = static_cast<A>(std::log(sum));
    for (int64_t i = 0; i < args.cols; ++i) y[i] = T((A(x[i]) - maximum) - log_sum);
  });
}

template <class T>
void log_softmax_rows_backward(const SoftmaxGradArgs& args) {
  using A = accumulate_t<T>;
  for_each_row(args.rows, args.cols, [&](int64_t row) {
    const T* y = static_cast<const T*>(args.y) + row * args.cols;
    const T* dy = static_cast<const T*>(args.dy) + row * args.cols;
    T* dx = static_cast<T*>(args.dx) + row * args.cols;
    const A sum = static_cast<A>(sum_row<A>(args.cols, [=](int64_t i) { return A(dy[i]); }));
    for (int64_t i = 0; i < args.cols; ++i) dx[i] = T(A(dy[i]) - exp_(A(y[i])) * sum);
  });
}

template <class T, class Index>
void cross_entropy(const CrossEntropyArgs& args) {
  using A = accumulate_t<T>;
  const T* logits = static_cast<const T*>(args.logits);
  const Index* targets = static_cast<const Index*>(args.targets);
  for_each_row(args.rows, args.vocab, [&](int64_t row) {
    if (targets[row] == args.ignore_index) {
      args.lse[row] = 0;
    } else {
      const auto [maximum, sum] = row_statistics(logits + row * args.row_stride, args.vocab);
      args.lse[row] = static_cast<double>(maximum) + std::log(sum);
    }
  });
  double total = 0;
  for (int64_t row = 0; row < args.rows; ++row) {
    if (targets[row] == args.ignore_index) continue;
    total += args.lse[row] - static_cast<double>(A(logits[row * args.row_stride + targets[row]]));
  }
  const int64_t counted =
      std::count_if(targets, targets + args.rows, [&](Index target) { return target != args.ignore_index; });
  *args.counted = counted;
  *static_cast<A*>(args.loss) = counted > 0 ? static_cast<A>(total / static_cast<double>(counted)) : A(0);
}

template <class T, class Index>
void cross_entropy_grad(const CrossEntropyGradArgs& args) {
  using A = accumulate_t<T>;
  const Index* targets = static_cast<const Index*>(args.targets);
  const A dloss = *static_cast<const A*>(args.dloss);
  const A scale = static_cast<A>(static_cast<double>(dloss) / static_cast<double>(std::max<int64_t>(*args.counted, 1)));
  for_each_row(args.rows, args.vocab, [&](int64_t row) {
    const T* logits = static_cast<const T*>(args.logits) + row * args.logits_row_stride;
    T* dlogits = static_cast<T*>(args.dlogits) + row * args.dlogits_row_stride;
    if (targets[row] == args.ignore_index) {
      std::fill(dlogits, dlogits + args.vocab, T(A(0)));
      return;
    }
    // lse in two parts: logit - lse_high is exact where it matters, whatever the size of the logits.
    const A lse_high = static_cast<A>(args.lse[row]);
    const A lse_low = static_cast<A>(args.lse[row] - static_cast<double>(lse_high));
    const A target_logit = A(logits[targets[row]]);
#pragma omp simd  // dlogits and logits may be the same memory, element by element
    for (int64_t j = 0; j < args.vocab; ++j) dlogits[j] = T(scale * exp_((A(logits[j]) - lse_high) - lse_low));
    dlogits[targets[row]] = T(scale * (exp_((target_logit - lse_high) - lse_low) - A(1)));
  });
}

}  // namespace

void softmax_forward(const SoftmaxArgs& args, const Stream&) {
  dispatch_floating(args.dtype, "softmax", [&]<class T>() { softmax_rows<T>(args); });
}

void softmax_backward(const SoftmaxGradArgs& args, const Stream&) {
  dispatch_floating(args.dtype, "softmax", [&]<class T>() { softmax_rows_backward<T>(args); });
}

void log_softmax_forward(const SoftmaxArgs& args, const Stream&) {
  dispatch_floating(args.dtype, "log_softmax", [&]<class T>() { log_softmax_rows<T>(args); });
}

void log_softmax_backward(const SoftmaxGradArgs& args, const Stream&) {
  dispatch_floating(args.dtype, "log_softmax", [&]<class T>() { log_softmax_rows_backward<T>(args); });
}

size_t cross_entropy_forward_workspace(const CrossEntropyArgs&, Device) { return 0; }

void cross_entropy_forward(const CrossEntropyArgs& args, const Stream&) {
  dispatch_floating(args.dtype, "cross_entropy", [&]<class T>() {
    dispatch_index(args.index_dtype, "cross_entropy", [&]<class Index>() { cross_entropy<T, Index>(args); });
  });
}

void cross_entropy_backward(const CrossEntropyGradArgs& args, const Stream&) {
  dispatch_floating(args.dtype, "cross_entropy", [&]<class T>() {
    dispatch_index(args.index_dtype, "cross_entropy", [&]<class Index>() { cross_entropy_grad<T, Index>(args); });
  });
}

}  // namespace strobe::kernels::cpu
