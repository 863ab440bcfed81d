// Random tensors and dropout on the CPU.
#include "strobe/kernels/random.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "strobe/kernels/cpu/parallel.h"
#include "strobe/kernels/cpu/philox_calls.h"
#include "strobe/kernels/philox.h"

namespace strobe::kernels::cpu {
namespace {

using strobe::cpu::parallel_for;

// out[2k] and out[2k + 1] from f(u, v) with the two uniform numbers of Philox call k.
template <class T, class Args, class F>
void fill_pairs(const Args& args, F&& f) {
  T* out = static_cast<T*>(args.out);
  parallel_for((args.size + 1) / 2, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      const PhiloxCounter words = philox_at(args.seed, args.offset, static_cast<uint64_t>(k));
      const std::array<double, 2> pair = f(uniform_double(words[0], words[1]), uniform_double(words[2], words[3]));
      out[2 * k] = T(static_cast<accumulate_t<T>>(pair[0]));
      if (2 * k + 1 < args.size) out[2 * k + 1] = T(static_cast<accumulate_t<T>>(pair[1]));
    }
  });
}

template <class T>
void dropout_elements(const DropoutArgs& args) {
  using A = accumulate_t<T>;
  constexpr int calls = 64;  // of Philox at a time
  constexpr int64_t block = 4 * calls;
  const T* x = static_cast<const T*>(args.x);
  T* y = static_cast<T*>(args.y);
  const uint32_t threshold = static_cast<uint32_t>(std::min(std::round(args.p * 0x1p32), 0x1p32 - 1));
  const A scale = static_cast<A>(1 / (1 - args.p));
  parallel_for((args.size + block - 1) / block, 16, [&](int64_t begin, int64_t end) {
    uint32_t words[4][calls];
    for (int64_t b = begin; b < end; ++b) {
      for (int i = 0; i < calls; ++i) {
        const PhiloxCounter counter = philox_counter(args.offset, static_cast<uint64_t>(b * calls + i));
        for (size_t w = 0; w < 4; ++w) words[w][i] = counter[w];
      }
      strobe::cpu::philox_calls(words, args.seed);
      uint32_t word_of[block];
      for (int i = 0; i < calls; ++i) {
        for (int w = 0; w < 4; ++w) word_of[4 * i + w] = words[w][i];
      }
      const T* const from = x + b * block;
      T* const to = y + b * block;
      const int64_t count = std::min(block, args.size - b * block);
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) {
        const A kept = A(from[i]) * scale;
        to[i] = T(word_of[i] >= threshold ? kept : A(0));
      }
    }
  });
}

}  // namespace

void uniform(const UniformArgs& args, const Stream&) {
  dispatch_floating(args.dtype, "uniform", [&]<class T>() {
    fill_pairs<T>(args, [&](double u, double v) -> std::array<double, 2> {
      return {args.low + (args.high - args.low) * u, args.low + (args.high - args.low) * v};
    });
  });
}

void normal(const NormalArgs& args, const Stream&) {
  dispatch_floating(args.dtype, "normal", [&]<class T>() {
    fill_pairs<T>(args, [&](double u, double v) -> std::array<double, 2> {
      const double radius = args.std * std::sqrt(-2 * std::log(1 - u));
      const double angle = 2 * std::numbers::pi * v;
      return {args.mean + radius * std::cos(angle), args.mean + radius * std::sin(angle)};
    });
  });
}

void dropout(const DropoutArgs& args, const Stream&) {
  dispatch_floating(args.dtype, "dropout", [&]<class T>() { dropout_elements<T>(args); });
}

}  // namespace strobe::kernels::cpu
