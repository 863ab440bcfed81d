#include "command_line.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace examples {
namespace {

[[noreturn]] void refuse_unknown(const CLI::App& app, const std::vector<std::string>& unknown) {
  const auto option = std::find_if(unknown.begin(), unknown.end(),
                                   [](const std::string& argument) { return argument.starts_with("-"); });
  if (option == unknown.end())
    throw std::runtime_error(fmt::format("'{}' was not expected: expected options, which begin with --", unknown[0]));
  std::vector<std::string> names;
  for (const CLI::Option* each : app.get_options()) names.push_back(each->get_name());
  const std::string name = option->substr(0, option->find('='));
  throw std::runtime_error(fmt::format("{}: unknown option; the nearest is {}", name, nearest_name(name, names)));
}

}  // namespace

void parse(CLI::App& app, const std::vector<std::string>& arguments) {
  app.allow_extras();
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());  // as CLI11 wants them
  try {
    app.parse(reversed);
  } catch (const CLI::CallForHelp&) {
    throw;
  } catch (const CLI::ParseError& error) {
    if (app.remaining().empty()) throw std::runtime_error(error.what());
  }
  if (!app.remaining().empty()) refuse_unknown(app, app.remaining());
}

std::string nearest_name(const std::string& name, const std::vector<std::string>& names) {
  const auto distance = [&](const std::string& other) {
    std::vector<size_t> row(other.size() + 1);  // of the first i characters of `name` to each beginning of `other`
    std::iota(row.begin(), row.end(), size_t{0});
    for (size_t i = 1; i <= name.size(); ++i) {
      size_t diagonal = std::exchange(row[0], i);
      for (size_t j = 1; j <= other.size(); ++j) {
        const size_t replaced = diagonal + (name[i - 1] == other[j - 1] ? 0 : 1);
        diagonal = row[j];
        row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
      }
    }
    return row.back();
  };
  // Whether `other` becomes `name` by leaving characters out.
  const auto abbreviates = [&](const std::string& other) {
    size_t found = 0;
    for (const char c : other) found += found < name.size() && c == name[found] ? 1 : 0;
    return found == name.size();
  };
  const auto rank = [&](const std::string& other) { return std::pair(!abbreviates(other), distance(other)); };
  return *std::min_element(names.begin(), names.end(),
                           [&](const std::string& a, const std::string& b) { return rank(a) < rank(b); });
}

}  // namespace examples
