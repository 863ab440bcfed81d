// Parses a command line; whoever misspells an option is told the nearest name.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace examples {

// Parses the arguments, in their order, into what `app` declares. Throws CLI::CallForHelp when they ask for help, else
// std::runtime_error with one line; an option that `app` does not know comes before all other mistakes.
void parse(CLI::App& app, const std::vector<std::string>& arguments);

// The one of `names` that takes the fewest insertions, deletions and replacements to get from `name` (Levenshtein); if
// `name` abbreviates some of them by leaving characters out, one of those.
std::string nearest_name(const std::string& name, const std::vector<std::string>& names);

}  // namespace examples
