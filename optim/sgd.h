// Stochastic gradient descent with momentum.
#pragma once

#include "strobe/optim/optimizer.h"

namespace strobe {

struct SGDOptions {
  double learning_rate = 1e-2;  // of step() without an argument
  double momentum = 0;          // in [0, 1)
  double weight_decay = 0;      // L2 penalty on parameters of two axes or more
};

// What SGD keeps of one parameter; undefined until the parameter is first updated.
struct SGDState {
  Tensor velocity;  // f32 (f64 for f64 parameters), shape of the parameter; only with momentum
  Tensor master;    // the parameter in f32, for bf16 and f16 parameters; the parameter is its rounded copy

  void visit(auto&& field) {
    field("velocity", velocity);
    field("master", master);
  }
};

// velocity = momentum velocity + (gradient + weight_decay parameter),  parameter -= learning_rate velocity.
// The state is allocated under MemoryTag("optimizer").
struct SGD {
  std::vector<Tensor> parameters;
  SGDOptions options;
  std::vector<SGDState> state;  // one per parameter

  explicit SGD(std::vector<Tensor> parameters, const SGDOptions& options = {});

  // Updates every parameter that has a gradient, in place; the others keep their value and their state. grad_factor:
  // one number that the gradients are multiplied by; where it is not finite nothing changes (see clip_factor).
  void step(double learning_rate, const Tensor& grad_factor = Tensor());
  void step() { step(options.learning_rate); }

  // Makes the state of parameter i fit it as it is now.
  void follow(size_t i);

  // Drops all gradients.
  void zero_grad() const { detail::zero_grad(parameters); }
};

}  // namespace strobe
