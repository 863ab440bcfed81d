// Reads the command line in layers, fills in what depends on other settings and checks them together.
#include "train_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <strobe/strobe.h>

#include <algorithm>
#include <filesystem>
#include <stdexcept>

#include "command_line.h"
#include "option_checks.h"
#include "report.h"
#include "train_settings.h"

namespace examples {
namespace {

// What the command line says beside the settings.
struct RunFlags {
  std::string config;
  std::string preset;
  bool resume = false;
  bool overwrite = false;
  Strings compare;
};

void declare_flags(CLI::App& app, RunFlags& f) {
  app.option_defaults()->group("Run");
  app.add_option("--config", f.config, "settings from a file, such as the config.toml that a run leaves")
      ->type_name("FILE.toml");
  app.add_option("--preset", f.preset, "model and run of a known shape; what is given besides wins")
      ->check(choice(preset_names()))
      ->type_name(fmt::format("{}", fmt::join(preset_names(), "|")));
  app.add_flag("--resume", f.resume, "go on with the run in --out, with its settings and what is given besides");
  app.add_flag("--overwrite", f.overwrite, "replace the run in --out");
  add_list(app, "--compare", f.compare, choice({"flash", "standard"}),
           "train with each kind of attention from the same seed and compare: --compare flash,standard")
      ->type_name("KIND,KIND")
      ->default_str("");
}

// Writes what the arguments say into `o` and `flags`; returns the names of the options among them.
std::set<std::string> apply(TrainOptions& o, RunFlags& flags, const Strings& arguments) {
  CLI::App app(
      "Trains a GPT on a text, then lets it write. Leaves checkpoints, metrics and the loss curve in --out.\n"
      "Ctrl-C or SIGTERM finishes the step, saves, and exits with status 3: --resume goes on from there.",
      "train_gpt");
  app.get_formatter()->column_width(44);
  declare_settings(app, o);
  declare_flags(app, flags);
  try {
    parse(app, arguments);
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app.help());
    throw;
  }
  std::set<std::string> given;
  for (const CLI::Option* option : app.get_options())
    if (option->count() > 0) given.insert(option->get_name().substr(2));
  return given;
}

std::vector<Setting> settings_of(TrainOptions& o) {
  CLI::App app;
  return declare_settings(app, o);
}

// The last part of a path, without a suffix.
std::string stem(const std::string& path) {
  if (path == "-") return "stdin";
  const std::filesystem::path normal = std::filesystem::absolute(path).lexically_normal();
  return (normal.has_filename() ? normal : normal.parent_path()).stem().string();
}

// A resumed run reads its texts again, and must not find its own files among them.
void require_outside(const std::string& out, const std::string& data) {
  namespace fs = std::filesystem;
  if (!fs::is_directory(data)) return;
  const fs::path within = fs::weakly_canonical(fs::absolute(out)).lexically_relative(fs::canonical(data));
  const bool unread = std::any_of(within.begin(), within.end(), [](const fs::path& part) {
    return part != "." && part.string().starts_with(".");  // ".." leads outside; hidden folders are not read
  });
  require(unread, "--out {}: lies in the folder {}, whose files are the text, expected a folder outside of it", out,
          data);
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const std::string_view character = strobe::first_character(text);
    if (character.size() == 1 && static_cast<unsigned char>(character[0]) >= 0x80) return false;
    text.remove_prefix(character.size());
  }
  return true;
}

// TOML is UTF-8: a run that began with other bytes could not read its own settings again.
void require_utf8(const Setting& setting) {
  const auto check = [&](const std::string& text) {
    require(is_utf8(text), "--{}: '{}' given, expected UTF-8", setting.name, printable(text));
  };
  if (const auto* text = std::get_if<std::string*>(&setting.value)) check(**text);
  if (const auto* texts = std::get_if<Strings*>(&setting.value))
    for (const std::string& text : **texts) check(text);
}

}  // namespace

std::optional<Command> parse_command(const Strings& arguments, const TrainOptions& base) {
  Command command;
  command.arguments = arguments;
  command.options = base;
  RunFlags flags, ignored;
  try {
    TrainOptions scratch;
    command.flags = apply(scratch, flags, arguments);
  } catch (const CLI::CallForHelp&) {
    return std::nullopt;
  }
  const auto layer = [&](const Strings& more) { command.given.merge(apply(command.options, ignored, more)); };
  if (!flags.config.empty()) {
    const Strings keys = arguments_of(strobe::read_text(flags.config), flags.config, settings_of(command.options));
    RunFlags in_file;
    TrainOptions scratch;
    try {
      apply(scratch, in_file, keys);
    } catch (const std::runtime_error& error) {
      throw std::runtime_error(fmt::format("{}: {}", flags.config, error.what()));
    }
    if (!in_file.preset.empty()) layer(preset_arguments(in_file.preset));
    layer(keys);
  }
  if (!flags.preset.empty()) layer(preset_arguments(flags.preset));
  // One of the two on the command line takes the place of either in a file.
  if (command.flags.contains("data")) command.options.tokens.clear();
  if (command.flags.contains("tokens")) command.options.data.clear();
  layer(arguments);
  command.resume = flags.resume;
  command.overwrite = flags.overwrite;
  command.compare = flags.compare;
  require(!flags.resume || !flags.overwrite, "--resume and --overwrite: both given, expected one of them");
  return command;
}

TrainOptions complete(const Command& command) {
  TrainOptions o = command.options;
  for (const Setting& setting : settings_of(o)) require_utf8(setting);
  const auto given = [&](const char* name) { return command.given.contains(name); };
  // Only what the command line itself names: a file may hold settings that this run has no use for.
  const auto only_with = [&](const char* name, bool sensible, const std::string& needed) {
    require(!command.flags.contains(name) || sensible, "--{}: contradicts the other options, expected only with {}",
            name, needed);
  };
  require(!o.data.empty() || !o.tokens.empty(),
          "--data: missing, expected --data FILE (a text) or --tokens FILE (token ids)");
  require(o.data.empty() || o.tokens.empty(), "--data and --tokens: both given, expected one of them");
  require(std::count(o.data.begin(), o.data.end(), "-") + std::count(o.val_data.begin(), o.val_data.end(), "-") <= 1,
          "--data and --val-data: standard input (-) given twice, expected at most once");
  const bool names_a_kind = o.tokenizer == "char" || o.tokenizer == "byte" || o.tokenizer == "bpe";
  if (!o.tokens.empty()) {
    only_with("tokenizer", !names_a_kind, "--data, or with the path of the tokenizer that --tokens come from");
    if (names_a_kind) o.tokenizer = "none";
  }
  require(o.data.empty() || o.tokenizer != "none", "--tokenizer: none given, expected one of --data");
  const bool free_vocabulary = o.tokenizer == "bpe" || o.tokenizer == "none";
  only_with("vocab-size", free_vocabulary, "--tokenizer bpe or --tokens");
  require(o.tokenizer != "none" || given("vocab-size"),
          "--vocab-size: missing, expected the number of token ids of --tokens");
  only_with("val-fraction", o.val_data.empty(), "no --val-data");
  only_with("prompt", o.sample_tokens > 0, "--sample-tokens above 0");
  only_with("prompt", o.tokenizer != "none", "a tokenizer");
  for (const char* name : {"beta1", "beta2", "eps"}) only_with(name, o.optimizer == "adamw", "--optimizer adamw");
  only_with("momentum", o.optimizer == "sgd", "--optimizer sgd");
  only_with("decay-steps", o.schedule == "wsd", "--schedule wsd");
  for (const char* name : {"min-lr-fraction", "warmup-steps"})
    only_with(name, o.schedule != "constant", "a --schedule other than constant");

  require(o.embed_dim % o.heads == 0, "--heads: {} given, expected a divisor of --embed-dim {}", o.heads, o.embed_dim);
  if (o.kv_heads == 0) o.kv_heads = o.heads;
  require(o.heads % o.kv_heads == 0, "--kv-heads: {} given, expected a divisor of --heads {}", o.kv_heads, o.heads);
  const int64_t head_dim = o.embed_dim / o.heads;
  require(o.positions != "rotary" || head_dim % 2 == 0,
          "--positions: rotary with a head width of {} (--embed-dim / --heads), expected an even width", head_dim);
  if (o.schedule == "constant") {
    o.warmup_steps = 0;
  } else if (!given("warmup-steps")) {
    o.warmup_steps = std::min(o.warmup_steps, o.steps / 10);
  } else if (o.warmup_steps > o.steps && command.flags.contains("steps") && !command.flags.contains("warmup-steps")) {
    o.warmup_steps = o.steps / 10;  // a preset or a file means longer runs
  }
  require(o.warmup_steps <= o.steps, "--warmup-steps: {} given, expected at most --steps {}", o.warmup_steps, o.steps);
  if (o.schedule == "wsd" && o.decay_steps == 0) o.decay_steps = std::min(o.steps / 5, o.steps - o.warmup_steps);
  require(o.schedule != "wsd" || o.decay_steps <= o.steps - o.warmup_steps,
          "--decay-steps: {} given, expected at most the {} after the warm-up", o.decay_steps,
          o.steps - o.warmup_steps);
  if (o.save_interval == 0) o.save_interval = o.eval_interval;
  if (o.out.empty())
    o.out = (std::filesystem::path("runs") / stem(o.data.empty() ? o.tokens.front() : o.data.front())).string();
  if (o.tokens.empty())
    for (const Strings* paths : {&o.data, &o.val_data})
      for (const std::string& path : *paths) require_outside(o.out, path);
  const size_t paths = o.data.size() + o.tokens.size() + o.val_data.size();
  require(paths <= max_config_list && to_toml(o).size() <= max_config_bytes,
          "--data, --tokens, --val-data: {} paths given, expected what fits into a configuration file: {} paths, {} "
          "bytes; folders need fewer",
          paths, max_config_list, max_config_bytes);
  return o;
}

TrainOptions from_toml(const std::string& toml, const std::string& name) {
  TrainOptions o;
  RunFlags ignored;
  apply(o, ignored, arguments_of(toml, name, settings_of(o)));
  return o;
}

TrainOptions resumed_options(const Command& command, const std::string& saved, Strings& notes) {
  TrainOptions before = from_toml(saved, "config.toml of the checkpoint");
  Command again = *parse_command(command.arguments, before);
  const std::vector<Setting> old_settings = settings_of(before), new_settings = settings_of(again.options);
  Strings refused;
  for (size_t i = 0; i < old_settings.size(); ++i) {
    const Setting& now = new_settings[i];
    const std::string old_value = toml_value(old_settings[i]), new_value = toml_value(now);
    if (old_value != new_value)
      (now.may_change ? notes : refused).push_back(fmt::format("--{} {}, now {}", now.name, old_value, new_value));
    again.given.insert(now.name);  // what the run began with was decided then
  }
  require(refused.empty(),
          "--resume: the run began with {}; what it began with wins and cannot change, expected the same or nothing "
          "(or a new run with another --out)",
          fmt::join(refused, "; "));
  return complete(again);
}

}  // namespace examples
