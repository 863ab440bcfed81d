// Layer and RMS normalization on the GPU: rows for the output and dx; for the parameters, sums over chunks of rows and
// then over the chunks, always in the same order.
#include "strobe/kernels/norm.h"

#include "strobe/kernels/cuda/row.cuh"
#include "strobe/kernels/math.h"

namespace strobe::kernels::cuda {
namespace {

using strobe::cuda::ceil_div;
using strobe::cuda::for_each_row;
using strobe::cuda::launch;
using strobe::cuda::launch_rows;
using strobe::cuda::load_shared_values;
using strobe::cuda::max_row_threads;
using strobe::cuda::Packed;
using strobe::cuda::Row;
using strobe::cuda::row_block;
using strobe::cuda::row_pack;
using strobe::cuda::row_sum;
using strobe::cuda::store_values;
using strobe::cuda::Values;
using strobe::cuda::warp_size;

template <class T, bool centered>
__global__ void __launch_bounds__(max_row_threads) normalize_rows(const NormArgs args) {
  using A = accumulate_t<T>;
  const T* weight = static_cast<const T*>(args.weight);
  const T* bias = centered ? static_cast<const T*>(args.bias) : nullptr;
  const A share = A(1) / static_cast<A>(args.cols);
  for_each_row(args.rows, [&](int64_t index) {
    T* const y = static_cast<T*>(args.y) + index * args.cols;
    Row<row_pack<T>, T> row(args.cols, static_cast<const T*>(args.x) + index * args.cols);
    row.align(y);
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
    const A rstd = A(1) / sqrt_(row_sum(squares) * share + static_cast<A>(args.eps));
    if (threadIdx.x == 0) {
      if constexpr (centered) static_cast<A*>(args.mean)[index] = mean;
      static_cast<A*>(args.rstd)[index] = rstd;
    }
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
  });
}

template <class T, bool centered>
__global__ void __launch_bounds__(max_row_threads) normalize_rows_backward(const NormGradArgs args) {
  using A = accumulate_t<T>;
  const T* weight = static_cast<const T*>(args.weight);
  const A share = A(1) / static_cast<A>(args.cols);
  for_each_row(args.rows, [&](int64_t index) {
    const int64_t first = index * args.cols;
    T* const dx = static_cast<T*>(args.dx) + first;
    const A mean = centered ? static_cast<const A*>(args.mean)[index] : A(0);
    const A rstd = static_cast<const A*>(args.rstd)[index];
    Row<row_pack<T>, T, T> row(args.cols, static_cast<const T*>(args.x) + first,
                               static_cast<const T*>(args.dy) + first);
    row.align(dx);
    // Calls use(i, g, xhat) for the runs of the row.
    const auto for_each = [&](auto&& use) {
      row.template for_each<A>([&]<int n>(int64_t i, const Values<A, n>& x, const Values<A, n>& dy) {
        Values<A, n> g = dy, xhat;
        for (int j = 0; j < n; ++j) xhat[j] = (x[j] - mean) * rstd;
        if (weight != nullptr) {
          const Values<A, n> weights = load_shared_values<A, n>(weight + i);
          for (int j = 0; j < n; ++j) g[j] *= weights[j];
        }
        use(i, g, xhat);
      });
    };
    A sum_g = 0, sum_g_xhat = 0;
    for_each([&]<int n>(int64_t, const Values<A, n>& g, const Values<A, n>& xhat) {
      for (int j = 0; j < n; ++j) {
        if constexpr (centered) sum_g += g[j];
        sum_g_xhat += g[j] * xhat[j];
      }
    });
    const A mean_g = centered ? row_sum(sum_g) * share : A(0);
    const A mean_g_xhat = row_sum(sum_g_xhat) * share;
    for_each([&]<int n>(int64_t i, const Values<A, n>& g, const Values<A, n>& xhat) {
      Values<A, n> result;
      for (int j = 0; j < n; ++j) result[j] = rstd * (g[j] - mean_g - xhat[j] * mean_g_xhat);
      store_values(dx + i, result);
    });
  });
}

// The gradients of the parameters: chunk c of the rows leaves its sums in row c of two (chunks, cols) arrays of A.
constexpr int64_t max_chunks = 256;
constexpr int column_warps = 8;  // of a block, which share its rows and add their sums at the end

int64_t rows_per_chunk(int64_t rows) { return std::max<int64_t>(ceil_div(rows, max_chunks), 4 * column_warps); }
int64_t chunks_of(int64_t rows) { return ceil_div(rows, rows_per_chunk(rows)); }

// Columns of a block: a lane sums `row_pack` columns, neighbours where `packed`, else a warp's width apart.
template <class T>
constexpr int columns_per_block = warp_size* row_pack<T>;

template <class T, bool centered, bool packed>
__global__ void __launch_bounds__(warp_size* column_warps)
    sum_parameter_gradients(const NormGradArgs args, int64_t chunk_rows) {
  using A = accumulate_t<T>;
  constexpr int n = row_pack<T>;
  constexpr int width = columns_per_block<T>;
  const int64_t blocks = ceil_div(args.cols, width);
  const int64_t chunk = blockIdx.x / blocks;
  const int64_t first_column = blockIdx.x % blocks * width;
  const auto column = [](int j) {
    return packed ? static_cast<int>(threadIdx.x) * n + j : threadIdx.x + j * warp_size;
  };
  const A* mean = static_cast<const A*>(args.mean);
  const A* rstd = static_cast<const A*>(args.rstd);
  Values<A, n> dweight{}, dbias{};
  const int64_t end = std::min(args.rows, (chunk + 1) * chunk_rows);
  if (first_column + column(0) < args.cols) {
#pragma unroll 4
    for (int64_t row = chunk * chunk_rows + threadIdx.y; row < end; row += column_warps) {
      const T* x = static_cast<const T*>(args.x) + row * args.cols + first_column;
      const T* dy = static_cast<const T*>(args.dy) + row * args.cols + first_column;
      Values<A, n> values{}, gradients{};
      if constexpr (packed) {
        Packed<T, n> x_pack, dy_pack;
        x_pack.load(x + column(0));
        dy_pack.load(dy + column(0));
        values = x_pack.template values<A>();
        gradients = dy_pack.template values<A>();
      } else {
        for (int j = 0; j < n; ++j) {
          if (first_column + column(j) >= args.cols) continue;
          values[j] = static_cast<A>(x[column(j)]);
          gradients[j] = static_cast<A>(dy[column(j)]);
        }
      }
      const A row_mean = centered ? mean[row] : A(0);
      const A row_rstd = rstd[row];
      for (int j = 0; j < n; ++j) {
        dweight[j] += gradients[j] * ((values[j] - row_mean) * row_rstd);
        if constexpr (centered) dbias[j] += gradients[j];
      }
    }
  }
  __shared__ A sums[column_warps][width];
  const auto write_sums = [&](const Values<A, n>& mine, A* target) {
    for (int j = 0; j < n; ++j) sums[threadIdx.y][column(j)] = mine[j];
    __syncthreads();
    for (int j = static_cast<int>(threadIdx.y * warp_size + threadIdx.x); j < width; j += warp_size * column_warps) {
      A sum = 0;
      for (int warp = 0; warp < column_warps; ++warp) sum += sums[warp][j];
      if (first_column + j < args.cols) target[chunk * args.cols + first_column + j] = sum;
    }
    __syncthreads();
  };
  A* partial = static_cast<A*>(args.workspace);
  write_sums(dweight, partial);
  if constexpr (centered) write_sums(dbias, partial + ceil_div(args.rows, chunk_rows) * args.cols);
}

// out[j] = sum of partial[c, j] over the chunks, a warp's width of columns to a block.
template <class T>
__global__ void __launch_bounds__(warp_size* column_warps)
    sum_chunks(T* out, const accumulate_t<T>* partial, int64_t chunks, int64_t cols) {
  using A = accumulate_t<T>;
  const int64_t column = int64_t(blockIdx.x) * warp_size + threadIdx.x;
  A sum = 0;
#pragma unroll 4
  for (int64_t chunk = threadIdx.y; chunk < chunks; chunk += column_warps) {
    if (column < cols) sum += partial[chunk * cols + column];
  }
  __shared__ A sums[column_warps][warp_size];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= cols) return;
  for (int warp = 1; warp < column_warps; ++warp) sum += sums[warp][threadIdx.x];
  out[column] = static_cast<T>(sum);
}

template <bool centered>
void forward(const char* operation, const NormArgs& args, const Stream& stream) {
  dispatch_floating(args.dtype, operation, [&]<class T>() {
    launch_rows(operation, normalize_rows<T, centered>, args.rows, row_block(args.cols, row_pack<T>), stream, args);
  });
}

template <class T, bool centered>
void parameter_gradients(const char* operation, const NormGradArgs& args, const Stream& stream) {
  using A = accumulate_t<T>;
  const int64_t chunk_rows = rows_per_chunk(args.rows), chunks = chunks_of(args.rows);
  const int64_t blocks = ceil_div(args.cols, columns_per_block<T>) * chunks;
  const dim3 block(warp_size, column_warps);
  const bool packed = args.cols % row_pack<T> == 0 && strobe::cuda::aligned_to(16, args.x, args.dy);
  launch(operation, packed ? sum_parameter_gradients<T, centered, true> : sum_parameter_gradients<T, centered, false>,
         dim3(static_cast<unsigned>(blocks)), block, 0, stream, args, chunk_rows);
  const A* partial = static_cast<const A*>(args.workspace);
  const dim3 grid(static_cast<unsigned>(ceil_div(args.cols, warp_size)));
  if (args.dweight != nullptr) {
    launch(operation, sum_chunks<T>, grid, block, 0, stream, static_cast<T*>(args.dweight), partial, chunks, args.cols);
  }
  if (centered && args.dbias != nullptr) {
    launch(operation, sum_chunks<T>, grid, block, 0, stream, static_cast<T*>(args.dbias), partial + chunks * args.cols,
           chunks, args.cols);
  }
}

}  // namespace

size_t norm_backward_workspace(const NormGradArgs& args, Device) {
  if (args.dweight == nullptr && args.dbias == nullptr) return 0;
  return static_cast<size_t>(2 * chunks_of(args.rows) * args.cols) * size_of(accumulate_dtype(args.dtype));
}

namespace {

template <bool centered>
void backward(const char* operation, const NormGradArgs& args, const Stream& stream) {
  const size_t needed = cuda::norm_backward_workspace(args, stream.device);
  STROBE_CHECK(args.workspace_bytes >= needed, operation, ": workspace of ", args.workspace_bytes,
               " bytes given, expected ", needed);
  dispatch_floating(args.dtype, operation, [&]<class T>() {
    if (args.dx != nullptr) {
      launch_rows(operation, normalize_rows_backward<T, centered>, args.rows, row_block(args.cols, row_pack<T>), stream,
                  args);
    }
    if (args.dweight != nullptr || args.dbias != nullptr) parameter_gradients<T, centered>(operation, args, stream);
  });
}

}  // namespace

void layer_norm_forward(const NormArgs& args, const Stream& stream) { forward<true>("layer_norm", args, stream); }

void layer_norm_backward(const NormGradArgs& args, const Stream& stream) { backward<true>("layer_norm", args, stream); }

void rms_norm_forward(const NormArgs& args, const Stream& stream) { forward<false>("rms_norm", args, stream); }

void rms_norm_backward(const NormGradArgs& args, const Stream& stream) { backward<false>("rms_norm", args, stream); }

}  // namespace strobe::kernels::cuda
