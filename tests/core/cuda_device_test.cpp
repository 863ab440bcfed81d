// GPUs as devices: tensors, layers and optimizers that move there and back, and what is said where there is none.
#include "support/op_cases.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

struct Affine {
  Tensor weight;
  Tensor bias;
  void visit(auto&& field) const {
    field("weight", weight);
    field("bias", bias);
  }
};

Affine make_affine() {
  seed(3);
  return {parameter(normal({5, 7}, 0, 1, DType::f32, Device::cpu())), parameter(zeros({5}, DType::f32, Device::cpu()))};
}

// The weight after three steps of an optimizer on one device.
template <class Optimizer, class Options>
Tensor train(Device device, DType dtype, const Options& options, Device finally) {
  const Affine model = make_affine();
  to(model, dtype);
  to(model, device);
  Optimizer optimizer(parameters(model), options);
  for (int step = 0; step < 4; ++step) {
    if (step == 3) to(model, finally);  // the optimizer's state follows
    const DeviceGuard guard(step == 3 ? finally : device);
    seed(static_cast<uint64_t>(10 + step));
    const Tensor x = normal({9, 7}, 0, 1, DType::f64).to(dtype);
    mean(square(linear(x, model.weight, model.bias) - 1.0)).backward();
    clip_grad_norm(optimizer.parameters, 0.5);
    optimizer.step(0.1);
    optimizer.zero_grad();
  }
  return model.weight.detach().to(Device::cpu());
}

}  // namespace

TEST_CASE("gpu: what is missing is said by every call" * needs_no_gpu()) {
  const std::vector<std::function<void()>> calls{[] { empty({2}, DType::f32, Device::cuda()); },
                                                 [] { empty({0}, DType::f32, Device::cuda()); },
                                                 [] { zeros({2}).to(Device::cuda()); },
                                                 [] { const DeviceGuard guard(Device::cuda()); },
                                                 [] { from_vector<float>({1}, {1}, Device::cuda()); },
                                                 [] {
                                                   const StreamGuard guard(Stream{Device::cuda(), nullptr});
                                                 },
                                                 [] { const OwnStream stream(Device::cuda()); },
                                                 [] { to(make_affine(), Device::cuda()); },
                                                 [] { memory_stats(Device::cuda()); }};
  for (const auto& call : calls) {
    const std::string message = error_of(call);
    CHECK(contains(message, "cuda:0"));
    CHECK(contains(message, "use the CPU"));
  }
  CHECK(zeros({2}).to_vector<float>() == std::vector<float>(2, 0.0f));
}

TEST_CASE("gpu: one that is not there is refused by number" * needs_gpu()) {
  CHECK(contains(error_of([] { empty({2}, DType::f32, Device::cuda(63)); }), "cuda:63: no such GPU"));
  CHECK(contains(error_of([] { empty({2}, DType::f32, Device::cuda(-1)); }), "cuda:-1"));
  CHECK(contains(error_of([] { add(zeros({2}), zeros({2}, DType::f32, Device::cuda())); }), "cpu and b on cuda:0"));
}

TEST_CASE("gpu: tensors go there and back unchanged" * needs_gpu()) {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16, DType::i32, DType::i64}) {
    const Tensor x = (arange(3001).to(DType::f64) - 1500.0).to(dtype);
    const Tensor there = x.to(Device::cuda());
    CHECK(there.device() == Device::cuda());
    CHECK(same_bits(there, x));
    CHECK(same_bits(transpose(reshape(there, {3001, 1}), 0, 1), reshape(x, {1, 3001})));
    CHECK(same_bits(there.to(DType::f64), x.to(DType::f64)));
  }
  const DeviceGuard guard(Device::cuda());
  CHECK(from_vector<int64_t>({1, 2, 3}, {3}).to_vector<float>() == std::vector<float>{1, 2, 3});
  CHECK(full({}, 7.5).item<float>() == 7.5f);
  CHECK(zeros({2, 2}).to_vector<double>() == std::vector<double>(4, 0.0));
  CHECK(arange(4).to_vector<int64_t>() == std::vector<int64_t>{0, 1, 2, 3});
  CHECK(empty({0, 3}).to(Device::cpu()).size() == 0);
}

TEST_CASE("gpu: copies convert as on the CPU, strided, overlapping and of every dtype" * needs_gpu()) {
  const double infinity = std::numeric_limits<double>::infinity();
  const std::vector<double> values{0.0,   -0.0,      1.5,  -2.7,      65519.0,  65520.0,      6e-8,        1e30,
                                   -1e30, 1.0 / 256, 3e38, -infinity, infinity, std::nan(""), 2147483648.0};
  const int64_t size = static_cast<int64_t>(values.size());
  const std::vector<DType> dtypes{DType::f32, DType::f64, DType::bf16, DType::f16, DType::i32, DType::i64};
  for (DType from : dtypes) {
    for (DType to : dtypes) {
      CAPTURE(std::string(name_of(from)));
      CAPTURE(std::string(name_of(to)));
      const Tensor x = from_vector(values, {size}).to(from);
      CHECK(relative_difference(x.to(Device::cuda()).to(to), x.to(to)) == 0);
      const Tensor table = expand(reshape(x, {size, 1, 1}), {size, 70, 3}).to(to);
      CHECK(relative_difference(expand(reshape(x.to(Device::cuda()), {size, 1, 1}), {size, 70, 3}).to(to), table) == 0);
      const Tensor turned = permute(table.to(Device::cuda()), {2, 0, 1});
      CHECK(relative_difference(contiguous(slice(turned, 2, 1, 68)),
                                contiguous(slice(permute(table, {2, 0, 1}), 2, 1, 68))) == 0);
    }
  }
  const Tensor row = arange(5).to(DType::f32).to(Device::cuda());
  slice(row, 0, 1, 5).copy_from(slice(row, 0, 0, 4));
  CHECK(row.to_vector<float>() == std::vector<float>{0, 0, 1, 2, 3});
}

TEST_CASE("gpu: layers and optimizers move, and train as on the CPU" * needs_gpu()) {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    CAPTURE(std::string(name_of(dtype)));
    const AdamWOptions adamw{.weight_decay = 0.1};
    const SGDOptions sgd{.momentum = 0.9, .weight_decay = 0.1};
    const SGDOptions plain{};
    for (Device finally : {Device::cpu(), Device::cuda()}) {
      CHECK(relative_difference(train<AdamW>(Device::cuda(), dtype, adamw, finally),
                                train<AdamW>(Device::cpu(), dtype, adamw, Device::cpu())) <= 4 * tolerance(dtype));
      CHECK(relative_difference(train<SGD>(Device::cuda(), dtype, sgd, finally),
                                train<SGD>(Device::cpu(), dtype, sgd, Device::cpu())) <= 4 * tolerance(dtype));
      CHECK(relative_difference(train<SGD>(Device::cuda(), dtype, plain, finally),
                                train<SGD>(Device::cpu(), dtype, plain, Device::cpu())) <= 4 * tolerance(dtype));
    }
  }
}

TEST_CASE("gpu: clip_grad_norm and many parameters of mixed dtypes and sizes, in more than one launch" * needs_gpu()) {
  std::vector<Tensor> on_cpu, on_gpu;
  seed(8);
  for (int64_t i = 0; i < 800; ++i) {
    const DType dtype = i % 3 == 0 ? DType::bf16 : i % 3 == 1 ? DType::f32 : DType::f64;
    const int64_t size = i == 400 ? 100001 : i % 37;
    const Tensor values = normal({size}, 0, 1, DType::f64).to(dtype);
    const Tensor gradient = normal({size}, 0, 1, DType::f64).to(dtype);
    on_cpu.push_back(parameter(values.to(DType::f64).to(dtype)));
    on_gpu.push_back(parameter(values.to(Device::cuda())));
    on_cpu.back().set_grad(gradient.to(DType::f64).to(dtype));
    on_gpu.back().set_grad(gradient.to(Device::cuda()));
  }
  AdamW cpu(on_cpu), gpu(on_gpu);
  const double norm = clip_grad_norm(on_cpu, 1.0);
  CHECK(std::abs(clip_grad_norm(on_gpu, 1.0) / norm - 1) < 1e-12);
  cpu.step(0.01);
  gpu.step(0.01);
  for (size_t i = 0; i < on_cpu.size(); ++i) {
    CAPTURE(i);
    CHECK(relative_difference(on_gpu[i].grad(), on_cpu[i].grad()) <= tolerance(on_cpu[i].dtype()));
    CHECK(relative_difference(on_gpu[i], on_cpu[i]) <= tolerance(on_cpu[i].dtype()));
  }
}

TEST_CASE("gpu: an update with a factor, one left out and the next are those of the CPU" * needs_gpu()) {
  for (DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    CAPTURE(std::string(name_of(dtype)));
    std::vector<Tensor> results;
    for (Device device : {Device::cpu(), Device::cuda()}) {
      const DeviceGuard guard(device);
      const Affine model = make_affine();
      to(model, dtype);
      to(model, device);
      AdamW adamw(parameters(model), {});
      SGD sgd(parameters(model), {.momentum = 0.9});
      GradScaler scaler({.initial_scale = 1024, .growth_interval = 2});
      for (int step = 0; step < 5; ++step) {
        seed(static_cast<uint64_t>(step));
        const Tensor x = normal({9, 7}, 0, 1, DType::f64).to(dtype);
        mean(square(linear(x, model.weight, model.bias) - 1.0)).backward();
        if (step == 2) model.bias.set_grad(model.bias.grad() / 0.0);
        const Tensor factor = scaler.clip(adamw.parameters, 1e-4).factor;
        adamw.step(0.1, factor);
        sgd.step(0.1, factor);
        adamw.zero_grad();
      }
      CHECK(adamw.state[0].updates() == 4);
      CHECK(scaler.scale.item<float>() == 2048.0f);  // 1024, 2048 after two steps, back, and again
      results.push_back(model.weight.detach().to(Device::cpu()));
    }
    CHECK(relative_difference(results[1], results[0]) <= 4 * tolerance(dtype));
  }
}
