#include "strobe/optim/sgd.h"

#include "strobe/core/autograd.h"
#include "strobe/core/ops.h"
#include "strobe/kernels/optimizer.h"

namespace strobe {
namespace {

void check_options(const SGDOptions& options) {
  detail::check_setting("SGD", "learning_rate", options.learning_rate);
  STROBE_CHECK(options.momentum >= 0 && options.momentum < 1, "SGD: momentum ", options.momentum,
               " given, expected a number in [0, 1)");
  detail::check_setting("SGD", "weight_decay", options.weight_decay);
}

}  // namespace

SGD::SGD(std::vector<Tensor> trained, const SGDOptions& settings)
    : parameters(std::move(trained)), options(settings), state(parameters.size()) {
  detail::check_parameters("SGD", parameters);
  check_options(options);
}

void SGD::follow(size_t i) {
  if (options.momentum > 0) detail::follow(state.at(i).velocity, parameters.at(i));
  detail::follow_master(state.at(i).master, parameters.at(i));
}

void SGD::step(double learning_rate, const Tensor& grad_factor) {
  detail::check_setting("SGD", "learning_rate", learning_rate);
  detail::check_grad_factor("SGD", grad_factor);
  check_options(options);
  STROBE_CHECK(state.size() == parameters.size(), "SGD: ", parameters.size(), " parameters given, expected the ",
               state.size(), " it was made with");
  detail::check_layout("SGD", parameters);
  const NoGrad no_grad;
  const MemoryTag tag("optimizer");
  detail::for_each_device(parameters, [&](const std::vector<size_t>& updated, const Stream& stream) {
    std::vector<Tensor> gradients;  // kept until the kernel is queued
    Tensor factor;
    std::vector<kernels::SgdParameter> list;
    for (size_t i : updated) {
      const Tensor& parameter = parameters[i];
      SGDState& own = state[i];
      follow(i);
      gradients.push_back(contiguous(parameter.grad()));
      list.push_back({.parameter = parameter.data(),
                      .gradient = gradients.back().data(),
                      .velocity = options.momentum > 0 ? own.velocity.data() : nullptr,
                      .master = data_or_null(own.master),
                      .size = parameter.size(),
                      .dtype = parameter.dtype(),
                      .weight_decay = detail::decay_of(parameter, options.weight_decay)});
    }
    kernels::sgd_step({.parameters = list.data(),
                       .count = std::ssize(list),
                       .learning_rate = learning_rate,
                       .momentum = options.momentum,
                       .grad_factor = detail::grad_factor_on(stream.device, grad_factor, factor)},
                      stream);
  });
}

}  // namespace strobe
