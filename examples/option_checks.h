// What the programs check, each error one line: command line options, by name, with what was given and what was
// expected; and that the output arrived.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <strobe/strobe.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace examples {

inline const std::map<std::string, strobe::DType> dtypes{{"f32", strobe::DType::f32},
                                                         {"f64", strobe::DType::f64},
                                                         {"bf16", strobe::DType::bf16},
                                                         {"f16", strobe::DType::f16}};
inline const std::map<std::string, strobe::AttentionKernel> attention_kernels{
    {"auto", strobe::AttentionKernel::auto_select},
    {"portable", strobe::AttentionKernel::portable},
    {"mma", strobe::AttentionKernel::mma},
    {"hopper", strobe::AttentionKernel::hopper}};

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

// Declares an option that takes values with commas between them, each of which `valid` accepts. CLI11's own delimiter
// would skip the empty value in "1,,2".
template <class T>
CLI::Option* add_list(CLI::App& app, const std::string& name, std::vector<T>& values, const CLI::Validator& valid,
                      const std::string& help) {
  const auto read = [name, &values, valid](const std::vector<std::string>& arguments) {
    values.clear();
    std::istringstream rest(fmt::format("{},", fmt::join(arguments, ",")));
    for (std::string value; std::getline(rest, value, ',');) {
      require(!value.empty(), "{}: an empty value given, expected values with commas between them", name);
      const std::string error = valid(value);
      require(error.empty(), "{}: {}", name, error);
      CLI::detail::lexical_cast(value, values.emplace_back());
    }
  };
  return app.add_option_function<std::vector<std::string>>(name, read, help)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->default_str(fmt::format("[{}]", fmt::join(values, ",")));
}

// Throws unless all that was printed so far could be written: a disk may be full.
inline void flush_output() {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return;
  const int error = errno;
  throw std::runtime_error(fmt::format("standard output: cannot be written ({})", std::strerror(error)));
}

}  // namespace examples
