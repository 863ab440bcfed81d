#include "strobe/optim/adamw.h"

#include "strobe/core/autograd.h"
#include "strobe/core/ops.h"
#include "strobe/kernels/optimizer.h"

namespace strobe {
namespace {

void check_options(const AdamWOptions& options) {
  detail::check_setting("AdamW", "learning_rate", options.learning_rate);
  for (double beta : options.betas) {
    STROBE_CHECK(beta >= 0 && beta < 1, "AdamW: beta ", beta, " given, expected a number in [0, 1)");
  }
  detail::check_setting("AdamW", "eps", options.eps);
  STROBE_CHECK(static_cast<float>(options.eps) > 0, "AdamW: eps ", options.eps,
               " given, expected a number above 0 in f32");
  detail::check_setting("AdamW", "weight_decay", options.weight_decay);
}

}  // namespace

AdamW::AdamW(std::vector<Tensor> trained, const AdamWOptions& settings)
    : parameters(std::move(trained)), options(settings), state(parameters.size()) {
  detail::check_parameters("AdamW", parameters);
  check_options(options);
}

void AdamW::follow(size_t i) {
  detail::follow(state.at(i).exp_avg, parameters.at(i));
  detail::follow(state[i].exp_avg_sq, parameters[i]);
  detail::follow_master(state[i].master, parameters[i]);
}

void AdamW::step(double learning_rate, const Tensor& grad_factor) {
  detail::check_setting("AdamW", "learning_rate", learning_rate);
  detail::check_grad_factor("AdamW", grad_factor);
  check_options(options);
  STROBE_CHECK(state.size() == parameters.size(), "AdamW: ", parameters.size(), " parameters given, expected the ",
               state.size(), " it was made with");
  detail::check_layout("AdamW", parameters);
  const NoGrad no_grad;
  const MemoryTag tag("optimizer");
  detail::for_each_device(parameters, [&](const std::vector<size_t>& updated, const Stream& stream) {
    std::vector<Tensor> gradients;  // kept until the kernel is queued
    Tensor factor;
    std::vector<kernels::AdamWParameter> list;
    for (size_t i : updated) {
      const Tensor& parameter = parameters[i];
      AdamWState& own = state[i];
      follow(i);
      if (grad_factor.defined() || own.skipped.defined()) detail::follow_count(own.skipped, parameter);
      gradients.push_back(contiguous(parameter.grad()));
      list.push_back({.parameter = parameter.data(),
                      .gradient = gradients.back().data(),
                      .exp_avg = own.exp_avg.data(),
                      .exp_avg_sq = own.exp_avg_sq.data(),
                      .master = data_or_null(own.master),
                      .size = parameter.size(),
                      .dtype = parameter.dtype(),
                      .step = ++own.step,
                      .skipped = own.skipped.defined() ? own.skipped.data<int64_t>() : nullptr,
                      .weight_decay = detail::decay_of(parameter, options.weight_decay)});
    }
    kernels::adamw_step({.parameters = list.data(),
                         .count = std::ssize(list),
                         .learning_rate = learning_rate,
                         .beta1 = options.betas[0],
                         .beta2 = options.betas[1],
                         .eps = options.eps,
                         .grad_factor = detail::grad_factor_on(stream.device, grad_factor, factor)},
                        stream);
  });
}

}  // namespace strobe
