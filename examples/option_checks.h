// Checks of command line options: one line that names the option, what was given and what was expected.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace examples {

template <class... Args>
void require(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) throw std::runtime_error(fmt::format(format, std::forward<Args>(args)...));
}

// A number from low to high; not a number is outside of every range.
template <class T>
CLI::Validator range(T low, T high) {
  const std::string kind = std::is_integral_v<T> ? "an integer" : "a number";
  return CLI::Validator(
      [=](const std::string& input) {
        T value{};
        if (CLI::detail::lexical_cast(input, value) && value >= low && value <= high) return std::string();
        return fmt::format("{} given, expected {} from {} to {}", input, kind, low, high);
      },
      "");
}

inline CLI::Validator choice(const std::vector<std::string>& values) {
  return CLI::Validator(
      [=](const std::string& input) {
        if (std::find(values.begin(), values.end(), input) != values.end()) return std::string();
        return fmt::format("{} given, expected {}", input, fmt::join(values, " or "));
      },
      "");
}

}  // namespace examples
