// What the optimizers share: checks of their parameters and settings, and their state's place in memory.
#pragma once

#include <functional>
#include <vector>

#include "strobe/core/tensor.h"

namespace strobe::detail {

// Throws unless all are distinct floating-point leaves that require a gradient.
void check_parameters(const char* optimizer, const std::vector<Tensor>& parameters);

// Throws unless value is finite and not negative; `name` as the user wrote it.
void check_setting(const char* optimizer, const char* name, double value);

// The parameters that have a gradient must be row-major, as their update is one pass over memory.
void check_layout(const char* optimizer, const std::vector<Tensor>& parameters);

// Throws unless a factor of all gradients, if there is one, is a single f64 number.
void check_grad_factor(const char* optimizer, const Tensor& grad_factor);

// The address of the factor on a device; `here` keeps it alive. Null where there is none.
const double* grad_factor_on(Device device, const Tensor& grad_factor, Tensor& here);

void zero_grad(const std::vector<Tensor>& parameters);

// Calls f(the positions of the parameters on one device that have a gradient, its stream) for each device.
void for_each_device(const std::vector<Tensor>& parameters,
                     const std::function<void(const std::vector<size_t>&, const Stream&)>& f);

// Biases and gains are not decayed: only parameters of two axes or more are.
inline double decay_of(const Tensor& parameter, double weight_decay) {
  return parameter.rank() >= 2 ? weight_decay : 0.0;
}

// Makes `state` fit the parameter as it is now: zeros at first; moved along after the model was moved or converted.
void follow(Tensor& state, const Tensor& parameter);

// The same for a number that counts.
void follow_count(Tensor& count, const Tensor& parameter);

// The same for the copy of a bf16 or f16 parameter in f32; undefined for other dtypes.
void follow_master(Tensor& master, const Tensor& parameter);

}  // namespace strobe::detail
