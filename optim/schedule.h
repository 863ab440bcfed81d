// Learning rates as functions of the step, counted from 0: plain structs to be called.
//
// All but the constant one warm up first: at step t < warmup_steps the rate is peak (t + 1) / (warmup_steps + 1), so
// that no step is wasted on 0 and step warmup_steps is the first at the peak. From total_steps on they stay at
// peak final_fraction. Settings are checked on every call.
#pragma once

#include <cmath>
#include <numbers>

#include "strobe/core/tensor.h"

namespace strobe {

namespace detail {

inline void check_schedule(const char* name, double peak, int64_t warmup_steps, int64_t total_steps,
                           double final_fraction, int64_t step) {
  STROBE_CHECK(std::isfinite(peak) && peak >= 0, name, ": peak ", peak, " given, expected a finite number, at least 0");
  STROBE_CHECK(warmup_steps >= 0, name, ": warmup_steps ", warmup_steps, " given, expected at least 0");
  STROBE_CHECK(total_steps >= warmup_steps, name, ": total_steps ", total_steps, " given, expected at least the ",
               warmup_steps, " warmup_steps");
  STROBE_CHECK(final_fraction >= 0 && final_fraction <= 1, name, ": final_fraction ", final_fraction,
               " given, expected a number in [0, 1]");
  STROBE_CHECK(step >= 0, name, ": step ", step, " given, expected at least 0");
}

inline double warmup(int64_t warmup_steps, int64_t step) {
  return static_cast<double>(step + 1) / static_cast<double>(warmup_steps + 1);
}

// How much of the way from step `begin` to step `end` lies behind `step`, in [0, 1].
inline double progress(int64_t begin, int64_t end, int64_t step) {
  if (step >= end) return 1;
  return step <= begin ? 0 : static_cast<double>(step - begin) / static_cast<double>(end - begin);
}

}  // namespace detail

struct ConstantSchedule {
  double peak;

  double operator()(int64_t step) const {
    detail::check_schedule("ConstantSchedule", peak, 0, 0, 1, step);
    return peak;
  }
};

// After the warm-up half a cosine wave (Loshchilov and Hutter 2017, "SGDR", without restarts):
// peak (final_fraction + (1 - final_fraction) (1 + cos(pi x)) / 2) for x from 0 to 1.
struct CosineSchedule {
  double peak;
  int64_t warmup_steps = 0;
  int64_t total_steps;
  double final_fraction = 0.1;

  double operator()(int64_t step) const {
    detail::check_schedule("CosineSchedule", peak, warmup_steps, total_steps, final_fraction, step);
    if (step < warmup_steps) return peak * detail::warmup(warmup_steps, step);
    const double x = detail::progress(warmup_steps, total_steps, step);
    return peak * (final_fraction + (1 - final_fraction) * (1 + std::cos(std::numbers::pi * x)) / 2);
  }
};

// After the warm-up a straight line from peak to peak final_fraction.
struct LinearSchedule {
  double peak;
  int64_t warmup_steps = 0;
  int64_t total_steps;
  double final_fraction = 0;

  double operator()(int64_t step) const {
    detail::check_schedule("LinearSchedule", peak, warmup_steps, total_steps, final_fraction, step);
    if (step < warmup_steps) return peak * detail::warmup(warmup_steps, step);
    return peak * (1 - (1 - final_fraction) * detail::progress(warmup_steps, total_steps, step));
  }
};

// After the warm-up the peak, and over the last decay_steps a straight line from peak to peak final_fraction
// (Hu et al. 2024, "MiniCPM").
struct WarmupStableDecaySchedule {
  double peak;
  int64_t warmup_steps = 0;
  int64_t total_steps;
  int64_t decay_steps;
  double final_fraction = 0;

  double operator()(int64_t step) const {
    detail::check_schedule("WarmupStableDecaySchedule", peak, warmup_steps, total_steps, final_fraction, step);
    STROBE_CHECK(decay_steps >= 0 && decay_steps <= total_steps - warmup_steps,
                 "WarmupStableDecaySchedule: decay_steps ", decay_steps, " given, expected 0 to the ",
                 total_steps - warmup_steps, " steps after the warm-up");
    if (step < warmup_steps) return peak * detail::warmup(warmup_steps, step);
    return peak * (1 - (1 - final_fraction) * detail::progress(total_steps - decay_steps, total_steps, step));
  }
};

}  // namespace strobe
