// Random tensors and dropout.
#include "strobe/kernels/random.h"

#include <cmath>

#include "strobe/core/autograd.h"
#include "strobe/core/ops.h"

namespace strobe {
namespace {

void check_floating(const char* name, DType dtype) {
  STROBE_CHECK(is_floating(dtype), name, ": dtype ", dtype, " given, expected f32, f64, bf16 or f16");
}

Tensor drop(const Tensor& x, double p, RandomState state) {
  const Tensor y = empty_like(x);
  kernels::dropout({.y = y.data(),
                    .x = x.data(),
                    .size = x.size(),
                    .dtype = x.dtype(),
                    .p = p,
                    .seed = state.seed,
                    .offset = state.offset},
                   x.stream());
  return y;
}

}  // namespace

Tensor normal(const Shape& shape, double mean, double std, DType dtype, Device device) {
  check_floating("normal", dtype);
  STROBE_CHECK(std >= 0, "normal: std ", std, " given, expected at least 0");
  const Tensor out = empty(shape, dtype, device);
  const RandomState state = next_random_state();
  kernels::normal({.out = out.data(),
                   .size = out.size(),
                   .dtype = dtype,
                   .mean = mean,
                   .std = std,
                   .seed = state.seed,
                   .offset = state.offset},
                  out.stream());
  return out;
}

Tensor uniform(const Shape& shape, double low, double high, DType dtype, Device device) {
  check_floating("uniform", dtype);
  STROBE_CHECK(low <= high && std::isfinite(high - low), "uniform: low ", low, " and high ", high,
               " given, expected low <= high, both finite");
  const Tensor out = empty(shape, dtype, device);
  const RandomState state = next_random_state();
  kernels::uniform({.out = out.data(),
                    .size = out.size(),
                    .dtype = dtype,
                    .low = low,
                    .high = high,
                    .seed = state.seed,
                    .offset = state.offset},
                   out.stream());
  return out;
}

Tensor dropout(const Tensor& given, double p) {
  require_floating("dropout", "x", given);
  STROBE_CHECK(p >= 0 && p < 1, "dropout: p ", p, " given, expected 0 <= p < 1");
  if (p == 0) return given;
  const Tensor x = contiguous(given);
  const RandomState state = next_random_state();
  return record("dropout", drop(x, p, state), {x},
                [p, state](const Tensor& dout) -> Grads { return {drop(contiguous(dout), p, state)}; });
}

}  // namespace strobe
