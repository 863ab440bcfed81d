// Rotary position embedding on the CPU.
#include "strobe/kernels/rope.h"

#include <algorithm>
#include <cmath>

#include "strobe/kernels/cpu/parallel.h"

namespace strobe::kernels::cpu {
namespace {

template <class T>
void rotate(const RopeArgs& args) {
  using A = accumulate_t<T>;
  constexpr int64_t block = 64;  // pairs whose cosines and sines are held at once
  const int64_t half = args.head_dim / 2;
  const int64_t work = std::max<int64_t>(args.batch * args.num_heads * args.head_dim, 1);
  // Over positions, so that one evaluation of the angles serves all sequences and heads.
  strobe::cpu::parallel_for(args.seq_len, std::max<int64_t>(8192 / work, 1), [&](int64_t begin, int64_t end) {
    A cosine[block];
    A sine[block];
    for (int64_t s = begin; s < end; ++s) {
      const double position = static_cast<double>(args.position_offset + s);
      for (int64_t first = 0; first < half; first += block) {
        const int64_t pairs = std::min(block, half - first);
        for (int64_t i = 0; i < pairs; ++i) {
          const double exponent = -static_cast<double>(2 * (first + i)) / static_cast<double>(args.head_dim);
          const double angle = position * std::pow(args.base, exponent);
          cosine[i] = static_cast<A>(std::cos(angle));
          sine[i] = static_cast<A>(args.inverse ? -std::sin(angle) : std::sin(angle));
        }
        for (int64_t b = 0; b < args.batch; ++b) {
          for (int64_t head = 0; head < args.num_heads; ++head) {
            const T* x = static_cast<const T*>(args.x) + b * args.x_batch_stride + s * args.x_seq_stride +
                         head * args.x_head_stride + first;
            T* y = static_cast<T*>(args.y) + ((b * args.seq_len + s) * args.num_heads + head) * args.head_dim + first;
            for (int64_t i = 0; i < pairs; ++i) {
              const A x1 = A(x[i]);
              const A x2 = A(x[i + half]);
              y[i] = T(x1 * cosine[i] - x2 * sine[i]);
              y[i + half] = T(x2 * cosine[i] + x1 * sine[i]);
            }
          }
        }
      }
    }
  });
}

}  // namespace

void rope(const RopeArgs& args, const Stream&) {
  dispatch_floating(args.dtype, "rope", [&]<class T>() { rotate<T>(args); });
}

}  // namespace strobe::kernels::cpu
