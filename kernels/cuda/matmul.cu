// Batched matrix product on the GPU: cuBLASLt for what it can express, a tiled kernel of our own for everything else.
#include "strobe/kernels/matmul.h"

#include <algorithm>
#include <array>

#include "strobe/kernels/cuda/cuda.h"
#include "strobe/kernels/cuda/matmul_lt.h"

namespace strobe::kernels::cuda {
namespace {

using strobe::cuda::ceil_div;
using strobe::cuda::cuda_stream;
using strobe::cuda::grid_size;
using strobe::cuda::launch;

bool is_banded(const MatmulArgs& args) { return args.band_lower > 1 - args.m || args.band_upper < args.k - 1; }

STROBE_HD int64_t num_batches(const MatmulArgs& args) {
  int64_t batches = 1;
  for (const MatmulBatch& batch : args.batch) batches *= batch.size;
  return batches;
}

// Makes one batch dimension of two that one stride walks through, so that cuBLASLt needs fewer calls.
MatmulArgs merge_batches(MatmulArgs args) {
  for (MatmulBatch& inner : args.batch) {
    for (MatmulBatch& outer : args.batch) {
      if (&inner == &outer || inner.size == 1 || outer.size == 1) continue;
      if (outer.a_stride != inner.a_stride * inner.size || outer.b_stride != inner.b_stride * inner.size ||
          outer.out_stride != inner.out_stride * inner.size) {
        continue;
      }
      inner.size *= outer.size;
      outer = {};
    }
  }
  return args;
}

// The operands of product number `index`.
template <class T, class Out>
struct Operands {
  const T* a;
  const T* b;
  Out* out;

  __device__ Operands(const MatmulArgs& args, int64_t index)
      : a(static_cast<const T*>(args.a)), b(static_cast<const T*>(args.b)), out(static_cast<Out*>(args.out)) {
    for (const MatmulBatch& batch : args.batch) {
      if (batch.size == 1) continue;
      const int64_t i = index % batch.size;
      index /= batch.size;
      a += i * batch.a_stride;
      b += i * batch.b_stride;
      out += i * batch.out_stride;
    }
  }
};

constexpr int tile = 64;        // rows and columns of out that a block computes
constexpr int tile_depth = 16;  // terms of a sum that it holds at a time
constexpr int tile_threads = 256;
constexpr int per_thread = 4;  // rows, and columns, of a thread

// Any strides. Thread t computes rows t / 16 * 4 + r and columns t % 16 + 16 c of its block's tile.
template <class T, class Out>
__global__ void __launch_bounds__(tile_threads) multiply_strided(const MatmulArgs args) {
  using A = accumulate_t<T>;
  __shared__ A a_tile[tile_depth][tile + 1];
  __shared__ A b_tile[tile_depth][tile + 1];
  const int thread = static_cast<int>(threadIdx.x);
  const int first_row = thread / 16 * per_thread, first_column = thread % 16;
  const int64_t row_tiles = ceil_div(args.m, tile), column_tiles = ceil_div(args.n, tile);
  const int64_t tiles = num_batches(args) * row_tiles * column_tiles;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const Operands<T, Out> operands(args, index / (row_tiles * column_tiles));
    const int64_t row = index / column_tiles % row_tiles * tile, column = index % column_tiles * tile;
    // The band of row i, as terms: i + band_lower <= p <= i + band_upper.
    const int64_t begin = std::max<int64_t>(0, row + args.band_lower);
    const int64_t end = std::min<int64_t>(args.k, row + tile + args.band_upper);
    A sums[per_thread][per_thread] = {};
    for (int64_t first = begin; first < end; first += tile_depth) {
      for (int e = thread; e < tile * tile_depth; e += tile_threads) {
        // Neighbouring threads read neighbouring addresses, whichever axis is contiguous.
        const int i = args.a_column_stride == 1 ? e / tile_depth : e % tile;
        const int p = args.a_column_stride == 1 ? e % tile_depth : e / tile;
        const bool inside = row + i < args.m && first + p < end;
        a_tile[p][i] =
            inside ? static_cast<A>(operands.a[(row + i) * args.a_row_stride + (first + p) * args.a_column_stride])
                   : A(0);
        const int j = args.b_row_stride == 1 ? e / tile_depth : e % tile;
        const int q = args.b_row_stride == 1 ? e % tile_depth : e / tile;
        b_tile[q][j] =
            column + j < args.n && first + q < end
                ? static_cast<A>(operands.b[(first + q) * args.b_row_stride + (column + j) * args.b_column_stride])
                : A(0);
      }
      __syncthreads();
      for (int p = 0; p < tile_depth; ++p) {
        for (int r = 0; r < per_thread; ++r) {
          const int64_t distance = first + p - (row + first_row + r);
          if (distance < args.band_lower || distance > args.band_upper) continue;
          for (int c = 0; c < per_thread; ++c)
            sums[r][c] += a_tile[p][first_row + r] * b_tile[p][first_column + 16 * c];
        }
      }
      __syncthreads();
    }
    for (int r = 0; r < per_thread; ++r) {
      for (int c = 0; c < per_thread; ++c) {
        const int64_t i = row + first_row + r, j = column + first_column + 16 * c;
        if (i >= args.m || j >= args.n) continue;
        Out& out = operands.out[i * args.out_row_stride + j];
        A sum = sums[r][c];
        if (args.bias != nullptr) sum += static_cast<A>(static_cast<const T*>(args.bias)[j]);
        if (args.accumulate) sum += static_cast<A>(out);
        out = static_cast<Out>(sum);
      }
    }
  }
}

// In a banded product a holds zeros outside of the band, which hide every finite element of b, but 0 * inf and 0 * NaN
// are NaN. So cuBLASLt multiplies a copy of b without them, and their terms within the band are added afterwards.
constexpr int64_t copy_rows = 64;  // of b for each block
const dim3 copy_block(32, 8);

// copy (batches, k, n) = b with 0 for what is not finite, which also sets `found`.
template <class T>
__global__ void copy_finite(const MatmulArgs args, T* copy, int* found) {
  using A = accumulate_t<T>;
  const int64_t parts = ceil_div(args.k, copy_rows);
  const int64_t blocks = num_batches(args) * parts;
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const T* b = Operands<T, T>(args, block / parts).b;
    T* target = copy + block / parts * args.k * args.n;
    const int64_t begin = block % parts * copy_rows;
    const int64_t end = std::min(args.k, begin + copy_rows);
    for (int64_t p = begin + threadIdx.y; p < end; p += blockDim.y) {
      for (int64_t j = threadIdx.x; j < args.n; j += blockDim.x) {
        const T value = b[p * args.b_row_stride + j * args.b_column_stride];
        const bool finite = isfinite(static_cast<A>(value));
        target[p * args.n + j] = finite ? value : static_cast<T>(A(0));
        if (!finite) *found = 1;
      }
    }
  }
}

// Adds to out the terms of its sums whose element of b is not finite, if one was found.
template <class T, class Out>
__global__ void add_infinite(const MatmulArgs args, const int* found) {
  if (*found == 0) return;
  using A = accumulate_t<T>;
  const int64_t rows = num_batches(args) * args.m;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const Operands<T, Out> operands(args, row / args.m);
    const int64_t i = row % args.m;
    const int64_t begin = std::max<int64_t>(0, i + args.band_lower);
    const int64_t end = std::min<int64_t>(args.k, i + args.band_upper + 1);
    for (int64_t j = threadIdx.x; j < args.n; j += blockDim.x) {
      A sum = 0;
      for (int64_t p = begin; p < end; ++p) {
        const A value = static_cast<A>(operands.b[p * args.b_row_stride + j * args.b_column_stride]);
        if (!isfinite(value))
          sum += static_cast<A>(operands.a[i * args.a_row_stride + p * args.a_column_stride]) * value;
      }
      Out& out = operands.out[i * args.out_row_stride + j];
      if (sum != A(0)) out = static_cast<Out>(static_cast<A>(out) + sum);
    }
  }
}

constexpr size_t workspace_alignment = 256;  // which cuBLASLt asks for
size_t round_up(size_t bytes) { return (bytes + workspace_alignment - 1) / workspace_alignment * workspace_alignment; }

// The product as cuBLASLt gets it, and where in the workspace its parts lie.
struct Plan {
  MatmulArgs args;              // with the copies in place of b and bias
  bool epilogue_apart = false;  // as a pass behind the product, which plan.args are then without
  std::optional<LtPlan> lt;     // nothing: the kernel of our own
  bool copies_bias = false;     // which cuBLASLt wants aligned
  size_t found_offset = 0;      // of the flag that add_infinite reads, behind the copy of b
  size_t bias_offset = 0;
  size_t lt_offset = 0;
  size_t workspace_bytes = 0;
};

bool is_empty(const MatmulArgs& args) { return args.m == 0 || args.n == 0 || num_batches(args) == 0; }

// workspace: aligned, or null when only its size is asked for.
Plan make_plan(const MatmulArgs& args, std::byte* workspace, Device device) {
  Plan plan{.args = args, .lt = std::nullopt};
  if (is_empty(args) || args.k == 0) return plan;
  size_t used = 0;
  if (is_banded(args)) {
    plan.args.b = workspace;
    plan.args.b_row_stride = args.n;
    plan.args.b_column_stride = 1;
    int64_t batch_stride = args.k * args.n;
    for (MatmulBatch& batch : plan.args.batch) {
      batch.b_stride = batch_stride;
      batch_stride *= batch.size;
    }
    plan.found_offset = round_up(static_cast<size_t>(batch_stride) * size_of(args.dtype));
    used = plan.found_offset + workspace_alignment;
  }
  plan.copies_bias = args.bias != nullptr && !strobe::cuda::aligned_to(16, args.bias);
  if (plan.copies_bias) {
    plan.bias_offset = used;
    plan.args.bias = workspace == nullptr ? args.bias : workspace + used;
    used += round_up(static_cast<size_t>(args.n) * size_of(args.dtype));
  }
  plan.lt_offset = used;
  plan.args = merge_batches(plan.args);
  plan.lt = plan_lt(plan.args, device);
  if (!plan.lt && args.epilogue != MatmulEpilogue::none) {
    plan.epilogue_apart = true;
    plan.args = without_epilogue(plan.args);
    plan.lt = plan_lt(plan.args, device);
  }
  if (!plan.lt) return plan;
  used += plan.lt->workspace_bytes;
  if (used > 0) plan.workspace_bytes = used + workspace_alignment;
  return plan;
}

template <class T, class Out>
void multiply(const MatmulArgs& args, const Stream& stream) {
  std::byte* const workspace = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(args.workspace)));
  const Plan plan = make_plan(args, workspace, stream.device);
  STROBE_CHECK(args.workspace_bytes >= plan.workspace_bytes, "matmul: workspace of ", args.workspace_bytes,
               " bytes given, expected ", plan.workspace_bytes);
  const strobe::cuda::ActiveDevice active(stream.device);
  int* const found = reinterpret_cast<int*>(workspace + plan.found_offset);
  if (plan.lt && is_banded(args)) {
    strobe::cuda::check_cuda(cudaMemsetAsync(found, 0, sizeof(*found), cuda_stream(stream)), "matmul");
    const int64_t copies = num_batches(args) * ceil_div(args.k, copy_rows);
    launch("matmul", copy_finite<T>, dim3(grid_size(copies, 1)), copy_block, 0, stream, args,
           reinterpret_cast<T*>(workspace), found);
  }
  if (plan.lt && plan.copies_bias) {
    strobe::cuda::check_cuda(
        cudaMemcpyAsync(workspace + plan.bias_offset, args.bias, static_cast<size_t>(args.n) * sizeof(T),
                        cudaMemcpyDeviceToDevice, cuda_stream(stream)),
        "matmul");
  }
  bool epilogue_apart = plan.epilogue_apart;
  if (!plan.lt || !run_lt(*plan.lt, plan.args, workspace + plan.lt_offset, stream)) {
    const int64_t tiles = num_batches(args) * ceil_div(args.m, tile) * ceil_div(args.n, tile);
    launch("matmul", multiply_strided<T, Out>, dim3(grid_size(tiles, 1)), dim3(tile_threads), 0, stream,
           without_epilogue(args));
    epilogue_apart = true;
  } else if (is_banded(args)) {
    const int64_t most = 4 * strobe::cuda::device_properties(stream.device).multiprocessors;
    const int64_t rows = std::min(most, num_batches(args) * args.m);
    launch("matmul", add_infinite<T, Out>, dim3(grid_size(rows, 1)), dim3(tile_threads), 0, stream, args, found);
  }
  if (epilogue_apart) apply_epilogue(args, stream);
}

// The rows from `first` on of a matrix in memory.
const void* shifted(const void* data, int64_t first, int64_t row_stride, DType dtype) {
  if (data == nullptr) return nullptr;
  return static_cast<const std::byte*>(data) + first * row_stride * static_cast<int64_t>(size_of(dtype));
}

// cuBLASLt's fast kernels for 16 bits want the extents of matrices along their contiguous axes to be multiples of 16
// bytes; others take up to seven times as long. So a large product is cut in two, to be computed one after the other,
// where only the few rows, columns or terms behind the last such multiple are in the way.
std::optional<std::array<MatmulArgs, 2>> cut(const MatmulArgs& args) {
  constexpr int64_t unit = 8, shortest = 1024;
  if (size_of(args.dtype) != 2 || args.epilogue != MatmulEpilogue::none || is_banded(args) || num_batches(args) != 1) {
    return std::nullopt;
  }
  const auto is_odd = [](int64_t extent, int64_t next_stride) {
    return extent > shortest && extent % unit != 0 && next_stride % unit == 0;
  };
  MatmulArgs whole = args, rest = args;
  if (is_odd(args.n, args.out_row_stride)) {
    rest.n = args.n % unit;
    whole.n -= rest.n;
    rest.b = shifted(args.b, whole.n, args.b_column_stride, args.dtype);
    rest.bias = shifted(args.bias, whole.n, 1, args.dtype);
    rest.out = const_cast<void*>(shifted(args.out, whole.n, 1, args.out_dtype));
  } else if (args.a_row_stride == 1 && is_odd(args.m, args.a_column_stride)) {
    rest.m = args.m % unit;
    whole.m -= rest.m;
    rest.a = shifted(args.a, whole.m, 1, args.dtype);
    rest.out = const_cast<void*>(shifted(args.out, whole.m, args.out_row_stride, args.out_dtype));
  } else if ((args.a_column_stride == 1 && is_odd(args.k, args.a_row_stride)) ||
             (args.b_row_stride == 1 && is_odd(args.k, args.b_column_stride))) {
    rest.k = args.k % unit;
    whole.k -= rest.k;
    rest.a = shifted(args.a, whole.k, args.a_column_stride, args.dtype);
    rest.b = shifted(args.b, whole.k, args.b_row_stride, args.dtype);
    rest.bias = nullptr;
    whole.accumulate = true;
    return std::array{rest, whole};  // the few terms first: their sum is rounded to out's dtype, not that of the many
  } else {
    return std::nullopt;
  }
  return std::array{whole, rest};
}

}  // namespace

size_t matmul_workspace(const MatmulArgs& args, Device device) {
  if (const auto parts = cut(args)) {
    return std::max(cuda::matmul_workspace((*parts)[0], device), cuda::matmul_workspace((*parts)[1], device));
  }
  return make_plan(args, nullptr, device).workspace_bytes;
}

void matmul(const MatmulArgs& args, const Stream& stream) {
  if (const auto parts = cut(args)) {
    for (const MatmulArgs& part : *parts) cuda::matmul(part, stream);
    return;
  }
  dispatch_floating(args.dtype, "matmul", [&]<class T>() {
    using A = accumulate_t<T>;
    STROBE_CHECK(args.out_dtype == args.dtype || args.out_dtype == dtype_of<A>(), "matmul: out_dtype ", args.out_dtype,
                 " given, expected ", args.dtype, " or ", dtype_of<A>());
    if (is_empty(args)) return;
    args.out_dtype == args.dtype ? multiply<T, T>(args, stream) : multiply<T, A>(args, stream);
  });
}

}  // namespace strobe::kernels::cuda
