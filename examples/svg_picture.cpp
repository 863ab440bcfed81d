// Writes each shape as one line of SVG.
#include "svg_picture.h"

#include <fmt/format.h>

namespace examples {
namespace {

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '&')
      result += "&amp;";
    else if (c == '<')
      result += "&lt;";
    else if (c == '>')
      result += "&gt;";
    else if (static_cast<unsigned char>(c) < 0x20)
      result += ' ';
    else
      result += c;
  }
  return result;
}

}  // namespace

SvgPicture::SvgPicture(double width, double height)
    : svg_(fmt::format("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" "
                       "font-family=\"Helvetica, Arial, sans-serif\" font-size=\"13\" fill=\"#333\">\n"
                       "<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n",
                       width, height)) {}

void SvgPicture::text(double x, double y, std::string_view anchor, const std::string& content,
                      std::string_view attributes) {
  svg_ += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" {}>{}</text>\n", x, y, anchor, attributes,
                      escaped(content));
}

void SvgPicture::line(double x1, double y1, double x2, double y2, std::string_view colour, double stroke,
                      std::string_view attributes) {
  svg_ += fmt::format(
      "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" stroke-width=\"{}\" {}/>\n", x1, y1,
      x2, y2, colour, stroke, attributes);
}

void SvgPicture::polyline(const Points& points, std::string_view colour, double stroke, std::string_view attributes) {
  if (points.empty()) return;
  std::string path;
  for (const auto& [x, y] : points) path += fmt::format("{:.1f},{:.1f} ", x, y);
  path.pop_back();
  svg_ += fmt::format(
      "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{}\" stroke-linejoin=\"round\" {}/>\n", path,
      colour, stroke, attributes);
}

void SvgPicture::dot(double x, double y, std::string_view colour) {
  svg_ += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"/>\n", x, y, colour);
}

void SvgPicture::ring(double x, double y, std::string_view colour) {
  svg_ +=
      fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\" fill=\"white\" stroke=\"{}\" stroke-width=\"1.5\"/>\n",
                  x, y, colour);
}

}  // namespace examples
