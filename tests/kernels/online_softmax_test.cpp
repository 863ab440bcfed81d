// The online softmax: any chunking, order and merge tree gives the direct form.
#include "strobe/kernels/online_softmax.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

using namespace strobe;

namespace {

// A part of one row together with its output: the weighted sum of values.
template <class T>
struct Part {
  OnlineSoftmax<T> softmax;
  T output = 0;

  void update(std::vector<T> scores, const std::vector<T>& values, T scale) {
    T factor;
    online_softmax_update<1>(&softmax, scores.data(), static_cast<int64_t>(scores.size()), 1, scale, &factor);
    output = output * factor + std::inner_product(scores.begin(), scores.end(), values.begin(), T(0));
  }
  void merge(const Part& other, T scale) {
    const auto factors = softmax.merge(other.softmax, scale);
    output = output * factors.mine + other.output * factors.other;
  }
};

// Splits a shuffled row into parts, takes each in by chunks, merges the parts in random pairs, and compares the log-sum
// and the output with the direct form. Returns the largest error.
template <class T>
double error_of_random_tree(std::mt19937_64& random) {
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  std::normal_distribution<double> normal;
  const size_t count = static_cast<size_t>(draw(1, 300));
  const double spread = std::pow(10.0, static_cast<double>(draw(-2, 2)));
  const T scale = static_cast<T>(std::pow(2.0, static_cast<double>(draw(-3, 1))));
  std::vector<T> scores(count), values(count);
  for (size_t j = 0; j < count; ++j) {
    scores[j] = static_cast<T>(spread * normal(random));
    values[j] = static_cast<T>(normal(random));
    if (draw(0, 9) == 0) scores[j] = -std::numeric_limits<T>::infinity();
  }
  scores[0] = static_cast<T>(normal(random));

  long double largest = -INFINITY, sum = 0, output = 0, magnitude = 0;
  for (size_t j = 0; j < count; ++j) largest = std::max(largest, static_cast<long double>(scores[j]) * scale);
  for (size_t j = 0; j < count; ++j) {
    const long double weight = std::exp(static_cast<long double>(scores[j]) * scale - largest);
    sum += weight;
    output += weight * values[j];
    magnitude += weight * std::abs(values[j]);
  }

  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  std::shuffle(order.begin(), order.end(), random);
  std::vector<Part<T>> parts(static_cast<size_t>(draw(1, 8)));
  for (size_t next = 0; next < count;) {
    const size_t end = std::min(count, next + static_cast<size_t>(draw(0, 40)));
    std::vector<T> chunk, chunk_values;
    for (; next < end; ++next) {
      chunk.push_back(scores[order[next]]);
      chunk_values.push_back(values[order[next]]);
    }
    parts[static_cast<size_t>(draw(0, std::ssize(parts) - 1))].update(chunk, chunk_values, scale);
  }
  while (parts.size() > 1) {
    std::shuffle(parts.begin(), parts.end(), random);
    const Part<T> last = parts.back();
    parts.pop_back();
    parts.front().merge(last, scale);
  }
  const Part<T>& row = parts.front();
  const long double lse = largest + std::log(sum);
  const double lse_error = static_cast<double>(std::abs(row.softmax.lse(scale) - lse) / (1 + std::abs(lse)));
  const double output_error =
      static_cast<double>(std::abs(row.output / row.softmax.sum - output / sum) / (magnitude / sum));
  return std::max(lse_error, output_error);
}

template <class T>
double largest_error(int trees) {
  std::mt19937_64 random(7);
  double largest = 0;
  for (int i = 0; i < trees; ++i) largest = std::max(largest, error_of_random_tree<T>(random));
  return largest;
}

}  // namespace

TEST_CASE("online softmax: any chunking, order and merge tree equals the direct form") {
  CHECK(largest_error<double>(3000) <= 4e-15);
  CHECK(largest_error<float>(3000) <= 1e-6);
}

TEST_CASE_TEMPLATE("online softmax: rows and pieces without scores", T, float, double) {
  constexpr T infinity = std::numeric_limits<T>::infinity();
  OnlineSoftmax<T> row;
  T factor;
  T hidden[] = {-infinity, -infinity};
  online_softmax_update<1>(&row, hidden, 2, 1, T(1), &factor);
  CHECK(hidden[0] == 0);
  CHECK(row.sum == 0);
  CHECK(row.maximum == -infinity);
  CHECK(row.lse() == -infinity);
  const auto factors = row.merge(OnlineSoftmax<T>{});
  CHECK_FALSE(std::isnan(factors.mine));
  CHECK_FALSE(std::isnan(factors.other));
  CHECK(row.sum == 0);

  OnlineSoftmax<T> seen{.maximum = 3, .sum = 2};
  CHECK(seen.merge(row).mine == 1);
  CHECK(seen.sum == 2);
  CHECK(row.merge(seen).other == 1);
  CHECK(row.sum == 2);
  CHECK(row.maximum == 3);
  online_softmax_update<1>(&seen, hidden, 0, 1, T(1), &factor);
  CHECK(factor == 1);
  CHECK(seen.sum == 2);
}

TEST_CASE_TEMPLATE("online softmax: NaN and infinite scores give NaN", T, float, double) {
  constexpr T infinity = std::numeric_limits<T>::infinity();
  constexpr T nan = std::numeric_limits<T>::quiet_NaN();
  for (const std::vector<T>& given : {std::vector<T>{nan}, {1, nan, 2}, {-infinity, nan}, {infinity, 1}}) {
    std::vector<T> scores = given;
    OnlineSoftmax<T> row;
    T factor;
    online_softmax_update<1>(&row, scores.data(), std::ssize(scores), 1, T(1), &factor);
    CHECK(std::isnan(row.sum));
    T more[] = {T(5)};
    online_softmax_update<1>(&row, more, 1, 1, T(1), &factor);
    CHECK(std::isnan(row.sum));
    OnlineSoftmax<T> other{.maximum = 100, .sum = 1};
    other.merge(row);
    CHECK(std::isnan(other.sum));
  }
}

TEST_CASE("online softmax: the scale multiplies differences, so large scores lose nothing") {
  float scores[] = {1048576.0f, 1048577.0f};
  OnlineSoftmax<float> row;
  float factor;
  online_softmax_update<1>(&row, scores, 2, 1, 0.088388346f, &factor);
  CHECK(scores[1] == 1.0f);
  CHECK(std::abs(scores[0] - std::exp(-0.088388346)) <= 1e-7);
}

TEST_CASE("online softmax: rows side by side are independent of each other, bit for bit") {
  constexpr int rows = 16;
  constexpr int64_t count = 37, stride = 20;
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal(0, 4);
  std::vector<float> scores(count * stride);
  for (float& score : scores) score = normal(random);
  OnlineSoftmax<float> states[rows];
  for (int r = 0; r < rows; ++r) states[r] = {.maximum = 0.5f * static_cast<float>(r), .sum = 1};
  OnlineSoftmax<float> singles[rows];
  std::copy(states, states + rows, singles);
  std::vector<float> together = scores;
  float factors[rows];
  online_softmax_update<rows>(states, together.data(), count, stride, 0.3f, factors);
  for (int r = 0; r < rows; ++r) {
    std::vector<float> alone = scores;
    float factor;
    online_softmax_update<1>(&singles[r], alone.data() + r, count, stride, 0.3f, &factor);
    CHECK(factor == factors[r]);
    CHECK(singles[r].maximum == states[r].maximum);
    CHECK(singles[r].sum == states[r].sum);
    for (int64_t j = 0; j < count; ++j) CHECK(alone[j * stride + r] == together[j * stride + r]);
  }
}
