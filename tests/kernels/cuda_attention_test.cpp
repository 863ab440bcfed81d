// Attention on a GPU, every kernel that accepts a case, against f64 on the host.
#include <doctest/doctest.h>

#include "support/gpu_attention.h"

using namespace strobe;
using namespace strobe::kernels;
using namespace strobe::testing;

namespace {

const char* name_of_kernel(AttentionKernel kernel) {
  return kernel == AttentionKernel::portable ? "portable" : kernel == AttentionKernel::mma ? "mma" : "auto_select";
}

// f(kernel) for all that accept the dtype.
template <class F>
void for_each_kernel(DType dtype, F&& f) {
  for (const AttentionKernel kernel : gpu_attention_kernels(dtype)) {
    INFO(std::string(name_of(dtype)), " ", std::string(name_of_kernel(kernel)));
    f(kernel);
  }
}

// A case of random sizes and options. lse stays within rounding of f32.
GpuAttentionCase random_case(std::mt19937& random) {
  const auto below = [&](int64_t bound) { return static_cast<int64_t>(random() % static_cast<uint64_t>(bound)); };
  const auto chance = [&](int percent) { return below(100) < percent; };
  GpuAttentionCase problem;
  problem.dtype = floating_dtypes[below(4)];
  problem.batch = 1 + below(3);
  problem.kv_heads = 1 + below(2);
  problem.heads = problem.kv_heads * (1 + below(3));
  problem.dim = chance(30) ? 64 : chance(30) ? 128 : 1 + below(chance(80) ? 80 : 256);
  const auto length = [&] { return chance(5) ? 0 : chance(30) ? 1 + below(20) : 1 + below(150); };
  if (chance(30)) {
    problem.padding = chance(50) ? 1 + below(9) : 0;
    for (int64_t b = 0; b < problem.batch; ++b) {
      problem.lengths_q.push_back(length());
      problem.lengths_k.push_back(chance(50) ? problem.lengths_q.back() : length());
      problem.seq_q = std::max(problem.seq_q, problem.lengths_q.back());
      problem.seq_k = std::max(problem.seq_k, problem.lengths_k.back());
    }
  } else {
    problem.seq_q = length();
    problem.seq_k = chance(50) ? problem.seq_q : length();
  }
  AttentionOptions& options = problem.options;
  options.causal = chance(40);
  if (chance(30)) options.window_left = below(80);
  if (chance(30)) options.window_right = below(80);
  if (chance(25)) options.softcap = 1 + static_cast<double>(below(30));
  if (chance(25)) {
    std::vector<float> slopes;
    for (int64_t h = 0; h < problem.heads; ++h) slopes.push_back(static_cast<float>(below(100)) / 200);
    options.alibi_slopes = from_vector(slopes, {problem.heads});
  }
  if (chance(25)) {
    options.dropout_p = static_cast<double>(1 + below(9)) / 10;
    options.dropout_seed = random();
    options.dropout_offset = random();
  }
  if (chance(25)) options.softmax_scale = chance(30) ? 0.0 : static_cast<double>(below(200) - 100) / 300;
  problem.with_dlse = chance(40);
  problem.gap = below(4);
  problem.heads_first = chance(30);
  problem.constant_dout = chance(15);
  return problem;
}

// `least`: what dquery and dkey are measured against where their largest element is smaller. They are differences, of
// terms as large as this.
void check_near(const AttentionValues& given, const AttentionValues& expected, DType dtype, double least = 0.1) {
  for (size_t i = 0; i < 5; ++i) {
    INFO(AttentionOutputs::names[i]);
    const double bound = i == 1 ? std::min(tolerance(dtype), 1e-5) : tolerance(dtype);
    CHECK(relative_error(given[i], expected[i], i == 2 || i == 3 ? least : 0.1) <= bound);
  }
}

double largest(const std::vector<double>& values) {
  double result = 0;
  for (const double x : values) result = std::isfinite(x) ? std::max(result, std::abs(x)) : result;
  return result;
}
// With dropout a query that sees one key gets gradient 0 as the difference of numbers that out's rounding is part of.
double least_gradient(const GpuAttentionCase& problem, const AttentionValues& expected) {
  return problem.options.dropout_p > 0 ? std::max(0.1, 2 * largest(expected[4])) : 0.1;
}

// Largest error of `given` against that of unfused attention whose matrices are rounded to the dtype.
void check_rounds_like_unfused(const AttentionValues& given, const AttentionValues& exact,
                               const AttentionValues& unfused) {
  for (const size_t i : {0, 2, 3, 4}) {
    INFO(AttentionOutputs::names[i]);
    CHECK(relative_error(given[i], exact[i]) <= 2 * relative_error(unfused[i], exact[i]) + 1e-6);
  }
}

bool same(const AttentionValues& a, const AttentionValues& b) {
  for (size_t i = 0; i < 5; ++i) {
    if (a[i].size() != b[i].size()) return false;
    if (!a[i].empty() && std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(double)) != 0) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("cuda attention: 1,000 random sizes, layouts and options" * needs_gpu()) {
  std::mt19937 random(1);
  for (int n = 0; n < 1000; ++n) {
    const GpuAttentionCase problem = random_case(random);
    INFO(n, ": ", problem.describe());
    GpuAttention attention(problem, random);
    const AttentionValues expected = attention.reference();
    const double least = least_gradient(problem, expected);
    for_each_kernel(problem.dtype,
                    [&](AttentionKernel kernel) { check_near(attention.run(kernel), expected, problem.dtype, least); });
  }
}

TEST_CASE("cuda attention: errors at most twice those of unfused attention" * needs_gpu()) {
  std::mt19937 random(2);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int64_t dim : {32, 64, 96, 128, 192, 256}) {
      for (const bool causal : {false, true}) {
        for (const auto& [seq_q, seq_k, heads] : {std::array<int64_t, 3>{300, 300, 1}, {129, 172, 2}, {128, 173, 2}}) {
          GpuAttention attention({.seq_q = seq_q,
                                  .seq_k = seq_k,
                                  .heads = heads,
                                  .dim = dim,
                                  .dtype = dtype,
                                  .options = {.causal = causal}},
                                 random);
          INFO("dim ", dim, " causal ", causal, " seq_len ", seq_q, " ", seq_k);
          const AttentionValues exact = attention.reference(), unfused = attention.reference(dtype);
          for_each_kernel(
              dtype, [&](AttentionKernel kernel) { check_rounds_like_unfused(attention.run(kernel), exact, unfused); });
        }
      }
    }
  }
}

TEST_CASE("cuda attention: the same bits on every run" * needs_gpu()) {
  std::mt19937 random(3);
  for (const DType dtype : floating_dtypes) {
    GpuAttention attention({.batch = 3,
                            .seq_q = 700,
                            .seq_k = 650,
                            .heads = 4,
                            .kv_heads = 2,
                            .dim = 64,
                            .dtype = dtype,
                            .options = {.window_left = 500, .dropout_p = 0.2},
                            .lengths_q = {700, 0, 333},
                            .lengths_k = {650, 77, 500},
                            .padding = 5},
                           random);
    for_each_kernel(dtype, [&](AttentionKernel kernel) {
      const AttentionValues first = attention.run(kernel);
      for (int n = 0; n < 19; ++n) CHECK(same(attention.run(kernel), first));
    });
  }
}

TEST_CASE("cuda attention: NaN reaches exactly the rows that see it" * needs_gpu()) {
  std::mt19937 random(4);
  for (int n = 0; n < 150; ++n) {
    GpuAttentionCase problem = random_case(random);
    problem.constant_dout = false;
    problem.options.softmax_scale.reset();
    if (n % 3 != 0) problem.options.causal = true;
    GpuAttention attention(problem, random);
    for (AttentionOperand* x : {&attention.query, &attention.key, &attention.value, &attention.dout}) {
      if (random() % 2 == 0 || x->values.empty()) continue;
      for (int count = 0; count < 2; ++count) x->values[random() % x->values.size()] = std::nan("");
      x->upload();
    }
    INFO(n, ": ", problem.describe());
    const AttentionValues expected = attention.reference();
    check_near(attention.run(AttentionKernel::portable), expected, problem.dtype, least_gradient(problem, expected));
  }
}

TEST_CASE("cuda attention: infinity does not reach rows that do not see it" * needs_gpu()) {
  std::mt19937 random(5);
  for (const DType dtype : floating_dtypes) {
    const int64_t seq = 150, dim = 40, first_spoilt = 70;
    GpuAttention attention({.seq_q = seq, .seq_k = seq, .dim = dim, .dtype = dtype, .options = {.causal = true}},
                           random);
    const AttentionValues clean = attention.run(AttentionKernel::portable);
    for (AttentionOperand* x : {&attention.key, &attention.value}) {
      for (size_t i = static_cast<size_t>(first_spoilt * dim); i < x->values.size(); ++i) {
        x->values[i] = i % 2 == 0 ? INFINITY : -INFINITY;
      }
      x->upload();
    }
    const AttentionValues spoilt = attention.run(AttentionKernel::portable);
    for (const size_t i : {0, 1, 2}) {
      const size_t count = static_cast<size_t>(first_spoilt) * (i == 1 ? 1 : static_cast<size_t>(dim));
      CHECK(std::memcmp(clean[i].data(), spoilt[i].data(), count * sizeof(double)) == 0);
    }
  }
}

TEST_CASE("cuda attention: cases with an exact answer" * needs_gpu()) {
  std::mt19937 random(6);
  const auto near = [](double x, double expected, DType dtype) {
    return expected == 0 ? x == 0
                         : std::abs(x - expected) <= std::abs(expected) * std::ldexp(2.0, dtype == DType::bf16  ? -8
                                                                                          : dtype == DType::f16 ? -11
                                                                                          : dtype == DType::f32 ? -23
                                                                                                                : -52);
  };
  for (const DType dtype : floating_dtypes) {
    for_each_kernel(dtype, [&](AttentionKernel kernel) {
      {
        GpuAttention one({.dtype = dtype}, random);
        const AttentionValues values = one.run(kernel);
        CHECK(values[0] == one.value.values);
        CHECK(values[4] == one.dout.values);
        // The difference of two sums, which only the portable kernel forms in the same order.
        const double bound = kernel == AttentionKernel::portable ? 0 : 1e-6;
        for (const size_t i : {2, 3}) CHECK(largest(values[i]) <= bound);
      }
      for (const int64_t seq : {7, 129}) {
        GpuAttention mean({.seq_q = seq, .seq_k = seq, .dtype = dtype, .options = {.causal = true}}, random);
        mean.query.fill([] { return 0; });
        mean.value.fill([i = 0]() mutable { return i++ / 16; });
        const AttentionValues values = mean.run(kernel);
        for (size_t i = 0; i < static_cast<size_t>(seq); ++i) {
          CHECK(near(values[0][16 * i], static_cast<double>(i) / 2, dtype));
          CHECK(std::abs(values[1][i] - std::log(static_cast<double>(i) + 1)) <= 1e-6);
        }
      }
      {
        GpuAttention few({.seq_q = 5, .seq_k = 2, .dtype = dtype, .options = {.causal = true}}, random);
        few.query.fill([] { return 0; });
        few.value.fill([i = 0]() mutable { return i++ < 16 ? 10 : 20; });
        few.dout.fill([] { return 1; });
        const AttentionValues values = few.run(kernel);
        const double out[] = {0, 0, 0, 10, 15}, dvalue[] = {1.5, 0.5};
        for (size_t i = 0; i < 5; ++i) CHECK(near(values[0][16 * i], out[i], dtype));
        for (size_t i = 0; i < 3; ++i) CHECK(values[1][i] == -INFINITY);
        CHECK(std::abs(values[1][3]) <= 1e-6);
        CHECK(std::abs(values[1][4] - std::log(2.0)) <= 1e-6);
        for (size_t j = 0; j < 2; ++j) CHECK(near(values[4][16 * j], dvalue[j], dtype));
      }
      {
        GpuAttention large({.seq_q = 1, .seq_k = 4, .dim = 128, .dtype = dtype}, random);
        large.query.fill([i = 0]() mutable { return i++ == 0 ? 512 : 0; });
        large.key.fill([i = 0]() mutable { return i++ % 128 == 0 ? -1024 : 0; });
        large.value.fill([] { return 1; });
        const AttentionValues values = large.run(kernel);
        for (const double x : values[0]) CHECK(near(x, 1, dtype));
      }
    });
  }
}

TEST_CASE("cuda attention: logits of 1e5 keep their digits" * needs_gpu()) {
  std::mt19937 random(7);
  for (const DType dtype : floating_dtypes) {
    for (const double scale : {1.0, -1.0}) {
      const int64_t seq = 130, dim = 64;
      GpuAttention attention(
          {.seq_q = seq, .seq_k = seq, .dim = dim, .dtype = dtype, .options = {.softmax_scale = scale}}, random);
      // Whole numbers whose products are exact in f32, and every key twice.
      const auto whole = [&] { return static_cast<double>(random() % 101) - 50; };
      attention.query.fill(whole);
      attention.key.fill(whole);
      for (size_t j = 1; j < static_cast<size_t>(seq); j += 2) {
        for (size_t c = 0; c < static_cast<size_t>(dim); ++c) {
          attention.key.values[j * dim + c] = attention.key.values[(j - 1) * dim + c];
        }
      }
      attention.key.upload();
      for (size_t i = 0; i < attention.query.values.size(); i += static_cast<size_t>(dim))
        attention.query.values[i] = 100;
      attention.query.upload();
      INFO("scale ", scale);
      const AttentionValues expected = attention.reference();
      // dquery is a difference of keys of up to 50 times gradients of about 4.
      for_each_kernel(dtype, [&](AttentionKernel kernel) { check_near(attention.run(kernel), expected, dtype, 200); });
    }
  }
}

TEST_CASE("cuda attention: backward takes the lse of more keys than it is given" * needs_gpu()) {
  std::mt19937 random(8);
  for (const double scale : {0.1, 300.0}) {
    GpuAttention attention(
        {.seq_q = 40, .seq_k = 50, .dim = 32, .dtype = DType::f64, .options = {.softmax_scale = scale}}, random);
    const AttentionValues alone = attention.run(AttentionKernel::portable);
    attention.change_lse = [](double lse) { return lse + std::log(4.0); };
    const AttentionValues part = attention.run(AttentionKernel::portable);
    std::vector<double> quarter = alone[4];
    for (double& x : quarter) x /= 4;
    CHECK(relative_error(part[4], quarter) <= 1e-9);
  }
}

TEST_CASE("cuda attention: heads and batches are independent" * needs_gpu()) {
  std::mt19937 random(9);
  for (const DType dtype : floating_dtypes) {
    const int64_t batch = 3, seq = 90, heads = 2, dim = 32;
    GpuAttention all({.batch = batch,
                      .seq_q = seq,
                      .seq_k = seq,
                      .heads = heads,
                      .kv_heads = heads,
                      .dim = dim,
                      .dtype = dtype,
                      .options = {.causal = true}},
                     random);
    for_each_kernel(dtype, [&](AttentionKernel kernel) {
      const AttentionValues together = all.run(kernel);
      for (int64_t b = 0; b < batch; ++b) {
        GpuAttention single({.seq_q = seq,
                             .seq_k = seq,
                             .heads = heads,
                             .kv_heads = heads,
                             .dim = dim,
                             .dtype = dtype,
                             .options = {.causal = true}},
                            random);
        const std::ptrdiff_t count = seq * heads * dim;
        const auto part = [&](AttentionOperand& to, const AttentionOperand& from) {
          to.values.assign(from.values.begin() + b * count, from.values.begin() + (b + 1) * count);
          to.upload();
        };
        part(single.query, all.query);
        part(single.key, all.key);
        part(single.value, all.value);
        part(single.dout, all.dout);
        const AttentionValues alone = single.run(kernel);
        for (size_t i = 0; i < 5; ++i) {
          const size_t size = alone[i].size();
          CHECK(std::memcmp(alone[i].data(), together[i].data() + static_cast<size_t>(b) * size,
                            size * sizeof(double)) == 0);
        }
      }
    });
  }
}

TEST_CASE("cuda attention: more than 65,535 heads" * needs_gpu()) {
  std::mt19937 random(10);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    GpuAttention many({.batch = 35000, .seq_q = 3, .seq_k = 2, .heads = 2, .kv_heads = 1, .dim = 4, .dtype = dtype},
                      random);
    const AttentionValues expected = many.reference();
    for_each_kernel(dtype, [&](AttentionKernel kernel) { check_near(many.run(kernel), expected, dtype); });
  }
}

TEST_CASE("cuda attention: operands beyond 2^31 elements" * needs_gpu()) {
  constexpr int64_t far = (int64_t{1} << 31) + 64, seq = 70, heads = 2, dim = 64, rows = seq * heads, part = rows * dim;
  constexpr int64_t operands = 8;  // query, key, value, out, dout, dquery, dkey, dvalue
  const Stream stream = gpu_stream();
  const auto bytes = [](int64_t elements) { return static_cast<size_t>(elements) * sizeof(bfloat16); };
  void* const memory = raw_malloc(bytes(far + operands * part), Device::cuda());
  if (memory == nullptr) {
    MESSAGE("skipped: the GPU has no 4.3 GB");
    return;
  }
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  std::vector<bfloat16> host(static_cast<size_t>(operands * part));
  for (bfloat16& x : host) x = bfloat16(normal(random));
  for_each_kernel(DType::bf16, [&](AttentionKernel kernel) {
    // Both batches hold the same numbers: what lies near the start is the answer to what lies far away.
    for (const int64_t offset : {int64_t{0}, far}) {
      raw_copy(static_cast<bfloat16*>(memory) + offset, Device::cuda(), host.data(), Device::cpu(),
               bytes(operands * part), stream);
    }
    const auto tensor = [&](int64_t index) {
      return AttentionTensor{static_cast<bfloat16*>(memory) + index * part, far, heads * dim, dim};
    };
    const GpuMemory lse(2 * rows * sizeof(float));
    AttentionGradArgs args{};
    args.forward = {.query = tensor(0),
                    .key = tensor(1),
                    .value = tensor(2),
                    .out = tensor(3),
                    .lse = lse.data(),
                    .batch = 2,
                    .seq_len_q = seq,
                    .seq_len_k = seq,
                    .num_heads = heads,
                    .num_kv_heads = heads,
                    .head_dim = dim,
                    .dtype = DType::bf16,
                    .softmax_scale = 0.125,
                    .causal = true,
                    .kernel = kernel};
    args.dout = tensor(4);
    args.dquery = tensor(5);
    args.dkey = tensor(6);
    args.dvalue = tensor(7);
    args.workspace_bytes = flash_attention_backward_workspace(args, Device::cuda());
    const GpuMemory workspace(args.workspace_bytes);
    args.workspace = workspace.data();
    flash_attention_forward(args.forward, stream);
    flash_attention_backward(args, stream);
    std::vector<bfloat16> near_results(host.size()), far_results(host.size());
    raw_copy(near_results.data(), Device::cpu(), memory, Device::cuda(), bytes(operands * part), stream);
    raw_copy(far_results.data(), Device::cpu(), static_cast<bfloat16*>(memory) + far, Device::cuda(),
             bytes(operands * part), stream);
    CHECK(std::memcmp(near_results.data(), far_results.data(), bytes(operands * part)) == 0);
    for (const int64_t index : {3, 5, 6, 7}) {
      CHECK(std::memcmp(near_results.data() + index * part, host.data() + index * part, bytes(part)) != 0);
    }
  });
  raw_free(memory, Device::cuda());
}

TEST_CASE("cuda attention: merging two sets of keys" * needs_gpu()) {
  const int64_t batch = 2, seq = 37, heads = 3, dim = 45, queries = batch * seq * heads, count = queries * dim;
  for (const DType dtype : floating_dtypes) {
    INFO(std::string(name_of(dtype)));
    const DType wide = accumulate_dtype(dtype);
    const auto with_blind_rows = [&](unsigned seed, size_t first) {
      std::vector<double> lse = random_values(queries, seed, -3, 3);
      for (size_t i = first; i < lse.size(); i += 5) lse[i] = -INFINITY;
      return lse;
    };
    Operand out_a(random_values(count, 1), dtype), out_b(random_values(count, 2), dtype);
    Operand lse_a(with_blind_rows(3, 0), wide), lse_b(with_blind_rows(4, 10), wide);
    Operand dout(random_values(count, 5), dtype), dlse(random_values(queries, 6), wide);
    Operand out(Operand::unwritten(count), dtype), lse(Operand::unwritten(queries), wide);
    Operand dout_a(Operand::unwritten(count), dtype), dout_b(Operand::unwritten(count), dtype);
    Operand dlse_a(Operand::unwritten(queries), wide), dlse_b(Operand::unwritten(queries), wide);
    const auto run = [&](const Stream& stream, DType type, auto&& at) {
      const AttentionCombineArgs args{at(out), at(lse), at(out_a), at(lse_a), at(out_b), at(lse_b),
                                      batch,   seq,     heads,     dim,       type};
      attention_combine_forward(args, stream);
      attention_combine_backward({args, at(dout), at(dlse), at(dout_a), at(dlse_a), at(dout_b), at(dlse_b)}, stream);
    };
    run({}, DType::f64, [](Operand& x) -> void* { return x.host(); });
    run(gpu_stream(), dtype, [](Operand& x) { return x.gpu(); });
    for (const Operand* x : {&out, &lse, &dout_a, &dlse_a, &dout_b, &dlse_b}) CHECK(x->error() <= gpu_tolerance(dtype));
  }
}

TEST_CASE("cuda attention: what is refused, by name" * needs_gpu()) {
  AttentionArgs args{};
  args.batch = args.seq_len_q = args.seq_len_k = args.num_heads = args.num_kv_heads = 1;
  args.head_dim = 16;
  const auto message = [](const AttentionArgs& asked) {
    try {
      flash_attention_forward(asked, gpu_stream());
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("nothing");
  };
  args.kernel = AttentionKernel::hopper;
  CHECK(message(args).find("kernel hopper given, but it ") != std::string::npos);
  args.kernel = AttentionKernel::mma;
  CHECK(message(args).find("dtype is f32") != std::string::npos);
  args.kernel = AttentionKernel::auto_select;
  args.head_dim = 257;
  CHECK(message(args).find("head_dim 257") != std::string::npos);
  args.head_dim = 16;
  const int32_t starts[2] = {0, 1};
  args.cu_seqlens_q = starts;
  CHECK(message(args).find("null given, expected both") != std::string::npos);
  args.cu_seqlens_q = nullptr;
  AttentionGradArgs grad{};
  grad.forward = args;
  CHECK_THROWS_WITH_AS(flash_attention_backward(grad, gpu_stream()),
                       doctest::Contains("flash_attention_backward: workspace of 0 bytes given"), Error);
}
