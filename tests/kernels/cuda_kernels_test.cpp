// Kernels on a GPU against the CPU where the table of operations does not reach: sizes around the edges of packs,
// warps, blocks and grids, addresses that are not aligned, values that are not finite, many rows of one index.
#include "strobe/kernels/device.h"
#include "support/op_cases.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

constexpr Device gpu = Device::cuda();
const std::vector<DType> floating{DType::f32, DType::f64, DType::bf16, DType::f16};

// The largest difference of f on the GPU and on the CPU for the same inputs.
double difference(const OpFunction& f, const std::vector<Tensor>& inputs) {
  const NoGrad no_grad;
  std::vector<Tensor> there;
  for (const Tensor& input : inputs) there.push_back(input.to(gpu));
  return relative_difference(f(there), f(inputs));
}

Tensor with_odd_values(const Tensor& x) {
  const double infinity = std::numeric_limits<double>::infinity();
  const std::vector<double> odd{std::nan(""), infinity, -infinity, 0.0, -0.0, 1e30, -1e30, 1e-30};
  const int64_t count = std::min<int64_t>(static_cast<int64_t>(odd.size()), x.size());
  slice(x, 0, 0, count).copy_from(from_vector(std::vector<double>(odd.begin(), odd.begin() + count), {count}));
  return x;
}

}  // namespace

TEST_CASE("gpu pointwise: every size, alignment and value as on the CPU" * needs_gpu()) {
  const std::vector<std::pair<const char*, OpFunction>> functions{
      {"neg", [](auto& x) { return -x[0]; }},           {"exp", [](auto& x) { return exp(x[0]); }},
      {"log", [](auto& x) { return log(x[0]); }},       {"sqrt", [](auto& x) { return sqrt(x[0]); }},
      {"square", [](auto& x) { return square(x[0]); }}, {"tanh", [](auto& x) { return tanh(x[0]); }},
      {"relu", [](auto& x) { return relu(x[0]); }},     {"silu", [](auto& x) { return silu(x[0]); }},
      {"gelu", [](auto& x) { return gelu(x[0]); }},     {"gelu_tanh", [](auto& x) { return gelu_tanh(x[0]); }},
      {"add", [](auto& x) { return x[0] + x[1]; }},     {"sub", [](auto& x) { return x[0] - x[1]; }},
      {"mul", [](auto& x) { return x[0] * x[1]; }},     {"div", [](auto& x) { return x[0] / x[1]; }},
      {"1 - x", [](auto& x) { return 1.0 - x[0]; }}};
  seed(11);
  for (DType dtype : floating) {
    for (int64_t size : {0, 1, 3, 7, 8, 9, 31, 255, 1025, 4097, 100003}) {
      const Tensor a = with_odd_values(normal({size + 1}, 0, 2, DType::f64)).to(dtype);
      const Tensor b = normal({size + 1}, 0, 2, DType::f64).to(dtype);
      for (const auto& [name, function] : functions) {
        for (int64_t start : {0, 1}) {
          CAPTURE(std::string(name));
          CAPTURE(std::string(name_of(dtype)));
          CAPTURE(size);
          CAPTURE(start);
          const auto from_start = [&, f = function](auto& x) {
            std::vector<Tensor> views;
            for (const Tensor& each : x) views.push_back(slice(each, 0, start, start + size));
            return f(views);
          };
          CHECK(difference(from_start, {a, b}) <= tolerance(dtype));
        }
      }
    }
  }
}

TEST_CASE("gpu pointwise: broadcast shapes, in packs and singly" * needs_gpu()) {
  seed(12);
  for (DType dtype : floating) {
    for (int64_t n : {1, 5, 8, 24, 64, 257}) {
      const std::vector<std::pair<Shape, Shape>> shapes{{{7, 33, n}, {n}},    {{7, 33, n}, {33, 1}},
                                                        {{7, 1, n}, {33, n}}, {{7, 33, n}, {7, 1, 1}},
                                                        {{1, n}, {65, 1}},    {{n, 3}, {}}};
      for (const auto& [a, b] : shapes) {
        CAPTURE(n);
        const std::vector<Tensor> inputs{normal(a, 0, 1, DType::f64).to(dtype), normal(b, 0, 1, DType::f64).to(dtype)};
        CHECK(difference([](auto& x) { return x[0] * x[1]; }, inputs) <= tolerance(dtype));
        CHECK(difference([](auto& x) { return transpose(x[0], 0, -1) - 2.0; }, inputs) <= tolerance(dtype));
      }
    }
  }
}

TEST_CASE("gpu reductions: rows and columns of all lengths, NaN and infinity included" * needs_gpu()) {
  seed(13);
  for (DType dtype : floating) {
    for (const Shape& shape : std::vector<Shape>{{1, 1, 1},
                                                 {3, 0, 5},
                                                 {0, 3, 5},
                                                 {5, 31, 1},
                                                 {3, 1025, 1},
                                                 {1, 300001, 1},
                                                 {40, 8192, 1},
                                                 {2, 70, 3},
                                                 {1, 5000, 7},
                                                 {1, 3000, 129},
                                                 {3, 33, 256},
                                                 {300, 768, 1},
                                                 {2, 2000, 264},
                                                 {1, 4099, 768}}) {
      CAPTURE(shape);
      CAPTURE(std::string(name_of(dtype)));
      const Tensor x = uniform(shape, 0.25, 1, DType::f64).to(dtype);
      CHECK(difference([](auto& t) { return sum(t[0], {1}); }, {x}) <= tolerance(dtype));
      CHECK(difference([](auto& t) { return mean(t[0], {1}); }, {x}) <= tolerance(dtype));
      CHECK(difference([](auto& t) { return sum(t[0]); }, {x}) <= tolerance(dtype));
      if (shape[1] == 0) continue;
      CHECK(difference([](auto& t) { return max(t[0], {1}); }, {x}) == 0);
      const Tensor flat = reshape(x, {-1});
      if (x.size() > 8) {
        with_odd_values(flat);
        CHECK(difference([](auto& t) { return max(t[0], {1}); }, {x}) == 0);
        slice(flat, 0, 0, 1).copy_from(full({1}, 0.5, dtype));
        slice(flat, 0, 2, 3).copy_from(full({1}, 0.5, dtype));
        CHECK(difference([](auto& t) { return max(t[0]); }, {x}) == 0);
        CHECK(difference([](auto& t) { return sum(t[0], {1}); }, {x}) <= tolerance(dtype));
      }
    }
  }
}

TEST_CASE("gpu max: the gradient is shared among equal maxima" * needs_gpu()) {
  for (int64_t inner : {1, 6}) {
    std::vector<Tensor> gradients;
    for (Device device : {Device::cpu(), gpu}) {
      const Tensor x = zeros({4, 100, inner}, DType::f32, device);
      slice(x, 1, 30, 34).copy_from(ones({4, 4, inner}, DType::f32, device));
      x.set_requires_grad();
      sum(max(x, {1})).backward();
      gradients.push_back(x.grad());
    }
    CHECK(relative_difference(gradients[1], gradients[0]) == 0);
  }
}

TEST_CASE("gpu embedding: many rows of one index, none of others, odd widths" * needs_gpu()) {
  seed(14);
  for (DType dtype : floating) {
    for (int64_t vocab : {1, 3, 300, 70000}) {
      for (int64_t rows : {0, 1, 33, 1500, 5000}) {
        for (int64_t dim : {1, 8, 130}) {
          CAPTURE(vocab);
          CAPTURE(rows);
          CAPTURE(dim);
          CAPTURE(std::string(name_of(dtype)));
          // Half of the rows have index 0, the others are spread.
          const Tensor drawn =
              relu(uniform({rows}, -static_cast<double>(vocab), static_cast<double>(vocab), DType::f64));
          const Tensor indices = drawn.to(rows % 2 == 0 ? DType::i32 : DType::i64);
          std::vector<Tensor> results;
          const Tensor table = normal({vocab, dim}, 0, 1, DType::f64).to(dtype);
          const Tensor dout = normal({rows, dim}, 0, 1, DType::f64).to(dtype);
          for (Device device : {Device::cpu(), gpu, gpu}) {
            const Tensor weight = table.to(DType::f64).to(dtype).to(device);
            weight.set_requires_grad();
            const Tensor out = embedding(indices.to(device), weight);
            if (device == gpu) CHECK(relative_difference(out, results[0]) == 0);
            out.backward(dout.to(device));
            if (results.empty()) results.push_back(out.detach());
            results.push_back(weight.grad());
          }
          CHECK(relative_difference(results[2], results[1]) <= tolerance(dtype));
          CHECK(same_bits(results[2], results[3]));
        }
      }
    }
  }
}

TEST_CASE("gpu indices: one out of range is reported by the next call that waits, and reads and writes nothing" *
          needs_gpu()) {
  const Tensor weight = ones({5, 8}, DType::f32, gpu).set_requires_grad();
  const Tensor good = embedding(from_vector<int64_t>({0, 4}, {2}, gpu), weight);
  const Tensor out = embedding(from_vector<int64_t>({0, 1, 5, -1, 1, int64_t{1} << 40}, {3, 2}, gpu), weight);
  const std::string message = error_of([&] { synchronize(out.stream()); });
  CHECK(contains(message, "embedding: indices holds 5 at position (1, 0), expected 0 to 4 (vocab is 5)"));
  const std::vector<float> values = out.to_vector<float>();  // thrown once
  for (size_t i = 0; i < values.size(); ++i) CHECK((i / 8 == 0 || i / 8 == 1 || i / 8 == 4) == (values[i] == 1.0f));
  out.backward(ones(out.shape(), DType::f32, gpu));
  const std::vector<float> gradient = weight.grad().to_vector<float>();
  for (size_t i = 0; i < gradient.size(); ++i) CHECK(gradient[i] == (i < 8 ? 1.0f : i < 16 ? 2.0f : 0.0f));

  const OwnStream own(gpu);
  const StreamGuard guard(own.get());
  const Tensor logits = zeros({3, 7}, DType::f32, gpu).set_requires_grad();
  const Tensor loss = cross_entropy(logits, from_vector<int32_t>({2, -100, 9}, {3}, gpu));
  loss.backward();
  synchronize({gpu, nullptr});  // another stream
  CHECK(contains(error_of([&] { loss.item<float>(); }), "cross_entropy: targets holds 9 at position (2)"));
  CHECK(std::isnan(loss.item<float>()));
  CHECK(good.to_vector<float>() == std::vector<float>(16, 1.0f));
}

TEST_CASE("gpu copy: transposed and permuted, of every size of element" * needs_gpu()) {
  seed(15);
  for (DType from : floating) {
    for (DType to : floating) {
      CAPTURE(std::string(name_of(from)));
      CAPTURE(std::string(name_of(to)));
      for (const auto& [shape, axes] :
           std::vector<std::pair<Shape, std::vector<int>>>{{{200, 131}, {1, 0}},
                                                           {{3, 65, 5, 70}, {0, 3, 2, 1}},
                                                           {{70, 2, 64}, {1, 2, 0}},
                                                           {{17, 16}, {1, 0}},
                                                           {{72, 600}, {1, 0}},
                                                           {{2, 1000, 3, 136}, {0, 3, 2, 1}},
                                                           {{3, 500}, {1, 0}}}) {
        CAPTURE(shape);
        const Tensor x = permute(normal(shape, 0, 1, DType::f64).to(from), axes);
        CHECK(same_bits(contiguous(x.to(gpu)).to(to), contiguous(x).to(to)));
        const Tensor there = permute(contiguous(permute(x, axes)).to(gpu), axes), y = empty(there.shape(), to, gpu);
        y.copy_from(there);
        CHECK(same_bits(y, contiguous(permute(permute(x, axes), axes)).to(to)));
      }
    }
  }
}

TEST_CASE("gpu random: the numbers of the CPU" * needs_gpu()) {
  for (DType dtype : floating) {
    for (int64_t size : {1, 2, 3, 1001, 100000}) {
      CAPTURE(size);
      CAPTURE(std::string(name_of(dtype)));
      std::vector<Tensor> made[2];
      for (int on_gpu : {0, 1}) {
        const Device device = on_gpu ? gpu : Device::cpu();
        seed(15);
        made[on_gpu].push_back(uniform({size}, -1, 3, dtype, device));
        made[on_gpu].push_back(dropout(full({size + 1}, 2.0, dtype, device), 0.3));
        made[on_gpu].push_back(dropout(slice(full({size + 1}, 2.0, dtype, device), 0, 1, size + 1), 0.5));
        made[on_gpu].push_back(normal({size}, 1, 2, dtype, device));
      }
      CHECK(relative_difference(made[1][0], made[0][0]) <= (dtype == DType::f64 ? 1e-15 : 0.0));
      CHECK(same_bits(made[1][1], made[0][1]));
      CHECK(same_bits(made[1][2], made[0][2]));
      CHECK(relative_difference(made[1][3], made[0][3]) <= (dtype == DType::f64 ? 1e-14 : tolerance(dtype) / 10));
    }
  }
}

TEST_CASE("gpu rope: strided inputs, many and few positions" * needs_gpu()) {
  seed(16);
  for (DType dtype : floating) {
    for (const Shape& shape :
         std::vector<Shape>{{2, 300, 3, 64}, {70, 1, 12, 10}, {1, 3, 1, 514}, {0, 3, 1, 4}, {2, 0, 1, 4}}) {
      CAPTURE(shape);
      const Tensor x = normal(shape, 0, 1, DType::f64).to(dtype);
      CHECK(difference([](auto& t) { return rope(t[0], 10000, 1000); }, {x}) <= tolerance(dtype));
      const Tensor swapped = normal({shape[0], shape[2], shape[1], shape[3]}, 0, 1, DType::f64).to(dtype);
      CHECK(difference([](auto& t) { return rope(transpose(t[0], 1, 2)); }, {swapped}) <= tolerance(dtype));
    }
  }
}

TEST_CASE("gpu: more than 2^32 elements" * needs_gpu()) {
  constexpr int64_t size = (int64_t{1} << 32) + 1027;
  if (device_memory(gpu).available < size_t{3} * size * 2) {
    MESSAGE("too little memory on this GPU: not checked");
    return;
  }
  const NoGrad no_grad;
  const Tensor x = full({size}, 1.0, DType::bf16, gpu);
  slice(x, 0, size - 1000, size).copy_from(full({1000}, 2.0, DType::bf16, gpu));
  CHECK(max(x).item<double>() == 2.0);
  const Tensor y = x * x;
  CHECK(slice(y, 0, size - 1001, size).to_vector<float>()[1] == 4.0f);
  CHECK(slice(y, 0, size - 1001, size).to_vector<float>()[0] == 1.0f);
  const Tensor narrow = expand(reshape(slice(y, 0, size - 4, size), {4, 1}), {4, 3}) + 1.0;
  CHECK(narrow.to_vector<float>() == std::vector<float>(12, 5.0f));
  release_cached_memory(gpu);
}
