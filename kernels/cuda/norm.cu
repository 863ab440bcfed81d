// Layer and RMS normalization on the GPU: rows for the output and dx; for the parameters, sums over some of the rows
// and then over those sums, always in the same order.
#include "strobe/kernels/norm.h"

#include "strobe/kernels/cuda/row.cuh"
#include "strobe/kernels/math.h"
#include "strobe/kernels/pointwise.h"

namespace strobe::kernels::cuda {
namespace {

using namespace strobe::cuda;

template <class T, bool centered, int packs, bool added>
__global__ void __launch_bounds__(max_row_threads) normalize_rows(const NormArgs args) {
  using A = accumulate_t<T>;
  const T* weight = static_cast<const T*>(args.weight);
  const T* bias = centered ? static_cast<const T*>(args.bias) : nullptr;
  const A share = A(1) / static_cast<A>(args.cols);
  const auto normalize = [&](int64_t index, auto& row, T* y) {
    A mean = 0;
    if constexpr (centered) {
      A sum = 0;
      row.template for_each<A>([&]<int n>(int64_t, const Values<A, n>& x, const auto&...) {
        for (int j = 0; j < n; ++j) sum += x[j];
      });
      mean = row_sum(sum) * share;
    }
    A squares = 0;
    row.template for_each<A>([&]<int n>(int64_t, const Values<A, n>& x, const auto&...) {
      for (int j = 0; j < n; ++j) squares += (x[j] - mean) * (x[j] - mean);
    });
    const A rstd = A(1) / sqrt_(row_sum(squares) * share + static_cast<A>(args.eps));
    if (threadIdx.x == 0) {
      if constexpr (centered) static_cast<A*>(args.mean)[index] = mean;
      static_cast<A*>(args.rstd)[index] = rstd;
    }
    row.template for_each<A>([&]<int n>(int64_t i, const Values<A, n>& x, const auto&...) {
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
  if constexpr (added) {
    static_assert(packs > 0);
    for_each_row<packs, row_pack<T>>(args.rows, args.cols, arrays_of<const T>(args.x, args.residual),
                                     arrays_of<T>(args.y, args.sum), [&](int64_t index, auto& row, T* y, T* sum) {
                                       row.template replace_first<A>(
                                           sum, [&]<int n>(int64_t, Values<A, n> x, const Values<A, n>& residual) {
                                             for (int j = 0; j < n; ++j) x[j] += residual[j];
                                             return x;
                                           });
                                       normalize(index, row, y);
                                     });
  } else {
    for_each_row<packs, row_pack<T>>(args.rows, args.cols, arrays_of<const T>(args.x), arrays_of<T>(args.y), normalize);
  }
}

template <bool centered>
void forward(const char* operation, const NormArgs& args, const Stream& stream) {
  dispatch_floating(args.dtype, operation, [&]<class T>() {
    const dim3 block = row_block(args.cols, row_pack<T>);
    const auto launch_with = [&]<int packs>() {
      if (args.residual == nullptr) {
        launch_rows(operation, normalize_rows<T, centered, packs, false>, args.rows, block, stream, args);
      } else if constexpr (packs > 0) {
        launch_rows(operation, normalize_rows<T, centered, packs, true>, args.rows, block, stream, args);
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
    with_row_packs(args.cols, row_pack<T>, block, launch_with, args.x, args.y, args.residual, args.sum);
  });
}

// What the backward kernels need of a row: g = dy * weight and xhat.
template <class A, int n>
struct Gradient {
  Values<A, n> g, xhat;

  __device__ Gradient(const Values<A, n>& x, const Values<A, n>& dy, A mean, A rstd) : g(dy) {
    for (int j = 0; j < n; ++j) xhat[j] = (x[j] - mean) * rstd;
  }
  __device__ void weigh(const Values<A, n>& weights) {
    for (int j = 0; j < n; ++j) g[j] *= weights[j];
  }
};

template <class T, bool centered>
__global__ void __launch_bounds__(max_row_threads) normalize_rows_backward(const NormGradArgs args) {
  using A = accumulate_t<T>;
  const T* weight = static_cast<const T*>(args.weight);
  const A share = A(1) / static_cast<A>(args.cols);
  const auto visit = [&](int64_t index, auto& row, T* dx) {
    const A mean = centered ? static_cast<const A*>(args.mean)[index] : A(0);
    const A rstd = static_cast<const A*>(args.rstd)[index];
    const T* dsum = args.dsum != nullptr ? static_cast<const T*>(args.dsum) + index * args.cols : nullptr;
    const auto for_each = [&](auto&& use) {
      row.template for_each<A>([&]<int n>(int64_t i, const Values<A, n>& x, const Values<A, n>& dy) {
        Gradient<A, n> gradient(x, dy, mean, rstd);
        if (weight != nullptr) gradient.weigh(load_shared_values<A, n>(weight + i));
        use(i, gradient);
      });
    };
    A sum_g = 0, sum_g_xhat = 0;
    for_each([&]<int n>(int64_t, const Gradient<A, n>& of) {
      for (int j = 0; j < n; ++j) sum_g += of.g[j], sum_g_xhat += of.g[j] * of.xhat[j];
    });
    row_sums(sum_g, sum_g_xhat);
    const A mean_g = centered ? sum_g * share : A(0), mean_g_xhat = sum_g_xhat * share;
    for_each([&]<int n>(int64_t i, const Gradient<A, n>& of) {
      Values<A, n> result;
      for (int j = 0; j < n; ++j) result[j] = rstd * (of.g[j] - mean_g - of.xhat[j] * mean_g_xhat);
      if (dsum != nullptr) {
        const Values<A, n> others = load_shared_values<A, n>(dsum + i);
        for (int j = 0; j < n; ++j) result[j] += others[j];
      }
      store_values(dx + i, result);
    });
  };
  for_each_row<0, row_pack<T>>(args.rows, args.cols, arrays_of<const T>(args.x, args.dy), arrays_of<T>(args.dx), visit);
}

// All gradients in one pass over x and dy: for rows that a block keeps in registers. A thread adds up the parameters'
// gradients of its columns over the rows that its block visits; block b leaves the sums in row b of two (chunks, cols)
// arrays of A.
constexpr int warp_rows = 4;   // that a block differentiates at a time, where a row is a warp's
constexpr int wide_packs = 2;  // of a row that is a block's, to a thread

// How rows are laid over threads; `packs` is 0 where they cannot be kept.
struct Layout {
  int packs = 0;
  dim3 block;

  Layout(int64_t cols, int width) {
    const int64_t lanes = ceil_div(cols, width);
    if (cols % width != 0 || cols == 0) return;
    if (lanes <= warp_size * kept_packs) {
      packs = static_cast<int>(ceil_div(lanes, warp_size));
      block = dim3(warp_size, warp_rows);
    } else if (lanes <= max_row_threads * wide_packs) {
      packs = wide_packs;
      block = dim3(static_cast<unsigned>(ceil_div(lanes, wide_packs * warp_size) * warp_size));
    }
  }
  // Blocks: as many as the registers let run at the same time.
  int64_t chunks(int64_t rows, Device device) const {
    const int64_t each = block.y > 1 ? 6 - packs : max_row_threads / block.x;
    return std::min(ceil_div(rows, block.y), each * device_properties(device).multiprocessors);
  }
};

template <class T, bool centered, int packs, bool added>
__global__ void __launch_bounds__(packs == wide_packs ? max_row_threads : warp_size * warp_rows)
    differentiate_rows(const NormGradArgs args) {
  using A = accumulate_t<T>;
  constexpr int n = row_pack<T>;
  const A share = A(1) / static_cast<A>(args.cols);
  const auto position = [](int k) { return static_cast<int>(k * blockDim.x + threadIdx.x) * n; };
  Packed<T, n> weights[packs] = {};
  Values<A, n> dweight[packs] = {}, dbias[packs] = {};
  if (args.weight != nullptr) {
#pragma unroll
    for (int k = 0; k < packs; ++k) {
      if (position(k) < args.cols) weights[k].load(static_cast<const T*>(args.weight) + position(k));
    }
  }
  for_each_row(args.rows, [&](int64_t index) {
    const int64_t first = index * args.cols;
    const auto differentiate = [&](auto& row) {
      const A mean = centered ? static_cast<const A*>(args.mean)[index] : A(0);
      const A rstd = static_cast<const A*>(args.rstd)[index];
      A sum_g = 0, sum_g_xhat = 0;
      row.template for_each_pack<A>([&](int k, int64_t, const Values<A, n>& x, const Values<A, n>& dy, const auto&...) {
        Gradient<A, n> of(x, dy, mean, rstd);
        for (int j = 0; j < n; ++j) dweight[k][j] += dy[j] * of.xhat[j], dbias[k][j] += dy[j];
        if (args.weight != nullptr) of.weigh(weights[k].template values<A>());
        for (int j = 0; j < n; ++j) sum_g += of.g[j], sum_g_xhat += of.g[j] * of.xhat[j];
      });
      if (args.dx == nullptr) return;
      row_sums(sum_g, sum_g_xhat);
      const A mean_g = centered ? sum_g * share : A(0), mean_g_xhat = sum_g_xhat * share;
      row.template for_each_pack<A>(
          [&](int k, int64_t i, const Values<A, n>& x, const Values<A, n>& dy, const auto&... others) {
            Gradient<A, n> of(x, dy, mean, rstd);
            if (args.weight != nullptr) of.weigh(weights[k].template values<A>());
            Values<A, n> result;
            for (int j = 0; j < n; ++j) result[j] = rstd * (of.g[j] - mean_g - of.xhat[j] * mean_g_xhat);
            for (int j = 0; j < n; ++j) ((result[j] += others[j]), ...);
            store_values(static_cast<T*>(args.dx) + first + i, result);
          });
    };
    const T *x = static_cast<const T*>(args.x) + first, *dy = static_cast<const T*>(args.dy) + first;
    if constexpr (added) {
      WholeRow<packs, n, T, T, T> row(args.cols, x, dy, static_cast<const T*>(args.dsum) + first);
      differentiate(row);
    } else {
      WholeRow<packs, n, T, T> row(args.cols, x, dy);
      differentiate(row);
    }
  });
  if (args.dweight == nullptr && args.dbias == nullptr) return;
  // Rows that are a warp's leave one sum each; the block's is theirs in the order of the warps.
  __shared__ A sums[warp_rows][packs == wide_packs ? 2 * warp_size * n : packs * warp_size * n];
  const auto write = [&](const Values<A, n>(&own)[packs], A* target) {
    target += int64_t{blockIdx.x} * args.cols;
    if (blockDim.y == 1) {
#pragma unroll
      for (int k = 0; k < packs; ++k) {
        for (int j = 0; j < n && position(k) < args.cols; ++j) target[position(k) + j] = own[k][j];
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < packs; ++k) {
      for (int j = 0; j < n; ++j) sums[threadIdx.y][position(k) + j] = own[k][j];
    }
    __syncthreads();
    const int cols = static_cast<int>(args.cols);
    for (int i = static_cast<int>(threadIdx.y * warp_size + threadIdx.x); i < cols; i += warp_size * warp_rows) {
      A sum = 0;
      for (int y = 0; y < warp_rows; ++y) sum += sums[y][i];
      target[i] = sum;
    }
    __syncthreads();
  };
  A* const partial = static_cast<A*>(args.workspace);
  write(dweight, partial);
  if constexpr (centered) write(dbias, partial + int64_t{gridDim.x} * args.cols);
}

// The same sums in a pass of their own, for all other rows: chunk c of the rows leaves its sums in row c.
constexpr int64_t max_chunks = 256;
constexpr int column_warps = 8;  // of a block, which share its rows and add their sums at the end

int64_t rows_per_chunk(int64_t rows) { return std::max<int64_t>(ceil_div(rows, max_chunks), 4 * column_warps); }

template <class T, bool centered>
__global__ void __launch_bounds__(warp_size* column_warps)
    sum_parameter_gradients(const NormGradArgs args, int64_t chunk_rows) {
  using A = accumulate_t<T>;
  const int64_t blocks = ceil_div(args.cols, warp_size);
  const int64_t chunk = blockIdx.x / blocks, column = blockIdx.x % blocks * warp_size + threadIdx.x;
  A dweight = 0, dbias = 0;
  const int64_t end = std::min(args.rows, (chunk + 1) * chunk_rows);
  if (column < args.cols) {
#pragma unroll 4
    for (int64_t row = chunk * chunk_rows + threadIdx.y; row < end; row += column_warps) {
      const A x = static_cast<A>(static_cast<const T*>(args.x)[row * args.cols + column]);
      const A dy = static_cast<A>(static_cast<const T*>(args.dy)[row * args.cols + column]);
      const A mean = centered ? static_cast<const A*>(args.mean)[row] : A(0);
      dweight += dy * ((x - mean) * static_cast<const A*>(args.rstd)[row]);
      dbias += dy;
    }
  }
  __shared__ A sums[2][column_warps][warp_size];
  sums[0][threadIdx.y][threadIdx.x] = dweight;
  sums[1][threadIdx.y][threadIdx.x] = dbias;
  __syncthreads();
  if (threadIdx.y > 1 || column >= args.cols) return;
  A sum = 0;
  for (int warp = 0; warp < column_warps; ++warp) sum += sums[threadIdx.y][warp][threadIdx.x];
  const int64_t chunks = ceil_div(args.rows, chunk_rows);
  static_cast<A*>(args.workspace)[(threadIdx.y * chunks + chunk) * args.cols + column] = sum;
}

// The gradients of the parameters, the sums of their chunks: dweight for blockIdx.y 0, dbias for 1, a warp's width of
// columns to a block.
constexpr int chunk_warps = 16;

template <class T>
__global__ void __launch_bounds__(warp_size* chunk_warps) sum_chunks(const NormGradArgs args, int64_t chunks) {
  using A = accumulate_t<T>;
  T* const out = static_cast<T*>(blockIdx.y == 0 ? args.dweight : args.dbias);
  if (out == nullptr) return;
  const A* const partial = static_cast<const A*>(args.workspace) + blockIdx.y * chunks * args.cols;
  const int64_t column = int64_t{blockIdx.x} * warp_size + threadIdx.x;
  A sum = 0;
  if (column < args.cols) {
#pragma unroll 8
    for (int64_t chunk = threadIdx.y; chunk < chunks; chunk += chunk_warps) sum += partial[chunk * args.cols + column];
  }
  __shared__ A sums[chunk_warps][warp_size];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= args.cols) return;
  for (int warp = 1; warp < chunk_warps; ++warp) sum += sums[warp][threadIdx.x];
  out[column] = static_cast<T>(sum);
}

bool wants_parameters(const NormGradArgs& args) { return args.dweight != nullptr || args.dbias != nullptr; }

template <class T>
Layout layout_of(const NormGradArgs& args) {
  const bool aligned = aligned_to(16, args.x, args.dy, args.dx, args.weight, args.dsum);
  return Layout(aligned ? args.cols : 0, row_pack<T>);
}

template <class T, bool centered, int packs>
void launch_differentiate(const char* operation, const NormGradArgs& args, const Layout& layout, const Stream& stream) {
  const int64_t blocks = layout.chunks(args.rows, stream.device);
  launch_rows(operation,
              args.dsum != nullptr ? differentiate_rows<T, centered, packs, true>
                                   : differentiate_rows<T, centered, packs, false>,
              args.rows, layout.block, stream, args, blocks);
}

template <bool centered>
void backward(const char* operation, const NormGradArgs& args, const Stream& stream) {
  const size_t needed = cuda::norm_backward_workspace(args, stream.device);
  STROBE_CHECK(args.workspace_bytes >= needed, operation, ": workspace of ", args.workspace_bytes,
               " bytes given, expected ", needed);
  dispatch_floating(args.dtype, operation, [&]<class T>() {
    const Layout layout = layout_of<T>(args);
    int64_t chunks = 0;
    if (layout.packs > 0) {
      chunks = layout.chunks(args.rows, stream.device);
      switch (layout.packs) {
        case 1:
          launch_differentiate<T, centered, 1>(operation, args, layout, stream);
          break;
        case 2:
          launch_differentiate<T, centered, 2>(operation, args, layout, stream);
          break;
        case 3:
          launch_differentiate<T, centered, 3>(operation, args, layout, stream);
          break;
        default:
          static_assert(kept_packs == 4);
          launch_differentiate<T, centered, 4>(operation, args, layout, stream);
      }
    } else {
      if (args.dx != nullptr) {
        launch_rows(operation, normalize_rows_backward<T, centered>, args.rows, row_block(args.cols, row_pack<T>),
                    stream, args);
      }
      if (!wants_parameters(args)) return;
      const int64_t chunk_rows = rows_per_chunk(args.rows);
      chunks = ceil_div(args.rows, chunk_rows);
      const dim3 grid(static_cast<unsigned>(ceil_div(args.cols, warp_size) * chunks));
      launch(operation, sum_parameter_gradients<T, centered>, grid, dim3(warp_size, column_warps), 0, stream, args,
             chunk_rows);
    }
    if (!wants_parameters(args)) return;
    const dim3 grid(static_cast<unsigned>(ceil_div(args.cols, warp_size)), centered ? 2 : 1);
    launch(operation, sum_chunks<T>, grid, dim3(warp_size, chunk_warps), 0, stream, args, chunks);
  });
}

}  // namespace

size_t norm_backward_workspace(const NormGradArgs& args, Device device) {
  if (!wants_parameters(args)) return 0;
  return dispatch_floating(args.dtype, "norm", [&]<class T>() {
    const Layout layout = layout_of<T>(args);
    const int64_t chunks =
        layout.packs > 0 ? layout.chunks(args.rows, device) : ceil_div(args.rows, rows_per_chunk(args.rows));
    return static_cast<size_t>(2 * chunks * args.cols) * sizeof(accumulate_t<T>);
  });
}

void layer_norm_forward(const NormArgs& args, const Stream& stream) { forward<true>("layer_norm", args, stream); }

void layer_norm_backward(const NormGradArgs& args, const Stream& stream) { backward<true>("layer_norm", args, stream); }

void rms_norm_forward(const NormArgs& args, const Stream& stream) { forward<false>("rms_norm", args, stream); }

void rms_norm_backward(const NormGradArgs& args, const Stream& stream) { backward<false>("rms_norm", args, stream); }

}  // namespace strobe::kernels::cuda
