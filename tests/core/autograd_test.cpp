#include "strobe/core/autograd.h"

#include "support/compare.h"

using namespace strobe;
using namespace strobe::testing;

TEST_CASE("backward: gradients of every use add up, and again over several passes") {
  const Tensor x = from_vector<double>({2, 3}, {2}).set_requires_grad();
  sum(x * x + x).backward();
  CHECK(x.grad().to_vector<double>() == std::vector<double>{5, 7});
  sum(x + x).backward();
  CHECK(x.grad().to_vector<double>() == std::vector<double>{7, 9});
}

TEST_CASE("backward: two leaves that get one gradient do not share it") {
  const Tensor a = ones({3}).set_requires_grad();
  const Tensor b = ones({3}).set_requires_grad();
  sum(a + b).backward();
  sum(a * 2.0).backward();
  CHECK(a.grad().to_vector<float>() == std::vector<float>(3, 3.0f));
  CHECK(b.grad().to_vector<float>() == std::vector<float>(3, 1.0f));
}

TEST_CASE("backward: the caller's gradient tensor is left alone") {
  const Tensor x = ones({3}).set_requires_grad();
  const Tensor dout = ones({3});
  x.backward(dout);
  x.backward(dout);
  CHECK(dout.to_vector<float>() == std::vector<float>(3, 1.0f));
  CHECK(x.grad().to_vector<float>() == std::vector<float>(3, 2.0f));
}

TEST_CASE("backward: a second pass over a freed graph changes nothing and says so") {
  const Tensor x = ones({2}).set_requires_grad();
  const Tensor shared = exp(x);
  const Tensor loss = sum(shared);
  const Tensor other = sum(shared * x);
  loss.backward();
  const std::vector<float> before = x.grad().to_vector<float>();
  CHECK(contains(error_of([&] { loss.backward(); }), "'sum' was freed by an earlier backward"));
  CHECK(contains(error_of([&] { other.backward(); }), "'exp' was freed by an earlier backward"));
  CHECK(x.grad().to_vector<float>() == before);
}

TEST_CASE("backward: bad calls are refused") {
  const Tensor x = ones({2}).set_requires_grad();
  CHECK(contains(error_of([&] { (x * 2.0).backward(); }), "expected one element"));
  CHECK(contains(error_of([&] { ones({1}).backward(); }), "requires a gradient"));
  CHECK(contains(error_of([&] { (x * 2.0).backward(ones({3})); }), "expected shape (2)"));
  CHECK(contains(error_of([&] { (x * 2.0).backward(ones({2}, DType::f64)); }), "dtype"));
  CHECK(contains(error_of([&] { arange(3).set_requires_grad(); }), "floating-point"));
  const Tensor wrong = record("wrong", ones({2}), {x}, [](const Tensor&) -> Grads { return {ones({4})}; });
  CHECK(contains(error_of([&] { sum(wrong).backward(); }), "wrong: gradient (4) does not match input (2)"));
  const Tensor few = record("few", ones({2}), {x, x}, [](const Tensor&) -> Grads { return {ones({2})}; });
  CHECK(contains(error_of([&] { sum(few).backward(); }), "few: backward gave 1 gradients, expected 2"));
}

TEST_CASE("NoGrad: nothing is recorded, and afterwards it is again") {
  const Tensor x = ones({2}).set_requires_grad();
  {
    const NoGrad no_grad;
    CHECK_FALSE((x * 2.0).requires_grad());
    const EnableGrad enable_grad;
    CHECK((x * 2.0).requires_grad());
  }
  CHECK((x * 2.0).requires_grad());
  CHECK_FALSE((x * 2.0).detach().requires_grad());
}

TEST_CASE("autograd: a very long chain neither overflows the stack in backward nor when dropped") {
  const Tensor x = ones({1}).set_requires_grad();
  Tensor y = x;
  for (int i = 0; i < 200000; ++i) y = y + 1.0;
  y.backward();
  CHECK(x.grad().item<float>() == 1.0f);
  for (int i = 0; i < 200000; ++i) y = (i == 0 ? x : y) + 1.0;
  y = Tensor();
}

TEST_CASE("autograd: activations are freed while backward runs") {
  const Tensor x = ones({1000}).set_requires_grad();
  const size_t before = memory_stats().current;
  Tensor y = x;
  for (int i = 0; i < 10; ++i) y = exp(y * 0.1);
  CHECK(memory_stats().current > before + 10 * 4000);
  sum(y).backward();
  y = Tensor();
  CHECK(memory_stats().current == before + 4000);  // the gradient
}

TEST_CASE("split: an output without a gradient counts as zero") {
  const Tensor x = ones({4}).set_requires_grad();
  sum(split(x, {1, 3}, 0)[1] * 2.0).backward();
  CHECK(x.grad().to_vector<float>() == std::vector<float>{0, 2, 2, 2});
}

TEST_CASE("checkpoint: the same gradients, less memory, the same random numbers") {
  const Tensor weight = full({64, 64}, 0.1).set_requires_grad();
  const Tensor x = ones({8, 64});  // needs no gradient itself; the weight does
  const auto deep = [&](const Tensor& input) {
    Tensor y = input;
    for (int i = 0; i < 8; ++i) y = dropout(tanh(matmul(y, weight)), 0.2);
    return y;
  };
  seed(3);
  const size_t start = memory_stats().current;
  const Tensor direct = sum(deep(x));
  const size_t direct_bytes = memory_stats().current - start;
  direct.backward();
  const std::vector<float> expected = weight.grad().to_vector<float>();
  const RandomState after = random_state();
  weight.set_grad(Tensor());
  seed(3);
  const size_t again = memory_stats().current;
  const Tensor checkpointed = sum(checkpoint(deep, x));
  CHECK(memory_stats().current - again < direct_bytes / 4);
  CHECK(random_state() == after);
  checkpointed.backward();
  CHECK(random_state() == after);
  CHECK(checkpointed.item<float>() == direct.item<float>());
  CHECK(weight.grad().to_vector<float>() == expected);
}

TEST_CASE("checkpoint: history that does not come through x is refused") {
  const Tensor w = ones({2}).set_requires_grad();
  const Tensor computed = w * 2.0;
  const Tensor y = checkpoint([&](const Tensor& input) { return input * computed; }, ones({2}));
  CHECK(contains(error_of([&] { sum(y).backward(); }), "expected it to come through x"));
}

TEST_CASE("checkpoint: an exception in the second pass leaves the random state where it was") {
  const Tensor x = ones({2}).set_requires_grad();
  int calls = 0;
  const Tensor y = checkpoint(
      [&](const Tensor& input) {
        if (++calls == 2) fail("second pass");
        return dropout(input, 0.5);
      },
      x);
  const RandomState state = random_state();
  CHECK(contains(error_of([&] { sum(y).backward(); }), "second pass"));
  CHECK(random_state() == state);
}

TEST_CASE("backward: an input that was assigned other memory since is refused") {
  const Tensor w = ones({64}, DType::f64).set_requires_grad();
  const Tensor x = ones({64}, DType::f64).set_requires_grad();
  const Tensor y = sum(w * x);
  w.assign(w.to(DType::f16));
  CHECK(contains(error_of([&] { y.backward(); }), "'mul' was assigned to after it was used"));
  CHECK_FALSE(x.grad().defined());
}

TEST_CASE("observer: sees every operation forward and backward, in order, and none of its own") {
  const Tensor w = ones({2, 2}).set_requires_grad();
  std::vector<std::string> seen;
  {
    const OperationObserver observer([&](const Operation& operation) {
      seen.push_back(std::string(operation.backward ? "d" : "") + operation.name);
      for (const Tensor& result : operation.results)
        if (result.defined()) CHECK(std::isfinite(sum(result).item<double>()));
      if (seen.size() == 1) CHECK(operation.inputs[0].impl() == w.impl());
    });
    sum(gelu(w)).backward();
  }
  sum(gelu(w));
  const auto place_of = [&](const char* name) { return std::find(seen.begin(), seen.end(), name) - seen.begin(); };
  CHECK(place_of("gelu") == 0);
  CHECK(place_of("sum") == 1);
  CHECK(place_of("dsum") > 1);
  CHECK(place_of("dgelu") > place_of("dsum"));
  CHECK(place_of("dgelu") + 1 == std::ssize(seen));
}
