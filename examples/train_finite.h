// Finds where a number that is not finite comes from.
#pragma once

#include <strobe/strobe.h>

#include <optional>
#include <string>
#include <vector>

namespace examples {

// The first tensor that is not finite when the losses of `batches` are computed and differentiated again, and what made
// it: "output of linear with h.0.mlp.fc.weight". Draws from the random state; leaves gradients behind.
std::optional<std::string> first_non_finite(const strobe::GPT& model, const std::vector<strobe::Batch>& batches);

bool all_finite(const strobe::Tensor& x);

}  // namespace examples
