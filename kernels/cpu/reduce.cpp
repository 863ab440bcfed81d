// Reductions on the CPU, over rows or over blocks of columns.
#include "strobe/kernels/reduce.h"

#include "strobe/kernels/cpu/parallel.h"
#include "strobe/kernels/cpu/row.h"

namespace strobe::kernels::cpu {
namespace {

using strobe::cpu::column_block;
using strobe::cpu::parallel_for;

template <class A>
struct SumReducer {
  using Value = double;
  template <class F>
  static void row(int64_t count, Value* result, F&& f) {
    *result = strobe::cpu::sum_row<A>(count, f);
  }
  template <class F>
  static void columns(int64_t rows, int64_t width, Value* results, F&& f) {
    strobe::cpu::sum_columns<A>(rows, width, results, f);
  }
  static Value combine(Value a, Value b) { return a + b; }
};

template <class A>
struct MaxReducer {
  using Value = A;
  template <class F>
  static void row(int64_t count, Value* result, F&& f) {
    *result = strobe::cpu::max_row<A>(count, f);
  }
  template <class F>
  static void columns(int64_t rows, int64_t width, Value* results, F&& f) {
    strobe::cpu::max_columns<A>(rows, width, results, f);
  }
  static Value combine(Value a, Value b) { return strobe::cpu::larger(a, b); }
};

// Calls f(outer index, first column, number of columns) for every block of results, in parallel. A row's worth of
// results (inner == 1) is a block of its own.
template <class F>
void for_each_block(int64_t outer, int64_t count, int64_t inner, F&& f) {
  const int64_t blocks = (inner + column_block - 1) / column_block;
  const int64_t work = std::max<int64_t>(count * std::min(inner, column_block), 1);
  parallel_for(outer * blocks, std::max<int64_t>(16384 / work, 1), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t block = task % blocks;
      const int64_t column = inner * block / blocks;
      f(task / blocks, column, inner * (block + 1) / blocks - column);
    }
  });
}

// A long reduction is cut into chunks that depend on its length only, so the bits do not depend on the threads. They
// run in parallel when there are too few blocks to keep the threads busy.
template <class Reducer, class T>
void reduce(const ReduceArgs& args) {
  using A = accumulate_t<T>;
  using Value = typename Reducer::Value;
  constexpr int64_t max_chunks = 32;
  for_each_block(args.outer, args.count, args.inner, [&](int64_t o, int64_t column, int64_t width) {
    const T* x = static_cast<const T*>(args.x) + o * args.count * args.inner + column;
    T* out = static_cast<T*>(args.out) + o * args.inner + column;
    const int64_t chunks = std::clamp<int64_t>(args.count * width / 16384, 1, max_chunks);
    Value partial[max_chunks][column_block];
    parallel_for(chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t first = args.count * chunk / chunks;
        const int64_t rows = args.count * (chunk + 1) / chunks - first;
        const T* start = x + first * args.inner;
        if (args.inner == 1) {
          Reducer::row(rows, partial[chunk], [start](int64_t i) { return A(start[i]); });
        } else {
          Reducer::columns(rows, width, partial[chunk],
                           [start, inner = args.inner](int64_t i, int64_t j) { return A(start[i * inner + j]); });
        }
      }
    });
    for (int64_t j = 0; j < width; ++j) {
      Value total = partial[0][j];
      for (int64_t chunk = 1; chunk < chunks; ++chunk) total = Reducer::combine(total, partial[chunk][j]);
      out[j] = T(static_cast<A>(static_cast<double>(total) / args.divisor));
    }
  });
}

// NaN is the maximum of whatever contains it.
template <class A>
bool attains(A value, A maximum) {
  return value == maximum || (value != value && maximum != maximum);
}

}  // namespace

void sum(const ReduceArgs& args, const Stream&) {
  dispatch_floating(args.dtype, "sum", [&]<class T>() { reduce<SumReducer<accumulate_t<T>>, T>(args); });
}

void max(const ReduceArgs& args, const Stream&) {
  dispatch_floating(args.dtype, "max", [&]<class T>() { reduce<MaxReducer<accumulate_t<T>>, T>(args); });
}

void max_backward(const MaxGradArgs& args, const Stream&) {
  dispatch_floating(args.dtype, "max", [&]<class T>() {
    using A = accumulate_t<T>;
    const int64_t inner = args.inner;
    for_each_block(args.outer, args.count, inner, [&](int64_t o, int64_t column, int64_t width) {
      const T* x = static_cast<const T*>(args.x) + o * args.count * inner + column;
      T* dx = static_cast<T*>(args.dx) + o * args.count * inner + column;
      const T* maximum = static_cast<const T*>(args.out) + o * inner + column;
      const T* dout = static_cast<const T*>(args.dout) + o * inner + column;
      double ties[column_block];
      if (inner == 1) {
        ties[0] = strobe::cpu::sum_row<A>(args.count, [=](int64_t i) { return A(attains(A(x[i]), A(*maximum))); });
      } else {
        strobe::cpu::sum_columns<A>(args.count, width, ties, [=](int64_t i, int64_t j) {
          return A(attains(A(x[i * inner + j]), A(maximum[j])));
        });
      }
      A share[column_block];
      for (int64_t j = 0; j < width; ++j) share[j] = static_cast<A>(static_cast<double>(A(dout[j])) / ties[j]);
      parallel_for(args.count, std::max<int64_t>(16384 / width, 1), [&](int64_t begin, int64_t end) {
        if (inner == 1) {
          for (int64_t i = begin; i < end; ++i) dx[i] = T(attains(A(x[i]), A(*maximum)) ? share[0] : A(0));
        } else {
          for (int64_t i = begin; i < end; ++i) {
            for (int64_t j = 0; j < width; ++j) {
              dx[i * inner + j] = T(attains(A(x[i * inner + j]), A(maximum[j])) ? share[j] : A(0));
            }
          }
        }
      });
    });
  });
}

}  // namespace strobe::kernels::cpu
