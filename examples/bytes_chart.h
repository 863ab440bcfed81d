// How bytes grow with a number, as an SVG picture with logarithmic axes.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace examples {

struct ByteCurve {
  std::string label;
  std::vector<std::pair<double, double>> measured;   // (number, bytes)
  std::vector<std::pair<double, double>> formula;    // drawn as a dashed line
  std::vector<std::pair<double, double>> predicted;  // sizes that were not run: empty rings
};

// Bytes that are a power of two: "64 KiB", "1 MiB".
std::string power_of_two_label(int exponent);

struct ChartText {
  std::string title, subtitle;
  std::string x, y;   // what the axes show
  std::string marks;  // what dots, dashes and rings are
};

// At most six curves; values that are not positive are left out.
std::string bytes_chart_svg(const ChartText& text, const std::vector<ByteCurve>& curves);

}  // namespace examples
