// Clipping of gradients by their common norm.
#pragma once

#include <vector>

#include "strobe/core/tensor.h"

namespace strobe {

// What clipping decides, on the device of the gradients: nothing waits until a value is read.
struct Clipping {
  Tensor norm;    // one element, f64
  Tensor factor;  // one element, f64, for step() of an optimizer, which multiplies the gradients by it as it reads them
                  // and makes no update where it is NaN
};

// norm: the Euclidean norm of all gradients of `parameters` taken as one vector, summed in f64. factor: max_norm / norm
// where the norm exceeds max_norm, else 1 (Pascanu et al. 2013, "On the difficulty of training recurrent neural
// networks"); NaN where the norm is not finite. max_norm may be infinite. The gradients stay as they are.
// Gradients of a loss that was multiplied by loss_scale (one element, f32): norm and factor are divided by it.
Clipping clip_factor(const std::vector<Tensor>& parameters, double max_norm, const Tensor& loss_scale = Tensor());

// The same at once: multiplies the gradients by the factor, waits for the norm and returns it. A norm that is not
// finite leaves the gradients as they are.
double clip_grad_norm(const std::vector<Tensor>& parameters, double max_norm);

}  // namespace strobe
