// AdamW: Adam with decoupled weight decay.
#pragma once

#include <array>

#include "strobe/optim/optimizer.h"

namespace strobe {

struct AdamWOptions {
  double learning_rate = 1e-3;                 // of step() without an argument
  std::array<double, 2> betas = {0.9, 0.999};  // memory of the mean and of the mean square, in [0, 1)
  double eps = 1e-8;                           // added to the root of the mean square
  double weight_decay = 0.01;                  // of parameters of two axes or more; the others are not decayed
};

// What AdamW keeps of one parameter; undefined until the parameter is first updated.
struct AdamWState {
  Tensor exp_avg;     // f32 (f64 for f64 parameters), shape of the parameter
  Tensor exp_avg_sq;  // as exp_avg
  Tensor master;      // the parameter in f32, for bf16 and f16 parameters; the parameter is its rounded copy
  int64_t step = 0;   // calls of step() so far that the parameter took part in
  Tensor skipped;     // one element, i64: how many of them made no update; undefined before the first grad_factor

  // Updates so far; waits for the device where some of them may have been left out.
  int64_t updates() const { return step - (skipped.defined() ? skipped.item<int64_t>() : 0); }

  void visit(auto&& field) {
    if (skipped.defined()) step = updates(), skipped = Tensor();
    field("exp_avg", exp_avg);
    field("exp_avg_sq", exp_avg_sq);
    field("master", master);
    field("step", step);
  }
};

// Kingma and Ba, "Adam" (2015); Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019). For gradient g:
//   m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,  m' = m / (1 - beta1^t),  v' = v / (1 - beta2^t),
//   parameter -= learning_rate (m' / (sqrt(v') + eps) + weight_decay parameter).
// The state is allocated under MemoryTag("optimizer").
struct AdamW {
  std::vector<Tensor> parameters;
  AdamWOptions options;
  std::vector<AdamWState> state;  // one per parameter

  explicit AdamW(std::vector<Tensor> parameters, const AdamWOptions& options = {});

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
