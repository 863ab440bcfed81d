// Settings as TOML and back.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <toml++/toml.h>
#include <algorithm>
#include <stdexcept>

#include "command_line.h"
#include "option_checks.h"
#include "train_settings.h"

namespace examples {
namespace {

template <class... Kinds>
struct Overloaded : Kinds... {
  using Kinds::operator()...;
};
template <class... Kinds>
Overloaded(Kinds...) -> Overloaded<Kinds...>;  // Clang 16 and newer find this themselves

// The beginning of a text that may be long.
std::string brief(const std::string& text) { return text.size() <= 100 ? text : text.substr(0, 97) + "..."; }

std::string shown(const toml::node& node) {
  std::string text;
  node.visit([&](const auto& value) {
    if constexpr (toml::is_table<decltype(value)>) {
      text = "a table";
    } else if constexpr (toml::is_array<decltype(value)>) {
      text = "a list";  // its values may be lists themselves
    } else {
      std::ostringstream out;
      out << value;
      text = brief(out.str());
    }
  });
  return text;
}

// How often `wanted` stands outside of strings and comments.
size_t count_outside_strings(std::string_view toml, char wanted) {
  size_t count = 0;
  for (size_t i = 0; i < toml.size(); ++i) {
    const char c = toml[i];
    if (c == wanted) ++count;
    if (c == '#') i = std::min(toml.find('\n', i), toml.size());
    if (c != '"' && c != '\'') continue;
    const std::string_view thrice = toml.substr(i, 3);
    const bool many_lines = thrice == std::string(3, c);
    const std::string_view end = thrice.substr(0, many_lines ? 3 : 1);
    i += end.size();
    while (i < toml.size() && !toml.substr(i).starts_with(end) && (many_lines || toml[i] != '\n')) {
      i += c == '"' && toml[i] == '\\' ? 2 : 1;
    }
    if (!many_lines) continue;
    while (i + 1 < toml.size() && toml[i + 1] == c) ++i;  // it may end with quotes of its own
  }
  return count;
}

// "--name=value"; CLI11 wants an empty value apart.
void append(Strings& arguments, const std::string& name, const std::string& value) {
  if (value.empty()) {
    arguments.insert(arguments.end(), {"--" + name, ""});
  } else {
    arguments.push_back(fmt::format("--{}={}", name, value));
  }
}

// Appends what `node` says about an option of the kind that `kind` points to; false when it is of another type.
bool append_value(Strings& arguments, const std::string& name, const decltype(Setting::value)& kind,
                  const toml::node& node) {
  const auto append_all = [&](const toml::array& values) {
    if (!std::all_of(values.begin(), values.end(), [](const toml::node& each) { return each.is_string(); }))
      return false;
    for (const toml::node& each : values) append(arguments, name, each.as_string()->get());
    return true;
  };
  const auto append_if = [&](bool right_type, const auto& text) {
    if (right_type) append(arguments, name, text());
    return right_type;
  };
  const auto string = [&] { return node.as_string()->get(); };
  return std::visit(
      Overloaded{
          [&](int64_t*) {
            return append_if(node.is_integer(), [&] { return fmt::format("{}", node.as_integer()->get()); });
          },
          [&](double*) {
            return append_if(node.is_number(), [&] { return fmt::format("{}", *node.value<double>()); });
          },
          [&](bool*) { return append_if(node.is_boolean(), [&] { return fmt::format("{}", *node.value<bool>()); }); },
          [&](std::string*) { return append_if(node.is_string(), string); },
          [&](Strings*) {
            return node.is_array() ? append_all(*node.as_array()) : append_if(node.is_string(), string);
          }},
      kind);
}

const char* type_of(const decltype(Setting::value)& kind) {
  constexpr const char* names[] = {"an integer", "a number", "true or false", "a string", "a list of strings"};
  return names[kind.index()];
}

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    const unsigned char byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      result += {'\\', c};
    } else if (byte < 0x20 || byte == 0x7f) {
      result += fmt::format("\\u{:04x}", byte);
    } else {
      result += c;
    }
  }
  return result + "\"";
}

// TOML takes a number without point and exponent for an integer.
std::string with_point(const std::string& number) {
  return number.find_first_of(".e") == std::string::npos ? number + ".0" : number;
}

}  // namespace

std::string toml_value(const Setting& setting) {
  return std::visit(Overloaded{[](const int64_t* value) { return fmt::format("{}", *value); },
                               [](const double* value) { return with_point(fmt::format("{}", *value)); },
                               [](const bool* value) { return fmt::format("{}", *value); },
                               [](const std::string* value) { return quoted(*value); },
                               [](const Strings* values) {
                                 Strings list;
                                 for (const std::string& value : *values) list.push_back(quoted(value));
                                 return fmt::format("[{}]", fmt::join(list, ", "));
                               }},
                    setting.value);
}

Strings arguments_of(const std::string& toml, const std::string& name, const std::vector<Setting>& settings) {
  require(toml.size() <= max_config_bytes, "{}: {} bytes given, expected settings, of at most {}", name, toml.size(),
          max_config_bytes);
  // toml++ calls itself for each table within another, which a long key would make end the process, and takes far more
  // memory for a long list of short values than they have bytes.
  constexpr size_t max_dots = 1000;
  require(count_outside_strings(toml, '.') <= max_dots, "{}: keys with dots given, expected TOML such as: layers = 4",
          name);
  const size_t commas = count_outside_strings(toml, ',');
  require(commas <= max_config_list, "{}: {} commas between values given, expected at most {}", name, commas,
          max_config_list);
  toml::table table;
  try {
    table = toml::parse(toml, name);
  } catch (const toml::parse_error& error) {
    throw std::runtime_error(fmt::format("{}:{}: {}, expected TOML such as: layers = 4", name,
                                         error.source().begin.line, error.description()));
  }
  Strings arguments;
  for (const auto& [key, node] : table) {
    const std::string text(key.str());
    const std::string place = fmt::format("{}:{}", name, node.source().begin.line);
    if (text == "preset") {
      require(node.is_string(), "{}: preset: {} given, expected a string", place, shown(node));
      append(arguments, text, node.as_string()->get());
      continue;
    }
    const auto setting =
        std::find_if(settings.begin(), settings.end(), [&](const Setting& each) { return each.name == text; });
    if (setting == settings.end()) {
      Strings names{"preset"};
      for (const Setting& each : settings) names.push_back(each.name);
      throw std::runtime_error(fmt::format("{}: unknown key '{}'; the nearest is '{}'", place, brief(text),
                                           nearest_name(brief(text), names)));
    }
    require(append_value(arguments, text, setting->value, node), "{}: {}: {} given, expected {}", place, text,
            shown(node), type_of(setting->value));
  }
  return arguments;
}

std::string to_toml(const TrainOptions& options) {
  TrainOptions copy = options;
  CLI::App app;
  std::string text = "# Settings of train_gpt: --config reads them.\n", group;
  for (const Setting& setting : declare_settings(app, copy)) {
    if (setting.group != group) text += fmt::format("\n# {}\n", group = setting.group);
    text += fmt::format("{} = {}\n", setting.name, toml_value(setting));
  }
  return text;
}

}  // namespace examples
