// The optimizers against the formulas of their papers, gradient clipping and the learning-rate schedules.
#include <cmath>
#include <limits>
#include <numbers>
#include <random>

#include "strobe/kernels/optimizer.h"
#include "support/compare.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

std::vector<double> random_values(size_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> distribution;
  std::vector<double> values(count);
  for (double& value : values) value = distribution(generator);
  return values;
}

Tensor trainable(const std::vector<double>& values, const Shape& shape, DType dtype) {
  const Tensor leaf = empty(shape, dtype);
  leaf.copy_from(from_vector(values, shape));
  return leaf.set_requires_grad();
}

// Gives the parameter a gradient and returns it as the optimizer will read it.
std::vector<double> give_gradient(const Tensor& parameter, uint32_t seed) {
  const std::vector<double> values = random_values(static_cast<size_t>(parameter.size()), seed);
  parameter.set_grad(from_vector(values, parameter.shape()).to(parameter.dtype()));
  return parameter.grad().to_vector<double>();
}

constexpr DType floating[] = {DType::f32, DType::f64, DType::bf16, DType::f16};

}  // namespace

TEST_CASE("AdamW: follows the formulas step by step, with f32 master weights for 16-bit parameters") {
  const double beta1 = 0.8, beta2 = 0.9, eps = 1e-6, weight_decay = 0.3;
  for (DType dtype : floating) {
    CAPTURE(std::string(name_of(dtype)));
    const Tensor parameter = trainable(random_values(35, 1), {5, 7}, dtype);
    AdamW optimizer({parameter}, {.betas = {beta1, beta2}, .eps = eps, .weight_decay = weight_decay});
    std::vector<double> expected = parameter.to_vector<double>(), m(35, 0.0), v(35, 0.0);
    for (int t = 1; t <= 12; ++t) {
      const std::vector<double> gradient = give_gradient(parameter, static_cast<uint32_t>(t));
      const double learning_rate = 0.01 * t;
      optimizer.step(learning_rate);
      for (size_t i = 0; i < expected.size(); ++i) {
        m[i] = beta1 * m[i] + (1 - beta1) * gradient[i];
        v[i] = beta2 * v[i] + (1 - beta2) * gradient[i] * gradient[i];
        const double mean = m[i] / (1 - std::pow(beta1, t)), square = v[i] / (1 - std::pow(beta2, t));
        expected[i] -= learning_rate * (mean / (std::sqrt(square) + eps) + weight_decay * expected[i]);
      }
    }
    const AdamWState& state = optimizer.state[0];
    const double allowed = dtype == DType::f64 ? 1e-14 : 2e-6;
    CHECK(state.step == 12);
    CHECK(relative_difference(state.exp_avg.to_vector<double>(), m) <= allowed);
    CHECK(relative_difference(state.exp_avg_sq.to_vector<double>(), v) <= allowed);
    if (size_of(dtype) == 2) {
      CHECK(relative_difference(state.master.to_vector<double>(), expected) <= allowed);
      CHECK(same_bits(parameter.detach(), state.master.to(dtype)));
    } else {
      CHECK_FALSE(state.master.defined());
      CHECK(relative_difference(parameter.to_vector<double>(), expected) <= allowed);
    }
  }
}

TEST_CASE("AdamW: master weights keep steps that are too small for bf16") {
  const Tensor parameter = trainable({1.0, 1.0}, {2}, DType::bf16);
  AdamW optimizer({parameter}, {.weight_decay = 0});
  for (int t = 0; t < 100; ++t) {
    parameter.set_grad(ones({2}, DType::bf16));
    optimizer.step(1e-4);  // 1 - 1e-4 rounds to 1
  }
  CHECK(parameter.to_vector<float>()[0] == doctest::Approx(0.99).epsilon(0.004));
}

TEST_CASE("SGD: follows the formulas step by step, with and without momentum") {
  for (DType dtype : floating) {
    for (double momentum : {0.0, 0.9}) {
      CAPTURE(std::string(name_of(dtype)));
      CAPTURE(momentum);
      const double weight_decay = 0.2;
      const Tensor parameter = trainable(random_values(35, 1), {5, 7}, dtype);
      SGD optimizer({parameter}, {.momentum = momentum, .weight_decay = weight_decay});
      std::vector<double> expected = parameter.to_vector<double>(), velocity(35, 0.0);
      for (int t = 1; t <= 12; ++t) {
        const std::vector<double> gradient = give_gradient(parameter, static_cast<uint32_t>(t));
        const double learning_rate = 0.01 * t;
        optimizer.step(learning_rate);
        for (size_t i = 0; i < expected.size(); ++i) {
          velocity[i] = momentum * velocity[i] + (gradient[i] + weight_decay * expected[i]);
          expected[i] -= learning_rate * velocity[i];
        }
      }
      const Tensor result = size_of(dtype) == 2 ? optimizer.state[0].master : parameter;
      CHECK(relative_difference(result.to_vector<double>(), expected) <= (dtype == DType::f64 ? 1e-14 : 2e-6));
      CHECK(optimizer.state[0].velocity.defined() == (momentum > 0));
      CHECK(same_bits(parameter.detach(), result.detach().to(dtype)));
    }
  }
}

TEST_CASE("optimizers: weight decay shrinks matrices and leaves vectors and scalars alone") {
  const auto decays = [](auto&& optimizer) {
    for (const Tensor& parameter : optimizer.parameters) parameter.set_grad(zeros(parameter.shape()));
    optimizer.step(0.5);
    return std::array<float, 3>{optimizer.parameters[0].template item<float>(),
                                optimizer.parameters[1].template item<float>(),
                                optimizer.parameters[2].template item<float>()};
  };
  const auto leaves = [] {
    return std::vector<Tensor>{ones({1, 1}).set_requires_grad(), ones({1}).set_requires_grad(),
                               ones({}).set_requires_grad()};
  };
  CHECK(decays(AdamW(leaves(), {.weight_decay = 0.5})) == std::array<float, 3>{0.75f, 1.0f, 1.0f});
  CHECK(decays(SGD(leaves(), {.weight_decay = 0.5})) == std::array<float, 3>{0.75f, 1.0f, 1.0f});
}

TEST_CASE("optimizers: parameters without a gradient keep their value and their state") {
  const Tensor used = trainable({1.0}, {1}, DType::f32), unused = trainable({1.0}, {1}, DType::f32);
  AdamW optimizer({used, unused}, {.learning_rate = 0.1});
  for (int t = 0; t < 3; ++t) {
    used.set_grad(ones({1}));
    optimizer.step();
  }
  CHECK(used.item<float>() == doctest::Approx(0.7));
  CHECK(unused.item<float>() == 1.0f);
  CHECK_FALSE(optimizer.state[1].exp_avg.defined());
  CHECK(optimizer.state[1].step == 0);

  unused.set_grad(ones({1}));  // its own first step: a full one, whatever the others have done
  optimizer.zero_grad();
  CHECK_FALSE(unused.grad().defined());
  unused.set_grad(ones({1}));
  optimizer.step();
  CHECK(unused.item<float>() == doctest::Approx(0.9));
  CHECK(used.item<float>() == doctest::Approx(0.7));
}

TEST_CASE("optimizers: gradients of any strides are read, and the state carries its tag") {
  const Tensor parameter = trainable({1, 2, 3, 4, 5, 6}, {2, 3}, DType::f32);
  const size_t before = memory_stats("optimizer").current;
  SGD optimizer({parameter}, {.learning_rate = 1.0, .momentum = 0.5});
  parameter.set_grad(transpose(from_vector(std::vector<float>{1, 2, 3, 4, 5, 6}, {3, 2}), 0, 1));
  optimizer.step();
  CHECK(parameter.to_vector<float>() == std::vector<float>{0, -1, -2, 2, 1, 0});
  CHECK(memory_stats("optimizer").current >= before + 6 * sizeof(float));
}

TEST_CASE("optimizers: the state follows a model that was converted after some steps") {
  const Tensor parameter = trainable({1.0, -1.0}, {2}, DType::f32);
  AdamW optimizer({parameter}, {.learning_rate = 0.1});
  parameter.set_grad(ones({2}));
  optimizer.step();
  parameter.assign(parameter.detach().to(DType::bf16));
  parameter.set_grad(ones({2}, DType::bf16));
  optimizer.step();
  CHECK(optimizer.state[0].master.dtype() == DType::f32);
  CHECK(optimizer.state[0].master.to_vector<float>()[0] == doctest::Approx(0.8).epsilon(0.004));
  CHECK(optimizer.state[0].step == 2);
}

TEST_CASE("optimizers: bad settings and parameters are named, and nothing is updated") {
  const Tensor leaf = trainable({1.0}, {1}, DType::f32);
  CHECK(error_of([&] { AdamW({leaf}, {.learning_rate = not_a_number}); }) ==
        "AdamW: learning_rate nan given, expected a finite number, at least 0");
  CHECK(contains(error_of([&] { AdamW({leaf}, {.betas = {1.0, 0.9}}); }), "AdamW: beta 1 given"));
  CHECK(contains(error_of([&] { AdamW({leaf}, {.betas = {0.9, -0.1}}); }), "AdamW: beta -0.1 given"));
  CHECK(contains(error_of([&] { AdamW({leaf}, {.betas = {0.9, not_a_number}}); }), "AdamW: beta nan given"));
  CHECK(contains(error_of([&] { AdamW({leaf}, {.eps = -1}); }), "AdamW: eps -1 given"));
  CHECK(contains(error_of([&] { AdamW({leaf}, {.weight_decay = infinity}); }), "AdamW: weight_decay inf given"));
  CHECK(contains(error_of([&] { SGD({leaf}, {.momentum = 1}); }), "SGD: momentum 1 given"));
  CHECK(contains(error_of([&] { SGD({leaf}, {.learning_rate = -0.1}); }), "SGD: learning_rate -0.1 given"));
  CHECK(contains(error_of([&] { AdamW({leaf, Tensor()}); }), "AdamW: parameter 1 is undefined"));
  CHECK(contains(error_of([&] { AdamW({leaf, leaf}); }), "AdamW: parameter 1 is the same tensor as parameter 0"));
  CHECK(contains(error_of([&] { SGD({ones({2})}); }), "SGD: parameter 0 of shape (2) given, expected a leaf"));
  CHECK(contains(error_of([&] { SGD({leaf * 2.0}); }), "expected a leaf that requires a gradient"));

  AdamW optimizer({leaf});
  leaf.set_grad(ones({1}));
  for (double bad : {not_a_number, infinity, -1e-3})
    CHECK(contains(error_of([&] { optimizer.step(bad); }), "learning_rate"));
  CHECK(leaf.item<float>() == 1.0f);
  CHECK(optimizer.state[0].step == 0);
}

TEST_CASE("clip_grad_norm: returns the norm of all gradients and scales them when it is too large") {
  for (DType dtype : floating) {
    CAPTURE(std::string(name_of(dtype)));
    const auto parameters = [dtype] {
      const Tensor a = trainable({0, 0}, {2}, dtype), b = trainable({0}, {1, 1}, dtype), c = trainable({0}, {1}, dtype);
      a.set_grad(from_vector(std::vector<double>{3, 0}, {2}).to(dtype));
      b.set_grad(from_vector(std::vector<double>{-4}, {1, 1}).to(dtype));
      return std::vector<Tensor>{a, b, c};
    };
    const std::vector<Tensor> clipped = parameters(), kept = parameters();
    CHECK(clip_grad_norm(clipped, 2.5) == 5.0);
    CHECK(clipped[0].grad().to_vector<double>() == std::vector<double>{1.5, 0});
    CHECK(clipped[1].grad().to_vector<double>() == std::vector<double>{-2});
    CHECK_FALSE(clipped[2].grad().defined());
    CHECK(clip_grad_norm(kept, 5.0) == 5.0);
    CHECK(clip_grad_norm(kept, infinity) == 5.0);
    CHECK(kept[0].grad().to_vector<double>() == std::vector<double>{3, 0});
  }
  CHECK(clip_grad_norm({}, 1.0) == 0.0);
}

TEST_CASE(
    "clip_grad_norm: is accurate over many elements and free of overflow, and reports a norm that is not finite") {
  const Tensor parameter = zeros({3000, 1000}).set_requires_grad();
  const std::vector<double> values = give_gradient(parameter, 3);
  long double squares = 0;
  for (double value : values) squares += static_cast<long double>(value) * value;
  const int threads = num_threads();
  double norms[2];
  for (int count : {1, 2}) {
    set_num_threads(count);
    norms[count - 1] = clip_grad_norm({parameter}, infinity);
  }
  set_num_threads(threads);
  CHECK(norms[0] == norms[1]);
  CHECK(norms[0] == doctest::Approx(static_cast<double>(std::sqrt(squares))).epsilon(1e-13));

  parameter.set_grad(full({3000, 1000}, 1e30));
  CHECK(clip_grad_norm({parameter}, infinity) == doctest::Approx(1e30 * std::sqrt(3e6)));
  for (double special : {not_a_number, infinity}) {
    parameter.set_grad(full({3000, 1000}, 2.0));
    parameter.grad().data<float>()[1234567] = static_cast<float>(special);
    CHECK_FALSE(std::isfinite(clip_grad_norm({parameter}, 1.0)));
    CHECK(parameter.grad().data<float>()[0] == 2.0f);
  }
  for (double bad : {not_a_number, 0.0, -1.0}) {
    CHECK(contains(error_of([&] { clip_grad_norm({parameter}, bad); }), "clip_grad_norm: max_norm"));
  }
}

TEST_CASE("clip_factor: leaves the gradients alone; the optimizers apply it as they read them") {
  for (DType dtype : floating) {
    CAPTURE(std::string(name_of(dtype)));
    const Tensor clipped = trainable(random_values(35, 1), {5, 7}, dtype),
                 parameter = trainable(random_values(35, 1), {5, 7}, dtype);
    AdamW adamw({parameter}), expected_adamw({clipped});
    SGD sgd({parameter}, {.momentum = 0.5}), expected_sgd({clipped}, {.momentum = 0.5});
    for (uint32_t t = 0; t < 3; ++t) {
      const std::vector<double> gradient = give_gradient(parameter, t);
      double squares = 0;
      for (double g : gradient) squares += g * g;
      const Clipping clipping = clip_factor({parameter}, 0.5);
      CHECK(clipping.norm.item<double>() == doctest::Approx(std::sqrt(squares)).epsilon(1e-13));
      CHECK(clipping.factor.item<double>() == doctest::Approx(0.5 / std::sqrt(squares)).epsilon(1e-13));
      CHECK(parameter.grad().to_vector<double>() == gradient);
      CHECK(clip_factor({parameter}, infinity).factor.item<double>() == 1);
      clipped.set_grad((parameter.grad().to(DType::f64) * clipping.factor).to(dtype));
      adamw.step(0.01, clipping.factor);
      sgd.step(0.01, clipping.factor);
      expected_adamw.step(0.01);
      expected_sgd.step(0.01);
    }
    CHECK(relative_difference(parameter, clipped) <= tolerance(dtype));
    CHECK(adamw.state[0].updates() == 3);
  }
  CHECK(clip_factor({}, 1.0).norm.item<double>() == 0);
  const Tensor parameter = trainable({1}, {1}, DType::f32);
  CHECK(contains(error_of([&] { AdamW({parameter}).step(0.1, ones({1})); }), "AdamW: grad_factor (1) of dtype f32"));
  CHECK(contains(error_of([&] { SGD({parameter}).step(0.1, ones({2}, DType::f64)); }), "SGD: grad_factor (2)"));
}

TEST_CASE("optimizers: a step whose gradients are not finite changes nothing, nor what the next ones do") {
  for (DType dtype : floating) {
    for (double special : {not_a_number, infinity, -infinity}) {
      CAPTURE(std::string(name_of(dtype)));
      CAPTURE(special);
      std::vector<Tensor> results;
      for (bool disturbed : {false, true}) {
        const Tensor a = trainable(random_values(35, 1), {5, 7}, dtype), b = trainable({1, 2}, {2}, dtype);
        AdamW adamw({a, b});
        SGD sgd({a, b}, {.momentum = 0.9});
        for (uint32_t t = 0; t < 6; ++t) {
          if (t == 3 && !disturbed) continue;
          give_gradient(a, t);
          if (t > 1) give_gradient(b, 10 + t);  // joins later, so that its own steps count
          if (t == 3) a.grad().copy_from(full({5, 7}, special));
          const Tensor factor = clip_factor({a, b}, 1.0).factor;
          adamw.step(0.1, factor);
          sgd.step(0.1, factor);
        }
        CHECK(adamw.state[0].updates() == 5);
        CHECK(adamw.state[1].updates() == 3);
        for (const Tensor& tensor : {a.detach(), b.detach(), adamw.state[0].exp_avg_sq, sgd.state[1].velocity}) {
          results.push_back(tensor);
        }
      }
      for (size_t i = 0; i < 4; ++i) CHECK(same_bits(results[i], results[i + 4]));
    }
  }
}

TEST_CASE("GradScaler: shrinks the scale when gradients overflow, lets it grow after enough finite steps") {
  const Tensor parameter = trainable({1}, {1}, DType::f16);
  GradScaler scaler({.initial_scale = 64, .growth = 4, .backoff = 0.25, .growth_interval = 3});
  const auto scale_after = [&](double gradient) {
    parameter.set_grad(full({1}, gradient).to(DType::f16));
    const double before = scaler.scale.item<double>();
    const Clipping clipping = scaler.clip({parameter}, 2.0);
    CHECK(clipping.norm.item<double>() == std::abs(gradient) / before);
    if (std::isfinite(gradient)) {
      CHECK(clipping.factor.item<double>() * gradient == doctest::Approx(std::min(2.0, gradient / before)));
    } else {
      CHECK(std::isnan(clipping.factor.item<double>()));
    }
    return scaler.scale.item<double>();
  };
  CHECK(scale_after(64) == 64);
  CHECK(scale_after(1024) == 64);
  CHECK(scale_after(infinity) == 16);
  CHECK(scale_after(64) == 16);
  CHECK(scale_after(64) == 16);
  CHECK(scale_after(64) == 64);
  for (int i = 0; i < 9; ++i) scale_after(infinity);
  CHECK(scaler.scale.item<double>() == 1);
  CHECK(contains(error_of([] { GradScaler({.initial_scale = 0.5}); }), "GradScaler: initial_scale 0.5"));
  CHECK(contains(error_of([] { GradScaler({.backoff = 0}); }), "GradScaler: backoff 0"));
  CHECK(contains(error_of([] { GradScaler({.growth = 0.5}); }), "GradScaler: growth 0.5"));
  CHECK(contains(error_of([] { GradScaler({.growth_interval = 0}); }), "GradScaler: growth_interval 0"));
  CHECK(contains(error_of([&] { scaler(ones({2})); }), "GradScaler: loss of shape (2)"));
}

TEST_CASE("optimizer kernels: bits do not depend on the number of threads") {
  const int threads = num_threads();
  std::vector<Tensor> results;
  for (int count : {1, 2}) {
    set_num_threads(count);
    const Tensor parameter = trainable(random_values(100003, 1), {100003}, DType::f32);
    AdamW optimizer({parameter});
    for (uint32_t t = 0; t < 3; ++t) {
      give_gradient(parameter, t);
      clip_grad_norm(optimizer.parameters, 1.0);
      optimizer.step();
    }
    results.push_back(parameter.detach());
  }
  set_num_threads(threads);
  CHECK(same_bits(results[0], results[1]));
}

TEST_CASE("schedules: exact values at warm-up, peak, on the way and after the end") {
  const ConstantSchedule constant{.peak = 0.5};
  CHECK(constant(0) == 0.5);
  CHECK(constant(1000000) == 0.5);

  const CosineSchedule cosine{.peak = 8, .warmup_steps = 3, .total_steps = 11, .final_fraction = 0.25};
  CHECK(cosine(0) == 2);
  CHECK(cosine(1) == 4);
  CHECK(cosine(2) == 6);
  CHECK(cosine(3) == 8);
  CHECK(cosine(5) == doctest::Approx(2 + 6 * (1 + std::cos(std::numbers::pi / 4)) / 2).epsilon(1e-15));
  CHECK(cosine(7) == doctest::Approx(5).epsilon(1e-15));
  CHECK(cosine(11) == 2);
  CHECK(cosine(12) == 2);
  CHECK(CosineSchedule{.peak = 1, .total_steps = 10}(0) == 1);
  CHECK(CosineSchedule{.peak = 1, .total_steps = 10}(10) == doctest::Approx(0.1).epsilon(1e-15));

  const LinearSchedule linear{.peak = 8, .warmup_steps = 3, .total_steps = 11, .final_fraction = 0.25};
  CHECK(linear(2) == 6);
  CHECK(linear(3) == 8);
  CHECK(linear(7) == 5);
  CHECK(linear(11) == 2);
  CHECK(linear(100) == 2);

  const WarmupStableDecaySchedule stable{.peak = 8, .warmup_steps = 3, .total_steps = 20, .decay_steps = 4};
  CHECK(stable(0) == 2);
  CHECK(stable(3) == 8);
  CHECK(stable(16) == 8);
  CHECK(stable(17) == 6);
  CHECK(stable(19) == 2);
  CHECK(stable(20) == 0);
  CHECK(WarmupStableDecaySchedule{.peak = 8, .total_steps = 5, .decay_steps = 0}(4) == 8);
  CHECK(LinearSchedule{.peak = 8, .warmup_steps = 5, .total_steps = 5}(5) == 0);
}

TEST_CASE("schedules: bad settings are named") {
  CHECK(contains(error_of([] { ConstantSchedule{.peak = not_a_number}(0); }), "ConstantSchedule: peak nan given"));
  CHECK(contains(error_of([] { CosineSchedule{.peak = -1, .total_steps = 1}(0); }), "CosineSchedule: peak -1 given"));
  CHECK(contains(error_of([] { CosineSchedule{.peak = 1, .warmup_steps = -1, .total_steps = 1}(0); }),
                 "CosineSchedule: warmup_steps -1 given"));
  CHECK(contains(error_of([] { LinearSchedule{.peak = 1, .warmup_steps = 5, .total_steps = 4}(0); }),
                 "LinearSchedule: total_steps 4 given, expected at least the 5 warmup_steps"));
  CHECK(contains(error_of([] { LinearSchedule{.peak = 1, .total_steps = 4, .final_fraction = 1.5}(0); }),
                 "final_fraction 1.5 given"));
  CHECK(contains(error_of([] { WarmupStableDecaySchedule{.peak = 1, .total_steps = 4, .decay_steps = 5}(0); }),
                 "decay_steps 5 given"));
  CHECK(contains(error_of([] { CosineSchedule{.peak = 1, .total_steps = 4}(-1); }), "step -1 given"));
}

TEST_CASE("optimizers: parameters added later, and an eps of 0, are refused") {
  const Tensor a = ones({2}).set_requires_grad();
  AdamW adamw({a}, {});
  SGD sgd({a}, {});
  adamw.parameters.push_back(ones({2}).set_requires_grad());
  sgd.parameters.push_back(ones({2}).set_requires_grad());
  CHECK(contains(error_of([&] { adamw.step(); }), "AdamW: 2 parameters given, expected the 1"));
  CHECK(contains(error_of([&] { sgd.step(); }), "SGD: 2 parameters given, expected the 1"));
  CHECK(contains(error_of([&] { AdamW({a}, {.eps = 0}); }), "eps 0"));
}
