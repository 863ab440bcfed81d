#include "strobe/layers/layer.h"

#include <map>
#include <set>

#include "strobe/core/io/checkpoint.h"

namespace strobe::detail {

void save_parameters(const std::vector<NamedTensor>& parameters, const std::string& path, const Metadata& metadata) {
  save_safetensors(path, parameters, metadata);
}

void load_parameters(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& saved,
                     const std::string& source) {
  std::map<std::string, Tensor> stored;
  for (const NamedTensor& entry : saved) stored[entry.name] = entry.tensor;
  std::vector<std::string> differences;
  std::set<std::string> wanted_names;
  for (const NamedTensor& wanted : parameters) {
    wanted_names.insert(wanted.name);
    const auto found = stored.find(wanted.name);
    if (found == stored.end()) {
      differences.push_back(concat_message("has no tensor '", wanted.name, "'"));
    } else if (found->second.shape() != wanted.tensor.shape()) {
      differences.push_back(concat_message("'", wanted.name, "' has shape ", found->second.shape(), ", expected ",
                                           wanted.tensor.shape()));
    } else if (is_floating(found->second.dtype()) != is_floating(wanted.tensor.dtype())) {
      differences.push_back(concat_message("'", wanted.name, "' has dtype ", found->second.dtype(),
                                           ", expected one like ", wanted.tensor.dtype()));
    }
  }
  for (const auto& [name, tensor] : stored) {
    if (!wanted_names.contains(name)) differences.push_back(concat_message("has a tensor '", name, "' too many"));
  }
  STROBE_CHECK(differences.empty(), "load: ", source, " is of another model: ", list_differences(differences));
  for (const NamedTensor& wanted : parameters) wanted.tensor.copy_from(stored[wanted.name]);
}

}  // namespace strobe::detail
