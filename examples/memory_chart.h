// How memory grows with seq_len, as an SVG picture with logarithmic axes.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace examples {

struct MemoryCurve {
  std::string label;
  std::vector<std::pair<double, double>> measured;   // (seq_len, bytes)
  std::vector<std::pair<double, double>> formula;    // drawn as a dashed line
  std::vector<std::pair<double, double>> predicted;  // sizes that were not run: empty rings
};

// Bytes that are a power of two: "64 KiB", "1 MiB".
std::string power_of_two_label(int exponent);

// At most six curves; values that are not positive are left out.
std::string memory_chart_svg(const std::string& title, const std::string& subtitle,
                             const std::vector<MemoryCurve>& curves);

}  // namespace examples
