// Gradients of layer and RMS normalization on the GPU: rows for dx; for the parameters, sums over some of the rows and
// then over those sums, always in the same order.
#include "strobe/kernels/cuda/rows_in_shared.cuh"
#include "strobe/kernels/norm.h"

namespace strobe::kernels::cuda {
namespace {

using namespace strobe::cuda;

// How rows of whole packs are laid over the threads of a block: a warp or a part of one has a row, or all of the block.
template <class T>
struct Layout {
  static constexpr int width = row_pack<T>;
  static constexpr int most_packs = sizeof(T) == 2 ? 3 : 6;  // of a row that is a warp's, to a thread
  static constexpr int wide_packs = 2;                       // of a row that is a block's

  int packs = 0;  // to a thread; 0: rows cannot be kept
  bool wide = false;
  dim3 block;
  size_t bytes = 0;    // of shared memory, for two rows of each array
  int64_t chunks = 0;  // blocks, as many as run at the same time

  Layout(const NormGradArgs& args, Device device) {
    const int64_t lanes = args.cols / width;
    if (lanes * width != args.cols || lanes == 0 || lanes > max_row_threads * wide_packs ||
        !aligned_to(16, args.x, args.dy, args.dx, args.weight, args.dsum)) {
      return;
    }
    block = row_block(args.cols, width, most_packs);
    wide = block.x > warp_size;
    if (wide) block.x = static_cast<unsigned>(ceil_div(lanes, wide_packs * warp_size)) * warp_size;
    const int own = wide ? wide_packs : static_cast<int>(ceil_div(lanes, block.x));
    const int64_t threads = block.x * block.y;
    bytes = static_cast<size_t>(2 * (args.dsum != nullptr ? 3 : 2) * own * threads * 16);
    const DeviceProperties& properties = device_properties(device);
    const int64_t taken = static_cast<int64_t>(bytes) + 2048;  // with what the kernel and the system need
    if (taken > properties.shared_bytes_per_block) return;
    packs = own;
    const int64_t resident = std::min(resident_threads(packs, wide) / threads,
                                      std::max<int64_t>(properties.shared_bytes_per_multiprocessor / taken, 1));
    chunks = std::min(ceil_div(args.rows, block.y), resident * properties.multiprocessors);
  }
  // Whose registers a multiprocessor has room for when each keeps so many packs.
  static constexpr int64_t resident_threads(int packs, bool wide) {
    return wide ? max_row_threads : 512 / (44 + packs * (sizeof(T) == 2 ? 36 : 20)) * shared_row_threads;
  }
};

// All gradients in one pass over x and dy; the next row is on its way to shared memory while a row is differentiated. A
// thread adds up the parameters' gradients of its columns over the rows that its block visits; block b leaves the sums
// in row b of two (chunks, cols) arrays of A. lanes: of a row, 0 where it has the block. added: dsum is added to dx.
template <class T, bool centered, int packs, int lanes, bool added>
__global__ void __launch_bounds__(most_threads<lanes>,
                                  Layout<T>::resident_threads(packs, lanes == 0) / most_threads<lanes>)
    differentiate_rows(const NormGradArgs args) {
  using A = accumulate_t<T>;
  constexpr int n = row_pack<T>, arrays = added ? 3 : 2;
  const int cols = static_cast<int>(args.cols);
  const A share = A(1) / static_cast<A>(cols);
  const RowsInShared<T, 2 * arrays, lanes, packs> rows;  // those of a stage: x, dy, dsum
  Packed<T, n> weights[packs];
  Values<A, n> dweight[packs] = {}, dbias[packs] = {};
  Values<A, n> ones;
  for (int j = 0; j < n; ++j) ones[j] = 1;
#pragma unroll
  for (int k = 0; k < packs; ++k) {
    const int i = rows.position(k);
    weights[k] = Packed<T, n>::rounded(ones);
    if (args.weight != nullptr && i < cols) weights[k].load(static_cast<const T*>(args.weight) + i);
    // Behind the end of a row everything is 0.
    for (int array = 0; array < 2 * arrays && i >= cols; ++array) rows.at(array, k) = {};
  }
  const auto begin = [&](int stage, int64_t index) {
    if (index < args.rows) {
      const int64_t first = index * args.cols + rows.position(0);
#pragma unroll
      for (int k = 0; k < packs; ++k) {
        if (rows.position(k) >= cols) continue;
        const auto copy = [&](int array, const void* source) {
          copy_in_background(rows.at(stage * arrays + array, k),
                             static_cast<const T*>(source) + first + k * rows.step());
        };
        copy(0, args.x), copy(1, args.dy);
        if constexpr (added) copy(2, args.dsum);
      }
    }
    copy_async_commit();
  };
  const auto load_statistics = [&](int64_t index, A& mean, A& rstd) {
    mean = index < args.rows && centered ? static_cast<const A*>(args.mean)[index] : A(0);
    rstd = index < args.rows ? static_cast<const A*>(args.rstd)[index] : A(0);
  };
  // All threads of a block take as many turns, so that they meet in the sums.
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  int64_t index = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  A mean, rstd, next_mean, next_rstd;
  begin(0, index);
  load_statistics(index, mean, rstd);
  int stage = 0;
  for (int64_t first = int64_t{blockIdx.x} * blockDim.y; first < args.rows; first += step, index += step) {
    begin(1 - stage, index + step);
    load_statistics(index + step, next_mean, next_rstd);
    copy_async_wait<1>();
    const bool exists = index < args.rows;
    Values<A, n> g[packs], xhat[packs];
    A sum_g = 0, sum_g_xhat = 0;
#pragma unroll
    for (int k = 0; k < packs && exists; ++k) {
      const Values<A, n> x = rows.at(stage * arrays, k).template values<A>();
      const Values<A, n> dy = rows.at(stage * arrays + 1, k).template values<A>();
      weights[k].stay_packed();
      const Values<A, n> weight = weights[k].template values<A>();
      A part_g = 0, part_g_xhat = 0;
      for (int j = 0; j < n; ++j) {
        xhat[k][j] = (x[j] - mean) * rstd;
        g[k][j] = dy[j] * weight[j];
        dweight[k][j] += dy[j] * xhat[k][j], dbias[k][j] += dy[j];
        part_g += g[k][j], part_g_xhat += g[k][j] * xhat[k][j];
      }
      sum_g += part_g, sum_g_xhat += part_g_xhat;
    }
    if (args.dx != nullptr) {
      row_sums<lanes>(sum_g, sum_g_xhat, stage);
      // dx with the factors of xhat and 1 put together.
      const A of_xhat = -rstd * (sum_g_xhat * share), of_one = centered ? -rstd * (sum_g * share) : A(0);
      T* const dx = static_cast<T*>(args.dx) + index * args.cols + rows.position(0);
#pragma unroll
      for (int k = 0; k < packs; ++k) {
        if (!exists || rows.position(k) >= cols) continue;
        Values<A, n> result;
        for (int j = 0; j < n; ++j) result[j] = g[k][j] * rstd + (xhat[k][j] * of_xhat + of_one);
        if constexpr (added) {
          const Values<A, n> other = rows.at(stage * arrays + 2, k).template values<A>();
          for (int j = 0; j < n; ++j) result[j] += other[j];
        }
        store_values(dx + k * rows.step(), result);
      }
    }
    mean = next_mean, rstd = next_rstd, stage = 1 - stage;
  }
  if (args.dweight == nullptr && args.dbias == nullptr) return;
  // Rows that share a block leave one sum each, in the place of the rows; the block's is theirs in the order of
  // threadIdx.y.
  A* const sums = rows.template as<A>();
  const auto write = [&](const Values<A, n>(&own)[packs], A* target) {
    target += int64_t{blockIdx.x} * args.cols;
    if constexpr (lanes == 0) {
#pragma unroll
      for (int k = 0; k < packs; ++k) {
        for (int j = 0; j < n && rows.position(k) < cols; ++j) target[rows.position(k) + j] = own[k][j];
      }
    } else {
      constexpr int pitch = lanes * packs * n, sharing = most_threads<lanes> / lanes;
      __syncthreads();
#pragma unroll
      for (int k = 0; k < packs; ++k) {
        for (int j = 0; j < n; ++j) sums[static_cast<int>(threadIdx.y) * pitch + rows.position(k) + j] = own[k][j];
      }
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.y * lanes + threadIdx.x); i < cols; i += most_threads<lanes>) {
        A sum = 0;
        for (int y = 0; y < sharing; ++y) sum += sums[y * pitch + i];
        target[i] = sum;
      }
    }
  };
  copy_async_wait<0>();
  A* const partial = static_cast<A*>(args.workspace);
  write(dweight, partial);
  if constexpr (centered) write(dbias, partial + int64_t{gridDim.x} * args.cols);
}

// What the result needs of a row: g = dy * weight and xhat.
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

// dx of any rows.
template <class T, bool centered>
__global__ void __launch_bounds__(max_row_threads) differentiate_any_rows(const NormGradArgs args) {
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
constexpr int chunk_warps = 32;

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

template <class T, bool centered>
void launch_differentiate(const char* operation, const NormGradArgs& args, const Layout<T>& layout,
                          const Stream& stream) {
  const auto launch_with = [&]<int packs, int lanes>() {
    launch(operation,
           args.dsum != nullptr ? differentiate_rows<T, centered, packs, lanes, true>
                                : differentiate_rows<T, centered, packs, lanes, false>,
           dim3(static_cast<unsigned>(layout.chunks)), layout.block, layout.bytes, stream, args);
  };
  const auto with_lanes = [&]<int packs>() {
    if (layout.packs != packs || layout.wide) return;
    if (layout.block.x == 8) launch_with.template operator()<packs, 8>();
    if constexpr (packs > Layout<T>::most_packs / 2) {
      if (layout.block.x == 16) launch_with.template operator()<packs, 16>();
      if (layout.block.x == 32) launch_with.template operator()<packs, 32>();
    }
  };
  if (layout.wide) return launch_with.template operator()<Layout<T>::wide_packs, 0>();
  const auto with_packs = [&]<int... packs>(std::integer_sequence<int, packs...>) {
    (with_lanes.template operator()<packs + 1>(), ...);
  };
  with_packs(std::make_integer_sequence<int, Layout<T>::most_packs>());
}

template <bool centered>
void backward(const char* operation, const NormGradArgs& args, const Stream& stream) {
  const size_t needed = cuda::norm_backward_workspace(args, stream.device);
  STROBE_CHECK(args.workspace_bytes >= needed, operation, ": workspace of ", args.workspace_bytes,
               " bytes given, expected ", needed);
  dispatch_floating(args.dtype, operation, [&]<class T>() {
    const Layout<T> layout(args, stream.device);
    int64_t chunks = 0;
    if (layout.packs > 0) {
      chunks = layout.chunks;
      launch_differentiate<T, centered>(operation, args, layout, stream);
    } else {
      if (args.dx != nullptr) {
        launch_rows(operation, differentiate_any_rows<T, centered>, args.rows, row_block(args.cols, row_pack<T>),
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
    const Layout<T> layout(args, device);
    const int64_t chunks = layout.packs > 0 ? layout.chunks : ceil_div(args.rows, rows_per_chunk(args.rows));
    return static_cast<size_t>(2 * chunks * args.cols) * sizeof(accumulate_t<T>);
  });
}

void layer_norm_backward(const NormGradArgs& args, const Stream& stream) { backward<true>("layer_norm", args, stream); }

void rms_norm_backward(const NormGradArgs& args, const Stream& stream) { backward<false>("rms_norm", args, stream); }

}  // namespace strobe::kernels::cuda
