// Rotary position embedding on CUDA.
#include "strobe/kernels/rope.h"

#include "strobe/kernels/cuda/packed.cuh"

namespace strobe::kernels::cuda {
namespace {

using namespace strobe::cuda;

constexpr int threads = 256;
constexpr int most_pairs = 128;  // whose cosines and sines a block holds at once

// Each block turns a share of the sequences and heads at one position, so that one evaluation of the angles serves
// many. A thread turns `width` neighbouring pairs at a time.
template <class T, int width>
__global__ void __launch_bounds__(threads) rotate(RopeArgs args) {
  using A = accumulate_t<T>;
  __shared__ A cosine[most_pairs];
  __shared__ A sine[most_pairs];
  const int64_t half = args.head_dim / 2;
  const int64_t vectors = args.batch * args.num_heads;
  for (int64_t s = blockIdx.x; s < args.seq_len; s += gridDim.x) {
    for (int64_t first = 0; first < half; first += most_pairs) {
      const int pairs = static_cast<int>(half - first < most_pairs ? half - first : most_pairs);
      __syncthreads();  // the angles before are no longer needed
      for (int i = static_cast<int>(threadIdx.x); i < pairs; i += threads) {
        const double exponent = -static_cast<double>(2 * (first + i)) / static_cast<double>(args.head_dim);
        const double angle = static_cast<double>(args.position_offset + s) * ::pow(args.base, exponent);
        cosine[i] = static_cast<A>(::cos(angle));
        sine[i] = static_cast<A>(args.inverse ? -::sin(angle) : ::sin(angle));
      }
      __syncthreads();
      const int packs = pairs / width;
      // Threads of a block are laid over vectors and packs once; from then on they only step from vector to vector.
      const int lanes = packs < threads ? packs : threads;
      const int vectors_at_a_time = threads / lanes;
      const int own = static_cast<int>(threadIdx.x) / lanes;
      if (own >= vectors_at_a_time) continue;
      const int64_t step = int64_t{gridDim.y} * vectors_at_a_time;
#pragma unroll 4
      for (int64_t vector = int64_t{blockIdx.y} * vectors_at_a_time + own; vector < vectors; vector += step) {
        const int64_t b = vectors <= 0xffffffff ? static_cast<uint32_t>(vector) / static_cast<uint32_t>(args.num_heads)
                                                : vector / args.num_heads;
        const int64_t head = vector - b * args.num_heads;
        const T* const x = static_cast<const T*>(args.x) + b * args.x_batch_stride + s * args.x_seq_stride +
                           head * args.x_head_stride + first;
        T* const y = static_cast<T*>(args.y) + ((b * args.seq_len + s) * args.num_heads + head) * args.head_dim + first;
        for (int i = static_cast<int>(threadIdx.x) % lanes * width; i < pairs; i += lanes * width) {
          const Values<A, width> low = load_values<A, width>(x + i), high = load_values<A, width>(x + i + half);
          Values<A, width> turned_low, turned_high;
#pragma unroll
          for (int j = 0; j < width; ++j) {
            turned_low[j] = low[j] * cosine[i + j] - high[j] * sine[i + j];
            turned_high[j] = high[j] * cosine[i + j] + low[j] * sine[i + j];
          }
          store_values(y + i, turned_low);
          store_values(y + i + half, turned_high);
        }
      }
    }
  }
}

}  // namespace

void rope(const RopeArgs& args, const Stream& stream) {
  dispatch_floating(args.dtype, "rope", [&]<class T>() {
    const int64_t half = args.head_dim / 2;
    if (args.batch * args.num_heads * half == 0) return;
    constexpr int64_t blocks_wanted = 1024;
    constexpr int width = 16 / sizeof(T);
    const int64_t most = ceil_div(args.batch * args.num_heads * half, 2 * threads);
    const int64_t shares = ceil_div(blocks_wanted, args.seq_len > 0 ? args.seq_len : 1);
    const dim3 grid(grid_size(args.seq_len, 1), static_cast<unsigned>(most < shares ? most : shares));
    const bool packed = half % width == 0 && args.x_batch_stride % width == 0 && args.x_seq_stride % width == 0 &&
                        args.x_head_stride % width == 0 &&
                        aligned_to(16, static_cast<const char*>(args.x), static_cast<const char*>(args.y));
    launch("rope", packed ? rotate<T, width> : rotate<T, 1>, grid, threads, 0, stream, args);
  });
}

}  // namespace strobe::kernels::cuda
