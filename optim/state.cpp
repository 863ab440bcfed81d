#include "strobe/optim/state.h"

#include <algorithm>

#include "strobe/core/io/checkpoint.h"

namespace strobe::detail {

void save_fields(const std::vector<StateField>& fields, std::vector<NamedTensor>& saved) {
  const auto is_there = [](const StateField& field) {
    const auto* tensor = std::get_if<Tensor*>(&field.value);
    return tensor != nullptr && (*tensor)->defined();
  };
  if (std::none_of(fields.begin(), fields.end(), is_there)) return;
  for (const StateField& field : fields) {
    if (is_there(field)) {
      saved.push_back({field.name, *std::get<Tensor*>(field.value)});
    } else if (const auto* number = std::get_if<int64_t*>(&field.value)) {
      saved.push_back({field.name, from_vector(std::vector<int64_t>{**number}, {1}, Device::cpu())});
    }
  }
}

SavedState::SavedState(const std::vector<NamedTensor>& saved) {
  for (const NamedTensor& entry : saved) tensors[entry.name] = entry.tensor;
}

bool SavedState::has_any(const std::vector<StateField>& fields) const {
  return std::any_of(fields.begin(), fields.end(),
                     [&](const StateField& field) { return tensors.contains(field.name); });
}

void SavedState::take(const std::vector<StateField>& fields) {
  for (const StateField& field : fields) {
    const auto* target = std::get_if<Tensor*>(&field.value);
    if (target != nullptr && !(*target)->defined()) continue;
    const auto found = tensors.find(field.name);
    if (found == tensors.end()) {
      problems.push_back(concat_message("'", field.name, "' is missing"));
      continue;
    }
    const Tensor value = found->second;
    tensors.erase(found);
    const Shape shape = target != nullptr ? (*target)->shape() : Shape{1};
    if (value.shape() != shape || is_floating(value.dtype()) != (target != nullptr)) {
      problems.push_back(concat_message("'", field.name, "' has shape ", value.shape(), " and dtype ", value.dtype(),
                                        ", expected ", shape, target != nullptr ? "" : " and i64"));
    } else if (target != nullptr) {
      (*target)->copy_from(value);
    } else {
      *std::get<int64_t*>(field.value) = value.item<int64_t>();
    }
  }
}

void SavedState::require_all_fitted() const {
  std::vector<std::string> all = problems;
  for (const auto& [name, tensor] : tensors) all.push_back(concat_message("'", name, "' is unknown"));
  STROBE_CHECK(all.empty(), "load_state: the saved state is of another optimizer or model: ", list_differences(all));
}

void check_names(size_t given, size_t expected) {
  STROBE_CHECK(given == expected, "optimizer state: ", given, " names given, expected one for each of the ", expected,
               " parameters");
}

}  // namespace strobe::detail
