// A picture as SVG text: the few shapes that charts are made of.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace examples {

using Points = std::vector<std::pair<double, double>>;  // (x, y) in pixels, from the top left

class SvgPicture {
 public:
  SvgPicture(double width, double height);

  // `anchor`: start, middle or end; `attributes` go into the element as they are, `content` is escaped.
  void text(double x, double y, std::string_view anchor, const std::string& content, std::string_view attributes = "");
  void line(double x1, double y1, double x2, double y2, std::string_view colour, double stroke,
            std::string_view attributes = "");
  void polyline(const Points& points, std::string_view colour, double stroke, std::string_view attributes = "");
  void dot(double x, double y, std::string_view colour);
  void ring(double x, double y, std::string_view colour);

  std::string finish() const { return svg_ + "</svg>\n"; }

 private:
  std::string svg_;
};

}  // namespace examples
