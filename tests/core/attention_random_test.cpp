// Tiled against standard attention on random shapes and combinations of options, and a sample against the definition.
#include <map>
#include <numeric>
#include <sstream>

#include "support/attention_problem.h"
#include "support/threads.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

// A random shape with random options, and the names of those it has.
struct RandomCase {
  int64_t batch, seq_q, seq_k, heads, kv_heads, dim;  // packed: seq_q and seq_k rows in all
  AttentionOptions options;
  std::vector<std::string> names;

  bool packed() const { return options.cu_seqlens_q.defined(); }
  AttentionProblem problem(DType dtype) const {
    AttentionProblem result = packed() ? AttentionProblem::packed(seq_q, seq_k, heads, kv_heads, dim, dtype)
                                       : AttentionProblem(batch, seq_q, seq_k, heads, kv_heads, dim, dtype);
    return result.with_random_dlse();
  }
  std::string description() const {
    std::ostringstream text;
    text << "batch " << batch << " seq_len " << seq_q << " and " << seq_k << " heads " << heads << " and " << kv_heads
         << " head_dim " << dim << " scale " << options.softmax_scale.value_or(1) << " window " << options.window_left
         << " and " << options.window_right << " softcap " << options.softcap << " dropout " << options.dropout_p;
    for (const std::string& name : names) text << ", " << name;
    return text.str();
  }
};

class CaseGenerator {
 public:
  explicit CaseGenerator(uint32_t seed) : random_(seed) {}

  RandomCase next(bool large) {
    RandomCase c{};
    const auto option = [&](const char* name, bool chosen) {
      if (chosen) c.names.push_back(name);
      return chosen;
    };
    const int64_t longest = large ? 300 : 40;
    int64_t longest_here = 0;
    c.dim = one_in(6) ? draw(65, 256) : draw(1, large ? 24 : 64);
    c.kv_heads = draw(1, 2);
    c.heads = c.kv_heads * (option("grouped heads", one_in(3)) ? draw(2, 3) : 1);
    if (option("packed", one_in(3))) {
      std::vector<int64_t> q_lengths, k_lengths;
      c.batch = draw(1, 4);
      for (int64_t b = 0; b < c.batch; ++b) {
        q_lengths.push_back(one_in(5) ? 0 : draw(1, longest));
        k_lengths.push_back(one_in(5) ? 0 : one_in(2) ? q_lengths.back() : draw(1, longest));
        longest_here = std::max({longest_here, q_lengths.back(), k_lengths.back()});
      }
      c.options.cu_seqlens_q = cu_seqlens(q_lengths);
      c.options.cu_seqlens_k = cu_seqlens(k_lengths);
      const int64_t padding = one_in(2) ? draw(1, 5) : 0;
      c.seq_q = std::accumulate(q_lengths.begin(), q_lengths.end(), padding);
      c.seq_k = std::accumulate(k_lengths.begin(), k_lengths.end(), padding);
      if (one_in(2)) {
        c.options.max_seq_len_q = *std::max_element(q_lengths.begin(), q_lengths.end()) + draw(0, 9);
        c.options.max_seq_len_k = *std::max_element(k_lengths.begin(), k_lengths.end()) + draw(0, 9);
      }
    } else {
      c.batch = draw(1, large ? 1 : 3);
      c.seq_q = draw(1, longest);
      c.seq_k = option("seq_len_q != seq_len_k", one_in(2)) ? draw(1, longest) : c.seq_q;
      longest_here = std::max(c.seq_q, c.seq_k);
    }
    c.options.causal = option("causal", one_in(2));
    if (option("window_left", one_in(3))) c.options.window_left = draw(0, longest / 2);
    if (option("window_right", one_in(3))) c.options.window_right = draw(0, longest / 2);
    if (option("softcap", one_in(3))) c.options.softcap = real(0.3, 10);
    if (option("alibi_slopes", one_in(3))) c.options.alibi_slopes = uniform({c.heads}, -0.2, 0.8);
    if (option("dropout", one_in(3))) {
      c.options.dropout_p = real(0.01, 0.9);
      c.options.dropout_seed = random_();
      c.options.dropout_offset = random_();
    }
    if (option("softmax_scale", one_in(2))) {
      const double scale = real(-2, 2) / std::sqrt(static_cast<double>(c.dim));
      c.options.softmax_scale = scale;
      option("negative softmax_scale", scale < 0);
    }
    option("odd head_dim", c.dim % 2 == 1);
    option("head_dim above 64", c.dim > 64);
    option("several tiles", longest_here > 128);
    return c;
  }

 private:
  int64_t draw(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }
  bool one_in(int64_t n) { return draw(1, n) == 1; }
  double real(double low, double high) { return std::uniform_real_distribution<double>(low, high)(random_); }

  std::mt19937 random_;
};

// max |x - reference| / max |reference|. Where a query sees a single key its dquery is a difference that cancels, so
// the magnitude of dquery and dkey counts as at least a hundredth of their terms, scale * dP * K.
double difference(size_t output, const Tensor& x, const Tensor& reference, const RandomCase& c) {
  const double relative = relative_difference(x, reference);
  if (output != 2 && output != 3) return relative;
  double magnitude = std::numeric_limits<double>::min();
  for (const double value : reference.to_vector<double>()) magnitude = std::max(magnitude, std::abs(value));
  const double root = std::sqrt(static_cast<double>(c.dim));
  return relative * magnitude / std::max(magnitude, 0.01 * std::abs(c.options.softmax_scale.value_or(1 / root)) * root);
}

}  // namespace

TEST_CASE("attention: tiled and standard agree on 1,000 random shapes and combinations of options") {
  const Threads one(1);  // problems so small that threads would mostly wait for each other
  seed(2);
  CaseGenerator generator(2);
  std::map<std::string, int> counts;
  double largest[2] = {};
  for (int number = 0; number < 1000; ++number) {
    const RandomCase c = generator.next(number % 4 == 0);
    for (const std::string& name : c.names) ++counts[name];
    INFO("case ", number, ": ", c.description());
    for (const DType dtype : {DType::f32, DType::f64}) {
      const AttentionProblem problem = c.problem(dtype);
      const std::vector<Tensor> tiled = problem.run(flash_attention_return_lse, c.options).all();
      const std::vector<Tensor> standard = problem.run(standard_attention_return_lse, c.options).all();
      for (size_t i = 0; i < 5; ++i) {
        INFO(AttentionOutputs::names[i], " in ", std::string(name_of(dtype)));
        const double found = difference(i, tiled[i], standard[i], c);
        CHECK(found <= tolerance(dtype));
        largest[dtype == DType::f64] = std::max(largest[dtype == DType::f64], found);
      }
      if (number % 5 != 1) continue;
      const std::vector<Tensor> expected = problem.reference(c.options).all();
      for (size_t i = 0; i < 5; ++i) {
        INFO(AttentionOutputs::names[i], " in ", std::string(name_of(dtype)), " against the definition");
        CHECK(difference(i, standard[i], expected[i], c) <= tolerance(dtype));
      }
    }
  }
  MESSAGE("largest differences: ", largest[0], " in f32, ", largest[1], " in f64");
  for (const char* name : {"causal", "window_left", "window_right", "softcap", "alibi_slopes", "dropout", "packed",
                           "grouped heads", "softmax_scale", "negative softmax_scale", "seq_len_q != seq_len_k",
                           "odd head_dim", "head_dim above 64", "several tiles"}) {
    CAPTURE(std::string(name));
    CHECK(counts[name] >= 100);
  }
}

TEST_CASE("attention: tiled and standard agree on strided operands") {
  const Threads one(1);
  seed(3);
  CaseGenerator generator(3);
  for (int number = 0; number < 60; ++number) {
    const RandomCase c = generator.next(number % 4 == 0);
    INFO("case ", number, ": ", c.description());
    for (const DType dtype : {DType::f32, DType::f64}) {
      AttentionProblem problem = c.problem(dtype);
      // Heads before positions, and query a part of wider rows.
      const auto heads_first = [](const Tensor& x) { return transpose(contiguous(transpose(x, -3, -2)), -3, -2); };
      problem.key = heads_first(problem.key);
      problem.dout = heads_first(problem.dout);
      problem.query = slice(concat({problem.query, problem.query}, -1), -1, c.dim / 2, c.dim / 2 + c.dim);
      const Tensor q = problem.query.detach().set_requires_grad(), k = problem.key.detach().set_requires_grad(),
                   v = problem.value.detach().set_requires_grad();
      const std::vector<Tensor> tiled =
          problem.differentiate(flash_attention_return_lse(q, k, v, c.options), q, k, v).all();
      const std::vector<Tensor> expected = problem.run(standard_attention_return_lse, c.options).all();
      for (size_t i = 0; i < 5; ++i) {
        INFO(AttentionOutputs::names[i], " in ", std::string(name_of(dtype)));
        CHECK(difference(i, tiled[i], expected[i], c) <= tolerance(dtype));
      }
    }
  }
}
