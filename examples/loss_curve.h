// The loss curve of a run as an SVG picture.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace examples {

struct CurvePoint {
  int64_t step = 0;
  double loss = 0;
};

// Training loss (as measured and smoothed) and validation loss against the step, with axes, ticks and a legend.
// Non-finite points are left out; any number of points gives a small picture.
std::string loss_curve_svg(const std::string& title, const std::vector<CurvePoint>& training,
                           const std::vector<CurvePoint>& validation);

}  // namespace examples
