// Computes a step again and looks at every tensor on the way.
#include "train_finite.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <map>

namespace examples {
namespace {

using namespace strobe;

class Search {
 public:
  explicit Search(const GPT& model) {
    for (const NamedTensor& parameter : named_parameters(model)) {
      names_[parameter.tensor.impl().get()] = parameter.name;
      if (!found && !all_finite(parameter.tensor)) found = "parameter " + parameter.name;
    }
  }

  void look_at(const Operation& operation) {
    if (found) return;
    std::vector<std::string> used;
    for (const Tensor& input : operation.inputs) {
      const auto name = input.defined() ? names_.find(input.impl().get()) : names_.end();
      if (name != names_.end()) used.push_back(name->second);
    }
    if (!used.empty()) last_used_ = used.back();
    for (const Tensor& result : operation.results) {
      if (!result.defined() || !is_floating(result.dtype()) || all_finite(result)) continue;
      const char* what = operation.backward ? "gradient made by the backward pass of" : "output of";
      found = fmt::format("{} {}", what, operation.name);
      if (!used.empty())
        *found += fmt::format(" with {}", fmt::join(used, " and "));
      else if (!last_used_.empty())
        *found += fmt::format(", after the one with {}", last_used_);
      return;
    }
  }

  std::optional<std::string> found;

 private:
  std::map<const TensorImpl*, std::string> names_;
  std::string last_used_;
};

}  // namespace

bool all_finite(const Tensor& x) {
  const NoGrad no_grad;
  // In f64 no sum of finite numbers of the other types overflows.
  return x.size() == 0 || std::isfinite(sum(x.detach().to(DType::f64)).item<double>());
}

std::optional<std::string> first_non_finite(const GPT& model, const std::vector<Batch>& batches) {
  Search search(model);
  const OperationObserver observer([&](const Operation& operation) { search.look_at(operation); });
  for (const Batch& batch : batches) {
    if (search.found) break;
    const Tensor loss = cross_entropy(model(batch.tokens), batch.targets);
    if (!search.found && loss.requires_grad()) loss.backward();
  }
  return search.found;
}

}  // namespace examples
