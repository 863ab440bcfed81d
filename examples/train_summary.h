// What a run came to, out of its metrics: over all its parts, when it was stopped and resumed.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "loss_curve.h"

namespace examples {

struct Summary {
  std::vector<CurvePoint> training, validation;
  std::optional<double> bits_per_byte;  // of the last evaluation
  double seconds = 0;                   // in training steps
  double tokens_per_second = 0;         // median step
  uint64_t bytes_peak = 0;

  double last_loss() const { return validation.empty() ? 0 : validation.back().loss; }
};

Summary summarize(const std::filesystem::path& metrics, int64_t tokens_per_step);

// One run of a comparison.
struct Compared {
  std::string name;
  Summary summary;
};

// A table of the runs side by side, and how far their training losses lie apart.
std::string comparison_table(const std::vector<Compared>& runs);

}  // namespace examples
