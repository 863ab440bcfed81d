#include "strobe/layers/layer.h"

#include <map>

namespace strobe::detail {

void save_parameters(const std::vector<NamedTensor>& parameters, const std::string& path, const Metadata& metadata) {
  save_safetensors(path, parameters, metadata);
}

void load_parameters(const std::vector<NamedTensor>& parameters, const std::string& path) {
  const SafeTensors file = load_safetensors(path);
  std::map<std::string, Tensor> stored;
  for (const NamedTensor& entry : file.tensors) stored[entry.name] = entry.tensor;
  for (const NamedTensor& wanted : parameters) {
    const auto found = stored.find(wanted.name);
    STROBE_CHECK(found != stored.end(), "load: ", path, " has no tensor '", wanted.name,
                 "', expected the parameters of this model");
    STROBE_CHECK(found->second.shape() == wanted.tensor.shape(), "load: '", wanted.name, "' in ", path, " has shape ",
                 found->second.shape(), ", expected ", wanted.tensor.shape(), " of this model");
    STROBE_CHECK(is_floating(found->second.dtype()) == is_floating(wanted.tensor.dtype()), "load: '", wanted.name,
                 "' in ", path, " has dtype ", found->second.dtype(), ", expected one like ", wanted.tensor.dtype());
  }
  STROBE_CHECK(stored.size() == parameters.size(), "load: ", path, " has ", stored.size(), " tensors, expected the ",
               parameters.size(), " of this model");
  for (const NamedTensor& wanted : parameters) wanted.tensor.copy_from(stored[wanted.name]);
}

}  // namespace strobe::detail
