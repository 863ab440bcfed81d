#include "strobe/optim/optimizer.h"

#include <algorithm>
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

void check_grad_factor(const char* optimizer, const Tensor& grad_factor) {
  STROBE_CHECK(!grad_factor.defined() || (grad_factor.size() == 1 && grad_factor.dtype() == DType::f64), optimizer,
               ": grad_factor ", grad_factor.shape(), " of dtype ", grad_factor.dtype(),
               " given, expected one element of dtype f64 (see clip_factor)");
}

const double* grad_factor_on(Device device, const Tensor& grad_factor, Tensor& here) {
  if (!grad_factor.defined()) return nullptr;
  here = grad_factor.to(device);
  return here.data<double>();
}

void zero_grad(const std::vector<Tensor>& parameters) {
  for (const Tensor& parameter : parameters) parameter.set_grad(Tensor());
}

void for_each_device(const std::vector<Tensor>& parameters,
                     const std::function<void(const std::vector<size_t>&, const Stream&)>& f) {
  std::vector<std::pair<Device, std::vector<size_t>>> groups;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].grad().defined()) continue;
    const Device device = parameters[i].device();
    auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& each) { return each.first == device; });
    if (group == groups.end()) group = groups.insert(groups.end(), {device, {}});
    group->second.push_back(i);
  }
  for (const auto& [device, positions] : groups) f(positions, current_stream(device));
}

void follow(Tensor& state, const Tensor& parameter) {
  const DType dtype = accumulate_dtype(parameter.dtype());
  state =
      state.defined() ? state.to(parameter.device()).to(dtype) : zeros(parameter.shape(), dtype, parameter.device());
}

void follow_count(Tensor& count, const Tensor& parameter) {
  count = count.defined() ? count.to(parameter.device()) : zeros({}, DType::i64, parameter.device());
}

void follow_master(Tensor& master, const Tensor& parameter) {
  if (accumulate_dtype(parameter.dtype()) == parameter.dtype()) {
    master = Tensor();
  } else {
    master = master.defined() ? master.to(parameter.device()) : parameter.detach().to(DType::f32);
  }
}

}  // namespace strobe::detail
