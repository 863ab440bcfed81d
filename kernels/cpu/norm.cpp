// Layer and RMS normalization on the CPU: rows for the output and dx, blocks of columns for the parameters.
#include "strobe/kernels/norm.h"

#include <cmath>

#include "strobe/kernels/cpu/parallel.h"
#include "strobe/kernels/cpu/row.h"

namespace strobe::kernels::cpu {
namespace {

using strobe::cpu::column_block;
using strobe::cpu::parallel_for;
using strobe::cpu::sum_columns;
using strobe::cpu::sum_row;

// Rows that are worth a thread.
int64_t row_grain(int64_t cols) { return std::max<int64_t>(16384 / std::max<int64_t>(cols, 1), 1); }

template <class T, bool centered>
void forward(const NormArgs& args) {
  using A = accumulate_t<T>;
  const int64_t cols = args.cols;
  const T* weight = static_cast<const T*>(args.weight);
  const T* bias = centered ? static_cast<const T*>(args.bias) : nullptr;
  parallel_for(args.rows, row_grain(cols), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(args.x) + row * cols;
      T* y = static_cast<T*>(args.y) + row * cols;
      if (args.residual != nullptr) {
        const T* residual = static_cast<const T*>(args.residual) + row * cols;
        T* sum = static_cast<T*>(args.sum) + row * cols;
        for (int64_t i = 0; i < cols; ++i) sum[i] = T(A(x[i]) + A(residual[i]));
        x = sum;
      }
      A mean = 0;
      if constexpr (centered) {
        mean = static_cast<A>(sum_row<A>(cols, [x](int64_t i) { return A(x[i]); }) / static_cast<double>(cols));
        static_cast<A*>(args.mean)[row] = mean;
      }
      const double squares = sum_row<A>(cols, [x, mean](int64_t i) {
        const A centered_x = A(x[i]) - mean;
        return centered_x * centered_x;
      });
      const A rstd = static_cast<A>(1 / std::sqrt(squares / static_cast<double>(cols) + args.eps));
      static_cast<A*>(args.rstd)[row] = rstd;
      const auto write = [=](auto weight_at, auto bias_at) {
        for (int64_t i = 0; i < cols; ++i) y[i] = T((A(x[i]) - mean) * rstd * weight_at(i) + bias_at(i));
      };
      const auto load_weight = [weight](int64_t i) { return A(weight[i]); };
      const auto load_bias = [bias](int64_t i) { return A(bias[i]); };
      const auto one = [](int64_t) { return A(1); };
      const auto zero = [](int64_t) { return A(0); };
      if (weight != nullptr && bias != nullptr) {
        write(load_weight, load_bias);
      } else if (weight != nullptr) {
        write(load_weight, zero);
      } else if (bias != nullptr) {
        write(one, load_bias);
      } else {
        write(one, zero);
      }
    }
  });
}

template <class T, bool centered>
void backward_rows(const NormGradArgs& args) {
  using A = accumulate_t<T>;
  const int64_t cols = args.cols;
  const T* weight = static_cast<const T*>(args.weight);
  parallel_for(args.rows, row_grain(cols), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(args.x) + row * cols;
      const T* dy = static_cast<const T*>(args.dy) + row * cols;
      T* dx = static_cast<T*>(args.dx) + row * cols;
      const T* dsum = args.dsum != nullptr ? static_cast<const T*>(args.dsum) + row * cols : nullptr;
      const A mean = centered ? static_cast<const A*>(args.mean)[row] : A(0);
      const A rstd = static_cast<const A*>(args.rstd)[row];
      const auto xhat = [=](int64_t i) { return (A(x[i]) - mean) * rstd; };
      const auto write = [=](auto g) {
        const double count = static_cast<double>(cols);
        const A mean_g = centered ? static_cast<A>(sum_row<A>(cols, g) / count) : A(0);
        const A mean_g_xhat = static_cast<A>(sum_row<A>(cols, [=](int64_t i) { return g(i) * xhat(i); }) / count);
        const auto gradient = [=](int64_t i) { return rstd * (g(i) - mean_g - xhat(i) * mean_g_xhat); };
        for (int64_t i = 0; i < cols; ++i) dx[i] = T(gradient(i));
        // Apart, so that the bits are those of a norm and a sum one after the other.
        for (int64_t i = 0; dsum != nullptr && i < cols; ++i) dx[i] = T(A(dx[i]) + A(dsum[i]));
      };
      if (weight != nullptr) {
        write([=](int64_t i) { return A(dy[i]) * A(weight[i]); });
      } else {
        write([=](int64_t i) { return A(dy[i]); });
      }
    }
  });
}

// A second pass over columns: every sum is one thread's, in the order of the rows, so the bits are always the same.
template <class T, bool centered>
void backward_columns(const NormGradArgs& args) {
  using A = accumulate_t<T>;
  const int64_t cols = args.cols;
  const A* mean = static_cast<const A*>(args.mean);
  const A* rstd = static_cast<const A*>(args.rstd);
  const int64_t blocks = (cols + column_block - 1) / column_block;
  parallel_for(blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = cols * block / blocks;
      const int64_t width = cols * (block + 1) / blocks - first;
      const T* x = static_cast<const T*>(args.x) + first;
      const T* dy = static_cast<const T*>(args.dy) + first;
      double sums[column_block];
      if (args.dweight != nullptr) {
        sum_columns<A>(args.rows, width, sums, [=](int64_t i, int64_t j) {
          const A centered_x = A(x[i * cols + j]) - (centered ? mean[i] : A(0));
          return A(dy[i * cols + j]) * (centered_x * rstd[i]);
        });
        T* dweight = static_cast<T*>(args.dweight) + first;
        for (int64_t j = 0; j < width; ++j) dweight[j] = T(static_cast<A>(sums[j]));
      }
      if (centered && args.dbias != nullptr) {
        sum_columns<A>(args.rows, width, sums, [=](int64_t i, int64_t j) { return A(dy[i * cols + j]); });
        T* dbias = static_cast<T*>(args.dbias) + first;
        for (int64_t j = 0; j < width; ++j) dbias[j] = T(static_cast<A>(sums[j]));
      }
    }
  });
}

template <class T, bool centered>
void backward(const NormGradArgs& args) {
  if (args.dx != nullptr) backward_rows<T, centered>(args);
  if (args.dweight != nullptr || args.dbias != nullptr) backward_columns<T, centered>(args);
}

}  // namespace

size_t norm_backward_workspace(const NormGradArgs&, Device) { return 0; }

void layer_norm_forward(const NormArgs& args, const Stream&) {
  dispatch_floating(args.dtype, "layer_norm", [&]<class T>() { forward<T, true>(args); });
}

void layer_norm_backward(const NormGradArgs& args, const Stream&) {
  dispatch_floating(args.dtype, "layer_norm", [&]<class T>() { backward<T, true>(args); });
}

void rms_norm_forward(const NormArgs& args, const Stream&) {
  dispatch_floating(args.dtype, "rms_norm", [&]<class T>() { forward<T, false>(args); });
}

void rms_norm_backward(const NormGradArgs& args, const Stream&) {
  dispatch_floating(args.dtype, "rms_norm", [&]<class T>() { backward<T, false>(args); });
}

}  // namespace strobe::kernels::cpu
