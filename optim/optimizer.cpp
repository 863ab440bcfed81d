#include "strobe/optim/optimizer.h"

#include <cmath>
#include <unordered_map>

namespace strobe::detail {

void check_parameters(const char* optimizer, const std::vector<Tensor>& parameters) {
  std::unordered_map<const TensorImpl*, size_t> seen;
  for (size_t i = 0; i < parameters.size(); ++i) {
    STROBE_CHECK(parameters[i].defined(), optimizer, ": parameter ", i, " is undefined, expected a tensor");
    STROBE_CHECK(parameters[i].requires_grad() && parameters[i].impl()->node == nullptr, optimizer, ": parameter ", i,
                 " of shape ", parameters[i].shape(), " given, expected a leaf that requires a gradient");
    const auto [first, is_new] = seen.emplace(parameters[i].impl().get(), i);
    STROBE_CHECK(is_new, optimizer, ": parameter ", i, " is the same tensor as parameter ", first->second,
                 ", expected each once");
  }
}

void check_setting(const char* optimizer, const char* name, double value) {
  STROBE_CHECK(std::isfinite(value) && value >= 0, optimizer, ": ", name, " ", value,
               " given, expected a finite number, at least 0");
}

void check_layout(const char* optimizer, const std::vector<Tensor>& parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    STROBE_CHECK(!parameters[i].grad().defined() || parameters[i].is_contiguous(), optimizer, ": parameter ", i,
                 " of shape ", parameters[i].shape(), " and strides ", parameters[i].strides(),
                 " given, expected row-major memory");
  }
}

void zero_grad(const std::vector<Tensor>& parameters) {
  for (const Tensor& parameter : parameters) parameter.set_grad(Tensor());
}

void follow(Tensor& state, const Tensor& parameter) {
  const DType dtype = accumulate_dtype(parameter.dtype());
  state =
      state.defined() ? state.to(parameter.device()).to(dtype) : zeros(parameter.shape(), dtype, parameter.device());
}

void follow_master(Tensor& master, const Tensor& parameter) {
  if (accumulate_dtype(parameter.dtype()) == parameter.dtype()) {
    master = Tensor();
  } else {
    master = master.defined() ? master.to(parameter.device()) : parameter.detach().to(DType::f32);
  }
}

}  // namespace strobe::detail
