// SGD, AdamW and gradient clipping as loops over contiguous memory.
#include "strobe/kernels/optimizer.h"

#include <cmath>

#include "strobe/kernels/cpu/parallel.h"
#include "strobe/kernels/cpu/row.h"

namespace strobe::kernels::cpu {
namespace {

using strobe::cpu::parallel_for;

constexpr int64_t grain = 16384;
constexpr int64_t block = 1024;

// Calls update(i, value) for every element, the value being read from and written to the master copy where there is
// one; `parameter` gets the rounded result.
template <class T, class F>
void update_parameter(void* parameter, void* master, int64_t size, F&& update) {
  using A = accumulate_t<T>;
  T* const stored = static_cast<T*>(parameter);
  A* const precise = static_cast<A*>(master);
  parallel_for(size, grain, [&](int64_t begin, int64_t end) {
    if (precise == nullptr) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) stored[i] = static_cast<T>(update(i, static_cast<A>(stored[i])));
      return;
    }
    // Two loops, because g++ does not vectorize an update and the rounding as one; a block stays in cache between them.
    for (int64_t first = begin; first < end; first += block) {
      const int64_t last = std::min(first + block, end);
#pragma omp simd
      for (int64_t i = first; i < last; ++i) precise[i] = update(i, precise[i]);
      for (int64_t i = first; i < last; ++i) stored[i] = static_cast<T>(precise[i]);
    }
  });
}

template <class T>
void update(const SgdArgs& args, const SgdParameter& own) {
  using A = accumulate_t<T>;
  const T* const gradient = static_cast<const T*>(own.gradient);
  const A factor = static_cast<A>(args.grad_factor != nullptr ? *args.grad_factor : 1);
  A* const velocity = static_cast<A*>(own.velocity);
  const A rate = static_cast<A>(args.learning_rate), momentum = static_cast<A>(args.momentum);
  const A decay = static_cast<A>(own.weight_decay);
  if (velocity == nullptr) {
    update_parameter<T>(own.parameter, own.master, own.size, [=](int64_t i, A value) {
      return value - rate * (static_cast<A>(gradient[i]) * factor + decay * value);
    });
  } else {
    update_parameter<T>(own.parameter, own.master, own.size, [=](int64_t i, A value) {
      velocity[i] = momentum * velocity[i] + (static_cast<A>(gradient[i]) * factor + decay * value);
      return value - rate * velocity[i];
    });
  }
}

template <class T>
void update(const AdamWArgs& args, const AdamWParameter& own) {
  using A = accumulate_t<T>;
  const double step = static_cast<double>(own.step - (own.skipped != nullptr ? *own.skipped : 0));
  const double correction1 = 1 - std::pow(args.beta1, step);
  const double correction2 = 1 - std::pow(args.beta2, step);
  const A factor = static_cast<A>(args.grad_factor != nullptr ? *args.grad_factor : 1);
  const T* const gradient = static_cast<const T*>(own.gradient);
  A* const exp_avg = static_cast<A*>(own.exp_avg);
  A* const exp_avg_sq = static_cast<A*>(own.exp_avg_sq);
  const A beta1 = static_cast<A>(args.beta1), rest1 = static_cast<A>(1 - args.beta1);
  const A beta2 = static_cast<A>(args.beta2), rest2 = static_cast<A>(1 - args.beta2);
  const A rate = static_cast<A>(args.learning_rate / correction1);
  const A root_scale = static_cast<A>(1 / std::sqrt(correction2));
  const A eps = static_cast<A>(args.eps);
  const A decay = static_cast<A>(args.learning_rate * own.weight_decay);
  update_parameter<T>(own.parameter, own.master, own.size, [=](int64_t i, A value) {
    const A g = static_cast<A>(gradient[i]) * factor;
    const A mean = exp_avg[i] = beta1 * exp_avg[i] + rest1 * g;
    const A square = exp_avg_sq[i] = beta2 * exp_avg_sq[i] + rest2 * (g * g);
    return value - decay * value - rate * mean / (std::sqrt(square) * root_scale + eps);
  });
}

template <class Args>
bool is_left_out(const Args& args) {
  return args.grad_factor != nullptr && !std::isfinite(*args.grad_factor);
}

// update<T> for each parameter of a list.
template <class Args>
void update_all(const char* name, const Args& args) {
  for (int64_t p = 0; p < args.count; ++p) {
    dispatch_floating(args.parameters[p].dtype, name, [&]<class T>() { update<T>(args, args.parameters[p]); });
  }
}

}  // namespace

void sgd_step(const SgdArgs& args, const Stream&) {
  if (is_left_out(args)) return;
  update_all("sgd_step", args);
}

void adamw_step(const AdamWArgs& args, const Stream&) {
  if (is_left_out(args)) {
    for (int64_t p = 0; p < args.count; ++p) ++*args.parameters[p].skipped;
    return;
  }
  update_all("adamw_step", args);
}

void clip_factor(const ClipFactorArgs& args, const Stream&) {
  finish_clip_factor(args, strobe::cpu::sum_row<double>(args.count, [&](int64_t i) { return args.parts[i]; }));
}

void adapt_loss_scale(const LossScaleArgs& args, const Stream&) { finish_loss_scale(args); }

void sum_squares(const SumSquaresArgs& args, const Stream&) {
  double* sums = args.parts;
  for (int64_t a = 0; a < args.count; ++a) {
    const GradientArray& gradient = args.gradients[a];
    const int64_t parts = squares_parts(gradient.size);
    dispatch_floating(gradient.dtype, "sum_squares", [&]<class T>() {
      const T* const x = static_cast<const T*>(gradient.data);
      parallel_for(parts, 1, [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p) {
          const T* const first = x + p * squares_part;
          sums[p] =
              strobe::cpu::sum_row<double>(std::min(squares_part, gradient.size - p * squares_part), [=](int64_t i) {
                const double value = static_cast<double>(static_cast<accumulate_t<T>>(first[i]));
                return value * value;
              });
        }
      });
    });
    sums += parts;
  }
}

void scale(const ScaleArgs& args, const Stream&) {
  for (int64_t a = 0; a < args.count; ++a) {
    const GradientArray& gradient = args.gradients[a];
    dispatch_floating(gradient.dtype, "scale", [&]<class T>() {
      const accumulate_t<T> factor = static_cast<accumulate_t<T>>(args.factor);
      T* const x = static_cast<T*>(gradient.data);
      parallel_for(gradient.size, grain, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) x[i] = static_cast<T>(static_cast<accumulate_t<T>>(x[i]) * factor);
      });
    });
  }
}

}  // namespace strobe::kernels::cpu
