// The Hopper attention kernels where their tiles, the maximum that stands still and their schedules make a difference.
#include <doctest/doctest.h>

#include <cstdlib>

#include "support/compare.h"
#include "support/gpu_attention.h"

using namespace strobe;
using namespace strobe::kernels;
using namespace strobe::testing;

namespace {

// out at most twice as far from the exact result as unfused attention with matrices in the dtype.
void check_output(const AttentionValues& given, const AttentionValues& exact, const AttentionValues& unfused, size_t i,
                  DType dtype) {
  INFO(AttentionOutputs::names[i]);
  const double tiny = dtype == DType::bf16 ? 4e-3 : 5e-4;
  CHECK(relative_error(given[i], exact[i]) <= 2 * relative_error(unfused[i], exact[i]) + tiny);
}
void check_forward(GpuAttention& attention, const GpuAttentionCase& problem) {
  INFO(problem.describe());
  const AttentionValues exact = attention.reference(), unfused = attention.reference(problem.dtype);
  const AttentionValues given = attention.run(AttentionKernel::hopper, AttentionKernel::auto_select);
  check_output(given, exact, unfused, 0, problem.dtype);
  CHECK(relative_error(given[1], exact[1]) <= 1e-5);
}
// dquery, dkey and dvalue, too.
void check_all(const GpuAttentionCase& problem, std::mt19937& random,
               AttentionKernel kernel = AttentionKernel::hopper) {
  INFO(problem.describe());
  GpuAttention attention(problem, random);
  const AttentionValues exact = attention.reference(), unfused = attention.reference(problem.dtype);
  const AttentionValues given = attention.run(kernel);
  for (const size_t i : {0, 2, 3, 4}) check_output(given, exact, unfused, i, problem.dtype);
  CHECK(relative_error(given[1], exact[1]) <= 1e-5);
}

bool same(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

}  // namespace

TEST_CASE("cuda attention hopper: lengths around the edges of tiles" * needs_hopper()) {
  std::mt19937 random(1);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int64_t dim : {64, 128}) {
      for (const int64_t seq_q : {1, 63, 64, 65, 128, 129, 191, 192, 193, 400}) {
        for (const int64_t seq_k : {1, 79, 80, 81, 96, 97, 128, 129, 161, 500}) {
          const GpuAttentionCase problem{.seq_q = seq_q,
                                         .seq_k = seq_k,
                                         .heads = 2,
                                         .dim = dim,
                                         .dtype = dtype,
                                         .options = {.causal = (seq_q + seq_k) % 2 == 0}};
          check_all(problem, random);
        }
      }
    }
  }
}

TEST_CASE("cuda attention hopper: head_dims of every width of tiles and between" * needs_hopper()) {
  std::mt19937 random(11);
  for (const int64_t dim : {96, 192, 256}) {
    for (const int64_t seq_q : {1, 64, 127, 129, 193, 300}) {
      for (const int64_t seq_k : {1, 79, 81, 97, 112, 113, 250}) {
        const bool odd = (seq_q + seq_k) % 2 == 1;
        check_all({.seq_q = seq_q,
                   .seq_k = seq_k,
                   .heads = 2,
                   .dim = dim,
                   .dtype = odd ? DType::f16 : DType::bf16,
                   .options = {.causal = seq_q % 3 != 0}},
                  random);
      }
    }
  }
  for (int64_t dim = 8; dim <= 256; dim += 8) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      check_all({.batch = 2,
                 .seq_q = 140,
                 .seq_k = 210,
                 .heads = 4,
                 .kv_heads = 2,
                 .dim = dim,
                 .dtype = dtype,
                 .options = {.causal = dim % 16 == 0},
                 .gap = 8},
                random);
    }
  }
}

TEST_CASE("cuda attention hopper: packed sequences, empty ones and single positions too" * needs_hopper()) {
  std::mt19937 random(12);
  const std::vector<int64_t> lengths_q{200, 0, 5, 193, 1, 64, 0}, lengths_k{170, 40, 33, 0, 1, 97, 0};
  for (const int64_t dim : {64, 72, 96, 128, 192, 256}) {
    for (const auto& [causal, left, right] :
         {std::tuple(false, -1, -1), {true, -1, -1}, {true, 30, -1}, {false, 40, 9}}) {
      for (const int64_t padding : {0, 3, 300}) {
        GpuAttentionCase problem{
            .batch = 7,
            .seq_q = 200,
            .seq_k = 170,
            .heads = 2,
            .kv_heads = 1,
            .dim = dim,
            .dtype = padding == 3 ? DType::f16 : DType::bf16,
            .options = {.causal = causal, .window_left = left, .window_right = right, .deterministic = padding > 0},
            .lengths_q = lengths_q,
            .lengths_k = lengths_k,
            .padding = padding,
            .with_dlse = true};
        check_all(problem, random);
        problem.seq_q = problem.seq_k = 1000;  // more than the longest
        problem.lengths_k = problem.lengths_q;
        check_all(problem, random);
        if (padding != 3) continue;
        problem.lengths_q[3] = 450;
        check_all(problem, random);
        problem.lengths_q = {0, 0, 0, 0, 0, 0, 1};
        problem.heads_first = true;
        check_all(problem, random);
      }
    }
  }
}

TEST_CASE("cuda attention hopper: packed sequences do not see each other, and are the same bits alone" *
          needs_hopper()) {
  std::mt19937 random(13);
  const std::vector<int64_t> lengths{90, 250, 1, 130};
  for (const int64_t dim : {64, 80, 128, 192, 256}) {
    GpuAttention packed({.batch = 4,
                         .seq_q = 250,
                         .seq_k = 250,
                         .dim = dim,
                         .dtype = DType::bf16,
                         .options = {.causal = dim == 128},
                         .lengths_q = lengths,
                         .lengths_k = lengths,
                         .padding = 7},
                        random);
    // The second sequence is NaN throughout.
    for (AttentionOperand* x : {&packed.query, &packed.key, &packed.value, &packed.dout}) {
      std::fill(x->values.begin() + 90 * dim, x->values.begin() + 340 * dim, std::nan(""));
      x->upload();
    }
    const AttentionValues together = packed.run(AttentionKernel::hopper);
    int64_t first = 0;
    for (const int64_t length : lengths) {
      GpuAttention single(
          {.seq_q = length, .seq_k = length, .dim = dim, .dtype = DType::bf16, .options = {.causal = dim == 128}},
          random);
      const auto copy = [&](AttentionOperand& to, const AttentionOperand& from) {
        to.values.assign(from.values.begin() + first * dim, from.values.begin() + (first + length) * dim);
        to.upload();
      };
      copy(single.query, packed.query);
      copy(single.key, packed.key);
      copy(single.value, packed.value);
      copy(single.dout, packed.dout);
      const AttentionValues alone = single.run(AttentionKernel::hopper);
      for (size_t i = 0; i < 5; ++i) {
        const int64_t row = i == 1 ? 1 : dim;
        for (int64_t n = 0; n < length * row; ++n) {
          const double x = together[i][static_cast<size_t>(first * row + n)], y = alone[i][static_cast<size_t>(n)];
          if (x != y && !(length == 250 && std::isnan(x) && std::isnan(y))) FAIL_CHECK("dim ", dim, " length ", length);
        }
      }
      first += length;
    }
  }
}

TEST_CASE("cuda attention hopper: softcap" * needs_hopper()) {
  std::mt19937 random(14);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int64_t dim : {64, 72, 96, 128, 192, 256}) {
      for (const double softcap : {0.5, 5.0, 50.0}) {
        for (const bool causal : {false, true}) {
          GpuAttentionCase problem{
              .seq_q = 150,
              .seq_k = 400,
              .heads = 4,
              .kv_heads = 2,
              .dim = dim,
              .dtype = dtype,
              .options = {.softmax_scale = causal ? -0.5 : 1.0, .causal = causal, .softcap = softcap},
              .with_dlse = true};
          check_all(problem, random);
          if (softcap != 5) continue;
          problem.options.window_left = 100;
          problem.batch = 3;
          problem.lengths_q = {150, 0, 70};
          problem.lengths_k = {120, 10, 400};
          check_all(problem, random);
        }
      }
    }
  }
}

TEST_CASE("cuda attention hopper: 200 random cases that it takes" * needs_hopper()) {
  std::mt19937 random(15);
  const auto below = [&](int64_t bound) { return static_cast<int64_t>(random() % static_cast<uint64_t>(bound)); };
  const auto chance = [&](int percent) { return below(100) < percent; };
  const auto length = [&] { return chance(30) ? 1 + below(20) : 1 + below(250); };
  for (int n = 0; n < 200; ++n) {
    GpuAttentionCase problem{.batch = 1 + below(3),
                             .kv_heads = 1 + below(2),
                             .dim = 8 * (1 + below(32)),
                             .dtype = chance(60) ? DType::bf16 : DType::f16,
                             .gap = 8 * below(2),
                             .heads_first = chance(30)};
    problem.heads = problem.kv_heads * (1 + below(3));
    problem.seq_q = length();
    problem.seq_k = chance(50) ? problem.seq_q : length();
    if (chance(40)) {
      problem.padding = chance(50) ? below(9) : 0;
      for (int64_t b = 0; b < problem.batch; ++b) {
        problem.lengths_q.push_back(b == 0 ? problem.seq_q : below(problem.seq_q + 1));
        problem.lengths_k.push_back(b == 0 ? problem.seq_k : below(problem.seq_k + 1));
      }
    }
    AttentionOptions& options = problem.options;
    options.causal = chance(40);
    if (chance(25)) options.window_left = below(150);
    if (chance(25)) options.window_right = below(150);
    if (chance(25)) options.softcap = 1 + static_cast<double>(below(30));
    if (chance(25)) options.softmax_scale = chance(30) ? 0.0 : static_cast<double>(below(200) - 100) / 300;
    check_all(problem, random);
  }
}

TEST_CASE("cuda attention hopper: windows, scales, strides" * needs_hopper()) {
  std::mt19937 random(2);
  for (const int64_t dim : {64, 80, 128, 256}) {
    for (const auto& [left, right] : {std::pair(0, 0), {17, 33}, {-1, 5}, {100, -1}, {1000, 1000}}) {
      for (const double scale : {0.1, 0.0, -0.1}) {
        for (const bool heads_first : {false, true}) {
          const GpuAttentionCase problem{
              .batch = 2,
              .seq_q = 200,
              .seq_k = 270,
              .dim = dim,
              .dtype = DType::bf16,
              .options = {.softmax_scale = scale, .window_left = left, .window_right = right},
              .gap = 8,
              .heads_first = heads_first};
          check_all(problem, random);
        }
      }
    }
  }
}

TEST_CASE("cuda attention hopper: windows wider than blocks of keys" * needs_hopper()) {
  std::mt19937 random(19);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int64_t dim : {64, 128}) {
      for (const int64_t left : {127, 191, 192, 256, 300, 320, 451}) {
        for (const int64_t right : {0, 70}) {
          GpuAttentionCase problem{.seq_q = 700,
                                   .seq_k = 650,
                                   .dim = dim,
                                   .dtype = dtype,
                                   .options = {.window_left = left, .window_right = right}};
          check_all(problem, random);
          problem.options.causal = true;
          problem.options.softcap = 5;
          check_all(problem, random);
        }
      }
    }
  }
}

TEST_CASE("cuda attention hopper: scores that rise block by block, a little or beyond any float" * needs_hopper()) {
  std::mt19937 random(3);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int64_t dim : {64, 96, 128, 192, 256}) {
      for (const auto& [growth, left] : {std::pair(1.0, -1), {30.0, -1}, {3000.0, -1}, {30.0, 310}, {3000.0, 310}}) {
        const GpuAttentionCase problem{
            .seq_q = 200, .seq_k = 700, .dim = dim, .dtype = dtype, .options = {.window_left = left}};
        GpuAttention attention(problem, random);
        // Keys are visited from the last to the first: norms grow towards key 0, for some queries far more than others.
        for (size_t i = 0; i < attention.key.values.size(); ++i) {
          const double key = static_cast<double>(i / static_cast<size_t>(dim));
          attention.key.values[i] *= growth * (700 - key) / 700;
        }
        for (size_t i = 0; i < attention.query.values.size(); ++i) {
          attention.query.values[i] *= i / static_cast<size_t>(dim) % 3 == 0 ? 1 : 0.01;
        }
        for (AttentionOperand* x : {&attention.key, &attention.query}) x->upload();
        check_forward(attention, problem);
      }
    }
  }
}

TEST_CASE("cuda attention hopper: STROBE_FORCE_SLOW_SOFTMAX takes another path, whose result differs by rounding" *
          needs_hopper()) {
  constexpr const char* name = "STROBE_FORCE_SLOW_SOFTMAX";
  std::mt19937 random(17);
  for (const int64_t dim : {64, 96, 128, 192, 256}) {
    GpuAttention attention({.seq_q = 200, .seq_k = 700, .dim = dim, .dtype = DType::bf16}, random);
    const bool given = std::getenv(name) != nullptr;  // by slow_softmax_test.sh
    unsetenv(name);
    const AttentionValues usual = attention.run(AttentionKernel::hopper, AttentionKernel::auto_select);
    setenv(name, "1", 1);
    const AttentionValues slow = attention.run(AttentionKernel::hopper, AttentionKernel::auto_select);
    if (!given) unsetenv(name);
    CHECK(!same(slow[0], usual[0]));
    CHECK(relative_error(slow[0], usual[0]) <= 1.6e-2);
    CHECK(relative_error(slow[1], usual[1]) <= 1e-5);
  }
}

TEST_CASE("cuda attention hopper: what a row does not see never changes its bits" * needs_hopper()) {
  std::mt19937 random(4);
  for (const int64_t dim : {64, 96, 128, 192, 256}) {
    const int64_t seq = 500, changed = 250;
    GpuAttention attention({.seq_q = seq, .seq_k = seq, .dim = dim, .dtype = DType::bf16, .options = {.causal = true}},
                           random);
    const AttentionValues before = attention.run(AttentionKernel::hopper, AttentionKernel::auto_select);
    // Rows from `changed` on now start from a tiny maximum and overflow later.
    for (size_t i = static_cast<size_t>(changed * dim); i < static_cast<size_t>(seq * dim); ++i) {
      attention.query.values[i] = 30;
      attention.key.values[i] = -30;
      attention.value.values[i] = 7;
    }
    for (AttentionOperand* x : {&attention.query, &attention.key, &attention.value}) x->upload();
    const AttentionValues after = attention.run(AttentionKernel::hopper, AttentionKernel::auto_select);
    for (const size_t i : {0, 1}) {
      const size_t count = static_cast<size_t>(changed) * (i == 1 ? 1 : static_cast<size_t>(dim));
      CHECK(std::memcmp(before[i].data(), after[i].data(), count * sizeof(double)) == 0);
    }
  }
}

TEST_CASE("cuda attention hopper: NaN and infinity reach the rows that see them" * needs_hopper()) {
  std::mt19937 random(5);
  for (const double poison : {std::nan(""), static_cast<double>(INFINITY), -static_cast<double>(INFINITY)}) {
    for (const int64_t at : {0, 150, 399}) {
      GpuAttention attention({.seq_q = 400, .seq_k = 400, .dim = 128, .dtype = DType::bf16}, random);
      attention.key.values[static_cast<size_t>(at * 128 + 5)] = poison;
      attention.key.upload();
      const AttentionValues expected = attention.reference(), given = attention.run(AttentionKernel::hopper);
      CHECK(relative_error(given[0], expected[0]) <= 1.6e-2);
    }
  }
}

TEST_CASE("cuda attention hopper: gradients of groups of heads, of lse, of head_dims between the widths of tiles" *
          needs_hopper()) {
  std::mt19937 random(7);
  for (const int64_t dim : {64, 128, 192, 256, 8, 40, 72, 96, 120, 136, 200}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const bool causal : {false, true}) {
        const GpuAttentionCase problem{.batch = 2,
                                       .seq_q = 300,
                                       .seq_k = 350,
                                       .heads = 6,
                                       .kv_heads = 2,
                                       .dim = dim,
                                       .dtype = dtype,
                                       .options = {.causal = causal, .deterministic = causal},
                                       .with_dlse = true};
        check_all(problem, random);
      }
    }
  }
}

TEST_CASE("cuda attention hopper: a single key has gradient 0" * needs_hopper()) {
  std::mt19937 random(8);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int64_t dim : {64, 128, 192, 256}) {
      for (const double softcap : {0.0, 5.0}) {
        GpuAttention attention(
            {.seq_q = 150, .heads = 2, .kv_heads = 2, .dim = dim, .dtype = dtype, .options = {.softcap = softcap}},
            random);
        const AttentionValues values = attention.run(AttentionKernel::hopper);
        for (const size_t i : {2, 3}) {
          CHECK(std::all_of(values[i].begin(), values[i].end(), [](double x) { return x == 0; }));
        }
      }
    }
  }
}

TEST_CASE("cuda attention hopper: large scores keep their gradients" * needs_hopper()) {
  std::mt19937 random(9);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const double softcap : {0.0, 2000.0}) {
      for (const int64_t dim : {64, 128, 192, 256}) {
        for (const bool causal : {false, true}) {
          check_all({.seq_q = 200,
                     .seq_k = 300,
                     .dim = dim,
                     .dtype = dtype,
                     .options = {.softmax_scale = 100, .causal = causal, .softcap = softcap}},
                    random);
        }
      }
    }
  }
}

TEST_CASE("cuda attention hopper: a dout that TMA cannot read is left to another kernel" * needs_hopper()) {
  std::mt19937 random(10);
  const GpuAttentionCase problem{.seq_q = 100, .seq_k = 100, .dim = 64, .dtype = DType::bf16, .constant_dout = true};
  check_all(problem, random, AttentionKernel::auto_select);
  CHECK_THROWS_WITH_AS(GpuAttention(problem, random).run(AttentionKernel::hopper),
                       doctest::Contains("kernel hopper given, but dout has stride 0"), Error);
}

TEST_CASE("cuda attention hopper: flash_attention takes it by name, too" * needs_hopper()) {
  const DeviceGuard device(Device::cuda());
  seed(3);
  const Tensor query = normal({2, 100, 3, 64}, 0, 1, DType::bf16), dout = normal(query.shape(), 0, 1, DType::bf16);
  const auto gradient = [&](AttentionKernel kernel) {
    const Tensor x = query.detach().set_requires_grad();
    flash_attention(x, x, x, {.causal = true, .kernel = kernel}).backward(dout);
    return x.grad().to_vector<double>();
  };
  CHECK(gradient(AttentionKernel::hopper) == gradient(AttentionKernel::auto_select));
}

TEST_CASE("cuda attention hopper: what both passes refuse, by name" * needs_hopper()) {
  std::mt19937 random(16);
  const auto refuses = [&](GpuAttentionCase problem, const char* what) {
    INFO(what);
    problem.dtype = DType::bf16;
    GpuAttention attention(problem, random);
    const std::string message = concat_message("kernel hopper given, but ", what);
    CHECK_THROWS_WITH_AS(attention.run(AttentionKernel::hopper, AttentionKernel::auto_select),
                         doctest::Contains(message.c_str()), Error);
    CHECK_THROWS_WITH_AS(attention.run(AttentionKernel::auto_select, AttentionKernel::hopper),
                         doctest::Contains(message.c_str()), Error);
  };
  refuses({.dim = 100}, "it takes head_dim in multiples of 8, head_dim is 100");
  refuses({.dim = 64, .options = {.dropout_p = 0.5}}, "it does not take dropout_p");
  refuses({.dim = 64, .options = {.alibi_slopes = ones({1})}}, "it does not take alibi_slopes");
  refuses({.seq_q = 9, .seq_k = 9, .heads = 2, .dim = 64, .gap = 4}, "query ");
}

TEST_CASE("cuda attention hopper: blocks of keys in two pieces have the bits of packed ones, which are whole" *
          needs_hopper()) {
  for (const int64_t dim : {64, 192, 256}) {
    GpuAttentionCase problem{.seq_q = 300, .seq_k = 1100, .heads = 14, .kv_heads = 2, .dim = dim, .dtype = DType::bf16};
    if (dim == 64) problem.options.softcap = 30;
    std::mt19937 random(15), again(15);
    const AttentionValues cut = GpuAttention(problem, random).run(AttentionKernel::hopper);
    problem.lengths_q = {300}, problem.lengths_k = {1100};
    const AttentionValues whole = GpuAttention(problem, again).run(AttentionKernel::hopper);
    for (size_t i = 0; i < 5; ++i) CHECK(same(cut[i], whole[i]));
  }
}

TEST_CASE("cuda attention hopper: many tiles for each block of the grid give the same bits on every run" *
          needs_hopper()) {
  std::mt19937 random(6);
  for (const auto& [causal, packed, softcap] : {std::tuple(false, false, 0),
                                                {true, false, 0},
                                                {false, true, 0},
                                                {true, true, 0},
                                                {false, false, 30},
                                                {true, true, 30}}) {
    GpuAttentionCase problem{.seq_q = 500,
                             .seq_k = 600,
                             .heads = 70,
                             .kv_heads = 10,
                             .dim = 64,
                             .dtype = DType::bf16,
                             .options = {.causal = causal, .softcap = static_cast<double>(softcap)}};
    if (packed) {
      problem.batch = 5;
      problem.lengths_q = {20, 500, 130, 64, 310};
      problem.lengths_k = {20, 600, 130, 200, 1};
    }
    GpuAttention attention(problem, random);
    const AttentionValues first = attention.run(AttentionKernel::hopper);
    const AttentionValues other = attention.run(AttentionKernel::mma);
    for (const size_t i : {0, 2, 3, 4}) CHECK(relative_error(first[i], other[i]) <= 1.6e-2);
    CHECK(relative_error(first[1], other[1]) <= 1e-5);
    for (int n = 0; n < 19; ++n) {
      const AttentionValues again = attention.run(AttentionKernel::hopper);
      for (size_t i = 0; i < 5; ++i) CHECK(same(again[i], first[i]));
    }
  }
}
