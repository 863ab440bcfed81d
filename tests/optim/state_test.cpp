// The state of the optimizers saved and restored: an update after it is the update without it.
#include "strobe/optim/state.h"

#include "strobe/optim/adamw.h"
#include "strobe/optim/sgd.h"
#include "support/compare.h"
#include "support/temporary_folder.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

const std::vector<std::string> names{"w", "b"};

std::vector<Tensor> make_parameters(DType dtype) {
  const RandomStateGuard same({3, 0});
  return {uniform({5, 7}, -1.0, 1.0, DType::f64).to(dtype).set_requires_grad(),
          uniform({7}, -1.0, 1.0, DType::f64).to(dtype).set_requires_grad()};
}

template <class Optimizer>
void step(Optimizer& optimizer, int64_t number) {
  const RandomStateGuard same({4, static_cast<uint64_t>(10 * number)});
  for (const Tensor& parameter : optimizer.parameters)
    parameter.set_grad(uniform(parameter.shape(), -1.0, 1.0, DType::f64).to(parameter.dtype()));
  optimizer.step(0.01);
}

template <class Optimizer, class Options>
void check_round_trip(const Options& options) {
  const TemporaryFolder folder;
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    CAPTURE(std::string(name_of(dtype)));
    Optimizer whole(make_parameters(dtype), options), part(make_parameters(dtype), options);
    for (int64_t i = 0; i < 3; ++i) step(whole, i), step(part, i);
    save_safetensors(folder / "state", named_state(part, names));
    std::vector<Tensor> copies;
    for (const Tensor& parameter : part.parameters) {
      const Tensor copy = empty_like(parameter);
      copy.copy_from(parameter);
      copies.push_back(copy.set_requires_grad());
    }
    Optimizer resumed(copies, options);
    load_state(resumed, names, load_safetensors(folder / "state").tensors);
    for (int64_t i = 3; i < 6; ++i) step(whole, i), step(resumed, i);
    for (size_t i = 0; i < names.size(); ++i)
      CHECK(same_bits(whole.parameters[i].detach(), resumed.parameters[i].detach()));
  }
}

std::vector<NamedTensor> adamw_state() {
  AdamW optimizer(make_parameters(DType::f32));
  step(optimizer, 0);
  return named_state(optimizer, names);
}

}  // namespace

TEST_CASE("optimizer state: an update after saving and loading is bit for bit the update without") {
  check_round_trip<AdamW>(AdamWOptions{.weight_decay = 0.1});
  check_round_trip<SGD>(SGDOptions{.momentum = 0.9});
  check_round_trip<SGD>(SGDOptions{});
}

TEST_CASE("optimizer state: parameters that were never updated have none") {
  AdamW optimizer(make_parameters(DType::bf16));
  CHECK(named_state(optimizer, names).empty());
  optimizer.parameters[1].set_grad(ones({7}, DType::bf16));
  optimizer.step();
  const std::vector<NamedTensor> state = named_state(optimizer, names);
  REQUIRE(state.size() == 4);
  for (const NamedTensor& entry : state) CHECK(entry.name.starts_with("b."));
  AdamW resumed(make_parameters(DType::bf16));
  load_state(resumed, names, state);
  CHECK_FALSE(resumed.state[0].exp_avg.defined());
  CHECK(resumed.state[1].step == 1);
  CHECK(same_bits(resumed.state[1].master, optimizer.state[1].master));
}

TEST_CASE("optimizer state: keys that differ are named, and nothing changes") {
  AdamW optimizer(make_parameters(DType::f32));
  step(optimizer, 1);
  const Tensor before = optimizer.state[0].exp_avg;
  const auto error_with = [&](const std::function<void(std::vector<NamedTensor>&)>& change) {
    std::vector<NamedTensor> state = adamw_state();
    change(state);
    return error_of([&] { load_state(optimizer, names, state); });
  };
  CHECK(contains(error_with([](auto& state) { state.erase(state.begin()); }), "'w.exp_avg' is missing"));
  CHECK(contains(error_with([](auto& state) {
                   state.push_back({"c.exp_avg", zeros({1})});
                 }),
                 "'c.exp_avg' is unknown"));
  CHECK(contains(error_with([](auto& state) { state[0].tensor = zeros({7, 5}); }), "'w.exp_avg' has shape (7, 5)"));
  CHECK(
      contains(error_with([](auto& state) { state[2].tensor = zeros({1}); }), "'w.step' has shape (1) and dtype f32"));
  CHECK(contains(error_of([&] { load_state(optimizer, {"w"}, adamw_state()); }), "1 names given"));
  SGD other(make_parameters(DType::f32), {.momentum = 0.9});
  CHECK(contains(error_of([&] { load_state(other, names, adamw_state()); }), "'w.exp_avg' is unknown"));
  CHECK(optimizer.state[0].exp_avg.impl() == before.impl());
}
