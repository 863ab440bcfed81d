// Draws the chart: powers of two along both axes, the legend above the plot where nothing can cross it.
#include "bytes_chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string_view>

#include "report.h"
#include "svg_picture.h"

namespace examples {
namespace {

constexpr double width = 860, height = 560;
constexpr double left = 84, right = 52, bottom = 58, legend_top = 76, legend_row = 20;
constexpr std::string_view dashes = "stroke-dasharray=\"5 4\"";
constexpr std::array<std::string_view, 6> colours{"#4c78a8", "#e45756", "#59a14f", "#b07aa1", "#f28e2b", "#76b7b2"};

// Exponents of two from low to high, a label every `step`.
struct Axis {
  int low = std::numeric_limits<int>::max(), high = std::numeric_limits<int>::min(), step = 1;

  void cover(double value) {
    low = std::min(low, static_cast<int>(std::floor(std::log2(value))));
    high = std::max(high, static_cast<int>(std::ceil(std::log2(value))));
  }
  // At most `ticks` labels, the lowest and highest at the ends.
  void finish(int ticks) {
    if (low > high) low = high = 10;
    if (low == high) ++high;
    step = (high - low + ticks - 1) / ticks;
    high = low + (high - low + step - 1) / step * step;
  }
  double part(double value) const { return (std::log2(value) - low) / (high - low); }
};

class Chart : public SvgPicture {
 public:
  Chart(Axis numbers, Axis bytes, double top)
      : SvgPicture(width, height), numbers_(numbers), bytes_(bytes), top_(top) {}

  void axes(const ChartText& labels) {
    for (int exponent = bytes_.low; exponent <= bytes_.high; exponent += bytes_.step) {
      const double y = pixels({1, std::exp2(exponent)}).second;
      line(left, y, width - right, y, "#e6e6e6", 1);
      text(left - 8, y + 4.5, "end", power_of_two_label(exponent));
    }
    for (int exponent = numbers_.low; exponent <= numbers_.high; exponent += numbers_.step) {
      const double x = pixels({std::exp2(exponent), 1}).first;
      line(x, height - bottom, x, height - bottom + 5, "#333", 1);
      text(x, height - bottom + 20, "middle", human_count(int64_t{1} << exponent));
    }
    line(left, height - bottom, width - right, height - bottom, "#333", 1);
    text((left + width - right) / 2, height - 14, "middle", labels.x);
    text(0, 0, "middle", labels.y,
         fmt::format("transform=\"translate(16 {:.1f}) rotate(-90)\"", (top_ + height - bottom) / 2));
  }

  void curve(const ByteCurve& curve, std::string_view colour) {
    Points formula;
    for (const auto& point : curve.formula) formula.push_back(pixels(point));
    polyline(formula, colour, 1.5, dashes);
    for (const auto& point : curve.measured) dot(pixels(point).first, pixels(point).second, colour);
    for (const auto& point : curve.predicted) ring(pixels(point).first, pixels(point).second, colour);
  }

  // Entries in two columns.
  void legend(size_t index, const std::string& label, std::string_view colour) {
    const double x = left + (index % 2 == 0 ? 0 : (width - left - right) / 2);
    const double y = legend_top + legend_row * static_cast<double>(index / 2);
    line(x, y - 4, x + 28, y - 4, colour, 1.5, dashes);
    dot(x + 14, y - 4, colour);
    text(x + 36, y, "start", label);
  }

 private:
  std::pair<double, double> pixels(const std::pair<double, double>& point) const {
    return {left + numbers_.part(point.first) * (width - left - right),
            height - bottom - bytes_.part(point.second) * (height - top_ - bottom)};
  }

  Axis numbers_, bytes_;
  double top_;
};

std::vector<std::pair<double, double>> positive(std::vector<std::pair<double, double>> points) {
  std::erase_if(points, [](const auto& point) { return !(point.second > 0) || !std::isfinite(point.second); });
  return points;
}

}  // namespace

std::string power_of_two_label(int exponent) {
  constexpr std::array<const char*, 7> units{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  const int unit = std::clamp(exponent / 10, 0, 6);
  return fmt::format("{:.0f} {}", std::exp2(exponent - 10 * unit), units[static_cast<size_t>(unit)]);
}

std::string bytes_chart_svg(const ChartText& text, const std::vector<ByteCurve>& given) {
  std::vector<ByteCurve> curves = given;
  Axis numbers, bytes;
  for (ByteCurve& curve : curves) {
    for (auto* points : {&curve.measured, &curve.formula, &curve.predicted}) {
      *points = positive(*points);
      for (const auto& [number, size] : *points) {
        numbers.cover(number);
        bytes.cover(size);
      }
    }
  }
  numbers.finish(8);  // a label may be as wide as 1,073,741,824
  bytes.finish(10);
  const double top = legend_top + legend_row * static_cast<double>((curves.size() + 1) / 2 + 1);
  Chart chart(numbers, bytes, top);
  chart.text(left, 28, "start", text.title, "font-size=\"16\" font-weight=\"bold\"");
  chart.text(left, 48, "start", text.subtitle);
  chart.axes(text);
  for (size_t i = 0; i < curves.size(); ++i) chart.curve(curves[i], colours[i % colours.size()]);
  for (size_t i = 0; i < curves.size(); ++i) chart.legend(i, curves[i].label, colours[i % colours.size()]);
  chart.text(left, top - 17, "start", text.marks);
  return chart.finish();
}

}  // namespace examples
