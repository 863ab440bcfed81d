// Reductions on CUDA: each block reduces a part of the middle axis for a row or for a tile of columns, and the parts
// are combined in order by a second kernel.
#include "strobe/kernels/reduce.h"

#include "strobe/kernels/cuda/elementwise.cuh"

namespace strobe::kernels::cuda {
namespace {

using namespace strobe::cuda;

constexpr int row_lanes = 8;     // warps of a block
constexpr int column_loads = 4;  // that a thread has under way at a time

// What one thread loads at a time is added in A, all else in double.
template <class A>
struct SumReduction {
  using Value = double;
  __device__ static A identity() { return 0; }
  template <class V>
  __device__ static V combine(V a, V b) {
    return a + b;
  }
};

template <class A>
struct MaxReduction {
  using Value = A;
  __device__ static A identity() { return -static_cast<A>(INFINITY); }
  __device__ static A combine(A a, A b) { return Larger()(a, b); }
};

template <class Reduction>
struct Combine {
  template <class V>
  __device__ V operator()(V a, V b) const {
    return Reduction::combine(a, b);
  }
};

// a / b of numbers that are not negative; 64 bits take several times as long as 32.
__device__ inline int64_t quotient(int64_t a, int64_t b) {
  return (a | b) >> 32 == 0 ? static_cast<uint32_t>(a) / static_cast<uint32_t>(b) : a / b;
}

struct Problem {
  int64_t outer;
  int64_t count;
  int64_t inner;
  int64_t parts;
  double divisor;

  // Of a part.
  __device__ int64_t length() const { return quotient(count + parts - 1, parts); }
  // A division takes as long as the sum of a short row.
  __device__ double divided(double total) const { return divisor == 1 ? total : total / divisor; }
};

// The result, or one part of it.
template <class T, class Value>
__device__ void write_total(T* out, Value* partial, const Problem& problem, int64_t result, int64_t part, Value total) {
  if (problem.parts == 1) {
    out[result] = T(static_cast<accumulate_t<T>>(problem.divided(static_cast<double>(total))));
  } else {
    partial[part * problem.outer * problem.inner + result] = total;
  }
}

// Blocks of reduce_rows that share a multiprocessor: with 8 loads of a thread under way, with fewer.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int many_loads_blocks = 4, few_loads_blocks = 4;  // 1,024 threads at most
#else
constexpr int many_loads_blocks = 4, few_loads_blocks = 5;
#endif

// inner == 1: `lanes` threads, a warp or the block, for each part of a row. loads: of a thread under way at a time.
template <class Reduction, class T, int lanes, int loads>
__global__ void __launch_bounds__(warp_size* row_lanes, loads > 4 ? many_loads_blocks : few_loads_blocks)
    reduce_rows(T* out, typename Reduction::Value* partial, const T* x, Problem problem, bool packed) {
  using A = accumulate_t<T>;
  using Value = typename Reduction::Value;
  constexpr int width = pack_width<T>;
  const int64_t tasks = problem.outer * problem.parts;
  // The bound is the same for all threads of a block, so that all meet in the reductions.
  for (int64_t first = int64_t{blockIdx.x} * blockDim.y; first < tasks; first += int64_t{gridDim.x} * blockDim.y) {
    const int64_t task = first + threadIdx.y;
    const bool exists = task < tasks;
    const int64_t row = !exists ? 0 : problem.parts == 1 ? task : quotient(task, problem.parts);
    const int64_t part = exists ? task - row * problem.parts : 0;
    const int64_t length = problem.parts == 1 ? problem.count : ceil_div(problem.length(), int64_t{width}) * width;
    const int64_t begin = part * length;
    const int64_t end = exists ? (begin + length < problem.count ? begin + length : problem.count) : begin;
    Value total = Value(Reduction::identity());
    const T* const start = x + row * problem.count;
    const int64_t packs = packed ? (end - begin) / width : 0;
    constexpr int step = loads * lanes;
    for (int64_t pack = threadIdx.x; pack < packs; pack += step) {
      const int left = static_cast<int>(packs - pack < step ? packs - pack : step);
      const T* const from = start + begin + pack * width;
      Packed<T, width> loaded[loads];
#pragma unroll
      for (int k = 0; k < loads; ++k) {
        if (k * lanes < left) loaded[k].load(from + k * lanes * width);
      }
      A sum = Reduction::identity();
#pragma unroll
      for (int k = 0; k < loads; ++k) {
        if (k * lanes >= left) continue;
        const Values<A, width> values = loaded[k].template values<A>();
        A of_pack = values[0];
#pragma unroll
        for (int j = 1; j < width; ++j) of_pack = Reduction::combine(of_pack, values[j]);
        sum = Reduction::combine(sum, of_pack);
      }
      total = Reduction::combine(total, Value(sum));
    }
    for (int64_t i = begin + packs * width + threadIdx.x; i < end; i += lanes) {
      total = Reduction::combine(total, Value(A(start[i])));
    }
    if constexpr (lanes == warp_size) {
      total = warp_reduce(total, Combine<Reduction>());
    } else {
      total = block_reduce(total, Value(Reduction::identity()), Combine<Reduction>());
    }
    if (exists && threadIdx.x == 0) write_total(out, partial, problem, row, part, total);
  }
}

// Each thread takes `width` neighbouring columns and every row_lanes-th element of a part.
template <class Reduction, class T, int width>
__global__ void __launch_bounds__(warp_size* row_lanes)
    reduce_columns(T* out, typename Reduction::Value* partial, const T* x, Problem problem) {
  using A = accumulate_t<T>;
  using Value = typename Reduction::Value;
  __shared__ Value totals[row_lanes][warp_size * width];
  const int64_t tiles = ceil_div(problem.inner, int64_t{warp_size * width});
  const int64_t tasks = problem.outer * problem.parts * tiles;
  const int64_t length = problem.length();
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t tile_row = quotient(task, tiles), tile = task - tile_row * tiles;
    const int64_t outer = quotient(tile_row, problem.parts), part = tile_row - outer * problem.parts;
    const int64_t column = (tile * warp_size + threadIdx.x) * width;
    const int64_t end = part * length + length < problem.count ? part * length + length : problem.count;
    Value total[width];
#pragma unroll
    for (int j = 0; j < width; ++j) total[j] = Value(Reduction::identity());
    if (column < problem.inner) {
      const T* const start = x + outer * problem.count * problem.inner + column;
      int64_t i = part * length + threadIdx.y;
      for (; i + (column_loads - 1) * row_lanes < end; i += column_loads * row_lanes) {
        Values<A, width> values[column_loads];
#pragma unroll
        for (int k = 0; k < column_loads; ++k) {
          values[k] = load_values<A, width>(start + (i + k * row_lanes) * problem.inner);
        }
        Values<A, width> sums = values[0];
#pragma unroll
        for (int k = 1; k < column_loads; ++k) {
#pragma unroll
          for (int j = 0; j < width; ++j) sums[j] = Reduction::combine(sums[j], values[k][j]);
        }
#pragma unroll
        for (int j = 0; j < width; ++j) total[j] = Reduction::combine(total[j], Value(sums[j]));
      }
      for (; i < end; i += row_lanes) {
        const Values<A, width> values = load_values<A, width>(start + i * problem.inner);
#pragma unroll
        for (int j = 0; j < width; ++j) total[j] = Reduction::combine(total[j], Value(values[j]));
      }
    }
    __syncthreads();  // the totals of the task before have been read
#pragma unroll
    for (int j = 0; j < width; ++j) totals[threadIdx.y][threadIdx.x * width + j] = total[j];
    __syncthreads();
    for (int c = static_cast<int>(threadIdx.y * warp_size + threadIdx.x); c < warp_size * width;
         c += warp_size * row_lanes) {
      Value sum = totals[0][c];
      for (int lane = 1; lane < row_lanes; ++lane) sum = Reduction::combine(sum, totals[lane][c]);
      const int64_t result_column = tile * warp_size * width + c;
      if (result_column < problem.inner) {
        write_total(out, partial, problem, outer * problem.inner + result_column, part, sum);
      }
    }
  }
}

// A warp's width of results to a block, whose warps share the parts.
constexpr int part_warps = 32;
constexpr int part_loads = 8;  // that a thread has under way at a time

template <class Reduction, class T>
__global__ void __launch_bounds__(warp_size* part_warps)
    combine_parts(T* out, const typename Reduction::Value* partial, int64_t results, Problem problem) {
  using Value = typename Reduction::Value;
  const int64_t result = int64_t{blockIdx.x} * warp_size + threadIdx.x;
  Value total = Value(Reduction::identity());
  if (result < results) {
    for (int64_t first = threadIdx.y; first < problem.parts; first += part_loads * part_warps) {
      Value values[part_loads];
#pragma unroll
      for (int k = 0; k < part_loads; ++k) {
        const int64_t part = first + k * part_warps;
        values[k] = part < problem.parts ? partial[part * results + result] : Value(Reduction::identity());
      }
#pragma unroll
      for (int k = 0; k < part_loads; ++k) total = Reduction::combine(total, values[k]);
    }
  }
  __shared__ Value totals[part_warps][warp_size];
  totals[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || result >= results) return;
  for (int warp = 1; warp < part_warps; ++warp) total = Reduction::combine(total, totals[warp][threadIdx.x]);
  out[result] = T(static_cast<accumulate_t<T>>(problem.divided(static_cast<double>(total))));
}

template <template <class> class ReductionOf>
void reduce(const char* name, const ReduceArgs& args, const Stream& stream) {
  dispatch_floating(args.dtype, name, [&]<class T>() {
    using Reduction = ReductionOf<accumulate_t<T>>;
    T* const out = static_cast<T*>(args.out);
    const T* const x = static_cast<const T*>(args.x);
    auto* const partial = static_cast<typename Reduction::Value*>(args.workspace);
    const Problem problem{args.outer, args.count, args.inner, reduce_parts(args), args.divisor};
    if (args.inner == 1) {
      const bool packed = aligned_to(16, x) && (args.outer == 1 || args.count % pack_width<T> == 0);
      const auto run = [&]<int lanes, int loads>() {
        constexpr int sharing = warp_size * row_lanes / lanes;
        launch(name, reduce_rows<Reduction, T, lanes, loads>, grid_size(args.outer * problem.parts, sharing),
               dim3(lanes, sharing), 0, stream, out, partial, x, problem, packed);
      };
      const int64_t length = args.count / problem.parts;
      if (length <= 4 * warp_size * pack_width<T>) {
        run.template operator()<warp_size, 4>();
      } else if (length <= (args.outer >= 1024 ? 8192 : 1024)) {
        run.template operator()<warp_size, 8>();
      } else {
        run.template operator()<warp_size * row_lanes, 8>();
      }
    } else {
      constexpr int width = pack_width<T>;
      const dim3 block(warp_size, row_lanes);
      const auto grid = [&](int columns) {
        return grid_size(args.outer * problem.parts * ceil_div(args.inner, warp_size * columns), 1);
      };
      if (args.inner % width == 0 && aligned_to(16, x)) {
        launch(name, reduce_columns<Reduction, T, width>, grid(width), block, 0, stream, out, partial, x, problem);
      } else {
        launch(name, reduce_columns<Reduction, T, 1>, grid(1), block, 0, stream, out, partial, x, problem);
      }
    }
    if (problem.parts > 1) {
      const int64_t results = args.outer * args.inner;
      launch(name, combine_parts<Reduction, T>, grid_size(results, warp_size), dim3(warp_size, part_warps), 0, stream,
             out, partial, results, problem);
    }
  });
}

// NaN is the maximum of whatever contains it.
template <class A>
__device__ inline bool attains(A value, A maximum) {
  return value == maximum || (value != value && maximum != maximum);
}

// `lanes` threads for each result: a warp when the reduced elements are neighbours, one thread when the results are.
template <class T, int lanes>
__global__ void __launch_bounds__(256)
    share_among_maxima(T* dx, const T* dout, const T* x, const T* out, int64_t results, int64_t count, int64_t inner) {
  using A = accumulate_t<T>;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int64_t step = int64_t{gridDim.x} * (256 / lanes);
  for (int64_t result = (int64_t{blockIdx.x} * 256 + threadIdx.x) / lanes; result < results; result += step) {
    const int64_t start = result / inner * count * inner + result % inner;
    const A maximum = A(out[result]);
    double ties = 0;
    for (int64_t i = lane; i < count; i += lanes) ties += attains(A(x[start + i * inner]), maximum) ? 1 : 0;
    ties = warp_sum<lanes>(ties);
    const A share = static_cast<A>(static_cast<double>(A(dout[result])) / ties);
    for (int64_t i = lane; i < count; i += lanes) {
      dx[start + i * inner] = T(attains(A(x[start + i * inner]), maximum) ? share : A(0));
    }
  }
}

}  // namespace

void sum(const ReduceArgs& args, const Stream& stream) { reduce<SumReduction>("sum", args, stream); }

void max(const ReduceArgs& args, const Stream& stream) { reduce<MaxReduction>("max", args, stream); }

void max_backward(const MaxGradArgs& args, const Stream& stream) {
  dispatch_floating(args.dtype, "max", [&]<class T>() {
    const int64_t results = args.outer * args.inner;
    const auto run_with = [&]<int lanes>(std::integral_constant<int, lanes>) {
      launch("max", share_among_maxima<T, lanes>, grid_size(results, 256 / lanes), 256, 0, stream,
             static_cast<T*>(args.dx), static_cast<const T*>(args.dout), static_cast<const T*>(args.x),
             static_cast<const T*>(args.out), results, args.count, args.inner);
    };
    if (args.inner == 1) {
      run_with(std::integral_constant<int, warp_size>());
    } else {
      run_with(std::integral_constant<int, 1>());
    }
  });
}

}  // namespace strobe::kernels::cuda
