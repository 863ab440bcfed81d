// Lets a trained model write: generate --checkpoint runs/NAME --prompt 'In the beginning'.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <strobe/strobe.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <limits>

#include "command_line.h"
#include "option_checks.h"
#include "train_folder.h"
#include "train_state.h"

using namespace examples;
using namespace strobe;

namespace {

struct Options {
  std::string checkpoint;
  std::string prompt;
  int64_t tokens = 400;
  double temperature = 0.8;
  int64_t top_k = 40;
  int64_t seed = 1;
};

// Throws Error where the best checkpoint of a run is damaged: what is wrong, and which other one is whole.
Checkpoint load_best(const std::string& best, const std::string& checkpoints) {
  try {
    return load_checkpoint(best);
  } catch (const Error& damage) {
    std::string other;
    try {
      other = load_newest_checkpoint(checkpoints).value().path;
    } catch (const std::exception&) {
      throw damage;
    }
    throw Error(fmt::format("{}; the newest checkpoint that is whole: --checkpoint {}", damage.what(), other));
  }
}

// The folder of a run stands for its best checkpoint, or for its newest when none was called the best.
Checkpoint find_checkpoint(const std::filesystem::path& path) {
  const std::filesystem::path checkpoints = checkpoints_in(path), best = checkpoints / "best";
  if (std::filesystem::exists(best)) return load_best(best.string(), checkpoints.string());
  std::optional<NewestCheckpoint> newest = load_newest_checkpoint(checkpoints.string());
  return newest ? std::move(newest->checkpoint) : load_checkpoint(path.string());
}

// The given prompt, else a line break, else the first token: characters may lack a line break.
std::vector<int32_t> prompt_tokens(const Tokenizer& tokenizer, const std::string& prompt) {
  if (!prompt.empty()) return tokenizer.encode(prompt);
  try {
    return tokenizer.encode("\n");
  } catch (const Error&) {
    return {0};
  }
}

void run(const Options& o) {
  const Checkpoint checkpoint = find_checkpoint(o.checkpoint);
  TrainOptions trained = from_toml(saved_config(checkpoint), o.checkpoint);
  trained.device = "auto";  // wherever it was trained
  const std::optional<Tokenizer> tokenizer = saved_tokenizer(checkpoint);
  require(tokenizer.has_value(), "--checkpoint {}: its run had no tokenizer, expected one that knows text",
          o.checkpoint);
  const DeviceGuard guard(device_of(trained));
  const GPT model(model_config(trained, saved_vocab_size(checkpoint)));
  to(model, dtype_of(trained));
  load(model, saved_weights(checkpoint));
  seed(static_cast<uint64_t>(o.seed));
  const std::vector<int32_t> prompt = prompt_tokens(*tokenizer, o.prompt);
  std::vector<int64_t> tokens(prompt.begin(), prompt.end());
  const std::vector<int64_t> written =
      generate(model, tokens, {.max_new_tokens = o.tokens, .temperature = o.temperature, .top_k = o.top_k});
  tokens.insert(tokens.end(), written.begin(), written.end());
  fmt::print("{}\n", tokenizer->decode(tokens));
  flush_output();
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app("Lets a model that train_gpt trained write.");
  app.option_defaults()->always_capture_default();
  app.add_option("--checkpoint", o.checkpoint, "folder of a run (its best checkpoint) or of one checkpoint")
      ->required()
      ->type_name("FOLDER");
  app.add_option("--prompt", o.prompt, "what it continues")->type_name("TEXT")->default_str("a line break");
  app.add_option("--tokens", o.tokens, "how many to write")->check(range<int64_t>(0, 1'000'000'000))->type_name("N");
  app.add_option("--temperature", o.temperature, "0: always the most likely token")
      ->check(range<double>(0, 1e3))
      ->type_name("X");
  app.add_option("--top-k", o.top_k, "among the k most likely tokens; 0: all")
      ->check(range<int64_t>(0, 1'000'000'000))
      ->type_name("N");
  app.add_option("--seed", o.seed, "of the random numbers")
      ->check(range<int64_t>(0, std::numeric_limits<int64_t>::max()))
      ->type_name("N");
  try {
    parse(app, {argv + 1, argv + argc});
    run(o);
    return 0;
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app.help());
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "generate: {}\n", error.what());
    return 1;
  }
}
