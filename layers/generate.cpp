#include "strobe/layers/generate.h"

#include <numeric>

namespace strobe {
namespace {

// Draws an index with probability proportional to exp(logit / temperature) among the top_k largest logits.
int64_t sample(const std::vector<double>& logits, const GenerateOptions& options) {
  std::vector<int64_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const size_t kept = options.temperature == 0 ? 1
                      : options.top_k > 0      ? std::min(static_cast<size_t>(options.top_k), order.size())
                                               : order.size();
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(),
                    [&](int64_t a, int64_t b) {
                      const double x = logits[static_cast<size_t>(a)];
                      const double y = logits[static_cast<size_t>(b)];
                      return x > y || (x == y && a < b);
                    });
  if (kept == 1) return order[0];
  std::vector<double> cumulative(kept);
  double total = 0;
  const double largest = logits[static_cast<size_t>(order[0])];
  for (size_t i = 0; i < kept; ++i) {
    total += std::exp((logits[static_cast<size_t>(order[i])] - largest) / options.temperature);
    cumulative[i] = total;
  }
  const double draw = uniform({1}, 0.0, 1.0, DType::f64, Device::cpu()).item<double>() * total;
  const auto chosen = std::upper_bound(cumulative.begin(), cumulative.end(), draw);
  return order[std::min(static_cast<size_t>(chosen - cumulative.begin()), kept - 1)];
}

}  // namespace

std::vector<int64_t> generate(const GPT& model, std::vector<int64_t> prompt, const GenerateOptions& options) {
  STROBE_CHECK(!prompt.empty(), "generate: an empty prompt given, expected at least one token");
  STROBE_CHECK(options.max_new_tokens >= 0, "generate: max_new_tokens ", options.max_new_tokens,
               " given, expected at least 0");
  STROBE_CHECK(options.temperature >= 0 && std::isfinite(options.temperature), "generate: temperature ",
               options.temperature, " given, expected a finite number of at least 0");
  STROBE_CHECK(options.top_k >= 0, "generate: top_k ", options.top_k, " given, expected at least 0");
  const NoGrad no_grad;
  GPT frozen = model;  // the same parameters
  frozen.training = false;
  const Device device = model.wte.weight.device();
  std::vector<int64_t> generated;
  for (int64_t step = 0; step < options.max_new_tokens; ++step) {
    const int64_t seen = std::min(static_cast<int64_t>(prompt.size()), model.config.max_seq_len);
    const Tensor tokens = from_vector(std::vector<int64_t>(prompt.end() - seen, prompt.end()), {1, seen}, device);
    const Tensor last = slice(frozen.features(tokens), 1, seen - 1, seen);
    const std::vector<double> logits = frozen.logits(last).to_vector<double>();
    STROBE_CHECK(std::all_of(logits.begin(), logits.end(), [](double x) { return std::isfinite(x); }),
                 "generate: the model gives logits that are not finite at new token ", step);
    generated.push_back(sample(logits, options));
    prompt.push_back(generated.back());
  }
  return generated;
}

}  // namespace strobe
