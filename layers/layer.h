// What makes a struct a layer: a member `visit(field)` that names its tensors and sub-layers. No base class.
//
//   struct Scale {
//     Tensor factor;
//     void visit(auto&& field) const { field("factor", factor); }
//   };
#pragma once

#include <concepts>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "strobe/core/autograd.h"
#include "strobe/core/io/safetensors.h"
#include "strobe/core/ops.h"

namespace strobe {

// A tensor to be trained: marks it as requiring a gradient.
inline Tensor parameter(const Tensor& initial) { return initial.set_requires_grad(); }

namespace detail {

template <class F>
void visit_field(const std::string& name, const Tensor& tensor, F& f) {
  if (tensor.defined()) f(name, tensor);
}

// Declared first: a layer's fields may be vectors and variants of layers.
template <class Layer, class F>
void visit_field(const std::string& name, const std::vector<Layer>& layers, F& f);
template <class... Layers, class F>
void visit_field(const std::string& name, const std::variant<Layers...>& choice, F& f);

template <class Layer, class F>
void visit_field(const std::string& name, Layer& layer, F& f) {
  layer.visit(
      [&](const char* field, auto& value) { visit_field(name.empty() ? field : name + "." + field, value, f); });
}

template <class Layer, class F>
void visit_field(const std::string& name, const std::vector<Layer>& layers, F& f) {
  for (size_t i = 0; i < layers.size(); ++i) visit_field(name + "." + std::to_string(i), layers[i], f);
}

template <class... Layers, class F>
void visit_field(const std::string& name, const std::variant<Layers...>& choice, F& f) {
  std::visit([&](const auto& layer) { visit_field(name, layer, f); }, choice);
}

void save_parameters(const std::vector<NamedTensor>& parameters, const std::string& path, const Metadata& metadata);
// `source` is what errors call the saved ones.
void load_parameters(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& saved,
                     const std::string& source);

}  // namespace detail

// Calls f(name, tensor) for every defined tensor of a layer, in the order of visit, with names such as
// "h.0.attn.proj.weight".
template <class Layer, class F>
void for_each_parameter(const Layer& layer, F&& f) {
  detail::visit_field(std::string(), layer, f);
}

template <class Layer>
std::vector<NamedTensor> named_parameters(const Layer& layer) {
  std::vector<NamedTensor> result;
  for_each_parameter(layer, [&](const std::string& name, const Tensor& tensor) { result.push_back({name, tensor}); });
  return result;
}

template <class Layer>
std::vector<Tensor> parameters(const Layer& layer) {
  std::vector<Tensor> result;
  for_each_parameter(layer, [&](const std::string&, const Tensor& tensor) { result.push_back(tensor); });
  return result;
}

template <class Layer>
int64_t num_parameters(const Layer& layer) {
  int64_t count = 0;
  for_each_parameter(layer, [&](const std::string&, const Tensor& tensor) { count += tensor.size(); });
  return count;
}

// Moves or converts every tensor in place: handles made before, such as an optimizer's, stay valid. Drops gradients.
template <class Layer>
void to(const Layer& layer, Device device) {
  for_each_parameter(layer, [&](const std::string&, const Tensor& tensor) { tensor.assign(tensor.to(device)); });
}
template <class Layer>
void to(const Layer& layer, DType dtype) {
  for_each_parameter(layer, [&](const std::string&, const Tensor& tensor) { tensor.assign(tensor.to(dtype)); });
}

// Writes all parameters as one safetensors file; a file that is already there survives any failure.
template <class Layer>
void save(const Layer& layer, const std::string& path, const Metadata& metadata = {}) {
  detail::save_parameters(named_parameters(layer), path, metadata);
}

// Fills all parameters from tensors with exactly these names and shapes, or from a safetensors file of them. Throws,
// naming those that differ, and changes nothing then.
template <class Layer>
void load(const Layer& layer, const std::vector<NamedTensor>& saved) {
  detail::load_parameters(named_parameters(layer), saved, "the checkpoint");
}
template <class Layer>
void load(const Layer& layer, const std::string& path) {
  detail::load_parameters(named_parameters(layer), load_safetensors(path).tensors, path);
}

}  // namespace strobe
