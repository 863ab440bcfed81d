// Dropout of attention: the mask is the one the formula gives, at the rate asked for, forward and backward, wherever
// tiles begin.
#include "support/attention_problem.h"
#include "support/threads.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

// The kept elements of P as the forward pass has them, (batch, heads, seq_q, seq_k): with query 0 and values that are
// the rows of an identity matrix, out is P itself. At most 256 keys from `first` show.
class ForwardMask {
 public:
  ForwardMask(AttentionFunction attention, int64_t batch, int64_t heads, int64_t seq_q, int64_t seq_k,
              const AttentionOptions& options, DType dtype, int64_t first = 0)
      : heads_(heads), seq_q_(seq_q), shown_(std::min<int64_t>(256, seq_k - first)), first_(first) {
    const Tensor value = zeros({batch, seq_k, 1, shown_}, dtype);
    for (int64_t j = 0; j < shown_; ++j) {
      slice(slice(value, 1, first + j, first + j + 1), 3, j, j + 1).copy_from(ones({batch, 1, 1, 1}, dtype));
    }
    const Tensor query = zeros({batch, seq_q, heads, shown_}, dtype);
    p_ = attention(query, zeros(value.shape(), dtype), value, options).out.to_vector<double>();
  }
  double p(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return p_[static_cast<size_t>(((b * seq_q_ + i) * heads_ + h) * shown_ + j - first_)];
  }

 private:
  int64_t heads_, seq_q_, shown_, first_;
  std::vector<double> p_;
};

const AttentionOptions some_dropout{.dropout_p = 0.3, .dropout_seed = 0xfedcba9876543210u, .dropout_offset = 12345};

}  // namespace

TEST_CASE("attention dropout: the mask is the formula's, the kept elements are scaled by the inverse of their rate") {
  for_each_path([](AttentionFunction attention, DType dtype) {
    for (const double dropout_p : {0.002, 0.1, 0.5, 0.996}) {
      AttentionOptions options = some_dropout;
      options.dropout_p = dropout_p;
      const double kept = 256.0 / dropout_keep_below(dropout_p);
      const ForwardMask mask(attention, 2, 3, 140, 256, options, dtype);
      int64_t wrong = 0;
      for (int64_t b = 0; b < 2; ++b) {
        for (int64_t h = 0; h < 3; ++h) {
          for (int64_t i = 0; i < 140; ++i) {
            for (int64_t j = 0; j < 256; ++j) {
              const double expected = keeps(options, b, 3, h, i, j) ? kept / 256 : 0;
              wrong += !(std::abs(mask.p(b, h, i, j) - expected) <= expected * tolerance(dtype));
            }
          }
        }
      }
      CAPTURE(dropout_p);
      CHECK(wrong == 0);
    }
  });
}

TEST_CASE("attention dropout: the mask far from the first key and query") {
  for (const AttentionPath& path : attention_paths) {
    INFO(path.name);
    const ForwardMask mask(path.function, 1, 1, 300, 700, some_dropout, DType::f32, 500);
    int64_t wrong = 0;
    for (int64_t i = 0; i < 300; ++i) {
      for (int64_t j = 500; j < 700; ++j) {
        wrong += (mask.p(0, 0, i, j) > 0) != keeps(some_dropout, 0, 1, 0, i, j);
      }
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("attention dropout: the mask depends on seed and offset, batch and head") {
  const auto agreement = [](const AttentionOptions& other, int64_t b, int64_t h) {  // with the first matrix
    const ForwardMask first(flash_attention_return_lse, 2, 2, 256, 256, some_dropout, DType::f32);
    const ForwardMask second(flash_attention_return_lse, 2, 2, 256, 256, other, DType::f32);
    int64_t same = 0;
    for (int64_t i = 0; i < 256; ++i) {
      for (int64_t j = 0; j < 256; ++j) same += (first.p(0, 0, i, j) > 0) == (second.p(b, h, i, j) > 0);
    }
    return static_cast<double>(same) / (256 * 256);
  };
  CHECK(agreement(some_dropout, 0, 0) == 1);
  AttentionOptions seed = some_dropout, offset = some_dropout;
  seed.dropout_seed += 1;
  offset.dropout_offset += 1;
  const double rate = 179.0 / 256, by_chance = rate * rate + (1 - rate) * (1 - rate);
  const double sigma = std::sqrt(by_chance * (1 - by_chance)) / 256;
  for (const double share : {agreement(seed, 0, 0), agreement(offset, 0, 0), agreement(some_dropout, 0, 1),
                             agreement(some_dropout, 1, 0), agreement(some_dropout, 1, 1)}) {
    CHECK(std::abs(share - by_chance) <= 4 * sigma);
  }
}

TEST_CASE("attention dropout: elements are kept at the rate asked for, within 4 sigma") {
  for (const double dropout_p : {0.05, 0.1, 0.25, 0.5, 0.75, 0.9}) {
    for (const uint64_t seed : {uint64_t{1}, uint64_t{2}, uint64_t{1} << 40}) {
      CAPTURE(dropout_p);
      CAPTURE(seed);
      const AttentionOptions options{.dropout_p = dropout_p, .dropout_seed = seed};
      const ForwardMask mask(flash_attention_return_lse, 1, 4, 256, 256, options, DType::f32);
      int64_t kept = 0;
      for (int64_t h = 0; h < 4; ++h) {
        for (int64_t i = 0; i < 256; ++i) {
          for (int64_t j = 0; j < 256; ++j) kept += mask.p(0, h, i, j) > 0;
        }
      }
      const double count = 4 * 256 * 256, rate = dropout_keep_below(dropout_p) / 256.0;
      CHECK(std::abs(rate - (1 - dropout_p)) <= 1.0 / 512);
      CHECK(std::abs(static_cast<double>(kept) - count * rate) <= 4 * std::sqrt(count * rate * (1 - rate)));
    }
  }
}

TEST_CASE("attention dropout: the backward pass has the forward pass's mask") {
  for_each_path([](AttentionFunction attention, DType dtype) {
    // dvalue = P^T dout: with the rows of an identity matrix for dout it is P^T itself.
    const int64_t batch = 2, heads = 2, seq_q = 256, seq_k = 140;
    const Tensor dout = zeros({batch, seq_q, heads, seq_q}, dtype);
    for (int64_t i = 0; i < seq_q; ++i) {
      slice(slice(dout, 1, i, i + 1), 3, i, i + 1).copy_from(ones({batch, 1, heads, 1}, dtype));
    }
    const Tensor key = zeros({batch, seq_k, heads, seq_q}, dtype);
    const AttentionProblem problem(zeros(dout.shape(), dtype), key, key, dout);
    const std::vector<double> dvalue = problem.run(attention, some_dropout).dvalue.to_vector<double>();
    const ForwardMask mask(attention, batch, heads, seq_q, seq_k, some_dropout, dtype);
    int64_t wrong = 0;
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t j = 0; j < seq_k; ++j) {
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t i = 0; i < seq_q; ++i) {
            const double p = dvalue[static_cast<size_t>(((b * seq_k + j) * heads + h) * seq_q + i)];
            wrong += !(std::abs(p - mask.p(b, h, i, j)) <= p * tolerance(dtype));
          }
        }
      }
    }
    CHECK(wrong == 0);
  });
}

TEST_CASE("attention dropout: dquery and dkey have the same mask") {
  seed(1);
  for_each_path([](AttentionFunction attention, DType dtype) {
    for (const bool causal : {false, true}) {
      const AttentionProblem problem = AttentionProblem(2, 150, 140, 2, 1, 8, dtype).with_random_dlse();
      AttentionOptions options = some_dropout;
      options.causal = causal;
      check_close(problem.run(attention, options), problem.reference(options), tolerance(dtype));
    }
  });
}

TEST_CASE("attention dropout: the mask stays where it is when windows and lengths move the tiles") {
  const int64_t seq_q = 200;
  for (const AttentionPath& path : attention_paths) {
    INFO(path.name);
    for (const int64_t seq_k : {100, 190, 200, 256}) {
      for (const AttentionOptions& window :
           {AttentionOptions{}, {.causal = true}, {.window_left = 37}, {.window_left = 9, .window_right = 50}}) {
        AttentionOptions options = window;
        options.dropout_p = some_dropout.dropout_p;
        options.dropout_seed = some_dropout.dropout_seed;
        options.dropout_offset = some_dropout.dropout_offset;
        const ForwardMask mask(path.function, 1, 1, seq_q, seq_k, options, DType::f32);
        int64_t wrong = 0;
        for (int64_t i = 0; i < seq_q; ++i) {
          for (int64_t j = 0; j < seq_k; ++j) {
            const bool kept = sees(options, seq_q, seq_k, i, j) && keeps(options, 0, 1, 0, i, j);
            wrong += (mask.p(0, 0, i, j) > 0) != kept;
          }
        }
        CHECK(wrong == 0);
      }
    }
  }
}

TEST_CASE("attention dropout: packed sequences count positions from their own start") {
  const std::vector<int64_t> q_lengths{45, 0, 150, 7}, k_lengths{13, 6, 140, 97};  // none begins at a tile
  for (const AttentionPath& path : attention_paths) {
    INFO(path.name);
    const int64_t heads = 3, total_q = 202, total_k = 256;
    AttentionOptions options = some_dropout;
    options.cu_seqlens_q = cu_seqlens(q_lengths);
    options.cu_seqlens_k = cu_seqlens(k_lengths);
    const Tensor identity = zeros({total_k, 1, total_k});
    for (int64_t j = 0; j < total_k; ++j) {
      slice(slice(identity, 0, j, j + 1), 2, j, j + 1).copy_from(ones({1, 1, 1}));
    }
    const Tensor out = path.function(zeros({total_q, heads, total_k}), zeros(identity.shape()), identity, options).out;
    const std::vector<double> p = out.to_vector<double>();
    int64_t wrong = 0, q_begin = 0, k_begin = 0;
    for (size_t b = 0; b < q_lengths.size(); ++b) {
      for (int64_t i = 0; i < q_lengths[b]; ++i) {
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t j = 0; j < total_k; ++j) {
            const bool inside = j >= k_begin && j < k_begin + k_lengths[b];
            const bool kept = inside && keeps(options, static_cast<int64_t>(b), heads, h, i, j - k_begin);
            wrong += (p[static_cast<size_t>(((q_begin + i) * heads + h) * total_k + j)] > 0) != kept;
          }
        }
      }
      q_begin += q_lengths[b];
      k_begin += k_lengths[b];
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("attention dropout: a query whose keys are all dropped gets 0") {
  // One key in 256 is kept: most rows of 20 keys keep none. lse is that of the undropped scores.
  for_each_path([](AttentionFunction attention, DType dtype) {
    const AttentionOptions options{.dropout_p = 0.996, .dropout_seed = 7};
    const AttentionProblem problem = AttentionProblem(1, 50, 20, 1, 1, 4, dtype).with_random_dlse();
    const AttentionOutputs got = problem.run(attention, options);
    int64_t empty_rows = 0;
    for (int64_t i = 0; i < 50; ++i) {
      bool any = false;
      for (int64_t j = 0; j < 20; ++j) any |= keeps(options, 0, 1, 0, i, j);
      if (any) continue;
      ++empty_rows;
      check_exact(slice(got.out, 1, i, i + 1), 0.0);
    }
    CHECK(empty_rows > 25);
    check_close(got, problem.reference(options), tolerance(dtype));
  });
}
