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

// Elements that a thread takes at a time: those of whole Philox calls, of which each decides for four, and of whole
// packs.
template <class T>
inline constexpr int unit = pack_width<T> < 4 ? 4 : pack_width<T>;
constexpr int units = 2;  // of a thread, so that enough bytes are under way

template <class T>
__global__ void __launch_bounds__(threads) drop(T* y, const T* x, int64_t size, bool packed, uint32_t threshold,
                                                accumulate_t<T> scale, const PhiloxKeys<> keys, uint64_t offset) {
  using A = accumulate_t<T>;
  const auto first = [](int u) { return ((int64_t{blockIdx.x} * units + u) * threads + threadIdx.x) * unit<T>; };
  const auto kept = [&](A value, uint32_t word) { return word >= threshold ? value * scale : A(0); };
  if (packed && first(units - 1) + unit<T> <= size) {
    Packed<T, unit<T>> loaded[units];
#pragma unroll
    for (int u = 0; u < units; ++u) loaded[u].load(x + first(u));
#pragma unroll
    for (int u = 0; u < units; ++u) {
      Values<A, unit<T>> values = loaded[u].template values<A>();
#pragma unroll
      for (int j = 0; j < unit<T>; j += 4) {
        const PhiloxCounter words = philox_at(keys, offset, static_cast<uint64_t>((first(u) + j) / 4));
#pragma unroll
        for (int k = 0; k < 4; ++k) values[j + k] = kept(values[j + k], words[static_cast<size_t>(k)]);
      }
      store_values(y + first(u), values);
    }
    return;
  }
  for (int u = 0; u < units; ++u) {
    for (int64_t i = first(u); i < first(u) + unit<T> && i < size; ++i) {
      const PhiloxCounter words = philox_at(keys, offset, static_cast<uint64_t>(i / 4));
      y[i] = T(kept(A(x[i]), words[static_cast<size_t>(i % 4)]));
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
    launch("dropout", drop<T>, grid_size(args.size, units * threads * unit<T>), threads, 0, stream, y, x, args.size,
           aligned_to(16, y, x), threshold, static_cast<accumulate_t<T>>(1 / (1 - args.p)), PhiloxKeys<>(args.seed),
           args.offset);
  });
}

}  // namespace strobe::kernels::cuda
