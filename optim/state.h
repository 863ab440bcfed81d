// What an optimizer keeps between steps, as named tensors: to save a run and to go on with it.
#pragma once

#include <map>
#include <variant>

#include "strobe/core/io/safetensors.h"
#include "strobe/core/memory.h"

namespace strobe {

namespace detail {

// One field of the state of one parameter.
struct StateField {
  std::string name;
  std::variant<Tensor*, int64_t*> value;
};

template <class State>
std::vector<StateField> state_fields(State& state, const std::string& parameter) {
  std::vector<StateField> fields;
  state.visit([&](const char* name, auto& value) { fields.push_back({parameter + "." + name, &value}); });
  return fields;
}

// Appends the fields of a parameter that was updated before; a number as a tensor of one i64 element.
void save_fields(const std::vector<StateField>& fields, std::vector<NamedTensor>& saved);

// Saved tensors by name, of which those that found their place are taken out; and what did not fit.
struct SavedState {
  std::map<std::string, Tensor> tensors;
  std::vector<std::string> problems;

  explicit SavedState(const std::vector<NamedTensor>& saved);
  bool has_any(const std::vector<StateField>& fields) const;
  void take(const std::vector<StateField>& fields);
  void require_all_fitted() const;
};

void check_names(size_t given, size_t expected);

}  // namespace detail

// The state of all parameters that were ever updated, named after them: "h.0.attn.proj.weight.exp_avg". `names` has
// one name for each of the optimizer's parameters. The tensors share memory with the state.
template <class Optimizer>
std::vector<NamedTensor> named_state(const Optimizer& optimizer, const std::vector<std::string>& names) {
  detail::check_names(names.size(), optimizer.parameters.size());
  std::vector<NamedTensor> saved;
  for (size_t i = 0; i < names.size(); ++i) {
    auto state = optimizer.state[i];
    detail::save_fields(detail::state_fields(state, names[i]), saved);
  }
  return saved;
}

// Goes on from what named_state gave, on the devices and with the dtypes of the parameters as they are now. Throws,
// naming the keys that are missing, unknown or of another shape, and changes nothing then.
template <class Optimizer>
void load_state(Optimizer& optimizer, const std::vector<std::string>& names, const std::vector<NamedTensor>& state) {
  detail::check_names(names.size(), optimizer.parameters.size());
  const MemoryTag tag("optimizer");
  Optimizer fresh(optimizer.parameters, optimizer.options);
  detail::SavedState saved(state);
  for (size_t i = 0; i < names.size(); ++i) {
    const std::vector<detail::StateField> fields = detail::state_fields(fresh.state[i], names[i]);
    if (!saved.has_any(fields)) continue;  // never updated
    fresh.follow(i);
    saved.take(fields);
  }
  saved.require_all_fitted();
  optimizer.state = std::move(fresh.state);
}

}  // namespace strobe
