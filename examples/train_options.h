// The settings of a run of train_gpt and its command line.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace examples {

// Every setting of a run; what is written here are the defaults: a small model that trains in about two minutes.
struct TrainOptions {
  std::vector<std::string> data;      // texts: files, folders, "-" for standard input
  std::vector<std::string> tokens;    // or token files and folders of them
  std::vector<std::string> val_data;  // held-out text or token files; when empty val_fraction decides
  double val_fraction = 0.1;
  std::string tokenizer = "char";  // char, byte, bpe, or the path of one
  int64_t vocab_size = 4096;       // that bpe learns; of token files without a tokenizer

  int64_t layers = 4;
  int64_t heads = 4;
  int64_t kv_heads = 0;  // 0: as many as heads
  int64_t embed_dim = 128;
  int64_t context = 128;
  std::string attention = "flash";
  std::string positions = "learned";
  std::string norm = "layer";
  std::string mlp = "gelu";
  int64_t mlp_dim = 0;  // 0: four times embed_dim, two thirds of that with swiglu
  bool no_bias = false;
  bool untied_embeddings = false;
  bool recompute = false;
  double dropout = 0;

  std::string optimizer = "adamw";
  double lr = 2e-3;
  double min_lr_fraction = 0.1;
  std::string schedule = "cosine";
  int64_t warmup_steps = 100;  // fewer in short runs
  int64_t decay_steps = 0;     // of the schedule wsd; 0: a fifth of the steps
  double weight_decay = 0.1;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double eps = 1e-8;
  double momentum = 0.9;
  double grad_clip = 1;

  int64_t steps = 2500;
  int64_t batch = 8;
  int64_t grad_accumulation = 1;
  int64_t seed = 1;
  std::string device = "auto";  // cuda where there is a GPU that this build can use, else cpu
  std::string dtype = "f32";    // of weights and activations; the optimizer keeps f32
  int64_t threads = 0;          // 0: all
  int64_t eval_interval = 250;
  int64_t eval_batches = 50;
  int64_t patience = 0;      // evaluations without a better loss before the run ends; 0: never
  int64_t log_interval = 0;  // steps between looks at the losses; 0: 1 on the CPU, 10 on a GPU
  bool skip_non_finite = false;

  std::string out;            // runs/<name of the data> when empty
  int64_t save_interval = 0;  // steps between checkpoints; 0: at every evaluation
  int64_t keep = 2;           // checkpoints that stay, besides the best one

  int64_t sample_tokens = 400;
  double temperature = 0.8;
  int64_t top_k = 40;
  std::string prompt;
};

// What a command line asks for.
struct Command {
  std::vector<std::string> arguments;  // all of them, in order
  TrainOptions options;                // the defaults, preset, configuration file and flags in layers; not yet complete
  std::set<std::string> given;         // options that one of the three names
  std::set<std::string> flags;         // options that the command line itself names
  bool resume = false;
  bool overwrite = false;
  std::vector<std::string> compare;  // kinds of attention
};

// Reads the command line on top of `base`; nothing when it asked for help, which has then been printed. Later ones win:
// base, the file's --preset, the file's keys, the command line's --preset, its flags. Throws std::runtime_error with
// one line: the option, what was given, what was expected.
std::optional<Command> parse_command(const std::vector<std::string>& arguments, const TrainOptions& base = {});

// Fills in what depends on other settings and checks them together.
TrainOptions complete(const Command& command);

// The options a run that began with `saved` (a configuration file's text) goes on with: `command` on top of them.
// `notes` gets one line for each setting that is another now. Throws when one differs that must not.
TrainOptions resumed_options(const Command& command, const std::string& saved, std::vector<std::string>& notes);

// All settings as a TOML file that --config reads.
std::string to_toml(const TrainOptions& options);

// The options that `toml`, written by to_toml, holds. Throws std::runtime_error, naming `name`.
TrainOptions from_toml(const std::string& toml, const std::string& name);

}  // namespace examples
