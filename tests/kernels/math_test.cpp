// The elementary functions of the kernels against the standard library in double precision.
#include "strobe/kernels/math.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>

using namespace strobe;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

// Largest error in units in the last place over every 97th float whose magnitude lies in [low, high], both signs.
template <class F, class Reference>
double largest_error_ulp(float low, float high, F&& f, Reference&& reference) {
  double largest = 0;
  for (uint32_t bits = std::bit_cast<uint32_t>(low); bits <= std::bit_cast<uint32_t>(high); bits += 97) {
    for (const float x : {std::bit_cast<float>(bits), -std::bit_cast<float>(bits)}) {
      const double expected = reference(static_cast<double>(x));
      const float rounded = static_cast<float>(expected);
      if (!std::isnormal(rounded)) continue;
      const double ulp = std::ldexp(1.0, std::ilogb(rounded) - 23);
      largest = std::max(largest, std::fabs(static_cast<double>(f(x)) - expected) / ulp);
    }
  }
  return largest;
}

}  // namespace

TEST_CASE("exp_: within 2 ulp of double over the whole float range") {
  CHECK(largest_error_ulp(
            1e-10f, 88.72f, [](float x) { return exp_(std::max(x, -86.9f)); },
            [](double x) { return std::exp(std::max(x, static_cast<double>(-86.9f))); }) <= 2.0);
}

TEST_CASE("exp_: limits") {
  CHECK(exp_(0.0f) == 1.0f);
  CHECK(exp_(infinity) == infinity);
  CHECK(exp_(-infinity) == 0.0f);
  CHECK(exp_(1000.0f) == infinity);
  CHECK(exp_(88.73f) == infinity);
  CHECK(std::isfinite(exp_(88.72f)));
  CHECK(exp_(-1000.0f) == 0.0f);
  CHECK(exp_(-86.89f) > 0.0f);
  CHECK(std::isnan(exp_(nan_value)));
}

TEST_CASE("exp2_: within 2 ulp over its range, in float and in double") {
  CHECK(largest_error_ulp(
            1e-10f, 126.4f, [](float x) { return exp2_(x); }, [](double x) { return std::exp2(x); }) <= 2.0);
  double largest = 0;
  for (double x = -1021.0; x < 1022.9; x += 0.001237) {
    largest = std::max(largest, std::fabs(exp2_(x) / std::exp2(x) - 1.0));
  }
  CHECK(largest <= 2.0 * 0x1p-52);
  CHECK(exp2_(0.0f) == 1.0f);
  CHECK(exp2_(3.0f) == 8.0f);
  CHECK(exp2_(200.0f) == infinity);
  CHECK(exp2_(infinity) == infinity);
  CHECK(exp2_(-infinity) == 0.0f);
  CHECK(std::isnan(exp2_(nan_value)));
  CHECK(exp2_(-std::numeric_limits<double>::infinity()) == 0.0);
  CHECK(exp2_(2000.0) == std::numeric_limits<double>::infinity());
  CHECK(std::isnan(exp2_(std::numeric_limits<double>::quiet_NaN())));
}

TEST_CASE("tanh_: within 3 ulp of double, also near zero") {
  CHECK(largest_error_ulp(
            1e-30f, 100.0f, [](float x) { return tanh_(x); }, [](double x) { return std::tanh(x); }) <= 3.0);
  CHECK(tanh_(infinity) == 1.0f);
  CHECK(tanh_(-infinity) == -1.0f);
  CHECK(tanh_(0.0f) == 0.0f);
  CHECK(std::isnan(tanh_(nan_value)));
}

TEST_CASE("erf_: within 2 ulp of double, also near zero") {
  CHECK(largest_error_ulp(
            1e-30f, 1e3f, [](float x) { return erf_(x); }, [](double x) { return std::erf(x); }) <= 2.0);
  CHECK(erf_(infinity) == 1.0f);
  CHECK(erf_(-infinity) == -1.0f);
  CHECK(std::isnan(erf_(nan_value)));
}

TEST_CASE("sigmoid_: saturates without NaN") {
  CHECK(sigmoid_(0.0f) == 0.5f);
  CHECK(sigmoid_(-infinity) == 0.0f);
  CHECK(sigmoid_(infinity) == 1.0f);
  CHECK(sigmoid_(-200.0f) == 0.0f);
  CHECK(std::isnan(sigmoid_(nan_value)));
}

TEST_CASE("math in double is the standard library's") {
  for (const double x : {-30.0, -1.0, 0.0, 1e-9, 0.3, 2.0, 30.0}) {
    CHECK(exp_(x) == std::exp(x));
    CHECK(tanh_(x) == std::tanh(x));
    CHECK(erf_(x) == std::erf(x));
  }
}
