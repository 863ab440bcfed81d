// Draws the loss curve: scales, ticks at round numbers, two lines for training and one for validation.
#include "loss_curve.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "report.h"
#include "svg_picture.h"

namespace examples {
namespace {

constexpr double width = 860, height = 480;
constexpr double left = 70, right = 32, top = 52, bottom = 58;
constexpr std::string_view training_colour = "#4c78a8", validation_colour = "#e45756";

struct Axis {
  double low = 0, high = 1, tick = 1;
  int decimals = 0;
};

// An axis that covers [low, high] with about `ticks` steps of 1, 2 or 5 times a power of ten.
Axis make_axis(double low, double high, int ticks) {
  if (!(high > low)) high = low + 1;
  const double raw = (high - low) / ticks;
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  const double mantissa = raw / power;
  const double tick = power * (mantissa <= 1 ? 1 : mantissa <= 2 ? 2 : mantissa <= 5 ? 5 : 10);
  const int decimals = std::max(0, static_cast<int>(-std::floor(std::log10(tick) + 1e-9)));
  return {.low = low, .high = high, .tick = tick, .decimals = decimals};
}

// The loss axis starts and ends at a tick, the step axis at the first and last step.
Axis rounded_outwards(Axis axis) {
  axis.low = std::floor(axis.low / axis.tick) * axis.tick;
  axis.high = std::ceil(axis.high / axis.tick) * axis.tick;
  return axis;
}

std::vector<CurvePoint> finite_points(const std::vector<CurvePoint>& points) {
  std::vector<CurvePoint> result;
  std::copy_if(points.begin(), points.end(), std::back_inserter(result),
               [](const CurvePoint& point) { return std::isfinite(point.loss); });
  return result;
}

// At most `count` points, each the mean of its neighbours: long runs stay small files.
std::vector<CurvePoint> thinned(const std::vector<CurvePoint>& points, size_t count) {
  const size_t group = (points.size() + count - 1) / count;
  if (group <= 1) return points;
  std::vector<CurvePoint> result;
  for (size_t begin = 0; begin < points.size(); begin += group) {
    const size_t end = std::min(begin + group, points.size());
    double sum = 0;
    for (size_t i = begin; i < end; ++i) sum += points[i].loss;
    result.push_back({points[(begin + end - 1) / 2].step, sum / static_cast<double>(end - begin)});
  }
  return result;
}

// Mean over about 2 % of the run around each point; the window shrinks towards both ends, so the curve does not lag.
std::vector<CurvePoint> smoothed(const std::vector<CurvePoint>& points) {
  std::vector<double> sums{0};
  for (const CurvePoint& point : points) sums.push_back(sums.back() + point.loss);
  std::vector<CurvePoint> result = points;
  for (size_t i = 0; i < points.size(); ++i) {
    const size_t reach = std::min({points.size() / 100, i, points.size() - 1 - i});
    result[i].loss = (sums[i + reach + 1] - sums[i - reach]) / static_cast<double>(2 * reach + 1);
  }
  return result;
}

class Picture : public SvgPicture {
 public:
  Picture(Axis steps, Axis losses) : SvgPicture(width, height), steps_(steps), losses_(losses) {}

  void axes() {
    for (int64_t i = std::llround(std::ceil(losses_.low / losses_.tick));
         static_cast<double>(i) * losses_.tick <= losses_.high * (1 + 1e-9); ++i) {
      const double value = static_cast<double>(i) * losses_.tick;
      line(left, y_of(value), width - right, y_of(value), "#e6e6e6", 1);
      text(left - 8, y_of(value) + 4.5, "end", fmt::format("{:.{}f}", value, losses_.decimals));
    }
    for (int64_t i = 0; static_cast<double>(i) * steps_.tick <= steps_.high; ++i) {
      const double value = static_cast<double>(i) * steps_.tick;
      line(x_of(value), height - bottom, x_of(value), height - bottom + 5, "#333", 1);
      text(x_of(value), height - bottom + 20, "middle", human_count(std::llround(value)));
    }
    line(left, height - bottom, width - right, height - bottom, "#333", 1);
    text((left + width - right) / 2, height - 14, "middle", "step");
    text(0, 0, "middle", "loss (nats per token)",
         fmt::format("transform=\"translate(20 {:.1f}) rotate(-90)\"", (top + height - bottom) / 2));
  }

  void curve(const std::vector<CurvePoint>& points, std::string_view colour, double stroke, double opacity) {
    Points path;
    for (const CurvePoint& point : points) path.emplace_back(x_of(static_cast<double>(point.step)), y_of(point.loss));
    polyline(path, colour, stroke, fmt::format("stroke-opacity=\"{}\"", opacity));
  }

  void dots(const std::vector<CurvePoint>& points, std::string_view colour) {
    for (const CurvePoint& point : points) dot(x_of(static_cast<double>(point.step)), y_of(point.loss), colour);
  }

  void legend(int row, const std::string& label, std::string_view colour) {
    const double y = top + 14 + 20 * row;
    line(width - right - 210, y - 4, width - right - 182, y - 4, colour, 2.5);
    text(width - right - 174, y, "start", label);
  }

 private:
  double x_of(double step) const {
    return left + (step - steps_.low) / (steps_.high - steps_.low) * (width - left - right);
  }
  double y_of(double loss) const {
    return height - bottom - (loss - losses_.low) / (losses_.high - losses_.low) * (height - top - bottom);
  }

  Axis steps_, losses_;
};

}  // namespace

std::string loss_curve_svg(const std::string& title, const std::vector<CurvePoint>& training,
                           const std::vector<CurvePoint>& validation) {
  const std::vector<CurvePoint> measured = thinned(finite_points(training), 800);
  const std::vector<CurvePoint> average = thinned(smoothed(finite_points(training)), 800);
  const std::vector<CurvePoint> held_out = finite_points(validation);
  double low = 0, high = 1, last_step = 1;
  bool first = true;
  for (const std::vector<CurvePoint>* points : {&measured, &held_out}) {
    for (const CurvePoint& point : *points) {
      low = first ? point.loss : std::min(low, point.loss);
      high = first ? point.loss : std::max(high, point.loss);
      last_step = std::max(last_step, static_cast<double>(point.step));
      first = false;
    }
  }
  Axis steps = make_axis(0, last_step, 8);
  steps.tick = std::max(steps.tick, 1.0);
  Picture picture(steps, rounded_outwards(make_axis(low, high, 6)));
  picture.text(left, 30, "start", title, "font-size=\"16\" font-weight=\"bold\"");
  picture.axes();
  picture.curve(measured, training_colour, 1, 0.35);
  picture.curve(average, training_colour, 2, 1);
  picture.curve(held_out, validation_colour, 1.5, 1);
  if (measured.size() == 1) picture.dots(measured, training_colour);
  if (held_out.size() <= 60) picture.dots(held_out, validation_colour);
  picture.legend(0, "training loss", training_colour);
  picture.legend(
      1, fmt::format("validation loss{}", held_out.empty() ? "" : fmt::format(" (last: {:.3f})", held_out.back().loss)),
      validation_colour);
  return picture.finish();
}

}  // namespace examples
