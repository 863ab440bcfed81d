// Clipping of gradients by their common norm.
#pragma once

#include <vector>

#include "strobe/core/tensor.h"

namespace strobe {

// The Euclidean norm of all gradients of `parameters` taken as one vector, summed in f64. When it exceeds max_norm
// every gradient is scaled by max_norm / norm (Pascanu et al. 2013, "On the difficulty of training recurrent neural
// networks"). A norm that is not finite is returned and leaves the gradients as they are. max_norm may be infinite.
double clip_grad_norm(const std::vector<Tensor>& parameters, double max_norm);

}  // namespace strobe
