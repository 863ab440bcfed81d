// The random number generator against published vectors, and the distributions made from it.
#include "strobe/kernels/philox.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "strobe/kernels/cpu/philox_calls.h"
#include "strobe/kernels/device.h"
#include "strobe/kernels/random.h"

using namespace strobe;

namespace {

const Stream stream{};

template <class T>
std::vector<T> draw_normal(int64_t size, uint64_t offset = 0) {
  std::vector<T> x(static_cast<size_t>(size));
  kernels::normal(
      {.out = x.data(), .size = size, .dtype = dtype_of<T>(), .mean = 0, .std = 1, .seed = 17, .offset = offset},
      stream);
  return x;
}

double mean_of(const std::vector<double>& x, int power) {
  double total = 0;
  for (double value : x) total += std::pow(value, power);
  return total / static_cast<double>(x.size());
}

}  // namespace

TEST_CASE("philox4x32: known answers of Random123") {
  CHECK(philox4x32({0, 0, 0, 0}, 0) == PhiloxCounter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, 0xffffffffffffffff) ==
        PhiloxCounter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0x299f31d0a4093822) ==
        PhiloxCounter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
  CHECK(philox4x32<7>({0, 0, 0, 0}, 0) == PhiloxCounter{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48});
}

TEST_CASE("philox_calls: many calls at once are the same calls") {
  constexpr int calls = 20;  // whole vectors and a rest
  std::mt19937 random(5);
  std::array<PhiloxCounter, calls> counters;
  for (auto& counter : counters) std::generate(counter.begin(), counter.end(), std::ref(random));
  const auto check = [&]<int rounds>(std::integral_constant<int, rounds>, uint64_t key) {
    uint32_t words[4][calls];
    for (size_t i = 0; i < calls; ++i) {
      for (size_t w = 0; w < 4; ++w) words[w][i] = counters[i][w];
    }
    strobe::cpu::philox_calls<rounds>(words, key);
    for (size_t i = 0; i < calls; ++i) {
      CHECK(philox4x32<rounds>(counters[i], key) == PhiloxCounter{words[0][i], words[1][i], words[2][i], words[3][i]});
    }
  };
  check(std::integral_constant<int, 10>{}, 0x299f31d0a4093822);
  check(std::integral_constant<int, 7>{}, 0xffffffffffffffff);
}

TEST_CASE("uniform_double: covers [0, 1) and never reaches 1") {
  CHECK(uniform_double(0, 0) == 0.0);
  CHECK(uniform_double(0xffffffff, 0xffffffff) == 1.0 - 0x1p-53);
}

TEST_CASE("normal: the moments of the normal distribution") {
  const std::vector<double> x = draw_normal<double>(1000000);
  CHECK(std::abs(mean_of(x, 1)) < 0.005);
  CHECK(std::abs(mean_of(x, 2) - 1) < 0.01);
  CHECK(std::abs(mean_of(x, 3)) < 0.02);
  CHECK(std::abs(mean_of(x, 4) - 3) < 0.06);
  double neighbours = 0;
  for (size_t i = 1; i < x.size(); ++i) neighbours += x[i] * x[i - 1];
  CHECK(std::abs(neighbours / static_cast<double>(x.size())) < 0.005);
}

TEST_CASE("normal: the same bits for any number of threads, the same numbers in every dtype") {
  const int threads = num_threads();
  const std::vector<float> many = draw_normal<float>(100001);
  set_num_threads(1);
  const std::vector<float> one = draw_normal<float>(100001);
  set_num_threads(threads);
  CHECK(std::memcmp(many.data(), one.data(), many.size() * sizeof(float)) == 0);
  const std::vector<double> wide = draw_normal<double>(100001);
  bool equal = true;
  for (size_t i = 0; i < wide.size(); ++i) equal = equal && one[i] == static_cast<float>(wide[i]);
  CHECK(equal);
  CHECK(draw_normal<double>(4) == std::vector<double>(wide.begin(), wide.begin() + 4));
  CHECK(draw_normal<double>(4, 1) != draw_normal<double>(4));
}

TEST_CASE("uniform: stays in its range, evenly") {
  std::vector<double> x(100000);
  kernels::uniform({.out = x.data(), .size = 100000, .dtype = DType::f64, .low = -2, .high = 6, .seed = 3, .offset = 5},
                   stream);
  int counts[8] = {};
  for (double value : x) {
    REQUIRE(value >= -2);
    REQUIRE(value < 6);
    ++counts[static_cast<int>(value + 2)];
  }
  for (int count : counts) CHECK(std::abs(count - 12500) < 500);
}

TEST_CASE("dropout: keeps the fraction 1 - p, scaled, whatever was there") {
  const std::vector<float> x(100003, 2.0f);
  std::vector<float> y(x.size());
  const auto drop = [&](double p, const std::vector<float>& source) {
    kernels::dropout({.y = y.data(),
                      .x = source.data(),
                      .size = static_cast<int64_t>(source.size()),
                      .dtype = DType::f32,
                      .p = p,
                      .seed = 1,
                      .offset = 2},
                     stream);
  };
  for (double p : {0.0, 0.1, 0.5, 0.9}) {
    CAPTURE(p);
    drop(p, x);
    int kept = 0;
    for (float value : y) {
      if (value == 0) continue;
      ++kept;
      REQUIRE(value == doctest::Approx(2.0 / (1 - p)));
    }
    CHECK(std::abs(kept / 100003.0 - (1 - p)) < 0.006);
  }
  drop(0.5, std::vector<float>(x.size(), std::nanf("")));
  int zeros = 0;
  for (float value : y) zeros += value == 0;
  CHECK(std::abs(zeros / 100003.0 - 0.5) < 0.006);
}

TEST_CASE("dropout: the mask is a function of seed, offset and position only") {
  const std::vector<double> x(50000, 1.0);
  const auto drop = [&](int64_t size, uint64_t offset) {
    std::vector<double> y(static_cast<size_t>(size));
    kernels::dropout(
        {.y = y.data(), .x = x.data(), .size = size, .dtype = DType::f64, .p = 0.3, .seed = 9, .offset = offset},
        stream);
    return y;
  };
  const int threads = num_threads();
  const std::vector<double> many = drop(50000, 4);
  set_num_threads(1);
  const std::vector<double> one = drop(50000, 4);
  set_num_threads(threads);
  CHECK(many == one);
  CHECK(drop(50000, 5) != one);
  CHECK(drop(100, 4) == std::vector<double>(one.begin(), one.begin() + 100));
  for (int64_t i = 0; i < 100; ++i) {
    const uint32_t word = philox_at(9, 4, static_cast<uint64_t>(i / 4))[static_cast<size_t>(i % 4)];
    CHECK((one[static_cast<size_t>(i)] != 0) == (word >= std::round(0.3 * 0x1p32)));
  }
}

TEST_CASE_TEMPLATE("dropout: every size, in place, keeps what Philox says", T, double, float, bfloat16, float16) {
  for (const int64_t size : {0, 1, 3, 255, 256, 257, 1000, 4099}) {
    std::vector<T> x(static_cast<size_t>(size), T(3.0f));
    kernels::dropout(
        {.y = x.data(), .x = x.data(), .size = size, .dtype = dtype_of<T>(), .p = 0.25, .seed = 21, .offset = 6},
        stream);
    int64_t wrong = 0;
    for (int64_t i = 0; i < size; ++i) {
      const uint32_t word = philox_at(21, 6, static_cast<uint64_t>(i / 4))[static_cast<size_t>(i % 4)];
      wrong += static_cast<accumulate_t<T>>(x[static_cast<size_t>(i)]) != (word >= 0x40000000u ? 4 : 0);
    }
    CAPTURE(size);
    CHECK(wrong == 0);
  }
}
