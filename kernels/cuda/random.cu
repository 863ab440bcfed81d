// Random tensors and dropout on CUDA.
#include "strobe/kernels/random.h"

#include <cmath>
#include <numbers>

#include "strobe/kernels/cuda/elementwise.cuh"
#include "strobe/kernels/philox.h"

namespace strobe::kernels::cuda {
namespace {

using namespace strobe::cuda;

constexpr int threads = 256;

struct Uniform {
  double low;
  double high;
  __device__ void operator()(double u, double v, double (&pair)[2]) const {
    pair[0] = low + (high - low) * u;
    pair[1] = low + (high - low) * v;
  }
};

struct Normal {
  double mean;
  double std;
  __device__ void operator()(double u, double v, double (&pair)[2]) const {
    const double radius = std * ::sqrt(-2 * ::log(1 - u));
    const double angle = 2 * std::numbers::pi * v;
    pair[0] = mean + radius * ::cos(angle);
    pair[1] = mean + radius * ::sin(angle);
  }
};

// out[2k] and out[2k + 1] from the two uniform numbers of Philox call k.
template <class T, class F>
__global__ void __launch_bounds__(threads) fill_pairs(T* out, int64_t size, uint64_t seed, uint64_t offset, F f) {
  using A = accumulate_t<T>;
  const int64_t step = int64_t{gridDim.x} * threads;
  for (int64_t k = int64_t{blockIdx.x} * threads + threadIdx.x; 2 * k < size; k += step) {
    const PhiloxCounter words = philox_at(seed, offset, static_cast<uint64_t>(k));
    double pair[2];
    f(uniform_double(words[0], words[1]), uniform_double(words[2], words[3]), pair);
    out[2 * k] = T(static_cast<A>(pair[0]));
    if (2 * k + 1 < size) out[2 * k + 1] = T(static_cast<A>(pair[1]));
  }
}

template <class Args, class F>
void fill_by(const char* name, const Args& args, const Stream& stream, F f) {
  dispatch_floating(args.dtype, name, [&]<class T>() {
    launch(name, fill_pairs<T, F>, grid_size(args.size, 2 * threads), threads, 0, stream, static_cast<T*>(args.out),
           args.size, args.seed, args.offset, f);
  });
}

// A thread for the four elements of a Philox call.
template <class T>
__global__ void __launch_bounds__(threads) drop(T* y, const T* x, int64_t size, bool packed, uint32_t threshold,
                                                accumulate_t<T> scale, uint64_t seed, uint64_t offset) {
  using A = accumulate_t<T>;
  constexpr int width = 16 / static_cast<int>(sizeof(T)) < 4 ? 16 / static_cast<int>(sizeof(T)) : 4;
  const int64_t step = int64_t{gridDim.x} * threads;
  for (int64_t call = int64_t{blockIdx.x} * threads + threadIdx.x; 4 * call < size; call += step) {
    const PhiloxCounter words = philox_at(seed, offset, static_cast<uint64_t>(call));
    const auto kept = [&](T value, size_t word) { return T(words[word] >= threshold ? A(value) * scale : A(0)); };
    const int64_t first = 4 * call;
    if (packed && first + 4 <= size) {
#pragma unroll
      for (int part = 0; part < 4; part += width) {
        Pack<T, width> pack = load_pack<T, width>(x + first + part);
#pragma unroll
        for (int j = 0; j < width; ++j) pack[j] = kept(pack[j], static_cast<size_t>(part + j));
        store_pack<T, width>(y + first + part, pack);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (first + j < size) y[first + j] = kept(x[first + j], static_cast<size_t>(j));
      }
    }
  }
}

}  // namespace

void uniform(const UniformArgs& args, const Stream& stream) {
  fill_by("uniform", args, stream, Uniform{args.low, args.high});
}

void normal(const NormalArgs& args, const Stream& stream) {
  fill_by("normal", args, stream, Normal{args.mean, args.std});
}

void dropout(const DropoutArgs& args, const Stream& stream) {
  dispatch_floating(args.dtype, "dropout", [&]<class T>() {
    T* const y = static_cast<T*>(args.y);
    const T* const x = static_cast<const T*>(args.x);
    const uint32_t threshold = static_cast<uint32_t>(std::fmin(std::round(args.p * 0x1p32), 0x1p32 - 1));
    launch("dropout", drop<T>, grid_size(args.size, 4 * threads), threads, 0, stream, y, x, args.size,
           aligned_to(16, y, x), threshold, static_cast<accumulate_t<T>>(1 / (1 - args.p)), args.seed, args.offset);
  });
}

}  // namespace strobe::kernels::cuda
