// The list of train_gpt's settings: each with its name, its help and its place in TrainOptions.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <variant>
#include <vector>

#include "train_options.h"

namespace examples {

using Strings = std::vector<std::string>;

struct Setting {
  std::string name;   // "layers" for --layers
  std::string group;  // of the help
  std::variant<int64_t*, double*, bool*, std::string*, Strings*> value;
  bool may_change = true;  // between the parts of a run that is resumed
};

// Declares all of them as options of `app`, which write into `o` what they are given.
std::vector<Setting> declare_settings(CLI::App& app, TrainOptions& o);

// What a configuration file may have at most: its values take many times the memory that their text does.
constexpr size_t max_config_bytes = 1 << 20;
constexpr size_t max_config_list = 8000;  // values in lists

// The value as TOML.
std::string toml_value(const Setting& setting);

// The arguments that say what a TOML text does: {"--layers=12"}. Throws std::runtime_error, naming `name`, the line and
// what is wrong, for a key that is none of the settings or "preset", or a value of another type.
Strings arguments_of(const std::string& toml, const std::string& name, const std::vector<Setting>& settings);

// The arguments that a preset stands for.
const std::vector<std::string>& preset_names();
const Strings& preset_arguments(const std::string& preset);

}  // namespace examples
