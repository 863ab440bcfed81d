// Trains a GPT on a text and lets it write: train_gpt --data FILE. Everything it needs of the framework is one header.
//
// Exit status: 0 when the run is finished, 1 after an error, 3 when SIGINT or SIGTERM stopped it and it was saved.
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <strobe/strobe.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "loss_curve.h"
#include "option_checks.h"
#include "report.h"
#include "train_folder.h"
#include "train_loop.h"
#include "train_options.h"
#include "train_summary.h"

using namespace examples;
using namespace strobe;

namespace {

constexpr int stopped_by_signal = 3;

// What a run begins with.
struct Start {
  TrainOptions options;
  std::optional<NewestCheckpoint> from;  // when it is resumed
};

Start fresh_start(const Command& command) { return {complete(command), std::nullopt}; }

// The settings of a run hold paths as they were given: relative ones mean another file in another folder than it began
// in, or none.
void require_reachable(const Command& command, const TrainOptions& o) {
  namespace fs = std::filesystem;
  for (const auto& [name, paths] : {std::pair("data", &o.data), {"tokens", &o.tokens}, {"val-data", &o.val_data}}) {
    if (command.given.contains(name)) continue;
    for (const std::string& path : *paths) {
      std::error_code error;
      const bool lost =
          path != "-" && fs::path(path).is_relative() && fs::status(path, error).type() == fs::file_type::not_found;
      require(!lost,
              "--resume: the run's --{} {} does not exist in the current folder, {}, expected the folder that it began "
              "in, or --{} with another path",
              name, printable(path), printable(fs::current_path(error).string()), name);
    }
  }
}

// Settings come from the newest checkpoint, and from `command` on top of them; says what is different now.
Start resumed_start(const Command& command, const std::string& out) {
  const std::string checkpoints = checkpoints_in(out).string();
  std::optional<NewestCheckpoint> newest = load_newest_checkpoint(checkpoints);
  require(newest.has_value(),
          "--resume: {} has no checkpoint, expected --out FOLDER of a run that has saved one (--overwrite begins anew)",
          checkpoints);
  for (const std::string& damage : newest->damaged) fmt::print("passed over: {}\n", damage);
  std::vector<std::string> notes;
  TrainOptions options = resumed_options(command, saved_config(newest->checkpoint), notes);
  options.out = out;
  require_reachable(command, options);
  fmt::print("resume {}\n", newest->path);
  for (const std::string& note : notes) fmt::print("       it had {}: the new value wins\n", note);
  return {options, std::move(newest)};
}

std::string folder_to_resume(const Command& command) {
  if (!command.options.out.empty()) return command.options.out;
  require(!command.options.data.empty() || !command.options.tokens.empty(),
          "--resume: which run? Expected --out FOLDER");
  return complete(command).out;
}

// Refuses what cannot fit into memory before anything is built: counts weights and gradients, and of the activations
// only the logits and ten vectors per layer and token.
void check_memory(const TrainOptions& o, int64_t vocab_size) {
  const double width = static_cast<double>(o.embed_dim), layers = static_cast<double>(o.layers);
  const double vocabulary = static_cast<double>(vocab_size);
  const double weights = 10 * layers * width * width + vocabulary * width;
  const double activations =
      static_cast<double>(o.batch) * static_cast<double>(o.context) * (10 * layers * width + vocabulary);
  const double bytes = sizeof(float) * (2 * weights + activations);
  require(
      bytes <= static_cast<double>(memory_limit()),
      "--layers {} --embed-dim {} --batch {} --context {}: training takes more than {:.1f} GiB, expected at most the "
      "memory of this machine, {}",
      o.layers, o.embed_dim, o.batch, o.context, bytes / (1 << 30), human_bytes(memory_limit()));
}

void describe(const TrainOptions& o, const TrainingData& data, const Training& training, const std::string& shape) {
  const std::string where =
      default_device().type == DeviceType::cpu ? fmt::format("{} threads", num_threads()) : "one GPU";
  fmt::print("data   {}: {} tokens to train on, {} held out, vocabulary {}\n", printable(data.name),
             human_count(data.split.training.size()), human_count(data.split.validation.size()),
             human_count(data.vocab_size));
  fmt::print("model  {}, {} attention: {} parameters\n", shape, o.attention,
             human_count(num_parameters(training.model)));
  fmt::print("run    {} steps of {} x {} tokens, {}, {}, {}\n", human_count(o.steps), o.batch * o.grad_accumulation,
             o.context, o.optimizer, o.dtype, where);
}

// Lines of metrics that a run which goes on from `done` keeps.
bool is_before(const nlohmann::ordered_json& line, const Progressed& done) {
  if (!line.contains("step")) return false;
  return line["step"] <= (line.contains("validation_loss") ? done.evaluated_step : done.step);
}

// What the sample continues: the given prompt, else a line break, else how the held-out tokens begin.
std::vector<int64_t> prompt_tokens(const TrainingData& data, const TrainOptions& o) {
  std::vector<int32_t> tokens(1);
  data.split.validation.read(0, tokens);
  if (data.tokenizer && !o.prompt.empty()) tokens = data.tokenizer->encode(o.prompt);
  if (data.tokenizer && o.prompt.empty()) {
    try {
      tokens = data.tokenizer->encode("\n");
    } catch (const Error&) {  // characters without a line break
    }
  }
  return {tokens.begin(), tokens.end()};
}

void write_sample(const GPT& model, const TrainingData& data, const TrainOptions& o) {
  std::vector<int64_t> tokens = prompt_tokens(data, o);
  const std::vector<int64_t> written =
      generate(model, tokens, {.max_new_tokens = o.sample_tokens, .temperature = o.temperature, .top_k = o.top_k});
  tokens.insert(tokens.end(), written.begin(), written.end());
  fmt::print("\n--- sample ---\n{}\n--------------\n",
             data.tokenizer ? printable(data.tokenizer->decode(tokens)) : fmt::format("{}", fmt::join(tokens, " ")));
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  write_file_atomically(path.string(), {{text.data(), text.size()}});
}

struct Result {
  Ending ending;
  Summary summary;
};

Result run(const Start& start, FolderUse use) {
  const auto begin = std::chrono::steady_clock::now();
  const TrainOptions& o = start.options;
  if (o.threads > 0) set_num_threads(static_cast<int>(o.threads));
  const DeviceGuard guard(device_of(o));
  reset_peak_memory();
  seed(static_cast<uint64_t>(o.seed));
  RunFolder folder(o.out, use);
  const TrainingData data =
      load_data(o, start.from ? saved_tokenizer(start.from->checkpoint) : std::optional<Tokenizer>());
  prompt_tokens(data, o);  // throws before the training, not after it
  check_memory(o, data.vocab_size);
  Training training = make_training(o, data);
  if (start.from) restore(training, start.from->checkpoint, data);
  folder.begin();
  if (start.from) repair_checkpoint_links(folder.checkpoints.string(), training.done.step);
  write_text(folder.config, to_toml(o));
  MetricsFile metrics(folder.metrics,
                      [&](const nlohmann::ordered_json& line) { return is_before(line, training.done); });
  const std::string shape =
      fmt::format("{} layers, {} heads, {} wide, context {}", o.layers, o.heads, o.embed_dim, o.context);
  describe(o, data, training, shape);

  const Ending ending = train(training, data, o, folder, metrics, start.from.has_value());
  const Summary summary = summarize(folder.metrics, o.batch * o.context * o.grad_accumulation);
  const std::string curve =
      loss_curve_svg(fmt::format("{}: {}", printable(data.name), shape), summary.training, summary.validation);
  write_text(folder.curve, curve);
  const std::string saved = fmt::format("after step {} and saved; to go on: train_gpt --resume --out {}",
                                        human_count(training.done.step), o.out);
  require(ending != Ending::output_lost, "standard output: cannot be written; stopped {}", saved);
  if (ending == Ending::signal) {
    // Not fmt::print, which throws: who reads this may have got the same signal, and is gone.
    std::fputs(fmt::format("stopped by a signal {}\n", saved).c_str(), stdout);
    return {ending, summary};
  }
  if (ending == Ending::no_improvement)
    fmt::print("no better validation loss in {} evaluations: stopped after step {}\n", o.patience,
               human_count(training.done.step));

  const double loss = summary.last_loss();
  fmt::print("\nvalidation loss  {:.4f} (perplexity {:.2f}; best {:.4f})\n", loss, std::exp(loss),
             training.done.best_loss.value_or(loss));
  if (summary.bits_per_byte) fmt::print("bits per byte    {:.3f}\n", *summary.bits_per_byte);
  if (training.done.skipped > 0)
    fmt::print("left out         {} steps that were not finite\n", human_count(training.done.skipped));
  fmt::print("speed            {} tokens/s (median step)\n", human_rate(summary.tokens_per_second));
  fmt::print("memory           {} at most\n", human_bytes(summary.bytes_peak));
  if (o.sample_tokens > 0) write_sample(training.model, data, o);
  fmt::print("\ncheckpoints {}\nsettings    {}\nmetrics     {}\nloss curve  {}\ntime        {}\n",
             folder.checkpoints.string(), folder.config.string(), folder.metrics.string(), folder.curve.string(),
             human_duration(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()));
  return {ending, summary};
}

FolderUse use_of(const Command& command) {
  return command.resume ? FolderUse::resume : command.overwrite ? FolderUse::overwrite : FolderUse::fresh;
}

int run_one(const Command& command) {
  const Start start = command.resume ? resumed_start(command, folder_to_resume(command)) : fresh_start(command);
  return run(start, use_of(command)).ending == Ending::signal ? stopped_by_signal : 0;
}

// Trains with each kind of attention in a folder of its own.
int run_compared(const Command& command) {
  require(!command.resume,
          "--compare with --resume: expected one of them; each run resumes by itself, from its folder");
  const TrainOptions common = complete(command);
  for (const std::vector<std::string>* paths : {&common.data, &common.val_data})
    require(std::find(paths->begin(), paths->end(), "-") == paths->end(),
            "--compare with standard input: expected a file, which can be read again for each run");
  const auto folder_of = [&](const std::string& kind) { return std::filesystem::path(common.out) / kind; };
  for (const std::string& kind : command.compare) {
    require(std::count(command.compare.begin(), command.compare.end(), kind) == 1,
            "--compare: {} given twice, expected each kind once", kind);
    const RunFolder usable(folder_of(kind), use_of(command));  // each, before the first run begins
  }
  std::vector<Compared> runs;
  for (const std::string& kind : command.compare) {
    Start start{common, std::nullopt};
    start.options.attention = kind;
    start.options.out = folder_of(kind).string();
    fmt::print("=== {} attention\n", kind);
    const Result result = run(start, use_of(command));
    if (result.ending == Ending::signal) return stopped_by_signal;
    runs.push_back({kind, result.summary});
  }
  fmt::print("\n{}", comparison_table(runs));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  // Where a standard stream is closed, a file that is opened would take its place.
  int descriptor = open("/dev/null", O_RDWR);
  while (descriptor >= 0 && descriptor <= STDERR_FILENO) descriptor = open("/dev/null", O_RDWR);
  close(descriptor);
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // a log shows every line as it comes
  // A file beyond the allowed size, and a reader that is gone, are errors of write, which are reported.
  std::signal(SIGXFSZ, SIG_IGN);
  std::signal(SIGPIPE, SIG_IGN);
  try {
    const std::optional<Command> command = parse_command({argv + 1, argv + argc});
    const int status = !command ? 0 : command->compare.empty() ? run_one(*command) : run_compared(*command);
    if (status != stopped_by_signal) flush_output();
    return status;
  } catch (const std::exception& error) {
    std::fflush(stdout);
    // What fmt throws does not say which file it is.
    const bool unnamed = std::ferror(stdout) != 0 && dynamic_cast<const std::system_error*>(&error) != nullptr;
    fmt::print(stderr, "train_gpt: {}{}\n", unnamed ? "standard output: " : "", error.what());
    return 1;
  }
}
